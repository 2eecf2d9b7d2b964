"""Fill the :class:`Collectives` seam from a torch process group.

Works for registered groups (``init_process_group``, ``new_group``) and for an unregistered one that a thread
made for itself, so nothing here asks torch's global registry: ranks are numbers inside the group.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings  # torch.distributed re-exports a part of it
from torch._C._distributed_c10d import PrefixStore, Store

from accelfn.context.call_log import CallLog
from accelfn.context.collectives import Collectives, Part, ReduceOp, StartedAllGather, chunk_bytes
from accelfn.context.failure import FAILURE, MessageBoard, board_within, store_board
from accelfn.context.peer_monitor import PeerMonitor
from accelfn.context.shared_memory import (
    LostRanksError,
    SharedRows,
    broadcast_in_rounds,
    scatter_in_rounds,
    share_rows,
)
from accelfn.context.world import GroupOwner
from accelfn.errors import DistributedError, NotAvailableError

_CPU = torch.device("cpu")
# The guard ends the waiting, with names.
_NEVER = timedelta(days=30)
# Bytes cost little where nobody sends them.
_MAX_SHARED_BYTES = 1 << 19


def make_gloo_group(
    store: Store, rank: int, size: int, patience: timedelta, interface: str | None = None
) -> dist.ProcessGroup:
    """Make a process group that torch's registry doesn't know; it ends when the last one releases it.

    Ranks: every rank of the group.

    Args:
        store: Where the ranks meet; nothing else may be in it.
        rank: This rank.
        size: Number of ranks.
        patience: How long ranks wait here for each other. Operations take as long as they do.
        interface: Of the network; what ``GLOO_SOCKET_IFNAME`` or the host's name says when None.
    """
    names = cast("Any", bindings)
    options = names.ProcessGroupGloo._Options()
    options._timeout = patience
    options._threads = 2
    make = names.ProcessGroupGloo
    options._devices = [
        make.create_default_device() if interface is None else make.create_device(interface=interface)
    ]
    backend = make(names.PrefixStore("ranks", store), rank, size, options)
    backend._set_default_timeout(_NEVER)
    group = names.ProcessGroup(names.PrefixStore("group", store), rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(_CPU, kind, backend)
    group._set_default_backend(kind)
    return group


def process_group_collectives(
    group: dist.ProcessGroup,
    rank: int,
    size: int,
    *,
    control: dist.ProcessGroup | None = None,
    board: MessageBoard | None = None,
    call_log: CallLog | None = None,
    one_machine: bool = True,
    store: Store | None = None,
    interface: str | None = None,
) -> Collectives:
    """Return collectives over ``group``.

    Ranks: every rank of the group.

    Args:
        group: Carries the tensors; whoever made it keeps it alive.
        rank: This rank in the group.
        size: Number of ranks in the group.
        control: A group of the same ranks for CPU tensors, which carries ``all_gather_bytes`` and all that
            is on the CPU where ``group`` carries none; ``group`` itself when None. One of its own stays
            in step whatever else the program sends through ``group``.
        board: Of the world.
        call_log: Of this rank; a new one when None.
        one_machine: The ranks may all be on one machine. Then processes exchange through its memory, if that
            proves to be so.
        store: Where parts of the world meet, see ``Collectives.split``; nothing else may be in it. Without
            one there are no parts.
        interface: Of the network, for the groups of such parts; as for :func:`make_gloo_group`.
    """
    board, call_log = board or MessageBoard(), call_log or CallLog()
    # Weakly: a context that outlives its group, or hangs in a traceback, must not keep its connections.
    references = (weakref.ref(group), weakref.ref(control or group))
    group = cast("dist.ProcessGroup", weakref.proxy(group))
    beside = group if control is None else cast("dist.ProcessGroup", weakref.proxy(control))
    carries_cpu = control is None or carries_cpu_tensors(group)
    shared: SharedRows | None = None
    monitor = PeerMonitor(
        board=board,
        call_log=call_log,
        rank=rank,
        size=size,
        has_ended=lambda other: shared is not None and shared.has_ended(other),
    )
    chunk = chunk_bytes(size)

    def finish(work: dist.Work, device: torch.device) -> None:
        if device.type != "cpu":
            work.wait()  # only orders streams: the host goes on
            return
        try:
            monitor.wait(lambda seconds: _is_done(work, seconds))
        except Exception:
            if not work.is_completed():
                _keep_for_ever(references)
            raise

    by_socket = _exchange_by_socket(beside, rank, size, chunk, monitor, finish, references)
    start_all_gather_bytes = by_socket
    if one_machine and control is not None and size > 1:  # not between threads, which have no locks
        most = chunk_bytes(size, _MAX_SHARED_BYTES)
        shared = share_rows(lambda message: by_socket(message).finish(), rank, size, most)
        if shared is not None:
            chunk = most
            start_all_gather_bytes = _exchange_in_memory(shared, monitor, references[0])

    def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return start_all_gather_bytes(message).finish()

    def carrier(buffer: torch.Tensor) -> dist.ProcessGroup:
        return beside if buffer.device.type == "cpu" and not carries_cpu else group

    def all_gather(buffer: torch.Tensor) -> torch.Tensor:
        output = buffer.new_empty(size * buffer.numel())
        with _failures("all_gather", monitor):
            # The method: dist.all_gather_into_tensor is deprecated in torch 2.13, its successor absent in
            # 2.11.
            finish(carrier(buffer)._allgather_base(output, buffer), buffer.device)
        return output

    def all_reduce(buffer: torch.Tensor, op: ReduceOp) -> None:
        options = bindings.AllreduceOptions()
        options.reduceOp = _reduce_op(op)
        with _failures("all_reduce", monitor):
            finish(carrier(buffer).allreduce([buffer], options), buffer.device)

    def reduce_scatter(buffer: torch.Tensor) -> torch.Tensor:
        output = buffer.new_empty(buffer.numel() // size)
        with _failures("reduce_scatter", monitor):
            work = carrier(buffer)._reduce_scatter_base(output, buffer, bindings.ReduceScatterOptions())
            finish(work, buffer.device)
        return output

    def broadcast(buffer: torch.Tensor, source: int) -> None:
        if shared is not None and buffer.device.type == "cpu":
            broadcast_in_rounds(all_gather_bytes, chunk, rank, buffer, source)
            return
        options = bindings.BroadcastOptions()
        options.rootRank = source
        with _failures("broadcast", monitor):
            finish(carrier(buffer).broadcast([buffer], options), buffer.device)

    def scatter(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        if shared is not None and output.device.type == "cpu":
            scatter_in_rounds(all_gather_bytes, chunk, rank, size, output, buffer, source)
            return
        options = bindings.ScatterOptions()
        options.rootRank = source
        parts = [list(buffer.view(size, -1).unbind())] if buffer is not None and rank == source else []
        with _failures("scatter", monitor):
            finish(carrier(output).scatter([output], parts, options), output.device)

    def all_to_all(buffer: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(buffer)
        with _failures("all_to_all", monitor):
            finish(carrier(buffer).alltoall_base(output, buffer, [], []), buffer.device)
        return output

    def permute(outgoing: torch.Tensor, incoming: torch.Tensor, to: int, source: int) -> None:
        # Not by send and recv: gloo ends all connections of the group where one of them is late.
        goes = [outgoing.numel() if other == to else 0 for other in range(size)]
        comes = [incoming.numel() if other == source else 0 for other in range(size)]
        with _failures("permute", monitor):
            finish(carrier(outgoing).alltoall_base(incoming, outgoing, comes, goes), outgoing.device)

    def finish_for_torch(work: dist.Work, device: torch.device) -> None:
        with _failures(call_log.current.operation, monitor):
            finish(work, device)

    def barrier() -> None:
        # Over the control bytes: the same on every backend, and no device has to be named.
        all_gather_bytes(torch.empty(0, dtype=torch.uint8))

    numbers = itertools.count()

    def split(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
        if store is None:
            raise NotAvailableError(
                "a mesh within a mesh can't be made: go along the axes of the whole context."
            )
        whole = references[0]()
        if whole is None:
            raise _closed("split")
        known = is_registered(whole)
        if known:
            level_group_counts(all_gather_bytes)
        parts: list[Part] = []
        for members in groups:
            place, count = list(members).index(rank), len(members)
            own = PrefixStore(f"split/{next(numbers)}/{members[0]}", store)
            group = make_group_within(whole, members, timeout) if known else None
            if count == 1:
                parts.append(Part(Collectives(), None if group is None else weakref.ref(group)))
                continue
            side = make_gloo_group(PrefixStore("side", own), place, count, timeout, interface)
            collectives = process_group_collectives(
                side if group is None else group,
                place,
                count,
                control=None if group is None else side,
                board=board_within(store_board(own), board, FAILURE),
                one_machine=one_machine,
            )
            parts.append(Part(collectives, None if group is None else weakref.ref(group), GroupOwner(side)))
        barrier()  # nobody may leave while others still connect to it
        return tuple(parts)

    return Collectives(
        all_gather_bytes=all_gather_bytes,
        start_all_gather_bytes=start_all_gather_bytes,
        all_gather=all_gather,
        all_reduce=all_reduce,
        reduce_scatter=reduce_scatter,
        broadcast=broadcast,
        scatter=scatter,
        all_to_all=all_to_all,
        permute=permute,
        barrier=barrier,
        finish=finish_for_torch,
        translate_error=lambda error: _explained(error, monitor),
        split=split,
        chunk=chunk,
        board=board,
        call_log=call_log,
    )


def _exchange_by_socket(
    group: dist.ProcessGroup,
    rank: int,
    size: int,
    chunk: int,
    monitor: PeerMonitor,
    finish: Callable[[dist.Work, torch.device], None],
    references: tuple[weakref.ref[dist.ProcessGroup], ...],
) -> Callable[[torch.Tensor], StartedAllGather]:
    # Made once: an exchange opens every operation.
    outgoing = torch.zeros(chunk, dtype=torch.uint8)
    incoming = torch.zeros(size * chunk, dtype=torch.uint8)
    rows = incoming.view(size, chunk).unbind()
    first = bindings.GatherOptions()
    first.rootRank = 0
    from_first = bindings.BroadcastOptions()
    from_first.rootRank = 0

    def start(message: torch.Tensor) -> StartedAllGather:
        outgoing[: message.numel()] = message
        with _failures("all_gather_bytes", monitor):
            if size == 2:
                works = [group._allgather_base(incoming, outgoing)]
            else:
                # To rank 0 and back: gloo's all_gather goes round a ring of as many steps as there are ranks.
                # Where ranks share cores it takes 8 times as long at 4 ranks, and 12 times at 8.
                works = [group.gather([list(rows)] if rank == 0 else [], [outgoing], first)]
                if rank != 0:
                    works.append(group.broadcast([incoming], from_first))

        def finish_exchange() -> tuple[torch.Tensor, ...]:
            with _failures("all_gather_bytes", monitor):
                for work in reversed(works):
                    finish(work, _CPU)
                if size > 2 and rank == 0:
                    finish(group.broadcast([incoming], from_first), _CPU)
            return rows

        def abandon() -> None:
            if not all(work.is_completed() for work in works):
                _keep_for_ever(references)

        return StartedAllGather(finish_exchange, abandon)

    return start


def _exchange_in_memory(
    shared: SharedRows, monitor: PeerMonitor, reference: weakref.ref[dist.ProcessGroup]
) -> Callable[[torch.Tensor], StartedAllGather]:
    def finish() -> tuple[torch.Tensor, ...]:
        try:
            monitor.wait(shared.wait)
        except LostRanksError as lost:
            error = monitor.explain_loss(str(lost), lost.ranks)
            raise error from error.__cause__  # what it was caused by there, and not by what was seen here
        return shared.read()

    started = StartedAllGather(finish, lambda: None)  # one for all: only one is under way at a time

    def start(message: torch.Tensor) -> StartedAllGather:
        if reference() is None:
            raise _closed("all_gather_bytes")
        shared.write(message)
        return started

    return start


def make_group_within(
    whole: dist.ProcessGroup,
    members: Sequence[int],
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Make a group that torch knows of some ranks of ``whole``; ranks outside of it needn't come here.

    Ranks: ``members``, which number the ranks of ``whole``; all have made equally many groups before, see
    :func:`level_group_counts`.
    """
    known = dist.get_process_group_ranks(whole)
    ranks = [known[member] for member in members]
    # torch sorts the ranks, where it knows another order at all.
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    make = cast("Callable[..., dist.ProcessGroup]", dist.new_group)  # pyright: ignore[reportUnknownMemberType]
    backend = str(dist.get_backend(whole))
    return make(ranks=ranks, backend=backend, timeout=timeout, use_local_synchronization=True, **order)


def level_group_counts(all_gather_bytes: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
    """Make the number of groups equal on all ranks, by groups of one.

    torch names a group that only its own ranks make by these ranks and by the number of groups in the
    process: ranks that have made different numbers before would wait under different names.

    Ranks: every rank that ``all_gather_bytes`` reaches.
    """
    count = len(cast("Any", dist.distributed_c10d)._world.pg_names)
    rows = all_gather_bytes(torch.tensor([count]).view(torch.uint8))
    most = max(int(row[:8].clone().view(torch.int64)) for row in rows)
    make = cast("Callable[..., dist.ProcessGroup]", dist.new_group)  # pyright: ignore[reportUnknownMemberType]
    for _ in range(most - count):
        make(ranks=[dist.get_rank()], backend="gloo", use_local_synchronization=True)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch's registry knows the group: not if it was destroyed, or made by a thread."""
    if not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def carries_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether tensors on the CPU can travel through ``group``."""
    try:
        return any(device.type == "cpu" for device in group._device_types)
    except RuntimeError:  # a group whose backend is made lazily on first use
        return False


def _is_done(work: dist.Work, seconds: float) -> bool:
    try:
        # In whole milliseconds, rounded up: torch cuts off the rest, and takes 0 for no limit at all.
        work.wait(timedelta(milliseconds=max(1, math.ceil(seconds * 1000))))
    except RuntimeError as error:
        # What the wait itself says when its time is up; the work goes on, and can be waited for again.
        if str(error).startswith("Operation timed out!"):
            return False
        raise
    return True


def _keep_for_ever(references: tuple[weakref.ref[dist.ProcessGroup], ...]) -> None:
    """Never release groups with an operation that will not end: gloo would wait for its end to do so."""
    for reference in references:
        group = reference()
        if group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@contextmanager
def _failures(operation: str, monitor: PeerMonitor) -> Generator[None]:
    """Turn what a backend raises for a lost or late peer into our errors; let everything else through."""
    try:
        yield
    except ReferenceError as error:
        raise _closed(operation) from error
    except RuntimeError as error:
        explained = _explained(error, monitor)
        if explained is error:
            raise
        raise explained from (explained.__cause__ or error)


def _closed(operation: str) -> DistributedError:
    return DistributedError(
        f"{operation}: the process group of this context is closed. Make a new context with init_context."
    )


def _explained(error: Exception, monitor: PeerMonitor) -> Exception:
    """Return an error that names the missing rank, where a backend complains of a lost connection."""
    text = str(error)
    if not isinstance(error, RuntimeError) or isinstance(error, DistributedError):
        return error
    if "imed out" in text or "timeout" in text.lower():
        return monitor.explain_delay(f"The backend said: {text}")
    if "onnection" in text or "peer" in text:
        return monitor.explain_loss(f"The backend said: {text}")
    return error


def _reduce_op(op: ReduceOp) -> dist.ReduceOp:
    match op:
        case "sum":
            return dist.ReduceOp(dist.ReduceOp.SUM)
        case "max":
            return dist.ReduceOp(dist.ReduceOp.MAX)
        case "min":
            return dist.ReduceOp(dist.ReduceOp.MIN)
