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
    check_attachments,
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
from accelfn.checkpoint.stages import remove_other_stages
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
from accelfn.tree import local_of

T = TypeVar("T")

# How often a checkpoint may vanish between finding and opening it, since another program prunes.
_ATTEMPTS = 5


class _Read(NamedTuple):
    """What a checkpoint has for this rank, read and verified."""

    manifest: Manifest
    source: Source
    document: Json
    tensors: Mapping[str, torch.Tensor]


class StoredParts(NamedTuple):
    """Documents of a checkpoint, and the tensors that they name: whole, verified, on the CPU."""

    path: str
    manifest: Manifest
    documents: list[Json]
    tensors: dict[str, torch.Tensor]


class _Asked(NamedTuple):
    """What the tree to load into asks for."""

    operation: str  # named in errors
    place: str
    names: Names
    strict: bool
    may_leave: Callable[[str], bool]


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

    Modules, optimizers, schedulers, loaders and whatever else has ``load_state_dict`` are loaded in place,
    and so are generators, and parameters that stand in the tree by themselves. Everything else comes back as
    new values in the tree that is returned: tensors (on the device where ``like`` has theirs, or on the CPU
    where that is the meta device), numbers, records.

    Every byte that is needed is read and verified first, on all ranks. Whatever is raised, on any rank,
    nothing was changed on any of them.

    Of another world size, replicated tensors and the place in the data come back as they were; cut tensors
    (DTensor) in whatever cut ``like`` has them; and what each rank had for itself goes to the ranks in turn,
    those along tp, which share their data, alike.

    Ranks: every rank of ``ctx``. Returns when all ranks have taken up their part.

    Args:
        ctx: The world.
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.
        like: A tree of the same names as the one that was saved. Parts of it without tensors and objects,
            such as numbers and lists of numbers, may have any form: they come back as they were saved.
        strict: Refuse modules whose state dict has other names. Otherwise what is missing keeps its values.
        random_state: Whether to restore the random number generators of this process.
        partial: What of the checkpoint ``like`` needn't have: True for all of it, as when a program that
            evaluates wants the model alone; or a list of paths, such as ``["optimizer", "models/critic"]``.
            It is left out, and not read. What ``like`` has must be there in any case.

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
    asked = _begin(ctx, phases, directory, like, strict, partial)
    return _load(ctx, phases, asked.place, like, asked, random_state)


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

    So a program begins and goes on by the same lines. Rank 0 looks what is there, and all ranks read and
    verify the same checkpoint. Where its bytes are damaged, the next older one is loaded instead, with a
    warning that names both; where all are damaged, that is an error. One that doesn't fit ``like`` is an
    error too.

    Ranks: every rank of ``ctx``. Returns when all ranks have loaded their part; None on all of them or on
    none.

    Args:
        ctx: The world.
        directory: A directory of checkpoints, or a checkpoint; it needn't be there.
        like: As of ``load_state``.
        strict: As of ``load_state``.
        random_state: As of ``load_state``.
        partial: As of ``load_state``.

    Returns:
        ``like``, with new records; None, where there is no checkpoint.

    Raises:
        DamagedCheckpointError: No checkpoint that is there is what was written.
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
    asked = _begin(ctx, phases, directory, like, strict, partial)
    places = _list_together(ctx, phases, asked.place)
    for place, older in zip(places, [*places, None][1:], strict=True):
        loaded, error = catch(functools.partial(_load, ctx, phases, place, like, asked, random_state))
        if error is None:
            return loaded
        if older is None or not _is_damage(error):
            raise error
        if ctx.is_main_process:
            warnings.warn(f"load_latest: {error} It loads {older} instead.", stacklevel=2)
    return None


def _is_damage(error: Exception) -> bool:
    """Whether this rank or another one has found that a checkpoint isn't what was written."""
    cause = error.cause if isinstance(error, RemoteRankError) else type(error).__name__
    return cause == DamagedCheckpointError.__name__


def _begin(
    ctx: Context,
    phases: CollectivePhases,
    directory: str | os.PathLike[str],
    like: Any,
    strict: bool,
    partial: bool | Sequence[str],
) -> _Asked:
    """Wait for a save in the background, and look at what is asked for, on all ranks."""

    def look() -> _Asked:
        finish_background(ctx)
        place = os.path.abspath(directory)
        return _Asked(
            phases.operation, place, find_names(like), strict, _may_leave_out(partial, phases.operation)
        )

    asked, error = catch(look)
    phases.gather("begin", "", error)
    return cast("_Asked", asked)


def _may_leave_out(partial: bool | Sequence[str], operation: str) -> Callable[[str], bool]:
    """Read the option ``partial``: return whether a path needn't be asked for."""
    if isinstance(partial, bool):
        return lambda path: partial
    if isinstance(partial, str) or not all(isinstance(cast("object", one), str) for one in partial):
        raise TypeError(f"{operation}: partial must be a bool or a list of paths, got {partial!r}.")
    return frozenset(partial).__contains__


def _load(
    ctx: Context, phases: CollectivePhases, place: str, like: T, asked: _Asked, random_state: bool
) -> T:
    """Read on all ranks what is asked for, and let objects take it up if that is possible on all ranks."""
    disk = REAL_DISK
    read = _read_together(ctx, disk, phases, place, lambda found: _read(ctx, disk, like, asked, found))
    prepared, error = catch(lambda: _prepare(read, like))
    phases.gather("decode", "", error)
    assert prepared is not None
    value, pending, writes = prepared
    undo: list[Callable[[], None]] = []
    may_refuse = [one for one in pending if not cannot_fail(one)]
    _, error = catch(lambda: _take_up(may_refuse, asked.names, undo))
    try:
        phases.gather("take up", "", error)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    for write in writes:
        write()
    for one in pending:
        if cannot_fail(one):
            restore_object(one, asked.names)
    if random_state and read.manifest.random is not None:
        _restore_random(ctx, read)
    phases.gather("loaded", "")
    return cast("T", value)


def load_tree(path: str | os.PathLike[str], like: Any = None, *, namespace: str = "") -> Any:
    """Load a tree that :func:`save_tree` has saved, or that of any checkpoint.

    Every byte is verified before anything is handed out. Nothing is imported and no code is run for a file:
    classes of named tuples, enums and registered nodes are those of ``like``, or else those that the program
    has imported already.

    Ranks: local. Of a checkpoint of several ranks, what rank 0 had.

    Args:
        path: A checkpoint, or a directory of checkpoints: then the newest in it.
        like: A tree of the same structure. Objects in it that have ``load_state_dict`` are loaded in place;
            everything else comes back as new values. None takes the tree as it was saved, with the states of
            objects as dicts.
        namespace: Of optree, where nodes of your own are registered in one.

    Returns:
        The tree. Tensors are on the CPU.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        DamagedCheckpointError: Its bytes or files aren't those that were written.
        CheckpointMismatchError: It doesn't fit ``like``; or an optimizer in ``like`` was saved by
            ``save_state``: use ``load_state`` for it.
    """
    disk = REAL_DISK

    def read(found: OpenCheckpoint) -> tuple[Json, dict[str, torch.Tensor]]:
        check_names(disk, found)
        document = _document(found.manifest, 0)
        if like is not None:
            matched = match(document, found.manifest.tensors, like, namespace=namespace)
            if matched.rows:
                raise CheckpointMismatchError(f"load_tree: {found.path} does not fit the tree.", matched.rows)
            # save_state calls the parameters of an optimizer by name, which torch doesn't take.
            named = [one for one in matched.objects if is_named_optimizer(one)]
            if named:
                raise CheckpointMismatchError(
                    f"load_tree: {found.path} was written by save_state, and only load_state brings its "
                    "optimizers back. Nothing was changed.",
                    [Misfit(one.path, "a state by names of parameters", "one by numbers") for one in named],
                )
        alone = found.manifest.world_size == 1 and found.manifest.random is None
        names = found.manifest.tensors if alone else stored_names(document)
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
    """Read some documents of a checkpoint, with their tensors and no others.

    Ranks: local.

    Args:
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.
        choose: Gives the documents for a manifest; without parts by rank, see ``document_of``.
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
    place: str,
    read: Callable[[OpenCheckpoint], _Read],
) -> _Read:
    """Let every rank read its part of one checkpoint, though another program may replace or remove it."""
    for _ in range(_ATTEMPTS):
        path = _find_together(ctx, disk, phases, place)
        found, error = catch(functools.partial(read_checkpoint, disk, path, read))
        if isinstance(error, NoCheckpointError):
            error = None  # it was there a moment ago; all look again
        identity = "" if found is None else found.manifest.identity
        identities = phases.gather("read", identity, error)
        if found is not None and len(set(identities)) == 1:
            return found
    raise CheckpointError(
        f"{phases.operation}: {place} changes all the time: another program replaces or removes checkpoints "
        "there while this one reads. Load from a directory of its own."
    )


def _find_together(ctx: Context, disk: Disk, phases: CollectivePhases, place: str) -> str:
    """Let all ranks choose the same checkpoint: as rank 0 finds it, or the newest that all nodes have."""
    if not ctx.project.save_on_each_node:
        path, error = catch(lambda: locate(disk, place)) if ctx.is_main_process else ("", None)
        absent = str(error) if isinstance(error, NoCheckpointError) else None
        said = json.dumps([path, absent])
        path, absent = json.loads(phases.gather("find", said, None if absent else error)[0])
        if absent is not None:  # on every rank, as programs ask whether there is one
            raise NoCheckpointError(absent)
        return path
    own, error = catch(lambda: parts_below(disk, place)) if ctx.is_local_main_process else ([], None)
    said = json.dumps([ctx.world.node_rank, ctx.is_local_main_process, own])
    heard = [json.loads(one) for one in phases.gather("find", said, error)]
    by_node = {node: parts for node, is_main, parts in heard if is_main}
    identity = common([by_node[node] for node in sorted(by_node)], place)
    if identity is None:
        return locate(disk, place)  # which says what is there instead
    return dict(by_node[ctx.world.node_rank])[identity]


def _list_together(ctx: Context, phases: CollectivePhases, place: str) -> list[str]:
    """List the checkpoints to try, newest first: as rank 0 finds them, or what the nodes have in common."""
    disk = REAL_DISK
    if ctx.project.save_on_each_node:
        own, error = catch(lambda: parts_below(disk, place)) if ctx.is_local_main_process else ([], None)
        return [place] if any(map(json.loads, phases.gather("list", json.dumps(own), error))) else []
    found, error = catch(lambda: newest_first(disk, place)) if ctx.is_main_process else ([], None)
    return json.loads(phases.gather("list", json.dumps(found), error)[0])


def find_checkpoint(ctx: Context, directory: str | os.PathLike[str]) -> Path:
    """Return which checkpoint :func:`accelfn.load_state` would load, for reading the files in it.

    The files that the caller of ``save_state`` had put into it are verified.

    Ranks: every rank of ``ctx``; the same on each, or on each of a node where
    ``ProjectConfiguration.save_on_each_node`` is set.

    Args:
        ctx: The world.
        directory: A checkpoint, or a directory of checkpoints: then the newest in it.

    Raises:
        NoCheckpointError: There is no committed checkpoint.
        DamagedCheckpointError: The files aren't what was written.
        NotAvailableError: A newer version of accelfn has written it.
        RemoteRankError: One of these happened on another rank.
    """
    disk, phases = REAL_DISK, CollectivePhases(ctx, "find_checkpoint")
    _, error = catch(lambda: finish_background(ctx))
    phases.gather("begin", "", error)
    path = _find_together(ctx, disk, phases, os.path.abspath(directory))
    error = None
    if writes_here(ctx):
        _, error = catch(lambda: read_checkpoint(disk, path, functools.partial(check_attachments, disk)))
    phases.gather("check", "", error)
    return Path(path)


@paused_collection()
def _read(ctx: Context, disk: Disk, like: Any, asked: _Asked, found: OpenCheckpoint) -> _Read:
    """Check that a checkpoint fits, and read what of it is for this rank."""
    manifest, names = found.manifest, asked.names
    # So that all ranks say what is missing, and not only those that need it.
    check_names(disk, found, warns=writes_here(ctx))
    if writes_here(ctx):
        check_attachments(disk, found)
    source = find_source(ctx, manifest)
    document = choose_part(_document(manifest, source.rank), like, asked.may_leave)
    matched = match(document, manifest.tensors, like)
    remove_other_stages(matched.objects, names)
    fits = [fit(one, names, manifest.tensors, strict=asked.strict) for one in matched.objects]
    rows = [*matched.rows, *(row for one in fits for row in one.rows)]
    if rows:
        count = "1 leaf" if len(rows) == 1 else f"{len(rows)} leaves"
        # Only where that alone would help.
        extra = all(row.wanted == "nothing" for row in rows)
        advice = " To load a part of it, pass partial=True, or the paths to leave out." if extra else ""
        raise CheckpointMismatchError(
            f"{asked.operation}: {found.path} does not fit the tree in {count}. Nothing was changed.{advice}",
            rows,
        )
    wanted: dict[str, torch.Tensor | None] = dict.fromkeys(stored_names(document))
    wanted.update({name: one for name, one in matched.leaves.items() if isinstance(one, torch.Tensor)})
    for one in fits:
        wanted.update(one.targets)
    random = document_of(manifest.random, source.rank)
    wanted.update(dict.fromkeys(stored_names(random)))
    return _Read(manifest, source, document, _read_tensors(disk, found, wanted))


def _document(manifest: Manifest, rank: int) -> Json:
    return manifest.tree if manifest.world_size == 1 else document_of(manifest.tree, rank)


def _read_tensors(
    disk: Disk, found: OpenCheckpoint, wanted: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Read tensors, whole or in the cut of those that they are for."""
    boxes: list[Box] = []
    ends: list[int] = []
    plans: list[tuple[str, torch.Tensor | None, list[Overlap]]] = []
    for name, target in wanted.items():
        one = found.manifest.tensors.get(name)
        if one is None:
            raise DamagedCheckpointError(
                f"{found.path} has no tensor {leaf_path(name)!r}, and its tree has need of it.", MANIFEST
            )
        overlaps = find_overlaps(one, target)
        boxes += [Box(name, one.dtype, lap.piece, lap.offset, lap.shape) for lap in overlaps]
        ends.append(len(boxes))
        plans.append((name, target, overlaps))
    parts = read_boxes(disk, found.folder, found.manifest, boxes)
    starts = [0, *ends][:-1]  # none where no tensor is wanted
    return {
        name: join_overlaps(found.manifest.tensors[name], target, overlaps, parts[start:end])
        for (name, target, overlaps), start, end in zip(plans, starts, ends, strict=True)
    }


# --- taking up -----------------------------------------------------------------------------------


@paused_collection()
def _prepare(read: _Read, like: Any) -> tuple[Any, list[Pending], list[Callable[[], None]]]:
    """Build the new tree, and list what is to be done to the objects in the old one."""
    pending: list[Pending] = []

    def remember(path: str, thing: Any, state: Any) -> Any:
        if isinstance(thing, LoaderState):
            return read_state(state)
        pending.append(Pending(path, thing, state))
        return thing

    writes: list[Callable[[], None]] = []
    adopt = functools.partial(_adopt, writes)
    value = decode(read.document, read.tensors, like=like, restore=remember, adopt=adopt)
    rows = [row for one in pending for row in untied_weights(one)]
    if rows:
        raise CheckpointMismatchError(
            "load_state: weights that are one in a module were saved apart. Nothing was changed.", rows
        )
    return value, sorted(pending, key=restore_order), writes


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        local_of(target).copy_(local_of(source))


def _adopt(writes: list[Callable[[], None]], like: Any, value: Any) -> Any:
    """Put a loaded tensor where ``like`` has its own: on its device, or into a parameter or a generator.

    What is to be written into is only listed, as calls.
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


def _take_up(pending: Sequence[Pending], names: Names, undo: list[Callable[[], None]]) -> None:
    """Let objects take up their states, those that may refuse first."""
    for one in pending:
        undo.append(prepare_undo(one))
        try:
            restore_object(one, names)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                cast("Any", error).add_note(f"raised while {one.path!r} took up its state")
            raise


def _restore_random(ctx: Context, read: _Read) -> None:
    states = decode(document_of(read.manifest.random, read.source.rank), read.tensors)
    restore_random_states(ctx, states, is_own=read.source.is_own)
