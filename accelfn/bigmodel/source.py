"""Models that commands are told of: a folder, a file of weights, or a function that builds one."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from accelfn.bigmodel.empty import init_empty_weights
from accelfn.bigmodel.model_info import LeafShape, ModelShape, read_shape, shape_from_leaves
from accelfn.bigmodel.weight_files import open_checkpoint
from accelfn.checkpoint.weights_index import find_weights
from accelfn.errors import MissingExtraError, NoCheckpointError

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
    if not _FACTORY.fullmatch(source):
        raise ValueError(
            f"{source!r}: there is no such file or folder. Pass a folder with a config.json, a safetensors "
            "file or index, or MODULE:FUNCTION, such as train:build_model."
        )
    built = call_on_meta(source)
    if not isinstance(built, nn.Module):
        raise ValueError(f"{source}: the function gave {type(built).__name__}, and must give a module.")
    return built


def call_on_meta(source: str) -> object:
    """Call the function that ``module:function`` names, and give no memory to the tensors that it makes.

    Modules are found in the working directory too, as ``python script.py`` would.

    Ranks: local. Effect: imports the module.

    Raises:
        ValueError: There is no such module or function, or the module needs one that isn't there.
        Exception: What the module or the function raised.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        try:
            found: Any = pkgutil.resolve_name(source)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{source}: {error}. Modules are looked for in {here} and in installed packages."
            ) from error
        with init_empty_weights(include_buffers=True):
            return found()
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
    """Read names and sizes from the headers of safetensors files."""
    if not find_weights(path).is_safe:
        raise ValueError(
            f"{path}: the sizes in a pickled file can't be read without its values. Pass safetensors, a "
            "folder with a config.json, or MODULE:FUNCTION."
        )
    files = open_checkpoint(path)
    if not files.tensors:
        raise NoCheckpointError(f"{path} has no tensors.")
    tensors = {**files.tensors, **{name: files.tensors[first] for name, first in files.tied.items()}}
    groups: dict[str, list[str]] = {}
    for name, first in files.tied.items():
        groups.setdefault(first, [first]).append(name)
    leaves = [
        LeafShape(name, one.num_bytes, torch.Size(one.shape).numel(), one.dtype)
        for name, one in tensors.items()
    ]
    return shape_from_leaves(leaves, groups.values())
