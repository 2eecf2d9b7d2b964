"""Before anything moves, the ranks agree on what they are about to do.

Each operation across ranks opens with one exchange of equal size on every rank, whatever the operation and
the tree. In it each rank says a fingerprint of its call (operation, options, structure, shapes, dtypes) and
whether it can go on. All ranks see what all said, so all come to the same verdict: go on, raise because a
rank can't, or raise because they differ. Nobody is left waiting, and tensors of another shape are never taken
for the right ones. Whatever is small enough travels in the same exchange, so that agreement costs no extra
message for small trees.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.comm.wire import as_bytes, as_tensor
from accelfn.context import Context
from accelfn.errors import (
    CollectiveTimeoutError,
    Disagreement,
    MismatchError,
    MissingRankError,
    RemoteRankError,
)
from accelfn.tree import Layout, flatten

__all__ = (
    "HEADER_BYTES",
    "Call",
    "agree",
    "attempt",
    "capacity",
    "check_rank",
    "describe_tree",
    "layout_call",
    "verify_structure",
)


T = TypeVar("T")

# Fingerprint of the call, status, bytes of payload in this exchange.
_HEADER = struct.Struct("<16sB3xQ4x")
HEADER_BYTES = _HEADER.size  # a multiple of the alignment, so that the payload behind it is aligned too

_READY, _FAILED = 0, 1
_MAX_ROWS = 20


class Call(NamedTuple):
    """What a rank is about to do.

    Attributes:
        operation: Name of the public function.
        text: All that must be equal on every rank, as text.
        leaves: Gives what is known of each leaf, by path; asked only to explain a mismatch.
    """

    operation: str
    text: str = ""
    leaves: Callable[[], dict[str, str]] = dict


def capacity(ctx: Context) -> int:
    """Bytes of payload that fit into the opening exchange."""
    return ctx.collectives.chunk - HEADER_BYTES


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Do what may be refused on this rank alone, and keep the refusal for :func:`agree`."""
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 -- the other ranks must hear of it before it is raised
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
        The payload of each rank, in rank order.

    Raises:
        Exception: ``error`` itself, on the ranks that gave one.
        RemoteRankError: Another rank gave one.
        MismatchError: The calls differ; the same error on every rank.
        MissingRankError: A rank has ended instead.
        CollectiveTimeoutError: A rank did not come in time.
    """
    if error is not None:
        text = json.dumps([type(error).__name__, str(error)[: capacity(ctx) // 8]], ensure_ascii=False)
        payload = as_tensor(text.encode(errors="replace"))
    length = 0 if payload is None else payload.numel()
    fingerprint = hashlib.blake2b(f"{call.operation}\0{call.text}".encode(), digest_size=16).digest()
    message = as_tensor(_HEADER.pack(fingerprint, _READY if error is None else _FAILED, length))
    if payload is not None:
        message = torch.cat([message, payload])

    try:
        rows = ctx.collectives.exchange(message)
    except (MissingRankError, CollectiveTimeoutError) as lost:
        # The seam knows only of an exchange; the user called something else.
        raise type(lost)(f"{call.operation}: {lost}") from lost
    headers = [_HEADER.unpack(as_bytes(row, HEADER_BYTES)) for row in rows]
    payloads = [
        row[HEADER_BYTES : HEADER_BYTES + header[2]] for row, header in zip(rows, headers, strict=True)
    ]

    if error is not None:
        raise error
    for rank, header in enumerate(headers):
        if header[1] == _FAILED:
            cause, text = json.loads(as_bytes(payloads[rank]))
            raise RemoteRankError(rank, cause, text, call.operation)
    if any(header[0] != headers[0][0] for header in headers):
        raise _explain(ctx, call)
    if ctx.debug and ctx.world.size > 1:  # only here is it certain that every rank is ready to compare
        _compare(ctx, call)
    return payloads


def check_rank(ctx: Context, operation: str, name: str, rank: int) -> None:
    """Refuse a rank that isn't in the world."""
    if not isinstance(cast("object", rank), int):
        raise TypeError(f"{operation}: {name} must be a whole number, got {rank!r}.")
    if not 0 <= rank < ctx.world.size:
        raise ValueError(f"{operation}: {name} must be a rank in 0..{ctx.world.size - 1}, got {rank}.")


def layout_call(operation: str, options: str, layout: Layout) -> Call:
    """Describe an operation on a tree of tensors."""
    return Call(operation, f"{options}\0{layout.describe()}", lambda: _layout_leaves(layout))


def describe_tree(operation: str, tree: Any, options: str = "") -> Call:
    """Describe an operation on a tree whose leaves may be anything."""
    leaves, structure = flatten(tree)
    kinds = [_kind(leaf) for leaf in leaves]
    return Call(
        operation,
        f"{options}\0{structure.describe()}{kinds}",
        lambda: dict(zip(structure.paths(), kinds, strict=True)),
    )


def verify_structure(ctx: Context, tree: Any) -> None:
    """Check that every rank has a tree of the same structure, shapes and dtypes.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        tree: Any tree. Of leaves that are no tensors the type is compared.

    Raises:
        MismatchError: The trees differ: the same error on every rank, with rank and path of each difference.
    """
    if ctx.world.size == 1:
        return
    agree(ctx, describe_tree("verify_structure", tree))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return _tensor_kind(leaf.dtype, tuple(leaf.shape))
    return type(leaf).__name__


def _tensor_kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _layout_leaves(layout: Layout) -> dict[str, str]:
    kinds = (_tensor_kind(dtype, shape) for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True))
    return dict(zip(layout.structure.paths(), kinds, strict=True))


def _compare(ctx: Context, call: Call) -> None:
    """Compare the calls in full, not by their fingerprints."""
    error = _explain(ctx, call)
    if error.rows:
        raise error


def _explain(ctx: Context, call: Call) -> MismatchError:
    """Let every rank tell in full what it called, and find where they differ: the same on every rank."""
    said = [
        json.loads(blob)
        for blob in _gather_all(ctx, json.dumps([call.operation, call.text, call.leaves()]).encode())
    ]
    return _difference([(operation, text, leaves) for operation, text, leaves in said])


def _difference(said: Sequence[tuple[str, str, dict[str, str]]]) -> MismatchError:
    """Find what differs between the calls of the ranks. Pure."""
    rows: list[Disagreement] = []
    expected_call = _most([one[0] for one in said])
    for rank, one in enumerate(said):
        if one[0] != expected_call:
            rows.append(Disagreement(rank, "", f"a call of {expected_call}", f"a call of {one[0]}"))
    if not rows:
        paths = dict.fromkeys(path for one in said for path in one[2])
        for path in paths:
            kinds = [one[2].get(path, "no such leaf") for one in said]
            expected = _most(kinds)
            rows += [
                Disagreement(rank, path, expected, kind)
                for rank, kind in enumerate(kinds)
                if kind != expected
            ]
    if not rows:
        # Options come before the structure; where they are equal, the kinds of containers differ.
        options = [one[1].partition("\0")[0] for one in said]
        texts = options if len(set(options)) > 1 else [one[1].rpartition("\0")[2] for one in said]
        expected = _most(texts)
        rows = [
            Disagreement(rank, "", expected[:200], text[:200])
            for rank, text in enumerate(texts)
            if text != expected
        ]
    left_out = len(rows) - _MAX_ROWS
    hint = (
        "Every rank must call the same operation with the same options on a tree of the same structure, "
        "shapes and dtypes."
    )
    if left_out > 0:
        hint = f"  ... and {left_out} more\n{hint}"
    return MismatchError(expected_call, tuple(rows[:_MAX_ROWS]), hint)


def _most(values: list[str]) -> str:
    """Give the most common value; of equally common ones that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]


def _gather_all(ctx: Context, blob: bytes) -> list[bytes]:
    """Gather bytes of any length, with no agreement before: every rank is known to be here."""
    lengths = [
        struct.unpack("<Q", as_bytes(row, 8))[0]
        for row in ctx.collectives.exchange(as_tensor(struct.pack("<Q", len(blob))))
    ]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(blob)] = as_tensor(blob)
    rows = ctx.collectives.all_gather(padded).view(len(lengths), -1)
    return [as_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]
