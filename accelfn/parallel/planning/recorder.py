"""Record a forward and backward pass: what autograd keeps, and what collectives bring, by segment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.parallel.planning.costs import Collective, Exchange, Segment, received_in_ring
from accelfn.tree import is_dtensor


class Recorder(TorchDispatchMode):
    """Records the passes of a model by segment: from the call of one of some blocks to the next.

    Attributes:
        axes: Name and size of the axis, by the name of its group.
        segments: In the order of their calls.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.axes: dict[str, tuple[str, int]] = {}
        self._running = Segment("")
        self.segments: list[Segment] = [self._running]
        self._during: Literal["forward", "backward"] = "forward"
        self._own: set[int] = set()
        # Of the parameters, also transposed: tensors like them are their gradients, or casts of them.
        self._shapes: set[tuple[int, ...]] = set()
        self._block = ""  # the recomputed block that runs
        self._done: list[Exchange] = []  # by it since it saved a tensor
        self._saved: list[tuple[weakref.ref[_Saved], Segment, str]] = []

    def watch(self, model: nn.Module, starts: Iterable[str], recomputed: Iterable[str]) -> None:
        """Record a model, whose segments begin with the calls of ``starts``."""
        self._own = {_storage(tensor)._cdata for tensor in (*model.parameters(), *model.buffers())}
        shapes = [tuple(_local(parameter).shape) for parameter in model.parameters()]
        self._shapes = {*shapes, *(shape[::-1] for shape in shapes)}
        # Before hooks that change the inputs: these are the tensors that the stage before sends.
        for name in starts:
            enter = partial(self._enter_segment, name)
            model.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        for name in recomputed:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter_block, name), with_kwargs=True)
            block.register_forward_hook(self._leave_block)

    def _enter_segment(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        before, sent = self._running, next(_tensors((args, kwargs)), None)
        self._running = Segment(name)
        self.segments.append(self._running)
        if sent is not None:
            self._running.entering, self._running.sent = _storage(sent), _local(sent).nbytes

            def leave(gradient: torch.Tensor) -> None:
                self._running = before

            if sent.requires_grad:
                cast("Any", sent).register_hook(leave)

    def _enter_block(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._block, self._done = name, []
        for storage in map(_storage, _tensors((args, kwargs))):
            if storage._cdata not in self._own:
                self._running.saved[storage._cdata] = storage

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        self._block = ""

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append((weakref.ref(saved), self._running, self._block))
        if self._block:
            # A recomputation ends as soon as it has saved all that the block saved.
            self._running.exchanges += self._done
            self._done = []
        return saved

    @contextmanager
    def forward_pass(self) -> Generator[None, None, None]:
        """Record what autograd saves inside, and keeps at the end; then the backward pass begins."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield
        self._during = "backward"
        for reference, segment, block in self._saved:
            saved = reference()
            if saved is not None and (storage := _storage(saved.tensor))._cdata not in self._own:
                home = segment.recomputed.setdefault(block, {}) if block else segment.saved
                home[storage._cdata] = storage
        earlier: set[int] = set()
        for segment in self.segments:
            segment.new = sum(one.nbytes() for key, one in segment.saved.items() if key not in earlier)
            earlier |= segment.saved.keys()

    def count(self, axis: str, kind: Collective, calls: int, received: int) -> None:
        """Count what is exchanged now."""
        one = Exchange(axis, kind, "activations", calls, received, self._during)
        self._running.exchanges.append(one)
        if self._block:
            self._done.append(one._replace(during="backward"))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "_local_tensor") or kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # called again with the local tensors
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and not any(one.alias_info for one in func._schema.returns)
        if is_new and tuple(result.shape) not in self._shapes:
            self._running.largest = max(self._running.largest, result.nbytes)
        if func.namespace == "_c10d_functional" and args and args[-1] in self.axes:
            axis, size = self.axes[args[-1]]
            name = func._schema.name.partition("::")[2]
            found = next((kind for kind in get_args(Collective) if name.startswith(kind)), "send")
            kind = cast("Collective", found)
            times = {"all_gather": size, "all_reduce": 2}.get(kind, 1)
            self.count(axis, kind, 1, received_in_ring(times * args[0].nbytes, size))
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
        size = group.size()
        kind, calls = ("all_to_all", size - 1) if rotation == "alltoall" else ("all_gather", 1)

        def rotate() -> None:
            self.count("cp", kind, calls, (size - 1) * (key.nbytes + value.nbytes))

        def rotate_back() -> None:
            rotate()
            self.count("cp", "all_to_all", size, size * 4 * (key.numel() + value.numel()))

        rotate()
        return cast("torch.Tensor", cast("Any", _Ring).apply(query, key, value, rotate_back))


class _Ring(torch.autograd.Function):
    """Memory of ring attention: keys and values twice, and their gradients in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotate_back: Callable[[], None],
    ) -> torch.Tensor:
        # Contiguous, as on all ranks except the last one, so that joining the heads copies.
        output = query.new_empty(query.shape)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.rotate_back = rotate_back
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.rotate_back()
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class FusedAttention(TorchFunctionMode):
    """Removes dropout from attention: with it, no CPU kernel saves the tensors that GPU kernels do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:])[: len(args)], {**(kwargs or {})}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **(kwargs or {}))


class _Saved:
    """A tensor saved by autograd; dead as soon as autograd releases it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _tensors(tree: Any) -> Generator[torch.Tensor, None, None]:
    yield from (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return cast("Any", tensor)._local_tensor if is_dtensor(tensor) else tensor


def _storage(tensor: torch.Tensor) -> Any:
    return _local(tensor).untyped_storage()
