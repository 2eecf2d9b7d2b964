"""The options of a context, and the pure function that applies them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, cast

from accelfn.config import (
    CanonicalReduction,
    Config,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FrozenOptions,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    Guard,
    GuardMode,
    KwargsHandler,
    MegatronLMPlugin,
    ParallelismConfig,
    Precision,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
    Settings,
    Strategy,
    TorchDynamoPlugin,
)
from accelfn.config.checks import did_you_mean
from accelfn.config.fsdp import check_fsdp
from accelfn.config.handlers import sort_handlers
from accelfn.config.records import settle_log_with
from accelfn.errors import ConfigurationError, NotAvailableError

C = TypeVar("C", bound=Config)


class ContextOptions(TypedDict, total=False):
    """Keyword arguments of ``init_context`` except ``group``; see there. None is the same as omitting one."""

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


def merge_settings(options: ContextOptions, settings: Settings) -> ContextOptions:
    """Return ``options`` with the environment's settings as defaults. Pure.

    Raises:
        NotAvailableError: A variable requests what isn't supported yet.
    """
    for name in ("cpu_affinity", "downcast_bf16"):
        if getattr(settings, name):
            raise NotAvailableError(
                f"ACCELFN_{name.upper()} or ACCELERATE_{name.upper()} is set, which accelfn does not support "
                "yet. Unset the variable."
            )
    options = drop_none(options)
    reduction, guard = options.get("reduction"), options.get("guard")
    sets_window = isinstance(reduction, CanonicalReduction) and reduction.num_microbatches is not None
    plugin = _deepspeed(Strategy(), options)[0]
    decided = {
        "gradient_accumulation_steps": sets_window
        or "gradient_accumulation_plugin" in options
        or (plugin is not None and plugin.accumulation is not None),
        "mixed_precision": plugin is not None and plugin.mixed_precision is not None,
        "dynamo_plugin": "dynamo_backend" in options,
        **dict.fromkeys(("guard", "debug"), True),  # which decide each other, see below
    }
    # A setting is the default of the option of its name.
    defaults = {
        name: getattr(settings, name)
        for name in ContextOptions.__annotations__
        if hasattr(settings, name) and name not in options and not decided.get(name)
    }
    merged = drop_none(cast("ContextOptions", {**defaults, **options}))
    handlers = options.get("kwargs_handlers")
    is_fp8 = merged.get("mixed_precision") == "fp8"
    if is_fp8 and settings.fp8_recipe is not None and "fp8_recipe" not in sort_handlers(handlers):
        merged["kwargs_handlers"] = [*(handlers or ()), settings.fp8_recipe]
    mode = guard.mode if isinstance(guard, Guard) else guard
    if mode is None and options.get("debug") is None:
        if settings.debug:
            merged["debug"] = True
        elif settings.guard is not None:
            base = guard if isinstance(guard, Guard) else Guard()
            merged["guard"] = dataclasses.replace(base, mode=settings.guard)
    return merged


def drop_none(options: ContextOptions) -> ContextOptions:
    """Drop options that are None. Pure."""
    return cast("ContextOptions", {name: value for name, value in options.items() if value is not None})


def apply_options(config: C, options: ContextOptions) -> C:
    """Return ``config`` with ``options`` applied, except for what depends on the number of ranks. Pure.

    Raises:
        ConfigurationError: Two options contradict each other, or an option isn't valid.
        NotAvailableError: An option isn't supported yet.
        TypeError: An option is unknown or of the wrong type.
    """
    options = drop_none(options)
    _check_types(options)
    handlers = sort_handlers(options.get("kwargs_handlers"))
    before, strategy = config.precision, config.strategy
    deepspeed, plugins = _deepspeed(strategy, options)
    _refuse_two_engines(strategy, options)
    mode = options.get("mixed_precision") or (deepspeed and deepspeed.mixed_precision) or before.mode
    if mode == "fp8" and (deepspeed or strategy.megatron or options.get("megatron_lm_plugin")):
        raise NotAvailableError(
            "mixed_precision='fp8' can't be combined yet with DeepSpeed or Megatron-LM. Use "
            "mixed_precision='bf16' with them, or an fsdp_plugin with fp8."
        )
    # ctx.replace(mixed_precision="bf16") drops the recipe of fp8.
    recipe = handlers.get("fp8_recipe", before.fp8_recipe if mode == "fp8" else None)
    reduction = _reduction(config.reduction, options.get("reduction"))
    ddp = handlers.get("ddp", strategy.ddp)
    if reduction is not None:
        _check_exact(ddp)
    return dataclasses.replace(
        config,
        precision=Precision(
            mode=mode,
            autocast=handlers.get("autocast", before.autocast),
            scaler=handlers.get("scaler") or (deepspeed and deepspeed.scaler) or before.scaler,
            fp8_recipe=recipe,
        ),
        accumulation=_accumulation(config, options, deepspeed),
        loading=options.get("dataloader_config") or config.loading,
        project=_project(config.project, options),
        strategy=dataclasses.replace(
            strategy,
            ddp=ddp,
            dynamo=_dynamo(strategy.dynamo, options),
            parallelism=options.get("parallelism_config") or strategy.parallelism,
            fsdp=options.get("fsdp_plugin") or strategy.fsdp,
            deepspeed=deepspeed,
            deepspeed_plugins=plugins,
            megatron=options.get("megatron_lm_plugin") or strategy.megatron,
        ),
        device_placement=options.get("device_placement", config.device_placement),
        step_scheduler_with_optimizer=options.get(
            "step_scheduler_with_optimizer", config.step_scheduler_with_optimizer
        ),
        rng_types=_rng_types(config.rng_types, options.get("rng_types")),
        guard=_guard(config.guard, options),
        reduction=reduction,
        profiling=handlers.get("profile", config.profiling),
        log_with=settle_log_with(options["log_with"]) if "log_with" in options else config.log_with,
    )


def settle_window(
    accumulation: GradientAccumulationPlugin, reduction: CanonicalReduction | None, size: int
) -> GradientAccumulationPlugin:
    """Return the accumulation whose windows on ``size`` ranks have ``num_microbatches`` in total. Pure.

    Raises:
        ConfigurationError: The number of ranks doesn't divide them, or another window was requested.

    >>> settle_window(GradientAccumulationPlugin(), CanonicalReduction(num_microbatches=12), 4).num_steps
    3
    """
    number = None if reduction is None else reduction.num_microbatches
    if number is None:
        return accumulation
    if number % size:
        divisors = ", ".join(str(ranks) for ranks in range(1, number + 1) if number % ranks == 0)
        raise ConfigurationError(
            "CanonicalReduction.num_microbatches must be divisible by the number of ranks: got "
            f"num_microbatches={number} and {size} ranks. With {number} microbatches use {divisors} ranks."
        )
    steps = number // size
    if accumulation.num_steps not in (1, steps):  # 1 is the default
        raise ConfigurationError(
            f"gradient_accumulation_steps={accumulation.num_steps} contradicts num_microbatches={number}, "
            f"which makes windows of {steps} on {size} ranks. Pass one of the two."
        )
    return dataclasses.replace(accumulation, num_steps=steps)


def settle_parallelism(
    parallelism: ParallelismConfig | None, fsdp: FullyShardedDataParallelPlugin | None, size: int
) -> ParallelismConfig | None:
    """Return the sizes of the mesh on ``size`` ranks. Pure.

    By default, FSDP shards over all ranks that no other axis uses.

    Raises:
        ConfigurationError: The mesh doesn't match the number of ranks, or contradicts the plugin.

    >>> settle_parallelism(None, FullyShardedDataParallelPlugin(), 8).dp_shard_size
    8
    """
    if parallelism is None and fsdp is None:
        return None
    config = parallelism or ParallelismConfig()
    num_free, remainder = divmod(size, config.total_size)
    if fsdp is not None and config.data_parallel_size == 1 and not remainder:
        config = dataclasses.replace(config, dp_shard_size=num_free)
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
            "fsdp_plugin has no ranks to shard over: dp_shard, cp and sp have one rank. Set dp_shard_size "
            "above 1, or leave the plugin out."
        )
    return config


def mesh_of_megatron(plugin: MegatronLMPlugin | None, size: int) -> ParallelismConfig | None:
    """Return the axes that Megatron-LM has on ``size`` ranks, so that loaders and metrics know of them. Pure.

    Raises:
        ConfigurationError: Its degrees don't divide the number of ranks.

    >>> mesh_of_megatron(MegatronLMPlugin(tp_degree=2, pp_degree=2), 8).dp_replicate_size
    2
    """
    if plugin is None:
        return None
    tp, pp, cp = plugin.tp_degree, plugin.pp_degree, plugin.context_parallel_size
    replicas, remainder = divmod(size, tp * pp * cp)
    if remainder:
        raise ConfigurationError(
            f"megatron_lm_plugin: tp_degree x pp_degree = {tp} x {pp} must divide the number of ranks, which "
            f"is {size}. Start a multiple of {tp * pp} processes, or change the degrees."
        )
    return ParallelismConfig(tp_size=tp, pp_size=pp, cp_size=cp, dp_replicate_size=replicas)


def refuse_inexact_axes(axes: Sequence[str]) -> None:
    """Raise if exact mode can't sum in a fixed order on a mesh. Pure.

    Args:
        axes: The axes of more than one rank.

    Raises:
        ConfigurationError: With the axes along which ranks have shards of the model or of samples.
    """
    sharded = [axis for axis in axes if axis != "dp_replicate"]
    if sharded:
        raise ConfigurationError(
            'reduction="canonical" needs the unsharded model and unsharded samples on every rank, but the '
            f"mesh shards along {', '.join(sharded)}: sums over shards change with their number. Leave "
            f"{', '.join(f'{axis}_size' for axis in sharded)} out (and fsdp_plugin), or use "
            'reduction="mean".'
        )


# The types of these options are checked, since the text "no" from a parsed file would count as True.
_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("device_placement", "step_scheduler_with_optimizer", "cpu", "debug"), (bool,)),
        "dataloader_config": (DataLoaderConfiguration,),
        "dynamo_plugin": (TorchDynamoPlugin,),
        "fsdp_plugin": (FullyShardedDataParallelPlugin,),
        "gradient_accumulation_plugin": (GradientAccumulationPlugin,),
        "guard": (Guard, str),
        "megatron_lm_plugin": (MegatronLMPlugin,),
        "parallelism_config": (ParallelismConfig,),
        "project_config": (ProjectConfiguration,),
        "reduction": (CanonicalReduction, str),
        "rng_types": (list, tuple),
    }
)


def _check_types(options: ContextOptions) -> None:
    unknown = sorted(set(options) - set(ContextOptions.__annotations__))
    if unknown:
        meant = did_you_mean(unknown[0], ContextOptions.__annotations__)
        raise TypeError(
            f"unknown option(s) {', '.join(unknown)}.{meant} The options of a context are "
            f"{', '.join(ContextOptions.__annotations__)}."
        )
    for name, value in options.items():
        kinds = _TYPES.get(name, (object,))
        if not isinstance(value, kinds):
            names = " or ".join("True or False" if kind is bool else f"a {kind.__name__}" for kind in kinds)
            raise TypeError(f"{name} must be {names}: got {value!r} of type {type(value).__name__}.")


def _accumulation(
    config: Config, options: ContextOptions, deepspeed: DeepSpeedPlugin | None
) -> GradientAccumulationPlugin:
    current, before = config.accumulation, config.reduction
    if options.get("reduction") is not None and before is not None and before.num_microbatches is not None:
        current = dataclasses.replace(current, num_steps=1)  # the window was derived from the reduction
    plugin, steps = options.get("gradient_accumulation_plugin"), options.get("gradient_accumulation_steps")
    if plugin is None and steps is None:
        steps = deepspeed and deepspeed.accumulation
    if plugin is None:
        return current if steps is None else dataclasses.replace(current, num_steps=steps)
    if steps not in (None, 1, plugin.num_steps):
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin with "
            f"num_steps={plugin.num_steps}. Pass one of the two."
        )
    return plugin


def _reduction(
    current: CanonicalReduction | None, asked: str | CanonicalReduction | None
) -> CanonicalReduction | None:
    if asked is None or isinstance(asked, CanonicalReduction):
        return current if asked is None else asked
    if asked.lower() not in ("mean", "canonical"):
        raise ConfigurationError(
            f'reduction must be "mean", "canonical" or a CanonicalReduction: got {asked!r}.'
        )
    return None if asked.lower() == "mean" else CanonicalReduction()


def _check_exact(ddp: DistributedDataParallelKwargs) -> None:
    """Raise if options of DistributedDataParallel are set, which exact mode doesn't use."""
    for name, default in (
        ("comm_hook", DDPCommunicationHookType.NO),
        ("comm_wrapper", DDPCommunicationHookType.NO),
        ("gradient_as_bucket_view", False),
    ):
        value = getattr(ddp, name)
        if value != default:
            raise ConfigurationError(
                'reduction="canonical" sums gradients without DistributedDataParallel, so '
                f"{name}={str(value)!r} has no effect. Leave one of the two out."
            )


def _guard(current: Guard, options: ContextOptions) -> Guard:
    asked, debug = options.get("guard"), options.get("debug")
    named = asked.mode if isinstance(asked, Guard) else asked  # None if no mode is named
    guard = dataclasses.replace(asked if isinstance(asked, Guard) else current, mode=named or current.mode)
    if debug is None or debug == (guard.mode == GuardMode.FULL):
        return guard
    if named is not None:
        raise ConfigurationError(
            f"debug={debug} means that the guard's mode is {'' if debug else 'not '}full, but guard is "
            f"{str(guard.mode)!r}. Pass one of the two."
        )
    return dataclasses.replace(guard, mode=GuardMode.FULL if debug else GuardMode.SAMPLED)


def _project(current: ProjectConfiguration, options: ContextOptions) -> ProjectConfiguration:
    project = options.get("project_config") or current
    directory = options.get("project_dir")
    if directory is None or (project.project_dir is not None and options.get("project_config") is not None):
        return project
    # A separate logging directory stays; one that was the default changes with the project's directory.
    logging_dir = None if project.logging_dir == project.project_dir else project.logging_dir
    return dataclasses.replace(project, project_dir=os.fspath(directory), logging_dir=logging_dir)


def _rng_types(current: tuple[str, ...], asked: Sequence[str | RNGType] | None) -> tuple[str, ...]:
    names = current if asked is None else tuple(str(name) for name in asked)
    unknown = [name for name in names if name not in RNGType.values()]
    if unknown:
        raise ConfigurationError(f"rng_types takes {', '.join(RNGType.values())}: got {unknown[0]!r}.")
    return names


def _dynamo(current: TorchDynamoPlugin, options: ContextOptions) -> TorchDynamoPlugin:
    plugin, backend = options.get("dynamo_plugin"), options.get("dynamo_backend")
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend and dynamo_plugin both set the backend. Pass one of the two."
        )
    return plugin or (current if backend is None else TorchDynamoPlugin(backend=backend))


def _deepspeed(
    strategy: Strategy, options: ContextOptions
) -> tuple[DeepSpeedPlugin | None, Mapping[str, DeepSpeedPlugin]]:
    """Return the active plugin of DeepSpeed, and all of them by name.

    Raises:
        TypeError: The option holds something else.
        ConfigurationError: The active one contradicts another option; names both.
    """
    asked: object = options.get("deepspeed_plugin")
    plugins, active = strategy.deepspeed_plugins, strategy.deepspeed
    if isinstance(asked, Mapping):
        plugins = FrozenOptions(cast("Mapping[str, Any]", asked))
        active = next(iter(plugins.values()), None)
    elif asked is not None:
        active = cast("Any", asked)
    for plugin in cast("tuple[object, ...]", (*plugins.values(), active)):
        if plugin is not None and not isinstance(plugin, DeepSpeedPlugin):
            raise TypeError(
                "deepspeed_plugin must be a DeepSpeedPlugin, or a mapping of names to them: got "
                f"{type(plugin).__name__}."
            )
    if active is None:
        return None, plugins
    window = options.get("gradient_accumulation_plugin")
    steps = window.num_steps if window is not None else options.get("gradient_accumulation_steps")
    mode = options.get("mixed_precision")
    sides = (
        ("gradient_accumulation_steps", steps, active.accumulation),
        ("mixed_precision", None if mode is None else str(mode), active.mixed_precision),
    )
    for name, own, other in sides:
        if own is not None and other is not None and own != other and not (own == "fp8" and other == "bf16"):
            raise ConfigurationError(
                f"{name}={own!r} contradicts the configuration of DeepSpeed, which asks for {other!r}. Set "
                f'one of the two, and leave the other "auto".'
            )
    return active, plugins


def _refuse_two_engines(strategy: Strategy, options: ContextOptions) -> None:
    """Refuse options that each name another owner of the training step."""
    engines = {
        "deepspeed_plugin": strategy.deepspeed,
        "megatron_lm_plugin": strategy.megatron,
        "fsdp_plugin": strategy.fsdp,
        "parallelism_config": strategy.parallelism,
    }
    named = [name for name, before in engines.items() if options.get(name) is not None or before is not None]
    owners = [name for name in named if name in ("deepspeed_plugin", "megatron_lm_plugin")]
    if owners and len(named) > 1:
        raise ConfigurationError(
            f"{' and '.join(named)} each decide how models are spread over ranks. Leave all but one out."
        )
    reduction = options.get("reduction")
    if owners and (isinstance(reduction, CanonicalReduction) or (reduction or "").lower() == "canonical"):
        raise ConfigurationError(
            f'reduction="canonical" sums gradients in a fixed order, but with {owners[0]} the engine sums '
            "them. Leave one of the two out."
        )
