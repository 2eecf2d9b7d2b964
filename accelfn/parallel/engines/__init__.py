"""Adapters of engines that own a model's training step, and what training and checkpoints need of them."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from types import MappingProxyType as _MappingProxyType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from accelfn.lazy import find_name as _find_name, list_names as _list_names
from accelfn.parallel.engines.engine import (
    REPLACED as REPLACED,
    EngineHandle as EngineHandle,
    EngineOptimizer as EngineOptimizer,
    owner_of_step as owner_of_step,
    with_plain_objects as with_plain_objects,
    with_plain_weights as with_plain_weights,
    wraps_model as wraps_model,
)
from accelfn.parallel.engines.xla import XlaShardPlan as XlaShardPlan

if _TYPE_CHECKING:  # loaded when one is asked for: most programs have no engine
    from accelfn.parallel.engines.deepspeed_plan import (
        DeepSpeedFacts as DeepSpeedFacts,
        DeepSpeedPlan as DeepSpeedPlan,
        plan_deepspeed as plan_deepspeed,
    )
    from accelfn.parallel.engines.deepspeed import (
        DummyOptim as DummyOptim,
        DummyScheduler as DummyScheduler,
        apply_deepspeed as apply_deepspeed,
        deepspeed_facts as deepspeed_facts,
        gathered_parameters as gathered_parameters,
        zero3_init as zero3_init,
    )
    from accelfn.parallel.engines.megatron import (
        AbstractTrainStep as AbstractTrainStep,
        BertTrainStep as BertTrainStep,
        GPTTrainStep as GPTTrainStep,
        MegatronLMDummyScheduler as MegatronLMDummyScheduler,
        MegatronPlan as MegatronPlan,
        T5TrainStep as T5TrainStep,
        plan_megatron as plan_megatron,
    )

_LAZY = _MappingProxyType(
    {
        "accelfn.parallel.engines.deepspeed_plan": (
            "DeepSpeedFacts",
            "DeepSpeedPlan",
            "plan_deepspeed",
        ),
        "accelfn.parallel.engines.deepspeed": (
            "DummyOptim",
            "DummyScheduler",
            "apply_deepspeed",
            "deepspeed_facts",
            "gathered_parameters",
            "zero3_init",
        ),
        "accelfn.parallel.engines.megatron": (
            "AbstractTrainStep",
            "BertTrainStep",
            "GPTTrainStep",
            "MegatronLMDummyScheduler",
            "MegatronPlan",
            "T5TrainStep",
            "plan_megatron",
        ),
    }
)


def __getattr__(name: str) -> object:
    return _find_name(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return _list_names(__name__, _LAZY)
