"""The handle of a model that is cut into the stages of a pipeline."""

from __future__ import annotations

import hashlib
import math
import pickle
import struct
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from accelfn.comm import Call, broadcast, catch, gather_bytes
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import HANDLE, IN_NO_SYNC, BatchRun, Handle, register
from accelfn.parallel.norm import count_stages
from accelfn.parallel.pipeline import PipelineProgram, StageCall, make_schedule, sent_of
from accelfn.parallel.pointers import named, whole_of
from accelfn.parallel.schedule import SchedulePlan
from accelfn.parallel.shard_handle import ShardHandle
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.parallel.stage_run import Outline
from accelfn.tree import concatenate, count_rows, flatten, is_dtensor, local_of, map_tensors, slice_tensors

__all__ = ("PipelineHandle",)

L = TypeVar("L")

_HEADER = struct.Struct("<q16s")  # rows of the batch, and a digest of all else of its shape


class _Shape(NamedTuple):
    """Of what batches a schedule is for: what a rank along "pp" has in common with the others.

    Attributes:
        schedule: With the microbatches that the rows of all ranks allow.
        rows: Of each microbatch.
        digest: Of the dtypes and the other sizes of its tensors.
        is_trained: Whether there are backward passes.
    """

    schedule: SchedulePlan
    rows: int
    digest: bytes
    is_trained: bool


class _Measured(NamedTuple):
    """What stages exchange for batches of one shape.

    Attributes:
        outlines: Of each stage.
        form: What the last one gives of a microbatch: a tree of tensors on the meta device.
        run: Runs the schedule.
    """

    outlines: tuple[Outline, ...]
    form: Any
    run: Callable[[PipelineProgram], None]


class PipelineHandle(Handle):
    """Of a model of which each rank along "pp" has some stages; in one stage another handle reduces.

    Gradients of a parameter that several stages hold are added up where a window closes.
    """

    engine: ClassVar[Literal["none", "ddp", "shard", "pipeline"]] = "pipeline"
    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True

    def __init__(
        self, ctx: Context, model: nn.Module, plan: PipelinePlan, schedule: SchedulePlan, inner: Handle
    ) -> None:
        """Run the stages of ``model`` in ``schedule``.

        Args:
            ctx: The world.
            model: With the stages of this rank alone.
            plan: That it was cut by.
            schedule: Of a batch that can be cut as was asked for.
            inner: Reduces the gradients of the stages over their replicas and shards.
        """
        self._ctx = ctx
        self._model = weakref.ref(model)
        self._plan = plan
        self._schedule = schedule
        self._inner = inner
        self._syncs = True
        self._is_open = False  # whether gradients of shared parameters are those of this rank's stages alone
        self._stash: dict[str, torch.Tensor | None] = {}
        self._rank = ctx.coordinate("pp")
        mesh = cast("Any", ctx.mesh)
        self._line: tuple[int, ...] = mesh.plan.group(ctx.rank, "pp")
        self._group = mesh.device_mesh("pp").get_group()
        self._known: set[tuple[int, _Shape]] = set()
        self._measured: dict[_Shape, _Measured] = {}
        whole = whole_of(model)
        first: Mapping[str, str] = {} if whole is None else whole.first
        parameters = {first.get(name, name): one for name, one in named(model).items()}
        self._shared: dict[str, tuple[weakref.ref[nn.Parameter], tuple[int, ...]]] = {}
        for name, stages in plan.shared.items():
            ranks = tuple(sorted({schedule.rank_of(stage) for stage in stages}))
            own = parameters.get(name)
            if len(ranks) > 1 and own is not None and own.requires_grad:
                self._shared[name] = (weakref.ref(cast("nn.Parameter", own)), ranks)
                count_stages(own, len(ranks))
        around = inner.compute if isinstance(inner, ShardHandle) else None
        self._call = StageCall(model, plan, around)
        register(self, model.parameters(), instead_of=inner)
        setattr(model, HANDLE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineHandle:
        """Refuse: what a copy holds would be trained by nobody."""
        raise ConfigurationError(
            "a prepared model that is cut into stages can't be copied. Copy it before it is prepared, and "
            "prepare the copy with evaluation_mode=True, or save it and load the weights."
        )

    @property
    def is_alive(self) -> bool:
        """Whether somebody holds the model still."""
        return self._model() is not None

    def without_sync(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of each rank's stages inside."""
        return self._syncing(False)

    def trigger_sync(self) -> AbstractContextManager[None]:
        """Average gradients inside, with all that have added up before."""
        return self._syncing(True)

    @contextmanager
    def _syncing(self, syncs: bool) -> Generator[None, None, None]:
        before, self._syncs = self._syncs, syncs
        try:
            yield
        finally:
            self._syncs = before

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        return IN_NO_SYNC if self._is_open else self._inner.why_unreduced()

    def discard(self) -> None:
        """Release gradients that have added up and were not averaged yet."""
        self._inner.discard()
        self._stash.clear()
        self._is_open = False

    def run(self, batch: BatchRun[L]) -> L:
        """Run one batch through the schedule. Returns its loss, without a gradient, on every rank.

        Ranks: every rank of the context.

        Raises:
            ValueError: The batch can't be cut along its rows.
            ConfigurationError: Ranks along "pp" have different batches; the loss function doesn't call the
                model once; or the model can't run in these stages.
            Exception: As the loss function, and RemoteRankError on the other ranks where it failed at once.
        """
        parts: dict[int, L] = {}

        def compute(stage: int, received: tuple[torch.Tensor, ...], index: int) -> Any:
            result = self._call.run(
                stage, measured.outlines, received, lambda: batch.loss_fn(batch.model, pieces[index])
            )
            if not self._is_last(stage):
                return result
            parts[index] = map_tensors(torch.Tensor.detach, result)
            return batch.to_differentiate(result, len(pieces))

        shape, pieces = self._cut(batch.batch, "forward_backward", is_trained=True)
        measured = self._measure(
            shape, "forward_backward", lambda: batch.loss_fn(batch.model, pieces[0]), batch.join
        )
        self._open()
        try:
            with self._inner.without_sync():
                self._run(measured, PipelineProgram(compute))
            if self._syncs:
                self._close()
        except BaseException:
            self._measured.clear()  # whose schedules have stopped in the middle
            self._known.clear()
            raise
        joined = batch.join([parts[index] for index in range(len(pieces))]) if parts else None
        return self._share(joined, measured.form)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the model, without gradients, on every rank.

        Ranks: every rank of the context.

        Raises:
            ValueError: The arguments, or the output, can't be cut along their rows.
            ConfigurationError: As :meth:`run`.
        """
        outputs: dict[int, Any] = {}
        model = cast("nn.Module", self._model())

        def call(index: int) -> Any:
            own_args, own_kwargs = pieces[index]
            return model(*own_args, **own_kwargs)

        def compute(stage: int, received: tuple[torch.Tensor, ...], index: int) -> Any:
            result = self._call.run(stage, measured.outlines, received, lambda: call(index))
            if not self._is_last(stage):
                return result
            outputs[index] = result
            return torch.zeros(1, device=self._ctx.device)  # torch joins what stages return

        def join(found: Sequence[Any]) -> Any:
            for one in found:
                leaves, structure = flatten(one)
                for leaf, path in zip(leaves, structure.paths("output"), strict=True):
                    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != shape.rows:
                        what = (
                            f"shape {tuple(leaf.shape)}"
                            if isinstance(leaf, torch.Tensor)
                            else type(leaf).__name__
                        )
                        raise ValueError(
                            f"forward: {path} has {what}, for a microbatch of {shape.rows} rows, and a "
                            "pipeline joins what it computes in microbatches along their rows. Let the model "
                            "return tensors with a row for each sample: without labels, for example."
                        )
            return concatenate(found)

        with torch.no_grad():
            shape, pieces = self._cut((args, dict(kwargs)), "forward", is_trained=False)
            measured = self._measure(
                shape, "forward", lambda: call(0), lambda found: join([*found] * len(pieces))
            )
            self._run(measured, PipelineProgram(compute))
            joined = join([outputs[index] for index in range(len(pieces))]) if outputs else None
            return self._share(joined, measured.form)

    def _is_last(self, stage: int) -> bool:
        return stage + 1 == self._schedule.num_stages

    def _cut(self, batch: Any, operation: str, *, is_trained: bool) -> tuple[_Shape, list[Any]]:
        """Cut a batch into microbatches, as many on every rank."""

        def read() -> bytes:
            reason = f"{operation}: in a pipeline a batch is cut into microbatches"
            rows = count_rows(batch, "batch", reason, with_others=not is_trained)
            leaves, structure = flatten(batch)
            kinds = [
                (str(leaf.dtype), tuple(leaf.shape[1:]))
                if isinstance(leaf, torch.Tensor)
                else type(leaf).__name__
                for leaf in leaves
            ]
            is_training = cast("nn.Module", self._model()).training
            text = repr((kinds, structure.describe(), is_trained, is_training, torch.is_autocast_enabled()))
            return _HEADER.pack(rows, hashlib.blake2b(text.encode(), digest_size=16).digest())

        header, error = catch(read)
        found = gather_bytes(self._ctx, Call(operation, "of a pipeline"), header or b"", error)
        told: list[tuple[int, bytes]] = [_HEADER.unpack(one) for one in found]
        plan = cast("Any", self._ctx.mesh).plan
        for rank, own in enumerate(told):
            first = plan.group(rank, "pp")[0]
            if own != told[first]:
                raise ConfigurationError(
                    f"{operation}: ranks {first} and {rank} have stages of one model, and different batches: "
                    f"{told[first][0]} and {own[0]} rows, or other shapes. Ranks along pp read the same "
                    'batches: those of ctx.coordinate("dp").'
                )
        schedule = self._schedule.fit(math.gcd(*(rows for rows, _ in told)))
        count = schedule.num_microbatches
        shapes = [_Shape(schedule, rows // count, digest, is_trained) for rows, digest in told]
        new = {*enumerate(shapes)} - self._known
        if new:  # measured on all ranks together, since the stages of each wait for its replicas
            self._measured.pop(shapes[self._ctx.rank], None)
        self._known |= new
        rows = shapes[self._ctx.rank].rows
        return shapes[self._ctx.rank], [
            slice_tensors(batch, slice(index * rows, (index + 1) * rows)) for index in range(count)
        ]

    def _measure(
        self, shape: _Shape, operation: str, compute: Callable[[], Any], join: Callable[[Sequence[Any]], Any]
    ) -> _Measured:
        """Return what stages send of a microbatch, by running one of them, stage by stage, without gradients.

        What is drawn and what is counted in buffers meanwhile is taken back.
        """
        known = self._measured.get(shape)
        if known is not None:
            return known
        device = self._ctx.device
        outlines: list[Outline] = []
        form: Any = None
        for stage in range(self._schedule.num_stages):
            owner = self._schedule.rank_of(stage)

            def measure(stage: int = stage) -> bytes:
                with torch.no_grad(), self._as_before():
                    outline, result = self._call.outline(stage, outlines, device, compute)
                    if self._is_last(stage):
                        result = map_tensors(lambda one: one.to("meta"), join([result]))
                return pickle.dumps((outline, result))

            blob, error = catch(measure) if owner == self._rank else (b"", None)
            call = Call(operation, f"first microbatch of its shape, stage {stage}", takes_long=True)
            found = pickle.loads(gather_bytes(self._ctx, call, blob or b"", error)[self._line[owner]])
            outlines.append(found[0])
            form = found[1]
        run = make_schedule(
            shape.schedule,
            self._rank,
            self._group,
            device,
            sent_of(outlines, self._plan, shape.schedule, is_trained=shape.is_trained),
            self._parameters_of,
            is_trained=shape.is_trained,
        )
        self._measured[shape] = _Measured(tuple(outlines), form, run)
        return self._measured[shape]

    @contextmanager
    def _as_before(self) -> Generator[None, None, None]:
        """Bring generators and buffers back to what they were."""
        model = cast("nn.Module", self._model())
        buffers = [(one, one.clone()) for one in model.buffers()]
        devices = [] if self._ctx.device.type == "cpu" else [self._ctx.device]
        with cast("Any", torch).random.fork_rng(devices, device_type=self._ctx.device.type):
            yield
        for one, value in buffers:
            one.copy_(value)

    def _parameters_of(self, stage: int) -> list[nn.Parameter]:
        own = named(cast("nn.Module", self._model()))
        names = [name for name in self._plan.stages[stage].parameters if name in own]
        return [cast("nn.Parameter", one) for one in {id(own[name]): own[name] for name in names}.values()]

    def _run(self, measured: _Measured, program: PipelineProgram) -> None:
        try:
            measured.run(program)
        except RuntimeError as error:  # of torch's, which says less than is known of a lost rank
            explained = self._ctx.collectives.translate_error(error)
            if explained is error:
                raise
            raise explained from (explained.__cause__ or error)

    def _share(self, result: Any, form: Any) -> Any:
        """Return what the last stage has, on every rank along "pp"."""
        source = self._schedule.rank_of(self._schedule.num_stages - 1)
        device = self._ctx.device
        if self._rank != source:
            result = map_tensors(lambda one: torch.zeros(one.shape, dtype=one.dtype, device=device), form)
        return broadcast(self._ctx.along("pp"), result, source)

    def _shared_now(self) -> Generator[tuple[str, nn.Parameter, tuple[int, ...]], None, None]:
        for name, (reference, ranks) in self._shared.items():
            parameter = reference()
            if parameter is not None:
                yield name, parameter, ranks

    def _open(self) -> None:
        """Put the sums that shared parameters have already aside."""
        if self._is_open:
            return
        self._is_open = True
        for name, parameter, _ in self._shared_now():
            self._stash[name], parameter.grad = parameter.grad, None

    def _close(self) -> None:
        """Reduce the gradients of the stages, and add up those of parameters that several stages hold."""
        self._inner.reduce()
        for name, parameter, ranks in self._shared_now():
            _add_up(parameter, ranks, self._rank, self._group)
            before = self._stash.pop(name, None)
            if before is not None:
                cast("torch.Tensor", parameter.grad).add_(before)
        self._is_open = False


def _add_up(parameter: nn.Parameter, ranks: Sequence[int], rank: int, group: Any) -> None:
    """Let each of ``ranks`` have the sum of their gradients of a parameter, added in the order of ranks."""
    import torch.distributed as dist

    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    elif is_dtensor(gradient) and is_dtensor(parameter):
        wanted = cast("Any", parameter).placements
        if cast("Any", gradient).placements != wanted:
            gradient = cast("torch.Tensor", cast("Any", gradient).redistribute(placements=wanted))
    parameter.grad = gradient
    with torch.no_grad():
        own = local_of(gradient).contiguous()
        parts = {one: own if one == rank else torch.empty_like(own) for one in ranks}
        # One after another in one order of pairs, so that no two ranks wait for each other.
        for sender in ranks:
            for receiver in ranks:
                if sender == rank != receiver:
                    dist.send(own, group=group, group_dst=receiver)
                elif receiver == rank != sender:
                    dist.recv(parts[sender], group=group, group_src=sender)
        total = parts[ranks[0]].clone()
        for one in ranks[1:]:
            total += parts[one]
        local_of(gradient).copy_(total)
