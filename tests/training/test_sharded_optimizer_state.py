"""A train step whose optimizer state is split over the ranks: the numbers are those of the whole."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context, Guard, Loss
from accelfn.config import CanonicalReduction, GradScalerKwargs
from accelfn.errors import NonFiniteGradientError, NotAvailableError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import gradients, parameters
from accelfn.tree import Sharded
from tests.parallel.traffic import traffic_of
from tests.training.optimizers import Adam

ROWS, STEPS = 12, 5
# Rows that two and four ranks split unequally or don't have, and a parameter that isn't split.
SHAPES = {"w": (7, 3), "b": (3,), "one": (1, 3), "s": ()}
EXACT: Any = {"reduction": CanonicalReduction()}


def make_params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_rows(ctx: Context, step: int) -> torch.Tensor:
    rows = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step + 1))
    count = ROWS // ctx.num_processes
    return rows[ctx.rank * count : (ctx.rank + 1) * count]


def outputs(params: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"] + params["b"] + params["one"][0]) * params["s"]).tanh()


def mean_loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return outputs(params, x).square().mean()


def sum_loss(params: Any, x: torch.Tensor) -> Loss:
    return Loss(outputs(params, x).square().sum(), weight=x.abs().sum(), aux={"largest": x.amax()})


class Run(NamedTuple):
    """What a rank has after some steps."""

    params: dict[str, torch.Tensor]
    metrics: list[Any]
    state: Any


def train(
    ctx: Context,
    is_sharded: bool,
    loss_fn: Any = mean_loss,
    steps: range = range(STEPS),
    start: Path | None = None,
    goal: Path | None = None,
    optimizer: Any = None,
    **options: Any,
) -> Run:
    optimizer = optimizer or af.functional(torch.optim.AdamW, lr=0.05)
    state = af.init_train_state(ctx, optimizer, make_params(), shard_optimizer_state=is_sharded)
    if start is not None:
        state = af.load_state(ctx, start, state)
    step = af.make_train_step(ctx, loss_fn, optimizer, shard_optimizer_state=is_sharded, **options)
    metrics: list[Any] = []
    for number in steps:
        state, one = step(state, make_rows(ctx, number))
        metrics.append([float(one.loss), one.grad_norm and float(one.grad_norm), bool(one.skipped), one.aux])
    if goal is not None:
        af.save_state(ctx, goal, state)
    return Run(state.params, metrics, state)


def both(size: int, loss_fn: Any = mean_loss, *, on: Any = "memory", options: Any = None, **step: Any) -> Any:
    chosen: Any = options or {}

    def run(ctx: Context) -> tuple[Run, Run]:
        ctx = ctx.replace(**chosen)
        return train(ctx, True, loss_fn, **step), train(ctx, False, loss_fn, **step)

    return run_ranks(run, size, on)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("loss_fn", [mean_loss, sum_loss])
@pytest.mark.parametrize("number", [1, 2])
def test_without_clipping_the_bits_are_those_of_whole_states(size: int, loss_fn: Any, number: int) -> None:
    found = both(size, loss_fn, options={"gradient_accumulation_steps": number})
    for mine, whole in found:
        torch.testing.assert_close(mine[:2], whole[:2], rtol=0, atol=0)
        torch.testing.assert_close(mine.params, found[0][0].params, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize(("size", "on"), [(1, "memory"), (3, "memory"), (4, "processes")])
def test_otherwise_the_numbers_are_within_rounding(
    mode: str, max_norm: float | None, size: int, on: Any
) -> None:
    found = both(size, on=on, options={"mixed_precision": mode}, max_norm=max_norm)
    bounds: Any = {"rtol": 1e-5, "atol": 1e-6} if size > 1 else {"rtol": 0, "atol": 0}
    for mine, whole in found:
        torch.testing.assert_close(mine[:2], whole[:2], **bounds)
        torch.testing.assert_close(mine.params, found[0][0].params, rtol=0, atol=0)  # no rank drifts


@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("loss_fn", [mean_loss, sum_loss])
def test_in_exact_mode_the_bits_are_those_of_whole_states_on_any_ranks(
    max_norm: float | None, loss_fn: Any
) -> None:
    def run(ctx: Context, is_sharded: bool) -> Run:
        ctx = ctx.replace(gradient_accumulation_steps=4 // ctx.num_processes)
        return train(ctx, is_sharded, loss_fn, max_norm=max_norm)

    (alone,) = run_ranks(lambda ctx: run(ctx, False), 1, **EXACT)
    for size in (1, 2, 4):
        for one in run_ranks(lambda ctx: run(ctx, True), size, **EXACT):
            torch.testing.assert_close(one[:2], alone[:2], rtol=0, atol=0)


def test_each_rank_keeps_its_rows_of_the_state_alone() -> None:
    def count(run: Run) -> int:
        tensors = af.tree.flatten(run.state.optimizer_state)[0]
        return sum(leaf.numel() for leaf in af.pieces(tensors) if leaf.dim())

    found = both(4)
    assert [count(whole) for _, whole in found] == [2 * 27] * 4
    # Two moments of: rows 2, 2, 2, 1 of 3; 1, 1, 1, 0; a row of 3 on the first.
    assert [count(mine) for mine, _ in found] == [2 * 10, 2 * 7, 2 * 7, 2 * 3]
    state = found[3][0].state.optimizer_state
    assert isinstance(state["exp_avg"]["w"], Sharded)
    assert not isinstance(state["exp_avg"]["s"], Sharded)
    assert not isinstance(state["step"]["w"], Sharded)


def test_collectives_and_bytes_of_a_step() -> None:
    """As many bytes as one reduction, which a ring does as these two halves."""

    def cost(ctx: Context, is_sharded: bool, max_norm: float | None) -> tuple[Counter[str], Counter[str]]:
        def loss_fn(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(x @ one).square().mean() for one in params.values()]).sum()

        optimizer = af.functional(torch.optim.AdamW)
        params = {f"{number}": torch.ones(256, 512) for number in range(4)}
        state = af.init_train_state(ctx, optimizer, params, shard_optimizer_state=is_sharded)
        step = af.make_train_step(
            ctx,
            loss_fn,
            optimizer,
            max_norm=max_norm,
            shard_optimizer_state=is_sharded,
        )
        for _ in range(2):
            state, _ = step(state, torch.ones(2, 256))
        seen = traffic_of(lambda: step(state, torch.ones(2, 256)))
        return seen.calls, seen.received

    size = 4 * 256 * 512 * 4
    for max_norm in (None, 1.0):
        for calls, received in run_ranks(partial(cost, is_sharded=True, max_norm=max_norm), 2, "processes"):
            assert calls == {"reduce_scatter": 1, "allgather": 1}
            assert received == {"reduce_scatter": size // 2, "allgather": size // 2}
    for calls, received in run_ranks(partial(cost, is_sharded=False, max_norm=None), 2, "processes"):
        assert calls == {"allreduce": 1}
        assert size <= received["allreduce"] <= size + 8  # and the loss


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_step_that_overflows_on_one_rank_changes_nothing_on_any(max_norm: float | None) -> None:
    scaler = GradScalerKwargs(init_scale=2.0**10)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"]).mean() + 0.1 * (params["b"].sum() + params["one"].sum() + params["s"])

    def run(ctx: Context) -> list[Any]:
        optimizer = af.functional(torch.optim.AdamW, lr=0.05)
        state = af.init_train_state(ctx, optimizer, make_params(), shard_optimizer_state=True)
        step = af.make_train_step(ctx, loss_fn, optimizer, max_norm=max_norm, shard_optimizer_state=True)
        state, _ = step(state, make_rows(ctx, 0))
        # The gradient is infinite in the last row of w alone, which the last rank updates.
        rows = make_rows(ctx, 1).clone()
        rows[0, -1] = float("inf") if ctx.rank == 0 else 1.0
        after, metrics = step(state, rows)
        for one, other in zip(*(af.tree.flatten(each[:2])[0] for each in (state, after)), strict=True):
            assert torch.equal(af.tree.local_of(one), af.tree.local_of(other))
        assert float(after.scaler.scale) == float(state.scaler.scale) / 2
        then, good = step(after, make_rows(ctx, 2))
        return [bool(metrics.skipped), bool(good.skipped), int(then.num_steps), then.params["w"].tolist()]

    found = run_ranks(run, 4, mixed_precision="fp16", kwargs_handlers=[scaler])
    assert found[0][:3] == [True, False, 3]
    assert found == [found[0]] * 4


@pytest.mark.parametrize("check", [True, "skip"])
def test_gradients_are_checked(check: Any) -> None:
    def run(ctx: Context) -> Any:
        ctx = ctx.replace(guard=Guard(check_gradients=check))
        optimizer = af.functional(torch.optim.AdamW, lr=0.05)
        state = af.init_train_state(ctx, optimizer, make_params(), shard_optimizer_state=True)
        step = af.make_train_step(ctx, mean_loss, optimizer, shard_optimizer_state=True)
        rows = make_rows(ctx, 0) * (float("nan") if ctx.rank == 1 else 1.0)
        if check is True:
            with pytest.raises(NonFiniteGradientError, match=r"params\['w'\]"):
                step(state, rows)
            return True
        after, metrics = step(state, rows)
        return bool(metrics.skipped) and torch.equal(after.params["w"], state.params["w"])

    assert run_ranks(run, 3) == [True] * 3


class KilledError(Exception):
    """As a process that ends."""


def test_a_run_that_is_killed_goes_on_with_fewer_ranks_and_ends_the_same(tmp_path: Path) -> None:
    """Four ranks, of which one dies in a step after a save; then two, then one. In exact mode, same bits."""

    def run(ctx: Context, steps: range, start: str, goal: str, kill: bool = False) -> Run:
        ctx = ctx.replace(gradient_accumulation_steps=4 // ctx.num_processes)
        done = 0

        def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
            nonlocal done
            done += 1
            if kill and ctx.rank == 2 and done > 4:
                raise KilledError
            return mean_loss(params, x)

        path = None if not start else tmp_path / start
        if kill:
            train(ctx, True, loss_fn, range(3), goal=tmp_path / goal, max_norm=0.5)
        return train(ctx, True, loss_fn, steps, path, tmp_path / goal, max_norm=0.5)

    (alone,) = run_ranks(lambda ctx: run(ctx, range(9), "", "undisturbed"), 1, **EXACT)
    with pytest.raises(KilledError):
        run_ranks(lambda ctx: run(ctx, range(3, 9), "four", "four", kill=True), 4, **EXACT)
    run_ranks(lambda ctx: run(ctx, range(3, 6), "four", "two"), 2, **EXACT)
    (last,) = run_ranks(lambda ctx: run(ctx, range(6, 9), "two", "one"), 1, **EXACT)
    torch.testing.assert_close(last.params, alone.params, rtol=0, atol=0)
    found, expected = (af.load_tree(tmp_path / name) for name in ("one", "undisturbed"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_whole_states_and_sharded_ones_load_as_each_other(tmp_path: Path) -> None:
    def run(ctx: Context) -> list[Run]:
        runs: list[Run] = []
        for is_sharded in (True, False):
            train(ctx, is_sharded, steps=range(2), goal=tmp_path / "at")
            runs.append(train(ctx, not is_sharded, steps=range(2, 4), start=tmp_path / "at"))
        return [*runs, train(ctx, False, steps=range(4))]

    for one, other, expected in run_ranks(run, 3):
        torch.testing.assert_close(one.params, expected.params, rtol=0, atol=0)
        torch.testing.assert_close(other.params, expected.params, rtol=0, atol=0)


KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    *((kind, {}) for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)),
    *((kind, {}) for kind in (torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop)),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.ASGD, {"t0": 2.0, "lr": 0.1}),
]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda one: getattr(one, "__name__", ""))
def test_every_class_that_steps_elementwise(kind: Any, options: Any, donate: bool) -> None:
    def run(ctx: Context) -> list[Run]:
        optimizer = af.functional(kind, donate=donate, **options)
        return [train(ctx, is_sharded, optimizer=optimizer) for is_sharded in (True, False)]

    for mine, whole in run_ranks(run, 3):
        torch.testing.assert_close(mine[:2], whole[:2], rtol=0, atol=0)


def test_some_parameters_are_left_out() -> None:
    def run(ctx: Context) -> list[Run]:
        optimizer = af.masked(af.functional(torch.optim.AdamW, lr=0.1), lambda path: "b" not in path)
        return [train(ctx, is_sharded, optimizer=optimizer) for is_sharded in (True, False)]

    for mine, whole in run_ranks(run, 3):
        torch.testing.assert_close(mine[:2], whole[:2], rtol=0, atol=0)
        assert torch.equal(mine.params["b"], make_params()["b"])
        assert list(mine.state.optimizer_state["exp_avg"]) == ["['one']", "['s']", "['w']"]


@settings(max_examples=25)
@given(st.data(), st.integers(1, 4))
def test_drawn_parameters(data: st.DataObject, size: int) -> None:
    params = data.draw(parameters())
    slopes = data.draw(gradients(params))

    def loss_fn(params: Any, x: torch.Tensor) -> Any:
        pairs = zip(*(af.tree.flatten(each)[0] for each in (params, slopes)), strict=True)
        return sum((one * slope * x.sum()).sum() for one, slope in pairs)

    def run(ctx: Context) -> list[Any]:
        found: list[Any] = []
        for is_sharded in (True, False):
            optimizer = af.functional(torch.optim.AdamW, lr=0.25)
            state = af.init_train_state(ctx, optimizer, params, shard_optimizer_state=is_sharded)
            step = af.make_train_step(ctx, loss_fn, optimizer, shard_optimizer_state=is_sharded)
            for _ in range(2):
                state, _ = step(state, torch.ones(1) + ctx.rank)
            found.append(state.params)
        return found

    for mine, whole in run_ranks(run, size):
        torch.testing.assert_close(mine, whole, rtol=0, atol=0)


def test_windows_of_a_loader() -> None:
    def run(ctx: Context) -> list[Any]:
        ctx = ctx.replace(gradient_accumulation_steps=2)
        rows = [make_rows(Context(), step) for step in range(3)]
        found: list[Any] = []
        for is_sharded in (True, False):
            loader: Any = af.prepare(
                ctx, torch.utils.data.DataLoader(cast("Any", torch.cat(rows)), batch_size=3)
            )
            optimizer = af.functional(torch.optim.AdamW, lr=0.1)
            state = af.init_train_state(ctx, optimizer, make_params(), shard_optimizer_state=is_sharded)
            step = af.make_train_step(ctx, sum_loss, optimizer, shard_optimizer_state=is_sharded)
            for window in af.windows(ctx, loader, epochs=2):
                state, _ = step(state, window)
            found.append(state.params)
        return found

    for mine, whole in run_ranks(run, 2):
        torch.testing.assert_close(mine, whole, rtol=0, atol=0)


class Own(torch.optim.SGD):
    """A class of the user's."""


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: torch.optim.SGD([torch.ones(1)]),
            TypeError,
            r"accelfn\.functional.*got SGD\. Shard modules",
        ),
        (lambda: Adam(0.1), TypeError, r"takes an optimizer from accelfn\.functional.*got Adam"),
        (lambda: af.functional(torch.optim.Muon), NotAvailableError, r"Muon isn't known"),
        (lambda: af.functional(torch.optim.Adafactor), NotAvailableError, r"Adafactor isn't known"),
        (lambda: af.masked(af.functional(torch.optim.Muon), {}), NotAvailableError, r"Muon isn't known"),
        (lambda: af.functional(Own), NotAvailableError, r"Own isn't known.*is_elementwise=True"),
    ],
)
def test_optimizers_that_cant_update_pieces_are_refused(make: Any, error: Any, text: str) -> None:
    def run(ctx: Context) -> None:
        with pytest.raises(error, match=f"make_train_step: .*{text}"):
            af.make_train_step(ctx, mean_loss, make(), shard_optimizer_state=True)
        with pytest.raises(error, match=f"init_train_state: .*{text}"):
            af.init_train_state(ctx, make(), make_params(), shard_optimizer_state=True)

    run_ranks(run, 2)


def test_a_class_may_be_declared_elementwise() -> None:
    def run(ctx: Context) -> list[Run]:
        optimizer = af.functional(Own, lr=0.1, is_elementwise=True)
        return [train(ctx, is_sharded, optimizer=optimizer) for is_sharded in (True, False)]

    for mine, whole in run_ranks(run, 2):
        torch.testing.assert_close(mine[:2], whole[:2], rtol=0, atol=0)


def test_muon_over_pieces_is_refused_without_a_step_too() -> None:
    with pytest.raises(NotAvailableError, match=r"functional: Muon isn't known"):
        af.functional(torch.optim.Muon).init({"w": Sharded(torch.ones(2, 2), 0, 0, 4)})


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_state_of_the_other_kind_is_refused(is_sharded: bool) -> None:
    def run(ctx: Context) -> None:
        optimizer = af.functional(torch.optim.AdamW)
        state = af.init_train_state(ctx, optimizer, make_params(), shard_optimizer_state=not is_sharded)
        step = af.make_train_step(ctx, mean_loss, optimizer, shard_optimizer_state=is_sharded)
        with pytest.raises(TypeError, match=r"Pass the same shard_optimizer_state="):
            step(state, make_rows(ctx, 0))

    run_ranks(run, 2)


def test_a_state_of_other_pieces_is_refused() -> None:
    optimizer = af.functional(torch.optim.AdamW)
    state = optimizer.init({"w": Sharded(torch.ones(2, 2), 0, 0, 4)})
    for other, text in (
        (
            Sharded(torch.ones(2, 2), 0, 2, 4),
            "entries 0 to 2 along dim 0 .* and its parameter entries 2 to 4",
        ),
        (torch.ones(4, 2), ".*its parameter the whole of shape"),
    ):
        with pytest.raises(ValueError, match=f"functional: the state 'exp_avg' is {text}"):
            optimizer.update({"w": torch.ones(2, 2)}, state, {"w": other})
