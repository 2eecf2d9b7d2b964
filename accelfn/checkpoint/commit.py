"""How a checkpoint appears, complete and durable, by one rename; and how it takes another one's place.

A save writes into ``.{name}.staging-{nonce}`` beside the directory that it shall become. To publish it:

1. fsync the stage, so that its files' names are durable; each file was synced when it was written.
2. Rename the old checkpoint, where there is one, to ``.{name}.replaced-{nonce}``, and the stage to ``name``.
3. fsync the parent. Only now is the save acknowledged, and only now is the old one deleted.

A crash at any instant leaves the old checkpoint or the new one, whole: under its name, or, between the two
renames, under that of the replaced one, where readers look too (``find.resolve``). A stage never counts,
however complete it looks: until its name has changed, nothing says that its bytes are durable.

The two renames may become durable in any order. If only the second does, it has put the new one over the
old one; so no fsync is needed between them. tests/checkpoint/files/test_power_loss.py tries all of this.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from accelfn.checkpoint.disk import (
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
from accelfn.checkpoint.manifest import MANIFEST, Manifest, format_manifest, is_own_name, parse_head
from accelfn.errors import CheckpointError, DamagedCheckpointError, NotAvailableError

# Of 40,000 tensors a manifest has about 8 MB.
MAX_MANIFEST_BYTES = 1 << 30

_DAY_S = 86_400.0
_LEFTOVER = re.compile(
    r"\.(?P<name>.+)\.(?P<kind>staging|files|replaced|trash)-"
    r"(?P<host>[0-9a-f]{12})-(?P<pid>[0-9]{1,10})-(?P<started>[0-9]{1,20})-(?P<random>[0-9a-f]{8})",
    re.DOTALL,
)

_Kind: TypeAlias = Literal["staging", "files", "replaced", "trash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A save on its way.

    Attributes:
        path: The directory to write into.
        directory: What it shall become.
        nonce: Tells it from all other saves.
        generation: For the manifest: one more than that of what it replaces.
    """

    path: str
    directory: str
    nonce: str
    generation: int


class Leftover(NamedTuple):
    """What a save or a removal left behind, or still works on.

    Attributes:
        path: Where it is.
        name: Of the checkpoint.
        kind: What it was to be; ``files`` are to become part of a checkpoint, see ``attachments``.
        host: Of its writer.
        pid: Of its writer.
        started: When that process began, in the system's own count; "0" where the system doesn't tell.
    """

    path: str
    name: str
    kind: _Kind
    host: str
    pid: int
    started: str


class _Target(NamedTuple):
    parent: str
    name: str
    path: str
    kind: Literal["absent", "empty", "checkpoint"]


def make_nonce() -> str:
    """Make a text that no other save has, and that tells whether its writer is alive."""
    return f"{_host()}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(4)}"


def _host() -> str:
    """Name this start of this machine, or of this container: where a process number means something."""
    parts = [platform.node()]
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _started(pid: int) -> str:
    """Return when a process began, which tells it from earlier ones of its number; "0" where nobody knows.

    A container that is started again gives the same numbers to its processes.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]  # the name before may have spaces
    except (OSError, IndexError):
        return "0"


def parse_leftover(parent: str, name: str) -> Leftover | None:
    """Return what a name in ``parent`` was meant for; None where it is no save's and no removal's. Pure."""
    match = _LEFTOVER.fullmatch(name)
    if match is None:
        return None
    kind: _Kind = match["kind"]  # pyright: ignore[reportAssignmentType]
    path = os.path.join(parent, name)
    return Leftover(path, match["name"], kind, match["host"], int(match["pid"]), match["started"])


def is_leftover(name: str) -> bool:
    """Return whether a name is one that saves and removals give. Pure."""
    return _LEFTOVER.fullmatch(name) is not None


def leftover_path(directory: str, kind: _Kind, nonce: str) -> str:
    """Return the path beside ``directory`` for a purpose. Pure."""
    parent, name = os.path.split(directory)
    return os.path.join(parent, f".{name}.{kind}-{nonce}")


def find_leftovers(disk: Disk, parent: str, name: str | None = None) -> list[Leftover]:
    """List what saves and removals left in ``parent``, of one checkpoint or of all; in order of names."""
    try:
        with opened(disk, parent) as folder:
            names = sorted(disk.names(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [parse_leftover(parent, one) for one in names]
    return [one for one in found if one is not None and name in (None, one.name)]


def read_head(disk: Disk, path: str) -> Manifest | None:
    """Read a checkpoint's manifest without tree and tensors; None where it has none.

    Raises:
        DamagedCheckpointError: It isn't what was written.
        NotAvailableError: A newer version of accelfn has written it.
    """
    try:
        with opened(disk, path) as folder:
            content = read_file(disk, folder, MANIFEST, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_head(content, os.path.join(path, MANIFEST))


def is_complete(disk: Disk, path: str) -> Manifest | None:
    """Return the head of a checkpoint's manifest where all its files are there, in their lengths.

    That tells a directory that is being deleted from a whole one; it doesn't read the tensors.
    """
    try:
        head = read_head(disk, path)
    except (DamagedCheckpointError, NotAvailableError):
        return None
    return head if head is not None and find_missing(disk, path, head) is None else None


def find_missing(disk: Disk, path: str, head: Manifest) -> str | None:
    """Name a file that should be there and isn't, or not in its length; None where all are there."""
    sizes = {name: file.size for name, file in head.files.items() if file.node in (None, head.node)}
    sizes |= {name: file.size for name, file in head.attachments.items()}
    for name, size in sorted(sizes.items()):
        try:
            status = disk.status(os.path.join(path, name))
        except (FileNotFoundError, NotADirectoryError):
            return name
        if (status.kind, status.size) != ("file", size):
            return name
    return None


def find_extra(disk: Disk, path: str, names: Iterable[str], head: Manifest) -> list[str]:
    """List what isn't part of a checkpoint, of ``names`` in its directory and of what is below them."""
    known = {MANIFEST, *head.files, *head.attachments}
    folders = {name[:place] for name in head.attachments for place, text in enumerate(name) if text == "/"}
    extra: list[str] = []
    for name in sorted(set(names) - known):
        if name in folders and disk.status(os.path.join(path, name)).kind == "directory":
            inside = walk(disk, os.path.join(path, name), f"{name}/")
            extra += [inner for inner, _ in inside if inner not in known | folders]
        else:
            extra.append(name)
    return extra


def describe_extra(path: str, extra: Sequence[str]) -> str:
    """Return the sentence that says what is in a checkpoint besides what belongs there. Pure."""
    shown = ", ".join(extra[:5]) + (", ..." if len(extra) > 5 else "")
    return f"{path} contains files that are not part of the checkpoint: {shown}."


def find_visible_extra(disk: Disk, path: str) -> list[str]:
    """List what somebody has put into a checkpoint's directory, but for hidden files, as systems leave them.

    Raises:
        OSError: It can't be read. Where there is no such directory, nothing is in it.
    """
    names: list[str] = []
    head = None
    # Without a manifest, as in one that is being removed, nobody knows which of them are its own.
    with suppress(FileNotFoundError, DamagedCheckpointError, NotAvailableError):
        with opened(disk, path) as folder:
            names = [name for name in disk.names(folder) if not is_own_name(name)]
        head = read_head(disk, path) if names else None  # nearly always there are none
    extra = [] if head is None else find_extra(disk, path, names, head)
    return [name for name in extra if not any(part.startswith(".") for part in name.split("/"))]


def check_target(disk: Disk, directory: str | os.PathLike[str]) -> None:
    """Refuse a directory that a checkpoint can't be saved to, or that holds no checkpoint but other files.

    Raises:
        CheckpointError: It is a file, a link, a mount point or a directory of other files, or its name is too
            long.
        OSError: It can't be looked at.
    """
    _target(disk, directory)


def _target(disk: Disk, directory: str | os.PathLike[str]) -> _Target:
    path = os.path.abspath(directory)
    parent, name = os.path.split(path)
    if not name:
        raise CheckpointError(f"{path} can't be a checkpoint: it has no name. Pass a directory below it.")
    if is_leftover(name):
        raise CheckpointError(
            f"{path} can't be a checkpoint: unfinished saves have such names. Pass another name."
        )
    try:
        status = disk.status(path)
    except FileNotFoundError:
        return _Target(parent, name, path, "absent")
    if status.kind != "directory":
        what = {"file": "a file", "link": "a link"}.get(status.kind, "neither file nor directory")
        raise CheckpointError(
            f"{path} can't be replaced by a checkpoint: it is {what}. Pass another directory, or remove it."
        )
    with opened(disk, path) as folder:
        names = sorted(disk.names(folder))
    if not names:
        return _Target(parent, name, path, "empty")
    others = [one for one in names if not is_own_name(one)]
    try:
        # Of a damaged one nobody knows which of the other files are its own.
        is_ours = MANIFEST in names and (not others or read_head(disk, path) is not None)
    except (DamagedCheckpointError, NotAvailableError):
        is_ours = False
    if not is_ours:
        shown = ", ".join((others or names)[:5]) + (", ..." if len(others or names) > 5 else "")
        raise CheckpointError(
            f"{path} can't be replaced by a checkpoint: it contains files that are not part of a checkpoint: "
            f"{shown}. Pass another directory, or move them away."
        )
    return _Target(parent, name, path, "checkpoint")


def begin_stage(disk: Disk, directory: str | os.PathLike[str], nonce: str) -> Stage:
    """Make the directory to write a new checkpoint into, and the directories above it.

    What dead saves to this place left behind is removed first. Of files that somebody has put into the
    checkpoint that is to be replaced, a warning is given: they are moved into the new one.

    Args:
        disk: To write to.
        directory: The checkpoint to be.
        nonce: Of ``make_nonce``; the same on all nodes.

    Raises:
        CheckpointError: ``directory`` can't be replaced by a checkpoint, see ``check_target``.
        OSError: The parent can't be written to.
    """
    target = _target(disk, directory)
    make_folders(disk, target.parent)
    clean(disk, target.parent, target.name)
    if target.kind == "checkpoint" and (extra := find_visible_extra(disk, target.path)):
        warnings.warn(
            f"{describe_extra(target.path, extra)} The new checkpoint in its place gets them, but for hidden "
            "ones, which are removed.",
            stacklevel=2,
        )
    earlier = [target.path, *(one.path for one in _replaced(disk, target))]
    heads = [head for path in earlier if (head := is_complete(disk, path)) is not None]
    generation = max((head.generation + 1 for head in heads), default=0)
    path = leftover_path(target.path, "staging", nonce)
    with naming(path):
        disk.make_folder(path)
    return Stage(path=path, directory=target.path, nonce=nonce, generation=generation)


def _replaced(disk: Disk, target: _Target) -> list[Leftover]:
    return [one for one in find_leftovers(disk, target.parent, target.name) if one.kind == "replaced"]


def write_manifest(disk: Disk, stage: Stage, manifest: Manifest) -> None:
    """Write the manifest of a stage; it is on the disk when this returns.

    Raises:
        OSError: With the file's name.
    """
    write_file(disk, os.path.join(stage.path, MANIFEST), format_manifest(manifest))


def abandon(disk: Disk, stage: Stage) -> None:
    """Remove a stage as far as that is possible; what stays is recognised by the next save."""
    with suppress(OSError):
        remove_tree(disk, stage.path)


def publish(disk: Disk, stage: Stage) -> None:
    """Make a stage, with its manifest and all its files written, the checkpoint.

    When this returns, the new checkpoint is durable. When it raises, the old one is in its place, and nothing
    else. Only where the last step failed, the sync of the parent, the new one has the name and the old one is
    whole beside it, since nobody knows which of them the disk has.

    Args:
        disk: To write to.
        stage: Of ``begin_stage``.

    Raises:
        CheckpointError: Meanwhile something else stands where the checkpoint shall be.
        OSError: With the file's name.
    """
    remove_replaced(disk, stage.directory, put_in_place(disk, stage))


def put_in_place(disk: Disk, stage: Stage) -> tuple[str, ...]:
    """Do what :func:`publish` does, and leave what was replaced beside it.

    Returns:
        What is to be removed, once the new one counts everywhere.
    """
    moved = leftover_path(stage.directory, "replaced", stage.nonce)
    try:
        target = _target(disk, stage.directory)
        old = (moved, *(one.path for one in _replaced(disk, target)))
        with naming(stage.path):
            disk.sync_folder(stage.path)
        if target.kind == "empty":
            disk.remove_folder(target.path)
        elif target.kind == "checkpoint":
            disk.rename(target.path, moved)
        disk.rename(stage.path, target.path)
        with naming(target.parent):
            disk.sync_folder(target.parent)
    except BaseException:
        _take_back(disk, stage, moved)
        raise
    return old


def remove_replaced(disk: Disk, directory: str, paths: tuple[str, ...]) -> None:
    """Remove what ``directory`` has replaced. What can't be removed stays for the next save to remove."""
    for path in paths:
        with suppress(OSError):
            _discard(disk, path, directory)


def _discard(disk: Disk, path: str, directory: str) -> None:
    """Remove a checkpoint that has lost its name; what isn't part of it goes to the one that has the name."""
    for name in find_visible_extra(disk, path) if is_there(disk, directory) else ():
        folder = os.path.dirname(os.path.join(directory, name))
        if not is_there(disk, folder):  # the new one has no such directory
            folder = directory
        place = os.path.join(folder, os.path.basename(name))
        while is_there(disk, place):
            place += "~"
        disk.rename(os.path.join(path, name), place)
        with naming(folder):
            disk.sync_folder(folder)
    remove_tree(disk, path)


def put_back(disk: Disk, directory: str, path: str) -> None:
    """Move ``path``, which was replaced by ``directory``, back to its name; what has the name goes.

    For nodes with disks of their own, where the save came to its end on some of them alone.
    """
    if path == directory:
        return
    trash = leftover_path(directory, "trash", make_nonce())
    if is_there(disk, directory):
        disk.rename(directory, trash)
    disk.rename(path, directory)
    with naming(os.path.dirname(directory)):
        disk.sync_folder(os.path.dirname(directory))
    with suppress(OSError):
        _discard(disk, trash, directory)


def _take_back(disk: Disk, stage: Stage, moved: str) -> None:
    """Restore the name of the old checkpoint, by what is there and not by what was to be done.

    Not where the new one has the name already: on a disk that can't sync, its next renames may become durable
    without the first ones, and lose both.
    """
    with suppress(OSError):
        if is_there(disk, moved) and not is_there(disk, stage.directory):
            disk.rename(moved, stage.directory)
    abandon(disk, stage)


def clean(disk: Disk, parent: str, name: str | None = None) -> tuple[str, ...]:
    """Remove what dead saves and removals left behind in a directory.

    A stage goes when its writer is dead: on this machine when there is no such process (of its number and of
    when it began), on another one after a day. A replaced checkpoint goes when the one that replaced it is
    there, in whole.

    Args:
        disk: To write to.
        parent: The directory in which the checkpoints are.
        name: Of the only checkpoint to clean up after; None takes all.

    Returns:
        The paths that are gone. What can't be removed stays.
    """
    doomed = [one for one in find_leftovers(disk, parent, name) if is_dead(disk, one)]
    if not doomed:
        return ()
    removed: list[str] = []
    with suppress(OSError):
        # Or a power cut could undo the rename that made it a leftover, and not the removal of its files.
        disk.sync_folder(parent)
        for one in doomed:
            with suppress(OSError):
                _discard(disk, one.path, os.path.join(parent, one.name))
                removed.append(one.path)
    return tuple(removed)


def is_dead(disk: Disk, one: Leftover) -> bool:
    """Return whether nobody works on what a save or a removal left, and nobody needs it."""
    if one.kind == "trash":
        return True
    if one.kind == "replaced":
        return is_complete(disk, os.path.join(os.path.dirname(one.path), one.name)) is not None
    # On Windows, asking for a process by signal 0 would end it.
    if one.host == _host() and os.name == "posix":
        return not _is_running(one.pid, one.started)
    try:
        return time.time() - disk.status(one.path).modified_s > _DAY_S
    except FileNotFoundError:
        return False


def _is_running(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # it is another user's, or no number of a process here
    return "0" in (started, now := _started(pid)) or started == now
