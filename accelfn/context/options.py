"""What a caller may ask of a context, and how asking turns into fields: a pure function."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, cast

from accelfn.context.config import (
    CanonicalReduction,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    Guard,
    GuardMode,
    KwargsHandler,
    MegatronLMPlugin,
    ParallelismConfig,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
    Settings,
    TorchDynamoPlugin,
)
from accelfn.context.config.fsdp import check_fsdp
from accelfn.context.config.handlers import sort_handlers
from accelfn.context.config.records import settle_log_with
from accelfn.context.device import Precision
from accelfn.errors import ConfigurationError, NotAvailableError

if TYPE_CHECKING:
    from accelfn.context.context import Context


class ContextOptions(TypedDict, total=False):
    """Keyword arguments of ``init_context`` (all but ``group``), which explains each; None says nothing."""

    device_placement: bool
    mixed_precision: str | PrecisionType | None
    gradient_accumulation_steps: int | None
    cpu: bool | None
    dataloader_config: DataLoaderConfiguration | None
    deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None
    fsdp_plugin: FullyShardedDataParallelPlugin | None
    megatron_lm_plugin: MegatronLMPlugin | None
    rng_types: Sequence[str | RNGType] | None
    log_with: Any
    project_dir: str | os.PathLike[str] | None
    project_config: ProjectConfiguration | None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None
    step_scheduler_with_optimizer: bool
    kwargs_handlers: Sequence[KwargsHandler] | None
    dynamo_backend: str | DynamoBackend | None
    dynamo_plugin: TorchDynamoPlugin | None
    parallelism_config: ParallelismConfig | None
    guard: Guard | str | None
    debug: bool | None
    reduction: str | CanonicalReduction | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What ``prepare_model`` does with a model in a world of several ranks.

    Attributes:
        ddp: Options of torch's DistributedDataParallel, the strategy when nothing else is asked for.
        parallelism: Sizes of the mesh's axes, which fill the world; None where nobody asked for a mesh.
        fsdp: How parameters are sharded over the ranks of ``"shard"``; None for torch's defaults.
        dynamo: How models are compiled; the backend "no" compiles nothing.
        bypass_device_map: Let each of several ranks bring a model that is on several devices. Only the
            variable ``ACCELFN_BYPASS_DEVICE_MAP`` says so.
    """

    ddp: DistributedDataParallelKwargs = dataclasses.field(default_factory=DistributedDataParallelKwargs)
    parallelism: ParallelismConfig | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None
    dynamo: TorchDynamoPlugin = dataclasses.field(default_factory=TorchDynamoPlugin)
    bypass_device_map: bool = False


# A setting fills the option of its name, unless one of these is passed.
_RIVALS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mixed_precision": (),
        "reduction": (),
        "gradient_accumulation_steps": ("gradient_accumulation_plugin",),
        "cpu": (),
        "dynamo_plugin": ("dynamo_backend",),
        "fsdp_plugin": (),
        "parallelism_config": (),
    }
)


def merge_settings(options: ContextOptions, settings: Settings) -> ContextOptions:
    """Fill what ``options`` leaves open with what the environment says; an explicit argument wins. Pure.

    Raises:
        NotAvailableError: A variable asks for what is not supported yet.
    """
    for name in ("use_deepspeed", "use_megatron_lm", "cpu_affinity", "downcast_bf16"):
        if getattr(settings, name):
            raise NotAvailableError(
                f"ACCELFN_{name.upper()} or ACCELERATE_{name.upper()} asks for what accelfn does not support "
                "yet. Unset the variable."
            )
    options = said(options)
    reduction, guard = options.get("reduction"), options.get("guard")
    says_window = isinstance(reduction, CanonicalReduction) and reduction.num_microbatches is not None
    filled = {
        name: getattr(settings, name)
        for name, rivals in _RIVALS.items()
        if not any(one in options for one in (name, *rivals))
        and not (name == "gradient_accumulation_steps" and says_window)
    }
    merged = said(cast("ContextOptions", {**filled, **options}))
    mode = guard.mode if isinstance(guard, Guard) else guard
    if mode is None and options.get("debug") is None:
        if settings.debug:
            merged["debug"] = True
        elif settings.guard is not None:
            given = guard if isinstance(guard, Guard) else Guard()
            merged["guard"] = dataclasses.replace(given, mode=settings.guard)
    return merged


def said(options: ContextOptions) -> ContextOptions:
    """Drop options that are None. Pure."""
    return cast("ContextOptions", {name: value for name, value in options.items() if value is not None})


def apply_options(ctx: Context, options: ContextOptions) -> Context:
    """Return ``ctx`` with ``options`` applied to it, but for what depends on the number of ranks. Pure.

    Raises:
        ConfigurationError: Two options contradict each other, or one is not valid.
        NotAvailableError: An option asks for what is not supported yet.
        TypeError: An unknown option, or one of the wrong type.
    """
    options = said(options)
    _check_types(options)
    _refuse_unavailable(options)
    handlers = sort_handlers(options.get("kwargs_handlers"))
    before, strategy = ctx.precision, ctx.strategy
    mode = options.get("mixed_precision") or before.mode
    # ctx.replace(mixed_precision="bf16") leaves fp8, and with it the recipe.
    recipe = handlers.get("fp8_recipe", before.fp8_recipe if mode == "fp8" else None)
    reduction = _reduction(ctx.reduction, options.get("reduction"))
    ddp = handlers.get("ddp", strategy.ddp)
    if reduction is not None:
        _refuse_inexact(ddp)
    return dataclasses.replace(
        ctx,
        precision=Precision(
            mode=mode,
            autocast=handlers.get("autocast", before.autocast),
            scaler=handlers.get("scaler", before.scaler),
            fp8_recipe=recipe,
        ),
        accumulation=_accumulation(ctx, options),
        loading=options.get("dataloader_config") or ctx.loading,
        project=_project(ctx.project, options),
        strategy=dataclasses.replace(
            strategy,
            ddp=ddp,
            dynamo=_dynamo(strategy.dynamo, options),
            parallelism=options.get("parallelism_config") or strategy.parallelism,
            fsdp=options.get("fsdp_plugin") or strategy.fsdp,
        ),
        device_placement=options.get("device_placement", ctx.device_placement),
        step_scheduler_with_optimizer=options.get(
            "step_scheduler_with_optimizer", ctx.step_scheduler_with_optimizer
        ),
        rng_types=_rng_types(ctx.rng_types, options.get("rng_types")),
        guard=_guard(ctx.guard, options),
        reduction=reduction,
        profiling=handlers.get("profile", ctx.profiling),
        log_with=settle_log_with(options["log_with"]) if "log_with" in options else ctx.log_with,
    )


def settle_window(
    accumulation: GradientAccumulationPlugin, reduction: CanonicalReduction | None, size: int
) -> GradientAccumulationPlugin:
    """Return the accumulation whose windows, on ``size`` ranks, make up ``num_microbatches``. Pure.

    Raises:
        ConfigurationError: The ranks can't share the batches out evenly, or another window was asked for.

    >>> settle_window(GradientAccumulationPlugin(), CanonicalReduction(num_microbatches=12), 4).num_steps
    3
    """
    number = None if reduction is None else reduction.num_microbatches
    if number is None:
        return accumulation
    if number % size:
        fitting = ", ".join(str(ranks) for ranks in range(1, number + 1) if number % ranks == 0)
        raise ConfigurationError(
            "CanonicalReduction.num_microbatches must be divisible by the number of ranks: got "
            f"num_microbatches={number} and {size} ranks. With {number} there can be {fitting} ranks."
        )
    steps = number // size
    if accumulation.num_steps not in (1, steps):  # 1 is what nobody asked for
        raise ConfigurationError(
            f"gradient_accumulation_steps={accumulation.num_steps} contradicts num_microbatches={number}, "
            f"which makes windows of {steps} on {size} ranks. Pass one of the two."
        )
    return dataclasses.replace(accumulation, num_steps=steps)


def settle_parallelism(
    parallelism: ParallelismConfig | None, fsdp: FullyShardedDataParallelPlugin | None, size: int
) -> ParallelismConfig | None:
    """Return the sizes of the mesh on ``size`` ranks. Pure.

    FSDP shards over the ranks that no other axis takes, where nobody says over how many.

    Raises:
        ConfigurationError: The mesh does not fit the ranks, or contradicts the plugin.

    >>> settle_parallelism(None, FullyShardedDataParallelPlugin(), 8).dp_shard_size
    8
    """
    if parallelism is None and fsdp is None:
        return None
    config = parallelism or ParallelismConfig()
    free, rest = divmod(size, config.total_size)
    if fsdp is not None and config.data_parallel_size == 1 and not rest:
        config = dataclasses.replace(config, dp_shard_size=free)
    elif config.total_size == 1:
        config = dataclasses.replace(config, dp_replicate_size=size)
    if fsdp is not None:
        check_fsdp(fsdp, config.dp_replicate_size)
    config.check_size(size)
    if (
        fsdp is not None
        and config.total_size > 1
        and config.dp_shard_size * config.cp_size * config.sp_size == 1
    ):
        raise ConfigurationError(
            "fsdp_plugin has nothing to shard over: along dp_shard, cp and sp the mesh has one rank. Set "
            "dp_shard_size above 1, or leave the plugin out."
        )
    return config


def refuse_inexact_axes(axes: Sequence[str]) -> None:
    """Refuse a mesh on which exact mode can't have its sums in one order. Pure.

    Args:
        axes: Those of more than one rank.

    Raises:
        ConfigurationError: With the axes along which ranks have parts.
    """
    found = [axis for axis in axes if axis != "dp_replicate"]
    if found:
        raise ConfigurationError(
            'reduction="canonical" needs the whole model on every rank, and whole samples, to take sums in '
            f"one order: along {', '.join(found)} ranks have parts, and sums over parts change with their "
            f"number. Leave {', '.join(f'{axis}_size' for axis in found)} out (and fsdp_plugin), or use "
            'reduction="mean".'
        )


# What each of these options has to be. Callers without a type checker pass a "no" from a parsed file, which
# would count as True.
_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("device_placement", "step_scheduler_with_optimizer", "cpu", "debug"), (bool,)),
        "dataloader_config": (DataLoaderConfiguration,),
        "dynamo_plugin": (TorchDynamoPlugin,),
        "fsdp_plugin": (FullyShardedDataParallelPlugin,),
        "gradient_accumulation_plugin": (GradientAccumulationPlugin,),
        "guard": (Guard, str),
        "parallelism_config": (ParallelismConfig,),
        "project_config": (ProjectConfiguration,),
        "reduction": (CanonicalReduction, str),
        "rng_types": (list, tuple),
    }
)


def _check_types(options: ContextOptions) -> None:
    unknown = sorted(set(options) - set(ContextOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"unknown option(s) {', '.join(unknown)}. A context has: "
            f"{', '.join(ContextOptions.__annotations__)}."
        )
    for name, value in options.items():
        kinds = _TYPES.get(name, (object,))
        if not isinstance(value, kinds):
            names = " or ".join("True or False" if kind is bool else f"a {kind.__name__}" for kind in kinds)
            raise TypeError(f"{name} must be {names}: got {value!r} of type {type(value).__name__}.")


def _accumulation(ctx: Context, options: ContextOptions) -> GradientAccumulationPlugin:
    now, before = ctx.accumulation, ctx.reduction
    if options.get("reduction") is not None and before is not None and before.num_microbatches is not None:
        now = dataclasses.replace(now, num_steps=1)  # the window only followed from the reduction
    plugin, steps = options.get("gradient_accumulation_plugin"), options.get("gradient_accumulation_steps")
    if plugin is None:
        return now if steps is None else dataclasses.replace(now, num_steps=steps)
    if steps not in (None, 1, plugin.num_steps):
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin with "
            f"num_steps={plugin.num_steps}. Pass one of the two."
        )
    return plugin


def _reduction(
    now: CanonicalReduction | None, asked: str | CanonicalReduction | None
) -> CanonicalReduction | None:
    if asked is None or isinstance(asked, CanonicalReduction):
        return now if asked is None else asked
    if asked.lower() not in ("mean", "canonical"):
        raise ConfigurationError(
            f'reduction must be "mean", "canonical" or a CanonicalReduction: got {asked!r}.'
        )
    return None if asked.lower() == "mean" else CanonicalReduction()


def _refuse_inexact(ddp: DistributedDataParallelKwargs) -> None:
    """Refuse what is asked of DistributedDataParallel and can't be had from exact mode, which has none."""
    for name, default in (
        ("comm_hook", DDPCommunicationHookType.NO),
        ("comm_wrapper", DDPCommunicationHookType.NO),
        ("gradient_as_bucket_view", False),
    ):
        value = getattr(ddp, name)
        if value != default:
            raise ConfigurationError(
                f'reduction="canonical" sums gradients as they are, without DistributedDataParallel: '
                f"{name}={str(value)!r} can't be had with it. Leave one of the two out."
            )


def _guard(now: Guard, options: ContextOptions) -> Guard:
    asked, debug = options.get("guard"), options.get("debug")
    named = asked.mode if isinstance(asked, Guard) else asked  # None where nobody names a mode
    guard = dataclasses.replace(asked if isinstance(asked, Guard) else now, mode=named or now.mode)
    if debug is None or debug == (guard.mode == GuardMode.FULL):
        return guard
    if named is not None:
        raise ConfigurationError(
            f"debug={debug} means that the guard's mode is {'' if debug else 'not '}full, and guard asks for "
            f"{str(guard.mode)!r}. Pass one of the two."
        )
    return dataclasses.replace(guard, mode=GuardMode.FULL if debug else GuardMode.SAMPLED)


def _project(now: ProjectConfiguration, options: ContextOptions) -> ProjectConfiguration:
    project = options.get("project_config") or now
    directory = options.get("project_dir")
    if directory is None or (project.project_dir is not None and options.get("project_config") is not None):
        return project
    # A logging folder of its own stays; one that was only the project's folder moves with it.
    logging_dir = None if project.logging_dir == project.project_dir else project.logging_dir
    return dataclasses.replace(project, project_dir=os.fspath(directory), logging_dir=logging_dir)


def _rng_types(now: tuple[str, ...], asked: Sequence[str | RNGType] | None) -> tuple[str, ...]:
    names = now if asked is None else tuple(str(name) for name in asked)
    unknown = [name for name in names if name not in RNGType.values()]
    if unknown:
        raise ConfigurationError(f"rng_types takes {', '.join(RNGType.values())}: got {unknown[0]!r}.")
    return names


def _dynamo(now: TorchDynamoPlugin, options: ContextOptions) -> TorchDynamoPlugin:
    plugin, backend = options.get("dynamo_plugin"), options.get("dynamo_backend")
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend and dynamo_plugin say the same thing twice. Pass one of the two."
        )
    return plugin or (now if backend is None else TorchDynamoPlugin(backend=backend))


def _refuse_unavailable(options: ContextOptions) -> None:
    for argument, what, is_asked in (
        ("deepspeed_plugin", "DeepSpeed", "deepspeed_plugin" in options),
        ("megatron_lm_plugin", "Megatron-LM", "megatron_lm_plugin" in options),
        ("mixed_precision", "fp8", options.get("mixed_precision") == "fp8"),
    ):
        if is_asked:
            raise NotAvailableError(
                f"{argument} asks for {what}, which accelfn does not support yet. "
                "The record is valid; leave it out of the context for now, or unset the variable that asks "
                "for it."
            )
