"""Configuration: frozen records that cannot be invalid, and the environment that gives their defaults."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.config.checks import FrozenOptions as FrozenOptions
from accelfn.config.config import Config as Config, Precision as Precision, Strategy as Strategy
from accelfn.config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accelfn.config.enums import (
    AutoWrapPolicy as AutoWrapPolicy,
    BackwardPrefetch as BackwardPrefetch,
    ContextParallelStrategy as ContextParallelStrategy,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    DynamoMode as DynamoMode,
    FP8AmaxAlgorithm as FP8AmaxAlgorithm,
    FP8Backend as FP8Backend,
    FP8Format as FP8Format,
    FP8OptLevel as FP8OptLevel,
    GradientCheck as GradientCheck,
    GuardMode as GuardMode,
    LogLevel as LogLevel,
    LoggerType as LoggerType,
    OffloadDevice as OffloadDevice,
    PrecisionType as PrecisionType,
    ProfileActivity as ProfileActivity,
    RNGType as RNGType,
    ShardingStrategy as ShardingStrategy,
    StateDictType as StateDictType,
    StringEnum as StringEnum,
)
from accelfn.config.fp8 import (
    FP8_PACKAGES as FP8_PACKAGES,
    Fp8Choice as Fp8Choice,
    choose_fp8 as choose_fp8,
    list_fp8_packages as list_fp8_packages,
)
from accelfn.config.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accelfn.config.handlers import (
    AORecipeKwargs as AORecipeKwargs,
    AutocastKwargs as AutocastKwargs,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    ProfileKwargs as ProfileKwargs,
    TERecipeKwargs as TERecipeKwargs,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from accelfn.config.megatron import MegatronLMPlugin as MegatronLMPlugin
from accelfn.config.parallelism import (
    ExpertParallelConfig as ExpertParallelConfig,
    ParallelismConfig as ParallelismConfig,
    PipelineParallelConfig as PipelineParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
)
from accelfn.config.records import (
    CanonicalReduction as CanonicalReduction,
    DataLoaderConfiguration as DataLoaderConfiguration,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    Guard as Guard,
    ProjectConfiguration as ProjectConfiguration,
)
from accelfn.config.settings import (
    Settings as Settings,
    VARIABLES as VARIABLES,
    Variable as Variable,
    read_settings as read_settings,
)
