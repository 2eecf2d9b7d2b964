"""One norm of the gradients for every layout of the parameters, and the scaling that goes with it.

Each rank adds up what it holds; what several ranks hold counts in parts, so that the sum over all ranks has
each element once. That sum is one number, which is all that travels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch

from accelfn.comm import reduce
from accelfn.context import Context
from accelfn.tree import is_dtensor, local_of

# Where a parameter keeps how many ranks of a pipeline hold it, each for a stage of its own.
_STAGES = "_accelfn_stages"


class _Part(NamedTuple):
    """What this rank holds of a gradient.

    Attributes:
        gradient: Dense, and written into when it is clipped.
        holders: Ranks that hold the same elements, this one among them.
    """

    gradient: torch.Tensor
    holders: int


def count_stages(parameter: torch.Tensor, number: int) -> None:
    """Let norms count a parameter once that stages on ``number`` ranks hold, with one gradient."""
    setattr(parameter, _STAGES, number)


def clip_norm_(
    ctx: Context, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; give the norm before.

    Ranks: as :func:`gradient_norm`.
    """
    norm = gradient_norm(ctx, parameters, norm_type)
    _shrink_([part.gradient for part in _parts(ctx, parameters)], norm, max_norm)
    return norm


def clip_tensors_(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients that are whole on each rank to a norm of at most ``max_norm``; return the norm before.

    Ranks: local.
    """
    norm = torch.nn.utils.get_total_norm(gradients)
    _shrink_(gradients, norm, max_norm)
    return norm


def _shrink_(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    # As torch.nn.utils.clip_grad_norm_ has it; nobody asks on the host whether it is needed.
    shrink = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for group in _by_device(gradients):
            torch._foreach_mul_(group, shrink.to(group[0].device))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def clip_value_(ctx: Context, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
    """Cut each entry of the gradients to ``-clip_value..clip_value``.

    Ranks: local, unless a gradient is laid out otherwise than its parameter.
    """
    with torch.no_grad():
        for part in _parts(ctx, parameters):
            part.gradient.clamp_(-clip_value, clip_value)


def gradient_norm(ctx: Context, parameters: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients of ``parameters``, taken over their whole.

    A gradient whose placements differ from its parameter's is brought to those first, and replaced.

    Ranks: local where each rank holds whole parameters; where some are sharded, or stages of a pipeline hold
    different ones, every rank of ``ctx``, with one sum of one number.

    Args:
        ctx: The world.
        parameters: Plain ones or DTensors, each counted once; those without a gradient are left out.
        norm_type: ``p`` of the norm; ``inf`` for the largest entry.

    Returns:
        Shape ``()``, on the gradients' device, and the same on every rank.
    """
    parts = _parts(ctx, parameters)
    if not _is_shared_out(ctx, parameters):
        return torch.nn.utils.get_total_norm([part.gradient for part in parts], norm_type)
    device = parts[0].gradient.device if parts else ctx.device
    # In float64 where the device has it: terms of many ranks and of very different sizes.
    wide = torch.float32 if device.type == "mps" else torch.float64
    largest = math.isinf(norm_type)
    terms = [_term(group, holders, norm_type).to(device, wide) for group, holders in _alike(parts)]
    start = math.inf if norm_type == -math.inf else 0.0
    total = torch.stack([torch.full((), start, dtype=wide, device=device), *terms])
    own = total.amin() if norm_type == -math.inf else total.amax() if largest else total.sum()
    together = "min" if norm_type == -math.inf else "max" if largest else "sum"
    everywhere = reduce(ctx.tagged("clip_grad_norm_"), own, together)
    norm = everywhere if largest or norm_type == 0 else everywhere ** (1.0 / norm_type)
    return norm if any(part.gradient.dtype == torch.float64 for part in parts) else norm.float()


def _alike(parts: Sequence[_Part]) -> list[tuple[list[torch.Tensor], int]]:
    """Sort gradients by device, dtype and holders; those with no element on this rank add nothing."""
    groups: dict[tuple[torch.device, torch.dtype, int], list[torch.Tensor]] = {}
    for gradient, holders in parts:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype, holders), []).append(gradient)
    return [(group, holders) for (_, _, holders), group in groups.items()]


def _term(gradients: list[torch.Tensor], holders: int, norm_type: float) -> torch.Tensor:
    """Return a power of the norm of gradients, by holder; or the largest entry, which needs no parts."""
    dtype = torch.float32 if gradients[0].dtype in (torch.float16, torch.bfloat16) else None
    each = torch._foreach_norm(gradients, norm_type, dtype=dtype)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    norms = torch.stack(each)
    if math.isinf(norm_type):
        return norms.amax() if norm_type > 0 else norms.amin()
    # Squared in float64, where the device has it: a square leaves the range of float32 early.
    wide = norms if norms.device.type == "mps" else norms.double()
    return (wide if norm_type == 0 else wide**norm_type).sum() / holders


def _is_shared_out(ctx: Context, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether ranks hold different elements. Asked of the parameters, which all ranks have alike."""
    return ctx.num_processes > 1 and (
        ctx.axis_size("pp") > 1 or any(_num_shards(parameter) > 1 for parameter in parameters)
    )


def _num_shards(tensor: torch.Tensor) -> int:
    """Return into how many parts a tensor is cut; 1 for a plain one."""
    if not is_dtensor(tensor):
        return 1
    layout = cast("Any", tensor)
    # Not is_shard(), which is False for a strided shard, as FSDP over tensor parallelism makes them.
    return math.prod(
        size
        for size, placement in zip(layout.device_mesh.shape, layout.placements, strict=True)
        if not placement.is_replicate() and not placement.is_partial()
    )


def _parts(ctx: Context, parameters: Iterable[torch.Tensor]) -> list[_Part]:
    """List what this rank holds of the gradients of ``parameters``, each once."""
    ranks = ctx.num_processes // ctx.axis_size("pp")  # that have the same parameters, or shards of them
    parts: list[_Part] = []
    for parameter in {id(one): one for one in parameters}.values():
        gradient = parameter.grad
        if gradient is None:
            continue
        if is_dtensor(gradient) and is_dtensor(parameter):
            wanted = cast("Any", parameter).placements
            if cast("Any", gradient).placements != wanted:
                gradient = cast("torch.Tensor", cast("Any", gradient).redistribute(placements=wanted))
                parameter.grad = gradient
        holders = max(1, ranks // _num_shards(gradient)) * int(getattr(parameter, _STAGES, 1))
        parts.append(_Part(local_of(gradient), holders))
    return parts


def _by_device(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups.values()
