from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelfn as af
from accelfn.bigmodel import ModelShape, read_shape, read_source
from accelfn.errors import DamagedCheckpointError, MissingExtraError, NoCheckpointError

FACTORY = """
from torch import nn

class Named:
    @staticmethod
    def build():
        return nn.Linear(2, 2)

def build():
    # 40 GB, if it took any memory.
    return nn.Sequential(nn.Linear(100_000, 100_000), nn.BatchNorm1d(5))

def other():
    return {"model": nn.Linear(2, 2)}

value = 5
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module `factory_here`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factory_here.py").write_text(FACTORY)
    (tmp_path / "needing.py").write_text("import absent_module\n")
    monkeypatch.delitem(sys.modules, "factory_here", raising=False)
    return tmp_path


def sizes(shape: ModelShape) -> dict[str, int]:
    return {leaf.name: leaf.num_bytes for leaf in shape.root.leaves()}


# --- functions -----------------------------------------------------------------------------------


def test_a_function_builds_on_the_meta_device(here: Path) -> None:
    before = list(sys.path)
    shape = read_source("factory_here:build")
    assert sizes(shape)["0.weight"] == 4 * 10**10
    assert [child.class_name for child in shape.root.children] == ["Linear", "BatchNorm1d"]
    assert [leaf.kind for leaf in shape.root.children[1].buffers] == ["buffer"] * 3
    assert sys.path == before
    assert sizes(read_source("factory_here:Named.build")) == {"weight": 16, "bias": 8}
    # The meta device is that of new tensors within the call alone.
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent_here:build", "No module named 'absent_here'"),
        ("factory_here:absent", "has no attribute 'absent'"),
        ("factory_here:other", "must return a module, but returned dict"),
        ("factory_here", "no such file or folder"),
        ("models/7B:latest", "no such file or folder"),
    ],
)
def test_invalid_sources_are_refused(source: str, message: str, here: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_source(source)


def test_exceptions_of_a_function_are_propagated(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "broken_here.py").write_text("def late():\n    return {}['absent']\n")
    monkeypatch.delitem(sys.modules, "broken_here", raising=False)
    with pytest.raises(KeyError, match="absent"):
        read_source("broken_here:late")
    with pytest.raises(ValueError, match="needing:build: No module named 'absent_module'"):
        read_source("needing:build")
    assert torch.empty(1).device.type == "cpu"


# --- files ---------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(11))
        self.head = nn.Linear(4, 10)
        self.head.weight = self.words.weight
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))


def test_names_sizes_and_ties_of_files(tmp_path: Path) -> None:
    model = Words()
    af.save_model(af.Context(), model, tmp_path / "one")
    af.save_model(af.Context(), model, tmp_path / "many", max_shard_size=200)
    (index,) = (tmp_path / "many").glob("*.index.json")
    real = read_shape(model)
    shapes = [read_source(tmp_path / "one"), read_source(str(tmp_path / "many")), read_source(index)]
    shapes.append(read_source(tmp_path / "one" / "model.safetensors"))
    for shape in shapes:
        assert sizes(shape) == sizes(real)
        assert shape.num_bytes == real.num_bytes
        assert [set(names) for names in shape.ties] == [{"words.weight", "head.weight"}]
        layers = next(child for child in shape.root.children if child.name == "layers")
        assert [child.name for child in layers.children] == [f"layers.{number}" for number in range(11)]
        assert {child.class_name for child in layers.children} == {"layers.*"}
        dtypes = {leaf.name: leaf.dtype for leaf in shape.root.leaves()}
        assert (dtypes["counts"], dtypes["words.weight"]) == (torch.int64, torch.float32)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(DamagedCheckpointError, match="lacks b, which the index lists"):
        read_source(index)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(DamagedCheckpointError):
        read_source(index)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "one.safetensors").read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError):
        read_source(tmp_path / "cut.safetensors")
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(NoCheckpointError, match="has no tensors"):
        read_source(tmp_path / "empty.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(NoCheckpointError):
        read_source(tmp_path / "folder")
    (tmp_path / "text.txt").write_text("no")
    with pytest.raises(ValueError, match="is not a weights file by its name"):
        read_source(tmp_path / "text.txt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="sizes in a pickled file can't be read"):
        read_source(tmp_path / "pytorch_model.bin")


# --- configurations ------------------------------------------------------------------------------


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelfn\[bigmodel\]'"):
        read_source(tmp_path)
