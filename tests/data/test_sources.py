import importlib
from typing import Any

import pytest

from accelfn.data.states import count_shards, take_shards
from accelfn.errors import ConfigurationError


class Sharded:
    """Shards that are numbers."""

    def __init__(self, shards: list[int]) -> None:
        self.shards = shards

    @property
    def n_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return Sharded(self.shards[index::num_shards])


def test_shards_are_counted_where_they_can_be_taken() -> None:
    class OnlyCounted:
        num_shards = 4

    class CountedInWords:
        n_shards = "many"

        def shard(self, num_shards: int, index: int) -> None:
            raise AssertionError("taken")

    assert count_shards(Sharded([1, 2])) == 2
    assert count_shards(OnlyCounted()) is None
    assert count_shards(CountedInWords()) is None
    assert count_shards(object()) is None


def test_shards_are_dealt_out() -> None:
    assert [take_shards(Sharded([0, 1, 2]), rank, 2).shards for rank in (0, 1)] == [[0, 2], [1]]


@pytest.mark.parametrize("num_shards", [4, 5])
def test_shards_of_hugging_face_datasets_are_read_by_one_rank_each(num_shards: int) -> None:
    datasets: Any = importlib.import_module("datasets")
    made = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset(num_shards=num_shards)
    assert count_shards(made) == num_shards
    parts = [take_shards(made, rank, 2) for rank in (0, 1)]
    rows = [[row["x"] for row in part] for part in parts]
    assert sorted(rows[0] + rows[1]) == list(range(20))
    assert {len(one) * num_shards // 20 for one in rows} == {num_shards // 2, num_shards - num_shards // 2}
    with pytest.raises(ConfigurationError, match="split_dataset_by_node already"):
        count_shards(parts[0])
