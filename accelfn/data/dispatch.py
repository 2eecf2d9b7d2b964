"""Let rank 0 read the data of all ranks, and send each rank its part of every step."""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset

from accelfn.comm import Call, agree
from accelfn.comm.agreement import as_bytes, as_tensor, capacity, padded_size
from accelfn.context import Context
from accelfn.data.draws import read_isolated
from accelfn.data.plan import BatchInfo, EpochPlan
from accelfn.data.rebuild import Batches, ListsOf, batch_sampler_of, rebuild
from accelfn.errors import ConfigurationError
from accelfn.tree import flatten

__all__ = ("BatchScatter", "BatchSplitter", "DispatchedSteps", "SliceFunction", "check_slicing")

T = TypeVar("T")
_SLICE_FN = "slice_fn(batch, rows, *, process_index, num_processes)"


class SliceFunction(Protocol):
    """Returns one rank's rows of the batch of a whole step."""

    def __call__(self, batch: Any, part: slice, /, *, process_index: int, num_processes: int) -> Any:
        """Return rows ``part`` of ``batch``, which belong to rank ``process_index``."""
        ...


def check_slicing(source: DataLoader[Any], slice_fn: SliceFunction | None) -> None:
    """Refuse a ``slice_fn`` for a loader that makes no batches.

    Raises:
        ConfigurationError: The loader makes no batches.
    """
    if slice_fn is None:
        return
    is_stream = isinstance(source.dataset, IterableDataset)
    if (source.batch_size if is_stream else batch_sampler_of(source)) is None:
        raise ConfigurationError(
            "slice_fn slices the batch of a whole step, but a loader with batch_size=None makes no batches. "
            "Leave slice_fn out, or give the loader a batch size."
        )


class BatchSplitter:
    """Turns what rank 0's loader yields into the parts of the ranks.

    Attributes:
        splits_batch: Each step is one batch, whose rows are divided among the ranks; otherwise each rank
            gets a batch.
    """

    def __init__(self, ctx: Context, slice_fn: SliceFunction | None) -> None:
        """Split for the ranks of ``ctx``."""
        self._size = ctx.axis_size("dp")
        self._slice_fn = slice_fn
        self.splits_batch: bool = ctx.loading.split_batches or slice_fn is not None

    def parts(self, plan: EpochPlan, step: int, batches: Iterator[Any]) -> list[Any]:
        """Take the batches of a step, and return one tree for each rank that has rows."""
        rows = [plan.num_rows(step, rank) for rank in range(plan.size)]
        if not self.splits_batch:
            return list(islice(batches, sum(number > 0 for number in rows)))
        return self.split(next(batches), rows)

    def split(self, batch: Any, rows: Sequence[int]) -> list[Any]:
        """Split ``batch`` into one part for each rank that has rows; ``rows`` holds their numbers by rank."""
        rows = [number for number in rows if number]
        ends = list(accumulate(rows))
        slices = [slice(end - number, end) for number, end in zip(rows, ends, strict=True)]
        if self._slice_fn is None:
            return [batch] if self._size == 1 else _split_rows(batch, ends[-1], slices)
        parts = [
            self._slice_fn(batch, part, process_index=rank, num_processes=self._size)
            for rank, part in enumerate(slices)
        ]
        if any(part is None for part in parts):
            raise TypeError(f"{_SLICE_FN} must return these rows of the batch, but it returned None.")
        return parts


def _split_rows(batch: Any, rows: int, slices: Sequence[slice]) -> list[Any]:
    """Split tensors, and lists that hold one object per row.

    Raises:
        TypeError: A leaf doesn't have one row per sample, so that its rows would go to the wrong ranks.
    """

    def is_leaf(value: Any) -> bool:
        if type(value) not in (list, tuple):
            return isinstance(value, PackedSequence)
        return len(value) == rows and not any(
            isinstance(item, (torch.Tensor, list, tuple, dict, type(None))) for item in value
        )

    leaves, structure = flatten(batch, is_leaf)
    has_rows: list[bool] = []
    for index, leaf in enumerate(leaves):
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
        has_rows.append(len(shape) > 0 or (type(leaf) in (list, tuple) and len(leaf) > 0))
        if isinstance(leaf, PackedSequence) or (shape and shape[0] != rows):
            what = f"of shape {shape}" if shape else "a PackedSequence"
            raise TypeError(
                f"dispatch_batches can't split the batch: {structure.paths()[index]}, {what}, doesn't have "
                f"one row for each of its {rows} samples. Make it a tensor with one in collate_fn, split it "
                "with slice_fn, or use dispatch_batches=False, with which each rank reads its own batches."
            )
    return [
        structure.unflatten(
            [leaf[part] if splits else leaf for leaf, splits in zip(leaves, has_rows, strict=True)]
        )
        for part in slices
    ]


# Number of bytes of the pickle, and of each rank's tensors on the CPU and on the device; whether the tensors
# are in the same message.
_STEP = struct.Struct("<QQQ?7x")


class _Stub(NamedTuple):
    """Stands for a tensor in a pickle, and locates its bytes in the buffer of its part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool
    start: int
    end: int


class _Encoder(pickle.Pickler):
    """Pickles a part with stubs in place of its tensors, and collects the tensors."""

    def __init__(self, part: Any) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[torch.Tensor, _Stub]] = []
        self.num_bytes = {False: 0, True: 0}  # on the CPU, on the device
        self.dump(part)
        self.pickled = self._stream.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        """Return the stub of a dense tensor; anything else is pickled."""
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided or obj.is_meta:
            return None
        on_device = obj.device.type != "cpu"
        start = self.num_bytes[on_device]
        end = start + math.prod(obj.shape) * obj.dtype.itemsize
        self.num_bytes[on_device] = padded_size(end)  # aligned for any dtype
        stub = _Stub(obj.dtype, tuple(obj.shape), on_device, start, end)
        self.tensors.append((obj, stub))
        return tuple(stub)

    def write(self, target: torch.Tensor, on_device: bool) -> None:
        """Copy the tensors' bytes into ``target``."""
        for tensor, stub in self.tensors:
            if stub.on_device == on_device and stub.start < stub.end:
                target[stub.start : stub.end].view(stub.dtype).view(stub.shape).copy_(tensor.detach())


class _Decoder(pickle.Unpickler):
    """Unpickles a part, taking its tensors from the CPU's and the device's buffer."""

    def __init__(self, pickled: bytes, buffers: dict[bool, torch.Tensor], device: torch.device) -> None:
        super().__init__(io.BytesIO(pickled))
        self._buffers = buffers
        self._device = device
        self._viewed_dtype: torch.dtype | None = None

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Return the tensor of a stub."""
        stub = _Stub(*pid)
        if stub.start == stub.end:
            return torch.empty(stub.shape, dtype=stub.dtype, device=self._device if stub.on_device else "cpu")
        self._viewed_dtype = self._viewed_dtype or stub.dtype
        data = self._buffers[stub.on_device][stub.start : stub.end].view(stub.dtype).view(stub.shape)
        # torch.save can't store one memory under several dtypes: only the first dtype is a view of it.
        return data if stub.dtype == self._viewed_dtype else data.clone()


class BatchScatter:
    """Sends parts from rank 0 to all ranks, during one pass over the data.

    A step is one exchange, which also carries small parts; large parts follow in one scatter of the tensors
    on the CPU and one of those on the device.
    """

    def __init__(self, ctx: Context, what: str) -> None:
        """Prepare for a pass; ``what`` names it, the same on every rank."""
        self._ctx = ctx
        # Rank 0's part needs no sending, unless other ranks share it.
        self._first = 1 if ctx.axis_size("dp") == ctx.num_processes else 0
        self._call = Call("a dispatched batch", what, pairs=True, takes_long=True)
        self._buffers: dict[bool, torch.Tensor] = {}

    def exchange(self, steps: Iterator[tuple[Sequence[Any], Any]] | None) -> tuple[Sequence[Any], Any] | None:
        """Carry out one step.

        Ranks: every rank of the world.

        Args:
            steps: On rank 0, yields the parts of the ranks that have one, and a value for all ranks.

        Returns:
            A list of this rank's part, empty where it has none, and the value; None at the end of the data.
        """
        if steps is None:
            return self.receive()
        step = next(steps, None)
        if step is None:
            self.end()
            return None
        parts, facts = step
        self.send(parts, facts)
        return parts[:1], facts

    def send(self, parts: Sequence[Any], facts: Any = None) -> None:
        """Send each rank its part. Ranks that share a batch get the same part.

        Ranks: rank 0, while the others :meth:`receive`.

        Args:
            parts: One for each coordinate along ``"dp"``, in order; fewer where the last ranks have none.
            facts: A small value for every rank.

        Raises:
            Exception: A part can't be pickled.
        """
        if self._ctx.num_processes == 1:
            return
        encoded = [_Encoder(part) for part in parts[self._first :]]
        pickles = [part.pickled for part in encoded]
        if len(set(pickles)) == 1:  # usually the parts differ only in the values of their tensors
            pickles = pickles[:1]
        message = pickle.dumps((facts, len(encoded), pickles))
        sizes = {key: max((part.num_bytes[key] for part in encoded), default=0) for key in (False, True)}
        inline = padded_size(_STEP.size + len(message))
        if not sizes[True] and inline + len(encoded) * sizes[False] <= capacity(self._ctx):
            payload = torch.empty(inline + len(encoded) * sizes[False], dtype=torch.uint8, device="cpu")
            head = as_tensor(_STEP.pack(len(message), sizes[False], 0, True) + message)
            payload[: head.numel()] = head
            for index, part in enumerate(encoded):
                part.write(payload[inline + index * sizes[False] :], on_device=False)
            agree(self._ctx, self._call, payload)
            return
        self._announce(_STEP.pack(len(message), sizes[False], sizes[True], False) + message)
        for on_device, size in sizes.items():
            if size:
                self._scatter(encoded, size, on_device)

    def end(self) -> None:
        """Announce the end of the data. Rank 0, while the others :meth:`receive`."""
        if self._ctx.num_processes > 1:
            self._announce(_STEP.pack(0, 0, 0, False))

    def receive(self) -> tuple[list[Any], Any] | None:
        """Wait for this rank's part.

        Ranks: all but rank 0.

        Returns:
            A list of the part, in memory that nothing else uses, empty where this rank has none in this step;
            and the value that ``send`` was passed. None at the end of the data.

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
            remainder = torch.empty(head - row.numel(), dtype=torch.uint8, device="cpu")
            ctx.collectives.broadcast(remainder, 0)
            message += as_bytes(remainder)
        facts, num_parts, pickles = pickle.loads(message)
        index = ctx.coordinate("dp") - self._first
        buffers: dict[bool, torch.Tensor] = {}
        if is_inline:  # cloned, since the next exchange may reuse the memory of this one
            start = padded_size(head) + index * cpu_bytes
            buffers[False] = row[start : start + cpu_bytes].clone()
        else:
            for on_device, size in ((False, cpu_bytes), (True, device_bytes)):
                if size:
                    device = ctx.device if on_device else "cpu"
                    buffers[on_device] = torch.empty(size, dtype=torch.uint8, device=device)
                    ctx.collectives.scatter(buffers[on_device], None, 0)
        if index >= num_parts:
            return [], facts
        return [_Decoder(pickles[index % len(pickles)], buffers, ctx.device).load()], facts

    def _announce(self, message: bytes) -> None:
        """Send ``message`` to all ranks: what doesn't fit into the exchange follows in a broadcast."""
        limit = capacity(self._ctx)
        agree(self._ctx, self._call, as_tensor(message[:limit]))
        if len(message) > limit:
            self._ctx.collectives.broadcast(as_tensor(message[limit:]), 0)

    def _scatter(self, encoded: Sequence[_Encoder], size: int, on_device: bool) -> None:
        """Send the other ranks' tensors; rank 0's own slot isn't filled."""
        ctx, number = self._ctx, self._ctx.num_processes
        buffer = self._buffers.get(on_device)
        if buffer is None or buffer.numel() != number * size:
            # Kept for the next step: fresh memory of that size would be faulted in page by page.
            buffer = torch.empty(number * size, dtype=torch.uint8, device=ctx.device if on_device else "cpu")
            self._buffers[on_device] = buffer
        plan = None if ctx.mesh is None else ctx.mesh.plan
        for rank in range(1, number):
            index = (rank if plan is None else plan.coordinate(rank, "dp")) - self._first
            if index < len(encoded):
                encoded[index].write(buffer[rank * size :], on_device)
        ctx.collectives.scatter(buffer[:size], buffer, 0)


class DispatchedSteps(Generic[T]):
    """Carries out planned steps: rank 0 reads the batches of all ranks, and sends each rank its own.

    Attributes:
        splits_batch: Each step is read as one batch, whose rows are divided among the ranks.
    """

    def __init__(self, ctx: Context, source: DataLoader[T], slice_fn: SliceFunction | None) -> None:
        """Read with a loader like ``source``, on rank 0."""
        self._splitter = BatchSplitter(ctx, slice_fn)
        self.splits_batch: bool = self._splitter.splits_batch
        self._ctx = ctx
        self._batches = Batches()
        self._loader = rebuild(source, self._batches) if ctx.is_main_process else None

    def begin(
        self, plan: EpochPlan, lists: ListsOf, infos: Iterator[BatchInfo], epoch: int
    ) -> Iterator[tuple[T, BatchInfo]]:
        """Return this rank's batches of a plan, each with its BatchInfo."""
        steps: Iterator[tuple[list[Any], None]] | None = None
        if self._loader is not None:
            # The pieces of a step are consecutive: together they are the batch of a world of one.
            read = plan.of_one_rank() if self.splits_batch else plan
            self._batches.begin(epoch, partial(lists, read, range(read.size)))
            batches = read_isolated(self._loader, is_resumed=plan.start > 0)
            steps = ((self._splitter.parts(plan, step, batches), None) for step in range(plan.num_steps))
        scatter = BatchScatter(self._ctx, f"epoch {epoch} from sample {plan.start}")
        return self._receive(plan, infos, steps, scatter)

    def _receive(
        self,
        plan: EpochPlan,
        infos: Iterator[BatchInfo],
        steps: Iterator[tuple[list[Any], None]] | None,
        scatter: BatchScatter,
    ) -> Iterator[tuple[T, BatchInfo]]:
        for _ in range(plan.num_steps):
            parts, _ = cast("tuple[Sequence[Any], None]", scatter.exchange(steps))
            if parts:
                yield parts[0], next(infos)
