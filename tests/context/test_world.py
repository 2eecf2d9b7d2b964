import dataclasses
import pickle

import pytest
import torch

from accelfn.context import Owned, World
from accelfn.errors import ConfigurationError


def test_the_default_is_one_process_on_the_cpu() -> None:
    world = World()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert (world.node_rank, world.num_nodes) == (0, 1)
    assert world.device == torch.device("cpu")
    assert (world.backend, world.group, world.made) == (None, None, Owned())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 1}, r"rank must lie in 0\.\.0, got 1"),
        ({"rank": -1, "size": 2}, r"rank must lie in 0\.\.1, got -1"),
        ({"size": 0}, "rank must lie in"),
        ({"size": 4, "local_rank": 2, "local_size": 2}, r"local_rank must lie in 0\.\.1, got 2"),
        ({"size": 4, "node_rank": 2, "num_nodes": 2}, r"node_rank must lie in 0\.\.1, got 2"),
        ({"size": 2, "local_size": 3}, "do not fit a world of 2"),
        ({"size": 2, "num_nodes": 3}, "do not fit a world of 2"),
        ({"size": 4, "local_size": 4, "num_nodes": 2}, "do not fit a world of 4"),
    ],
)
def test_an_impossible_place_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        World(**fields)  # pyright: ignore[reportArgumentType]


def test_it_is_frozen_hashable_and_picklable() -> None:
    world = World(rank=1, size=2, local_size=2, local_rank=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 0  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(world) == hash(World(rank=1, size=2, local_size=2, local_rank=1))
    assert pickle.loads(pickle.dumps(world)) == world
