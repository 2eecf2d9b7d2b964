"""Check every byte of a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from accelfn.checkpoint.attachments import check_attachments
from accelfn.checkpoint.disk import REAL_DISK, Disk
from accelfn.checkpoint.find import OpenCheckpoint, check_names, read_checkpoint
from accelfn.checkpoint.tensor_reader import expected_entries, verify_tensor_file

__all__ = ("CheckpointReport", "verify_checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What a sound checkpoint is.

    Attributes:
        path: Its directory.
        files: Names of its files of tensors that are in the directory.
        attachments: Paths of the files in it that the caller had put there.
        num_bytes: Of all these files, all of which were read.
        num_tensors: In the checkpoint as a whole.
        step: What its writer counted; None where nothing was said.
        metric: What its writer measured; None where nothing was said.
        world_size: Ranks that saved it.
        num_nodes: Nodes with a disk of their own; 1 where they share one.
        generation: How many checkpoints were written over in this place before.
        created_by: Name and version of the program.
    """

    path: Path
    files: tuple[str, ...]
    attachments: tuple[str, ...]
    num_bytes: int
    num_tensors: int
    step: int | None
    metric: float | None
    world_size: int
    num_nodes: int
    generation: int
    created_by: str


def verify_checkpoint(directory: str | os.PathLike[str], *, disk: Disk = REAL_DISK) -> CheckpointReport:
    """Check that a checkpoint is, bit for bit, what was written.

    That is: the manifest and its checksum; that all files are there and no others; of each file the length,
    the header and every byte of every tensor, and every byte of files that the caller had put there. Memory
    for it is a few MB.

    Where nodes have disks of their own, the files of another node are checked if they are there.

    Ranks: any; nothing is exchanged.

    Args:
        directory: The checkpoint, or a directory with checkpoints, of which the newest is checked.
        disk: The operations on files.

    Returns:
        What it holds.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
        DamagedCheckpointError: Something isn't what was written; with the file, and the tensor.
        NotAvailableError: A newer version of accelfn has written it.
        OSError: A file can't be read.
    """

    def check(checkpoint: OpenCheckpoint) -> CheckpointReport:
        manifest = checkpoint.manifest
        names = check_names(disk, checkpoint)
        expected = expected_entries(manifest)
        for name in names:
            verify_tensor_file(disk, checkpoint.folder, name, manifest.files[name], expected[name])
        check_attachments(disk, checkpoint)
        return CheckpointReport(
            path=Path(checkpoint.path),
            files=names,
            attachments=tuple(sorted(manifest.attachments)),
            num_bytes=sum(manifest.files[name].size for name in names)
            + sum(one.size for one in manifest.attachments.values()),
            num_tensors=len(manifest.tensors),
            step=manifest.step,
            metric=manifest.metric,
            world_size=manifest.world_size,
            num_nodes=manifest.num_nodes,
            generation=manifest.generation,
            created_by=manifest.created_by,
        )

    return read_checkpoint(disk, directory, check)
