"""Files of the caller's own in a checkpoint: durable and checked as everything else in it.

They are written by other programs' code, such as ``save_pretrained``, into a directory beside the checkpoint
to be. A save syncs them, notes their checksums and moves them into its stage, so that they appear and vanish
with the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from accelfn.checkpoint.background import CollectivePhases
from accelfn.checkpoint.commit import check_target, leftover_path, make_nonce
from accelfn.checkpoint.disk import (
    REAL_DISK,
    Disk,
    make_folders,
    naming,
    open_regular,
    opened,
    remove_tree,
    walk,
)
from accelfn.checkpoint.files import checksums
from accelfn.checkpoint.manifest import Attachment, is_own_name
from accelfn.comm import catch
from accelfn.context import Context
from accelfn.errors import CheckpointError


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
        make_folders(disk, os.path.dirname(target))
        path = leftover_path(target, "files", make_nonce())
        with naming(path):
            disk.make_folder(path)
        return path

    made, error = catch(make)
    phases = CollectivePhases(ctx, "folder_for_files")
    every = [json.loads(one) for one in phases.gather("make", json.dumps([ctx.world.node_rank, made]), error)]
    node = ctx.world.node_rank if ctx.project.save_on_each_node else every[0][0]
    path = next(place for number, place in every if number == node and place is not None)
    try:
        yield Path(path)
    finally:
        if made is not None:
            with suppress(OSError):  # what stays is recognised by the next save
                remove_tree(disk, made)


def writes_here(ctx: Context) -> bool:
    """Return whether this rank is the one that makes directories: the main process, of its node or of all."""
    return ctx.is_local_main_process if ctx.project.save_on_each_node else ctx.is_main_process


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
        top, why = name.partition("/")[0], ""
        if is_own_name(top):
            why = f"it has a file {top} of its own. Give it another name"
        elif status.kind not in ("file", "directory"):
            why = f"it is {'a link' if status.kind == 'link' else 'no plain file'}. Put the file itself there"
        elif "\\" in name:
            why = "its name has a backslash, which other systems take for a directory. Give it another name"
        if why:
            raise CheckpointError(
                f"save_state: {os.path.join(path, name)} can't become part of the checkpoint: {why}."
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
                descriptor, size = open_regular(disk, opened_folder, name)
                try:
                    sums = checksums(disk, descriptor, size)
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
    with opened(disk, folder) as opened_folder:
        rest = sorted(disk.names(opened_folder))
    for name in rest:
        disk.rename(os.path.join(folder, name), os.path.join(stage, name))
    return found
