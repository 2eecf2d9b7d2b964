"""Gather and broadcast Python objects.

They are pickled between the ranks of one program, and never written to disk.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, TypeVar, cast, overload

import torch

from accelfn.comm.agreement import Call, agree, as_bytes, as_tensor, capacity, catch, check_rank
from accelfn.context import Context, check_context

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")


@overload
def gather_object(ctx: Context, obj: list[T]) -> list[T]: ...
@overload
def gather_object(ctx: Context, obj: T) -> list[T]: ...
def gather_object(ctx: Context, obj: Any) -> list[Any]:
    """Gather the Python objects of all ranks in one list.

    Lists are concatenated in rank order; any other object counts as a list of one.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        obj: Any picklable object. For tensors use :func:`accelfn.gather`.

    Returns:
        The same list on every rank. With one process, a list itself.

    Raises:
        Exception: Pickle's error, on the rank whose object can't be pickled.
        RemoteRankError: The object of another rank can't be pickled.

    >>> gather_object(Context(), ["a", "b"]), gather_object(Context(), {"score": 1})
    (['a', 'b'], [{'score': 1}])
    """
    check_context("gather_object", ctx)
    objects = cast("list[Any]", obj) if isinstance(obj, list) else [obj]
    if ctx.world.size == 1:
        return objects
    blob, error = catch(lambda: pickle.dumps(objects))
    blobs = gather_bytes(ctx, Call("gather_object", pairs=True), blob or b"", error)
    return [item for rank in blobs for item in pickle.loads(rank)]


def broadcast_object_list(ctx: Context, objs: list[T], from_process: int = 0) -> list[T]:
    """Send every rank the list of Python objects of rank ``from_process``.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        objs: On ``from_process`` the list to send; ignored elsewhere.
        from_process: The rank that sends.

    Returns:
        On ``from_process`` the list itself, elsewhere a new list.

    Raises:
        ValueError: ``from_process`` isn't a rank.
        TypeError: ``objs`` isn't a list.
        RemoteRankError: The objects of the sending rank can't be pickled.

    >>> broadcast_object_list(Context(), ["a", 1])
    ['a', 1]
    """
    check_context("broadcast_object_list", ctx)
    sends = ctx.world.rank == from_process

    def prepare() -> bytes:
        check_rank(ctx, "broadcast_object_list", "from_process", from_process)
        if not isinstance(cast("object", objs), list):
            raise TypeError(
                f"broadcast_object_list: objs must be a list, got {type(objs).__name__}. Wrap it: [obj]."
            )
        return pickle.dumps(objs) if sends and ctx.world.size > 1 else b""

    blob, error = catch(prepare)
    if ctx.world.size == 1:
        if error is not None:
            raise error
        return objs
    call = Call("broadcast_object_list", f"from {from_process}")
    received = broadcast_bytes(ctx, call, blob or b"", from_process, error)
    return objs if sends else pickle.loads(received)


def gather_bytes(ctx: Context, call: Call, blob: bytes, error: Exception | None = None) -> list[bytes]:
    """Gather bytes of any length, one entry per rank. Opens the operation ``call``."""
    first = capacity(ctx) - _LENGTH.size
    rows = agree(ctx, call, as_tensor(_LENGTH.pack(len(blob)) + blob[:first]), error)
    lengths = [_LENGTH.unpack(as_bytes(row, _LENGTH.size))[0] for row in rows]
    heads = [as_bytes(row[_LENGTH.size :]) for row in rows]
    rest = max(lengths) - first
    if rest <= 0:
        return heads
    padded = torch.zeros(rest, dtype=torch.uint8, device="cpu")
    tail = as_tensor(blob[first:])
    padded[: tail.numel()] = tail
    joined = ctx.collectives.all_gather(padded).view(len(rows), rest)
    return [
        head + as_bytes(row[: max(0, length - first)])
        for head, row, length in zip(heads, joined, lengths, strict=True)
    ]


def broadcast_bytes(
    ctx: Context, call: Call, blob: bytes, source: int, error: Exception | None = None
) -> bytes:
    """Send every rank the bytes of rank ``source``. Opens the operation ``call``."""
    first = capacity(ctx) - _LENGTH.size
    sends = ctx.world.rank == source
    rows = agree(ctx, call, as_tensor(_LENGTH.pack(len(blob)) + blob[:first]) if sends else None, error)
    row = rows[source]
    length = _LENGTH.unpack(as_bytes(row, _LENGTH.size))[0]
    head = as_bytes(row[_LENGTH.size :])  # copied now, since the broadcast may overwrite the row
    if length <= first:
        return head
    tail = as_tensor(blob[first:]) if sends else torch.empty(length - first, dtype=torch.uint8, device="cpu")
    ctx.collectives.broadcast(tail, source)
    return blob if sends else head + as_bytes(tail)
