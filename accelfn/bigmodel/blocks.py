"""Blocks of tensors that travel together: as much as a layer, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from accelfn.bigmodel.assign import TensorRef, has_forward, refs_of, store_of

# Modules of torch that use the tensors of those below them without calling these.
READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A module whose tensors travel together.

    Attributes:
        name: Of the module in the model.
        module: It; its forward is what the tensors are needed for.
        refs: Of the tensors that travel: all below the module, or only its own.
    """

    name: str
    module: nn.Module
    refs: tuple[TensorRef, ...]


def plan_blocks(
    model: nn.Module, names: Collection[str], whole_classes: Collection[str] = ()
) -> tuple[Block, ...]:
    """Choose which tensors travel together. Pure.

    A module travels as a whole if its class is said to, if it has no others below it, if it is a layer, or if
    it is at most an eighth of all. Layers are modules of one class, with modules of their own, that stand
    together in a list. What has layers below it is taken apart, but for small layers; its own tensors then
    are a block by themselves, which stays while the module runs. So do those of modules below it that can't
    be called: of a ParameterList, say.

    Args:
        model: Any; only its structure and the sizes of its tensors are read.
        names: Full names of the tensors that travel at all, tied ones under each name, as :func:`refs_of`
            gives them.
        whole_classes: Names of classes that aren't taken apart.

    Returns:
        The blocks, in the order of the modules; each tensor is in one of them.
    """
    left = {name: ref for name, ref in refs_of(model) if name in set(names)}
    limit = sum(ref.read().nbytes for ref in left.values()) // 8
    found: list[Block] = []

    def is_whole(module: nn.Module, num_bytes: int, is_layer: bool) -> bool:
        if type(module).__name__ in whole_classes or isinstance(module, READ_BELOW):
            return True
        if not any(True for _ in module.children()):
            return True
        small = num_bytes <= limit
        has_layers = any(_layers(below) for below in module.modules())
        return (is_layer and small) if has_layers else (is_layer or small)

    def take(module: nn.Module, name: str, inside: Collection[str]) -> None:
        refs = tuple(left.pop(one) for one in inside)
        if refs:
            found.append(Block(name=name, module=module, refs=refs))

    def visit(module: nn.Module, name: str, is_layer: bool) -> None:
        dot = f"{name}." if name else ""
        # The names of tied tensors depend on the path, so they are made from this module's on.
        below = [f"{dot}{one}" for one, _ in refs_of(module) if f"{dot}{one}" in left]
        if not below:
            return
        num_bytes = sum(left[one].read().nbytes for one in below)
        if has_forward(module) and is_whole(module, num_bytes, is_layer):
            take(module, name, below)
            return
        take(module, name, [one for one in _own(module, dot) if one in left])
        layers = _layers(module)
        for key, child in module.named_children():
            visit(child, f"{dot}{key}", child in layers)

    visit(model, "", False)
    return tuple(found)


def _own(module: nn.Module, dot: str) -> Iterator[str]:
    """Return the tensors of a module, and of those below it that are no more than names for some of them."""
    for is_parameter in (True, False):
        yield from (f"{dot}{key}" for key in store_of(module, is_parameter))
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
