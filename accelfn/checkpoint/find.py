"""Find checkpoints: the one in a directory, the newest of several, and what is there instead."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from accelfn.checkpoint.commit import MAX_MANIFEST_BYTES, describe_extra, find_extra, find_missing
from accelfn.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    is_own_name,
    parse_head,
    parse_manifest,
)
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError, NotAvailableError
from accelfn.storage.address import as_path
from accelfn.storage.disk import Disk, Folder, is_there, opened, read_file
from accelfn.storage.object_store import disk_at

_T = TypeVar("_T")
# Each new attempt means that a save replaced or removed the checkpoint while it was read.
_MAX_ATTEMPTS = 10
_NUMBER = re.compile("[0-9]+")


class Found(NamedTuple):
    """A checkpoint in a directory of checkpoints.

    Attributes:
        path: Its directory.
        step: From its manifest.
        metric: From its manifest.
        modified_s: When its manifest was written, by the clock of the disk.
        number: Its step: from the manifest, else from its name, else its place among the others.
    """

    path: str
    step: int | None
    metric: float | None
    modified_s: float
    number: int = 0


class Broken(NamedTuple):
    """A checkpoint whose manifest can't be read, or that lacks files."""

    path: str
    modified_s: float
    error: CheckpointError | NotAvailableError


class OpenCheckpoint(NamedTuple):
    """A checkpoint while it is read.

    Attributes:
        path: Its directory.
        folder: The open directory.
        manifest: Its manifest.
    """

    path: str
    folder: Folder
    manifest: Manifest


def explain_absence(disk: Disk, path: str) -> str:
    """Return what is at a path instead of a checkpoint."""
    try:
        with opened(disk, path) as folder:
            return _describe(sorted(disk.names(folder)))
    except FileNotFoundError:
        return "there is no such directory"
    except NotADirectoryError:
        return "it is a file"


def _describe(names: Sequence[str]) -> str:
    """Return what a directory without a manifest seems to be. Pure.

    >>> _describe(["model.safetensors", "random_states_0.pkl"])
    'it is a checkpoint of Accelerate; turn it into one with `accelfn checkpoint convert`'
    """
    if any(re.fullmatch(r"random_states_\d+\.pkl", name) for name in names):
        return "it is a checkpoint of Accelerate; turn it into one with `accelfn checkpoint convert`"
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return (
            "it is a checkpoint of torch.distributed.checkpoint; turn it into one with "
            "`accelfn checkpoint convert`"
        )
    if any(re.fullmatch(r"model.*\.safetensors(\.index\.json)?", name) for name in names):
        return "it holds the weights of a model, and no state of a training"
    if not names:
        return "the directory is empty"
    if all(map(is_own_name, names)):
        return f"it has no {MANIFEST}, as after a save that was killed"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"the directory has no {MANIFEST}, but {shown}"


def _no_checkpoint(disk: Disk, path: str) -> NoCheckpointError:
    return NoCheckpointError(f"{path} is not a checkpoint of accelfn: {explain_absence(disk, path)}.")


def scan(disk: Disk, directory: str | os.PathLike[str]) -> tuple[list[Found], list[Broken]]:
    """List the checkpoints in a directory, oldest first, and those that are damaged.

    They are ordered by step if each has a step, else by all whole numbers of the name, from left to right, if
    each name has one, else by when the manifest was written; equal ones by name.

    Raises:
        FileNotFoundError: There is no such directory.
        NotADirectoryError: It is a file.
    """
    parent = str(as_path(directory))
    before: tuple[set[str], set[str]] | None = None
    for attempt in itertools.count(1):
        with opened(disk, parent) as folder:
            names = set(disk.names(folder))
        found, broken, unfinished = _scan_names(disk, parent, names)
        # A directory without a manifest may be a checkpoint that was removed meanwhile, after a newer one had
        # been saved, which isn't among these names or was looked at before.
        if not unfinished or (names, unfinished) == before or attempt == _MAX_ATTEMPTS:
            return _ordered(found), broken
        before = names, unfinished
    raise AssertionError


def _scan_names(disk: Disk, parent: str, names: set[str]) -> tuple[list[Found], list[Broken], set[str]]:
    """Scan some names in a directory, and return also the directories without a manifest."""
    found: list[Found] = []
    broken: list[Broken] = []
    unfinished: set[str] = set()
    for name in sorted(names):
        path = os.path.join(parent, name)
        try:
            if disk.status(path).kind != "directory":
                continue
            try:
                found.append(_read_unchanged(disk, path, partial(_inspect, disk)))
            except (DamagedCheckpointError, NotAvailableError) as error:
                broken.append(Broken(path, _modified_s(disk, path), error))
        except FileNotFoundError:
            unfinished.add(name)
    return found, broken, unfinished


def _inspect(disk: Disk, folder: Folder, content: bytes) -> Found:
    """Read the head of a checkpoint's manifest, and look for its files."""
    path, modified_s = folder.path, _modified_s(disk, folder.path)
    head = parse_head(content, os.path.join(path, MANIFEST))
    missing = find_missing(disk, path, head)
    if missing is not None:
        raise DamagedCheckpointError(
            f"{os.path.join(path, missing)} is missing, or its length isn't the one that was written. Take "
            "another copy, or an older checkpoint.",
            missing,
        )
    return Found(path, head.step, head.metric, modified_s)


def _modified_s(disk: Disk, path: str) -> float:
    return disk.status(os.path.join(path, MANIFEST)).modified_s


def _ordered(found: Sequence[Found]) -> list[Found]:
    if all(item.step is not None for item in found):
        numbered = [item._replace(number=item.step or 0) for item in found]
        return sorted(numbered, key=lambda item: (item.number, item.path))
    numbers = {item: [int(text) for text in _NUMBER.findall(os.path.basename(item.path))] for item in found}
    if all(numbers.values()):
        # The last number that differs between the names: 500 and 1000 for epoch_1_step_500 and
        # epoch_2_step_1000, 8 and 9 for epoch_8_bf16 and epoch_9_bf16.
        columns = list(zip(*numbers.values(), strict=False))
        column = max(
            (index for index, values in enumerate(columns) if len(set(values)) > 1), default=len(columns) - 1
        )
        by_name = sorted(found, key=lambda item: (numbers[item], item.path))
        return [item._replace(number=numbers[item][column]) for item in by_name]
    by_time = sorted(found, key=lambda item: (item.modified_s, item.path))
    return [item._replace(number=index) for index, item in enumerate(by_time)]


def find_checkpoints(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> tuple[Path, ...]:
    """List the committed checkpoints in a directory, oldest first; none if there is no such directory.

    They are ordered by step if each has a step, else by all whole numbers of the name, from left to right, if
    each name has one (``epoch_8_bf16`` before ``epoch_10_bf16``), else by when they were written. Unfinished
    saves and other things aren't listed, nor is a checkpoint whose manifest is damaged or that lacks files.

    Ranks: any; nothing is exchanged, so let one rank decide.

    Args:
        directory: In which the checkpoints are.
        disk: The operations on files; None for those of the system, or of an object store.

    Returns:
        Their directories.

    Raises:
        NotADirectoryError: It is a file.

    >>> find_checkpoints("no/such/directory")
    ()
    """
    try:
        return tuple(as_path(item.path) for item in scan(disk or disk_at(directory), directory)[0])
    except FileNotFoundError:
        return ()


def latest_checkpoint(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> Path:
    """Return the newest of the committed checkpoints in a directory, in the order of ``find_checkpoints``.

    Ranks: any; nothing is exchanged, so let one rank decide.

    Args:
        directory: In which the checkpoints are.
        disk: The operations on files; None for those of the system, or of an object store.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
        DamagedCheckpointError: The one that was written last has a damaged manifest or lacks files, so that
            an older one would lose work without a warning. Remove it, or pass the path of the one to use.
    """
    path = str(as_path(directory))
    disk = disk or disk_at(path)
    try:
        found, broken = scan(disk, path)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_checkpoint(disk, path) from None
    newest = max(broken, key=lambda item: item.modified_s, default=None)
    if newest is not None and all(item.modified_s <= newest.modified_s for item in found):
        raise newest.error
    if not found:
        raise _no_checkpoint(disk, path)
    return as_path(found[-1].path)


def is_checkpoint(disk: Disk, path: str) -> bool:
    """Return whether a directory has a manifest."""
    return is_there(disk, os.path.join(path, MANIFEST))


def newest_first(disk: Disk, directory: str | os.PathLike[str]) -> list[str]:
    """List what may be loaded for a directory: itself if it is a checkpoint, else those in it, newest first.

    Damaged ones that were written last come first; if all are damaged, all of them are listed.

    Raises:
        NotADirectoryError: It is a file.
    """
    path = str(as_path(directory))
    if is_checkpoint(disk, path):
        return [path]
    try:
        found, broken = scan(disk, path)
    except FileNotFoundError:
        return []
    last = max((item.modified_s for item in found), default=0.0)
    newer = [item for item in broken if item.modified_s >= last]
    newer.sort(key=lambda item: item.modified_s, reverse=True)
    return [item.path for item in (*newer, *reversed(found))]


def locate(disk: Disk, directory: str | os.PathLike[str]) -> str:
    """Return which directory to read: ``directory`` if it is a checkpoint, else the newest one in it.

    Raises:
        NoCheckpointError: There is neither.
        DamagedCheckpointError: As ``latest_checkpoint`` says.
    """
    path = str(as_path(directory))
    return path if is_checkpoint(disk, path) else str(latest_checkpoint(path, disk=disk))


def read_checkpoint(
    disk: Disk, directory: str | os.PathLike[str], read: Callable[[OpenCheckpoint], _T]
) -> _T:
    """Open a checkpoint, or the newest one in a directory, and return the result of ``read`` for it.

    If another program replaces or removes the checkpoint meanwhile, ``read`` is called again on the new one.

    Args:
        disk: To read from.
        directory: The checkpoint, or the directory with checkpoints.
        read: Reads what it needs, and changes nothing else.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
        DamagedCheckpointError: The manifest is damaged; or raised by ``read``.
        NotAvailableError: A newer version of accelfn has written it.
    """

    def read_open(folder: Folder, content: bytes) -> _T:
        manifest = parse_manifest(content, os.path.join(folder.path, MANIFEST))
        return read(OpenCheckpoint(folder.path, folder, manifest))

    for attempt in itertools.count(1):
        path = locate(disk, directory)
        try:
            return _read_unchanged(disk, path, read_open)
        except FileNotFoundError:
            if attempt == _MAX_ATTEMPTS:
                raise
    raise AssertionError


def _read_unchanged(disk: Disk, path: str, read: Callable[[Folder, bytes], _T]) -> _T:
    """Call ``read`` with a checkpoint's directory and manifest, again if the manifest was replaced meanwhile.

    Raises:
        FileNotFoundError: There is no manifest, or it was removed meanwhile.
    """
    for attempt in itertools.count(1):
        with opened(disk, path) as folder:
            try:
                content = read_file(disk, folder, MANIFEST, MAX_MANIFEST_BYTES)
            except DamagedCheckpointError:  # in a store, a shorter one may have replaced it
                if attempt == _MAX_ATTEMPTS:
                    raise
                continue
            try:
                return read(folder, content)
            except (FileNotFoundError, DamagedCheckpointError):
                if attempt == _MAX_ATTEMPTS:
                    raise
                if not _has_changed(disk, folder, content):
                    raise
    raise AssertionError


def _has_changed(disk: Disk, folder: Folder, content: bytes) -> bool:
    """Return whether a directory has another manifest by now."""
    try:
        return read_file(disk, folder, MANIFEST, MAX_MANIFEST_BYTES) != content
    except DamagedCheckpointError:  # in a store, it is replaced just now
        return True


def check_names(disk: Disk, checkpoint: OpenCheckpoint, *, warns: bool = True) -> tuple[str, ...]:
    """Check that a checkpoint's directory has the files of its manifest; warn of extra files.

    Returns:
        The files of tensors, in order.

    Raises:
        DamagedCheckpointError: A file is missing.
    """
    manifest = checkpoint.manifest
    names = set(disk.names(checkpoint.folder))
    extra = warns and find_extra(disk, checkpoint.path, names, manifest)
    if extra:
        warnings.warn(f"{describe_extra(checkpoint.path, extra)} They are not read.", stacklevel=2)
    for name in sorted(manifest.files):
        # Some object stores list new names late.
        if name not in names and not is_there(disk, os.path.join(checkpoint.path, name)):
            raise DamagedCheckpointError(
                f"{os.path.join(checkpoint.path, name)} is missing, and the manifest names it. Take another "
                "copy, or an older checkpoint.",
                name,
            )
    return tuple(sorted(manifest.files))
