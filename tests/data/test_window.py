"""Windows: the batches of each optimizer step, over epochs, and from where a run stopped."""

# torch leaves tolist and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accelfn as af
from accelfn.data import restore_loader
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks


def loader_of(length: int, **options: Any) -> Any:
    data: Any = torch.arange(length)
    return DataLoader(data, **options)


def context(steps: int, ctx: af.Context | None = None, **more: Any) -> af.Context:
    plugin = af.GradientAccumulationPlugin(num_steps=steps, **more)
    return (ctx or af.Context()).replace(gradient_accumulation_plugin=plugin)


def rows_of(windows: Iterator[af.Window[torch.Tensor]]) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in window.batches] for window in windows]


@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_windows_are_the_batches_of_each_step(
    length: int, batch_size: int, steps: int, epochs: int, ends: bool
) -> None:
    ctx = context(steps, sync_with_dataloader=ends)

    def loader() -> Any:
        return af.prepare(ctx, loader_of(length, batch_size=batch_size, shuffle=True))

    torch.manual_seed(0)
    found = list(af.windows(ctx, loader(), epochs=epochs))
    torch.manual_seed(0)
    other, expected, open_window = loader(), list[list[list[int]]](), list[list[int]]()
    for _ in range(epochs):
        for batch, micro in af.microbatches(ctx, other):
            open_window.append(batch.tolist())
            if micro.sync:
                expected.append(open_window)
                open_window = []
    assert rows_of(iter(found)) == expected
    assert len(found) == af.num_steps(ctx, loader(), epochs)
    if ends:
        assert [window.epoch for window in found if window.is_last] == list(range(epochs))


@given(st.integers(1, 24), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans(), st.data())
def test_a_run_goes_on_where_it_stopped_on_other_ranks(
    length: int, steps: int, size: int, ends: bool, data: st.DataObject
) -> None:
    def read(ctx: af.Context, state: Any = None, number: int | None = None) -> tuple[list[Any], Any]:
        ctx = context(steps, ctx, sync_with_dataloader=ends)
        batch_size = 4 // ctx.num_processes
        loader: Any = af.prepare(ctx, loader_of(length, batch_size=batch_size, shuffle=True))
        if state is not None:
            restore_loader(loader, state)
        found: list[Any] = []
        for window in af.windows(ctx, loader, epochs=3):
            found.append([batch.tolist() for batch in window.batches])
            if len(found) == number:
                break
        return found, af.loader_state(loader)

    torch.manual_seed(0)
    ((whole, _),) = run_ranks(read, 1)
    number = data.draw(st.integers(1, max(1, len(whole))))
    torch.manual_seed(0)
    ((first, state),) = run_ranks(lambda ctx: read(ctx, number=number), 1)
    rest = run_ranks(lambda ctx: read(ctx, state)[0], size)
    joined = [
        # The last batch of an epoch is filled up where several ranks share it.
        [[row for batch in parts for row in batch] for parts in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*rest, strict=True)
    ]
    expected = whole[len(first) :]
    assert first == whole[: len(first)]
    cut = [
        [batch[: len(one)] for batch, one in zip(*pair, strict=True)]
        for pair in zip(joined, expected, strict=True)
    ]
    assert cut == expected


def test_a_run_that_is_over_reads_nothing() -> None:
    ctx = af.Context()
    data: Any = loader_of(4, batch_size=2)
    loader: Any = af.prepare(ctx, data)
    states = [af.loader_state(loader) for _ in af.windows(ctx, loader, epochs=2)]
    for state in (states[-1], af.loader_state(loader)):  # in the last step, and after it
        again: Any = af.prepare(ctx, data)
        restore_loader(again, state)
        assert list(af.windows(ctx, again, epochs=2)) == []
        assert rows_of(af.windows(ctx, again, epochs=3)) == [[[0, 1]], [[2, 3]]]


def test_a_loop_that_was_left_counts_as_an_epoch() -> None:
    ctx = af.Context()
    loader: Any = af.prepare(ctx, loader_of(4, batch_size=2))
    for _ in af.windows(ctx, loader, epochs=2):
        break
    assert [window.epoch for window in af.windows(ctx, loader, epochs=2)] == [1, 1]


def test_other_data_is_read_in_epochs_of_its_own() -> None:
    ctx = context(2)
    data = [torch.tensor([1]), torch.tensor([2]), torch.tensor([3])]
    assert [(window.epoch, len(window.batches)) for window in af.windows(ctx, data, epochs=2)] == [
        *((0, 2), (0, 1)),
        *((1, 2), (1, 1)),
    ]
    endless = af.windows(ctx, data, epochs=None)
    assert [next(endless).epoch for _ in range(5)] == [0, 0, 1, 1, 2]


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="epochs must not be negative, got -1"):
        af.windows(af.Context(), [], epochs=-1)
    with pytest.raises(TypeError, match=r"epochs must be an int, or None for no end, got 1\.5"):
        af.windows(af.Context(), [], epochs=1.5)  # pyright: ignore[reportArgumentType]
    for epochs in (2, None):
        with pytest.raises(TypeError, match="a list_iterator can be read once, but epochs="):
            af.windows(af.Context(), iter([1]), epochs=epochs)
    assert len([*af.windows(af.Context(), iter([1]))]) == 1
    with pytest.raises(ConfigurationError, match="num_steps: the data has no length"):
        af.num_steps(af.Context(), iter([]), 2)


def test_steps_are_counted_as_ranks_share_the_data() -> None:
    def count(ctx: af.Context) -> tuple[int, int]:
        loader = loader_of(10, batch_size=2)
        ctx = context(2, ctx)
        return af.num_steps(ctx, loader, 3), af.num_steps(ctx, af.prepare(ctx, loader), 3)

    assert run_ranks(count, 2) == [(6, 6)] * 2  # three batches a rank, two windows an epoch
