"""Load a model's weights in place, from the files that the ecosystem writes."""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import safetensors
import torch
from torch import nn

from accelfn.checkpoint.files.stored_dtype import SAFETENSORS_NAMES
from accelfn.checkpoint.weights.index import WeightsFiles, find_weights, read_header
from accelfn.checkpoint.weights.plan import tied_by
from accelfn.checkpoint.weights.state import is_tensor, own_names, require_module
from accelfn.errors import CheckpointMismatchError, DamagedCheckpointError, Misfit
from accelfn.parallel import WholeModel, whole_of
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor

__all__ = ("LoadReport", "load_model")

_LOAD = "load_model"
_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})


class LoadReport(NamedTuple):
    """What :func:`load_model` could not match.

    Attributes:
        missing: Names of the model's tensors that the files don't have; they were left as they were.
        unexpected: Names of tensors in the files that the model doesn't have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Stored(NamedTuple):
    """A tensor in a file. Its bytes are read when they are copied."""

    value: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]


def load_model(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> LoadReport:
    """Load weights that :func:`save_model`, transformers, diffusers, safetensors or torch saved into a model.

    Everything is checked before anything is changed: names, shapes, dtypes, and that the files are sound. The
    tensors of the model keep their place, so an optimizer goes on with them. Weights that the model
    shares need to be in the files under one of their names. Pickled files are read with
    ``weights_only=True``, so that none can run code.

    Ranks: local; every rank reads by itself. Of a model that is spread over ranks (``DTensor``, stages of a
    pipeline) each takes its parts, and looks whether the files have the names of all. These formats have no
    checksums: bits that changed on the disk aren't noticed.

    Args:
        model: Prepared or not; changed in place.
        path: A directory, the only file, or the index; see :func:`accelfn.checkpoint.find_weights`.
        strict: Refuse where a name is missing on either side.

    Returns:
        What did not match; two empty tuples if ``strict``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: The model is on the meta device, and has no memory to load into.
        NoCheckpointError: There are no weights.
        DamagedCheckpointError: A file isn't sound, or is refused.
        CheckpointMismatchError: Names, shapes or dtypes differ, or tied weights of the model differ in the
            files. Nothing was changed.
    """
    plain = unwrap_model(require_module(_LOAD, model), keep_torch_compile=False)
    names = own_names(_LOAD, plain)
    state: dict[str, Any] = plain.state_dict(keep_vars=True)
    targets = {own: state[name] for name, own in names.items()}
    absent = [name for name, value in targets.items() if is_tensor(value) and value.is_meta]
    if absent:
        raise ValueError(
            f"{_LOAD}: {', '.join(absent[:5])}{' and others' if len(absent) > 5 else ''} have no memory "
            "(meta device). Give the model memory first (to_empty)."
        )
    files = find_weights(path)
    stored = _open(files)
    whole = whole_of(plain) or WholeModel(dict.fromkeys(targets), {})
    sources = _match(targets, stored, whole)
    there = {whole.first.get(name, name) for name in (*stored.tensors, *stored.tied)}
    elsewhere = [name for name in whole.tensors if name not in targets]
    missing = tuple(name for name in targets if name not in sources) + tuple(
        name for name in elsewhere if whole.first.get(name, name) not in there
    )
    used = {*sources.values(), *targets, *elsewhere}
    unexpected = tuple(name for name in stored.tensors if name not in used)
    rows = _misfits(targets, stored.tensors, sources)
    if strict:
        rows += [
            Misfit(
                name, "nothing", _kind_of(targets[name]) if name in targets else "a tensor of another stage"
            )
            for name in missing
        ]
        rows += [Misfit(name, _kind_of(stored.tensors[name]), "nothing") for name in unexpected]
    if rows:
        raise CheckpointMismatchError(f"{_LOAD}: {path} doesn't fit the model. Nothing was changed.", rows)
    with torch.no_grad():
        loaded = {
            name: _laid_out(stored.tensors[sources[own]].value, targets[own])
            for name, own in names.items()
            if own in sources
        }
        plain.load_state_dict(loaded, strict=False)
    return LoadReport(missing, unexpected)


# --- the files -----------------------------------------------------------------------------------


class _Opened(NamedTuple):
    """What the files hold.

    Attributes:
        tensors: By name.
        tied: Names that aren't stored, with the stored ones whose data they share.
    """

    tensors: dict[str, _Stored]
    tied: dict[str, str]


def _open(files: WeightsFiles) -> _Opened:
    tensors: dict[str, _Stored] = {}
    tied: dict[str, str] = {}
    for path in files.paths:
        found, aliases = _open_safe(path) if files.is_safe else (_open_pickled(path), {})
        if files.weight_map is not None:
            promised = {name for name, file in files.weight_map.items() if file == path.name}
            lost = sorted(promised - found.keys())
            if lost:
                raise DamagedCheckpointError(
                    f"{path} lacks {', '.join(lost[:5])}, which the index says is in it: the files are not "
                    "of one save.",
                    path.name,
                )
            found = {name: one for name, one in found.items() if name in promised}
        tensors.update(found)
        tied.update(aliases)
    return _Opened(tensors, {name: first for name, first in tied.items() if first in tensors})


def _open_safe(path: Path) -> tuple[dict[str, _Stored], dict[str, str]]:
    header, metadata = read_header(path)
    unknown = sorted({one.dtype for one in header.values()} - _DTYPES.keys())
    if unknown:
        raise DamagedCheckpointError(
            f"{path} has tensors of {', '.join(unknown)}, which torch lacks.", path.name
        )
    try:
        opened: Any = safetensors.safe_open(path, "pt")
        with opened as file:
            # These are views of the mapped file: nothing is read yet.
            found = {
                name: _Stored(file.get_tensor(name), _DTYPES[one.dtype], one.shape)
                for name, one in header.items()
            }
    except safetensors.SafetensorError as error:
        raise DamagedCheckpointError(f"{path} is no sound safetensors file: {error}.", path.name) from error
    return found, {name: first for name, first in metadata.items() if first in header}


def _open_pickled(path: Path) -> dict[str, _Stored]:
    try:
        found: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise DamagedCheckpointError(
            f"{path} is refused: it isn't what torch.save makes of a dict of tensors ({error}).", path.name
        ) from error
    named = cast("Mapping[object, object]", found) if isinstance(found, Mapping) else None
    if named is None or not all(isinstance(name, str) for name in named):
        raise DamagedCheckpointError(f"{path} holds no dict of tensors by name.", path.name)
    tensors: dict[str, _Stored] = {}
    for name, value in named.items():
        if not is_tensor(value) or value.layout != torch.strided:
            raise DamagedCheckpointError(f"{path}: {name!r} in it is no dense tensor.", path.name)
        tensors[cast("str", name)] = _Stored(value, value.dtype, tuple(value.shape))
    return tensors


# --- what goes where -----------------------------------------------------------------------------


def _match(targets: Mapping[str, Any], stored: _Opened, whole: WholeModel) -> dict[str, str]:
    """Return the stored tensor for each of the model's: its own, or that of a weight that shares its data."""
    sources = {name: name for name in targets if name in stored.tensors}
    by_data: dict[Any, str] = {}
    for name, source in sources.items():
        if is_tensor(targets[name]):
            by_data.setdefault(tied_by(targets[name]), source)
    tied = {whole.first.get(name, name): name for name in stored.tensors}  # with what another stage has
    for name, target in targets.items():
        if name not in sources and is_tensor(target):
            # A tie of the model goes first: the file may have been made by another program.
            source = by_data.get(
                tied_by(target), tied.get(whole.first.get(name, name), stored.tied.get(name))
            )
            if source is not None:
                sources[name] = source
    return sources


def _misfits(
    targets: Mapping[str, Any], stored: Mapping[str, _Stored], sources: Mapping[str, str]
) -> list[Misfit]:
    rows: list[Misfit] = []
    first: dict[Any, str] = {}
    for name, source in sources.items():
        one, target = stored[source], targets[name]
        if not is_tensor(target):
            rows.append(Misfit(name, _kind_of(one), type(target).__name__))
        elif (one.dtype, one.shape) != (target.dtype, tuple(target.shape)):
            rows.append(Misfit(name, _kind_of(one), _kind_of(target)))
        else:
            before = first.setdefault(tied_by(target), source)
            if before != source and not _same_bits(stored[before].value, one.value):
                rows.append(Misfit(name, f"other values than {before}", f"tied to {before}"))
    return rows


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (value.contiguous().view(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(first, second)


def _kind_of(value: Any) -> str:
    if not isinstance(value, _Stored) and not is_tensor(value):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _laid_out(value: torch.Tensor, target: Any) -> torch.Tensor:
    """Return this rank's parts of a whole tensor, as ``target`` lies; without a message to other ranks."""
    if not is_dtensor(target):
        return value
    # Where there is a DTensor, it has been imported.
    distribute = importlib.import_module("torch.distributed.tensor").distribute_tensor
    local = value.to(target.device_mesh.device_type)
    return distribute(local, target.device_mesh, target.placements, src_data_rank=None)
