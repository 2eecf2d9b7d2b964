"""Models that commands are told of: a folder, a file of weights, or a function that builds one."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from accelfn.bigmodel.arguments import require_path
from accelfn.bigmodel.empty import init_empty_weights
from accelfn.bigmodel.plan.shape import LeafShape, ModelShape, read_shape, shape_from_leaves
from accelfn.checkpoint.files.header import Entry
from accelfn.checkpoint.files.stored_dtype import SAFETENSORS_NAMES
from accelfn.checkpoint.weights.index import find_weights, read_header
from accelfn.errors import DamagedCheckpointError, MissingExtraError, NoCheckpointError

__all__ = ("build_on_meta", "build_source", "call_on_meta", "importing_from_here", "read_source")

_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def read_source(source: str | os.PathLike[str], *, trust_remote_code: bool = False) -> ModelShape:
    """Read the shape of a model that a command is told of. No weight is read, and no memory is taken for it.

    Ranks: local. Effect: imports the module of a factory, or transformers, and runs what builds the model.

    Args:
        source: A folder with a ``config.json`` of transformers; a folder or a file of safetensors, or an
            index; or ``module:factory``, a function without arguments that gives a module. The module is
            looked for in the working directory too.
        trust_remote_code: Whether Python code that lies in the folder may be run, by transformers, which
            copies it into its cache. A configuration that names classes in there needs it.

    Raises:
        ValueError: It is none of them, the folder's configuration names no known model, or the function
            can't be imported or called, or doesn't give a module.
        TypeError: It is no path or text.
        MissingExtraError: transformers is needed and not installed.
        NoCheckpointError: The folder has neither a configuration nor weights.
        DamagedCheckpointError: A file of weights isn't sound.
    """
    require_path("read_source", "source", source)
    text = os.fspath(source)
    path = Path(text)
    if path.exists() and not (path / "config.json").is_file():
        return _from_files(path)
    return read_shape(build_source(text, trust_remote_code=trust_remote_code))


def build_source(source: str, *, trust_remote_code: bool = False) -> nn.Module:
    """Build the model that a command is told of, on the meta device. No memory is taken for it.

    Ranks: local. Effect: as :func:`read_source`.

    Raises:
        ValueError: As :func:`read_source`; or it is a file of weights, which doesn't say what modules do.
        MissingExtraError: transformers is needed and not installed.
    """
    path = Path(source)
    if (path / "config.json").is_file():
        return _from_config(path, trust_remote_code)
    if path.exists():
        raise ValueError(
            f"{source}: names and sizes of weights don't say of which modules they are. Pass a folder with a "
            "config.json, or MODULE:FUNCTION."
        )
    if _FACTORY.fullmatch(source):
        return build_on_meta(source)
    raise ValueError(
        f"{source!r}: there is no such file or folder. Pass a folder with a config.json, a safetensors file "
        "or index, or MODULE:FUNCTION, such as train:build_model."
    )


def build_on_meta(source: str) -> nn.Module:
    """Call the function that ``module:factory`` names, and give no memory to the module that it builds.

    Ranks: local. Effect: imports the module.

    Raises:
        ValueError: As :func:`call_on_meta`, or the function doesn't give a module.
    """
    built = call_on_meta(source)
    if not isinstance(built, nn.Module):
        raise ValueError(f"{source}: the function gave {type(built).__name__}, and must give a module.")
    return built


def call_on_meta(source: str) -> object:
    """Call the function that ``module:function`` names, and give no memory to the tensors that it makes.

    Ranks: local. Effect: imports the module.

    Raises:
        ValueError: There is no such module or function, or it can't be imported or called without arguments.
            What it raised is the cause.
    """
    module_name, _, function_name = source.partition(":")
    with importing_from_here():
        try:
            found: Any = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{source}: {_tell_import(module_name, error)}") from error
        for part in function_name.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise ValueError(f"{source}: the module {module_name} has no function {function_name!r}.")
        needed = _needed_arguments(found)
        if needed:
            raise ValueError(
                f"{source}: the function needs arguments ({', '.join(needed)}), and is called without any. "
                "Name one that needs none, and calls it."
            )
        try:
            with init_empty_weights(include_buffers=True):
                return cast("Callable[[], object]", found)()
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{source}: the function raised {_tell(error)}. It is called without arguments, and while "
                "new tensors have no values (meta device)."
            ) from error


def _tell_import(module_name: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module_name}.".startswith(f"{missing}."):
        return f"importing the module {module_name} raised {_tell(error)}."  # also by what it imports itself
    if module_name.endswith(".py"):
        name = module_name.removesuffix(".py")
        return f"a module is named without .py: write {name}:FUNCTION."
    return f"there is no module {missing!r} here ({os.getcwd()}) or among the installed ones."


def _needed_arguments(function: Callable[..., object]) -> list[str]:
    """Name the arguments that a function can't be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some of C say nothing
        return []
    bound = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in bound]


def _tell(error: BaseException) -> str:
    """Return what was raised, and where in the user's own code."""
    said = f"{type(error).__name__}: {error}".rstrip(": .")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not _is_ours(one.filename)]
    own = [one for one in frames if not _is_installed(one.filename)] or frames
    return f"{said} ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else said


def _is_ours(filename: str) -> bool:
    ours = (Path(__file__).parents[1], Path(importlib.__file__).parent)  # the latter imports for us
    return filename.startswith("<") or any(one in Path(filename).parents for one in ours)


def _is_installed(filename: str) -> bool:
    known = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return any(Path(one) in Path(filename).parents for one in known)


@contextmanager
def importing_from_here() -> Generator[None, None, None]:
    """Find modules in the working directory, as ``python script.py`` would."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _from_config(folder: Path, trust_remote_code: bool) -> nn.Module:
    """Build the model that a configuration describes, by the class that it names."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(
            f"{folder}/config.json describes a model of transformers, which isn't installed: "
            "pip install 'accelfn[bigmodel]'. Or pass the file of weights instead of its folder."
        ) from error
    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder}/config.json describes no model that transformers knows: {error}"
        ) from error
    named: list[str] = getattr(config, "architectures", None) or []
    kinds: list[Any] = [getattr(transformers, name, None) for name in named]
    kind = next((one for one in kinds if one is not None), None)
    auto_map: dict[str, Any] = getattr(config, "auto_map", None) or {}
    own = [name for name in auto_map if name.startswith("AutoModel")]
    with init_empty_weights(include_buffers=True):
        if trust_remote_code and own:
            # A class with a head before one without.
            auto: Any = getattr(transformers, max(own, key=lambda name: "For" in name))
            return cast("nn.Module", auto.from_config(config, trust_remote_code=True))
        # _from_config, and not the class itself, takes the dtype of the configuration.
        built = transformers.AutoModel.from_config(config) if kind is None else kind._from_config(config)
    return cast("nn.Module", built)


def _from_files(path: Path) -> ModelShape:
    """Read names and sizes from the heads of safetensors files."""
    files = find_weights(path)
    if not files.is_safe:
        raise ValueError(
            f"{path}: the sizes in a pickled file can't be read without its values. Pass safetensors, a "
            "folder with a config.json, or MODULE:FUNCTION."
        )
    leaves: dict[str, LeafShape] = {}
    tied: dict[str, str] = {}
    for file in files.paths:
        header = read_header(file)
        names = header.entries.keys()
        if files.weight_map is not None:
            names = {name for name, home in files.weight_map.items() if home == file.name}
            lost = sorted(names - header.entries.keys())
            if lost:
                raise DamagedCheckpointError(
                    f"{file} lacks {', '.join(lost[:5])}, which the index says is in it: the files are not "
                    "of one save.",
                    file.name,
                )
        leaves.update({name: _leaf(name, header.entries[name]) for name in names})
        # Names that aren't stored stand in the metadata, with the stored ones.
        tied.update({name: first for name, first in header.metadata.items() if first in names})
    if not leaves:
        raise NoCheckpointError(f"{path} has no tensors.")
    groups: dict[str, list[str]] = {}
    for name, first in tied.items():
        if name not in leaves:
            leaves[name] = leaves[first]._replace(name=name)
            groups.setdefault(first, [first]).append(name)
    return shape_from_leaves(leaves.values(), groups.values())


def _leaf(name: str, entry: Entry) -> LeafShape:
    dtype = torch.float4_e2m1fn_x2 if entry.dtype == "F4" else _DTYPES.get(entry.dtype)
    size = entry.stop - entry.start
    numel = 1
    for length in entry.shape:
        numel *= length
    if entry.dtype == "F4":
        numel //= 2  # torch counts pairs
    return LeafShape(name, size, numel, dtype, is_plain=dtype is not None)
