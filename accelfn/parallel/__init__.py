"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.batch_norm import convert_sync_batchnorm
from accelfn.parallel.exact import (
    ExactReplica,
    exact_backward,
    exact_batch,
    scale_open_sums,
    swap_parts,
)
from accelfn.parallel.facts import ModelFacts, read_facts
from accelfn.parallel.handle import (
    check_reduced,
    follow_optimizers,
    handle_of,
    has_engine,
    is_kept_equal,
    is_replicated,
    local_steps,
    uncompiled,
)
from accelfn.parallel.norm import clip_norm_, clip_value_, gradient_norm
from accelfn.parallel.plan import ModelPlan, apply_model, plan_model
from accelfn.parallel.pointers import follow, newest, repoint
from accelfn.parallel.replicate import (
    check_wrapped,
    no_sync,
    replicate,
    trigger_sync_in_backward,
    unchecked,
)
from accelfn.parallel.shard import ShardPlan, register_forward_method
from accelfn.parallel.tensor import apply_tensor
from accelfn.parallel.tensor_plans import TensorPlan, plan_tensor
from accelfn.parallel.thread_ddp import ThreadDDP

__all__ = (
    "ExactReplica",
    "ModelFacts",
    "ModelPlan",
    "ShardPlan",
    "TensorPlan",
    "ThreadDDP",
    "apply_model",
    "apply_tensor",
    "check_reduced",
    "check_wrapped",
    "clip_norm_",
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
    "plan_model",
    "plan_tensor",
    "read_facts",
    "register_forward_method",
    "replicate",
    "repoint",
    "scale_open_sums",
    "swap_parts",
    "trigger_sync_in_backward",
    "unchecked",
    "uncompiled",
)
