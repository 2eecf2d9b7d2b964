# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Accelerator, Context, DataLoaderConfiguration
from accelfn.accelerator import AcceleratedDataLoader, AcceleratedOptimizer, AcceleratedScheduler
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.training.models import one_weight, sgd, weight_of


def make(**options: Any) -> tuple[Accelerator, nn.Linear, AcceleratedOptimizer, AcceleratedScheduler]:
    accelerator = Accelerator(context=Context().replace(**options))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def test_the_optimizer_is_shared_and_not_copied() -> None:
    _, model, optimizer, _ = make()
    inner = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.param_groups[0]["lr"] = 0.25
    assert optimizer.state_dict() == inner.state_dict()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    assert repr(optimizer).startswith("AcceleratedOptimizer(SGD (")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("stepped"))
    model(torch.ones(1, 1)).sum().backward()
    assert optimizer.step() is None
    assert calls == ["stepped"]
    assert optimizer.step(lambda: 3.0) == 3.0
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"]
)
def test_proxies_come_back_from_copies_and_pickles(way: Any) -> None:
    _, model, optimizer, scheduler = make()
    step = AcceleratedOptimizer.step
    twin_model, twin, twin_scheduler = way((model, optimizer, scheduler))
    assert AcceleratedOptimizer.step is step  # torch's unpickling would put hooks around it
    assert twin.param_groups[0]["params"][0] is twin_model.weight
    twin_model(torch.ones(1, 1)).sum().backward()
    before = float(twin_model.weight.detach())
    twin.step()
    with pytest.warns(UserWarning, match="overridden"):  # torch's schedules say so after any copy
        twin_scheduler.step()
    assert float(twin_model.weight.detach()) == before - 1
    assert twin_scheduler.get_last_lr() == [0.5]
    assert scheduler.get_last_lr() == [1.0]
    optimizer.step()


def test_a_schedule_may_go_its_own_way() -> None:
    accelerator, model, _, scheduler = make(
        gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    with accelerator.accumulate(model), pytest.warns(UserWarning, match=r"before `optimizer\.step"):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    other = AcceleratedScheduler(accelerator, torch.optim.lr_scheduler.StepLR(scheduler.optimizer, 1))
    other.load_state_dict({**other.state_dict(), "last_epoch": 7})
    assert other.last_epoch == 7


def test_preparing_twice_gives_the_same_and_another_accelerators_is_an_error() -> None:
    accelerator, _, optimizer, scheduler = make()
    loader = accelerator.prepare(DataLoader([1, 2]))  # pyright: ignore[reportArgumentType]
    again = accelerator.prepare(optimizer, scheduler, loader)
    assert all(one is two for one, two in zip(again, (optimizer, scheduler, loader), strict=True))
    other = Accelerator(context=Context().replace(mixed_precision="bf16"))
    for item in (optimizer, scheduler, loader):
        with pytest.raises(ConfigurationError, match="another context"):
            other.prepare(item)


def numbers(num: int, batch_size: int = 2) -> Any:
    return DataLoader(torch.arange(num), batch_size=batch_size)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("way", ["method", "function"])
def test_a_skipped_loader_is_followed_and_moves_the_original_on(way: str) -> None:
    def run(ctx: Context) -> list[Any]:
        accelerator = Accelerator(context=ctx)
        loader = accelerator.prepare(numbers(11))
        if way == "method":
            rest = accelerator.skip_first_batches(loader, num_batches=1)
        else:
            rest = af.skip_first_batches(loader, 1)
        assert isinstance(rest, AcceleratedDataLoader)
        assert (len(rest), len(loader)) == (2, 3)
        found: list[Any] = []
        for batch in rest:
            with accelerator.accumulate():
                gathered = accelerator.gather_for_metrics(batch).tolist()
                found.append((gathered, accelerator.sync_gradients))
        assert loader.epoch == rest.epoch == 1
        return found

    expected = [([4, 5, 6, 7], False), ([8, 9, 10], True)]
    assert run_ranks(run, 2, gradient_accumulation_steps=2) == [expected] * 2


def rows(num: int) -> Any:
    return DataLoader(torch.arange(float(num))[:, None] / num, batch_size=2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("even", [None, False])
def test_uneven_ranks_are_joined(even: bool | None) -> None:
    def run(ctx: Context) -> float:
        accelerator = Accelerator(context=ctx)
        model = one_weight(0.5)
        prepared, optimizer, loader = accelerator.prepare(model, sgd(model, 0.1), rows(13))
        for _ in range(2):
            with accelerator.join_uneven_inputs([prepared], even_batches=even):
                assert len(loader) == (4 if ctx.rank == 0 else 3)
                for x in loader:
                    with accelerator.accumulate(prepared):
                        accelerator.backward(prepared(x).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
            assert len(loader) == (3 if even is None and ctx.rank else 4)
        assert accelerator.uneven == "error"
        return weight_of(model)

    config = DataLoaderConfiguration(even_batches=even is not None)
    options: Any = {"dataloader_config": config, "gradient_accumulation_steps": 2}
    first, second = run_ranks(run, 2, "processes", **options)
    assert first == second < 0.5
