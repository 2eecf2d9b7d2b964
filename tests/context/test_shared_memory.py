"""Rows that processes of one machine share: whole messages, and nothing left behind."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accelfn.context import Context
from accelfn.context.shared_memory import share_rows
from accelfn.testing import run_ranks

CHUNK = 64
Told = list[str]  # path and nonce


def as_row(message: bytes) -> torch.Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)


def elsewhere(told: Told) -> Told:
    return [told[0] + "-elsewhere", told[1]]


def other_file(told: Told) -> Told:
    return [told[0], "00" * 32]


def no_file(told: Told) -> Told:
    return ["", told[1]]


def open_files() -> int:
    """Count this process's open files of rows."""
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("/accelfn-" in os.path.realpath(path) for path in paths)


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


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_processes_of_one_machine_meet_in_a_file_that_has_no_name_any_more(num_nodes: int) -> None:
    def work(ctx: Context) -> list[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return [line.rpartition(" ")[2] for line in maps if "/accelfn-" in line]

    for ends in run_ranks(work, 2, "processes", num_nodes=num_nodes):
        assert set(ends) == ({"(deleted)"} if num_nodes == 1 else set())


def test_what_is_shared_goes_with_its_rows() -> None:
    before = open_files()
    rows = run_ranks(lambda ctx: share_rows(ctx.collectives.all_gather_bytes, ctx.rank, 3, CHUNK), 3)
    assert open_files() > before
    rows.clear()
    assert open_files() == before


def test_between_processes_large_tensors_come_whole() -> None:
    def move(ctx: Context) -> tuple[int, int]:
        length = 3 * (1 << 19) + 5  # several rounds, the last one short
        whole = torch.arange(ctx.num_processes * length).remainder_(251).to(torch.uint8)
        parts = whole.view(ctx.num_processes, -1)
        output = torch.empty(length, dtype=torch.uint8)
        ctx.collectives.scatter(output, whole if ctx.rank == 1 else None, 1)
        sent = parts[1].clone() if ctx.rank == 1 else torch.empty_like(output)
        ctx.collectives.broadcast(sent, 1)
        return int((output != parts[ctx.rank]).sum()), int((sent != parts[1]).sum())

    assert run_ranks(move, 3, "processes") == [(0, 0)] * 3
