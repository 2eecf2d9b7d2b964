# torch leaves manual_seed and the optimizers' step partly untyped.
# pyright: reportUnknownMemberType=false

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import accelfn as af
from accelfn import Accelerator, Context
from accelfn.bigmodel.dispatch import cpu_offload
from accelfn.errors import ConfigurationError
from accelfn.testing import Where, run_ranks
from tests.training.models import gradients


def mapped(device_map: Any, model: nn.Module | None = None) -> nn.Module:
    inner = model or nn.Linear(1, 1)
    cast("Any", inner).hf_device_map = device_map
    return model or nn.Sequential(nn.Linear(1, 1), nn.Sequential(inner))


def test_a_device_map_counts_where_it_names_several_devices() -> None:
    shim = Accelerator(context=Context())
    for verify in (af.training.verify_device_map, shim.verify_device_map):
        assert not verify(nn.Linear(1, 1))
        assert not verify(mapped({"": "cpu"}))
        assert not verify(mapped("auto"))
        assert verify(mapped({"a": 0, "b": "disk"}))


@pytest.mark.parametrize(("on", "evaluation_mode"), [("memory", True), ("processes", False)])
def test_several_ranks_refuse_a_model_on_several_devices(on: Where, evaluation_mode: bool) -> None:
    def run(ctx: Context) -> None:
        on_gpu = nn.Linear(1, 1)
        with FakeTensorMode():  # as if there were one
            on_gpu.weight = nn.Parameter(torch.empty(1, 1, device="cuda"))
        for model, found in (
            (nn.Sequential(nn.Linear(1, 1), on_gpu), "0.weight is on cpu, 1.weight is on cuda:0"),
            (mapped({"a": 0, "b": 1}), "a device map has spread it"),
        ):
            with pytest.raises(ConfigurationError, match=f"of the 2 ranks holds .* several: {found}"):
                af.prepare_model(ctx, model, evaluation_mode=evaluation_mode)
            assert "forward" not in vars(model)
        af.wait_for_everyone(ctx)

    run_ranks(run, 2, on, mixed_precision="bf16")


class Immovable(nn.Sequential):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("moved")


def immovable() -> nn.Module:
    return Immovable(nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("model", "ctx"),
    [
        (mapped({"a": 0, "b": 1}, immovable()), Context()),
        (cpu_offload(immovable(), "cpu:0"), Context()),
        (immovable(), Context().replace(device_placement=False)),
    ],
    ids=["spread", "offloaded", "no placement"],
)
def test_a_model_stays_where_it_is(model: nn.Module, ctx: Context) -> None:
    assert af.prepare(ctx, model) is model
    with pytest.raises(AssertionError, match="moved"):
        af.prepare(Context(), immovable())


def test_the_variable_lets_ranks_bring_spread_models() -> None:
    def run(ctx: Context) -> list[float]:
        with pytest.raises(ConfigurationError, match="ACCELFN_BYPASS_DEVICE_MAP=true"):
            af.prepare_model(ctx, mapped({"a": 0, "b": 1}))
        strategy = dataclasses.replace(ctx.strategy, bypass_device_map=True)
        model = mapped({"a": 0, "b": 1})
        prepared = af.prepare_model(dataclasses.replace(ctx, strategy=strategy), model)
        prepared(torch.ones(1, 1)).sum().backward()
        return [float(one.sum()) for one in gradients(model)]

    first, second = run_ranks(run, 2, "processes")
    assert first == second


@pytest.mark.parametrize(
    ("bits", "device_map", "refused"),
    [
        (4, {"": "cpu"}, ""),
        (8, {}, ""),
        (8, {"": 0}, "on 0, while this rank trains on cpu"),
        (4, {"": "cuda:1"}, "on 1, while"),
        (4, {"a": "cpu", "b": "disk"}, "on disk, while"),
        (8, {"a": 0, "b": 1}, ""),
    ],
)
def test_a_quantised_model_is_prepared_where_it_was_loaded(
    bits: int, device_map: dict[str, Any], refused: str
) -> None:
    model = mapped(device_map, nn.Linear(1, 1))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    if refused:
        with pytest.raises(ConfigurationError, match=refused):
            af.prepare(Context(), model)
    else:
        assert af.prepare(Context(), model) is model
