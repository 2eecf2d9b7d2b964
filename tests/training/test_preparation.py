# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Context
from accelfn.data import PreparedDataLoader
from accelfn.errors import ConfigurationError
from accelfn.testing import Where, run_ranks
from tests.training.models import grad_of, one_weight, weight_of


def parts() -> tuple[nn.Linear, torch.optim.SGD, torch.optim.lr_scheduler.StepLR, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(torch.arange(4))  # pyright: ignore[reportArgumentType]
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), loader


def test_each_kind_of_object_comes_back_in_its_place() -> None:
    model, optimizer, scheduler, loader = parts()
    found = af.prepare(Context(), scheduler, loader, "text", optimizer, model)
    assert found[0] is scheduler
    assert isinstance(found[1], PreparedDataLoader)
    assert found[2:] == ("text", optimizer, model)
    assert af.prepare(Context(), model) is model
    with pytest.raises(TypeError, match="nothing to prepare"):
        cast("Any", af.prepare)(Context())


def test_what_is_prepared_already_comes_back_as_it_is() -> None:
    def run(ctx: Context) -> None:
        first = af.prepare(ctx, *parts())
        second = af.prepare(ctx, *first)
        assert all(a is b for a, b in zip(first, second, strict=True))
        for item in first:
            with pytest.raises(ConfigurationError, match="another context"):
                af.prepare(ctx.replace(mixed_precision="bf16"), item)

    run_ranks(run, 2)


def test_on_processes_a_model_stands_inside_of_ddp_and_cannot_be_gone_past() -> None:
    def run(ctx: Context) -> bool:
        model = parts()[0]
        wrapped = af.prepare_model(ctx, model)
        assert af.prepare_model(ctx, wrapped) is wrapped
        assert af.unwrap_model(wrapped) is model
        with pytest.raises(ConfigurationError, match="wraps it"):
            af.prepare_model(ctx, model)
        return isinstance(wrapped, DistributedDataParallel)

    assert run_ranks(run, 2, "processes") == [True, True]


@pytest.mark.parametrize("on", ["memory", "processes"])
@pytest.mark.parametrize("why", ["evaluation", "frozen"])
def test_what_nobody_averaged_is_replicated_when_it_is_prepared_for_training(on: Where, why: str) -> None:
    def run(ctx: Context) -> tuple[float, float, bool]:
        model = one_weight(ctx.rank + 1.0).requires_grad_(why == "evaluation")
        first = af.prepare_model(ctx, model, evaluation_mode=why == "evaluation")
        assert first is model
        forward = vars(model)["forward"]
        assert af.prepare_model(ctx, model, evaluation_mode=True) is model
        before = weight_of(model)
        trained = af.prepare_model(ctx, model.requires_grad_(True))
        assert af.prepare_model(ctx, trained) is trained
        assert vars(model)["forward"] is forward  # it was under autocast already
        assert model.weight.tolist() == [[1.0]]
        trained(torch.full((1, 1), float(ctx.rank))).sum().backward()
        return before, grad_of(model), isinstance(trained, DistributedDataParallel)

    wrapped = on == "processes"
    second = 2.0 if why == "evaluation" else 1.0  # frozen models get rank 0's values at once
    assert run_ranks(run, 2, on, mixed_precision="bf16") == [(1.0, 0.5, wrapped), (second, 0.5, wrapped)]


def test_compiled_models_are_unwrapped_on_request() -> None:
    inner = nn.Linear(1, 1)
    compiled = cast("nn.Module", cast("Any", torch).compile(inner, backend="eager"))
    assert af.unwrap_model(compiled) is compiled
    assert af.unwrap_model(compiled, keep_torch_compile=False) is inner
