"""One gradient norm for every layout of the parameters, and clipping by it.

Each rank sums over its local elements, divided by the number of ranks that hold them, so that the sum over
all ranks has each element once. Only that one number is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch

from accelfn.comm import reduce
from accelfn.context import Context
from accelfn.devices import device_type
from accelfn.tree import Sharded, is_dtensor, local_of

# Attribute of a parameter: the number of pipeline ranks that hold it, each for a stage of its own.
_STAGES = "_accelfn_stages"

# Classes of tensors that no other rank has a part of.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class _Part(NamedTuple):
    """This rank's part of a gradient.

    Attributes:
        gradient: Dense, of a sparse one its entries; clipping writes into it.
        holders: Number of ranks that hold the same elements, including this one.
    """

    gradient: torch.Tensor
    holders: int


def count_stages(parameter: torch.Tensor, number: int) -> None:
    """Make norms count a parameter once that stages on ``number`` ranks hold, with equal gradients."""
    setattr(parameter, _STAGES, number)


def clip_norm_(
    ctx: Context, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients to a norm of at most ``max_norm``; return the norm before.

    A gradient whose placements differ from its parameter's is redistributed first, and replaced.

    Ranks: local where each rank holds complete parameters; where some are sharded, or pipeline stages hold
    different ones, every rank of ``ctx``, with one sum of one number.

    Args:
        ctx: The world.
        parameters: Plain ones or DTensors, each once; those without a gradient are ignored.
        max_norm: Upper bound.
        norm_type: ``p`` of the norm; ``inf`` for the largest entry.

    Returns:
        Shape ``()``, on the gradients' device, and the same on every rank.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    num_stages = 1 if ctx.mesh is None else ctx.axis_size("pp")
    if num_stages == 1 and _PLAIN.issuperset(map(type, (*parameters, *gradients))):
        try:
            return clip_tensors_(gradients, max_norm, norm_type)
        except NotImplementedError:  # torch has no norm of sparse gradients
            entries = [part.gradient for part in _parts(parameters, 1)]
            return clip_tensors_(entries, max_norm, norm_type)
    parts = _parts(parameters, ctx.world.size // num_stages)
    gradients = [part.gradient for part in parts]
    # Decided by the parameters, which all ranks agree on.
    if ctx.world.size > 1 and (
        num_stages > 1
        or any(is_dtensor(parameter) and _num_shards(parameter) > 1 for parameter in parameters)
    ):
        norm = _norm_over_ranks(ctx, parts, norm_type)
    else:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    _shrink_(gradients, norm, max_norm)
    return norm


def clip_tensors_(gradients: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale complete gradients to a norm of at most ``max_norm``; return the norm before.

    Ranks: local.
    """
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    _shrink_(gradients, norm, max_norm)
    return norm


def clip_pieces_(ctx: Context, gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients, of which some are Sharded, by their whole norm; return the norm before.

    Ranks: every rank of ``ctx``, with one sum of one number.
    """
    norm = norm_of_pieces(ctx, gradients)
    _shrink_([*map(local_of, gradients)], norm, max_norm)
    return norm


def norm_of_pieces(ctx: Context, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of tensors together, of which some are Sharded over the ranks of ``ctx``.

    Ranks: every rank of ``ctx``, with one sum of one number. The other tensors are the same on all.
    """
    size = ctx.num_processes
    parts = [_Part(local_of(one), 1 if isinstance(one, Sharded) else size) for one in tensors]
    return _norm_over_ranks(ctx, parts, 2.0)


def _shrink_(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    # As in torch.nn.utils.clip_grad_norm_, which doesn't wait for the device either.
    shrink = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for group in _by_device(gradients):
            torch._foreach_mul_(group, shrink.to(group[0].device))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def clip_value_(ctx: Context, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
    """Clamp each entry of the gradients to ``-clip_value..clip_value``.

    Ranks: local, unless a gradient's placements differ from its parameter's.
    """
    with torch.no_grad():
        for part in _parts(parameters, ctx.world.size):
            part.gradient.clamp_(-clip_value, clip_value)


def _norm_over_ranks(ctx: Context, parts: Sequence[_Part], norm_type: float) -> torch.Tensor:
    """Return the norm of all gradients, from this rank's parts of them."""
    device = parts[0].gradient.device if parts else ctx.device
    # In float64 if the device has it: terms of many ranks, of very different sizes.
    wide = torch.float64 if device_type(device.type).has_float64 else torch.float32
    largest = math.isinf(norm_type)
    terms = [_term(group, holders, norm_type).to(device, wide) for group, holders in _alike(parts)]
    start = math.inf if norm_type == -math.inf else 0.0
    total = torch.stack([torch.full((), start, dtype=wide, device=device), *terms])
    own = total.amin() if norm_type == -math.inf else total.amax() if largest else total.sum()
    together = "min" if norm_type == -math.inf else "max" if largest else "sum"
    everywhere = reduce(ctx.tagged("clip_grad_norm_"), own, together)
    norm = everywhere if largest or norm_type == 0 else everywhere ** (1.0 / norm_type)
    return norm if torch.float64 in {part.gradient.dtype for part in parts} else norm.float()


def _alike(parts: Sequence[_Part]) -> list[tuple[list[torch.Tensor], int]]:
    """Group gradients by device, dtype and holders; gradients without local elements are left out."""
    groups: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}
    for gradient, holders in parts:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype, holders), []).append(gradient)
    return [(group, holders) for (_, _, holders), group in groups.items()]


def _term(gradients: list[torch.Tensor], holders: int, norm_type: float) -> torch.Tensor:
    """Return the gradients' norm to the power of ``norm_type``, divided by holders; or the largest entry."""
    dtype = torch.float32 if gradients[0].dtype in (torch.float16, torch.bfloat16) else None
    each = torch._foreach_norm(gradients, norm_type, dtype=dtype)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    norms = torch.stack(each)
    if math.isinf(norm_type):
        return norms.amax() if norm_type > 0 else norms.amin()
    # Squared in float64 if the device has it: squares overflow float32 early.
    wide = norms.double() if device_type(norms.device.type).has_float64 else norms
    return (wide if norm_type == 0 else wide**norm_type).sum() / holders


def _num_shards(tensor: Any) -> int:
    """Return the number of shards of a DTensor."""
    number = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        # Not is_shard(), which is False for the strided shards of FSDP over tensor parallelism.
        if not placement.is_replicate() and not placement.is_partial():
            number *= size
    return number


def _parts(parameters: Iterable[torch.Tensor], num_ranks: int) -> list[_Part]:
    """Return this rank's parts of the gradients of ``parameters``.

    Args:
        parameters: Each once.
        num_ranks: Number of ranks with the same parameters, or shards of them.
    """
    parts: list[_Part] = []
    for parameter in parameters:
        gradient, holders = parameter.grad, num_ranks
        if gradient is None:
            continue
        if is_dtensor(gradient):
            gradient = parameter.grad = aligned(gradient, parameter)
            holders = max(1, num_ranks // _num_shards(gradient))
        elif gradient.is_sparse:
            parameter.grad = gradient.coalesce()  # so that each element is in one entry
            gradient = parameter.grad._values()
        parts.append(_Part(local_of(gradient), holders * getattr(parameter, _STAGES, 1)))
    return parts


def aligned(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the placements of its parameter; a plain one, or of a plain one, as it is."""
    placements = getattr(parameter, "placements", None)
    if placements is None or getattr(gradient, "placements", placements) == placements:
        return gradient
    return cast("Any", gradient).redistribute(placements=placements)


def _by_device(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups.values()
