"""A batch through the stages of a pipeline: torch's schedules, and the stages that they call.

Each stage runs the user's loss function, and in it the model's own forward, on a microbatch. The schedule
passes on the number of the microbatch alone: every rank along "pp" has the batch itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from accelfn.errors import ConfigurationError
from accelfn.parallel.pipeline_plan import PipelinePlan, SchedulePlan
from accelfn.parallel.stages import Outline, outline_stage, run_stage

if TYPE_CHECKING:
    import torch.distributed as dist
import hashlib
import math
import pickle
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, NamedTuple

from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.parallel.handle import IN_NO_SYNC, BatchRun, Handle
from accelfn.parallel.norm import count_stages
from accelfn.parallel.parameters import named, whole_of
from accelfn.parallel.shard_handle import ShardHandle
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

R = TypeVar("R")


class SentError(BaseException):
    """Leaves a loss function where it has called the model, on all stages but the last one.

    No ``Exception``, since a loss function may catch those.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Carry what is sent."""
        super().__init__()
        self.tensors = tensors


class StageCall:
    """The call of a model that is cut into stages: runs the stage whose turn it is.

    It keeps nothing alive. Outside of a schedule the model's forward refuses the call by name.
    """

    def __init__(
        self, model: nn.Module, plan: PipelinePlan, around: Callable[..., Any] | None = None
    ) -> None:
        """Replace the call of ``model``.

        Args:
            model: In which :func:`accelfn.parallel.stages.apply_stages` has left some stages.
            plan: That it was cut by.
            around: Calls what it is given, as ``around(call, *args, **kwargs)``; None for nothing.
        """
        self._model = weakref.ref(model)
        self._plan = plan
        self._around = around
        self._turn: Callable[..., Any] | None = None  # runs a stage, once
        self._calls = 0
        vars(model)["_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model on the last stage.

        Raises:
            SentError: Another stage was run, with what it sends.
            ConfigurationError: The loss function has called the model before.
        """
        model: Any = self._model()
        turn, self._turn = self._turn, None
        if turn is None and self._calls == 1:
            raise ConfigurationError(
                "the loss function has called the model twice, and a pipeline runs one forward pass of each "
                "batch. Call it once, on the rows of both calls."
            )
        if turn is None:  # in run_stage, or refused by the forward
            kind = cast("Any", type(model))
            call = kind._call_impl
            return (
                call(model, *args, **kwargs)
                if self._around is None
                else self._around(call, model, *args, **kwargs)
            )
        stage, output = turn(model, args, kwargs)
        self._calls = 1
        if stage + 1 < len(self._plan.stages):
            raise SentError(output)
        return output

    def run(
        self,
        stage: int,
        outlines: Sequence[Outline],
        received: tuple[torch.Tensor, ...],
        compute: Callable[[], Any],
    ) -> Any:
        """Return what ``compute``, which calls the model, gives on the last stage; of others what they send.

        Raises:
            ConfigurationError: ``compute`` has not called the model, or more than once; or it has caught
                :class:`SentError`.
            Exception: As ``compute``.
        """

        def turn(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
            return stage, run_stage(model, self._plan, stage, outlines, received, args, kwargs)

        return self._take(stage, turn, compute)

    def outline(
        self,
        stage: int,
        before: Sequence[Outline],
        device: torch.device,
        compute: Callable[[], Any],
    ) -> tuple[Outline, Any]:
        """Return the outline of a stage, and on the last one what ``compute`` gives.

        Raises:
            ConfigurationError: As :meth:`run`.
            Exception: As ``compute``.
        """
        found: list[Outline] = []

        def turn(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
            outline, output = outline_stage(model, self._plan, stage, before, device, args, kwargs)
            found.append(outline)
            return stage, output

        result = self._take(stage, turn, compute)
        return found[0], result

    def _take(self, stage: int, turn: Callable[..., Any], compute: Callable[[], Any]) -> Any:
        self._turn, self._calls = turn, 0
        try:
            result = compute()
        except SentError as sent:
            return sent.tensors
        finally:
            called, self._calls = self._calls, 0
            self._turn = None
        if not called:
            raise ConfigurationError(
                "the loss function hasn't called the model that it was given, and a pipeline runs the model "
                "in that call. Call it once, and not a module inside of it."
            )
        if stage + 1 < len(self._plan.stages):
            raise ConfigurationError(
                "the loss function has caught what ends it after the model's call, on the stages that have "
                "no output. It isn't an Exception: write `except Exception:` instead of a bare `except:`."
            )
        return result


class PipelineProgram:
    """What the stages of a rank compute in one call of a schedule, by the number of the microbatch.

    Attributes:
        compute: ``compute(stage, received, index)`` returns what the stage sends, or on the last one what is
            differentiated; None where nothing is. The first stage receives nothing.
        stops: Whether an error ends the schedule on this rank at once. Otherwise its stages send zeros from
            then on, so that the schedule ends on all ranks, which then can tell each other.
        error: The first exception of this rank.
    """

    def __init__(
        self,
        compute: Callable[
            [int, tuple[torch.Tensor, ...], int], tuple[torch.Tensor, ...] | torch.Tensor | None
        ],
        *,
        stops: bool = False,
    ) -> None:
        """Run ``compute``."""
        self.compute = compute
        self.stops = stops
        self.error: Exception | None = None

    def attempt(self, action: Callable[[], R]) -> R | None:
        """Return what ``action`` does; None after an error.

        Raises:
            Exception: What it raised, where that ends the schedule.
        """
        if self.error is None:
            try:
                return action()
            except Exception as error:
                self.error = error
                if self.stops:
                    raise
        return None


class _StageModule(nn.Module):
    """What torch takes for a stage's module. Neither DDP's nor FSDP's: reductions are the handle's."""

    def __init__(
        self,
        index: int,
        own: Callable[[int], Sequence[nn.Parameter]],
        sent: tuple[torch.Tensor, ...],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.index = index
        self.program: PipelineProgram | None = None
        self.own = own
        self.sent = sent
        self.device = device

    def parameters(self, recurse: bool = True) -> Any:
        """Return those of the stage: a schedule with two backward passes asks for them."""
        del recurse
        return iter(self.own(self.index))

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        """Compute one microbatch."""
        program = cast("PipelineProgram", self.program)

        result = program.attempt(
            lambda: program.compute(self.index, received if self.index else (), int(index))
        )
        return _like(self.sent, self.device) if result is None else result

    def catch_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's backward pass of a stage, which after an error computes zeros."""

        def run(kind: str, values: dict[str, Any], last_backward: bool = False) -> Any:
            def compute() -> Any:
                try:
                    return backward(kind, values, last_backward=last_backward)
                except RuntimeError as error:
                    raise error.__cause__ or error  # noqa: B904 -- torch puts its own around every one

            computed = cast("PipelineProgram", self.program).attempt(compute)
            if computed is not None:
                return computed
            return tuple(map(torch.zeros_like, values.get("input_values", ()))), []

        return run


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


def make_schedule(
    plan: SchedulePlan,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
    boundaries: Sequence[tuple[torch.Tensor, ...]],
    parameters: Callable[[int], Sequence[nn.Parameter]],
    *,
    is_trained: bool,
) -> Callable[[PipelineProgram], None]:
    """Make a schedule of torch's for batches of one shape, and return what runs it.

    Ranks: every rank of ``group`` runs it, with the same plan and boundaries.

    Args:
        plan: As the batch allows it.
        rank: This one's along "pp".
        group: The ranks along "pp".
        device: Of the tensors that are sent.
        boundaries: What each stage but the last one sends of a microbatch, on the meta device.
        parameters: Those of a stage, by its index.
        is_trained: Run backward passes too.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    modules: list[_StageModule] = []
    stages: list[Any] = []
    for index in plan.stages_of(rank):
        is_last = index + 1 == plan.num_stages
        sent = (torch.empty((), device="meta"),) if is_last else boundaries[index]
        module = _StageModule(index, parameters, sent, device)
        stage: Any = PipelineStage(
            module,
            index,
            plan.num_stages,
            device,
            # Shapes that are given: torch would find them out in a forward and a backward pass of nothing.
            input_args=_like(boundaries[index - 1], "meta") if index else (),
            output_args=_like(sent, "meta"),
            group=group,
        )
        stage.backward_maybe_with_nosync = module.catch_backward(stage.backward_maybe_with_nosync)
        modules.append(module)
        stages.append(stage)
    kind = cast("Any", get_schedule_class(plan.name))
    is_multiple = plan.stages_per_rank > 1 or plan.name not in ("gpipe", "1f1b")
    schedule = kind(
        stages if is_multiple else stages[0],
        plan.num_microbatches,
        loss_fn=_as_it_is if is_trained else None,
        scale_grads=False,
    )
    if plan.is_v_shaped and not is_trained:
        _leave_out_backward(schedule, plan)
    numbers = torch.arange(plan.num_microbatches)

    def run(program: PipelineProgram) -> None:
        for module in modules:
            module.program = program
        try:
            if is_trained:
                schedule.step(index=numbers, target=numbers, return_outputs=False)
            else:
                schedule.eval(index=numbers, return_outputs=False)
        except RuntimeError as error:
            if program.error is None:
                raise
            raise program.error from error.__cause__ if error.__cause__ is not program.error else None
        finally:
            for module, stage in zip(modules, stages, strict=True):
                module.program = None
                stage.clear_runtime_states()  # else it keeps activations until the next batch

    return run


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


L = TypeVar("L")

_HEADER = struct.Struct("<q16s")  # rows of the batch, and a digest of all else of its shape
_SMALL_BYTES = 4096  # of a tensor on the CPU that travels in the agreement
_NUM_KEPT = 4  # shapes of batches whose schedules, with their buffers, are kept


class Line(NamedTuple):
    """The ranks that the stages of a model are on.

    Attributes:
        lines: All lines of the world, each a list of ranks; those of one line work on the same batch.
        along: The context of the ranks of this line, numbered as they are in it.
        group: Torch's, of the same ranks.
    """

    lines: Sequence[Sequence[int]]
    along: Context
    group: dist.ProcessGroup


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
    """What was found out about batches of one shape.

    Attributes:
        outlines: Of each stage.
        run: Runs the schedule.
    """

    outlines: list[Outline]
    run: Callable[[PipelineProgram], None]


class Prepared(NamedTuple, Generic[L]):
    """A batch that can go through the stages.

    Attributes:
        operation: What errors call it.
        compute: Calls the model with a microbatch.
        pieces: The microbatches.
        rows: Of each.
        measured: What stages exchange for each, and in which order they run.
    """

    operation: str
    compute: Callable[[Any], L]
    pieces: list[Any]
    rows: int
    measured: _Measured


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
        line: Line,
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
            line: Where the stages are.
            around: Calls the model, as :class:`StageCall` has it.
            waits_inside: Whether ranks wait for others inside of a stage, so that one whose stage has failed
                must not go on.
        """
        self._ctx = ctx
        self._model = weakref.ref(model)
        self._plan = plan
        self._schedule = schedule
        self._lines = line.lines
        self._line = next(one for one in line.lines if ctx.rank in one)
        self._along = line.along
        self.rank: int = line.along.rank
        self.group: dist.ProcessGroup = line.group
        self._waits_inside = waits_inside
        self._call = StageCall(model, plan, around)
        self._known: dict[tuple[int, _Shape], None] = {}  # of all ranks; the latest at the end
        self._measured: dict[_Shape, _Measured] = {}

    def prepare(
        self,
        operation: str,
        batch: Any,
        compute: Callable[[Any], L],
        *,
        is_trained: bool,
        num_batches: int = 1,
    ) -> Prepared[L]:
        """Cut a batch into microbatches, as many on every rank, and find out what stages send of it.

        Ranks: every rank of the context.

        Args:
            operation: What errors call it.
            batch: A tree. Tensors in it have a row for each sample, or are 0-d. Where nothing is trained,
                tensors with another number of rows than the first, and all else, belong to each microbatch.
            compute: Calls the model with a microbatch.
            is_trained: Cut it into as many microbatches as divide its rows. Otherwise the last row is
                repeated until they are divided.
            num_batches: How many batches of the usual size this one is as large as.

        Raises:
            ValueError: The batch can't be cut along its rows.
            ConfigurationError: Ranks of a line have different batches, or the model can't run in stages.
            Exception: As ``compute``.
        """
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
        schedule = self._schedule._replace(num_microbatches=self._schedule.num_microbatches * num_batches)
        if is_trained:
            schedule = schedule.fit(math.gcd(*(rows for rows, _ in told)))
        else:
            most = schedule.num_microbatches
            schedule = schedule.fit(max(_divided(rows, _divided(rows, most)) for rows, _ in told))
        count = schedule.num_microbatches
        shapes = [_Shape(schedule, _divided(rows, count), digest, is_trained) for rows, digest in told]
        shape, rows = shapes[self._ctx.rank], told[self._ctx.rank][0]
        if self._is_new(shapes):  # measured on all ranks together: the stages of each wait for its replicas
            self._measured.pop(shape, None)
        pieces = [_take(batch, rows, index * shape.rows, shape.rows) for index in range(count)]
        if shape not in self._measured:
            self._measured[shape] = self._measure(operation, shape, lambda: compute(pieces[0]))
        return Prepared(operation, compute, pieces, shape.rows, self._measured[shape])

    def outlines_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Outline] | None:
        """Return what stages exchange for a microbatch; None where none of its shapes has been run lately."""
        form = self._form_of("forward", (args, dict(kwargs)), is_trained=False)
        known = {(shape.rows, shape.digest): one.outlines for shape, one in self._measured.items()}
        return known.get(form)

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

    def _is_new(self, shapes: Sequence[_Shape]) -> bool:
        """Return whether any rank has a new shape: the same on all ranks. Forgets those of long ago."""
        latest = [*enumerate(shapes)]
        is_new = any(one not in self._known for one in latest)
        for one in latest:
            self._known.pop(one, None)
            self._known[one] = None
        while len(self._known) > _NUM_KEPT * len(shapes):
            rank, shape = next(iter(self._known))
            del self._known[rank, shape]
            if rank == self._ctx.rank:
                self._measured.pop(shape, None)
        return is_new

    def _forget(self) -> None:
        self._measured.clear()
        self._known.clear()

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
                with torch.no_grad(), self._as_before():
                    return pickle.dumps(self._call.outline(stage, outlines, device, compute)[0])

            blob, error = catch(measure) if owner == self.rank else (b"", None)
            call = Call(operation, f"first microbatch of its shape, stage {stage}", takes_long=True)
            outlines.append(
                pickle.loads(gather_bytes(self._ctx, call, blob or b"", error)[self._line[owner]])
            )
        run = make_schedule(
            shape.schedule,
            self.rank,
            self.group,
            device,
            sent_of(outlines, self._plan, shape.schedule, is_trained=shape.is_trained),
            self._parameters_of,
            is_trained=shape.is_trained,
        )
        return _Measured(outlines, run)

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

    def _is_last(self, stage: int) -> bool:
        return stage + 1 == self._schedule.num_stages

    def run(
        self,
        prepared: Prepared[L],
        join: Callable[[Sequence[L]], L],
        *,
        to_differentiate: Callable[[L, int], torch.Tensor] | None = None,
        everywhere: bool = True,
    ) -> L | None:
        """Run a batch. Returns what its microbatches give together, without gradients.

        Ranks: every rank of the context. After an error the others go on to the end of the batch, where all
        are told.

        Args:
            prepared: By :meth:`prepare`.
            join: Puts together what microbatches give.
            to_differentiate: Gives what is differentiated of one of so many microbatches; None: nothing is.
            everywhere: Return the result on all ranks, and not on that of the last stage only.

        Raises:
            Exception: What a stage of this rank has raised, or ``join``.
            RemoteRankError: That of another rank.
        """
        parts: dict[int, L] = {}

        outlines = prepared.measured.outlines

        def compute(stage: int, received: tuple[torch.Tensor, ...], index: int) -> Any:
            result = self._call.run(
                stage, outlines, received, lambda: prepared.compute(prepared.pieces[index])
            )
            if not self._is_last(stage):
                return result
            parts[index] = map_tensors(torch.Tensor.detach, result)
            return None if to_differentiate is None else to_differentiate(result, len(prepared.pieces))

        program = PipelineProgram(compute, stops=self._waits_inside)
        try:
            prepared.measured.run(program)
        except BaseException as error:
            self._forget()  # schedules that have stopped in the middle
            # What torch says of a lost rank is less than is known.
            explained = (
                self._ctx.collectives.translate_error(error) if isinstance(error, RuntimeError) else error
            )
            if explained is error:
                raise
            raise explained from (explained.__cause__ or error)

        # One agreement for all ranks, before gradients are reduced; what is small travels in it.
        def finish() -> tuple[L, bytes, list[torch.Tensor]]:
            result = join([parts[index] for index in sorted(parts)])
            return self._announce(result) if everywhere else (result, b"", [])

        found, error = None, program.error
        if parts and error is None:
            found, error = catch(finish)
        call = Call(prepared.operation, "end of a batch", takes_long=True)
        blobs = gather_bytes(self._ctx, call, found[1] if found else b"", error)
        if not everywhere:
            return found[0] if found else None
        source = self._schedule.rank_of(self._schedule.num_stages - 1)
        broadcast = self._along.collectives.broadcast
        if found:
            for row in found[2]:
                broadcast(row, source)
            return found[0]

        def receive(announced: torch.Tensor) -> torch.Tensor:
            if not announced.is_meta:
                return announced
            received = torch.empty(announced.shape, dtype=announced.dtype, device=self._ctx.device)
            broadcast(flatten_tensor(received).view(torch.uint8), source)
            return received

        return map_tensors(receive, pickle.loads(blobs[self._line[source]]))

    def _announce(self, result: L) -> tuple[L, bytes, list[torch.Tensor]]:
        """Return a result, what the agreement carries of it, and the bytes of the tensors that follow."""
        result = send_to_device(result, self._ctx.device)
        rows: list[torch.Tensor] = []

        def announce(one: torch.Tensor) -> torch.Tensor:
            if one.device.type == "cpu" and one.nbytes <= _SMALL_BYTES:
                return one
            rows.append(flatten_tensor(one).view(torch.uint8))
            return torch.empty_like(one, device="meta")

        return result, pickle.dumps(map_tensors(announce, result)), rows

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, everywhere: bool = True) -> Any:
        """Return the output of the model, without gradients.

        Ranks: every rank of the context.

        Args:
            args: Of the model's call.
            kwargs: Of the model's call.
            everywhere: Return it on all ranks, and not on that of the last stage only, where others get None.

        Raises:
            ValueError: The arguments, or the output, can't be cut along their rows.
            ConfigurationError: As :meth:`prepare`.
            Exception: As :meth:`run`.
        """
        model = cast("nn.Module", self._model())

        def call(piece: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
            return model(*piece[0], **piece[1])

        def join(found: Sequence[Any]) -> Any:
            for one in found:
                leaves, structure = flatten(one)
                for index, leaf in enumerate(leaves):
                    if isinstance(leaf, torch.Tensor) and leaf.shape[:1] != (prepared.rows,):
                        raise ValueError(
                            f"forward: {structure.paths('output')[index]} has the shape {tuple(leaf.shape)}, "
                            f"for a microbatch of {prepared.rows} rows, and a pipeline joins microbatches "
                            "along their rows. Let the model return tensors with a row for each sample: "
                            "without labels, for example."
                        )
            return slice_tensors(concatenate(found), slice(rows))

        with torch.no_grad():
            batch = (args, dict(kwargs))
            prepared = self.prepare("forward", batch, call, is_trained=False)
            rows = find_batch_size(batch)
            return self.run(prepared, join, everywhere=everywhere)


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
        lines = {mesh.plan.group(rank, "pp") for rank in range(ctx.num_processes)}
        self._engine = PipelineEngine(
            ctx,
            model,
            plan,
            schedule,
            Line(sorted(lines), ctx.along("pp"), mesh.device_mesh("pp").get_group()),
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
        prepared = self._engine.prepare(
            "forward_backward",
            batch.batch,
            partial(batch.loss_fn, batch.model),
            is_trained=True,
            num_batches=batch.num_batches,
        )
        self._open()
        try:
            with self._inner.without_sync():
                loss = self._engine.run(prepared, batch.join, to_differentiate=batch.to_differentiate)
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
