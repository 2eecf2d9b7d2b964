"""Configuration: frozen records that cannot be invalid, and the environment that gives their defaults."""

from accelfn.context.config.accumulation import (
    GradientAccumulationPlugin,
)
from accelfn.context.config.deepspeed import (
    DeepSpeedPlugin,
)
from accelfn.context.config.dynamo import (
    TorchDynamoPlugin,
)
from accelfn.context.config.enums import (
    AutoWrapPolicy,
    BackwardPrefetch,
    ContextParallelStrategy,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    DynamoMode,
    FP8AmaxAlgorithm,
    FP8Backend,
    FP8Format,
    FP8OptLevel,
    GuardMode,
    LoggerType,
    LogLevel,
    OffloadDevice,
    PrecisionType,
    ProfileActivity,
    RNGType,
    ShardingStrategy,
    StateDictType,
    StringEnum,
)
from accelfn.context.config.fp8 import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accelfn.context.config.fsdp import (
    FullyShardedDataParallelPlugin,
)
from accelfn.context.config.guard import (
    Guard,
)
from accelfn.context.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from accelfn.context.config.loading import (
    DataLoaderConfiguration,
)
from accelfn.context.config.megatron import (
    MegatronLMPlugin,
)
from accelfn.context.config.options import (
    FrozenOptions,
    thaw,
)
from accelfn.context.config.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ExpertParallelConfig,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accelfn.context.config.project import (
    ProjectConfiguration,
)
from accelfn.context.config.reduction import (
    CanonicalReduction,
)
from accelfn.context.config.settings import (
    VARIABLES,
    Settings,
    Variable,
    read_settings,
)

__all__ = (
    "VARIABLES",
    "AORecipeKwargs",
    "AutoWrapPolicy",
    "AutocastKwargs",
    "BackwardPrefetch",
    "CanonicalReduction",
    "ContextParallelStrategy",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "DynamoMode",
    "ExpertParallelConfig",
    "FP8AmaxAlgorithm",
    "FP8Backend",
    "FP8Format",
    "FP8OptLevel",
    "FP8RecipeKwargs",
    "FrozenOptions",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "Guard",
    "GuardMode",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LogLevel",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "OffloadDevice",
    "ParallelismConfig",
    "PipelineParallelConfig",
    "PrecisionType",
    "ProfileActivity",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "Settings",
    "ShardingStrategy",
    "StateDictType",
    "StringEnum",
    "TERecipeKwargs",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "Variable",
    "read_settings",
    "thaw",
)
