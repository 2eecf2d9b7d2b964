# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportIndexIssue=false

from collections.abc import Callable
from typing import Any, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import Context, GradScalerKwargs, Guard, Loss, PureTrainState
from accelfn.errors import MismatchError, NonFiniteGradientError, ReplicaDriftError
from accelfn.testing import Where, run_ranks
from tests.training.optimizers import Adam, Sgd
from tests.training.test_train_step import Rows, make_model, make_rows
from tests.training.test_train_step import mean_loss as of_module


def make_params(kind: str, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    weight, bias, out = (torch.randn(shape, generator=generator) for shape in ((3, 4), (4,), (4,)))
    if kind == "dict":
        return {"z": weight, "a": {"bias": bias, "out": [out]}}
    return (weight, [bias, None], (out,))


def outputs(params: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(params, dict):
        tree = cast("dict[str, Any]", params)
        weight, bias, out = tree["z"], tree["a"]["bias"], tree["a"]["out"][0]
    else:
        weight, (bias, _), (out,) = params
    return (x @ weight + bias).tanh() @ out


def mean_loss(params: Any, rows: Rows) -> torch.Tensor:
    return outputs(params, rows["x"]).square().mean()


def mean_with_aux(params: Any, rows: Rows) -> Loss:
    loss = mean_loss(params, rows)
    return Loss(loss, aux={"twice": 2 * loss, "x": rows["x"].mean(dim=0)})


def sum_loss(params: Any, rows: Rows) -> Loss:
    total = (outputs(params, rows["x"]).square() * rows["weight"]).sum()
    return Loss(total, rows["weight"].sum(), {"twice": 2 * total})


def train(
    ctx: Context, kind: str, loss_fn: Callable[..., Any], rows: Rows, seed: int, max_norm: float | None
) -> tuple[Any, Any]:
    optimizer = Sgd(0.1)
    step = af.make_train_step(ctx, loss_fn, optimizer, max_norm=max_norm)
    state: PureTrainState[Any] = af.init_train_state(ctx, optimizer, make_params(kind, seed))
    count = len(rows["x"]) // ctx.num_processes
    own = af.slice_tensors(rows, slice(ctx.rank * count, (ctx.rank + 1) * count))
    told: list[Any] = []
    for _ in range(2):
        state, metrics = step(state, own)
        told.append((metrics.loss, metrics.grad_norm, metrics.aux))
    return state.params, told


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(optree.tree_leaves(found), optree.tree_leaves(expected), rtol=1e-5, atol=1e-6)


def same(found: Any, expected: Any) -> None:
    assert optree.tree_structure(found) == optree.tree_structure(expected)
    torch.testing.assert_close(optree.tree_leaves(found), optree.tree_leaves(expected), rtol=0, atol=0)


@pytest.mark.parametrize("loss_fn", [mean_loss, mean_with_aux, sum_loss])
@given(
    st.sampled_from(["dict", "tuple"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 999),
)
def test_ranks_and_windows_are_one_rank_with_one_batch(
    loss_fn: Callable[..., Any], kind: str, ranks: int, window: int, count: int, clip: bool, seed: int
) -> None:
    rows, max_norm = make_rows(ranks * count, seed), 0.5 if clip else None
    expected = train(Context(), kind, loss_fn, rows, seed, max_norm)
    found = run_ranks(
        lambda ctx: train(ctx, kind, loss_fn, rows, seed, max_norm), ranks, gradient_accumulation_steps=window
    )
    for one in found:
        close(one, expected)
        same(one, found[0])  # parameters and metrics are equal on all ranks


@pytest.mark.parametrize("on", ["gloo", "processes"])
def test_the_same_on_real_groups(on: Where) -> None:
    rows = make_rows(12, 3)
    expected = train(Context(), "dict", sum_loss, rows, 3, 0.5)
    for one in run_ranks(
        lambda ctx: train(ctx, "dict", sum_loss, rows, 3, 0.5), 2, on, gradient_accumulation_steps=3
    ):
        close(one, expected)


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_it_is_the_step_over_a_module(mode: str) -> None:
    handlers = [GradScalerKwargs(init_scale=8.0)] if mode == "fp16" else []
    ctx = Context().replace(mixed_precision=mode, kwargs_handlers=handlers, gradient_accumulation_steps=3)
    rows, model = make_rows(7, 1), make_model(1)
    params = {name: item.detach().clone() for name, item in model.named_parameters()}
    af.prepare_model(ctx, model)
    by = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = af.make_train_step(ctx, of_module, by, model=model, max_norm=0.5)

    def functional_loss(params: dict[str, torch.Tensor], rows: Rows) -> torch.Tensor:
        return torch.func.functional_call(model, params, rows["x"]).square().mean()

    pure = af.make_train_step(ctx, functional_loss, Sgd(0.1), max_norm=0.5)
    state = af.init_train_state(ctx, Sgd(0.1), params)
    other = af.init_train_state(ctx, by)
    for _ in range(3):
        state, metrics = pure(state, rows)
        other, expected = whole(other, rows)
        close(metrics, expected)
    close(state.params, dict(model.named_parameters()))
    same(state.scaler, other.scaler)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_has_the_bits_of_a_loop_written_by_hand(ranks: int) -> None:
    rows, optimizer = make_rows(4, 9), Adam(0.1)

    def by_hand(ctx: Context) -> Any:
        params = make_params("dict", 9)
        state = optimizer.init(params)
        own = af.slice_tensors(rows, slice(ctx.rank, ctx.rank + 2))
        for _ in range(3):
            _, grads = af.value_and_grad(ctx, mean_loss)(params, own)
            updates, state = optimizer.update(grads, state, params=params)
            params = optree.tree_map(torch.add, params, updates)
        return params

    def by_step(ctx: Context) -> Any:
        step = af.make_train_step(ctx, mean_loss, optimizer)
        state = af.init_train_state(ctx, optimizer, make_params("dict", 9))
        for _ in range(3):
            state, _ = step(state, af.slice_tensors(rows, slice(ctx.rank, ctx.rank + 2)))
        return state.params

    same(run_ranks(by_step, ranks), run_ranks(by_hand, ranks))


@pytest.mark.parametrize("mode", ["no", "fp16"])
@given(st.booleans(), st.integers(0, 99))
def test_what_goes_in_is_left_as_it_was(mode: str, overflows: bool, seed: int) -> None:
    ctx = Context().replace(mixed_precision=mode, gradient_accumulation_steps=2)
    optimizer = Adam(0.1)
    state = af.init_train_state(ctx, optimizer, make_params("tuple", seed))
    rows = make_rows(3, seed)
    if overflows:
        rows["weight"][0] = float("inf")
    leaves = tensors((state, rows))
    copies = [leaf.clone() for leaf in leaves]
    versions = [leaf._version for leaf in leaves]
    new, _ = af.make_train_step(ctx, sum_loss, optimizer, max_norm=1.0)(state, rows)
    torch.testing.assert_close(leaves, copies, rtol=0, atol=0, equal_nan=True)
    assert [leaf._version for leaf in leaves] == versions
    assert not any(leaf.requires_grad for leaf in tensors(new))


def test_a_step_that_overflows_on_one_rank_changes_nothing_on_any() -> None:
    def run(ctx: Context) -> list[float]:
        optimizer = Adam(0.1)
        step = af.make_train_step(ctx, lambda params, x: (params["w"] * x).mean(), optimizer, max_norm=1.0)
        state = af.init_train_state(ctx, optimizer, {"w": torch.ones(3)})
        scales: list[float] = []
        for bad in (False, True, False):
            before = state
            state, metrics = step(state, torch.full((2, 3), float("inf") if bad and ctx.rank else 1.0))
            assert bool(metrics.skipped) == bad
            assert torch.equal(state.params["w"], before.params["w"]) == bad
            if bad:
                same(state.optimizer_state, before.optimizer_state)
            scales.append(float(state.scaler.scale))
        assert (int(state.scaler.num_skipped), int(state.num_steps)) == (1, 3)
        return scales

    handlers = [GradScalerKwargs(init_scale=8.0)]
    assert run_ranks(run, 2, mixed_precision="fp16", kwargs_handlers=handlers) == [[8.0, 4.0, 4.0]] * 2


def test_all_ranks_begin_with_rank_0s_parameters_and_no_history() -> None:
    def run(ctx: Context) -> Any:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, ctx.rank + 1.0)
        nn.init.constant_(model.bias, ctx.rank)
        state = af.init_train_state(ctx, Sgd(1.0), dict(model.named_parameters()))
        assert model.weight.requires_grad
        assert not state.params["weight"].requires_grad
        return {name: float(item) for name, item in state.params.items()}

    assert run_ranks(run, 2) == [{"weight": 1.0, "bias": 0.0}] * 2


def test_an_error_on_one_rank_is_every_ranks_and_the_next_step_goes_on() -> None:
    def run(ctx: Context) -> tuple[str, Any]:
        step = af.make_train_step(ctx, mean_loss, Sgd(0.1))
        state = af.init_train_state(ctx, Sgd(0.1), make_params("dict", 0))
        error = ""
        try:
            step(state, make_rows(3, 0) if not ctx.rank else {"x": torch.ones(3, 7)})
        except RuntimeError as caught:
            error = f"{type(caught).__name__}: {caught}"
        return error, step(state, make_rows(3, 0))[0].params

    (first, params), (second, others) = run_ranks(run, 2)
    assert first.startswith("RemoteRankError: rank 1 failed in ")
    assert second.startswith("RuntimeError: ")
    same(params, others)


def test_what_a_step_cant_take_is_refused() -> None:
    ctx, optimizer, rows = Context(), Sgd(0.1), make_rows(2, 0)
    state = af.init_train_state(ctx, optimizer, make_params("dict", 0))

    def step_with(loss_fn: Callable[..., Any], given: Any = state) -> None:
        af.make_train_step(ctx, loss_fn, optimizer)(given, rows)

    with pytest.raises(ValueError, match=r"one number, got a tensor of shape \(2,\)"):
        step_with(lambda params, rows: outputs(params, rows["x"]))
    with pytest.raises(ValueError, match="the loss depends on no parameter"):
        step_with(lambda params, rows: mean_loss(params, rows).detach())
    with pytest.raises(TypeError, match="got float"):
        step_with(lambda params, rows: 1.0)
    of_modules = af.init_train_state(ctx, torch.optim.SGD([torch.ones(1)], lr=0.1))
    with pytest.raises(TypeError, match="takes a PureTrainState, got TrainState"):
        step_with(mean_loss, of_modules)
    with pytest.raises(TypeError, match=r"\['name'\] must be a tensor, got str"):
        af.init_train_state(ctx, optimizer, {"name": "x"})
    with pytest.raises(TypeError, match="int64, which has no gradient"):
        step_with(mean_loss, af.init_train_state(ctx, optimizer, {"n": torch.ones(1, dtype=torch.int64)}))


def test_an_optimizer_that_gives_another_tree_is_refused() -> None:
    class Wrong(Sgd):
        def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return [grads], state

    step = af.make_train_step(Context(), mean_loss, Wrong(0.1))
    state = af.init_train_state(Context(), Wrong(0.1), make_params("dict", 0))
    with pytest.raises(ValueError, match="another structure than the parameters"):
        step(state, make_rows(2, 0))


def test_with_float16_what_is_skipped_must_be_tensors_and_parameters_float32() -> None:
    ctx = Context().replace(mixed_precision="fp16")
    for number, found in ((float, r"\.num_updates is no tensor and changed from 0.0 to 1.0"), (None, "")):
        optimizer = Adam(0.1, number) if number else Adam(0.1)
        params = make_params("dict", 0)
        if not number:
            params, found = optree.tree_map(torch.Tensor.half, params), "some are float16"
        step = af.make_train_step(ctx, mean_loss, optimizer)
        with pytest.raises(ValueError, match=found):
            step(af.init_train_state(ctx, optimizer, params), make_rows(2, 0))


def test_an_optimizer_that_would_write_is_told_not_to() -> None:
    seen: list[bool] = []

    class Writing(Sgd):
        def update(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, grads: Any, state: Any, *, params: Any = None, inplace: bool = True
        ) -> tuple[Any, Any]:
            seen.append(inplace)
            return super().update(grads, state, params)

    step = af.make_train_step(Context(), mean_loss, Writing(0.1))
    step(af.init_train_state(Context(), Writing(0.1), make_params("dict", 0)), make_rows(2, 0))
    assert seen == [False]


def test_the_guards_checks_hold_here_too() -> None:
    def not_finite(ctx: Context) -> str:
        step = af.make_train_step(ctx, lambda params, x: (params["w"] * x).sum(), Sgd(0.1))
        state = af.init_train_state(ctx, Sgd(0.1), {"w": torch.ones(1)})
        with pytest.raises(NonFiniteGradientError) as caught:
            step(state, torch.full((1,), float("nan") if ctx.rank else 1.0))
        return str(caught.value)

    found = run_ranks(not_finite, 2, guard=Guard(check_gradients=True))
    assert found[0] == found[1]
    assert "params['w']  on rank 1" in found[0]

    def drifted(ctx: Context) -> None:
        step = af.make_train_step(ctx, lambda params, x: (params["w"] * x).sum(), Sgd(0.1))
        state = af.init_train_state(ctx, Sgd(0.1), {"w": torch.ones(1)})
        state = state._replace(params={"w": torch.ones(1) + ctx.rank})
        state, _ = step(state, torch.ones(1))
        with pytest.raises(ReplicaDriftError, match=r"params\['w'\]"):
            step(state, torch.ones(1))

    run_ranks(drifted, 2, guard=Guard(check_replicas_every=2))


def test_ranks_with_different_parameters_get_one_error() -> None:
    def run(ctx: Context) -> None:
        with pytest.raises(MismatchError):
            af.init_train_state(ctx, Sgd(0.1), {"w": torch.ones(1 + ctx.rank)})

    run_ranks(run, 2)


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_torchopt_is_such_an_optimizer(mode: str) -> None:
    torchopt = pytest.importorskip("torchopt")
    handlers = [GradScalerKwargs(init_scale=8.0)] if mode == "fp16" else []
    ctx = Context().replace(mixed_precision=mode, kwargs_handlers=handlers)
    rows = make_rows(4, 0)
    for optimizer, make in (
        (torchopt.sgd(0.1, momentum=0.9), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        (torchopt.adam(0.1), lambda params: torch.optim.Adam(params, lr=0.1)),
        (torchopt.chain(torchopt.sgd(0.1)), lambda params: torch.optim.SGD(params, lr=0.1)),
    ):
        params = make_params("dict", 0)
        state = af.init_train_state(ctx, optimizer, params)
        before = [leaf.clone() for leaf in tensors(state)]
        step = af.make_train_step(ctx, mean_loss, optimizer, max_norm=1.0)
        new, _ = step(state, rows)
        new, _ = step(new, rows)
        torch.testing.assert_close(tensors(state), before, rtol=0, atol=0)
        leaves = [leaf.clone().requires_grad_() for leaf in optree.tree_leaves(params)]
        by = make(leaves)
        structure = optree.tree_structure(params)
        for _ in range(2):
            by.zero_grad()
            with af.autocast(ctx):
                loss = mean_loss(optree.tree_unflatten(structure, leaves), rows)
            (loss * (8.0 if mode == "fp16" else 1.0)).backward()
            for leaf in leaves:
                if mode == "fp16":
                    leaf.grad /= 8.0
            torch.nn.utils.clip_grad_norm_(leaves, 1.0)
            by.step()
        close(new.params, [leaf.detach() for leaf in leaves])


def test_two_parameters_may_have_one_tensor_for_a_gradient() -> None:
    def loss_fn(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return ((params["a"] + params["b"]) * batch).sum()

    ctx = Context()
    seen: list[Any] = []

    class Spy(Adam):
        def update(self, grads: Any, state: Any, params: Any = None) -> Any:
            seen.append({name: grad.clone() for name, grad in grads.items()})
            return super().update(grads, state, params=params)

    spy = Spy(0.1)
    step = af.make_train_step(ctx, loss_fn, spy, max_norm=1.0)
    batch = torch.tensor([3.0, 4.0])
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    step(af.init_train_state(ctx, spy, params), batch)
    expected = batch / (50**0.5)  # over both of them
    torch.testing.assert_close(seen, [{"a": expected, "b": expected}])
    assert batch.tolist() == [3, 4]
