"""Batches through a model that is cut into stages: what ranks agree on before and after each."""

from __future__ import annotations

import hashlib
import math
import pickle
import struct
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import nn

from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.pipeline import PipelineProgram, StageCall, make_schedule, sent_of
from accelfn.parallel.pointers import named
from accelfn.parallel.schedule import SchedulePlan
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.parallel.stage_run import Outline
from accelfn.tree import (
    concatenate,
    count_rows,
    find_batch_size,
    flatten,
    flatten_tensor,
    map_tensors,
    send_to_device,
    slice_tensors,
)

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ("Line", "PipelineEngine", "Prepared")

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
