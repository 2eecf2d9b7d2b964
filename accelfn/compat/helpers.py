"""Small functions of Accelerate's ``utils``: files, the environment, modules, texts."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

import accelfn.bigmodel as bigmodel
from accelfn.compat.current import current
from accelfn.compat.records import freeze
from accelfn.compat.saving import save_alone
from accelfn.errors import ConfigurationError
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor

M = TypeVar("M", bound=nn.Module)
_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str) -> int:
    """Return 1 for a text that means yes, 0 for one that means no.

    Raises:
        ValueError: It is neither.

    >>> str_to_bool("On"), str_to_bool("f")
    (1, 0)
    """
    word = value.lower()
    if word not in (*_TRUE, *_FALSE):
        raise ConfigurationError(f"{value!r} means neither yes nor no. Use true or false.")
    return int(word in _TRUE)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether a variable means yes."""
    return str_to_bool(os.environ.get(key, str(default))) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable's text."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Any, default: int) -> int:
    """Return the first of several variables that is a number of at least 0."""
    for key in env_keys:
        value = int(os.environ.get(key, -1))
        if value >= 0:
            return value
    return default


@contextmanager
def patch_environment(**kwargs: Any) -> Generator[None, None, None]:
    """Set variables, with names in capitals, inside a ``with`` block."""
    changes = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


@contextmanager
def clear_environment() -> Generator[None, None, None]:
    """Have no variables inside a ``with`` block."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write one object on the main process, or once per node."""
    ctx = current().context
    if save_on_each_node:
        ctx = ctx.replace(project_config=dataclasses.replace(ctx.project, save_on_each_node=True))
    save_alone(ctx, obj, f, safe_serialization)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict without the further names of a tensor, with contiguous tensors."""
    seen: set[tuple[object, ...]] = set()
    cleaned: dict[str, Any] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.numel():
            shape, stride = tuple(value.shape), tuple(value.stride())
            key = (value.untyped_storage().data_ptr(), value.storage_offset(), shape, stride)
            if key in seen:
                continue
            seen.add(key)
            value = value.contiguous()
        cleaned[name] = value
    return cleaned


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether torch.compile has wrapped a module."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)  # pyright: ignore[reportPrivateUsage]


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is peft's."""
    inner = unwrap_model(model, keep_torch_compile=False)
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(inner).__mro__)


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter is sharded by torch."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of that name among a module and the modules inside it."""
    return next((type(one) for one in module.modules() if type(one).__name__ == name), None)


def get_parameters_from_modules(
    modules: str | Iterable[nn.Module] | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Return the parameters of modules, which are moved to ``device``.

    Args:
        modules: The modules, or a regular expression that matches their whole names in ``model``.
        model: Where they are looked for by name.
        device: Where they belong.
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        named = re.compile(modules)
        by_name = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        chosen = [module for name, module in by_name if named.fullmatch(name)]
    else:
        chosen = [*modules]
    return {parameter for module in chosen for parameter in module.to(device).parameters()}


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its name with dots."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Write a nested mapping into another one, and return that."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(cast("dict[str, Any]", value), destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def convert_bytes(size: float) -> str:
    """Return a number of bytes with its unit.

    >>> convert_bytes(2048)
    '2.0 KB'
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or a class, or the object's as text."""
    named = (
        obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else getattr(obj, "__class__", obj)
    )
    return str(getattr(named, "__qualname__", getattr(named, "__name__", named)))


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether another program listens on a port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else int(port))) == 0


def get_free_port() -> int:
    """Return a port of this machine that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the modules of a model, children before parents, with their names if asked."""
    found: list[tuple[str, nn.Module]] = list(cast("Any", model).named_modules())[::-1]
    return found if return_fqns else [module for _, module in found]


def load_and_quantize_model(model: M, bnb_quantization_config: Any, *args: Any, **kwargs: Any) -> M:
    """Quantise the linear layers of a model; see :func:`accelfn.bigmodel.load_and_quantize_model`."""
    return bigmodel.load_and_quantize_model(model, freeze(bnb_quantization_config), *args, **kwargs)
