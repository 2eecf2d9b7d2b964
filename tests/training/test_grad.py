# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context
from accelfn.errors import MismatchError
from accelfn.testing import Where, run_ranks


class Layer(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass
class Net:
    layer: Layer
    scale: list[torch.Tensor]


def make(kind: str, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    weight, bias, scale = (torch.randn(n, dtype=torch.float64, generator=generator) for n in (3, 1, 1))
    if kind == "dict":
        return {"z": weight, "a": {"bias": bias, 3: scale}}
    if kind == "tuple":
        return (weight, (bias, [scale], None))
    return Net(Layer(weight, bias), [scale])


def leaves(kind: str, params: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if kind == "dict":
        return params["z"], params["a"]["bias"], params["a"][3]
    if kind == "tuple":
        return params[0], params[1][0], params[1][1][0]
    return params.layer.weight, params.layer.bias, params.scale[0]


def loss_of(kind: str, params: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias, scale = leaves(kind, params)
    return ((x @ weight + bias).tanh() * scale).square().mean()


def check(kind: str, world: int, batch: int, seed: int, on: Where = "memory") -> None:
    x = torch.randn(world * batch, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def run(ctx: Context) -> tuple[Any, Any]:
        step = af.value_and_grad(ctx, lambda params, rows: loss_of(kind, params, rows))
        return cast("tuple[Any, Any]", step(make(kind, seed), x[ctx.rank * batch :][:batch]))

    params = make(kind, seed)
    flat = leaves(kind, params)
    for leaf in flat:
        leaf.requires_grad_()
    loss = loss_of(kind, params, x)
    expected = torch.autograd.grad(loss, flat)
    for value, grads in run_ranks(run, world, on):
        torch.testing.assert_close(value, loss.detach())
        assert type(grads) is type(params)
        torch.testing.assert_close(leaves(kind, grads), expected)


@given(
    st.sampled_from(["dict", "tuple", "dataclass"]), st.integers(1, 5), st.integers(1, 4), st.integers(0, 999)
)
def test_ranks_together_have_the_gradient_of_one_with_all_samples(
    kind: str, world: int, batch: int, seed: int
) -> None:
    check(kind, world, batch, seed)


@pytest.mark.parametrize("on", ["gloo", "processes"])
@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_the_same_on_real_groups(kind: str, on: Where) -> None:
    check(kind, 2, 3, 7, on)


def test_aux_is_any_tree_and_stays_local() -> None:
    def loss_fn(params: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out = params * x
        return out.sum(), {"net": Net(Layer(out, out), []), "text": "a", "none": None, "number": 3}

    def run(ctx: Context) -> tuple[float, Any, torch.Tensor]:
        (loss, aux), grads = af.value_and_grad(ctx, loss_fn)(torch.ones(2), torch.full((2,), ctx.rank + 1.0))
        assert not torch._C._functorch.is_functorch_wrapped_tensor(aux["net"].layer.weight)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        return float(loss), aux, grads

    (loss, aux, grads), (other_loss, other_aux, _) = run_ranks(run, 2)
    assert loss == other_loss == 3.0
    assert grads.tolist() == [1.5, 1.5]
    assert aux["net"].layer.weight.tolist() == [1.0, 1.0]
    assert other_aux["net"].layer.weight.tolist() == [2.0, 2.0]
    assert (aux["text"], aux["none"], aux["number"]) == ("a", None, 3)


def test_it_computes_in_the_contexts_precision_and_keeps_the_parameters_dtype() -> None:
    seen: list[torch.dtype] = []

    def loss_fn(params: torch.Tensor) -> torch.Tensor:
        out = params @ params
        seen.append(out.dtype)
        return out.float().mean()

    _, grads = af.value_and_grad(Context().replace(mixed_precision="bf16"), loss_fn)(torch.ones(2, 2))
    assert seen == [torch.bfloat16]
    assert grads.dtype == torch.float32


def test_the_arguments_are_left_as_they_were() -> None:
    params = {"w": torch.ones(2, requires_grad=True)}
    af.value_and_grad(Context(), lambda p, *, by: (p["w"] * by).sum())(params, by=2.0)  # pyright: ignore[reportIndexIssue]
    assert params["w"].grad is None
    assert params["w"].requires_grad


def test_what_has_no_gradient_is_named() -> None:
    step = af.value_and_grad(Context(), lambda params: params["b"].sum())  # pyright: ignore[reportIndexIssue]
    with pytest.raises(TypeError, match=r"int64, which has no gradient"):
        step({"b": torch.ones(1), "n": torch.ones(1, dtype=torch.int64)})
    with pytest.raises(TypeError, match=r"\['n'\]"):
        step({"b": torch.ones(1), "n": cast("Any", "text")})


@pytest.mark.parametrize(("loss", "found"), [(torch.ones(2), r"shape \(2,\)"), (1.0, "float")])
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss: Any, found: str) -> None:
    def loss_fn(params: torch.Tensor) -> Any:
        return loss

    with pytest.raises(TypeError, match=found):
        af.value_and_grad(Context(), loss_fn)(torch.ones(1))


def test_ranks_with_different_parameters_get_one_error() -> None:
    def run(ctx: Context) -> str:
        step = af.value_and_grad(ctx, lambda params: params["w"].sum())  # pyright: ignore[reportIndexIssue]
        with pytest.raises(MismatchError) as caught:
            step({"w": torch.ones(2 + ctx.rank)})
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert "\n  1 " in first
