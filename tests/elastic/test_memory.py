"""What the memory of some ranks is worth: every snapshot that is whole can be restored, in any world."""

import copy
import dataclasses
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.distributed import DistStoreError
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.context import Context
from accelfn.elastic.assemble import restore_snapshot
from accelfn.elastic.memory import Key, Memory, Regroup, neighbour_shift
from accelfn.errors import CheckpointMismatchError, MismatchError, MissingRankError, RemoteRankError
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import OPTIMIZERS, Layout, differing, laid_out, mesh_of, step, whole
from tests.checkpoint.state.test_stages import Cut, go, new, tensors
from tests.exchanges import Exchanges


def make_state(ctx: Context) -> dict[str, Any]:
    """A prepared state, with what each rank has for itself."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.arange(48.0).view(16, 3)), batch_size=1, shuffle=True)
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    own = {"own": torch.full((3,), float(ctx.rank)), "name": f"rank {ctx.rank}"}
    return {"model": model, "optimizer": optimizer, "loader": loader, "steps": 0, **own}


@contextmanager
def remembering(ctx: Context, memory: Memory | None = None, generation: int = 0) -> Generator[Memory]:
    """Let a rank take snapshots, for a generation."""
    memory = memory or Memory()
    memory.enter(ctx, generation)
    try:
        yield memory
    finally:
        memory.leave()


def train(ctx: Context, memory: Memory, state: dict[str, Any], steps: int, every: int) -> None:
    model, loader = state["model"], state["loader"]
    while state["steps"] < steps:
        for (rows,), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                af.backward(ctx, model(rows).square().mean(), af.init_scaler(ctx), micro)
            af.optimizer_step(ctx, state["optimizer"], af.init_scaler(ctx))
            state["steps"] += 1
            state["own"] += 1
            memory.snapshot(ctx, state, every)
            if state["steps"] == steps:
                return


def values(state: dict[str, Any]) -> dict[str, Any]:
    moments = state["optimizer"].state_dict()["state"]
    objects = {"weights": af.unwrap_model(state["model"]).state_dict(), "moments": moments}
    position = af.loader_state(state["loader"])
    place = (position.epoch, position.consumed, state["steps"])
    return copy.deepcopy({**objects, "place": place, "own": state["own"]})


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def ran(world: int, steps: int, every: int) -> tuple[list[Memory], list[dict[str, Any]]]:
    """Train in a world, and return what its ranks remember, and what they had at the last snapshot."""

    def run(ctx: Context) -> tuple[Memory, dict[str, Any]]:
        with remembering(ctx) as memory:
            state = make_state(ctx)
            memory.take(ctx, state)
            train(ctx, memory, state, steps - steps % every, every)
            last = values(state)
            train(ctx, memory, state, steps, every)
        return memory, last

    pairs = run_ranks(run, world)
    return [memory for memory, _ in pairs], [last for _, last in pairs]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"losses": [torch.zeros(())]}, "losses"),
        ({"own": torch.ones(3).double()}, "own"),
        ({"own": torch.zeros(5)}, "own"),
    ],
)
def test_a_state_that_changes_its_form_is_an_error_at_once(change: dict[str, Any], path: str) -> None:
    def run(ctx: Context) -> None:
        state: dict[str, Any] = {"own": torch.zeros(3), "losses": [], "best": 1.0, "means": [0.5]}
        with remembering(ctx) as memory:
            memory.take(ctx, state)
            state.update(own=torch.ones(3), best=2.0, means=[0.5, 0.25])  # values may grow
            memory.snapshot(ctx, state, 1)
            state.update(change)
            with pytest.raises(CheckpointMismatchError, match=f"another form than at step 1[^|]*{path}"):
                memory.snapshot(ctx, state, 1)

    run_ranks(run, 2)


def test_a_rank_that_skips_a_call_is_named_by_the_next_operation() -> None:
    def run(ctx: Context) -> None:
        state = {"own": torch.zeros(3)}
        with remembering(ctx):
            for step in range(4):
                if (ctx.rank, step) != (1, 2):
                    af.snapshot(ctx, state, every=5)
                if step < 2:
                    af.wait_for_everyone(ctx)
            with pytest.raises(MismatchError, match="snapshot: the ranks disagree"):
                af.wait_for_everyone(ctx)

    run_ranks(run, 2)


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (2.5, TypeError), ("3", TypeError)])
def test_a_wrong_interval_is_refused_in_any_world(every: Any, error: type[Exception]) -> None:
    with af.init_context(cpu=True) as ctx, pytest.raises(error, match="every must be"):
        af.snapshot(ctx, {}, every=every)


@settings(max_examples=12)
@given(st.integers(1, 3), st.integers(0, 9), st.integers(1, 4), st.data(), st.integers(0, 2))
def test_whoever_is_left_restores_the_newest_snapshot_in_any_world(
    world: int, steps: int, every: int, data: st.DataObject, num_new: int
) -> None:
    memories, last = ran(world, steps, every)
    left = data.draw(st.sets(st.integers(0, world - 1), min_size=1).map(sorted))
    holders = [*(memories[rank] for rank in left), *(Memory() for _ in range(num_new))]

    def restore(ctx: Context) -> tuple[dict[str, Any], str, int]:
        with remembering(ctx, holders[ctx.rank], 1) as memory:
            state = restore_snapshot(ctx, memory, make_state(ctx))
            assert state is not None
            memory.take(ctx, state)
        return values(state), state["name"], memory.step

    shared = ("weights", "moments", "place")
    for restored, _, reached in run_ranks(restore, len(holders)):
        assert reached == steps - steps % every
        assert_equal({name: restored[name] for name in shared}, {name: last[0][name] for name in shared})
    # What was there before the loss is there after it: a snapshot was taken from what was restored.
    again = run_ranks(restore, len(holders))
    if len(holders) == world and not num_new:
        assert [name for _, name, _ in again] == [f"rank {rank}" for rank in range(world)]
        assert_equal([found["own"] for found, _, _ in again], [one["own"] for one in last])


def test_the_neighbour_keeps_what_only_the_lost_rank_had() -> None:
    memories, last = ran(3, 4, 2)

    def restore(ctx: Context) -> tuple[str, torch.Tensor]:
        state = restore_snapshot(ctx, [memories[0], memories[2], Memory()][ctx.rank], make_state(ctx))
        assert state is not None
        return state["name"], state["own"]

    found = run_ranks(restore, 3)
    assert [name for name, _ in found] == ["rank 0", "rank 1", "rank 2"]
    assert_equal([own for _, own in found], [one["own"] for one in last])


CUT = Cut(3, is_tied=True, num_ranks=2, per_rank=1, copies=2)


# A neighbour is the next rank, and the first one that of the last.
@pytest.mark.parametrize(("lost", "is_whole"), [({1}, True), ({0, 2}, True), ({0, 3}, False)])
def test_stages_of_lost_ranks_come_from_their_neighbours(lost: set[int], is_whole: bool) -> None:
    def run(ctx: Context) -> None:
        with remembering(ctx) as memory:
            state, other = new(ctx, CUT, 0), new(ctx, CUT, 1)
            go(state)
            expected = tensors(ctx, state)
            memory.take(ctx, state)
            memory.settle()
            held = Memory() if ctx.rank in lost else memory
            found = restore_snapshot(ctx, held, other)
            assert (found is not None) == is_whole
            assert found is None or not differing(tensors(ctx, found), expected)

    run_ranks(run, 4, parallelism_config=CUT.config)


@pytest.mark.parametrize(
    ("layout", "lost"),
    [
        (Layout("fsdp", (4,)), {1}),
        (Layout("fsdp", (4,)), {0, 2}),
        (Layout("hsdp", (2, 2)), {1}),
        (Layout("fsdp and tp", (2, 2)), {3}),
    ],
)
def test_shards_of_lost_ranks_come_from_who_has_them(layout: Layout, lost: set[int]) -> None:
    def run(ctx: Context) -> None:
        state, other = ({"model": laid_out(ctx, layout, seed)} for seed in (0, 1))
        optimizers = [OPTIMIZERS["adamw"](one["model"].parameters()) for one in (state, other)]
        step(state["model"], optimizers[0])
        expected = whole(state["model"], optimizers[0])
        with remembering(ctx) as memory:
            memory.take(ctx, {**state, "optimizer": optimizers[0], "rank": ctx.rank})
            memory.settle()
            held = Memory() if ctx.rank in lost else memory
            found = restore_snapshot(ctx, held, {**other, "optimizer": optimizers[1], "rank": -1})
            assert found is not None
            assert found["rank"] == ctx.rank
            assert not differing(whole(other["model"], optimizers[1]), expected)

    run_ranks(run, layout.size, "processes")


def test_generators_go_on_where_they_were() -> None:
    def run(ctx: Context) -> tuple[Memory, torch.Tensor]:
        torch.manual_seed(5)  # pyright: ignore[reportUnknownMemberType]
        with remembering(ctx) as memory:
            torch.rand(3)
            memory.take(ctx, {"step": 1})
            return memory, torch.rand(2)

    [(memory, drawn)] = run_ranks(run, 1)

    def restore(ctx: Context) -> torch.Tensor:
        restore_snapshot(ctx, memory, {"step": 0})
        return torch.rand(2)

    assert_equal(run_ranks(restore, 1)[0], drawn)


def test_without_a_whole_snapshot_nothing_is_changed() -> None:
    def restore(ctx: Context) -> tuple[object, int]:
        state = {"step": 7}
        return restore_snapshot(ctx, Memory(), state), state["step"]

    assert run_ranks(restore, 2) == [(None, 7), (None, 7)]


def test_a_snapshot_that_does_not_fit_is_an_error_on_every_rank() -> None:
    memories, _ = ran(2, 2, 1)

    def restore(ctx: Context) -> type[Exception]:
        like = make_state(ctx)
        if ctx.rank == 1:
            like["other"] = torch.zeros(2)
        before = values(like)
        with pytest.raises((CheckpointMismatchError, RemoteRankError)) as caught:
            restore_snapshot(ctx, memories[ctx.rank], like)
        assert_equal(values(like)["weights"], before["weights"])
        return caught.type

    assert run_ranks(restore, 2) == [RemoteRankError, CheckpointMismatchError]


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_leave_together_at_a_whole_snapshot_if_processes_wait(world: int) -> None:
    def run(ctx: Context) -> tuple[int, set[Key]]:
        memory = Memory(lambda: ctx.is_last_process)  # only one of them has noticed
        state: dict[str, Any] = {"step": 0}
        with remembering(ctx, memory, 3), suppress(Regroup):
            memory.take(ctx, state)
            while state["step"] < 100:
                state["step"] += 1
                memory.snapshot(ctx, state, 4)
        return state["step"], {share.key for share in memory.shares() if share.key.step == state["step"]}

    assert run_ranks(run, world) == [(4, {Key(4, 3)})] * world


def test_remember_needs_no_elastic_run() -> None:
    assert run_ranks(lambda ctx: af.snapshot(ctx, {"step": 1}), 2) == [None, None]
    with pytest.raises(ValueError, match="every must be at least 1"):
        af.snapshot(Context(), {}, every=0)


def test_what_can_not_be_stored_is_named() -> None:
    def run(ctx: Context) -> None:
        with remembering(ctx) as memory, pytest.raises(TypeError, match="callback"):
            memory.take(ctx, {"callback": print})

    run_ranks(run, 1)


def test_a_member_that_is_lost_while_others_connect_to_it_is_a_loss_soon() -> None:
    def run(ctx: Context) -> None:
        def split(groups: Any, timeout: timedelta) -> Any:
            assert timeout <= timedelta(seconds=15) < timedelta(seconds=ctx.guard.timeout_s)
            raise DistStoreError("wait timeout after 15000ms, keys: /0//cpu//0/1")

        seam = dataclasses.replace(ctx.collectives, split=split)
        with pytest.raises(MissingRankError, match="could not be reached: wait timeout"):
            Memory().enter(dataclasses.replace(ctx, collectives=seam), 1)

    run_ranks(run, 2, "processes")


# --- what ranks exchange ---------------------------------------------------------------------------


def exchanged(on: Literal["memory", "processes"], size: int, num_tensors: int) -> list[Exchanges]:
    """Return what each rank exchanges to restore a snapshot when rank 1 was lost."""

    def run(ctx: Context) -> Exchanges:
        counted = Exchanges()
        held = {f"layer{number}.weight": torch.ones(24) for number in range(num_tensors)}
        if on == "processes":
            af.set_seed(ctx.rank)  # else any rank may give the lost one the random states of all
            mesh = mesh_of(Layout("fsdp", (size,)))
            held = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in held.items()}
        state = {"rank": ctx.rank, "held": held}
        with remembering(ctx) as memory:
            memory.take(ctx, state)
            memory.settle()
            found = restore_snapshot(counted.context(ctx), Memory() if ctx.rank == 1 else memory, state)
            assert found is not None
            assert found["rank"] == ctx.rank
        return counted

    return run_ranks(run, size, on)


# Of numbers, which may have more digits.
DIGITS = 64


@pytest.mark.parametrize(("on", "few", "many"), [("memory", 4, 12), ("processes", 3, 6)])
def test_what_ranks_send_for_a_snapshot_does_not_grow_with_tensors_times_ranks(
    on: Literal["memory", "processes"], few: int, many: int
) -> None:
    growths: list[int] = []
    for size in (few, many):
        small, large = (exchanged(on, size, num_tensors) for num_tensors in (20, 400))
        sent = [sum(one.sent for one in ranks) for ranks in (small, large)]
        growths.append(sent[1] - sent[0])
        print(f"{size} ranks, 20 and 400 tensors: {sent} bytes sent by all of them together")
        print(f"by the last one: {small[-1].sent} and {large[-1].sent}, {large[-1].calls} calls")
        # It has nothing that the lost one needs, and others have said what it holds.
        if size == many:
            assert large[-1].sent <= small[-1].sent + DIGITS
    assert growths[1] <= 1.1 * growths[0]


def test_ranks_exchange_nothing_more_if_each_has_its_share() -> None:
    def run(ctx: Context) -> int:
        counted = Exchanges()
        with remembering(ctx) as memory:
            memory.take(ctx, {"own": torch.ones(3) * ctx.rank, "same": torch.ones(3)})
            memory.settle()
            restore_snapshot(counted.context(ctx), memory, {"own": torch.zeros(3), "same": torch.zeros(3)})
        return counted.calls

    few, many = (run_ranks(run, size)[0] for size in (2, 8))
    assert few == many


# --- who keeps it --------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 64))
def test_the_neighbour_is_on_another_node(num_nodes: int, per_node: int) -> None:
    size = num_nodes * per_node
    shift = neighbour_shift(size, num_nodes)
    for rank in range(size):
        neighbour = (rank + shift) % size
        assert neighbour != rank or size == 1
        assert neighbour // per_node != rank // per_node or num_nodes == 1
