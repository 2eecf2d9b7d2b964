# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import gc
import weakref
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn import Accelerator, Context, Guard
from accelfn.accelerator import LocalSGD
from accelfn.errors import ConfigurationError
from accelfn.testing import Where, run_ranks
from tests.training.models import filled, one_weight, sgd, weight_of


def parts() -> tuple[Any, Any, Any, Any]:
    model = filled(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(12, 2)
    return model, optimizer, scheduler, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)


def references(*things: Any) -> list[weakref.ref[Any]]:
    return [weakref.ref(one) for one in things]


def still_there(held: list[weakref.ref[Any]]) -> list[str]:
    gc.collect()
    return [type(one()).__name__ for one in held if one() is not None]


@pytest.mark.parametrize(("on", "mode"), [("memory", "fp16"), ("processes", "bf16")])
def test_after_del_nothing_is_kept_by_the_functions(on: Where, mode: str) -> None:
    def run(ctx: Context) -> list[str]:
        before = parts()
        held = references(*before)
        model, optimizer, scheduler, loader = af.prepare(ctx, *before)
        held += references(model, loader)
        scaler = af.init_scaler(ctx)
        x = y = torch.empty(0)
        for (x, y), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, (model(x) - y).square().mean(), scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                af.scheduler_step(ctx, scheduler, scaler)
            held += references(x)
        del before, model, optimizer, scheduler, loader, x, y
        return still_there(held)

    assert run_ranks(run, 2, on, mixed_precision=mode) == [[], []]


@pytest.mark.parametrize(("way", "mode"), [("del", "no"), ("free_memory", "fp16"), ("clear", "no")])
def test_after_del_nothing_is_kept_by_the_shim(way: str, mode: str) -> None:
    def run(ctx: Context) -> list[str]:
        accelerator = Accelerator(context=ctx)
        before = parts()
        held = references(*before)
        model, optimizer, scheduler, loader = accelerator.prepare(*before)
        held += references(model, optimizer, scheduler, loader)
        x = y = torch.empty(0)
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            held += references(x)
        del before, x, y
        if way == "del":
            del model, optimizer, scheduler, loader
        else:
            free = getattr(accelerator, way)
            model, optimizer, scheduler, loader = free(model, optimizer, scheduler, loader)
            assert (model, optimizer, scheduler, loader) == (None,) * 4
            assert accelerator.step == 0
            assert accelerator.last_micro is None
        found = still_there(held)
        assert [*accelerator.models, *accelerator.optimizers, *accelerator.loaders] == []
        return found

    assert run_ranks(run, 2, mixed_precision=mode) == [[], []]


def test_debugging_is_asked_for_by_argument_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**options: Any) -> bool:
        accelerator = Accelerator(cpu=True, **options)
        accelerator.close()
        return accelerator.state.debug

    assert [found(), found(debug=True), found(guard="full"), found(debug=False)] == [False, True, True, False]
    for name in ("ACCELERATE_DEBUG_MODE", "ACCELFN_DEBUG_MODE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert [found(), found(debug=False), found(guard="sampled")] == [True, False, False]
    with pytest.raises(ConfigurationError, match="options from the context, but got debug too"):
        Accelerator(context=Context(), debug=True)


def test_freeing_amid_a_window_leaves_no_weight_of_its_losses() -> None:
    accelerator = Accelerator(context=Context())
    for weight in (8.0, 2.0):
        model = one_weight()
        model, optimizer = accelerator.prepare(model, sgd(model))
        accelerator.backward(weight * model(torch.ones(1, 1)).sum(), weight=weight)
        if weight == 8.0:
            accelerator.free_memory()
        else:
            optimizer.step()
            assert weight_of(model) == -1  # and not -2 / (2 + 8)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_the_example_of_triggering_averages_what_was_accumulated(on: Where) -> None:
    def run(ctx: Context) -> list[torch.Tensor]:
        accelerator = Accelerator(context=ctx)
        model = cast("nn.Module", accelerator.prepare(parts()[0]))
        inputs = [torch.full((2, 2), ctx.rank + number, dtype=torch.float64) for number in (0.5, 1.5)]
        with accelerator.no_sync():
            losses = [model(one).square().mean() for one in inputs]
        accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
        return [cast("torch.Tensor", one.grad) for one in model.parameters()]

    first, second = run_ranks(run, 2, on)
    alone = parts()[0]
    for value in (0.5, 1.5, 1.5, 2.5):
        (alone(torch.full((2, 2), value, dtype=torch.float64)).square().mean() / 2).backward()
    torch.testing.assert_close(first, [one.grad for one in alone.parameters()])
    torch.testing.assert_close(second, first)


def test_local_sgd_averages_unless_it_is_off_or_fails() -> None:
    def run(ctx: Context) -> tuple[float, float, bool]:
        accelerator = Accelerator(context=ctx)
        model = cast("nn.Linear", accelerator.prepare(nn.Linear(1, 1, bias=False)))

        def left(enabled: bool) -> float:
            nn.init.constant_(model.weight, float(ctx.rank))
            with pytest.raises(KeyError), LocalSGD(accelerator, model, 1, enabled):
                raise KeyError
            return float(model.weight.detach())

        found = left(enabled=True), left(enabled=False)
        model.zero_grad()
        with LocalSGD(accelerator, model, enabled=False) as local_sgd:
            model(torch.ones(1, 1) * ctx.rank).sum().backward()
            local_sgd.step()
        assert model.weight.grad is not None
        is_averaged = float(model.weight.grad) == 0.5
        nn.init.constant_(model.weight, float(ctx.rank))
        with LocalSGD(accelerator, model, 1) as local_sgd:
            local_sgd.step()
            assert model.weight.item() == 0.5
        return *found, is_averaged

    assert run_ranks(run, 2) == [(0.0, 0.0, True), (1.0, 1.0, True)]
    accelerator = Accelerator(context=Context())
    with pytest.raises(ValueError, match="the number of steps must be at least 1, got 0"):
        LocalSGD(accelerator, nn.Linear(1, 1), 0)
    guarded = Accelerator(context=Context().replace(guard=Guard(check_replicas_every=1)))
    with pytest.raises(ConfigurationError, match="check_replicas_every compares"):
        LocalSGD(guarded, nn.Linear(1, 1))
    LocalSGD(guarded, nn.Linear(1, 1), enabled=False)


def test_buffers_are_cut_inside_and_whole_again_behind() -> None:
    def run(ctx: Context) -> list[Any]:
        accelerator = Accelerator(context=ctx)
        ids, kept = torch.arange(8), torch.arange(16).view(2, 8)
        inside: list[Any] = []
        left = pytest.raises(ValueError, match="left")
        with left, accelerator.maybe_context_parallel([ids, kept], [0, 1], no_restore_buffers={kept}):
            inside += [ids.tolist(), kept.tolist()]
            raise ValueError("left")
        uneven = accelerator.maybe_context_parallel([ids, torch.zeros(6)], [0, 0])
        with pytest.raises(ValueError, match="'1' have 6 tokens"), uneven:
            pass
        cutting = Accelerator(
            context=ctx.replace(dataloader_config=af.DataLoaderConfiguration(sequence={0: 1}))
        )
        with (
            pytest.raises(ConfigurationError, match="shard sequences already"),
            cutting.maybe_context_parallel([ids], [0]),
        ):
            pass
        return [*inside, ids.tolist(), kept.tolist()]

    ranks = run_ranks(run, 2, parallelism_config=af.ParallelismConfig(cp_size=2))
    for found, piece in zip(ranks, ([0, 1, 6, 7], [2, 3, 4, 5]), strict=True):
        rows = [piece, [one + 8 for one in piece]]
        assert found == [piece, rows, list(range(8)), rows]


def test_without_ranks_that_share_sequences_buffers_stay_whole_and_it_is_said_once() -> None:
    accelerator = Accelerator(context=Context())
    ids = torch.arange(6)
    with pytest.warns(UserWarning, match="shown once"), accelerator.maybe_context_parallel([ids], [0]):
        assert len(ids) == 6
    with accelerator.maybe_context_parallel([ids], [0]):
        assert len(ids) == 6
    with (
        pytest.raises(ValueError, match="1 buffers and 2"),
        accelerator.maybe_context_parallel([ids], [0, 1]),
    ):
        pass
