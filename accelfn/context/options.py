"""What a caller may ask of a context, and how asking turns into fields: a pure function."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

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
from accelfn.context.config.trackers import settle_log_with
from accelfn.context.handlers import sort_handlers
from accelfn.context.precision import Precision
from accelfn.errors import ConfigurationError, NotAvailableError

if TYPE_CHECKING:
    from accelfn.context.context import Context

__all__ = (
    "ContextOptions",
    "Strategy",
    "apply_options",
    "merge_settings",
    "refuse_inexact_axes",
    "said",
    "settle_parallelism",
    "settle_window",
)

_T = TypeVar("_T")


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


def merge_settings(options: ContextOptions, settings: Settings) -> ContextOptions:
    """Fill what ``options`` leaves open with what the environment says; an explicit argument wins. Pure."""
    options = said(options)
    merged = options.copy()
    if "mixed_precision" not in options and settings.mixed_precision is not None:
        merged["mixed_precision"] = settings.mixed_precision
    if options.get("reduction") is None and settings.reduction is not None:
        merged["reduction"] = settings.reduction
    steps = settings.gradient_accumulation_steps
    reduction = options.get("reduction")
    says_window = isinstance(reduction, CanonicalReduction) and reduction.num_microbatches is not None
    if (
        steps is not None
        and not says_window
        and "gradient_accumulation_steps" not in options
        and not options.get("gradient_accumulation_plugin")
    ):
        merged["gradient_accumulation_steps"] = steps
    if "cpu" not in options:
        merged["cpu"] = settings.cpu
    guard = options.get("guard")
    says_mode = guard.mode is not None if isinstance(guard, Guard) else guard is not None
    if not says_mode and options.get("debug") is None:
        if settings.debug:
            merged["debug"] = True
        elif settings.guard is not None:
            merged["guard"] = (
                dataclasses.replace(guard, mode=settings.guard)
                if isinstance(guard, Guard)
                else settings.guard
            )
    if (
        not options.get("dynamo_backend")
        and not options.get("dynamo_plugin")
        and settings.dynamo_plugin is not None
    ):
        merged["dynamo_plugin"] = settings.dynamo_plugin
    if not options.get("fsdp_plugin") and settings.fsdp_plugin is not None:
        merged["fsdp_plugin"] = settings.fsdp_plugin
    if not options.get("deepspeed_plugin") and settings.deepspeed_plugin is not None:
        merged["deepspeed_plugin"] = settings.deepspeed_plugin
    if not options.get("megatron_lm_plugin") and settings.megatron_lm_plugin is not None:
        merged["megatron_lm_plugin"] = settings.megatron_lm_plugin
    if not options.get("parallelism_config") and settings.parallelism_config is not None:
        merged["parallelism_config"] = settings.parallelism_config
    if merged.get("mixed_precision") == "fp8" and settings.fp8_recipe is not None:
        handlers = tuple(options.get("kwargs_handlers") or ())
        if "fp8_recipe" not in sort_handlers(handlers):
            merged["kwargs_handlers"] = (*handlers, settings.fp8_recipe)
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
    _check_names_and_flags(options)
    _refuse_unavailable(options)
    handlers = sort_handlers(options.get("kwargs_handlers"))
    precision = ctx.precision
    mode = options.get("mixed_precision")
    recipe = handlers.get("fp8_recipe", precision.fp8_recipe)
    if mode is not None and mode != "fp8" and "fp8_recipe" not in handlers:
        recipe = None  # ctx.replace(mixed_precision="bf16") leaves fp8, and with it the recipe
    reduction = _reduction(ctx.reduction, options.get("reduction"))
    ddp = handlers.get("ddp", ctx.strategy.ddp)
    if reduction is not None:
        _refuse_inexact(ddp)
    return dataclasses.replace(
        ctx,
        precision=Precision(
            mode=precision.mode if mode is None else mode,
            autocast=handlers.get("autocast", precision.autocast),
            scaler=handlers.get("scaler", precision.scaler),
            fp8_recipe=recipe,
        ),
        accumulation=_accumulation(_given_window(ctx, options), options),
        loading=_typed("dataloader_config", options.get("dataloader_config"), DataLoaderConfiguration)
        or ctx.loading,
        project=_project(ctx.project, options),
        strategy=dataclasses.replace(
            ctx.strategy,
            ddp=ddp,
            dynamo=_dynamo(options) or ctx.strategy.dynamo,
            parallelism=options.get("parallelism_config") or ctx.strategy.parallelism,
            fsdp=_typed("fsdp_plugin", options.get("fsdp_plugin"), FullyShardedDataParallelPlugin)
            or ctx.strategy.fsdp,
        ),
        device_placement=options.get("device_placement", ctx.device_placement),
        step_scheduler_with_optimizer=options.get(
            "step_scheduler_with_optimizer", ctx.step_scheduler_with_optimizer
        ),
        rng_types=_rng_types(ctx.rng_types, options.get("rng_types")),
        guard=_guard(ctx.guard, options),
        reduction=reduction,
        profiling=handlers.get("profile", ctx.profiling),
        log_with=_log_with(ctx.log_with, options.get("log_with")),
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
    # Version 1 of the plugin is run by the engine of version 2.
    config.validate(size, fsdp_version=None if fsdp is None else 2)
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


def _check_names_and_flags(options: ContextOptions) -> None:
    unknown = sorted(set(options) - set(ContextOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"unknown option(s) {', '.join(unknown)}. A context has: "
            f"{', '.join(ContextOptions.__annotations__)}."
        )
    # Callers without a type checker pass a "no" from a parsed file, which would count as True.
    given = cast("Mapping[str, object]", options)
    for name in ("device_placement", "step_scheduler_with_optimizer", "cpu", "debug"):
        if name in given and not isinstance(given[name], bool):
            raise TypeError(f"{name} must be True or False: got {given[name]!r}.")


def _accumulation(now: GradientAccumulationPlugin, options: ContextOptions) -> GradientAccumulationPlugin:
    plugin = _typed(
        "gradient_accumulation_plugin",
        options.get("gradient_accumulation_plugin"),
        GradientAccumulationPlugin,
    )
    steps = options.get("gradient_accumulation_steps")
    if steps is None:
        return plugin or now
    if plugin is not None:
        if steps not in (1, plugin.num_steps):
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin with "
                f"num_steps={plugin.num_steps}. Pass one of the two."
            )
        return plugin
    return dataclasses.replace(now, num_steps=steps)


def _given_window(ctx: Context, options: ContextOptions) -> GradientAccumulationPlugin:
    """Return the accumulation before ``options``, without a window that only followed from a reduction."""
    before = ctx.reduction
    if options.get("reduction") is None or before is None or before.num_microbatches is None:
        return ctx.accumulation
    return dataclasses.replace(ctx.accumulation, num_steps=1)


def _reduction(
    now: CanonicalReduction | None, asked: str | CanonicalReduction | None
) -> CanonicalReduction | None:
    if asked is None or isinstance(asked, CanonicalReduction):
        return now if asked is None else asked
    if not isinstance(cast("object", asked), str):
        raise TypeError(
            f'reduction must be "mean", "canonical" or a CanonicalReduction: got {type(asked).__name__}.'
        )
    if asked not in ("mean", "canonical"):
        raise ConfigurationError(
            f'reduction must be "mean", "canonical" or a CanonicalReduction: got {asked!r}.'
        )
    return None if asked == "mean" else CanonicalReduction()


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
    asked = options.get("guard")
    if asked is not None and not isinstance(asked, (Guard, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"guard must be a Guard or the name of a mode: got {type(asked).__name__}.")
    said = asked.mode if isinstance(asked, Guard) else asked  # None where nobody names a mode
    guard = dataclasses.replace(
        asked if isinstance(asked, Guard) else now, mode=now.mode if said is None else said
    )
    debug, is_full = options.get("debug"), guard.mode == GuardMode.FULL
    if debug is None or debug == is_full:
        return guard
    if said is not None:
        meaning = '"full"' if debug else 'not "full"'
        raise ConfigurationError(
            f"debug={debug} means that the guard's mode is {meaning}, and guard asks for "
            f"{str(guard.mode)!r}. Pass one of the two."
        )
    return dataclasses.replace(guard, mode=GuardMode.FULL if debug else GuardMode.SAMPLED)


def _project(now: ProjectConfiguration, options: ContextOptions) -> ProjectConfiguration:
    project = _typed("project_config", options.get("project_config"), ProjectConfiguration) or now
    directory = options.get("project_dir")
    if directory is None or (project.project_dir is not None and options.get("project_config") is not None):
        return project
    # A logging folder of its own stays; one that was only the project's folder moves with it.
    logging_dir = None if project.logging_dir == project.project_dir else project.logging_dir
    return dataclasses.replace(project, project_dir=os.fspath(directory), logging_dir=logging_dir)


def _log_with(now: tuple[Any, ...], asked: Any) -> tuple[Any, ...]:
    return now if asked is None else settle_log_with(asked)


def _rng_types(now: tuple[str, ...], asked: Sequence[str | RNGType] | None) -> tuple[str, ...]:
    if asked is None:
        return now
    if isinstance(asked, str):
        raise TypeError(f"rng_types takes a list of names, such as [{str(asked)!r}]: got {asked!r}.")
    known = tuple(item.value for item in RNGType)
    names = tuple(item.value if isinstance(item, RNGType) else item for item in asked)
    for name in names:
        if name not in known:
            raise ConfigurationError(f"rng_types takes {', '.join(known)}: got {name!r}.")
    return names


def _typed(name: str, value: object, kind: type[_T]) -> _T | None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}: got {type(value).__name__}.")
    return value


def _dynamo(options: ContextOptions) -> TorchDynamoPlugin | None:
    plugin = _typed("dynamo_plugin", options.get("dynamo_plugin"), TorchDynamoPlugin)
    backend = options.get("dynamo_backend")
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend and dynamo_plugin say the same thing twice. Pass one of the two."
        )
    return TorchDynamoPlugin(backend=backend) if backend is not None else plugin


def _refuse_unavailable(options: ContextOptions) -> None:
    _typed("parallelism_config", options.get("parallelism_config"), ParallelismConfig)
    mode = options.get("mixed_precision")
    asked = (
        ("deepspeed_plugin", "DeepSpeed", options.get("deepspeed_plugin") is not None),
        ("megatron_lm_plugin", "Megatron-LM", options.get("megatron_lm_plugin") is not None),
        ("mixed_precision", "fp8", mode in ("fp8", PrecisionType.FP8)),
    )
    for argument, what, is_asked in asked:
        if is_asked:
            raise NotAvailableError(
                f"{argument} asks for {what}, which accelfn does not support yet. "
                "The record is valid; leave it out of the context for now, or unset the variable that asks "
                "for it."
            )
