"""Write what a save has planned: each rank its part, and one of them the manifest and the commit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from accelfn import __version__
from accelfn.checkpoint.attachments import (
    find_attachments,
    take_attachments,
)
from accelfn.checkpoint.background import (
    Phases,
    paused_collection,
)
from accelfn.checkpoint.commit import (
    Stage,
    abandon,
    begin_stage,
    put_back,
    put_in_place,
    remove_replaced,
    write_manifest,
)
from accelfn.checkpoint.disk import Disk, remove_tree
from accelfn.checkpoint.files import new_entry, write_tensors
from accelfn.checkpoint.find import common, parts_at
from accelfn.checkpoint.keep import Keep, prune_checkpoints
from accelfn.checkpoint.manifest import (
    Attachment,
    Json,
    Manifest,
    Piece,
    StoredFile,
    StoredTensor,
)
from accelfn.checkpoint.plan import (
    Box,
    Held,
    SavePlan,
    Write,
    all_of,
)
from accelfn.comm import catch
from accelfn.errors import NoCheckpointError

# Two threads write two files at a time, where there is so much for each of them.
_BYTES_FOR_A_FILE = 1 << 25
_MOST_FILES = 4


_Entry = tuple[str, torch.Tensor, "tuple[int, ...] | None"]  # key, tensor, checksums that are known


class Job(NamedTuple):
    """What is left of a save once all ranks know who writes what."""

    directory: Path
    nonce: str
    tree: Json
    described: Mapping[str, Held]  # by stored name
    plan: SavePlan
    entries: tuple[_Entry, ...]
    threads: int  # to write with, so that all ranks of a machine together use its cores
    step: int | None = None
    metric: float | None = None
    keep: Keep | None = None
    random: Json = None
    rank: int = 0
    main: int = 0  # the rank that makes the directory of this rank's node
    size: int = 1
    nodes: tuple[int, ...] | None = None  # by rank, where nodes have disks of their own
    files: str | None = None  # directory of files that become part of the checkpoint, on ranks that have one
    any_files: bool = False  # whether any rank has one
    owns_files: bool = False  # whether that directory is of this save


def entry_key(write: Write, described: Mapping[str, Held]) -> str:
    """Name an entry of a file: as the tensor, with the place of its box where it is cut."""
    if write.box is None:
        return write.stored
    key = f"{write.stored}@{','.join(map(str, write.box.offset))}"
    while key in described:  # a tensor that somebody has called so
        key += "'"
    return key


@paused_collection()
def write_job(job: Job, phases: Phases, disk: Disk) -> Path:
    """Write this rank's part, and commit when all ranks have written theirs."""
    stage: Stage | None = None
    names: tuple[str, ...] = ()
    is_main, error = job.rank == job.main, None
    try:
        if job.nodes is not None:
            _settle_nodes(job, phases, disk)
        if job.files is not None:
            found, error = catch(lambda: find_attachments(disk, cast("str", job.files)))
            names = found or ()
        if is_main and error is None:
            stage, error = catch(lambda: begin_stage(disk, job.directory, job.nonce))
        own = json.dumps([stage.path, stage.generation] if stage is not None else [])
        every = [json.loads(one) for one in phases.gather("stage", own, error)]
        path, generation = every[job.main][0], max(one[1] for one in every if one)
        written, error = catch(lambda: _write_all(job, disk, path, names))
        results = phases.gather("write", json.dumps(written), error)
        old, error = (), None
        if stage is not None:
            manifest = _manifest(job, results, generation)
            _, error = catch(lambda: write_manifest(disk, stage, manifest))
        if job.nodes is not None:
            # Every node is ready before one of them commits: each still has its old one if another fails.
            phases.gather("ready", "", error)
        if stage is not None and error is None:
            old, error = catch(lambda: put_in_place(disk, stage))
            if error is None and job.nodes is None:
                remove_replaced(disk, str(job.directory), old or ())
        phases.gather("commit", "", error)
    except BaseException:
        if stage is not None:
            abandon(disk, stage)
        if job.owns_files:
            with suppress(OSError):
                remove_tree(disk, cast("str", job.files))
        raise
    if job.files is not None:
        with suppress(OSError):  # somebody has put something into it again
            disk.remove_folder(job.files)
    if is_main and job.nodes is not None:
        remove_replaced(disk, str(job.directory), old or ())
    if job.keep is not None:
        keep, error = job.keep, None
        if is_main:
            parent, saved = job.directory.parent, job.directory
            _, error = catch(lambda: prune_checkpoints(parent, keep, saved=saved, disk=disk))
        phases.gather("prune", "", error)
    return job.directory


def _settle_nodes(job: Job, phases: Phases, disk: Disk) -> None:
    """Make all nodes agree on one checkpoint before a new one replaces it: a crash may have left two."""
    is_main, place = job.rank == job.main, str(job.directory)
    parts, error = catch(lambda: parts_at(disk, place) if is_main else [])
    every = [json.loads(one) for one in phases.gather("nodes", json.dumps(parts), error)]
    mains = sorted({(job.nodes or ())[rank]: rank for rank in reversed(range(job.size))}.values())
    try:
        identity = common([every[rank] for rank in mains], place)
    except NoCheckpointError:
        return  # nothing is left that a new one could take from anybody
    error = None
    if is_main and identity is not None:
        _, error = catch(lambda: put_back(disk, place, dict(parts or ())[identity]))
    phases.gather("settled", "", error)


def _file_name(rank: int, part: int) -> str:
    return f"tensors-{rank:05d}.safetensors" if part == 0 else f"tensors-{rank:05d}-{part}.safetensors"


def _write_own(job: Job, disk: Disk, stage: str) -> list[Any]:
    """Write this rank's tensors; say of each file its name, size, and checksums of header and entries."""
    parts = _deal(job.entries, job.threads)

    def write(number: int) -> list[Any]:
        name = _file_name(job.rank, number)
        entries = [
            new_entry(key, tensor) if sums is None else new_entry(key, tensor)._replace(crc32=sums)
            for key, tensor, sums in parts[number]
        ]
        written = write_tensors(disk, os.path.join(stage, name), entries, {"format": "pt"})
        return [name, written.size, written.header_crc32, dict(written.crc32)]

    if len(parts) < 2:
        return [write(number) for number in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(write, range(len(parts))))


def _deal(entries: Sequence[_Entry], threads: int) -> list[list[_Entry]]:
    """Cut what a rank writes into files of about equal size. Pure.

    A system copies what is written to one file in one thread; with a file for each core a save of 300 MB
    takes about half as long.
    """
    sizes = [tensor.numel() * tensor.dtype.itemsize for _, tensor, _ in entries]
    count = max(1, min(threads, sum(sizes) // _BYTES_FOR_A_FILE, _MOST_FILES))
    parts: list[list[_Entry]] = [[] for _ in range(count)]
    loads = [0] * count
    for index in sorted(range(len(entries)), key=lambda index: -sizes[index]):
        least = loads.index(min(loads))
        parts[least].append(entries[index])
        loads[least] += sizes[index]
    return [part for part in parts if part]


def _write_all(job: Job, disk: Disk, stage: str, names: Sequence[str]) -> Json:
    """Write this rank's tensors, move its files, and say what there is of both; ``_said_of`` reads it."""
    own = _write_own(job, disk, stage)
    if job.files is None:
        return own
    return {"own": own, "attached": take_attachments(disk, job.files, names, stage)}


def _parse_written(result: str) -> tuple[list[Any], dict[str, Any]]:
    found: Any = json.loads(result)
    if not isinstance(found, dict):
        return found, {}
    both = cast("dict[str, Any]", found)
    return both["own"], both["attached"]


def _manifest(job: Job, results: Sequence[str], generation: int) -> Manifest:
    files: dict[str, StoredFile] = {}
    pieces: dict[str, dict[Box | None, Piece]] = {}
    node = None if job.nodes is None else job.nodes[job.rank]
    # This node's own pieces first: of a box that several nodes have, each reads its own.
    order = sorted(
        range(job.size), key=lambda rank: (job.nodes is not None and job.nodes[rank] != node, rank)
    )
    for rank in order:
        written, _ = _parse_written(results[rank])
        found = {key: (name, sums) for name, _, _, by_key in written for key, sums in by_key.items()}
        used: set[str] = set()
        for write in job.plan.writes[rank]:
            known = pieces.setdefault(write.stored, {})
            if write.box in known:
                continue
            one = job.described[write.stored]
            box = write.box or all_of(one.shape)
            key = entry_key(write, job.described)
            file, sums = found[key]
            used.add(file)
            known[write.box] = Piece(file, key, box.offset, box.shape, tuple(sums))
        at = None if job.nodes is None else job.nodes[rank]
        for name, size, header_crc32, _ in written:
            if name in used or at == node:
                files[name] = StoredFile(size, header_crc32, at)
    _, attached = _parse_written(results[job.main])
    return Manifest(
        tree=job.tree,
        tensors={
            name: StoredTensor(job.described[name].dtype, job.described[name].shape, tuple(boxes.values()))
            for name, boxes in pieces.items()
        },
        files=files,
        attachments={name: Attachment(size, tuple(sums)) for name, (size, sums) in attached.items()},
        random=job.random,
        # Of all that was written, so that equal states give equal bytes.
        identity=hashlib.sha256(json.dumps([list(results), generation, job.step]).encode()).hexdigest()[:32],
        step=job.step,
        metric=job.metric,
        world_size=job.size,
        num_nodes=1 if job.nodes is None else len(set(job.nodes)),
        node=node,
        generation=generation,
        created_by=f"accelfn {__version__}",
    )
