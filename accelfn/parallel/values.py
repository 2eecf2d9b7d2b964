"""The values of a model: those of rank 0 for all ranks, and memory that nobody has written yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.comm import Call, broadcast, gather_bytes, verify_structure
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.pointers import distributed, leave_pointers, named, retie
from accelfn.tree import is_dtensor, local_of

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
    """Set the parameters and buffers that a rank has complete to rank 0's values, some at a time.

    Does nothing for a model with tensors on the meta device: those of an offloaded one are elsewhere.

    Ranks: every rank of ``ctx``.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype.
    """
    if ctx.num_processes == 1 or names_on_meta(model):
        return
    found = (*model.named_parameters(), *model.named_buffers())
    found = ((name, one.detach()) for name, one in found if not (is_made_of_others(one) or is_dtensor(one)))
    tensors = dict(found)
    verify_structure(ctx, tensors)
    fill(ctx, model, Values(tensors, (), ()))


def _part(whole: torch.Tensor, target: Any) -> torch.Tensor:
    """Return this rank's part of a tensor, in the layout of ``target``."""
    return distributed(whole, target).to_local() if is_dtensor(target) else whole


def refuse_unfilled(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse forward passes and saves of a model until the named tensors have been written, in any way.

    Ranks: local.

    Args:
        model: Gets a hook, which is removed when all are written.
        names: Names of tensors with uninitialised memory.
    """
    tensors = {**named(model), **dict(model.named_buffers())}
    waiting = {name: (tensors[name], count_writes(tensors[name])) for name in names}
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
        if found.get(name) is tensor and count_writes(tensor) == count
    ]
    if unfilled:
        shown = ", ".join(unfilled[:5]) + (f" and {len(unfilled) - 5} others" if unfilled[5:] else "")
        raise ConfigurationError(
            f"{operation}: {shown} came from the meta device and never got values. Load them first "
            "(accelfn.load_model, accelfn.load_state), or prepare a model that is loaded on rank 0. Buffers "
            "that no file has, such as those that aren't persistent, need a model made under "
            "accelfn.init_empty_weights(), which computes buffers."
        )


def count_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of in-place writes to a tensor and to its local shard."""
    return tensor._version + local_of(tensor)._version


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a frozen wrapper subclass, such as a quantised weight of torchao.

    It can't be broadcast; ``prepare_model`` compares it between the ranks instead.
    """
    return is_traceable_wrapper_subclass(tensor) and not tensor.requires_grad
