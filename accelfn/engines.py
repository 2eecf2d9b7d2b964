"""DeepSpeed and Megatron-LM by their own names: plans, stand-ins, and the steps of models that they own."""

from accelfn.parallel.engines import (
    AbstractTrainStep,
    BertTrainStep,
    DeepSpeedFacts,
    DeepSpeedPlan,
    DummyOptim,
    DummyScheduler,
    GPTTrainStep,
    MegatronLMDummyScheduler,
    MegatronPlan,
    T5TrainStep,
    deepspeed_facts,
    gathered_parameters,
    plan_deepspeed,
    plan_megatron,
    zero3_init,
)
from accelfn.training import (
    MegatronLMDummyDataLoader,
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)

__all__ = (
    "AbstractTrainStep",
    "BertTrainStep",
    "DeepSpeedFacts",
    "DeepSpeedPlan",
    "DummyOptim",
    "DummyScheduler",
    "GPTTrainStep",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronPlan",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "deepspeed_facts",
    "gather_across_data_parallel_groups",
    "gathered_parameters",
    "plan_deepspeed",
    "plan_megatron",
    "zero3_init",
)
