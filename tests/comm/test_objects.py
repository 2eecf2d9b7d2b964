import dataclasses
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accelfn as af
from accelfn.comm import broadcast_object_list, gather_object, wait_for_everyone
from accelfn.config import DataLoaderConfiguration
from accelfn.context import Context
from accelfn.data import Order, next_plan
from accelfn.errors import MismatchError, RemoteRankError
from accelfn.testing import Where, run_ranks
from accelfn.tree import flatten
from tests.comm.seam import failure

KINDS: tuple[Where, ...] = ("memory", "processes")


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise TypeError("this object stays at home")


def tiny(ctx: Context) -> Context:
    return dataclasses.replace(ctx, collectives=dataclasses.replace(ctx.collectives, chunk=64))


def objects() -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.integers() | st.text() | st.binary(max_size=200),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=4,
    )


def every_operation(ctx: Context) -> list[Any]:
    """Communicate by all means, under another default device."""
    data, many = torch.full((2,), ctx.rank + 1.0), ["x" * 2_000_000 if ctx.is_main_process else "y"]
    rows: Any = torch.arange(6000)
    source: Any = DataLoader(rows, batch_size=1000, shuffle=True)
    dispatching = ctx.replace(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loaders: list[Any] = [af.prepare(each, source) for each in (ctx, dispatching)]
    plan: Any = next_plan(loaders[0])
    # torch's own loaders need the CPU for their random numbers.
    read: Any = af.microbatches
    batches = [next(read(ctx, loader)) for loader in loaders]
    with torch.device("meta"):
        tree: Any = {"a": data, "b": data.int()}
        found: list[Any] = [
            *(af.gather(ctx, tree), af.reduce(ctx, tree), af.broadcast(ctx, tree), af.scatter(ctx, tree)),
            af.pad_across_processes(ctx, data[: ctx.rank + 1]),
            *(af.gather_for_metrics(ctx, batch.sum(), micro) for batch, micro in batches),
            plan.block(0, 1, range(2)),
        ]
        assert {leaf.device.type for leaf in flatten(found)[0]} == {"cpu"}
        objects = [len(text) for text in gather_object(ctx, many)]
        objects += [len(text) for text in broadcast_object_list(ctx, list(many))]
        _, fired = af.comm.check_trigger(ctx, af.comm.set_trigger(af.comm.TriggerState()))
        af.comm.synchronize_rng_states(ctx, ["torch"])
        wait_for_everyone(ctx)
        order: Any = Order(kind="shuffled", num_samples=9, num_items=9).at(0, torch.arange(9, device="cpu"))
    return [found[0]["a"].tolist(), objects, fired, sorted(order.tolist())]


@pytest.mark.parametrize("where", KINDS)
def test_no_operation_minds_the_programs_default_device(where: Where) -> None:
    expected = [[1.0, 1.0, 2.0, 2.0], [2_000_000, 1, 2_000_000], True, list(range(9))]
    assert run_ranks(every_operation, 2, where) == [expected] * 2


@given(st.lists(st.lists(objects(), max_size=3) | objects(), min_size=1, max_size=5), st.booleans())
def test_lists_are_joined_in_rank_order_and_other_objects_count_as_one(said: list[Any], split: bool) -> None:
    if any(isinstance(item, list) for item in said):
        said = [item if isinstance(item, list) else [item] for item in said]
        expected = [part for item in said for part in item]
    else:
        expected = said
    results = run_ranks(lambda ctx: gather_object(tiny(ctx) if split else ctx, said[ctx.rank]), len(said))
    assert results == [expected] * len(said)
    if len(said) == 1 and isinstance(said[0], list):
        assert results[0] is said[0]


@given(st.lists(st.lists(objects(), max_size=3), min_size=1, max_size=5), st.booleans(), st.data())
def test_broadcast_sends_the_list_of_a_rank(said: list[list[Any]], split: bool, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, len(said) - 1))
    before = repr(said)

    def work(ctx: Context) -> Any:
        return broadcast_object_list(tiny(ctx) if split else ctx, said[ctx.rank], source)

    results = run_ranks(work, len(said))
    assert results == [said[source]] * len(said)
    assert results[source] is said[source]
    for rank, result in enumerate(results):
        if rank != source:
            result.append("written")
    assert repr(said) == before
    assert len({id(result) for result in results}) == len(results)


@pytest.mark.parametrize("on", KINDS)
def test_all_worlds_carry_objects(on: Where) -> None:
    def work(ctx: Context) -> Any:
        long = "x" * (1_000_000 * ctx.rank)
        return gather_object(ctx, {ctx.rank: long}), broadcast_object_list(ctx, [long], 1)

    expected = ([{0: ""}, {1: "x" * 1_000_000}], ["x" * 1_000_000])
    assert run_ranks(work, 2, on) == [expected] * 2


@pytest.mark.parametrize("on", KINDS)
def test_what_can_not_be_pickled_is_an_error_on_every_rank(on: Where) -> None:
    def work(ctx: Context) -> Any:
        mine: Any = Unpicklable() if ctx.rank == 1 else "fine"
        return (
            failure(lambda ctx: gather_object(ctx, mine))(ctx),
            failure(lambda ctx: broadcast_object_list(ctx, [mine], 1))(ctx),
        )

    here, there = run_ranks(work, 2, on, timeout_s=10)
    assert [(type(error), str(error)) for error in there] == [(TypeError, "this object stays at home")] * 2
    assert [(type(error), error.rank, error.cause) for error in here] == [
        (RemoteRankError, 1, "TypeError")
    ] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_bad_arguments_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"from_process must be a rank in 0..{size - 1}, got -1"):
        run_ranks(lambda ctx: broadcast_object_list(ctx, [1], -1), size)
    with pytest.raises(ValueError, match=f"from_process must be a rank in 0..{size - 1}, got 2"):
        run_ranks(lambda ctx: broadcast_object_list(ctx, [1], 2), size)
    text: Any = "text"
    with pytest.raises(TypeError, match="objs must be a list, got str"):
        run_ranks(lambda ctx: broadcast_object_list(ctx, text), size)


def test_another_sender_is_an_error() -> None:
    with pytest.raises(MismatchError, match="from 1"):
        run_ranks(lambda ctx: broadcast_object_list(ctx, [1], ctx.rank), 2)
