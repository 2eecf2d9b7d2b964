"""Implement :class:`Collectives` with a torch process group.

Works for the group of ``init_process_group`` and those of ``new_group``: ranks are those within the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import re
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings  # torch.distributed re-exports a part of it
from torch._C._distributed_c10d import PrefixStore, Store

from accelfn.context.call_log import CallLog
from accelfn.context.collectives import Collectives, Part, ReduceOp, StartedAllGather, chunk_bytes
from accelfn.context.failure import MessageBoard, board_within, store_board
from accelfn.context.peer_monitor import PeerMonitor
from accelfn.context.shared_memory import (
    LostRanksError,
    SharedRows,
    broadcast_chunks,
    scatter_chunks,
    share_rows,
)
from accelfn.context.world import GroupOwner
from accelfn.errors import DistributedError, NotAvailableError

_CPU = torch.device("cpu")
_UNUSED_TAG = 0x5F3C01  # nothing is sent with it
# The peer monitor ends the wait instead, with an error that names ranks.
_NEVER = timedelta(days=30)
# Large, since unused shared memory costs little.
_MAX_SHARED_BYTES = 1 << 19


def make_gloo_group(store: Store, rank: int, size: int, patience: timedelta) -> dist.ProcessGroup:
    """Return a new process group that isn't registered with torch, and ends with its last reference.

    Ranks: every rank of the group.

    Args:
        store: Rendezvous of the ranks; nothing else may use it.
        rank: This rank.
        size: Number of ranks.
        patience: How long ranks wait here for each other. Later operations have no timeout.
    """
    names = cast("Any", bindings)
    options = names.ProcessGroupGloo._Options()
    options._timeout = patience
    options._threads = 2
    make = names.ProcessGroupGloo
    options._devices = [make.create_default_device()]
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
    store: Store,
    timeout: timedelta,
    one_machine: bool = True,
    within: MessageBoard | None = None,
) -> Part:
    """Return the communication over ``group``, and over a gloo group beside it.

    That one carries ``all_gather_bytes``, and CPU tensors unless ``group`` has another backend for them, so
    that neither is affected by what else is sent through ``group``: operations of one group pair by their
    order, and DistributedDataParallel's begin when gradients are there, earlier on some ranks than on others.
    It isn't registered with torch, and ends with the part's ``group_owner``.

    Ranks: every rank of the group.

    Args:
        group: Carries tensors on devices; the caller keeps it alive.
        rank: This rank in the group.
        size: Number of ranks in the group.
        store: Of these ranks alone, for their board, their rendezvous and that of parts of them.
        timeout: How long ranks wait here for each other.
        one_machine: The ranks may all be on one machine. If they are, they use shared memory.
        within: The board of the world that these ranks are a part of; None if they are a world.
    """
    call_log, board = CallLog(), store_board(store)
    if within is not None:
        board = board_within(board, within)
    # Not with dist.new_group, which names groups by their ranks: the next context's would collide.
    control = make_gloo_group(PrefixStore("side", store), rank, size, timeout)
    owner = GroupOwner(control)
    latest = owner.latest
    # Weak: a context that outlives its group, or stays in a traceback, must not keep its connections open.
    references = [weakref.ref(group), weakref.ref(control)]
    group = cast("dist.ProcessGroup", weakref.proxy(group))
    control = cast("dist.ProcessGroup", weakref.proxy(control))
    is_beside = not carries_cpu_tensors(group) or _is_gloo(group)  # which is no faster than the one beside it
    shared: SharedRows | None = None

    def has_ended(other: int) -> bool:
        return shared is not None and shared.has_ended(other)

    def lost_rank() -> int | None:
        return next((other for other in range(size) if other != rank and has_ended(other)), None)

    monitor = PeerMonitor(
        board=board,
        call_log=call_log,
        rank=rank,
        size=size,
        has_ended=has_ended,
    )
    chunk = chunk_bytes(size)

    def finish(work: dist.Work, device: torch.device) -> None:
        if device.type != "cpu":
            work.wait()  # only orders streams, without blocking the host
            return
        try:
            monitor.wait(lambda seconds: _is_done(work, seconds))
        except Exception:
            if not work.is_completed():
                _leak(references)
            raise

    by_socket = _exchange_by_socket(control, rank, size, chunk, monitor, finish, references)
    start_all_gather_bytes = by_socket
    if one_machine and size > 1:
        most = chunk_bytes(size, _MAX_SHARED_BYTES)
        shared = share_rows(lambda message: by_socket(message).finish(), rank, size, most)
        if shared is not None:
            chunk = most
            start_all_gather_bytes = _exchange_in_memory(shared, monitor, references[0])

    def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return start_all_gather_bytes(message).finish()

    def run(operation: str, device: torch.device, start: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        carrier = control if device.type == "cpu" and is_beside else group
        with _translate_errors(operation, monitor):
            finish(start(carrier), device)

    # dist.all_gather_into_tensor is deprecated in torch 2.13, and its successor missing in 2.11.
    def all_gather(buffer: torch.Tensor) -> torch.Tensor:
        output, options = buffer.new_empty(size * buffer.numel()), bindings.AllgatherOptions()
        run("all_gather", buffer.device, lambda group: group._allgather_base(output, buffer, options))
        return output

    def all_reduce(buffer: torch.Tensor, op: ReduceOp) -> None:
        options = bindings.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, op.upper()))
        run("all_reduce", buffer.device, lambda group: group.allreduce([buffer], options))

    def reduce_scatter(buffer: torch.Tensor) -> torch.Tensor:
        output, options = buffer.new_empty(buffer.numel() // size), bindings.ReduceScatterOptions()
        run(
            "reduce_scatter", buffer.device, lambda group: group._reduce_scatter_base(output, buffer, options)
        )
        return output

    def broadcast(buffer: torch.Tensor, source: int) -> None:
        if shared is not None and buffer.device.type == "cpu":
            broadcast_chunks(all_gather_bytes, chunk, rank, buffer, source)
            return
        options = bindings.BroadcastOptions()
        options.rootRank = source
        run("broadcast", buffer.device, lambda group: group.broadcast([buffer], options))

    def scatter(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        if shared is not None and output.device.type == "cpu":
            scatter_chunks(all_gather_bytes, chunk, rank, size, output, buffer, source)
            return
        if output.device.type == "xla":  # torch_xla's backend has no scatter
            on_host = torch.empty_like(output, device="cpu")
            scatter(on_host, None if buffer is None else buffer.cpu(), source)
            output.copy_(on_host)
            return
        options = bindings.ScatterOptions()
        options.rootRank = source
        parts = [list(buffer.view(size, -1).unbind())] if buffer is not None and rank == source else []
        run("scatter", output.device, lambda group: group.scatter([output], parts, options))

    def all_to_all(buffer: torch.Tensor) -> torch.Tensor:
        output, options = torch.empty_like(buffer), bindings.AllToAllOptions()
        run("all_to_all", buffer.device, lambda group: group.alltoall_base(output, buffer, [], [], options))
        return output

    def permute(outgoing: torch.Tensor, incoming: torch.Tensor, to: int, source: int) -> None:
        if outgoing.device.type == "xla":  # torch_xla's backend splits into equal parts only
            on_host = torch.empty_like(incoming, device="cpu")
            permute(outgoing.cpu(), on_host, to, source)
            incoming.copy_(on_host)
            return
        # Not with send and recv: if one of them times out, gloo closes all connections of the group.
        sizes_out = [outgoing.numel() if other == to else 0 for other in range(size)]
        sizes_in = [incoming.numel() if other == source else 0 for other in range(size)]
        run(
            "permute",
            outgoing.device,
            lambda group: group.alltoall_base(incoming, outgoing, sizes_in, sizes_out),
        )

    def finish_for_torch(work: dist.Work, device: torch.device) -> None:
        with _translate_errors(call_log.current.operation, monitor):
            finish(work, device)

    def barrier() -> None:
        # On the control group, which is the same for every backend and device.
        all_gather_bytes(torch.empty(0, dtype=torch.uint8, device="cpu"))

    numbers = itertools.count()

    def apart() -> dist.ProcessGroup:
        other = make_gloo_group(PrefixStore(f"apart/{next(numbers)}", store), rank, size, timeout)
        references[2:] = [one for one in references[2:] if one() is not None]
        references.append(weakref.ref(other))
        latest.append(other)
        return other

    def split(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
        if within is not None:
            raise NotAvailableError(
                "the context of a part of the mesh can't be split: use the axes of the context of the world."
            )
        world_group = references[0]()
        if world_group is None:
            raise _closed_error("split")
        level_group_counts(all_gather_bytes)
        parts: list[Part] = []
        for members in groups:
            part_store = PrefixStore(f"split/{next(numbers)}/{members[0]}", store)
            group = make_group_within(world_group, members, timeout)
            if len(members) == 1:
                parts.append(Part(Collectives(), weakref.ref(group)))
                continue
            part = process_group_collectives(
                group,
                list(members).index(rank),
                len(members),
                store=part_store,
                timeout=timeout,
                one_machine=one_machine,
                within=board,
            )
            parts.append(part)
        barrier()  # no rank may exit while others still connect to it
        return tuple(parts)

    collectives = Collectives(
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
        translate_error=lambda error: _translate(error, monitor) if _is_of_backend(error) else error,
        split=split,
        apart=apart,
        lost_rank=lost_rank,
        chunk=chunk,
        board=board,
        call_log=call_log,
    )
    return Part(collectives, references[0], owner)


def _exchange_by_socket(
    group: dist.ProcessGroup,
    rank: int,
    size: int,
    chunk: int,
    monitor: PeerMonitor,
    finish: Callable[[dist.Work, torch.device], None],
    references: Sequence[weakref.ref[dist.ProcessGroup]],
) -> Callable[[torch.Tensor], StartedAllGather]:
    # Allocated once, since every operation begins with an exchange.
    outgoing = torch.zeros(chunk, dtype=torch.uint8, device="cpu")
    incoming = torch.zeros(size * chunk, dtype=torch.uint8, device="cpu")
    rows = incoming.view(size, chunk).unbind()
    first = bindings.GatherOptions()
    first.rootRank = 0
    from_first = bindings.BroadcastOptions()
    from_first.rootRank = 0

    def start(message: torch.Tensor) -> StartedAllGather:
        outgoing[: message.numel()] = message
        with _translate_errors("all_gather_bytes", monitor):
            if size == 2:
                works = [group._allgather_base(incoming, outgoing)]
            else:
                # To rank 0 and back: gloo's all_gather is a ring with as many steps as ranks. If ranks share
                # cores, it takes 8 times as long with 4 ranks, and 12 times with 8.
                works = [group.gather([list(rows)] if rank == 0 else [], [outgoing], first)]
                if rank != 0:
                    works.append(group.broadcast([incoming], from_first))

        def finish_exchange() -> tuple[torch.Tensor, ...]:
            with _translate_errors("all_gather_bytes", monitor):
                for work in reversed(works):
                    finish(work, _CPU)
                if size > 2 and rank == 0:
                    finish(group.broadcast([incoming], from_first), _CPU)
            return rows

        def abandon() -> None:
            if not all(work.is_completed() for work in works):
                _leak(references)

        return StartedAllGather(finish_exchange, abandon)

    return start


def _exchange_in_memory(
    shared: SharedRows, monitor: PeerMonitor, reference: weakref.ref[dist.ProcessGroup]
) -> Callable[[torch.Tensor], StartedAllGather]:
    def finish() -> tuple[torch.Tensor, ...]:
        try:
            monitor.wait(shared.wait)
        except LostRanksError as lost:
            error = monitor.explain_loss(lost=lost.ranks)
            raise error from error.__cause__  # the cause on the failed rank, rather than LostRanksError
        return shared.read()

    started = StartedAllGather(finish, lambda: None)  # reused, since only one is in flight at a time

    def start(message: torch.Tensor) -> StartedAllGather:
        if reference() is None:
            raise _closed_error("all_gather_bytes")
        shared.write(message)
        return started

    return start


def make_group_within(
    whole: dist.ProcessGroup,
    members: Sequence[int],
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Create a registered group of some ranks of ``whole``, without the participation of the other ranks.

    Ranks: ``members``, which are ranks within ``whole``; all have created equally many groups before, see
    :func:`level_group_counts`.
    """
    global_ranks = dist.get_process_group_ranks(whole)
    ranks = [global_ranks[member] for member in members]
    # By default torch sorts the ranks; older versions always do, without this argument.
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    make = cast("Callable[..., dist.ProcessGroup]", dist.new_group)  # pyright: ignore[reportUnknownMemberType]
    backend = str(dist.get_backend(whole))
    return make(ranks=ranks, backend=backend, timeout=timeout, use_local_synchronization=True, **order)


def gather_number(
    all_gather_bytes: Callable[[torch.Tensor], Sequence[torch.Tensor]], number: int
) -> list[int]:
    """Return a number of each rank.

    Ranks: every rank of ``all_gather_bytes``.
    """
    rows = all_gather_bytes(torch.tensor([number], device="cpu").view(torch.uint8))
    return [int(row[:8].clone().view(torch.int64)) for row in rows]


def level_group_counts(all_gather_bytes: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
    """Equalise the number of registered groups on all ranks by creating groups of one.

    torch names a group that only its members create by these ranks and the number of groups in the process:
    ranks with different numbers would wait under different names.

    Ranks: every rank of ``all_gather_bytes``.
    """
    count = len(cast("Any", dist.distributed_c10d)._world.pg_names)
    most = max(gather_number(all_gather_bytes, count))
    make = cast("Callable[..., dist.ProcessGroup]", dist.new_group)  # pyright: ignore[reportUnknownMemberType]
    for _ in range(most - count):
        make(ranks=[dist.get_rank()], backend="gloo", use_local_synchronization=True)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch's registry contains the group: not after its destruction."""
    if not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def carries_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` has a backend for CPU tensors."""
    try:
        return any(device.type == "cpu" for device in group._device_types)
    except RuntimeError:  # its backend is created on first use
        return False


def _is_done(work: dist.Work, seconds: float) -> bool:
    try:
        # Rounded up to milliseconds: torch truncates, and 0 means no timeout.
        work.wait(timedelta(milliseconds=max(1, math.ceil(seconds * 1000))))
    except RuntimeError as error:
        # The timeout of wait itself: the work continues, and can be waited for again.
        if str(error).startswith("Operation timed out!"):
            return False
        raise
    return True


def _leak(references: Sequence[weakref.ref[dist.ProcessGroup]]) -> None:
    """Keep groups with an operation that won't end alive, since gloo's destructor would wait for it."""
    for reference in references:
        group = reference()
        if group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether gloo carries the CPU tensors of a group that has a backend for them."""
    if group.__class__ is not dist.ProcessGroup:  # of another package, such as torch_xla
        return False
    return isinstance(group._get_backend(_CPU), cast("Any", bindings).ProcessGroupGloo)


def close_gloo_connections(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Close the connections of groups that use gloo, even if torch keeps the groups alive.

    torch's caches for sharded tensors keep destroyed groups, so that ranks which wait in one would not notice
    that this rank has left. gloo offers no call for it, but it closes all connections of a group in which an
    operation times out.

    Ranks: local. Operations of other ranks in these groups end with an error.
    """
    for group in groups:
        if group is None or not (is_registered(group) and carries_cpu_tensors(group)):
            continue
        if _is_gloo(group):
            for other in {*range(group.size())} - {group.rank()}:
                with contextlib.suppress(RuntimeError):  # it times out, or the connection is closed
                    message = torch.empty(1, device="cpu")
                    group.recv([message], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))


@contextmanager
def _translate_errors(operation: str, monitor: PeerMonitor) -> Generator[None]:
    """Translate a backend's errors about a lost or late rank; other errors pass through."""
    try:
        yield
    except ReferenceError as error:
        raise _closed_error(operation) from error
    except RuntimeError as error:
        explained = _translate(error, monitor)
        if explained is error:
            raise
        raise explained from (explained.__cause__ or error)


def _closed_error(operation: str) -> DistributedError:
    return DistributedError(
        f"{operation}: the process group of this context is closed. Create a new context with init_context."
    )


def _is_of_backend(error: Exception) -> bool:
    """Return whether a backend raised an error, rather than a program whose words are like a backend's."""
    return isinstance(error, dist.DistError) or re.match(r"\[[^]]*gloo", str(error)) is not None


def _translate(error: Exception, monitor: PeerMonitor) -> Exception:
    """Return an error that names the missing rank for a backend's connection error; otherwise ``error``."""
    text = str(error)
    if not isinstance(error, RuntimeError) or isinstance(error, DistributedError):
        return error
    if "imed out" in text or "timeout" in text.lower():
        return monitor.explain_delay(f"The backend reported: {text}")
    if "onnection" in text or "peer" in text:
        return monitor.explain_loss(f"The backend reported: {text}")
    return error
