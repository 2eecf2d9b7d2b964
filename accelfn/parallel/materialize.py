"""Memory for parameters without any, and values for it: rank 0's, or those that are loaded afterwards.

A model is spread over ranks on the meta device, where nothing is copied. Each rank then gets memory for its
own parts, and takes them from rank 0's values, a few tensors at a time: no other rank has to hold the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.comm import Call, broadcast, gather_bytes, verify_structure
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.pointers import leave_pointers, named, retie
from accelfn.parallel.thread_ddp import is_made_of_others
from accelfn.tree import is_dtensor, local_of

__all__ = ("Values", "check_filled", "fill", "materialize", "names_on_meta", "refuse_unfilled", "release")

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
    if not is_dtensor(target):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # From this rank's own copy: with src_data_rank another's would be sent, which is equal.
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None).to_local()


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
