"""Attention over sequences that ranks share: ring attention (``cp``), or by exchanging heads (``sp``).

Attention modules call ``F.scaled_dot_product_attention`` with this rank's part of the sequence. Inside their
``forward``, a thread-local function mode computes that call over the ranks: nothing is patched, and a block
that is recomputed in the backward pass enters the mode again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from accelfn.config import TorchContextParallelConfig
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.facts import ModelFacts, list_text
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.strategies.position_check import find_mixing_kind, find_mixing_module
from accelfn.parallel.strategies.strategy import Application, Planning

if TYPE_CHECKING:
    import torch.distributed as dist


_NOTHING: Mapping[str, Any] = MappingProxyType({})
_DIMS = 4
_DIM = 2  # of the sequence, in (rows, heads, length, features)
_MAX_FEATURES = 256  # of a head, in flash attention


class _Kernel(NamedTuple):
    """A torch operator for attention within one part of the sequence, and its backward.

    Attributes:
        name: Name of torch's operator; its backward has the suffix ``_backward``.
        grad_name: The backward's argument for the gradient of the output.
        rest: The forward's results after output and logsumexp, as the backward's arguments.
        forward_options: Further arguments of the forward.
        backward_options: Further arguments of the backward.
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
    """Return causal attention over a sequence that the ranks of ``group`` hold in head-tail parts.

    Of ``2 * P`` equal chunks, rank ``r`` of ``P`` has the chunks ``r`` and ``2 * P - 1 - r``, so that all
    ranks do equal work. Differentiable once.

    Ranks: every rank of ``group``, forward and backward.

    Args:
        query: Shape ``(rows, heads, length, features)``, with the length of this rank's part.
        key: Same shape, dtype and device.
        value: Same shape, dtype and device.
        group: Of processes.
        rotation: How keys and values reach other ranks: "allgather", all at once, or "alltoall", from one
            rank at a time.
        scale: Of the scores; None for ``features ** -0.5``.

    Returns:
        This rank's part, shaped like ``query``.
    """
    return cast("torch.Tensor", cast("Any", _Ring).apply(query, key, value, group, rotation, scale))


def _kernel_for(query: torch.Tensor) -> _Kernel:
    if query.device.type == "cpu":
        return _ON_CPU
    features = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return _FLASH if is_half and features % 8 == 0 and features <= _MAX_FEATURES else _EFFICIENT


@contextmanager
def _rotating(rotation: str) -> Generator[Any, None, None]:
    """Yield torch's private module, with its process-wide options set for one call."""
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
    """The loop over the ranks, and its backward."""

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
        ctx.tensors = [name for name, tensor in named.items() if isinstance(tensor, torch.Tensor)]
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


_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_NAMED = re.compile("attention|attn", re.IGNORECASE)
_MASK, _POSITIONS = "attention_mask", "position_ids"
# Attributes of transformers modules that only attend to a part of the sequence.
_WINDOWS = ("sliding_window", "attention_chunk_size")
_HINT = "attention modules are those with attn or attention in their class or name, or with num_heads"


class AttentionPlan(NamedTuple):
    """How ranks that share sequences compute attention. A value.

    Attributes:
        axis: "cp", by passing keys and values from rank to rank; or "sp", by exchanging heads.
        size: Ranks that share a sequence.
        rotation: How keys and values are exchanged along "cp": "allgather" or "alltoall"; "" along "sp".
        modules: Names of the attention modules.
    """

    axis: Literal["cp", "sp"]
    size: int
    rotation: str
    modules: tuple[str, ...]

    def __str__(self) -> str:
        """Return the line of the model plan's table."""
        how = f"heads exchanged over {self.size}"
        if self.axis == "cp":
            how = f"a ring of {self.size}, keys and values passed around by {self.rotation}"
        where = list_text(self.modules) or "no module of this stage"
        return f"each sequence shared along {self.axis}: {how}; in {where}"


def plan_attention(
    config: TorchContextParallelConfig | None,
    facts: ModelFacts,
    axis: Literal["cp", "sp"],
    size: int,
    model: nn.Module | None = None,
    whole: ModelFacts | None = None,
) -> AttentionPlan:
    """Plan attention over ranks that share sequences. Pure.

    Args:
        config: How keys and values are exchanged along "cp"; None for the default.
        facts: Of the model, with the heads that each rank has.
        axis: The axis that the ranks are along.
        size: Number of ranks.
        model: The model of the facts, if there is one.
        whole: Facts of the complete model, where ``facts`` are those of a stage, which may have no attention.

    Raises:
        ConfigurationError: The model has no attention module, or one that can't share a sequence: its heads
            don't divide, it attends to a window, or it doesn't use torch's ``scaled_dot_product_attention``.
    """
    if "MultiheadAttention" in facts.kinds.values():
        name = next(name for name, kind in facts.kinds.items() if kind == "MultiheadAttention")
        raise ConfigurationError(
            f"{axis}_size: {name} is torch's nn.MultiheadAttention, which can't share a sequence over ranks. "
            f"Write attention with F.scaled_dot_product_attention, or leave {axis}_size out."
        )
    names = _attention_in(facts)
    if not names and not (whole is not None and _attention_in(whole)):
        raise ConfigurationError(
            f"{axis}_size: {facts.kinds['']} has no attention module: {_HINT}. Rename it, or leave "
            f"{axis}_size out."
        )
    if axis == "sp":
        _check_heads(facts, names, size)
    if model is not None:
        _check_kind(model, axis, names)
    chosen = config or TorchContextParallelConfig()
    return AttentionPlan(axis, size, str(chosen.cp_comm_strategy) if axis == "cp" else "", names)


def _attention_in(facts: ModelFacts) -> tuple[str, ...]:
    return tuple(name for name in facts.kinds if name and _is_attention(name, facts))


def _is_attention(name: str, facts: ModelFacts) -> bool:
    if name in facts.containers or name in facts.layers:
        return False
    leaf = name.rpartition(".")[2]
    if "norm" in f"{leaf} {facts.kinds[name]}".lower():  # such as post_attention_layernorm
        return False
    has_heads = name in facts.heads and bool(facts.heads[name].counts)
    return has_heads or bool(_NAMED.search(leaf)) or bool(_NAMED.search(facts.kinds[name]))


def _check_heads(facts: ModelFacts, names: Sequence[str], size: int) -> None:
    for name in names:
        for key, count in facts.heads[name].counts.items() if name in facts.heads else ():
            is_repeated = ("kv" in key or "key_value" in key) and size % count == 0
            if count % size and not is_repeated:
                fitting = " or ".join(str(one) for one in range(1, count + 1) if count % one == 0)
                raise ConfigurationError(
                    f"sp_size must divide the number of heads, which ranks exchange: {name} has "
                    f"{key}={count} on each rank, got sp_size={size}. Use {fitting}, or use cp_size."
                )


def _check_kind(model: nn.Module, axis: str, names: Sequence[str]) -> None:
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind is not None and kind != "sdpa":
        raise ConfigurationError(
            f"{axis}_size: {type(model).__name__} computes attention by {kind!r}, which can't share a "
            'sequence over ranks. Load it with attn_implementation="sdpa".'
        )
    mixing = find_mixing_kind(model)
    if mixing is not None:
        raise ConfigurationError(
            f"{axis}_size: {mixing}, which mixes positions outside of attention, where each rank has a "
            f"part of the sequence. Leave {axis}_size out."
        )
    for name in names:
        for key in _WINDOWS:
            window = vars(model.get_submodule(name)).get(key)
            if window is not None:
                raise ConfigurationError(
                    f"{axis}_size: {name} has {key}={window}, whose mask can't be built from a part of a "
                    f"sequence. Set {key} to None in the model's configuration, or leave {axis}_size out."
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


def _attend_alone(call: _Call) -> torch.Tensor:
    """Return what depends on queries, keys and values at each position alone."""
    query, key, value = call[:3]
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    # Sums show positions that are rotated, as the product of a query and its own key doesn't.
    return value + (query.sum(-1, keepdim=True) + key.sum(-1, keepdim=True)) * query.shape[-1] ** -0.5


class _Sharing:
    """The ranks that share a sequence; copies of a model share one instance."""

    def __init__(
        self,
        plan: AttentionPlan,
        group: dist.ProcessGroup,
        ring: Callable[..., torch.Tensor],
        find_mixing: Callable[..., str | None] | None,
    ) -> None:
        self.plan = plan
        self.group = group
        self.ring = ring
        self.find_mixing = find_mixing
        self.has_answered: bool = False
        self.is_checked: bool = False  # whether a first forward pass used the modules' attention only
        self.is_tried: bool = find_mixing is None  # whether all but attention computes positions alone
        self.is_alone: bool = False  # whether attention does too, for a trial

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sharing:
        return self

    def refusal(self, what: str, advice: str) -> ConfigurationError:
        return ConfigurationError(f"attention with {self.plan.axis}_size={self.plan.size}: {what}. {advice}")

    def refuse(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refuse a call of attention outside of the attention modules."""
        raise self.refusal(
            f"the model calls attention outside of its attention modules ({', '.join(self.plan.modules)}), "
            "where it would only attend to this rank's part of the sequence",
            f"Move it into a module of its own: {_HINT}.",
        )

    def answer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return this rank's part of attention over the complete sequence."""
        call = _Call(*args, **kwargs)
        if self.is_alone:
            return _attend_alone(call)
        query, key, value = call[:3]
        if query.dim() != 4 or query.shape[2] != key.shape[2] or key.shape[2] != value.shape[2]:
            raise self.refusal(
                "queries, keys and values must have one shape (rows, heads, length, features) except for the "
                f"number of heads, got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}",
                "Cross-attention and caches of keys can't be used.",
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        call = call._replace(query=query, key=key, value=value)
        output = self._along_ring(call) if self.plan.axis == "cp" else self._by_heads(call)
        self.has_answered = True
        return output

    def _along_ring(self, call: _Call) -> torch.Tensor:
        query, key, value = call[:3]
        if call.is_causal and not call.dropout_p:
            # Torch's loop exchanges keys and values as the kernel takes them.
            if key.shape[1] != query.shape[1]:
                times = query.shape[1] // key.shape[1]
                key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
            rotation = self.plan.rotation
            return self.ring(query, key, value, self.group, rotation=rotation, scale=call.scale)
        # What torch's loop doesn't compute: this rank's queries attend to the keys of all ranks.
        length = query.shape[2]
        mask = None if call.attn_mask is None else self._over_all_keys(call.attn_mask, length)
        if call.is_causal:
            places = self.places(length).to(query.device)
            mask = places[:, None] >= torch.arange(length * self.plan.size, device=query.device)
        elif mask is not None and mask.shape[2] not in (1, length):
            mask = mask[:, :, self.places(length).to(mask.device)]
        key, value = (self.gathered(tensor, 2) for tensor in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, mask, call.dropout_p, scale=call.scale, enable_gqa=call.enable_gqa
        )

    def places(self, length: int) -> torch.Tensor:
        """Return the places of this rank's ``length`` tokens in the complete sequence."""
        size, rank = self.plan.size, self.group.rank()
        if self.plan.axis == "sp":
            return torch.arange(rank * length, (rank + 1) * length)
        chunks = torch.arange(length * size).chunk(2 * size)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])

    def gathered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather the ranks' parts of a sequence, in its order. Differentiable."""
        from torch.distributed import _functional_collectives as functional

        gather = cast("Any", functional).all_gather_single_autograd
        joined: torch.Tensor = gather(tensor.contiguous(), dim, self.group)
        if self.plan.axis == "sp":
            return joined
        chunks = joined.chunk(2 * self.plan.size, dim)
        return torch.cat([*chunks[::2], *chunks[::-2]], dim)  # heads of all ranks, then tails from the last

    def _by_heads(self, call: _Call) -> torch.Tensor:
        query, key, value = call[:3]
        if self.plan.size % key.shape[1] == 0:  # fewer heads of keys and values than ranks
            key, value = (one.repeat_interleave(self.plan.size // one.shape[1], 1) for one in (key, value))
        mask = None if call.attn_mask is None else self._mask_of_heads(call.attn_mask, query)
        query, key, value = self._exchange(
            [_by_rank(tensor, 1, self.plan.size) for tensor in (query, key, value)]
        )
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
        """Send slice ``r`` of each tensor to rank ``r``; return the received ones. Differentiable."""
        from torch.distributed import _functional_collectives as functional

        flat = [tensor.flatten(1) for tensor in tensors]
        packed = torch.cat(flat, 1)
        lengths = [packed.shape[1]] * len(packed)
        exchange = cast("Any", functional).all_to_all_single_autograd
        received: torch.Tensor = exchange(packed.flatten(), lengths, lengths, self.group).view(packed.shape)
        parts = torch.split(received, [tensor.shape[1] for tensor in flat], 1)
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _mask_of_heads(self, mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Return the mask of the complete sequence, for the heads that this rank will have."""
        mask = self._over_all_keys(mask, query.shape[2])
        if mask.shape[2] == query.shape[2]:
            mask = self.gathered(mask, 2)
        if mask.shape[1] == query.shape[1] > 1:
            mask = mask.chunk(self.plan.size, 1)[self.group.rank()]
        return mask

    def _over_all_keys(self, mask: torch.Tensor, length: int) -> torch.Tensor:
        """Return a mask of four dimensions over the keys of all ranks, which have ``length`` each."""
        total = length * self.plan.size
        mask = mask[(None,) * (4 - mask.dim())]
        rows, columns = mask.shape[2:]
        if columns == length and rows == 1:  # of keys only
            return self.gathered(mask, 3)
        if columns not in (1, total) or rows not in (1, length, total):
            raise self.refusal(
                f"a mask of {rows} by {columns} doesn't cover keys on other ranks; the sequence has {total} "
                f"tokens, {length} of them on this rank",
                "Pass a mask over the keys of the complete sequence, or of keys only (one row). A model that "
                "makes masks or biases of distances itself, such as T5, can't share sequences.",
            )
        return mask


def _by_rank(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Split a dimension into ``size`` parts, and move the parts to the front."""
    parts: torch.Tensor = cast("Any", tensor).unflatten(dim, (size, -1))
    return torch.movedim(parts, dim, 0)


def _joined(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Join the parts at the front along another dimension."""
    return torch.movedim(tensor, 0, dim).flatten(dim, dim + 1)


class _Answered(TorchFunctionMode):
    """Calls ``answer`` in the place of some functions of torch."""

    def __init__(self, functions: Sequence[Any], answer: Callable[..., Any]) -> None:
        super().__init__()
        self._functions = functions
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self._functions:
            return func(*args, **(kwargs or {}))
        # Attention modules may be nested: the outer one's mode must not run.
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            return self._answer(*args, **(kwargs or {}))


def _is_over_all_keys(mask: Any) -> bool:
    """Return whether a mask is of a rank's tokens by all keys, and not by the rank's own."""
    return isinstance(mask, torch.Tensor) and mask.dim() == _DIMS and mask.shape[2] < mask.shape[3]


class AttentionForward(WrappedForward):
    """A module's ``forward``, with attention over sequences that ranks share."""

    def __init__(self, forward: Any, sharing: _Sharing, *, builds_mask: bool) -> None:
        """Wrap ``forward``; with ``builds_mask``, masks that it gets were built from positions."""
        super().__init__(forward)
        self._sharing = sharing
        self._builds_mask = builds_mask

    # Not compiled, nor are the modules around it: the compiler would trace the mode at each call of torch.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped forward."""
        if self._builds_mask and _MASK in kwargs and not _is_over_all_keys(kwargs[_MASK]):
            # Transformers takes positions that jump, from head to tail, for packed sequences.
            kwargs[_MASK] = None
        with _Answered((F.scaled_dot_product_attention,), self._sharing.answer):
            return self.__wrapped__(*args, **kwargs)


class SequenceForward(WrappedForward):
    """The ``forward`` of a model on parts of sequences; checks the first call."""

    def __init__(self, forward: Any, sharing: _Sharing, *, builds_mask: bool) -> None:
        """Wrap ``forward``; with ``builds_mask``, it builds masks of packed documents from positions."""
        super().__init__(forward)
        self._sharing = sharing
        self._parameters = list(inspect.signature(forward).parameters)
        self._builds_mask = builds_mask and {_MASK, _POSITIONS} <= set(self._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped forward."""
        if not self._sharing.is_tried and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._refuse_mixing(args, kwargs)
        if self._builds_mask:
            given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
            mask = self._mask_of_documents(given.get(_MASK), given.get(_POSITIONS))
            if mask is not None:
                args, kwargs = (), {**given, _MASK: mask}
        if self._sharing.is_checked or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        with _Answered(_ATTENTION, self._sharing.refuse):
            output = self.__wrapped__(*args, **kwargs)
        if not self._sharing.has_answered:
            raise self._sharing.refusal(
                "the model's forward never called F.scaled_dot_product_attention, so ranks attended only to "
                "their own parts of the sequence",
                "Compute attention by it.",
            )
        self._sharing.is_checked = True
        return output

    def _mask_of_documents(self, mask: Any, positions: Any) -> torch.Tensor | None:
        """Return the mask for documents that are packed in a row, whose positions begin again; None without.

        Transformers builds it too, but of this rank's tokens alone. As an argument it reaches a block that is
        recomputed as well.
        """
        sharing = self._sharing
        if mask is not None:
            if sharing.plan.axis == "cp" and not _is_over_all_keys(mask):
                raise sharing.refusal(
                    f"the model was called with {_MASK}, of which it makes a mask of this rank's tokens",
                    "Leave it out of the batch. Pad at the end, which causal attention never attends to, and "
                    "ignore padding in the labels; or pass four dimensions: this rank's tokens by all keys.",
                )
            return None
        # A plan computes with tensors without values.
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or type(positions) is FakeTensor:
            return None
        is_start = sharing.gathered(positions, 1).diff(dim=1) != 1
        if not is_start.any():
            return None
        documents = F.pad(is_start.cumsum(1), (1, 0))
        own = sharing.places(positions.shape[1]).to(positions.device)
        is_before = own[:, None] >= torch.arange(documents.shape[1], device=own.device)
        return (is_before & (documents[:, own, None] == documents[:, None]))[:, None]

    def _refuse_mixing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a model whose modules other than attention need the positions on other ranks."""
        sharing = self._sharing

        def call(*args: Any, **kwargs: Any) -> None:
            sharing.is_alone = True
            try:
                with _Answered(_ATTENTION, sharing.refuse):
                    self.__wrapped__(*args, **kwargs)
            finally:
                sharing.is_alone = False

        forward: Any = self
        while isinstance(forward, WrappedForward):
            forward = forward.__wrapped__
        model = getattr(forward, "__self__", None)
        if isinstance(model, nn.Module) and sharing.find_mixing is not None:
            name = sharing.find_mixing(model, call, args, kwargs)
            if name is not None:
                raise sharing.refusal(
                    f"what {name} returns for a position depends on other positions, or on its place in this "
                    "rank's part of the sequence, and ranks share sequences in attention only",
                    "Pass positions with the batch, sharded like the tokens. Layers that mix positions, such "
                    "as convolutions, recurrent layers, and sums or means over the sequence, need complete "
                    f"sequences: leave {sharing.plan.axis}_size out.",
                )
        sharing.is_tried = True


def apply_attention(
    model: nn.Module,
    plan: AttentionPlan,
    group: dist.ProcessGroup,
    ring: Callable[..., torch.Tensor] = ring_attention,
    find_mixing: Callable[..., str | None] | None = None,
) -> None:
    """Make ranks that share sequences compute attention together. Writes into ``model``; names don't change.

    From then on the model takes this rank's parts of sequences, as :func:`accelfn.shard_sequence` returns
    them.

    Ranks: every rank of ``group``; nothing is communicated.

    Args:
        model: The planned model; not recomputed or compiled by accelfn yet.
        plan: From :func:`plan_attention`.
        group: The processes that share a sequence.
        ring: Attention along "cp", called as :func:`accelfn.parallel.strategies.attention.ring_attention`.
        find_mixing: Finds modules that mix positions at the first forward pass under grad, called as
            :func:`accelfn.parallel.strategies.position_check.find_mixing_module` without its context; None to
            trust.
    """
    sharing = _Sharing(plan, group, ring, find_mixing)
    builds_mask = False
    for name in plan.modules:
        module = model.get_submodule(name)
        is_causal = getattr(module, "is_causal", False) is True
        builds_mask = builds_mask or is_causal
        module.forward = AttentionForward(
            module.forward, sharing, builds_mask=is_causal and plan.axis == "cp"
        )
    model.forward = SequenceForward(model.forward, sharing, builds_mask=builds_mask)


def of_rank(whole: None, at: Planning) -> AttentionPlan:
    """Return how ranks that share sequences compute attention."""
    del whole
    parallelism = at.ctx.strategy.parallelism
    handler = None if parallelism is None else parallelism.cp_handler
    axis = "cp" if at.mesh.size("cp") > 1 else "sp"
    return plan_attention(handler, at.facts, axis, at.mesh.size("seq"), at.model, at.whole)


def apply(plan: AttentionPlan, at: Application) -> None:
    """Make ranks along "cp" or "sp" compute attention together.

    Ranks: every rank of the context; nothing is communicated.

    Raises:
        NotAvailableError: The ranks are threads.
    """
    ctx, group = at.ctx, None if at.ctx.mesh is None else at.ctx.mesh.sequence_group()
    if group is None:
        raise NotAvailableError(
            "ranks that share sequences must be processes with an initialised torch.distributed; these are "
            'threads. In a test, use run_ranks(..., on="processes").'
        )
    if not plan.modules:  # a stage without attention
        return
    # A stage of a pipeline ends the model's forward early; scales of 8 bits are those of all positions.
    is_tried = ctx.axis_size("pp") == 1 and ctx.precision.mode != "fp8"
    find_mixing = partial(find_mixing_module, ctx) if is_tried else None
    apply_attention(at.model, plan, group, find_mixing=find_mixing)
