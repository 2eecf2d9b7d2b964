"""Folders of offloaded weights: write, convert and map them, also in Accelerate's format."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from accelfn.bigmodel.transfer import is_dense
from accelfn.checkpoint.model_files import replacing, write_safetensors
from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from accelfn.storage.address import as_path, is_address
from accelfn.storage.disk import naming
from accelfn.weights.assign import read_dtype, set_module_tensor_to_device
from accelfn.weights.dtypes import SAFETENSORS_NAMES, dtype_name
from accelfn.weights.index import read_header
from accelfn.weights.match import LoadStep
from accelfn.weights.open import stored_in
from accelfn.weights.places import check_device, read_place
from accelfn.weights.stored import FileId, Stored, drop_pages, file_id_of, map_stored, opened_unchanged
from accelfn.weights.write import memory_of


def check_folder(folder: str | os.PathLike[str], argument: str) -> None:
    """Refuse a path that is a file or below one.

    Args:
        folder: A folder, which needn't exist.
        argument: The argument's name in errors.

    Raises:
        NotADirectoryError: The path, or a part of it, exists and isn't a directory.
        ValueError: The path contains zero bytes, or is an address.
    """
    path = local_folder(folder, argument)
    if "\0" in str(path):
        raise ValueError(f"{argument}: a path can't contain zero bytes, got {str(path)!r}.")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        what = "it is a file" if existing == path else f"{existing} is a file"
        raise _with_advice(NotADirectoryError(errno.ENOTDIR, what), path, argument)


def local_folder(folder: str | os.PathLike[str], argument: str) -> Path:
    """Return the path of a folder on a disk.

    Raises:
        ValueError: It is an address.
    """
    if is_address(folder):
        raise ValueError(
            f"{argument}: weights are offloaded to a disk of this machine, and {as_path(folder)} is an "
            "address. Pass a directory."
        )
    return Path(folder)


@contextlib.contextmanager
def writing_to(folder: str | os.PathLike[str], argument: str) -> Generator[Path]:
    """Create a folder, and add advice to errors while weights are written to it.

    Args:
        folder: Created if it doesn't exist.
        argument: The argument's name in errors.

    Raises:
        OSError: It can't be created or written to. Class, ``errno`` and ``filename`` are those of the
            system's error.
    """
    path = Path(folder)
    check_folder(path, argument)
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        name = None if error.filename is None else os.path.abspath(os.fsdecode(error.filename))
        if error.errno is None or (name and not Path(name).is_relative_to(path.absolute())):
            raise  # for example from a file that is read meanwhile
        raise _with_advice(error, path, argument) from error


def _with_advice(error: OSError, folder: Path, argument: str) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        todo = "Free some space, or pass a folder on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        todo = "Pass a folder that you may write to"
    else:
        todo = "Pass another folder"
    text = f"can't write weights to {argument}={str(folder)!r}: {error.strerror}. {todo}"
    return OSError(error.errno, text, error.filename or str(folder))


def _check_dtypes(dtypes: Mapping[str, torch.dtype]) -> None:
    for name, dtype in dtypes.items():
        if dtype not in SAFETENSORS_NAMES:
            raise ValueError(
                f"{name!r} can't be on the disk: safetensors doesn't support {dtype}. Use another dtype, or "
                "keep it on the CPU."
            )


_KEY = "accelfn.converted"


def convert(
    file_ids: Mapping[Path, FileId],
    folder: str | os.PathLike[str] | None,
    advance: Callable[[int], None],
    steps: Sequence[LoadStep],
) -> list[torch.Tensor]:
    """Write the tensors of steps of a load to a folder in other dtypes, and map them.

    Each source file is converted to one file, whose name is a hash of its description: path, size and
    modification time of the source, and offset and dtypes of each tensor. The file also stores the
    description, and is reused only if it is the same. One tensor at a time is in memory.

    Ranks: local. Several ranks may write to the same folder, since files are renamed when they are complete.

    Args:
        file_ids: Identities of the source files.
        folder: Created if it doesn't exist. Without one, no step converts.
        advance: Called with the number of bytes that were converted.
        steps: The steps.

    Returns:
        The tensors, in the same order.

    Raises:
        DamagedCheckpointError: A source file was modified.
        OSError: The folder can't be written to, or is full. No partial file is left.
        ValueError: safetensors doesn't support a dtype.
    """
    _check_dtypes({step.source.name: step.dtype for step in steps})
    # With an index, since a name is repeated if it is tied or requested in two dtypes.
    keys = [f"{index}:{step.source.name}" for index, step in enumerate(steps)]
    by_file: dict[Path, dict[str, tuple[Stored, torch.dtype]]] = {}
    for key, step in zip(keys, steps, strict=True):
        by_file.setdefault(step.source.path, {})[key] = (step.source, step.dtype)
    tensors: dict[str, torch.Tensor] = {}
    if by_file:
        with writing_to(folder or "", "offload_folder") as output:
            for path, some in by_file.items():
                with opened_unchanged(path, file_ids):
                    pass
                tensors.update(_convert_file(path, some, file_ids[path], output, advance))
    return [tensors[key] for key in keys]


def _convert_file(
    path: Path,
    conversions: Mapping[str, tuple[Stored, torch.dtype]],
    file_id: FileId,
    folder: Path,
    advance: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    tensors = {key: [str(dtype), _describe(source)] for key, (source, dtype) in conversions.items()}
    parts = {"file": str(path.resolve()), "file_id": list(file_id), "tensors": tensors}
    description = json.dumps(parts, sort_keys=True)
    final = folder / f"accelfn-{hashlib.sha256(description.encode()).hexdigest()[:32]}.safetensors"

    def value_of(key: str) -> torch.Tensor:
        source, dtype = conversions[key]
        value = source.map()
        converted = value.to(dtype, copy=True, memory_format=torch.contiguous_format)
        drop_pages((value,))
        advance(source.num_bytes)
        return converted

    if _has_description(final, description):
        advance(sum(source.num_bytes for source, _ in conversions.values()))
    else:
        forms = {key: (dtype, source.shape) for key, (source, dtype) in conversions.items()}
        with replacing(final) as temporary:
            write_safetensors(temporary, forms, value_of, {_KEY: description}, fill=True)
    return _map_file(final)


def _describe(source: Stored) -> list[object]:
    parts = [
        [str(part.path.resolve()), list(file_id_of(part.path)), _describe(part)] for part in source.parts
    ]
    return [str(source.dtype), list(source.shape), source.start, source.operations, parts]


def _has_description(path: Path, description: str) -> bool:
    """Check whether a file exists and has this description."""
    with contextlib.suppress(FileNotFoundError, DamagedCheckpointError):
        return read_header(path).metadata.get(_KEY) == description
    return False


def _map_file(path: Path) -> dict[str, torch.Tensor]:
    stored = stored_in(path)
    return dict(zip(stored, map_stored([*stored.values()]), strict=True))


def write_mapped(
    folder: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Write tensors to a file in a folder, and return them mapped from it.

    The file is unlinked once it is mapped (except on Windows, which doesn't support that): its disk space is
    freed with the last tensor, and no file is left that could be mistaken for another model's weights.

    Tensors are aligned to 64 bytes, as in torch, so that kernels return bit-identical results.

    Args:
        folder: Created if it doesn't exist. Errors refer to it as ``offload_dir``.
        tensors: Tensors with values, by name. They keep their strides if they fill their memory.

    Raises:
        ValueError: safetensors doesn't support a dtype.
        OSError: The folder can't be written to, or the disk is full. No file is left.
    """
    _check_dtypes({name: tensor.dtype for name, tensor in tensors.items()})
    # In memory order, whatever the order of dimensions.
    flat = {
        name: tensor.detach().as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.detach()
        for name, tensor in tensors.items()
    }
    with writing_to(folder, "offload_dir") as output:
        path = output / f".accelfn-{secrets.token_hex(8)}.safetensors"
        try:
            forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in flat.items()}
            write_safetensors(path, forms, flat.__getitem__, {}, fill=True)
            mapped = _map_file(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    if os.name == "posix":
        path.unlink(missing_ok=True)
    return {
        name: mapped[name].as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else mapped[name]
        for name, tensor in tensors.items()
    }


# --- Accelerate's format: NAME.dat files and an index.json ---------------------------------------

_INDEX = "index.json"
_DTYPES = MappingProxyType(
    {dtype_name(dtype): dtype for dtype in (*SAFETENSORS_NAMES, torch.complex32, torch.complex128)}
)


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]] | None:
    """Write a tensor to a folder, as Accelerate's ``NAME.dat``, from where it can be mapped.

    All torch dtypes of whole bytes are supported. Accelerate reads NumPy's dtypes and bfloat16. The file is
    renamed when it is complete.

    Ranks: local; one rank writes.

    Args:
        weight: A tensor on any device.
        weight_name: Its full name in the model.
        offload_folder: The folder, which must exist.
        index: An entry is added to it, in place.

    Returns:
        ``index``.

    Raises:
        ValueError: The tensor isn't plain bytes, or the name can't be that of a file.
        OSError: The file can't be written; an existing one is unchanged.
    """
    name = dtype_name(weight.dtype)
    if name not in _DTYPES or weight.is_meta or weight.layout != torch.strided:
        raise ValueError(
            f"offload_weight: {weight_name} ({weight.dtype} on {weight.device}) can't be written as bytes. "
            "Pass a strided tensor with values."
        )
    path = _file_of(local_folder(offload_folder, "offload_folder"), weight_name)
    plain = weight.detach().cpu().resolve_conj().resolve_neg().contiguous()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with naming(str(path)):
        try:
            with open(temporary, "wb") as file:
                # As Accelerate does for scalars and empty tensors.
                file.write(memory_of(plain) if plain.numel() else b"")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    if index is not None:
        index[weight_name] = {"dtype": name, "shape": list(weight.shape)}
    return index


def _file_of(folder: Path, name: str) -> Path:
    if not name or any(character in name for character in "/\\\0"):
        raise ValueError(f"{name!r} can't be the name of a tensor's file.")
    return folder / f"{name}.dat"


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]
) -> torch.Tensor:
    """Map a tensor that :func:`offload_weight` or Accelerate wrote.

    Nothing is read until it is used. Writes to the tensor don't reach the file, which must not be modified.

    Args:
        weight_file: The file.
        weight_info: Its entry in the index: ``dtype`` and ``shape``.

    Raises:
        DamagedCheckpointError: The file's size doesn't match dtype and shape, or these are invalid.
        OSError: There is no such file.
    """
    path = Path(weight_file)
    dtype, shape = _DTYPES.get(str(weight_info.get("dtype"))), weight_info.get("shape")
    is_shape = isinstance(shape, (list, tuple)) and all(
        type(length) is int and length >= 0 for length in cast("Iterable[object]", shape)
    )
    if dtype is None or not is_shape:
        raise DamagedCheckpointError(f"{path}: invalid entry in the index: {dict(weight_info)!r}.", path.name)
    stored = Stored("", path, dtype, tuple(cast("Iterable[int]", shape)), 0)
    size = path.stat().st_size
    if size != stored.num_bytes:
        raise DamagedCheckpointError(
            f"{path} has {size} bytes, but {stored.kind} needs {stored.num_bytes}: it is truncated, or of "
            "another tensor. Write the folder again.",
            path.name,
        )
    return stored.map()


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a state dict to a folder, then its index.

    Ranks: local; one rank writes.

    Args:
        save_dir: The folder, created if it doesn't exist. Entries of an existing index are kept.
        state_dict: Tensors by name.

    Raises:
        ValueError: A tensor isn't plain bytes.
        OSError: A file can't be written. The index is unchanged, and no new file is left.
    """
    index: dict[str, dict[str, Any]] = {}
    new: list[Path] = []
    with writing_to(save_dir, "save_dir") as folder:
        try:
            for name, tensor in state_dict.items():
                path = _file_of(folder, name)
                if not path.exists():
                    new.append(path)
                offload_weight(tensor, name, folder, index)
            save_offload_index(index, folder)
        except BaseException:
            for path in new:
                path.unlink(missing_ok=True)
            raise


def save_offload_index(
    index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Write an index, merged with an existing one, atomically.

    Args:
        index: Entries by name. If there are none, nothing is written.
        offload_folder: The folder.

    Raises:
        DamagedCheckpointError: The existing index is damaged.
        OSError: It can't be written; an existing one is unchanged.
    """
    if not index:
        return
    path = local_folder(offload_folder, "offload_folder") / _INDEX
    merged = {**(_read_index(path) if path.exists() else {}), **index}
    with naming(str(path)), replacing(path) as temporary:
        temporary.write_text(json.dumps(merged, indent=2))


def _read_index(path: Path) -> dict[str, dict[str, Any]]:
    try:
        entries: Any = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NoCheckpointError(
            f"{path} doesn't exist: {path.parent} isn't a folder of offloaded weights."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} isn't valid JSON: {error}.", path.name) from error
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) for entry in cast("dict[str, Any]", entries).values()
    ):
        raise DamagedCheckpointError(f"{path} isn't an index of offloaded weights.", path.name)
    return cast("dict[str, dict[str, Any]]", entries)


def load_offloaded_weights(
    model: nn.Module,
    index: Mapping[str, Mapping[str, Any]] | None,
    offload_folder: str | os.PathLike[str],
) -> None:
    """Assign the tensors of a folder of offloaded weights to a model, mapped.

    Effect: on ``model``. All files are checked first. Ranks: local.

    Args:
        model: A model with tensors of these names, which are on the CPU afterwards.
        index: Entries as added by :func:`offload_weight`. None or empty: nothing is done. Entries whose names
            end in ``SCB`` are assigned to their int8 weights.
        offload_folder: The folder.

    Raises:
        DamagedCheckpointError: A file's size doesn't match the index.
        ValueError: The model has no such tensor, or it has another shape.
        OSError: A file is missing.
    """
    folder = local_folder(offload_folder, "offload_folder")
    loaded = {
        name: load_offloaded_weight(_file_of(folder, name), entry) for name, entry in (index or {}).items()
    }
    for name, weight in loaded.items():
        if not name.endswith("SCB"):
            scales = loaded.get(f"{name.removesuffix('weight')}SCB") if weight.dtype == torch.int8 else None
            set_module_tensor_to_device(
                model, name, "cpu", value=weight, dtype=weight.dtype, fp16_statistics=scales
            )


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Tensors by name, some in memory and some on the disk, which are mapped when they are looked up.

    Args:
        state_dict: Tensors in memory. They take precedence over the index.
        save_folder: A folder of offloaded weights.
        index: Entries of tensors on the disk, by name; None for the index in ``save_folder``. An entry may
            refer to a safetensors file: ``safetensors_file``, and optionally ``weight_name`` and ``dtype``.
        device: The device of tensors of safetensors files. None: they stay mapped.

    Raises:
        ValueError: No argument is given.
        NoCheckpointError: The folder has no index.
        DamagedCheckpointError: The index is damaged.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("OffloadedWeightsLoader: pass a state_dict, a save_folder or an index.")
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = _read_index(local_folder(save_folder, "save_folder") / _INDEX)
        self.index: Mapping[str, Mapping[str, Any]] = {} if index is None else index
        self.device = device
        self.all_keys: list[str] = list(dict.fromkeys((*self.state_dict, *self.index)))
        self._headers: dict[Path, Mapping[str, Stored]] = {}  # of safetensors files

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if entry.get("safetensors_file") is not None:
            return self._from_safetensors(key, entry)
        if self.save_folder is None:
            raise ValueError(f"OffloadedWeightsLoader: {key} is in a .dat file. Pass save_folder.")
        return load_offloaded_weight(_file_of(Path(self.save_folder), key), entry)

    def __contains__(self, key: object) -> bool:
        # Unlike that of Mapping, without mapping the tensor.
        return key in self.state_dict or key in self.index

    def _from_safetensors(self, key: str, entry: Mapping[str, Any]) -> torch.Tensor:
        path = Path(str(entry["safetensors_file"]))
        if path not in self._headers:
            self._headers[path] = stored_in(path)
        name = str(entry.get("weight_name") or key)
        if name not in self._headers[path]:
            raise DamagedCheckpointError(f"{path} lacks {name}, which the index lists for it.", path.name)
        tensor = self._headers[path][name].map()
        if entry.get("dtype") is not None:
            tensor = tensor.to(read_dtype(entry["dtype"]))
        return tensor if self.device is None else tensor.to(check_device(read_place(self.device)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The tensors of a mapping whose names start with a prefix, without that prefix.

    Args:
        dataset: Tensors by name.
        prefix: Such as ``"decoder."``.

    >>> part = PrefixedDataset({"a.weight": torch.ones(1), "b.weight": torch.zeros(1)}, "a.")
    >>> list(part), len(part), part["weight"]
    (['weight'], 1, tensor([1.]))
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(key.startswith(self.prefix) for key in self.dataset)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that belong to some modules, with their full names.

    Args:
        state_dict: Tensors by name.
        submodule_names: Names of modules or tensors. ``""`` is the whole model.

    >>> list(extract_submodules_state_dict({"a.w": torch.ones(1), "ab.w": torch.ones(1)}, ["a"]))
    ['a.w']
    """
    names = tuple(submodule_names)
    prefixes = tuple("" if not name else f"{name}." for name in names)
    return {key: value for key, value in state_dict.items() if key in names or key.startswith(prefixes)}
