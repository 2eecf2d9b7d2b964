"""The agreement of the ranks on the operation that they are about to carry out.

Each operation across ranks opens with one exchange of a fixed size, for any operation and tree. Each rank
sends a fingerprint of all its calls so far (operations, options, structures, shapes, dtypes, call sites) and
whether it can take part. Since every rank receives the same messages, all of them decide alike: continue,
raise because a rank can't take part, or raise because the calls differ. So no rank is left waiting, and
tensors of different shapes are never combined. Small payloads are sent in the same exchange, so that the
agreement costs no extra message for small trees.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.config import GuardMode
from accelfn.context import Context, Unsettled, call_site, publish, takes_context, text_of
from accelfn.errors import Caller, Disagreement, MismatchError, RemoteRankError, UnevenDataError
from accelfn.tree import PackSpec, TreeSpec, flatten

# Buffers are aligned to the largest element (complex128), so that they can be viewed as any dtype.
ALIGNMENT = 16


def as_tensor(data: bytes) -> torch.Tensor:
    """Copy ``data`` into a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor, length: int | None = None) -> bytes:
    """Copy a contiguous uint8 tensor on the CPU, or its first ``length`` elements. Needs no numpy."""
    length = tensor.numel() if length is None else length
    return ctypes.string_at(tensor.data_ptr(), length) if length else b""


def padded_size(num_bytes: int) -> int:
    """Round up to the alignment of buffers."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


_MAX_ROWS = 20
_MAX_CHARS = 200


class CallRecord(NamedTuple):
    """A rank's full description of its call, which is exchanged only to explain a mismatch."""

    operation: str
    site: str
    guard: str  # what its guard compares
    number: int
    text: str  # options, then what must be equal of the tree
    tag: str
    line: str  # of the call, and of the first call of its form
    place: str
    leaves: dict[str, str]  # description of each leaf, by path
    passes: list[tuple[int, int, bool]]  # open passes, outermost first: number, batches, has_ended
    recent: list[tuple[int, str, str, str]]  # number, operation, site, chain of calls not compared yet
    # Axes along which ranks share a batch, the index of the batch, and descriptions of its leaves by path.
    shared: tuple[str, int, dict[str, str]] | None = None


def find_mismatch(records: Sequence[CallRecord]) -> MismatchError:
    """Return the error for the first difference between the ranks' calls.

    Args:
        records: By rank.

    Returns:
        The error, the same on every rank, since all have the same records.
    """
    operation = _most_common([record.operation for record in records])
    callers = [Caller(rank, one.operation, one.site) for rank, one in enumerate(records)]
    # First, since ranks whose guards compare different things can't agree on any call.
    if rows := _differing([record.guard for record in records]):
        return MismatchError(
            operation,
            rows[:_MAX_ROWS],
            "Use the same guard on all ranks, in init_context or replace.",
            callers,
        )
    earlier = _find_earlier_mismatch(records)
    if earlier is not None:
        return earlier
    rows, hint = _rows(records)
    if len(rows) > _MAX_ROWS:
        hint = f"  ... and {len(rows) - _MAX_ROWS} more\n{hint}"
        rows = rows[:_MAX_ROWS]
    uneven = _find_uneven(records)
    if uneven is not None:
        counts, ended = uneven
        hint = (
            f"The counts above are batches read so far; rank(s) {', '.join(map(str, ended))} had no more. "
            'Use the same number on all ranks: even_batches=True, drop_last=True, or uneven="stop_first" (of '
            "microbatches, or accelerator.uneven)."
        )
        return UnevenDataError(operation, rows, hint, callers, counts)
    return MismatchError(operation, rows, hint, callers)


def _find_uneven(records: Sequence[CallRecord]) -> tuple[list[int], list[int]] | None:
    """Return the batches by rank and the ranks that have ended, of a pass that only some ranks have ended.

    Passes that only some ranks have begun, such as an evaluation on one of them, don't count.
    """
    for passes in reversed(list(zip(*(record.passes for record in records), strict=False))):
        numbers, counts, has_ended = zip(*passes, strict=True)
        if len(set(numbers)) == 1 and len(set(counts)) > 1 and any(has_ended):
            return list(counts), [rank for rank, ended in enumerate(has_ended) if ended]
    return None


def _rows(records: Sequence[CallRecord]) -> tuple[list[Disagreement], str]:
    """Return the differences, checking from coarse to fine, and what to do about them."""
    hint = (
        "Every rank must call the same operation with the same options on a tree of the same structure, "
        "shapes and dtypes."
    )
    operations = [record.operation for record in records]
    # Other operations are often called at several lines, and a model is called at one by all ranks.
    calls = [(one.operation, one.site if one.operation == "forward" else "") for one in records]
    if calls.count(calls[0]) == 1 and len(calls) > 1:
        hint += f" If {operations[0]} is inside `if ... is_main_process`, move it out: all ranks take part."
    if rows := _differing(operations, "a call of "):
        return rows, hint
    if rows := _differing([f"call {record.number}" for record in records]):
        return rows, "A rank has skipped a call, or made an extra one. " + hint
    if rows := _differing([record.place or "outside of accumulate" for record in records]):
        return rows, "The ranks are at different positions in their data. " + hint
    paths = dict.fromkeys(path for record in records for path in record.leaves)
    rows = [
        row
        for path in paths
        for row in _differing([record.leaves.get(path, "no such leaf") for record in records], path=path)
    ]
    # Options first; if everything else is equal, the types of containers differ.
    rows = rows or _differing([record.text.partition("\0")[0] for record in records])
    rows = rows or _differing([record.text.rpartition("\0")[2] for record in records])
    if rows:
        return rows, hint
    shared = [record.shared for record in records if record.shared is not None]
    if (
        len({record.tag for record in records}) == 1
        and len(shared) == len(records)
        and (rows := _compare_shared(shared))
    ):
        return rows, (
            f"Ranks along {shared[0][0]} share one batch, and must pass the model the same inputs. A "
            "prepared loader ensures this; otherwise split data with "
            'split_between_processes(ctx.along("dp"), ...), and use the same random seed on these ranks.'
        )
    if len({record.tag for record in records}) == 1:
        return [], (
            "The ranks have differed since an earlier call that was not compared and is no longer logged. "
            'guard="full" compares every call.'
        )
    return _differing([record.line for record in records]), (
        "The calls have the same form but come from different lines, so one may have been skipped, or two "
        'swapped. If they belong together, give them one name: pass ctx.tagged("...") instead of ctx, on '
        "every rank."
    )


def _compare_shared(shared: Sequence[tuple[str, int, dict[str, str]]]) -> list[Disagreement]:
    """Return a row for each rank and leaf that differs from most of the ranks with the same batch."""
    rows: list[Disagreement] = []
    for batch in dict.fromkeys(index for _, index, _ in shared):
        ranks = [rank for rank, (_, index, _) in enumerate(shared) if index == batch]
        leaves = [shared[rank][2] for rank in ranks]
        for path in dict.fromkeys(path for by_path in leaves for path in by_path):
            differing = _differing([by_path.get(path, "no such leaf") for by_path in leaves], path=path)
            rows += [row._replace(rank=ranks[row.rank]) for row in differing]
    return rows


def _find_earlier_mismatch(records: Sequence[CallRecord]) -> MismatchError | None:
    """Return the error for the first earlier call, counted but not compared, in which the ranks differ."""
    by_rank = [{call[0]: call for call in record.recent} for record in records]
    for number in sorted(by_rank[0]):
        if not all(number in recent for recent in by_rank):
            continue
        calls = [recent[number] for recent in by_rank]
        is_current = all(record.number == number for record in records)  # explained in detail elsewhere
        if is_current or len({call[3] for call in calls}) == 1:
            continue
        rows = _differing([f"{call[1]} at {call[2]}" for call in calls], f"call {number}: ")
        rows = rows or [Disagreement(0, "", "", f"call {number}: {calls[0][1]} at {calls[0][2]}")]
        callers = [Caller(rank, call[1], call[2]) for rank, call in enumerate(calls)]
        return MismatchError(
            _most_common([call[1] for call in calls]),
            rows,
            f"The ranks have differed since call {number}, which was not compared when it was made. "
            'guard="full" compares every call.',
            callers,
        )
    return None


def _differing(values: Sequence[str], before: str = "", path: str = "") -> list[Disagreement]:
    """Return a row for each rank whose value differs from the most common one."""
    expected = _most_common(values)
    return [
        Disagreement(rank, path, before + expected[:_MAX_CHARS], before + value[:_MAX_CHARS])
        for rank, value in enumerate(values)
        if value != expected
    ]


def _most_common(values: Sequence[str]) -> str:
    """Return the most common value; among equally common ones that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]


T = TypeVar("T")

# Fingerprint of all calls, number of this one, bytes of payload in this exchange, status.
_HEADER = struct.Struct("<16sQQB15x")
_LENGTH = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size  # a multiple of the alignment, so that the payload after it is aligned too

_READY, _FAILED = 0, 1

_SHARED_BYTES = 16

# The "sampled" mode: the first operations, where most mistakes show, and all operations in small worlds; in
# larger worlds, as many as keep the cost per operation that of a small world.
_FIRST_CALLS = 50
_SMALL_WORLD = 8


class Shared(NamedTuple):
    """What must be equal on the ranks that share a batch.

    Attributes:
        axes: The axes along which ranks share a batch, as text.
        batches: The index of the batch, by rank.
        leaves: Returns a description of each leaf, by path; called when the call is compared.
    """

    axes: str
    batches: Sequence[int]
    leaves: Callable[[], dict[str, str]]


class Call(NamedTuple):
    """Description of an operation that a rank is about to carry out.

    Attributes:
        operation: Name of the public function.
        text: Everything that must be equal on every rank, as text.
        leaves: Returns a description of each leaf, by path; called only to explain a mismatch.
        pairs: Whether each rank contributes data, so that it matters which calls are matched: a rank that has
            made a call of this form on another line before must call on the same line as the other ranks.
        takes_long: Whether a rank may be minutes late.
        place: Position in the data, such as ``"batch 3 of epoch 0"``, which must be equal on every rank.
        shared: What must be equal on some ranks only. Sent in place of a payload.
    """

    operation: str
    text: str = ""
    leaves: Callable[[], dict[str, str]] = dict
    pairs: bool = False
    takes_long: bool = False
    place: str = ""
    shared: Shared | None = None


def beneath_transforms() -> AbstractContextManager[None]:
    """Return a block in which ``torch.func`` doesn't wrap new tensors, since ranks exchange real bytes."""
    return cast("Any", torch)._C._DisableFuncTorch()


def has_transforms() -> bool:
    """Return whether a transform of ``torch.func`` is running."""
    return cast("Any", torch)._C._functorch.peek_interpreter_stack() is not None


def capacity(ctx: Context) -> int:
    """Return the number of payload bytes that fit into the opening exchange."""
    return ctx.collectives.chunk - HEADER_BYTES


def catch(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run an action that may fail on this rank alone; return its result or its exception."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 -- the other ranks must be notified before it is raised
        return None, error


def agree(
    ctx: Context, call: Call, payload: torch.Tensor | None = None, error: Exception | None = None
) -> list[torch.Tensor]:
    """Open an operation: compare this rank's call with those of all ranks, and exchange payloads.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        call: What this rank is about to do.
        payload: uint8 on the CPU, at most :func:`capacity` bytes, of any length on any rank.
        error: Why this rank can't take part.

    Returns:
        The payload of each rank, in rank order, which must be read before the next operation.

    Raises:
        Exception: ``error`` itself, on the ranks that passed one.
        RemoteRankError: Another rank passed one, or has failed elsewhere.
        MismatchError: The calls differ; the same error on every rank.
        MissingRankError: A rank has ended instead.
        CollectiveTimeoutError: A rank did not arrive in time.
    """
    started_call = _begin(ctx, call)
    shared = call.shared
    if shared is not None and error is None:
        payload, error = catch(lambda: _digest_of(shared))
    if error is not None:
        text = json.dumps([type(error).__name__, text_of(error)[: capacity(ctx) // 8]], ensure_ascii=False)
        payload = as_tensor(text.encode(errors="replace"))
    with beneath_transforms():
        message = _message(ctx, payload, _READY if error is None else _FAILED)
        rows = ctx.collectives.all_gather_bytes(message)
        headers = _evaluate(ctx, call, started_call, rows, error)
        return [_payload(row, header) for row, header in zip(rows, headers, strict=True)]


def _message(ctx: Context, payload: torch.Tensor | None, status: int) -> torch.Tensor:
    call_log = ctx.collectives.call_log
    length = 0 if payload is None else payload.numel()
    message = as_tensor(_HEADER.pack(call_log.chain, call_log.number, length, status))
    return message if payload is None else torch.cat([message, payload])


def _evaluate(
    ctx: Context, call: Call, started_call: _Started, rows: tuple[torch.Tensor, ...], error: Exception | None
) -> list[tuple[Any, ...]]:
    """Return the headers of all ranks, or raise; all ranks do the same, since all have the same rows."""
    call_log = ctx.collectives.call_log
    headers = [_HEADER.unpack(as_bytes(row, HEADER_BYTES)) for row in rows]

    last, failed, are_equal = 0, None, True
    for rank, (chain, number, _, status) in enumerate(headers):
        last = max(last, number)
        are_equal = are_equal and chain == headers[0][0]
        if status == _FAILED and failed is None:
            failed = rank
    if failed is not None:
        call_log.resume(last)
        if error is not None:
            raise error
        cause, text = json.loads(as_bytes(_payload(rows[failed], headers[failed])))
        raise RemoteRankError(failed, cause, text, call.operation)
    if not are_equal or (call.shared is not None and _shared_differs(call.shared, rows, headers)):
        mismatch = _explain(ctx, call, started_call)
        call_log.resume(last)
        raise mismatch
    call_log.confirm()
    return headers


def _digest_of(shared: Shared) -> torch.Tensor:
    text = json.dumps(list(shared.leaves().items()))
    return as_tensor(hashlib.blake2b(text.encode(), digest_size=_SHARED_BYTES).digest())


def _shared_differs(shared: Shared, rows: Sequence[torch.Tensor], headers: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether ranks that share a batch differ in it; the same on every rank."""
    digests = [as_bytes(_payload(row, header)) for row, header in zip(rows, headers, strict=True)]
    return len(set(zip(shared.batches, digests, strict=True))) > len(set(shared.batches))


def _payload(row: torch.Tensor, header: tuple[Any, ...]) -> torch.Tensor:
    return row[HEADER_BYTES : HEADER_BYTES + header[2]]


def check(ctx: Context, call: Call, error: Exception | None = None) -> None:
    """Open an operation without a payload, and compare it if the guard of ``ctx`` selects it.

    An operation that isn't compared is counted, so that the next comparison finds a difference.

    Ranks: every rank of ``ctx``.

    Raises:
        Exception: As :func:`agree`.
    """
    if _is_due(ctx):
        agree(ctx, call, None, error)
        return
    _begin(ctx, call)
    if error is not None:
        # The other ranks don't compare, and receive the error while they wait for the data.
        publish(ctx.collectives.board, ctx.collectives.call_log, ctx.rank, error, call.operation)
        raise error


def count_call(ctx: Context, call: Call) -> None:
    """Count a call that every rank must make, but that doesn't communicate.

    The next comparison finds a rank that has skipped it; with ``guard="full"`` it is compared itself.

    Ranks: every rank of ``ctx``.

    Raises:
        Exception: As :func:`agree`, with ``guard="full"``.
    """
    if ctx.guard.mode == GuardMode.FULL:
        check(ctx, call)
    elif ctx.world.size > 1:
        _begin(ctx, call)


def check_later(ctx: Context, call: Call) -> None:
    """Start :func:`check` without waiting: its result is read by ``CallLog.settle``.

    For operations that compute before they communicate. The next operation settles it first. A call with
    ``shared`` is checked immediately.

    Ranks: every rank of ``ctx``.
    """
    start = ctx.collectives.start_all_gather_bytes
    if start is None or call.shared is not None or not _is_due(ctx):
        check(ctx, call)
        return
    started_call = _begin(ctx, call)
    with beneath_transforms():
        started = start(_message(ctx, None, _READY))

    def settle() -> None:
        with beneath_transforms():
            _evaluate(ctx, call, started_call, started.finish(), None)

    ctx.collectives.call_log.unsettled = Unsettled(settle, started.abandon)


def _is_due(ctx: Context) -> bool:
    if ctx.guard.mode != GuardMode.SAMPLED:
        return ctx.guard.mode == GuardMode.FULL
    number, size = ctx.collectives.call_log.number + 1, ctx.world.size
    return size <= _SMALL_WORLD or number <= _FIRST_CALLS or number % -(-size // _SMALL_WORLD) == 0


class _Started(NamedTuple):
    """The lines of a call that has started."""

    site: str
    first: str  # of the first call of the same form
    tag: str  # which distinguishes it from calls of the same form


def _begin(ctx: Context, call: Call) -> _Started:
    guard, call_log = ctx.guard, ctx.collectives.call_log
    call_log.settle()
    site = call_site()
    tag, first = ctx.tag if guard.call_sites else "", site
    if call.pairs and guard.call_sites and not tag:
        # Two branches of a function may make the same call on different lines. So calls from the first line
        # of a form are identified by the function only, and calls from other lines by the line.
        first = call_log.first_site(hash((call.operation, call.text)), site)
        tag = _function_of(site) if site == first else site
    material = None
    if guard.mode != GuardMode.OFF:
        material = f"{call.operation}\0{call.place}\0{tag}\0{call.text}"
    patience_s = guard.long_timeout_s if call.takes_long else guard.timeout_s
    call_log.begin(call.operation, site, material, patience_s)
    return _Started(site, first, tag)


def _function_of(site: str) -> str:
    """Return ``site`` without the line number, except for a lambda, which only its line identifies."""
    line, _, function = site.rpartition(" in ")
    return site if function == "<lambda>" else f"{line.rpartition(':')[0]} in {function}"


def check_rank(ctx: Context, operation: str, name: str, rank: int) -> None:
    """Check that a rank is in the world."""
    if not isinstance(cast("object", rank), int):
        raise TypeError(f"{operation}: {name} must be an int, got {rank!r}.")
    if not 0 <= rank < ctx.world.size:
        raise ValueError(f"{operation}: {name} must be a rank in 0..{ctx.world.size - 1}, got {rank}.")


def layout_call(
    operation: str, options: str, layout: PackSpec, *, pairs: bool = True, name: str = "tree"
) -> Call:
    """Return the Call of an operation on a tree of tensors, which errors call ``name``."""

    def leaves() -> dict[str, str]:
        kinds = map(_tensor_kind, layout.dtypes, layout.shapes)
        return dict(zip(layout.structure.paths(name), kinds, strict=True))

    return Call(operation, f"{options}\0{layout.describe()}", leaves, pairs=pairs)


def tree_call(
    operation: str, options: str, structure: TreeSpec, kinds: Sequence[str], *, pairs: bool = False
) -> Call:
    """Return the Call of an operation on a tree; ``kinds`` describes what must be equal of each leaf."""
    return Call(
        operation,
        f"{options}\0{structure.describe()}{kinds}",
        lambda: dict(zip(structure.paths(), kinds, strict=True)),
        pairs=pairs,
    )


def describe_tree(operation: str, tree: Any) -> Call:
    """Return the Call of an operation on a tree with any leaves."""
    leaves, structure = flatten(tree)
    return tree_call(operation, "", structure, [_kind(leaf) for leaf in leaves])


@takes_context
def verify_structure(ctx: Context, tree: Any) -> None:
    """Check that every rank has a tree of the same structure, shapes and dtypes.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        tree: Any tree. Tensors are compared by shape, dtype, layout (dense or sparse) and whether they are on
            the meta device; other leaves by type.

    Raises:
        MismatchError: The trees differ; the same error on every rank, with rank and path of each difference.
    """
    if ctx.world.size == 1:
        return
    # An explicit check, so it compares in any mode of the guard.
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


def _explain(ctx: Context, call: Call, started_call: _Started) -> MismatchError:
    """Exchange full records of the calls, and return the error, the same on every rank."""
    guard, call_log = ctx.guard, ctx.collectives.call_log
    record = CallRecord(
        operation=call.operation,
        site=started_call.site,
        guard=f'guard mode "{guard.mode}"' + ("" if guard.call_sites else " without call sites"),
        number=call_log.number,
        text=call.text,
        tag=started_call.tag,
        line=ctx.tag
        or (
            started_call.site
            if started_call.site == started_call.first
            else f"{started_call.site}, first {started_call.first}"
        ),
        place=call.place,
        leaves=call.leaves(),
        shared=None
        if call.shared is None
        else (call.shared.axes, call.shared.batches[ctx.rank], call.shared.leaves()),
        passes=[(item.number, item.batches, item.has_ended) for item in call_log.open_passes],
        recent=[
            (entry.number, entry.operation, entry.site, entry.chain.hex()) for entry in call_log.recent()
        ],
    )
    blob = json.dumps(record._asdict()).encode()
    rows = ctx.collectives.all_gather_bytes(as_tensor(_LENGTH.pack(len(blob))))
    lengths = [_LENGTH.unpack(as_bytes(row, _LENGTH.size))[0] for row in rows]
    return find_mismatch([CallRecord(**json.loads(message)) for message in gather_known(ctx, blob, lengths)])


def gather_known(ctx: Context, blob: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Gather bytes whose lengths every rank knows, without an agreement: all ranks are known to take part."""
    longest = max(lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(blob)] = as_tensor(blob)
    rows = ctx.collectives.all_gather(padded).view(len(lengths), longest)
    return [as_bytes(row, length) for row, length in zip(rows, lengths, strict=True)]
