"""Who writes what: every box once, and every rank's own version of what differs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.checkpoint.plan import Box, Held, SavePlan, plan_save
from accelfn.errors import CheckpointError

NAMES = st.sampled_from(["a", "c", "c@1", "c@2"])


@st.composite
def worlds(draw: st.DrawFn) -> list[dict[str, Held]]:
    """Whole tensors of several versions, held by some ranks or all."""
    size = draw(st.integers(1, 5))
    world: list[dict[str, Held]] = [{} for _ in range(size)]
    for name in draw(st.lists(NAMES, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        for rank in range(size):
            if draw(st.booleans()):
                world[rank][name] = Held("float32", shape, 4, None, draw(st.sampled_from(["x", "y"])))
    return world


def stored_names(plan: SavePlan, rank: int, held: dict[str, Held]) -> dict[str, str]:
    return {name: plan.names[rank].get(name, name) for name in held}


@given(worlds())
def test_every_version_is_written_once_by_a_rank_that_has_it(world: list[dict[str, Held]]) -> None:
    plan = plan_save(world)
    written = [write for writes in plan.writes for write in writes]
    assert len({write.stored for write in written}) == len(written)
    for rank, writes in enumerate(plan.writes):
        for write in writes:
            assert plan.names[rank].get(write.name, write.name) == write.stored
            assert write.name in world[rank]
    # What a rank calls by a stored name is what was written under it.
    by_stored = {
        write.stored: world[rank][write.name] for rank, writes in enumerate(plan.writes) for write in writes
    }
    for rank, held in enumerate(world):
        for name, stored in stored_names(plan, rank, held).items():
            assert by_stored[stored] == held[name]


@given(worlds())
def test_what_all_ranks_hold_alike_keeps_its_name(world: list[dict[str, Held]]) -> None:
    plan = plan_save(world)
    for name in world[0]:
        if len({held.get(name) for held in world}) == 1:
            assert not any(name in names for names in plan.names)
        assert name not in plan.names[0]  # rank 0's values are always under the plain name


@given(st.integers(1, 6), st.lists(st.integers(0, 1000), min_size=1, max_size=40))
def test_ranks_write_about_equally_much(size: int, lengths: list[int]) -> None:
    held = {str(number): Held("uint8", (length,), 1) for number, length in enumerate(lengths)}
    plan = plan_save([held] * size)
    loads = [sum(math.prod(held[write.name].shape) for write in writes) for writes in plan.writes]
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= max(lengths)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 7))
def test_boxes_are_written_once_in_the_world_or_once_a_node(replicas: int, shards: int, rows: int) -> None:
    size = replicas * shards
    cut = [rows * shard // shards for shard in range(shards + 1)]

    def held(rank: int) -> dict[str, Held]:
        start, end = cut[rank % shards], cut[rank % shards + 1]
        boxes = (Box((start,), (end - start,)),) if end > start else ()
        return {"w": Held("float32", (rows,), 4, boxes)}

    world = [held(rank) for rank in range(size)]
    boxes = [box for one in world[:shards] for box in one["w"].boxes or ()]
    once = plan_save(world)
    assert sorted(write.box or Box((), ()) for own in once.writes for write in own) == sorted(boxes)
    each = plan_save(world, nodes=[rank // shards for rank in range(size)])
    assert sum(map(len, each.writes)) == len(boxes) * replicas


def test_a_tensor_that_is_cut_on_some_ranks_alone_is_refused() -> None:
    whole = Held("float32", (4,), 4, None, "x")
    part = Held("float32", (4,), 4, (Box((0,), (2,)),))
    with pytest.raises(CheckpointError, match=r"'w' is float32 \(4,\) on rank 1"):
        plan_save([{"w": whole}, {"w": part}])
    with pytest.raises(CheckpointError, match="must have one layout on all of them"):
        plan_save([{"w": part}, {"w": part._replace(shape=(5,))}])
