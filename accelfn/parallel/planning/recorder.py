"""Record a forward and backward pass: what autograd keeps, and what collectives bring, by segment."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.parallel.planning.costs import Collective, Exchange, Segment, StepCost
from accelfn.tree import is_dtensor

Route = tuple[str, Collective]
"""An axis, and a kind of communication along it."""


class _Tally:
    """A pass of a segment, as far as it has come."""

    def __init__(self) -> None:
        self.largest = 0
        self.calls: Counter[Route] = Counter()
        self.received: Counter[Route] = Counter()

    def add(self, other: _Tally) -> None:
        self.calls += other.calls
        self.received += other.received

    def read(self, during: Literal["forward", "backward"]) -> list[Exchange]:
        return [
            Exchange(axis, kind, "activations", self.calls[axis, kind], received, during)
            for (axis, kind), received in self.received.items()
        ]


class CountedTraffic(TorchDispatchMode):
    """Counts collectives and the bytes that they bring, along planned axes.

    Attributes:
        axes: Name and size of the axis, by the name of its group.
        shapes: Of the parameters, also transposed: tensors like them are their gradients, or casts of them.
        tally: Of the running pass of the running segment.
        again: What the running recomputed block will do once more in its backward pass; None outside of one.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.axes: dict[str, tuple[str, int]] = {}
        self.shapes: set[tuple[int, ...]] = set()
        self.tally: _Tally = _Tally()
        self.again: _Tally | None = None

    def count(self, route: Route, calls: int, received: int) -> None:
        """Count what is exchanged now."""
        for tally in (self.tally, self.again):
            if tally is not None:
                tally.calls[route] += calls
                tally.received[route] += received

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "_local_tensor") or kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # called again with the local tensors
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and not any(one.alias_info for one in func._schema.returns)
        if is_new and tuple(result.shape) not in self.shapes:
            self.tally.largest = max(self.tally.largest, result.nbytes)
        if func.namespace == "_c10d_functional" and args and args[-1] in self.axes:
            axis, size = self.axes[args[-1]]
            kind = _kind_of(func._schema.name.partition("::")[2])
            self.count((axis, kind), 1, _received(kind, args[0].nbytes, size))
        return result

    def attend_in_ring(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        *,
        rotation: str,
        **options: Any,
    ) -> torch.Tensor:
        """Replace :func:`accelfn.parallel.strategies.attention.ring_attention`, which needs processes."""
        return cast("torch.Tensor", cast("Any", _Ring).apply(query, key, value, self, group.size(), rotation))


class _Ring(torch.autograd.Function):
    """Memory and traffic of ring attention: keys and values twice, and their gradients in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        traffic: CountedTraffic,
        size: int,
        rotation: str,
    ) -> torch.Tensor:
        # Contiguous, as on all ranks except the last one, so that joining the heads copies.
        output = query.new_empty(query.shape)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.settings = traffic, size, rotation
        _rotate(traffic, key, value, size, rotation)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        traffic, size, rotation = ctx.settings
        query, key, value, _, _ = ctx.saved_tensors
        _rotate(traffic, key, value, size, rotation)
        passed_on = size * 4 * (key.numel() + value.numel())
        traffic.count(("cp", "all_to_all"), size, passed_on)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None, None


def _rotate(
    traffic: CountedTraffic, key: torch.Tensor, value: torch.Tensor, size: int, rotation: str
) -> None:
    kind, calls = ("all_to_all", size - 1) if rotation == "alltoall" else ("all_gather", 1)
    traffic.count(("cp", kind), calls, (size - 1) * (key.nbytes + value.nbytes))


def _kind_of(name: str) -> Collective:
    kinds = get_args(Collective)
    return next((kind for kind in kinds if name.startswith(kind)), "send")


def _received(kind: Collective, size: int, num_ranks: int) -> int:
    """Return the bytes that a rank receives in a ring collective of tensors of ``size`` bytes."""
    others = num_ranks - 1
    if kind == "all_gather":
        return size * others
    return (2 if kind == "all_reduce" else 1) * size * others // num_ranks


class FusedAttention(TorchFunctionMode):
    """Removes dropout from attention: with it, no CPU kernel saves the tensors that GPU kernels do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:])[: len(args)], {**kwargs}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _Saved:
    """A tensor saved by autograd; dead as soon as autograd releases it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Running:
    """A segment whose forward pass runs, or has run."""

    def __init__(self, name: str, entering: torch.Tensor | None) -> None:
        self.name = name
        self.entering: Any = None if entering is None else _storage(entering)  # which stays alive
        self.sent = 0 if entering is None else _local(entering).nbytes
        self.forward, self.backward = _Tally(), _Tally()
        self.inputs: dict[int, Any] = {}  # of recomputed blocks


class _Saving(NamedTuple):
    """What autograd keeps for a segment: sizes by storage, and those that a recomputed block saves again."""

    kept: Mapping[int, int]
    recomputed: Mapping[str, Mapping[int, int]]


class Recorder:
    """Records what a forward pass saves, by segment: from the call of one of the ``starts`` to the next."""

    def __init__(
        self, model: nn.Module, starts: Sequence[str], recomputed: set[str], traffic: CountedTraffic
    ) -> None:
        self._traffic = traffic
        self._own = {_storage(tensor)._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._segments = [_Running("", None)]
        traffic.tally = self._segments[0].forward
        shapes = [tuple(_local(parameter).shape) for parameter in model.parameters()]
        traffic.shapes = {*shapes, *(shape[::-1] for shape in shapes)}
        self._block = ""
        self._done = _Tally()  # what the running recomputed block has done since it saved a tensor
        self._saved: list[tuple[weakref.ref[_Saved], int, str]] = []
        # Before hooks that change the inputs: these are the tensors that the stage before sends.
        for name in starts:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter_segment(name), with_kwargs=True, prepend=True)
        for name in recomputed:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(self._enter_block(name), with_kwargs=True)
            block.register_forward_hook(self._leave_block)

    def _enter_segment(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = _pytree.tree_leaves((args, kwargs))
            sent = next((leaf for leaf in given if isinstance(leaf, torch.Tensor)), None)
            before = self._segments[-1]
            self._segments.append(_Running(name, sent))
            self._traffic.tally = self._segments[-1].forward

            def leave(gradient: torch.Tensor) -> None:
                self._traffic.tally = before.backward

            if sent is not None and sent.requires_grad:
                cast("Any", sent).register_hook(leave)

        return enter

    def _enter_block(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._block = name
            self._traffic.again = self._done = _Tally()
            for leaf in _pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    storage = _storage(leaf)
                    self._segments[-1].inputs[storage._cdata] = storage

        return enter

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        self._block = ""
        self._traffic.again = None

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append((weakref.ref(saved), len(self._segments) - 1, self._block))
        if self._block:
            # A recomputation ends as soon as it has saved all that the block saved.
            self._segments[-1].backward.add(self._done)
            self._traffic.again = self._done = _Tally()
        return saved

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Record what autograd saves inside, and the forward pass; then the backward pass begins."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield
        self._traffic.tally = self._segments[-1].backward

    def read(self) -> list[_Saving]:
        """Return what is kept for each segment, while the result is alive."""
        kept: list[dict[int, int]] = [
            {key: storage.nbytes() for key, storage in one.inputs.items() if key not in self._own}
            for one in self._segments
        ]
        blocks: list[dict[str, dict[int, int]]] = [{} for _ in kept]
        for reference, segment, block in self._saved:
            saved = reference()
            if saved is None:
                continue
            storage = _storage(saved.tensor)
            if storage._cdata not in self._own:
                home = blocks[segment].setdefault(block, {}) if block else kept[segment]
                home[storage._cdata] = storage.nbytes()
        return [_Saving(held, again) for held, again in zip(kept, blocks, strict=True)]

    def cost(self, saved: Sequence[_Saving]) -> StepCost:
        """Return the cost, after the backward pass."""
        return StepCost(
            tuple(
                Segment(
                    names=(one.name,),
                    entering=None if one.entering is None else (one.entering._cdata, one.entering.nbytes()),
                    sent=one.sent,
                    saved=held.kept,
                    recomputed=held.recomputed,
                    exchanges=(*one.forward.read("forward"), *one.backward.read("backward")),
                    largest=max(one.forward.largest, one.backward.largest),
                )
                for one, held in zip(self._segments, saved, strict=True)
            )
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return cast("Any", tensor)._local_tensor if is_dtensor(tensor) else tensor


def _storage(tensor: torch.Tensor) -> Any:
    return _local(tensor).untyped_storage()
