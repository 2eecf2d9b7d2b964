# torch leaves manual_seed and the optimizers' step partly untyped.
# pyright: reportUnknownMemberType=false

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Accelerator, Context
from accelfn.bigmodel.dispatch import cpu_offload, dispatch_model
from accelfn.errors import ConfigurationError, RemoteRankError
from accelfn.testing import Where, run_ranks
from tests.training.models import filled, values


def mapped(device_map: Any, model: nn.Module | None = None) -> nn.Module:
    inner = model or nn.Linear(1, 1)
    cast("Any", inner).hf_device_map = device_map
    return model or nn.Sequential(nn.Linear(1, 1), nn.Sequential(inner))


def test_a_device_map_counts_where_it_names_several_devices() -> None:
    shim = Accelerator(context=Context())
    for verify in (af.verify_device_map, shim.verify_device_map):
        assert not verify(nn.Linear(1, 1))
        assert not verify(mapped({"": "cpu"}))
        assert not verify(mapped("auto"))
        assert verify(mapped({"a": 0, "b": "disk"}))


@pytest.mark.parametrize("on", ["memory", "processes"])
@pytest.mark.parametrize("evaluation_mode", [False, True], ids=["training", "evaluation"])
def test_several_ranks_refuse_a_model_on_several_devices(on: Where, evaluation_mode: bool) -> None:
    def run(ctx: Context) -> None:
        on_meta = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
        for model, found in (
            (on_meta, "0.weight is on cpu, 1.weight is on meta"),
            (mapped({"a": 0, "b": 1}), "a device map has spread it"),
        ):
            with pytest.raises(ConfigurationError, match=f"of the 2 ranks holds .* several: {found}"):
                af.prepare_model(ctx, model, evaluation_mode=evaluation_mode)
            assert "forward" not in vars(model)
        af.wait_for_everyone(ctx)

    run_ranks(run, 2, on, mixed_precision="bf16")


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_one_ranks_model_on_several_devices_is_an_error_of_all(on: Where) -> None:
    def run(ctx: Context) -> str:
        model = mapped({"a": 0, "b": 1}) if ctx.rank else mapped({})
        with pytest.raises((ConfigurationError, RemoteRankError), match="on several") as caught:
            af.prepare(ctx, model)
        return type(caught.value).__name__

    assert run_ranks(run, 2, on) == ["RemoteRankError", "ConfigurationError"]


class Immovable(nn.Sequential):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("moved")


def immovable() -> nn.Module:
    return Immovable(nn.Linear(3, 1))


def around_offloaded() -> nn.Module:
    wrapped = nn.Sequential(cpu_offload(immovable(), "cpu:0"))
    vars(wrapped)["to"] = None  # not called
    return wrapped


@pytest.mark.parametrize(
    ("model", "ctx"),
    [
        (mapped({"a": 0, "b": 1}, immovable()), Context()),
        (cpu_offload(immovable(), "cpu:0"), Context()),
        (around_offloaded(), Context()),
        (immovable(), Context().replace(device_placement=False)),
    ],
    ids=["spread", "offloaded", "around an offloaded one", "no placement"],
)
def test_a_model_stays_where_it_is(model: nn.Module, ctx: Context) -> None:
    assert af.prepare(ctx, model) is model
    with pytest.raises(AssertionError, match="moved"):
        af.prepare(Context(), immovable())


def spread(**options: Any) -> nn.Module:
    model = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    return dispatch_model(model, {"0": "cpu:0", "1": "cpu", "2": "cpu"}, main_device="cpu:0", **options)


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def trained(ctx: Context, model: nn.Module) -> list[torch.Tensor]:
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    prepared, optimizer = af.prepare(ctx, model, optimizer)
    for _ in range(2):
        share = X.tensor_split(ctx.num_processes)[ctx.rank]
        af.backward(ctx, prepared(share).square().mean(), af.init_scaler(ctx))
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_the_variable_lets_ranks_bring_spread_models(on: Where) -> None:
    def run(ctx: Context) -> list[torch.Tensor]:
        with pytest.raises(ConfigurationError, match="ACCELFN_BYPASS_DEVICE_MAP=true"):
            af.prepare_model(ctx, spread(), evaluation_mode=True)
        strategy = dataclasses.replace(ctx.strategy, bypass_device_map=True)
        return trained(dataclasses.replace(ctx, strategy=strategy), spread())

    alone = trained(Context(), spread())
    for found in run_ranks(run, 2, on):
        assert all(torch.allclose(one, other) for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("said", ["true", "false", None])
def test_the_variable_is_read_once(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_BYPASS_DEVICE_MAP", "ACCELFN_BYPASS_DEVICE_MAP"):
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", said)
    with af.init_context(cpu=True) as ctx:
        assert ctx.strategy.bypass_device_map is (said == "true")
        assert ctx.replace(mixed_precision="bf16").strategy == ctx.strategy


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("device_map", "refused"),
    [
        ({"": "cpu"}, ""),
        ({}, ""),
        ({"": 0}, "on 0, while this rank trains on cpu"),
        ({"": "cuda:1"}, "on 1, while"),
        ({"": "disk"}, "on disk, while"),
        ({"a": "cpu", "b": "disk"}, "on disk, while"),
        ({"a": 0, "b": 1}, ""),
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
