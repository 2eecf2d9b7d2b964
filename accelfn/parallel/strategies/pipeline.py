"""Run batches through the stages of a pipeline, in the order of torch's schedules.

Each stage calls the user's loss function, and in it the model's own forward, on a microbatch. The schedule
passes around only the microbatch's index: every rank along "pp" has the batch itself.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
import struct
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.buffers import BufferWatch, KeptBuffers
from accelfn.parallel.handle import IN_NO_SYNC, BatchRun, Handle, naming_lost_ranks
from accelfn.parallel.norm import aligned, count_stages
from accelfn.parallel.pointers import named, whole_of
from accelfn.parallel.strategies.fsdp import ShardHandle
from accelfn.parallel.strategies.pipeline_plan import PipelinePlan, SchedulePlan
from accelfn.parallel.strategies.stages import Form, Outline, StageRun, has_stand_in, resized, run_stage
from accelfn.tree import (
    concatenate,
    count_rows,
    find_batch_size,
    flatten,
    flatten_tensor,
    local_of,
    map_tensors,
    send_to_device,
    slice_tensors,
)

if TYPE_CHECKING:
    import torch.distributed as dist

L = TypeVar("L")
R = TypeVar("R")


class SentError(BaseException):
    """Ends the loss function at the model's call, on every stage except the last.

    Not an ``Exception``, since a loss function may catch those.
    """


class StageCall:
    """Replaces the call of a pipelined model: runs the stage that is scheduled.

    It holds the model weakly. Outside of a schedule the model's forward raises an error.
    """

    def __init__(self, model: nn.Module, around: Callable[..., Any] | None = None) -> None:
        """Replace the call of ``model``.

        Args:
            model: Prepared by :func:`accelfn.parallel.strategies.stages.apply_stages`.
            around: Wraps the call, as ``around(call, *args, **kwargs)``; None for no wrapper.
        """
        self._model = weakref.ref(model)
        self._around = around
        self._run: StageRun | None = None  # the scheduled stage; consumed by the first call
        self._has_run = False
        vars(model)["_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output on the last stage.

        Raises:
            SentError: The stage isn't the last one.
            ConfigurationError: The loss function called the model a second time.
        """
        model: Any = self._model()
        run, self._run = self._run, None
        if run is not None:
            output = run_stage(model, run, args, kwargs)
            self._has_run = True
            if run.sent is not None:
                raise SentError
            return output
        if self._has_run:
            raise ConfigurationError(
                "the loss function called the model twice, but a pipeline runs one forward pass per batch. "
                "Call the model once, on the rows of both calls."
            )
        call = cast("Any", type(model))._call_impl  # reached from run_stage; else the forward raises
        if self._around is None:
            return call(model, *args, **kwargs)
        return self._around(call, model, *args, **kwargs)

    def run(self, run: StageRun, compute: Callable[[], Any]) -> Any:
        """Call ``compute``, which calls the model; return its result on the last stage.

        On every other stage, return the tensors to send to the next one.

        Raises:
            ConfigurationError: ``compute`` didn't call the model, called it more than once, caught
                :class:`SentError`, or used parameters of other stages.
            Exception: Raised by ``compute``.
        """
        self._run, self._has_run = run, False
        try:
            result = compute()
        except SentError:
            return run.sent
        finally:
            has_run, self._has_run, self._run = self._has_run, False, None
        if not has_run:
            raise ConfigurationError(
                "the loss function didn't call the model that it was passed, and a pipeline runs the model "
                "in that call. Call the model itself, not a module inside it, exactly once."
            )
        if run.sent is not None:
            raise ConfigurationError(
                "the loss function caught the exception that ends it at the model's call, on stages without "
                "the model's output. That isn't an Exception: write `except Exception:` instead of a bare "
                "`except:`."
            )
        if has_stand_in(result):
            raise ConfigurationError(
                "the loss depends on tensors whose values are on another stage of the pipeline. Return "
                "tensors from the model directly, or in tuples, lists, dicts or outputs of transformers; "
                "parameters of other stages can't be used."
            )
        return result


class _StageModule(nn.Module):
    """The module that torch's PipelineStage runs. Not DDP or FSDP: the handle reduces gradients."""

    def __init__(self, index: int, compute: Callable[[int, tuple[torch.Tensor, ...], int], Any]) -> None:
        super().__init__()
        self.index = index
        self.compute = compute

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        """Compute one microbatch."""
        return self.compute(self.index, received if self.index else (), int(index))


def _zeros(forms: tuple[Form, ...], device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """Return zeros of some forms; floating ones require gradients."""
    return tuple(form.zeros(device).requires_grad_(form.dtype.is_floating_point) for form in forms)


def sent_of(outlines: Sequence[Outline], plan: PipelinePlan, *, is_trained: bool) -> list[tuple[Form, ...]]:
    """Return the forms of the tensors that each stage except the last sends.

    Raises:
        ConfigurationError: In training, an integer tensor would be sent, which has no gradient.
    """
    sent = [stage.sent_to(following) for stage, following in itertools.pairwise(outlines)]
    for index, forms in enumerate(sent if is_trained else ()):
        block, paths = plan.stages[index + 1].blocks[0], outlines[index + 1].receives
        for path, form in zip(paths, forms, strict=True):
            if not form.dtype.is_floating_point:
                raise ConfigurationError(
                    f"stage {index} of a pipeline would send an integer tensor ({form.dtype}, shape "
                    f"{form.shape}), which has no gradient: {path} in the call of {block}. Compute "
                    "it from the model's arguments, which every stage has, or begin the next stage with "
                    "another block."
                )
    return sent


class BatchSchedule:
    """One of torch's schedules for batches of one shape, over the stages of this rank.

    After an error, this rank's stages send zeros, so that the schedule ends on every rank and the error can
    be exchanged.
    """

    def __init__(
        self,
        plan: SchedulePlan,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        boundaries: Sequence[tuple[Form, ...]],
        *,
        is_trained: bool,
        stops: bool,
        is_first: bool,
    ) -> None:
        """Build the schedule.

        Args:
            plan: The schedule, with the batch's number of microbatches.
            rank: This rank along "pp".
            group: The ranks along "pp".
            device: Device of the tensors that are sent.
            boundaries: Forms of the tensors that each stage except the last sends per microbatch.
            is_trained: Whether to run backward passes.
            stops: Whether an error ends the schedule on this rank at once.
            is_first: Whether no schedule was built for these ranks before.
        """
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        self._device = device
        self._sent = (*boundaries, (Form((), torch.float32),))
        self._count = plan.num_microbatches
        self._is_trained = is_trained
        self._stops = stops
        self._compute: Callable[[int, tuple[torch.Tensor, ...], int], Any] | None = None
        self._error: Exception | None = None
        self._stages: list[Any] = []
        for index in plan.stages_of(rank):
            stage: Any = PipelineStage(
                _StageModule(index, self._forward),
                index,
                plan.num_stages,
                device,
                # Static: torch would otherwise infer them by a forward and a backward pass on uninitialised
                # tensors.
                input_args=_zeros(boundaries[index - 1], "meta") if index else (),
                output_args=_zeros(self._sent[index], "meta"),
                group=group,
            )
            stage.backward_maybe_with_nosync = partial(self._backward, stage.backward_maybe_with_nosync)
            self._stages.append(stage)
        is_multiple = plan.stages_per_rank > 1 or plan.name not in ("gpipe", "1f1b")
        self._schedule: Any = cast("Any", get_schedule_class(plan.name))(
            self._stages if is_multiple else self._stages[0],
            plan.num_microbatches,
            loss_fn=_first if is_trained else None,
            scale_grads=False,
        )
        if not is_first:
            _leave_out_warmup(self._schedule, self._stages)

    def run(
        self,
        compute: Callable[
            [int, tuple[torch.Tensor, ...], int], tuple[torch.Tensor, ...] | torch.Tensor | None
        ],
    ) -> Exception | None:
        """Run a batch; return the first exception of this rank's stages, or None.

        Args:
            compute: ``compute(stage, received, index)`` returns the tensors that the stage sends for a
                microbatch; on the last stage the tensor to differentiate, or None. The first stage receives
                nothing.

        Raises:
            Exception: An exception of a stage, where ``stops`` is set; or an error of torch itself.
        """
        self._compute, self._error = compute, None
        indices = torch.arange(self._count)
        try:
            if self._is_trained:
                self._schedule.step(index=indices, target=indices, return_outputs=False)
            else:
                self._schedule.eval(index=indices, return_outputs=False)
            return self._error
        except RuntimeError as error:
            if self._error is None:
                raise
            raise self._error from error.__cause__ if error.__cause__ is not self._error else None
        finally:
            self._compute = self._error = None
            for stage in self._stages:
                stage.clear_runtime_states()  # frees activations, which it would keep until the next batch

    def _attempt(self, action: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``action``; None after an error."""
        if self._error is None:
            try:
                return action(*args)
            except Exception as error:
                self._error = error
                if self._stops:
                    raise
        return None

    def _forward(self, stage: int, received: tuple[torch.Tensor, ...], index: int) -> Any:
        result = self._attempt(cast("Any", self._compute), stage, received, index)
        return _zeros(self._sent[stage], self._device) if result is None else result

    def _backward(
        self, backward: Callable[..., Any], kind: str, values: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run torch's backward pass of a stage; after an error, return zero gradients."""

        def compute() -> Any:
            try:
                return backward(kind, values, last_backward=last_backward)
            except RuntimeError as error:
                if isinstance(error.__cause__, CheckpointError):
                    raise ConfigurationError(
                        "backward: the model recomputes modules of several stages of the pipeline at once, "
                        "by torch.utils.checkpoint. Let it recompute each block alone."
                    ) from error.__cause__
                raise error.__cause__ or error  # noqa: B904 -- torch wraps every error in its own

        gradients = self._attempt(compute)
        if gradients is not None:
            return gradients
        return tuple(map(torch.zeros_like, values.get("input_values", ()))), []


def _leave_out_warmup(schedule: Any, stages: Sequence[Any]) -> None:
    """Spare a schedule torch's warm-up, which connects the ranks and lets them vote on what is given here.

    Torch before 2.13 has no vote, and connects the ranks anew.
    """
    from torch.distributed.pipelining import stage as torchs

    def nothing(*_: object) -> None: ...

    mode: Any = getattr(torchs, "InferenceMode", None)
    if mode is not None and hasattr(schedule, "_warmup_p2p"):
        schedule._warmup_p2p = nothing
        for stage in stages:
            stage._inference_mode = mode.STATIC


def _first(loss: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the last stage's result as the loss."""
    del index
    return loss


_HEADER = struct.Struct("<q16s")  # number of rows, and a digest of the rest of the batch's shape
_SMALL_BYTES = 4096  # CPU tensors up to this size travel in the agreement
_NUM_KEPT = 4  # batch shapes whose schedules and buffers are kept


class _Shape(NamedTuple):
    """The shape of a batch, which selects its schedule. Equal on all ranks along "pp".

    Attributes:
        schedule: With the number of microbatches that the rows of all ranks allow.
        rows: Rows of each microbatch.
        digest: Digest of the dtypes and the other sizes of the batch's tensors.
        is_trained: Whether there are backward passes.
    """

    schedule: SchedulePlan
    rows: int
    digest: bytes
    is_trained: bool


class _Measured(NamedTuple):
    """What is known about batches of one shape: sizes, outlines of all stages, and the schedule."""

    sizes: list[int]
    outlines: list[Outline]
    schedule: BatchSchedule


class PipelineEngine:
    """Runs batches through the stages of a model.

    A failure on one rank raises on every rank; later batches run normally.
    """

    def __init__(
        self,
        ctx: Context,
        model: nn.Module,
        plan: PipelinePlan,
        schedule: SchedulePlan,
        along: Context,
        group: dist.ProcessGroup,
        pipelines: Sequence[Sequence[int]],
        *,
        around: Callable[..., Any] | None = None,
        waits_inside: bool = False,
    ) -> None:
        """Run the stages of ``model`` in ``schedule``.

        Args:
            ctx: The world, all of whose ranks run each batch.
            model: The model, with only the stages of this rank.
            plan: The plan that split it.
            schedule: The schedule of a batch with enough rows.
            along: The context of the ranks of this pipeline, numbered as in it.
            group: Torch's process group of the same ranks.
            pipelines: The ranks of every pipeline in the world.
            around: Wraps the model's call, as in :class:`StageCall`.
            waits_inside: Whether ranks wait for each other inside a stage, so that a rank whose stage has
                failed must not go on.
        """
        self._ctx = ctx
        self._model = weakref.ref(model)
        self._plan = plan
        self._schedule = schedule
        self._pipelines = pipelines
        self._peers = next(ranks for ranks in pipelines if ctx.rank in ranks)
        self._along = along
        self.rank: int = along.rank
        self.group: dist.ProcessGroup = group
        self._waits_inside = waits_inside
        self._call = StageCall(model, around)
        # By rank and shape, latest last. All ranks have the same keys, but each measures only its own shapes.
        self._known: dict[tuple[int, _Shape], _Measured | None] = {}
        self._is_connected = False  # whether a schedule was built; equal on all ranks

    def outlines_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Outline] | None:
        """Return the stages' outlines for a microbatch; None if no batch of its shape was run lately."""
        form = self._form_of("forward", (args, dict(kwargs)), is_trained=False)
        for (_, shape), measured in self._known.items():
            if measured is not None and (shape.rows, shape.digest) == form:
                return measured.outlines
        return None

    def run(
        self,
        operation: str,
        batch: Any,
        compute: Callable[[Any], L],
        join: Callable[[Sequence[L]], L],
        *,
        to_differentiate: Callable[[L, int], torch.Tensor] | None = None,
        num_batches: int = 1,
        everywhere: bool = True,
    ) -> L | None:
        """Run a batch; return the joined results of its microbatches, without gradients.

        Ranks: every rank of the context. After an error, the other ranks finish the batch and then raise too.

        Args:
            operation: Name of the operation in errors.
            batch: A tree. Tensors in it have a row for each sample, or are 0-d. Without training, tensors
                with another number of rows than the first, and everything else, go to each microbatch.
            compute: Calls the model with a microbatch.
            join: Joins the results of the microbatches.
            to_differentiate: Returns the tensor to differentiate, from a microbatch's result and the number
                of microbatches, which divides the rows. None: no gradients; the last row is repeated until
                the rows divide.
            num_batches: Size of the batch, in batches of the usual size.
            everywhere: Return the result on all ranks, instead of only on the rank of the last stage.

        Raises:
            ValueError: The batch can't be split along its rows.
            ConfigurationError: Ranks of one pipeline have different batches, or the model can't run in
                stages.
            Exception: Raised by a stage of this rank, or by ``join``.
            RemoteRankError: Another rank failed.
        """
        is_trained = to_differentiate is not None
        forms = self._agree_on(operation, batch, is_trained=is_trained)
        schedule = self._fit([rows for rows, _ in forms], num_batches, is_trained=is_trained)
        count = schedule.num_microbatches
        shapes = [_Shape(schedule, _divided(rows, count), digest, is_trained) for rows, digest in forms]
        rows, size = forms[self._ctx.rank][0], shapes[self._ctx.rank].rows

        def compute_piece(index: int) -> L:
            # Anew for each stage: the program may take tensors out of its batch.
            return compute(_take(batch, rows, index * size, size))

        measured = self._measured(operation, shapes, batch, partial(compute_piece, 0))
        parts: dict[int, L] = {}

        def compute_stage(stage: int, received: tuple[torch.Tensor, ...], index: int) -> Any:
            run = StageRun(self._plan, stage, measured.outlines, received, self._ctx.device)
            result = self._call.run(run, partial(compute_piece, index))
            if run.sent is not None:
                return result
            parts[index] = map_tensors(torch.Tensor.detach, result)
            return None if to_differentiate is None else to_differentiate(result, count)

        try:
            with naming_lost_ranks(self._ctx):
                error = measured.schedule.run(compute_stage)
        except BaseException:
            self._known.clear()  # its schedules stopped half-way
            raise
        return self._finish(operation, parts, join, error, everywhere=everywhere)

    def _agree_on(self, operation: str, batch: Any, *, is_trained: bool) -> list[tuple[int, bytes]]:
        """Return rows and digest of every rank's batch."""
        header, error = catch(lambda: _HEADER.pack(*self._form_of(operation, batch, is_trained=is_trained)))
        blobs = gather_bytes(self._ctx, Call(operation, "of a pipeline"), header or b"", error)
        forms: list[tuple[int, bytes]] = [_HEADER.unpack(blob) for blob in blobs]
        for ranks in self._pipelines:
            first = ranks[0]
            for rank in ranks:
                if forms[rank] != forms[first]:
                    raise ConfigurationError(
                        f"{operation}: ranks {first} and {rank} hold stages of one model, but have different "
                        f"batches: {forms[first][0]} and {forms[rank][0]} rows, or other shapes. Ranks along "
                        'pp must read the same batches: those of ctx.coordinate("dp").'
                    )
        return forms

    def _form_of(self, operation: str, batch: Any, *, is_trained: bool) -> tuple[int, bytes]:
        """Return a batch's number of rows, and a digest of the rest of its shape."""
        reason = f"{operation}: in a pipeline a batch is split into microbatches"
        rows = count_rows(batch, "batch", reason, with_others=not is_trained)
        leaves, structure = flatten(batch)
        kinds = [
            (str(leaf.dtype), leaf.dim() and leaf.shape[0] == rows, tuple(leaf.shape[1:]))
            if isinstance(leaf, torch.Tensor)
            else type(leaf).__name__
            for leaf in leaves
        ]
        is_training = cast("nn.Module", self._model()).training
        text = repr((kinds, structure.describe(), is_trained, is_training, torch.is_autocast_enabled()))
        return rows, hashlib.blake2b(text.encode(), digest_size=16).digest()

    def _fit(self, rows: Sequence[int], num_batches: int, *, is_trained: bool) -> SchedulePlan:
        """Return the schedule for batches with these rows by rank: equally many microbatches on each."""
        most = self._schedule.num_microbatches * num_batches
        schedule = self._schedule._replace(num_microbatches=most)
        if is_trained:
            return schedule.fit(math.gcd(*rows))
        return schedule.fit(max(_divided(count, _divided(count, most)) for count in rows))

    def _measured(
        self, operation: str, shapes: Sequence[_Shape], batch: Any, compute: Callable[[], Any]
    ) -> _Measured:
        """Return the outlines and schedule for this rank's shape; forget shapes of long ago.

        A shape that is new on any rank is measured on all ranks: stages may wait for their replicas.
        """
        latest = [*enumerate(shapes)]
        key = self._ctx.rank, shapes[self._ctx.rank]
        measured = self._known.get(key)
        if measured is None or any(other not in self._known for other in latest):
            measured = self._measure(operation, shapes, batch, compute)
        for other in latest:
            self._known.pop(other, None)
            self._known[other] = measured if other == key else None
        while len(self._known) > _NUM_KEPT * len(shapes):
            del self._known[next(iter(self._known))]
        return measured

    def _measure(
        self, operation: str, shapes: Sequence[_Shape], batch: Any, compute: Callable[[], Any]
    ) -> _Measured:
        """Outline the stages for batches of one shape, and build their schedule.

        A stage needs the outlines of those before it. So the first time, one runs after the other; later on
        all run at once, on what they expect after another shape, and the outlines count where every rank
        found what it had expected.
        """
        shape = shapes[self._ctx.rank]
        sizes = [shape.rows, *_sizes_of(batch)]
        own = self._schedule.stages_of(self.rank)
        is_first, self._is_connected = not self._is_connected, True
        outlines: list[Outline] = []

        def outline(stage: int, before: Sequence[Outline]) -> Outline:
            return self._outline(stage, before, compute, is_trained=shape.is_trained)

        if self._known:
            expected = self._expected(shapes, sizes)
            # Not an error yet, if it isn't: it may be for what was expected.
            is_right = bool(expected) and all(
                catch(partial(outline, stage, expected[:stage])) == (expected[stage], None) for stage in own
            )
            call = Call(operation, "first microbatch of its shape", takes_long=True)
            is_right = not any(gather_bytes(self._ctx, call, b"" if is_right else b"differs", None))
            outlines = expected if is_right else []
        for stage in range(len(outlines), self._schedule.num_stages):
            blob, error = b"", None
            if stage in own:
                blob, error = catch(lambda: pickle.dumps(outline(stage, outlines)))  # noqa: B023 -- called here
            call = Call(operation, f"first microbatch of its shape, stage {stage}", takes_long=True)
            owner = self._peers[self._schedule.rank_of(stage)]
            outlines.append(pickle.loads(gather_bytes(self._ctx, call, blob or b"", error)[owner]))
        schedule = BatchSchedule(
            shape.schedule,
            self.rank,
            self.group,
            self._ctx.device,
            sent_of(outlines, self._plan, is_trained=shape.is_trained),
            is_trained=shape.is_trained,
            stops=self._waits_inside,
            is_first=is_first,
        )
        return _Measured(sizes, outlines, schedule)

    def _expected(self, shapes: Sequence[_Shape], sizes: Sequence[int]) -> list[Outline]:
        """Return what the outlines should be after those of the latest shape; empty if none is like this one.

        Where stages wait for their replicas, these must expect the same.
        """
        ranks = range(len(shapes)) if self._waits_inside else (self._ctx.rank,)
        if len({shapes[rank] for rank in ranks}) == 1:
            for _, shape in reversed(self._known):
                if all((rank, shape) in self._known for rank in ranks):
                    known = self._known[self._ctx.rank, shape]
                    if known is not None and len(known.sizes) == len(sizes):
                        return resized(known.outlines, known.sizes, sizes)
        return []

    def _outline(
        self, stage: int, before: Sequence[Outline], compute: Callable[[], Any], *, is_trained: bool
    ) -> Outline:
        """Outline a stage by one microbatch, without gradients; random states and buffers are restored."""
        run = StageRun(self._plan, stage, before, (), self._ctx.device)
        with torch.no_grad(), self._restoring(is_trained=is_trained):
            self._call.run(run, compute)
        return run.outline

    @contextmanager
    def _restoring(self, *, is_trained: bool) -> Generator[None, None, None]:
        """Restore random states and buffers afterwards.

        Raises:
            ConfigurationError: Buffers were changed, and will be once for each microbatch of a training step.
        """
        model = cast("nn.Module", self._model())
        devices = [] if self._ctx.device.type == "cpu" else [self._ctx.device]
        fork = cast("Any", torch).random.fork_rng(devices, device_type=self._ctx.device.type)
        with KeptBuffers(cast("Iterable[nn.Module]", model.modules())), fork:
            watch = BufferWatch(model)
            yield
            changed = watch.changed()
        if changed and is_trained:
            raise ConfigurationError(
                f"a pipeline can't train a model whose forward changes {changed[0]}: it computes a "
                "batch in microbatches, and each of them would change the buffer by its own rows. Use "
                "GroupNorm or LayerNorm instead of batch normalisation, freeze the module with eval(), or "
                "train without pp."
            )

    def _finish(
        self,
        operation: str,
        parts: Mapping[int, L],
        join: Callable[[Sequence[L]], L],
        error: Exception | None,
        *,
        everywhere: bool,
    ) -> L | None:
        """Join the microbatches' results on the ranks of the last stage, and send them to the others.

        One agreement of all ranks, before gradients are reduced; small tensors travel in it.
        """

        def joined() -> L:
            return send_to_device(join([parts[index] for index in sorted(parts)]), self._ctx.device)

        result: L | None = None
        blob = b""
        if parts and error is None:
            result, error = catch(joined)
        if parts and error is None and everywhere:
            blob = pickle.dumps(map_tensors(_announced, result))
        blobs = gather_bytes(self._ctx, Call(operation, "end of a batch", takes_long=True), blob, error)
        if not everywhere:
            return result
        source = self._schedule.rank_of(self._schedule.num_stages - 1)
        leaves, structure = flatten(pickle.loads(blobs[self._peers[source]]))
        own = flatten(result)[0] if parts else leaves
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                tensor = own[index] if parts else torch.empty_like(leaf, device=self._ctx.device)
                self._along.collectives.broadcast(flatten_tensor(tensor).view(torch.uint8), source)
                leaves[index] = tensor
        return structure.unflatten(leaves)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, everywhere: bool = True) -> Any:
        """Return the output of the model, without gradients.

        Ranks: every rank of the context.

        Args:
            args: Positional arguments of the model's call.
            kwargs: Keyword arguments of the model's call.
            everywhere: Return the output on all ranks; else only on the rank of the last stage, and None on
                the others.

        Raises:
            ValueError: The arguments, or the output, can't be split along their rows.
            Exception: As :meth:`run`.
        """
        model = cast("nn.Module", self._model())

        def call(piece: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
            output = model(*piece[0], **piece[1])
            size = find_batch_size(piece)
            leaves, structure = flatten(output)
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf.shape[:1] != (size,):
                    raise ValueError(
                        f"forward: {structure.paths('output')[index]} has shape {tuple(leaf.shape)} for a "
                        f"microbatch of {size} rows, and a pipeline joins microbatches along their rows. "
                        "Return tensors with a row for each sample: for example, leave labels out."
                    )
            return output

        def join(outputs: Sequence[Any]) -> Any:
            return slice_tensors(concatenate(outputs), slice(find_batch_size(batch)))

        batch = (args, dict(kwargs))
        with torch.no_grad():
            return self.run("forward", batch, call, join, everywhere=everywhere)


def _announced(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the agreement carries of a tensor: a small one itself, otherwise its shape and dtype."""
    is_small = tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES
    return tensor if is_small else torch.empty_like(tensor, device="meta")


def _sizes_of(batch: Any) -> list[int]:
    """Return the sizes of a batch's tensors, except for their rows."""
    tensors = (leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor))
    return [size for tensor in tensors for size in tensor.shape[1:]]


def _divided(rows: int, parts: int) -> int:
    """Return the rows of each part, rounded up."""
    return -(-rows // parts)


def _take(batch: Any, rows: int, start: int, size: int) -> Any:
    """Return ``size`` rows of a batch of ``rows`` rows; past its end the last row is repeated."""

    def take(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.shape[:1] != (rows,):
            return leaf
        if start + size <= rows:
            return leaf[start : start + size]
        return leaf[torch.arange(start, start + size, device=leaf.device).clamp_(max=rows - 1)]

    return map_tensors(take, batch)


class PipelineHandle(Handle):
    """The handle of a pipelined model; an inner handle reduces the gradients of each stage.

    Gradients of a parameter on several stages are summed where the window closes.
    """

    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True
    splits_batches: ClassVar[bool] = True

    def __init__(
        self, ctx: Context, model: nn.Module, plan: PipelinePlan, schedule: SchedulePlan, inner: Handle
    ) -> None:
        """Run the stages of ``model`` in ``schedule``.

        Args:
            ctx: The world.
            model: The model, with only the stages of this rank.
            plan: The plan that split it.
            schedule: The schedule of a batch with enough rows.
            inner: Reduces the stages' gradients over their replicas and shards.
        """
        self._inner = inner
        self._is_open = False  # whether gradients of shared parameters are those of this rank's stages only
        mesh = cast("Any", ctx.mesh)
        self._engine = PipelineEngine(
            ctx,
            model,
            plan,
            schedule,
            ctx.along("pp"),
            mesh.device_mesh("pp").get_group(),
            sorted({mesh.plan.group(rank, "pp") for rank in range(ctx.num_processes)}),
            around=inner.compute_part if isinstance(inner, ShardHandle) else None,
            waits_inside=mesh.plan.size("dp_shard", "cp", "sp") > 1,
        )
        whole = whole_of(model)
        first: Mapping[str, str] = {} if whole is None else whole.first
        parameters = {first.get(name, name): parameter for name, parameter in named(model).items()}
        self._shared: list[tuple[weakref.ref[nn.Parameter], tuple[int, ...]]] = []
        for name, stages in plan.shared.items():
            ranks = tuple(sorted({schedule.rank_of(stage) for stage in stages}))
            parameter = parameters.get(name)
            if len(ranks) > 1 and parameter is not None and parameter.requires_grad:
                self._shared.append((weakref.ref(cast("nn.Parameter", parameter)), ranks))
                count_stages(parameter, len(ranks))
        super().__init__(model, model.parameters(), instead_of=inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineHandle:
        """Refuse: nothing would train the copy."""
        raise ConfigurationError(
            "a prepared pipelined model can't be copied. Copy it before it is prepared and prepare the copy "
            "with evaluation_mode=True, or save it and load the weights."
        )

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are only this rank's own; None where they are averaged."""
        return IN_NO_SYNC if self._is_open else self._inner.why_unreduced()

    def discard(self) -> None:
        """Drop accumulated gradients that were not averaged yet."""
        self._inner.discard()
        self._is_open = False

    def scale_held(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply accumulated gradients of ``parameters`` that were not averaged yet."""
        self._inner.scale_held(parameters, factor)

    def run(self, batch: BatchRun[L]) -> L:
        """Run one batch through the schedule; return its loss, without a gradient, on every rank.

        Ranks: every rank of the context.

        Raises:
            ValueError: The batch can't be split along its rows.
            ConfigurationError: Ranks along "pp" have different batches; the loss function doesn't call the
                model once; or the model can't run in these stages.
            Exception: Raised by the loss function; RemoteRankError on the other ranks.
        """
        self._open()
        try:
            with self._inner.without_sync():
                loss = self._engine.run(
                    "forward_backward",
                    batch.batch,
                    partial(batch.loss_fn, batch.model),
                    batch.join,
                    to_differentiate=batch.to_differentiate,
                    num_batches=batch.num_batches,
                )
        except BaseException:
            self._inner.discard()
            raise
        if self._syncs:
            self._close()
        return cast("L", loss)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the model on every rank, as :meth:`PipelineEngine.forward`."""
        return self._engine.forward(args, kwargs)

    def _shared_parameters(self) -> Generator[tuple[nn.Parameter, tuple[int, ...]], None, None]:
        for reference, ranks in self._shared:
            parameter = reference()
            if parameter is not None:
                yield parameter, ranks

    def _open(self) -> None:
        """Keep the sum of a shared parameter on the first rank that holds it, so that it counts once."""
        if self._is_open:
            return
        self._is_open = True
        for parameter, ranks in self._shared_parameters():
            if self._engine.rank != ranks[0]:
                parameter.grad = None

    def _close(self) -> None:
        """Reduce the stages' gradients, and sum those of parameters on several stages."""
        self._inner.reduce()
        for parameter, ranks in self._shared_parameters():
            _add_up(parameter, ranks, self._engine.rank, self._engine.group)
        self._is_open = False


def _add_up(parameter: nn.Parameter, ranks: Sequence[int], rank: int, group: Any) -> None:
    """Sum the gradients of a parameter over ``ranks``, in rank order, on each of them."""
    import torch.distributed as dist

    gradient = torch.zeros_like(parameter) if parameter.grad is None else aligned(parameter.grad, parameter)
    parameter.grad = gradient
    with torch.no_grad():
        own = local_of(gradient).contiguous()
        first, *others = ranks
        if rank != first:
            dist.send(own, group=group, group_dst=first)
            dist.recv(own, group=group, group_src=first)
        else:
            own, part = own.clone(), torch.empty_like(own)
            for other in others:
                dist.recv(part, group=group, group_src=other)
                own += part
            for other in others:
                dist.send(own, group=group, group_dst=other)
        local_of(gradient).copy_(own)
