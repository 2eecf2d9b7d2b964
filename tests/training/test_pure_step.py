"""The train step over trees of parameters: what is about optimizers that are pairs of functions."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportIndexIssue=false

from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import Context, Loss
from accelfn.config import GradScalerKwargs
from accelfn.errors import MismatchError
from accelfn.testing import run_ranks
from tests.training.models import one_weight
from tests.training.optimizers import Adam, Sgd
from tests.training.test_train_step import Rows, close, make_rows, same


def make_params(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    weight, bias, out = (torch.randn(shape, generator=generator) for shape in ((3, 4), (4,), (4,)))
    return (weight, [bias, None], {"out": out})


def outputs(params: Any, x: torch.Tensor) -> torch.Tensor:
    weight, (bias, _), last = params
    return (x @ weight + bias).tanh() @ last["out"]


def mean_loss(params: Any, rows: Rows) -> torch.Tensor:
    return outputs(params, rows["x"]).square().mean()


def sum_loss(params: Any, rows: Rows) -> Loss:
    total = (outputs(params, rows["x"]).square() * rows["weight"]).sum()
    return Loss(total, rows["weight"].sum())


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("mode", ["no", "fp16"])
@given(st.booleans(), st.integers(0, 99))
def test_what_goes_in_is_left_as_it_was(mode: str, overflows: bool, seed: int) -> None:
    ctx = Context().replace(mixed_precision=mode, gradient_accumulation_steps=2)
    optimizer = Adam(0.1)
    state = af.init_train_state(ctx, optimizer, make_params(seed))
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


def test_all_ranks_begin_with_rank_0s_parameters_and_no_history() -> None:
    def run(ctx: Context) -> float:
        model = one_weight(ctx.rank + 1.0)
        state = af.init_train_state(ctx, Sgd(1.0), dict(model.named_parameters()))
        assert model.weight.requires_grad
        assert not state.params["weight"].requires_grad
        with pytest.raises(MismatchError):
            af.init_train_state(ctx, Sgd(0.1), {"w": torch.ones(1 + ctx.rank)})
        return float(state.params["weight"])

    assert run_ranks(run, 2) == [1.0, 1.0]


class Wrong(Sgd):
    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return [grads], state


class Partial(Sgd):
    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = super().update(grads, state, params)
        return {**updates, "frozen": None, "absent": None}, state


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_an_update_of_none_changes_nothing(mode: str) -> None:
    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (params["w"] * params["frozen"] * x).sum()

    ctx, optimizer = Context().replace(mixed_precision=mode), Partial(0.5)
    params = {"w": torch.ones(()), "frozen": torch.ones(()), "absent": None}
    state = af.init_train_state(ctx, optimizer, params)
    state, _ = af.make_train_step(ctx, loss_fn, optimizer)(state, torch.ones(2))
    assert state.params == {"w": torch.tensor(0.0), "frozen": torch.tensor(1.0), "absent": None}


@pytest.mark.parametrize(
    ("mode", "optimizer", "change", "text"),
    [
        ("no", Wrong(0.1), None, "another structure than the parameters"),
        ("no", Sgd(0.1), torch.Tensor.int, "int32, which has no gradient"),
        ("fp16", Adam(0.1, float), None, r"\.num_updates is no tensor and changed from 0.0 to 1.0"),
        ("fp16", Adam(0.1), torch.Tensor.half, "some are float16"),
    ],
)
def test_what_an_optimizer_cant_do_is_refused(mode: str, optimizer: Any, change: Any, text: str) -> None:
    ctx, params = Context().replace(mixed_precision=mode), make_params(0)
    state = af.init_train_state(ctx, optimizer, optree.tree_map(change, params) if change else params)
    with pytest.raises((TypeError, ValueError), match=text):
        af.make_train_step(ctx, mean_loss, optimizer)(state, make_rows(2, 0))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_torchopt_is_such_an_optimizer(mode: str) -> None:
    torchopt = pytest.importorskip("torchopt")
    ctx = Context().replace(mixed_precision=mode, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    rows = make_rows(4, 0)
    for optimizer, make in (
        (torchopt.adam(0.1), lambda params: torch.optim.Adam(params, lr=0.1)),
        (torchopt.chain(torchopt.sgd(0.1)), lambda params: torch.optim.SGD(params, lr=0.1)),
    ):
        state = af.init_train_state(ctx, optimizer, make_params(0))
        before = [leaf.clone() for leaf in tensors(state)]
        step = af.make_train_step(ctx, mean_loss, optimizer, max_norm=1.0)
        new, _ = step(state, rows)
        new, _ = step(new, rows)
        same(tensors(state), before)
        leaves, structure = optree.tree_flatten(make_params(0))
        leaves = [nn.Parameter(leaf) for leaf in leaves]
        by, scaler = make(leaves), af.init_scaler(ctx)
        for _ in range(2):
            with af.autocast(ctx):
                loss = mean_loss(optree.tree_unflatten(structure, leaves), rows)
            scaler = af.backward(ctx, loss, scaler)
            scaler = af.optimizer_step(ctx, by, scaler, max_norm=1.0)
        close(new.params, [leaf.detach() for leaf in leaves])


def test_two_parameters_may_have_one_tensor_for_a_gradient() -> None:
    step = af.make_train_step(
        Context(), lambda params, x: ((params["a"] + params["b"]) * x).sum(), Sgd(1.0), max_norm=1.0
    )
    params, batch = {"a": torch.zeros(2), "b": torch.zeros(2)}, torch.tensor([3.0, 4.0])
    state, _ = step(af.init_train_state(Context(), Sgd(1.0), params), batch)
    expected = -batch / (50**0.5)  # over both of them
    torch.testing.assert_close(state.params, {"a": expected, "b": expected})
    assert batch.tolist() == [3, 4]
