"""The files of a model on disk: written tensor by tensor, and put in place so that no crash tears a set.

A reader opens one file first, the *entry*: the only file, or the index that names the others. So a set of
files replaces another like this, and what is done is durable before each next step:

1. All new files are written in a folder of their own.
2. Shards get names that no file has. No reader knows of them yet.
3. The new entry gets its name, by one rename.
4. Entries of other names, which the old set left, go: those that readers prefer least come first. So the old
   entry is there until the last one goes, if readers prefer it to the new one.
5. What no entry names any more goes.

At every instant a reader thus opens the old entry, all files of which are there, or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accelfn.checkpoint.commit import scratch_folder
from accelfn.checkpoint.disk import REAL_DISK, make_folders, naming, write_file
from accelfn.checkpoint.files import NewEntry, write_tensors
from accelfn.checkpoint.header import SAFETENSORS_NAMES
from accelfn.checkpoint.weights_index import (
    WeightNames,
    WeightNaming,
    WeightsPlan,
    entry_names,
    names_of,
    parse_size,
    plan_weights,
)

# --- one file ------------------------------------------------------------------------------------


def write_safetensors(
    path: Path,
    forms: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    value_of: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    *,
    fill: bool = False,
) -> None:
    """Write a new safetensors file durably, holding one tensor at a time, and without checksums.

    Args:
        path: Must not exist yet.
        forms: Dtype and shape of each tensor, by name.
        value_of: Returns a tensor; called in the order of ``header.storage_order``.
        metadata: Of the file.
        fill: As for ``header.format_header``.

    Raises:
        OSError: The file can't be written; it names the file.
    """
    entries = [
        NewEntry(name, SAFETENSORS_NAMES[dtype], tuple(shape), partial(value_of, name), crc32=())
        for name, (dtype, shape) in forms.items()
    ]
    write_tensors(REAL_DISK, os.fspath(path), entries, metadata, fill=fill)


def write_pickled(path: Path, obj: Any) -> None:
    """Write a new file durably by ``torch.save``.

    Raises:
        OSError: The file can't be written; it names the file.
    """
    with naming(os.fspath(path)), open(path, "xb") as file:
        torch.save(obj, file)
        file.flush()
        os.fsync(file.fileno())


# --- a set of files ------------------------------------------------------------------------------


@contextlib.contextmanager
def staging(final: Path) -> Generator[Path]:
    """Make a folder beside ``final`` to write into, and remove what is left of it on the way out.

    What is written is to be renamed to ``final`` inside; that is durable on the way out. What programs left
    there that were killed is removed first.
    """
    target = os.path.abspath(final)
    with scratch_folder(REAL_DISK, target) as stage:
        yield Path(stage)
        _sync(Path(target).parent)


@contextlib.contextmanager
def replacing(final: Path) -> Generator[Path]:
    """Return the path to write a new file to, which takes the name ``final`` on the way out, in one step.

    After an error nothing of it is left, and what had the name before still has it.
    """
    with staging(final) as stage:
        yield stage / final.name
        os.replace(stage / final.name, final)


@contextlib.contextmanager
def holding(folder: Path, naming: WeightNaming) -> Generator[None]:
    """Make a directory for a model, and let no other program save a model in it meanwhile.

    Raises:
        NotADirectoryError: It is a file.
        IsADirectoryError: The name of a model's file is taken by a directory.
        BlockingIOError: Another program, or another rank, is saving in it.
        OSError: It can't be made.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"save_model: {folder} is a file. Pass a directory.")
    make_folders(REAL_DISK, os.path.abspath(folder))
    for name in entry_names(naming):
        if (folder / name).is_dir():
            raise IsADirectoryError(
                f"save_model: {folder / name} is a directory, and its name is that of a model's file. "
                "Remove it, or save elsewhere."
            )
    with _locked(folder):
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
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
        yield
    finally:
        if release is not None:
            release()


def taken_generations(folder: Path, naming: WeightNaming) -> frozenset[int]:
    """Generations of shard names that files of a directory have."""
    found = (names.generation(name) for name in os.listdir(folder) for names in names_of(naming))
    return frozenset(one for one in found if one is not None)


def write_files(
    folder: Path,
    plan: WeightsPlan,
    kind: WeightNames,
    tensors: Mapping[str, torch.Tensor],
    values: Iterator[torch.Tensor],
) -> tuple[str, ...]:
    """Write the files of a plan durably, and their index where they are several.

    Args:
        folder: Has none of them.
        plan: Which tensor is in which file.
        kind: Of the files.
        tensors: By name; of their dtypes and shapes.
        values: The tensors whole, in the order of the plan.

    Returns:
        The names of the files. The entry is the last.

    Raises:
        OSError: One can't be written; it names the file.
    """
    stored_in = {name: file for file, names in plan.files for name in names}
    for file, names in plan.files:
        tied = {name: first for name, first in plan.tied if stored_in[first] == file}
        if kind.is_safe:
            forms = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
            write_safetensors(folder / file, forms, lambda _: next(values), {"format": "pt", **tied})
        else:
            held = {name: _compact(value) for name, value in zip(names, values, strict=False)}
            write_pickled(folder / file, {**held, **{name: held[first] for name, first in tied.items()}})
            del held
    if len(plan.files) == 1:
        return (plan.files[0][0],)
    # Pickled files hold tied weights under each name, which share their data there.
    shared = {} if kind.is_safe else {name: stored_in[first] for name, first in plan.tied}
    said = {"metadata": {"total_size": plan.total_bytes}, "weight_map": {**stored_in, **shared}}
    text = json.dumps(said, indent=2, sort_keys=True) + "\n"
    write_file(REAL_DISK, os.fspath(folder / kind.index), text.encode())
    return (*(file for file, _ in plan.files), kind.index)


def _compact(value: torch.Tensor) -> torch.Tensor:
    plain = value.cpu().resolve_conj().resolve_neg().contiguous()
    # torch.save writes the whole storage, of which this may be a part.
    is_part = plain.untyped_storage().nbytes() != plain.numel() * plain.dtype.itemsize
    return plain.clone() if is_part else plain


def publish(folder: Path, naming: WeightNaming, stage: Path, files: Sequence[str]) -> None:
    """Let a complete set of files take the place of the one that is there; see the module.

    Args:
        folder: Where the others are.
        naming: Whose names they have.
        stage: Where the new ones are.
        files: Their names; the last is that of the entry, and the others are nobody's.

    Raises:
        OSError: The disk refused a step. The set that was there or the new one is what readers see.
    """
    *shards, entry = files
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
        if name != entry and os.path.lexists(folder / name):
            os.unlink(folder / name)
            _sync(folder)
    for name in set(os.listdir(folder)).difference(files):
        if any(names.generation(name) is not None for names in names_of(naming)):
            # The new set is in place: rubbish that can't be removed is no reason to call the save a failure.
            with contextlib.suppress(OSError):
                os.unlink(folder / name)


def _sync(folder: Path) -> None:
    with naming(os.fspath(folder)):
        REAL_DISK.sync_folder(os.fspath(folder))


def write_tied(folder: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one safetensors file; of tensors that are the same memory the first, with the others' names."""
    _write(folder, plan_weights(tensors, sys.maxsize, WeightNames(stem, ".safetensors")), tensors)


def _write(folder: Path, plan: WeightsPlan, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    values = (tensors[name] for _, names in plan.files for name in names)
    return write_files(folder, plan, names_of("transformers")[0], tensors, values)


def write_weights(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    max_shard_size: int | str = "10GB",
) -> tuple[str, ...]:
    """Write tensors as a new folder with ``model.safetensors``, or several files with their index.

    Tensors that are the same memory are stored once; the other names stand in the metadata of the file.

    Ranks: local; one process writes.

    Args:
        directory: Of the folder. Nothing, or an empty directory, may stand there.
        tensors: By name: dense, whole.
        max_shard_size: Largest size of a file, in bytes or such as ``"5GB"``.

    Returns:
        The names of the files.

    Raises:
        ValueError: safetensors has no such dtype, or the size has another form. All tensors are listed.
        OSError: It can't be written, or something stands there. Nothing is left behind.
    """
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_NAMES]
    if odd:
        listed = ", ".join(f"{name} ({tensors[name].dtype})" for name in odd[:5])
        raise ValueError(
            f"safetensors has no dtype for {listed}. Convert them to one that it has, such as float32."
        )
    plan = plan_weights(tensors, parse_size(max_shard_size))
    Path(directory).parent.mkdir(parents=True, exist_ok=True)
    with staging(Path(directory)) as stage:
        files = _write(stage, plan, tensors)
        os.replace(stage, directory)
    return files
