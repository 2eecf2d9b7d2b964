"""Save the state of a run: compare what the ranks hold, and plan which rank writes what."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, overload

import torch

from accelfn.checkpoint.background import (
    BoardPhases,
    CollectivePhases,
    SaveHandle,
    begin_background,
    copies_in_background,
    finish_background,
    paused_collection,
)
from accelfn.checkpoint.by_rank import join_documents, renamed
from accelfn.checkpoint.collect import (
    collect_state,
    contents,
    held_of,
    parse_boxes,
    parse_held,
    random_names,
)
from accelfn.checkpoint.commit import check_path, check_target
from accelfn.checkpoint.document.encode import Encoded, encode
from accelfn.checkpoint.groups import digest_of, exchange_documents, group_equal, rename_trees
from accelfn.checkpoint.keep import Keep
from accelfn.checkpoint.manifest import Json, Part, StoredTensor, entry_key, leaf_path
from accelfn.checkpoint.plan import (
    Box,
    Boxes,
    Group,
    Held,
    all_of,
    boxes_of,
    find_drift,
    has_copies,
    plan_save,
)
from accelfn.checkpoint.scheduled_disk import disk_of
from accelfn.checkpoint.stages import join_stages
from accelfn.checkpoint.write import Job, begin_job, write_job
from accelfn.comm import catch, check_replicas
from accelfn.config import GuardMode
from accelfn.context import Context, news, takes_context
from accelfn.errors import MissingRankError, ReplicaDriftError
from accelfn.parallel.engines import with_plain_objects
from accelfn.parallel.pointers import WholeModel
from accelfn.storage.address import as_path
from accelfn.storage.disk import Disk
from accelfn.storage.object_store import disk_at
from accelfn.tree import local_of


class _RankState(NamedTuple):
    """The state of this rank that is to be saved."""

    tree: Json
    random: Json
    tensors: Mapping[str, torch.Tensor]  # DTensors too
    held: Mapping[str, Held]
    boxes: Boxes  # which parts of sharded tensors it holds, by layout
    random_held: Mapping[str, Held]
    sums: Mapping[str, tuple[int, ...]]  # checksums that are already known
    replicated: frozenset[str]  # names of tensors that must be equal on all ranks
    copies: Mapping[str, str]  # digests of shards that other ranks hold too
    staged: Mapping[str, WholeModel | None]  # models of which this rank has stages, optimizers
    order: Mapping[str, int]  # of the parameters of these models


class _Options(NamedTuple):
    """The options of a save, which must be the same on all ranks."""

    step: int | None
    metric: float | None
    keep: Keep | None
    asynchronous: bool
    allow_drift: bool


@overload
def save_state(
    ctx: Context,
    directory: str | os.PathLike[str],
    tree: Any,
    asynchronous: Literal[False] = False,
    *,
    step: int | None = None,
    metric: float | None = None,
    keep: Keep | None = None,
    files: str | os.PathLike[str] | None = None,
    allow_drift: bool = False,
) -> Path: ...
@overload
def save_state(
    ctx: Context,
    directory: str | os.PathLike[str],
    tree: Any,
    asynchronous: Literal[True],
    *,
    step: int | None = None,
    metric: float | None = None,
    keep: Keep | None = None,
    files: str | os.PathLike[str] | None = None,
    allow_drift: bool = False,
) -> SaveHandle: ...
@overload
def save_state(
    ctx: Context,
    directory: str | os.PathLike[str],
    tree: Any,
    asynchronous: bool,
    *,
    step: int | None = None,
    metric: float | None = None,
    keep: Keep | None = None,
    files: str | os.PathLike[str] | None = None,
    allow_drift: bool = False,
) -> Path | SaveHandle: ...
@takes_context
def save_state(
    ctx: Context,
    directory: str | os.PathLike[str],
    tree: Any,
    asynchronous: bool = False,
    *,
    step: int | None = None,
    metric: float | None = None,
    keep: Keep | None = None,
    files: str | os.PathLike[str] | None = None,
    allow_drift: bool = False,
) -> Path | SaveHandle:
    """Save the state of a run as one checkpoint, so that no crash can lose it.

    ``directory`` is the checkpoint. Its files are written beside those of an earlier one in it, and the new
    one counts as soon as its manifest is renamed, when all of them are durable. Whatever goes wrong, on any
    rank, the earlier one is still there and every rank raises. Your own files in the directory stay there.

    The tree may contain modules, optimizers, schedulers, loaders and other objects with ``state_dict`` and
    ``load_state_dict``, and tensors and plain values in any containers. The states of the random number
    generators of every rank are saved too. A tensor that is equal on all ranks is written once; if ranks have
    different values, each rank's is saved. Sharded tensors (DTensor) are written by the ranks that hold them.

    Ranks: every rank of ``ctx``. Returns when the checkpoint is committed, on all ranks.

    Args:
        ctx: The world.
        directory: The checkpoint; missing directories above it are made. The same on every rank, on a disk
            that they share. Or an address, such as ``"s3://bucket/run/step-100"``, to which files are
            uploaded while they are written.
        tree: The state, as any tree with names.
        asynchronous: Copy the state to host memory and write it in the background. The copy is complete when
            this returns. One save at a time: the next one waits for it.
        step: A count, such as of optimizer steps, by which checkpoints are ordered.
        metric: A measure, for keeping the best; an infinite one or NaN counts as None.
        keep: Which other checkpoints stay after this one is committed; None keeps all.
        files: A directory of the main process, on the disk of the checkpoint, such as
            :func:`accelfn.checkpoint.folder_for_files` makes. It becomes part of the checkpoint, and
            :func:`accelfn.checkpoint.find_files` finds it there. It is moved, not copied, and after an error
            it may be lost; to an object store it is uploaded. Nothing may write to it any more.
        allow_drift: Save the parameters of a replicated model, and the states of their optimizers, even if
            they differ between ranks: each rank's are saved, and loaded again. For replicas that are meant to
            differ, as with local SGD.

    Returns:
        The checkpoint's path; with ``asynchronous`` a handle, whose ``result()`` returns it.

    Raises:
        TypeError: Something in the tree has no plain form: all such leaves, by path.
        ValueError: A tensor has no data.
        CheckpointError: Ranks hold different shards of a tensor; there are links among ``files``; the
            directory holds files but no checkpoint, isn't shared by all ranks, or another program saves to it
            at the moment.
        MissingExtraError: The package isn't installed that an address needs, such as s3fs.
        OSError: It can't be written, such as for lack of space or rights. Or it is committed, and older ones
            that ``keep`` doesn't keep can't be removed.
        ReplicaDriftError: A replicated model (:func:`accelfn.prepare`) has other parameters on some ranks, or
            its optimizer another state: on every rank, with the leaves and ranks. Background saves compare
            larger tensors by samples. Not raised with ``allow_drift``, or if the guard is off or has
            ``check_replicas_before_saving=False``.
        RemoteRankError: One of these happened on another rank; or an earlier save in the background has
            failed, and another rank has not asked for its result.
        MismatchError: A rank called something else.
    """
    check_path("save_state", directory)
    path = as_path(directory)
    disk, no_disk = catch(lambda: disk_of(ctx, disk_at(path)))
    plain, refused = catch(lambda: with_plain_objects(tree)[0])

    def collect() -> _RankState:
        if disk is None or refused is not None:
            raise cast("Exception", refused or no_disk)
        finish_background(ctx)
        _check_options(step, metric, keep)
        return _collect(ctx, disk, path, plain, is_copied=asynchronous)

    own, error = catch(collect)
    folder = os.path.abspath(files) if files is not None and ctx.is_main_process else None
    phases = CollectivePhases(ctx, "save_state")
    options = _Options(step, metric, keep, asynchronous, allow_drift)
    job, error = catch(lambda: _agree_on(ctx, phases, path, own, error, options, folder))
    if job is None or disk is None:
        raise cast("Exception", error)
    if not asynchronous:
        return write_job(job, phases, disk)
    tensors = [tensor for _, tensor, _ in job.entries]
    copies, error = catch(lambda: copies_in_background(ctx, tensors))
    phases.gather("copy", "", error)
    # The caller goes on, so its files are moved now.
    begun = begin_job(job, phases, disk) if job.any_files else None
    copied = zip(job.entries, copies or (), strict=True)
    entries = tuple((key, copy, sums) for (key, _, sums), copy in copied)
    work = partial(write_job, job._replace(entries=entries), board_phases(ctx), disk, begun)
    return begin_background(ctx, path, work)


def board_phases(ctx: Context) -> BoardPhases:
    """Return the phases of what is done in the background."""
    return BoardPhases(
        board=ctx.collectives.board,
        rank=ctx.rank,
        size=ctx.num_processes,
        operation="save_state",
        threads=ctx.collectives.threads,
        number=str(ctx.collectives.call_log.number),
        patience_s=ctx.guard.long_timeout_s,
        is_hopeless=lambda: _why_hopeless(ctx),
    )


def _why_hopeless(ctx: Context) -> Exception | None:
    """Return why a background save can't be completed: a rank has failed or is lost; None otherwise."""
    collectives = ctx.collectives
    error = news(collectives.board, collectives.call_log, ctx.rank)
    lost = collectives.lost_rank() if error is None else None
    if lost is None:
        return error
    return MissingRankError(
        f"save_state: the process of rank {lost} has ended during a background save. Look at its output."
    )


def save_tree(path: str | os.PathLike[str], tree: Any, *, namespace: str = "") -> Path:
    """Save a tree as a checkpoint: tensors in safetensors, everything else in JSON, no pickle.

    Ranks: local; one rank alone writes to a directory.

    Args:
        path: Directory of the checkpoint, as for :func:`accelfn.save_state`.
        tree: Any optree tree of tensors, arrays and plain values, and of objects that have ``state_dict`` and
            ``load_state_dict``. A tensor that occurs several times is one tensor again when it is loaded.
        namespace: The optree namespace of your own registered nodes, if they have one.

    Returns:
        The path.

    Raises:
        TypeError: Something in the tree has no plain form: all such leaves, by path. Or a tensor is split
            over ranks.
        ValueError: A tensor has no data.
        CheckpointError: The path is a directory that holds files but no checkpoint.
        OSError: It can't be written.

    >>> import tempfile, accelfn as af
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place = save_tree(f"{folder}/state", {"w": torch.arange(3), "step": 7})
    ...     af.load_tree(place)
    {'w': tensor([0, 1, 2]), 'step': 7}
    """
    with paused_collection():
        encoded = encode(tree, namespace=namespace)
        parts = [name for name, one in encoded.tensors.items() if boxes_of(one) is not None]
        if parts:
            raise TypeError(
                f"save_tree: {leaf_path(parts[0])!r} is split over ranks, and this writes what one rank has. "
                "Use save_state(ctx, path, tree) on all ranks."
            )
        return _write_alone(path, encoded)


class _Alone(NamedTuple):
    """Phases of a save in which this process writes the state of all ranks."""

    size: int

    def gather(self, phase: str, text: str, error: Exception | None = None) -> list[str]:
        if error is not None:
            raise error
        return [text, *["[[], {}]"] * (self.size - 1)]


def save_for_ranks(
    path: str | os.PathLike[str], tree: Any, randoms: Sequence[Any] = (), *, step: int | None = None
) -> Path:
    """Save a tree and the random states of each rank of a world, as that world would with ``save_state``.

    Ranks: local; one process writes everything.

    Args:
        path: As of :func:`save_tree`.
        tree: As of :func:`save_tree`.
        randoms: By rank, as ``random_states`` returns them; empty for one rank without random states.
        step: As of :func:`accelfn.save_state`.

    Raises:
        TypeError: As of :func:`save_tree`.
        OSError: It can't be written. Nothing is left behind.
    """
    encoded = encode(tree)
    documents: list[Json] = []
    tensors = dict(encoded.tensors)
    for rank, one in enumerate(map(encode, randoms)):
        called = random_names(one.tensors, encoded.tensors, f"@{rank}" if rank else "")
        documents.append(renamed(one.document, called))
        tensors.update({called[name]: tensor for name, tensor in one.tensors.items()})
    random = join_documents(documents) if documents else None
    whole = encoded._replace(tensors=tensors)
    return _write_alone(path, whole, random, max(1, len(documents)), step)


def _write_alone(
    path: str | os.PathLike[str],
    encoded: Encoded,
    random: Json = None,
    size: int = 1,
    step: int | None = None,
) -> Path:
    described, _ = held_of(encoded.tensors, {})
    target = as_path(path)
    disk = disk_at(target)
    check_target(disk, target)
    job = Job(
        directory=target,
        tree=encoded.document,
        random=random,
        tensors={
            name: StoredTensor(one.dtype, one.shape, (Part(0, (0,) * len(one.shape), one.shape),))
            for name, one in described.items()
        },
        step=step,
        size=size,
        entries=tuple((name, encoded.tensors[name], None) for name in described),
        threads=os.cpu_count() or 1,
    )
    return write_job(job, _Alone(size), disk)


# --- collecting the state of a rank ------------------------------------------------------------------


def _check_options(step: object, metric: object, keep: object) -> None:
    """Check the types of the options.

    Raises:
        TypeError: One has another type.
    """
    if step is not None and type(step) is not int:
        raise TypeError(f"save_state: step must be a whole number or None, got {step!r}.")
    if metric is not None and not isinstance(metric, (int, float)):
        raise TypeError(
            f"save_state: metric must be a number or None, got {type(metric).__name__}. Pass float(metric)."
        )
    if keep is not None and not isinstance(keep, Keep):
        raise TypeError(f"save_state: keep must be a Keep such as Keep(last=3), or None, got {keep!r}.")


@paused_collection()
def _collect(ctx: Context, disk: Disk, path: Path, tree: Any, *, is_copied: bool) -> _RankState:
    """Collect and digest the state of this rank; nothing is written."""
    check_target(disk, path)
    found = collect_state(ctx, tree)
    sums: dict[str, tuple[int, ...]] = {}
    compares = ctx.num_processes > 1 and ctx.guard.mode != GuardMode.OFF
    whole = {name: one for name, one in found.tensors.items() if boxes_of(one) is None}
    content = contents(whole, sums, is_copied=is_copied) if compares else {}
    random_content = contents(found.random_tensors, sums, is_copied=False) if ctx.num_processes > 1 else {}
    parts = {name: local_of(one) for name, one in found.tensors.items() if has_copies(one)}
    compares = compares and ctx.guard.check_replicas_before_saving
    held, boxes = held_of(found.tensors, content)
    return _RankState(
        tree=found.tree,
        random=found.random,
        tensors={**found.tensors, **found.random_tensors},
        held=held,
        boxes=boxes,
        random_held=held_of(found.random_tensors, random_content)[0],
        sums=sums,
        replicated=found.replicated,
        copies=contents(parts, sums, is_copied=is_copied) if compares else {},
        staged=found.staged,
        order=found.order,
    )


# --- who writes what -----------------------------------------------------------------------------


@paused_collection()
def _agree_on(
    ctx: Context,
    phases: CollectivePhases,
    path: Path,
    own: _RankState | None,
    error: Exception | None,
    options: _Options,
    files: str | None,
) -> Job:
    """Exchange summaries of what the ranks hold, and plan which rank writes what."""
    world = ctx.world
    summary, details = {}, {}
    if own is not None:
        summary, details = _summarise(own)
        summary["files"] = files is not None
    shown = {"directory": str(path), **{name: repr(value) for name, value in options._asdict().items()}}
    texts = phases.gather(f"begin {json.dumps(shown)}", json.dumps(summary), error)
    assert own is not None  # otherwise gather has raised
    ranks = [json.loads(text) for text in texts]
    groups, replicated = _group_ranks(phases, own, details, ranks)
    digests = [one["tree"] for one in ranks]
    found = exchange_documents(phases, "tree", [[one] for one in digests], {summary["tree"]: own.tree})
    trees: list[Json] = [found[digest] for digest in digests]
    if not options.allow_drift and ctx.guard.check_replicas_before_saving:
        _refuse_drift(ctx, own, groups, replicated)
    _refuse_different_copies(phases, own, ranks, groups)
    randoms = [Group((rank,), parse_held(one["random_held"]), ((),)) for rank, one in enumerate(ranks)]
    plan = plan_save(world.size, [*groups, *randoms])
    tree_names, random_names_of = plan.names[: len(groups)], plan.names[len(groups) :]
    by_rank = rename_trees(groups, tree_names, trees)
    if own.staged and ctx.mesh is not None:
        mesh = ctx.mesh.plan
        stages = sorted({mesh.group(rank, "pp") for rank in range(world.size)})
        by_rank = join_stages(by_rank, stages, own.staged, own.order)
    random = [renamed(one["random"], names) for one, names in zip(ranks, random_names_of, strict=True)]
    metric = options.metric
    return Job(
        directory=path,
        step=options.step,
        metric=None if metric is None or not math.isfinite(metric) else metric,
        keep=options.keep,
        rank=world.rank,
        threads=max(1, (os.cpu_count() or 1) // world.local_size),
        size=world.size,
        tree=join_documents(by_rank),
        random=join_documents(random),
        tensors=plan.tensors,
        files=files,
        any_files=any(summary["files"] for summary in ranks),
        entries=tuple(
            (
                entry_key(stored, plan.tensors[stored].parts, part),
                local_of(own.tensors[plan.plain[stored]]),
                own.sums.get(plan.plain[stored]),
            )
            for stored, part in plan.written_by(world.rank)
        ),
    )


def _summarise(own: _RankState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the other ranks always need, and what they need only if ranks differ.

    The first doesn't grow with the tensors: it has parts and digests by layout.
    """
    details = {"held": own.held, "replicated": sorted(own.replicated)}
    names: dict[int | None, list[str]] = {}
    for name in own.copies:
        names.setdefault(own.held[name].layout, []).append(name)
    summary = {
        "details": digest_of(details),
        "tree": digest_of(own.tree),
        "boxes": own.boxes,
        "random": own.random,
        "random_held": own.random_held,
        # Of each layout of which other ranks hold the same parts: its number, and digests of its tensors.
        "copies": [
            [layout, digest_of(some), digest_of([own.copies[name] for name in some])]
            for layout, some in names.items()
        ],
    }
    return summary, details


def _group_ranks(
    phases: CollectivePhases, own: _RankState, details: Mapping[str, Any], ranks: Sequence[Any]
) -> tuple[list[Group], list[Sequence[str]]]:
    """Return the groups of ranks that hold the same; and of each which tensors must be equal.

    Args:
        phases: Of the save.
        own: The state of this rank.
        details: Of this rank.
        ranks: The summaries of all ranks.
    """
    digests = [one["details"] for one in ranks]
    mine = digests[phases.ctx.rank]
    found = exchange_documents(phases, "details", [[one] for one in digests], {mine: details})
    held = {one: own.held if one == mine else parse_held(found[one]["held"]) for one in found}
    groups = group_equal(digests, held, [parse_boxes(one["boxes"]) for one in ranks])
    return groups, [found[one]["replicated"] for one in dict.fromkeys(digests)]


def _refuse_drift(
    ctx: Context, own: _RankState, groups: Sequence[Group], replicated: Sequence[Sequence[str]]
) -> None:
    """Raise if replicas differ. Which leaves differ is already known, so only those are compared again."""
    if len(groups) == 1:
        return
    names = set(replicated[0]).intersection(*replicated[1:])
    # Each group has numbers of its own for its layouts.
    held = [group.held for group in groups]
    drifted = [name for name in sorted(names) if len({of[name]._replace(layout=None) for of in held}) > 1]
    if drifted:
        leaves = {leaf_path(name): local_of(own.tensors[name]) for name in drifted}
        paths = {f"tree[{path!r}]": path for path in leaves}
        try:
            check_replicas(ctx, leaves, name="tree")
        except ReplicaDriftError as found:
            rows = tuple(row._replace(path=paths[row.path]) for row in found.rows)
            error: Any = ReplicaDriftError("save_state", rows)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    "Nothing was written. If these replicas are meant to differ, as with local SGD, pass "
                    "allow_drift=True: then each rank's are saved."
                )
            raise error from None
    # Along "pp", ranks have different tensors, which check_replicas doesn't compare, and some equal ones.
    values: dict[str, set[tuple[str, str]]] = {}
    for group, some in zip(groups, replicated, strict=True):
        for name in some:
            values.setdefault(name, set()).add((group.held[name].dtype, group.held[name].content))
    mine: list[dict[str, Held]] = [{} for _ in range(ctx.num_processes)]
    for group, some in zip(groups, replicated, strict=True):
        different = {name: group.held[name] for name in some if len(values[name]) > 1}
        for rank in group.ranks:
            mine[rank] = different
    _raise_drift(
        [{name: f"{one.dtype} {one.content}" for name, one in of.items()} for of in mine],
        [{name: [all_of(one.shape)] for name, one in of.items()} for of in mine],
    )


def _refuse_different_copies(
    phases: CollectivePhases, own: _RankState, ranks: Sequence[Any], groups: Sequence[Group]
) -> None:
    """Raise if ranks hold the same part of a tensor with different values: only one of them is saved."""
    digests: dict[tuple[object, ...], set[str]] = {}
    for group in groups:
        for rank, boxes in zip(group.ranks, group.boxes, strict=True):
            copies: list[tuple[int, str, str]] = ranks[rank]["copies"]
            for layout, names, content in copies:
                digests.setdefault((names, boxes[layout]), set()).add(content)
    if all(len(some) == 1 for some in digests.values()):
        return
    shown = {name: [own.boxes[cast("int", own.held[name].layout)], text] for name, text in own.copies.items()}
    found = [json.loads(text) for text in phases.gather("copies", json.dumps(shown))]
    _raise_drift(
        [{name: text for name, (_, text) in one.items()} for one in found],
        [{name: parse_boxes([boxes])[0] for name, (boxes, _) in one.items()} for one in found],
    )


def _raise_drift(copies: Sequence[Mapping[str, str]], boxes: Sequence[Mapping[str, Sequence[Box]]]) -> None:
    """Raise if copies differ between ranks, see :func:`find_drift`."""
    rows = find_drift(copies, boxes)
    if rows:
        raise ReplicaDriftError("save_state", rows)
