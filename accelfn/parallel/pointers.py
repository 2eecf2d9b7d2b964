"""From the parameters that a model had to those that it has now: pointers, which optimizers follow.

Sharding replaces parameters by new ones of the same names. Each old parameter then
points at its successor, so that whoever still holds it finds the new one: an optimizer that was made before,
in whatever order model and optimizer are prepared. A model of which this rank keeps some stages remembers
what it was as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.errors import ConfigurationError
from accelfn.tree import is_dtensor

__all__ = (
    "WholeModel",
    "follow",
    "leave_pointers",
    "named",
    "newest",
    "remember_whole",
    "repoint",
    "retie",
    "whole_of",
)

# Where an old parameter keeps its successor: a tuple, whose item is None for one that this rank has no more.
_SUCCESSOR = "_accelfn_now"
# Where a model keeps what it was before other ranks took stages of it.
_WHOLE = "_accelfn_whole"


class WholeModel(NamedTuple):
    """The state dict of a model before ranks took different stages of it: the same on all of them.

    Attributes:
        tensors: Dtype and shape by name, in the model's order; None for what is no tensor.
        first: First name of a tied tensor, by each of its others.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]] | None]
    first: Mapping[str, str]

    def tied(self) -> dict[str, tuple[str, ...]]:
        """Return all names of each tied tensor, by each of them."""
        groups: dict[str, list[str]] = {}
        for name, leader in self.first.items():
            groups.setdefault(leader, [leader]).append(name)
        return {name: tuple(names) for names in groups.values() for name in names}


def remember_whole(model: nn.Module) -> None:
    """Let a model remember its state dict; before parts of it go. Writes into ``model``."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {}
    first: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, value in cast("dict[str, object]", model.state_dict(keep_vars=True)).items():
        if not isinstance(value, torch.Tensor):
            tensors[name] = None
            continue
        tensors[name] = (value.dtype, tuple(value.shape))
        leader = names.setdefault(id(value), name)
        if leader != name:
            first[name] = leader
    setattr(model, _WHOLE, WholeModel(tensors, first))


def whole_of(model: nn.Module) -> WholeModel | None:
    """Return what a model was before stages of it went to other ranks; None where all of it is here."""
    return getattr(model, _WHOLE, None)


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name, with an entry for each name of a tied one."""
    return dict(model.named_parameters(remove_duplicate=False))


def retie(before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Tie again what was tied in ``before``, and was replaced module by module. Writes into ``model``.

    Raises:
        ConfigurationError: Tied parameters have been laid out differently.
    """
    after = named(model)
    first: dict[int, str] = {}
    for name, old in before.items():
        if name not in after:
            continue
        leader = first.setdefault(id(old), name)
        one, other = after[leader], after[name]
        if one is other:
            continue
        if _layout(one) != _layout(other):
            raise ConfigurationError(
                f"{leader} and {name} are one tied parameter, and the plan lays them out differently: "
                f"{_layout(one)} and {_layout(other)}. Give both modules the same style, or untie them."
            )
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, one)


def leave_pointers(before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Let each parameter in ``before`` that ``model`` has replaced point at the new one of its name.

    One of which this rank holds no part any more points at nothing.
    """
    after = named(model)
    by_old: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for name, old in before.items():
        known = by_old.get(id(old))
        if known is None or known[1] is None:  # one of the names of a tied parameter may be elsewhere
            by_old[id(old)] = (old, after.get(name))
    for old, new in by_old.values():
        if new is not old:
            setattr(old, _SUCCESSOR, (new,))


def newest(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what replaces a parameter now: itself where nothing has replaced it.

    None for one that this rank holds no part of any more.
    """
    found: torch.Tensor | None = parameter
    while found is not None:
        # Not vars(), which torch.compile can't follow.
        successor = cast("tuple[torch.Tensor | None] | None", getattr(found, _SUCCESSOR, None))
        if successor is None:
            break
        found = successor[0]
    return found


def follow(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the newest of each parameter, each once, without those that this rank has no part of."""
    found = [newest(one) for one in parameters]
    return list({id(one): one for one in found if one is not None}.values())


def repoint(optimizer: Optimizer) -> int:
    """Point an optimizer at the parameters that replaced its own, and move its state to them.

    Writes into the optimizer: its groups stay the same objects, in their order, so that schedulers go on.
    State of a parameter's shape is laid out as the new parameter is: each rank keeps its shard.

    Ranks: local; doesn't communicate. Every rank's state is of the whole parameters, and equal.

    Returns:
        How many parameters were replaced.
    """
    replaced = 0
    state = cast("dict[torch.Tensor, dict[str, Any]]", optimizer.state)
    for group in optimizer.param_groups:
        old_parameters = cast("list[torch.Tensor]", group["params"])
        now: dict[int, torch.Tensor] = {}
        kept_names: list[str] = []
        for index, old in enumerate(old_parameters):
            new = newest(old)
            if new is not old:
                replaced += 1
                values = state.pop(old, None)
                if new is not None and values is not None:
                    state[new] = {name: _laid_out(name, value, old, new) for name, value in values.items()}
            if new is not None and id(new) not in now:
                now[id(new)] = new
                kept_names += group["param_names"][index : index + 1] if "param_names" in group else ()
        old_parameters[:] = now.values()
        if "param_names" in group:
            group["param_names"] = kept_names
        are_sharded = {is_dtensor(one) for one in old_parameters}
        if len(are_sharded) == 2 and "foreach" in group and not group.get("fused"):
            group["foreach"] = False  # torch's foreach functions don't take both kinds together
    return replaced


def _laid_out(name: str, value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return an entry of an optimizer's state as it belongs to ``new``."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or name == "step":
        return value
    if not is_dtensor(new):
        return value
    from torch.distributed.tensor import distribute_tensor

    layout = cast("Any", new)
    # From this rank's own copy: with src_data_rank another's would be sent, which is equal.
    shard = distribute_tensor(
        value.detach().to(layout.device_mesh.device_type),
        layout.device_mesh,
        layout.placements,
        src_data_rank=None,
    )
    local = layout.to_local()
    if shard.to_local().device != local.device:  # parameters that rest in host memory
        shard = shard.to(local.device)
    return shard


def _layout(tensor: torch.Tensor) -> object:
    """Return what two tied parameters must have in common, so that one can stand for both."""
    if not is_dtensor(tensor):
        return "whole"
    return cast("Any", tensor).placements, cast("Any", tensor).device_mesh
