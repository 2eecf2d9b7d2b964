"""The adapter of Megatron-LM, over megatron-core."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.parallel.engines.megatron.model import (
    MegatronModel as MegatronModel,
    MegatronOutput as MegatronOutput,
)
from accelfn.parallel.engines.megatron.plan import (
    MegatronPlan as MegatronPlan,
    plan_megatron as plan_megatron,
)
from accelfn.parallel.engines.megatron.schedule import (
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
)
from accelfn.parallel.engines.megatron.steps import (
    AbstractTrainStep as AbstractTrainStep,
    BertTrainStep as BertTrainStep,
    GPTTrainStep as GPTTrainStep,
    StepArguments as StepArguments,
    T5TrainStep as T5TrainStep,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from accelfn.parallel.engines.megatron.train import prepare_megatron as prepare_megatron
