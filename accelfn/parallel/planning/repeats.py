"""Equal blocks of a model: a few of them say what all of them cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

# The first block, one that stands for those between, and the last one.
_KEPT = 3
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Repeats(NamedTuple):
    """Equal blocks that follow each other in a list of modules.

    Attributes:
        container: Name of the list.
        keys: Their names in it.
    """

    container: str
    keys: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks in the model."""
        return tuple(f"{self.container}.{key}" if self.container else key for key in self.keys)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of those that stay in a shortened model."""
        return self.names[:_KEPT]

    @property
    def stands_for(self) -> Mapping[str, tuple[str, ...]]:
        """The blocks that each kept one stands for, by its name.

        >>> Repeats("", ("0", "1", "2", "3", "4")).stands_for
        {'0': ('0',), '1': ('1', '2', '3'), '2': ('4',)}
        """
        first, middle, last = self.kept
        names = self.names
        return {first: names[:1], middle: names[1:-1], last: names[-1:]}


def find_repeats(model: nn.Module, blocks: Iterable[str]) -> tuple[Repeats, ...]:
    """Find more than three equal blocks in a row. Pure.

    Blocks are equal if their modules have the same classes, options and hooks, and parameters and buffers of
    the same shapes and dtypes, none of which any other module has. An integer may grow by one from block to
    block: it is the block's place.

    Args:
        model: Real or meta.
        blocks: Names of the blocks, in the model's order.

    >>> model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)), nn.Linear(2, 3))
    >>> find_repeats(model, [str(index) for index in range(6)])
    (Repeats(container='', keys=('0', '1', '2', '3', '4')),)
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            owners[id(tensor)] = owners.get(id(tensor), 0) + 1
    by_container: dict[str, list[str]] = {}
    for name in blocks:
        container, _, key = name.rpartition(".")
        by_container.setdefault(container, []).append(key)
    found: list[Repeats] = []
    for container, keys in by_container.items():
        around = model.get_submodule(container)
        described = [_describe(around.get_submodule(key), owners) for key in keys]
        run = keys[:1]
        for key, (before, after) in zip(keys[1:], pairwise(described), strict=True):
            if not _are_equal(before, after):
                found.append(Repeats(container, tuple(run)))
                run = []
            run.append(key)
        found.append(Repeats(container, tuple(run)))
    return tuple(repeats for repeats in found if len(repeats.keys) > _KEPT)


class _Description(NamedTuple):
    """What makes blocks equal: facts, numbers that may grow by one, and whether no other has its tensors."""

    facts: tuple[Any, ...]
    numbers: tuple[int, ...]
    is_apart: bool


def _describe(block: nn.Module, owners: Mapping[int, int]) -> _Description:
    facts: list[Any] = []
    numbers: list[int] = []
    is_apart = True
    modules: dict[str, nn.Module] = dict(block.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    for name, module in modules.items():
        values: dict[str, Any] = vars(module)
        facts += (name, type(module), *(len(values[hooks]) for hooks in _HOOKS))
        for key, value in values.items():
            if type(value) is int:
                facts.append(key)
                numbers.append(value)
            elif isinstance(value, _PLAIN):
                facts += (key, value)
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for key, tensor in tensors:
            facts += (key, type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            is_apart = is_apart and owners[id(tensor)] == 1
    return _Description(tuple(facts), tuple(numbers), is_apart)


def _are_equal(before: _Description, after: _Description) -> bool:
    return (
        before.facts == after.facts
        and before.is_apart
        and after.is_apart
        and all(next_ - one in (0, 1) for one, next_ in zip(before.numbers, after.numbers, strict=True))
    )
