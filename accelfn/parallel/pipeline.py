"""A batch through the stages of a pipeline: torch's schedules, and the stages that they call.

Each stage runs the user's loss function, and in it the model's own forward, on a microbatch. The schedule
passes on the number of the microbatch alone: every rank along "pp" has the batch itself.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
import struct
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import IN_NO_SYNC, BatchRun, Handle, naming_lost_ranks
from accelfn.parallel.norm import count_stages
from accelfn.parallel.parameters import named, whole_of
from accelfn.parallel.pipeline_plan import PipelinePlan, SchedulePlan
from accelfn.parallel.shard import ShardHandle
from accelfn.parallel.stages import Outline, StageRun, has_stand_in, run_stage
from accelfn.tree import (
    concatenate,
    count_rows,
    find_batch_size,
    flatten,
    flatten_tensor,
    is_dtensor,
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
    """Leaves a loss function where it has called the model, on all stages but the last one.

    No ``Exception``, since a loss function may catch those.
    """


class StageCall:
    """The call of a model that is cut into stages: runs the stage whose turn it is.

    It keeps nothing alive. Outside of a schedule the model's forward refuses the call by name.
    """

    def __init__(self, model: nn.Module, around: Callable[..., Any] | None = None) -> None:
        """Replace the call of ``model``.

        Args:
            model: In which :func:`accelfn.parallel.stages.apply_stages` has left some stages.
            around: Calls what it is given, as ``around(call, *args, **kwargs)``; None for nothing.
        """
        self._model = weakref.ref(model)
        self._around = around
        self._run: StageRun | None = None  # whose turn it is, once
        self._has_run = False
        vars(model)["_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model on the last stage.

        Raises:
            SentError: Another stage was run.
            ConfigurationError: The loss function has called the model before.
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
                "the loss function has called the model twice, and a pipeline runs one forward pass of each "
                "batch. Call it once, on the rows of both calls."
            )
        call = cast("Any", type(model))._call_impl  # in run_stage, or refused by the forward
        if self._around is None:
            return call(model, *args, **kwargs)
        return self._around(call, model, *args, **kwargs)

    def run(self, run: StageRun, compute: Callable[[], Any]) -> Any:
        """Return what ``compute``, which calls the model, gives on the last stage; of others what they send.

        Raises:
            ConfigurationError: ``compute`` has not called the model, or more than once; or it has caught
                :class:`SentError`, or used parameters of other stages.
            Exception: As ``compute``.
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
                "the loss function hasn't called the model that it was given, and a pipeline runs the model "
                "in that call. Call it once, and not a module inside of it."
            )
        if run.sent is not None:
            raise ConfigurationError(
                "the loss function has caught what ends it after the model's call, on the stages that have "
                "no output. It isn't an Exception: write `except Exception:` instead of a bare `except:`."
            )
        if has_stand_in(result):
            raise ConfigurationError(
                "the loss depends on tensors whose values another stage of the pipeline has. A model has to "
                "return tensors as such, or in tuples, lists, dicts and outputs of transformers; parameters "
                "of other stages can't be used."
            )
        return result


class _StageModule(nn.Module):
    """What torch takes for a stage's module. Neither DDP's nor FSDP's: reductions are the handle's."""

    def __init__(
        self,
        index: int,
        own: Callable[[int], Sequence[nn.Parameter]],
        forward: Callable[[int, tuple[torch.Tensor, ...], int], Any],
    ) -> None:
        super().__init__()
        self.index = index
        self.own = own
        self.compute = forward

    def parameters(self, recurse: bool = True) -> Any:
        """Return those of the stage: a schedule with two backward passes asks for them."""
        del recurse
        return iter(self.own(self.index))

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        """Compute one microbatch."""
        return self.compute(self.index, received if self.index else (), int(index))


def _like(tensors: tuple[torch.Tensor, ...], device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """Return zeros of the same shapes and dtypes, which require gradients where they can."""
    return tuple(
        torch.zeros_like(one, device=device, requires_grad=one.is_floating_point()) for one in tensors
    )


def sent_of(
    outlines: Sequence[Outline], plan: PipelinePlan, schedule: SchedulePlan, *, is_trained: bool
) -> list[tuple[torch.Tensor, ...]]:
    """Return what each stage but the last one sends, of the outlines of all: tensors on the meta device.

    Raises:
        ConfigurationError: Gradients are needed, and a tensor has none, since it is of whole numbers; or the
            schedule can't compute those of several.
    """
    sent = [stage.sent_to(following) for stage, following in itertools.pairwise(outlines)]
    for index, tensors in enumerate(sent if is_trained else ()):
        block, paths = plan.stages[index + 1].blocks[0], outlines[index + 1].receives
        for path, one in zip(paths, tensors, strict=True):
            if not one.is_floating_point():
                raise ConfigurationError(
                    f"stage {index} of a pipeline would send a tensor of {one.dtype} and shape "
                    f"{tuple(one.shape)}, which is {path} of the call of {block}, and through which no "
                    "gradient comes back. Compute it from the model's arguments, which every stage has, or "
                    "begin the next stage with another block."
                )
        if schedule.splits_backward and len(tensors) > 1:
            # torch leaves out parameters whose gradients don't meet those of what was received.
            raise ConfigurationError(
                f"schedule={schedule.name!r} computes gradients of inputs and of weights apart, which torch "
                f"can't do where a stage sends several tensors: {', '.join(paths)} of the call of {block}. "
                'Use "1f1b", "interleaved1f1b", "loopedbfs" or "gpipe".'
            )
    return sent


class BatchSchedule:
    """A schedule of torch's for batches of one shape, which runs the stages of this rank.

    After an error of one of them the stages of this rank send zeros, so that the schedule ends on all ranks,
    which then can tell each other.
    """

    def __init__(
        self,
        plan: SchedulePlan,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        boundaries: Sequence[tuple[torch.Tensor, ...]],
        parameters: Callable[[int], Sequence[nn.Parameter]],
        *,
        is_trained: bool,
        stops: bool,
    ) -> None:
        """Make the schedule.

        Args:
            plan: As the batch allows it.
            rank: This one's along "pp".
            group: The ranks along "pp".
            device: Of the tensors that are sent.
            boundaries: What each stage but the last one sends of a microbatch, on the meta device.
            parameters: Those of a stage, by its index.
            is_trained: Run backward passes too.
            stops: Whether an error ends the schedule on this rank at once.
        """
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        self._device = device
        self._sent = (*boundaries, (torch.empty((), device="meta"),))
        self._count = plan.num_microbatches
        self._is_trained = is_trained
        self._stops = stops
        self._compute: Callable[[int, tuple[torch.Tensor, ...], int], Any] | None = None
        self._error: Exception | None = None
        self._stages: list[Any] = []
        for index in plan.stages_of(rank):
            stage: Any = PipelineStage(
                _StageModule(index, parameters, self._forward),
                index,
                plan.num_stages,
                device,
                # Given: torch would find them out in a forward and a backward pass of nothing.
                input_args=_like(boundaries[index - 1], "meta") if index else (),
                output_args=_like(self._sent[index], "meta"),
                group=group,
            )
            stage.backward_maybe_with_nosync = partial(self._backward, stage.backward_maybe_with_nosync)
            self._stages.append(stage)
        is_multiple = plan.stages_per_rank > 1 or plan.name not in ("gpipe", "1f1b")
        self._schedule: Any = cast("Any", get_schedule_class(plan.name))(
            self._stages if is_multiple else self._stages[0],
            plan.num_microbatches,
            loss_fn=_as_it_is if is_trained else None,
            scale_grads=False,
        )
        if plan.is_v_shaped and not is_trained:
            _leave_out_backward(self._schedule, plan)

    def run(
        self,
        compute: Callable[
            [int, tuple[torch.Tensor, ...], int], tuple[torch.Tensor, ...] | torch.Tensor | None
        ],
    ) -> Exception | None:
        """Run a batch. Returns the first exception of this rank's stages; None where there was none.

        Args:
            compute: ``compute(stage, received, index)`` returns what the stage sends of a microbatch, or on
                the last one what is differentiated; None where nothing is. The first stage receives nothing.

        Raises:
            Exception: That of a stage, where it ends the schedule; or torch's own.
        """
        self._compute, self._error = compute, None
        numbers = torch.arange(self._count)
        try:
            if self._is_trained:
                self._schedule.step(index=numbers, target=numbers, return_outputs=False)
            else:
                self._schedule.eval(index=numbers, return_outputs=False)
            return self._error
        except RuntimeError as error:
            if self._error is None:
                raise
            raise self._error from error.__cause__ if error.__cause__ is not self._error else None
        finally:
            self._compute = self._error = None
            for stage in self._stages:
                stage.clear_runtime_states()  # else it keeps activations until the next batch

    def _attempt(self, action: Callable[..., Any], *args: Any) -> Any:
        """Return what ``action`` does; None after an error."""
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
        return _like(self._sent[stage], self._device) if result is None else result

    def _backward(
        self, backward: Callable[..., Any], kind: str, values: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run torch's backward pass of a stage, which after an error computes zeros."""

        def compute() -> Any:
            try:
                return backward(kind, values, last_backward=last_backward)
            except RuntimeError as error:
                raise error.__cause__ or error  # noqa: B904 -- torch puts its own around every one

        computed = self._attempt(compute)
        if computed is not None:
            return computed
        return tuple(map(torch.zeros_like, values.get("input_values", ()))), []


def _leave_out_backward(schedule: Any, plan: SchedulePlan) -> None:
    """Let a schedule run forward passes alone: torch can't leave the backward passes out of a V."""
    from torch.distributed.pipelining import schedules

    torchs = cast("Any", schedules)
    forward = torchs._ComputationType.FORWARD
    passes = {
        rank: [
            torchs._Action(stage, forward, index)
            for stage in plan.stages_of(rank)
            for index in range(plan.num_microbatches)
        ]
        for rank in range(plan.num_ranks)
    }
    schedule.pipeline_order_with_comms = torchs._add_send_recv(passes, plan.rank_of, plan.num_stages)


def _as_it_is(value: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return what the last stage has computed, which is the loss."""
    del number
    return value


_HEADER = struct.Struct("<q16s")  # rows of the batch, and a digest of all else of its shape
_SMALL_BYTES = 4096  # of a tensor on the CPU that travels in the agreement
_NUM_KEPT = 4  # shapes of batches whose schedules, with their buffers, are kept


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
    """What was found out about batches of one shape: outlines of all stages, and how they are run."""

    outlines: list[Outline]
    schedule: BatchSchedule


class PipelineEngine:
    """Runs batches through the stages of a model.

    What fails on one rank is an error on all, and the next batch runs.
    """

    def __init__(
        self,
        ctx: Context,
        model: nn.Module,
        plan: PipelinePlan,
        schedule: SchedulePlan,
        along: Context,
        group: dist.ProcessGroup,
        lines: Sequence[Sequence[int]],
        *,
        around: Callable[..., Any] | None = None,
        waits_inside: bool = False,
    ) -> None:
        """Run the stages of ``model`` in ``schedule``.

        Args:
            ctx: The world, all of whose ranks run each batch.
            model: With the stages of this rank alone.
            plan: That it was cut by.
            schedule: Of a batch that can be cut as was asked for.
            along: The context of the ranks that have the stages of one batch, numbered as they are in it.
            group: Torch's, of the same ranks.
            lines: All such lists of ranks in the world.
            around: Calls the model, as :class:`StageCall` has it.
            waits_inside: Whether ranks wait for others inside of a stage, so that one whose stage has failed
                must not go on.
        """
        self._ctx = ctx
        self._model = weakref.ref(model)
        self._plan = plan
        self._schedule = schedule
        self._lines = lines
        self._line = next(one for one in lines if ctx.rank in one)
        self._along = along
        self.rank: int = along.rank
        self.group: dist.ProcessGroup = group
        self._waits_inside = waits_inside
        self._call = StageCall(model, around)
        # By rank and shape, the latest at the end: the same on all ranks, each of which has its own measured.
        self._known: dict[tuple[int, _Shape], _Measured | None] = {}

    def outlines_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Outline] | None:
        """Return what stages exchange for a microbatch; None where none of its shapes has been run lately."""
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
        """Run a batch. Returns what its microbatches give together, without gradients.

        Ranks: every rank of the context. After an error the others go on to the end of the batch, where all
        are told.

        Args:
            operation: What errors call it.
            batch: A tree. Tensors in it have a row for each sample, or are 0-d. Where nothing is trained,
                tensors with another number of rows than the first, and all else, belong to each microbatch.
            compute: Calls the model with a microbatch.
            join: Puts together what microbatches give.
            to_differentiate: Gives what is differentiated of one of so many microbatches, which are as many
                as divide the rows. None: nothing is, and the last row is repeated until they are divided.
            num_batches: How many batches of the usual size this one is as large as.
            everywhere: Return the result on all ranks, and not on that of the last stage only.

        Raises:
            ValueError: The batch can't be cut along its rows.
            ConfigurationError: Ranks of a line have different batches, or the model can't run in stages.
            Exception: What a stage of this rank has raised, or ``join``.
            RemoteRankError: That of another rank.
        """
        is_trained = to_differentiate is not None
        told = self._agree_on(operation, batch, is_trained=is_trained)
        schedule = self._fit([rows for rows, _ in told], num_batches, is_trained=is_trained)
        count = schedule.num_microbatches
        shapes = [_Shape(schedule, _divided(rows, count), digest, is_trained) for rows, digest in told]
        rows, size = told[self._ctx.rank][0], shapes[self._ctx.rank].rows
        pieces = [_take(batch, rows, index * size, size) for index in range(count)]
        measured = self._measured(operation, shapes, lambda: compute(pieces[0]))
        parts: dict[int, L] = {}

        def compute_stage(stage: int, received: tuple[torch.Tensor, ...], index: int) -> Any:
            run = StageRun(self._plan, stage, measured.outlines, received, self._ctx.device)
            result = self._call.run(run, lambda: compute(pieces[index]))
            if run.sent is not None:
                return result
            parts[index] = map_tensors(torch.Tensor.detach, result)
            return None if to_differentiate is None else to_differentiate(result, count)

        try:
            with naming_lost_ranks(self._ctx):
                error = measured.schedule.run(compute_stage)
        except BaseException:
            self._known.clear()  # schedules that have stopped in the middle
            raise
        return self._finish(operation, parts, join, error, everywhere=everywhere)

    def _agree_on(self, operation: str, batch: Any, *, is_trained: bool) -> list[tuple[int, bytes]]:
        """Return rows and digest of the batch of each rank."""
        header, error = catch(lambda: _HEADER.pack(*self._form_of(operation, batch, is_trained=is_trained)))
        found = gather_bytes(self._ctx, Call(operation, "of a pipeline"), header or b"", error)
        told: list[tuple[int, bytes]] = [_HEADER.unpack(one) for one in found]
        for line in self._lines:
            for rank in line:
                if told[rank] != told[line[0]]:
                    raise ConfigurationError(
                        f"{operation}: ranks {line[0]} and {rank} have stages of one model, and different "
                        f"batches: {told[line[0]][0]} and {told[rank][0]} rows, or other shapes. Ranks along "
                        'pp read the same batches: those of ctx.coordinate("dp").'
                    )
        return told

    def _form_of(self, operation: str, batch: Any, *, is_trained: bool) -> tuple[int, bytes]:
        """Return the number of rows of a batch, and a digest of all else of its shape."""
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
        """Return the schedule of batches of so many rows, by rank: with as many microbatches on each."""
        most = self._schedule.num_microbatches * num_batches
        schedule = self._schedule._replace(num_microbatches=most)
        if is_trained:
            return schedule.fit(math.gcd(*rows))
        return schedule.fit(max(_divided(one, _divided(one, most)) for one in rows))

    def _measured(self, operation: str, shapes: Sequence[_Shape], compute: Callable[[], Any]) -> _Measured:
        """Return what is known of batches of the shape of this rank's; forgets shapes of long ago.

        What is new on any rank is measured on all of them together: stages wait for their replicas.
        """
        latest = [*enumerate(shapes)]
        own = self._ctx.rank, shapes[self._ctx.rank]
        measured = self._known.get(own)
        if measured is None or any(one not in self._known for one in latest):
            measured = self._measure(operation, own[1], compute)
        for one in latest:
            self._known.pop(one, None)
            self._known[one] = measured if one == own else None
        while len(self._known) > _NUM_KEPT * len(shapes):
            del self._known[next(iter(self._known))]
        return measured

    def _measure(self, operation: str, shape: _Shape, compute: Callable[[], Any]) -> _Measured:
        """Find out what stages exchange for batches of one shape, and make their schedule.

        One microbatch is run for it, stage by stage, without gradients. What is drawn and what is counted in
        buffers meanwhile is taken back.
        """
        device = self._ctx.device
        outlines: list[Outline] = []
        for stage in range(self._schedule.num_stages):
            owner = self._schedule.rank_of(stage)

            def measure(stage: int = stage) -> bytes:
                run = StageRun(self._plan, stage, outlines, (), device)
                with torch.no_grad(), self._as_before():
                    self._call.run(run, compute)
                return pickle.dumps(run.outline)

            blob, error = catch(measure) if owner == self.rank else (b"", None)
            call = Call(operation, f"first microbatch of its shape, stage {stage}", takes_long=True)
            outlines.append(
                pickle.loads(gather_bytes(self._ctx, call, blob or b"", error)[self._line[owner]])
            )
        schedule = BatchSchedule(
            shape.schedule,
            self.rank,
            self.group,
            device,
            sent_of(outlines, self._plan, shape.schedule, is_trained=shape.is_trained),
            self._parameters_of,
            is_trained=shape.is_trained,
            stops=self._waits_inside,
        )
        return _Measured(outlines, schedule)

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

    def _finish(
        self,
        operation: str,
        parts: Mapping[int, L],
        join: Callable[[Sequence[L]], L],
        error: Exception | None,
        *,
        everywhere: bool,
    ) -> L | None:
        """Join the results of microbatches, which the ranks of the last stage have, and send them to others.

        One agreement for all ranks, before gradients are reduced; what is small travels in it.
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
        leaves, structure = flatten(pickle.loads(blobs[self._line[source]]))
        own = flatten(result)[0] if parts else leaves
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                one = own[index] if parts else torch.empty_like(leaf, device=self._ctx.device)
                self._along.collectives.broadcast(flatten_tensor(one).view(torch.uint8), source)
                leaves[index] = one
        return structure.unflatten(leaves)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, everywhere: bool = True) -> Any:
        """Return the output of the model, without gradients.

        Ranks: every rank of the context.

        Args:
            args: Of the model's call.
            kwargs: Of the model's call.
            everywhere: Return it on all ranks, and not on that of the last stage only, where others get None.

        Raises:
            ValueError: The arguments, or the output, can't be cut along their rows.
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
                        f"forward: {structure.paths('output')[index]} has the shape {tuple(leaf.shape)}, "
                        f"for a microbatch of {size} rows, and a pipeline joins microbatches along their "
                        "rows. Let the model return tensors with a row for each sample: without labels, for "
                        "example."
                    )
            return output

        def join(found: Sequence[Any]) -> Any:
            return slice_tensors(concatenate(found), slice(find_batch_size(batch)))

        batch = (args, dict(kwargs))
        with torch.no_grad():
            return self.run("forward", batch, call, join, everywhere=everywhere)


def _announced(one: torch.Tensor) -> torch.Tensor:
    """Return what the agreement carries of a tensor: itself where it is small, or its shape and dtype."""
    return (
        one
        if one.device.type == "cpu" and one.nbytes <= _SMALL_BYTES
        else torch.empty_like(one, device="meta")
    )


def _divided(rows: int, parts: int) -> int:
    """Return the rows of each of ``parts``, rounded up."""
    return -(-rows // parts)


def _take(batch: Any, rows: int, start: int, size: int) -> Any:
    """Return ``size`` rows of a batch of ``rows``, whose last one is repeated behind its end."""

    def take(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.shape[:1] != (rows,):
            return leaf
        if start + size <= rows:
            return leaf[start : start + size]
        return leaf[torch.arange(start, start + size, device=leaf.device).clamp_(max=rows - 1)]

    return map_tensors(take, batch)


class PipelineHandle(Handle):
    """Of a model of which each rank along "pp" has some stages; in one stage another handle reduces.

    Gradients of a parameter that several stages hold are added up where a window closes.
    """

    engine: ClassVar[Literal["none", "ddp", "shard", "pipeline"]] = "pipeline"
    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True
    cuts_batches: ClassVar[bool] = True

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
        self._inner = inner
        self._is_open = False  # whether gradients of shared parameters are those of this rank's stages alone
        mesh = cast("Any", ctx.mesh)
        self._engine = PipelineEngine(
            ctx,
            model,
            plan,
            schedule,
            ctx.along("pp"),
            mesh.device_mesh("pp").get_group(),
            sorted({mesh.plan.group(rank, "pp") for rank in range(ctx.num_processes)}),
            around=inner.compute if isinstance(inner, ShardHandle) else None,
            waits_inside=mesh.plan.size("dp_shard", "cp", "sp") > 1,
        )
        whole = whole_of(model)
        first: Mapping[str, str] = {} if whole is None else whole.first
        parameters = {first.get(name, name): one for name, one in named(model).items()}
        self._shared: list[tuple[weakref.ref[nn.Parameter], tuple[int, ...]]] = []
        for name, stages in plan.shared.items():
            ranks = tuple(sorted({schedule.rank_of(stage) for stage in stages}))
            own = parameters.get(name)
            if len(ranks) > 1 and own is not None and own.requires_grad:
                self._shared.append((weakref.ref(cast("nn.Parameter", own)), ranks))
                count_stages(own, len(ranks))
        super().__init__(model, model.parameters(), instead_of=inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineHandle:
        """Refuse: what a copy holds would be trained by nobody."""
        raise ConfigurationError(
            "a prepared model that is cut into stages can't be copied. Copy it before it is prepared, and "
            "prepare the copy with evaluation_mode=True, or save it and load the weights."
        )

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        return IN_NO_SYNC if self._is_open else self._inner.why_unreduced()

    def discard(self) -> None:
        """Release gradients that have added up and were not averaged yet."""
        self._inner.discard()
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

    def _shared_now(self) -> Generator[tuple[nn.Parameter, tuple[int, ...]], None, None]:
        for reference, ranks in self._shared:
            parameter = reference()
            if parameter is not None:
                yield parameter, ranks

    def _open(self) -> None:
        """Leave the sum that a shared parameter has on the first rank that holds it, to be counted once."""
        if self._is_open:
            return
        self._is_open = True
        for parameter, ranks in self._shared_now():
            if self._engine.rank != ranks[0]:
                parameter.grad = None

    def _close(self) -> None:
        """Reduce the gradients of the stages, and add up those of parameters that several stages hold."""
        self._inner.reduce()
        for parameter, ranks in self._shared_now():
            _add_up(parameter, ranks, self._engine.rank, self._engine.group)
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
