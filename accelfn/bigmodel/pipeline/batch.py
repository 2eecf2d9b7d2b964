"""Arguments of a call, cut into micro-batches, and results put together again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from accelfn.tree import find_batch_size

__all__ = ("Batch", "Example", "Result", "join_results", "micro_batch", "read_batch", "read_example")


class Example(NamedTuple):
    """What a call looks like.

    Attributes:
        keywords: Names of the keyword arguments, in order.
        leaves: Of the positional and then the keyword arguments, in order. Tensors are on the meta device.
        spec: Of the arguments, as torch's pytrees have it.
        is_batch: Of each leaf, whether it is a tensor with a row for each row of the batch.
        num_rows: Of the batch.
    """

    keywords: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: Any
    is_batch: tuple[bool, ...]
    num_rows: int


class Batch(NamedTuple):
    """The arguments of a call that is like the example.

    Attributes:
        leaves: As those of the example.
        num_rows: Of the batch.
    """

    leaves: tuple[Any, ...]
    num_rows: int


class Result(NamedTuple):
    """What a call gives.

    Attributes:
        constants: Its leaves in order: None for a tensor, and a tuple around anything else, which is the same
            at each call.
        spec: Of it, as torch's pytrees have it.
    """

    constants: tuple[tuple[Any] | None, ...]
    spec: Any


def read_example(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
    """Read what a call looks like.

    The batch size is that of the first tensor that has any dimension. Tensors with as many rows are cut into
    micro-batches; all others come whole to each of them.

    Raises:
        ValueError: There is no such tensor, or the batch is empty.
    """
    try:
        num_rows = find_batch_size((args, dict(kwargs)))
    except ValueError as error:
        raise ValueError(
            "prepare_pipeline: the example has no batch dimension: no argument is a tensor with a dimension. "
            "Pass arguments as the model takes them, with one row for each sample."
        ) from error
    if num_rows == 0:
        raise ValueError("prepare_pipeline: the batch of the example is empty. Pass one with rows.")
    leaves, spec = _pytree.tree_flatten((args, dict(kwargs)))
    return Example(
        keywords=tuple(kwargs),
        leaves=tuple(leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
        spec=spec,
        is_batch=tuple(
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == num_rows for leaf in leaves
        ),
        num_rows=num_rows,
    )


def read_batch(example: Example, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
    """Take the arguments of a call apart.

    Raises:
        ValueError: They aren't like the example in all but the number of rows; with the first difference.
    """
    if set(kwargs) != set(example.keywords):
        raise ValueError(
            f"pipeline: got the keyword arguments {sorted(kwargs)}, and the example had "
            f"{sorted(example.keywords)}. Pass the same ones."
        )
    ordered = {name: kwargs[name] for name in example.keywords}
    placed, spec = _pytree.tree_flatten_with_path((args, ordered))
    if spec != example.spec:
        raise ValueError(
            f"pipeline: the arguments have another structure than those of the example:\n  now: {spec}\n"
            f"  example: {example.spec}\nPass the same ones, or prepare the model for these."
        )
    num_rows: int | None = None
    for (path, leaf), like, is_batch in zip(placed, example.leaves, example.is_batch, strict=True):
        _compare(_name(path), leaf, like, is_batch)
        if is_batch:
            if num_rows is not None and leaf.shape[0] != num_rows:
                raise ValueError(
                    f"pipeline: {_name(path)} has {leaf.shape[0]} rows, and an argument before it has "
                    f"{num_rows}. All of a batch need the same number."
                )
            num_rows = leaf.shape[0]
    if not num_rows:
        raise ValueError("pipeline: the batch has no rows. Leave the call out.")
    return Batch(tuple(leaf for _, leaf in placed), num_rows)


def _compare(name: str, leaf: Any, like: Any, is_batch: bool) -> None:
    """Refuse a leaf that isn't as in the example."""
    if not isinstance(like, torch.Tensor) or not isinstance(leaf, torch.Tensor):
        same = type(leaf) is type(like) and not isinstance(leaf, torch.Tensor) and bool(leaf == like)
        now, before = _kind(leaf), _kind(like)
    else:
        first = 1 if is_batch else 0
        same = leaf.dtype == like.dtype and leaf.shape[first:] == like.shape[first:]
        same = same and leaf.dim() == like.dim()
        now, before = _kind(leaf), _kind(like, "any" if is_batch else None)
    if not same:
        raise ValueError(
            f"pipeline: {name} is {now}, and the model was prepared for {before}. Pad or cut it to that, or "
            "prepare the model for it."
        )


def _kind(leaf: Any, rows: str | None = None) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    shape = [str(length) for length in leaf.shape]
    if rows is not None:
        shape[0] = rows
    return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(shape)})"


def _name(path: Any) -> str:
    """Name a leaf as it is passed: the arguments are a tuple of the positional and the keyword ones."""
    text = _pytree.keystr(path)
    return f"args{text[3:]}" if text.startswith("[0]") else f"kwargs{text[3:]}"


def micro_batch(
    example: Example, batch: Batch, index: int, rows: int, device: torch.device
) -> tuple[Any, ...]:
    """Give the leaves of one micro-batch, on a device.

    Args:
        example: What a call looks like.
        batch: All of it.
        index: Which micro-batch.
        rows: Of each. The last row is repeated where too few are left.
        device: Where to.
    """

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        part = leaf[index * rows : (index + 1) * rows]
        missing = rows - part.shape[0]
        if missing:
            part = torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])
        return part.to(device)

    return tuple(
        cut(leaf) if is_batch else leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
        for leaf, is_batch in zip(batch.leaves, example.is_batch, strict=True)
    )


def join_results(parts: Sequence[Sequence[torch.Tensor]], num_rows: int) -> list[torch.Tensor]:
    """Put the tensors of the micro-batches' results together, without the rows that were added.

    Args:
        parts: Of each micro-batch the tensors of its result, in order.
        num_rows: Of the batch.
    """
    return [torch.cat(column)[:num_rows] for column in zip(*parts, strict=True)]
