"""Configuration records and enums."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.records import (
    AORecipeKwargs as AORecipeKwargs,
    AutocastKwargs as AutocastKwargs,
    BnbQuantizationConfig as BnbQuantizationConfig,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DeepSpeedPlugin as DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    FP8RecipeKwargs as FP8RecipeKwargs,
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    GradScalerKwargs as GradScalerKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    MegatronLMPlugin as MegatronLMPlugin,
    ProfileKwargs as ProfileKwargs,
    ProjectConfiguration as ProjectConfiguration,
    TERecipeKwargs as TERecipeKwargs,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchDynamoPlugin as TorchDynamoPlugin,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
)
from accelfn.context.config import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DynamoBackend as DynamoBackend,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
)
from accelfn.bigmodel import (
    CustomDtype as CustomDtype,
)
from accelfn.tree import (
    TensorInformation as TensorInformation,
)
from accelfn.compat.helpers import (
    get_module_class_from_name as get_module_class_from_name,
)
from accelfn.compat.constants import (
    DistributedType as DistributedType,
    ComputeEnvironment as ComputeEnvironment,
    FP8BackendType as FP8BackendType,
    SageMakerDistributedType as SageMakerDistributedType,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
