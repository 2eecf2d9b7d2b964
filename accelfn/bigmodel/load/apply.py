"""Carry out a plan of loading: read, map and write what it says, and put it into the model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.bigmodel.load.convert import Conversion, convert
from accelfn.bigmodel.load.placing import replaced
from accelfn.bigmodel.load.plan import LoadPlan, LoadStep
from accelfn.bigmodel.load.read import Reading, read_tensors
from accelfn.bigmodel.load.source import Stamp, Stored, map_stored
from accelfn.bigmodel.load.targets import Target
from accelfn.tree import is_dtensor, local_of

__all__ = ("Fetch", "apply_plan", "fetch_from_files")

# What is read between two looks at what may go: of tensors that replace others, both are there so long.
_BATCH_BYTES = 1 << 28


class Fetch(NamedTuple):
    """How stored tensors come into memory.

    Attributes:
        bring: Brings some of them to where they shall be, and calls the other with bytes that are done.
        has_files: Whether this rank has the files, and may map them.
    """

    bring: Callable[[Sequence[Reading], Callable[[int], None]], None]
    has_files: bool


def fetch_from_files(stamps: Mapping[Path, Stamp]) -> Fetch:
    """Return what reads from the files themselves."""

    def bring(readings: Sequence[Reading], advance: Callable[[int], None]) -> None:
        read_tensors(readings, stamps, advance)

    return Fetch(bring, has_files=True)


def apply_plan(
    model: nn.Module,
    plan: LoadPlan,
    stamps: Mapping[Path, Stamp],
    fetch: Fetch,
    *,
    folder: str | os.PathLike[str] | None = None,
    is_whole: bool = True,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Load a model as a plan says.

    What is written to the disk comes first, as that fails most easily; then tensors are read. Those of a
    model without memory (meta) get into it when all are there, so that an error leaves it as it was.

    Effect: on ``model``, and on ``folder``.

    Args:
        model: That the plan is of.
        plan: Its steps may be carried out once.
        stamps: Of the files, as they were when the plan was made.
        fetch: Brings what is read into memory.
        folder: Where converted tensors go.
        is_whole: Whether the files have whole tensors, where the model has parts of them.
        advance: Called with bytes that are done.

    Raises:
        DamagedCheckpointError: A file isn't what it was.
        OSError: A file can't be read, or the folder not written.
    """
    with torch.no_grad():
        ready = _converted(plan.steps, stamps, folder, advance)
        ready += _mapped(plan.steps, stamps, advance)
        for batch in _batches([step for step in plan.steps if step.how in ("fill", "new")]):
            found = _read(batch, fetch, is_whole, advance)
            for step, value in found:
                if step.target.tensor.is_meta:
                    ready.append((step, value))
                else:
                    _put(step.target, value)
        for step, value in ready:
            _put(step.target, value)
        for target, value in plan.values:
            _put(target, value.to(target.tensor.dtype))
    for module, state in plan.extras:
        cast("Any", module).set_extra_state(state.map().clone() if isinstance(state, Stored) else state)
    if plan.needs_ties:
        cast("Any", model).tie_weights()


def _converted(
    steps: Iterable[LoadStep],
    stamps: Mapping[Path, Stamp],
    folder: str | os.PathLike[str] | None,
    advance: Callable[[int], None],
) -> list[tuple[LoadStep, torch.Tensor]]:
    todo = [step for step in steps if step.how == "convert"]
    if not todo or folder is None:  # the plan has refused it then
        return []
    values = convert([Conversion(one.source, one.dtype) for one in todo], stamps, folder, advance)
    return [(step, value.view(step.target.tensor.shape)) for step, value in zip(todo, values, strict=True)]


def _mapped(
    steps: Iterable[LoadStep], stamps: Mapping[Path, Stamp], advance: Callable[[int], None]
) -> list[tuple[LoadStep, torch.Tensor]]:
    todo = [step for step in steps if step.how == "map"]
    views = map_stored([step.source for step in todo], stamps)
    advance(sum(step.source.num_bytes for step in todo))
    return [(step, view.view(step.target.tensor.shape)) for step, view in zip(todo, views, strict=True)]


# --- reading -------------------------------------------------------------------------------------


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


def _read(
    batch: Sequence[LoadStep], fetch: Fetch, is_whole: bool, advance: Callable[[int], None]
) -> list[tuple[LoadStep, torch.Tensor]]:
    """Read some tensors; give those that are new, and not the model's already."""
    targets: list[torch.Tensor] = []
    readings: list[Reading] = []
    for step in batch:
        tensor = step.target.tensor
        if is_dtensor(tensor) and is_whole and fetch.has_files and step.source.is_mappable:
            # Of the whole only what this rank takes is ever read.
            targets.append(step.source.map())
            advance(step.source.num_bytes)
            continue
        if is_dtensor(tensor):
            target = _memory_of_spread(step, is_whole)
        elif step.how == "fill":
            target = tensor.detach()
        else:
            target = torch.empty(tensor.shape, dtype=step.dtype, device=step.device)
        targets.append(target)
        readings.append(Reading(step.source, target.view(step.source.shape) if not target.dim() else target))
    fetch.bring(readings, advance)
    new: list[tuple[LoadStep, torch.Tensor]] = []
    for step, target in zip(batch, targets, strict=True):
        tensor = step.target.tensor
        value = _spread(step, target, is_whole) if is_dtensor(tensor) else target
        if step.how == "new":
            new.append((step, value))
        elif is_whole and is_dtensor(tensor):
            local_of(tensor).copy_(local_of(value))
        elif not tensor.is_inference():
            # The memory was written behind torch's back, and graphs that need the old values shall notice.
            torch.autograd.graph.increment_version(local_of(tensor))
    return new


def _memory_of_spread(step: LoadStep, is_whole: bool) -> torch.Tensor:
    """Return memory to read a tensor of several ranks into: the whole, or this rank's part."""
    tensor = step.target.tensor
    if is_whole:
        # On the host: of the whole only a part goes to the device.
        return torch.empty(tensor.shape, dtype=step.dtype)
    local = local_of(tensor)
    if step.how == "fill":
        return local.detach()
    return torch.empty(local.shape, dtype=step.dtype, device=step.device)


def _spread(step: LoadStep, value: torch.Tensor, is_whole: bool) -> torch.Tensor:
    """Make a tensor of several ranks of what this one has read; without a message to others."""
    tensor = cast("Any", step.target.tensor)
    # Where there is a DTensor, it has been imported.
    spread: Any = importlib.import_module("torch.distributed.tensor")
    local = value
    if is_whole:
        whole = value.view(tensor.shape).to(tensor.device_mesh.device_type)
        made = spread.distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        local = local_of(made).to(step.dtype)
        if local.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
            local = local.clone()  # no part, but all of what may be a file's
    return spread.DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


# --- putting -------------------------------------------------------------------------------------


def _put(target: Target, value: torch.Tensor) -> None:
    """Set a value in the model under all names of its target."""
    old = target.tensor
    if is_dtensor(old):
        for slot in target.slots:
            # By torch's own way, since those that spread it keep parts of it elsewhere and want to be told.
            slot.owner.load_state_dict({slot.key: value}, strict=False, assign=True)
        return
    if not old.is_meta and type(old) in (torch.Tensor, nn.Parameter) and old.layout == value.layout:
        # The same object, so that optimizers and whoever else holds it go on with it.
        old.data = value
        old.grad = None  # of values that are gone, and maybe of another dtype or device
        for slot in target.slots:
            if slot.read() is not old:
                slot.write(old)
        return
    new = replaced(old, value)
    for slot in target.slots:
        slot.write(new)
