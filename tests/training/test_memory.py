# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import contextlib
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import Context, find_executable_batch_size
from accelfn.errors import MismatchError
from accelfn.testing import run_ranks


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Let what other modules have made be passed over: each try that fails collects garbage."""
    gc.freeze()


def needing(limit: int, tried: list[int]) -> Callable[..., int]:
    """Make a function that fits into memory up to a batch size."""

    def train(batch_size: int, *others: Any) -> int:
        del others
        tried.append(batch_size)
        if batch_size > limit:
            raise MemoryError
        return batch_size

    return train


@settings(max_examples=20)
@given(st.integers(1, 99), st.integers(1, 99))
def test_the_size_is_nine_tenths_of_the_one_before_until_it_fits(start: int, limit: int) -> None:
    tried: list[int] = []
    search = find_executable_batch_size(needing(limit, tried), start)
    found = search()
    assert tried[0] == start
    assert tried[-1] == found
    assert found == start or found <= limit
    assert tried[1:] == [int(size * 0.9) for size in tried[:-1]]
    assert all(size > limit for size in tried[:-1])
    assert search() == found  # nothing is remembered: the next call begins anew
    assert tried[len(tried) // 2] == start


def halve(size: int) -> int:
    return size // 2


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        (halve, [40, 20, 10]),
        (iter((20, 7)).__next__, [40, 20, 7]),  # may take nothing, as in Accelerate
    ],
    ids=["named", "nothing"],
)
def test_a_reducer_may_take_the_size_or_nothing(reducer: Callable[..., int], expected: list[int]) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=40, reduce_batch_size_fn=reducer)
    def decorated(batch_size: int) -> int:
        return needing(10, tried)(batch_size)

    assert decorated() == expected[-1]
    assert tried == expected


def test_a_decorator_without_arguments_and_methods_and_arguments() -> None:
    @find_executable_batch_size
    def train(batch_size: int, x: int, *, y: int = 0) -> tuple[int, int, int]:
        "Document."
        return batch_size, x, y

    assert train(1, y=2) == (128, 1, 2)
    assert train.__doc__ == "Document."
    assert str(inspect.signature(train)) == "(x: int, *, y: int = 0) -> tuple[int, int, int]"
    with pytest.raises(TypeError, match=r"train is called with the batch size .* with \(1, 2\).*Leave"):
        train(1, 2)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        train()


def broken(batch_size: int) -> None:
    raise RuntimeError(f"another {batch_size}")


def test_errors() -> None:
    with pytest.raises(RuntimeError, match="no batch size from 3 down fits into memory, so train can't run"):
        find_executable_batch_size(needing(0, []), 3)()
    with pytest.raises(ValueError, match="returned 9 after 9 did not fit"):
        find_executable_batch_size(needing(0, []), 9, lambda size: size)()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        find_executable_batch_size(needing(0, []), 0)
    with pytest.raises(RuntimeError, match="another 128"):
        find_executable_batch_size(broken)()


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("in whatever words"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (None, True),  # a real one
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_short_of_memory(error: Exception | None, counts: bool) -> None:
    def train(batch_size: int) -> int:
        if batch_size == 1:
            return 1
        if error is not None:
            raise error
        return len(torch.empty(batch_size, 1 << 50, dtype=torch.uint8))

    search = find_executable_batch_size(train, 2)
    if counts:
        assert search() == 1
    else:
        with pytest.raises(type(cast("Exception", error)), match=str(error)):
            search()


def test_what_a_failed_try_held_is_freed_before_the_next() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def train(batch_size: int) -> int:
        assert all(one() is None for one in held)
        tensor = torch.ones(batch_size)
        held.append(weakref.ref(tensor))
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return len(held)

    assert find_executable_batch_size(train, 8, lambda size: size // 2)() == 3


@settings(max_examples=20)
@given(st.integers(2, 4), st.data())
def test_one_rank_that_is_short_of_memory_lowers_the_size_of_all(world: int, data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.integers(1, 10), min_size=world, max_size=world))
    within = data.draw(st.sampled_from(["none", "before", "after", "many"]))

    def run(ctx: Context) -> tuple[int, list[int]]:
        tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=halve, ctx=ctx)
        def train(batch_size: int) -> int:
            if within in ("before", "many"):
                af.reduce(ctx, torch.tensor(batch_size))
            needing(limits[ctx.rank], tried)(batch_size)
            if within in ("after", "many"):
                for _ in range(1 if within == "after" else 3):
                    af.gather(ctx, torch.tensor([batch_size]))
            return batch_size

        found = train()
        assert af.gather(ctx, torch.tensor([found])).tolist() == [found] * world  # all are in step
        return found, tried

    fits = next(size for size in (8, 4, 2, 1) if size <= min(limits))
    for found, tried in run_ranks(run, world):
        assert found == fits
        assert tried == [size for size in (8, 4, 2, 1) if size >= fits]


def test_with_ddp_a_first_step_without_averaging_finds_the_size_and_one_with_it_is_an_error_of_all() -> None:
    def run(ctx: Context) -> tuple[int, str]:
        def train(batch_size: int, averaged: bool) -> int:
            model = af.prepare(ctx, nn.Linear(2, 2))
            with contextlib.nullcontext() if averaged else af.no_sync(ctx, model):
                y = model(torch.ones(batch_size, 2))
                needing(4 if ctx.rank else 99, [])(batch_size)
                y.sum().backward()
            return batch_size

        search = find_executable_batch_size(train, 16, halve, ctx=ctx)
        found = search(averaged=False)
        with pytest.raises(MismatchError, match="find_executable_batch_size") as caught:
            search(averaged=True)
        return found, str(caught.value)

    first, second = run_ranks(run, 2, "processes")
    assert first == second
    assert first[0] == 4


def test_release_memory_gives_one_none_for_each_object() -> None:
    model = nn.Linear(1, 1)
    cycle = [model]
    cast("Any", cycle).append(cycle)
    held = weakref.ref(model)
    gc.disable()
    try:
        released: list[None] = af.training.release_memory(model, cycle)
        del model, cycle
        assert af.training.release_memory() == []
    finally:
        gc.enable()
    assert released == [None, None]
    assert held() is None
    af.training.clear_device_cache()
    af.training.clear_device_cache(garbage_collection=True)
