"""The Accelerator, and the records that programs import beside it."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.constants import (
    DistributedType as DistributedType,
)
from accelfn.compat.accelerator import (
    Accelerator as Accelerator,
)
from accelfn.accelerator import (
    AcceleratedOptimizer as AcceleratedOptimizer,
    AcceleratedScheduler as AcceleratedScheduler,
)
from accelfn.compat.records import (
    AORecipeKwargs as AORecipeKwargs,
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DeepSpeedPlugin as DeepSpeedPlugin,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    GradScalerKwargs as GradScalerKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    MegatronLMPlugin as MegatronLMPlugin,
    ParallelismConfig as ParallelismConfig,
    ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
    TERecipeKwargs as TERecipeKwargs,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from accelfn.compat.states import (
    AcceleratorState as AcceleratorState,
    GradientState as GradientState,
    PartialState as PartialState,
)
from accelfn.context.config import (
    DynamoBackend as DynamoBackend,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
