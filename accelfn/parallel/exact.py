"""Exact mode: the gradients of a step are summed over its microbatches in one order, at any number of ranks.

A microbatch is one batch of one rank. In a window the batch at place ``p`` of rank ``r`` is microbatch ``p * ranks +
r``: since a step of the loaders covers consecutive samples in rank order, the same microbatch holds the same
samples at any number of ranks. One rank adds the gradients of its batches one after the other; several must
come to the same bits, so they add the same tensors in the same order. Each rank does so for its part of all
parameters: after every backward pass each gradient is cut into one part for each rank, every rank gets its
part of the gradients of all ranks, and adds them in rank order to its sum. Where the window closes, the sums
come together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage] -- every norm with statistics
from torch.nn.parallel import DistributedDataParallel

from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.ordered_sum import OrderedSum
from accelfn.parallel.thread_ddp import REPLICA, ThreadDDP
from accelfn.tree import flatten, flatten_tensor, plan_layout

__all__ = ("ExactReplica", "exact_backward", "exact_batch", "scale_open_sums", "swap_parts")


class ExactReplica(ThreadDDP):
    """Sums the gradients of one model over all microbatches of a window, in their order, on any number of ranks.

    Works for any way that a gradient arises, as :class:`ThreadDDP` does. While a window is open, ``.grad`` of
    what has got a gradient is None on several ranks: the sums are elsewhere.
    """

    def __init__(self, ctx: Context, model: nn.Module) -> None:
        """Bring the model to rank 0's values, and watch its parameters."""
        _refuse_statistics(model)
        for name, parameter in model.named_parameters():
            if isinstance(vars(parameter).get(REPLICA), ExactReplica):
                raise ConfigurationError(
                    f"the parameter {name} is that of another prepared model too, and its gradients would be "
                    'summed twice. With reduction="canonical", prepare one model that holds all parameters.'
                )
        super().__init__(ctx, model)

    def _watch(self) -> None:
        ctx = self._ctx
        self._items = list(self._parameters.values())
        _, structure = flatten(self._items)
        groups = plan_layout(cast("list[torch.Tensor]", self._items), structure).groups
        self._sums = [OrderedSum(group, ctx.rank, ctx.num_processes) for group in groups]
        self._touched: set[int] = set()  # what has a sum in the window that is open
        self._pass: list[Callable[[], None]] | None = None  # by which a backward pass is told from others
        self._got: set[int] = set()  # what got a gradient in it
        self._kept: dict[int, torch.Tensor] = {}  # what was in .grad before it
        self._batch: object = None  # the batch at hand
        self._seen: set[int] | None = None  # what got a gradient from it; None outside of `accumulate`
        self._forms = {
            name: f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
            for name, item in self._parameters.items()
        }
        self._digest = hashlib.blake2b(repr(self._forms).encode(), digest_size=8).hexdigest()
        for index, item in enumerate(self._items):
            setattr(item, REPLICA, self)
            cast("Any", item).register_hook(partial(self._before_gradient, index))
            cast("Any", item).register_post_accumulate_grad_hook(partial(self._after_gradient, index))

    @property
    def syncs(self) -> bool:
        """Whether backward passes communicate: always."""
        return True

    def will_sync_buffers(self, module: nn.Module) -> bool:
        """Say no: what could change buffers in training is refused, so they stay as they were prepared."""
        del module
        return False

    def begin_batch(self, batch: object, place: int, window: int) -> set[int] | None:
        """Begin with a batch of a window; what was left of a window that never closed is dropped.

        Returns:
            What ``end_batch`` is to be given.
        """
        before = self._seen
        if batch is not self._batch or window == 1:
            self._batch, self._seen = batch, set()
            if place == 0:
                self._drop()
        elif self._seen is None:
            self._seen = set()
        return before

    def end_batch(self, before: set[int] | None) -> None:
        """End what ``begin_batch`` began."""
        self._seen = before

    def scale_sums(self, parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply the sums that ``parameters`` have in a window that is open."""
        wanted = {id(parameter) for parameter in parameters}
        scaled = {index for index in self._touched if id(self._items[index]) in wanted}
        for one in self._sums:
            for number, start, end, _ in one.segments:
                if number in scaled and one.part is not None:
                    one.part[start:end].mul_(factor.to(one.part.device, one.part.dtype))

    def _drop(self) -> None:
        self._touched = set()
        for one in self._sums:
            one.part = None

    def _begin_pass(self, pending: list[Callable[[], None]]) -> None:
        # What a pass that failed has left is dropped with it.
        self._pass, self._got, self._kept = pending, set(), {}
        pending.append(self._finish_pass)

    def _before_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Hook before a gradient is added to ``.grad``: put away what is there, so that it comes alone."""
        del gradient
        pending = self._ctx.collectives.call_log.after_backward
        if pending is None:  # torch.autograd.grad, which adds nothing
            return
        if pending is not self._pass:
            self._begin_pass(pending)
        item = self._items[index]
        if item.grad is not None and index not in self._got:
            self._kept[index], item.grad = item.grad, None

    def _after_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Hook after a gradient was added to ``.grad``."""
        del parameter
        if self._ctx.collectives.call_log.after_backward is None:
            raise ConfigurationError(
                'with reduction="canonical", call accelfn.backward(ctx, loss, scaler, micro) instead of '
                "loss.backward(): it divides the loss by the number of microbatches, and sums their gradients when "
                "the backward pass is over."
            )
        self._got.add(index)

    def _finish_pass(self) -> None:
        """Add what a backward pass has given to the sums."""
        got, kept = self._got, self._kept
        self._pass, self._got, self._kept = None, set(), {}
        for index in [index for index in kept if index not in got]:  # asked for by torch.autograd.grad
            self._items[index].grad = kept.pop(index)
        if not got:
            return
        flats, error = catch(lambda: self._checked(got))
        if self._seen is not None:
            self._seen |= got
        with torch.no_grad():
            if self._ctx.num_processes == 1:
                self._add_alone(kept, error)
            else:
                self._add_together(got, kept, flats or [], error)

    def _checked(self, got: set[int]) -> list[torch.Tensor]:
        """Give the gradients as one buffer for each of the sums, or say why that can't be."""
        again = sorted(got & (self._seen or set()))
        if again:
            raise ConfigurationError(
                f"the parameter {list(self._parameters)[again[0]]} got a second gradient from one batch. "
                'With reduction="canonical" the order of sums would depend on the number of ranks: add the '
                "losses of a batch up, and call backward once."
            )
        for index in sorted(got):
            item, grad = self._items[index], self._items[index].grad
            assert grad is not None  # it was just given
            if grad.layout != torch.strided or grad.dtype != item.dtype:
                raise ConfigurationError(
                    f"the gradient of {list(self._parameters)[index]} is of layout {grad.layout} and "
                    f'{grad.dtype}. With reduction="canonical" it must be dense and of the dtype of its '
                    f"parameter ({item.dtype}): use no sparse embeddings."
                )
        if self._ctx.num_processes == 1:
            return []
        return [self._flat(one, got) for one in self._sums]

    def _flat(self, one: OrderedSum, got: set[int]) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for index, number in zip(one.group.leaves, one.group.sizes, strict=True):
            grad = self._items[index].grad if index in got else None
            # What is missing is never looked at: the others are told so.
            empty = self._items[index].new_zeros(number) if grad is None else None
            parts.append(flatten_tensor(grad) if empty is None else empty)  # pyright: ignore[reportArgumentType]
        if one.padding:
            parts.append(parts[0].new_zeros(one.padding))
        return torch.cat(parts)

    def _add_alone(self, kept: dict[int, torch.Tensor], error: Exception | None) -> None:
        if kept and error is None:
            gradients = [cast("torch.Tensor", self._items[index].grad) for index in kept]
            torch._foreach_add_(list(kept.values()), gradients)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        for index, old in kept.items():
            self._items[index].grad = old
        if error is not None:
            raise error

    def _add_together(
        self,
        got: set[int],
        kept: dict[int, torch.Tensor],
        flats: list[torch.Tensor],
        error: Exception | None,
    ) -> None:
        ctx = self._ctx
        for index in got:
            self._items[index].grad = None
        bits = sum(1 << index for index in got).to_bytes(-(-len(self._items) // 8), "little")
        window = f"closes={self.sync} open={bool(self._touched)}"
        call = Call("backward", f"{self._digest} {window}", lambda: {"window": window, **self._forms})
        try:
            blobs = gather_bytes(ctx, call, bits, error)
        except Exception:
            for index, old in kept.items():
                self._items[index].grad = old
            raise
        present = [_indices(blob) for blob in blobs]
        union = frozenset[int]().union(*present)

        def before(index: int) -> torch.Tensor | None:
            return kept.get(index, self._items[index].grad)

        for one, flat in zip(self._sums, flats, strict=True):
            rows = swap_parts(ctx, flat.view(ctx.num_processes, -1))
            one.add(rows.unbind(), present, self._touched, before)
        self._touched |= union
        if self.sync:
            self._close()
        else:
            for index in union:
                self._items[index].grad = None

    def _close(self) -> None:
        """Bring the sums of all ranks together in ``.grad``."""
        touched = self._touched
        for one in self._sums:
            part = cast("torch.Tensor", one.part)
            joined = self._ctx.collectives.all_gather(part.view(torch.uint8)).view(part.dtype)
            if one.padding:
                joined = joined[: -one.padding]
            for index, own in zip(one.group.leaves, torch.split(joined, list(one.group.sizes)), strict=True):
                if index in touched:
                    # A tensor of its own, laid out as torch would: what is computed from a gradient, such as
                    # its norm, may depend on where it lies.
                    item = self._items[index]
                    item.grad = torch.empty_like(item).copy_(own.view(item.shape))
        self._drop()


def scale_open_sums(parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the gradients that ``parameters`` have in windows that are open, and so not in ``.grad`` yet.

    Ranks: all in the same way; doesn't communicate.
    """
    replicas = {id(one): one for one in (vars(parameter).get(REPLICA) for parameter in parameters)}
    for replica in replicas.values():
        if isinstance(replica, ExactReplica):
            replica.scale_sums(parameters, factor)


def swap_parts(ctx: Context, parts: torch.Tensor) -> torch.Tensor:
    """Give every rank its part of the rows of all ranks.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        parts: Shape ``(ranks, n)``, contiguous: what is meant for each rank.

    Returns:
        Shape ``(ranks, n)``: what each rank meant for this one.
    """
    moved = ctx.collectives.all_to_all(parts.reshape(-1).view(torch.uint8))
    return moved.view(parts.dtype).view(ctx.num_processes, -1)


@contextmanager
def exact_backward(ctx: Context) -> Generator[None, None, None]:
    """Let models in exact mode sum the gradients of the backward pass inside when it is over.

    Ranks: every rank of ``ctx``, where the gradients of a prepared model are computed inside.

    Raises:
        ConfigurationError: A parameter got a second gradient from one batch, or one that can't be summed.
    """
    call_log = ctx.collectives.call_log
    after: list[Callable[[], None]] = []
    before, call_log.after_backward = call_log.after_backward, after
    try:
        yield
    finally:
        call_log.after_backward = before
    for finish in after:
        finish()


@contextmanager
def exact_batch(
    models: Sequence[nn.Module], batch: object, place: int, window: int
) -> Generator[None, None, None]:
    """Say which batch the gradients of ``models`` inside are of.

    Ranks: local.

    Args:
        models: Prepared in exact mode, or not prepared at all.
        batch: Tells the batch from others, by identity.
        place: Of the batch in its window; at 0 a window begins anew.
        window: Batches in it.

    Raises:
        ConfigurationError: A model was prepared without exact mode.
    """
    with ExitStack() as stack:
        for model in models:
            replica = vars(model).get(REPLICA)
            if isinstance(replica, ExactReplica):
                stack.callback(replica.end_batch, replica.begin_batch(batch, place, window))
            elif replica is not None or isinstance(model, DistributedDataParallel):
                raise ConfigurationError(
                    'accumulate: this context has reduction="canonical", and the model was prepared by one '
                    "without it. Prepare it with this context."
                )
        yield


def _indices(blob: bytes) -> frozenset[int]:
    return frozenset(
        8 * place + bit for place, byte in enumerate(blob) if byte for bit in range(8) if byte >> bit & 1
    )


def _refuse_statistics(model: nn.Module) -> None:
    """Refuse modules whose running statistics would depend on which rank has seen which samples."""
    modules: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    for name, module in modules.items():
        if not isinstance(module, _NormBase) or not module.track_running_stats:
            continue
        if module.training:
            raise _statistics_error(name, module)
        # It may be that it is frozen. Should it be trained after all, this is found out then.
        module.register_forward_pre_hook(partial(_refuse_training, name))


def _refuse_training(name: str, module: nn.Module, arguments: Any) -> None:
    del arguments
    if module.training:
        raise _statistics_error(name, module)


def _statistics_error(name: str, module: nn.Module) -> ConfigurationError:
    return ConfigurationError(
        f'with reduction="canonical", {name or "the model"} ({type(module).__name__}) can\'t be trained: it '
        "keeps running statistics of the samples that its own rank sees, which depend on the number of "
        "ranks. Use GroupNorm or LayerNorm, build it with track_running_stats=False, or freeze it: call its "
        "eval() before prepare, and after each model.train()."
    )
