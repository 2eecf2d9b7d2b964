"""Write and read small checkpoints through the package's internal functions."""

import os
from collections.abc import Mapping

import torch

from accelfn.checkpoint.attachments import check_attachable, sync_attachments
from accelfn.checkpoint.commit import abandon, begin_save, clean, commit, end_save, write_manifest
from accelfn.checkpoint.disk import REAL_DISK, Disk
from accelfn.checkpoint.files import Box, new_entry, read_boxes, write_tensors
from accelfn.checkpoint.find import OpenCheckpoint, read_checkpoint
from accelfn.checkpoint.manifest import Manifest, Piece, StoredFile, StoredTensor

Tensors = Mapping[str, torch.Tensor]


def write_parts(
    disk: Disk, path: str, ranks: tuple[Tensors, ...], suffix: str = "", **fields: object
) -> Manifest:
    """Write one file of tensors for each rank, and return the manifest."""
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for rank, mine in enumerate(ranks):
        name = f"tensors-{rank:05d}{suffix}.safetensors"
        written = write_tensors(
            disk,
            os.path.join(path, name),
            [new_entry(key, tensor) for key, tensor in mine.items()],
            {"format": "pt"},
        )
        files[name] = StoredFile(written.size, written.header_crc32)
        for key, tensor in mine.items():
            piece = Piece(name, key, (0,) * tensor.dim(), tuple(tensor.shape), written.crc32[key])
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[key] = StoredTensor(dtype, tuple(tensor.shape), (piece,))
    tree = {name: {"$": "tensor", "name": name} for name in tensors}
    return Manifest(tree=tree, tensors=tensors, files=files, world_size=len(ranks), **fields)  # pyright: ignore[reportArgumentType]


def save_small(
    directory: str | os.PathLike[str],
    *ranks: Tensors,
    disk: Disk = REAL_DISK,
    files: str | None = None,
    **fields: object,
) -> None:
    """Save a checkpoint as one process would for all ranks, with the files of a directory in it."""
    save = begin_save(disk, directory)
    try:
        clean(disk, save.path)
        if files is not None:
            check_attachable(disk, files)
            disk.rename(files, os.path.join(save.path, save.attachments))
            fields["attachments"] = sync_attachments(disk, save.path, save.attachments)
        write_manifest(disk, save, write_parts(disk, save.path, ranks, save.suffix, **fields))
        commit(disk, save)
    except BaseException:
        abandon(disk, save)
        raise
    end_save(disk, save)


def load_small(directory: str | os.PathLike[str], *, disk: Disk = REAL_DISK) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint."""

    def read(checkpoint: OpenCheckpoint) -> dict[str, torch.Tensor]:
        boxes = [
            Box(name, stored.dtype, piece)
            for name, stored in checkpoint.manifest.tensors.items()
            for piece in stored.pieces
        ]
        tensors = read_boxes(disk, checkpoint.folder, checkpoint.manifest, boxes)
        return {box.name: tensor for box, tensor in zip(boxes, tensors, strict=True)}

    return read_checkpoint(disk, directory, read)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
        )
    )
