"""Save a model's weights as safetensors, in the layout that the ecosystem reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from torch import nn

from accelfn.comm import Call, agree, attempt, check_replicas
from accelfn.context import Context
from accelfn.context.config import GuardMode
from accelfn.training import unwrap_model

__all__ = ("WeightsPlan", "flush", "parse_size", "plan_weights", "save_model", "write_tensor_file")

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("B", 1))
_INDEX = "model.safetensors.index.json"
_NAME = r"model((-\d{5}-of-\d{5})?\.safetensors|\.safetensors\.index\.json)"
# The files of a save, and the unfinished ones of a save that was killed.
_OURS = re.compile(rf"{_NAME}|\.{_NAME}\.\d+\.partial")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlan:
    """Which tensor goes into which file.

    Attributes:
        files: Names of files, and of the tensors in each, in order.
        tied: Name of each tensor that isn't stored, and the stored one that it shares all its data with.
        total_bytes: Of all stored tensors.
    """

    files: tuple[tuple[str, tuple[str, ...]], ...]
    tied: tuple[tuple[str, str], ...]
    total_bytes: int


def parse_size(size: int | str) -> int:
    """Read a size such as ``"10GB"``, ``"1.5 MB"`` or a number of bytes. Units are powers of 1000.

    Raises:
        ValueError: Another form, or nothing above zero.

    >>> parse_size("1.5MB"), parse_size(10)
    (1500000, 10)
    """
    number = Decimal(size) if isinstance(size, int) else None
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(TB|GB|MB|KB|B)\s*", size, re.IGNORECASE)
        number = Decimal(match[1]) * dict(_UNITS)[match[2].upper()] if match else None
    if number is None or number < 1:
        raise ValueError(
            f"max_shard_size must be bytes or a number with TB, GB, MB or KB, such as '5GB': got {size!r}."
        )
    return int(number)


def plan_weights(tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> WeightsPlan:
    """Decide which tensor goes into which file. Pure.

    Tensors are taken in order; a file is closed when the next one would make it too large, and a tensor that
    is too large by itself gets a file of its own. Tensors with the very same data are stored once, under the
    first name.

    Args:
        tensors: By name.
        max_shard_bytes: Largest size of a file's tensors.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied: list[tuple[str, str]] = []
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, tensor in tensors.items():
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and same in first:
            tied.append((name, first[same]))
            continue
        first[same] = name
        size = tensor.numel() * tensor.dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
        total += size
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    )
    files = tuple((name, tuple(shard)) for name, shard in zip(names, shards, strict=True))
    return WeightsPlan(files=files, tied=tuple(tied), total_bytes=total)


def save_model(
    ctx: Context, model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str = "10GB"
) -> tuple[Path, ...]:
    """Write the weights of ``model`` as ``model.safetensors``, or as several files with an index.

    The main process writes. Each file is complete on disk before it takes its name, and what an earlier save
    left behind is removed last. Weights that share their data are stored once; the other names stand in the
    file's metadata.

    Ranks: every rank of ``ctx``. Returns when the files are in place, on all ranks.

    Args:
        ctx: The world.
        model: Prepared or not. Its class and wrapper leave no trace in the names.
        directory: Made if it isn't there.
        max_shard_size: Largest size of a file, in bytes or such as ``"5GB"``.

    Returns:
        The files, on every rank.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: A weight is sparse, or on the meta device and has no data, the state dict holds something
            that is no tensor, or the size has another form.
        NotADirectoryError: ``directory`` is a file.
        OSError: The files can't be written. What was there before is only gone where a new file took its
            name.
        RemoteRankError: On the other ranks, when the main process failed.
        ReplicaDriftError: The parameters differ between ranks, so that another rank's would be lost.
    """
    folder = Path(directory)

    def save() -> WeightsPlan:
        if not isinstance(cast("object", model), nn.Module):
            raise TypeError(f"save_model: takes a module, got {type(model).__name__}.")
        tensors = _tensors(unwrap_model(model, keep_torch_compile=False))
        plan = plan_weights(tensors, parse_size(max_shard_size))
        if ctx.is_main_process:
            _write(folder, plan, tensors)
        return plan

    guard = ctx.guard
    if ctx.num_processes > 1 and guard.check_replicas_before_saving and guard.mode != GuardMode.OFF:
        # Parameters alone: running statistics of a batch differ between ranks by right.
        parameters, error = attempt(lambda: _parameters(model))
        agree(ctx, Call("save_model", takes_long=True), error=error)
        check_replicas(ctx, parameters, name="model")
    plan, error = attempt(save)
    if ctx.num_processes > 1:
        agree(ctx, Call("save_model", takes_long=True), error=error)
    elif error is not None:
        raise error
    files = [folder / name for name, _ in cast("WeightsPlan", plan).files]
    return (*files, folder / _INDEX) if len(files) > 1 else tuple(files)


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    if not isinstance(cast("object", model), nn.Module):
        raise TypeError(f"save_model: takes a module, got {type(model).__name__}.")
    return {name: value for name, value in unwrap_model(model).named_parameters() if not value.is_meta}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(
            f"save_model: {', '.join(others[:5])} in the state dict is no tensor, and would be lost: "
            "safetensors holds tensors only. Let get_extra_state give a tensor, or save it by yourself."
        )
    tensors = {name: cast("torch.Tensor", value).detach() for name, value in state.items()}
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"save_model: {', '.join(sparse[:5])} must be dense to be saved. Make it dense (to_dense) first."
        )
    absent = [name for name, tensor in tensors.items() if tensor.is_meta]
    if absent:
        raise ValueError(
            f"save_model: {', '.join(absent[:5])}{' and others' if len(absent) > 5 else ''} have no data "
            "(meta device). "
            "Load or initialise the model first."
        )
    return tensors


def _write(folder: Path, plan: WeightsPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"save_model: {folder} is a file. Pass a directory.")
    folder.mkdir(parents=True, exist_ok=True)
    stored_with = {stored: file for file, names in plan.files for stored in names}
    written: list[tuple[Path, Path]] = []
    try:
        for file, names in plan.files:
            tied = {name: stored for name, stored in plan.tied if stored_with[stored] == file}
            temporary = folder / f".{file}.{os.getpid()}.partial"
            written.append((temporary, folder / file))
            write_tensor_file(temporary, {name: tensors[name] for name in names}, {"format": "pt", **tied})
        if len(plan.files) > 1:
            temporary = folder / f".{_INDEX}.{os.getpid()}.partial"
            written.append((temporary, folder / _INDEX))
            index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": stored_with}
            temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            flush(temporary)
        for temporary, final in written:
            os.replace(temporary, final)
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
    flush(folder)
    current = {final.name for _, final in written}
    for old in folder.iterdir():
        if _OURS.fullmatch(old.name) and old.name not in current:
            old.unlink()


def write_tensor_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write one file of safetensors, durably.

    Args:
        path: Is written over if it is there.
        tensors: By name; dense, on any device. They are stored one by one, shared memory or not.
        metadata: Texts for the file's header.
    """
    # One copy at a time where a tensor isn't on the CPU or not contiguous; `held` keeps the memory until it
    # is written.
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.numel() * tensor.dtype.itemsize,
        )
        for name, tensor in held.items()
    }
    path.touch()
    mode = (
        path.stat().st_mode
    )  # as the user's umask makes new files; safetensors would leave them to the owner alone
    safetensors.serialize_file(specs, path, metadata)
    path.chmod(mode)
    flush(path)


def flush(path: Path) -> None:
    """Make sure that ``path`` survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
