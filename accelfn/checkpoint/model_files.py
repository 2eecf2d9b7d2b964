"""Write the files of a model's weights, and replace a model's files so that no crash mixes two models.

A reader opens one file first, the *entry*: the single file, or the index that names the others. A new set of
files replaces an old one in these steps, each durable before the next:

1. All new files are written in a separate folder.
2. The shards are moved to names that no existing file has; no reader knows them yet.
3. The new entry is moved to its name, by one rename.
4. Other entries of the old set are removed, beginning with those that readers prefer least. If readers prefer
   an old entry to the new one, it is therefore the last to go.
5. Files that no entry names any more are removed.

At every instant, a reader opens the old entry with all of its files, or the new one. Where there are no locks
(Windows, some network file systems), another program may be doing the same: then no two saves use the same
names for shards, and only files of the set that was found before step 2 are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accelfn.checkpoint.commit import check_local, scratch_folder
from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from accelfn.storage.disk import REAL_DISK, make_folders, naming, write_file
from accelfn.weights.dtypes import SAFETENSORS_NAMES
from accelfn.weights.index import (
    WeightNames,
    WeightNaming,
    WeightsPlan,
    entry_names,
    find_weights,
    names_of,
    parse_size,
    plan_weights,
)
from accelfn.weights.write import NewEntry, write_tensors

# --- one file ------------------------------------------------------------------------------------


def write_safetensors(
    path: Path,
    forms: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    value_of: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    *,
    fill: bool = False,
) -> None:
    """Write a new safetensors file durably, with one tensor in memory at a time and without checksums.

    Args:
        path: Must not exist yet.
        forms: Dtype and shape of each tensor, by name.
        value_of: Returns a tensor by its name; called in the order of ``header.storage_order``.
        metadata: Texts for the header.
        fill: See ``header.format_header``.

    Raises:
        OSError: The file can't be written; the error names it.
    """
    entries = [
        NewEntry(name, SAFETENSORS_NAMES[dtype], tuple(shape), partial(value_of, name), crc32=())
        for name, (dtype, shape) in forms.items()
    ]
    write_tensors(REAL_DISK, os.fspath(path), entries, metadata, fill=fill)


def write_pickled(path: Path, obj: Any) -> None:
    """Write a new file durably with ``torch.save``.

    Raises:
        OSError: The file can't be written; the error names it.
    """
    with naming(os.fspath(path)), open(path, "xb") as file:
        torch.save(obj, file)
        file.flush()
        os.fsync(file.fileno())


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU, contiguous, and with a storage that holds nothing else.

    ``torch.save`` writes the storage of a view completely.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    is_view = plain.untyped_storage().nbytes() != plain.numel() * plain.dtype.itemsize
    return plain.clone() if is_view else plain


# --- a folder for new files ----------------------------------------------------------------------


@contextlib.contextmanager
def staging(final: Path) -> Generator[Path]:
    """Make a folder next to ``final`` for new files, and remove it at the end.

    The caller renames the result to ``final`` inside the block; the rename is durable when the block ends.
    Folders that killed programs left behind are removed first.
    """
    target = os.path.abspath(final)
    check_local(target)
    make_folders(REAL_DISK, os.path.dirname(target))
    with scratch_folder(REAL_DISK, target) as stage:
        yield Path(stage)
        _sync(Path(target).parent)


@contextlib.contextmanager
def replacing(final: Path) -> Generator[Path]:
    """Yield the path for a new file that replaces ``final`` at the end of the block, by one rename.

    If the block fails, the new file is removed, and ``final`` is unchanged.
    """
    with staging(final) as stage:
        yield stage / final.name
        os.replace(stage / final.name, final)


def _sync(folder: Path) -> None:
    with naming(os.fspath(folder)):
        REAL_DISK.sync_folder(os.fspath(folder))


# --- the directory of a model --------------------------------------------------------------------


@contextlib.contextmanager
def locked_directory(folder: Path, naming: WeightNaming) -> Generator[bool]:
    """Make the directory of a model, and lock it against other saves until the end of the block.

    Yields whether it is locked: some file systems have no locks.

    Raises:
        CheckpointError: ``folder`` is an address.
        NotADirectoryError: ``folder`` is a file.
        IsADirectoryError: A directory has the name of one of the model's files.
        BlockingIOError: Another program or rank is saving to the directory.
        OSError: The directory can't be made.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"save_model: {folder} is a file. Pass a directory.")
    check_local(os.path.abspath(folder))
    make_folders(REAL_DISK, os.path.abspath(folder))
    for name in entry_names(naming):
        if (folder / name).is_dir():
            raise IsADirectoryError(
                f"save_model: {folder / name} is a directory, but the model needs a file of that name. "
                "Remove it, or save to another directory."
            )
    with _locked(folder) as is_locked:
        yield is_locked


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[bool]:
    try:
        release = REAL_DISK.lock(os.fspath(folder))
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno,
            "save_model: another program or rank is saving a model here. Let one write at a time "
            "(save_on_each_node is for disks that nodes don't share)",
            os.fspath(folder),
        ) from error
    try:
        yield release is not None
    finally:
        if release is not None:
            release()


def existing_generations(folder: Path, naming: WeightNaming) -> frozenset[int]:
    """Return the generations of the shards in a directory."""
    found = (names.generation(name) for name in os.listdir(folder) for names in names_of(naming))
    return frozenset(generation for generation in found if generation is not None)


def write_files(
    folder: Path,
    plan: WeightsPlan,
    kind: WeightNames,
    tensors: Mapping[str, torch.Tensor],
    values: Iterator[torch.Tensor] | None = None,
) -> tuple[str, ...]:
    """Write the files of a plan durably, and the index if there are several.

    Args:
        folder: Contains none of the files yet.
        plan: Which tensor is in which file.
        kind: Names of the files.
        tensors: By name, for dtypes and shapes.
        values: The complete tensors in the order of the plan. None: those in ``tensors``.

    Returns:
        Names of the files; the entry is the last.

    Raises:
        OSError: A file can't be written; the error names it.
    """
    remaining = values or (tensors[name] for _, names in plan.files for name in names)
    file_of = {name: file for file, names in plan.files for name in names}
    for file, names in plan.files:
        tied = {name: stored for name, stored in plan.tied if file_of[stored] == file}
        if kind.is_safe:
            forms = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
            write_safetensors(folder / file, forms, lambda _: next(remaining), {"format": "pt", **tied})
        else:
            content = {name: compact(value) for name, value in zip(names, remaining, strict=False)}
            write_pickled(folder / file, content | {name: content[stored] for name, stored in tied.items()})
            del content  # before the next file's tensors are collected
    if len(plan.files) == 1:
        return (plan.files[0][0],)
    # Pickled files contain tied weights under each of their names.
    tied_files = {} if kind.is_safe else {name: file_of[stored] for name, stored in plan.tied}
    index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": {**file_of, **tied_files}}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_file(REAL_DISK, os.fspath(folder / kind.index), text.encode())
    return (*(file for file, _ in plan.files), kind.index)


def publish(
    folder: Path, naming: WeightNaming, stage: Path, files: Sequence[str], *, is_locked: bool
) -> None:
    """Replace the model in a directory by a complete set of new files; see the module.

    Args:
        folder: The model's directory.
        naming: The library whose names the files have.
        stage: Contains the new files.
        files: Their names. The last one is the entry; no file in ``folder`` has the other names.
        is_locked: Whether no other program can be saving to ``folder``.

    Raises:
        OSError: A step failed. Readers find either the old files or the new ones.
    """
    *shards, entry = files
    before = {name: _identity(folder / name) for name in entry_names(naming)}
    old = set(os.listdir(folder)) if is_locked else _named_in(folder / name for name in before)
    try:
        for name in shards:
            os.replace(stage / name, folder / name)
        if shards:
            _sync(folder)
        os.replace(stage / entry, folder / entry)
    except OSError:
        for name in shards:
            (folder / name).unlink(missing_ok=True)
        raise
    _sync(folder)
    for name in reversed(entry_names(naming)):
        now = _identity(folder / name)
        if name != entry and now is not None and now == before[name]:
            os.unlink(folder / name)
            _sync(folder)
    for name in old.difference(files):
        if any(names.generation(name) is not None for names in names_of(naming)):
            with contextlib.suppress(OSError):  # the save has succeeded, with or without old files left over
                os.unlink(folder / name)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one that replaces it; None if there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _named_in(entries: Iterable[Path]) -> set[str]:
    """Return the files that indexes name; none for other entries, and for what can't be read."""
    found: set[str] = set()
    for entry in entries:
        with contextlib.suppress(NoCheckpointError, DamagedCheckpointError):
            found.update(find_weights(entry).files)
    return found


def write_weights(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    max_shard_size: int | str = "10GB",
) -> tuple[str, ...]:
    """Write tensors to a new directory, as ``model.safetensors`` or as several files with an index.

    Tensors that are the same data are stored once; the file's metadata has the other names.

    Ranks: local; one process writes.

    Args:
        directory: Must not exist, or be empty.
        tensors: Dense, complete tensors by name.
        max_shard_size: Largest size of a file, in bytes or a text such as ``"5GB"``.

    Returns:
        Names of the files.

    Raises:
        ValueError: safetensors lacks a tensor's dtype, or ``max_shard_size`` is malformed.
        OSError: The files can't be written, or the directory isn't empty. Nothing is left behind.
    """
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_NAMES]
    if odd:
        listed = ", ".join(f"{name} ({tensors[name].dtype})" for name in odd[:5])
        raise ValueError(f"safetensors has no dtype for {listed}. Convert to a dtype such as float32 first.")
    plan = plan_weights(tensors, parse_size(max_shard_size))
    with staging(Path(directory)) as stage:
        files = write_files(stage, plan, names_of("transformers")[0], tensors)
        os.replace(stage, directory)
    return files
