"""Gather, broadcast and scatter Python objects.

They are pickled between the ranks of one program, and never written to disk.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast, overload

import torch

from accelfn.comm.agreement import (
    Call,
    agree,
    as_bytes,
    as_tensor,
    capacity,
    catch,
    check_rank,
    gather_known,
    padded_size,
)
from accelfn.context import Context, takes_context

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")


@overload
def gather_object(ctx: Context, obj: list[T]) -> list[T]: ...
@overload
def gather_object(ctx: Context, obj: T) -> list[T]: ...
@takes_context
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
    objects = cast("list[Any]", obj) if isinstance(obj, list) else [obj]
    if ctx.world.size == 1:
        return objects
    blob, error = catch(lambda: pickle.dumps(objects))
    blobs = gather_bytes(ctx, Call("gather_object", pairs=True), blob or b"", error)
    return [item for rank in blobs for item in pickle.loads(rank)]


@takes_context
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
    rest = [max(0, length - first) for length in lengths]
    senders = [rank for rank, length in enumerate(rest) if length]
    if not senders:
        return heads
    if 2 * len(senders) > len(rest):
        tails = gather_known(ctx, blob[first:], rest)
        return [head + tail for head, tail in zip(heads, tails, strict=True)]
    for rank in senders:  # in a gather, all others would send as many bytes of padding
        tail = as_tensor(blob[first:])
        if rank != ctx.rank:
            tail = torch.empty(rest[rank], dtype=torch.uint8, device="cpu")
        ctx.collectives.broadcast(tail, rank)
        heads[rank] += as_bytes(tail)
    return heads


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


class _Encoder(pickle.Pickler):
    """Pickles an object with the place of each dense tensor instead of the tensor, and collects those.

    Attributes:
        pickled: The object without its tensors.
        num_bytes: Of the buffer that the tensors take together.
    """

    def __init__(self, obj: Any) -> None:
        stream = io.BytesIO()
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._tensors: list[tuple[torch.Tensor, int]] = []
        self.num_bytes: int = 0
        self.dump(obj)
        self.pickled: bytes = stream.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        """Return dtype, shape, whether it is on a device, and place of a dense tensor; None for the rest."""
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided or obj.is_meta:
            return None
        start = self.num_bytes
        self._tensors.append((obj, start))
        self.num_bytes = padded_size(start + obj.numel() * obj.dtype.itemsize)  # aligned for any dtype
        return obj.dtype, tuple(obj.shape), obj.device.type != "cpu", start

    def write(self, target: torch.Tensor) -> torch.Tensor:
        """Copy the tensors' bytes into ``target``, and return it."""
        for tensor, start in self._tensors:
            if size := tensor.numel() * tensor.dtype.itemsize:
                place = target[start : start + size].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor.detach())
        return target


class _Decoder(pickle.Unpickler):
    """Unpickles an object, with views of a buffer as its tensors."""

    def __init__(self, pickled: bytes, buffer: torch.Tensor, device: torch.device) -> None:
        super().__init__(io.BytesIO(pickled))
        self._buffer = buffer
        self._device = device
        self._viewed_dtype: torch.dtype | None = None

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Return a tensor."""
        dtype, shape, on_device, start = pid
        device = self._device if on_device else torch.device("cpu")
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device=device)
        data = self._buffer[start : start + size].view(dtype).view(shape).to(device)
        self._viewed_dtype = self._viewed_dtype or dtype
        # torch.save can't store one memory under several dtypes: only the first dtype is a view of it.
        return data if dtype == self._viewed_dtype else data.clone()


class ObjectScatter:
    """Sends objects from rank 0, step by step: each rank its own, and a small one to all.

    A step is one exchange, which also carries small tensors; large ones follow in one scatter.
    """

    def __init__(self, ctx: Context, call: Call) -> None:
        """Send to the ranks of ``ctx`` along ``"dp"``; ranks that share a coordinate get the same object."""
        self._ctx, self._call = ctx, call
        # Rank 0's object needs no sending, unless other ranks share it.
        self._first = 1 if ctx.axis_size("dp") == ctx.num_processes else 0
        self._buffer = as_tensor(b"")

    def exchange(self, steps: Iterator[tuple[Sequence[Any], Any]] | None) -> tuple[Sequence[Any], Any] | None:
        """Carry out one step.

        Ranks: every rank of the world.

        Args:
            steps: On rank 0, yields the objects of the ranks that have one, and a small value for all.

        Returns:
            A list of this rank's object, in memory that nothing else uses, empty where it has none in this
            step; and the value. None at the end of the steps.

        Raises:
            Exception: An object can't be pickled.
            RemoteRankError: Rank 0 has failed.
        """
        if steps is None:
            return self._receive()
        step = next(steps, None)
        if self._ctx.num_processes > 1:
            self._send(step)
        return None if step is None else (step[0][:1], step[1])

    def _send(self, step: tuple[Sequence[Any], Any] | None) -> None:
        ctx = self._ctx
        if step is None:
            broadcast_bytes(ctx, self._call, b"", 0)
            return
        encoded = [_Encoder(obj) for obj in step[0][self._first :]]
        size = max((one.num_bytes for one in encoded), default=0)
        pickles = [one.pickled for one in encoded]
        if len(set(pickles)) == 1:  # usually they differ only in the values of their tensors
            pickles = pickles[:1]
        tensors: int | list[bytes] = size
        if not size or sum(map(len, pickles)) + len(encoded) * size <= capacity(ctx):
            empty = torch.empty(size, dtype=torch.uint8, device="cpu")
            tensors = [as_bytes(one.write(empty)) for one in encoded]
        broadcast_bytes(ctx, self._call, pickle.dumps((step[1], len(encoded), pickles, tensors)), 0)
        if isinstance(tensors, int):
            self._scatter(encoded, size)

    def _scatter(self, encoded: Sequence[_Encoder], size: int) -> None:
        """Send the other ranks' tensors; rank 0's own slot isn't filled."""
        ctx, number = self._ctx, self._ctx.num_processes
        if self._buffer.numel() != number * size:
            # Kept for the next step: fresh memory of that size would be faulted in page by page.
            self._buffer = torch.empty(number * size, dtype=torch.uint8, device="cpu")
        plan = None if ctx.mesh is None else ctx.mesh.plan
        for rank in range(1, number):
            index = (rank if plan is None else plan.coordinate(rank, "dp")) - self._first
            if index < len(encoded):
                encoded[index].write(self._buffer[rank * size :])
        ctx.collectives.scatter(self._buffer[:size], self._buffer, 0)

    def _receive(self) -> tuple[list[Any], Any] | None:
        ctx = self._ctx
        message = broadcast_bytes(ctx, self._call, b"", 0)
        if not message:
            return None
        value, number, pickles, tensors = pickle.loads(message)
        index = ctx.coordinate("dp") - self._first
        if isinstance(tensors, int):
            buffer = torch.empty(tensors, dtype=torch.uint8, device="cpu")
            ctx.collectives.scatter(buffer, None, 0)
        else:
            buffer = as_tensor(tensors[index] if index < number else b"")
        if index >= number:
            return [], value
        return [_Decoder(pickles[index % len(pickles)], buffer, ctx.device).load()], value
