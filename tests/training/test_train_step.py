"""The train step over modules and over trees of parameters: what it computes, keeps and refuses."""

# torch leaves backward, tolist and schedulers partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import optree
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

import accelfn as af
from accelfn import Context, Guard, Loss
from accelfn.config import GradScalerKwargs
from accelfn.context import World
from accelfn.errors import ConfigurationError, NonFiniteGradientError, RemoteRankError
from accelfn.testing import run_ranks
from tests.training.models import one_weight, sgd, values, weight_of
from tests.training.optimizers import Adam, Sgd

Rows = dict[str, torch.Tensor]
KINDS = pytest.mark.parametrize("kind", ["modules", "trees"])


def make_model(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def make_rows(count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    # Of each row, how much it counts; often nothing.
    weight = torch.randint(-2, 3, (count,), generator=generator).clamp(min=0).float()
    return {"x": torch.randn(count, 3, generator=generator), "weight": weight}


def mean_loss(model: Callable[..., torch.Tensor], rows: Rows) -> torch.Tensor:
    return model(rows["x"]).square().mean()


def sum_loss(model: Callable[..., torch.Tensor], rows: Rows) -> Loss:
    total = (model(rows["x"]).square().squeeze(1) * rows["weight"]).sum()
    return Loss(total, rows["weight"].sum(), {"twice": 2 * total})


class Training(NamedTuple):
    step: Any
    state: Any
    params: Callable[[Any], list[torch.Tensor]]
    """Copies of the parameters at a state."""
    memory: Callable[[Any], list[Any]]
    """What optimizer and schedule know at a state."""


def begin(
    ctx: Context,
    kind: str,
    loss_fn: Callable[..., Any],
    seed: int = 0,
    *,
    by_adam: bool = False,
    **options: Any,
) -> Training:
    """Make a step over a model, or over the tree of its parameters."""
    model = make_model(seed)
    if kind != "modules":
        pure: Any = Adam(0.1) if by_adam else Sgd(0.1)

        def of_tree(params: Any, batch: Any) -> Any:
            return loss_fn(partial(torch.func.functional_call, model, params), batch)

        step: Any = af.make_train_step(ctx, of_tree, pure, **options)
        state = af.init_train_state(ctx, pure, dict(model.named_parameters()))
        return Training(
            step, state, lambda state: [*state.params.values()], lambda state: list(state.optimizer_state)
        )
    model = af.prepare_model(ctx, model)
    optimizer: Any = sgd(model, 0.1)
    if by_adam:  # whose rate would be a part of compiled graphs as a number, and each value another one
        optimizer = torch.optim.Adam(model.named_parameters(), lr=torch.tensor(0.1))
    scheduler = StepLR(optimizer, 1) if by_adam else None
    step = af.make_train_step(ctx, loss_fn, optimizer, model=model, scheduler=scheduler, **options)
    return Training(
        step,
        af.init_train_state(ctx, optimizer),
        lambda state: values(model),
        lambda state: [*map(dict, optimizer.state.values()), scheduler and scheduler.last_epoch],
    )


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(optree.tree_leaves(found), optree.tree_leaves(expected), rtol=1e-5, atol=1e-6)


def same(found: Any, expected: Any) -> None:
    assert optree.tree_structure(found) == optree.tree_structure(expected)
    torch.testing.assert_close(optree.tree_leaves(found), optree.tree_leaves(expected), rtol=0, atol=0)


@KINDS
@pytest.mark.parametrize("loss_fn", [mean_loss, sum_loss])
def test_pieces_of_unequal_length_give_the_mean_over_the_rows(kind: str, loss_fn: Any) -> None:
    rows, model = make_rows(5, 3), make_model(3)
    step, state, params, _ = begin(Context().replace(gradient_accumulation_steps=3), kind, loss_fn, 3)
    loss = loss_fn(model, rows)
    loss = loss if isinstance(loss, torch.Tensor) else loss.value / loss.weight
    loss.backward()
    sgd(model, 0.1).step()
    state, metrics = step(state, rows)
    close((params(state), metrics.loss), (values(model), loss.detach()))


@KINDS
@pytest.mark.parametrize(("counts", "steps"), [((3, 2), 2), ((3, 1), 1), ((4, 0), 2)])
@pytest.mark.parametrize("reduction", [None, "canonical"])
def test_ranks_with_different_numbers_of_rows_give_the_mean_over_all_rows(
    kind: str, counts: tuple[int, int], steps: int, reduction: Any
) -> None:
    if reduction is not None and counts[0] % steps:
        counts = (4, 2)  # exact mode takes equal pieces alone
    rows, model = make_rows(sum(counts), 3), make_model(3)

    def loss_fn(model: Any, rows: Rows) -> Loss:
        return Loss(mean_loss(model, rows), aux={"x": rows["x"].mean()})

    def run(ctx: Context) -> Any:
        mine = slice(counts[0], None) if ctx.rank else slice(counts[0])
        ctx = ctx.replace(gradient_accumulation_steps=steps, reduction=reduction)
        step, state, params, _ = begin(ctx, kind, loss_fn, seed=3)
        state, metrics = step(state, optree.tree_map(lambda tensor: tensor[mine], cast("Any", rows)))
        return params(state), metrics.loss, metrics.aux["x"]

    loss = mean_loss(model, rows)
    grads = torch.autograd.grad(loss, [*model.parameters()])
    for params, found, aux in run_ranks(run, 2):
        close(found, loss.detach())
        close(aux, rows["x"].mean())
        close(params, [one - 0.1 * grad for one, grad in zip(values(model), grads, strict=True)])


@KINDS
def test_a_step_that_overflows_on_one_rank_changes_nothing_on_any(kind: str) -> None:
    def run(ctx: Context) -> list[Any]:
        step, state, params, memory = begin(ctx, kind, mean_loss, by_adam=True, max_norm=1.0)
        seen: list[Any] = []
        for bad in (False, True, False):
            before = params(state), memory(state)
            rows = make_rows(2, 0)
            if bad and ctx.rank:
                rows["x"].fill_(float("inf"))
            state, metrics = step(state, rows)
            assert bool(metrics.skipped) == bad
            if bad:
                same((params(state), memory(state)), before)
            else:
                assert not torch.equal(params(state)[0], before[0][0])
            if kind == "modules":
                assert memory(state)[-1] - before[1][-1] == (not bad)  # the schedule
            seen.append((float(state.scaler.scale), int(state.scaler.num_skipped), int(state.num_steps)))
        return seen

    handlers = [GradScalerKwargs(init_scale=8.0)]
    expected = [(8.0, 0, 1), (4.0, 1, 2), (4.0, 1, 3)]
    assert run_ranks(run, 2, mixed_precision="fp16", kwargs_handlers=handlers) == [expected] * 2


@KINDS
def test_a_failed_step_leaves_nothing_to_the_next(kind: str) -> None:
    rows = make_rows(4, 2)

    def run(ctx: Context) -> tuple[str, list[torch.Tensor]]:
        step, state, params, _ = begin(ctx, kind, mean_loss, 2)
        with pytest.raises((ValueError, RemoteRankError)) as caught:
            step(state, {"x": torch.ones(4, 3), "y": torch.ones(3)} if ctx.rank else rows)
        return f"{type(caught.value).__name__}: {caught.value}", params(step(state, rows)[0])

    (first, params), (second, _) = run_ranks(run, 2, gradient_accumulation_steps=2)
    assert first.startswith("RemoteRankError: rank 1 failed in ")
    assert "batch['y'] has 3 rows" in second
    model = make_model(2)
    mean_loss(model, rows).backward()
    sgd(model, 0.1).step()
    close(params, values(model))


@KINDS
def test_gradients_that_are_not_finite_are_named_where_that_is_asked(kind: str) -> None:
    def run(ctx: Context) -> str:
        step, state, _, _ = begin(ctx, kind, mean_loss)
        with pytest.raises(NonFiniteGradientError) as caught:
            step(state, {"x": torch.full((1, 3), float("nan") if ctx.rank else 1.0)})
        return str(caught.value)

    first, second = run_ranks(run, 2, guard=Guard(check_gradients=True))
    assert first == second
    path, ranks = ("parameters['2.weight']", "0, 1") if kind == "modules" else ("params['2.weight']", "1")
    assert f"{path}  on rank {ranks}\n" in first  # over modules they are averaged already


@KINDS
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_steps_of_gradients_that_are_not_finite_are_skipped_where_that_is_asked(
    kind: str, max_norm: float | None
) -> None:
    def run(ctx: Context) -> list[bool]:
        step, state, params, _ = begin(ctx, kind, mean_loss, max_norm=max_norm)
        before, skipped = params(state), list[bool]()
        for value in (float("nan") if ctx.rank else 1.0, 1.0):
            state, metrics = step(state, {"x": torch.full((1, 3), value)})
            skipped.append(bool(metrics.skipped))
            assert all(map(torch.equal, before, params(state))) is bool(metrics.skipped)
        assert (int(state.scaler.num_skipped), float(state.scaler.scale)) == (1, 1.0)
        return skipped

    assert run_ranks(run, 2, guard=Guard(check_gradients="skip")) == [[True, False]] * 2


@KINDS
@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_what_is_no_weight_shows_in_loss_and_parameters(kind: str, weight: float) -> None:
    def loss_fn(model: Any, rows: Rows) -> Loss:
        total = sum_loss(model, rows).value
        return Loss(total, torch.tensor(weight), {"twice": 2 * total})

    step, state, params, _ = begin(Context(), kind, loss_fn)
    before = params(state)
    state, metrics = step(state, {"x": torch.ones(1, 3), "weight": torch.ones(1)})
    # Without any weight there is nothing to learn from.
    loss = torch.tensor(weight)
    torch.testing.assert_close([metrics.loss, metrics.aux["twice"]], [loss] * 2, equal_nan=True)
    torch.testing.assert_close(params(state), [one + weight for one in before], equal_nan=True)


@KINDS
def test_a_step_takes_a_state_of_its_own_kind_any_number_of_times(kind: str) -> None:
    step, state, _, _ = begin(Context(), kind, mean_loss, max_norm=1.0)
    assert [int(step(state, make_rows(2, 0))[0].num_steps) for _ in range(2)] == [1, 1]
    other = begin(Context(), "trees" if kind == "modules" else "modules", mean_loss).state
    for wrong in (other, state.scaler, None):
        with pytest.raises(TypeError, match=f"takes a {type(state).__name__}, got {type(wrong).__name__}"):
            step(wrong, make_rows(2, 0))


def test_several_models_and_optimizers_step_together_and_foreign_gradients_are_dropped() -> None:
    ctx = Context()
    models = {"one": one_weight(1.0), "two": one_weight(1.0)}
    optimizers = [sgd(model) for model in models.values()]
    schedulers: list[LRScheduler] = [StepLR(one, 1, 0.5) for one in optimizers]
    step = af.make_train_step(
        ctx,
        lambda m, x: (m["one"](x) * 2 + m["two"](x)).mean(),
        optimizers,
        model=models,
        scheduler=schedulers,
    )
    models["one"](torch.full((1, 1), 100.0)).sum().backward()  # of another loss
    _, metrics = step(af.init_train_state(ctx, optimizers), torch.ones(2, 1))
    assert [weight_of(model) for model in models.values()] == [-1.0, 0.0]
    assert [one.get_last_lr() for one in schedulers] == [[0.5], [0.5]]
    assert (metrics.loss, metrics.grad_norm) == (3.0, None)


def test_a_model_whose_gradients_nobody_averages_is_refused() -> None:
    def run(ctx: Context) -> None:
        model = make_model(0)
        evaluated = af.prepare_model(ctx, make_model(0), evaluation_mode=True)
        for one in (model, evaluated):
            with pytest.raises(
                ConfigurationError, match=r"the gradient of param.* is not averaged over the 2 ranks"
            ):
                af.make_train_step(ctx, mean_loss, sgd(one), model=one)
        af.prepare_model(ctx, model)
        if ctx.world.group is not None:  # the module inside of DistributedDataParallel
            with pytest.raises(ConfigurationError, match=r"prepare_model\(ctx, model\) returns"):
                af.make_train_step(ctx, mean_loss, sgd(model), model=model)

    run_ranks(run, 2)
    run_ranks(run, 2, "processes")


def test_what_doesnt_fit_together_is_refused() -> None:
    ctx, model, pure = Context(), make_model(0), Sgd(0.1)
    optimizer, other = sgd(model), sgd(one_weight())
    norm = "max_norm must be positive"
    no_optimizer = r"must be a torch optimizer or a sequence of them, or have init"
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        *(({"optimizer": wrong}, TypeError, no_optimizer) for wrong in ("sgd", [], [optimizer, "sgd"], None)),
        ({"optimizer": other}, ConfigurationError, "no parameter of model"),
        ({"model": {"a": 3}}, TypeError, r"model\['a'\] is of type int"),
        ({"model": None}, TypeError, "Pass model="),
        ({"loss_fn": 3}, TypeError, "loss_fn must be callable, got int"),
        ({"scheduler": ReduceLROnPlateau(optimizer)}, TypeError, "Plateau needs a metric"),
        ({"scheduler": ["linear"]}, TypeError, "takes torch's schedulers, got str"),
        ({"scheduler": StepLR(other, 1)}, ConfigurationError, "an optimizer that doesn't step here"),
        *(({"max_norm": wrong}, ValueError, norm) for wrong in (0.0, -1.0, float("nan"))),
        ({"optimizer": pure}, TypeError, "got model= for an optimizer with init and update"),
        (
            {"optimizer": pure, "model": None, "scheduler": StepLR(optimizer, 1)},
            TypeError,
            r"got scheduler= .* learning rate schedule",
        ),
    ]
    for changed, error, text in refused:
        arguments = {"loss_fn": mean_loss, "optimizer": optimizer, "model": model, **changed}
        with pytest.raises(error, match=text):
            cast("Any", af.make_train_step)(ctx, **arguments)
    for given_optimizer, params, text in (
        ("sgd", (), no_optimizer),
        (optimizer, ({"w": torch.ones(1)},), "got params for a torch optimizer"),
        (pure, (), "Pass params="),
        (pure, ({"name": "x"},), r"\['name'\] must be a tensor, got str"),
    ):
        with pytest.raises(TypeError, match=text):
            cast("Any", af.init_train_state)(ctx, given_optimizer, *params)


def test_the_number_of_a_window_is_where_it_is_read() -> None:
    """Elsewhere it would let the host wait for the device in each step."""
    ctx = Context(world=World(device=torch.device("meta")))
    guarded = ctx.replace(guard=Guard(check_replicas_every=2))
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert af.init_train_state(ctx, optimizer).num_steps.device.type == "meta"
    assert af.init_train_state(guarded, optimizer).num_steps.device.type == "cpu"
