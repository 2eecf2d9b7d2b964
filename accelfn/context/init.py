"""Start a context: read the environment once, plan, then set up what the plan says.

Ranks find each other by a store at an address, in which all say that they are there.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed re-exports them untyped
    PrefixStore,
    Store,
    TCPStore,
)  # torch.distributed re-exports them untyped
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]
from typing_extensions import Unpack

from accelfn.context.call_log import call_site
from accelfn.context.collectives import Collectives, Part
from accelfn.context.config import (
    Guard,
    InitProcessGroupKwargs,
    read_settings,
)
from accelfn.context.config.handlers import sort_handlers
from accelfn.context.context import Context, close_context, with_mesh, with_window
from accelfn.context.device import DevicePlan, check_precision, plan_device, read_hardware
from accelfn.context.environment import EnvironmentPlan, detect_environment
from accelfn.context.failure import MessageBoard, announce_end, publish, store_board
from accelfn.context.options import ContextOptions, apply_options, merge_settings, said
from accelfn.context.peer_monitor import start_watchdog
from accelfn.context.process_group import (
    make_gloo_group,
    process_group_collectives,
)
from accelfn.context.world import GroupOwner, Owned, World, WorldIdentity
from accelfn.errors import ConfigurationError, DistributedError, NotAvailableError

_HOST_BYTES = 256
# At an address that nobody has named, the other ranks are soon there, or somewhere else.
_GUESSED_PATIENCE = timedelta(seconds=60)


def init_context(*, group: dist.ProcessGroup | None = None, **options: Unpack[ContextOptions]) -> Context:
    """Find out who this process is, join its world, and return the frozen :class:`Context`.

    The environment is read here, once, and never written: ``ACCELFN_*`` variables, then ``ACCELERATE_*``,
    then those of the launcher (:func:`detect_environment`). They only fill what isn't passed; an explicit
    argument always wins. When torch.distributed is already initialised, by whomever, that group is adopted
    and never destroyed; its device is the one that it is bound to, or the current accelerator.

    Ranks: every rank of the world (or of ``group``).

    Args:
        group: An existing process group to use instead of the default one; it stays the caller's.
        **options: The keyword arguments below; None stands for not passing one.

    Keyword Args:
        device_placement: Move models and batches to the device of this rank; on by default.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        gradient_accumulation_steps: Micro-batches per optimizer step; 1 when nothing says otherwise.
        cpu: Use the CPU even where there is an accelerator.
        dataloader_config: How ``prepare_data_loader`` shares out the data.
        deepspeed_plugin: DeepSpeed, as one plugin or several by name.
        fsdp_plugin: Sharding by FSDP.
        megatron_lm_plugin: Megatron-LM.
        rng_types: Random states that loaders synchronise; ``("generator",)`` when None.
        log_with: Experiment trackers that :func:`accelfn.init_trackers` starts: names, trackers, classes of
            these, or a list.
        project_dir: Folder for outputs; ``project_config`` wins if it names one.
        project_config: Where outputs go.
        gradient_accumulation_plugin: Accumulation in more detail than a number of steps.
        step_scheduler_with_optimizer: A scheduler moves only when its optimizer does; on by default.
        kwargs_handlers: Records such as ``AutocastKwargs``, at most one of a kind.
        dynamo_backend: Short for ``dynamo_plugin=TorchDynamoPlugin(backend=...)``.
        dynamo_plugin: torch.compile.
        parallelism_config: Sizes of the mesh's axes.
        guard: How ranks are kept in agreement and how long they wait for each other: a :class:`Guard`, or
            its mode: ``"full"``, ``"sampled"`` or ``"off"``.
        debug: True is short for ``guard="full"``; False keeps a variable or ``ctx.replace`` from it.
        reduction: ``"mean"``, or ``"canonical"``: exact mode, which gives the same bits at any number of
            ranks; a :class:`CanonicalReduction` says how many microbatches make a step.

    Returns:
        The context; also a context manager that closes it.

    Raises:
        ConfigurationError: An option, a variable, a device or a backend is not valid or not there.
        NotAvailableError: An option asks for what is not supported yet.
        DistributedError: The other ranks could not be reached: within the timeout, or, where RANK and
            WORLD_SIZE are set but no address of rank 0 and no timeout, within a minute. After 5 seconds a
            line on stderr says what is waited for.

    >>> with init_context(cpu=True, mixed_precision="bf16") as ctx:
    ...     ctx.num_processes, ctx.mixed_precision
    (1, 'bf16')
    """
    environment = dict(os.environ)
    settings = read_settings(environment)
    asked = said(options)
    options = merge_settings(asked, settings)
    base = apply_options(Context(), options)  # refuses bad options before anything is started
    if settings.bypass_device_map:
        base = dataclasses.replace(base, strategy=dataclasses.replace(base.strategy, bypass_device_map=True))
    joining = sort_handlers(asked.get("kwargs_handlers")).get("process_group", InitProcessGroupKwargs())
    if joining.timeout is not None and not isinstance(asked.get("guard"), Guard):
        base = dataclasses.replace(base, guard=dataclasses.replace(base.guard, timeout=joining.timeout))
    timeout = joining.timeout or timedelta(seconds=base.guard.timeout_s)
    hardware = read_hardware()
    use_cpu = bool(options.get("cpu"))
    device = None if asked.get("cpu") else settings.device  # cpu=True was passed, the device is a variable

    if group is not None or dist.is_initialized():
        adopted = group if group is not None else dist.group.WORLD
        if adopted is None:
            raise ConfigurationError(
                "torch.distributed is initialised but has no default group. Pass group=."
            )
        place = _place_in(adopted)
        base = with_window(base, place.size)
        _refuse_other_backend(adopted, joining)
        plan = plan_device(place, hardware, cpu=use_cpu, device=device or _current_device(adopted, use_cpu))
        check_precision(base.precision, plan.facts)
        world, collectives = _adopt(adopted, place, plan, timeout)
    else:
        place = detect_environment(environment)
        base = with_window(base, place.size)
        plan = plan_device(place, hardware, cpu=use_cpu, device=device, backend=joining.backend)
        check_precision(base.precision, plan.facts)
        names = () if place.launcher != "env" or joining.init_method else ("MASTER_ADDR", "MASTER_PORT")
        guessed = [name for name in names if not environment.get(name)]
        patience = timeout if joining.timeout or not guessed else min(timeout, _GUESSED_PATIENCE)
        world, collectives = _join(place, plan, joining.init_method, timeout, patience, guessed)
    joined = dataclasses.replace(
        base, world=_watched(world, collectives, base.guard), collectives=collectives
    )
    try:
        return with_mesh(joined)
    except BaseException:
        close_context(joined)
        raise


def _watched(world: World, collectives: Collectives, guard: Guard) -> World:
    """Make sure that the other ranks are notified of this one's end, however it comes."""
    if world.size == 1 and not world.made.group:
        return world
    board, call_log, rank = collectives.board, collectives.call_log, world.rank
    end_watch = start_watchdog(board, rank, whole_process=True) if guard.watchdog and world.size > 1 else None

    def at_exit() -> None:
        # What the interpreter has just printed, if it is ending for that.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            publish(board, call_log, rank, error)
        announce_end(board, call_log, rank)
        if end_watch is not None:
            end_watch()

    if world.size > 1:
        atexit.register(at_exit)
    made = dataclasses.replace(
        world.made, opened=True, at_exit=at_exit if world.size > 1 else None, end_watch=end_watch
    )
    return dataclasses.replace(world, made=made)


def _join(
    place: EnvironmentPlan,
    plan: DevicePlan,
    init_method: str | None,
    timeout: timedelta,
    patience: timedelta,
    guessed: Sequence[str],
) -> tuple[World, Collectives]:
    """Meet the other ranks; ``guessed`` names variables of the address that nobody has set."""
    # torchrun's scripts may count on a group even in a world of one; nobody else does.
    if place.size == 1 and place.launcher != "torchrun":
        return _world(place, plan, None, None, Owned()), Collectives()
    method = address_of(place, init_method)
    hook = sys.excepthook
    previous = None
    if plan.device.type not in ("cpu", "mps"):
        previous = torch.device(plan.device.type, torch.accelerator.current_device_index())
        torch.accelerator.set_device_index(plan.device)
    try:
        store = arrive(place, timeout, patience, init_method)
        dist.init_process_group(
            plan.backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=None if plan.device.type in ("cpu", "mps") else plan.device,
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        if previous is not None:
            torch.accelerator.set_device_index(previous)
        raise DistributedError(
            f"rank {place.rank} could not join its world of {place.size} ({place.launcher}, backend "
            f"{plan.backend}, at {method}): {error}{_advice(guessed, method)}"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    made = Owned(
        group=True,
        previous_device=previous,
        excepthooks=(hook, sys.excepthook),
        hosts_store=place.rank == 0 and place.launcher != "torchrun" and method.startswith(("tcp:", "env:")),
    )
    world = _world(place, plan, plan.backend, group, made)
    try:
        return _connect(world, place, PrefixStore("accelfn", store), store_board(store), timeout)
    except BaseException:
        close_context(Context(world=world))
        raise


def _advice(guessed: Sequence[str], method: str) -> str:
    if not guessed:
        return ""
    return (
        f" {' and '.join(guessed)} not being set, {method.removeprefix('tcp://')} was taken. Set MASTER_ADDR "
        "(host of rank 0) and MASTER_PORT for every rank, start the script with a launcher (accelfn launch), "
        "or unset RANK and WORLD_SIZE to run one process."
    )


def _adopt(
    group: dist.ProcessGroup, place: EnvironmentPlan, plan: DevicePlan, timeout: timedelta
) -> tuple[World, Collectives]:
    world = _world(place, plan, str(dist.get_backend(group)), group, Owned())
    if place.size == 1:
        return world, Collectives()
    # In a part that no earlier context has written to.
    try:
        beside = cast(Store, cast("Any", group).get_group_store())
        store = PrefixStore(f"accelfn/context/{beside.add(f'accelfn/adopted/{place.rank}', 1)}", beside)
    except (AttributeError, RuntimeError) as error:  # a backend without a store, such as MPI
        raise NotAvailableError(
            "init_context adopts process groups that have a store, by which their ranks meet; this one has "
            "none. Start the world with init_context, or with a backend that has one (gloo, nccl)."
        ) from error
    try:
        return _connect(world, place, store, store_board(store), timeout)
    except RuntimeError as error:
        if isinstance(error, DistributedError):
            raise
        raise DistributedError(
            f"rank {place.rank} could not meet the other {place.size - 1} ranks of the group that it "
            f"adopts: {error}. Every rank of the group must call init_context, equally often."
        ) from error


def _connect(
    world: World, place: EnvironmentPlan, store: Store, board: MessageBoard, timeout: timedelta
) -> tuple[World, Collectives]:
    """Reach the other ranks over the world's group, and find out what only they know of the nodes."""
    group = world.group
    assert group is not None
    # Not by torch, which names groups by their ranks: the next context's would meet where this one's has.
    side = make_gloo_group(PrefixStore("side", store), place.rank, place.size, timeout)
    collectives = process_group_collectives(
        group,
        place.rank,
        place.size,
        control=side,
        board=board,
        one_machine=place.num_nodes == 1 or not place.nodes_known,
        store=PrefixStore("parts", store),
    )
    world = dataclasses.replace(world, keeper=GroupOwner(side))
    if not place.nodes_known and place.size > 1:
        collectives.call_log.begin("init_context", call_site(), None, timeout.total_seconds())
        world = _with_nodes(world, collectives)
    return world, collectives


def _place_in(group: dist.ProcessGroup) -> EnvironmentPlan:
    """Find this rank in a group that somebody else made. Which node it is on, the ranks tell each other."""
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise ConfigurationError(
            "init_context(group=...) needs a group that torch.distributed knows: one from new_group, in a "
            f"process that has called init_process_group. torch said: {error}"
        ) from error
    if rank < 0:
        raise ConfigurationError(
            "init_context(group=...) was called by a rank that isn't in the group. Call it on its ranks."
        )
    size = dist.get_world_size(group)
    return EnvironmentPlan(launcher="adopted", rank=rank, size=size, local_size=size, nodes_known=False)


def _current_device(group: dist.ProcessGroup, cpu: bool) -> str | None:
    """Name the accelerator that whoever made the group has chosen for this rank."""
    if cpu or not torch.accelerator.is_available():
        return None
    bound: torch.device | None = group.bound_device_id
    if bound is not None:
        return str(bound)
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type == "mps":
        return None
    return f"{kind.type}:{torch.accelerator.current_device_index()}"


def _refuse_other_backend(group: dist.ProcessGroup, joining: InitProcessGroupKwargs) -> None:
    if joining.backend is None:
        return

    has = str(dist.get_backend(group))
    asked, there = (
        {part.rpartition(":")[2].strip().lower() for part in text.split(",")}
        for text in (joining.backend, has)
    )
    if not asked <= there:
        raise ConfigurationError(
            f"InitProcessGroupKwargs(backend={joining.backend!r}) can't be had: torch.distributed is "
            f"initialised with {has!r}, and that group is adopted. Leave the backend out, or initialise "
            "with it."
        )


def _with_nodes(world: World, collectives: Collectives) -> World:
    """Ask every rank for its host, and number nodes and local ranks by it."""
    own = _host().ljust(_HOST_BYTES, b"\0")
    rows = collectives.all_gather_bytes(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    hosts = [bytes(row[:_HOST_BYTES].tolist()) for row in rows]  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    nodes = list(dict.fromkeys(hosts))
    here = [rank for rank, host in enumerate(hosts) if host == own]
    return dataclasses.replace(
        world,
        local_rank=here.index(world.rank),
        local_size=len(here),
        node_rank=nodes.index(own),
        num_nodes=len(nodes),
    )


def _host() -> bytes:
    # Machines may share a name ("localhost"), containers of one machine its boot: together they tell.
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {socket.gethostname()}".encode()[:_HOST_BYTES]


def _world(
    place: EnvironmentPlan,
    plan: DevicePlan,
    backend: str | None,
    group: dist.ProcessGroup | None,
    made: Owned,
) -> World:
    names = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")
    return World(
        **{name: getattr(place, name) for name in names},
        device=plan.device,
        backend=backend,
        group_ref=None if group is None else weakref.ref(group),
        identity=World().identity if group is None else WorldIdentity(),
        made=made,
    )


# Ranks come at different times. When it takes longer than this, somebody may be looking at the terminal.
_QUIET_S = 5.0


def address_of(place: EnvironmentPlan, init_method: str | None = None) -> str:
    """Return the address of the store in which the ranks of ``place`` find each other. Pure."""
    if init_method is not None:
        return init_method
    # torchrun's agent hosts the store, which env:// knows how to find; others get the address in the call.
    return "env://" if place.launcher == "torchrun" else f"tcp://{_host_and_port(place)}"


def arrive(
    place: EnvironmentPlan, timeout: timedelta, patience: timedelta, init_method: str | None = None
) -> Store:
    """Wait until all ranks are there. What takes long is reported on stderr.

    Ranks: every rank of ``place``.

    Args:
        place: This rank.
        timeout: Of the store, once all are there.
        patience: How long to wait for them.
        init_method: Address that the user has given.

    Returns:
        A part of the store that no earlier world of this launch has written to: torchrun's outlives a world,
        and gloo would find the addresses of the last one in it.

    Raises:
        RuntimeError: Rank 0 can't be reached, or others did not come in time.
    """
    rank, size, where = place.rank, place.size, address_of(place, init_method)
    end = time.monotonic() + patience.total_seconds()
    if where == f"tcp://{_host_and_port(place)}":
        # Without waiting for the others, which would say nothing of how many there are.
        with _telling(f"rank 0 of {size} ranks at {_host_and_port(place)}, as rank {rank}"):
            store: Store = TCPStore(
                place.master_addr or "127.0.0.1",
                place.master_port or 0,
                None,
                rank == 0,
                patience,
                wait_for_workers=False,
                multi_tenant=True,
            )
    else:
        with _telling(f"other ranks of {size} at {where}, as rank {rank}"):
            store = next(rendezvous(where, rank, size, timeout=patience))[0]
    store.set_timeout(timeout)
    part = PrefixStore(f"accelfn/world/{store.add(f'accelfn/joined/{rank}', 1)}", store)
    if part.add("number here", 1) == size:
        part.set("all here", "")
    if not _are_all_here(part, size, min(end, time.monotonic() + _QUIET_S)):
        if place.local_rank == 0:  # one rank of a machine says it for all
            _tell(f"{size - part.add('number here', 0)} of {size} ranks at {where.removeprefix('tcp://')}")
        if not _are_all_here(part, size, end):
            missing = size - part.add("number here", 0)
            raise RuntimeError(
                f"{missing} of {size} ranks did not come within {patience.total_seconds():.0f} s. Start "
                "them, or look at their output."
            )
    return part


def _are_all_here(part: Store, size: int, end: float) -> bool:
    """Wait until all are, or the monotonic clock says ``end``."""
    # Asked for again and again, 500 times a second by all together: where its own wait comes to an end, torch
    # fills the terminal.
    while not part.check(["all here"]):
        if time.monotonic() >= end:
            return False
        time.sleep(min(0.2, size / 500))
    return True


@contextmanager
def _telling(what: str) -> Generator[None, None, None]:
    """Print what is waited for if the block takes long."""
    timer = threading.Timer(_QUIET_S, _tell, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(what: str) -> None:
    print(f"accelfn: waiting for {what} ...", file=sys.stderr, flush=True)


def _host_and_port(place: EnvironmentPlan) -> str:
    host = place.master_addr or "127.0.0.1"
    if ":" in host and not host.startswith("["):  # IPv6
        host = f"[{host}]"
    return f"{host}:{place.master_port}"


def plan_context(num_processes: int, **options: Unpack[ContextOptions]) -> Context:
    """Return the context that rank 0 of ``num_processes`` ranks would have, to plan with. Pure.

    It answers what is planned: :func:`accelfn.plan_model`, :func:`accelfn.plan_memory`, ``ctx.along(...)``,
    ``ctx.coordinate(...)``. Nothing is started and the environment isn't read, so there may be any number of
    ranks. What communicates raises an error.

    Ranks: local.

    Args:
        num_processes: Ranks to plan for.
        **options: Keyword arguments of :func:`accelfn.init_context`.

    Raises:
        ConfigurationError: ``num_processes`` is below 1, an option isn't valid, or the mesh doesn't fit the
            ranks.
        NotAvailableError: An option asks for what is not supported yet.
        TypeError: ``num_processes`` is no int, or an option is unknown or of the wrong type.

    >>> from accelfn import FullyShardedDataParallelPlugin
    >>> ctx = plan_context(10_000, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    >>> ctx.axis_size("dp_shard"), ctx.along("tp").num_processes
    (10000, 1)
    """
    if not isinstance(cast("object", num_processes), int) or isinstance(num_processes, bool):
        raise TypeError(f"plan_context: num_processes must be an int, got {num_processes!r}.")
    if num_processes < 1:
        raise ConfigurationError(f"plan_context: num_processes must be at least 1, got {num_processes}.")
    world = World(size=num_processes, local_size=num_processes, identity=WorldIdentity())
    base = Context(world=world, collectives=_absent())
    return with_mesh(with_window(apply_options(base, options), num_processes))


def _absent() -> Collectives:
    """Return collectives that refuse to communicate."""
    calls: dict[str, Any] = {one.name: _refuse_absent for one in fields(Collectives) if callable(one.default)}
    del calls["while_blocked"], calls["translate_error"]  # of this rank alone
    calls["split"] = _split_absent
    return Collectives(**calls)


def _split_absent(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
    del timeout
    return tuple(Part(_absent() if len(group) > 1 else Collectives()) for group in groups)


def _refuse_absent(*args: object) -> NoReturn:
    del args
    raise NotAvailableError(
        "the ranks of this context aren't there: plan_context made it, to plan with. Use what init_context "
        "returns, in a program that accelfn launch starts."
    )
