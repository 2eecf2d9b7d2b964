"""Checkpoints are loaded as in a device map, and the model runs."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import CheckpointMismatchError
from accelfn.weights import load as apply
from accelfn.weights.stored import mapped_from
from tests.bigmodel.load.layouts import on_meta, save


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data + self.linear(self.norm(data)).relu() * self.scale


class Small(nn.Module):
    def __init__(self, num_blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        blocks = [Block(width) for _ in range(num_blocks)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, width)
        self.head.weight = blocks[0].linear.weight

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        data = self.embed(data)
        for block in self.blocks:
            data = block(data)
        return self.head(data)


def saved(tmp_path: Path) -> tuple[Small, Path]:
    torch.random.manual_seed(3)  # pyright: ignore[reportUnknownMemberType]
    model = Small().eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None:
            norm.running_mean.uniform_(-1, 1)
    tensors = {name: one for name, one in model.state_dict().items() if name != "head.weight"}
    return model, save(tensors, tmp_path / "ck", "folder")


places = st.sampled_from(["cpu", "cpu:0", "cpu:1", "disk"])
maps = st.fixed_dictionaries(
    {"embed": places, "blocks.0": places, "blocks.1": places, "blocks.2": places, "head": places}
)


@given(maps)
def test_outputs_are_those_of_the_plain_model(
    tmp_path_factory: pytest.TempPathFactory, device_map: dict[str, str]
) -> None:
    plain, path = saved(tmp_path_factory.mktemp("load"))
    asked: Any = device_map
    model = af.load_checkpoint_and_dispatch(on_meta(Small().eval()), path, asked, strict=True)
    data = torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(model(data), plain(data))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with torch.no_grad():
        assert torch.equal(twin(data), plain(data))


@pytest.mark.parametrize("name", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_map_by_name(name: str, tmp_path: Path) -> None:
    plain, path = saved(tmp_path)
    model: Any = af.load_checkpoint_and_dispatch(
        on_meta(Small().eval()), path, name, {"cpu:0": 900, "cpu:1": 700, "cpu": 500}, ["Block"]
    )
    assert {"disk"} < set(model.hf_device_map.values())
    data = torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(model(data), plain(data))


def test_a_narrower_dtype_is_planned_with_and_written_to_the_folder(tmp_path: Path) -> None:
    plain, path = saved(tmp_path)
    model: Any = af.load_checkpoint_and_dispatch(
        on_meta(Small().eval()),
        path,
        "sequential",
        {"cpu:0": 600, "cpu": 10},
        ["Block"],
        tmp_path / "off",
        dtype="bfloat16",
        keep_in_fp32_modules=["norm"],
    )
    assert "cpu:0" in model.hf_device_map.values()
    assert model.blocks[2].norm.weight.dtype == torch.float32
    assert model.blocks[2].linear.weight.dtype == torch.bfloat16
    assert mapped_from(model.blocks[2].linear.weight) is not None
    assert len(list((tmp_path / "off").iterdir())) == 3  # one for each file
    wanted = plain.bfloat16().head.weight
    assert torch.equal(model.head.weight, wanted)


def test_without_a_map_it_only_loads(tmp_path: Path) -> None:
    plain, path = saved(tmp_path)
    model = af.load_checkpoint_and_dispatch(on_meta(Small().eval()), path, dtype="bf16")
    assert not hasattr(model, "hf_device_map")
    data = torch.randn(5, 4).bfloat16()
    with torch.no_grad():
        assert torch.equal(model(data), plain.bfloat16()(data))


def test_errors_leave_the_model_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = saved(tmp_path)
    wrong = on_meta(Small(width=9))
    with pytest.raises(CheckpointMismatchError):
        af.load_checkpoint_and_dispatch(wrong, path, "auto")
    with pytest.raises(ValueError, match="device_map must be one of 'auto'"):
        af.load_checkpoint_and_dispatch(wrong, path, "automatic")
    assert not hasattr(wrong, "hf_device_map")
    reads: Any = iter([apply.read_tensors])

    def fail_late(*arguments: Any) -> None:
        for read in reads:
            return read(*arguments)
        raise OSError("the disk went away")

    monkeypatch.setattr(apply, "read_tensors", fail_late)
    monkeypatch.setattr(apply, "_BATCH_BYTES", 200)
    model = on_meta(Small())
    with pytest.raises(OSError, match="went away"):
        af.load_checkpoint_and_dispatch(model, path, {"": "cpu"})
    assert all(one.is_meta for one in model.parameters())


def test_a_folder_that_cannot_be_written_is_named_and_the_model_stays(tmp_path: Path) -> None:
    _, checkpoint = saved(tmp_path)
    (tmp_path / "file").write_text("")
    model = on_meta(Small())
    with pytest.raises(NotADirectoryError, match=r"offload_folder='.*file': it is a file"):
        af.load_checkpoint_and_dispatch(model, checkpoint, {"": "disk"}, offload_folder=tmp_path / "file")
    # Refused although nothing would be written there.
    with pytest.raises(NotADirectoryError, match=r"offload_folder='.*below': .*file is a file"):
        af.load_checkpoint_and_dispatch(model, checkpoint, "auto", offload_folder=tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="offload_folder: a path can't contain zero bytes"):
        af.load_checkpoint_and_dispatch(model, checkpoint, {"": "cpu"}, offload_folder="\0")
    assert all(one.is_meta for one in model.parameters())
    assert not hasattr(model, "hf_device_map")
