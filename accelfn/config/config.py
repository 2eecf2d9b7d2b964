"""How a program trains, as one frozen record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from accelfn.config.checks import FrozenOptions, did_you_mean
from accelfn.config.deepspeed import DeepSpeedPlugin
from accelfn.config.enums import GuardMode, PrecisionType
from accelfn.config.fsdp import FullyShardedDataParallelPlugin
from accelfn.config.handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    MSAMPRecipeKwargs,
    ProfileKwargs,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from accelfn.config.megatron import MegatronLMPlugin
from accelfn.config.parallelism import ParallelismConfig
from accelfn.config.records import (
    CanonicalReduction,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    Guard,
    ProjectConfiguration,
)
from accelfn.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of one training step.

    Attributes:
        mode: ``"no"`` (the model's own dtypes), ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        autocast: Options of ``torch.autocast``.
        scaler: Options of the loss scaler, used with ``"fp16"``.
        fp8_recipe: How matrix products are cast, used with ``"fp8"``.
        scales_loss: Whether the loss is scaled, so that small gradients don't underflow.
    """

    mode: str = "no"
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    fp8_recipe: FP8RecipeKwargs | TERecipeKwargs | AORecipeKwargs | MSAMPRecipeKwargs | None = None
    scales_loss: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the mode, and that an fp8 recipe has an effect."""
        modes = tuple(item.value for item in PrecisionType)
        mode = self.mode.value if isinstance(self.mode, PrecisionType) else self.mode
        if mode not in modes:
            is_full = mode in ("fp32", "float32", "full", "32", None)
            meant = " That is 'no'." if is_full else did_you_mean(mode, modes)
            raise ConfigurationError(
                f"mixed_precision must be one of {', '.join(modes)}: got {mode!r}.{meant}"
            )
        object.__setattr__(self, "mode", mode)
        object.__setattr__(self, "scales_loss", mode == "fp16" and self.scaler.enabled)
        if self.fp8_recipe is not None and mode != "fp8":
            raise ConfigurationError(
                f"{type(self.fp8_recipe).__name__} has an effect only with mixed_precision='fp8', got "
                f"{mode!r}. Use fp8, or leave the recipe out."
            )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None if it is off."""
        if self.mode == "no" or not self.autocast.enabled:
            return None
        return torch.float16 if self.mode == "fp16" else torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How ``prepare_model`` parallelises and compiles a model.

    Attributes:
        ddp: Options of torch's DistributedDataParallel, the default strategy.
        parallelism: Sizes of the mesh's axes, whose product is the number of ranks; None without a mesh.
        fsdp: How parameters are sharded over the ranks along ``"shard"``; None for torch's defaults.
        dynamo: How models are compiled; the backend "no" compiles nothing.
        bypass_device_map: Allow models that are spread over several devices on each of several ranks. Set
            only by the variable ``ACCELFN_BYPASS_DEVICE_MAP``.
        deepspeed: DeepSpeed trains, with these options; None for torch's own strategies.
        deepspeed_plugins: All of DeepSpeed's options by name, if there are several models.
        megatron: Megatron-LM trains, with these options.
        engine: Name of the engine that owns the training step: "DeepSpeed" or "Megatron-LM"; None for torch.
    """

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    parallelism: ParallelismConfig | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None
    dynamo: TorchDynamoPlugin = field(default_factory=TorchDynamoPlugin)
    bypass_device_map: bool = False
    deepspeed: DeepSpeedPlugin | None = None
    deepspeed_plugins: Mapping[str, DeepSpeedPlugin] = field(default_factory=FrozenOptions)
    megatron: MegatronLMPlugin | None = None
    engine: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Name the engine."""
        megatron = None if self.megatron is None else "Megatron-LM"
        object.__setattr__(self, "engine", megatron if self.deepspeed is None else "DeepSpeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a program trains: all of a :class:`accelfn.Context` that isn't about its world.

    Attributes:
        precision: Mixed precision.
        accumulation: Gradient accumulation.
        loading: Configuration of data loaders.
        project: Directories of outputs.
        strategy: What ``prepare_model`` does.
        device_placement: Whether models and batches are moved to the device of this rank.
        step_scheduler_with_optimizer: Whether a scheduler steps only when its optimizer does.
        rng_types: Random states that a loader synchronises at the start of an epoch.
        guard: How agreement between ranks is checked, and how long they wait for each other.
        reduction: Exact mode, where gradients are summed in a fixed order; None for their mean.
        profiling: What :func:`accelfn.profile` records and writes.
        log_with: Experiment trackers of the run: names, trackers and tracker classes.
    """

    precision: Precision = field(default_factory=Precision)
    accumulation: GradientAccumulationPlugin = field(default_factory=GradientAccumulationPlugin)
    loading: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    strategy: Strategy = field(default_factory=Strategy)
    device_placement: bool = True
    step_scheduler_with_optimizer: bool = True
    rng_types: tuple[str, ...] = ("generator",)
    guard: Guard = field(default_factory=Guard)
    reduction: CanonicalReduction | None = None
    profiling: ProfileKwargs = field(default_factory=ProfileKwargs)
    log_with: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        """Set the guard's default mode: ``guard.mode`` of a context is always a ``GuardMode``."""
        if self.guard.mode is None:
            object.__setattr__(self, "guard", dataclasses.replace(self.guard, mode=GuardMode.SAMPLED))
