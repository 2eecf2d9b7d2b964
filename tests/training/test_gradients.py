# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch

import accelfn as af
from accelfn import Context
from accelfn.errors import MismatchError, NotAvailableError
from accelfn.testing import run_ranks


class Layer(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass
class Net:
    layer: Layer
    scale: list[torch.Tensor]


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


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_with_its_weight_and_aux_is_averaged(weighted: bool, exact: bool) -> None:
    rows = torch.tensor([[1.0], [3.0], [5.0], [6.0]])
    counts = torch.tensor([[0], [1], [3], [0]])

    def loss_fn(params: Any, x: torch.Tensor, count: torch.Tensor) -> af.Loss:
        total = (params["w"] * x * count).sum() if weighted else (params["w"] * x).mean()
        return af.Loss(total, count.sum() if weighted else None, {"twice": 2 * total, "one": 1})

    def run(ctx: Context) -> tuple[float, Any, float]:
        own = slice(ctx.rank * 4 // ctx.num_processes, (ctx.rank + 1) * 4 // ctx.num_processes)
        loss, grads = af.value_and_grad(ctx, loss_fn)({"w": torch.ones(1)}, rows[own], counts[own])
        assert (loss.weight is None) != weighted
        assert loss.weight is None or float(loss.weight) == 4
        return float(loss.value), {name: float(one) for name, one in loss.aux.items()}, float(grads["w"])

    for size in (1, 2, 4):
        more: Any = {"reduction": "canonical", "gradient_accumulation_steps": 4 // size} if exact else {}
        number = 4 if exact else size  # of ones that are added to be divided by the weight
        aux = {"twice": 9.0, "one": number / 4} if weighted else {"twice": 7.5, "one": 1.0}
        expected = (4.5, aux, 4.5) if weighted else (3.75, aux, 3.75)
        assert run_ranks(run, size, **more) == [expected] * size


def test_aux_of_a_loss_that_is_no_number_is_named() -> None:
    step: Any = af.value_and_grad(
        Context(), lambda params: af.Loss(cast("Any", params).sum(), aux={"a": "b"})
    )
    with pytest.raises(TypeError, match=r"aux\['a'\] is of type str, which can't be averaged"):
        step(torch.ones(1))


def test_the_arguments_are_left_as_they_were_and_gradients_have_their_form() -> None:
    params = Net(Layer(torch.ones(2, requires_grad=True), torch.ones(())), [])
    loss_fn: Any = lambda p, *, by: (p.layer.weight * by).sum()  # noqa: E731
    _, grads = af.value_and_grad(Context(), loss_fn)(params, by=2.0)
    assert params.layer.weight.grad is None
    assert params.layer.weight.requires_grad
    assert isinstance(grads, Net)
    assert (grads.layer.weight.tolist(), grads.layer.bias.item()) == ([2.0, 2.0], 0.0)


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


def _cubes(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (params["w"] ** 3 * x).sum()


def _transformed(ctx: Context) -> list[Any]:
    of: Any = af.value_and_grad(ctx, _cubes)
    x, params = torch.tensor([1.0, 2.0]) * (ctx.rank + 1), {"w": torch.tensor([2.0, 3.0])}
    weight = params["w"].clone().requires_grad_()
    of({"w": weight}, x)[1]["w"].sum().backward()
    return [
        weight.grad,
        torch.func.grad(lambda params: of(params, x)[0])(params)["w"],
        torch.func.jacrev(lambda params: of(params, x)[1])(params)["w"]["w"],
        torch.func.vmap(lambda w: of({"w": w}, x)[1]["w"])(torch.eye(2)),
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_differentiated_and_mapped_as_in_one_process(size: int) -> None:
    x, w = torch.tensor([1.0, 2.0]) * (size + 1) / 2, torch.tensor([2.0, 3.0])
    expected = [6 * w * x, 3 * w**2 * x, torch.diag(6 * w * x), 3 * torch.eye(2) * x]
    for found in run_ranks(_transformed, size):
        torch.testing.assert_close(found, expected)


def _tangents(ctx: Context) -> list[torch.Tensor]:
    of: Any = af.value_and_grad(ctx, _cubes)
    x, w = torch.tensor([1.0, 2.0]) * (ctx.rank + 1), torch.tensor([2.0, 3.0])
    _, tangent, *_ = torch.func.jvp(lambda w: of({"w": w}, x)[1]["w"], (w,), (torch.ones(2),))
    model = torch.nn.Linear(2, 2)
    weight = model.weight.detach().clone()
    prepared = af.prepare_model(ctx, model)
    output, moved, *_ = torch.func.jvp(prepared, (x,), (torch.ones(2),))
    return [tangent, output - prepared(x), moved - af.broadcast(ctx, weight).sum(1)]


@pytest.mark.parametrize("fsdp", [None, af.FullyShardedDataParallelPlugin()], ids=["replicas", "shards"])
def test_tangents_go_through_it_and_through_a_prepared_model(
    fsdp: af.FullyShardedDataParallelPlugin | None,
) -> None:
    expected = [torch.tensor([18.0, 54.0]), torch.zeros(2), torch.zeros(2)]
    # On processes, since torch has one level of tangents for all threads.
    for found in run_ranks(_tangents, 2, on="processes", fsdp_plugin=fsdp):
        torch.testing.assert_close([tensor.detach() for tensor in found], expected)


def test_in_exact_mode_transforms_are_refused() -> None:
    of: Any = af.value_and_grad(Context().replace(reduction="canonical"), _cubes)
    with pytest.raises(NotAvailableError, match=r"in exact mode it isn't differentiable"):
        torch.func.grad(lambda params: of(params, torch.ones(2))[0])({"w": torch.ones(2)})
