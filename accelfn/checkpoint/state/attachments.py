"""Files of the caller's own in a checkpoint: durable and checked as everything else in it.

They are written by other programs' code, such as ``save_pretrained``, into a directory beside the checkpoint
to be. A save syncs them, notes their checksums and moves them into its stage, so that they appear and vanish
with the checkpoint.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from accelfn.checkpoint.files.commit import check_target, leftover_path, make_nonce
from accelfn.checkpoint.files.disk import (
    REAL_DISK,
    Disk,
    Folder,
    make_folders,
    naming,
    open_regular,
    opened,
    read_exactly,
    remove_tree,
    walk,
)
from accelfn.checkpoint.files.find import OpenCheckpoint
from accelfn.checkpoint.files.manifest import CHUNK_BYTES, Attachment, is_own_name
from accelfn.checkpoint.state.phases import CollectivePhases
from accelfn.comm import catch
from accelfn.context import Context
from accelfn.errors import CheckpointError, DamagedCheckpointError

__all__ = (
    "check_attachment",
    "check_attachments",
    "find_attachments",
    "folder_for_files",
    "make_leftover_folder",
    "move_content",
    "take_attachments",
    "writes_here",
)

_READ_BYTES = 1 << 20


@contextmanager
def folder_for_files(ctx: Context, directory: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """Make a directory for files that shall be in a checkpoint, for :func:`accelfn.save_state` to take.

    It lies beside the checkpoint to be, and is gone after the block, or when a later save finds that its
    program is dead.

    Ranks: every rank of ``ctx``. All of them may write to it, those of a node to that of the node where
    ``ProjectConfiguration.save_on_each_node`` is set.

    Args:
        ctx: The world.
        directory: The checkpoint to be.

    Raises:
        CheckpointError: ``directory`` can be no checkpoint.
        OSError: Nothing can be written there.
        RemoteRankError: One of these happened on another rank.

    >>> import tempfile, accelfn as af
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with folder_for_files(Context(), f"{place}/best") as folder:
    ...         _ = (folder / "notes.txt").write_text("the best so far")
    ...         path = af.save_state(Context(), f"{place}/best", {"step": 7}, files=folder)
    ...     (path / "notes.txt").read_text()
    'the best so far'
    """
    disk, target = REAL_DISK, os.path.abspath(directory)

    def make() -> str | None:
        if not writes_here(ctx):
            return None
        check_target(disk, target)
        return make_leftover_folder(disk, target)

    made, error = catch(make)
    phases = CollectivePhases(ctx, "folder_for_files")
    said = [json.loads(one) for one in phases.gather("make", json.dumps([ctx.world.node_rank, made]), error)]
    node = ctx.world.node_rank if ctx.project.save_on_each_node else said[0][0]
    path = next(place for number, place in said if number == node and place is not None)
    try:
        yield Path(path)
    finally:
        if made is not None:
            with suppress(OSError):  # what stays is recognised by the next save
                remove_tree(disk, made)


def writes_here(ctx: Context) -> bool:
    """Return whether this rank is the one that makes directories: the main process, of its node or of all."""
    return ctx.is_local_main_process if ctx.project.save_on_each_node else ctx.is_main_process


def make_leftover_folder(disk: Disk, directory: str) -> str:
    """Make a directory beside ``directory`` that later saves remove when this program is dead."""
    make_folders(disk, os.path.dirname(directory))
    path = leftover_path(directory, "files", make_nonce())
    with naming(path):
        disk.make_folder(path)
    return path


def find_attachments(disk: Disk, folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """List the files in a directory that shall become part of a checkpoint, by path.

    Raises:
        CheckpointError: There are links or other things that are no files, or names that a checkpoint's own
            files have.
        OSError: The directory can't be read.
    """
    path = os.path.abspath(folder)
    names: list[str] = []
    for name, status in walk(disk, path):
        top = name.partition("/")[0]
        if is_own_name(top):
            raise CheckpointError(
                f"save_state: {os.path.join(path, name)} can't become part of the checkpoint: it has a file "
                f"{top} of its own. Give it another name."
            )
        if status.kind not in ("file", "directory"):
            what = "a link" if status.kind == "link" else "no plain file"
            raise CheckpointError(
                f"save_state: {os.path.join(path, name)} can't become part of the checkpoint: it is {what}. "
                "Put the file itself there."
            )
        if "\\" in name:
            raise CheckpointError(
                f"save_state: {os.path.join(path, name)} can't become part of the checkpoint: its name has a "
                "backslash, which other systems take for a directory. Give it another name."
            )
        if status.kind == "file":
            names.append(name)
    return tuple(names)


def take_attachments(disk: Disk, folder: str, names: Sequence[str], stage: str) -> dict[str, Attachment]:
    """Move files into a stage, with all but their topmost names durable; that is for the stage's own sync.

    Args:
        disk: To write to.
        folder: In which they are. It is empty afterwards.
        names: Of ``find_attachments``.
        stage: Of the save, on the same disk.

    Returns:
        What the manifest has to say of them.

    Raises:
        CheckpointError: A file changes meanwhile.
        OSError: With the file's name.
    """
    found: dict[str, Attachment] = {}
    with opened(disk, folder) as opened_folder:
        for name in names:
            path = os.path.join(folder, name)
            with naming(path):
                descriptor, size = open_regular(disk, opened_folder, name, to_sync=True)
                try:
                    sums = _checksums(disk, descriptor, size)
                    disk.sync(descriptor)
                finally:
                    disk.close(descriptor)
            if sums is None:
                raise CheckpointError(f"save_state: {path} became shorter while it was read.")
            found[name] = Attachment(size, sums)
    needed = {name[:place] for name in names for place, text in enumerate(name) if text == "/"}
    inner = [name for name, status in walk(disk, folder) if status.kind == "directory"]
    for name in reversed(inner):  # those below first
        if name in needed:
            disk.sync_folder(os.path.join(folder, name))
        else:
            disk.remove_folder(os.path.join(folder, name))
    move_content(disk, folder, stage)
    return found


def move_content(disk: Disk, folder: str, target: str) -> None:
    """Move all that is in a directory to another one of the same disk."""
    with opened(disk, folder) as opened_folder:
        names = sorted(disk.names(opened_folder))
    for name in names:
        disk.rename(os.path.join(folder, name), os.path.join(target, name))


def _checksums(disk: Disk, descriptor: int, size: int) -> tuple[int, ...] | None:
    """Return the checksum of each chunk of a file; None where it ends before ``size``."""
    sums: list[int] = []
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    for place in range(0, size, _READ_BYTES):
        part = buffer[: min(_READ_BYTES, size - place)]
        if not read_exactly(disk, descriptor, part, place):
            return None
        if place % CHUNK_BYTES == 0:
            sums.append(0)
        sums[-1] = zlib.crc32(part, sums[-1])
    return tuple(sums)


def check_attachments(disk: Disk, checkpoint: OpenCheckpoint) -> None:
    """Check every byte of the caller's files in a checkpoint, with little memory.

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
            is_sound = size == stored.size and _checksums(disk, descriptor, size) == stored.crc32
    finally:
        disk.close(descriptor)
    if not is_sound:
        raise DamagedCheckpointError(
            f"{path} is damaged: its bytes aren't those that were written. Take another copy, or an older "
            "checkpoint.",
            name,
        )
