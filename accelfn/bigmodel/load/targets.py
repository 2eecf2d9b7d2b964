"""What of a model wants a value: each tensor once, with all its names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.bigmodel.load.source import Stored
from accelfn.bigmodel.load.transformers_names import as_transformers_names
from accelfn.bigmodel.offload.blocks import Slot
from accelfn.checkpoint.weights.plan import tied_by
from accelfn.checkpoint.weights.state import own_names
from accelfn.tree import is_dtensor

__all__ = ("Target", "Targets", "Translated", "read_targets", "tie_by_names", "translate")


class Target(NamedTuple):
    """A tensor of a model.

    Attributes:
        names: All that it has in the model, without what wrappers add; the first is what it is called.
        slots: Where it hangs, one for each name.
        tensor: What hangs there now.
        is_stored: Whether a state dict holds it; a buffer may be left out of it.
        starts_at_zero: Whether a module counts with it, and begins at zero where a checkpoint lacks it.
    """

    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    tensor: torch.Tensor
    is_stored: bool
    starts_at_zero: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return self.names[0]

    @property
    def kind(self) -> str:
        """Dtype and shape, for people."""
        return f"{str(self.tensor.dtype).removeprefix('torch.')} {tuple(self.tensor.shape)}"


class Targets(NamedTuple):
    """What of a model wants a value.

    Attributes:
        tensors: Parameters and buffers, in the order of the modules.
        extras: Modules that have more state than tensors, by its name in a state dict.
    """

    tensors: tuple[Target, ...]
    extras: Mapping[str, nn.Module]


def read_targets(operation: str, model: nn.Module) -> Targets:
    """List the tensors of a model.

    Ranks: local.

    Args:
        operation: What errors call it.
        model: Without the wrappers around it.

    Raises:
        ValueError: A lazy layer has no shape yet, a parameter is made of other tensors, as those of quantised
            layers are, or two tensors would have the same name without wrappers.
    """
    own = own_names(operation, model)
    groups: dict[object, list[tuple[str, Slot]]] = {}
    extras: dict[str, nn.Module] = {}
    for path, module in _all_modules(model):
        dot = f"{path}." if path else ""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extras[own.get(f"{dot}_extra_state", f"{dot}_extra_state")] = module
        for is_parameter in (True, False):
            held: dict[str, torch.Tensor | None] = vars(module)["_parameters" if is_parameter else "_buffers"]
            for key, tensor in held.items():
                if tensor is not None:
                    _check(operation, f"{dot}{key}", tensor)
                    slot = Slot(module, key, is_parameter)
                    groups.setdefault(tied_by(tensor), []).append((f"{dot}{key}", slot))
    return Targets(tuple(_target(group, own) for group in groups.values()), extras)


def _all_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))


def _check(operation: str, name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(
            f"{operation}: {name} has no shape yet. Run the model on a batch once, or give the layer its "
            "size."
        )
    if is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor):
        raise ValueError(
            f"{operation}: {name} is a {type(tensor).__name__}, which is made of other tensors, and can't be "
            "read from a file as one. Load the weights first and quantise then (load_and_quantize_model)."
        )


def _target(group: Iterable[tuple[str, Slot]], own: Mapping[str, str]) -> Target:
    named = list(group)
    slot = named[0][1]
    counts = isinstance(slot.owner, _NormBase) and slot.key == "num_batches_tracked"
    return Target(
        names=tuple(own.get(name, name) for name, _ in named),
        slots=tuple(one for _, one in named),
        tensor=slot.read(),
        is_stored=any(name in own for name, _ in named),
        starts_at_zero=counts,
    )


def tie_by_names(targets: Iterable[Target], model: nn.Module, stored: Iterable[str]) -> tuple[Target, ...]:
    """Put tensors together that a model of transformers says are one, and that aren't (yet).

    Models lose their ties where tensors are replaced one by one. Only what a checkpoint lacks is taken to be
    tied: what it has under both names may have been untied since.

    Args:
        targets: Of the model.
        model: Whose modules may have ``all_tied_weights_keys``: names, and the names they are tied to.
        stored: Names that the checkpoint has.
    """
    said: dict[str, str] = {}
    for path, module in _all_modules(model):
        found: object = vars(module).get("all_tied_weights_keys")
        if isinstance(found, dict):
            dot = f"{path}." if path else ""
            pairs = cast("dict[str, str]", found).items()
            said.update({f"{dot}{name}": f"{dot}{first}" for name, first in pairs})
    have = set(stored)
    merged = {target.name: target for target in targets}
    of_name = {name: target.name for target in merged.values() for name in target.names}
    for name, first in said.items():
        one, other = of_name.get(name), of_name.get(first)
        if one is None or other is None or one == other or have.intersection(merged[one].names):
            continue
        lacking, base = merged[one], merged[other]
        if lacking.tensor.shape == base.tensor.shape:
            del merged[one]
            merged[other] = base._replace(names=base.names + lacking.names, slots=base.slots + lacking.slots)
            of_name.update(dict.fromkeys(lacking.names, other))
    return tuple(merged.values())


class Translated(NamedTuple):
    """The tensors of a checkpoint under the names that the model's modules turn theirs into.

    Attributes:
        tensors: By name.
        values: What modules add on their own.
    """

    tensors: dict[str, Stored]
    values: dict[str, torch.Tensor]


def translate(operation: str, model: nn.Module, tensors: Mapping[str, Stored]) -> Translated:
    """Return the tensors of a checkpoint as the model has them.

    First as transformers knows it of its models. Then modules may rename what they know by an older name, as
    ``load_state_dict`` lets them: their hooks get tensors without values, so only names may change.

    Args:
        operation: What errors call it.
        model: Whose modules may have hooks for loading.
        tensors: Of a checkpoint, by name.

    Raises:
        ValueError: A hook needs values, or computes some.
    """
    tensors = as_transformers_names(model, tensors)
    hooked = [(path, module) for path, module in _all_modules(model) if _hooks_of(module)]
    if not hooked:
        return Translated(dict(tensors), {})
    state: dict[str, Any] = {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()
    }
    # Its object tells what a stand-in stands for; the dict of them keeps the objects alive.
    known = {id(value): name for name, value in state.items()}
    kept = list(state.values())
    for path, module in hooked:
        dot = f"{path}." if path else ""
        try:
            for hook in _hooks_of(module):
                hook(state, dot, {}, True, [], [], [])
        except (NotImplementedError, RuntimeError) as error:  # what has no values can't be computed with
            raise ValueError(_refusal(operation, path, module)) from error
        if any(value.is_meta and id(value) not in known for value in state.values()):
            raise ValueError(_refusal(operation, path, module))
    del kept
    return Translated(
        {name: tensors[known[id(value)]] for name, value in state.items() if id(value) in known},
        {name: value for name, value in state.items() if id(value) not in known},
    )


def _hooks_of(module: nn.Module) -> list[Any]:
    return list(cast("dict[int, Any]", vars(module).get("_load_state_dict_pre_hooks") or {}).values())


def _refusal(operation: str, path: str, module: nn.Module) -> str:
    return (
        f"{operation}: {type(module).__name__} at {path or 'the root'!r} has a hook that computes with the "
        "values that are loaded, and here they go from the files to their places unseen. Load this model "
        "with load_state_dict of torch."
    )
