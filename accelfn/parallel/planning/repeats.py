"""Equal blocks of a model: a few of them say what all of them cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def find_repeats(model: nn.Module, blocks: Sequence[str]) -> dict[str, str]:
    """Return the blocks that needn't run, each with the one that stands for it. Pure.

    Of equal blocks in a row these are all but the first, the second, which stands for them, and the last.
    Blocks are equal if their modules have the same classes, options and hooks, and parameters and buffers of
    the same shapes and dtypes, none of which any other module has. An integer may grow by one from block to
    block: it is the block's place.

    Args:
        model: Real or meta.
        blocks: Names of the blocks, in the model's order.

    >>> model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)), nn.Linear(2, 3))
    >>> find_repeats(model, [str(index) for index in range(6)])
    {'2': '1', '3': '1'}
    """
    owners = Counter(id(tensor) for module in model.modules() for _, tensor in _tensors(module))
    found: dict[str, str] = {}
    row: list[str] = []
    before: tuple[list[Any], list[int]] = [], []
    for name in blocks:
        facts, numbers = _describe(model.get_submodule(name), owners)
        same_list = bool(row) and row[-1].rpartition(".")[0] == name.rpartition(".")[0]
        steps = {after - one for one, after in zip(before[1], numbers, strict=False)}
        if not (same_list and before[0] == facts and steps <= {0, 1}):
            row = []
        elif len(row) > 2:
            found[row[-1]] = row[1]
        row.append(name)
        before = facts, numbers
    return found


def _describe(block: nn.Module, owners: Mapping[int, int]) -> tuple[list[Any], list[int]]:
    """Return what is the same in equal blocks, and numbers that may grow by one."""
    facts: list[Any] = []
    numbers: list[int] = []
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
        for key, tensor in _tensors(module):
            facts += (key, type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            if owners[id(tensor)] > 1:
                facts.append(object())  # which equals no other
    return facts, numbers


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
