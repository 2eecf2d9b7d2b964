"""Write a checkpoint whose parts are all in this process."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from accelfn import __version__
from accelfn.checkpoint.files.commit import (
    abandon,
    begin_stage,
    check_free,
    check_target,
    make_nonce,
    publish,
    write_manifest,
)
from accelfn.checkpoint.files.disk import REAL_DISK, Disk
from accelfn.checkpoint.files.manifest import Json, Manifest, Piece, StoredFile, StoredTensor
from accelfn.checkpoint.files.tensor_file import new_entry, write_tensors

__all__ = ("write_whole",)

_FILE = "tensors-00000.safetensors"


def write_whole(
    directory: str | os.PathLike[str],
    tree: Json,
    tensors: Mapping[str, torch.Tensor],
    *,
    random: Json = None,
    world_size: int = 1,
    step: int | None = None,
    metric: float | None = None,
    disk: Disk = REAL_DISK,
) -> Path:
    """Write a checkpoint from documents and tensors. It appears by one rename, or not at all.

    Ranks: local; one process writes.

    Args:
        directory: Of the checkpoint. One that is there is replaced.
        tree: Document of the tree, also with parts by rank.
        tensors: What both documents name: whole, dense.
        random: Document of the random states, by rank; None where there are none.
        world_size: Ranks that the documents are of.
        step: What was counted.
        metric: What was measured.
        disk: The operations on files.

    Raises:
        CheckpointError: The directory can't be a checkpoint.
        OSError: It can't be written. Nothing is left behind.
    """
    path = Path(os.path.abspath(os.fspath(directory)))
    check_target(disk, path)
    entries = [new_entry(name, tensor) for name, tensor in tensors.items()]
    check_free(disk, path, sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values()))
    stage = begin_stage(disk, path, make_nonce())
    try:
        files: dict[str, StoredFile] = {}
        sums: Mapping[str, tuple[int, ...]] = {}
        if entries:
            written = write_tensors(disk, os.path.join(stage.path, _FILE), entries, {"format": "pt"})
            files, sums = {_FILE: StoredFile(written.size, written.header_crc32)}, written.crc32
        said = json.dumps([tree, random, sums, stage.generation, step])
        manifest = Manifest(
            tree=tree,
            tensors={name: _stored(name, tensor, sums[name]) for name, tensor in tensors.items()},
            files=files,
            random=random,
            identity=hashlib.sha256(said.encode()).hexdigest()[:32],
            step=step,
            metric=metric,
            world_size=world_size,
            generation=stage.generation,
            created_by=f"accelfn {__version__}",
        )
        write_manifest(disk, stage, manifest)
        publish(disk, stage)
    except BaseException:
        abandon(disk, stage)
        raise
    return path


def _stored(name: str, tensor: torch.Tensor, sums: tuple[int, ...]) -> StoredTensor:
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(dtype, shape, (Piece(_FILE, name, (0,) * len(shape), shape, sums),))
