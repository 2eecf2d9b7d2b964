# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn import Accelerator, Context
from accelfn.bigmodel.align_hooks import (
    attach_align_device_hook,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
)
from accelfn.bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model
from accelfn.bigmodel.hooks import cpu_offload_with_hook, remove_hook_from_submodules
from tests.bigmodel.offload.trees import same

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Has tensors at its root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(3))
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) * self.scale + self.offset


def on_cpu(model: Model, folder: Path) -> None:
    cpu_offload(model, "cpu:0")


def on_disk(model: Model, folder: Path) -> None:
    disk_offload(model, folder / "offload", "cpu:0")


def spread(model: Model, folder: Path) -> None:
    places: dict[str, Any] = {"scale": "cpu:1", "offset": "cpu", "blocks.0": "cpu:0", "blocks.1": "disk"}
    dispatch_model(model, places, offload_dir=folder / "offload")


def hooked(model: Model, folder: Path) -> None:
    attach_align_device_hook(model, "cpu:0", offload=True, offload_buffers=True)


def as_a_whole(model: Model, folder: Path) -> None:
    cpu_offload_with_hook(model, "cpu:0")


OFFLOADS = [on_cpu, on_disk, spread, hooked, as_a_whole]


def equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return [*one] == [*other] and same(one, other)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_the_state_dict_is_real(offload: Callable[[Model, Path], None], tmp_path: Path) -> None:
    model, plain = Model(), Model()
    offload(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
    state = plain.state_dict()
    assert equal(get_state_dict_offloaded_model(model), state)
    assert equal(model.state_dict(), state)
    remove_hook_from_submodules(model)
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(X), plain(X))
    assert equal(model.state_dict(), state)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_models_are_saved(offload: Callable[[Model, Path], None], tmp_path: Path) -> None:
    model = Model()
    offload(model, tmp_path)
    af.save_model(Context(), model, tmp_path / "function")
    shim = Accelerator(cpu=True)
    model = shim.prepare(model)
    shim.save_model(model, tmp_path / "shim")
    assert equal(shim.get_state_dict(model), Model().state_dict())
    for name in ("function", "shim"):
        assert same(load_file(tmp_path / name / "model.safetensors"), Model().state_dict())
    with torch.no_grad():
        assert torch.equal(model(X), Model()(X))


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight', '0\.bias' are on the meta device"):
        get_state_dict_offloaded_model(nn.Sequential(nn.Linear(3, 3, device="meta")))


@pytest.mark.parametrize("offload", OFFLOADS)
def test_named_entries_get_their_values(offload: Callable[[Model, Path], None], tmp_path: Path) -> None:
    model, state = Model(), Model().state_dict()
    offload(model, tmp_path)
    asked: dict[str, Any] = {"blocks.0.weight": "", "blocks.0.bias": "", "blocks.1.bias": "", "other": 1}
    found = get_state_dict_from_offload(model.blocks[0], "blocks.0.weight", asked)
    assert found is asked
    assert found.pop("blocks.1.bias") == ""
    assert found.pop("other") == 1
    assert equal(found, {name: state[name] for name in ("blocks.0.weight", "blocks.0.bias")})
    found = get_state_dict_from_offload(model, "scale", {"scale": ""})
    assert equal(found, {"scale": state["scale"]})
