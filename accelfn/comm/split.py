"""Share out a sequence between ranks, without communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch

from accelfn.context import Context, check_context

__all__ = ("split_between_processes", "split_sizes")

T = TypeVar("T")


def split_between_processes(ctx: Context, inputs: T, apply_padding: bool = False) -> T:
    """Return this rank's part of ``inputs``: consecutive items, as equal as can be, longer parts first.

    Ranks: any; doesn't communicate. Every rank passes the same inputs.

    Args:
        ctx: The world. Where ranks along ``"tp"`` share layers, pass ``ctx.along("dp")``: they get one part.
        inputs: A list, tuple or other sequence, a tensor or array (split along its first dimension), a
            ``datasets.Dataset``, or a mapping of these, all of one length, nested as you like.
        apply_padding: Repeat the last item until all parts are equally long, for what is gathered afterwards.

    Returns:
        A part of the same type; tensors are views unless padded. With one process the inputs themselves.

    Raises:
        TypeError: ``inputs`` can't be split (a string, a set, a 0-d tensor, ...).
        ValueError: The values of a mapping differ in length.

    >>> split_between_processes(Context(), ["A", "B", "C"])
    ['A', 'B', 'C']
    """
    check_context("split_between_processes", ctx)
    length = _length(inputs, "inputs")
    size, rank = ctx.world.size, ctx.world.rank
    if size == 1:
        return inputs
    sizes = split_sizes(length, size)
    start = sum(sizes[:rank])
    indices = list(range(start, start + sizes[rank]))
    if apply_padding and length:
        indices += [length - 1] * (sizes[0] - len(indices))
    return _take(inputs, indices)


def split_sizes(length: int, parts: int) -> list[int]:
    """Cut ``length`` into ``parts`` as equal as can be, longer ones first. Pure.

    >>> split_sizes(5, 3)
    [2, 2, 1]
    """
    quotient, rest = divmod(length, parts)
    return [quotient + (part < rest) for part in range(parts)]


def _length(inputs: Any, path: str) -> int:
    if isinstance(inputs, Mapping):
        lengths = {
            key: _length(value, f"{path}[{key!r}]")
            for key, value in cast("Mapping[Any, Any]", inputs).items()
        }
        if not lengths:
            raise ValueError(
                f"split_between_processes: {path} is an empty mapping. Pass what is to be split."
            )
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"split_between_processes: the values of {path} must have one length, got {lengths}."
            )
        return next(iter(lengths.values()))
    if isinstance(inputs, torch.Tensor) or hasattr(inputs, "__array__"):
        if not inputs.ndim:
            raise TypeError(f"split_between_processes: {path} is 0-dimensional and can't be split.")
        return int(inputs.shape[0])
    if isinstance(inputs, (list, tuple)) or (hasattr(inputs, "select") and hasattr(inputs, "__len__")):
        return len(cast("list[Any]", inputs))
    raise TypeError(
        f"split_between_processes: {path} is a {type(inputs).__name__}, which can't be split. Pass a list, "
        "a tuple, a tensor, an array, a dataset, or a mapping of these."
    )


def _take(inputs: Any, indices: list[int]) -> Any:
    start = indices[0] if indices else 0
    consecutive = indices == list(range(start, start + len(indices)))  # not where the last item was added
    if isinstance(inputs, Mapping):
        mapping = cast("Mapping[Any, Any]", inputs)
        taken = {key: _take(value, indices) for key, value in mapping.items()}
        return taken if type(mapping) is dict else cast("Any", type(mapping))(taken)
    if isinstance(inputs, torch.Tensor) or hasattr(inputs, "__array__"):
        return inputs[start : start + len(indices)] if consecutive else inputs[indices]
    if hasattr(inputs, "select"):
        return inputs.select(indices)
    if isinstance(inputs, list):
        return [inputs[index] for index in indices]
    # A namedtuple names positions, so a part of it is a plain tuple.
    return tuple(inputs[index] for index in indices)
