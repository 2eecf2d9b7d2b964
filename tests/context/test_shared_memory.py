"""Rows that processes share: what is written is read, who dies is noticed, and nothing is left behind."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import Context
from accelfn.context.shared_memory import (
    LostRanksError,
    SharedRows,
    broadcast_chunks,
    scatter_chunks,
    share_rows,
)
from accelfn.testing import run_ranks

CHUNK = 64


def rows_in_one_process(size: int) -> list[SharedRows]:
    """Give the rows of all ranks; ``share_rows`` in threads, which agree as processes do."""
    made = run_ranks(lambda ctx: share_rows(ctx.collectives.all_gather_bytes, ctx.rank, size, CHUNK), size)
    rows = [one for one in made if one is not None]
    assert len(rows) == size
    return rows


def as_row(message: bytes) -> torch.Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)


@given(st.data())
def test_every_rank_reads_what_each_has_written(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    rows = rows_in_one_process(size)
    for messages in data.draw(st.lists(st.lists(st.binary(max_size=CHUNK), min_size=size, max_size=size))):
        order = data.draw(st.permutations(range(size)))
        for rank in order[:-1]:
            rows[rank].write(as_row(messages[rank]))
            assert not rows[rank].wait(0.0)
        rows[order[-1]].write(as_row(messages[order[-1]]))
        for one in rows:
            assert one.wait(0.0)
            seen = [bytes(row[: len(text)].numpy()) for row, text in zip(one.read(), messages, strict=True)]
            assert seen == messages


def test_a_rank_may_be_one_exchange_ahead_and_spoils_nothing() -> None:
    first, second = rows_in_one_process(2)
    first.write(as_row(b"a"))
    second.write(as_row(b"b"))
    assert first.wait(0.0)
    first.write(as_row(b"c"))  # the second has still to read
    assert second.wait(0.0)
    assert [int(row[0]) for row in second.read()] == [ord("a"), ord("b")]
    assert not first.wait(0.001)


def test_a_process_that_ends_instead_is_noticed_at_once() -> None:
    def work(ctx: Context) -> tuple[int, ...]:
        rows = share_rows(ctx.collectives.all_gather_bytes, ctx.rank, ctx.num_processes, CHUNK)
        assert rows is not None
        if ctx.rank == 2:
            time.sleep(0.1)  # seen to live first
            return ()
        rows.write(as_row(b"here"))
        with pytest.raises(LostRanksError) as caught:
            rows.wait(30.0)
        return caught.value.ranks

    assert run_ranks(work, 3, "processes") == [(2,), (2,), ()]


def test_a_living_process_is_waited_for() -> None:
    def work(ctx: Context) -> bool:
        rows = share_rows(ctx.collectives.all_gather_bytes, ctx.rank, ctx.num_processes, CHUNK)
        assert rows is not None
        if ctx.rank == 1:
            time.sleep(0.3)
        rows.write(as_row(b"here"))
        return rows.wait(30.0)

    assert run_ranks(work, 2, "processes") == [True, True]


def test_a_copy_of_the_process_does_not_live_for_it() -> None:
    def work(ctx: Context) -> tuple[int, ...]:
        rows = share_rows(ctx.collectives.all_gather_bytes, ctx.rank, ctx.num_processes, CHUNK)
        assert rows is not None
        if ctx.rank == 1:
            if os.fork() == 0:  # as the workers of a data loader
                time.sleep(5.0)
                os._exit(0)
            return ()
        rows.write(as_row(b"here"))
        with pytest.raises(LostRanksError) as caught:
            rows.wait(30.0)
        return caught.value.ranks

    assert run_ranks(work, 2, "processes") == [(1,), ()]


Told = list[str]  # path and nonce


def elsewhere(told: Told) -> Told:
    return [told[0] + "-elsewhere", told[1]]


def other_file(told: Told) -> Told:
    return [told[0], "00" * 32]


def no_file(told: Told) -> Told:
    return ["", told[1]]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("change", [elsewhere, other_file, no_file])
def test_where_one_rank_can_not_share_none_does(change: Callable[[Told], Told]) -> None:
    def work(ctx: Context) -> tuple[bool, str]:
        paths: list[str] = []

        def exchange(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows = ctx.collectives.all_gather_bytes(message)
            if message.numel() == 1:  # whether they all can
                return rows
            told = json.loads(bytes(rows[0][: message.numel()].numpy()))
            paths.append(told[0])
            changed = json.dumps(change(told) if ctx.rank == 1 else told)
            return (as_row(changed.encode().ljust(message.numel())), *rows[1:])

        return share_rows(exchange, ctx.rank, ctx.num_processes, CHUNK) is None, paths[0]

    before = open_files()
    outcomes = run_ranks(work, 3)
    assert [refused for refused, _ in outcomes] == [True] * 3
    assert {Path(path).name[:8] for _, path in outcomes} == {"accelfn-"}
    assert not any(Path(path).exists() for _, path in outcomes)
    assert open_files() == before


def test_nothing_is_left_behind() -> None:
    before = open_files()
    rows = rows_in_one_process(3)
    assert open_files() >= before + 3
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert all(line.endswith("(deleted)") for line in maps if "/accelfn-" in line)
    rows.clear()
    assert open_files() == before


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_processes_of_one_machine_meet_in_its_memory(num_nodes: int) -> None:
    def work(ctx: Context) -> bool:
        return "/accelfn-" in Path("/proc/self/maps").read_text()

    assert run_ranks(work, 2, "processes", num_nodes=num_nodes) == [num_nodes == 1] * 2


SMALL = 16
dtypes = st.sampled_from([torch.uint8, torch.int64, torch.bfloat16])


@given(st.integers(2, 5), st.integers(0, 40), dtypes, st.data())
def test_every_rank_gets_the_buffer_of_the_source(
    size: int, length: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    source = data.draw(st.integers(0, size - 1))

    def move(ctx: Context) -> torch.Tensor:
        buffer = (torch.arange(length) + 100 * ctx.rank).to(dtype)
        broadcast_chunks(ctx.collectives.all_gather_bytes, SMALL, ctx.rank, buffer, source)
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
        scatter_chunks(ctx.collectives.all_gather_bytes, SMALL, ctx.rank, size, output, buffer, source)
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
