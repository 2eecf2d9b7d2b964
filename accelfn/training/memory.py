"""Release memory, and find a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn

from accelfn.comm import Call, agree
from accelfn.context import Context, empty_device_cache
from accelfn.errors import RemoteRankError
from accelfn.parallel.engines import EngineHandle
from accelfn.parallel.handle import handle_of

T = TypeVar("T")

# Messages of allocators and libraries that are out of memory and raise a plain RuntimeError.
_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "STATUS_ALLOC_FAILED",
    "PT_DEVMEM Allocation failed",
)


class BatchTooLarge(Exception):  # noqa: N818 -- a verdict between ranks and not an error
    """Sent to the other ranks by a rank that is out of memory. Never leaves this module."""


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release torch's cached memory on the accelerator; does nothing without one.

    Ranks: local.

    Args:
        garbage_collection: Collect Python's garbage first: tensors in cycles hold their memory until then.
    """
    if garbage_collection:
        gc.collect()
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        empty_device_cache(device.type)


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and empty the device's cache; return one None for each object.

    A function can't delete its caller's variables, but assigning its result does. Their memory is freed by
    the assignment itself, and on the device it stays cached by torch::

        model, optimizer = release_memory(model, optimizer)

    Ranks: local.

    >>> model = torch.nn.Linear(1, 1)
    >>> (model,) = release_memory(model)
    >>> model is None
    True
    """
    count = len(objects)
    close_engines(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def close_engines(objects: Iterable[object]) -> None:
    """Free what engines around models hold (DeepSpeed); such models can't be used any more."""
    for item in objects:
        handle = handle_of(item) if isinstance(item, nn.Module) else None
        if isinstance(handle, EngineHandle):
            handle.close()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the host or a device is out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


@overload
def find_executable_batch_size(
    function: Callable[..., T],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    ctx: Context | None = None,
) -> Callable[..., T]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    ctx: Context | None = None,
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    ctx: Context | None = None,
) -> Any:
    """Call a function with a batch size, and with smaller ones as long as it runs out of memory.

    A decorator, with or without arguments, or called with the function. Each call starts again with
    ``starting_batch_size``. Before each retry garbage is collected and the device's cache emptied.

    Ranks: every rank of ``ctx``, if it is passed: a rank that is out of memory lowers the size on all ranks.
    The others notice in their next communication, or at the end of the function.
    If they wait inside a backward pass of ``DistributedDataParallel``, a reduction is left half done, and
    all ranks raise instead: let such a function try one step without averaging first (:func:`no_sync`).

    Args:
        function: Called as ``function(batch_size, *args, **kwargs)``.
        starting_batch_size: First size, at least 1.
        reduce_batch_size_fn: Returns the next size from the one that was too large, or takes no argument, as
            in Accelerate. Default: nine tenths of it, rounded down.
        ctx: The world that agrees on the size; None lets each process decide alone.

    Returns:
        A function without the first parameter, which returns the result of ``function``.

    Raises:
        RuntimeError: (when called) Not even the smallest size fits.
        TypeError: (when called) The arguments don't fit ``function``, such as a batch size of the caller's.
        ValueError: ``starting_batch_size`` is below 1, or (when called) the next size isn't smaller.

    >>> tried = []
    >>> @find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=lambda size: size // 2)
    ... def train(batch_size):
    ...     tried.append(batch_size)
    ...     if batch_size > 30:
    ...         raise MemoryError
    ...     return "done"
    >>> train(), tried
    ('done', [100, 50, 25])
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            ctx=ctx,
        )
    if not isinstance(cast("object", starting_batch_size), int) or starting_batch_size < 1:
        raise ValueError(
            "find_executable_batch_size: starting_batch_size must be an integer of at least 1, got "
            f"{starting_batch_size!r}."
        )
    reduced = _reducer(reduce_batch_size_fn)

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(function, args, kwargs)
        size = starting_batch_size
        while size > 0:
            fits, result = _try(ctx, function, size, args, kwargs)
            if fits:
                return result
            clear_device_cache(garbage_collection=True)
            smaller = reduced(size)
            if smaller >= size:
                raise ValueError(
                    f"find_executable_batch_size: reduce_batch_size_fn returned {smaller} after {size} did "
                    "not fit. Each size must be smaller than the one before."
                )
            size = smaller
        raise RuntimeError(
            f"find_executable_batch_size: no batch size from {starting_batch_size} down fits into memory, so "
            f"{_name(function)} can't run here. Make the model or its inputs smaller."
        )

    # The search passes the size, so it isn't part of the signature.
    signature = inspect.signature(function)
    vars(search)["__signature__"] = signature.replace(parameters=list(signature.parameters.values())[1:])
    return search


def _try(
    ctx: Context | None, function: Callable[..., Any], size: int, args: Any, kwargs: Any
) -> tuple[bool, Any]:
    """Call ``function`` once; return whether memory sufficed on all ranks, and its result."""
    result, verdict = None, None
    try:
        result = function(size, *args, **kwargs)
    except RemoteRankError as error:
        if error.cause != BatchTooLarge.__name__ or ctx is None:
            raise
        return False, None  # raised by a communication inside of the function
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Without the traceback, whose frames hold the tensors that didn't fit.
        verdict = BatchTooLarge(f"{type(error).__name__} with batch size {size}")
    if ctx is None or ctx.num_processes == 1:
        return verdict is None, result
    try:
        agree(ctx, Call("find_executable_batch_size", f"batch_size={size}"), None, verdict)
    except BatchTooLarge:
        return False, None
    except RemoteRankError as error:
        if error.cause != BatchTooLarge.__name__:
            raise
        return False, None
    return True, result


def _reducer(reduce_batch_size_fn: Callable[..., int] | None) -> Callable[[int], int]:
    if reduce_batch_size_fn is None:
        return lambda size: size * 9 // 10
    chosen = reduce_batch_size_fn
    takes_size = any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(chosen).parameters.values()
    )
    return chosen if takes_size else lambda size: chosen()


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError as error:
        shown = ", ".join((*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())))
        raise TypeError(
            f"find_executable_batch_size: {_name(function)} is called with the batch size as its first "
            f"argument, and then with ({shown}), which it does not take: {error}. Leave the batch size out "
            "of the call."
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
