"""How functions, arguments and results become bytes, and what must not: what belongs to one process alone."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context, text_of
from accelfn.errors import MissingExtraError

__all__ = ("name_of", "pack", "pack_call", "unpack")


def pack(value: Any) -> bytes:
    """Write any value, by cloudpickle where that is installed.

    Raises:
        TypeError: It holds a context, an ``Accelerator`` or something else of this process's world.
    """
    # By torch, which writes float8 and unsigned tensors too; pickle alone can't read those.
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_refusing(_find_pickler()))
    return buffer.getvalue()


def unpack(content: bytes, device: str | None) -> Any:
    """Read what :func:`pack` has written in this very launch, into a folder of its own.

    Args:
        content: The bytes.
        device: For its tensors; None: where they were.
    """
    return torch.load(io.BytesIO(content), map_location=device, weights_only=False)


def pack_call(
    caller: str, fn: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any] | None
) -> bytes:
    """Write a function with its arguments.

    Args:
        caller: Name of the launcher, for messages.
        fn: The function.
        args: Its arguments.
        options: Of the context that stands before them, or None.

    Raises:
        MissingExtraError: It can be sent by cloudpickle only, which isn't installed.
        TypeError: It holds what can't be sent.
    """
    has_cloudpickle = _find_pickler() is not pickle
    called = name_of(fn)
    try:
        packed = pack((fn, tuple(args), options))
    except _OfThisProcessError as error:
        where = _place_of(error.thing, fn, args)
        raise TypeError(
            f"{caller}: {called} and its arguments can't be sent to fresh processes{where}: {error}. Make it "
            "inside of the function, where it joins the ranks."
        ) from None
    except Exception as error:
        if has_cloudpickle or not _is_unnamed(fn):
            raise TypeError(
                f"{caller}: {called} and its arguments can't be sent to fresh processes: {text_of(error)}. "
                "Make what can't be sent (locks, open files, generators, process groups, contexts) inside of "
                "the function."
            ) from error
        raise _cloudpickle_is_missing(caller, called) from error
    if not has_cloudpickle and getattr(fn, "__module__", None) == "__main__":
        raise _cloudpickle_is_missing(caller, called)  # a rank has another __main__, without the function
    return packed


class _OfThisProcessError(TypeError):
    """What was to be sent holds a part of this process's world; ``thing`` is that part."""

    def __init__(self, thing: object, name: str) -> None:
        super().__init__(f"the {name} in it belongs to this process, and in another one it would be alone")
        self.thing = thing


def _refusing(pickler: ModuleType) -> Any:
    """Return a pickler that refuses what pickles, but would silently become a world of one elsewhere."""

    class Refusing(pickler.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            name = _name_of_world(obj)
            if name:
                raise _OfThisProcessError(obj, name)
            below = getattr(super(), "reducer_override", None)
            return NotImplemented if below is None else below(obj)

    return SimpleNamespace(Pickler=Refusing, __name__=pickler.__name__)


def _name_of_world(thing: object) -> str:
    """Name the kind of a thing by which a process belongs to its world; empty for any other thing."""
    if isinstance(thing, Context | dist.ProcessGroup | DeviceMesh | DistributedDataParallel):
        return type(thing).__name__
    # By name: to import it would cost each rank more than a second look.
    of_shim = any(
        (one.__module__, one.__name__) == ("accelfn.accelerator.accelerator", "Accelerator")
        for one in type(thing).__mro__
    )
    return type(thing).__name__ if of_shim else ""


def _place_of(thing: object, fn: object, args: Sequence[Any]) -> str:
    """Return by which name a function reaches a thing, if it is an easy one."""
    for number, one in enumerate(args):
        if one is thing:
            return f", because of argument {number}"
    if not isinstance(fn, FunctionType):
        return ""
    reached = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # of a cell that nothing was put into
            reached[name] = cell.cell_contents
    name = next((name for name, one in reached.items() if one is thing), None)
    return "" if name is None else f", because of {name!r}"


def _is_unnamed(fn: object) -> bool:
    return "<" in str(getattr(fn, "__qualname__", "<object>"))


def _cloudpickle_is_missing(caller: str, called: str) -> MissingExtraError:
    return MissingExtraError(
        f"{caller}: {called} is written in a notebook, in the script itself or inside of another function. "
        "To send such a function to fresh processes takes cloudpickle: pip install 'accelfn[notebook]'. Or "
        "write it at the top of a module of its own, and import it from there."
    )


def name_of(fn: object) -> str:
    """Return what a function is called in messages."""
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def _find_pickler() -> ModuleType:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle
