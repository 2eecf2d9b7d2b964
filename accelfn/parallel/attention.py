"""Attention over sequences that several ranks share: ring attention (``cp``), and by heads (``sp``).

Modules of attention call ``F.scaled_dot_product_attention`` with this rank's piece of the sequence. Inside of
their ``forward`` that call is answered over the ranks, by a mode of the thread: nothing is patched, and where
a block is computed again in the backward, so is the mode.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from accelfn.context.config import TorchContextParallelConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts
from accelfn.parallel.forward import WrappedForward

if TYPE_CHECKING:
    import torch.distributed as dist


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


_NAMED = re.compile("attention|attn", re.IGNORECASE)
_MASK = "attention_mask"
# What modules of transformers that look at a part of the sequence alone call its length.
_WINDOWS = ("sliding_window", "attention_chunk_size")
_HINT = "a module of attention is one whose class or name has attn or attention in it, or that says num_heads"


class AttentionPlan(NamedTuple):
    """How ranks that share sequences compute attention. A value.

    Attributes:
        axis: "cp", by passing keys and values from rank to rank; or "sp", by exchanging heads.
        size: Ranks that share a sequence.
        rotation: How keys and values travel along "cp": "allgather" or "alltoall"; "" along "sp".
        modules: Names of the modules of attention.
    """

    axis: Literal["cp", "sp"]
    size: int
    rotation: str
    modules: tuple[str, ...]


def plan_attention(
    config: TorchContextParallelConfig | None,
    facts: ModelFacts,
    axis: Literal["cp", "sp"],
    size: int,
    model: nn.Module | None = None,
) -> AttentionPlan:
    """Return how attention is computed over ranks that share sequences. Pure.

    Args:
        config: How keys and values travel along "cp"; None for the default.
        facts: Of the model, with the heads that each rank has.
        axis: That the ranks are along.
        size: Their number.
        model: That of the facts; None where there are facts alone.

    Raises:
        ConfigurationError: The model has no module of attention, or one that can't share a sequence: one
            whose heads don't divide, that looks at a window, or that isn't computed by torch's
            ``scaled_dot_product_attention``.
    """
    if "MultiheadAttention" in facts.kinds.values():
        name = next(name for name, kind in facts.kinds.items() if kind == "MultiheadAttention")
        raise ConfigurationError(
            f"{axis}_size: {name} is torch's nn.MultiheadAttention, which doesn't let a sequence be shared. "
            "Write attention with F.scaled_dot_product_attention, or leave "
            f"{axis}_size out."
        )
    names = tuple(name for name in facts.kinds if name and _is_attention(name, facts))
    if not names:
        raise ConfigurationError(
            f"{axis}_size: {facts.kinds['']} has no module of attention to share sequences in: {_HINT}. "
            f"Rename it, or leave {axis}_size out."
        )
    if axis == "sp":
        _check_heads(facts, names, size)
    if model is not None:
        _check_kind(model, axis, names)
    chosen = config or TorchContextParallelConfig()
    return AttentionPlan(axis, size, str(chosen.cp_comm_strategy) if axis == "cp" else "", names)


def _is_attention(name: str, facts: ModelFacts) -> bool:
    if name in facts.containers or name in facts.layers:
        return False
    own = name.rpartition(".")[2]
    if "norm" in f"{own} {facts.kinds[name]}".lower():  # such as post_attention_layernorm
        return False
    states = name in facts.heads and bool(facts.heads[name].counts)
    return states or bool(_NAMED.search(own)) or bool(_NAMED.search(facts.kinds[name]))


def _check_heads(facts: ModelFacts, names: Sequence[str], size: int) -> None:
    for name in names:
        for key, count in facts.heads[name].counts.items() if name in facts.heads else ():
            if count % size:
                raise ConfigurationError(
                    f"sp_size: ranks exchange heads, so sp_size must divide their number: {name} has "
                    f"{key}={count} on each rank, and sp_size={size}. Fitting: {_divisors(count)}; or use "
                    "cp_size."
                )


def _divisors(count: int) -> str:
    return ", ".join(str(one) for one in range(1, count + 1) if count % one == 0)


def _check_kind(model: nn.Module, axis: str, names: Sequence[str]) -> None:
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind is not None and kind != "sdpa":
        raise ConfigurationError(
            f"{axis}_size: {type(model).__name__} computes attention by {kind!r}, which doesn't let a "
            'sequence be shared. Load it with attn_implementation="sdpa".'
        )
    for name in names:
        for key in _WINDOWS:
            window = vars(model.get_submodule(name)).get(key)
            if window is not None:
                raise ConfigurationError(
                    f"{axis}_size: {name} has {key}={window}: from a piece of a sequence its mask can't be "
                    f"built. Set {key} to None in the model's configuration, or leave {axis}_size out."
                )


class _Call(NamedTuple):
    """Arguments of ``F.scaled_dot_product_attention``, in its order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class _Sharing:
    """The ranks that share a sequence, as modules of attention know them; those of a copy share them too."""

    def __init__(
        self, plan: AttentionPlan, group: dist.ProcessGroup, ring: Callable[..., torch.Tensor]
    ) -> None:
        self.plan = plan
        self.group = group
        self.ring = ring
        self.has_answered: bool = False
        self.is_checked: bool = False  # a whole forward pass had all its attention answered

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sharing:
        return self

    def refusal(self, what: str, advice: str) -> ConfigurationError:
        return ConfigurationError(f"attention with {self.plan.axis}_size={self.plan.size}: {what}. {advice}")

    def refuse(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refuse a call of attention that nobody answers over the ranks."""
        raise self.refusal(
            "the model calls attention outside of what was taken for modules of attention "
            f"({', '.join(self.plan.modules)}), where it would see this rank's piece alone",
            f"Put it into a module of its own: {_HINT}.",
        )

    def answer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's piece of attention over the whole sequence."""
        call = _Call(*args, **kwargs)
        query, key, value = call[:3]
        if query.dim() != 4 or query.shape[2] != key.shape[2] or key.shape[2] != value.shape[2]:
            raise self.refusal(
                "queries, keys and values must have one shape (rows, heads, length, features) but for heads, "
                f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}",
                "Attention to another sequence, or to a cache of keys, needs whole sequences.",
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (one.to(dtype) for one in (query, key, value))
        call = call._replace(query=query, key=key, value=value)
        output = self._ring(call) if self.plan.axis == "cp" else self._by_heads(call)
        self.has_answered = True
        return output

    def _ring(self, call: _Call) -> torch.Tensor:
        if call.attn_mask is not None:
            raise self.refusal(
                "ring attention takes no mask",
                "Pad at the end, where causal attention never looks, and leave padding out of the labels; or "
                "use sp_size.",
            )
        if not call.is_causal:
            raise self.refusal("ring attention is causal, got is_causal=False", "Use sp_size instead.")
        if call.dropout_p:
            raise self.refusal(
                f"ring attention has no dropout, got dropout_p={call.dropout_p}",
                "Set it to 0, or use sp_size.",
            )
        query, key, value = call[:3]
        if key.shape[1] != query.shape[1]:  # torch's loop exchanges what the kernel sees
            times = query.shape[1] // key.shape[1]
            key, value = (one.repeat_interleave(times, 1) for one in (key, value))
        rotation = self.plan.rotation
        return self.ring(query, key, value, self.group, rotation=rotation, scale=call.scale)

    def _by_heads(self, call: _Call) -> torch.Tensor:
        query, key, value = call[:3]
        for what, one in (("queries", query), ("keys and values", key)):
            if one.shape[1] % self.plan.size:
                raise self.refusal(
                    "ranks exchange heads, and their number must divide them, got "
                    f"{one.shape[1]} heads of {what}",
                    f"Use sp_size of {_divisors(one.shape[1])}, or cp_size.",
                )
        mask = None if call.attn_mask is None else self._whole_mask(call.attn_mask, query)
        query, key, value = self._exchange([_by_rank(one, 1, self.plan.size) for one in (query, key, value)])
        output = F.scaled_dot_product_attention(
            _joined(query, 2),
            _joined(key, 2),
            _joined(value, 2),
            mask,
            call.dropout_p,
            call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )
        (output,) = self._exchange([_by_rank(output, 2, self.plan.size)])
        return _joined(output, 1)

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send slice ``r`` of each tensor to rank ``r``; return what came, by rank. Differentiable."""
        from torch.distributed import _functional_collectives as functional

        flat = [one.flatten(1) for one in tensors]
        packed = torch.cat(flat, 1)
        lengths = [packed.shape[1]] * len(packed)
        exchange = cast("Any", functional).all_to_all_single_autograd
        came: torch.Tensor = exchange(packed.flatten(), lengths, lengths, self.group).view(packed.shape)
        pieces = torch.split(came, [one.shape[1] for one in flat], 1)
        return [piece.reshape(one.shape) for piece, one in zip(pieces, tensors, strict=True)]

    def _whole_mask(self, mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Return a mask over the whole sequence, with the heads that this rank will have."""
        from torch.distributed import _functional_collectives as functional

        gather = cast("Any", functional).all_gather_single
        local, size = query.shape[2], self.plan.size
        whole = local * size
        mask = mask[(None,) * (4 - mask.dim())]
        rows, columns = mask.shape[2:]
        if columns == local and rows == 1:  # of keys alone
            mask, columns = gather(mask.contiguous(), 3, self.group), whole
        elif rows == local and columns in (1, whole):
            mask, rows = gather(mask.contiguous(), 2, self.group), whole
        if columns not in (1, whole) or rows not in (1, whole):
            raise self.refusal(
                f"a mask of {rows} by {columns} says nothing of queries here and keys on other ranks; the "
                f"sequence has {whole} tokens, {local} of them here",
                "Pass one with the keys of the whole sequence, or of keys alone (one row).",
            )
        if mask.shape[1] == query.shape[1] > 1:
            mask = mask.chunk(size, 1)[self.group.rank()]
        return mask


def _by_rank(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Cut a dimension into ``size`` parts, and bring their number to the front."""
    parts: torch.Tensor = cast("Any", tensor).unflatten(dim, (size, -1))
    return torch.movedim(parts, dim, 0)


def _joined(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Join the parts at the front along a dimension of the rest."""
    return torch.movedim(tensor, 0, dim).flatten(dim, dim + 1)


class _Answered(TorchFunctionMode):
    """Lets ``answer`` be called in the place of some functions of torch."""

    def __init__(self, functions: Sequence[Any], answer: Callable[..., Any]) -> None:
        super().__init__()
        self._functions = functions
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self._functions:
            return func(*args, **(kwargs or {}))
        # A module of attention may be inside of another one, whose mode isn't asked.
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            return self._answer(*args, **(kwargs or {}))


class AttentionForward(WrappedForward):
    """A module's ``forward``, in which attention is over sequences that ranks share."""

    def __init__(self, forward: Any, sharing: _Sharing, *, builds_mask: bool) -> None:
        """Wrap ``forward``; with ``builds_mask``, what it gets as a mask was built from positions."""
        super().__init__(forward)
        self._sharing = sharing
        self._builds_mask = builds_mask

    # Not compiled, with what is around it: the compiler would trace the mode at each call of torch.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is wrapped."""
        if self._builds_mask and _MASK in kwargs:
            # Transformers takes positions that jump, from head to tail, for several sequences in one row.
            kwargs[_MASK] = None
        with _Answered((F.scaled_dot_product_attention,), self._sharing.answer):
            return self.__wrapped__(*args, **kwargs)


class SequenceForward(WrappedForward):
    """The ``forward`` of a model that takes this rank's pieces of sequences; checks the first one."""

    def __init__(self, forward: Any, sharing: _Sharing) -> None:
        """Wrap ``forward``."""
        super().__init__(forward)
        self._sharing = sharing
        parameters = list(inspect.signature(forward).parameters)
        self._mask_place = parameters.index(_MASK) if _MASK in parameters else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is wrapped."""
        if self._sharing.plan.axis == "cp" and self._mask_place is not None:
            has_place = len(args) > self._mask_place
            if (args[self._mask_place] if has_place else kwargs.get(_MASK)) is not None:
                raise self._sharing.refusal(
                    f"ring attention takes no mask, and the model was called with {_MASK}",
                    "Leave it out of the batch. Pad at the end, where causal attention never looks, and "
                    "leave padding out of the labels; or use sp_size.",
                )
        if self._sharing.is_checked or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        attention = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
        with _Answered(attention, self._sharing.refuse):
            output = self.__wrapped__(*args, **kwargs)
        if not self._sharing.has_answered:
            raise self._sharing.refusal(
                "the model's forward never came to F.scaled_dot_product_attention, so that ranks have seen "
                "their pieces alone",
                "Compute attention by it.",
            )
        self._sharing.is_checked = True
        return output


def apply_attention(
    model: nn.Module,
    plan: AttentionPlan,
    group: dist.ProcessGroup,
    ring: Callable[..., torch.Tensor] = ring_attention,
) -> None:
    """Let ranks that share sequences compute attention together. Writes into ``model``; all names stay.

    From then on the model takes this rank's pieces of sequences, as :func:`accelfn.shard_sequence` cuts them.

    Ranks: every rank of ``group``; nothing is communicated.

    Args:
        model: As ``plan`` was made for; neither recomputed nor compiled by accelfn yet.
        plan: From :func:`plan_attention`.
        group: The ranks that share a sequence, as processes.
        ring: Attention along "cp", called as :func:`accelfn.parallel.attention.ring_attention`.
    """
    sharing = _Sharing(plan, group, ring)
    for name in plan.modules:
        module = model.get_submodule(name)
        builds_mask = plan.axis == "cp" and getattr(module, "is_causal", False) is True
        module.forward = AttentionForward(module.forward, sharing, builds_mask=builds_mask)
    model.forward = SequenceForward(model.forward, sharing)
