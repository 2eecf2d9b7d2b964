"""Exact mode: gradients are summed over microbatches in one fixed order, at any number of ranks.

A microbatch is one batch of one rank. In the window of a loop, the batch at place ``p`` of rank ``r`` is
microbatch ``p * ranks + r``: a step of the loaders covers consecutive samples in rank order, so that the same
microbatch has the same samples at any number of ranks. One rank adds the gradients of its batches one after
the other. Several ranks add the same tensors in the same order, after every backward pass, and get the same
bits. In a train step, which splits its batch, the batch at place ``p`` of rank ``r`` is microbatch
``r * window + p``, so all are added where the window closes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelfn.comm import Call, catch, check, gather_bytes
from accelfn.context import BackwardPass, Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.buffers import BufferWatch
from accelfn.parallel.gradient_hooks import refuse_hook_of_replica
from accelfn.parallel.handle import HANDLE
from accelfn.parallel.strategies.thread_ddp import ThreadDDP
from accelfn.parallel.waiting_gradients import WaitingGradients
from accelfn.tree import Buffer, flatten, flatten_tensor, plan_layout

_Microbatch = Sequence[torch.Tensor | None]


_NOT_CLOSED = (
    "the latest backward pass added to them under no_sync, and in exact mode only one outside of it sums "
    "them. End the window with a backward pass outside of no_sync; each rank for itself can't step in exact "
    "mode"
)


class OrderedSum:
    """Sums tensors over microbatches, in one order; in between, each rank holds a part of the sums.

    All tensors of one dtype and device share a flat buffer, which is split into one part per rank. Each
    microbatch is sent in parts to the ranks that sum them, and the sums are gathered by :meth:`close`. A
    tensor that a microbatch lacks counts as minus zero, which changes no sum.

    Attributes:
        summed: Indices of the tensors that have a sum since the last :meth:`close`.
    """

    def __init__(self, ctx: Context, tensors: Sequence[torch.Tensor]) -> None:
        """Start without sums, for tensors like ``tensors``, which are of the same kinds on all ranks."""
        self._ctx = ctx
        self._tensors = list(tensors)
        self._groups = plan_layout(self._tensors, flatten(self._tensors)[1]).groups
        self.drop()

    def add(
        self,
        call: Call,
        microbatches: Sequence[_Microbatch],
        before: Callable[[int], torch.Tensor | None] = lambda index: None,
        error: Exception | None = None,
    ) -> frozenset[int]:
        """Add this rank's microbatches: those of rank 0 in their order, then those of rank 1, and so on.

        Ranks: every rank of the context, with equally many microbatches.

        Args:
            call: Compared between the ranks.
            microbatches: This rank's; unchanged.
            before: Returns the initial sum of a tensor, or None; the same on all ranks.
            error: The exception that left this rank without microbatches.

        Returns:
            Indices of the tensors that some rank's microbatch has.

        Raises:
            Exception: ``error`` itself, and RemoteRankError on the other ranks; nothing has changed then.
            MismatchError: ``call`` differs between ranks.
        """
        size, number = self._ctx.num_processes, len(self._tensors)
        flats: list[torch.Tensor] | None = None
        if error is None:
            flats, error = catch(lambda: [self._pack(group, microbatches) for group in self._groups])
        present = bytes([any(row[index] is not None for row in microbatches) for index in range(number)])
        if size > 1:
            masks = gather_bytes(self._ctx, call, present, error)
        elif error is not None:
            raise error
        else:
            masks = [present]
        found = frozenset(index for index in range(number) if any(mask[index] for mask in masks))
        first = [before(index) if index in found - self.summed else None for index in range(number)]
        for place, (group, flat) in enumerate(zip(self._groups, flats or (), strict=True)):
            rows = flat
            if size > 1:  # each rank gets its part of everybody's microbatches
                sent = flat.view(size, len(microbatches), -1).reshape(-1).view(torch.uint8)
                rows = self._ctx.collectives.all_to_all(sent).view(flat.dtype)
            rest = list(rows.view(size * len(microbatches), -1).unbind())
            if any(first[index] is not None for index in group.leaves):
                rest.insert(0, self._pack(group, [first])[self._ctx.rank, 0])
            total = self._parts[place]
            if total is None:
                total = self._parts[place] = rest.pop(0).clone()
            for row in rest:  # not torch.sum over the rows, whose order is unspecified
                total.add_(row)
        self.summed |= found
        return found

    def _pack(self, group: Buffer, microbatches: Sequence[_Microbatch]) -> torch.Tensor:
        """Return the microbatches' tensors of a group, of shape ``(ranks, microbatches, length)``."""
        size, total = self._ctx.num_processes, sum(group.sizes)
        nothing = self._tensors[group.leaves[0]].detach().new_zeros(max(size, *group.sizes)).neg_()
        flats: list[torch.Tensor] = []
        for microbatch in microbatches:
            tensors = [microbatch[index] for index in group.leaves]
            parts = [
                nothing[:number] if tensor is None else flatten_tensor(tensor)
                for tensor, number in zip(tensors, group.sizes, strict=True)
            ]
            flats.append(torch.cat([*parts, nothing[: -total % size]]).view(size, -1))
        return torch.stack(flats, 1)

    def close(self) -> list[torch.Tensor | None]:
        """Gather the sums, and start again.

        Ranks: every rank of the context.

        Returns:
            The sum of each tensor, with the tensor's memory layout; None where nothing was added.
        """
        result: list[torch.Tensor | None] = [None] * len(self._tensors)
        for group, part in zip(self._groups, self._parts, strict=True) if self.summed else ():
            joined = cast("torch.Tensor", part)
            if self._ctx.num_processes > 1:
                joined = self._ctx.collectives.all_gather(joined.view(torch.uint8)).view(joined.dtype)
            flats = torch.split(joined[: sum(group.sizes)], list(group.sizes))
            for index, flat in zip(group.leaves, flats, strict=True):
                if index in self.summed:
                    # A tensor of its own with torch's layout: results such as its norm may depend on where
                    # it is in memory.
                    like = self._tensors[index]
                    result[index] = torch.empty_like(like, requires_grad=False).copy_(flat.view(like.shape))
        self.drop()
        return result

    def drop(self) -> None:
        """Drop the sums."""
        self.summed: frozenset[int] = frozenset()
        self._parts: list[torch.Tensor | None] = [None] * len(self._groups)

    def forget(self, indices: Iterable[int]) -> None:
        """Drop the sums of some of the tensors."""
        gone = frozenset(indices)
        self.summed -= gone
        marks = [torch.tensor(float(index in gone)) for index in range(len(self._tensors))]
        for part, marked in self._beside(marks):
            part.masked_fill_(marked != 0, -0.0)

    def scale(self, tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply the sums of some of the tensors."""
        wanted = {id(tensor) for tensor in tensors}
        one = torch.ones(())
        factors = [factor if id(tensor) in wanted else one for tensor in self._tensors]
        for part, own in self._beside(factors):
            part.mul_(own)

    def _beside(self, values: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parts of the sums with a value for each tensor, repeated for its elements."""
        spread = [value.to(one).expand(one.shape) for value, one in zip(values, self._tensors, strict=True)]
        return [
            (part, self._pack(group, [spread])[self._ctx.rank, 0])
            for group, part in zip(self._groups, self._parts, strict=True)
            if part is not None
        ]


class ExactReplica(ThreadDDP):
    """Sums the gradients of one model over all microbatches of a window, in one order on any number of ranks.

    Works however a gradient arises, as :class:`ThreadDDP` does. While a window is open on several ranks, the
    sums are here, and ``.grad`` of these parameters are zeros: clearing them drops the sums.
    """

    holds_gradients: ClassVar[bool] = True

    def __init__(self, ctx: Context, model: nn.Module) -> None:
        """Broadcast the model from rank 0, and hook its parameters."""
        for name, parameter in model.named_parameters():
            if isinstance(vars(parameter).get(HANDLE), ExactReplica):
                raise ConfigurationError(
                    f"the parameter {name} is already in another prepared model, so its gradients would be "
                    'summed twice. With reduction="canonical", prepare one model that holds all parameters.'
                )
        super().__init__(ctx, model)
        if any(True for _ in model.buffers()):
            model.register_forward_pre_hook(self._before_forward)
            model.register_forward_hook(self._after_forward)

    def _watch(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._items = list(parameters.values())
        self._sum = OrderedSum(self._ctx, self._items)  # of the open window
        self._waiting = WaitingGradients[int]()  # parameters that have a sum
        self._pass: BackwardPass | None = None
        self._got: set[int] = set()  # parameters with a gradient from that pass
        self._kept: dict[int, torch.Tensor] = {}  # their .grad before that pass
        self._batch: object = None  # the current batch
        self._seen: set[int] | None = None  # parameters with a gradient from it; None outside `accumulate`
        self._held: list[list[torch.Tensor | None]] | None = None  # the batches of a train step so far
        self._forms = {
            name: f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
            for name, item in self._parameters.items()
        }
        self._digest = hashlib.blake2b(repr(self._forms).encode(), digest_size=8).hexdigest()
        self._buffers: BufferWatch | None = None  # from the first forward pass on
        for index, item in enumerate(self._items):
            setattr(item, HANDLE, self)
            cast("Any", item).register_hook(partial(self._before_gradient, index))
            cast("Any", item).register_post_accumulate_grad_hook(partial(self._after_gradient, index))

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        """Hook before a forward pass."""
        del args
        if self._buffers is None:
            self._buffers = BufferWatch(model)
        else:
            self._buffers.look()

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook after a forward pass: refuse what would depend on how samples are distributed over ranks."""
        del args, output
        changed = self._buffers.changed() if self._buffers is not None and model.training else []
        if changed:
            raise ConfigurationError(
                f'with reduction="canonical", {changed[0]} can\'t be changed by a forward pass in '
                "training: it would be that of its own rank's samples, which depend on the number of ranks. "
                "Use GroupNorm or LayerNorm instead of batch normalisation, build it with "
                "track_running_stats=False, or freeze the module: call its eval() after each model.train()."
            )

    @contextmanager
    def batch(self, batch: object, place: int, window: int, is_held: bool) -> Generator[None, None, None]:
        """Count the gradients inside as those of one batch; see :func:`exact_batch`."""
        seen = self._seen
        if batch is not self._batch or window == 1:
            self._batch, self._seen = batch, set()
            if place == 0:
                self._held = [] if is_held and self._ctx.num_processes > 1 else None
        elif self._seen is None:
            self._seen = set()
        if self._held is not None:
            self._held.append([None] * len(self._items))
        try:
            yield
            if self._held is not None and place == window - 1:
                held, self._held = self._held, None
                self._add("make_train_step", held)
                self._close()
        except BaseException:
            self._held = None  # drop the gradients of the failed window
            raise
        finally:
            self._seen = seen

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are only this rank's own; None where they are summed, or none."""
        if self._waiting:
            self._release()
            self._hold()
        if self._sum.summed:
            return _NOT_CLOSED
        return super().why_unreduced() if any(item.grad is not None for item in self._items) else None

    def discard(self) -> None:
        """Drop the sums of an open window."""
        self._waiting.release()
        self._sum.drop()

    def scale_held(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply the open window's sums of ``parameters``."""
        self._release()
        self._sum.scale(parameters, factor)

    def _hold(self) -> None:
        """Let whoever clears the gradients of parameters drop their sums."""
        for index in sorted(self._sum.summed):
            self._waiting.hold(index, self._items[index])

    def _release(self) -> None:
        """Undo :meth:`_hold`, and drop the sums of what was cleared."""
        if cleared := self._waiting.release():
            self._sum.forget(cleared)

    def _before_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Hook before a gradient is added to ``.grad``: set the current value aside."""
        del gradient
        running = self._ctx.collectives.call_log.backward
        if running is None or not running.is_exact:  # torch.autograd.grad, which doesn't accumulate
            return
        if running is not self._pass:  # also drops what a failed pass left
            self._pass, self._got, self._kept = running, set(), {}
            running += self._finish_pass, self._hold
            self._release()
        item = self._items[index]
        if item.grad is not None and index not in self._got:
            self._kept[index], item.grad = item.grad, None

    def _after_gradient(self, index: int, parameter: Any) -> None:
        """Hook after a gradient was added to ``.grad``."""
        if len(parameter._post_accumulate_grad_hooks) > 1 and self._ctx.num_processes > 1:
            refuse_hook_of_replica("backward", parameter)
        running = self._ctx.collectives.call_log.backward
        if running is None or not running.is_exact:
            raise ConfigurationError(
                'with reduction="canonical", call accelfn.backward(ctx, loss, scaler, micro) instead of '
                "loss.backward(): it divides the loss by the number of microbatches, and sums their "
                "gradients at the end of the backward pass."
            )
        self._got.add(index)

    def _finish_pass(self) -> None:
        """Add the gradients of a backward pass to the sums."""
        got, kept = self._got, self._kept
        self._pass, self._got, self._kept = None, set(), {}
        new: dict[int, torch.Tensor] = {index: cast("Any", self._items[index].grad) for index in got}
        for index in (*got, *kept):  # torch.autograd.grad may have set aside some that got nothing
            self._items[index].grad = kept.get(index)
        if not got:
            return
        _, error = catch(lambda: self._check(new))
        if self._seen is not None:
            self._seen |= got
        if self._ctx.num_processes == 1:
            if error is not None:
                raise error
            both = [index for index in got if index in kept]
            if both:
                torch._foreach_add_([kept[index] for index in both], [new[index] for index in both])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            for index in got - kept.keys():
                self._items[index].grad = new[index]
            return
        gradients = [new.get(index) for index in range(len(self._items))]
        if self._held is not None:
            if error is not None:
                check(self._ctx, Call("backward"), error)  # other ranks raise where the window closes
            before = self._held[-1]
            self._held[-1] = [
                grad if old is None else old for old, grad in zip(before, gradients, strict=True)
            ]
            return
        for index in self._add("backward", [gradients], error):
            self._items[index].grad = None
        if self._syncs:
            self._close()

    def _check(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Refuse gradients that can't be summed."""
        for index, gradient in sorted(gradients.items()):
            name, item = [*self._parameters.items()][index]
            if index in (self._seen or ()):
                raise ConfigurationError(
                    f"the parameter {name} got a second gradient from one batch. With "
                    'reduction="canonical" the order of sums would depend on the number of ranks: add up the '
                    "losses of a batch, and call backward once."
                )
            if gradient.layout != torch.strided or gradient.dtype != item.dtype:
                raise ConfigurationError(
                    f"the gradient of {name} has layout {gradient.layout} and dtype {gradient.dtype}. With "
                    'reduction="canonical" it must be dense and of its parameter\'s dtype '
                    f"({item.dtype}): don't use sparse embeddings."
                )

    @torch.no_grad()
    def _add(
        self, operation: str, microbatches: Sequence[_Microbatch], error: Exception | None = None
    ) -> frozenset[int]:
        """Add gradients to the sums, which start from ``.grad``."""
        window = f"closes={self._syncs} sums={len(self._sum.summed)}"
        text = f"{self._digest} {window} {len(microbatches)}"
        call = Call(operation, text, lambda: {"window": window, **self._forms})
        return self._sum.add(call, microbatches, lambda index: self._items[index].grad, error)

    @torch.no_grad()
    def _close(self) -> None:
        """Gather the sums of all ranks into ``.grad``."""
        for item, total in zip(self._items, self._sum.close(), strict=True):
            if total is not None:
                item.grad = total
        self._unreduced = None


def exact_batch(
    model: nn.Module, batch: object, place: int, window: int, is_held: bool
) -> AbstractContextManager[None]:
    """Count the gradients of a model inside as those of one batch.

    Ranks: every rank of the model's context; with ``is_held``, the gradients are summed where a window ends.

    Args:
        model: Prepared in exact mode, or not prepared at all.
        batch: Identifies the batch.
        place: Place of the batch in its window; 0 starts a new window.
        window: Number of batches in the window.
        is_held: The batches of a rank are consecutive microbatches, whose gradients are held until the window
            closes. Otherwise each step is one microbatch of each rank, whose gradients are added at once.

    Raises:
        ConfigurationError: The model was prepared without exact mode.
    """
    replica = vars(model).get(HANDLE)
    if isinstance(replica, ExactReplica):
        return replica.batch(batch, place, window, is_held)
    if replica is not None or isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            'accumulate: this context has reduction="canonical", and the model was prepared by one '
            "without it. Prepare it with this context."
        )
    return nullcontext()
