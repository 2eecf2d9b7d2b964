"""Strategies: how a model is spread over ranks."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from types import MappingProxyType as _MappingProxyType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from accelfn.lazy import find_name as _find_name, list_names as _list_names
from accelfn.parallel.strategies.experts import (
    ExpertPlan as ExpertPlan,
    HeldExperts as HeldExperts,
    plan_experts as plan_experts,
)
from accelfn.parallel.facts import ModelFacts as ModelFacts, read_facts as read_facts
from accelfn.parallel.strategies.fp8 import Fp8Plan as Fp8Plan, plan_fp8 as plan_fp8
from accelfn.parallel.handle import is_replicated as is_replicated
from accelfn.parallel.strategies.pipeline_plan import (
    PipelinePlan as PipelinePlan,
    SchedulePlan as SchedulePlan,
    StagePlan as StagePlan,
    plan_schedule as plan_schedule,
    plan_stages as plan_stages,
)
from accelfn.parallel.plan import ModelPlan as ModelPlan, plan_model as plan_model
from accelfn.parallel.batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
from accelfn.parallel.strategies.fsdp_plan import ShardPlan as ShardPlan
from accelfn.parallel.strategies.fsdp import register_forward_method as register_forward_method
from accelfn.parallel.strategies.tensor import TensorPlan as TensorPlan, plan_tensor as plan_tensor

if _TYPE_CHECKING:  # loaded when one is asked for: training needs none of them
    from accelfn.parallel.planning import (
        Budget as Budget,
        Exchange as Exchange,
        Layout as Layout,
        MeshSearch as MeshSearch,
        RefusedMesh as RefusedMesh,
        Traffic as Traffic,
        plan_memory as plan_memory,
        plan_traffic as plan_traffic,
        search_meshes as search_meshes,
    )

_LAZY = _MappingProxyType(
    {
        "accelfn.parallel.planning": (
            *("Budget", "Exchange", "Layout", "MeshSearch", "RefusedMesh", "Traffic"),
            *("plan_memory", "plan_traffic", "search_meshes"),
        )
    }
)


def __getattr__(name: str) -> object:
    return _find_name(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return _list_names(__name__, _LAZY)
