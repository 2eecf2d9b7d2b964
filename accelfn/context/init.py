"""Start a context: read the environment once, plan, then set up what the plan contains."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import socket
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed's are untyped
from typing_extensions import Unpack

from accelfn.config import (
    Guard,
    InitProcessGroupKwargs,
    read_settings,
)
from accelfn.config.handlers import sort_handlers
from accelfn.context.call_log import call_site
from accelfn.context.collectives import Collectives
from accelfn.context.context import Context, close_context, with_mesh, with_window
from accelfn.context.device import (
    DevicePlan,
    check_peers,
    check_precision,
    load_sagemaker_backend,
    plan_device,
    read_hardware,
)
from accelfn.context.environment import EnvironmentPlan, detect_environment
from accelfn.context.failure import announce_end, publish
from accelfn.context.options import ContextOptions, apply_options, drop_none, merge_settings
from accelfn.context.process_group import process_group_collectives
from accelfn.context.rendezvous import address_of, join_store
from accelfn.context.world import Owned, World, WorldIdentity, numbers_among, numbers_of
from accelfn.context.xla import is_xla_requested, read_xla_place, use_spmd
from accelfn.devices import device_type
from accelfn.errors import ConfigurationError, DistributedError, NotAvailableError

_HOST_BYTES = 256
# At a default address, the other ranks arrive soon or wait at another address.
_DEFAULT_ADDRESS_TIMEOUT = timedelta(seconds=60)


def init_context(*, group: dist.ProcessGroup | None = None, **options: Unpack[ContextOptions]) -> Context:
    """Detect the environment, join the world, and return the frozen :class:`Context`.

    The environment is read here, once, and never written: ``ACCELFN_*`` variables, then ``ACCELERATE_*``,
    then those of the launcher (:func:`detect_environment`). They are defaults: an explicit argument always
    takes precedence. If torch.distributed is already initialised, its default group is adopted and never
    destroyed; the device is the one that the group is bound to, or the current accelerator.

    Ranks: every rank of the world (or of ``group``).

    Args:
        group: An existing process group to use instead of the default group; the caller keeps it.
        **options: The keyword arguments below; None is the same as omitting one.

    Keyword Args:
        device_placement: Move models and batches to the device of this rank; on by default.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        gradient_accumulation_steps: Micro-batches per optimizer step; 1 by default.
        cpu: Use the CPU even if there is an accelerator.
        dataloader_config: How ``prepare_data_loader`` shards the data.
        deepspeed_plugin: DeepSpeed, as one plugin or several by name.
        fsdp_plugin: Sharding by FSDP.
        megatron_lm_plugin: Megatron-LM trains the model, with these options.
        rng_types: Random states that loaders synchronise; ``("generator",)`` by default.
        log_with: Experiment trackers that :func:`accelfn.init_trackers` starts: a name, a tracker, a tracker
            class, or a list of these.
        project_dir: Directory for outputs, unless ``project_config`` has one.
        project_config: Directories for outputs.
        gradient_accumulation_plugin: Further options of gradient accumulation.
        step_scheduler_with_optimizer: A scheduler steps only when its optimizer does; on by default.
        kwargs_handlers: Records such as ``AutocastKwargs``, at most one of each kind.
        dynamo_backend: Short for ``dynamo_plugin=TorchDynamoPlugin(backend=...)``.
        dynamo_plugin: torch.compile.
        parallelism_config: Sizes of the mesh's axes.
        guard: How agreement between ranks is checked and how long they wait for each other: a
            :class:`Guard`, or its mode: ``"full"``, ``"sampled"`` or ``"off"``.
        debug: True is short for ``guard="full"``; False overrides a variable or the original of
            ``ctx.replace``.
        reduction: ``"mean"``, or ``"canonical"``: exact mode, which computes the same bits at any number of
            ranks; a :class:`CanonicalReduction` sets the number of microbatches per step.

    Returns:
        The context; also a context manager that closes it.

    Raises:
        ConfigurationError: An option, variable, device or backend isn't valid or doesn't exist.
        NotAvailableError: An option isn't supported yet.
        DistributedError: The other ranks could not be reached within the timeout; within a minute if RANK
            and WORLD_SIZE are set but neither the address of rank 0 nor a timeout. After 5 seconds of
            waiting, a line on stderr reports it.

    >>> with init_context(cpu=True, mixed_precision="bf16") as ctx:
    ...     ctx.num_processes, ctx.mixed_precision
    (1, 'bf16')
    """
    return _init(options, group=group)


class Meeting(NamedTuple):
    """How a rank joins others that already agree who they are, without a launcher's variables.

    Attributes:
        place: Of this rank.
        store: Of these ranks alone.
        device_index: Of this rank's accelerator.
        patience: How long to wait for the others.
    """

    place: EnvironmentPlan
    store: Store
    device_index: int
    patience: timedelta


def join_meeting(meeting: Meeting, options: ContextOptions) -> Context:
    """Return the context of a rank of a meeting; otherwise as :func:`init_context`.

    Ranks: every rank of the meeting.

    Raises:
        ConfigurationError: torch.distributed is initialised already; or as of ``init_context``.
        DistributedError: Another rank could not be reached.
    """
    if dist.is_initialized():
        raise ConfigurationError(
            "run_elastic: torch.distributed is initialised already, and each new world needs its own process "
            "group. Call run_elastic instead of init_process_group or init_context."
        )
    return _init(options, meeting=meeting)


def _init(
    options: ContextOptions, *, group: dist.ProcessGroup | None = None, meeting: Meeting | None = None
) -> Context:
    environment = dict(os.environ)
    settings = read_settings(environment)
    passed = drop_none(options)
    device = None if passed.get("cpu") else settings.device  # cpu=True was passed, the device is a variable
    if device is None and not (passed.get("cpu") or settings.cpu) and is_xla_requested(environment):
        device = "xla"
    is_xla = device is not None and _kind_of(device) == "xla"
    if is_xla:
        settings = dataclasses.replace(settings, downcast_bf16=False)  # the launcher has told XLA
    options = merge_settings(passed, settings)
    base = apply_options(Context(), options)  # raises for invalid options before anything is started
    if is_xla and base.strategy.parallelism is not None:
        raise NotAvailableError(
            "parallelism_config arranges ranks in a mesh, which accelfn doesn't support on XLA's devices. "
            "Leave it out; fsdp_plugin shards over all devices of a host."
        )
    if settings.bypass_device_map:
        base = dataclasses.replace(base, strategy=dataclasses.replace(base.strategy, bypass_device_map=True))
    joining = sort_handlers(passed.get("kwargs_handlers")).get("process_group", InitProcessGroupKwargs())
    if joining.timeout is not None and not isinstance(passed.get("guard"), Guard):
        base = dataclasses.replace(base, guard=dataclasses.replace(base.guard, timeout=joining.timeout))
    timeout = joining.timeout or timedelta(seconds=base.guard.timeout_s)
    use_cpu = bool(options.get("cpu"))
    backend = None if use_cpu else load_sagemaker_backend(settings)
    backend = joining.backend or backend
    hardware = read_hardware(_kind_of(device) if device is not None else "cpu" if use_cpu else None)

    adopted = dist.group.WORLD if group is None else group
    unset: list[str] = []
    if adopted is None and is_xla and base.strategy.fsdp is not None:
        use_spmd()
    if adopted is not None:
        place = _plan_adopted(adopted)
        _check_adopted_backend(adopted, joining)
        device = device or _current_device(adopted, use_cpu)
        backend = None
    elif meeting is not None:
        place = meeting.place
        kind = device or hardware.devices[0].type
        if not use_cpu and device_type(_kind_of(kind)).numbering == "local_rank" and ":" not in kind:
            device = f"{kind}:{meeting.device_index}"
    else:
        place = read_xla_place() if is_xla else detect_environment(environment)
        if place.launcher == "env" and not joining.init_method:
            unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    base = with_window(base, place.size)
    plan = plan_device(place, hardware, cpu=use_cpu, device=device, backend=backend)
    check_precision(base.precision, plan.facts)
    if adopted is not None:
        world, collectives = _adopt(adopted, place, plan, timeout)
    else:
        if place.local_size > 1:
            check_peers(plan, environment)
        patience = timeout if joining.timeout or not unset else min(timeout, _DEFAULT_ADDRESS_TIMEOUT)
        world, collectives = _join(place, plan, joining.init_method, timeout, patience, unset, meeting)
    joined = dataclasses.replace(
        base, world=_with_exit_hooks(world, collectives, base.guard), collectives=collectives
    )
    try:
        return with_mesh(joined)
    except BaseException:
        close_context(joined)
        raise


def _kind_of(device: str) -> str:
    return device.partition(":")[0]


def _with_exit_hooks(world: World, collectives: Collectives, guard: Guard) -> World:
    """Return the world with hooks that notify the other ranks of this rank's end."""
    if world.size == 1 and not world.owned.group:
        return world
    board, call_log, rank = collectives.board, collectives.call_log, world.rank
    if guard.watchdog and world.size > 1:
        call_log.watch(guard.timeout_s)

    def at_exit() -> None:
        # The exception that ended the program, if one did. An interactive session goes on after each.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not hasattr(sys, "ps1"):
            publish(board, call_log, rank, error)
        announce_end(board, call_log, rank)

    if world.size > 1:
        atexit.register(at_exit)
    owned = dataclasses.replace(world.owned, opened=True, at_exit=at_exit if world.size > 1 else None)
    return dataclasses.replace(world, owned=owned)


def _join(
    place: EnvironmentPlan,
    plan: DevicePlan,
    init_method: str | None,
    timeout: timedelta,
    patience: timedelta,
    unset: Sequence[str],
    meeting: Meeting | None,
) -> tuple[World, Collectives]:
    """Join the other ranks.

    ``unset`` lists the variables of the address that aren't set. The ranks of a meeting are there already,
    and connect within its patience.
    """
    # Scripts for torchrun may rely on a process group even in a world of one.
    if place.size == 1 and place.launcher != "torchrun":
        return _world(place, plan, None, None, Owned()), Collectives()
    method = address_of(place, init_method)
    hook = sys.excepthook
    previous = None
    is_bound = device_type(plan.device.type).numbering == "local_rank"
    if is_bound:
        previous = torch.device(plan.device.type, torch.accelerator.current_device_index())
        torch.accelerator.set_device_index(plan.device)
    connecting = timeout if meeting is None else meeting.patience
    counts = cast("Any", dist.distributed_c10d)._world
    count = counts.group_count
    try:
        store = join_store(place, timeout, patience, init_method) if meeting is None else meeting.store
        dist.init_process_group(
            plan.backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=connecting,
            device_id=plan.device if is_bound else None,
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        if previous is not None:
            torch.accelerator.set_device_index(previous)
        # torch names worlds by this number: who has failed would wait under another name than the others.
        counts.group_count = count
        raise DistributedError(
            f"rank {place.rank} could not join its world of {place.size} ({place.launcher}, backend "
            f"{plan.backend}, at {method}): {error}{_advice(unset, method)}"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    owned = Owned(
        group=True,
        previous_device=previous,
        excepthooks=(hook, sys.excepthook),
        hosts_store=meeting is None
        and place.rank == 0
        and place.launcher != "torchrun"
        and method.startswith(("tcp:", "env:", "xla:")),
    )
    world = _world(place, plan, plan.backend, group, owned)
    try:
        connected = _connect(world, place, PrefixStore("accelfn", store), connecting)
        if meeting is not None:
            cast("Any", dist.distributed_c10d)._set_pg_timeout(timeout, group)
        return connected
    except BaseException:
        close_context(Context(world=world))
        raise


def _advice(unset: Sequence[str], method: str) -> str:
    if not unset:
        return ""
    return (
        f" {' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set, so the address was "
        f"{method.removeprefix('tcp://')}. Set MASTER_ADDR (host of rank 0) and MASTER_PORT for every rank, "
        "start the script with a launcher (accelfn launch), or unset RANK and WORLD_SIZE to run one process."
    )


def _adopt(
    group: dist.ProcessGroup, place: EnvironmentPlan, plan: DevicePlan, timeout: timedelta
) -> tuple[World, Collectives]:
    world = _world(place, plan, str(dist.get_backend(group)), group, Owned())
    if place.size == 1:
        return world, Collectives()
    # Under a prefix that no earlier context has used.
    try:
        group_store = cast(Store, cast("Any", group).get_group_store())
        count = group_store.add(f"accelfn/adopted/{place.rank}", 1)
        store = PrefixStore(f"accelfn/context/{count}", group_store)
    except (AttributeError, RuntimeError) as error:  # a backend without a store, such as MPI
        raise NotAvailableError(
            "init_context can adopt only process groups with a key-value store, and this group has none. "
            "Start the world with init_context, or with a backend that has one (gloo, nccl)."
        ) from error
    try:
        return _connect(world, place, store, timeout)
    except RuntimeError as error:
        if isinstance(error, DistributedError):
            raise
        raise DistributedError(
            f"rank {place.rank} could not connect to the other {place.size - 1} ranks of the adopted group: "
            f"{error}. Every rank of the group must call init_context, equally often."
        ) from error


def _connect(
    world: World, place: EnvironmentPlan, store: Store, timeout: timedelta
) -> tuple[World, Collectives]:
    """Connect to the other ranks, and exchange the nodes' identities if they aren't known."""
    group = world.group
    assert group is not None
    may_share = place.num_nodes == 1 or not place.nodes_known
    collectives, _, owner = process_group_collectives(
        group, place.rank, place.size, store=store, timeout=timeout, one_machine=may_share
    )
    world = dataclasses.replace(world, group_owner=owner)
    if not place.nodes_known and place.size > 1:
        collectives.call_log.begin("init_context", call_site(), None, timeout.total_seconds())
        world = _with_nodes(world, collectives)
    return world, collectives


def _plan_adopted(group: dist.ProcessGroup) -> EnvironmentPlan:
    """Return this rank's place in an existing group; the nodes are unknown."""
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise ConfigurationError(
            "init_context(group=...) needs a registered group: one from new_group, in a process that has "
            f"called init_process_group. torch reports: {error}"
        ) from error
    if rank < 0:
        raise ConfigurationError(
            "init_context(group=...) was called by a rank that isn't in the group. Call it on its ranks."
        )
    size = dist.get_world_size(group)
    return EnvironmentPlan(launcher="adopted", rank=rank, size=size, local_size=size, nodes_known=False)


def _current_device(group: dist.ProcessGroup, cpu: bool) -> str | None:
    """Return the accelerator that the group is bound to, or that is current."""
    if cpu or not torch.accelerator.is_available():
        return None
    bound: torch.device | None = group.bound_device_id
    if bound is not None:
        return str(bound)
    kind = torch.accelerator.current_accelerator()
    if kind is None or device_type(kind.type).numbering == "none":
        return None
    return f"{kind.type}:{torch.accelerator.current_device_index()}"


def _check_adopted_backend(group: dist.ProcessGroup, joining: InitProcessGroupKwargs) -> None:
    if joining.backend is None:
        return
    existing = str(dist.get_backend(group))
    requested_names, existing_names = (
        {part.rpartition(":")[2].strip().lower() for part in text.split(",")}
        for text in (joining.backend, existing)
    )
    if not requested_names <= existing_names:
        raise ConfigurationError(
            f"InitProcessGroupKwargs(backend={joining.backend!r}) has no effect: torch.distributed is "
            f"already initialised with {existing!r}, and that group is adopted. Leave the backend out, or "
            "initialise torch.distributed with it."
        )


def _with_nodes(world: World, collectives: Collectives) -> World:
    """Gather the hosts of all ranks, and number nodes and local ranks by them."""
    host = _host().ljust(_HOST_BYTES, b"\0")
    rows = collectives.all_gather_bytes(torch.frombuffer(bytearray(host), dtype=torch.uint8))
    hosts = [bytes(row[:_HOST_BYTES].tolist()) for row in rows]  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return dataclasses.replace(world, **numbers_among(world.rank, hosts))


def _host() -> bytes:
    # Machines may share a name ("localhost"), and containers of one machine share its boot id.
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {socket.gethostname()}".encode()[:_HOST_BYTES]


def _world(
    place: EnvironmentPlan,
    plan: DevicePlan,
    backend: str | None,
    group: dist.ProcessGroup | None,
    owned: Owned,
) -> World:
    return World(
        **numbers_of(place),
        device=plan.device,
        backend=backend,
        group_ref=None if group is None else weakref.ref(group),
        identity=World().identity if group is None else WorldIdentity(),
        owned=owned,
    )
