"""Save the state of a run: what all ranks hold, as one checkpoint that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, overload

import optree
import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.checkpoint.attachments import (
    find_attachments,
    writes_here,
)
from accelfn.checkpoint.background import (
    BoardPhases,
    CollectivePhases,
    SaveHandle,
    begin_background,
    copies_in_background,
    finish_background,
    paused_collection,
)
from accelfn.checkpoint.by_rank import join_documents, renamed, stored_place
from accelfn.checkpoint.commit import (
    check_target,
    leftover_path,
    make_nonce,
)
from accelfn.checkpoint.disk import REAL_DISK, Disk, make_folders, remove_tree
from accelfn.checkpoint.document.encode import Encoded, encode
from accelfn.checkpoint.files import memory_of
from accelfn.checkpoint.header import dtype_name
from accelfn.checkpoint.keep import Keep
from accelfn.checkpoint.manifest import (
    CHUNK_BYTES,
    Json,
    leaf_path,
)
from accelfn.checkpoint.objects import Names, find_names, inner_of, state_of
from accelfn.checkpoint.plan import (
    Held,
    SavePlan,
    Write,
    all_of,
    boxes_from,
    boxes_of,
    find_drift,
    has_copies,
    plan_save,
)
from accelfn.checkpoint.random_state import random_states
from accelfn.checkpoint.stages import first_names, join_stages
from accelfn.checkpoint.write import Job, entry_key, write_job
from accelfn.comm import catch, check_replicas
from accelfn.context import Context, check_context, news
from accelfn.context.config import GuardMode
from accelfn.errors import CheckpointError, ReplicaDriftError
from accelfn.parallel.parameters import WholeModel, check_filled, whole_of
from accelfn.training import ScalerState, unwrap_model
from accelfn.training.scaler import check_newest
from accelfn.tree import local_of
from accelfn.tree.digest import digest_tensors

# In the background, of larger tensors only samples are compared between ranks: looking at every byte would
# hold up the training for as long as copying them.
_COMPARED_WHOLE = 1 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 12


class _Own(NamedTuple):
    """What this rank brings to a save."""

    tree: Json
    random: Json
    tensors: Mapping[str, torch.Tensor]  # DTensors among them
    held: Mapping[str, Held]
    random_held: Mapping[str, Held]
    sums: Mapping[str, tuple[int, ...]]  # checksums that are known already
    replicated: frozenset[str]  # tensors that shall be equal on all ranks
    copies: Mapping[str, str]  # what parts contain that other ranks hold as well
    staged: Mapping[str, WholeModel | None]  # models of which this rank has some stages, and optimizers
    order: Mapping[str, int]  # of the parameters of these models


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

    ``directory`` is the checkpoint. It appears by one rename, when every file of it is written and durable;
    one that is there already is replaced, and until the new one is complete the old one stays. Whatever goes
    wrong, on any rank, the old one is still there and every rank raises.

    Modules, optimizers, schedulers and loaders are saved by what they are, anything else that has
    ``state_dict`` and ``load_state_dict`` by what it says. Tensors and plain values, in any containers, are
    saved as they are. The states of the random number generators of every rank are saved with them. A tensor
    that is equal on all ranks is written once; where ranks differ, each one's is kept. Tensors that are cut
    over ranks (DTensor) are written by those that hold them.

    Ranks: every rank of ``ctx``. Returns when the checkpoint is committed, on all ranks.

    Args:
        ctx: The world.
        directory: Of the checkpoint; the ones above it are made where they are missing. The same on every
            rank, on a disk that they share, unless ``ProjectConfiguration.save_on_each_node`` is set: then
            each node has its part on its own disk.
        tree: What to save, by names: any tree.
        asynchronous: Copy the state to host memory and write it in the background. The copy is complete when
            this returns. One save at a time: the next one waits for it.
        step: What you count, such as optimizer steps: says which checkpoint is the newest.
        metric: What you measure, for keeping the best; one that is infinite or NaN counts as None.
        keep: Which checkpoints beside this one stay, once it is committed; None keeps all.
        files: A directory of the main process (of that of each node, with ``save_on_each_node``), on the disk
            of the checkpoint, such as :func:`accelfn.checkpoint.folder_for_files` makes. What is in it
            becomes part of the checkpoint: files, in directories too, under their names. They are moved, not
            copied, so they are gone from there, and after an error they may be lost. Nothing may write to
            them any more.
        allow_drift: Save the parameters of a replicated model, and the states of their optimizers, even where
            they differ between ranks: each rank's own are kept, and come back. For replicas that are meant to
            differ, such as those of local SGD, whose optimizers always do.

    Returns:
        The checkpoint's path; with ``asynchronous`` a handle, whose ``result()`` gives it.

    Raises:
        TypeError: Something in the tree has no plain form: all such leaves, by path.
        ValueError: A tensor has no data, or the directory can be none, such as one that holds other files.
        CheckpointError: Ranks hold different cuts of a tensor; or among ``files`` are links, or names that
            the checkpoint's own files have.
        OSError: It can't be written: no space, no right to. Or it is committed, and older ones can't be
            removed as ``keep`` says.
        ReplicaDriftError: A model that is replicated (:func:`accelfn.prepare`) has other parameters on some
            ranks, or its optimizer another state: on every rank, with the leaves and ranks. Of what is saved
            in the background, larger tensors are compared by samples. Not with ``allow_drift``, nor where the
            guard is off or has ``check_replicas_before_saving=False``.
        RemoteRankError: One of these happened on another rank; or an earlier save in the background has
            failed, and another rank has not asked for its result.
        MismatchError: A rank called something else.
    """
    check_context("save_state", ctx)
    path = Path(os.path.abspath(os.fspath(directory)))

    def look() -> _Own:
        finish_background(ctx)
        _check_options(step, metric, keep)
        return _look(ctx, path, tree, is_copied=asynchronous)

    own, error = catch(look)
    taken = os.path.abspath(files) if files is not None and writes_here(ctx) else None
    phases = CollectivePhases(ctx, "save_state")
    each_node = ctx.project.save_on_each_node
    options = {
        "directory": "of each node" if each_node else str(path),
        "step": repr(step),
        "metric": repr(metric),
        "keep": repr(keep),
        "asynchronous": asynchronous,
        "allow_drift": allow_drift,
    }
    job, error = catch(
        lambda: _agree_on(ctx, phases, path, own, error, options, step, metric, keep, taken, allow_drift)
    )
    if job is None:
        raise cast("Exception", error)
    if not asynchronous:
        return write_job(job, phases, REAL_DISK)
    tensors = [tensor for _, tensor, _ in job.entries]
    copies, error = catch(lambda: copies_in_background(ctx, tensors))
    phases.gather("copy", "", error)
    if job.any_files:
        job = _set_aside(job, phases, REAL_DISK)
    board = BoardPhases(
        board=ctx.collectives.board,
        rank=ctx.rank,
        size=ctx.num_processes,
        operation="save_state",
        number=str(ctx.collectives.call_log.number),
        patience_s=ctx.guard.long_timeout_s,
        is_hopeless=lambda: news(ctx.collectives.board, ctx.collectives.call_log, ctx.rank),
    )
    copied = zip(job.entries, copies or (), strict=True)
    entries = tuple((key, copy, sums) for (key, _, sums), copy in copied)
    return begin_background(ctx, path, partial(write_job, job._replace(entries=entries), board, REAL_DISK))


def save_tree(path: str | os.PathLike[str], tree: Any, *, namespace: str = "") -> Path:
    """Save a tree as a checkpoint of its own: tensors in safetensors, everything else in JSON, no pickle.

    Ranks: local; one rank alone writes to a directory.

    Args:
        path: Directory of the checkpoint, as for :func:`accelfn.save_state`.
        tree: Any optree tree of tensors, arrays and plain values, and of objects that have ``state_dict`` and
            ``load_state_dict``. The same tensor at several places is one again when it is loaded.
        namespace: Of optree, where nodes of your own are registered in one.

    Returns:
        The path.

    Raises:
        TypeError: Something in the tree has no plain form: all such leaves, by path.
        ValueError: A tensor has no data.
        OSError: It can't be written.

    >>> import tempfile, accelfn as af
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place = save_tree(f"{folder}/state", {"w": torch.arange(3), "step": 7})
    ...     af.load_tree(place)
    {'w': tensor([0, 1, 2]), 'step': 7}
    """
    with paused_collection():
        encoded = encode(tree, namespace=namespace)
    return _write_alone(path, encoded)


class _Alone(NamedTuple):
    """Phases of a save for which this process writes what all ranks have."""

    size: int

    def gather(self, phase: str, text: str, error: Exception | None = None) -> list[str]:
        if error is not None:
            raise error
        return [text, *["[]"] * (self.size - 1)]


def save_for_ranks(
    path: str | os.PathLike[str], tree: Any, randoms: Sequence[Any] = (), *, step: int | None = None
) -> Path:
    """Save a tree, and random states for each rank of a world, as that world would with ``save_state``.

    Ranks: local; one process writes all.

    Args:
        path: As of :func:`save_tree`.
        tree: As of :func:`save_tree`.
        randoms: By rank, as ``random_states`` returns them; empty: for one rank, which keeps its own.
        step: As of :func:`accelfn.save_state`.

    Raises:
        TypeError: As of :func:`save_tree`.
        OSError: It can't be written. Nothing is left behind.
    """
    encoded = encode(tree)
    documents: list[Json] = []
    tensors = dict(encoded.tensors)
    for rank, one in enumerate(map(encode, randoms)):
        called = _random_names(one.tensors, encoded.tensors, f"@{rank}" if rank else "")
        documents.append(renamed(one.document, called))
        tensors.update({called[name]: tensor for name, tensor in one.tensors.items()})
    random = join_documents(documents) if documents else None
    whole = encoded._replace(tensors=tensors)
    return _write_alone(path, whole, random, max(1, len(documents)), step)


def _random_names(names: Iterable[str], taken: Iterable[str], ending: str = "") -> dict[str, str]:
    """Name the tensors of random states as no tensor of the tree is called."""
    prefix = "#random"
    while any(name.startswith(f"{prefix}/") for name in taken):
        prefix = f"#{prefix}"
    return {name: f"{prefix}/{name}{ending}" for name in names}


def _write_alone(
    path: str | os.PathLike[str],
    encoded: Encoded,
    random: Json = None,
    size: int = 1,
    step: int | None = None,
) -> Path:
    described = _held(encoded.tensors, {})
    writes = tuple(Write(name, name, None) for name in described)
    target = Path(os.path.abspath(os.fspath(path)))
    check_target(REAL_DISK, str(target))
    job = Job(
        directory=target,
        nonce=make_nonce(),
        tree=encoded.document,
        random=random,
        described=described,
        plan=SavePlan((writes, *[()] * (size - 1)), ({},) * size),
        step=step,
        size=size,
        entries=tuple((write.stored, encoded.tensors[write.name], None) for write in writes),
        threads=os.cpu_count() or 1,
    )
    return write_job(job, _Alone(size), REAL_DISK)


# --- before anything is written ------------------------------------------------------------------


def _check_options(step: object, metric: object, keep: object) -> None:
    """Refuse what is no step, no metric or no rule.

    Raises:
        TypeError: One isn't.
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
def _look(ctx: Context, path: Path, tree: Any, *, is_copied: bool) -> _Own:
    """Read all that this rank brings; nothing is written."""
    check_target(REAL_DISK, str(path))
    names = find_names(tree)
    staged: dict[str, WholeModel | None] = {}

    def convert(where: str, thing: Any) -> Any:
        whole = whole_of(inner_of(thing)) if isinstance(thing, nn.Module) else None
        if whole is not None or (isinstance(thing, Optimizer) and ctx.axis_size("pp") > 1):
            staged[where] = whole
        return _state_of(thing, names)

    main = encode(_without_gradients(tree), convert=convert)
    if staged and ctx.axis_size("pp") == 1:
        raise CheckpointError(
            f"save_state: {next(iter(staged)) or 'tree'} is cut into stages, and the ranks of this context "
            "have some of them. Save with the context that it was prepared with."
        )
    firsts = first_names(staged, main.tensors)
    document = renamed(main.document, firsts)
    tensors = {firsts.get(name, name): tensor for name, tensor in main.tensors.items()}
    random = encode({**random_states(ctx), **stored_place(ctx)})
    called = _random_names(random.tensors, tensors)
    random_tensors = {called[name]: tensor for name, tensor in random.tensors.items()}
    sums: dict[str, tuple[int, ...]] = {}
    compares = ctx.num_processes > 1 and ctx.guard.mode != GuardMode.OFF
    whole = {name: one for name, one in tensors.items() if boxes_of(one) is None}
    content = _contents(whole, sums, is_copied=is_copied) if compares else {}
    random_content = _contents(random_tensors, sums, is_copied=False) if ctx.num_processes > 1 else {}
    parts = {name: local_of(one) for name, one in tensors.items() if has_copies(one)}
    compares = compares and ctx.guard.check_replicas_before_saving
    return _Own(
        tree=document,
        random=renamed(random.document, called),
        tensors={**tensors, **random_tensors},
        held=_held(tensors, content),
        random_held=_held(random_tensors, random_content),
        sums=sums,
        replicated=names.replicated_of(tensors),
        copies=_contents(parts, sums, is_copied=is_copied) if compares else {},
        staged=staged,
        order=names.order,
    )


def _without_gradients(tree: Any) -> Any:
    """Forget what scaler states know of the gradients at hand, which are in no checkpoint."""
    if not any(isinstance(one, ScalerState) for one in optree.tree_leaves(tree, is_leaf=_is_scaler)):
        return tree

    def forget(leaf: Any) -> Any:
        if not isinstance(leaf, ScalerState):
            return leaf
        check_newest("save_state", leaf)
        return leaf._replace(unscaled=(), weight=None, is_open=None)

    return optree.tree_map(forget, tree, is_leaf=_is_scaler)


def _is_scaler(value: Any) -> bool:
    return isinstance(value, ScalerState)


def _state_of(thing: Any, names: Names) -> Any:
    if isinstance(thing, nn.Module):
        check_filled("save_state", unwrap_model(thing, keep_torch_compile=False))
    return state_of(thing, names)


def _held(tensors: Mapping[str, torch.Tensor], content: Mapping[str, str]) -> dict[str, Held]:
    kinds = {one: (dtype_name(one), one.itemsize) for one in {tensor.dtype for tensor in tensors.values()}}
    held: dict[str, Held] = {}
    for name, tensor in tensors.items():
        dtype, itemsize = kinds[tensor.dtype]
        held[name] = Held(dtype, tuple(tensor.shape), itemsize, boxes_of(tensor), content.get(name, ""))
    return held


def _contents(
    tensors: Mapping[str, torch.Tensor], sums: dict[str, tuple[int, ...]], *, is_copied: bool
) -> dict[str, str]:
    """Return for each tensor a text that differs where any of its bits does."""
    found: dict[str, str] = {}
    digested: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        if is_copied and size > _COMPARED_WHOLE:
            digested[name] = _samples(tensor)
        elif tensor.device.type == "cpu" and tensor.is_contiguous():
            memory = memory_of(tensor)
            sums[name] = tuple(
                zlib.crc32(memory[start : start + CHUNK_BYTES]) for start in range(0, size, CHUNK_BYTES)
            )
            found[name] = "crc32:" + ",".join(map(str, sums[name]))
        else:
            digested[name] = tensor
    rows = cast("list[list[int]]", digest_tensors(list(digested.values())).tolist()) if digested else []  # pyright: ignore[reportUnknownMemberType]
    found.update({name: f"digest:{row}" for name, row in zip(digested, rows, strict=True)})
    return found


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    """Return some parts of a large tensor, spread over all of it."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    length = max(1, _SAMPLE_BYTES // tensor.dtype.itemsize)
    step = (flat.numel() - length) // (_SAMPLES - 1)
    return flat.as_strided((_SAMPLES, length), (step, 1), flat.storage_offset()).contiguous()


# --- who writes what -----------------------------------------------------------------------------


@paused_collection()
def _agree_on(
    ctx: Context,
    phases: CollectivePhases,
    path: Path,
    own: _Own | None,
    error: Exception | None,
    options: Mapping[str, object],
    step: int | None,
    metric: float | None,
    keep: Keep | None,
    files: str | None,
    allow_drift: bool,
) -> Job:
    """Exchange what ranks hold, and plan who writes what."""
    world = ctx.world
    head, details = {}, ""
    if own is not None:
        head, details = _summarise(own, world.node_rank, world.local_rank)
        head["files"] = files is not None
        head["copies"] = own.copies
    texts = phases.gather(f"begin {json.dumps(options)}", json.dumps(head), error)
    heads = [json.loads(one) for one in texts]
    assert own is not None  # otherwise gather has raised
    documents, held = [own.tree] * world.size, [own.held] * world.size
    digests = [one["details"] for one in heads]
    if len(set(digests)) > 1:
        # Of the ranks that have the same to say, the first one says it: such as of the copies of a stage.
        first = [digests.index(one) for one in digests]
        every = phases.gather("details", details if first[world.rank] == world.rank else "")
        parsed = [json.loads(every[rank]) for rank in first]
        documents = [one["tree"] for one in parsed]
        held = [_parse_held(one["held"]) for one in parsed]
        if not allow_drift and ctx.guard.check_replicas_before_saving:
            _refuse_drift(ctx, own, held, [one["replicated"] for one in parsed])
    # Of parts that several ranks hold, only one copy would be kept.
    _raise_drift([one["copies"] for one in heads], [one["boxes"] for one in heads])
    for rank, one in enumerate(heads):
        own_boxes = {name: boxes_from(boxes) for name, boxes in one["boxes"].items()}
        cut = {name: held[rank][name]._replace(boxes=boxes) for name, boxes in own_boxes.items()}
        held[rank] = {**held[rank], **cut, **_parse_held(one["random_held"])}
    nodes = tuple(one["node"] for one in heads) if ctx.project.save_on_each_node else None
    plan = plan_save(held, nodes)
    described = {
        plan.names[rank].get(name, name): tensor
        for rank, tensors in enumerate(held)
        for name, tensor in tensors.items()
    }
    mains = {one["node"]: rank for rank, one in enumerate(heads) if one["local_rank"] == 0}
    trees = [renamed(one, plan.names[rank]) for rank, one in enumerate(documents)]
    if own.staged and ctx.mesh is not None:
        mesh = ctx.mesh.plan
        groups = sorted({mesh.group(rank, "pp") for rank in range(world.size)})
        join_stages(trees, groups, own.staged, own.order)
    randoms = [renamed(one["random"], plan.names[rank]) for rank, one in enumerate(heads)]
    return Job(
        directory=path,
        step=step,
        metric=None if metric is None or not math.isfinite(metric) else metric,
        keep=keep,
        rank=world.rank,
        main=0 if nodes is None else mains[world.node_rank],
        nonce=heads[0]["nonce"],
        threads=max(1, (os.cpu_count() or 1) // world.local_size),
        nodes=nodes,
        size=world.size,
        tree=join_documents(trees),
        random=join_documents(randoms),
        described=described,
        plan=plan,
        files=files,
        any_files=any(one["files"] for one in heads),
        entries=tuple(
            (entry_key(write, described), local_of(own.tensors[write.name]), own.sums.get(write.name))
            for write in plan.writes[world.rank]
        ),
    )


def _refuse_drift(
    ctx: Context, own: _Own, held: Sequence[Mapping[str, Held]], replicated: Sequence[Sequence[str]]
) -> None:
    """Refuse replicas that differ. Which leaves do is known by now, so only those are looked at again."""
    names = set(replicated[0]).intersection(*replicated[1:])
    drifted = [name for name in sorted(names) if len({tensors[name] for tensors in held}) > 1]
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
                    "allow_drift=True: then each rank's own are saved."
                )
            raise error from None
    # Along "pp" ranks have different tensors, which check_replicas doesn't compare; some have the same.
    mine = [{name: tensors[name] for name in of} for of, tensors in zip(replicated, held, strict=True)]
    _raise_drift(
        [{name: f"{one.dtype} {one.content}" for name, one in of.items()} for of in mine],
        [{name: [all_of(one.shape)] for name, one in of.items()} for of in mine],
    )


def _raise_drift(copies: Sequence[Mapping[str, str]], boxes: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Refuse copies that differ between ranks; see :func:`find_drift`, but for the boxes as JSON has them."""
    rows = find_drift(
        copies,
        [{name: boxes_from(found[name]) for name in of} for of, found in zip(copies, boxes, strict=True)],
    )
    if rows:
        raise ReplicaDriftError("save_state", rows)


def _summarise(own: _Own, node: int, local_rank: int) -> tuple[dict[str, Any], str]:
    """Return what the other ranks need in any case, and what they need only where ranks differ."""
    boxes = {name: one.boxes for name, one in own.held.items() if one.boxes is not None}
    plain = {name: one._replace(boxes=()) if name in boxes else one for name, one in own.held.items()}
    details = json.dumps({"tree": own.tree, "held": plain, "replicated": sorted(own.replicated)})
    head = {
        "details": hashlib.sha256(details.encode()).hexdigest(),
        "boxes": boxes,
        "random": own.random,
        "random_held": own.random_held,
        "node": node,
        "local_rank": local_rank,
        "nonce": make_nonce(),
    }
    return head, details


def _parse_held(held: Mapping[str, Sequence[Any]]) -> dict[str, Held]:
    return {
        name: Held(dtype, tuple(shape), itemsize, None if boxes is None else boxes_from(boxes), content)
        for name, (dtype, shape, itemsize, boxes, content) in held.items()
    }


def _set_aside(job: Job, phases: CollectivePhases, disk: Disk) -> Job:
    """Move the files to a directory of the save's own, since the caller goes on."""

    def move() -> str | None:
        if job.files is None:
            return None
        find_attachments(disk, job.files)
        moved = leftover_path(str(job.directory), "files", make_nonce())
        make_folders(disk, os.path.dirname(moved))
        disk.rename(job.files, moved)
        return moved

    own, error = catch(move)
    try:
        phases.gather("files", "", error)
    except BaseException:
        if own is not None:
            with suppress(OSError):
                remove_tree(disk, own)
        raise
    return job._replace(files=own, owns_files=own is not None)
