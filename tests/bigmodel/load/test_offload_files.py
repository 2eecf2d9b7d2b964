"""Folders of offloaded weights: ours read by Accelerate, and its by us."""

# torch and Accelerate leave some of their functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.load import load_checkpoint_in_model
from accelfn.bigmodel.offload_folder import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accelfn.context import Context
from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from accelfn.testing import run_ranks
from accelfn.weights.dtypes import STORED_DTYPES
from accelfn.weights.stored import mapped_from
from tests.bigmodel.load.layouts import made, same

DTYPES = (*STORED_DTYPES.values(), torch.complex128)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple))
def test_tensors_are_written_and_mapped(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    folder = tmp_path_factory.mktemp("off")
    tensor = made(dtype, shape)
    index: dict[str, Any] = {}
    assert offload_weight(tensor, "a.b", folder, index) is index
    assert offload_weight(tensor, "a.c", folder) is None
    assert (folder / "a.b.dat").stat().st_size == tensor.numel() * dtype.itemsize
    found = load_offloaded_weight(folder / "a.b.dat", index["a.b"])
    assert same(found, tensor)
    offload_weight(nn.Parameter(tensor.mT, False) if tensor.dim() > 1 else tensor, "turned", folder, index)
    turned = load_offloaded_weight(folder / "turned.dat", index["turned"])
    assert same(turned, tensor.mT if tensor.dim() > 1 else tensor)
    assert (mapped_from(found) is not None) == (tensor.numel() > 0)


@pytest.mark.slow
def test_accelerate_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    theirs: Any = importlib.import_module("accelerate.utils")
    # Accelerate goes through numpy, which lacks some.
    lacks = ("float8", "float4", "uint64", "complex32")
    dtypes = [one for one in DTYPES if not any(name in str(one) for name in lacks)]
    tensors = {
        f"{dtype}.{len(shape)}".removeprefix("torch."): made(dtype, shape)
        for dtype in dtypes
        for shape in ((), (3,), (2, 3))
    }
    offload_state_dict(tmp_path / "ours", tensors)
    theirs.offload_state_dict(str(tmp_path / "theirs"), tensors)
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()
    read_by_them = theirs.OffloadedWeightsLoader(save_folder=str(tmp_path / "ours"))
    read_by_us = OffloadedWeightsLoader(save_folder=tmp_path / "theirs")
    for name, tensor in tensors.items():
        assert same(torch.as_tensor(read_by_them[name]), tensor)
        assert same(read_by_us[name], tensor)


def test_a_folder_grows_by_its_index(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    save_offload_index(None, tmp_path)
    for bare in (torch.ones(1, device="meta"), torch.ones(2, 2).to_sparse()):
        with pytest.raises(ValueError, match="can't be written as bytes"):
            offload_weight(bare, "w", tmp_path)
    assert not list(tmp_path.iterdir())
    offload_state_dict(tmp_path, {"a": torch.ones(2)})
    offload_state_dict(tmp_path, {"b": torch.ones(3), "a": torch.zeros(4)})
    found = OffloadedWeightsLoader(save_folder=tmp_path)
    assert {name: tuple(one.shape) for name, one in found.items()} == {"a": (4,), "b": (3,)}


def test_an_index_that_is_none_and_a_folder_without(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="isn't a folder of offloaded weights"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    for text in ("[]", "{", '{"a": 3}'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(DamagedCheckpointError, match=r"index\.json"):
            OffloadedWeightsLoader(save_folder=tmp_path)
        with pytest.raises(DamagedCheckpointError):
            save_offload_index({"b": {}}, tmp_path)
        assert (tmp_path / "index.json").read_text() == text


@pytest.mark.parametrize(
    "info",
    [
        {"dtype": "float32", "shape": [3]},
        {"dtype": "float99", "shape": [4]},
        {"shape": [4]},
        {"dtype": "float32", "shape": [-4]},
        {"dtype": "float32", "shape": "4"},
    ],
    ids=str,
)
def test_entries_must_match_the_file(info: dict[str, Any], tmp_path: Path) -> None:
    offload_weight(torch.ones(4), "w", tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"w\.dat"):
        load_offloaded_weight(tmp_path / "w.dat", info)


@pytest.mark.parametrize("name", ["../w", "a\\b", "", "a\0"])
def test_names_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be the name of a tensor"):
        offload_weight(torch.ones(1), name, tmp_path / "in")
    loader = OffloadedWeightsLoader(save_folder=tmp_path, index={name: {"dtype": "float32", "shape": [1]}})
    with pytest.raises(ValueError, match="can't be the name of a tensor"):
        loader[name]


# --- mappings ------------------------------------------------------------------------------------


def test_tensors_in_memory_take_precedence(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(1), "c": torch.ones(1)})
    loader = OffloadedWeightsLoader({"b": torch.zeros(1), "a": torch.zeros(1)}, tmp_path)
    assert list(loader) == ["b", "a", "c"]
    assert len(loader) == 3
    assert "c" in loader
    assert "d" not in loader
    assert float(loader["a"]) == 0
    with pytest.raises(KeyError):
        loader["d"]
    with pytest.raises(ValueError, match="pass a state_dict"):
        OffloadedWeightsLoader()
    with pytest.raises(ValueError, match="Pass save_folder"):
        OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [1]}})["a"]


def test_entries_of_safetensors_files(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"inner.w": torch.arange(4.0)}, file)
    index = {
        "w": {"safetensors_file": str(file), "weight_name": "inner.w", "dtype": "float16"},
        "inner.w": {"safetensors_file": str(file)},
        "gone": {"safetensors_file": str(file)},
    }
    for device in (None, "cpu", "cpu:1"):
        loader = OffloadedWeightsLoader(index=index, device=device)
        assert same(loader["w"], torch.arange(4.0).half())
        assert same(loader["inner.w"], torch.arange(4.0))
        with pytest.raises(DamagedCheckpointError, match="lacks gone"):
            loader["gone"]
    assert mapped_from(OffloadedWeightsLoader(index=index)["inner.w"]) is not None


def test_a_part_of_a_mapping() -> None:
    tensors = {"a.w": torch.ones(1), "a.b.w": torch.ones(2), "ab.w": torch.ones(3), "a": torch.ones(4)}
    part = PrefixedDataset(tensors, "a.")
    assert list(part) == ["w", "b.w"]
    assert len(part) == 2
    assert {name: one.numel() for name, one in part.items()} == {"w": 1, "b.w": 2}
    assert "ab.w" not in part
    assert list(extract_submodules_state_dict(tensors, ["a"])) == ["a.w", "a.b.w", "a"]
    assert list(extract_submodules_state_dict(tensors, ["a.b", "ab"])) == ["a.b.w", "ab.w"]
    assert extract_submodules_state_dict(tensors, [""]) == tensors
    assert extract_submodules_state_dict(tensors, []) == {}


def test_a_model_gets_its_weights_back(tmp_path: Path) -> None:
    saved = nn.Linear(3, 2)
    offload_state_dict(tmp_path, saved.state_dict())
    index = json.loads((tmp_path / "index.json").read_text())
    model = nn.Linear(3, 2, device="meta")
    load_offloaded_weights(model, None, tmp_path)
    load_offloaded_weights(model, index, tmp_path)
    assert same(model.weight, saved.weight)
    assert model.weight.requires_grad
    assert mapped_from(model.weight) is not None
    os.truncate(tmp_path / "bias.dat", 4)
    bare = nn.Linear(3, 2, device="meta")
    with pytest.raises(DamagedCheckpointError, match=r"bias\.dat has 4 bytes"):
        load_offloaded_weights(bare, index, tmp_path)
    assert bare.weight.is_meta


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists what is open and mapped")
def test_mapped_tensors_keep_no_file_open_and_their_mappings_end_with_them(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {f"w{number}": torch.full((2,), float(number)) for number in range(20)})

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(str(tmp_path))

    num_open, _ = count()
    tensors = [*OffloadedWeightsLoader(save_folder=tmp_path).values()]
    assert [tensor.tolist() for tensor in tensors] == [[float(number)] * 2 for number in range(20)]
    assert count() == (num_open, 20)
    part = tensors[3][1:]
    del tensors
    assert count() == (num_open, 1)
    assert part.add_(1).item() == 4.0  # the file keeps its own value
    assert OffloadedWeightsLoader(save_folder=tmp_path)["w3"].tolist() == [3.0, 3.0]


def test_scales_go_to_their_weight(tmp_path: Path) -> None:
    model: Any = nn.Module()
    model.weight = nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad=False)
    offload_state_dict(tmp_path, {"weight": torch.ones(2, 3, dtype=torch.int8), "SCB": torch.full((2,), 5.0)})
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert model.weight.dtype == torch.int8
    assert vars(model.weight)["SCB"].eq(5).all()


# --- disks ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are of POSIX")
def test_a_full_disk_leaves_existing_files(tmp_path: Path) -> None:
    """A limit on the size of files stands for the end of the disk."""
    resource: Any = importlib.import_module("resource")
    off = tmp_path / "off"
    offload_state_dict(off, {"w": torch.ones(4)})
    with pytest.raises(
        NotADirectoryError, match=r"to save_dir='.*w\.dat': it is a file. Pass another folder"
    ):
        offload_state_dict(off / "w.dat", {"w": torch.ones(1)})
    torch.save(nn.Linear(300, 300).state_dict(), tmp_path / "m.bin")

    def run(ctx: Context) -> None:
        if ctx.rank:
            return
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"save_dir='.*off'.*Free some space.*w\.dat"):
            offload_state_dict(off, {"new": torch.ones(1), "w": torch.zeros(1 << 15)})
        model = nn.Linear(300, 300, device="meta")
        with pytest.raises(OSError, match=r"offload_folder='.*new'.*Free some space.*accelfn-"):
            load_checkpoint_in_model(
                model, tmp_path / "m.bin", {"": "disk"}, tmp_path / "new", torch.bfloat16
            )
        assert model.weight.is_meta

    run_ranks(run, 2, on="processes")
    assert OffloadedWeightsLoader(save_folder=off)["w"].eq(1).all()
    assert sorted(path.name for path in off.iterdir()) == ["index.json", "w.dat"]
    assert not list((tmp_path / "new").iterdir())
