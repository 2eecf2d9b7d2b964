"""Load the state of a run: everything is read and verified on all ranks before anything is changed."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.checkpoint.attachments import writes_here
from accelfn.checkpoint.background import CollectivePhases, finish_background, paused_collection
from accelfn.checkpoint.by_rank import Source, document_of, find_source
from accelfn.checkpoint.disk import REAL_DISK, Disk
from accelfn.checkpoint.document.compare import choose_part, match
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.document.nodes import stored_names
from accelfn.checkpoint.files import Box, read_boxes
from accelfn.checkpoint.find import (
    OpenCheckpoint,
    check_names,
    common,
    locate,
    newest_first,
    parts_below,
    read_checkpoint,
)
from accelfn.checkpoint.manifest import MANIFEST, Json, Manifest, leaf_path
from accelfn.checkpoint.objects import (
    Names,
    Pending,
    cannot_fail,
    find_names,
    fit,
    is_in_place,
    is_named_optimizer,
    prepare_undo,
    restore_object,
    restore_order,
    untied_weights,
)
from accelfn.checkpoint.plan import Overlap, find_overlaps, join_overlaps
from accelfn.checkpoint.random_state import restore_random_states
from accelfn.checkpoint.scheduled_disk import disk_of
from accelfn.checkpoint.stages import remove_other_stages
from accelfn.checkpoint.verify import check_attachments
from accelfn.comm import catch
from accelfn.context import Context, check_context
from accelfn.data import LoaderState
from accelfn.data.resume import read_state
from accelfn.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedCheckpointError,
    Misfit,
    NoCheckpointError,
    RemoteRankError,
)
from accelfn.parallel.engines import with_plain_objects
from accelfn.tree import local_of

T = TypeVar("T")

# How often another program may remove a checkpoint between finding and opening it.
_ATTEMPTS = 5


class Read(NamedTuple):
    """The part of a checkpoint that this rank needs, read and verified."""

    manifest: Manifest
    source: Source
    document: Json
    tensors: Mapping[str, torch.Tensor]


class StoredParts(NamedTuple):
    """Documents of a checkpoint, and the tensors that they name: complete, verified, on the CPU."""

    path: str
    manifest: Manifest
    documents: list[Json]
    tensors: dict[str, torch.Tensor]


class Request(NamedTuple):
    """The options of a load, and the names of the objects in the tree to load into."""

    operation: str  # named in errors
    directory: str
    names: Names
    strict: bool
    is_optional: Callable[[str], bool]  # whether the tree needn't have what the checkpoint has at a path


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
    changed on any of them.

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
    check_context("load_state", ctx)
    phases = CollectivePhases(ctx, "load_state")
    plain, write_back = with_plain_objects(like)
    request = begin_load(ctx, phases, directory, plain, strict, partial)
    return write_back(_load(ctx, phases, request.directory, plain, request, random_state))


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
        NoCheckpointError: Nodes with disks of their own have checkpoints, and none in common.
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
    check_context("load_latest", ctx)
    phases = CollectivePhases(ctx, "load_latest")
    plain, write_back = with_plain_objects(like)
    request = begin_load(ctx, phases, directory, plain, strict, partial)
    paths = _list_together(ctx, phases, request.directory)
    for path, older in zip(paths, [*paths, None][1:], strict=True):
        loaded, error = catch(functools.partial(_load, ctx, phases, path, plain, request, random_state))
        if error is None:
            return write_back(loaded)
        if older is None or not _is_damage(error):
            raise error
        if ctx.is_main_process:
            warnings.warn(f"load_latest: {error} Loading {older} instead.", stacklevel=2)
    return None


def _is_damage(error: Exception) -> bool:
    """Return whether this rank or another one has found damage in a checkpoint."""
    cause = error.cause if isinstance(error, RemoteRankError) else type(error).__name__
    return cause == DamagedCheckpointError.__name__


def begin_load(
    ctx: Context,
    phases: CollectivePhases,
    directory: str | os.PathLike[str],
    like: Any,
    strict: bool,
    partial: bool | Sequence[str],
) -> Request:
    """Wait for a save in the background, and check the options, on all ranks."""

    def check() -> Request:
        finish_background(ctx)
        path, is_optional = os.path.abspath(directory), _parse_partial(partial, phases.operation)
        return Request(phases.operation, path, find_names(like), strict, is_optional)

    request, error = catch(check)
    phases.gather("begin", "", error)
    return cast("Request", request)


def _parse_partial(partial: bool | Sequence[str], operation: str) -> Callable[[str], bool]:
    """Return a function for whether a tree may lack a path, from the option ``partial``."""
    if isinstance(partial, bool):
        return lambda path: partial
    if isinstance(partial, str) or not all(isinstance(cast("object", one), str) for one in partial):
        raise TypeError(f"{operation}: partial must be a bool or a list of paths, got {partial!r}.")
    return frozenset(partial).__contains__


def _load(
    ctx: Context, phases: CollectivePhases, path: str, like: T, request: Request, random_state: bool
) -> T:
    disk = disk_of(ctx, REAL_DISK)
    read = _read_together(ctx, disk, phases, path, lambda found: _read(ctx, disk, like, request, found))
    return restore(ctx, phases, like, request, read, random_state=random_state)


def restore(
    ctx: Context, phases: CollectivePhases, like: T, request: Request, read: Read, *, random_state: bool
) -> T:
    """Restore this rank's part of a state, and change objects only when no rank's part can be refused.

    Ranks: every rank of ``ctx``.
    """
    prepared, error = catch(lambda: _prepare(read, like))
    phases.gather("decode", "", error)
    assert prepared is not None
    value, pending, writes = prepared
    undo: list[Callable[[], None]] = []
    may_refuse = [one for one in pending if not cannot_fail(one)]
    _, error = catch(lambda: _restore_undoably(may_refuse, request.names, undo))
    try:
        phases.gather("restore", "", error)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    for write in writes:
        write()
    for one in pending:
        if cannot_fail(one):
            restore_object(one, request.names)
    if random_state and read.manifest.random is not None:
        _restore_random(ctx, read)
    phases.gather("loaded", "")
    return cast("T", value)


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
    disk = REAL_DISK

    def read(found: OpenCheckpoint) -> tuple[Json, dict[str, torch.Tensor]]:
        check_names(disk, found)
        document = _document(found.manifest, 0)
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
    disk: Disk = REAL_DISK,
) -> StoredParts:
    """Read some documents of a checkpoint, and only the tensors that they name.

    Ranks: local.

    Args:
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.
        choose: Returns the documents of a manifest, each for one rank, see ``document_of``.
        disk: The operations on files.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        DamagedCheckpointError: Its bytes aren't those that were written.
    """

    def read(found: OpenCheckpoint) -> StoredParts:
        documents = list(choose(found.manifest))
        tensors = _read_tensors(disk, found, dict.fromkeys(stored_names(documents)))
        return StoredParts(found.path, found.manifest, documents, tensors)

    with paused_collection():
        return read_checkpoint(disk, directory, read)


# --- reading -------------------------------------------------------------------------------------


def _read_together(
    ctx: Context,
    disk: Disk,
    phases: CollectivePhases,
    directory: str,
    read: Callable[[OpenCheckpoint], Read],
) -> Read:
    """Read each rank's part of one checkpoint, even if another program replaces or removes checkpoints."""
    for _ in range(_ATTEMPTS):
        path, identity = _find_together(ctx, disk, phases, directory)
        found, error = catch(functools.partial(read_checkpoint, disk, path, read, identity=identity))
        if isinstance(error, NoCheckpointError):
            error = None  # it was removed after it had been found; all ranks look again
        identities = phases.gather("read", "" if found is None else found.manifest.identity, error)
        if found is not None and len(set(identities)) == 1:
            return found
    raise CheckpointError(
        f"{phases.operation}: {directory} changes all the time: another program replaces or removes "
        "checkpoints there while this one reads. Load a copy, or wait for that program."
    )


def _find_together(
    ctx: Context, disk: Disk, phases: CollectivePhases, directory: str
) -> tuple[str, str | None]:
    """Choose the same checkpoint on all ranks: the one that rank 0 finds, or the newest that all nodes have.

    Returns:
        Its path; and its identity, where nodes have disks of their own.
    """
    if not ctx.project.save_on_each_node:
        path, error = catch(lambda: locate(disk, directory)) if ctx.is_main_process else ("", None)
        absent = str(error) if isinstance(error, NoCheckpointError) else None
        text = json.dumps([path, absent])
        path, absent = json.loads(phases.gather("find", text, None if absent else error)[0])
        if absent is not None:  # the same class on every rank, since programs catch it
            raise NoCheckpointError(absent)
        return path, None
    parts, error = catch(lambda: parts_below(disk, directory)) if ctx.is_local_main_process else ([], None)
    text = json.dumps([ctx.world.node_rank, ctx.is_local_main_process, parts])
    ranks = [json.loads(text) for text in phases.gather("find", text, error)]
    by_node = {node: parts for node, is_main, parts in ranks if is_main}
    identity = common([by_node[node] for node in sorted(by_node)], directory)
    if identity is None:
        return locate(disk, directory), None  # its error names what is there instead
    return dict(by_node[ctx.world.node_rank])[identity], identity


def _list_together(ctx: Context, phases: CollectivePhases, directory: str) -> list[str]:
    """List the checkpoints to try, newest first: those that rank 0 finds, or the one that all nodes have."""
    each_node = ctx.project.save_on_each_node
    list_paths = parts_below if each_node else newest_first
    disk = disk_of(ctx, REAL_DISK)
    found, error = catch(lambda: list_paths(disk, directory)) if writes_here(ctx) else ([], None)
    ranks = [json.loads(text) for text in phases.gather("list", json.dumps(found), error)]
    return ranks[0] if not each_node else [directory] if any(ranks) else []


def find_checkpoint(ctx: Context, directory: str | os.PathLike[str]) -> Path:
    """Return which checkpoint :func:`accelfn.load_state` would load.

    Ranks: every rank of ``ctx``; the same on each, or on each of a node with
    ``ProjectConfiguration.save_on_each_node``.

    Args:
        ctx: The world.
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        RemoteRankError: This happened on another rank, or an earlier background save has failed.
    """
    phases = CollectivePhases(ctx, "find_checkpoint")
    _, error = catch(lambda: finish_background(ctx))
    phases.gather("begin", "", error)
    disk = disk_of(ctx, REAL_DISK)
    return Path(_find_together(ctx, disk, phases, os.path.abspath(directory))[0])


def find_files(ctx: Context, directory: str | os.PathLike[str]) -> Path:
    """Return the directory of the files that the caller of ``save_state`` put into a checkpoint, verified.

    Ranks: every rank of ``ctx``; the same on each, or on each of a node with
    ``ProjectConfiguration.save_on_each_node``.

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
    disk, phases = disk_of(ctx, REAL_DISK), CollectivePhases(ctx, "find_files")
    _, error = catch(lambda: finish_background(ctx))
    phases.gather("begin", "", error)
    path, identity = _find_together(ctx, disk, phases, os.path.abspath(directory))

    def look(found: OpenCheckpoint) -> str:
        if writes_here(ctx):
            check_attachments(disk, found)
        tops = (name.partition("/")[0] for name in found.manifest.attachments)
        return os.path.join(found.path, next(tops, "files"))

    folder, error = catch(lambda: read_checkpoint(disk, path, look, identity=identity))
    phases.gather("check", "", error)
    return Path(cast("str", folder))


class ReadPlan(NamedTuple):
    """The part of a checkpoint that this rank needs.

    Attributes:
        source: The rank whose documents it loads.
        document: Of the tree.
        wanted: Names of tensors; with the tensor of the tree whose sharding they get, or None.
    """

    source: Source
    document: Json
    wanted: Mapping[str, torch.Tensor | None]


def plan_read(ctx: Context, like: Any, request: Request, manifest: Manifest, where: str) -> ReadPlan:
    """Check that a state fits a tree, and plan what this rank reads of it. Pure.

    Args:
        ctx: The world, which may be another one than that of the state.
        like: The tree to load into.
        request: The options.
        manifest: Of the state.
        where: Its path, for errors.

    Raises:
        CheckpointMismatchError: Leaves are missing, extra, misshapen or of another dtype; all, by path.
    """
    names, source = request.names, find_source(ctx, manifest)
    document = choose_part(_document(manifest, source.rank), like, request.is_optional)
    matched = match(document, manifest.tensors, like)
    remove_other_stages(matched.objects, names)
    fits = [fit(one, names, manifest.tensors, strict=request.strict) for one in matched.objects]
    rows = [*matched.rows, *(row for one in fits for row in one.rows)]
    if rows:
        count = "1 leaf" if len(rows) == 1 else f"{len(rows)} leaves"
        # Only if that alone would help.
        extra = all(row.wanted == "nothing" for row in rows)
        advice = " To load a part of it, pass partial=True, or the paths to leave out." if extra else ""
        raise CheckpointMismatchError(
            f"{request.operation}: {where} does not fit the tree in {count}. Nothing was changed.{advice}",
            rows,
        )
    wanted: dict[str, torch.Tensor | None] = dict.fromkeys(stored_names(document))
    wanted.update({name: one for name, one in matched.leaves.items() if isinstance(one, torch.Tensor)})
    for one in fits:
        wanted.update(one.targets)
    wanted.update(dict.fromkeys(stored_names(document_of(manifest.random, source.rank))))
    return ReadPlan(source, document, wanted)


@paused_collection()
def _read(ctx: Context, disk: Disk, like: Any, request: Request, found: OpenCheckpoint) -> Read:
    """Check that a checkpoint fits, and read this rank's part of it."""
    # On all ranks, so that all of them name a missing file, and not only those that need it.
    check_names(disk, found, warns=writes_here(ctx))
    if writes_here(ctx):
        check_attachments(disk, found)
    plan = plan_read(ctx, like, request, found.manifest, found.path)
    tensors = _read_tensors(disk, found, plan.wanted)
    return Read(found.manifest, plan.source, plan.document, tensors)


def _document(manifest: Manifest, rank: int) -> Json:
    return manifest.tree if manifest.world_size == 1 else document_of(manifest.tree, rank)


def _read_tensors(
    disk: Disk, found: OpenCheckpoint, wanted: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Read tensors, complete or with the sharding of their targets."""
    boxes: list[Box] = []
    ends: list[int] = []
    plans: list[tuple[str, torch.Tensor | None, list[Overlap]]] = []
    for name, target in wanted.items():
        one = found.manifest.tensors.get(name)
        if one is None:
            raise DamagedCheckpointError(
                f"{found.path} has no tensor {leaf_path(name)!r}, which its tree names.", MANIFEST
            )
        overlaps = find_overlaps(one, target)
        boxes += [Box(name, one.dtype, lap.piece, lap.offset, lap.shape) for lap in overlaps]
        ends.append(len(boxes))
        plans.append((name, target, overlaps))
    parts = read_boxes(disk, found.folder, found.manifest, boxes)
    starts = [0, *ends][:-1]  # empty if no tensor is wanted
    return {
        name: join_overlaps(found.manifest.tensors[name], target, overlaps, parts[start:end])
        for (name, target, overlaps), start, end in zip(plans, starts, ends, strict=True)
    }


# --- restoring -----------------------------------------------------------------------------------


@paused_collection()
def _prepare(read: Read, like: Any) -> tuple[Any, list[Pending], list[Callable[[], None]]]:
    """Build the new tree, and list the objects to restore and the calls that write into tensors."""
    pending: list[Pending] = []

    def defer(path: str, thing: Any, state: Any) -> Any:
        if isinstance(thing, LoaderState):
            return read_state(state)
        pending.append(Pending(path, thing, state))
        return thing

    writes: list[Callable[[], None]] = []
    adopt = functools.partial(_adopt, writes)
    value = decode(read.document, read.tensors, like=like, restore=defer, adopt=adopt)
    rows = [row for one in pending for row in untied_weights(one)]
    if rows:
        raise CheckpointMismatchError(
            "load_state: weights that are tied in a module were saved separately. Nothing was changed.", rows
        )
    return value, sorted(pending, key=restore_order), writes


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        local_of(target).copy_(local_of(source))


def _adopt(writes: list[Callable[[], None]], like: Any, value: Any) -> Any:
    """Return a loaded tensor on the device of ``like``, or a parameter or generator of ``like`` itself.

    Those are written into later, by the calls that are appended to ``writes``.
    """
    if isinstance(like, torch.Generator) and isinstance(value, torch.Generator):
        if like.device != value.device:
            return value
        writes.append(functools.partial(like.set_state, value.get_state()))  # pyright: ignore[reportArgumentType]
        return like
    if not isinstance(like, torch.Tensor) or not isinstance(value, torch.Tensor) or like.is_meta:
        return value
    if is_in_place(like):
        writes.append(functools.partial(_write, like, value))
        return like
    moved = value if value.device == like.device else value.detach().to(like.device)
    return moved.requires_grad_() if value.requires_grad and not moved.requires_grad else moved


def _restore_undoably(pending: Sequence[Pending], names: Names, undo: list[Callable[[], None]]) -> None:
    """Restore objects, and append the calls that reverse it to ``undo``."""
    for one in pending:
        undo.append(prepare_undo(one))
        try:
            restore_object(one, names)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                cast("Any", error).add_note(f"raised while {one.path!r} was restored")
            raise


def _restore_random(ctx: Context, read: Read) -> None:
    states = decode(document_of(read.manifest.random, read.source.rank), read.tensors)
    restore_random_states(ctx, states, is_own=read.source.is_own)
