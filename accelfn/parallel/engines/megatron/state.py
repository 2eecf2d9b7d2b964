"""The state of a model that Megatron-LM trains: of each rank its own part, for the same layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from accelfn.errors import CheckpointMismatchError, Misfit
from accelfn.parallel.engines.megatron.model import MegatronModel
from accelfn.parallel.engines.megatron.plan import MegatronPlan


class Stepped(Protocol):
    """An optimizer whose state is saved.

    Attributes:
        num_steps: Those that updated the parameters.
        param_groups: The user's, with options.
        parts: Megatron's optimizers.
    """

    num_steps: int

    @property
    def param_groups(self) -> Any: ...  # noqa: D102 -- above

    @property
    def parts(self) -> list[Any]: ...  # noqa: D102


class MegatronModelState:
    """This rank's parts of a model, in the form of any object with a state."""

    def __init__(self, model: MegatronModel, parts: Sequence[Any]) -> None:
        """Stand for ``model``, whose weights ``parts`` of Megatron's optimizer step."""
        self._model = model
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Return the layout, the state of each part of the model, and its float32 weights."""
        return {
            "layout": _layout_of(self._model.plan),
            "chunks": [_tensors(chunk.state_dict()) for chunk in self._model.inner_chunks()],
            "weights": list(_weights(self._parts)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write a state into the parts of the model, and into the float32 weights that are stepped."""
        _check_layout(self._model.plan, state)
        for chunk, stored in zip(self._model.inner_chunks(), state["chunks"], strict=True):
            chunk.load_state_dict(stored, strict=False)
        with torch.no_grad():
            for weight, value in zip(_weights(self._parts), state["weights"], strict=True):
                weight.copy_(value)


class MegatronOptimizerState:
    """What this rank's optimizers of Megatron hold beside the weights, likewise."""

    def __init__(self, plan: MegatronPlan, optimizer: Stepped) -> None:
        """Stand for the state of ``optimizer``."""
        self._plan = plan
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the layout, the options of each group, and the state of each part."""
        optimizer = self._optimizer
        return {
            "layout": _layout_of(self._plan),
            "num_steps": optimizer.num_steps,
            "groups": [_options(group) for group in optimizer.param_groups],
            "parts": [part.optimizer.state_dict() for part in optimizer.parts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write a state into this rank's optimizers."""
        optimizer = self._optimizer
        _check_layout(self._plan, state)
        optimizer.num_steps = state["num_steps"]
        for group, options in zip(optimizer.param_groups, state["groups"], strict=True):
            group.update(options)
        for part, stored in zip(optimizer.parts, state["parts"], strict=True):
            part.optimizer.load_state_dict(stored)


def _layout_of(plan: MegatronPlan) -> str:
    return f"{plan.layout}, {plan.num_chunks} parts per rank"


def _check_layout(plan: MegatronPlan, state: dict[str, Any]) -> None:
    stored, own = state["layout"], _layout_of(plan)
    if stored != own:
        raise CheckpointMismatchError(
            "Megatron-LM saves each rank's own part, which only the same layout can load. Use that "
            "one, or convert the weights with Megatron-Bridge.",
            [Misfit("layout", stored, own)],
        )


def _weights(parts: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the weights that are stepped: in half precision, or sharded over replicas, copies."""
    for part in parts:
        for group in part.optimizer.param_groups:
            yield from group["params"]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state: TransformerEngine's extra states have other forms."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
