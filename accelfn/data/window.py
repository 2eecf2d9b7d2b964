"""Windows: the batches of one optimizer step each, over several epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from typing_extensions import NamedTuple

from accelfn.context import Context, takes_context
from accelfn.data.loader import PreparedDataLoader, passes_of, prepare_data_loader
from accelfn.data.microbatch import MicroBatch, Uneven, microbatches
from accelfn.data.reader import length_of
from accelfn.errors import ConfigurationError

__all__ = ("Window", "num_steps", "windows")

T = TypeVar("T")


class Window(NamedTuple, Generic[T]):
    """The batches of one optimizer step on this rank.

    Attributes:
        batches: As the loader yields them; ``gradient_accumulation_steps`` of them, fewer at the end of the
            data.
        micros: The position of each.
    """

    batches: tuple[T, ...]
    micros: tuple[MicroBatch, ...]

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the window ends, from 0."""
        return self.micros[-1].epoch

    @property
    def is_last(self) -> bool | None:
        """Whether no batch follows in this epoch; None if that is unknown, because the data has no length."""
        return self.micros[-1].is_last


@takes_context
def windows(
    ctx: Context, loader: Iterable[T], *, epochs: int | None = 1, uneven: Uneven = "error"
) -> Iterator[Window[T]]:
    """Yield the batches of one optimizer step after the other, until ``epochs`` epochs are read.

    For the step of :func:`accelfn.make_train_step`::

        for window in af.windows(ctx, loader, epochs=8):
            state, metrics = step(state, window)

    A prepared loader whose position was restored goes on there: epochs count from the start of the training,
    so a program that ran to its end reads nothing when it is started again. Epochs of other data count from
    this call.

    Ranks: every rank of ``ctx``, as for :func:`accelfn.microbatches`.

    Args:
        ctx: Its accumulation configures the windows.
        loader: From :func:`accelfn.prepare_data_loader`, or any iterable of trees that can be read ``epochs``
            times.
        epochs: Number of epochs in all; None for no end.
        uneven: As for :func:`accelfn.microbatches`.

    Raises:
        TypeError: ``epochs`` is no int; or the data is an iterator, and it isn't 1.
        ValueError: ``epochs`` is negative.
        UnevenDataError: As :func:`accelfn.microbatches`, which raises more.

    >>> ctx = Context().replace(gradient_accumulation_steps=2)
    >>> [(window.batches, window.epoch, window.is_last) for window in windows(ctx, [1, 2, 3], epochs=2)]
    [((1, 2), 0, False), ((3,), 0, True), ((1, 2), 1, False), ((3,), 1, True)]
    """
    if epochs is not None and not isinstance(epochs, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"windows: epochs must be an int, or None for no end, got {epochs!r}.")
    if epochs is not None and epochs < 0:
        raise ValueError(f"windows: epochs must not be negative, got {epochs}.")
    if isinstance(loader, Iterator) and epochs != 1:
        raise TypeError(
            f"windows: a {type(loader).__name__} can be read once, but epochs={epochs}. Pass what makes it, "
            "such as a list or a loader."
        )
    return _windows(ctx, loader, epochs, uneven)


def _windows(ctx: Context, loader: Iterable[T], epochs: int | None, uneven: Uneven) -> Iterator[Window[T]]:
    passes = passes_of(loader) if isinstance(loader, PreparedDataLoader) else None
    epoch = 0 if passes is None else passes.next_epoch
    batches: list[T] = []
    micros: list[MicroBatch] = []
    while epochs is None or epoch < epochs:
        for batch, micro in microbatches(ctx, loader, uneven):
            batches.append(batch)
            micros.append(micro if passes is not None else micro._replace(epoch=epoch))
            if micro.sync:
                yield Window(tuple(batches), tuple(micros))
                batches, micros = [], []
        epoch = epoch + 1 if passes is None else passes.next_epoch


@takes_context
def num_steps(ctx: Context, loader: Iterable[Any], epochs: int) -> int:
    """Return the number of optimizer steps in ``epochs`` epochs, such as for a schedule of learning rates.

    Ranks: every rank of ``ctx`` for a loader that isn't prepared yet; otherwise local.

    Args:
        ctx: The world, and the size of a window.
        loader: As for :func:`windows`; a torch ``DataLoader`` counts as after ``prepare``.
        epochs: Number of epochs.

    Raises:
        ConfigurationError: The data has no length.

    >>> num_steps(Context().replace(gradient_accumulation_steps=2), [1, 2, 3], epochs=2)
    4
    """
    if hasattr(loader, "batch_sampler") and not isinstance(loader, PreparedDataLoader):
        loader = prepare_data_loader(ctx, loader)
    count = passes_of(loader).count() if isinstance(loader, PreparedDataLoader) else length_of(loader)
    if count is None:
        raise ConfigurationError(
            "num_steps: the data has no length, so its number of steps isn't known before it is read. Give "
            "the schedule a number of steps of your own."
        )
    window = ctx.accumulation.num_steps
    if ctx.accumulation.sync_with_dataloader:
        return epochs * -(-count // window)
    return epochs * count // window
