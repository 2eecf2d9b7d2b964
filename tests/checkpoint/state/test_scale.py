"""What a rank exchanges to save and load: no more among many ranks than among few, but for the first."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import accelfn as af
from accelfn.checkpoint import Keep
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import Layout, mesh_of
from tests.exchanges import Exchanges

Where: TypeAlias = Literal["memory", "processes"]
Work: TypeAlias = Callable[[Context, Path, dict[str, torch.Tensor]], object]


def make_state(ctx: Context, on: Where, num_tensors: int) -> dict[str, torch.Tensor]:
    """Make tensors: shards where ranks are processes, and else replicas."""
    tensors = {f"layer{number}.weight": torch.ones(24, 2) for number in range(num_tensors)}
    if on == "memory":
        return tensors
    mesh = mesh_of(Layout("fsdp", (ctx.num_processes,)))
    return {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in tensors.items()}


def exchanged(work: Work, folder: Path, on: Where, size: int, num_tensors: int = 20) -> list[Exchanges]:
    """Return what each rank has exchanged in ``work``, once a checkpoint is there."""

    def run(ctx: Context) -> Exchanges:
        counted, state = Exchanges(), make_state(ctx, on, num_tensors)
        at = folder / f"{size}-{num_tensors}"
        af.save_state(ctx, at / "step-1", state, step=1)
        work(counted.context(ctx), at, state)
        ctx.collectives.barrier()  # else some ranks see on the board that others have ended
        return counted

    return run_ranks(run, size, on)


def save(ctx: Context, folder: Path, state: dict[str, torch.Tensor]) -> None:
    af.save_state(ctx, folder / "step-2", state, step=2)


def save_own_value(ctx: Context, folder: Path, state: dict[str, torch.Tensor]) -> None:
    own = {"rank": ctx.rank, "state": state}
    assert af.load_state(ctx, af.save_state(ctx, folder / "step-2", own, step=2), own)["rank"] == ctx.rank


def retain(ctx: Context, folder: Path, state: dict[str, torch.Tensor]) -> None:
    af.save_state(ctx, folder / "step-2", state, step=2, keep=Keep(last=1))
    assert [path.name for path in folder.iterdir()] == ["step-2"]


def save_in_background(ctx: Context, folder: Path, state: dict[str, torch.Tensor]) -> None:
    af.save_state(ctx, folder / "step-2", state, True, step=2, keep=Keep(last=1)).result()


def load(ctx: Context, folder: Path, state: dict[str, torch.Tensor]) -> None:
    af.load_state(ctx, folder, state)


# Of messages and texts, in which numbers may have more digits.
DIGITS = 64


@pytest.mark.parametrize("work", [save, save_own_value, retain, save_in_background, load])
@pytest.mark.parametrize(("on", "few", "many"), [("memory", 3, 12), ("processes", 2, 4)])
def test_what_a_rank_sends_does_not_grow_with_the_ranks(
    tmp_path: Path, work: Work, on: Where, few: int, many: int
) -> None:
    small, large = (exchanged(work, tmp_path, on, size)[1:] for size in (few, many))
    measures: dict[str, tuple[Callable[[Exchanges], int], int]] = {
        "messages": (lambda one: one.calls, 0),
        "bytes sent": (lambda one: one.sent, DIGITS),
        "texts posted": (lambda one: len(one.posted), 0),
        "characters posted": (lambda one: sum(one.posted.values()), DIGITS),
        "texts asked for": (lambda one: len(one.asked), 0),
        "characters read": (lambda one: sum(one.asked.values()), DIGITS),
    }
    for name, (measure, more) in measures.items():
        of_few, of_many = ([measure(one) for one in ranks] for ranks in (small, large))
        print(f"{work.__name__}, {name} of each rank but the first of {few}: {of_few}, of {many}: {of_many}")
        assert max(of_many) <= max(of_few) + more
    # A gather hands each rank what all of them send: a kilobyte and a half for each, in all phases together.
    assert max(one.received for one in large) <= 1500 * (many - 1)


@pytest.mark.parametrize("work", [save, save_own_value, retain, save_in_background, load])
@pytest.mark.parametrize(("on", "size"), [("memory", 3), ("processes", 2)])
def test_what_a_rank_exchanges_does_not_grow_with_the_tensors(
    tmp_path: Path, work: Work, on: Where, size: int
) -> None:
    few, many = (exchanged(work, tmp_path, on, size, num_tensors) for num_tensors in (10, 400))
    # The first rank sends its tree where others differ from it, and a long text takes two messages.
    first = 1 if work is save_own_value else 0
    for rank, (small, large) in enumerate(zip(few[first:], many[first:], strict=True), start=first):
        texts = [sum(one.posted.values()) for one in (small, large)]
        print(
            f"{work.__name__}, rank {rank}, for 10 tensors: {small.sent} bytes, {texts[0]} characters posted"
        )
        print(f"for 200 tensors: {large.sent} bytes, {texts[1]} characters posted")
        assert small.calls <= large.calls <= small.calls + first
        assert large.sent <= small.sent + DIGITS
        assert large.posted.keys() == small.posted.keys()
        assert texts[1] <= texts[0] + DIGITS
