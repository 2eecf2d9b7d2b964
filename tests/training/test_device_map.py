from typing import Any, cast

import pytest
from torch import nn

import accelfn as af
from accelfn import Accelerator, Context
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
