"""Write a folder that Accelerate's ``load_state`` takes."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from accelfn.checkpoint.accelerate.reading import AccelerateState
from accelfn.checkpoint.files.commit import clean, leftover_path, make_nonce
from accelfn.checkpoint.files.disk import REAL_DISK
from accelfn.checkpoint.files.tensor_file import new_entry, write_tensors
from accelfn.checkpoint.weights.files import sync
from accelfn.checkpoint.weights.plan import plan_weights

__all__ = ("write_accelerate",)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_KEYS = (bool, int, float, str, bytes, tuple)


def write_accelerate(directory: str | os.PathLike[str], state: AccelerateState) -> Path:
    """Write a folder that Accelerate 1.x loads with ``load_state``.

    Models are safetensors; the rest is what ``torch.save`` writes, since Accelerate reads nothing else, and
    holds plain values and tensors only. The folder appears at once and complete, by one rename.

    Accelerate has to prepare its objects in the order in which they stand in ``state``.

    Ranks: local; one rank writes all.

    Args:
        directory: The folder to make. Directories above it are made too.
        state: What to write, as :func:`to_accelerate` gives it. It isn't changed.

    Returns:
        The folder.

    Raises:
        FileExistsError: There is something of that name, and it isn't an empty folder.
        TypeError: Something in ``state`` is neither a plain value nor a tensor or an array; the message has
            its path.
        ValueError: A tensor is sparse, or on the meta device and has no data.
        OSError: The files can't be written. Nothing is left behind; what a program left that was killed goes
            with the next one that writes there.
    """
    folder = Path(directory)
    if folder.is_symlink() or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(
            f"write_accelerate: {folder} is there already, and isn't written over. Pass a new folder, or "
            "remove it."
        )
    objects = _objects(state)
    models = [_portable(f"models[{number}]", model) for number, model in enumerate(state.models)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = os.path.abspath(folder)
    clean(REAL_DISK, *os.path.split(place))
    stage = Path(leftover_path(place, "staging", make_nonce()))
    stage.mkdir()
    try:
        for number, tensors in enumerate(models):
            _write_model(stage / f"model{_suffix(number)}.safetensors", tensors)
        for name, value in objects.items():
            with open(stage / name, "wb") as file:
                torch.save(value, file)
            sync(stage / name)
        sync(stage)
        os.replace(stage, folder)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    sync(folder.parent)
    return folder


def _suffix(number: int) -> str:
    return f"_{number}" if number else ""


def _objects(state: AccelerateState) -> dict[str, Any]:
    """Return what goes into the files that torch.save writes, by name."""
    named: dict[str, Any] = {}
    for field, stem in (
        *(("optimizers", "optimizer"), ("schedulers", "scheduler"), ("samplers", "sampler")),
        ("loaders", "dl_state_dict"),
    ):
        for number, value in enumerate(getattr(state, field)):
            named[f"{stem}{_suffix(number)}.bin"] = _portable(f"{field}[{number}]", value)
    for number, value in enumerate(state.custom):
        named[f"custom_checkpoint_{number}.pkl"] = _portable(f"custom[{number}]", value)
    for rank, value in enumerate(state.random):
        if value is not None:
            named[f"random_states_{rank}.pkl"] = _portable(f"random[{rank}]", _numpy_as_list(value))
    if state.scaler is not None:
        named["scaler.pt"] = _portable("scaler", state.scaler)
    return named


def _numpy_as_list(state: Mapping[str, Any]) -> dict[str, Any]:
    """Turn NumPy's key into plain numbers: set_state takes them, and no array has to be pickled."""
    held = dict(state)
    if held.get("numpy_random_seed") is not None:
        name, key, *rest = held["numpy_random_seed"]
        held["numpy_random_seed"] = (name, [int(number) for number in key.tolist()], *rest)
    return held


def _write_model(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    plan = plan_weights(tensors, sys.maxsize)
    ((_, names),) = plan.files
    entries = [new_entry(name, tensors[name]) for name in names]
    write_tensors(REAL_DISK, str(path), entries, {"format": "pt", **dict(plan.tied)})


def _portable(path: str, value: Any) -> Any:
    """Return a copy of nothing but what a restricted reader takes; tensors on the CPU, and compact."""
    if isinstance(value, torch.Tensor):
        return _portable_tensor(path, value)
    if type(value) in _PLAIN or _is_array(value):
        return value
    if type(value) in (dict, OrderedDict, Counter):
        held = cast("dict[Any, Any]", value)
        odd = next((key for key in held if key is not None and type(key) not in _KEYS), None)
        if odd is not None:
            raise TypeError(
                f"write_accelerate: {path} has a key of the type {type(odd).__name__}. Use a text."
            )
        items = {key: _portable(f"{path}[{key!r}]", part) for key, part in held.items()}
        return items if type(value) is dict else type(value)(items)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_portable(f"{path}[{number}]", part) for number, part in enumerate(value))
    raise TypeError(
        f"write_accelerate: {path} is {type(value).__module__}.{type(value).__qualname__}, and neither a "
        "plain value nor a tensor. Save what it holds as numbers, texts, containers of them, or tensors."
    )


def _portable_tensor(path: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise ValueError(f"write_accelerate: {path} has no data (meta device). Load or initialise it first.")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"write_accelerate: {path} must be dense to be saved. Make it dense (to_dense) first."
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"write_accelerate: {path} is a {type(tensor).__name__}. Turn it into a plain tensor first "
            "(full_tensor() for a DTensor)."
        )
    held = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A view would take all of its storage into the file.
    whole = held.untyped_storage().nbytes() == held.numel() * held.dtype.itemsize
    return held if whole else held.clone()


def _is_array(value: Any) -> bool:
    """Whether it is an array or a number of NumPy without objects in it. NumPy isn't loaded for that."""
    numpy: Any = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(value) is not numpy.void
        and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
        and value.dtype.kind in "biufcUS"
    )
