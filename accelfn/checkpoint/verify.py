"""Verify a checkpoint: read every byte of it, and compare it with what was written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from accelfn.checkpoint.commit import find_extra
from accelfn.checkpoint.find import OpenCheckpoint, check_names, read_checkpoint
from accelfn.checkpoint.manifest import MANIFEST, Attachment
from accelfn.checkpoint.read import all_boxes, checksums, files_by_rank, lacking, verify_tensor_file
from accelfn.errors import DamagedCheckpointError
from accelfn.storage.address import as_path
from accelfn.storage.disk import Disk, Folder, naming, open_regular
from accelfn.storage.object_store import disk_at


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """The description of a sound checkpoint.

    Attributes:
        path: Its directory.
        files: Names of its files of tensors.
        attachments: Paths in it of the files that the caller of ``save_state`` put there.
        num_bytes: The size of all these files, all of which were read.
        num_tensors: The number of tensors.
        step: The step that was passed; None if none was.
        metric: The metric that was passed; None if none was.
        world_size: The number of ranks that saved it.
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
    created_by: str


def verify_checkpoint(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> CheckpointReport:
    """Check that a checkpoint is, bit for bit, what was written.

    It checks the manifest and its checksum; that all files exist; the length, the header and every byte of
    each file of tensors, and every byte of the caller's files. It needs a few MB of memory. Files that aren't
    part of the checkpoint cause a warning. The meaning of the tree isn't checked: a maliciously made manifest
    is detected when it is loaded.

    Ranks: any; nothing is exchanged.

    Args:
        directory: The checkpoint, or a directory with checkpoints, of which the newest is checked.
        disk: The operations on files; None for those of the system, or of an object store.

    Returns:
        Its description.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
        DamagedCheckpointError: Something isn't what was written; with the file, and the tensor.
        NotAvailableError: A newer version of accelfn has written it.
        OSError: A file can't be read.
    """
    own = disk or disk_at(directory)

    def check(checkpoint: OpenCheckpoint) -> CheckpointReport:
        manifest = checkpoint.manifest
        check_names(own, checkpoint)
        rows = _check_each(own, checkpoint)
        for _, error in rows:
            if error is not None:
                raise error
        read = [row for row, _ in rows[1:] if not row.is_extra]
        return CheckpointReport(
            path=as_path(checkpoint.path),
            files=tuple(row.name for row in read if row.name in manifest.files),
            attachments=tuple(sorted(manifest.attachments)),
            num_bytes=sum(row.size for row in read),
            num_tensors=len(manifest.tensors),
            step=manifest.step,
            metric=manifest.metric,
            world_size=manifest.world_size,
            created_by=manifest.created_by,
        )

    return read_checkpoint(own, directory, check)


class FileReport(NamedTuple):
    """The result of checking a file of a checkpoint.

    Attributes:
        name: Its path in the checkpoint.
        size: In bytes, from the manifest; for the manifest itself and extra files, from the disk.
        error: What is wrong with it; "" if it is sound.
        is_extra: Whether it isn't part of the checkpoint, so that it can't be checked.
    """

    name: str
    size: int
    error: str = ""
    is_extra: bool = False


def verify_files(
    directory: str | os.PathLike[str], *, disk: Disk | None = None
) -> tuple[Path, tuple[FileReport, ...]]:
    """Check a checkpoint as :func:`verify_checkpoint` does, and continue after a damaged file.

    Ranks: any; nothing is exchanged.

    Args:
        directory: The checkpoint, or a directory with checkpoints, of which the newest is checked.
        disk: The operations on files; None for those of the system, or of an object store.

    Returns:
        The checkpoint's directory, and its files: the manifest, tensors, the caller's files, and extra ones.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
        DamagedCheckpointError: The manifest can't be read, so that the other files can't be checked.
        NotAvailableError: A newer version of accelfn has written it.
        OSError: A file can't be read.
    """
    rows: list[_Row] = []
    place, own = Path(directory), disk or disk_at(directory)

    def check(checkpoint: OpenCheckpoint) -> None:
        nonlocal place
        place = as_path(checkpoint.path)
        rows[:] = _check_each(own, checkpoint)
        for _, error in rows:
            if error is not None:  # checked again if another program has replaced it meanwhile
                raise error

    try:
        read_checkpoint(own, directory, check)
    except DamagedCheckpointError:
        if not rows:
            raise
    return place, tuple(row for row, _ in rows)


_Row: TypeAlias = "tuple[FileReport, DamagedCheckpointError | None]"


def _check_each(disk: Disk, checkpoint: OpenCheckpoint) -> list[_Row]:
    manifest, folder = checkpoint.manifest, checkpoint.folder
    boxes = all_boxes(manifest)
    there = set(disk.names(folder))

    def size_of(name: str) -> int:
        return disk.status(os.path.join(checkpoint.path, name)).size

    def check(name: str, size: int, verify: Callable[[], None]) -> None:
        error = None
        try:
            verify()
        except DamagedCheckpointError as found:
            error = found
        rows.append((FileReport(name, size, str(error or "")), error))

    rows: list[_Row] = [(FileReport(MANIFEST, size_of(MANIFEST)), None)]
    for rank, names in files_by_rank(manifest).items():
        begin, left = len(rows), boxes[rank]
        for name in names:
            file = manifest.files[name]
            check(name, file.size, partial(verify_tensor_file, disk, folder, name, file, left))
        if left and not any(error for _, error in rows[begin:]):
            row, missing = rows[-1][0], lacking(folder, names[-1], left)
            rows[-1] = row._replace(error=str(missing)), missing
    for name, stored in sorted(manifest.attachments.items()):
        check(name, stored.size, partial(check_attachment, disk, folder, name, stored))
    extra = find_extra(disk, checkpoint.path, there, manifest)
    return rows + [(FileReport(name, size_of(name), is_extra=True), None) for name in extra]


def check_attachments(disk: Disk, checkpoint: OpenCheckpoint) -> None:
    """Check every byte of the caller's files in a checkpoint, in little memory.

    Raises:
        DamagedCheckpointError: A file is missing or isn't what was written.
        OSError: A file can't be read.
    """
    for name, stored in sorted(checkpoint.manifest.attachments.items()):
        check_attachment(disk, checkpoint.folder, name, stored)


def check_attachment(disk: Disk, folder: Folder, name: str, stored: Attachment) -> None:
    """Check every byte of one of these files.

    Raises:
        DamagedCheckpointError: It is missing or isn't what was written.
        OSError: It can't be read.
    """
    path = os.path.join(folder.path, name)
    try:
        descriptor, size = open_regular(disk, folder, name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(
            f"{path} is missing, and the manifest names it. Take another copy, or an older checkpoint.", name
        ) from error
    try:
        with naming(path):
            is_sound = size == stored.size and checksums(disk, descriptor, size) == stored.crc32
    finally:
        disk.close(descriptor)
    if not is_sound:
        raise DamagedCheckpointError(
            f"{path} is damaged: its bytes aren't those that were written. Take another copy, or an older "
            "checkpoint.",
            name,
        )
