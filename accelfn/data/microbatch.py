"""MicroBatch: what is to be known of one batch, as a value that travels beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch

from accelfn.comm import Call, check, gather_bytes
from accelfn.context import Context, check_context
from accelfn.context.config import GuardMode
from accelfn.data.loader import PreparedDataLoader, passes_of
from accelfn.data.passes import Passes
from accelfn.data.plan import BatchInfo
from accelfn.data.reader import EVENED, EpochPass, length_of, rows_of
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


# A batch, what is known of it, its place in its window, the window's size, and whether it is the last one.
_Step: TypeAlias = "tuple[T, BatchInfo, int, int, bool | None]"


class Draws:
    """Names the random numbers of one batch: the same name on whichever rank, and after a resumption.

    Attributes:
        name: Of the batch's place in the data.
        blocks: Blocks of code so far that have drawn for the batch; each draws other numbers.
    """

    __slots__ = ("blocks", "name")

    def __init__(self, name: str) -> None:
        """Begin with no block."""
        self.name: str = name
        self.blocks: int = 0

    def __repr__(self) -> str:
        """Show the name."""
        return f"Draws({self.name!r})"


class MicroBatch(NamedTuple):
    """Where one batch stands in its epoch and in its accumulation window.

    Attributes:
        index: Number of the batch in its pass, from 0: of one that goes on in an epoch, from where it does.
        epoch: Number of the epoch, from 0.
        place: Place in the window, from 0.
        window: Batches that the window really holds: fewer at the end of the data.
        sync: This batch closes its window: gradients are averaged over ranks, and the optimizer steps.
        is_last: No batch follows in this epoch; None where the data has no length and only asking for the
            next batch could say.
        num_rows: Samples in this rank's batch, padding included; of a loader that wasn't prepared, or was
            sharded already, the batch's first dimension; None when it has none.
        max_rows: Samples in the batch of the rank that has most; None when the loader doesn't say.
        num_valid: Rows over all ranks that are no padding; None when the loader doesn't say. The first ones
            in rank order, unless ``valid_by_rank`` says otherwise.
        valid_by_rank: Rows of each rank that are no padding, where their batches have different lengths; each
            rank's first ones.
        own_valid: Rows of this rank that are no padding: its first ones; None for all.
        consumed: Samples of the epoch that all ranks have read when this batch is done, those before a
            resumption too; None when the loader doesn't say.
        pass_rows: Rows of this rank's batches in this pass, up to and including this one, padding included;
            None when ``num_rows`` is for one of them.
        pass_valid: How many of those are no padding: the first ones, since padding comes last.
        pass_is_full: Up to and including this batch, all ranks have had equally many rows in each step, and
            none was padding. All ranks know the same of it; False when the loader doesn't say.
        draws: In exact mode, what names the batch's random numbers.
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


def plan_microbatch(
    index: int, epoch: int, num_batches: int, num_steps: int, sync_with_dataloader: bool = True
) -> MicroBatch:
    """Return where batch ``index`` of ``num_batches`` stands, when ``num_steps`` make a window. Pure.

    Args:
        index: Of the batch, from 0.
        epoch: Of the pass, from 0.
        num_batches: In this epoch.
        num_steps: Batches in a full window.
        sync_with_dataloader: The end of the data closes the window; otherwise windows go on into the next
            epoch.

    >>> [(m.place, m.window, m.sync) for m in (plan_microbatch(i, 0, 3, 2) for i in range(3))]
    [(0, 2, False), (1, 2, True), (0, 1, True)]
    """
    place, window = _place_of(index, epoch, num_batches, num_steps, sync_with_dataloader)
    return MicroBatch(index, epoch, place, window, place == window - 1, index == num_batches - 1)


def _place_of(
    index: int, epoch: int, num_batches: int, num_steps: int, sync_with_dataloader: bool
) -> tuple[int, int]:
    """Return a batch's place in its window, and the window's size."""
    if sync_with_dataloader:
        place = index % num_steps
        return place, min(num_steps, num_batches - (index - place))
    return (epoch * num_batches + index) % num_steps, num_steps


def check_micro(function: str, given: object, *, is_needed: bool = False) -> None:
    """Refuse what was passed instead of the micro-batch; None is let through, unless it ``is_needed``.

    Raises:
        TypeError: ``given`` is neither.
    """
    if (is_needed or given is not None) and not isinstance(given, MicroBatch):
        raise TypeError(
            f"{function}: micro must be a MicroBatch, got {type(given).__name__}. Pass what microbatches "
            "yields beside each batch."
        )


def microbatches(
    ctx: Context, loader: Iterable[T], uneven: Uneven = "error"
) -> Iterator[tuple[T, MicroBatch]]:
    """Yield each batch of one pass over ``loader`` together with its :class:`MicroBatch`.

    A batch is yielded when it exists. Only where it is unknown how many there are (the data has no length)
    and several make a window, the window is read first, since its first batch has to know its size.

    Ranks along ``"seq"`` read one batch, and get their shards of its sequences: :func:`shard_sequence`, with
    the dimensions that ``DataLoaderConfiguration(sequence={...})`` of the context names. A prepared loader
    shards what it yields in any loop.

    Ranks: every rank of ``ctx``. Ranks whose data have lengths compare them when a pass begins; without
    lengths, and unless all read one stream, they compare what they have before each window. Each pass ends
    with an exchange. With the guard off and ``uneven="error"``, nothing is compared.

    Args:
        ctx: Says how many batches make a window.
        loader: From :func:`accelfn.prepare_data_loader`, or any iterable of trees.
        uneven: What to do when ranks have different numbers of batches: ``"error"``; ``"stop_first"`` when
            the rank with the fewest has no more; or ``"pad"``: go on as long as a rank has one, the others
            get their latest batch again, with ``num_valid`` and ``valid_rows`` that leave it out. Inside of
            :func:`accelfn.join_uneven_inputs`, ``"join"``: each rank goes through its own, nothing is
            compared, and where a rank has no more the windows of all ranks close and begin anew.

    Raises:
        ConfigurationError: With ``"join"``, the data has no length, or windows go on into the next epoch.
        UnevenDataError: The ranks have different numbers of batches, and ``uneven`` is ``"error"``; the same
            error on every rank. Before the first batch, where the data's lengths tell.
        ConfigurationError: Windows are to go on into the next epoch, and the data has no length.
        ValueError: With ``"pad"``, a rank has no batch at all that it could repeat; on every rank. Or a
            sequence can't be cut as ranks along ``"seq"`` need it.

    >>> import torch
    >>> loader = [torch.zeros(2), torch.zeros(2), torch.zeros(1)]
    >>> ctx = Context().replace(gradient_accumulation_steps=2)
    >>> [(len(batch), micro.window, micro.sync) for batch, micro in microbatches(ctx, loader)]
    [(2, 2, False), (2, 2, True), (1, 1, True)]
    """
    check_context("microbatches", ctx)
    if uneven not in ("error", "stop_first", "pad", "join"):
        raise ValueError(
            f'microbatches: uneven must be "error", "stop_first", "pad" or "join", got {uneven!r}.'
        )
    return _microbatches(ctx, loader, uneven)


def _microbatches(ctx: Context, loader: Iterable[T], uneven: Uneven) -> Iterator[tuple[T, MicroBatch]]:
    whole, ctx = ctx, ctx.along("dp")  # those who work on one batch together have the same ones
    passes = passes_of(loader) if isinstance(loader, PreparedDataLoader) else None
    if passes is None:
        begun, source = _begin_any(ctx, loader, uneven)
        epoch, before = 0, 0
    else:
        begun = passes.begin()
        epoch, before = passes.epoch, passes.consumed  # behind a pass that was left, another one begins
        source = f"epoch {epoch}"
    steps = (
        _in_step(ctx, begun, begun.counts, epoch, uneven) if begun.counts else _in_windows(ctx, begun, uneven)
    )
    size = ctx.num_processes
    shard = sequence_sharder(whole) if passes is None else None  # a prepared loader does it
    # What MicroBatch(...) calls, at a third of its cost, which each batch pays.
    make = cast("Callable[..., MicroBatch]", cast("Any", tuple).__new__)
    rows: int | None = 0
    valid: int | None = 0
    is_full = uneven != "join"  # there, what is planned for a step isn't what the ranks do together
    with whole.collectives.call_log.open_pass() as now:
        index = 0
        for batch, info, place, window, is_last in steps:
            own, most, by_all, by_rank, own_valid, _, consumed, _ = info
            if rows is None or valid is None or own is None:
                rows = valid = None
            else:
                rows += own
                valid += own if own_valid is None else own_valid
            is_full = is_full and by_all is not None and most is not None and by_all == most * size
            if passes is not None:
                passes.note(info)
            draws = None
            if ctx.reduction is not None:
                draws = _draws_of(ctx, source, index, info, before, begun.is_own)
                before = info.consumed
            known = (index, epoch, place, window, place == window - 1, is_last)
            of_step = (own, most, by_all, by_rank, own_valid, consumed or None)
            index += 1
            now.batches = index
            if shard is not None:
                batch = shard(batch)
            yield batch, make(MicroBatch, (*known, *of_step, rows, valid, is_full, draws))
        # A source that gave fewer batches than its length has promised is found out here.
        if whole.num_processes > 1 and uneven != "join":
            now.has_ended = True
            read = _read_by_all(passes, begun, uneven)
            check(whole, Call("microbatches", f"the end after {index} batches{read}"))
    if passes is not None:  # a rank that left batches over has ended its epoch like the others
        passes.finish()


def _read_by_all(passes: Passes[Any] | None, begun: EpochPass[Any], uneven: Uneven) -> str:
    """Return what the ranks have read together, where all must know the same of it."""
    if passes is None or uneven != "error" or not (begun.in_step or begun.counts is not None):
        return ""
    return f" and {passes.consumed} samples of epoch {passes.epoch}"


def _begin_any(ctx: Context, loader: Iterable[T], uneven: Uneven) -> tuple[EpochPass[T], str]:
    """Begin a pass over what was not prepared, and name it for the random numbers of exact mode.

    Such data has no epochs, so the name is drawn, as torch's DataLoader draws a seed for each pass: from the
    generator that the program seeds and saves. All ranks draw, to leave it alike, and take that of rank 0.
    """
    name = "" if ctx.reduction is None else str(int(torch.empty((), dtype=torch.int64).random_()))
    own = length_of(loader)
    batches = ((batch, BatchInfo(num_rows=rows_of(batch))) for batch in loader)
    is_unasked = ctx.guard.mode == GuardMode.OFF and uneven == "error" and ctx.reduction is None
    if ctx.num_processes == 1 or is_unasked:
        return EpochPass(None if own is None else (own,), batches, in_step=True), f"pass {name}"
    said: list[tuple[int | None, str]] = [
        json.loads(blob) for blob in gather_bytes(ctx, Call("microbatches"), json.dumps([own, name]).encode())
    ]
    counts = tuple(count for count, _ in said if count is not None)
    return EpochPass(counts if len(counts) == len(said) else None, batches), f"pass {said[0][1]}"


def _in_step(
    ctx: Context, begun: EpochPass[T], counts: tuple[int, ...], epoch: int, uneven: Uneven
) -> Iterator[_Step[T]]:
    """Go through batches whose number is known on every rank.

    With ``"join"`` each rank goes through its own, and windows close wherever a rank has no more: one that
    stayed open on a rank without batches would lose its gradients, and ranks whose windows close in different
    steps would reduce different things.
    """
    _refuse_uneven(counts, begun.evened_by, uneven)
    steps, ends_window = ctx.accumulation.num_steps, ctx.accumulation.sync_with_dataloader
    number, batches = min(counts), begun.batches
    if uneven == "join":
        number = counts[ctx.rank]
        if steps > 1 and not ends_window:
            raise _no_joined_windows(steps)
    elif uneven == "pad" and number < max(counts):
        number = max(counts)
        batches = _lengthened(batches, number, begun.info_at)
    ends = sorted(set(counts)) if uneven == "join" else [number]
    place, window, start = 0, 1, 0
    # Where the data has fewer than its length has promised, all find it out when the pass ends.
    for index, (batch, info) in enumerate(islice(batches, number)):
        if index == ends[0]:
            start = ends.pop(0)
        if steps > 1:
            place, window = _place_of(index - start, epoch, ends[0] - start, steps, ends_window)
        yield batch, info, place, window, index == number - 1


def _in_windows(ctx: Context, begun: EpochPass[T], uneven: Uneven) -> Iterator[_Step[T]]:
    """Go through batches of unknown number, a window at a time."""
    steps = ctx.accumulation.num_steps
    if steps > 1 and uneven == "join":
        raise _no_joined_windows(steps)
    if steps > 1 and not ctx.accumulation.sync_with_dataloader:
        raise ConfigurationError(
            "sync_with_dataloader=False lets windows go on into the next epoch, and in data without a length "
            f"it is unknown where one ends: got windows of {steps} batches. Use sync_with_dataloader=True "
            "or data with a length."
        )
    is_unasked = ctx.guard.mode == GuardMode.OFF and uneven == "error"
    compares = ctx.num_processes > 1 and not (begun.in_step or uneven == "join" or is_unasked)
    batches, index = begun.batches, 0
    latest: tuple[T, BatchInfo] | None = None
    while True:
        held = list(islice(batches, steps))
        number = len(held)
        if compares:
            blobs = gather_bytes(ctx, Call("microbatches", "a window"), str(number).encode())
            numbers = [int(blob) for blob in blobs]
            _refuse_uneven([index + one for one in numbers], begun.evened_by, uneven)
            number = max(numbers) if uneven == "pad" else min(numbers)
            held = list(_lengthened(iter(held), number, begun.info_at, latest))[:number]
        for place, (batch, info) in enumerate(held):
            if place < number - 1:
                is_last: bool | None = False
            elif number < steps:
                is_last = True
            else:  # the end of this rank's own data is not that of data that is made longer
                is_last = None if compares and uneven == "pad" else info.is_last
            yield batch, info, place, number, is_last
        index += number
        if number < steps:
            return
        latest = held[-1]


def _lengthened(
    batches: Iterator[tuple[T, BatchInfo]],
    number: int,
    info_at: Callable[[int], BatchInfo] | None,
    latest: tuple[T, BatchInfo] | None = None,
) -> Iterator[tuple[T, BatchInfo]]:
    """Repeat the latest batch, as padding, until there are ``number``."""
    given = 0
    for one in batches:
        latest = one
        given += 1
        yield one
    for index in range(given, number):
        if latest is None:  # a source that gave none has promised some: found out by all when the pass ends
            return
        batch, info = latest
        planned = info if info_at is None else info_at(index)
        yield batch, planned._replace(num_rows=info.num_rows, own_valid=0)


def _no_joined_windows(steps: int) -> ConfigurationError:
    return ConfigurationError(
        'microbatches: uneven="join" closes windows where a rank ends, so windows of several batches '
        f"need data with a length, and sync_with_dataloader=True. Got windows of {steps} batches. Use 1, "
        'or uneven="pad".'
    )


def _refuse_uneven(counts: Sequence[int], evened_by: Sequence[str], uneven: Uneven) -> None:
    """Refuse, on every rank alike, numbers of batches by rank that the policy has no way to deal with."""
    if min(counts) == max(counts):
        return
    if uneven == "pad" and min(counts) == 0:
        raise ValueError(
            'microbatches: uneven="pad" repeats the latest batch of a rank that has no more, and a rank has '
            f"none at all: the numbers of batches are {', '.join(map(str, counts))} by rank. "
            + _ways_out(counts, evened_by)
        )
    if uneven == "error":
        expected = max(counts, key=counts.count)  # of equally common ones that of the lowest rank
        rows = [
            Disagreement(rank, "", _batches(expected), _batches(count))
            for rank, count in enumerate(counts)
            if count != expected
        ]
        raise UnevenDataError("microbatches", rows, _ways_out(counts, evened_by), counts=counts)


def _ways_out(counts: Sequence[int], evened_by: Sequence[str]) -> str:
    """Name what would help ranks with so many batches, and leave something to read."""
    if min(counts) == 0:  # to stop with the first rank, or to drop the last step, would be to read nothing
        ways = [way for way in evened_by if way in EVENED]
        return f"Give each rank some data{''.join(f', or use {way}' for way in ways)}."
    ways = [*evened_by, 'uneven="stop_first"']
    use = f'{", ".join(ways)} or uneven="pad".'
    return f"Use {use}" if evened_by else f"Give each rank equally many batches, or use {use}"


def _batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"


def _draws_of(ctx: Context, source: str, index: int, info: BatchInfo, before: int, is_own: bool) -> Draws:
    """Name the random numbers of a batch. Pure.

    Args:
        ctx: Says the rank.
        source: What the batch is of, such as ``"epoch 0"``.
        index: Number of the batch in its pass.
        info: What is known of it.
        before: Samples of the epoch that had been read before it.
        is_own: Each rank has data of its own. Together they count as one order: a batch of each rank in turn.
    """
    rank, size, read = ctx.rank, ctx.num_processes, info.consumed - before
    if not info.consumed:  # nobody counts
        return Draws(f"batch {index * size + rank} of {source}")
    if is_own:
        first = before * size + rank * read
    elif info.valid_by_rank is not None:
        first = before + sum(info.valid_by_rank[:rank])
    else:
        rows = -(-read // size) if info.max_rows is None else info.max_rows
        first = before + rank * rows
    return Draws(f"sample {first} of {source}")
