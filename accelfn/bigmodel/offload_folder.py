"""Folders of offloaded weights: written, converted, and mapped; also those that Accelerate writes."""

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

from accelfn.bigmodel.assign import read_dtype, set_module_tensor_to_device
from accelfn.bigmodel.devices import check_device, read_place
from accelfn.bigmodel.transfer import is_dense
from accelfn.bigmodel.weight_files import (
    FileId,
    Stored,
    drop_pages,
    file_id_of,
    map_stored,
    open_unchanged,
    stored_in,
)
from accelfn.checkpoint.disk import naming
from accelfn.checkpoint.files import memory_of
from accelfn.checkpoint.header import SAFETENSORS_NAMES, dtype_name
from accelfn.checkpoint.weights_files import replacing, write_safetensors
from accelfn.checkpoint.weights_index import read_header
from accelfn.errors import DamagedCheckpointError, NoCheckpointError


def check_folder(folder: str | os.PathLike[str], argument: str) -> None:
    """Refuse what is a file, or lies below one.

    Args:
        folder: It needn't be there.
        argument: As the caller knows it.

    Raises:
        NotADirectoryError: It is there, or a part of its path is, and is no directory.
        ValueError: It can't be a path.
    """
    path = Path(folder)
    if "\0" in str(path):
        raise ValueError(f"{argument}: a path has no zero bytes: got {str(path)!r}.")
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not there.is_dir():
        what = "it is a file" if there == path else f"{there} is a file"
        raise _with_advice(NotADirectoryError(errno.ENOTDIR, what), path, argument)


@contextlib.contextmanager
def writing_to(folder: str | os.PathLike[str], argument: str) -> Generator[Path]:
    """Make a folder, and while weights are written to it, let errors of the disk say what to do.

    Args:
        folder: It is made if it isn't there.
        argument: As the caller knows it.

    Raises:
        OSError: It can't be made, or written to. Class, ``errno`` and ``filename`` are those of the system's
            error.
    """
    path = Path(folder)
    check_folder(path, argument)
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        named = None if error.filename is None else os.path.abspath(os.fsdecode(error.filename))
        if error.errno is None or (named and not Path(named).is_relative_to(path.absolute())):
            raise  # of a file that is read meanwhile, say
        raise _with_advice(error, path, argument) from error


def _with_advice(error: OSError, folder: Path, argument: str) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        todo = "Make room there, or pass a folder on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        todo = "Pass a folder that you may write to"
    else:
        todo = "Pass another folder"
    said = f"{argument}={str(folder)!r} can't take weights: {error.strerror}. {todo}"
    return OSError(error.errno, said, error.filename or str(folder))


def _check_dtypes(dtypes: Mapping[str, torch.dtype]) -> None:
    unfit = [name for name, dtype in dtypes.items() if dtype not in SAFETENSORS_NAMES]
    if unfit:
        raise ValueError(
            f"{unfit[0]!r} can't lie on the disk: safetensors has no {dtypes[unfit[0]]}. Choose another "
            "dtype, or leave it on the CPU."
        )


_KEY = "accelfn.converted"


def convert(
    conversions: Sequence[tuple[Stored, torch.dtype]],
    file_ids: Mapping[Path, FileId],
    folder: str | os.PathLike[str],
    advance: Callable[[int], None] = lambda _: None,
) -> list[torch.Tensor]:
    """Write tensors into a folder in other dtypes, and map them.

    There is one file for each file that they come from, called after what it is made of: the file's path,
    size and time of change, and place and dtypes of each tensor. It says all this itself, too, and is only
    taken for the right one if every word of it is. One tensor at a time is in memory.

    Ranks: local. Several may write the same folder: a file gets its name when it is whole.

    Args:
        conversions: What to write, and the dtypes that it shall have.
        file_ids: Of the files that it comes from.
        folder: Made where it isn't there.
        advance: Called with bytes that are done.

    Returns:
        The tensors, in the order given.

    Raises:
        DamagedCheckpointError: A file that they come from was changed meanwhile.
        OSError: The folder can't be written to, or is full. Nothing half is left behind.
        ValueError: safetensors has no such dtype.
    """
    _check_dtypes({source.name: dtype for source, dtype in conversions})
    by_file: dict[Path, dict[str, tuple[Stored, torch.dtype]]] = {}
    for number, (source, dtype) in enumerate(conversions):
        # Keys of their own: what is tied, or asked for in two dtypes, may have one name.
        by_file.setdefault(source.path, {})[f"{number}:{source.name}"] = (source, dtype)
    found: dict[str, torch.Tensor] = {}
    if by_file:
        with writing_to(folder, "offload_folder") as place:
            for path, some in by_file.items():
                open_unchanged(path, file_ids).close()
                found.update(_convert_file(path, some, file_ids[path], place, advance))
    return [found[f"{number}:{source.name}"] for number, (source, _) in enumerate(conversions)]


def _convert_file(
    path: Path,
    conversions: Mapping[str, tuple[Stored, torch.dtype]],
    file_id: FileId,
    folder: Path,
    advance: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    tensors = {key: [str(dtype), _describe(source)] for key, (source, dtype) in conversions.items()}
    told = {"file": str(path.resolve()), "file_id": list(file_id), "tensors": tensors}
    description = json.dumps(told, sort_keys=True)
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
        [str(one.path.resolve()), list(file_id_of(one.path.stat())), _describe(one)] for one in source.made_of
    ]
    return [str(source.dtype), list(source.shape), source.start, source.made_by, parts]


def _has_description(path: Path, description: str) -> bool:
    """Whether a file is there already and says that it is what would be written."""
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

    The file has no name any more once it is mapped (but for Windows, which doesn't allow that): it takes its
    space on the disk until the last of the tensors is gone, and nothing is left to be mistaken for another
    model's weights later.

    Each begins where torch would have it begin, at a multiple of 64 bytes, so that results are the same bits.

    Args:
        folder: It is made if it isn't there. Errors call it ``offload_dir``.
        tensors: By name, with values. They keep their strides if they fill their memory.

    Raises:
        ValueError: safetensors has no such dtype.
        OSError: The folder can't be written, or the disk is full. Nothing is left there.
    """
    _check_dtypes({name: one.dtype for name, one in tensors.items()})
    # Memory as it is, in whatever order its dimensions lie there.
    flat = {
        name: one.detach().as_strided((one.numel(),), (1,)) if is_dense(one) else one.detach()
        for name, one in tensors.items()
    }
    with writing_to(folder, "offload_dir") as place:
        path = place / f".accelfn-{secrets.token_hex(8)}.safetensors"
        try:
            forms = {name: (one.dtype, tuple(one.shape)) for name, one in flat.items()}
            write_safetensors(path, forms, flat.__getitem__, {}, fill=True)
            mapped = _map_file(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    if os.name == "posix":
        path.unlink(missing_ok=True)
    return {
        name: mapped[name].as_strided(one.shape, one.stride()) if is_dense(one) else mapped[name]
        for name, one in tensors.items()
    }


# --- folders as Accelerate has them --------------------------------------------------------------

_INDEX = "index.json"
_DTYPES = MappingProxyType(
    {dtype_name(one): one for one in (*SAFETENSORS_NAMES, torch.complex32, torch.complex128)}
)


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]] | None:
    """Write a tensor into a folder, as Accelerate's ``NAME.dat``, from where it can be mapped.

    Every dtype of torch that has whole bytes can be written. Accelerate reads those that NumPy has, and
    bfloat16. A file takes its name when it is complete.

    Ranks: local; one writes.

    Args:
        weight: On any device. It may require gradients.
        weight_name: Its full name in the model.
        offload_folder: Of the files; must exist.
        index: Gets an entry of it, in place.

    Returns:
        ``index``.

    Raises:
        ValueError: The tensor has no plain bytes, or the name can't be that of a file.
        OSError: It can't be written; the file that was there before still is.
    """
    name = dtype_name(weight.dtype)
    if name not in _DTYPES or weight.is_meta or weight.layout != torch.strided:
        raise ValueError(
            f"offload_weight: {weight_name} ({weight.dtype} on {weight.device}) has no plain bytes to write."
        )
    path = _file_of(Path(offload_folder), weight_name)
    plain = weight.detach().cpu().resolve_conj().resolve_neg().contiguous()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with naming(str(path)):
        try:
            with open(temporary, "wb") as file:
                # Accelerate writes a tensor without dimensions as one element, and maps no empty file.
                file.write(memory_of(plain) if plain.numel() else b"")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    if index is not None:
        index[weight_name] = {"dtype": name, "shape": list(weight.shape)}
    return index


def _file_of(folder: Path, name: str) -> Path:
    if not name or any(one in name for one in "/\\\0"):
        raise ValueError(f"{name!r} is no name of a tensor, and can't be that of its file.")
    return folder / f"{name}.dat"


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]
) -> torch.Tensor:
    """Map a tensor that :func:`offload_weight` or Accelerate wrote.

    Nothing is read before it is used, and writes to the tensor don't reach the file, which must stay as it is
    meanwhile.

    Args:
        weight_file: Of its bytes.
        weight_info: What the index says of it: ``dtype`` and ``shape``.

    Raises:
        DamagedCheckpointError: The file is shorter or longer than dtype and shape say, or they are none.
        OSError: There is no such file.
    """
    path = Path(weight_file)
    dtype, shape = _DTYPES.get(str(weight_info.get("dtype"))), weight_info.get("shape")
    is_shape = isinstance(shape, (list, tuple)) and all(
        type(length) is int and length >= 0 for length in cast("Iterable[object]", shape)
    )
    if dtype is None or not is_shape:
        raise DamagedCheckpointError(
            f"{path}: the index says {dict(weight_info)!r}, which is no tensor of torch.", path.name
        )
    stored = Stored("", path, dtype, tuple(cast("Iterable[int]", shape)), 0)
    found = path.stat().st_size
    if found != stored.num_bytes:
        raise DamagedCheckpointError(
            f"{path} has {found} bytes, and {stored.kind} needs {stored.num_bytes}: it is another tensor's, "
            "or was cut off. Write the folder again.",
            path.name,
        )
    return stored.map()


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a state dict into a folder, and its index last.

    Ranks: local; one writes.

    Args:
        save_dir: Of the files; made where it isn't there. What an index in it names already stays in it.
        state_dict: Tensors by name.

    Raises:
        ValueError: A tensor has no plain bytes.
        OSError: A file can't be written. The index is as it was, and no new file is left.
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
            for path in new:  # no index names them
                path.unlink(missing_ok=True)
            raise


def save_offload_index(
    index: Mapping[str, Mapping[str, Any]] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Write an index, merged into the one that is there; in one step, so that it is never half there.

    Args:
        index: By name. Without any, nothing is written.
        offload_folder: Where to.

    Raises:
        DamagedCheckpointError: The index that is there is none.
        OSError: It can't be written; the one that was there still is.
    """
    if not index:
        return
    path = Path(offload_folder) / _INDEX
    merged = {**(_read_index(path) if path.exists() else {}), **index}
    with naming(str(path)), replacing(path) as temporary:
        temporary.write_text(json.dumps(merged, indent=2))


def _read_index(path: Path) -> dict[str, dict[str, Any]]:
    try:
        said: object = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NoCheckpointError(
            f"{path} doesn't exist: {path.parent} is no folder of offloaded weights."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} holds no sound JSON: {error}.", path.name) from error
    entries = cast("dict[str, object]", said) if isinstance(said, dict) else {"": None}
    if not all(isinstance(entry, dict) for entry in entries.values()):
        raise DamagedCheckpointError(f"{path} is no index of offloaded weights.", path.name)
    return cast("dict[str, dict[str, Any]]", entries)


def load_offloaded_weights(
    model: nn.Module,
    index: Mapping[str, Mapping[str, Any]] | None,
    offload_folder: str | os.PathLike[str],
) -> None:
    """Return a model tensors of a folder of offloaded weights, mapped.

    Effect: on ``model``. All files are checked first. Ranks: local.

    Args:
        model: That has tensors of these names, on any device; they are on the CPU afterwards.
        index: What the folder has, as :func:`offload_weight` says it. None or empty: nothing is done. An
            entry whose name ends in ``SCB`` goes to the int8 weight that it belongs to.
        offload_folder: Of the files.

    Raises:
        DamagedCheckpointError: A file isn't as long as the index says.
        ValueError: The model has no such tensor, or it has another shape.
        OSError: A file is missing.
    """
    folder = Path(offload_folder)
    loaded = {
        name: load_offloaded_weight(_file_of(folder, name), said) for name, said in (index or {}).items()
    }
    for name, weight in loaded.items():
        if not name.endswith("SCB"):
            scales = loaded.get(f"{name.removesuffix('weight')}SCB") if weight.dtype == torch.int8 else None
            set_module_tensor_to_device(
                model, name, "cpu", value=weight, dtype=weight.dtype, fp16_statistics=scales
            )


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Tensors by name, some in memory and some on the disk, where they are mapped when they are asked for.

    Args:
        state_dict: Tensors in memory. They win over those of the index.
        save_folder: Of offloaded weights.
        index: What is on the disk, by name; that of ``save_folder`` if None. An entry may name a safetensors
            file instead: ``safetensors_file``, and where they differ ``weight_name`` and ``dtype``.
        device: Where tensors of safetensors files go. None: they stay mapped.

    Raises:
        ValueError: Neither tensors nor a folder nor an index is given.
        NoCheckpointError: The folder has no index.
        DamagedCheckpointError: The index is none.
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
            index = _read_index(Path(save_folder) / _INDEX)
        self.index: Mapping[str, Mapping[str, Any]] = {} if index is None else index
        self.device = device
        self.all_keys: list[str] = list(dict.fromkeys((*self.state_dict, *self.index)))
        self._headers: dict[Path, Mapping[str, Stored]] = {}  # of safetensors files that were read

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        said = self.index[key]
        if said.get("safetensors_file") is not None:
            return self._of_safetensors(key, said)
        if self.save_folder is None:
            raise ValueError(
                f"OffloadedWeightsLoader: the index has {key} in a file of its own: pass save_folder."
            )
        return load_offloaded_weight(_file_of(Path(self.save_folder), key), said)

    def __contains__(self, key: object) -> bool:
        # Not by reading the tensor, as a Mapping would.
        return key in self.state_dict or key in self.index

    def _of_safetensors(self, key: str, said: Mapping[str, Any]) -> torch.Tensor:
        path = Path(str(said["safetensors_file"]))
        if path not in self._headers:
            self._headers[path] = stored_in(path)
        name = str(said.get("weight_name") or key)
        if name not in self._headers[path]:
            raise DamagedCheckpointError(f"{path} lacks {name}, which the index says is in it.", path.name)
        found = self._headers[path][name].map()
        if said.get("dtype") is not None:
            found = found.to(read_dtype(said["dtype"]))
        return found if self.device is None else found.to(check_device(read_place(self.device)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The tensors of a mapping whose names begin with a prefix, under the rest of their names.

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
    """Take the tensors of some modules out of a state dict, under their full names.

    Args:
        state_dict: Tensors by name.
        submodule_names: Of modules, or of tensors. ``""`` is the whole model.

    >>> list(extract_submodules_state_dict({"a.w": torch.ones(1), "ab.w": torch.ones(1)}, ["a"]))
    ['a.w']
    """
    names = tuple(submodule_names)
    prefixes = tuple("" if not name else f"{name}." for name in names)
    return {key: value for key, value in state_dict.items() if key in names or key.startswith(prefixes)}
