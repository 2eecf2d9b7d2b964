"""Load the state of a run: everything is read and verified on all ranks before anything is changed."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.checkpoint.background import CollectivePhases, finish_background, paused_collection
from accelfn.checkpoint.document.compare import match
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.document.nodes import stored_names
from accelfn.checkpoint.find import (
    OpenCheckpoint,
    check_names,
    locate,
    newest_first,
    read_checkpoint,
)
from accelfn.checkpoint.manifest import MANIFEST, Json, Manifest, StoredTensor, entry_key, leaf_path
from accelfn.checkpoint.objects import (
    is_named_optimizer,
)
from accelfn.checkpoint.overlaps import Known, find_overlaps, memory_for, part_of
from accelfn.checkpoint.read import Box, read_boxes
from accelfn.checkpoint.restore import (
    Read,
    Request,
    begin_load,
    document_for,
    plan_read,
    restore,
)
from accelfn.checkpoint.scheduled_disk import disk_of
from accelfn.checkpoint.verify import check_attachments
from accelfn.comm import catch
from accelfn.context import Context, takes_context
from accelfn.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedCheckpointError,
    Misfit,
    NoCheckpointError,
    RemoteRankError,
)
from accelfn.parallel.engines import with_plain_objects
from accelfn.storage.address import as_path
from accelfn.storage.disk import Disk
from accelfn.storage.object_store import disk_at
from accelfn.tree import local_of

T = TypeVar("T")

# How often another program may remove a checkpoint between finding and opening it.
_ATTEMPTS = 5
# New memory for what is written into the tree's memory at the end; the rest is read for a second time then,
# which takes a third longer.
_KEPT_BYTES = 1 << 26


class StoredParts(NamedTuple):
    """Documents of a checkpoint, and the tensors that they name: complete, verified, on the CPU."""

    path: str
    manifest: Manifest
    documents: list[Json]
    tensors: dict[str, torch.Tensor]


@takes_context
def load_state(
    ctx: Context,
    directory: str | os.PathLike[str],
    like: T,
    *,
    strict: bool = True,
    random_state: bool = True,
    partial: bool | Sequence[str] = False,
) -> T:
    """Load the state that :func:`accelfn.save_state` has saved, on any number of ranks.

    Modules, optimizers, schedulers, loaders and other objects with ``load_state_dict`` are loaded in place,
    and so are generators, and parameters that are leaves of the tree. Everything else is a new value in the
    returned tree: tensors (on the device of the tensor in ``like``, or on the CPU if that is the meta
    device), numbers, records.

    Every byte that is needed is read and verified first, on all ranks. If any rank raises, nothing has been
    changed on any of them. Then weights, parameters and the states that an optimizer has already are read
    once more, straight into their memory, so that a rank holds at most 64 MiB besides its own state.
    Only if files fail or change between these two readings, an error leaves objects changed.

    On another number of ranks, replicated tensors and the position in the data are the same; sharded tensors
    (DTensor) get the sharding of ``like``; and values that each rank had for itself are assigned to the ranks
    in turn. Ranks along tp, which share their data, get the same.

    Ranks: every rank of ``ctx``. Returns when all ranks have loaded their part.

    Args:
        ctx: The world.
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.
        like: A tree of the same names as the one that was saved. Parts of it without tensors and objects,
            such as numbers and lists of numbers, may have any form: they come back as they were saved.
        strict: Refuse modules whose state dict has other names. Otherwise what is missing keeps its values.
        random_state: Whether to restore the random number generators of this process.
        partial: Which parts of the checkpoint ``like`` may lack: True for any, as for a program that
            evaluates and needs only the model; or paths such as ``["optimizer", "models/critic"]``. They
            aren't read. What ``like`` has must be in the checkpoint in any case.

    Returns:
        ``like``, with new records.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        DamagedCheckpointError: Its bytes or files aren't those that were written.
        CheckpointMismatchError: Leaves are missing, extra, misshapen or of another dtype; all, by path.
        NotAvailableError: A newer version of accelfn has written it.
        RemoteRankError: One of these happened on another rank; or an earlier save in the background has
            failed, and another rank has not asked for its result.
    """
    phases = CollectivePhases(ctx, "load_state")
    plain, write_back = with_plain_objects(like)
    request = begin_load(ctx, phases, directory, plain, strict, partial)
    return write_back(_load(ctx, phases, request.directory, plain, request, random_state))


@takes_context
def load_latest(
    ctx: Context,
    directory: str | os.PathLike[str],
    like: T,
    *,
    strict: bool = True,
    random_state: bool = True,
    partial: bool | Sequence[str] = False,
) -> T | None:
    """Load the newest checkpoint if there is any, as :func:`accelfn.load_state` does; return None otherwise.

    So a program starts and resumes with the same lines. Rank 0 lists the checkpoints, and all ranks read and
    verify the same one. If its bytes are damaged, the next older one is loaded instead, with a warning that
    names both; if all are damaged, that is an error. One that doesn't fit ``like`` is an error too.

    Ranks: every rank of ``ctx``. Returns when all ranks have loaded their part; None on all of them or on
    none.

    Args:
        ctx: The world.
        directory: A directory of checkpoints, or a checkpoint; it needn't exist.
        like: As of ``load_state``.
        strict: As of ``load_state``.
        random_state: As of ``load_state``.
        partial: As of ``load_state``.

    Returns:
        ``like``, with new records; None if there is no checkpoint.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
        CheckpointMismatchError: Leaves are missing, extra, misshapen or of another dtype; all, by path.
        NotAvailableError: A newer version of accelfn has written the newest.
        NotADirectoryError: ``directory`` is a file.
        RemoteRankError: One of these happened on another rank.

    >>> import tempfile, accelfn as af
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     before = load_latest(Context(), folder, {"step": 0})
    ...     _ = af.save_state(Context(), f"{folder}/step-7", {"step": 7}, step=7)
    ...     before, load_latest(Context(), folder, {"step": 0})
    (None, {'step': 7})
    """
    phases = CollectivePhases(ctx, "load_latest")
    plain, write_back = with_plain_objects(like)
    request = begin_load(ctx, phases, directory, plain, strict, partial)
    paths = _list_together(phases, request)
    for path, older in zip(paths, [*paths, None][1:], strict=True):
        loaded, error = catch(functools.partial(_load, ctx, phases, path, plain, request, random_state))
        if error is None:
            return write_back(loaded)
        if older is None or not _is_damage(error):
            raise error
        if ctx.is_main_process:
            warnings.warn(f"load_latest: {error} Loading {older} instead.", stacklevel=3)
    return None


def _is_damage(error: Exception) -> bool:
    """Return whether this rank or another one has found damage in a checkpoint."""
    cause = error.cause if isinstance(error, RemoteRankError) else type(error).__name__
    return cause == DamagedCheckpointError.__name__


def _load(
    ctx: Context, phases: CollectivePhases, path: str, like: T, request: Request, random_state: bool
) -> T:
    disk = request.disk
    for _ in range(_ATTEMPTS):
        read = _read_together(disk, phases, path, lambda found: _read(ctx, disk, like, request, found))
        value, is_complete = restore(ctx, phases, like, request, read, random_state=random_state)
        if is_complete:
            return value
    raise _changes_all_the_time(phases, path)


def load_tree(path: str | os.PathLike[str], like: Any = None, *, namespace: str = "") -> Any:
    """Load a tree that :func:`save_tree` has saved, or that of any checkpoint.

    Every byte is verified before anything is returned. A file can't cause an import or run code: classes of
    named tuples, enums and registered nodes are those of ``like``, or else those that the program has
    imported already.

    Ranks: local. From a checkpoint of several ranks, it loads the tree of rank 0.

    Args:
        path: A checkpoint, or a directory of checkpoints: then the newest in it.
        like: A tree of the same structure. Objects in it that have ``load_state_dict`` are loaded in place;
            everything else is a new value. None returns the tree as it was saved, with the states of objects
            as dicts.
        namespace: The optree namespace of your own registered nodes, if they have one.

    Returns:
        The tree. Tensors are on the CPU.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        DamagedCheckpointError: Its bytes or files aren't those that were written.
        CheckpointMismatchError: It doesn't fit ``like``; or ``like`` has an optimizer that ``save_state``
            has saved: load that with ``load_state``.
    """
    disk = disk_at(path)

    def read(found: OpenCheckpoint) -> tuple[Json, dict[str, torch.Tensor]]:
        check_names(disk, found)
        document = document_for(found.manifest, 0)
        if like is not None:
            matched = match(document, found.manifest.tensors, like, namespace=namespace)
            if matched.rows:
                raise CheckpointMismatchError(f"load_tree: {found.path} does not fit the tree.", matched.rows)
            # save_state stores an optimizer's parameters by name, and torch identifies them by number.
            named = [one for one in matched.objects if is_named_optimizer(one)]
            if named:
                raise CheckpointMismatchError(
                    f"load_tree: {found.path} was written by save_state, and only load_state can load its "
                    "optimizers. Nothing was changed.",
                    [Misfit(one.path, "a state by names of parameters", "one by numbers") for one in named],
                )
        is_all = found.manifest.world_size == 1 and found.manifest.random is None
        names = found.manifest.tensors if is_all else stored_names(document)
        return document, _read_tensors(disk, found, dict.fromkeys(names))

    with paused_collection():
        document, tensors = read_checkpoint(disk, path, read)
        return decode(document, tensors, like=like, namespace=namespace)


def read_parts(
    directory: str | os.PathLike[str],
    choose: Callable[[Manifest], Sequence[Json]],
    *,
    disk: Disk | None = None,
) -> StoredParts:
    """Read some documents of a checkpoint, and only the tensors that they name.

    Ranks: local.

    Args:
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.
        choose: Returns the documents of a manifest, each for one rank, see ``document_of``.
        disk: The operations on files; None for those of the system, or of an object store.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        DamagedCheckpointError: Its bytes aren't those that were written.
    """
    own = disk or disk_at(directory)

    def read(found: OpenCheckpoint) -> StoredParts:
        documents = list(choose(found.manifest))
        tensors = _read_tensors(own, found, dict.fromkeys(stored_names(documents)))
        return StoredParts(found.path, found.manifest, documents, tensors)

    with paused_collection():
        return read_checkpoint(own, directory, read)


# --- reading -------------------------------------------------------------------------------------


@paused_collection()
def _read_together(
    disk: Disk, phases: CollectivePhases, directory: str, read: Callable[[OpenCheckpoint], Read]
) -> Read:
    """Read each rank's part of one checkpoint, even if another program replaces or removes checkpoints."""
    identities: list[str] = []
    for _ in range(_ATTEMPTS):
        path = _find_together(disk, phases, directory)
        found, error = catch(functools.partial(read_checkpoint, disk, path, read))
        if isinstance(error, NoCheckpointError):
            error = None  # it was removed after it had been found; all ranks look again
        identities = phases.gather("read", "" if found is None else found.manifest.identity, error)
        if found is not None and len(set(identities)) == 1:
            return found
    if identities[0] and "" in identities:
        raise NoCheckpointError(
            f"{phases.operation}: rank 0 finds a checkpoint in {directory}, and rank {identities.index('')} "
            "doesn't: the path must be on a disk that all ranks share. Pass another one, or copy it there."
        )
    raise _changes_all_the_time(phases, directory)


def _changes_all_the_time(phases: CollectivePhases, directory: str) -> CheckpointError:
    return CheckpointError(
        f"{phases.operation}: {directory} changes all the time: another program replaces or removes "
        "checkpoints there while this one reads. Load a copy, or wait for that program."
    )


def _find_together(disk: Disk, phases: CollectivePhases, directory: str) -> str:
    """Choose the same checkpoint on all ranks: the one that rank 0 finds."""
    path, error = catch(lambda: locate(disk, directory)) if phases.ctx.is_main_process else ("", None)
    absent = str(error) if isinstance(error, NoCheckpointError) else None
    text = json.dumps([path, absent])
    path, absent = json.loads(phases.gather("find", text, None if absent else error)[0])
    if absent is not None:  # the same class on every rank, since programs catch it
        raise NoCheckpointError(absent)
    return path


def _list_together(phases: CollectivePhases, request: Request) -> list[str]:
    """List the checkpoints to try, newest first: those that rank 0 finds."""
    found, error = (
        catch(lambda: newest_first(request.disk, request.directory))
        if phases.ctx.is_main_process
        else ([], None)
    )
    return json.loads(phases.gather("list", json.dumps(found), error)[0])


def find_checkpoint(ctx: Context, directory: str | os.PathLike[str]) -> Path:
    """Return which checkpoint :func:`accelfn.load_state` would load.

    Ranks: every rank of ``ctx``; the same on each.

    Args:
        ctx: The world.
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        RemoteRankError: This happened on another rank, or an earlier background save has failed.
    """
    return as_path(_find_first(CollectivePhases(ctx, "find_checkpoint"), directory)[1])


def _find_first(phases: CollectivePhases, directory: str | os.PathLike[str]) -> tuple[Disk, str]:
    """Wait for a save in the background, and return the checkpoint that rank 0 finds, and its disk."""

    def begin() -> Disk:
        finish_background(phases.ctx)
        return disk_of(phases.ctx, disk_at(directory))

    disk, error = catch(begin)
    phases.gather("begin", "", error)
    assert disk is not None  # otherwise gather has raised
    return disk, _find_together(disk, phases, str(as_path(directory)))


def find_files(ctx: Context, directory: str | os.PathLike[str]) -> Path:
    """Return the directory of the files that the caller of ``save_state`` put into a checkpoint, verified.

    Ranks: every rank of ``ctx``; the same on each.

    Args:
        ctx: The world.
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.

    Returns:
        The directory, in the checkpoint; for a checkpoint without such files, a path where nothing is.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        DamagedCheckpointError: The files aren't what was written.
        NotAvailableError: A newer version of accelfn has written it.
        RemoteRankError: One of these happened on another rank, or an earlier background save has failed.
    """
    phases = CollectivePhases(ctx, "find_files")
    disk, path = _find_first(phases, directory)

    def look(found: OpenCheckpoint) -> str:
        if ctx.is_main_process:
            check_attachments(disk, found)
        tops = (name.partition("/")[0] for name in found.manifest.attachments)
        return os.path.join(found.path, next(tops, "files"))

    folder, error = catch(lambda: read_checkpoint(disk, path, look))
    phases.gather("check", "", error)
    return as_path(cast("str", folder))


def _read(ctx: Context, disk: Disk, like: Any, request: Request, found: OpenCheckpoint) -> Read:
    """Check that a checkpoint fits, and read this rank's part of it."""
    # On all ranks, so that all of them name a missing file, and not only those that need it.
    check_names(disk, found, warns=ctx.is_main_process)
    if ctx.is_main_process:
        check_attachments(disk, found)
    plan = plan_read(ctx, like, request, found.manifest, found.path)
    tensors: dict[str, torch.Tensor] = {}
    later: dict[str, torch.Tensor] = {}
    left = _KEPT_BYTES
    for name, target in plan.wanted.items():
        if name in plan.in_place:
            left -= local_of(plan.in_place[name]).nbytes
            if left < 0:
                later[name] = plan.in_place[name]
                continue
        tensors[name] = memory_for(_stored(found, name), target)
    _fill(disk, found, {**tensors, **later}, later)
    return Read(found.manifest, plan, tensors, functools.partial(_read_again, disk, found))


def _read_again(disk: Disk, before: OpenCheckpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read tensors that have been verified into memory that is in use.

    Raises:
        NoCheckpointError: The checkpoint isn't there any more.
        DamagedCheckpointError: Its bytes aren't those that were read before.
    """

    def read(found: OpenCheckpoint) -> None:
        if found.manifest.identity != before.manifest.identity:
            raise NoCheckpointError(f"{before.path} was replaced while it was loaded.")
        _fill(disk, found, tensors)
        torch.autograd.graph.increment_version([local_of(one) for one in tensors.values()])

    if tensors:
        read_checkpoint(disk, before.path, read)


def _read_tensors(
    disk: Disk, found: OpenCheckpoint, wanted: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Read tensors into new memory, complete or with the sharding of their targets."""
    tensors = {name: memory_for(_stored(found, name), target) for name, target in wanted.items()}
    _fill(disk, found, tensors)
    return tensors


def _stored(found: OpenCheckpoint, name: str) -> StoredTensor:
    if name not in found.manifest.tensors:
        raise DamagedCheckpointError(
            f"{found.path} has no tensor {leaf_path(name)!r}, which its tree names.", MANIFEST
        )
    return found.manifest.tensors[name]


def _fill(
    disk: Disk, found: OpenCheckpoint, tensors: Mapping[str, torch.Tensor], unchanged: Collection[str] = ()
) -> None:
    """Read the tensors that have these names, or this rank's parts of them; only verify ``unchanged``."""
    boxes: list[Box] = []
    targets: list[torch.Tensor | None] = []
    known: Known = {}
    for name, tensor in tensors.items():
        dtype, _, parts = stored = _stored(found, name)
        for lap in find_overlaps(stored, tensor, known):
            key = entry_key(name, parts, lap.part)
            boxes.append(Box(name, key, dtype, lap.part, lap.offset, lap.shape))
            targets.append(None if name in unchanged else part_of(tensor, lap))
    read_boxes(disk, found.folder, found.manifest, boxes, targets)
