"""Models that commands name: a folder, a file of weights, or a function that builds one."""

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
from accelfn.errors import MissingExtraError, NoCheckpointError
from accelfn.weights.index import find_weights
from accelfn.weights.open import open_weights

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def read_source(source: str | os.PathLike[str], *, trust_remote_code: bool = False) -> ModelShape:
    """Read the shape of a model without reading weights or allocating memory for them.

    Ranks: local. Effect: imports the module of a function, or transformers, and builds the model.

    Args:
        source: A folder with a transformers ``config.json``; a folder, file or index of safetensors; or
            ``module:function``, a function without arguments that returns a module. The module may also be in
            the working directory.
        trust_remote_code: Whether transformers may run Python code in the folder, which it copies into its
            cache. Needed for a configuration that names classes in there.

    Raises:
        ValueError: ``source`` is none of these, the folder's configuration names no known model, or the
            function can't be imported or doesn't return a module.
        TypeError: ``source`` is neither a path nor a string.
        MissingExtraError: transformers is needed and not installed.
        NoCheckpointError: The folder has neither a configuration nor weights.
        DamagedCheckpointError: A file of weights is damaged.
    """
    text = os.fspath(source)
    path = Path(text)
    if path.exists() and not (path / "config.json").is_file():
        return _from_files(path)
    return read_shape(build_source(text, trust_remote_code=trust_remote_code))


def build_source(source: str, *, trust_remote_code: bool = False) -> nn.Module:
    """Build the model that a command names, on the meta device.

    Ranks: local. Effect: as :func:`read_source`.

    Raises:
        ValueError: As :func:`read_source`; or ``source`` is a file of weights, which has no modules.
        MissingExtraError: transformers is needed and not installed.
    """
    path = Path(source)
    if (path / "config.json").is_file():
        return _from_config(path, trust_remote_code)
    if path.exists():
        raise ValueError(
            f"{source}: a file of weights doesn't describe the modules. Pass a folder with a config.json, or "
            "MODULE:FUNCTION."
        )
    if not _FACTORY.fullmatch(source):
        raise ValueError(
            f"{source!r}: no such file or folder. Pass a folder with a config.json, a safetensors file or "
            "index, or MODULE:FUNCTION, such as train:build_model."
        )
    built = call_on_meta(source)
    if not isinstance(built, nn.Module):
        raise ValueError(f"{source} must return a module, but returned {type(built).__name__}.")
    return built


def call_on_meta(source: str) -> object:
    """Call the function that ``module:function`` names, with all tensors on the meta device.

    The module may also be in the working directory, as for ``python script.py``.

    Ranks: local. Effect: imports the module.

    Raises:
        ValueError: The module or function can't be imported.
        Exception: Whatever the module or the function raises.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        try:
            function: Any = pkgutil.resolve_name(source)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{source}: {error}. The module must be in {here} or installed.") from error
        with init_empty_weights(include_buffers=True):
            return function()
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _from_config(folder: Path, trust_remote_code: bool) -> nn.Module:
    """Build the model that a transformers configuration describes."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(
            f"{folder}/config.json needs transformers, which isn't installed: "
            "pip install 'accelfn[bigmodel]'. Or pass the file of weights instead of its folder."
        ) from error
    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder}/config.json doesn't describe a model that transformers knows: {error}"
        ) from error
    architectures: list[str] = getattr(config, "architectures", None) or []
    classes: list[Any] = [getattr(transformers, name, None) for name in architectures]
    model_class = next((kind for kind in classes if kind is not None), None)
    auto_map: dict[str, Any] = getattr(config, "auto_map", None) or {}
    auto_classes = [name for name in auto_map if name.startswith("AutoModel")]
    with init_empty_weights(include_buffers=True):
        if trust_remote_code and auto_classes:
            # Prefer a class with a head (AutoModelFor...).
            auto_class: Any = getattr(transformers, max(auto_classes, key=lambda name: "For" in name))
            return cast("nn.Module", auto_class.from_config(config, trust_remote_code=True))
        if model_class is None:
            return cast("nn.Module", transformers.AutoModel.from_config(config))
        # Unlike the constructor, _from_config applies the dtype of the configuration.
        return cast("nn.Module", model_class._from_config(config))


def _from_files(path: Path) -> ModelShape:
    """Read names and sizes from the headers of safetensors files."""
    if not find_weights(path).is_safe:
        raise ValueError(
            f"{path}: the sizes in a pickled file can't be read without its weights. Pass safetensors, a "
            "folder with a config.json, or MODULE:FUNCTION."
        )
    files = open_weights(path)
    if not files.tensors:
        raise NoCheckpointError(f"{path} has no tensors.")
    tensors = {**files.tensors, **{name: files.tensors[first] for name, first in files.tied.items()}}
    groups: dict[str, list[str]] = {}
    for name, first in files.tied.items():
        groups.setdefault(first, [first]).append(name)
    leaves = [
        LeafShape(name, stored.num_bytes, torch.Size(stored.shape).numel(), stored.dtype)
        for name, stored in tensors.items()
    ]
    return shape_from_leaves(leaves, groups.values())
