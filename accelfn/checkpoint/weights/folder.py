"""A folder of bare weights, which appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress

import torch

from accelfn.checkpoint.files.commit import clean, leftover_path, make_nonce
from accelfn.checkpoint.files.disk import REAL_DISK, Disk, make_folders, naming, remove_tree, write_file
from accelfn.checkpoint.files.stored_dtype import SAFETENSORS_NAMES
from accelfn.checkpoint.files.tensor_file import new_entry, write_tensors
from accelfn.checkpoint.weights.plan import parse_size, plan_weights

__all__ = ("write_weights",)

_INDEX = "model.safetensors.index.json"


def write_weights(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    max_shard_size: int | str = "10GB",
    disk: Disk = REAL_DISK,
) -> tuple[str, ...]:
    """Write tensors as a new folder with ``model.safetensors``, or several files with their index.

    Tensors that are the same memory are stored once; the other names stand in the metadata of the file.

    Ranks: local; one process writes.

    Args:
        directory: Of the folder. Nothing, or an empty directory, may stand there.
        tensors: By name: dense, whole.
        max_shard_size: Largest size of a file, in bytes or such as ``"5GB"``.
        disk: The operations on files.

    Returns:
        The names of the files.

    Raises:
        ValueError: safetensors has no such dtype, or the size has another form. All tensors are listed.
        OSError: It can't be written, or something stands there. Nothing is left behind.
    """
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_NAMES]
    if odd:
        listed = ", ".join(f"{name} ({tensors[name].dtype})" for name in odd[:5])
        raise ValueError(
            f"safetensors has no dtype for {listed}. Convert them to one that it has, such as float32."
        )
    plan = plan_weights(tensors, parse_size(max_shard_size))
    path = os.path.abspath(directory)
    stage = leftover_path(path, "staging", make_nonce())
    make_folders(disk, os.path.dirname(path))
    clean(disk, *os.path.split(path))
    with naming(stage):
        disk.make_folder(stage)
    try:
        stored_in = {name: file for file, names in plan.files for name in names}
        for file, names in plan.files:
            tied = {name: stored for name, stored in plan.tied if stored_in[stored] == file}
            entries = [new_entry(name, tensors[name]) for name in names]
            write_tensors(disk, os.path.join(stage, file), entries, {"format": "pt", **tied})
        files = [file for file, _ in plan.files]
        if len(files) > 1:
            index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": stored_in}
            content = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_file(disk, os.path.join(stage, _INDEX), content.encode())
            files.append(_INDEX)
        disk.sync_folder(stage)
        disk.rename(stage, path)
        disk.sync_folder(os.path.dirname(path))
    except BaseException:
        with suppress(OSError):
            remove_tree(disk, stage)
        raise
    return tuple(files)
