"""Optimizers as pairs of functions: the numbers are those of torch's classes, bit by bit."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Optimizer

from accelfn import Context
from accelfn.comm.pieces import cut, join
from accelfn.errors import NotAvailableError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import gradients, parameters
from accelfn.training.functional_optimizers import clip_by_global_norm, ema_update, functional, masked
from accelfn.tree import flatten

Tree = dict[str, Any]

CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95)}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"t0": 2.0, "lr": 0.1}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Muon, {}),
]
NAMES = [f"{kind.__name__}{index}" for index, (kind, _) in enumerate(CASES)]


def params_of(kind: type[Optimizer]) -> Tree:
    generator = torch.Generator().manual_seed(0)
    shapes: Any = {"w": (4, 3), "v": (3, 5)} if kind is torch.optim.Muon else {"w": (4, 3), "v": (5,)}
    return {"layer": {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}}


def grads_of(params: Tree, step: int) -> Tree:
    generator = torch.Generator().manual_seed(step + 1)
    return {
        "layer": {name: torch.randn(one.shape, generator=generator) for name, one in params["layer"].items()}
    }


def by_class(
    kind: type[Optimizer], options: Any, steps: int, lr: Callable[[int], float] | None = None
) -> Any:
    params = {name: one.clone().requires_grad_() for name, one in params_of(kind)["layer"].items()}
    optimizer: Any = kind([*params.values()], **options)
    for step in range(steps):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr(step)
        for name, grad in grads_of({"layer": params}, step)["layer"].items():
            params[name].grad = grad
        optimizer.step()
    state = {name: optimizer.state[one] for name, one in params.items()}
    return {name: one.detach() for name, one in params.items()}, state


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=NAMES)
def test_updates_are_those_of_the_class(kind: type[Optimizer], options: Any, donate: bool) -> None:
    optimizer = functional(kind, donate=donate, **options)
    params = params_of(kind)
    state = optimizer.init(params)
    for step in range(4):
        before = {name: one.clone() for name, one in params["layer"].items()}
        new_params, new_state = optimizer.update(grads_of(params, step), state, params)
        same = [new_params["layer"][name] is params["layer"][name] for name in before]
        assert same == [donate] * len(before)
        if not donate:
            assert all(torch.equal(params["layer"][name], one) for name, one in before.items())
        params, state = new_params, new_state
    expected, slots = by_class(kind, options, 4)
    for name, one in expected.items():
        assert torch.equal(params["layer"][name], one)
        for slot, value in slots[name].items():
            found = state[slot]["layer"][name]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    assert int(state["num_updates"]) == 4


# torch copies the first gradient of SGD: its momentum begins with the first step.
LATE = (torch.optim.SGD, "momentum")


@pytest.mark.parametrize(("kind", "options"), [case for case in CASES if (case[0], *case[1])[:3:2] != LATE])
def test_the_first_state_has_the_structure_of_all(kind: type[Optimizer], options: Any) -> None:
    optimizer = functional(kind, **options)
    params = params_of(kind)
    first = optimizer.init(params)
    _, second = optimizer.update(grads_of(params, 0), first, params)
    assert flatten(first)[1] == flatten(second)[1]


def test_an_option_may_be_a_schedule() -> None:
    def lr(step: int) -> float:
        return 0.1 / (step + 1)

    optimizer = functional(torch.optim.AdamW, lr=lr)
    params = params_of(torch.optim.AdamW)
    state = optimizer.init(params)
    for step in range(3):
        params, state = optimizer.update(grads_of(params, step), state, params)
    expected, _ = by_class(torch.optim.AdamW, {}, 3, lr)
    assert all(torch.equal(params["layer"][name], one) for name, one in expected.items())


def test_parameters_without_gradient_stay() -> None:
    optimizer = functional(torch.optim.AdamW, lr=0.1)
    params = params_of(torch.optim.AdamW)
    grads = grads_of(params, 0)
    grads["layer"]["v"] = None
    found, state = optimizer.update(grads, optimizer.init(params), params)
    assert torch.equal(found["layer"]["v"], params["layer"]["v"])
    assert not torch.equal(found["layer"]["w"], params["layer"]["w"])
    assert (float(state["step"]["layer"]["v"]), float(state["step"]["layer"]["w"])) == (0.0, 1.0)


def test_some_parameters_are_left_out() -> None:
    params = params_of(torch.optim.AdamW)
    grads = grads_of(params, 0)
    whole = functional(torch.optim.AdamW, lr=0.1)
    expected = whole.update(grads, whole.init(params), params)[0]
    for mask in (lambda path: path.endswith("['w']"), {"layer": {"w": True, "v": False}}):
        optimizer = masked(whole, mask)
        state = optimizer.init(params)
        found, state = optimizer.update(grads, state, params)
        assert torch.equal(found["layer"]["w"], expected["layer"]["w"])
        assert torch.equal(found["layer"]["v"], params["layer"]["v"])
        assert list(state["exp_avg"]) == ["['layer']['w']"]


def test_gradients_are_clipped_and_parameters_averaged() -> None:
    grads: Tree = {"a": torch.tensor([3.0, 0.0]), "b": [torch.tensor([4.0])]}
    clipped, norm = clip_by_global_norm(grads, 2.5)
    assert float(norm) == 5.0
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    torch.nn.utils.clip_grad_norm_([parameter], 2.5)
    assert torch.equal(torch.cat([clipped["a"], clipped["b"][0]]), parameter.grad)
    assert torch.equal(clip_by_global_norm(grads, 100.0)[0]["a"], grads["a"])
    average = ema_update({"w": torch.ones(2)}, {"w": torch.tensor([0.0, 2.0])}, 0.9)
    torch.testing.assert_close(average, {"w": torch.tensor([0.9, 1.1])})


def test_what_cannot_be_functional_is_refused() -> None:
    for option, message in (
        (torch.optim.LBFGS, "LBFGS evaluates"),
        ("adam", "a class of optimizers"),
        (3, "got 3"),
    ):
        with pytest.raises(TypeError, match=message):
            functional(option)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="learning rate"):
        functional(torch.optim.AdamW, lr=-1.0)

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1

    optimizer = functional(Counts, lr=0.1)
    with pytest.raises(NotAvailableError, match="in its parameter groups"):
        optimizer.update({"w": torch.ones(1)}, optimizer.init({"w": torch.ones(1)}), {"w": torch.ones(1)})


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_new_state_has_the_form_of_a_later_one(kind: type[Optimizer], options: dict[str, Any]) -> None:
    params: Tree = {"w": torch.ones(4, 3)}
    optimizer = functional(kind, **options)
    first = optimizer.init(params)
    _, later = optimizer.update(params, first, params)
    kinds = [
        [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else one for one in flatten(state)[0]]
        for state in (first, later)
    ]
    assert kinds[0] == kinds[1]
    assert flatten(first)[1] == flatten(later)[1]


def test_trees_that_differ_are_refused() -> None:
    params, other = {"w": torch.ones(2)}, {"v": torch.ones(2)}
    sgd = functional(torch.optim.SGD, lr=0.1)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: sgd.update(other, sgd.init(params), params), "parameters and gradients: the trees differ"),
        (lambda: sgd.update({}, sgd.init(params), params), "parameters and gradients: the trees differ"),
        (lambda: masked(sgd, {"v": True}).init(params), "parameters and mask: the trees differ"),
        (lambda: ema_update(params, other, 0.5), "average and parameters: the trees differ"),
        (lambda: ema_update(params, params, 1.5), r"decay must be from 0 to 1, got 1\.5"),
        (lambda: clip_by_global_norm(params, -1.0), r"max_norm must be positive, got -1\.0"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_an_update_is_not_differentiated_silently() -> None:
    sgd = functional(torch.optim.SGD, lr=0.1)

    def after(w: torch.Tensor) -> torch.Tensor:
        params = {"w": torch.ones(2)}
        return sgd.update({"w": w}, sgd.init(params), params)[0]["w"].sum()

    with pytest.raises(NotAvailableError, match="an update isn't differentiable"):
        torch.func.grad(after)(torch.ones(2))


@given(st.data(), st.integers(1, 4))
def test_pieces_are_clipped_and_averaged_as_the_whole(data: st.DataObject, size: int) -> None:
    whole = data.draw(parameters())
    grads = data.draw(gradients(whole))
    clipped, norm = clip_by_global_norm(grads, 1.0)
    average = ema_update(whole, grads, 0.75)

    def run(ctx: Context) -> None:
        own, own_grads = cut(ctx, whole), cut(ctx, grads)
        found, found_norm = clip_by_global_norm(own_grads, 1.0, ctx=ctx)
        torch.testing.assert_close(found_norm, norm)
        torch.testing.assert_close(join(ctx, "test", found), clipped)
        torch.testing.assert_close(join(ctx, "test", ema_update(own, own_grads, 0.75)), average)

    run_ranks(run, size)
