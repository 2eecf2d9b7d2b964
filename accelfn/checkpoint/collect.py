"""Collect the state of this rank: documents, tensors, and digests by which ranks compare what they hold."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.checkpoint.background import paused_collection
from accelfn.checkpoint.by_rank import renamed, stored_place
from accelfn.checkpoint.document.encode import encode
from accelfn.checkpoint.manifest import Json
from accelfn.checkpoint.objects import Names, find_names, inner_of, state_of
from accelfn.checkpoint.plan import Box, Boxes, Held, boxes_from, boxes_of
from accelfn.checkpoint.random_state import random_states
from accelfn.checkpoint.stages import first_names
from accelfn.context import Context
from accelfn.errors import CheckpointError
from accelfn.parallel.pointers import WholeModel, whole_of
from accelfn.parallel.values import check_filled
from accelfn.training import StepState, unwrap_model
from accelfn.training.scaler import check_scaler
from accelfn.tree.digest import digest_tensors
from accelfn.weights.dtypes import dtype_name
from accelfn.weights.write import CHUNK_BYTES, memory_of

# Background saves compare only samples of tensors that are larger than this: reading every byte would hold up
# the training for as long as copying them.
_COMPARED_WHOLE = 1 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 12


class Collected(NamedTuple):
    """The state of this rank: documents, and the tensors that they name.

    Attributes:
        tree: The tree as JSON.
        random: The random states of this rank as JSON.
        tensors: Of the tree, by name; DTensors too.
        random_tensors: Of the random states.
        replicated: Names of tensors that are equal on all ranks.
        staged: Models of which this rank has pipeline stages by path, and None for optimizers.
        order: Of the parameters of these models.
    """

    tree: Json
    random: Json
    tensors: Mapping[str, torch.Tensor]
    random_tensors: Mapping[str, torch.Tensor]
    replicated: frozenset[str]
    staged: Mapping[str, WholeModel | None]
    order: Mapping[str, int]


def random_names(names: Iterable[str], taken: Iterable[str], ending: str = "") -> dict[str, str]:
    """Return names for the tensors of random states that no tensor of the tree has."""
    prefix = "#random"
    while any(name.startswith(f"{prefix}/") for name in taken):
        prefix = f"#{prefix}"
    return {name: f"{prefix}/{name}{ending}" for name in names}


@paused_collection()
def collect_state(ctx: Context, tree: Any, operation: str = "save_state") -> Collected:
    """Collect the state of this rank, whose tensors are the objects' own memory.

    Ranks: local.

    Raises:
        TypeError: Something in the tree has no plain form.
        CheckpointError: A model is split into pipeline stages, and the context has none.
    """
    names = find_names(tree)
    staged: dict[str, WholeModel | None] = {}

    def convert(where: str, thing: Any) -> Any:
        whole = whole_of(inner_of(thing)) if isinstance(thing, nn.Module) else None
        if whole is not None or (isinstance(thing, Optimizer) and ctx.axis_size("pp") > 1):
            staged[where] = whole
        return _state_of(operation, thing, names)

    main = encode(_without_gradients(operation, tree), convert=convert)
    if staged and ctx.axis_size("pp") == 1:
        raise CheckpointError(
            f"{operation}: {next(iter(staged)) or 'tree'} is split into pipeline stages, and this context "
            "has no pp axis. Save with the context that it was prepared with."
        )
    firsts = first_names(staged, main.tensors)
    tensors = {firsts.get(name, name): tensor for name, tensor in main.tensors.items()}
    random = encode({**random_states(ctx), **stored_place(ctx)})
    called = random_names(random.tensors, tensors)
    return Collected(
        tree=renamed(main.document, firsts),
        random=renamed(random.document, called),
        tensors=tensors,
        random_tensors={called[name]: tensor for name, tensor in random.tensors.items()},
        replicated=names.replicated_of(tensors),
        staged=staged,
        order=names.order,
    )


def _without_gradients(operation: str, tree: Any) -> Any:
    """Reset the fields of scaler states that describe current gradients, which aren't saved."""
    if not any(isinstance(one, StepState) for one in optree.tree_leaves(tree, is_leaf=_is_scaler)):
        return tree

    def forget(leaf: Any) -> Any:
        if not isinstance(leaf, StepState):
            return leaf
        check_scaler(operation, leaf)
        return leaf._replace(unscaled=(), weight=None, is_open=None)

    return optree.tree_map(forget, tree, is_leaf=_is_scaler)


def _is_scaler(value: Any) -> bool:
    return isinstance(value, StepState)


def _state_of(operation: str, thing: Any, names: Names) -> Any:
    if isinstance(thing, nn.Module):
        check_filled(operation, unwrap_model(thing, keep_torch_compile=False))
    return state_of(thing, names)


def held_of(tensors: Mapping[str, torch.Tensor], content: Mapping[str, str]) -> tuple[dict[str, Held], Boxes]:
    """Describe what this rank holds of tensors, whose digests are in ``content``. Pure.

    Returns:
        The tensors, which are described alike on all ranks that share them; and the parts that this rank
        holds, by layout.
    """
    held: dict[str, Held] = {}
    boxes: list[tuple[Box, ...]] = []
    known: dict[Any, int | None] = {None: None}  # numbers of layouts, which many tensors share
    for name, tensor in tensors.items():
        layout: Any = None if type(tensor) is torch.Tensor else getattr(tensor, "_spec", tensor)
        if layout not in known:
            own = boxes_of(tensor)
            known[layout] = None if own is None else len(boxes)
            boxes += () if own is None else (own,)
        shape, digest = tuple(tensor.shape), content.get(name, "")
        held[name] = Held(dtype_name(tensor.dtype), shape, tensor.itemsize, known[layout], digest)
    return held, tuple(boxes)


def contents(
    tensors: Mapping[str, torch.Tensor], sums: dict[str, tuple[int, ...]], *, is_copied: bool
) -> dict[str, str]:
    """Return for each tensor a text that differs if any of its bits does; checksums go into ``sums``."""
    found: dict[str, str] = {}
    digested: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        if is_copied and size > _COMPARED_WHOLE:
            digested[name] = _samples(tensor)
        elif tensor.device.type == "cpu" and tensor.is_contiguous():
            memory = memory_of(tensor)
            sums[name] = tuple(
                zlib.crc32(memory[start : start + CHUNK_BYTES]) for start in range(0, size, CHUNK_BYTES)
            )
            found[name] = "crc32:" + ",".join(map(str, sums[name]))
        else:
            digested[name] = tensor
    rows = cast("list[list[int]]", digest_tensors(list(digested.values())).tolist()) if digested else []  # pyright: ignore[reportUnknownMemberType]
    found.update({name: f"digest:{row}" for name, row in zip(digested, rows, strict=True)})
    return found


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Return samples of a large tensor, evenly spread."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    length = max(1, _SAMPLE_BYTES // tensor.dtype.itemsize)
    step = (flat.numel() - length) // (_SAMPLES - 1)
    return flat.as_strided((_SAMPLES, length), (step, 1), flat.storage_offset()).contiguous()


def parse_held(held: Mapping[str, Sequence[Any]]) -> dict[str, Held]:
    """Return what JSON has of the tensors of :func:`held_of`. Pure."""
    return {
        name: Held(dtype, tuple(shape), itemsize, layout, content)
        for name, (dtype, shape, itemsize, layout, content) in held.items()
    }


def parse_boxes(boxes: Sequence[Sequence[Any]]) -> Boxes:
    """Return what JSON has of the parts of :func:`held_of`. Pure."""
    return tuple(map(boxes_from, boxes))
