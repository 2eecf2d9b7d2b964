"""Megatron-LM."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.parallel.engines import (
    AbstractTrainStep as AbstractTrainStep,
    BertTrainStep as BertTrainStep,
    GPTTrainStep as GPTTrainStep,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    T5TrainStep as T5TrainStep,
)
from accelfn.training import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
