"""What a strategy is: how it is planned, and how it is applied to a model.

The strategies are the rows of ``table.py``. A new one is a file here, a row there, and the field of its plan
in :class:`accelfn.parallel.ModelPlan`, of the same name, whose ``rows`` print it. Where ranks hold parts of
the model by it, ``is_spread`` of that class says so; where it averages gradients, it has a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import nn

from accelfn.context import Context, MeshPlan
from accelfn.parallel.facts import ModelFacts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelfn.context import Mesh

Engine = Literal["none", "ddp", "shard"]


class Planning(NamedTuple):
    """What a strategy is planned from.

    Attributes:
        ctx: The mesh and the options.
        mesh: The mesh.
        engine: What averages gradients.
        model: The model; None where there are facts alone.
        whole: Facts of the complete model.
        facts: Of the part of the model that a rank has after the strategies before: some stages of a
            pipeline, with some of the rows or columns of their layers.
        pp_rank: The rank's coordinate along "pp".
        plans: Of the strategies before, by name.
    """

    ctx: Context
    mesh: MeshPlan
    engine: Engine
    model: nn.Module | None
    whole: ModelFacts
    facts: ModelFacts
    pp_rank: int
    plans: Mapping[str, Any]


class Application(NamedTuple):
    """What a strategy is applied to.

    Attributes:
        ctx: The world of the plans.
        model: The model, as the strategies before have left it.
        plans: Of all strategies, by name.
        before: Parameters and buffers of the model before the first strategy, by name.
    """

    ctx: Context
    model: nn.Module
    plans: Mapping[str, Any]
    before: Mapping[str, torch.Tensor]

    def device_mesh(self, *dims: str) -> DeviceMesh:
        """Return torch's mesh with these dimensions; see :meth:`accelfn.context.Mesh.device_mesh`."""
        return cast("Mesh", self.ctx.mesh).device_mesh(*dims)


class Strategy(NamedTuple):
    """A row of the table of strategies: all are pure but ``apply``, which writes into the model.

    Attributes:
        name: Field of its plan in a :class:`accelfn.parallel.ModelPlan`.
        dims: Dimensions of the mesh that it is for: it is planned where one of them has several ranks.
        plan: Returns the plan for all ranks together, such as the stages of a pipeline; None without one.
        of_rank: Returns the plan for one rank, from that for all ranks. Where each rank plans by itself, it
            is the only one.
        narrow: Returns the facts of the part of the model that a rank has with its plan; called where it has
            one.
        apply: Carries the plan out; called where there is one.
        is_compute: Whether it is about how a rank computes, and not about what it holds. Such a strategy also
            applies to a model that isn't trained.
        is_second: Whether it is a second step of the strategy of that name, which applies the same plan.
    """

    name: str
    dims: tuple[str, ...] = ()
    plan: Callable[[Planning], Any] = lambda at: None
    of_rank: Callable[[Any, Planning], Any] = lambda plan, at: plan
    narrow: Callable[[Any, Planning], ModelFacts] = lambda plan, at: at.facts
    apply: Callable[[Any, Application], None] = lambda plan, at: None
    is_compute: bool = False
    is_second: bool = False

    def is_for(self, mesh: MeshPlan) -> bool:
        """Return whether models on a mesh are planned by it."""
        return not self.is_second and (not self.dims or mesh.size(*self.dims) > 1)
