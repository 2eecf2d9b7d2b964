# torch leaves backward and DistributedDataParallel partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import accelfn as af
from accelfn import Context
from accelfn.config import DistributedDataParallelKwargs
from accelfn.data import plan_microbatch
from accelfn.errors import ConfigurationError
from accelfn.testing import Where, run_ranks

Values = list[torch.Tensor]


class Net(nn.Module):
    """A model with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
        self.temperature = 2.0
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), 1):
                parameter.copy_(torch.linspace(-1, number, parameter.numel()).view_as(parameter))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) / self.temperature).square().mean()


def rows(rank: int, number: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * number + rank))


Way = Callable[[Context, Any, torch.Tensor], None]


def by_forward(ctx: Context, model: Any, x: torch.Tensor) -> None:
    (model(x) / 2).square().mean().backward()


def by_inner_method(ctx: Context, model: Any, x: torch.Tensor) -> None:
    cast("Net", af.unwrap_model(model)).loss(x).backward()


def by_free_function(ctx: Context, model: Any, x: torch.Tensor) -> None:
    inner = cast("Net", af.unwrap_model(model))
    hidden = torch.tanh(x @ inner.body.weight.T + inner.body.bias)
    (nn.functional.linear(hidden, inner.head.weight, inner.head.bias) / 2).square().mean().backward()


def by_forwards_before_backwards(ctx: Context, model: Any, x: torch.Tensor) -> None:
    losses = [(model(half) / 2).square().mean() / 2 for half in x.split(1)]
    for loss in losses:
        loss.backward()


def by_halves_of_the_parameters(ctx: Context, model: Any, x: torch.Tensor) -> None:
    loss = (model(x) / 2).square().mean()
    parameters = list(model.parameters())
    loss.backward(inputs=parameters[:2], retain_graph=True)
    loss.backward(inputs=parameters[2:])


def by_a_forward_under_no_sync(ctx: Context, model: Any, x: torch.Tensor) -> None:
    with af.no_sync(ctx, model):
        loss = (model(x) / 2).square().mean()
    loss.backward()


def by_a_window(ctx: Context, model: Any, x: torch.Tensor) -> None:
    first, last = x.split(1)
    with af.no_sync(ctx, torch.compile(model, backend="eager")):  # pyright: ignore[reportArgumentType]
        ((model(first) / 2).square().mean() / 2).backward()
    (cast("Any", af.unwrap_model(model)).loss(last) / 2).backward()


def by_checkpoints_inside(ctx: Context, model: Any, x: torch.Tensor) -> None:
    inner = cast("Net", af.unwrap_model(model))
    hidden = cast("Any", checkpoint(inner.body, x.clone().requires_grad_(), use_reentrant=True))
    out = cast("Any", checkpoint(inner.head, torch.tanh(hidden), use_reentrant=True))
    (out / 2).square().mean().backward()


WAYS: list[Way] = [
    by_forward,
    by_inner_method,
    by_free_function,
    by_forwards_before_backwards,
    by_halves_of_the_parameters,
    by_a_forward_under_no_sync,
    by_a_window,
    by_checkpoints_inside,
]


def by_hand(world: int, steps: int) -> Values:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(steps):
        for rank in range(world):
            (model.loss(rows(rank, number)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach() for one in model.parameters()]


def trained(ctx: Context, ways: list[Way]) -> Values:
    model = af.prepare_model(ctx, Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = af.init_scaler(ctx)
    for number, way in enumerate(ways):
        way(ctx, model, rows(ctx.rank, number))
        scaler = af.optimizer_step(ctx, optimizer, scaler)
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("on", ["memory", "processes"])
def test_whatever_computed_the_loss_ranks_train_the_model_of_one_process(on: Where, view: bool) -> None:
    # Each way by itself, from the first step on, and between ordinary ones; then all in turn.
    programs = [[way, way, by_forward, way] for way in WAYS] + [WAYS]
    options = [DistributedDataParallelKwargs(gradient_as_bucket_view=view)]

    def run(ctx: Context) -> list[Values]:
        return [trained(ctx, ways) for ways in programs]

    expected = [by_hand(2, len(ways)) for ways in programs]
    for found in run_ranks(run, 2, on, kwargs_handlers=options):
        for ways, one, other in zip(programs, found, expected, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, ways=ways: f"{ways[0].__name__}: {text}")


def refusal(ctx: Context, optimizer: torch.optim.Optimizer, **step: Any) -> str:
    """Step, and return the error; "" if there is none."""
    try:
        af.optimizer_step(ctx, optimizer, af.init_scaler(ctx), **step)
    except ConfigurationError as error:
        return str(error)
    return ""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_gradients_that_were_not_averaged_since_they_grew_are_refused(on: Where) -> None:
    def run(ctx: Context) -> None:
        model = af.prepare_model(ctx, Net())
        before = [one.detach().clone() for one in model.parameters()]
        optimizer, scaler = sgd(model), af.init_scaler(ctx)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, ctx.rank)
        assert "they were set by hand" in refusal(ctx, optimizer)
        optimizer.zero_grad()
        with af.no_sync(ctx, model):
            model(rows(ctx.rank, 0)).sum().backward()
        with pytest.raises(
            ConfigurationError, match=r"optimizer_step: .* not averaged over the 2 ranks, .*sync"
        ):
            af.optimizer_step(ctx, optimizer, scaler)
        with pytest.raises(ConfigurationError, match=r"clip_grad_norm_: .* not averaged"):
            af.clip_grad_norm_(ctx, model.parameters(), 1.0, scaler_state=scaler)
        with pytest.raises(ConfigurationError, match=r"clip_grad_value_: .* not averaged"):
            af.clip_grad_value_(ctx, model.parameters(), 1.0, scaler_state=scaler)
        assert all(map(torch.equal, before, model.parameters()))
        model(rows(ctx.rank, 0)).sum().backward()  # averages what was there too
        assert refusal(ctx, optimizer, clear_gradients=False) == ""
        with af.no_sync(ctx, model):  # where ranks step by themselves, as local SGD has it
            model(rows(ctx.rank, 0)).sum().backward()
            assert refusal(ctx, optimizer) == ""

    run_ranks(run, 2, on)


class Fails(torch.autograd.Function):
    """Fails in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise MemoryError("no more")


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_what_a_backward_pass_that_failed_has_left_is_refused(on: Where) -> None:
    def run(ctx: Context) -> str:
        model = af.prepare_model(ctx, Net())
        inner = cast("Net", af.unwrap_model(model))
        hidden = cast("torch.Tensor", Fails.apply(inner.body(rows(ctx.rank, 0))))
        with pytest.raises(MemoryError):
            inner.head(hidden).sum().backward()  # the head has its gradients by then
        return refusal(ctx, sgd(model))

    assert all("not averaged" in text for text in run_ranks(run, 2, on))


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_ranks_may_use_other_parameters(on: Where) -> None:
    """In several buckets; one that nobody uses gets no gradient, and one may be frozen in between."""
    size = 520  # so that each layer fills a bucket
    used = [(0, 1, 2), (0, 2)]

    def gradients(ctx: Context, model: nn.Module, rank: int, *, frozen: bool) -> None:
        layers = cast("Any", af.unwrap_model(model))
        layers[0].weight.requires_grad_(not frozen)
        x = torch.full((1, size), rank + 1.0)
        chosen = [layers[index] for index in used[rank]]
        loss = cast("torch.Tensor", sum(layer(x).sum() for layer in chosen))
        af.backward(ctx, loss, af.init_scaler(ctx))
        layers[0].weight.requires_grad_(True)

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(size, size) for _ in range(4)))

    def found_in(model: nn.Module) -> list[float | None]:
        return [None if one.grad is None else float(one.grad.mean()) for one in model.parameters()]

    def run(ctx: Context, finds_unused: bool) -> list[list[float | None]]:
        options = DistributedDataParallelKwargs(bucket_cap_mb=1, find_unused_parameters=finds_unused)
        ctx = ctx.replace(kwargs_handlers=[options])
        model, found = af.prepare_model(ctx, make()), list[list[float | None]]()
        for frozen in (False, True, False):
            model.zero_grad()
            gradients(ctx, model, ctx.rank, frozen=frozen)
            found.append(found_in(model))
            assert not refusal(ctx, sgd(model))
        return found

    def alone(frozen: bool) -> list[float | None]:
        model = make()
        for rank in range(2):
            gradients(Context(), model, rank, frozen=frozen)
        return [None if one is None else one / 2 for one in found_in(model)]

    expected = [alone(frozen) for frozen in (False, True, False)]
    assert expected[1][0] is None
    for found in run_ranks(lambda ctx: [run(ctx, False), run(ctx, True)], 2, on):
        assert found == [expected] * 2


def test_a_forward_pass_that_is_never_reversed_says_nothing_of_the_next_window() -> None:
    """A parameter that was frozen in it may be trained by then."""

    def gradients(ctx: Context, model: nn.Module, x: torch.Tensor) -> list[float]:
        first, scaler = cast("Any", af.unwrap_model(model))[0], af.init_scaler(ctx)
        first.requires_grad_(False)
        model(x)
        first.requires_grad_(True)
        for place in range(2):
            micro = plan_microbatch(place, 0, 100, 2)
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, model((place + 1) * x).sum(), scaler, micro)
        return [float(cast("torch.Tensor", one.grad).sum()) for one in model.parameters()]

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        for one in model.parameters():
            nn.init.constant_(one, 0.5)
        return model

    def run(ctx: Context) -> list[float]:
        options = DistributedDataParallelKwargs(find_unused_parameters=True)
        ctx = ctx.replace(kwargs_handlers=[options])
        return gradients(ctx, af.prepare_model(ctx, make()), torch.full((1, 2), ctx.rank + 1.0))

    ranks = [gradients(Context(), make(), torch.full((1, 2), rank + 1.0)) for rank in range(2)]
    expected = [sum(both) / 2 for both in zip(*ranks, strict=True)]
    assert run_ranks(run, 2, "processes") == [expected] * 2


@pytest.mark.parametrize(
    ("option", "is_own"), [("static_graph", False), ("static_graph", True), ("find_unused_parameters", True)]
)
def test_where_torch_must_know_what_is_differentiated_another_loss_is_refused(
    option: str, is_own: bool
) -> None:
    def run(ctx: Context) -> list[str]:
        chosen: Any = {option: True}
        if is_own:  # a wrapper of the program
            model = af.prepare_model(ctx, DistributedDataParallel(Net(), **chosen))
        else:
            ctx = ctx.replace(kwargs_handlers=[DistributedDataParallelKwargs(**chosen)])
            model = af.prepare_model(ctx, Net())
        optimizer, found = sgd(model), list[str]()
        for way in (by_forward, by_forward, by_inner_method, by_forward):
            way(ctx, model, rows(ctx.rank, 0))
            found.append(refusal(ctx, optimizer))
        return found

    for found in run_ranks(run, 2, "processes"):
        assert [bool(text) for text in found] == [False, False, True, False]
        words = "call the prepared model" if option == "static_graph" else "Call accelfn.backward"
        assert words in found[2]


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_gradients_that_nobody_averages_are_refused(on: Where) -> None:
    def run(ctx: Context) -> None:
        for model in (Net(), af.prepare_model(ctx, Net(), evaluation_mode=True)):
            model.loss(rows(ctx.rank, 0)).backward()
            assert "not averaged" in refusal(ctx, sgd(model))
        micro = next(micro for _, micro in af.microbatches(ctx, [0]))
        block = af.accumulate(ctx, micro, af.prepare_model(ctx, nn.Tanh()), model)
        with pytest.raises(ConfigurationError, match="model 1, a Net, was not prepared for training"):
            block.__enter__()
        model = Net()
        model.head.requires_grad_(False)
        prepared = af.prepare_model(ctx, model)
        prepared.loss(rows(ctx.rank, 0)).backward()
        assert refusal(ctx, sgd(model)) == ""
        model.head.requires_grad_(True)  # nobody knows of it
        prepared.loss(rows(ctx.rank, 0)).backward()
        assert "the gradient of a parameter of shape (1, 4) is not averaged" in refusal(ctx, sgd(model))

    run_ranks(run, 2, on)


def test_a_wrapper_that_nobody_holds_averages_no_more_and_keeps_nothing_alive() -> None:
    def run(ctx: Context) -> tuple[str, list[bool]]:
        model = Net()
        af.prepare_model(ctx, model)  # what it gives back is dropped
        gc.collect()
        model.loss(rows(ctx.rank, 0)).backward()
        text = refusal(ctx, sgd(model))
        model = Net()
        prepared = af.prepare_model(ctx, model)
        prepared.loss(rows(ctx.rank, 0)).backward()
        left = [weakref.ref(model), weakref.ref(prepared), weakref.ref(model.head.weight)]
        del model, prepared
        gc.collect()
        return text, [one() is None for one in left]

    for text, gone in run_ranks(run, 2, "processes"):
        assert "not averaged" in text
        assert gone == [True] * 3


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_a_parameter_of_two_models_is_averaged_by_the_one_whose_forward_was_called(on: Where) -> None:
    def run(ctx: Context) -> tuple[Values, list[str]]:
        trunk = nn.Linear(3, 2)
        nn.init.ones_(trunk.weight)
        models = [af.prepare_model(ctx, nn.Sequential(trunk, nn.Linear(2, 1))) for _ in range(2)]
        found: list[str] = []
        for model in models:
            optimizer = sgd(model)
            model(rows(ctx.rank, 0)).sum().backward()
            found.append(refusal(ctx, optimizer))
            with af.no_sync(ctx, model):
                model(rows(ctx.rank, 0)).sum().backward()
            found.append(refusal(ctx, optimizer))
            optimizer.zero_grad()
        return [one.detach() for one in trunk.parameters()], found

    first, second = run_ranks(run, 2, on)
    assert all(map(torch.equal, first[0], second[0]))
    assert [bool(text) for text in first[1]] == [False, True] * 2


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_copies_are_averaged_and_compiled_models_are_looked_into(on: Where) -> None:
    def run(ctx: Context) -> tuple[Values, str]:
        original = af.prepare_model(ctx, Net())
        model = copy.deepcopy(original)
        compiled = cast("Any", torch.compile(model, backend="eager"))
        optimizer, scaler = sgd(model), af.init_scaler(ctx)
        batches = [rows(ctx.rank, number) for number in range(4)]
        for x, micro in af.microbatches(ctx.replace(gradient_accumulation_steps=2), batches):
            with af.accumulate(ctx, micro, compiled):
                scaler = af.backward(ctx, (compiled(x) / 2).square().mean(), scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
        compiled.loss(batches[0]).backward()
        assert refusal(ctx, optimizer, clear_gradients=False) == ""
        del original
        with af.no_sync(ctx, compiled):
            compiled.loss(batches[0]).backward()
        return [one.detach() for one in model.parameters()], refusal(ctx, optimizer)

    first, second = run_ranks(run, 2, on)
    assert all(map(torch.equal, first[0], second[0]))
    assert "no_sync" in first[1]


def test_the_models_own_attributes_are_reached_through_the_wrapper() -> None:
    def run(ctx: Context) -> None:
        model = af.prepare_model(ctx, Net())
        assert isinstance(model, DistributedDataParallel)
        assert model.temperature == 2.0
        assert model.body is cast("Net", model.module).body
        assert sorted(model.state_dict()) == sorted(f"module.{name}" for name in Net().state_dict())
        assert not hasattr(model, "nothing")
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
            _ = cast("Any", model).nothing
        with pytest.raises(AttributeError, match="_hidden"):
            _ = cast("Any", model)._hidden

    run_ranks(run, 2, "processes")


def test_a_model_that_is_wrapped_already_is_taken_as_it_is() -> None:
    def run(ctx: Context) -> Values:
        theirs = DistributedDataParallel(Net())
        model = af.prepare_model(ctx.replace(mixed_precision="bf16"), theirs)
        assert model is theirs
        assert af.prepare_model(ctx.replace(mixed_precision="bf16"), theirs) is theirs
        optimizer, scaler = sgd(model), af.init_scaler(ctx)
        for x, micro in af.microbatches(ctx, [rows(ctx.rank, number) for number in range(4)]):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, model(x).square().mean(), scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
        by_inner_method(ctx, model, rows(ctx.rank, 0))
        assert refusal(ctx, optimizer) == ""
        alone = torch.distributed.new_group([ctx.rank], use_local_synchronization=True)
        with pytest.raises(
            ConfigurationError, match=rf"over the processes \[{ctx.rank}\], where .* \[0, 1\]"
        ):
            af.prepare_model(ctx, DistributedDataParallel(Net(), process_group=alone))
        other = ctx.replace(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
        with pytest.raises(ConfigurationError, match="where this context has DistributedDataParallelKwargs"):
            af.prepare_model(other, DistributedDataParallel(Net()))
        with pytest.raises(ConfigurationError, match="and this context has one process"):
            af.prepare_model(Context(), DistributedDataParallel(Net()))
        sharded: Any = fully_shard(Net(), mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ConfigurationError, match="it is already sharded by FSDP"):
            af.prepare_model(ctx, sharded)
        return [one.detach() for one in model.parameters()]

    first, second = run_ranks(run, 2, "processes", gradient_accumulation_steps=2)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("reduction", ["mean", "canonical"])
def test_a_model_may_be_named_twice(reduction: Any) -> None:
    def gradients(ctx: Context, number: int) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model, scaler = af.prepare_model(ctx, model), af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, [torch.ones(1, 1), torch.full((1, 1), ctx.rank + 2.0)]):
            with af.accumulate(ctx, micro, *[model] * number):
                scaler = af.backward(ctx, model(batch).mean(), scaler, micro)
        model.weight.grad, closed = None, model.weight.grad
        with af.no_sync(ctx, *[model] * number):
            pass
        assert closed is not None
        return closed.flatten().tolist()

    def run(ctx: Context) -> list[list[float]]:
        return [gradients(ctx, 1), gradients(ctx, 2)]

    once = [1.75]  # of 1 and the mean of 2 and 3, half each
    assert run_ranks(run, 2, gradient_accumulation_steps=2, reduction=reduction) == [[once, once]] * 2
