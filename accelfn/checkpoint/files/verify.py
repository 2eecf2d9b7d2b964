"""Check every byte of a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from accelfn.checkpoint.files.commit import find_extra
from accelfn.checkpoint.files.disk import REAL_DISK, Disk
from accelfn.checkpoint.files.find import OpenCheckpoint, check_names, read_checkpoint
from accelfn.checkpoint.files.manifest import MANIFEST
from accelfn.checkpoint.files.tensor_reader import expected_entries, verify_tensor_file
from accelfn.checkpoint.state.attachments import check_attachment, check_attachments
from accelfn.errors import DamagedCheckpointError

__all__ = ("CheckpointReport", "FileReport", "verify_checkpoint", "verify_files")


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

    That is: the manifest and its checksum; that all files are there; of each file the length, the header and
    every byte of every tensor, and every byte of files that the caller of ``save_state`` had put there.
    Memory for it is a few MB. Of files that aren't part of the checkpoint a warning is given.

    Where nodes have disks of their own, the files of another node are checked if they are there. What the
    tree means isn't looked at: that a manifest was made to harm is found when it is loaded.

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


class FileReport(NamedTuple):
    """What a file of a checkpoint is.

    Attributes:
        name: In the checkpoint.
        size: In bytes, as the manifest has it; of the manifest itself, and of an extra file, as it is.
        error: What is wrong with it; "" where it is sound.
        node: On whose disk it lies, where it isn't here.
        is_extra: Whether it isn't part of the checkpoint, so that nothing is known of it.
    """

    name: str
    size: int
    error: str = ""
    node: int | None = None
    is_extra: bool = False


def verify_files(
    directory: str | os.PathLike[str], *, disk: Disk = REAL_DISK
) -> tuple[Path, tuple[FileReport, ...]]:
    """Check a checkpoint as :func:`verify_checkpoint` does, and go on after a file that is damaged.

    Ranks: any; nothing is exchanged.

    Args:
        directory: The checkpoint, or a directory with checkpoints, of which the newest is checked.
        disk: The operations on files.

    Returns:
        The checkpoint's directory, and its files: the manifest, tensors, those that the caller of
        ``save_state`` had put there, and those that aren't part of it.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
        DamagedCheckpointError: The manifest can't be read, so that nothing is known of the other files.
        NotAvailableError: A newer version of accelfn has written it.
        OSError: A file can't be read.
    """
    place = Path(directory)
    rows: list[FileReport] = []

    def check(checkpoint: OpenCheckpoint) -> None:
        nonlocal place
        place = Path(checkpoint.path)
        rows[:] = _check_each(disk, checkpoint)
        error = next((row.error for row in rows if row.error), None)
        if error is not None:  # looked at again, where another program has replaced the checkpoint meanwhile
            raise DamagedCheckpointError(error)

    try:
        read_checkpoint(disk, directory, check)
    except DamagedCheckpointError:
        if not rows:
            raise
    return place, tuple(rows)


def _check_each(disk: Disk, checkpoint: OpenCheckpoint) -> list[FileReport]:
    manifest = checkpoint.manifest
    expected = expected_entries(manifest)
    there = set(disk.names(checkpoint.folder))

    def size_of(name: str) -> int:
        return disk.status(os.path.join(checkpoint.path, name)).size

    rows = [FileReport(MANIFEST, size_of(MANIFEST))]
    for name, file in sorted(manifest.files.items()):
        error, node = "", None
        if name in there:
            try:
                verify_tensor_file(disk, checkpoint.folder, name, file, expected[name])
            except DamagedCheckpointError as found:
                error = str(found)
        elif file.node in (None, manifest.node):
            error = f"{os.path.join(checkpoint.path, name)} is missing, and the manifest names it."
        else:
            node = file.node
        rows.append(FileReport(name, file.size, error, node))
    for name, stored in sorted(manifest.attachments.items()):
        error = ""
        try:
            check_attachment(disk, checkpoint.folder, name, stored)
        except DamagedCheckpointError as found:
            error = str(found)
        rows.append(FileReport(name, stored.size, error))
    extra = find_extra(disk, checkpoint.path, there - {MANIFEST}, {*manifest.files, *manifest.attachments})
    return rows + [FileReport(name, size_of(name), is_extra=True) for name in extra]
