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


def mapped(device_map: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    cast("Any", model[1]).hf_device_map = device_map
    return model


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


def test_alone_a_model_that_was_spread_stays_where_it_is() -> None:
    class Immovable(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("moved")

    model = Immovable(1, 1)
    cast("Any", model).hf_device_map = {"a": 0, "b": 1}
    assert af.prepare(Context(), model) is model


def spread(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
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
    return [one.detach().clone() for one in parameters]


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


def test_an_offloaded_model_is_prepared_where_it_lies() -> None:
    class Immovable(nn.Sequential):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("moved")

    model = cpu_offload(Immovable(nn.Linear(3, 1)), "cpu:0")
    assert af.prepare(Context(), model) is model
    wrapped = nn.Sequential(Immovable(nn.Linear(3, 1)))
    cpu_offload(wrapped[0], "cpu:0")
    vars(wrapped)["to"] = None  # not called
    assert af.prepare(Context(), wrapped) is wrapped


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
    model: Any = nn.Linear(1, 1)
    model.hf_device_map = device_map
    setattr(model, f"is_loaded_in_{bits}bit", True)
    if refused:
        with pytest.raises(ConfigurationError, match=refused):
            af.prepare(Context(), model)
    else:
        assert af.prepare(Context(), model) is model
