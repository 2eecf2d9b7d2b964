"""Strategies: how a model is spread over ranks."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.parallel.budget import Budget as Budget, plan_memory as plan_memory
from accelfn.parallel.experts import (
    ExpertPlan as ExpertPlan,
    HeldExperts as HeldExperts,
    plan_experts as plan_experts,
)
from accelfn.parallel.facts import ModelFacts as ModelFacts, read_facts as read_facts
from accelfn.parallel.fp8 import Fp8Plan as Fp8Plan, plan_fp8 as plan_fp8
from accelfn.parallel.handle import is_replicated as is_replicated
from accelfn.parallel.mesh_search import (
    Layout as Layout,
    MeshSearch as MeshSearch,
    RefusedMesh as RefusedMesh,
    search_meshes as search_meshes,
)
from accelfn.parallel.pipeline_plan import (
    PipelinePlan as PipelinePlan,
    SchedulePlan as SchedulePlan,
    StagePlan as StagePlan,
    plan_schedule as plan_schedule,
    plan_stages as plan_stages,
)
from accelfn.parallel.plan import ModelPlan as ModelPlan, plan_model as plan_model
from accelfn.parallel.replicate import convert_sync_batchnorm as convert_sync_batchnorm
from accelfn.parallel.shard import ShardPlan as ShardPlan, register_forward_method as register_forward_method
from accelfn.parallel.step_traffic import (
    Cluster as Cluster,
    Exchange as Exchange,
    Link as Link,
    Traffic as Traffic,
    plan_traffic as plan_traffic,
)
from accelfn.parallel.tensor import TensorPlan as TensorPlan, plan_tensor as plan_tensor
