"""Operations without a context: in the current one, with the arguments and results that programs rely on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

import accelfn.comm as comm
import accelfn.tree as tree
from accelfn.compat.current import current
from accelfn.errors import MismatchError
from accelfn.training import unwrap_model

T = TypeVar("T")

# What programs catch where ranks disagree.
DistributedOperationException = MismatchError


class CannotPadNestedTensorWarning(UserWarning):
    """Kept for programs that import it: nested tensors are refused."""


def gather(tensor: T) -> T:
    """Concatenate tensors of all ranks; with one process the tree itself. See :func:`accelfn.gather`."""
    ctx = current().context
    return tensor if ctx.num_processes == 1 else comm.gather(ctx, tensor)


def gather_object(object: Any) -> Any:  # noqa: A002 -- the name of the parameter there
    """Join the lists of all ranks; with one process the object itself."""
    ctx = current().context
    if ctx.num_processes == 1:
        return object
    return [item for rank in comm.gather_object(ctx, [object]) for item in rank]


def reduce(tensor: T, reduction: str = "mean", scale: float = 1.0) -> T:
    """Combine tensors of all ranks, by default as a mean. See :func:`accelfn.reduce`."""
    return comm.reduce(current().context, tensor, reduction, scale)


@torch.no_grad()
def broadcast(tensor: T, from_process: int = 0) -> T:
    """Overwrite the tensors of every rank with those of one rank, and return them."""
    ctx = current().context
    sent = comm.broadcast(ctx, tensor, from_process)
    if sent is not tensor:
        for own, new in zip(tree.flatten(tensor)[0], tree.flatten(sent)[0], strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(new)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the list of every rank with that of one rank, and return it."""
    object_list[:] = comm.broadcast_object_list(current().context, object_list, from_process)
    return object_list


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return the main process's tensor on the device of every rank; the other ranks pass None."""
    ctx = current().context
    sent = cast("list[torch.Tensor]", comm.broadcast_object_list(ctx, [tensor]))
    return sent[0].to(ctx.device)


def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """Lengthen tensors to the longest of all ranks. See :func:`accelfn.pad_across_processes`."""
    return comm.pad_across_processes(current().context, tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Wait until all ranks are here."""
    comm.wait_for_everyone(current().context)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Set one random state to rank 0's."""
    synchronize_rng_states([rng_type], generator)


def synchronize_rng_states(rng_types: Sequence[Any], generator: torch.Generator | None = None) -> None:
    """Set random states to rank 0's. See :func:`accelfn.comm.synchronize_rng_states`."""
    comm.synchronize_rng_states(current().context, [str(kind) for kind in rng_types], generator)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed all generators. See :func:`accelfn.set_seed`."""
    rank = current().context.rank if device_specific else 0
    comm.set_seed(seed + rank, deterministic=deterministic)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Remove the wrapper of ``prepare`` from a model. See :func:`accelfn.unwrap_model`."""
    del recursive
    return unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)


# --- trees on one rank ---------------------------------------------------------------------------


def is_namedtuple(data: object) -> bool:
    """Return whether an object is a named tuple."""
    return isinstance(data, tuple) and hasattr(cast("Any", data), "_fields")


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether an object describes a tensor."""
    return isinstance(tensor_info, tree.TensorInformation)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return items as a collection of the type of ``obj``."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = torch.is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to each leaf of lists, tuples and mappings that passes ``test_type``.

    Raises:
        TypeError: Another leaf, with ``error_on_other_type``.
    """

    def visit(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return honor_type(item, [visit(part) for part in cast("Sequence[Any]", item)])
        if isinstance(item, Mapping):
            mapping = cast("Mapping[Any, Any]", item)
            return cast("Any", type(mapping))({key: visit(part) for key, part in mapping.items()})
        if test_type(item):
            return func(item, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', func)} takes nested lists, tuples and dicts of tensors, got "
                f"{type(item).__name__}."
            )
        return item

    return visit(data)


def get_shape(data: Any) -> Any:
    """Return the shapes of the tensors of a tree, as lists."""

    def shape_of(tensor: torch.Tensor) -> list[int]:
        return [*tensor.shape]

    return recursively_apply(shape_of, data, error_on_other_type=True)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the number of rows of a tree; None if it has none."""
    try:
        return tree.find_batch_size(data)
    except (TypeError, ValueError):
        return None


def slice_tensors(
    data: T, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> T:
    """Return rows of each tensor of a tree."""
    del process_index, num_processes
    return tree.slice_tensors(data, tensor_slice)


class ConvertOutputsToFp32:
    """A function whose results are in float32.

    Attributes:
        model_forward: The function that it calls.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        """Call ``model_forward``, whose name and docstring it has."""
        self.model_forward: Callable[..., Any] = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns, with floating-point tensors in float32."""
        return tree.convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose results are in float32."""
    converted = ConvertOutputsToFp32(model_forward)
    return functools.wraps(model_forward)(lambda *args, **kwargs: converted(*args, **kwargs))
