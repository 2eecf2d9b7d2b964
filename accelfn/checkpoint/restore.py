"""Restore a state: plan which part of it this rank needs, and change objects only when all ranks can."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.checkpoint.background import CollectivePhases, finish_background, paused_collection
from accelfn.checkpoint.by_rank import Source, document_of, find_source
from accelfn.checkpoint.commit import check_path
from accelfn.checkpoint.document.compare import choose_part, match
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.document.nodes import stored_names
from accelfn.checkpoint.manifest import Json, Manifest
from accelfn.checkpoint.objects import (
    Names,
    Pending,
    address_of,
    cannot_fail,
    find_names,
    fit,
    is_in_place,
    prepare_undo,
    restore_object,
    restore_order,
    untied_weights,
    write,
)
from accelfn.checkpoint.random_state import random_states, restore_random_states
from accelfn.checkpoint.scheduled_disk import disk_of
from accelfn.checkpoint.stages import remove_other_stages
from accelfn.comm import catch
from accelfn.context import Context
from accelfn.data import LoaderState
from accelfn.data.resume import read_state
from accelfn.errors import CheckpointMismatchError, NoCheckpointError
from accelfn.storage.address import as_path
from accelfn.storage.disk import Disk
from accelfn.storage.object_store import disk_at
from accelfn.tree import local_of

T = TypeVar("T")


class ReadPlan(NamedTuple):
    """The part of a checkpoint that this rank needs.

    Attributes:
        source: The rank whose documents it loads.
        document: Of the tree.
        wanted: Names of tensors; with the tensor of the tree whose sharding they get, or None.
        in_place: Tensors of the tree to write into at the end, by the names of the stored ones.
    """

    source: Source
    document: Json
    wanted: Mapping[str, torch.Tensor | None]
    in_place: Mapping[str, torch.Tensor]


class Read(NamedTuple):
    """The part of a checkpoint that this rank needs, verified.

    Attributes:
        manifest: Of the checkpoint.
        plan: What is needed.
        tensors: Those that were read, in new memory. All others are read in place at the end.
        read_in_place: Reads these, by name, into their memory.
    """

    manifest: Manifest
    plan: ReadPlan
    tensors: Mapping[str, torch.Tensor]
    read_in_place: Callable[[Mapping[str, torch.Tensor]], None]


class Request(NamedTuple):
    """The options of a load, and the names of the objects in the tree to load into."""

    operation: str  # named in errors
    directory: str
    disk: Disk
    names: Names
    strict: bool
    is_optional: Callable[[str], bool]  # whether the tree needn't have what the checkpoint has at a path


@paused_collection()
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
        check_path(phases.operation, directory)
        path, is_optional = str(as_path(directory)), _parse_partial(partial, phases.operation)
        disk = disk_of(ctx, disk_at(path))
        return Request(phases.operation, path, disk, find_names(like), strict, is_optional)

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


def restore(
    ctx: Context, phases: CollectivePhases, like: T, request: Request, read: Read, *, random_state: bool
) -> tuple[T, bool]:
    """Restore this rank's part of a state, and change objects only when no rank's part can be refused.

    Ranks: every rank of ``ctx``.

    Returns:
        The new tree; and whether it is complete: not if the state was removed before it was read in place.
    """
    in_place = read.plan.in_place
    prepared, error = catch(lambda: _prepare(read, like))
    phases.gather("decode", "", error)
    assert prepared is not None
    value, pending, writes = prepared
    undo: list[Callable[[], None]] = []
    may_refuse = [one for one in pending if not cannot_fail(one)]

    def change() -> None:
        _restore_undoably(may_refuse, request.names, undo)
        if random_state and read.manifest.random is not None:
            states = decode(document_of(read.manifest.random, read.plan.source.rank), read.tensors)
            undo.append(functools.partial(restore_random_states, ctx, random_states(ctx), is_own=True))
            restore_random_states(ctx, states, is_own=read.plan.source.is_own)

    _, error = catch(change)
    try:
        phases.gather("restore", "", error)
    except BaseException:
        for step in reversed(undo):
            step()
        raise

    def finish() -> None:
        read.read_in_place({name: one for name, one in in_place.items() if name not in read.tensors})
        for name, one in in_place.items():
            write(one, read.tensors.get(name, one))
        for step in writes:
            step()
        for one in pending:
            if cannot_fail(one):
                restore_object(one, request.names)

    _, error = catch(finish)
    is_gone = isinstance(error, NoCheckpointError)
    gone = phases.gather("loaded", "gone" if is_gone else "", None if is_gone else error)
    return cast("T", value), not any(gone)


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
    document = choose_part(document_for(manifest, source.rank), like, request.is_optional)
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
    found = [
        (name, one)
        for name, one in matched.leaves.items()
        if isinstance(one, torch.Tensor) and is_in_place(one) and not one.is_meta
    ]
    in_place = _choose_in_place(document, [*found, *(pair for one in fits for pair in one.in_place)])
    wanted.update(dict.fromkeys(stored_names(document_of(manifest.random, source.rank))))
    return ReadPlan(source, document, wanted, in_place)


def _choose_in_place(document: Json, found: Sequence[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Choose which stored tensors are read straight into the tree's memory.

    Those of which the state has other uses need memory of their own, and so do different ones for the same
    memory, which must be compared, and what isn't dense memory.
    """
    uses, places = Counter(stored_names(document)), Counter(name for name, _ in found)
    names: dict[object, set[str]] = {}
    for name, one in found:
        names.setdefault(address_of(one), set()).add(name)
    return {
        name: one
        for name, one in found
        if uses[name] == places[name] and len(names[address_of(one)]) == 1 and _is_dense(local_of(one))
    }


def _is_dense(local: torch.Tensor) -> bool:
    return (
        type(local) in (torch.Tensor, torch.nn.Parameter)
        and local.layout == torch.strided
        and local.device.type not in ("meta", "xla")  # XLA would compile each copy into a part of a tensor
        and not (local.is_conj() or local.is_neg() or local.is_quantized)
    )


def document_for(manifest: Manifest, rank: int) -> Json:
    """Return the document of the tree of one rank. Pure."""
    return manifest.tree if manifest.world_size == 1 else document_of(manifest.tree, rank)


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
    document, in_place = read.plan.document, read.plan.in_place
    value = decode(document, read.tensors, like=like, in_place=in_place, restore=defer, adopt=adopt)
    rows = [row for one in pending for row in untied_weights(one)]
    if rows:
        raise CheckpointMismatchError(
            "load_state: weights that are tied in a module were saved separately. Nothing was changed.", rows
        )
    return value, sorted(pending, key=restore_order), writes


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
        writes.append(functools.partial(write, like, value))
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
