"""What travels together: the tensors of a layer, and where they hang in its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import nn

__all__ = (
    "Block",
    "BlockNames",
    "Slot",
    "has_forward",
    "named_modules",
    "plan_blocks",
    "read_block",
    "slots_of",
)

# Modules of torch that use the tensors of those below them without calling these.
_READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Slot(NamedTuple):
    """Where a tensor hangs.

    Attributes:
        owner: The module.
        key: The tensor's own name in it.
        is_parameter: Or a buffer.
    """

    owner: nn.Module
    key: str
    is_parameter: bool

    @property
    def is_saved(self) -> bool:
        """Whether state dicts have it: all tensors but buffers that aren't persistent."""
        return self.key not in cast("set[str]", vars(self.owner)["_non_persistent_buffers_set"])

    def read(self) -> torch.Tensor:
        """Return the tensor that hangs there now."""
        found = _store(self.owner, self.is_parameter)[self.key]
        assert found is not None  # a slot is only made of a tensor
        return found

    def peek(self) -> torch.Tensor | None:
        """Return the tensor that hangs there now; None if the module has let go of it."""
        # As _store does; this is asked for each tensor at each use of a block.
        return self.owner.__dict__["_parameters" if self.is_parameter else "_buffers"].get(self.key)

    def write(self, tensor: torch.Tensor) -> None:
        """Set another tensor there, of whatever class."""
        # Not through setattr: a module refuses to hang a plain tensor where a parameter was.
        _store(self.owner, self.is_parameter)[self.key] = tensor
        if isinstance(self.owner, nn.RNNBase):  # it keeps a list of its weights beside them
            names: list[str] = vars(self.owner)["_flat_weights_names"]
            vars(self.owner)["_flat_weights"] = [getattr(self.owner, name, None) for name in names]


def _store(owner: nn.Module, is_parameter: bool) -> dict[str, torch.Tensor | None]:
    return vars(owner)["_parameters" if is_parameter else "_buffers"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A module whose tensors travel together.

    Attributes:
        name: Of the module in the model.
        module: It; its forward is what the tensors are needed for.
        slots: Of the tensors that travel: all below the module, or only its own.
        sources: Of slots whose tensor isn't held by the module: what gives it, by the slot's position.
    """

    name: str
    module: nn.Module
    slots: tuple[Slot, ...]
    sources: Mapping[int, Callable[[], torch.Tensor]] = field(
        default_factory=dict[int, Callable[[], torch.Tensor]]
    )


class BlockNames(NamedTuple):
    """A block of a plan.

    Attributes:
        name: Of the module.
        leaves: Full names of the tensors that travel with it.
    """

    name: str
    leaves: tuple[str, ...]


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return all modules of a module and their names, itself as ``""`` first, each under its first name."""
    return cast("Iterator[tuple[str, nn.Module]]", module.named_modules())


def slots_of(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Return the full names and slots of all tensors below a module, tied ones under each of their names."""
    for prefix, owner in named_modules(module):
        dot = f"{prefix}." if prefix else ""
        for is_parameter in (True, False):
            for key, tensor in _store(owner, is_parameter).items():
                if tensor is not None:
                    yield f"{dot}{key}", Slot(owner, key, is_parameter)


def read_block(model: nn.Module, names: BlockNames) -> Block:
    """Find the modules and slots of a block of a plan."""
    slots: list[Slot] = []
    for leaf in names.leaves:
        prefix, _, key = leaf.rpartition(".")
        owner = model.get_submodule(prefix)
        slots.append(Slot(owner, key, key in _store(owner, True)))
    return Block(name=names.name, module=model.get_submodule(names.name), slots=tuple(slots))


def has_forward(module: nn.Module) -> bool:
    """Whether calling the module computes something, and it is no mere list or namespace of others."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def plan_blocks(
    model: nn.Module, leaves: Collection[str], whole_classes: Collection[str] = ()
) -> tuple[BlockNames, ...]:
    """Choose which tensors travel together: as much as a layer, and no more. Pure.

    A module travels as a whole if its class is said to, if it has no others below it, if it is a layer, or if
    it is at most an eighth of all. Layers are modules of one class, with modules of their own, that stand
    together in a list. What has layers below it is taken apart, but for small layers; its own tensors then
    are a block by themselves, which stays while the module runs. So do those of modules below it that can't
    be called: of a ParameterList, say.

    Args:
        model: Any; only its structure and the sizes of its tensors are read.
        leaves: Full names of the tensors that travel at all, tied ones under each name, as :func:`slots_of`
            gives them.
        whole_classes: Names of classes that aren't taken apart.

    Returns:
        The blocks, in the order of the modules; each leaf is in one of them.
    """
    wanted = set(leaves)
    sizes = {name: slot.read().nbytes for name, slot in slots_of(model) if name in wanted}
    limit = sum(sizes.values()) // 8
    found: list[BlockNames] = []

    def is_whole(module: nn.Module, num_bytes: int, is_layer: bool) -> bool:
        if type(module).__name__ in whole_classes or isinstance(module, _READ_BELOW):
            return True
        if not any(True for _ in module.children()):
            return True
        small = num_bytes <= limit
        return (is_layer and small) if _has_layers(module) else (is_layer or small)

    def visit(module: nn.Module, name: str, is_layer: bool) -> None:
        dot = f"{name}." if name else ""
        # The names of tied tensors depend on the path, so they are made from this module's on.
        below = tuple(f"{dot}{leaf}" for leaf, _ in slots_of(module) if f"{dot}{leaf}" in wanted)
        if not below:
            return
        if has_forward(module) and is_whole(module, sum(sizes[leaf] for leaf in below), is_layer):
            wanted.difference_update(below)
            found.append(BlockNames(name, below))
            return
        own = tuple(leaf for leaf in _own(module, dot) if leaf in wanted)
        if own:
            wanted.difference_update(own)
            found.append(BlockNames(name, own))
        layers = _layers(module)
        for key, child in module.named_children():
            visit(child, f"{dot}{key}", child in layers)

    visit(model, "", False)
    return tuple(found)


def _own(module: nn.Module, dot: str) -> Iterator[str]:
    """Return the tensors of a module, and of those below it that are no more than names for some of them."""
    for is_parameter in (True, False):
        yield from (f"{dot}{key}" for key in _store(module, is_parameter))
    for key, child in module.named_children():
        if not has_forward(child):
            yield from _own(child, f"{dot}{key}.")


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return what stands in a list together with others of its class, and has modules of its own."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    composite = [child for child in module if next(child.children(), None) is not None]
    counts = Counter(type(child) for child in composite)
    return [child for child in composite if counts[type(child)] > 1]


def _has_layers(module: nn.Module) -> bool:
    return any(_layers(below) for below in module.modules())
