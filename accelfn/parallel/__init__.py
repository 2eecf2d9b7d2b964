"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.batch_norm import convert_sync_batchnorm
from accelfn.parallel.budget import Budget, plan_memory
from accelfn.parallel.exact import (
    ExactReplica,
    exact_backward,
    exact_batch,
    scale_open_sums,
)
from accelfn.parallel.expert_plans import ExpertPlan, HeldExperts, plan_experts
from accelfn.parallel.experts import apply_experts
from accelfn.parallel.facts import ModelFacts, read_facts
from accelfn.parallel.handle import (
    BatchRun,
    Handle,
    check_reduced,
    follow_optimizers,
    handle_of,
    has_engine,
    is_kept_equal,
    is_replicated,
    local_steps,
    uncompiled,
)
from accelfn.parallel.model_plan import ModelPlan
from accelfn.parallel.norm import clip_norm_, clip_tensors_, clip_value_, gradient_norm
from accelfn.parallel.ordered_sum import OrderedSum
from accelfn.parallel.pipeline_engine import Line, PipelineEngine
from accelfn.parallel.pipeline_handle import PipelineHandle
from accelfn.parallel.plan import apply_model, plan_model
from accelfn.parallel.pointers import WholeModel, follow, newest, repoint, whole_of
from accelfn.parallel.replicate import (
    at_place,
    check_wrapped,
    no_sync,
    replicate,
    trigger_sync_in_backward,
    unchecked,
)
from accelfn.parallel.schedule import SchedulePlan, plan_schedule
from accelfn.parallel.shard import ShardPlan, register_forward_method
from accelfn.parallel.stage_plan import PipelinePlan, StagePlan, plan_stages
from accelfn.parallel.stage_run import Outline
from accelfn.parallel.stages import apply_stages, outline_stage, run_stage
from accelfn.parallel.tensor import apply_tensor
from accelfn.parallel.tensor_plans import TensorPlan, plan_tensor
from accelfn.parallel.thread_ddp import ThreadDDP

__all__ = (
    "BatchRun",
    "Budget",
    "ExactReplica",
    "ExpertPlan",
    "Handle",
    "HeldExperts",
    "Line",
    "ModelFacts",
    "ModelPlan",
    "OrderedSum",
    "Outline",
    "PipelineEngine",
    "PipelineHandle",
    "PipelinePlan",
    "SchedulePlan",
    "ShardPlan",
    "StagePlan",
    "TensorPlan",
    "ThreadDDP",
    "WholeModel",
    "apply_experts",
    "apply_model",
    "apply_stages",
    "apply_tensor",
    "at_place",
    "check_reduced",
    "check_wrapped",
    "clip_norm_",
    "clip_tensors_",
    "clip_value_",
    "convert_sync_batchnorm",
    "exact_backward",
    "exact_batch",
    "follow",
    "follow_optimizers",
    "gradient_norm",
    "handle_of",
    "has_engine",
    "is_kept_equal",
    "is_replicated",
    "local_steps",
    "newest",
    "no_sync",
    "outline_stage",
    "plan_experts",
    "plan_memory",
    "plan_model",
    "plan_schedule",
    "plan_stages",
    "plan_tensor",
    "read_facts",
    "register_forward_method",
    "replicate",
    "repoint",
    "run_stage",
    "scale_open_sums",
    "trigger_sync_in_backward",
    "unchecked",
    "uncompiled",
    "whole_of",
)
