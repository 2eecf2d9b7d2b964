"""Write a folder that Accelerate's ``load_state`` loads."""

from __future__ import annotations

import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from accelfn.checkpoint.accelerate_read import ALWAYS_NUMBERED, KINDS
from accelfn.checkpoint.weights_files import staging, write_pickled, write_tied
from accelfn.context.config import GradScalerKwargs
from accelfn.training import ScalerState

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_STEMS = MappingProxyType({"loader": "dl_state_dict", "custom": "custom_checkpoint"})
_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")


def write_accelerate(
    directory: str | os.PathLike[str],
    tree: Mapping[str, Any],
    *,
    scaler: GradScalerKwargs | None = None,
) -> Path:
    """Write a folder that Accelerate 1.x loads with ``load_state``.

    Models are safetensors; the rest is what ``torch.save`` writes, since Accelerate reads nothing else, and
    holds plain values and tensors only. The folder appears at once and complete, by one rename.

    Accelerate has to prepare its objects in the order of their numbers.

    Ranks: local; one rank writes all.

    Args:
        directory: The folder to make. Directories above it are made too.
        tree: Any of the parts that :func:`read_accelerate` lists. It isn't changed. An optimizer's parameters
            are numbered in the order of its groups. Accelerate has no place for the scaler's count of skipped
            steps.
        scaler: The run's options of the loss scaler. None: the defaults.

    Returns:
        The folder.

    Raises:
        FileExistsError: There is something of that name, and it isn't an empty folder.
        TypeError: Something in ``tree`` is neither a plain value nor a tensor or an array; the message has
            its path.
        ValueError: A part has a name that isn't known, one of several is missing, an optimizer has a state
            for a parameter that is in none of its groups, the scaler's gradients wait for a step; or a tensor
            is sparse, or on the meta device and has no data.
        OSError: The files can't be written. Nothing is left behind; what a program left that was killed goes
            with the next one that writes there.
    """
    folder = Path(directory)
    parts = dict(tree)
    models: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for kind in KINDS:
        for number in range(len(parts)):
            name = f"{kind}_{number}" if number or kind == ALWAYS_NUMBERED else kind
            if name not in parts:
                break
            value = parts.pop(name)
            stem = name.replace(kind, _STEMS.get(kind, kind))
            if kind == "model":
                models[stem] = _portable(name, value)
            else:
                ending = "pkl" if kind == "custom" else "bin"
                state = _numbered_optimizer(value) if kind == "optimizer" else value
                objects[f"{stem}.{ending}"] = _portable(name, state)
    state, random, step = (parts.pop(name, None) for name in ("scaler", "random", "step"))
    if parts:
        raise ValueError(
            f"write_accelerate: a folder of Accelerate has no place for {', '.join(map(repr, parts))}. Parts "
            "are model, model_1, ..., optimizer, scheduler, sampler, loader, custom_0, scaler, random and "
            "step, without gaps."
        )
    if step is not None and not random:
        raise ValueError("write_accelerate: Accelerate keeps the step with the random states: add random.")
    if state is not None:
        objects["scaler.pt"] = _scaler_dict(state, scaler or GradScalerKwargs())
    for rank, one in enumerate(random or ()):
        if one is not None:
            objects[f"random_states_{rank}.pkl"] = _random_dict(one, random, step)
    if folder.is_symlink() or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(
            f"write_accelerate: {folder} is there already, and isn't written over. Pass a new folder, or "
            "remove it."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging(folder) as stage:
        for stem, tensors in models.items():
            write_tied(stage, stem, tensors)
        for name, value in objects.items():
            write_pickled(stage / name, value)
        os.replace(stage, folder)
    return folder


def _numbered_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    number_of: dict[Any, int] = {}
    groups: list[dict[str, Any]] = []
    for group in state["groups"]:
        for name in group["params"]:
            if name in number_of:
                raise ValueError(
                    f"write_accelerate: the parameter {name} stands in an optimizer's groups twice."
                )
            number_of[name] = len(number_of)
        groups.append({**group, "params": [number_of[name] for name in group["params"]]})
        groups[-1]["params"] = groups[-1].pop("params")  # behind the options, as torch has it
    lost = [name for name in state["state"] if name not in number_of]
    if lost:
        raise ValueError(
            f"write_accelerate: an optimizer has a state for {lost[0]}, which is in none of its groups."
        )
    held = {number: state["state"][name] for name, number in number_of.items() if name in state["state"]}
    return {"state": held, "param_groups": groups, **state.get("others", {})}


def _scaler_dict(state: ScalerState, options: GradScalerKwargs) -> dict[str, Any]:
    if state.is_unscaled or state.weight is not None:
        raise ValueError(
            "write_accelerate: the scaler's gradients wait for a step. Save after optimizer_step."
        )
    chosen = {option: getattr(options, option) for option in _OPTIONS}
    return {"scale": float(state.scale), **chosen, "_growth_tracker": int(state.growth_tracker)}


def _random_dict(state: Mapping[str, Any], every: Sequence[Any], step: int | None) -> dict[str, Any]:
    """Return the state of a rank's generators as Accelerate has it."""
    theirs: dict[str, Any] = {} if step is None else {"step": step}
    python = state["python"]
    theirs["random_state"] = (python["version"], tuple(python["numbers"].tolist()), python["gauss"])
    if "numpy" in state:
        # Plain numbers: set_state takes them, and no array has to be pickled.
        *numbers, place = state["numpy"]["numbers"].tolist()
        gauss = state["numpy"]["gauss"]
        theirs["numpy_random_seed"] = ("MT19937", numbers, place, int(gauss is not None), gauss or 0.0)
    theirs["torch_manual_seed"] = state["torch"].clone()
    for name in [name for name, value in state.items() if isinstance(value, list)]:
        # Accelerate has the generators of all devices of the machine on every rank: those of all ranks.
        devices = [device.clone() for one in every if one is not None for device in one.get(name, ())]
        theirs[f"torch_{name}_manual_seed"] = devices
    return theirs


def _portable(path: str, value: Any) -> Any:
    """Return a copy of nothing but what a restricted reader takes; tensors on the CPU, and compact."""
    kind: Any = type(cast("object", value))
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(
                f"write_accelerate: {path} has no data of its own ({value.layout}, on {value.device}). Load "
                "it, or make it dense (to_dense), first."
            )
        if kind in (torch.Tensor, torch.nn.Parameter):
            held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            # A view would take all of its storage into the file.
            whole = held.untyped_storage().nbytes() == held.numel() * held.dtype.itemsize
            return held if whole else held.clone()
    elif kind in (dict, OrderedDict, Counter):
        held = cast("dict[Any, Any]", value)
        pairs = {_portable(f"{path}: a key", key): _portable(f"{path}[{key!r}]", held[key]) for key in held}
        return cast("Any", kind)(pairs)
    elif kind in (list, tuple, set, frozenset):
        return cast("Any", kind)(_portable(f"{path}[{number}]", one) for number, one in enumerate(value))
    elif kind in _PLAIN or _is_array(value):
        return value
    raise TypeError(
        f"write_accelerate: {path} is {kind.__module__}.{kind.__qualname__}, and neither a plain value nor "
        "a plain tensor. Save what it holds as numbers, texts, containers of them, or tensors (full_tensor() "
        "of a DTensor)."
    )


def _is_array(value: Any) -> bool:
    """Whether it is an array or a number of NumPy without objects in it. NumPy isn't loaded for that."""
    numpy: Any = sys.modules.get("numpy")
    is_array = numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
    return is_array and value.dtype.kind in "biufcUS"
