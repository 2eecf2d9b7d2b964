"""MicroBatch: the position and size of one batch, as a value that accompanies it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch

from accelfn.comm import Call, check, failing_together, gather_bytes
from accelfn.config import GuardMode
from accelfn.context import Context, takes_context
from accelfn.data.loader import PreparedDataLoader, passes_of
from accelfn.data.passes import Position
from accelfn.data.plan import BatchInfo
from accelfn.data.reader import EVEN_BATCHES, EpochPass, length_of, rows_of
from accelfn.data.sequence import sequence_sharder
from accelfn.errors import ConfigurationError, Disagreement, UnevenDataError

__all__ = (
    "Draws",
    "MicroBatch",
    "Uneven",
    "check_micro",
    "microbatches",
    "plan_microbatch",
)

T = TypeVar("T")
Uneven = Literal["error", "stop_first", "pad", "join"]


# A batch, its BatchInfo, its place in its window, the window's size, and whether it is the last batch.
_Step: TypeAlias = "tuple[T, BatchInfo, int, int, bool | None]"


class Draws:
    """Names the random numbers of one batch: the same on any rank, and after a resumption.

    Attributes:
        name: Position of the batch in the data, as text.
        blocks: Number of code blocks that have drawn for the batch so far; each draws different numbers.
    """

    __slots__ = ("blocks", "name")

    def __init__(self, name: str) -> None:
        """Start with no block."""
        self.name: str = name
        self.blocks: int = 0

    def __repr__(self) -> str:
        """Show the name."""
        return f"Draws({self.name!r})"


class MicroBatch(NamedTuple):
    """The position of one batch in its epoch and in its accumulation window, and its numbers of rows.

    Padding always comes last: the valid rows are the first ones, in rank order over all ranks.

    Attributes:
        index: Number of the batch in its pass, from 0, even if the pass resumed within an epoch.
        epoch: Number of the epoch, from 0.
        place: Index in the window, from 0.
        window: Size of the window, which may be smaller at the end of the data.
        sync: This batch closes its window: gradients are averaged over ranks, and the optimizer steps.
        is_last: No batch follows in this epoch; None if that is unknown, because the data has no length.
        num_rows: Samples in this rank's batch, padding included. Without a plan (a loader that wasn't
            prepared, or was already sharded), the batch's first dimension; None if it has none.
        max_rows: Samples in the largest batch of all ranks in this step; None if unknown.
        num_valid: Rows over all ranks that aren't padding; None if unknown.
        valid_by_rank: The same by rank, if the ranks' batches have different lengths.
        own_valid: Rows of this rank that aren't padding; None for all.
        consumed: Samples of the epoch that all ranks have read after this batch, including those before a
            resumption; None if unknown.
        pass_rows: Rows of this rank's batches in this pass up to this one, padding included; None if
            ``num_rows`` is None for one of them.
        pass_valid: How many of those aren't padding.
        pass_is_full: In each step of the pass up to this one, all ranks had equally many rows, without
            padding. The same on all ranks; False if unknown.
        draws: In exact mode, names the random numbers of the batch.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride] -- of tuples; nobody looks a value up here
    epoch: int
    place: int
    window: int
    sync: bool
    is_last: bool | None
    num_rows: int | None = None
    max_rows: int | None = None
    num_valid: int | None = None
    valid_by_rank: tuple[int, ...] | None = None
    own_valid: int | None = None
    consumed: int | None = None
    pass_rows: int | None = None
    pass_valid: int | None = None
    pass_is_full: bool = False
    draws: Draws | None = None

    @property
    def closes_window(self) -> bool:
        """Whether the window ends with this batch: ``sync``, by what it says of the loop."""
        return self.sync


def plan_microbatch(
    index: int, epoch: int, num_batches: int, num_steps: int, sync_with_dataloader: bool = True
) -> MicroBatch:
    """Return the position of batch ``index`` of ``num_batches`` in windows of ``num_steps``. Pure.

    Args:
        index: Of the batch, from 0.
        epoch: Of the pass, from 0.
        num_batches: Batches in this epoch.
        num_steps: Batches in a full window.
        sync_with_dataloader: The end of the data closes the window; otherwise windows continue in the next
            epoch.

    >>> [(m.place, m.window, m.sync) for m in (plan_microbatch(i, 0, 3, 2) for i in range(3))]
    [(0, 2, False), (1, 2, True), (0, 1, True)]
    """
    place, window = _window_position(index, epoch, num_batches, num_steps, sync_with_dataloader)
    return MicroBatch(index, epoch, place, window, place == window - 1, index == num_batches - 1)


def _window_position(
    index: int, epoch: int, num_batches: int, num_steps: int, sync_with_dataloader: bool
) -> tuple[int, int]:
    """Return a batch's index in its window, and the window's size."""
    if sync_with_dataloader:
        place = index % num_steps
        return place, min(num_steps, num_batches - (index - place))
    return (epoch * num_batches + index) % num_steps, num_steps


def check_micro(function: str, micro: object, *, is_needed: bool = False) -> None:
    """Check that ``micro`` is a MicroBatch, or None unless it ``is_needed``.

    Raises:
        TypeError: It is something else.
    """
    if (is_needed or micro is not None) and not isinstance(micro, MicroBatch):
        raise TypeError(
            f"{function}: micro must be a MicroBatch, got {type(micro).__name__}. Pass the one that "
            "microbatches yields with each batch."
        )


@takes_context
def microbatches(
    ctx: Context, loader: Iterable[T], uneven: Uneven = "error"
) -> Iterator[tuple[T, MicroBatch]]:
    """Yield each batch of one pass over ``loader`` together with its :class:`MicroBatch`.

    A batch is yielded as soon as it exists. Only if the data has no length and a window has several batches,
    the window is read first, since its first batch must know its size.

    Ranks along ``"seq"`` read one batch, and get their shards of its sequences: :func:`shard_sequence`, with
    the dimensions of ``DataLoaderConfiguration(sequence={...})``. A prepared loader shards sequences in any
    loop.

    Ranks: every rank of ``ctx``. If the ranks' data have lengths, they are compared when a pass begins;
    otherwise, unless all ranks read one stream, the ranks compare their numbers of batches before each
    window. Each pass ends with an exchange. With the guard off and ``uneven="error"``, nothing is compared.

    Args:
        ctx: Its accumulation configures the windows.
        loader: From :func:`accelfn.prepare_data_loader`, or any iterable of trees.
        uneven: What to do if ranks have different numbers of batches. ``"error"``: raise UnevenDataError.
            ``"stop_first"``: stop when the first rank has no more. ``"pad"``: continue as long as a rank has
            a batch; the other ranks repeat their latest batch as padding. ``"join"``, inside
            :func:`accelfn.join_uneven_inputs`: each rank reads its own number without comparing, and the
            windows of all ranks close whenever a rank ends.

    Raises:
        UnevenDataError: The ranks have different numbers of batches, and ``uneven`` is ``"error"``; the same
            error on every rank, and before the first batch if the data has lengths.
        ConfigurationError: Windows would continue in the next epoch, and the data has no length; or with
            ``"join"``, the data has no length.
        ValueError: With ``"pad"``, a rank has no batch to repeat; on every rank. Or a sequence can't be
            divided among the ranks along ``"seq"``. Or the data has another number of batches than its
            length.

    >>> import torch
    >>> loader = [torch.zeros(2), torch.zeros(2), torch.zeros(1)]
    >>> ctx = Context().replace(gradient_accumulation_steps=2)
    >>> [(len(batch), micro.window, micro.sync) for batch, micro in microbatches(ctx, loader)]
    [(2, 2, False), (2, 2, True), (1, 1, True)]
    """
    if uneven not in ("error", "stop_first", "pad", "join"):
        raise ValueError(
            f'microbatches: uneven must be "error", "stop_first", "pad" or "join", got {uneven!r}.'
        )
    return _microbatches(ctx, loader, uneven)


def _microbatches(ctx: Context, loader: Iterable[T], uneven: Uneven) -> Iterator[tuple[T, MicroBatch]]:
    world_ctx, ctx = ctx, ctx.along("dp")  # ranks that share a batch have the same number of batches
    passes = passes_of(loader) if isinstance(loader, PreparedDataLoader) else None
    if passes is None:
        begun, source = _begin_unprepared(ctx, loader, uneven)
        position, epoch = Position(), 0
    else:
        begun = passes.begin()
        position, epoch = passes.position, passes.epoch  # read after begin(), which may start the next epoch
        source = f"epoch {epoch}"
    before = position.latest.consumed
    windows = ctx.accumulation
    if uneven == "join" and windows.num_steps > 1 and not (begun.counts and windows.sync_with_dataloader):
        raise ConfigurationError(
            'microbatches: uneven="join" closes windows when a rank ends, so windows of several batches need '
            f"data with a length, and sync_with_dataloader=True: got windows of {windows.num_steps} batches. "
            'Use windows of 1 batch, or uneven="pad".'
        )
    whole = passes.reader.count() if passes is not None and before else None
    steps = (
        _with_known_counts(ctx, begun, begun.counts, epoch, uneven, whole)
        if begun.counts
        else _by_window(ctx, begun, uneven)
    )
    size = ctx.num_processes
    shard = sequence_sharder(world_ctx) if passes is None else None  # a prepared loader shards by itself
    # As MicroBatch(...), at a third of its cost, since it is called for every batch.
    make = cast("Callable[..., MicroBatch]", cast("Any", tuple).__new__)
    rows: int | None = 0
    valid: int | None = 0
    is_full = uneven != "join"  # where a planned step isn't necessarily one that all ranks carry out
    reading = nullcontext() if passes is None else passes.reading()
    with reading, world_ctx.collectives.call_log.open_pass() as now:
        index = 0
        for batch, info, place, window, is_last in steps:
            own, most, by_all, by_rank, own_valid, _, consumed, _ = info
            if rows is None or valid is None or own is None:
                rows = valid = None
            else:
                rows += own
                valid += own if own_valid is None else own_valid
            is_full = is_full and by_all is not None and most is not None and by_all == most * size
            position.latest = info
            draws = None
            if ctx.reduction is not None:
                draws = _name_draws(ctx, source, index, info, before, begun.is_rank_local)
                before = info.consumed
            known = (index, epoch, place, window, place == window - 1, is_last)
            of_step = (own, most, by_all, by_rank, own_valid, consumed or None)
            index += 1
            now.batches = index
            if shard is not None:
                batch = shard(batch)
            yield batch, make(MicroBatch, (*known, *of_step, rows, valid, is_full, draws))
        # Detects a source that yielded fewer batches than its length.
        if world_ctx.num_processes > 1 and uneven != "join":
            now.has_ended = True
            read = ""
            if passes is not None and uneven == "error" and (begun.in_step or begun.counts is not None):
                read = f" and {position.latest.consumed} samples of epoch {position.epoch}"
            check(world_ctx, Call("microbatches", f"the end after {index} batches{read}"))


def _begin_unprepared(ctx: Context, loader: Iterable[T], uneven: Uneven) -> tuple[EpochPass[T], str]:
    """Begin a pass over data that isn't prepared, and name it for the random numbers of exact mode.

    Such data has no epochs, so the name is drawn from the program's generator, as torch's DataLoader draws a
    seed for each pass. All ranks draw, so that their generators advance alike, and use rank 0's name.
    """
    name = (
        "" if ctx.reduction is None else str(int(torch.empty((), dtype=torch.int64, device="cpu").random_()))
    )
    length = length_of(loader)
    batches = ((batch, BatchInfo(num_rows=rows_of(batch))) for batch in loader)
    compares_nothing = ctx.guard.mode == GuardMode.OFF and uneven == "error" and ctx.reduction is None
    if ctx.num_processes == 1 or compares_nothing:
        return EpochPass(None if length is None else (length,), batches, in_step=True), f"pass {name}"
    messages = gather_bytes(ctx, Call("microbatches"), json.dumps([length, name]).encode())
    by_rank: list[tuple[int | None, str]] = [json.loads(message) for message in messages]
    counts = tuple(count for count, _ in by_rank if count is not None)
    return EpochPass(counts if len(counts) == len(by_rank) else None, batches), f"pass {by_rank[0][1]}"


def _with_known_counts(
    ctx: Context,
    begun: EpochPass[T],
    counts: tuple[int, ...],
    epoch: int,
    uneven: Uneven,
    whole: int | None = None,
) -> Iterator[_Step[T]]:
    """Yield the batches of a pass whose number is known on every rank.

    Of a pass that resumes within an epoch, ``whole`` is the number of batches in it: windows that continue in
    the next epoch continue in it too.

    With ``"join"`` each rank yields all its own, and all windows close whenever a rank ends: a window that
    stayed open on a rank without batches would lose its gradients, and ranks whose windows closed at
    different steps would reduce different gradients.
    """
    _check_counts(counts, begun.remedies, uneven)
    steps, ends_window = ctx.accumulation.num_steps, ctx.accumulation.sync_with_dataloader
    own = number = counts[ctx.rank if len(counts) > 1 else 0]  # one where ranks compare nothing
    batches = begun.batches
    if uneven == "pad":
        number = max(counts)
        if own < number:
            batches = _repeat_latest(batches, number, begun.info_at)
    elif uneven != "join":
        number = min(counts)
    before = 0 if whole is None or ends_window else whole - own
    ends = sorted(set(counts)) if uneven == "join" else [number]
    index, place, window, start = -1, 0, 1, 0
    for index, (batch, info) in enumerate(islice(batches, number)):
        if index == ends[0]:
            start = ends.pop(0)
        if steps > 1:
            place, window = _window_position(
                before + index - start, epoch, before + ends[0] - start, steps, ends_window
            )
        yield batch, info, place, window, index == number - 1
    with failing_together(ctx, "microbatches"):
        # Read to its end, as any other loop would: what follows would be lost, or is refused by its reader.
        # Not where a rank has left others with batches: reading may need every rank.
        has_ended = number == max(counts) or uneven == "join"
        if has_ended and next(begun.batches, None) is not None:
            raise _wrong_length(own, "yields more")
        # In other cases the exchange at the end of the pass detects that the ranks have read unequally.
        if ends_window and place < window - 1:
            raise _wrong_length(own, f"ended after {_count_batches(index + 1)}, within a window")


def _wrong_length(number: int, what: str) -> ValueError:
    return ValueError(
        f"microbatches: the loader has a length of {_count_batches(number)}, but {what}. Its __len__ must "
        "return what its __iter__ yields; omit __len__ if that is unknown."
    )


def _by_window(ctx: Context, begun: EpochPass[T], uneven: Uneven) -> Iterator[_Step[T]]:
    """Yield the batches of a pass of unknown length, one window at a time."""
    steps = ctx.accumulation.num_steps
    if steps > 1 and not ctx.accumulation.sync_with_dataloader:
        raise ConfigurationError(
            "sync_with_dataloader=False continues windows in the next epoch, but data without a length has "
            f"no known end: got windows of {steps} batches. Use sync_with_dataloader=True or data with a "
            "length."
        )
    compares_nothing = ctx.guard.mode == GuardMode.OFF and uneven == "error"
    compares = ctx.num_processes > 1 and not (begun.in_step or uneven == "join" or compares_nothing)
    batches, index = begun.batches, 0
    latest: tuple[T, BatchInfo] | None = None
    while True:
        window = list(islice(batches, steps))
        number = len(window)
        if compares:
            messages = gather_bytes(ctx, Call("microbatches", "a window"), str(number).encode())
            numbers = [int(message) for message in messages]
            _check_counts([index + count for count in numbers], begun.remedies, uneven)
            number = max(numbers) if uneven == "pad" else min(numbers)
            window = list(_repeat_latest(iter(window), number, begun.info_at, latest))[:number]
        for place, (batch, info) in enumerate(window):
            if place < number - 1:
                is_last: bool | None = False
            elif number < steps:
                is_last = True
            else:  # with padding, other ranks may continue after this rank's own end
                is_last = None if compares and uneven == "pad" else info.is_last
            yield batch, info, place, number, is_last
        index += number
        if number < steps:
            return
        latest = window[-1]


def _repeat_latest(
    batches: Iterator[tuple[T, BatchInfo]],
    number: int,
    info_at: Callable[[int], BatchInfo] | None,
    latest: tuple[T, BatchInfo] | None = None,
) -> Iterator[tuple[T, BatchInfo]]:
    """Yield ``batches``, then repeat the latest one as padding until there are ``number``."""
    num_read = 0
    for item in batches:
        latest = item
        num_read += 1
        yield item
    for index in range(num_read, number):
        if latest is None:  # the source's length was wrong, which the exchange at the end detects
            return
        batch, info = latest
        planned = info if info_at is None else info_at(index)
        yield batch, planned._replace(num_rows=info.num_rows, own_valid=0)


def _check_counts(counts: Sequence[int], remedies: Sequence[str], uneven: Uneven) -> None:
    """Raise, on every rank alike, if the policy doesn't allow these numbers of batches by rank."""
    if min(counts) == max(counts):
        return
    if uneven == "pad" and min(counts) == 0:
        raise ValueError(
            'microbatches: uneven="pad" repeats the latest batch of a rank, but a rank has no batch: the '
            f"numbers of batches by rank are {', '.join(map(str, counts))}. " + _remedies(counts, remedies)
        )
    if uneven == "error":
        expected = max(counts, key=counts.count)  # the lowest rank's among equally common counts
        rows = [
            Disagreement(rank, "", _count_batches(expected), _count_batches(count))
            for rank, count in enumerate(counts)
            if count != expected
        ]
        raise UnevenDataError("microbatches", rows, _remedies(counts, remedies), counts=counts)


def _remedies(counts: Sequence[int], remedies: Sequence[str]) -> str:
    """Return the advice for ranks with these numbers of batches."""
    if min(counts) == 0:  # with "stop_first" or drop_last, nothing would be read
        options = [option for option in remedies if option in EVEN_BATCHES]
        return f"Give each rank some data{''.join(f', or use {option}' for option in options)}."
    options = ", ".join([*remedies, 'uneven="stop_first" or "pad" (of microbatches, or accelerator.uneven).'])
    return f"Use {options}" if remedies else f"Give each rank equally many batches, or use {options}"


def _count_batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"


def _name_draws(
    ctx: Context, source: str, index: int, info: BatchInfo, before: int, is_rank_local: bool
) -> Draws:
    """Name the random numbers of a batch. Pure.

    Args:
        ctx: The ranks that read different data.
        source: The pass that the batch belongs to, such as ``"epoch 0"``.
        index: Number of the batch in its pass.
        info: The batch's BatchInfo.
        before: Samples of the epoch that had been read before it.
        is_rank_local: Each rank has its own data; their batches are numbered in turn.
    """
    rank, size, read = ctx.rank, ctx.num_processes, info.consumed - before
    if not info.consumed:  # this source doesn't count samples
        return Draws(f"batch {index * size + rank} of {source}")
    if is_rank_local:
        first = before * size + rank * read
    elif info.valid_by_rank is not None:
        first = before + sum(info.valid_by_rank[:rank])
    else:
        rows = -(-read // size) if info.max_rows is None else info.max_rows
        first = before + rank * rows
    return Draws(f"sample {first} of {source}")
