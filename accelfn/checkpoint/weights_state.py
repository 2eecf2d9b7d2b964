"""A model's tensors under their own names, whole, wherever their parts lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.checkpoint.weights_index import tied_by
from accelfn.comm import Call, agree, broadcast, catch, gather_object
from accelfn.context import Context, check_context
from accelfn.parallel.parameters import check_filled, whole_of
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor

T = TypeVar("T")

_GET = "get_state_dict"
# What torch.compile and activation checkpointing add to names; no user calls a module so.
_ADDED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def require_module(operation: str, model: object) -> nn.Module:
    """Check that something is a module.

    Raises:
        TypeError: It isn't.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{operation}: takes a module, got {type(model).__name__}.")
    return model


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value of a state dict is a tensor, and not what ``get_extra_state`` gave."""
    return isinstance(value, torch.Tensor)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain memory, and not made of other tensors, as those of quantised models are."""
    return not is_traceable_wrapper_subclass(tensor) and (not tensor.numel() or bool(tensor.data_ptr()))


def own_names(operation: str, model: nn.Module) -> dict[str, str]:
    """Map each name in the state dict of a model to the one that it has without any wrapper, in order.

    Raises:
        ValueError: Two would have the same name.
    """
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
    inside = frozenset(
        _without_added(f"{name}.module" if name else "module")
        for name, module in modules
        if isinstance(module, (DistributedDataParallel, nn.DataParallel))
    )
    names: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in model.state_dict(keep_vars=True):
        plain = _without_added(name)
        parts = plain.split(".")
        own = ".".join(part for count, part in enumerate(parts, 1) if ".".join(parts[:count]) not in inside)
        if own in first:
            raise ValueError(f"{operation}: {first[own]} and {name} would both be called {own}. Rename one.")
        first[own] = name
        names[name] = own
    return names


def _without_added(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _ADDED)


class Meet(Protocol):
    """Brings all ranks together before a step that they do together; see :func:`together`."""

    def __call__(self, step: str, leaves: Callable[[], dict[str, str]] = dict) -> None:
        """Meet.

        Args:
            step: What comes, the same on every rank.
            leaves: What must be equal on every rank, too, by path.

        Raises:
            RemoteRankError: Another rank has failed.
            MismatchError: Ranks say different things; the same error on every rank.
        """


def together(ctx: Context, operation: str, work: Callable[[Meet], T]) -> T:
    """Do ``work`` on all ranks; an error on one reaches all, also amid what they do together.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        operation: What errors call it.
        work: Gets what brings the ranks together.

    Raises:
        Exception: That of ``work``, on the ranks where it failed; ``RemoteRankError`` on the others.
    """
    told = False  # whether the other ranks know of the error that is on its way

    def meet(step: str, leaves: Callable[[], dict[str, str]] = dict) -> None:
        nonlocal told
        if ctx.num_processes > 1:
            said = leaves()
            told = True
            agree(ctx, Call(operation, f"{step}\0{said}", lambda: said, takes_long=True))
            told = False

    result, error = catch(lambda: work(meet))
    if error is not None and told:
        raise error
    if ctx.num_processes > 1:
        agree(ctx, Call(operation, takes_long=True), error=error)
    elif error is not None:
        raise error
    return cast("T", result)


def describe(state: Mapping[str, Any], stages: Stages | None = None) -> dict[str, str]:
    """Return what must be equal on every rank, for each value of a state dict."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        f"{f' {cast(Any, value).placements}' if is_dtensor(value) and stages is None else ''}"
        if is_tensor(value)
        else type(value).__name__
        for name, value in state.items()
    }


class Stages(NamedTuple):
    """The ranks that have the stages of one model.

    Attributes:
        ctx: Along "pp".
        holders: For each tensor, by its first name, the first of these ranks that has it.
    """

    ctx: Context
    holders: Mapping[str, int]

    def send(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor that a rank along "pp" has, on all of them.

        Ranks: every rank along "pp".

        Args:
            name: The first one of the tensor.
            value: The tensor; on the meta device where it isn't here.
        """
        if value.is_meta:
            value = torch.empty(value.shape, dtype=value.dtype, device=self.ctx.device)
        return broadcast(self.ctx, value, self.holders[name])


def whole_state(
    ctx: Context, operation: str, model: nn.Module, state: Mapping[str, Any], meet: Meet
) -> tuple[dict[str, Any], Stages | None]:
    """Return the state dict of a whole model of which this rank may have some stages alone.

    Ranks: every rank of ``ctx``, where the model is cut into stages.

    Args:
        ctx: The world.
        operation: What errors call it.
        model: Without any wrapper.
        state: What this rank has, by the model's own names.
        meet: As :func:`together` gives it.

    Returns:
        In the order of the whole model. What other ranks have is on the meta device. Names of one tensor have
        the same object, as :func:`accelfn.checkpoint.weights_index.tied_by` knows them. And where it all is;
        None where it is here.

    Raises:
        ValueError: The context is without the ranks that have the other stages.
    """
    whole = whole_of(model)
    if whole is None:
        return dict(state), None
    if ctx.axis_size("pp") == 1:
        raise ValueError(
            f"{operation}: the model is cut into stages, and the ranks of this context have some of them. "
            "Pass the context that it was prepared with."
        )
    meet("stages")
    along = ctx.along("pp")
    own = {name: None if is_tensor(value) else value for name, value in state.items()}
    holders: dict[str, int] = {}
    others: dict[str, Any] = {}  # what get_extra_state gave
    for rank, names in enumerate(gather_object(along, own)):
        for name, value in names.items():
            holders.setdefault(whole.first.get(name, name), rank)
            others.setdefault(name, value)
    found: dict[str, Any] = {whole.first.get(name, name): state[name] for name in reversed([*state])}
    for name, kind in whole.tensors.items():
        if name not in whole.first and name not in found:
            found[name] = (
                others.get(name) if kind is None else torch.empty(kind[1], dtype=kind[0], device="meta")
            )
    names = [*whole.tensors, *(name for name in state if name not in whole.tensors)]
    return {name: found[whole.first.get(name, name)] for name in names}, Stages(along, holders)


def whole_tensors(
    tensors: Mapping[str, torch.Tensor], order: Iterable[str], meet: Meet, stages: Stages | None
) -> Iterator[torch.Tensor]:
    """Yield tensors one after the other, those that are spread over ranks whole.

    Ranks: every rank of the world that ``meet`` stands for, to the end, if any tensor is spread.

    Args:
        tensors: By name.
        order: Of the names, the same on every rank.
        meet: As :func:`together` gives it.
        stages: As :func:`whole_state` gives it.
    """
    for name in order:
        value = tensors[name].detach()
        if is_dtensor(value) or stages is not None:
            # A rank that runs out of memory amid the gathering leaves the others to torch's timeout: it tries
            # before, and then they hear of it.
            torch.empty(value.shape, dtype=value.dtype, device=value.device)
            meet(f"gather {name}")
        if is_dtensor(value):
            value = _gather(value)
        yield value if stages is None else stages.send(name, value)


def _gather(tensor: Any) -> torch.Tensor:
    """Return a ``DTensor`` whole. Ranks: every rank of its mesh."""
    from torch.distributed.tensor import Replicate

    # fully_shard splits again what tensor parallelism has split, which torch calls _StridedShard. No single
    # collective undoes both, and torch warns where it is asked for both at once: this one is undone first.
    placements = [Replicate() if type(one).__name__ == "_StridedShard" else one for one in tensor.placements]
    return tensor.redistribute(placements=placements).full_tensor()


def get_state_dict(ctx: Context, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
    """The state dict of a model, with whole tensors under the names that the model itself gives them.

    Of a model that every rank holds whole, it is that of ``state_dict()``: on every rank, and sharing memory
    with the model. Of one that is spread over ranks (FSDP2, tensor parallelism, stages of a pipeline), the
    main process gets all tensors, on the CPU and of its own, and the other ranks get an empty dict. One
    tensor is gathered at a time.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: Prepared or not.
        unwrap: Leave out of the names what wrappers put in. Otherwise ``DistributedDataParallel`` keeps its
            ``module.``; what ``torch.compile`` and activation checkpointing add is left out in any case.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: Without the wrappers two tensors would have the same name.
        RemoteRankError: Another rank has failed.
        MismatchError: The ranks' models differ.

    >>> sorted(get_state_dict(Context(), torch.nn.Linear(2, 1)))
    ['bias', 'weight']
    """
    check_context("get_state_dict", ctx)

    def look(meet: Meet) -> tuple[dict[str, Any], Stages | None]:
        plain = require_module(_GET, model)
        check_filled(_GET, unwrap_model(plain, keep_torch_compile=False))
        if unwrap:
            plain = unwrap_model(plain, keep_torch_compile=False)
            names = own_names(_GET, plain)
        else:
            names = {name: _without_added(name) for name in plain.state_dict(keep_vars=True)}
        tensors = plain.state_dict(keep_vars=True)
        own = {own: tensors[name] for name, own in names.items()}
        inner = unwrap_model(plain, keep_torch_compile=False)
        state, stages = whole_state(ctx, _GET, inner, own, meet)
        meet("state", lambda: describe(state, stages))
        return state, stages

    def gather(meet: Meet) -> dict[str, Any]:
        first = {tied_by(value): name for name, value in reversed(state.items()) if is_tensor(value)}
        order = [name for name in state if name in first.values()]
        whole: dict[str, torch.Tensor] = {}
        values = whole_tensors(state, order, meet, stages)
        for name in order:
            value = next(values)
            if ctx.is_main_process:
                whole[name] = value.to("cpu", copy=True)
            del value  # before the next one comes
        if not ctx.is_main_process:
            return {}
        return {
            name: whole[first[tied_by(value)]] if is_tensor(value) else value for name, value in state.items()
        }

    state, stages = together(ctx, _GET, look)
    if stages is not None or any(is_dtensor(value) for value in state.values()):
        return together(ctx, _GET, gather)
    return {name: value.detach() if is_tensor(value) else value for name, value in state.items()}
