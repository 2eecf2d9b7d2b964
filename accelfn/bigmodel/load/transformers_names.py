"""What models of transformers call their weights, and how those lie in a checkpoint.

Some models have tensors that their checkpoints don't: the experts of a layer as one tensor, or three
matrices as one. transformers knows for each of its models how one becomes the other, and loads so; here it is
asked for the same, one tensor of the model at a time.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.bigmodel.load.source import Stored

__all__ = ("as_transformers_names",)


def as_transformers_names(model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint as a model of transformers has them.

    Nothing is read: what is put together of several tensors is so when it is loaded.

    Args:
        model: Of any library.
        tensors: Of a checkpoint, by name.

    Returns:
        By the model's names, where transformers knows them; the same for models of others, and for
        transformers before version 5, which has no such tensors.
    """
    is_theirs = any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)
    have = set(model.state_dict(keep_vars=True)) if is_theirs else set[str]()
    if not is_theirs or have.issuperset(tensors):
        return dict(tensors)
    if importlib.util.find_spec("transformers.core_model_loading") is None:
        return dict(tensors)
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversions: Any = importlib.import_module("transformers.conversion_mapping")
    try:
        rules = list(conversions.get_model_conversion_mapping(model))
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    except (AttributeError, TypeError):  # another version's way; what doesn't fit is then named as it is
        return dict(tensors)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Stored] = {}
    parts: dict[str, list[_Part]] = {}
    rule_of: dict[str, Any] = {}
    # In the order of numbers in names, in which parts are put together.
    for name in sorted(tensors, key=loading.dot_natural_key):
        renamed, pattern = cast(
            "tuple[str, str | None]", loading.rename_source_key(name, renamings, converters)
        )
        if renamed not in have:
            found[name] = tensors[name]
        elif pattern is None:
            found[renamed] = tensors[name]
        else:
            rule_of.setdefault(renamed, by_pattern[pattern])
            parts.setdefault(renamed, []).append(_Part(name, pattern, tensors[name]))
    for renamed, some in parts.items():
        found.update(_put_together(model, rule_of[renamed], renamed, some))
    return found


class _Part(NamedTuple):
    name: str
    pattern: str
    stored: Stored


def _others(count: int) -> str:
    return "" if not count else f" and {count} other{'s' * (count > 1)}"


def _put_together(model: nn.Module, rule: Any, renamed: str, parts: Sequence[_Part]) -> dict[str, Stored]:
    """Return the dtypes and shapes of what will be made of some tensors, and how to make it.

    Raises:
        ValueError: It can't be made of them, since their shapes don't go together.
    """
    try:
        shapes = _convert(model, rule, renamed, parts, _without_values)
    except RuntimeError as error:
        raise ValueError(
            f"{renamed} can't be put together of {parts[0].name}{_others(len(parts) - 1)}: {error}. Is it "
            f"a checkpoint of {type(model).__name__}?"
        ) from error
    first = min((part.stored for part in parts), key=lambda one: (str(one.path), one.start))
    made: dict[str, Stored] = {}
    for name, value in shapes.items():

        def elements(name: str) -> torch.Tensor:
            return _convert(model, rule, renamed, parts, lambda one: one.map())[name]

        made[name] = Stored(
            name,
            first.path,
            value.dtype,
            tuple(value.shape),
            first.start,
            elements=functools.partial(elements, name),
            made_of=tuple(part.stored for part in parts),
            made_by=repr(rule.operations),
        )
    return made


def _without_values(one: Stored) -> torch.Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device="meta")


def _convert(
    model: nn.Module, rule: Any, renamed: str, parts: Sequence[_Part], value: Callable[[Stored], torch.Tensor]
) -> dict[str, torch.Tensor]:
    own = copy.deepcopy(rule)
    for part in parts:
        own.add_tensor(renamed, part.name, part.pattern, value(part.stored))
    made = cast("dict[str, Any]", own.convert(renamed, model=model, config=cast("Any", model).config))
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
