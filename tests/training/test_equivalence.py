# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""n ranks, b samples a batch, k batches a window, an uneven tail: the same as one rank with one batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn import Context, DataLoaderConfiguration
from accelfn.data import MicroBatch, microbatches, prepare_data_loader
from accelfn.testing import Where, run_ranks
from accelfn.testing.strategies import tensors, trees
from accelfn.tree import flatten, map_tensors

TOLERANCE = 1e-6  # of float32, for numbers up to about 1
RATE = 0.5


@dataclass(frozen=True)
class Case:
    """A way to train for one epoch.

    Attributes:
        batch: Samples of one rank in one batch.
        steps: Batches of a window.
        num: Samples altogether.
        even: Fill the last step up with samples that came before; otherwise leave it short.
        hidden: Units of the model's middle layer.
        seed: Of data and model.
    """

    batch: int
    steps: int
    num: int
    even: bool = False
    hidden: int = 3
    seed: int = 0


def make_data(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give inputs, targets, and how much each sample counts: many of them nothing."""
    generator = torch.Generator().manual_seed(case.seed)
    x, y = (torch.rand(case.num, size, generator=generator) * 2 - 1 for size in (3, 2))
    return x, y, torch.randint(0, 4, (case.num,), generator=generator).float()


def make_model(case: Case) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, case.hidden), nn.Tanh(), nn.Linear(case.hidden, 2))
    generator = torch.Generator().manual_seed(case.seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    return model


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean(dim=1)


def taken(model: nn.Module) -> list[torch.Tensor]:
    return [cast("torch.Tensor", parameter.grad).clone() for parameter in model.parameters()]


def at_once(case: Case, world: int, weighted: bool) -> list[list[torch.Tensor]]:
    """Train on one rank with each window as one batch; return each step's gradients, and the weights."""
    x, y, weights = make_data(case)
    model = make_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found: list[list[torch.Tensor]] = []
    for begin in range(0, case.num, world * case.batch * case.steps):
        rows = slice(begin, begin + world * case.batch * case.steps)
        losses = losses_of(model, x[rows], y[rows])
        counts = weights[rows] if weighted else torch.ones_like(losses)
        optimizer.zero_grad()
        # Without any weight there is nothing to learn.
        ((losses * counts).sum() / counts.sum().clamp(min=1.0)).backward()
        found.append(taken(model))
        optimizer.step()
    return [*found, [parameter.detach() for parameter in model.parameters()]]


def configured(ctx: Context, case: Case) -> Context:
    loading = DataLoaderConfiguration(even_batches=case.even)
    return ctx.replace(gradient_accumulation_steps=case.steps, dataloader_config=loading)


def shared_out(ctx: Context, case: Case) -> Any:
    dataset = cast("Any", TensorDataset(*make_data(case)))
    return microbatches(ctx, prepare_data_loader(ctx, DataLoader(dataset, case.batch)), "pad")


def counting(weights: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Leave out rows that are padding: there are no others behind them."""
    valid = torch.arange(len(weights)) < (len(weights) if micro.own_valid is None else micro.own_valid)
    return weights * valid


def in_parts(ctx: Context, case: Case, weighted: bool) -> list[list[torch.Tensor]]:
    """Do what :func:`at_once` does, on many ranks and in many batches."""
    ctx = configured(ctx, case)
    model = make_model(case)
    model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=RATE))
    scaler = af.init_scaler(ctx)
    found: list[list[torch.Tensor]] = []
    for (x, y, weights), micro in shared_out(ctx, case):
        with af.accumulate(ctx, micro, model):
            losses = losses_of(model, x, y)
            if weighted:
                counts = counting(weights, micro)
                scaler = af.backward(ctx, (losses * counts).sum(), scaler, micro, weight=counts.sum())
            else:
                scaler = af.backward(ctx, losses.mean(), scaler, micro)
        if micro.sync:
            scaler = af.unscale_gradients(ctx, optimizer, scaler)
            found.append(taken(model))
            scaler = af.optimizer_step(ctx, optimizer, scaler)
    return [*found, [parameter.detach() for parameter in model.parameters()]]


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def check(world: int, case: Case, weighted: bool) -> None:
    expected = at_once(case, world, weighted)
    for found in run_ranks(lambda ctx: in_parts(ctx, case, weighted), world):
        assert_equal(found, expected)


@st.composite
def cases(draw: st.DrawFn, weighted: bool) -> tuple[int, Case]:
    """Draw a number of ranks and a way to train on them."""
    sizes = st.integers(1, 4)
    world, batch, steps = draw(sizes), draw(sizes), draw(sizes)
    # Means: the last window is a short one, unless ``steps`` divides the number of batches.
    num, even = world * batch * draw(st.integers(1, 9)), False
    if weighted:
        # Each rank has at least one row: what a rank without any would repeat as padding, nobody knows.
        num, even = (world - 1) * batch + 1 + draw(st.integers(0, 60)), draw(st.booleans())
    return world, Case(batch, steps, num, even, draw(st.integers(1, 5)), draw(st.integers(0, 999)))


@given(cases(weighted=False))
def test_means_over_equal_batches(drawn: tuple[int, Case]) -> None:
    check(*drawn, weighted=False)


@given(cases(weighted=True))
@example((3, Case(2, 2, 6)))  # one sample more than it needs for a batch each: ranks 0 and 1 have theirs
@example((3, Case(2, 1, 7)))  # the last step leaves ranks 1 and 2 without a row
@example((3, Case(2, 2, 7, even=True)))  # the last step is padding on ranks 1 and 2
def test_sums_with_weights_over_an_uneven_tail(drawn: tuple[int, Case]) -> None:
    check(*drawn, weighted=True)


# Batches and windows that come out even; a short last window; a short last batch; ranks without a last batch;
# and a last window that is padding on all ranks but one.
MEANS = (Case(2, 3, 36), Case(3, 2, 90))
SUMS = (Case(2, 3, 23), Case(3, 2, 37), Case(4, 4, 49, even=True), Case(1, 1, 10), Case(2, 2, 25, even=True))


@pytest.mark.parametrize("world", [2, 3])
def test_the_same_by_ddp_on_processes(world: int) -> None:
    cases = [*((case, False) for case in MEANS), *((case, True) for case in SUMS)]
    expected = [at_once(case, world, weighted) for case, weighted in cases]
    ranks = run_ranks(lambda ctx: [in_parts(ctx, *case) for case in cases], world, "processes")
    for found in ranks:
        for one, right in zip(found, expected, strict=True):
            assert_equal(one, right)
    # Replicas are more than close.
    for found in ranks[1:]:
        torch.testing.assert_close(found, ranks[0], rtol=0, atol=0)


def test_a_rank_without_any_row_is_refused_on_every_rank() -> None:
    def run(ctx: Context) -> str:
        with pytest.raises(ValueError, match="a rank has no batch") as caught:
            in_parts(ctx, Case(2, 1, 2), weighted=True)
        return str(caught.value)

    assert len(set(run_ranks(run, 3))) == 1


def losses_of_tree(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Give a loss for each row that depends on every number of a tree, whatever its form."""
    total = torch.zeros(len(x))
    for place, leaf in enumerate(flatten(params)[0], 1):
        numbers = leaf.reshape(-1) / 8
        angles = x.sum(dim=1, keepdim=True) * torch.arange(place, place + numbers.numel())
        total = total + (angles.sin() * numbers).sum(dim=1) / max(1, numbers.numel())
    return (total.tanh() - x[:, 0]).square()


def add(first: Any, second: Any, scale: float | torch.Tensor) -> Any:
    pairs = iter(flatten(second)[0])
    return map_tensors(lambda leaf: leaf + next(pairs) * scale, first)


def grads_of_windows(
    ctx: Context, case: Case, params: Any, weighted: bool
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Give value and gradient of each window, by ``value_and_grad`` of each of its batches."""
    ctx = configured(ctx, case)

    def mean(params: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return losses_of_tree(params, x).mean()

    def weighted_sum(params: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return (losses_of_tree(params, x) * counts).sum()

    chosen: Callable[..., torch.Tensor] = weighted_sum if weighted else mean
    step = af.value_and_grad(ctx, chosen)
    found: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    zero = (torch.zeros(()), map_tensors(torch.zeros_like, params))
    window, weight = zero, torch.zeros(())
    for (x, _, weights), micro in shared_out(ctx, case):
        counts = counting(weights, micro)
        result = step(params, x, counts)
        window = add(window, result, 1 if weighted else 1 / micro.window)
        weight = weight + counts.sum()
        if micro.sync:
            if weighted:  # values and gradients are averaged over ranks, and weights added up
                total = af.reduce(ctx, weight)
                window = add(zero, window, ctx.num_processes / total.clamp(min=1.0))
            found.append((window[0], flatten(window[1])[0]))
            window, weight = zero, torch.zeros(())
    return found


def check_tree(world: int, case: Case, params: Any, weighted: bool, on: Where = "memory") -> None:
    x, _, weights = make_data(case)
    expected: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    leaves, structure = flatten(params)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    for begin in range(0, case.num, world * case.batch * case.steps):
        rows = slice(begin, begin + world * case.batch * case.steps)
        losses = losses_of_tree(structure.unflatten(leaves), x[rows])
        counts = weights[rows] if weighted else torch.ones_like(losses)
        loss = (losses * counts).sum() / counts.sum().clamp(min=1.0)
        grads = torch.autograd.grad(loss, leaves) if leaves else ()
        expected.append((loss.detach(), list(grads)))
    for found in run_ranks(lambda ctx: grads_of_windows(ctx, case, params, weighted), world, on):
        assert_equal(found, expected)


@given(trees(tensors(torch.float32)), st.booleans(), st.data())
def test_a_tree_by_value_and_grad(params: Any, weighted: bool, data: st.DataObject) -> None:
    check_tree(*data.draw(cases(weighted)), params, weighted)


def test_a_tree_by_value_and_grad_on_processes() -> None:
    check_tree(2, SUMS[0], {"z": torch.ones(3), "a": (torch.ones(1, 2), [None])}, True, "processes")
