"""A model's state dict with complete tensors under the model's own names, wherever its parts are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.comm import Call, agree, broadcast, catch, gather_object
from accelfn.context import Context, takes_context
from accelfn.parallel.engines import with_plain_weights
from accelfn.parallel.pointers import whole_of
from accelfn.parallel.values import check_filled, gathered
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor
from accelfn.weights.index import tied_by

T = TypeVar("T")

_GET = "get_state_dict"
# Parts of names that torch.compile and activation checkpointing insert.
_INSERTED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


# --- a model's own names -------------------------------------------------------------------------


def require_module(operation: str, model: object) -> nn.Module:
    """Check that ``model`` is a module.

    Raises:
        TypeError: It isn't.
    """
    if isinstance(model, Context):
        raise TypeError(f"{operation}: takes no Context. Write {operation}(model, ...).")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{operation}: takes a module, got {type(model).__name__}.")
    return model


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value of a state dict is a tensor; ``get_extra_state`` may return anything."""
    return isinstance(value, torch.Tensor)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory. Quantised tensors, for example, consist of other tensors."""
    return not is_traceable_wrapper_subclass(tensor) and (not tensor.numel() or bool(tensor.data_ptr()))


def own_names(operation: str, model: nn.Module) -> dict[str, str]:
    """Map each name in a model's state dict to the name without any wrapper, in order.

    Raises:
        ValueError: Two tensors would have the same name.
    """
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    wrapped = frozenset(
        without_inserted(f"{name}.module" if name else "module")
        for name, module in modules
        if isinstance(module, (DistributedDataParallel, nn.DataParallel))
    )
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in model.state_dict(keep_vars=True):
        parts = without_inserted(name).split(".")
        own = ".".join(part for count, part in enumerate(parts, 1) if ".".join(parts[:count]) not in wrapped)
        if own in taken:
            raise ValueError(f"{operation}: {taken[own]} and {name} would both be called {own}. Rename one.")
        taken[own] = name
        names[name] = own
    return names


def without_inserted(name: str) -> str:
    """Return a name without what ``torch.compile`` and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _INSERTED)


# --- agreement between ranks ---------------------------------------------------------------------


class Agreement(Protocol):
    """Synchronises all ranks before a collective step; see :func:`together`."""

    def __call__(self, step: str, leaves: Callable[[], dict[str, str]] = dict) -> None:
        """Wait until all ranks are at the same step.

        Args:
            step: Name of the step, the same on every rank.
            leaves: Returns descriptions by path, which must be equal on every rank too.

        Raises:
            RemoteRankError: Another rank has failed.
            MismatchError: The ranks disagree; the same error on every rank.
        """


def together(ctx: Context, operation: str, work: Callable[[Agreement], T]) -> T:
    """Run ``work`` on all ranks; if it fails on one rank, every rank raises, even between collective steps.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        operation: Its name in errors.
        work: Receives the function that synchronises the ranks.

    Raises:
        Exception: From ``work``, on the ranks where it failed; ``RemoteRankError`` on the others.
    """
    is_shared = False  # whether the other ranks know the current error already

    def agree_on(step: str, leaves: Callable[[], dict[str, str]] = dict) -> None:
        nonlocal is_shared
        if ctx.num_processes > 1:
            described = leaves()
            is_shared = True
            agree(ctx, Call(operation, f"{step}\0{described}", lambda: described, takes_long=True))
            is_shared = False

    result, error = catch(lambda: work(agree_on))
    if ctx.num_processes > 1 and not is_shared:
        agree(ctx, Call(operation, takes_long=True), error=error)
    elif error is not None:
        raise error
    return cast("T", result)


def describe_value(value: object) -> str:
    """Describe a value of a state dict: dtype and shape of a tensor, otherwise the name of its class."""
    if not is_tensor(value):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def describe_state(state: Mapping[str, Any], stages: Stages | None = None) -> dict[str, str]:
    """Describe the values of a state dict, as far as they must be the same on every rank."""
    described = {name: describe_value(value) for name, value in state.items()}
    for name, value in state.items():
        if is_dtensor(value) and stages is None:
            described[name] += f" {value.placements}"
    return described


# --- complete tensors ----------------------------------------------------------------------------


class Stages(NamedTuple):
    """The ranks that hold the pipeline stages of one model.

    Attributes:
        ctx: These ranks, along "pp".
        holders: The first rank that holds each tensor, by the first name of the tensor.
    """

    ctx: Context
    holders: Mapping[str, int]

    def send(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor on all ranks along "pp".

        Ranks: every rank along "pp".

        Args:
            name: First name of the tensor.
            value: The tensor; on the meta device if this rank doesn't hold it.
        """
        if value.is_meta:
            value = torch.empty(value.shape, dtype=value.dtype, device=self.ctx.device)
        return broadcast(self.ctx, value, self.holders[name])


def complete_state(
    ctx: Context, operation: str, model: nn.Module, state: Mapping[str, Any], agree_on: Agreement
) -> tuple[dict[str, Any], Stages | None]:
    """Extend a state dict to all pipeline stages of a model, of which this rank may hold only some.

    Ranks: every rank of ``ctx`` if the model is split into stages; otherwise local.

    Args:
        ctx: The world.
        operation: Its name in errors.
        model: Without any wrapper.
        state: This rank's state dict, by the model's own names.
        agree_on: From :func:`together`.

    Returns:
        The state dict in the order of the complete model, with tensors of other ranks on the meta device, and
        the stages; None for a model without stages. Tied names have the same object, as
        :func:`accelfn.weights.index.tied_by` expects.

    Raises:
        ValueError: ``ctx`` lacks the ranks that hold the other stages.
    """
    whole = whole_of(model)
    if whole is None:
        return dict(state), None
    if ctx.axis_size("pp") == 1:
        raise ValueError(
            f"{operation}: the model is split into pipeline stages, and this context lacks the ranks of the "
            "other stages. Pass the context that the model was prepared with."
        )
    agree_on("stages")
    along = ctx.along("pp")
    own = {name: None if is_tensor(value) else value for name, value in state.items()}
    holders: dict[str, int] = {}
    extra_states: dict[str, Any] = {}  # from get_extra_state
    for rank, values in enumerate(gather_object(along, own)):
        for name, value in values.items():
            holders.setdefault(whole.first.get(name, name), rank)
            extra_states.setdefault(name, value)
    complete: dict[str, Any] = {whole.first.get(name, name): state[name] for name in reversed([*state])}
    for name, form in whole.tensors.items():
        if name not in whole.first and name not in complete:
            complete[name] = (
                extra_states.get(name) if form is None else torch.empty(form[1], dtype=form[0], device="meta")
            )
    names = [*whole.tensors, *(name for name in state if name not in whole.tensors)]
    return {name: complete[whole.first.get(name, name)] for name in names}, Stages(along, holders)


def gathered_tensors(
    tensors: Mapping[str, torch.Tensor], order: Iterable[str], agree_on: Agreement, stages: Stages | None
) -> Iterator[torch.Tensor]:
    """Yield tensors one after the other, gathering those that are distributed over ranks.

    Ranks: every rank of the world, to the end of the iterator, if any tensor is distributed.

    Args:
        tensors: By name.
        order: The names, in the same order on every rank.
        agree_on: From :func:`together`.
        stages: From :func:`complete_state`.
    """
    for name in order:
        value = tensors[name].detach()
        if is_dtensor(value) or stages is not None:
            # A rank that runs out of memory while gathering would leave the others to torch's timeout. So it
            # tries to allocate the memory first, and a failure reaches the other ranks in agree_on.
            torch.empty(value.shape, dtype=value.dtype, device=value.device)
            agree_on(f"gather {name}")
        if is_dtensor(value):
            value = gathered(value)
        yield value if stages is None else stages.send(name, value)


@takes_context
def get_state_dict(ctx: Context, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
    """Return the state dict of a model, with complete tensors under the model's own names.

    If every rank holds the complete model, the result is that of ``state_dict()`` on every rank, and shares
    memory with the model. If the model is distributed over ranks (FSDP2, tensor parallelism, pipeline
    stages, ZeRO with its float32 parameters), the main process gets copies of all tensors on the CPU, and
    the other ranks get an empty dict. One tensor is gathered at a time.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: Prepared or not.
        unwrap: Remove what wrappers add to the names. Otherwise ``DistributedDataParallel`` keeps its
            ``module.``; additions of ``torch.compile`` and activation checkpointing are removed in any case.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: Without the wrappers, two tensors would have the same name.
        RemoteRankError: Another rank has failed.
        MismatchError: The ranks' models differ.

    >>> sorted(get_state_dict(Context(), torch.nn.Linear(2, 1)))
    ['bias', 'weight']
    """
    plain, _ = with_plain_weights(model)

    def collect(agree_on: Agreement) -> dict[str, Any]:
        inner = unwrap_model(require_module(_GET, plain), keep_torch_compile=False)
        check_filled(_GET, inner)
        tensors = (inner if unwrap else plain).state_dict(keep_vars=True)
        names = own_names(_GET, inner) if unwrap else {name: without_inserted(name) for name in tensors}
        own = {own: tensors[name] for name, own in names.items()}
        state, stages = complete_state(ctx, _GET, inner, own, agree_on)
        agree_on("state", lambda: describe_state(state, stages))
        if stages is None and not any(map(is_dtensor, state.values())):
            return {name: value.detach() if is_tensor(value) else value for name, value in state.items()}
        first = {tied_by(value): name for name, value in reversed(state.items()) if is_tensor(value)}
        stored = frozenset(first.values())
        order = [name for name in state if name in stored]
        whole: dict[str, torch.Tensor] = {}
        values = gathered_tensors(state, order, agree_on, stages)
        for name in order:
            value = next(values)
            if ctx.is_main_process:
                whole[name] = value.to("cpu", copy=True)
            del value  # before the next tensor is gathered
        if not ctx.is_main_process:
            return {}
        return {
            name: whole[first[tied_by(value)]] if is_tensor(value) else value for name, value in state.items()
        }

    return together(ctx, _GET, collect)


def part_of(target: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a complete tensor in the layout of a DTensor, without communication.

    The tensor is split where it is, so that only this part goes to the device. It may be a view.

    Ranks: local.

    Args:
        target: The DTensor.
        whole: A tensor of its complete shape.
    """
    part = whole
    for dim, placement in enumerate(target.placements):
        if not placement.is_replicate():
            part = placement._shard_tensor(part, target.device_mesh, dim, None)
    return part
