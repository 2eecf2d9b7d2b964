"""Ring attention: torch's, on plain tensors, with each rank's keys and values passed from rank to rank.

Torch has it behind a private name and behind DTensors, whose dispatcher a program can switch only as a whole,
and which fall back to attention inside of each piece where a kernel doesn't fit. Here the loop over the ranks
is called by itself, with a kernel that was chosen, so that nothing falls back in silence.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

__all__ = ("ring_attention",)

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DIM = 2  # of the sequence, in (rows, heads, length, features)
_WIDEST = 256  # features of a head that flash attention takes


class _Kernel(NamedTuple):
    """Attention inside of one piece, and its backward.

    Attributes:
        name: Of torch's operator; that of its backward is the same with ``_backward``.
        grad_name: What the backward calls the gradient of the output.
        rest: What the forward gives beside output and logsumexp, as the backward calls it.
        forward_options: More arguments of the forward.
        backward_options: More arguments of the backward.
    """

    name: str
    grad_name: str = "grad_out"
    rest: tuple[str, ...] = ()
    forward_options: Mapping[str, Any] = _NOTHING
    backward_options: Mapping[str, Any] = _NOTHING

    def operator(self, *, backward: bool = False) -> Any:
        """Return torch's operator."""
        return getattr(torch.ops.aten, f"{self.name}_backward" if backward else self.name).default


_ON_CPU = _Kernel("_scaled_dot_product_flash_attention_for_cpu")
_FLASH = _Kernel(
    "_scaled_dot_product_flash_attention",
    rest=("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
)
_EFFICIENT = _Kernel(
    "_scaled_dot_product_efficient_attention",
    grad_name="grad_out_",
    rest=("philox_seed", "philox_offset"),
    forward_options=MappingProxyType({"attn_bias": None, "compute_log_sumexp": True}),
    backward_options=MappingProxyType({"attn_bias": None, "grad_input_mask": (True, True, True, False)}),
)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    rotation: str = "allgather",
    scale: float | None = None,
) -> torch.Tensor:
    """Return causal attention over the sequence that the ranks of ``group`` have in head-tail pieces.

    Of ``2 * P`` equal chunks rank ``r`` of ``P`` has the chunks ``r`` and ``2 * P - 1 - r``, so that ranks
    have equal work. Differentiable once.

    Ranks: every rank of ``group``, forward and backward.

    Args:
        query: Shape ``(rows, heads, length, features)``, with the length of this rank's piece.
        key: The same shape, dtype and device.
        value: Likewise.
        group: Over real processes.
        rotation: How keys and values reach other ranks: "allgather", all at once, or "alltoall", one rank's
            at a time.
        scale: Of the scores; None for one over the root of ``features``.

    Returns:
        This rank's piece, as ``query``.
    """
    return cast("torch.Tensor", cast("Any", _Ring).apply(query, key, value, group, rotation, scale))


def _kernel_for(query: torch.Tensor) -> _Kernel:
    if query.device.type == "cpu":
        return _ON_CPU
    features = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return _FLASH if is_half and features % 8 == 0 and features <= _WIDEST else _EFFICIENT


@contextmanager
def _rotating(rotation: str) -> Generator[Any, None, None]:
    """Yield torch's private module, with the options of the process set for one call."""
    from torch.distributed.tensor.experimental import _context_parallel

    torchs: Any = _context_parallel._attention  # pyright: ignore[reportPrivateUsage]
    options = torchs._cp_options
    before = options.enable_load_balance, options.rotate_method
    methods = torchs._RotateMethod
    method = methods.ALL_TO_ALL if rotation == "alltoall" else methods.ALL_GATHER
    options.enable_load_balance, options.rotate_method = True, method
    try:
        yield torchs
    finally:
        options.enable_load_balance, options.rotate_method = before


class _Ring(torch.autograd.Function):
    """The loop over the ranks, and the loop back."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        rotation: str,
        scale: float | None,
    ) -> torch.Tensor:
        kernel = _kernel_for(query)
        with _rotating(rotation) as torchs:
            output, logsumexp, *rest = torchs._templated_ring_attention(
                group,
                _DIM,
                kernel.operator(),
                query,
                key,
                value,
                is_causal=True,
                dropout_p=0.0,
                scale=scale,
                **kernel.forward_options,
            )
        named = dict(zip(kernel.rest, rest, strict=False))
        ctx.tensors = [name for name, one in named.items() if isinstance(one, torch.Tensor)]
        ctx.others = {name: one for name, one in named.items() if name not in ctx.tensors}
        ctx.save_for_backward(query, key, value, output, logsumexp, *(named[name] for name in ctx.tensors))
        ctx.settings = kernel, group, rotation, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        kernel, group, rotation, scale = ctx.settings
        query, key, value, output, logsumexp, *rest = ctx.saved_tensors
        with _rotating(rotation) as torchs:
            found = torchs._templated_ring_attention_backward(
                group,
                _DIM,
                kernel.operator(backward=True),
                gradients[0],
                kernel.grad_name,
                query,
                key,
                value,
                output,
                logsumexp,
                is_causal=True,
                dropout_p=0.0,
                scale=scale,
                **dict(zip(ctx.tensors, rest, strict=True)),
                **ctx.others,
                **kernel.backward_options,
            )
        return (*found[:3], None, None, None)
