"""Each rank's share of a stream is what the peer gives it."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from accelfn.compat.shards import IterableDatasetShard
from accelfn.errors import ConfigurationError


class Stream(IterableDataset[int]):
    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.number))


@pytest.mark.slow
@given(
    number=st.integers(0, 30),
    rows=st.integers(1, 4),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
    split=st.booleans(),
)
def test_samples_are_the_peers(
    peer: Any, number: int, rows: int, size: int, drop_last: bool, split: bool
) -> None:
    batch = rows * size if split else rows
    for rank in range(size):
        arguments = (Stream(number), batch, drop_last, size, rank, split)
        own = IterableDatasetShard(*arguments)
        samples = [*own]
        assert samples == [*peer.data_loader.IterableDatasetShard(*arguments)]
        assert len(samples) == len(own)


def test_ranks_share_a_stream_and_the_last_round_begins_again() -> None:
    read = [[*IterableDatasetShard(Stream(5), 2, False, 2, rank)] for rank in range(2)]
    assert read == [[0, 1, 4, 0], [2, 3, 1, 2]]


def test_a_batch_that_cant_be_split_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="batch_size=3 can't be split into parts for 2 processes"):
        IterableDatasetShard(Stream(4), 3, num_processes=2, split_batches=True)


def test_the_epoch_is_passed_on() -> None:
    stream = Stream(3)
    IterableDatasetShard(stream).set_epoch(4)
    assert stream.epoch == 4
