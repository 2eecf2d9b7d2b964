"""Before anything moves, the ranks agree on what they are about to do.

Each operation across ranks opens with one exchange of equal size on every rank, whatever the operation and
the tree. In it each rank says a fingerprint of all it has called so far (operations, options, structures,
shapes, dtypes, call sites) and whether it can go on. All ranks see what all said, so all come to the same
verdict: go on, raise because a rank can't, or raise because they differ. Nobody is left waiting, and tensors
of another shape are never taken for the right ones. Whatever is small enough travels in the same exchange, so
that agreement costs no extra message for small trees.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.context import Context, Unsettled, call_site, check_context, publish, refuse_if_over, text_of
from accelfn.context.config import GuardMode
from accelfn.errors import Caller, Disagreement, MismatchError, RemoteRankError, UnevenDataError
from accelfn.tree import Buffer, PackSpec, TreeSpec, flatten, flatten_group

# Every buffer starts at a multiple of the largest element (complex128), so that a view of any dtype is
# possible.
ALIGNMENT = 16


def as_tensor(data: bytes) -> torch.Tensor:
    """Copy ``data`` into a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor, length: int | None = None) -> bytes:
    """Copy a contiguous uint8 tensor on the CPU, or its first ``length`` elements. Needs no numpy."""
    length = tensor.numel() if length is None else length
    return ctypes.string_at(tensor.data_ptr(), length) if length else b""


def padded_size(num_bytes: int) -> int:
    """Round up to the alignment of buffers."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def write_groups(target: torch.Tensor, groups: tuple[Buffer, ...], leaves: list[torch.Tensor]) -> None:
    """Write the leaves of ``groups`` one after the other into ``target``, uint8 and large enough."""
    start = 0
    for group in groups:
        if group.num_bytes:
            target[start : start + group.num_bytes] = flatten_group(group, leaves).view(torch.uint8)
        start += padded_size(group.num_bytes)


def read_groups(source: torch.Tensor, groups: tuple[Buffer, ...]) -> list[torch.Tensor]:
    """Return one flat view of ``source`` per group, as :func:`write_groups` wrote them."""
    start = 0
    buffers: list[torch.Tensor] = []
    for group in groups:
        buffers.append(source[start : start + group.num_bytes].view(group.dtype))
        start += padded_size(group.num_bytes)
    return buffers


_MAX_ROWS = 20
_SHOWN = 200


class Said(NamedTuple):
    """What one rank said of its call."""

    operation: str
    site: str
    guard: str  # what its guard compares
    number: int
    text: str  # options, then what must be equal of the tree
    tag: str
    line: str  # the call's own, and the first one of its form
    place: str
    leaves: dict[str, str]  # kind of each leaf, by path
    passes: list[tuple[int, int, bool]]  # open ones, outermost first: what preceded it, batches, has it ended
    recent: list[tuple[int, str, str, str]]  # number, operation, site, chain of calls not compared yet
    # Axes along which ranks have one batch, the batch, and the kind of each leaf of it, by path.
    shared: tuple[str, int, dict[str, str]] | None = None


def find_difference(said: Sequence[Said]) -> MismatchError:
    """Find the first thing in which the calls of the ranks differ.

    Args:
        said: By rank.

    Returns:
        The error to raise: the same on every rank, since all were told the same.
    """
    operation = _most([one.operation for one in said])
    callers = [Caller(rank, one.operation, one.site) for rank, one in enumerate(said)]
    # Before all else: ranks that compare different things can't agree, whatever they call.
    if rows := _unequal([one.guard for one in said]):
        return MismatchError(
            operation, rows[:_MAX_ROWS], "Give all ranks the same guard, in init_context or replace.", callers
        )
    earlier = _first_difference(said)
    if earlier is not None:
        return earlier
    rows, hint = _rows(said)
    left_out = len(rows) - _MAX_ROWS
    if left_out > 0:
        hint = f"  ... and {left_out} more\n{hint}"
    rows = rows[:_MAX_ROWS]
    uneven = _uneven(said)
    if uneven is not None:
        counts, ended = uneven
        hint = (
            f"Batches taken so far are counted above; rank(s) {', '.join(map(str, ended))} had no more. Give "
            'all ranks equally many: even_batches=True, drop_last=True, or uneven="stop_first".'
        )
        return UnevenDataError(operation, rows, hint, callers, counts)
    return MismatchError(operation, rows, hint, callers)


def _uneven(said: Sequence[Said]) -> tuple[list[int], list[int]] | None:
    """Find a pass that all ranks are in and that some have ended; give batches by rank, and who has no more.

    Passes that only some ranks have begun, as in an evaluation on one of them, say nothing of the data.
    """
    for passes in reversed(list(zip(*(one.passes for one in said), strict=False))):
        numbers, counts, has_ended = zip(*passes, strict=True)
        if len(set(numbers)) == 1 and len(set(counts)) > 1 and any(has_ended):
            return list(counts), [rank for rank, ended in enumerate(has_ended) if ended]
    return None


def _rows(said: Sequence[Said]) -> tuple[list[Disagreement], str]:
    """Return what differs, from the coarse to the fine, and what to do about it."""
    hint = (
        "Every rank must call the same operation with the same options on a tree of the same structure, "
        "shapes and dtypes."
    )
    if rows := _unequal([one.operation for one in said], "a call of "):
        return rows, hint
    if rows := _unequal([f"call {one.number}" for one in said]):
        return rows, "A rank has left out a call, or made one too many. " + hint
    if rows := _unequal([one.place for one in said]):
        return rows, "The ranks are at different places in their data. " + hint
    paths = dict.fromkeys(path for one in said for path in one.leaves)
    rows = [
        row
        for path in paths
        for row in _unequal([one.leaves.get(path, "no such leaf") for one in said], path=path)
    ]
    # Options come before the structure; where all else is equal, the kinds of containers differ.
    rows = rows or _unequal([one.text.partition("\0")[0] for one in said])
    rows = rows or _unequal([one.text.rpartition("\0")[2] for one in said])
    if rows:
        return rows, hint
    shared = [one.shared for one in said if one.shared is not None]
    if len({one.tag for one in said}) == 1 and len(shared) == len(said) and (rows := _unlike(shared)):
        return rows, (
            f"Ranks along {shared[0][0]} work on one batch together, and must give the model the same. A "
            "prepared loader sees to it; elsewhere split data with "
            'split_between_processes(ctx.along("dp"), ...), and seed what is drawn alike on these ranks.'
        )
    if len({one.tag for one in said}) == 1:
        return [], (
            "They have differed since an earlier call that was not compared and is no longer remembered. "
            'With guard="full" each one is.'
        )
    return _unequal([one.line for one in said]), (
        "The calls have the same form but come from different lines, so one may have been left out, or two "
        'swapped. If they are meant to meet, give them one name: pass ctx.tagged("...") instead of ctx, on '
        "every rank."
    )


def _unlike(shared: Sequence[tuple[str, int, dict[str, str]]]) -> list[Disagreement]:
    """Return a row for each rank and leaf that isn't what most of those with the same batch have."""
    rows: list[Disagreement] = []
    for batch in dict.fromkeys(one[1] for one in shared):
        ranks = [rank for rank, one in enumerate(shared) if one[1] == batch]
        leaves = [shared[rank][2] for rank in ranks]
        for path in dict.fromkeys(path for one in leaves for path in one):
            found = _unequal([one.get(path, "no such leaf") for one in leaves], path=path)
            rows += [row._replace(rank=ranks[row.rank]) for row in found]
    return rows


def _first_difference(said: Sequence[Said]) -> MismatchError | None:
    """Find an earlier call that was counted but not compared, in which the ranks already differ."""
    by_rank = [{one[0]: one for one in rank.recent} for rank in said]
    for number in sorted(by_rank[0]):
        if not all(number in recent for recent in by_rank):
            continue
        calls = [recent[number] for recent in by_rank]
        is_current = all(one.number == number for one in said)  # which is explained in more detail
        if is_current or len({call[3] for call in calls}) == 1:
            continue
        rows = _unequal([f"{call[1]} at {call[2]}" for call in calls], f"call {number}: ")
        rows = rows or [Disagreement(0, "", "", f"call {number}: {calls[0][1]} at {calls[0][2]}")]
        callers = [Caller(rank, call[1], call[2]) for rank, call in enumerate(calls)]
        return MismatchError(
            _most([call[1] for call in calls]),
            rows,
            f"The ranks have differed since call {number}; it is found only now, because not every call is "
            'compared. With guard="full" it is.',
            callers,
        )
    return None


def _unequal(values: Sequence[str], before: str = "", path: str = "") -> list[Disagreement]:
    """Return a row for each rank that has not what most have."""
    expected = _most(values)
    return [
        Disagreement(rank, path, before + expected[:_SHOWN], before + value[:_SHOWN])
        for rank, value in enumerate(values)
        if value != expected
    ]


def _most(values: Sequence[str]) -> str:
    """Return the most common value; of equally common ones that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]


T = TypeVar("T")

# Fingerprint of all calls, number of this one, bytes of payload in this exchange, status.
_HEADER = struct.Struct("<16sQQB15x")
HEADER_BYTES = _HEADER.size  # a multiple of the alignment, so that the payload behind it is aligned too

_READY, _FAILED = 0, 1

_SHARED_BYTES = 16

# What "sampled" means: all operations at first, where most mistakes show, and in small worlds; then as many
# as keep the cost per operation what it is with this many ranks.
_FIRST_CALLS = 50
_SMALL_WORLD = 8


class Shared(NamedTuple):
    """What ranks that work on one batch together must have alike, and others needn't.

    Attributes:
        axes: Along which they do, as text.
        batches: By rank, which batch it works on.
        leaves: Gives what is known of each leaf, by path; asked where the call is compared.
    """

    axes: str
    batches: Sequence[int]
    leaves: Callable[[], dict[str, str]]


class Call(NamedTuple):
    """What a rank is about to do.

    Attributes:
        operation: Name of the public function.
        text: All that must be equal on every rank, as text.
        leaves: Gives what is known of each leaf, by path; asked only to explain a mismatch.
        pairs: Whether each rank brings data of its own, so that it matters which calls meet: a rank that has
            called the form from another line before must be on the same line as the others.
        takes_long: Whether a rank may come late by minutes.
        place: Where in its data the rank calls, such as ``"batch 3 of epoch 0"``: equal on every rank too.
        shared: What must be equal on some ranks only. Travels in the place of a payload.
    """

    operation: str
    text: str = ""
    leaves: Callable[[], dict[str, str]] = dict
    pairs: bool = False
    takes_long: bool = False
    place: str = ""
    shared: Shared | None = None


def capacity(ctx: Context) -> int:
    """Bytes of payload that fit into the opening exchange."""
    return ctx.collectives.chunk - HEADER_BYTES


def catch(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Do what may be refused on this rank alone, and keep the refusal for :func:`agree`."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 -- the other ranks must learn of it before it is raised
        return None, error


def agree(
    ctx: Context, call: Call, payload: torch.Tensor | None = None, error: Exception | None = None
) -> list[torch.Tensor]:
    """Open an operation: tell all ranks what this one is about to do, and hear what they are.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: Supplies the exchange.
        call: What this rank is about to do.
        payload: uint8 on the CPU, at most :func:`capacity` bytes; any length on any rank.
        error: Why this rank can't take part.

    Returns:
        The payload of each rank, in rank order; to be read before the next operation.

    Raises:
        Exception: ``error`` itself, on the ranks that gave one.
        RemoteRankError: Another rank gave one, or has failed elsewhere.
        MismatchError: The calls differ; the same error on every rank.
        MissingRankError: A rank has ended instead.
        CollectiveTimeoutError: A rank did not come in time.
    """
    rows, headers = _exchanged(ctx, call, payload, error)
    return [_payload(row, header) for row, header in zip(rows, headers, strict=True)]


def _exchanged(
    ctx: Context, call: Call, payload: torch.Tensor | None, error: Exception | None
) -> tuple[tuple[torch.Tensor, ...], list[tuple[Any, ...]]]:
    """Open an operation; give the rows of all ranks, and their headers."""
    begun = _begin(ctx, call)
    shared = call.shared
    if shared is not None and error is None:
        payload, error = catch(lambda: _digest_of(shared))
    if error is not None:
        text = json.dumps([type(error).__name__, text_of(error)[: capacity(ctx) // 8]], ensure_ascii=False)
        payload = as_tensor(text.encode(errors="replace"))
    message = _message(ctx, payload, _READY if error is None else _FAILED)
    rows = ctx.collectives.all_gather_bytes(message)
    return rows, _verdict(ctx, call, begun, rows, error)


def _message(ctx: Context, payload: torch.Tensor | None, status: int) -> torch.Tensor:
    call_log = ctx.collectives.call_log
    length = 0 if payload is None else payload.numel()
    message = as_tensor(_HEADER.pack(call_log.chain, call_log.number, length, status))
    return message if payload is None else torch.cat([message, payload])


def _verdict(
    ctx: Context, call: Call, begun: _Begun, rows: tuple[torch.Tensor, ...], error: Exception | None
) -> list[tuple[Any, ...]]:
    """Go on with the headers of all ranks, or raise; all ranks do the same, since all have the same rows."""
    call_log = ctx.collectives.call_log
    headers = [_HEADER.unpack(as_bytes(row, HEADER_BYTES)) for row in rows]

    last = max(header[1] for header in headers)
    failed = next((rank for rank, header in enumerate(headers) if header[3] == _FAILED), None)
    if failed is not None:
        call_log.resume(last)
        if error is not None:
            raise error
        cause, text = json.loads(as_bytes(_payload(rows[failed], headers[failed])))
        raise RemoteRankError(failed, cause, text, call.operation)
    if any(header[0] != headers[0][0] for header in headers) or _share_differently(call, rows, headers):
        difference = _explain(ctx, call, begun)
        call_log.resume(last)
        raise difference
    call_log.confirm()
    return headers


def _digest_of(shared: Shared) -> torch.Tensor:
    text = json.dumps(list(shared.leaves().items()))
    return as_tensor(hashlib.blake2b(text.encode(), digest_size=_SHARED_BYTES).digest())


def _share_differently(call: Call, rows: Sequence[torch.Tensor], headers: Sequence[tuple[Any, ...]]) -> bool:
    """Whether ranks that should have something alike don't; the same on every rank."""
    if call.shared is None:
        return False
    digests = [as_bytes(_payload(row, header)) for row, header in zip(rows, headers, strict=True)]
    return len(set(zip(call.shared.batches, digests, strict=True))) > len(set(call.shared.batches))


def _payload(row: torch.Tensor, header: tuple[Any, ...]) -> torch.Tensor:
    return row[HEADER_BYTES : HEADER_BYTES + header[2]]


def check(ctx: Context, call: Call, error: Exception | None = None) -> None:
    """Open an operation whose data follow by themselves, where the guard of ``ctx`` wants it checked.

    What isn't checked is counted, so that the next check finds a difference.

    Ranks: every rank of ``ctx``.

    Raises:
        Exception: As :func:`agree`.
    """
    if _is_due(ctx):
        _exchanged(ctx, call, None, error)
        return
    _begin(ctx, call)
    if error is not None:
        # The others don't look: they learn of it where they wait for the data.
        publish(ctx.collectives.board, ctx.collectives.call_log, ctx.rank, error, call.operation)
        raise error


def count_call(ctx: Context, call: Call) -> None:
    """Count a call that every rank has to make and that sends nothing.

    The next check finds a rank that has left it out; with ``guard="full"`` it is checked itself.

    Ranks: every rank of ``ctx``.

    Raises:
        Exception: As :func:`agree`, with ``guard="full"``.
    """
    if ctx.guard.mode == GuardMode.FULL:
        check(ctx, call)
    elif ctx.world.size > 1:
        _begin(ctx, call)


def check_later(ctx: Context, call: Call) -> None:
    """Check as :func:`check` does, and go on meanwhile: its verdict comes with ``CallLog.settle``.

    For what begins with computing, and communicates only then. The next operation settles it first. Where
    the call has something ``shared``, its verdict comes at once.

    Ranks: every rank of ``ctx``.
    """
    start = ctx.collectives.start_all_gather_bytes
    if start is None or call.shared is not None or not _is_due(ctx):
        check(ctx, call)
        return
    begun = _begin(ctx, call)
    started = start(_message(ctx, None, _READY))
    ctx.collectives.call_log.unsettled = Unsettled(
        lambda: cast("None", _verdict(ctx, call, begun, started.finish(), None)), started.abandon
    )


def _is_due(ctx: Context) -> bool:
    if ctx.guard.mode != GuardMode.SAMPLED:
        return ctx.guard.mode == GuardMode.FULL
    number, size = ctx.collectives.call_log.number + 1, ctx.world.size
    return size <= _SMALL_WORLD or number <= _FIRST_CALLS or number % -(-size // _SMALL_WORLD) == 0


class _Begun(NamedTuple):
    """Where a call was made."""

    site: str
    first: str  # where calls of the same form were made first
    tag: str  # by which it is distinguished


def _begin(ctx: Context, call: Call) -> _Begun:
    guard, call_log = ctx.guard, ctx.collectives.call_log
    refuse_if_over(call_log, call.operation)
    call_log.settle()
    site = call_site()
    tag, first = ctx.tag if guard.call_sites else "", site
    if call.pairs and guard.call_sites and not tag:
        # Two branches may make the same call on two lines. Only once there are others of its form can it be
        # taken for one of those: what comes from the first line is known by its function, the rest by lines.
        first = call_log.first_site(hash((call.operation, call.text)), site)
        tag = _function_of(site) if site == first else site
    material = None
    if guard.mode != GuardMode.OFF:
        material = f"{call.operation}\0{call.place}\0{tag}\0{call.text}"
    patience_s = guard.long_timeout_s if call.takes_long else guard.timeout_s
    call_log.begin(call.operation, site, material, patience_s)
    return _Begun(site, first, tag)


def _function_of(site: str) -> str:
    """Leave the line out of ``site``, but for a lambda, which has no branches, and whose line is its name."""
    line, _, function = site.rpartition(" in ")
    return site if function == "<lambda>" else f"{line.rpartition(':')[0]} in {function}"


def check_rank(ctx: Context, operation: str, name: str, rank: int) -> None:
    """Refuse a rank that isn't in the world."""
    if not isinstance(cast("object", rank), int):
        raise TypeError(f"{operation}: {name} must be a whole number, got {rank!r}.")
    if not 0 <= rank < ctx.world.size:
        raise ValueError(f"{operation}: {name} must be a rank in 0..{ctx.world.size - 1}, got {rank}.")


def layout_call(
    operation: str, options: str, layout: PackSpec, *, pairs: bool = True, name: str = "tree"
) -> Call:
    """Describe an operation on a tree of tensors, which errors call ``name``."""

    def leaves() -> dict[str, str]:
        kinds = map(_tensor_kind, layout.dtypes, layout.shapes)
        return dict(zip(layout.structure.paths(name), kinds, strict=True))

    return Call(operation, f"{options}\0{layout.describe()}", leaves, pairs=pairs)


def tree_call(
    operation: str, options: str, structure: TreeSpec, kinds: Sequence[str], *, pairs: bool = False
) -> Call:
    """Describe an operation on a tree; ``kinds`` says what must be equal of each leaf."""
    return Call(
        operation,
        f"{options}\0{structure.describe()}{kinds}",
        lambda: dict(zip(structure.paths(), kinds, strict=True)),
        pairs=pairs,
    )


def describe_tree(operation: str, tree: Any) -> Call:
    """Describe an operation on a tree whose leaves may be anything."""
    leaves, structure = flatten(tree)
    return tree_call(operation, "", structure, [_kind(leaf) for leaf in leaves])


def verify_structure(ctx: Context, tree: Any) -> None:
    """Check that every rank has a tree of the same structure, shapes and dtypes.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        tree: Any tree. Of tensors, shape, dtype, layout (dense or how sparse) and whether they are on the
            meta device are compared; of other leaves the type.

    Raises:
        MismatchError: The trees differ: the same error on every rank, with rank and path of each difference.
    """
    check_context("verify_structure", ctx)
    if ctx.world.size == 1:
        return
    # Asked for by name, so it compares whatever the guard's mode is.
    compared = ctx if ctx.guard.mode != GuardMode.OFF else ctx.replace(guard="full")
    agree(compared, describe_tree("verify_structure", tree))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        layout = "" if leaf.layout == torch.strided else f" {str(leaf.layout).removeprefix('torch.')}"
        place = " on meta" if leaf.is_meta else ""  # real devices may differ between ranks
        return f"{_tensor_kind(leaf.dtype, tuple(leaf.shape))}{layout}{place}"
    return type(leaf).__name__


def _tensor_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _explain(ctx: Context, call: Call, begun: _Begun) -> MismatchError:
    """Exchange in full what every rank called, and find where they differ: the same on every rank."""
    guard, call_log = ctx.guard, ctx.collectives.call_log
    own = Said(
        operation=call.operation,
        site=begun.site,
        guard=f'guard mode "{guard.mode}"' + ("" if guard.call_sites else " without call sites"),
        number=call_log.number,
        text=call.text,
        tag=begun.tag,
        line=ctx.tag or (begun.site if begun.site == begun.first else f"{begun.site}, first {begun.first}"),
        place=call.place,
        leaves=call.leaves(),
        shared=None
        if call.shared is None
        else (call.shared.axes, call.shared.batches[ctx.rank], call.shared.leaves()),
        passes=[(one.number, one.batches, one.has_ended) for one in call_log.open_passes],
        recent=[(one.number, one.operation, one.site, one.chain.hex()) for one in call_log.recent()],
    )
    return find_difference([Said(**json.loads(blob)) for blob in _gather_all(ctx, json.dumps(own._asdict()))])


def _gather_all(ctx: Context, text: str) -> list[bytes]:
    """Gather texts of any length by exchanges alone, with no agreement: every rank is known to be here."""
    blob = text.encode()
    rows = ctx.collectives.all_gather_bytes(as_tensor(struct.pack("<Q", len(blob))))
    lengths = [struct.unpack("<Q", as_bytes(row, 8))[0] for row in rows]
    gathered = [b""] * len(lengths)
    chunk = max(ctx.collectives.chunk, 1024)  # which any exchange carries
    for start in range(0, max(lengths), chunk):
        rows = ctx.collectives.all_gather_bytes(as_tensor(blob[start : start + chunk]))
        for rank, row in enumerate(rows):
            gathered[rank] += as_bytes(row, max(0, min(chunk, lengths[rank] - start)))
    return gathered
