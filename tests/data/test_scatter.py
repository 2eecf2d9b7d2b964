# pyright: reportUnknownMemberType=false

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from accelfn import Context
from accelfn.comm.agreement import HEADER_BYTES
from accelfn.data.dispatch import BatchScatter
from accelfn.errors import RemoteRankError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import Sample, rank_trees
from accelfn.tree import flatten, flatten_tensor

Steps = list[list[Any]]


def same(one: Any, other: Any) -> bool:
    (leaves, structure), (more, also) = flatten(one), flatten(other)
    return structure == also and all(same_leaf(a, b) for a, b in zip(leaves, more, strict=True))


def same_leaf(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and one == other
    # By bytes: torch can't compare float8.
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(flatten_tensor(one).view(torch.uint8), flatten_tensor(other).view(torch.uint8))
    )


class Counted(NamedTuple):
    ctx: Context
    calls: list[str]
    sizes: list[int]  # of the messages of each all_gather_bytes, without the agreement's own header


def counted(ctx: Context) -> Counted:
    calls: list[str] = []
    sizes: list[int] = []
    seam = ctx.collectives

    def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append("all_gather_bytes")
        sizes.append(message.numel() - HEADER_BYTES)
        return seam.all_gather_bytes(message)

    def scatter(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        calls.append("scatter")
        sizes.append(output.numel())
        seam.scatter(output, buffer, source)

    def broadcast(buffer: torch.Tensor, source: int) -> None:
        calls.append("broadcast")
        seam.broadcast(buffer, source)

    seam_counted = replace(seam, all_gather_bytes=all_gather_bytes, scatter=scatter, broadcast=broadcast)
    return Counted(replace(ctx, collectives=seam_counted), calls, sizes)


def run_steps(ctx: Context, steps: Steps, facts: Any = None) -> list[Any]:
    """Give what this rank has of each step; None where it has nothing."""
    way = BatchScatter(ctx.tagged("parts"), "a test")  # which come from two lines of this test
    got: list[Any] = []
    for parts in steps:
        if ctx.is_main_process:
            way.send(parts, facts)
            got.append(parts[0])
            continue
        received = way.receive()
        assert received is not None
        assert received[1] == facts
        got.append(received[0][0] if received[0] else None)
    if ctx.is_main_process:
        way.end()
    else:
        assert way.receive() is None
    return got


@st.composite
def handed_out(draw: st.DrawFn) -> Steps:
    size = draw(st.integers(2, 4))
    steps: Steps = []
    for _ in range(draw(st.integers(1, 4))):
        parts = draw(rank_trees(size, float8=True))
        if draw(st.booleans()):
            parts = [{"tree": tree, "name": "a", "number": 1.5, "yes": True} for tree in parts]
        steps += [parts] * draw(st.integers(1, 2))
    steps.append([*steps[-1][: draw(st.integers(1, size))]])  # the last ranks may have none
    return steps


@given(handed_out(), st.sampled_from([None, (1, None, [2])]))
def test_each_rank_has_its_own_part_of_each_step(steps: Steps, facts: Any) -> None:
    size = len(steps[0])
    got = run_ranks(lambda ctx: run_steps(ctx, steps, facts), size)
    for rank in range(size):
        for parts, own in zip(steps, got[rank], strict=True):
            assert own is None if rank >= len(parts) else same(own, parts[rank])


@pytest.mark.parametrize("on", ["memory", "gloo", "processes"])
def test_large_parts_of_any_shape_arrive(on: Any) -> None:
    def part(step: int, rank: int) -> Any:
        rows = torch.arange(4000 + 1000 * rank).view(-1, 10) + step
        return {"rows": rows, "half": rows.to(torch.bfloat16), "one": torch.tensor(rank), "empty": rows[:0]}

    steps = [[part(step, rank) for rank in range(3)] for step in range(3)]
    steps.append(steps[0][:2])
    got = run_ranks(lambda ctx: run_steps(ctx, steps), 3, on)
    for rank in range(3):
        assert all(same(own, parts[rank]) for parts, own in zip(steps[:3], got[rank], strict=False))
    assert got[2][3] is None


def test_what_arrives_is_memory_of_its_own() -> None:
    def run(ctx: Context) -> list[float]:
        steps = [[torch.full((2,), step + rank / 8) for rank in range(2)] for step in range(3)]
        got = run_steps(ctx, steps)
        return [float(one[0]) for one in got]

    assert run_ranks(run, 2)[1] == [0.125, 1.125, 2.125]


@pytest.mark.parametrize(
    ("rows", "calls"),
    [(4, ["all_gather_bytes"]), (40_000, ["all_gather_bytes", "scatter"])],
    ids=["small", "large"],
)
def test_a_step_is_one_exchange_and_at_most_one_scatter_for_all_dtypes(rows: int, calls: list[str]) -> None:
    def run(ctx: Context) -> tuple[list[str], list[int]]:
        part = {"x": torch.zeros(rows), "y": torch.zeros(rows, dtype=torch.int64), "z": torch.ones(rows) > 0}
        seen = counted(ctx)
        run_steps(seen.ctx, [[part] * 3] * 4)
        return seen.calls, seen.sizes

    # The end is told in an exchange of its own, where nobody knew of it before.
    for seen, _ in run_ranks(run, 3):
        assert seen == calls * 4 + ["all_gather_bytes"]
    # No rank receives the parts of the others, but in the exchange.
    if rows == 40_000:
        assert max(run_ranks(run, 3)[1][1]) < 2 * 40_000 * 13


class Two(NamedTuple):
    first: Any
    second: Any


def test_containers_come_back_as_what_they_were() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    part = {"a": Two(torch.ones(2), None), "b": Sample(torch.zeros(1), "label"), "c": packed}

    def run(ctx: Context) -> Any:
        return run_steps(ctx, [[part] * 2])[0]

    got = run_ranks(run, 2)[1]
    assert isinstance(got["a"], Two)
    assert isinstance(got["b"], Sample)
    assert got["b"].label == "label"
    assert isinstance(got["c"], PackedSequence)
    assert same(got, part)


def test_a_form_that_cannot_be_pickled_is_every_ranks_error() -> None:
    class Local(dict[str, Any]):
        pass

    def run(ctx: Context) -> None:
        from accelfn.comm import failing_together

        with failing_together(ctx, "a test"):
            run_steps(ctx, [[Local(x=torch.zeros(1))] * 2])

    with pytest.raises(Exception, match="Local") as caught:
        run_ranks(run, 2)
    assert not isinstance(caught.value, RemoteRankError)
