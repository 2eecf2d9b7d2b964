"""Pointers from replaced parameters to their successors.

Sharding replaces parameters by new ones of the same names. Each old parameter then points at its successor,
so that its holders find the new one: an optimizer made before, in whatever order model and optimizer are
prepared. A model of which this rank keeps some pipeline stages remembers its complete state dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.errors import ConfigurationError
from accelfn.tree import is_dtensor, local_of

# Attributes of a tensor: its hooks before and after autograd adds to the gradient, by id.
BEFORE, AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"
# Attribute of an old parameter: its successor in a tuple, with None if it isn't on this rank any more.
_SUCCESSOR = "_accelfn_now"
# Attribute of a parameter: the optimizers that hold it, as far as they were prepared.
_OPTIMIZERS = "_accelfn_optimizers"
# Attribute of a pipelined model: its state dict before it was split.
_WHOLE = "_accelfn_whole"


class WholeModel(NamedTuple):
    """The state dict of a model before it was split into stages: the same on all ranks.

    Attributes:
        tensors: Dtype and shape by name, in the model's order; None for values that aren't tensors.
        first: First name of a tied tensor, by each of its other names.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]] | None]
    first: Mapping[str, str]

    def tied(self) -> dict[str, tuple[str, ...]]:
        """Return all names of each tied tensor, by each of them."""
        groups: dict[str, list[str]] = {}
        for name, leader in self.first.items():
            groups.setdefault(leader, [leader]).append(name)
        return {name: tuple(names) for names in groups.values() for name in names}


def describe_whole(model: nn.Module) -> WholeModel:
    """Return the record of a model's state dict."""
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
    return WholeModel(tensors, first)


def remember_whole(model: nn.Module) -> None:
    """Record a model's state dict, before parts of it are removed. Writes into ``model``."""
    setattr(model, _WHOLE, describe_whole(model))


def whole_of(model: nn.Module) -> WholeModel | None:
    """Return the record of a model's state dict before it was split; None if it wasn't."""
    return getattr(model, _WHOLE, None)


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name; a tied one has an entry for each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def retie(before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Tie parameters that were tied in ``before`` and replaced one by one. Writes into ``model``.

    Raises:
        ConfigurationError: Tied parameters have different layouts.
    """
    after = named(model)
    first: dict[int, str] = {}
    for name, old in before.items():
        if name not in after:
            continue
        leader = first.setdefault(id(old), name)
        target, other = after[leader], after[name]
        if target is other:
            continue
        if _layout(target) != _layout(other):
            raise ConfigurationError(
                f"{leader} and {name} are one tied parameter, but the plan lays them out differently: "
                f"{_layout(target)} and {_layout(other)}. Give both modules the same style, or untie them."
            )
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, target)


def leave_pointers(before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Point each parameter in ``before`` that ``model`` has replaced at the new one of its name.

    Parameters that are on other ranks only point at None. Optimizers that :func:`note_holder` knows hold the
    new ones from now on: one that clears gradients before its first step must reach them.
    """
    after = named(model)
    by_old: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for name, old in before.items():
        known = by_old.get(id(old))
        if known is None or known[1] is None:  # another name of a tied parameter may be on this rank
            by_old[id(old)] = (old, after.get(name))
    optimizers: dict[int, Optimizer] = {}
    for old, new in by_old.values():
        if new is not old:
            setattr(old, _SUCCESSOR, (new,))
            for kind in (BEFORE, AFTER) if new is not None and not is_dtensor(new) else ():
                if getattr(old, kind):
                    setattr(new, kind, getattr(old, kind))  # the same dict, from which hooks may be removed
            optimizers.update({id(one): one for one in vars(old).get(_OPTIMIZERS, ())})
    for optimizer in optimizers.values():
        repoint(optimizer)


class _Optimizers(weakref.WeakSet[Optimizer]):
    """The optimizers of a parameter. A copy has none."""

    def __reduce__(self) -> Any:
        return _Optimizers, ()


def note_holder(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Note on parameters that an optimizer holds them, for :func:`leave_pointers`."""
    for parameter in parameters:
        vars(parameter).setdefault(_OPTIMIZERS, _Optimizers()).add(optimizer)


def newest(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the successor of a parameter: the parameter itself if it wasn't replaced.

    None if it is on other ranks only.
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
    """Return the successors of parameters, each once, without those on other ranks only."""
    found: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        successor = newest(parameter) if hasattr(parameter, _SUCCESSOR) else parameter
        if successor is not None:
            found[id(successor)] = successor
    return list(found.values())


def repoint(optimizer: Optimizer) -> int:
    """Point an optimizer at the successors of its parameters, and move its state to them.

    Writes into the optimizer: its groups stay the same objects, in their order, so that schedulers keep
    working. State of a parameter's shape is sharded like the new parameter.

    Ranks: local; doesn't communicate. Every rank's state is unsharded, and equal.

    Returns:
        The number of replaced parameters.
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
        are_sharded = {is_dtensor(parameter) for parameter in old_parameters}
        if len(are_sharded) == 2 and "foreach" in group and not group.get("fused"):
            group["foreach"] = False  # torch's foreach functions don't take both kinds together
    return replaced


def _laid_out(name: str, value: Any, old: torch.Tensor, new: Any) -> Any:
    """Return an entry of an optimizer's state in the layout of ``new``."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or name == "step":
        return value
    if not is_dtensor(new):
        return value
    shard = distributed(value.detach().to(new.device_mesh.device_type), new)
    return shard.to(local_of(new).device)  # the host, for offloaded parameters


def distributed(whole: torch.Tensor, target: Any) -> Any:
    """Return a tensor, which every rank has complete, in the layout of ``target``."""
    from torch.distributed.tensor import distribute_tensor

    # From this rank's own copy, which is equal: src_data_rank would send another rank's.
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def _layout(tensor: torch.Tensor) -> object:
    """Return the layout that tied parameters must have in common."""
    if not is_dtensor(tensor):
        return "whole"
    return cast("Any", tensor).placements, cast("Any", tensor).device_mesh
