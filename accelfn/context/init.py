"""Start a context: read the environment once, plan, then set up what the plan says."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accelfn.context.collectives import Collectives
from accelfn.context.config import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    MegatronLMPlugin,
    ParallelismConfig,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
    read_settings,
)
from accelfn.context.context import Context, configure
from accelfn.context.device import DevicePlan, plan_device, read_hardware
from accelfn.context.environment import EnvironmentPlan, detect_environment
from accelfn.context.options import ContextOptions, merge_settings, sort_handlers
from accelfn.context.precision import check_precision
from accelfn.context.process_group import process_group_collectives
from accelfn.context.world import Made, World
from accelfn.errors import ConfigurationError, DistributedError

__all__ = ("DEFAULT_TIMEOUT", "init_context")

# Long enough for a slow first batch, short enough that a hang costs minutes and not half an hour.
DEFAULT_TIMEOUT = timedelta(minutes=10)


def init_context(
    *,
    device_placement: bool = True,
    mixed_precision: str | PrecisionType | None = None,
    gradient_accumulation_steps: int | None = None,
    cpu: bool | None = None,
    dataloader_config: DataLoaderConfiguration | None = None,
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    megatron_lm_plugin: MegatronLMPlugin | None = None,
    rng_types: Sequence[str | RNGType] | None = None,
    log_with: Any = None,
    project_dir: str | os.PathLike[str] | None = None,
    project_config: ProjectConfiguration | None = None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
    step_scheduler_with_optimizer: bool = True,
    kwargs_handlers: Sequence[KwargsHandler] | None = None,
    dynamo_backend: str | DynamoBackend | None = None,
    dynamo_plugin: TorchDynamoPlugin | None = None,
    parallelism_config: ParallelismConfig | None = None,
    debug: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> Context:
    """Find out who this process is, join its world, and return the frozen :class:`Context`.

    The environment is read here, once, and never written: ``ACCELFN_*`` variables, then ``ACCELERATE_*``, then those of
    the launcher (:func:`detect_environment`). They only fill what isn't passed; an explicit argument always wins.
    When torch.distributed is already initialised, by whomever, that group is adopted and never destroyed.

    Ranks: every rank of the world (or of ``group``).

    Args:
        device_placement: Move models and batches to the device of this rank.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        gradient_accumulation_steps: Micro-batches per optimizer step; 1 when nothing says otherwise.
        cpu: Use the CPU even where there is an accelerator.
        dataloader_config: How ``prepare_data_loader`` shares out the data.
        deepspeed_plugin: DeepSpeed, as one plugin or several by name.
        fsdp_plugin: Sharding by FSDP.
        megatron_lm_plugin: Megatron-LM.
        rng_types: Random states that loaders synchronise; ``("generator",)`` when None.
        log_with: Experiment trackers.
        project_dir: Folder for outputs; ``project_config`` wins if it names one.
        project_config: Where outputs go.
        gradient_accumulation_plugin: Accumulation in more detail than a number of steps.
        step_scheduler_with_optimizer: A scheduler moves only when its optimizer does.
        kwargs_handlers: Records such as ``AutocastKwargs``, at most one of a kind.
        dynamo_backend: Short for ``dynamo_plugin=TorchDynamoPlugin(backend=...)``.
        dynamo_plugin: torch.compile.
        parallelism_config: Sizes of the mesh's axes.
        debug: Compare full structures before every operation across ranks.
        group: An existing process group to use instead of the default one; it stays the caller's.

    Raises:
        ConfigurationError: An option, a variable, a device or a backend is not valid or not there.
        NotAvailableError: An option asks for machinery that this version does not have.
        DistributedError: The other ranks could not be reached.

    >>> with init_context(cpu=True, mixed_precision="bf16") as ctx:
    ...     ctx.num_processes, ctx.mixed_precision
    (1, 'bf16')
    """
    asked = ContextOptions(
        device_placement=device_placement,
        mixed_precision=mixed_precision,
        dataloader_config=dataloader_config,
        deepspeed_plugin=deepspeed_plugin,
        fsdp_plugin=fsdp_plugin,
        megatron_lm_plugin=megatron_lm_plugin,
        rng_types=rng_types,
        log_with=log_with,
        project_dir=project_dir,
        project_config=project_config,
        gradient_accumulation_plugin=gradient_accumulation_plugin,
        step_scheduler_with_optimizer=step_scheduler_with_optimizer,
        kwargs_handlers=kwargs_handlers,
        dynamo_backend=dynamo_backend,
        dynamo_plugin=dynamo_plugin,
        parallelism_config=parallelism_config,
    )
    if gradient_accumulation_steps is not None:
        asked["gradient_accumulation_steps"] = gradient_accumulation_steps
    if cpu is not None:
        asked["cpu"] = cpu
    if debug is not None:
        asked["debug"] = debug

    environment = dict(os.environ)
    settings = read_settings(environment)
    options = merge_settings(asked, settings)
    base = configure(Context(), options)  # refuses bad options before anything is started
    joining = sort_handlers(kwargs_handlers).get("process_group", InitProcessGroupKwargs())
    hardware = read_hardware()

    if group is not None or dist.is_initialized():
        adopted = group if group is not None else dist.group.WORLD
        if adopted is None:
            raise ConfigurationError(
                "torch.distributed is initialised but has no default group. Pass group=."
            )
        place = _place_in(adopted)
        plan = plan_device(place, hardware, cpu=options.get("cpu", False), device=settings.device)
        check_precision(base.precision, plan.facts)
        world, collectives = _adopt(adopted, place, plan)
    else:
        place = detect_environment(environment)
        plan = plan_device(
            place, hardware, cpu=options.get("cpu", False), device=settings.device, backend=joining.backend
        )
        check_precision(base.precision, plan.facts)
        world, collectives = _join(place, plan, joining)
    return dataclasses.replace(base, world=world, collectives=collectives)


def _join(
    place: EnvironmentPlan, plan: DevicePlan, joining: InitProcessGroupKwargs
) -> tuple[World, Collectives]:
    # torchrun's scripts may count on a group even in a world of one; nobody else does.
    if place.launcher == "none" or (place.size == 1 and place.launcher != "torchrun"):
        return _world(place, plan, None, None, Made()), Collectives()
    # torchrun's agent hosts the store, which env:// knows how to find; others get the address in the call.
    default_method = (
        "env://" if place.launcher == "torchrun" else f"tcp://{place.master_addr}:{place.master_port}"
    )
    previous = None
    if plan.device.type not in ("cpu", "mps"):
        previous = torch.device(plan.device.type, torch.accelerator.current_device_index())
        torch.accelerator.set_device_index(plan.device)
    try:
        dist.init_process_group(
            plan.backend,
            init_method=joining.init_method or default_method,
            rank=place.rank,
            world_size=place.size,
            timeout=joining.timeout or DEFAULT_TIMEOUT,
            device_id=None if plan.device.type in ("cpu", "mps") else plan.device,
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        if previous is not None:
            torch.accelerator.set_device_index(previous)
        raise DistributedError(
            f"rank {place.rank} could not join its world of {place.size} ({place.launcher}, backend {plan.backend}, "
            f"at {joining.init_method or default_method}): {error}"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    world = _world(place, plan, plan.backend, group, Made(group=True, previous_device=previous))
    return world, process_group_collectives(group, place.rank, place.size)


def _adopt(group: dist.ProcessGroup, place: EnvironmentPlan, plan: DevicePlan) -> tuple[World, Collectives]:
    side = None
    if not _carries_cpu(group):
        side = dist.new_group(ranks=dist.get_process_group_ranks(group), backend="gloo")
    backend = str(dist.get_backend(group))
    world = _world(place, plan, backend, group, Made(side_group=side))
    collectives = process_group_collectives(group, place.rank, place.size, control=side)
    if place.size == 1:
        return world, Collectives()
    return _with_nodes(world, collectives), collectives


def _place_in(group: dist.ProcessGroup) -> EnvironmentPlan:
    """Find this rank in a group that somebody else made. Which node it is on follows once messages can be sent."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ConfigurationError(
            "init_context(group=...) was called by a rank that isn't in the group. Call it on its ranks."
        )
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
    return EnvironmentPlan(
        launcher="adopted",
        rank=rank,
        size=size,
        local_rank=min(index, size - 1),
        local_size=size,
        num_nodes=1,
    )


def _with_nodes(world: World, collectives: Collectives) -> World:
    """Ask every rank of an adopted group for its host, and number nodes and local ranks by it."""
    own = socket.gethostname().encode()[:256].ljust(256, b"\0")
    rows = collectives.exchange(torch.frombuffer(bytearray(own), dtype=torch.uint8))
    hosts = [bytes(row[:256].tolist()) for row in rows]
    nodes = list(dict.fromkeys(hosts))
    here = [rank for rank, host in enumerate(hosts) if host == own]
    return dataclasses.replace(
        world,
        local_rank=here.index(world.rank),
        local_size=len(here),
        node_rank=nodes.index(own),
        num_nodes=len(nodes),
    )


def _carries_cpu(group: dist.ProcessGroup) -> bool:
    try:
        return any(device.type == "cpu" for device in group._device_types)  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:  # a group whose backend is made lazily on first use
        return False


def _world(
    place: EnvironmentPlan, plan: DevicePlan, backend: str | None, group: dist.ProcessGroup | None, made: Made
) -> World:
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        node_rank=place.node_rank,
        num_nodes=place.num_nodes,
        device=plan.device,
        backend=backend,
        group=group,
        made=made,
    )
