"""From the parameters that a model had to those that it has now: pointers, which optimizers follow.

Sharding replaces parameters by new ones of the same names. Each old parameter then
points at its successor, so that whoever still holds it finds the new one: an optimizer that was made before,
in whatever order model and optimizer are prepared. A model of which this rank keeps some stages remembers
what it was as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.comm import Call, broadcast, gather_bytes, verify_structure
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.tree import is_dtensor, local_of

# Where an old parameter keeps its successor: a tuple, whose item is None for one that this rank has no more.
_SUCCESSOR = "_accelfn_now"
# Where a model keeps what it was before other ranks took stages of it.
_WHOLE = "_accelfn_whole"


class WholeModel(NamedTuple):
    """The state dict of a model before ranks took different stages of it: the same on all of them.

    Attributes:
        tensors: Dtype and shape by name, in the model's order; None for what is no tensor.
        first: First name of a tied tensor, by each of its others.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]] | None]
    first: Mapping[str, str]

    def tied(self) -> dict[str, tuple[str, ...]]:
        """Return all names of each tied tensor, by each of them."""
        groups: dict[str, list[str]] = {}
        for name, leader in self.first.items():
            groups.setdefault(leader, [leader]).append(name)
        return {name: tuple(names) for names in groups.values() for name in names}


def remember_whole(model: nn.Module) -> None:
    """Let a model remember its state dict; before parts of it go. Writes into ``model``."""
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
    setattr(model, _WHOLE, WholeModel(tensors, first))


def whole_of(model: nn.Module) -> WholeModel | None:
    """Return what a model was before stages of it went to other ranks; None where all of it is here."""
    return getattr(model, _WHOLE, None)


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name, with an entry for each name of a tied one."""
    return dict(model.named_parameters(remove_duplicate=False))


def retie(before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Tie again what was tied in ``before``, and was replaced module by module. Writes into ``model``.

    Raises:
        ConfigurationError: Tied parameters have been laid out differently.
    """
    after = named(model)
    first: dict[int, str] = {}
    for name, old in before.items():
        if name not in after:
            continue
        leader = first.setdefault(id(old), name)
        one, other = after[leader], after[name]
        if one is other:
            continue
        if _layout(one) != _layout(other):
            raise ConfigurationError(
                f"{leader} and {name} are one tied parameter, and the plan lays them out differently: "
                f"{_layout(one)} and {_layout(other)}. Give both modules the same style, or untie them."
            )
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, one)


def leave_pointers(before: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Let each parameter in ``before`` that ``model`` has replaced point at the new one of its name.

    One of which this rank holds no part any more points at nothing.
    """
    after = named(model)
    by_old: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for name, old in before.items():
        known = by_old.get(id(old))
        if known is None or known[1] is None:  # one of the names of a tied parameter may be elsewhere
            by_old[id(old)] = (old, after.get(name))
    for old, new in by_old.values():
        if new is not old:
            setattr(old, _SUCCESSOR, (new,))


def newest(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what replaces a parameter now: itself where nothing has replaced it.

    None for one that this rank holds no part of any more.
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
    """Return the newest of each parameter, each once, without those that this rank has no part of."""
    found = [newest(one) for one in parameters]
    return list({id(one): one for one in found if one is not None}.values())


def repoint(optimizer: Optimizer) -> int:
    """Point an optimizer at the parameters that replaced its own, and move its state to them.

    Writes into the optimizer: its groups stay the same objects, in their order, so that schedulers go on.
    State of a parameter's shape is laid out as the new parameter is: each rank keeps its shard.

    Ranks: local; doesn't communicate. Every rank's state is of the whole parameters, and equal.

    Returns:
        How many parameters were replaced.
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
        are_sharded = {is_dtensor(one) for one in old_parameters}
        if len(are_sharded) == 2 and "foreach" in group and not group.get("fused"):
            group["foreach"] = False  # torch's foreach functions don't take both kinds together
    return replaced


def _laid_out(name: str, value: Any, old: torch.Tensor, new: Any) -> Any:
    """Return an entry of an optimizer's state as it belongs to ``new``."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or name == "step":
        return value
    if not is_dtensor(new):
        return value
    shard = _distributed(value.detach().to(new.device_mesh.device_type), new)
    return shard.to(local_of(new).device)  # elsewhere for parameters that rest in host memory


def _distributed(whole: torch.Tensor, target: Any) -> Any:
    """Return a tensor, which every rank has whole, as ``target`` is laid out."""
    from torch.distributed.tensor import distribute_tensor

    # From this rank's own copy: with src_data_rank another's would be sent, which is equal.
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def _layout(tensor: torch.Tensor) -> object:
    """Return what two tied parameters must have in common, so that one can stand for both."""
    if not is_dtensor(tensor):
        return "whole"
    return cast("Any", tensor).placements, cast("Any", tensor).device_mesh


# Sent together, so that as much of the whole model is there at once, beside what rank 0 holds.
_BROADCAST_BYTES = 64 << 20

# Where a model keeps which of its tensors have never been written.
_UNFILLED = "_accelfn_unfilled"


class Values(NamedTuple):
    """What the tensors of a model were before it was spread.

    Attributes:
        tensors: By name, in the model's order. On rank 0 with values; elsewhere only shapes and dtypes count.
        missing: Names of those that no rank has values for.
        ties: Names of one and the same parameter, the one in ``tensors`` first.
    """

    tensors: dict[str, torch.Tensor]
    missing: tuple[str, ...]
    ties: tuple[tuple[str, ...], ...]


def release(ctx: Context, model: nn.Module) -> Values:
    """Move the parameters of a model to the meta device, and return what they were. Writes into ``model``.

    Ties stay. Buffers stay where they are, and so do parameters made of others, as quantised ones.

    Ranks: every rank of ``ctx``.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype. Nothing was changed.
        ConfigurationError: Another rank has values for what rank 0 has none. Nothing was changed.
    """
    found = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: one.detach() for name, one in found if not is_made_of_others(one)}
    verify_structure(ctx, {name: torch.empty_like(one, device="meta") for name, one in tensors.items()})
    bits = sum(1 << place for place, one in enumerate(tensors.values()) if one.is_meta)
    of_ranks = gather_bytes(ctx, Call("prepare_model", "meta"), bits.to_bytes(len(tensors) // 8 + 1, "big"))
    first, *others = (int.from_bytes(one, "big") for one in of_ranks)
    for rank, other in enumerate(others, 1):
        lost = first & ~other
        if lost:
            name = [*tensors][(lost & -lost).bit_length() - 1]
            raise ConfigurationError(
                f"prepare_model: {name} is on the meta device on rank 0, and has values on rank {rank}. All "
                "ranks begin with the values of rank 0: load the model there, or on none."
            )
    names: dict[int, list[str]] = {}
    for name, one in named(model).items():
        names.setdefault(id(one), []).append(name)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        register = cast("dict[str, nn.Parameter | None]", vars(module)["_parameters"])
        for name, old in register.items():
            if old is None or is_made_of_others(old):
                continue
            if id(old) not in made:
                made[id(old)] = nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad)
            register[name] = made[id(old)]
    missing = tuple(name for place, name in enumerate(tensors) if first >> place & 1)
    return Values(tensors, missing, tuple(tuple(group) for group in names.values() if len(group) > 1))


def names_on_meta(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that have no values."""
    return tuple(name for name, one in (*model.named_parameters(), *model.named_buffers()) if one.is_meta)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Return what is on the meta device memory, of which each rank holds its parts. Writes into ``model``.

    The memory isn't written: values are whatever was there. Ties stay, and parameters that are replaced
    point at the new ones.

    Ranks: local.

    Args:
        model: Its tensors may be shards.
        device: Where the memory is.
    """

    def given(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    before = named(model)
    cast("Any", model)._apply(given)  # as torch's to_empty, which would forget the values of buffers too
    retie(before, model)
    leave_pointers(before, model)


def fill(ctx: Context, model: nn.Module, values: Values) -> None:
    """Bring the parameters and buffers of a model to rank 0's values, some at a time.

    What rank 0 has no values for is refused in a forward pass, until something has written it.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: Has memory for all of its tensors; what of ``values`` is not in it, this rank has no part of.
        values: From :func:`release`.
    """
    targets: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for leader, *others in values.ties:  # of which this rank may have another name
        found = next((targets[name] for name in (leader, *others) if name in targets), None)
        if found is not None:
            targets[leader] = found
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
    refuse_unfilled(model, [name for name in values.missing if name in targets])


def _part(whole: torch.Tensor, target: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, as ``target`` is laid out."""
    return _distributed(whole, target).to_local() if is_dtensor(target) else whole


def refuse_unfilled(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse forward passes and saves of a model until tensors of it have been written, by whatever way.

    Ranks: local.

    Args:
        model: Writes a hook into it, which goes when all are written.
        names: Of tensors whose memory holds nothing yet.
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
    """Check that nothing of a model is memory that was never written.

    Ranks: local.

    Raises:
        ConfigurationError: Some of it came from the meta device and never got values.
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
            "(accelfn.load_model, accelfn.load_state), or prepare a model that rank 0 has loaded. What "
            "no file has, as buffers that aren't persistent, is computed where the model is made under "
            "accelfn.init_empty_weights(), which leaves buffers real."
        )


def _count_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place, as torch counts: a DTensor, or its part."""
    return tensor._version + local_of(tensor)._version


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a frozen wrapper subclass, such as a quantised weight of torchao.

    It can't be broadcast; ``prepare_model`` compares it between the ranks instead.
    """
    return is_traceable_wrapper_subclass(tensor) and not tensor.requires_grad
