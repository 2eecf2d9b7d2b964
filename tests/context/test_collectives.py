"""The seam's default, a world of one, obeys the laws of a larger world."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import Collectives, chunk_bytes
from accelfn.context.collectives import MAX_CHUNK_BYTES, ReduceOp

buffers = st.lists(st.integers(0, 255), max_size=20).map(
    lambda values: torch.tensor(values, dtype=torch.uint8)
)


@given(buffer=buffers)
def test_moving_bytes_alone_gives_them_back(buffer: torch.Tensor) -> None:
    alone = Collectives()
    before = buffer.clone()
    (received,) = alone.all_gather_bytes(buffer)
    assert torch.equal(received[: buffer.numel()], before)
    assert torch.equal(alone.all_gather(buffer), before)
    assert torch.equal(alone.all_to_all(buffer), before)
    alone.broadcast(buffer, 0)
    received = torch.zeros_like(buffer)
    alone.permute(buffer, received, 0, 0)
    assert torch.equal(received, before)
    alone.barrier()
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@given(buffer=buffers)
def test_reducing_alone_changes_nothing(op: ReduceOp, buffer: torch.Tensor) -> None:
    before = buffer.clone()
    Collectives().all_reduce(buffer, op)
    assert torch.equal(Collectives().reduce_scatter(buffer), before)
    assert torch.equal(buffer, before)


@given(size=st.integers(1, 1_000_000))
def test_chunks_are_bounded_and_shrink(size: int) -> None:
    chunk = chunk_bytes(size)
    assert 1024 <= chunk <= MAX_CHUNK_BYTES
    assert chunk % 16 == 0
    assert chunk_bytes(size + 1) <= chunk
    assert chunk == 1024 or chunk * size <= 1 << 20
