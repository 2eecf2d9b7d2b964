"""Find what counts as a checkpoint now: under its name, after a crash, or the newest of several."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from accelfn.checkpoint.commit import (
    MAX_MANIFEST_BYTES,
    describe_extra,
    find_extra,
    find_leftovers,
    find_missing,
    is_complete,
    is_leftover,
    parse_leftover,
)
from accelfn.checkpoint.disk import (
    REAL_DISK,
    Disk,
    Folder,
    Status,
    is_there,
    naming,
    open_regular,
    opened,
    read_file,
    standing,
)
from accelfn.checkpoint.files import checksums, expected_entries, verify_tensor_file
from accelfn.checkpoint.manifest import MANIFEST, Attachment, Manifest, parse_head, parse_manifest
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError, NotAvailableError

_T = TypeVar("_T")
# Each new attempt means that a save replaced the checkpoint while it was read.
_MAX_ATTEMPTS = 10
_NUMBER = re.compile("[0-9]+")


class Found(NamedTuple):
    """A committed checkpoint in a directory of checkpoints.

    Attributes:
        path: Its directory; after a crash it may be gone, and ``resolve`` says where the checkpoint is.
        resolved: Where it is now.
        step: What its manifest says.
        metric: What its manifest says.
        generation: What its manifest says.
        modified_s: When its manifest was written, by the clock of the disk.
        number: Its step: of the manifest, else from its name, else its place among the others.
    """

    path: str
    resolved: str
    step: int | None
    metric: float | None
    generation: int
    modified_s: float
    number: int = 0


class Broken(NamedTuple):
    """A checkpoint whose manifest can't be read, or that hasn't all its files."""

    path: str
    modified_s: float
    error: CheckpointError | NotAvailableError


class OpenCheckpoint(NamedTuple):
    """A checkpoint while it is read.

    Attributes:
        path: Where it was found.
        folder: To open its files in, whatever its name becomes meanwhile.
        manifest: Of it.
    """

    path: str
    folder: Folder
    manifest: Manifest


def resolve(disk: Disk, directory: str | os.PathLike[str]) -> str:
    """Return which directory holds the checkpoint ``directory`` now.

    That is ``directory`` itself; or, where a crash or a running save has left no checkpoint of that name, the
    newest complete one that was being replaced.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
    """
    path = os.path.abspath(directory)
    parent, name = os.path.split(path)
    # While another program saves again and again, each of several looks may come between two of its renames.
    misses = 0
    for _ in range(_MAX_ATTEMPTS):
        if is_there(disk, os.path.join(path, MANIFEST)):
            return path
        leftovers = find_leftovers(disk, parent, name)
        heads = [(is_complete(disk, one.path), one.path) for one in leftovers if one.kind == "replaced"]
        found = [(head.generation, place) for head, place in heads if head is not None]
        if found:
            return max(found)[1]
        misses = 0 if leftovers else misses + 1
        if misses == 2:
            break
    raise _nothing(disk, path)


def _nothing(disk: Disk, path: str) -> NoCheckpointError:
    """Make the error that says what is there instead of a checkpoint."""
    parent, name = os.path.split(path)
    stages = [one.path for one in find_leftovers(disk, parent, name) if one.kind == "staging"]
    try:
        with opened(disk, path) as folder:
            names = sorted(disk.names(folder))
    except FileNotFoundError:
        if stages:
            why = f"only an unfinished save of it is there, {stages[0]}, which is of no use"
        else:
            why = "there is no such directory"
    except NotADirectoryError:
        why = "it is a file"
    else:
        why = _describe(names)
        if stages and not names:
            why += f"; an unfinished save of it is there, {stages[0]}, which is of no use"
    return NoCheckpointError(f"{path} is no checkpoint of accelfn: {why}.")


def _describe(names: Sequence[str]) -> str:
    """Return what a directory without a manifest seems to be. Pure.

    >>> _describe(["model.safetensors", "random_states_0.pkl"])
    'it is a checkpoint of Accelerate; turn it into one with `accelfn checkpoint convert`'
    """
    if any(re.fullmatch(r"random_states_\d+\.pkl", name) for name in names):
        return "it is a checkpoint of Accelerate; turn it into one with `accelfn checkpoint convert`"
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return "it is a checkpoint of torch.distributed.checkpoint"
    if any(re.fullmatch(r"model.*\.safetensors(\.index\.json)?", name) for name in names):
        return "it holds the weights of a model, and no state of a training"
    if not names:
        return "the directory is empty"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"the directory has no {MANIFEST}, but {shown}"


def scan(disk: Disk, directory: str | os.PathLike[str]) -> tuple[list[Found], list[Broken]]:
    """List the committed checkpoints in a directory, oldest first, and those that are damaged.

    They are ordered by step where every one has a step, else by all whole numbers of the name, from left to
    right, where every name has one, else by when the manifest was written; equal ones by generation and name.

    Raises:
        FileNotFoundError: There is no such directory.
        NotADirectoryError: It is a file.
    """
    parent = os.path.abspath(directory)
    before: set[str] | None = None
    for attempt in itertools.count(1):
        with opened(disk, parent) as folder:
            names = set(disk.names(folder))
        found, broken, has_vanished = _look_at(disk, parent, names)
        if attempt == _MAX_ATTEMPTS or names == before or not (broken or has_vanished):
            return _ordered(found), broken
        before = names
    raise AssertionError


def _look_at(disk: Disk, parent: str, names: set[str]) -> tuple[list[Found], list[Broken], bool]:
    """List what is sound and what is damaged of ``names``; and whether anything was removed meanwhile."""
    leftovers = [one for name in names if (one := parse_leftover(parent, name)) is not None]
    candidates = {name for name in names if not is_leftover(name)}
    candidates |= {one.name for one in leftovers if one.kind == "replaced"}
    found: list[Found] = []
    broken: list[Broken] = []
    has_vanished = False
    for name in sorted(candidates):
        path = os.path.join(parent, name)
        try:
            if name in names and disk.status(path).kind != "directory":
                continue
            try:
                look = partial(_look_in, disk, path)
                found.append(_read_what_stays(disk, partial(resolve, disk, path), look))
            except (DamagedCheckpointError, NotAvailableError) as error:
                broken.append(Broken(path, _modified_s(disk, resolve(disk, path)), error))
        except FileNotFoundError:  # it is no checkpoint, or was removed meanwhile
            has_vanished = True
    return found, broken, has_vanished


def _look_in(disk: Disk, path: str, folder: Folder) -> Found:
    """Read the head of the checkpoint ``path``, which lies in ``folder``, and look for all its files."""
    modified_s = _modified_s(disk, folder.path)
    content = read_file(disk, folder, MANIFEST, MAX_MANIFEST_BYTES)
    head = parse_head(content, os.path.join(folder.path, MANIFEST))
    missing = find_missing(disk, folder.path, head)
    if missing is not None:
        why = f"{os.path.join(path, missing)} is missing, or not as long as it was written."
        raise DamagedCheckpointError(why, missing)
    return Found(path, folder.path, head.step, head.metric, head.generation, modified_s)


def _modified_s(disk: Disk, path: str) -> float:
    return disk.status(os.path.join(path, MANIFEST)).modified_s


def _ordered(found: Sequence[Found]) -> list[Found]:
    if all(one.step is not None for one in found):
        numbered = [one._replace(number=one.step or 0) for one in found]
        return sorted(numbered, key=lambda one: (one.number, one.generation, one.path))
    numbers = {one: [int(text) for text in _NUMBER.findall(os.path.basename(one.path))] for one in found}
    if all(numbers.values()):
        # Of epoch_1_step_500 and epoch_2_step_1000 it is 500 and 1000, of epoch_8_bf16 and epoch_9_bf16 8 and
        # 9: the last number that isn't the same in all names.
        rows = list(zip(*numbers.values(), strict=False))
        place = max((index for index, row in enumerate(rows) if len(set(row)) > 1), default=len(rows) - 1)
        by_name = sorted(found, key=lambda one: (numbers[one], one.generation, one.path))
        return [one._replace(number=numbers[one][place]) for one in by_name]
    by_time = sorted(found, key=lambda one: (one.modified_s, one.generation, one.path))
    return [one._replace(number=index) for index, one in enumerate(by_time)]


def find_checkpoints(directory: str | os.PathLike[str], *, disk: Disk = REAL_DISK) -> tuple[Path, ...]:
    """List the committed checkpoints in a directory, oldest first; none where there is no such directory.

    They are ordered by step where every one has a step, else by all whole numbers of the name, from left to
    right, where every name has one (``epoch_8_bf16`` before ``epoch_10_bf16``), else by when they were
    written. Unfinished saves and other things aren't listed, nor is a checkpoint whose manifest is damaged
    or that hasn't all its files.

    Ranks: any; nothing is exchanged, so let one rank decide.

    Args:
        directory: In which the checkpoints are.
        disk: The operations on files.

    Returns:
        Their directories. Where a crash came while one was replaced, the directory itself may be missing, and
        loading from its path gives the old one all the same.

    Raises:
        NotADirectoryError: It is a file.

    >>> find_checkpoints("no/such/directory")
    ()
    """
    try:
        return tuple(Path(one.path) for one in scan(disk, directory)[0])
    except FileNotFoundError:
        return ()


def latest_checkpoint(directory: str | os.PathLike[str], *, disk: Disk = REAL_DISK) -> Path:
    """Return the newest of the committed checkpoints in a directory, in the order of ``find_checkpoints``.

    Ranks: any; nothing is exchanged, so let one rank decide.

    Args:
        directory: In which the checkpoints are.
        disk: The operations on files.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
        DamagedCheckpointError: The one that was written last has a damaged manifest or not all its files, so
            that taking an older one would lose work without a word. Remove it, or pass the one to take by
            its own path.
    """
    path = os.path.abspath(directory)
    try:
        found, broken = scan(disk, path)
    except (FileNotFoundError, NotADirectoryError):
        raise _nothing(disk, path) from None
    newest = max(broken, key=lambda one: one.modified_s, default=None)
    if newest is not None and all(one.modified_s <= newest.modified_s for one in found):
        raise newest.error
    if not found:
        raise _nothing(disk, path)
    return Path(found[-1].path)


def newest_first(disk: Disk, directory: str | os.PathLike[str]) -> list[str]:
    """List what may be loaded for a directory: itself if it is a checkpoint, else those in it, newest first.

    Damaged ones that were written last come first; where all are damaged, all of them are listed.

    Raises:
        NotADirectoryError: It is a file.
    """
    path = os.path.abspath(directory)
    try:
        resolve(disk, path)
        return [path]
    except NoCheckpointError:
        pass
    try:
        found, broken = scan(disk, path)
    except FileNotFoundError:
        return []
    last = max((one.modified_s for one in found), default=0.0)
    newer = [one for one in broken if one.modified_s >= last]
    newer.sort(key=lambda one: one.modified_s, reverse=True)
    return [one.path for one in (*newer, *reversed(found))]


def locate(disk: Disk, directory: str | os.PathLike[str]) -> str:
    """Return which directory to read: ``directory`` as a checkpoint, else the newest one in it.

    Raises:
        NoCheckpointError: There is neither.
        DamagedCheckpointError: As ``latest_checkpoint`` says.
    """
    for _ in range(_MAX_ATTEMPTS):
        with suppress(NoCheckpointError):
            return resolve(disk, directory)
        # Its error says the same where there is none.
        newest = latest_checkpoint(directory, disk=disk)
        with suppress(NoCheckpointError):  # another program has removed it, since there is a newer one
            return resolve(disk, newest)
    return resolve(disk, directory)


def read_checkpoint(
    disk: Disk, directory: str | os.PathLike[str], read: Callable[[OpenCheckpoint], _T]
) -> _T:
    """Open a checkpoint, or the newest one in a directory, and give what ``read`` gives for it.

    Where another program replaces or removes the checkpoint meanwhile, ``read`` is called again on what is
    there then.

    Args:
        disk: To read from.
        directory: The checkpoint, or the directory with checkpoints.
        read: Reads what it needs, and changes nothing else.

    Raises:
        NoCheckpointError: There is none; with what is there instead.
        DamagedCheckpointError: Of the manifest, or of ``read``.
        NotAvailableError: A newer version of accelfn has written it.
    """

    def read_open(folder: Folder) -> _T:
        content = read_file(disk, folder, MANIFEST, MAX_MANIFEST_BYTES)
        manifest = parse_manifest(content, os.path.join(folder.path, MANIFEST))
        return read(OpenCheckpoint(folder.path, folder, manifest))

    return _read_what_stays(disk, partial(locate, disk, directory), read_open)


def _read_what_stays(disk: Disk, find: Callable[[], str], read: Callable[[Folder], _T]) -> _T:
    """Find a checkpoint and read in it, and do both again where it was moved or removed meanwhile."""
    for attempt in itertools.count(1):
        path, changed = find(), True
        try:
            with opened(disk, path) as folder:
                before = standing(disk, folder)
                try:
                    return read(folder)
                except (FileNotFoundError, DamagedCheckpointError):
                    # Asked while the directory is open, so that no other one can have its number.
                    changed = not _stays(disk, path, before)
                    raise
        except (FileNotFoundError, DamagedCheckpointError):
            if attempt == _MAX_ATTEMPTS or not changed:
                raise
    raise AssertionError


def _stays(disk: Disk, path: str, before: Status) -> bool:
    """Return whether nobody has moved a directory away, or begun to remove what is in it.

    Times alone don't say it: some disks count them in whole seconds, and a removal takes less. But what has a
    checkpoint's own name is never removed before it has another one.
    """
    try:
        with opened(disk, path) as folder:
            if standing(disk, folder) != before:
                return False
    except FileNotFoundError:
        return False
    return not is_leftover(os.path.basename(path)) or is_complete(disk, path) is not None


def check_names(disk: Disk, checkpoint: OpenCheckpoint, *, warns: bool = True) -> tuple[str, ...]:
    """Check that in a checkpoint's directory is what its manifest says; warn of what else is there.

    Returns:
        The files of tensors that are there, in order. Those of other nodes needn't be.

    Raises:
        DamagedCheckpointError: A file is missing.
    """
    manifest = checkpoint.manifest
    there = set(disk.names(checkpoint.folder))
    extra = warns and find_extra(disk, checkpoint.path, there, manifest)
    if extra:
        warnings.warn(f"{describe_extra(checkpoint.path, extra)} They are not read.", stacklevel=2)
    for name, file in sorted(manifest.files.items()):
        if name not in there and file.node in (None, manifest.node):
            raise DamagedCheckpointError(
                f"{os.path.join(checkpoint.path, name)} is missing, and the manifest names it. Take another "
                "copy, or an older checkpoint.",
                name,
            )
    return tuple(sorted(there & manifest.files.keys()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What a sound checkpoint is.

    Attributes:
        path: Its directory.
        files: Names of its files of tensors that are in the directory.
        attachments: Paths of the files in it that the caller had put there.
        num_bytes: Of all these files, all of which were read.
        num_tensors: In the checkpoint as a whole.
        step: What its writer counted; None where it wasn't given.
        metric: What its writer measured; None where it wasn't given.
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
        check_names(disk, checkpoint)
        rows = _check_each(disk, checkpoint)
        for _, error in rows:
            if error is not None:
                raise error
        read = [row for row, _ in rows[1:] if row.node is None and not row.is_extra]
        return CheckpointReport(
            path=Path(checkpoint.path),
            files=tuple(row.name for row in read if row.name in manifest.files),
            attachments=tuple(sorted(manifest.attachments)),
            num_bytes=sum(row.size for row in read),
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
    rows: list[_Row] = []
    place = Path(directory)

    def check(checkpoint: OpenCheckpoint) -> None:
        nonlocal place
        place = Path(checkpoint.path)
        rows[:] = _check_each(disk, checkpoint)
        for _, error in rows:
            if error is not None:  # looked at again, where another program has replaced it meanwhile
                raise error

    try:
        read_checkpoint(disk, directory, check)
    except DamagedCheckpointError:
        if not rows:
            raise
    return place, tuple(row for row, _ in rows)


_Row: TypeAlias = "tuple[FileReport, DamagedCheckpointError | None]"


def _check_each(disk: Disk, checkpoint: OpenCheckpoint) -> list[_Row]:
    manifest, folder = checkpoint.manifest, checkpoint.folder
    expected = expected_entries(manifest)
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
    for name, file in sorted(manifest.files.items()):
        if name not in there and file.node not in (None, manifest.node):
            rows.append((FileReport(name, file.size, node=file.node), None))
        else:
            check(name, file.size, partial(verify_tensor_file, disk, folder, name, file, expected[name]))
    for name, stored in sorted(manifest.attachments.items()):
        check(name, stored.size, partial(check_attachment, disk, folder, name, stored))
    extra = find_extra(disk, checkpoint.path, there, manifest)
    return rows + [(FileReport(name, size_of(name), is_extra=True), None) for name in extra]


def parts_at(disk: Disk, directory: str) -> list[tuple[str, str]]:
    """List the checkpoints that this node has under one name: identity and path, oldest first."""
    parent, name = os.path.split(directory)
    paths = [one.path for one in find_leftovers(disk, parent, name) if one.kind == "replaced"]
    heads = [(path, is_complete(disk, path)) for path in (*paths, directory)]
    found = [(head.generation, head.identity, path) for path, head in heads if head is not None]
    return [(identity, path) for _, identity, path in sorted(found)]


def parts_below(disk: Disk, directory: str) -> list[tuple[str, str]]:
    """List all that this node has in a directory of checkpoints, oldest first, or under the name itself."""
    own = parts_at(disk, directory)
    if own:
        return own
    try:
        found, _ = scan(disk, directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [part for one in found for part in parts_at(disk, one.path)]


def common(parts: Sequence[Sequence[Sequence[str]]], directory: str) -> str | None:
    """Return the identity of the newest checkpoint that all nodes have; None where no node has any. Pure.

    Args:
        parts: Of each node, identity and path, oldest first.
        directory: For the message.

    Raises:
        NoCheckpointError: Nodes have some, and none in common.

    >>> common([[("a", "x"), ("b", "y")], [("a", "x")]], "checkpoint")
    'a'
    """
    if not any(parts):
        return None
    others = [{identity for identity, _ in own} for own in parts[1:]]
    shared = [identity for identity, _ in parts[0] if all(identity in own for own in others)]
    if not shared:
        counts = ", ".join(f"{len(own)} on node {node}" for node, own in enumerate(parts))
        raise NoCheckpointError(
            f"{directory}: no checkpoint is on the disks of all nodes ({counts}, none in common). Bring the "
            "disk of the node that was replaced, or copy its part from where it is."
        )
    return shared[-1]


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
            is_sound = size == stored.size and checksums(disk, descriptor, size) == stored.crc32
    finally:
        disk.close(descriptor)
    if not is_sound:
        raise DamagedCheckpointError(
            f"{path} is damaged: its bytes aren't those that were written. Take another copy, or an older "
            "checkpoint.",
            name,
        )
