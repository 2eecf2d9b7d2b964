"""Commit a checkpoint: write its files beside those of the old one, then swap the manifest by one rename.

A directory is a checkpoint if it has a ``manifest.json``, and the checkpoint is what that file names. A save

1. writes its files under names that the directory doesn't have yet, and syncs each of them;
2. writes the new manifest under a temporary name, syncs it, and syncs the directory;
3. renames it to ``manifest.json``, and syncs the directory (in an object store it is uploaded);
4. removes the files that the new manifest doesn't name.

So at every instant ``manifest.json`` names a complete set of durable files. One save at a time holds the
lock of a directory. Under the lock, files with names of ours that no manifest names were left by a save that
was killed, and are removed. Where there are no locks (Windows, some network file systems), they may be those
of another save that runs, so a save removes only its own files and those of the checkpoint that it replaces.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from accelfn.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    format_manifest,
    is_own_name,
    parse_head,
)
from accelfn.errors import CheckpointError, DamagedCheckpointError, NotAvailableError
from accelfn.storage.address import as_path
from accelfn.storage.disk import (
    Disk,
    is_there,
    make_folders,
    naming,
    opened,
    read_file,
    remove_tree,
    walk,
    write_file,
)

# The manifest of 40,000 tensors has about 8 MB.
MAX_MANIFEST_BYTES = 1 << 30

_COPY_S = 3600.0
# Where there are no locks, what was written so long before a checkpoint is no longer in use.
_KILLED_S = 86400.0
# Each new attempt means that another program has removed the directory since it was made.
_MAX_ATTEMPTS = 10
_TEMPORARY = re.compile(r"manifest-[0-9a-f]{8}\.json")
# What file managers, notebooks, repositories and network file systems leave in directories.
_LITTER = re.compile(
    r"\.DS_Store|\._.*|\.git(keep|ignore|attributes)|\.nfs.*|\.fuse_hidden.*|\.ipynb_checkpoints|Thumbs\.db"
    r"|desktop\.ini|random_states_\d+"  # of a rank that saved after the main process had saved alone
)
_SCRATCH = re.compile(r"\.(?P<name>.+)\.staging-[0-9a-f]{8}", re.DOTALL)


class OpenSave(NamedTuple):
    """A save that holds the lock of a checkpoint's directory.

    Attributes:
        path: The directory.
        token: Eight random hexadecimal digits, for the names of its files.
        suffix: The ending of its files of tensors; "" in a directory that was empty and is locked.
        is_new: Whether the save made the directory.
        release: Releases the lock; None where the file system has no locks.
        replaced: What the manifest named when the save began.
    """

    path: str
    token: str
    suffix: str
    is_new: bool
    release: Callable[[], None] | None
    replaced: frozenset[str] = frozenset()

    @property
    def attachments(self) -> str:
        """The name of the directory of the caller's files."""
        return f"files-{self.token}"


# --- what a directory holds ------------------------------------------------------------------------


def read_head(disk: Disk, path: str, name: str = MANIFEST) -> Manifest | None:
    """Read a checkpoint's manifest without its tree and tensors; None if there is none.

    Args:
        disk: To read from.
        path: The checkpoint.
        name: Of the manifest's file.

    Raises:
        DamagedCheckpointError: The manifest is damaged.
        NotAvailableError: A newer version of accelfn has written it.
    """
    try:
        with opened(disk, path) as folder:
            content = read_file(disk, folder, name, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_head(content, os.path.join(path, name))


def find_missing(disk: Disk, path: str, head: Manifest) -> str | None:
    """Return the name of a file that is missing, or whose length isn't the manifest's; None if none is."""
    sizes = {name: file.size for name, file in (*head.files.items(), *head.attachments.items())}
    for name, size in sorted(sizes.items()):
        try:
            status = disk.status(os.path.join(path, name))
        except (FileNotFoundError, NotADirectoryError):
            return name
        if (status.kind, status.size) != ("file", size):
            return name
    return None


def find_extra(disk: Disk, path: str, names: Iterable[str], head: Manifest) -> list[str]:
    """List what users have put into a checkpoint: of ``names`` in its directory, and below ``files-*``.

    What systems leave everywhere isn't listed, nor are names of ours that the manifest lacks: they belong to
    a save that runs or was killed.
    """
    extra = [name for name in sorted(names) if not is_own_name(name)]
    folders = {name[:end] for name in head.attachments for end, text in enumerate(name) if text == "/"}
    for top in sorted(name for name in folders if "/" not in name):
        with suppress(FileNotFoundError, NotADirectoryError):
            inside = [name for name, _ in walk(disk, os.path.join(path, top), f"{top}/")]
            extra += [name for name in inside if name not in head.attachments and name not in folders]
    return [name for name in extra if not any(map(_LITTER.fullmatch, name.split("/")))]


def extra_in(disk: Disk, path: str) -> list[str]:
    """List what users have put into a directory that may be a checkpoint."""
    try:
        with opened(disk, path) as folder:
            names = disk.names(folder)
        head = read_head(disk, path)
    except (FileNotFoundError, DamagedCheckpointError, NotAvailableError):
        return []
    return [] if head is None else find_extra(disk, path, names, head)


def describe_extra(path: str, extra: Sequence[str]) -> str:
    """Return a sentence that lists a checkpoint's extra files. Pure."""
    return f"{path} contains files that are not part of the checkpoint: {_first_names(extra)}."


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def check_path(operation: str, directory: object) -> None:
    """Check the argument ``directory``.

    Raises:
        TypeError: It is no path.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"{operation}: the directory must be a str or a pathlib.Path, got {type(directory).__name__}. It "
            f"is the argument named directory: write {operation}(..., directory=..., ...)."
        )


def check_target(disk: Disk, directory: str | os.PathLike[str]) -> bool:
    """Check that a checkpoint can be saved to a directory, and return whether that is empty or missing.

    Files such as ``.DS_Store`` and ``.gitkeep`` don't count, and stay where they are.

    Raises:
        CheckpointError: It is no directory, or it holds files and no checkpoint.
        OSError: It can't be read.
    """
    path = str(as_path(directory))
    try:
        with opened(disk, path) as folder:
            names = sorted(disk.names(folder))
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        # Only the last part of the path: a file above it is the operating system's error.
        if not is_there(disk, path):
            raise
        raise CheckpointError(
            f"{path} is not a directory, so no checkpoint is saved to it. Pass another path, or remove it."
        ) from None
    try:
        # A damaged manifest is recognised by files of tensors beside it; another program's has none.
        is_ours = any(is_own_name(name) and name != MANIFEST for name in names)
        is_ours = is_ours or all(map(_LITTER.fullmatch, names)) or read_head(disk, path) is not None
    except (DamagedCheckpointError, NotAvailableError):
        is_ours = False
    if not is_ours:
        raise CheckpointError(
            f"{path} contains files but no checkpoint, so none is saved to it: {_first_names(names)}. "
            "Pass another directory, or an empty one."
        )
    return not names


# --- a save ----------------------------------------------------------------------------------------


def claim(disk: Disk, directory: str | os.PathLike[str]) -> None:
    """Make a directory of a future checkpoint, so that a save accepts what programs write there before.

    Raises:
        CheckpointError: :func:`check_target` refuses it.
        OSError: It can't be made.
    """
    path = str(as_path(directory))
    if check_target(disk, path) or not read_head(disk, path):
        make_folders(disk, path)
        write_file(disk, os.path.join(path, _temporary(secrets.token_hex(4))), b"")


def begin_save(disk: Disk, directory: str | os.PathLike[str]) -> OpenSave:
    """Make a checkpoint's directory, and those above it, and take its lock.

    Raises:
        CheckpointError: :func:`check_target` refuses it, or another save holds the lock.
        OSError: It can't be made.
    """
    path = str(as_path(directory))
    check_target(disk, path)
    is_new, release = _make_and_lock(disk, path)
    try:
        is_empty = check_target(disk, path)  # again: another program may have saved meanwhile
    except BaseException:
        if is_new:
            with suppress(OSError):
                disk.remove_folder(path)
        _release(release)
        raise
    token = secrets.token_hex(4)
    suffix = "" if is_empty and release is not None else f"-{token}"
    replaced: frozenset[str] = frozenset()
    with suppress(OSError, DamagedCheckpointError, NotAvailableError):
        head = read_head(disk, path)
        replaced = frozenset() if head is None else _names_used(head)
    return OpenSave(path, token, suffix, is_new, release, replaced)


def _make_and_lock(disk: Disk, path: str) -> tuple[bool, Callable[[], None] | None]:
    """Make a directory, and take its lock; return whether it was missing, and the function that releases."""
    for attempt in itertools.count(1):
        is_new = not is_there(disk, path)
        try:
            make_folders(disk, path)
            if not is_new and not is_there(disk, os.path.join(path, MANIFEST)):
                with naming(os.path.dirname(path)):  # its own name may not be durable yet
                    disk.sync_folder(os.path.dirname(path))
        except OSError:
            if is_new:
                with suppress(OSError):
                    disk.remove_folder(path)
            raise
        try:
            return is_new, disk.lock(path)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{path} is being written or removed by another program or rank. Save to another directory, "
                "or let one at a time save."
            ) from error
        except FileNotFoundError:  # another save has failed and has removed the directory that it had made
            if attempt == _MAX_ATTEMPTS:
                raise
    raise AssertionError


def clean(disk: Disk, save: OpenSave, committed: Manifest | None = None) -> None:
    """Remove the files of saves that no manifest in a directory names.

    Without a lock, only those of this save and of the checkpoint that it found, and those that were written a
    day before the manifest: by the same clock, that of the disk.

    Args:
        disk: To write to.
        save: Which has the directory.
        committed: The manifest, if it is known to survive a power cut. Otherwise it is read, and the
            directory is synced first: a power cut could bring an older manifest back, and not its files.

    What can't be read or removed stays until the next save. If the manifest is damaged, or there is none any
    more, everything stays.
    """
    with suppress(OSError, DamagedCheckpointError, NotAvailableError):
        head = committed or read_head(disk, save.path)
        if head is None and save.replaced:
            return
        used = _names_used(head)
        with opened(disk, save.path) as folder:
            unused = [name for name in sorted(disk.names(folder)) if is_own_name(name) and name not in used]
        if save.release is None:
            unused = [
                name
                for name in unused
                if save.token in name or name in save.replaced or _is_old(disk, save.path, name)
            ]
        if unused and committed is None:
            disk.sync_folder(save.path)
        for name in unused:
            with suppress(OSError):
                remove_tree(disk, os.path.join(save.path, name))


def _is_old(disk: Disk, path: str, name: str) -> bool:
    """Return whether a file in a checkpoint, or a directory, was written long before the manifest."""
    newest = disk.status(os.path.join(path, MANIFEST)).modified_s
    return _last_change_s(disk, os.path.join(path, name)) < newest - _KILLED_S


def _last_change_s(disk: Disk, path: str) -> float:
    """Return when a file was written, or the last one in a directory: stores have no time of directories."""
    status = disk.status(path)
    if status.kind != "directory":
        return status.modified_s
    return max((one.modified_s for _, one in walk(disk, path)), default=status.modified_s)


def _names_used(head: Manifest | None) -> frozenset[str]:
    """Return the names in a directory that belong to its checkpoint. Pure."""
    if head is None:
        return frozenset((MANIFEST,))
    return frozenset((MANIFEST, *head.files, *(file.partition("/")[0] for file in head.attachments)))


def commit(disk: Disk, save: OpenSave, manifest: Manifest) -> None:
    """Write the manifest under a temporary name, and swap it. When this returns, the new one is durable.

    If the last sync fails, the new one is in place but may not survive a power cut; the old files stay.

    Args:
        disk: To write to.
        save: With all its files written.
        manifest: Of the new checkpoint.

    Raises:
        OSError: With the file's name.
    """
    place, content = os.path.join(save.path, MANIFEST), format_manifest(manifest)
    if disk.has_whole_files:
        write_file(disk, place, content)
        return
    temporary = os.path.join(save.path, _temporary(save.token))
    write_file(disk, temporary, content)
    with naming(save.path):
        disk.sync_folder(save.path)
    disk.rename(temporary, place)
    with naming(save.path):
        disk.sync_folder(save.path)


def _temporary(token: str) -> str:
    return f"manifest-{token}.json"


def end_save(disk: Disk, save: OpenSave, committed: Manifest) -> None:
    """Remove what the new checkpoint replaced, and release the lock."""
    clean(disk, save, committed)
    _release(save.release)


def abandon(disk: Disk, save: OpenSave) -> None:
    """Remove what a save that failed has written, as far as possible, and release the lock."""
    clean(disk, save)
    if save.is_new:
        with suppress(OSError):
            disk.remove_folder(save.path)
    _release(save.release)


def _release(release: Callable[[], None] | None) -> None:
    if release is not None:
        release()


# --- removing checkpoints, and directories for writing ---------------------------------------------


def remove_checkpoint(disk: Disk, path: str, *, is_unused: bool = False) -> bool:
    """Remove a checkpoint with everything in its directory; return False if a save holds its lock.

    Where there are no locks, a save may be writing there, so only the checkpoint's own files are removed,
    unless the directory ``is_unused`` (:func:`is_dead`).

    Raises:
        OSError: Its manifest can't be renamed, and it is complete.
    """
    try:
        release = disk.lock(path)
    except (BlockingIOError, FileNotFoundError):
        return False
    try:
        # A temporary manifest marks the directory as half removed, if this is killed.
        marker = _temporary(secrets.token_hex(4))
        manifest = os.path.join(path, MANIFEST)
        try:
            disk.rename(manifest, os.path.join(path, marker))
        except FileNotFoundError:
            if is_there(disk, manifest):
                raise
        with naming(path):
            # Or a power cut could bring the manifest back, and not the files.
            disk.sync_folder(path)
        with suppress(OSError):  # it is no checkpoint any more; the next removal takes the rest
            if release is not None or is_unused:
                remove_tree(disk, path)
            else:
                _remove_own(disk, path, marker)
    finally:
        _release(release)
    return True


def _remove_own(disk: Disk, path: str, manifest: str) -> None:
    """Remove a manifest, the files that it names, and the directory if nothing else is in it."""
    own = {*_names_used(read_head(disk, path, manifest)), manifest} - {MANIFEST}
    with opened(disk, path) as folder:
        names = sorted(disk.names(folder), reverse=True)  # the manifest after the tensors
    for name in names:
        if name in own or _LITTER.fullmatch(name):
            remove_tree(disk, os.path.join(path, name))
    disk.remove_folder(path)


def is_dead(disk: Disk, path: str, newest_s: float) -> bool:
    """Return whether a directory that :func:`find_leftovers` lists is no longer in use.

    No program may hold its lock. Tensor files without a temporary manifest must also be an hour old, since
    a user may be copying a checkpoint there. On a disk without locks, it must have been written a day before
    ``newest_s``, when a checkpoint beside it was written by the same clock; 0 if there is none.
    """
    try:
        release = disk.lock(path)
        _release(release)
        inside = dict(walk(disk, path))
        times = [status.modified_s for status in (disk.status(path), *inside.values())]
    except OSError:
        return False
    if release is None:
        return max(times) < newest_s - _KILLED_S
    is_copy = not _SCRATCH.fullmatch(os.path.basename(path)) and not any(map(_TEMPORARY.fullmatch, inside))
    return not is_copy or time.time() - max(times) > _COPY_S


def find_leftovers(disk: Disk, parent: str) -> list[str]:
    """List what saves and removals that were killed left in a directory, and what those that run work on.

    That is directories that :func:`scratch_folder` made, and those that hold nothing but files of a
    checkpoint, without a manifest.
    """
    found: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        with opened(disk, parent) as folder:
            names = sorted(disk.names(folder))
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):
                if disk.status(path).kind != "directory":
                    continue
                with opened(disk, path) as folder:
                    inside = disk.names(folder)
                if _SCRATCH.fullmatch(name) or (
                    inside and MANIFEST not in inside and all(map(is_own_name, inside))
                ):
                    found.append(path)
    return found


@contextmanager
def scratch_folder(disk: Disk, target: str) -> Generator[str, None, None]:
    """Make a hidden directory beside ``target`` for a ``with`` block, and remove it afterwards.

    Its lock is held. Earlier ones for the same target whose program was killed are removed.
    """
    parent, name = os.path.split(target)
    for path in find_leftovers(disk, parent):
        match = _SCRATCH.fullmatch(os.path.basename(path))
        if match is not None and match["name"] == name and is_dead(disk, path, 0):
            with suppress(OSError):
                remove_tree(disk, path)
    path = os.path.join(parent, f".{name}.staging-{secrets.token_hex(4)}")
    with naming(path):
        disk.make_folder(path)
    release = disk.lock(path)
    try:
        yield path
    finally:
        with suppress(OSError):
            remove_tree(disk, path)
        _release(release)
