"""The seam's default, a world of one, obeys the laws of a larger world."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import Collectives, chunk_bytes
from accelfn.context.collectives import MAX_CHUNK_BYTES


@given(st.lists(st.integers(0, 255), max_size=20), st.sampled_from(("sum", "max", "min")))
def test_alone_bytes_come_back_as_they_are(values: list[int], op: str) -> None:
    alone, buffer, before = Collectives(), *(torch.tensor(values, dtype=torch.uint8) for _ in "ab")
    (row,) = alone.all_gather_bytes(buffer)
    received = torch.zeros_like(buffer)
    alone.permute(buffer, received, 0, 0)
    moved = (row[: len(values)], received, alone.all_gather(buffer), alone.all_to_all(buffer))
    for result in (*moved, alone.reduce_scatter(buffer)):
        assert torch.equal(result, before)
    alone.broadcast(buffer, 0)
    alone.all_reduce(buffer, op)  # pyright: ignore[reportArgumentType]
    alone.barrier()
    assert torch.equal(buffer, before)


@given(size=st.integers(1, 1_000_000))
def test_chunks_are_bounded_and_shrink(size: int) -> None:
    chunk = chunk_bytes(size)
    assert 1024 <= chunk <= MAX_CHUNK_BYTES
    assert chunk % 16 == 0
    assert chunk_bytes(size + 1) <= chunk
    assert chunk == 1024 or chunk * size <= 1 << 20
