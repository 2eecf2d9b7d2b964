"""Pointers from replaced parameters to their successors, and the values that these get.

Sharding replaces parameters by new ones of the same names. Each old parameter then points at its successor,
so that its holders find the new one: an optimizer made before, in whatever order model and optimizer are
prepared. A model of which this rank keeps some pipeline stages remembers its complete state dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.comm import Call, broadcast, gather_bytes, verify_structure
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.tree import is_dtensor, local_of

K = TypeVar("K")
# Attributes of a tensor: its hooks before and after autograd adds to the gradient, by id.
_BEFORE, _AFTER = "_backward_hooks", "_post_accumulate_grad_hooks"

# Attribute of an old parameter: its successor in a tuple, with None if it isn't on this rank any more.
_SUCCESSOR = "_accelfn_now"
# Attribute of a parameter: the optimizers that hold it, as far as they were prepared.
_OPTIMIZERS = "_accelfn_optimizers"
# Attribute of a pipelined model: its state dict before it was split.
_WHOLE = "_accelfn_whole"


class WholeModel(NamedTuple):
    """The state dict of a model before it was split into stages: the same on all ranks.

    Attributes:
        tensors: Dtype and shape by name, in the model's order; None for values that aren't tensors.
        first: First name of a tied tensor, by each of its other names.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]] | None]
    first: Mapping[str, str]

    def tied(self) -> dict[str, tuple[str, ...]]:
        """Return all names of each tied tensor, by each of them."""
        groups: dict[str, list[str]] = {}
        for name, leader in self.first.items():
            groups.setdefault(leader, [leader]).append(name)
        return {name: tuple(names) for names in groups.values() for name in names}


def describe_whole(model: nn.Module) -> WholeModel:
    """Return the record of a model's state dict."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]] | None] = {}
    first: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, value in cast("dict[str, object]", model.state_dict(keep_vars=True)).items():
        if not isinstance(value, torch.Tensor):
            tensors[name] = None
            continue
        tensors[name] = (value.dtype, tuple(value.shape))
        leader = names.setdefault(id(value), name)
        if leader != name:
            first[name] = leader
    return WholeModel(tensors, first)


def remember_whole(model: nn.Module) -> None:
    """Record a model's state dict, before parts of it are removed. Writes into ``model``."""
    setattr(model, _WHOLE, describe_whole(model))


def whole_of(model: nn.Module) -> WholeModel | None:
    """Return the record of a model's state dict before it was split; None if it wasn't."""
    return getattr(model, _WHOLE, None)


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name; a tied one has an entry for each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def retie(before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Tie parameters that were tied in ``before`` and replaced one by one. Writes into ``model``.

    Raises:
        ConfigurationError: Tied parameters have different layouts.
    """
    after = named(model)
    first: dict[int, str] = {}
    for name, old in before.items():
        if name not in after:
            continue
        leader = first.setdefault(id(old), name)
        target, other = after[leader], after[name]
        if target is other:
            continue
        if _layout(target) != _layout(other):
            raise ConfigurationError(
                f"{leader} and {name} are one tied parameter, but the plan lays them out differently: "
                f"{_layout(target)} and {_layout(other)}. Give both modules the same style, or untie them."
            )
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, target)


def leave_pointers(before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Point each parameter in ``before`` that ``model`` has replaced at the new one of its name.

    Parameters that are on other ranks only point at None. Optimizers that :func:`note_holder` knows hold the
    new ones from now on: one that clears gradients before its first step must reach them.
    """
    after = named(model)
    by_old: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for name, old in before.items():
        known = by_old.get(id(old))
        if known is None or known[1] is None:  # another name of a tied parameter may be on this rank
            by_old[id(old)] = (old, after.get(name))
    optimizers: dict[int, Optimizer] = {}
    for old, new in by_old.values():
        if new is not old:
            setattr(old, _SUCCESSOR, (new,))
            for kind in (_BEFORE, _AFTER) if new is not None and not is_dtensor(new) else ():
                if getattr(old, kind):
                    setattr(new, kind, getattr(old, kind))  # the same dict, from which hooks may be removed
            optimizers.update({id(one): one for one in vars(old).get(_OPTIMIZERS, ())})
    for optimizer in optimizers.values():
        repoint(optimizer)


class _Optimizers(weakref.WeakSet[Optimizer]):
    """The optimizers of a parameter. A copy has none."""

    def __reduce__(self) -> Any:
        return _Optimizers, ()


def note_holder(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Note on parameters that an optimizer holds them, for :func:`leave_pointers`."""
    for parameter in parameters:
        vars(parameter).setdefault(_OPTIMIZERS, _Optimizers()).add(optimizer)


def _has_hook(parameter: torch.Tensor, kind: str) -> bool:
    """Return whether a parameter has a hook of the program."""
    hooks = cast("dict[int, Any]", getattr(parameter, kind) or {})
    functions = [hook.func if isinstance(hook, partial) else hook for hook in hooks.values()]
    return not all(str(getattr(one, "__module__", "")).startswith("accelfn.") for one in functions)


def refuse_hook_of_shard(operation: str, name: str, parameter: torch.Tensor, *kinds: str) -> None:
    """Refuse a hook before the gradient of a parameter that ranks share, or are going to.

    Args:
        operation: Name of the operation in errors.
        name: Of the parameter.
        parameter: The parameter, or a shard of it.
        kinds: Of other hooks to refuse.

    Raises:
        ConfigurationError: It has one.
    """
    if any(_has_hook(parameter, kind) for kind in (_BEFORE, *kinds)):
        raise ConfigurationError(
            f"{operation}: {name} has a hook on its gradient, which ranks compute in parts, and not all of "
            "it by autograd: the hook would see a part, or not run. Change the gradient after backward "
            "instead (after unscale_gradients, before the step), or keep the full model on every rank."
        )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks on the gradients of a model that ranks are going to share.

    Raises:
        ConfigurationError: A parameter has one.
    """
    for name, parameter in model.named_parameters():
        refuse_hook_of_shard("prepare_model", name, parameter, _AFTER)


def refuse_hook_of_replica(operation: str, parameter: torch.Tensor) -> None:
    """Refuse a hook after the gradient of a replicated parameter, which isn't averaged then.

    Raises:
        ConfigurationError: It has one.
    """
    if _has_hook(parameter, _AFTER):
        raise ConfigurationError(
            f"{operation}: a parameter of shape {tuple(parameter.shape)} has a hook after the accumulation "
            "of its gradient (register_post_accumulate_grad_hook), where the gradient is this rank's own: a "
            "step there would let the models of the ranks drift apart. Do after backward what the hook does; "
            "or shard the model with an fsdp_plugin, and register it after prepare: FSDP averages before."
        )


def newest(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the successor of a parameter: the parameter itself if it wasn't replaced.

    None if it is on other ranks only.
    """
    found: torch.Tensor | None = parameter
    while found is not None:
        # Not vars(), which torch.compile can't follow.
        successor = cast("tuple[torch.Tensor | None] | None", getattr(found, _SUCCESSOR, None))
        if successor is None:
            break
        found = successor[0]
    return found


def follow(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the successors of parameters, each once, without those on other ranks only."""
    found: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        successor = newest(parameter) if hasattr(parameter, _SUCCESSOR) else parameter
        if successor is not None:
            found[id(successor)] = successor
    return list(found.values())


def repoint(optimizer: Optimizer) -> int:
    """Point an optimizer at the successors of its parameters, and move its state to them.

    Writes into the optimizer: its groups stay the same objects, in their order, so that schedulers keep
    working. State of a parameter's shape is sharded like the new parameter.

    Ranks: local; doesn't communicate. Every rank's state is unsharded, and equal.

    Returns:
        The number of replaced parameters.
    """
    replaced = 0
    state = cast("dict[torch.Tensor, dict[str, Any]]", optimizer.state)
    for group in optimizer.param_groups:
        old_parameters = cast("list[torch.Tensor]", group["params"])
        now: dict[int, torch.Tensor] = {}
        kept_names: list[str] = []
        for index, old in enumerate(old_parameters):
            new = newest(old)
            if new is not old:
                replaced += 1
                values = state.pop(old, None)
                if new is not None and values is not None:
                    state[new] = {name: _laid_out(name, value, old, new) for name, value in values.items()}
            if new is not None and id(new) not in now:
                now[id(new)] = new
                kept_names += group["param_names"][index : index + 1] if "param_names" in group else ()
        old_parameters[:] = now.values()
        if "param_names" in group:
            group["param_names"] = kept_names
        are_sharded = {is_dtensor(parameter) for parameter in old_parameters}
        if len(are_sharded) == 2 and "foreach" in group and not group.get("fused"):
            group["foreach"] = False  # torch's foreach functions don't take both kinds together
    return replaced


def _laid_out(name: str, value: Any, old: torch.Tensor, new: Any) -> Any:
    """Return an entry of an optimizer's state in the layout of ``new``."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or name == "step":
        return value
    if not is_dtensor(new):
        return value
    shard = _distributed(value.detach().to(new.device_mesh.device_type), new)
    return shard.to(local_of(new).device)  # the host, for offloaded parameters


def _distributed(whole: torch.Tensor, target: Any) -> Any:
    """Return a tensor, which every rank has complete, in the layout of ``target``."""
    from torch.distributed.tensor import distribute_tensor

    # From this rank's own copy, which is equal: src_data_rank would send another rank's.
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def _layout(tensor: torch.Tensor) -> object:
    """Return the layout that tied parameters must have in common."""
    if not is_dtensor(tensor):
        return "whole"
    return cast("Any", tensor).placements, cast("Any", tensor).device_mesh


# Bytes that are broadcast at once: that much of the complete model is in memory beside rank 0's copy.
_BROADCAST_BYTES = 64 << 20

# Attribute of a model: its tensors that have never been written.
_UNFILLED = "_accelfn_unfilled"


class Values(NamedTuple):
    """The tensors of a model before it was spread over ranks.

    Attributes:
        tensors: By name, in the model's order. With values on rank 0; elsewhere only shapes and dtypes count.
        missing: Names of those without values on any rank.
        ties: Names of each tied parameter, the one in ``tensors`` first.
    """

    tensors: dict[str, torch.Tensor]
    missing: tuple[str, ...]
    ties: tuple[tuple[str, ...], ...]


def release(ctx: Context, model: nn.Module) -> Values:
    """Move the parameters of a model to the meta device; return their values. Writes into ``model``.

    Ties stay. Buffers stay where they are, and so do parameters made of others, as quantised ones.

    Ranks: every rank of ``ctx``.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype. Nothing was changed.
        ConfigurationError: Another rank has values that rank 0 lacks. Nothing was changed.
    """
    found = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: tensor.detach() for name, tensor in found if not is_made_of_others(tensor)}
    verify_structure(ctx, {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()})
    bits = sum(1 << place for place, tensor in enumerate(tensors.values()) if tensor.is_meta)
    of_ranks = gather_bytes(ctx, Call("prepare_model", "meta"), bits.to_bytes(len(tensors) // 8 + 1, "big"))
    first, *others = (int.from_bytes(blob, "big") for blob in of_ranks)
    for rank, other in enumerate(others, 1):
        lost = first & ~other
        if lost:
            name = [*tensors][(lost & -lost).bit_length() - 1]
            raise ConfigurationError(
                f"prepare_model: {name} is on the meta device on rank 0, but has values on rank {rank}. All "
                "ranks start from the values of rank 0: load the model there, or on no rank."
            )
    names: dict[int, list[str]] = {}
    for name, tensor in named(model).items():
        names.setdefault(id(tensor), []).append(name)
    on_meta: dict[int, nn.Parameter] = {}
    for module in model.modules():
        register = cast("dict[str, nn.Parameter | None]", vars(module)["_parameters"])
        for name, old in register.items():
            if old is None or is_made_of_others(old):
                continue
            if id(old) not in on_meta:
                on_meta[id(old)] = nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad)
            register[name] = on_meta[id(old)]
    missing = tuple(name for place, name in enumerate(tensors) if first >> place & 1)
    return Values(tensors, missing, tuple(tuple(group) for group in names.values() if len(group) > 1))


def gathered(tensor: Any) -> torch.Tensor:
    """Return a ``DTensor`` as a complete tensor. Ranks: every rank of its mesh."""
    from torch.distributed.tensor import Replicate

    # If fully_shard shards a dim that tensor parallelism has sharded, torch calls the placement
    # _StridedShard. No single collective undoes both, and torch warns about it, so this one is undone first.
    placements = [Replicate() if type(one).__name__ == "_StridedShard" else one for one in tensor.placements]
    return tensor.redistribute(placements=placements).full_tensor()


def names_on_meta(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters and buffers on the meta device."""
    return tuple(
        name for name, parameter in (*model.named_parameters(), *model.named_buffers()) if parameter.is_meta
    )


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate memory for a model's tensors on the meta device. Writes into ``model``.

    The memory is uninitialised. Ties stay, and replaced parameters point at the new ones.

    Ranks: local.

    Args:
        model: Its tensors may be shards.
        device: Device of the memory.
    """

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    before = named(model)
    cast("Any", model)._apply(allocate)  # like torch's to_empty, which would also drop the buffers' values
    retie(before, model)
    leave_pointers(before, model)


def fill(ctx: Context, model: nn.Module, values: Values) -> None:
    """Set the parameters and buffers of a model to rank 0's values, some at a time.

    Forward passes are refused until all tensors without values on rank 0 have been written.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: With memory for the tensors that are on this rank.
        values: From :func:`release`.
    """
    targets: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    here: dict[str, str] = {}
    for leader, *others in values.ties:  # this rank may only have another of its names
        found = next((name for name in (leader, *others) if name in targets), None)
        if found is not None:
            here[leader] = found
            targets[leader] = targets[found]
    missing = frozenset(values.missing)
    batch: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        with torch.no_grad():
            for name, whole in broadcast(ctx, batch).items():
                if name not in targets:
                    continue
                local_of(targets[name]).copy_(_part(whole, targets[name]))
        batch.clear()

    for name, value in values.tensors.items():
        if name in missing:
            continue
        if ctx.rank == 0:
            batch[name] = value.to(ctx.device)
        else:
            batch[name] = torch.empty(value.shape, dtype=value.dtype, device=ctx.device)
        size += value.nbytes
        if size >= _BROADCAST_BYTES:
            flush()
            size = 0
    if batch:
        flush()
    refuse_unfilled(model, [here.get(name, name) for name in values.missing if name in targets])


def send_values(ctx: Context, model: nn.Module) -> None:
    """Set the parameters and buffers of a complete model to rank 0's values, some at a time.

    Does nothing for a model with tensors on the meta device: those of an offloaded one are elsewhere.

    Ranks: every rank of ``ctx``.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype.
    """
    if ctx.num_processes == 1 or names_on_meta(model):
        return
    found = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: tensor.detach() for name, tensor in found if not is_made_of_others(tensor)}
    verify_structure(ctx, tensors)
    fill(ctx, model, Values(tensors, (), ()))


def _part(whole: torch.Tensor, target: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, in the layout of ``target``."""
    return _distributed(whole, target).to_local() if is_dtensor(target) else whole


def refuse_unfilled(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse forward passes and saves of a model until the named tensors have been written, in any way.

    Ranks: local.

    Args:
        model: Gets a hook, which is removed when all are written.
        names: Names of tensors with uninitialised memory.
    """
    tensors = {**named(model), **dict(model.named_buffers())}
    waiting = {name: (tensors[name], _count_writes(tensors[name])) for name in names}
    if not waiting:
        return

    def check(module: nn.Module, args: Any) -> None:
        del args
        check_filled("forward", module)
        delattr(module, _UNFILLED)
        hook.remove()

    setattr(model, _UNFILLED, waiting)
    hook = model.register_forward_pre_hook(check, prepend=True)


def check_filled(operation: str, model: nn.Module) -> None:
    """Check that no tensor of a model is uninitialised.

    Ranks: local.

    Raises:
        ConfigurationError: Tensors from the meta device never got values.
    """
    waiting = cast("dict[str, tuple[torch.Tensor, int]] | None", getattr(model, _UNFILLED, None))
    if waiting is None:
        return
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    unfilled = [
        name
        for name, (tensor, count) in waiting.items()
        if found.get(name) is tensor and _count_writes(tensor) == count
    ]
    if unfilled:
        shown = ", ".join(unfilled[:5]) + (f" and {len(unfilled) - 5} others" if unfilled[5:] else "")
        raise ConfigurationError(
            f"{operation}: {shown} came from the meta device and never got values. Load them first "
            "(accelfn.load_model, accelfn.load_state), or prepare a model that is loaded on rank 0. Buffers "
            "that no file has, such as those that aren't persistent, need a model made under "
            "accelfn.init_empty_weights(), which computes buffers."
        )


def _count_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of in-place writes to a tensor and to its local shard."""
    return tensor._version + local_of(tensor)._version


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a frozen wrapper subclass, such as a quantised weight of torchao.

    It can't be broadcast; ``prepare_model`` compares it between the ranks instead.
    """
    return is_traceable_wrapper_subclass(tensor) and not tensor.requires_grad


class WaitingGradients(Generic[K]):
    """Parameters whose gradients wait outside of ``.grad``, until an accumulation window closes.

    Meanwhile their ``.grad`` are zeros that take no memory. Whoever clears them, in any way, means the
    gradients that wait.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._held: list[tuple[K, torch.Tensor, torch.Tensor, int, torch.Tensor | None]] = []

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._held)

    def hold(self, key: K, parameter: torch.Tensor) -> None:
        """Set ``.grad`` of a parameter to zeros, until :meth:`release`."""
        zeros = _zeros_without_memory(parameter)
        self._held.append((key, parameter, zeros, _count_writes(zeros), parameter.grad))
        parameter.grad = zeros

    def release(self) -> list[K]:
        """Restore ``.grad`` of all parameters, except where it was cleared; return the keys of these."""
        cleared: list[K] = []
        for key, parameter, zeros, num_writes, before in self._held:
            if parameter.grad is not zeros:
                cleared.append(key)
            elif _count_writes(zeros) == num_writes:
                parameter.grad = before
            else:  # cleared in place
                parameter.grad = torch.zeros_like(parameter if before is None else before)
                cleared.append(key)
        self._held.clear()
        return cleared


def _zeros_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    zeros = torch.zeros((), dtype=local.dtype, device=local.device).expand(local.shape)
    if not is_dtensor(tensor):
        return zeros
    from torch.distributed.tensor import DTensor

    spread = cast("Any", tensor)
    return DTensor.from_local(
        zeros,
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
