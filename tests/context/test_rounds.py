"""What is moved piece by piece is what was sent, whatever the lengths, the source and the number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import Context
from accelfn.context.rounds import broadcast_in_rounds, scatter_in_rounds
from accelfn.testing import run_ranks

CHUNK = 16
dtypes = st.sampled_from([torch.uint8, torch.int64, torch.bfloat16])


@given(st.integers(2, 5), st.integers(0, 40), dtypes, st.data())
def test_every_rank_gets_the_buffer_of_the_source(
    size: int, length: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    source = data.draw(st.integers(0, size - 1))

    def move(ctx: Context) -> torch.Tensor:
        buffer = (torch.arange(length) + 100 * ctx.rank).to(dtype)
        broadcast_in_rounds(ctx.collectives.all_gather_bytes, CHUNK, ctx.rank, buffer, source)
        return buffer

    for received in run_ranks(move, size):
        assert torch.equal(received, (torch.arange(length) + 100 * source).to(dtype))


@given(st.integers(2, 5), st.integers(0, 20), dtypes, st.booleans(), st.data())
def test_every_rank_gets_its_part(
    size: int, length: int, dtype: torch.dtype, in_place: bool, data: st.DataObject
) -> None:
    source = data.draw(st.integers(0, size - 1))
    whole = torch.arange(size * length).to(dtype)

    def move(ctx: Context) -> torch.Tensor:
        buffer = whole.clone() if ctx.rank == source else None
        output = torch.zeros(length, dtype=dtype)
        if buffer is not None and in_place:
            output = buffer[source * length : (source + 1) * length]
        scatter_in_rounds(ctx.collectives.all_gather_bytes, CHUNK, ctx.rank, size, output, buffer, source)
        return output.clone()

    assert torch.equal(torch.cat(run_ranks(move, size)), whole)


def test_between_processes_large_tensors_come_whole() -> None:
    def move(ctx: Context) -> tuple[int, int]:
        length = 3 * (1 << 19) + 5  # several rounds, the last one short
        output, buffer = torch.empty(length, dtype=torch.uint8), None
        if ctx.rank == 1:
            buffer = torch.arange(ctx.num_processes * length).remainder_(251).to(torch.uint8)
        ctx.collectives.scatter(output, buffer, 1)
        own = torch.arange(ctx.rank * length, (ctx.rank + 1) * length).remainder_(251).to(torch.uint8)
        told = output if ctx.rank == 1 else torch.empty_like(output)
        ctx.collectives.broadcast(told, 1)
        expected = torch.arange(length, 2 * length).remainder_(251).to(torch.uint8)
        return int((output != own).sum()), int((told != expected).sum())

    assert run_ranks(move, 3, on="processes") == [(0, 0)] * 3
