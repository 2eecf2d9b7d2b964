"""Rank 0 hands each rank its part of a step: the form of the data once, the data in one message."""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from accelfn.comm import Call, agree
from accelfn.comm.agreement import capacity
from accelfn.comm.wire import as_bytes, as_tensor, padded_size
from accelfn.context import Context
from accelfn.tree import TreeSpec, flatten

__all__ = ("BatchScatter", "CannotSendError", "Received")

# Flags, bytes of what is sent beside the data, bytes of each rank's data on the CPU and on a device.
_STEP = struct.Struct("<B3xIQQ8x")
_END, _REFUSED, _INLINE = 1, 2, 4

# What may stand beside the tensors, if it is the same for all ranks.
_CONSTANTS = (str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size)

_WAYS_OUT = (
    "Make tensors of it in collate_fn, leave it out with slice_fn, or use dispatch_batches=False, with which "
    "each rank reads its own batches."
)


class CannotSendError(TypeError):
    """A batch can't be dispatched; every rank raises a TypeError that says the same."""

    def __init__(self, what: str) -> None:
        """Return what can't be sent, and the alternatives."""
        super().__init__(what)

    def __str__(self) -> str:
        return f"dispatch_batches: {self.args[0]} {_WAYS_OUT}"


class Received(NamedTuple):
    """What came of one step.

    Attributes:
        parts: This rank's part alone; empty where it has none in this step.
        facts: What rank 0 sent beside it.
    """

    parts: tuple[Any, ...]
    facts: Any


class _Form(NamedTuple):
    """What all parts of a step have in common.

    Attributes:
        structure: Of each part.
        leaves: Of a tensor its dtype and whether it is on a device, of anything else its type and value.
    """

    structure: TreeSpec
    leaves: list[tuple[Any, Any]]


class _Span(NamedTuple):
    """Where a tensor is in the bytes of its part."""

    leaf: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool
    start: int
    end: int


class _Place(NamedTuple):
    """Where the tensors of one part lie.

    Attributes:
        spans: Of each tensor.
        cpu_bytes: Of those on the CPU together.
        device_bytes: Of those on a device together.
        stays: Of each of the two the dtype that has most bytes. What is received of it stays where it was
            received; the rest is copied, since torch saves no memory that is seen as several dtypes.
    """

    spans: list[_Span]
    cpu_bytes: int
    device_bytes: int
    stays: dict[bool, torch.dtype]


class BatchScatter:
    """The way of parts from rank 0 to all ranks, during one pass over data.

    A step is one exchange in which small parts travel too, and for larger ones a scatter for what is on the
    CPU and one for what is on a device. Structure and dtypes are sent when they change, and so are shapes;
    what a container carries beside its items counts as part of the structure that was sent last.
    """

    def __init__(self, ctx: Context, what: str) -> None:
        """Begin; ``what`` is the same on every rank."""
        self._ctx = ctx
        self._rank = ctx.coordinate("dp")  # whose part this rank gets
        self._size = ctx.axis_size("dp")
        # Rank 0 has its own part already; it sends that where others share it.
        self._first = 1 if self._size == ctx.num_processes else 0
        self._call = Call("a dispatched batch", what, pairs=True, takes_long=True)
        self._form: _Form | None = None
        self._shapes: list[list[tuple[int, ...]]] = []
        self._places: list[_Place] = []
        self._buffers: dict[bool, torch.Tensor] = {}

    def send(self, parts: Sequence[Any], facts: Any = None) -> None:
        """Send each rank its part: those that work on one batch together, the same one.

        Ranks: rank 0; the others :meth:`receive`.

        Args:
            parts: One tree for each place along ``"dp"``, in order; fewer where the last ones have none.
            facts: Small and picklable, for every rank.

        Raises:
            TypeError: The parts differ in structure, or hold something else than tensors and equal constants;
                on every rank.
        """
        if self._ctx.num_processes == 1:
            return
        try:
            form, leaves = _common_form(parts)
        except CannotSendError as error:
            self.refuse(error)
        told = self._tell(form, leaves, facts)
        first = self._first
        cpu_bytes = max((place.cpu_bytes for place in self._places[first : len(parts)]), default=0)
        device_bytes = max((place.device_bytes for place in self._places[first : len(parts)]), default=0)
        head = len(told) + _STEP.size
        small = padded_size(head) + (len(parts) - first) * cpu_bytes
        if not device_bytes and small <= capacity(self._ctx):
            message = torch.empty(small, dtype=torch.uint8)
            message[:head] = as_tensor(_STEP.pack(_INLINE, len(told), cpu_bytes, 0) + told)
            for rank in range(first, len(parts)):
                start = padded_size(head) + (rank - first) * cpu_bytes
                _fill(message[start:], self._places[rank], leaves[rank], on_device=False)
            agree(self._ctx, self._call, message)
            return
        self._say(0, told, cpu_bytes, device_bytes)
        for on_device, size in ((False, cpu_bytes), (True, device_bytes)):
            if size:
                self._scatter(leaves, size, on_device)

    def end(self) -> None:
        """Announce the end of the data. Rank 0; the others :meth:`receive`."""
        if self._ctx.num_processes > 1:
            self._say(_END, b"", 0, 0)

    def refuse(self, error: TypeError) -> NoReturn:
        """Raise ``error`` here, and one that says the same on the ranks that :meth:`receive`."""
        if self._ctx.num_processes > 1:
            self._say(_REFUSED, str(error).encode(errors="replace"), 0, 0)
        raise error

    def receive(self) -> Received | None:
        """Wait for this rank's part.

        Ranks: all but rank 0.

        Returns:
            The part, in memory of its own; None when there is no more data.

        Raises:
            TypeError: Rank 0 has a batch that can't be sent.
            RemoteRankError: Rank 0 has failed.
        """
        ctx = self._ctx
        row = agree(ctx, self._call)[0]
        flags, length, cpu_bytes, device_bytes = _STEP.unpack(as_bytes(row, _STEP.size))
        head = _STEP.size + length
        told = as_bytes(row[_STEP.size :], min(length, row.numel() - _STEP.size))
        if head > row.numel():
            rest = torch.empty(head - row.numel(), dtype=torch.uint8)
            ctx.collectives.broadcast(rest, 0)
            told += as_bytes(rest)
        if flags & _END:
            return None
        if flags & _REFUSED:
            raise TypeError(told.decode())
        facts = self._hear(told)
        place = self._places[0] if self._places else None
        buffers: dict[bool, torch.Tensor] = {}
        if flags & _INLINE:
            start = padded_size(head) + (self._rank - self._first) * cpu_bytes
            buffers[False] = row[start : start + cpu_bytes]
        else:
            for on_device, size in ((False, cpu_bytes), (True, device_bytes)):
                if size:
                    buffers[on_device] = torch.empty(
                        size, dtype=torch.uint8, device=ctx.device if on_device else "cpu"
                    )
                    ctx.collectives.scatter(buffers[on_device], None, 0)
        if place is None or self._form is None:
            return Received((), facts)
        leaves = [value for _, value in self._form.leaves]
        for span in place.spans:
            if span.start == span.end:
                device = ctx.device if span.on_device else "cpu"
                leaves[span.leaf] = torch.empty(span.shape, dtype=span.dtype, device=device)
                continue
            data = buffers[span.on_device][span.start : span.end]
            if flags & _INLINE or span.dtype != place.stays[span.on_device]:
                data = data.clone()  # the next exchange may write over what came with this one
            leaves[span.leaf] = data.view(span.dtype).view(span.shape)
        return Received((self._form.structure.unflatten(leaves),), facts)

    def _say(self, flags: int, told: bytes, cpu_bytes: int, device_bytes: int) -> None:
        """Open a step, with all that is sent in it."""
        message = _STEP.pack(flags, len(told), cpu_bytes, device_bytes) + told
        first = capacity(self._ctx)
        agree(self._ctx, self._call, as_tensor(message[:first]))
        if len(message) > first:
            self._ctx.collectives.broadcast(as_tensor(message[first:]), 0)

    def _tell(self, form: _Form, leaves: list[list[Any]], facts: Any) -> bytes:
        """Write down what the other ranks don't know yet."""
        form_told = shapes_told = None
        if form != self._form:
            form_told = _write_form(form)
        shapes = [[tuple(leaf.shape) for leaf in one if isinstance(leaf, torch.Tensor)] for one in leaves]
        if form_told is not None or shapes != self._shapes:
            # Most often all ranks have the same.
            alike = all(one == shapes[0] for one in shapes[1:]) and len(shapes) == self._size
            shapes_told = (alike, shapes[:1] if alike else shapes)
            self._places = [_place(form, one) for one in shapes_told[1]] * (len(shapes) if alike else 1)
        self._form, self._shapes = form, shapes
        if facts is None and form_told is None and shapes_told is None:
            return b""
        return pickle.dumps((facts, form_told, shapes_told))

    def _hear(self, told: bytes) -> Any:
        """Store what rank 0 sent; keeps this rank's place alone."""
        if not told:
            return None
        facts, form, shapes = pickle.loads(told)
        if form is not None:
            self._form = _read_form(form)
        if shapes is not None and self._form is not None:
            alike, by_rank = shapes
            own = by_rank[:1] if alike else by_rank[self._rank : self._rank + 1]
            self._places = [_place(self._form, one) for one in own]
        return facts

    def _scatter(self, leaves: list[list[Any]], size: int, on_device: bool) -> None:
        """Send the parts of the others; rank 0's own has no content, and comes back to where it is."""
        ctx = self._ctx
        number = ctx.num_processes
        buffer = self._buffers.get(on_device)
        if buffer is None or buffer.numel() != number * size:
            # Kept for the next step, since fresh memory of that size has to be brought in page by page.
            buffer = torch.empty(number * size, dtype=torch.uint8, device=ctx.device if on_device else "cpu")
            self._buffers[on_device] = buffer
        plan = None if ctx.mesh is None else ctx.mesh.plan
        for rank in range(1, number):
            part = rank if plan is None else plan.coordinate(rank, "dp")
            if part < len(leaves):
                _fill(buffer[rank * size :], self._places[part], leaves[part], on_device)
        ctx.collectives.scatter(buffer[:size], buffer, 0)


def _common_form(parts: Sequence[Any]) -> tuple[_Form, list[list[Any]]]:
    """Flatten the parts, and check that they differ in nothing but their tensors' values and shapes."""
    first, structure = flatten(parts[0])
    leaves = [first]
    for rank, part in enumerate(parts[1:], 1):
        own, other = flatten(part)
        if other != structure:
            raise CannotSendError(
                f"the batches of one step must have one structure, and the one for rank {rank} has another "
                f"than the one for rank 0: {other.describe()} instead of {structure.describe()}."
            )
        leaves.append(own)
    kinds = [_kind(leaf, structure, index) for index, leaf in enumerate(first)]
    for rank, own in enumerate(leaves[1:], 1):
        for index, leaf in enumerate(own):
            kind = _kind(leaf, structure, index)
            if kind != kinds[index] and leaf is not first[index]:
                what = f"{structure.paths()[index]} must be a tensor of one dtype, or the same for all ranks;"
                raise CannotSendError(
                    f"{what} rank 0's part has {_shown(first[index])} there and rank {rank}'s {_shown(leaf)}."
                )
    return _Form(structure, kinds), leaves


def _kind(leaf: Any, structure: TreeSpec, index: int) -> tuple[Any, Any]:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout == torch.strided and not leaf.is_meta:
            return leaf.dtype, leaf.device.type != "cpu"
    elif isinstance(leaf, _CONSTANTS):
        return type(leaf), leaf
    raise CannotSendError(
        f"{structure.paths()[index]} must be a dense tensor, a string or a number, got {_shown(leaf)}."
    )


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {leaf.dtype}, layout {leaf.layout}, on {leaf.device}"
    text = repr(leaf)
    return f"{type(leaf).__name__} {text if len(text) <= 40 else f'{text[:40]}...'}"


def _write_form(form: _Form) -> Any:
    # Tensors, so that containers that look at what they are given get what they expect; dtypes beside, since
    # torch can't pickle a tensor of every one.
    are_tensors = [isinstance(kind, torch.dtype) for kind, _ in form.leaves]
    stubs = [
        torch.empty(0) if is_tensor else value
        for is_tensor, (_, value) in zip(are_tensors, form.leaves, strict=True)
    ]
    kinds = [leaf if is_tensor else None for is_tensor, leaf in zip(are_tensors, form.leaves, strict=True)]
    return form.structure.unflatten(stubs), kinds


def _read_form(written: Any) -> _Form:
    tree, kinds = written
    leaves, structure = flatten(tree)
    return _Form(structure, [kind or (type(leaf), leaf) for leaf, kind in zip(leaves, kinds, strict=True)])


def _place(form: _Form, shapes: Sequence[tuple[int, ...]]) -> _Place:
    """Pack the tensors of a part end to end, each at an address that suits any dtype."""
    spans: list[_Span] = []
    ends = {False: 0, True: 0}
    sums: dict[tuple[bool, torch.dtype], int] = {}
    left = iter(shapes)
    for index, (dtype, on_device) in enumerate(form.leaves):
        if not isinstance(dtype, torch.dtype):
            continue
        shape = next(left)
        start = ends[on_device]
        end = start + math.prod(shape) * dtype.itemsize
        spans.append(_Span(index, dtype, shape, on_device, start, end))
        ends[on_device] = padded_size(end)
        sums[on_device, dtype] = sums.get((on_device, dtype), 0) + end - start
    # The last one that is set is the one that has most.
    stays = dict(sorted(sums, key=lambda one: sums[one]))
    return _Place(spans, ends[False], ends[True], stays)


def _fill(target: torch.Tensor, place: _Place, leaves: Sequence[Any], on_device: bool) -> None:
    for span in place.spans:
        if span.on_device == on_device and span.start < span.end:
            there = target[span.start : span.end].view(span.dtype).view(span.shape)
            there.copy_(leaves[span.leaf].detach())
