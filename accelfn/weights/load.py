"""Load weights from files into a model: what :mod:`accelfn.weights.match` plans is read and assigned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from accelfn.parallel.engines import with_plain_weights
from accelfn.training import unwrap_model
from accelfn.tree import from_local, is_dtensor, local_of
from accelfn.weights.assign import named_modules, put
from accelfn.weights.match import LoadOptions, LoadPlan, LoadStep, Target, plan_load
from accelfn.weights.open import open_weights
from accelfn.weights.read import Reading, read_tensors
from accelfn.weights.state import own_names, part_of, require_module
from accelfn.weights.stored import FileId, Stored, map_stored

_LOAD = "load_model"

Read: TypeAlias = Callable[[Sequence[Reading], Callable[[int], None]], None]
"""Reads tensors into memory, and reports the bytes that were read."""

# New memory is assigned after each batch, so old and new tensors of at most so many bytes coexist.
_BATCH_BYTES = 1 << 28


def apply_plan(
    model: nn.Module,
    plan: LoadPlan,
    file_ids: Mapping[Path, FileId],
    *,
    read: Read | None = None,
    convert: Callable[[Sequence[LoadStep]], Sequence[torch.Tensor]] = lambda _: (),
    is_whole: bool = True,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Execute a load plan.

    Converted tensors are written first, since that is most likely to fail; then tensors are read. Meta
    tensors are replaced when all values are read, so that an error leaves the model unchanged.

    Effect: on ``model``.

    Args:
        model: The model of the plan.
        plan: The plan, which can be executed once.
        file_ids: Identities of the files when the plan was made.
        read: Reads for this rank if it lacks the files. None: it reads them itself.
        convert: Returns the tensors of the steps that are converted, mapped; called first.
        is_whole: Whether the files have complete tensors where the model has shards.
        advance: Called with the number of bytes that were read.

    Raises:
        DamagedCheckpointError: A file was modified.
        OSError: A file can't be read, or converted.
    """
    if plan.is_by_modules:
        _load_by_modules(model, plan, advance)
        return
    converted, mapped = ([step for step in plan.steps if step.how == how] for how in ("convert", "map"))
    with torch.no_grad():
        values = [*convert(converted)] if converted else []
        values += map_stored([step.source for step in mapped], file_ids)
        advance(sum(step.source.num_bytes for step in mapped))
        steps = converted + mapped
        ready = [
            (step, value.view(step.target.tensor.shape)) for step, value in zip(steps, values, strict=True)
        ]
        for batch in _batches([step for step in plan.steps if step.how in ("fill", "new")]):
            for step, value in _read_batch(batch, file_ids, read, is_whole, advance):
                if step.target.tensor.is_meta:
                    ready.append((step, value))
                else:
                    _assign(step.target, value)
        for step, value in ready:
            _assign(step.target, value)
        for target, value in plan.values:
            _assign(target, value.to(target.tensor.dtype))
    for module, state in plan.extras:
        cast("Any", module).set_extra_state(state.map().clone() if isinstance(state, Stored) else state)


def _load_by_modules(model: nn.Module, plan: LoadPlan, advance: Callable[[int], None]) -> None:
    """Pass mapped tensors to ``load_state_dict``, which runs the modules' hooks and methods."""
    values: dict[str, Any] = {}
    for step in plan.steps:
        tensor, value = step.target.tensor, step.source.map()
        if is_dtensor(tensor):
            value = from_local(_copied(part_of(tensor, value), step), like=tensor)
        values.update(dict.fromkeys(step.target.names, value))
    loaded = {name: values[own] for name, own in own_names(_LOAD, model).items() if own in values}
    extras = {id(module): state for module, state in plan.extras}
    for path, module in named_modules(model, every_name=True):
        if (state := extras.get(id(module))) is not None:
            loaded[f"{path}._extra_state".lstrip(".")] = state.map() if isinstance(state, Stored) else state
    with torch.no_grad():
        model.load_state_dict(loaded, strict=False)
    advance(plan.num_bytes)


def _copied(part: torch.Tensor, step: LoadStep) -> torch.Tensor:
    """Return a part of a mapped file in new memory on the device of a step."""
    return part.to(local_of(step.target.tensor).device, step.dtype, copy=True)


def _batches(steps: Iterable[LoadStep]) -> Iterator[list[LoadStep]]:
    batch: list[LoadStep] = []
    size = 0
    for step in steps:
        batch.append(step)
        size += step.source.num_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_batch(
    batch: Sequence[LoadStep],
    file_ids: Mapping[Path, FileId],
    read: Read | None,
    is_whole: bool,
    advance: Callable[[int], None],
) -> list[tuple[LoadStep, torch.Tensor]]:
    """Read tensors; return those in new memory, which the model doesn't hold yet."""
    targets: list[torch.Tensor] = []
    readings: list[Reading] = []
    for step in batch:
        source, local = step.source, local_of(step.target.tensor)
        if is_dtensor(step.target.tensor) and is_whole:
            # On the host, since only a shard goes to the device; of a mapped file only that shard is read.
            source = source if read is not None else _rows_of(step.target.tensor, source)
            is_mapped = read is None and source.is_mappable
            target = source.map() if is_mapped else torch.empty(source.shape, dtype=source.dtype)
        elif step.how == "fill":
            target, is_mapped = local.detach(), False
        else:
            target, is_mapped = torch.empty(local.shape, dtype=step.dtype, device=step.device), False
        targets.append(target)
        if is_mapped:
            advance(source.num_bytes)
        else:
            readings.append(Reading(source, target if target.dim() else target.view(source.shape)))
    if read is None:
        read_tensors(readings, file_ids, advance)
    else:
        read(readings, advance)
    new: list[tuple[LoadStep, torch.Tensor]] = []
    for step, target in zip(batch, targets, strict=True):
        tensor = step.target.tensor
        part = target if is_whole and is_dtensor(tensor) else None
        if part is not None and part.numel() == tensor.numel():
            part = part_of(tensor, part.view(tensor.shape))
        if step.how == "new":
            value = target if part is None else part.to(step.device, step.dtype, copy=True)
            new.append((step, from_local(value, like=tensor)))
        elif part is not None:
            local_of(tensor).copy_(part)
        elif not tensor.is_inference():
            # torch didn't see the write; graphs that saved the old values must detect it.
            torch.autograd.graph.increment_version(local_of(tensor))
    return new


def _rows_of(tensor: torch.Tensor, source: Stored) -> Stored:
    """Return the rows of a stored tensor that are this rank's part of a DTensor; all of it if it has others.

    So that an object store isn't asked for the rest.
    """
    chunks: list[Any] = getattr(tensor, "__create_chunk_list__")()  # noqa: B009 -- of DTensor
    is_rows = len(chunks) == 1 and tensor.dim() > 0 and chunks[0].sizes[1:] == tensor.shape[1:]
    if source.elements is not None or not is_rows:
        return source
    row_bytes = source.num_bytes // tensor.shape[0] if tensor.shape[0] else 0
    shape = tuple(chunks[0].sizes)
    return source._replace(shape=shape, start=source.start + chunks[0].offsets[0] * row_bytes)


def _assign(target: Target, value: torch.Tensor) -> None:
    """Assign a value to every name of a target."""
    old = target.tensor
    if is_dtensor(old):
        for ref in target.refs:
            # Through torch, since FSDP keeps references to shards, and updates them in load_state_dict.
            ref.owner.load_state_dict({ref.key: value}, strict=False, assign=True)
        return
    old.grad = None  # it belongs to the old values, and may have another dtype or device
    put(target.refs, old, value)


class LoadReport(NamedTuple):
    """Names that :func:`load_model` could not match.

    Attributes:
        missing: The model's tensors that the files lack; they were left unchanged.
        unexpected: Tensors in the files that the model lacks.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_model(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> LoadReport:
    """Load weights that :func:`save_model`, transformers, diffusers, safetensors or torch saved into a model.

    Names, shapes, dtypes and the files themselves are checked before anything is changed. Weights are copied
    into the model's tensors, so an optimizer keeps working with them. Of tied weights, the files need only
    one name. Pickled files are read as data, so they can't run code, and their checksums are verified.
    Safetensors files have none: damage to a tensor isn't detected.

    Ranks: local; every rank reads for itself. With ZeRO, every rank of the world. If a model is
    distributed over ranks (``DTensor``, pipeline stages), each rank loads its own parts, and checks that the
    files have the names of all.

    Args:
        model: Prepared or not; changed in place.
        path: A directory, a single file, or an index; see :func:`accelfn.checkpoint.find_weights`.
        strict: Raise if a name is missing on either side. Otherwise one name must match.

    Returns:
        The names that did not match; both tuples are empty if ``strict``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: The model is on the meta device and has no memory to load into.
        NoCheckpointError: There are no weights at ``path``.
        DamagedCheckpointError: A file is malformed.
        CheckpointError: A pickled file requires running code, or has the format of torch before 1.6.
        CheckpointMismatchError: Names, shapes or dtypes differ, or the files have different values for
            weights that are tied in the model. Nothing was changed.
    """
    plain, write_back = with_plain_weights(model)
    inner = unwrap_model(require_module(_LOAD, plain), keep_torch_compile=False)
    state = cast("dict[str, object]", inner.state_dict(keep_vars=True))
    on_meta = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if on_meta:
        raise ValueError(
            f"{_LOAD}: {', '.join(on_meta[:5])}{' and others' if len(on_meta) > 5 else ''} have no memory "
            "(meta device). Allocate it first (to_empty)."
        )
    opened = open_weights(path)
    # Only load_model writes what it has loaded back into an engine, so it is no use to name another function.
    advice = f"load_checkpoint_in_model(model, path, strict={strict})" if plain is model else None
    plan = plan_load(_LOAD, inner, opened, LoadOptions(strict=strict, casts=False, advice=advice))
    apply_plan(inner, plan, opened.file_ids)
    write_back(plain)
    return LoadReport(plan.missing, plan.unexpected)
