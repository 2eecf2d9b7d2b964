"""Carry out a planned save: each rank writes its part, and one of them the manifest, which it commits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accelfn import __version__
from accelfn.checkpoint.attachments import check_attachable, move_files, sync_attachments
from accelfn.checkpoint.background import Phases, paused_collection
from accelfn.checkpoint.commit import (
    OpenSave,
    abandon,
    begin_save,
    clean,
    commit,
    end_save,
    find_missing,
)
from accelfn.checkpoint.keep import Keep, prune_checkpoints
from accelfn.checkpoint.manifest import Attachment, Json, Manifest, StoredFile, StoredTensor
from accelfn.comm import catch
from accelfn.errors import CheckpointError
from accelfn.storage.address import is_address
from accelfn.storage.disk import Disk
from accelfn.weights.write import new_entry, write_tensors

# Two threads write two files at a time if each has at least this many bytes.
_BYTES_FOR_A_FILE = 1 << 25
_MOST_FILES = 4


_Entry = tuple[str, torch.Tensor, "tuple[int, ...] | None"]  # key, tensor, checksums that are known


class Job(NamedTuple):
    """What one rank has to do for a save, once all ranks know who writes what."""

    directory: Path
    tree: Json
    tensors: Mapping[str, StoredTensor]
    entries: tuple[_Entry, ...]
    threads: int  # so that the ranks of a machine together use its cores
    step: int | None = None
    metric: float | None = None
    keep: Keep | None = None
    random: Json = None
    rank: int = 0
    size: int = 1
    files: str | None = None  # directory of the caller's files, on rank 0
    any_files: bool = False  # whether rank 0 has one


class Begun(NamedTuple):
    """A save whose directory is ready.

    Attributes:
        save: On rank 0.
        suffix: For the names of this rank's files.
    """

    save: OpenSave | None
    suffix: str


def begin_job(job: Job, phases: Phases, disk: Disk) -> Begun:
    """Lock the checkpoint's directory, and move the caller's files into it.

    Raises:
        CheckpointError: Another save is writing there, or a file can't become part of a checkpoint.
        Exception: The disk fails, or another rank has failed; nothing is left behind.
    """
    save, error = catch(lambda: _begin(job, disk)) if job.rank == 0 else (None, None)
    try:
        suffix, *_ = phases.gather("lock", "" if save is None else save.suffix, error)
    except BaseException:
        if save is not None:
            abandon(disk, save)
        raise
    return Begun(save, suffix)


def _begin(job: Job, disk: Disk) -> OpenSave:
    if job.files is not None:
        check_attachable(disk, job.files, job.directory)
    save = begin_save(disk, job.directory)
    try:
        clean(disk, save)
        if job.files is not None:
            move_files(disk, job.files, os.path.join(save.path, save.attachments))
    except BaseException:
        abandon(disk, save)
        raise
    return save


def write_job(job: Job, phases: Phases, disk: Disk, begun: Begun | None = None) -> Path:
    """Write this rank's part, and commit when all ranks have written theirs."""
    begun = begun or begin_job(job, phases, disk)
    manifest = _commit_job(job, phases, disk, begun)
    return _end_job(job, phases, disk, begun, manifest)


@paused_collection()
def _commit_job(job: Job, phases: Phases, disk: Disk, begun: Begun) -> Manifest | None:
    """Write this rank's part, and swap the manifest when all ranks have written theirs."""
    save, suffix = begun
    try:
        written, error = catch(lambda: _write_all(job, disk, save, suffix))
        results = phases.gather("write", json.dumps(written), error)
        manifest = error = None
        if save is not None:
            manifest, error = catch(lambda: _commit(job, disk, save, results))
        phases.gather("commit", "", error)
        return manifest
    except BaseException:
        if save is not None:
            abandon(disk, save)
        raise


def _commit(job: Job, disk: Disk, save: OpenSave, results: Sequence[str]) -> Manifest:
    manifest = _manifest(job, results)
    lost = find_missing(disk, save.path, manifest) if job.size > 1 else None
    if lost is not None:
        raise _not_shared(job, f"rank 0 doesn't find {lost} there, which another rank has written")
    commit(disk, save, manifest)
    return manifest


def _not_shared(job: Job, why: str) -> CheckpointError:
    return CheckpointError(
        f"save_state: {job.directory} isn't on a disk that all ranks share: {why}. Pass a path that every "
        "node sees (save_on_each_node is for save_model and save_object)."
    )


def _end_job(job: Job, phases: Phases, disk: Disk, begun: Begun, manifest: Manifest | None) -> Path:
    """Remove what the new checkpoint replaces, which must be durable on all ranks, and release the lock."""
    save, _ = begun
    if save is not None and manifest is not None:
        end_save(disk, save, manifest)
    if job.keep is not None:
        keep, error = job.keep, None
        if save is not None:
            parent, saved = job.directory.parent, job.directory
            _, error = catch(lambda: prune_checkpoints(parent, keep, saved=saved, disk=disk))
        phases.gather("prune", "", error)
    return job.directory


def _write_tensors(job: Job, disk: Disk, suffix: str) -> list[Any]:
    """Write this rank's tensors; return for each file its name, and what the manifest says of it."""
    parts = _deal(job.entries, job.threads)

    def write(number: int) -> list[Any]:
        part = f"-{number}" if number else ""
        name = f"tensors-{job.rank:05d}{part}{suffix}.safetensors"
        entries = [
            new_entry(key, tensor) if sums is None else new_entry(key, tensor)._replace(crc32=sums)
            for key, tensor, sums in parts[number]
        ]
        path = os.path.join(job.directory, name)
        return [name, job.rank, *write_tensors(disk, path, entries, {"format": "pt"}, has_sums=True)]

    if len(parts) < 2:
        return [write(number) for number in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(write, range(len(parts))))


def _deal(entries: Sequence[_Entry], threads: int) -> list[list[_Entry]]:
    """Split what a rank writes into files of about equal size. Pure.

    The kernel copies into one file in one thread, so with a file for each core a save of 300 MB takes about
    half as long.
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


def _write_all(job: Job, disk: Disk, save: OpenSave | None, suffix: str) -> list[Any]:
    """Write this rank's tensors, and sync the caller's files; return what the manifest needs of both."""
    attached = {}
    if save is not None and job.files is not None:
        attached = sync_attachments(disk, save.path, save.attachments)
    try:
        return [_write_tensors(job, disk, suffix), attached]
    except FileNotFoundError as error:
        if save is not None or is_address(job.directory):
            raise
        raise _not_shared(job, f"rank {job.rank} doesn't see the directory that rank 0 has made") from error


def _manifest(job: Job, results: Sequence[str]) -> Manifest:
    ranks: list[Any] = [json.loads(text) for text in results]
    attached = ranks[0][1]
    return Manifest(
        tree=job.tree,
        tensors=job.tensors,
        files={name: StoredFile(*fields) for written, _ in ranks for name, *fields in written},
        attachments={name: Attachment(size, tuple(sums)) for name, (size, sums) in attached.items()},
        random=job.random,
        # From the checksums of everything written, so that equal states give equal bytes.
        identity=hashlib.sha256(json.dumps([list(results), job.step]).encode()).hexdigest()[:32],
        step=job.step,
        metric=job.metric,
        world_size=job.size,
        created_by=f"accelfn {__version__}",
    )
