"""Send each rank its part of a step from rank 0: what isn't a tensor as a pickle, tensors as bytes."""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from accelfn.comm import Call, agree
from accelfn.comm.agreement import as_bytes, as_tensor, capacity, padded_size
from accelfn.context import Context

__all__ = ("BatchScatter",)

# Bytes of the pickle, and of each rank's tensors on the CPU and on a device; whether tensors come at once.
_STEP = struct.Struct("<QQQ?7x")


class _Stub(NamedTuple):
    """Where the bytes of a tensor are in those of its part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool
    start: int
    end: int


class _Encoded(pickle.Pickler):
    """A part: its pickle, in which tensors are stubs, and the tensors."""

    def __init__(self, part: Any) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[torch.Tensor, _Stub]] = []
        self.num_bytes = {False: 0, True: 0}  # on the CPU, on a device
        self.dump(part)
        self.pickled = self._stream.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        """Return the stub of a dense tensor; anything else is pickled."""
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided or obj.is_meta:
            return None
        on_device = obj.device.type != "cpu"
        start = self.num_bytes[on_device]
        end = start + math.prod(obj.shape) * obj.dtype.itemsize
        self.num_bytes[on_device] = padded_size(end)  # at an address that suits any dtype
        stub = _Stub(obj.dtype, tuple(obj.shape), on_device, start, end)
        self.tensors.append((obj, stub))
        return tuple(stub)

    def write(self, target: torch.Tensor, on_device: bool) -> None:
        """Write the tensors' bytes into ``target``."""
        for tensor, stub in self.tensors:
            if stub.on_device == on_device and stub.start < stub.end:
                target[stub.start : stub.end].view(stub.dtype).view(stub.shape).copy_(tensor.detach())


class _Decoder(pickle.Unpickler):
    """Unpickles a part, with its tensors from the buffers of the CPU and of a device."""

    def __init__(self, pickled: bytes, buffers: dict[bool, torch.Tensor], device: torch.device) -> None:
        super().__init__(io.BytesIO(pickled))
        self._buffers = buffers
        self._device = device
        self._kept: torch.dtype | None = None

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Return the tensor of a stub."""
        stub = _Stub(*pid)
        if stub.start == stub.end:
            return torch.empty(stub.shape, dtype=stub.dtype, device=self._device if stub.on_device else "cpu")
        self._kept = self._kept or stub.dtype
        data = self._buffers[stub.on_device][stub.start : stub.end].view(stub.dtype).view(stub.shape)
        # torch can't save memory that is seen as several dtypes, so those after the first one are copied.
        return data if stub.dtype == self._kept else data.clone()


class BatchScatter:
    """Sends parts from rank 0 to all ranks, during one pass over data.

    A step is one exchange, in which small parts travel too; larger ones follow in a scatter of what is on the
    CPU and one of what is on a device.
    """

    def __init__(self, ctx: Context, what: str) -> None:
        """Begin; ``what`` is the same on every rank."""
        self._ctx = ctx
        # Rank 0 has its own part already; it sends that where others share it.
        self._first = 1 if ctx.axis_size("dp") == ctx.num_processes else 0
        self._call = Call("a dispatched batch", what, pairs=True, takes_long=True)
        self._buffers: dict[bool, torch.Tensor] = {}

    def send(self, parts: Sequence[Any], facts: Any = None) -> None:
        """Send each rank its part: those that work on one batch together, the same one.

        Ranks: rank 0; the others :meth:`receive`.

        Args:
            parts: One for each place along ``"dp"``, in order; fewer where the last ones have none.
            facts: Small, for every rank.

        Raises:
            Exception: A part can't be pickled.
        """
        if self._ctx.num_processes == 1:
            return
        sent = [_Encoded(part) for part in parts[self._first :]]
        pickles = [one.pickled for one in sent]
        if len(set(pickles)) == 1:  # most often ranks differ in nothing but tensors' values
            pickles = pickles[:1]
        message = pickle.dumps((facts, len(sent), pickles))
        sizes = {key: max((one.num_bytes[key] for one in sent), default=0) for key in (False, True)}
        inline = padded_size(_STEP.size + len(message))
        if not sizes[True] and inline + len(sent) * sizes[False] <= capacity(self._ctx):
            payload = torch.empty(inline + len(sent) * sizes[False], dtype=torch.uint8)
            head = as_tensor(_STEP.pack(len(message), sizes[False], 0, True) + message)
            payload[: head.numel()] = head
            for place, one in enumerate(sent):
                one.write(payload[inline + place * sizes[False] :], on_device=False)
            agree(self._ctx, self._call, payload)
            return
        self._open(_STEP.pack(len(message), sizes[False], sizes[True], False) + message)
        for on_device, size in sizes.items():
            if size:
                self._scatter(sent, size, on_device)

    def end(self) -> None:
        """Announce the end of the data. Rank 0; the others :meth:`receive`."""
        if self._ctx.num_processes > 1:
            self._open(_STEP.pack(0, 0, 0, False))

    def receive(self) -> tuple[list[Any], Any] | None:
        """Wait for this rank's part.

        Ranks: all but rank 0.

        Returns:
            A list of the part, in memory of its own, empty where there is none in this step; and the facts.
            None when there is no more data.

        Raises:
            RemoteRankError: Rank 0 has failed.
        """
        ctx = self._ctx
        row = agree(ctx, self._call)[0]
        length, cpu_bytes, device_bytes, is_inline = _STEP.unpack(as_bytes(row, _STEP.size))
        if not length:
            return None
        head = _STEP.size + length
        message = as_bytes(row[_STEP.size :], min(length, row.numel() - _STEP.size))
        if head > row.numel():
            rest = torch.empty(head - row.numel(), dtype=torch.uint8)
            ctx.collectives.broadcast(rest, 0)
            message += as_bytes(rest)
        facts, num_parts, pickles = pickle.loads(message)
        place = ctx.coordinate("dp") - self._first
        buffers: dict[bool, torch.Tensor] = {}
        if is_inline:  # the next exchange may write over what came with this one
            start = padded_size(head) + place * cpu_bytes
            buffers[False] = row[start : start + cpu_bytes].clone()
        else:
            for on_device, size in ((False, cpu_bytes), (True, device_bytes)):
                if size:
                    device = ctx.device if on_device else "cpu"
                    buffers[on_device] = torch.empty(size, dtype=torch.uint8, device=device)
                    ctx.collectives.scatter(buffers[on_device], None, 0)
        if place >= num_parts:
            return [], facts
        return [_Decoder(pickles[place % len(pickles)], buffers, ctx.device).load()], facts

    def _open(self, message: bytes) -> None:
        """Open a step with ``message``; what doesn't fit into the exchange follows it."""
        fits = capacity(self._ctx)
        agree(self._ctx, self._call, as_tensor(message[:fits]))
        if len(message) > fits:
            self._ctx.collectives.broadcast(as_tensor(message[fits:]), 0)

    def _scatter(self, sent: Sequence[_Encoded], size: int, on_device: bool) -> None:
        """Send the parts of the others; what rank 0 receives itself has no content."""
        ctx, number = self._ctx, self._ctx.num_processes
        buffer = self._buffers.get(on_device)
        if buffer is None or buffer.numel() != number * size:
            # Kept for the next step, since fresh memory of that size has to be brought in page by page.
            buffer = torch.empty(number * size, dtype=torch.uint8, device=ctx.device if on_device else "cpu")
            self._buffers[on_device] = buffer
        plan = None if ctx.mesh is None else ctx.mesh.plan
        for rank in range(1, number):
            place = (rank if plan is None else plan.coordinate(rank, "dp")) - self._first
            if place < len(sent):
                sent[place].write(buffer[rank * size :], on_device)
        ctx.collectives.scatter(buffer[:size], buffer, 0)
