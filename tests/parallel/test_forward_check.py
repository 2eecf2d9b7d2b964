"""Ranks agree on each forward pass of a replicated model, and hear of it before gradients are reduced."""

# torch leaves backward and hooks partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context, DistributedDataParallelKwargs
from accelfn.context import StartedAllGather
from accelfn.parallel.handle import syncing
from accelfn.testing import Where, run_ranks
from tests.seen import Seen, look

WORLDS: tuple[Where, ...] = ("memory", "processes")
# Long enough that an error found by waiting it out would be a timeout and not the one that is expected.
PATIENCE_S = 20.0
# DistributedDataParallel may order its buckets anew in the second pass; each until then is checked at once.
WARM = 2


def batch(ctx: Context) -> torch.Tensor:
    return torch.full((2, 3), ctx.rank + 1.0)


def listed(tensor: torch.Tensor) -> list[float]:
    return [float(number) for number in tensor.detach().flatten()]


def step(ctx: Context, model: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        model(batch(ctx)).sum().backward()


def is_open(ctx: Context) -> bool:
    return ctx.collectives.call_log.unsettled is not None


def with_ddp(ctx: Context, **options: Any) -> Context:
    return ctx.replace(kwargs_handlers=[DistributedDataParallelKwargs(**options)])


class Counted:
    """A context whose exchanges are counted."""

    def __init__(self, ctx: Context) -> None:
        self.count = 0
        seam = ctx.collectives
        start = seam.start_all_gather_bytes

        def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.count += 1
            return seam.all_gather_bytes(message)

        def start_all_gather_bytes(message: torch.Tensor) -> StartedAllGather:
            assert start is not None
            self.count += 1
            return start(message)

        counted = dataclasses.replace(
            seam,
            all_gather_bytes=all_gather_bytes,
            start_all_gather_bytes=None if start is None else start_all_gather_bytes,
        )
        self.ctx = dataclasses.replace(ctx, collectives=counted)

    def during(self, action: Callable[[], object]) -> int:
        before = self.count
        action()
        return self.count - before


# --- ranks that disagree -------------------------------------------------------------------------


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("passes", [0, WARM + 1])
def test_another_operation_for_a_forward_pass_is_one_error_and_no_gradient(
    on: Where, size: int, passes: int
) -> None:
    def run(ctx: Context) -> tuple[Seen, bool, list[bool], list[float]]:
        model = af.prepare(ctx, nn.Linear(3, 1))
        step(ctx, model, passes)
        model.zero_grad()
        ahead: list[bool] = []

        def train() -> None:
            result = model(batch(ctx))
            ahead.append(True)
            result.sum().backward()

        seen = look(train if ctx.rank != 1 else lambda: af.gather(ctx, batch(ctx)))
        untouched = all(parameter.grad is None for parameter in model.parameters())
        step(ctx, model)  # all have heard of it, so all can go on
        bias = next(value.grad for name, value in model.named_parameters() if name.endswith("bias"))
        assert bias is not None
        return seen, untouched, ahead, listed(bias)

    found = run_ranks(run, size, on, timeout_s=PATIENCE_S)
    assert {seen.error for seen, *_ in found} == {"MismatchError"}
    assert len({seen.text for seen, *_ in found}) == 1
    for part in ("gather", "forward", "test_forward_check.py:"):
        assert part in found[0][0].text
    late = on == "processes" and passes > WARM
    for rank, (_, untouched, ahead, bias) in enumerate(found):
        assert untouched
        assert ahead == ([True] if late and rank != 1 else [])
        assert bias == [2.0]


@pytest.mark.parametrize("on", WORLDS)
def test_no_buffer_is_broadcast_before_all_ranks_are_there(on: Where) -> None:
    def run(ctx: Context) -> tuple[Seen, int]:
        model = af.prepare(ctx, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        step(ctx, model, WARM + 1)
        before = ctx.collectives.call_log.number
        seen = look(lambda: af.gather(ctx, batch(ctx)) if ctx.rank == 1 else model(batch(ctx)))
        return seen, ctx.collectives.call_log.number - before

    found = run_ranks(run, 3, on, timeout_s=PATIENCE_S)
    assert {seen.error for seen, _ in found} == {"MismatchError"}
    assert {calls for _, calls in found} == {1}


def meets(rank: int, action: Callable[[Context], object]) -> Callable[[Context], Seen]:
    """Let ranks but ``rank`` train one step with gradients averaged, and that one do something else."""

    def run(ctx: Context) -> Seen:
        model = af.prepare(ctx, nn.Linear(3, 1))
        step(ctx, model, WARM + 1)

        def other() -> None:
            with syncing(False, model):
                step(ctx, model)
            action(ctx)

        def usual() -> None:
            step(ctx, model)
            af.gather(ctx.tagged("after"), batch(ctx))

        return look(other if ctx.rank == rank else usual)

    return run


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [3])
def test_a_rank_that_accumulates_where_others_average_is_an_error_of_all(on: Where, size: int) -> None:
    seen = run_ranks(
        meets(1, lambda ctx: af.gather(ctx.tagged("after"), batch(ctx))), size, on, timeout_s=PATIENCE_S
    )
    assert {one.error for one in seen} == {"MismatchError"}
    assert len({one.text for one in seen}) == 1
    assert "forward" in seen[0].text
    assert "gather" in seen[0].text


class Promises:
    """Batches, of which there are fewer than its length says."""

    def __init__(self, ctx: Context, promised: int, given: int) -> None:
        self.batches = [batch(ctx)] * given
        self.promised = promised

    def __len__(self) -> int:
        return self.promised

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [3])
def test_one_batch_fewer_is_an_error_that_counts_them(on: Where, size: int) -> None:
    def run(ctx: Context) -> Seen:
        model = af.prepare(ctx, nn.Linear(3, 1))

        def train() -> None:
            for data, _ in af.microbatches(ctx, Promises(ctx, 5, 5 - (ctx.rank == 1))):
                model(data).sum().backward()

        return look(train)

    seen = run_ranks(run, size, on, timeout_s=PATIENCE_S)
    assert {one.error for one in seen} == {"UnevenDataError"}
    assert len({one.text for one in seen}) == 1
    assert "different numbers of batches: 5, 4" in seen[0].text
    assert "rank(s) 1 had no more" in seen[0].text


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [3])
def test_a_rank_that_ends_a_step_earlier_is_missed_by_the_others(on: Where, size: int) -> None:
    def run(ctx: Context) -> Seen:
        model = af.prepare(ctx, nn.Linear(3, 1))
        return look(lambda: step(ctx, model, WARM + 2 - (ctx.rank == 1)))

    seen = run_ranks(run, size, on, timeout_s=PATIENCE_S)
    assert [one.error for one in seen] == ["" if rank == 1 else "MissingRankError" for rank in range(size)]
    assert "forward: rank 1 has ended after " in seen[0].text


# --- where the verdict is heard ------------------------------------------------------------------


class Custom:
    """A container that nobody knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Shaped(nn.Module):
    """Two layers, whose outputs are given in a shape of choice."""

    def __init__(self, shape: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)
        self.shape = shape

    def forward(self, x: torch.Tensor) -> Any:
        return self.shape(self.first(x), self.second(x))


Outputs = tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], torch.Tensor]]
# What a model gives, and how a loss is made of it.
LATE: dict[str, Outputs] = {
    "tensor": (lambda a, b: a + b, lambda out: out),
    "tuple": (lambda a, b: (a, b), lambda out: out[0] + out[1]),
    "dict": (lambda a, b: {"a": a, "b": [b, "x", 1]}, lambda out: out["b"][0] * out["a"]),
    "beside one without gradient": (lambda a, b: [a.detach(), {"b": a + b}], lambda out: out[1]["b"]),
    "only the first": (lambda a, b: (a, b), lambda out: out[0]),
    "only the last": (lambda a, b: (a, b), lambda out: out[1]),
    "changed in place": (lambda a, b: a + b, lambda out: out.mul_(2)),
    "view changed in place": (lambda a, b: (a + b).squeeze(1), lambda out: out.mul_(2)),
    "one of two views changed in place": (
        lambda a, b: torch.cat([a, b], 1).unsqueeze(0).transpose(0, 2),
        lambda out: out[0].mul_(2),
    ),
}
AT_ONCE: dict[str, Outputs] = {
    "custom": (lambda a, b: Custom(a + b), lambda out: out.value),
    "custom in a list": (lambda a, b: [Custom(a + b)], lambda out: out[0].value),
    "custom beside a tensor": (lambda a, b: (a, Custom(a + b)), lambda out: out[1].value),
}


def heard(ctx: Context, name: str, outputs: Outputs) -> tuple[bool, list[bool], bool]:
    """Say whether the verdict is open after a forward pass, at each gradient, and in the end."""
    shape, loss = outputs
    made = with_ddp(ctx, find_unused_parameters=name.startswith("only"))
    model = af.prepare(made, Shaped(shape))
    at_gradient: list[bool] = []

    def on_gradient(gradient: torch.Tensor) -> None:
        del gradient
        at_gradient.append(is_open(ctx))

    for _ in range(WARM):
        loss(model(batch(ctx))).sum().backward()
    for parameter in model.parameters():
        parameter.register_hook(on_gradient)
    output = model(batch(ctx))
    after = is_open(ctx)
    loss(output).sum().backward()
    return after, at_gradient, is_open(ctx)


def test_the_verdict_is_heard_before_the_first_gradient() -> None:
    def run(ctx: Context) -> dict[str, tuple[bool, list[bool], bool]]:
        return {name: heard(ctx, name, outputs) for name, outputs in LATE.items()}

    for found in run_ranks(run, 2, "processes", timeout_s=PATIENCE_S):
        for name, (after, at_gradient, end) in found.items():
            assert after, name
            assert at_gradient, name
            assert not any(at_gradient), name
            assert not end, name


def test_the_verdict_is_heard_at_once_where_gradients_may_start_unseen() -> None:
    def run(ctx: Context) -> dict[str, tuple[bool, list[bool], bool]]:
        return {name: heard(ctx, name, outputs) for name, outputs in AT_ONCE.items()}

    for found in run_ranks(run, 2, "processes", timeout_s=PATIENCE_S):
        for name, (after, at_gradient, _) in found.items():
            assert not after, name
            assert at_gradient, name


@pytest.mark.parametrize("on", WORLDS)
def test_a_forward_pass_without_a_backward_is_no_error(on: Where) -> None:
    def run(ctx: Context) -> tuple[list[float], list[float]]:
        model = af.prepare(ctx, nn.Linear(3, 1))
        step(ctx, model, WARM)
        model(batch(ctx))
        gathered = af.gather(ctx, torch.tensor([float(ctx.rank)]))
        model(batch(ctx))
        model(batch(ctx))
        model.zero_grad()
        step(ctx, model)
        model(batch(ctx))  # and the world ends
        bias = next(value.grad for name, value in model.named_parameters() if name.endswith("bias"))
        assert bias is not None
        return listed(gathered), listed(bias)

    assert run_ranks(run, 2, on, timeout_s=PATIENCE_S) == [([0.0, 1.0], [2.0])] * 2


# --- kinds of models -----------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses one of two layers, another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.layers[self.passes % 2](x)


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "usual": (lambda: nn.Linear(3, 1), {}),
    "buffers": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), {}),
    "unused parameters": (Branches, {"find_unused_parameters": True}),
    "static graph": (lambda: nn.Linear(3, 1), {"static_graph": True}),
}


@pytest.mark.parametrize("on", WORLDS)
def test_ranks_that_train_stay_equal_and_meet_once_for_each_pass(on: Where) -> None:
    def run(ctx: Context) -> dict[str, tuple[list[list[float]], list[list[float]], list[int]]]:
        return {name: trained(ctx, make, options) for name, (make, options) in KINDS.items()}

    def trained(
        ctx: Context, make: Callable[[], nn.Module], options: dict[str, Any]
    ) -> tuple[list[list[float]], list[list[float]], list[int]]:
        counted = Counted(with_ddp(ctx, **options))
        model = af.prepare(counted.ctx, make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(4, 3, generator=torch.Generator().manual_seed(ctx.rank))
        before = [listed(parameter) for parameter in model.parameters()]

        def train() -> None:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        counts = [counted.during(train) for _ in range(WARM + 2)]
        after = [listed(parameter) for parameter in model.parameters()]
        return before, after, counts

    one, other = run_ranks(run, 2, on, timeout_s=PATIENCE_S)
    for name, first in one.items():
        second = other[name]
        assert first[:2] == second[:2], name
        assert first[0] != first[1], name
        if on == "processes":  # where gradients and buffers go by torch's own reductions
            assert first[2] == second[2] == [1] * (WARM + 2), name


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.mark.parametrize("way", [by_pickle, by_torch])
def test_a_model_from_a_pickle_belongs_to_no_world(way: Callable[[nn.Module], nn.Module]) -> None:
    def run(ctx: Context) -> tuple[nn.Module, int]:
        counted = Counted(ctx)
        model = af.prepare(counted.ctx, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        loaded = way(model)

        def alone() -> None:
            loaded(batch(ctx)).sum().backward()
            with syncing(False, loaded):
                loaded(batch(ctx)).sum().backward()

        count = counted.during(alone)
        own = next(loaded.parameters()).grad
        assert own is not None
        return loaded, count

    for loaded, count in run_ranks(run, 2, timeout_s=PATIENCE_S):
        assert count == 0
        loaded.eval()
        assert loaded(torch.zeros(1, 3)).shape == (1, 2)


# --- what is not checked -------------------------------------------------------------------------


def without_gradients(model: nn.Module, ctx: Context) -> None:
    with torch.no_grad():
        model(batch(ctx))


def under_no_sync(model: nn.Module, ctx: Context) -> None:
    with syncing(False, model):
        step(ctx, model)


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("action", [without_gradients, under_no_sync])
def test_a_pass_that_reduces_nothing_makes_no_exchange(
    on: Where, action: Callable[[nn.Module, Context], None]
) -> None:
    def run(ctx: Context) -> list[int]:
        counted = Counted(ctx)
        model = af.prepare(counted.ctx, nn.Linear(3, 1))
        counts: list[int] = []
        for _ in range(WARM + 1):
            counts.append(counted.during(lambda: action(model, ctx)))
            counts.append(counted.during(lambda: model(batch(ctx)).sum()))
        return counts

    assert run_ranks(run, 2, on) == [[0, 1] * (WARM + 1)] * 2


def test_without_a_guard_no_pass_is_checked() -> None:
    def run(ctx: Context) -> int:
        counted = Counted(ctx)
        model = af.prepare(counted.ctx, nn.Linear(3, 1))
        return counted.during(lambda: step(ctx, model, WARM + 1))

    assert run_ranks(run, 2, "processes", guard="off") == [0, 0]
