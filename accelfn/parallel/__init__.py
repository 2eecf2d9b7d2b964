"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.budget import Budget, plan_memory
from accelfn.parallel.experts import ExpertPlan, HeldExperts, plan_experts
from accelfn.parallel.facts import ModelFacts, read_facts
from accelfn.parallel.handle import is_replicated
from accelfn.parallel.pipeline_plan import PipelinePlan, SchedulePlan, StagePlan, plan_schedule, plan_stages
from accelfn.parallel.plan import ModelPlan, plan_model
from accelfn.parallel.replicate import convert_sync_batchnorm
from accelfn.parallel.shard import ShardPlan, register_forward_method
from accelfn.parallel.tensor import TensorPlan, plan_tensor

__all__ = (
    "Budget",
    "ExpertPlan",
    "HeldExperts",
    "ModelFacts",
    "ModelPlan",
    "PipelinePlan",
    "SchedulePlan",
    "ShardPlan",
    "StagePlan",
    "TensorPlan",
    "convert_sync_batchnorm",
    "is_replicated",
    "plan_experts",
    "plan_memory",
    "plan_model",
    "plan_schedule",
    "plan_stages",
    "plan_tensor",
    "read_facts",
    "register_forward_method",
)
