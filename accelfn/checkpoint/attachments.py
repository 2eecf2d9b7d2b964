"""The caller's own files in a checkpoint: as durable, and as well verified, as everything else in it.

Other programs' code, such as ``save_pretrained``, writes them into a directory. A save renames that directory
into the checkpoint, syncs the files and notes their checksums in the manifest, so that they appear and vanish
with the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from accelfn.checkpoint.background import CollectivePhases
from accelfn.checkpoint.commit import check_target, claim, scratch_folder
from accelfn.checkpoint.manifest import Attachment
from accelfn.checkpoint.read import checksums
from accelfn.comm import catch
from accelfn.context import Context
from accelfn.errors import CheckpointError
from accelfn.storage.address import as_path, is_address
from accelfn.storage.disk import (
    REAL_DISK,
    Disk,
    copy_file,
    is_there,
    make_folders,
    naming,
    open_regular,
    opened,
    walk,
)
from accelfn.storage.object_store import disk_at


@contextmanager
def folder_for_files(ctx: Context, directory: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """Make a directory for files that :func:`accelfn.save_state` puts into a checkpoint.

    It is beside the future checkpoint. It is removed after the block, or by a later call if the program was
    killed. For a checkpoint in an object store it is a temporary directory of the main process's machine.

    Ranks: every rank of ``ctx``. All of them may write to it, where they see it.

    Args:
        ctx: The world.
        directory: The future checkpoint.

    Raises:
        CheckpointError: No checkpoint can be saved to ``directory``.
        OSError: The directory can't be made.
        RemoteRankError: One of these happened on another rank.

    >>> import tempfile, accelfn as af
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with folder_for_files(Context(), f"{place}/best") as folder:
    ...         _ = (folder / "notes.txt").write_text("the best so far")
    ...         path = af.save_state(Context(), f"{place}/best", {"step": 7}, files=folder)
    ...     (af.checkpoint.find_files(Context(), path) / "notes.txt").read_text()
    'the best so far'
    """
    target = as_path(directory)
    with ExitStack() as stack:

        def make() -> str | None:
            if not ctx.is_main_process:
                return None
            disk = disk_at(target)
            check_target(disk, target)
            if is_address(target):
                return stack.enter_context(TemporaryDirectory(prefix="accelfn-"))
            make_folders(disk, os.path.dirname(target))
            return stack.enter_context(scratch_folder(disk, str(target)))

        made, error = catch(make)
        phases = CollectivePhases(ctx, "folder_for_files")
        yield Path(json.loads(phases.gather("make", json.dumps(made), error)[0]))


def claim_folder(directory: Path) -> Path:
    """Make the directory of a future checkpoint, so that programs can write files of their own there before.

    They are no part of the checkpoint, which is saved beside them.

    Ranks: local.

    Raises:
        CheckpointError: No checkpoint can be saved there.
        OSError: It can't be made.
    """
    claim(disk_at(directory), directory)
    return directory


def check_attachable(disk: Disk, folder: str, directory: Path) -> None:
    """Check that everything in a directory can become part of a checkpoint.

    Args:
        disk: Of the checkpoint.
        folder: The directory, on that disk, or on the system's for an object store.
        directory: The checkpoint.

    Raises:
        CheckpointError: Something is neither a file nor a directory, or its name has a backslash.
        OSError: The directory can't be read.
    """
    for name, status in walk(REAL_DISK if is_address(directory) else disk, folder):
        why = ""
        if status.kind not in ("file", "directory"):
            why = f"it is {'a link' if status.kind == 'link' else 'no plain file'}. Put the file itself there"
        elif "\\" in name:
            why = "its name has a backslash, which other systems take for a directory. Rename it"
        if why:
            raise CheckpointError(
                f"save_state: {os.path.join(folder, name)} can't become part of the checkpoint: {why}."
            )


def move_files(disk: Disk, folder: str, target: str) -> None:
    """Move a directory into a checkpoint; to an object store its files are uploaded.

    Raises:
        OSError: With the file's name.
    """
    if not is_address(target):
        disk.rename(folder, target)
        return
    for name, status in walk(REAL_DISK, folder):
        if status.kind == "file":
            copy_file(REAL_DISK, os.path.join(folder, name), disk, os.path.join(target, name))


@contextmanager
def local_files(folder: Path) -> Generator[Path, None, None]:
    """Copy the files that :func:`find_files` finds in an object store to a disk for a ``with`` block.

    Those on a disk are yielded where they are. Ranks: local.

    Raises:
        OSError: With the file's name.
    """
    if not is_address(folder):
        yield folder
        return
    disk, source = disk_at(folder), str(folder)
    with TemporaryDirectory(prefix="accelfn-") as copy:
        for name, status in walk(disk, source) if is_there(disk, source) else ():
            path = os.path.join(copy, name)
            if status.kind == "file":
                copy_file(disk, os.path.join(source, name), REAL_DISK, path)
            else:
                os.mkdir(path)
        yield Path(copy)


def sync_attachments(disk: Disk, path: str, top: str) -> dict[str, Attachment]:
    """Make the caller's files durable, and compute their checksums.

    Args:
        disk: To write to.
        path: The checkpoint's directory.
        top: The name of the directory of these files in it.

    Raises:
        CheckpointError: A file changes meanwhile.
        OSError: With the file's name.
    """
    found: dict[str, Attachment] = {}
    folders = [os.path.join(path, top)]
    with opened(disk, path) as folder:
        for name, status in walk(disk, folders[0], f"{top}/"):
            place = os.path.join(path, name)
            if status.kind == "directory":
                folders.append(place)
                continue
            with naming(place):
                descriptor, size = open_regular(disk, folder, name)
                try:
                    sums = checksums(disk, descriptor, size)
                    disk.sync(descriptor)
                finally:
                    disk.close(descriptor)
            if sums is None:
                raise CheckpointError(f"save_state: {place} became shorter while it was read.")
            found[name] = Attachment(size, sums)
    for place in folders:
        with naming(place):
            disk.sync_folder(place)
    return found
