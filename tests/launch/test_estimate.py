"""``accelfn estimate-memory`` as a user runs it."""

# pyright: reportUnknownMemberType=false

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelfn as af
from accelfn.bigmodel.drawing import draw_estimate, draw_estimate_html, draw_estimate_svg
from accelfn.bigmodel.estimate import estimate_memory


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


Told = Callable[..., dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def events(command: Command) -> Told:
    def run(*argv: object) -> dict[str, Any]:
        status, stdout, _ = command("estimate-memory", *argv, "--format", "json")
        assert status == 0
        return json.loads(stdout)

    return run


def test_a_file_a_folder_and_an_index_of_weights(tmp_path: Path, events: Told) -> None:
    model = net().half()
    (tmp_path / "one").mkdir()
    save_file(model.state_dict(), tmp_path / "one" / "model.safetensors")
    af.save_model(af.Context(), model, tmp_path / "many", max_shard_size=300)
    index = tmp_path / "many" / "model.safetensors.index.json"
    assert index.is_file()
    factors = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1, "int4": 0.5}
    for place in (tmp_path / "one", tmp_path / "one" / "model.safetensors", tmp_path / "many", index):
        found = events(place)
        assert found["model"] == str(place)
        assert found["num_parameters"] == 212
        assert {name: one["total"] for name, one in found["dtypes"].items()} == {
            name: 212 * factor for name, factor in factors.items()
        }
        assert found["dtypes"]["float32"]["largest_names"] == ["0"]
        assert found["dtypes"]["float32"]["training"]["peak"] == 16 * 212


FACTORY = """
import torch
from torch import nn

def build():
    assert torch.empty(1).is_meta
    return nn.Sequential(nn.Linear(50_000, 50_000), nn.BatchNorm1d(50_000))

class Made:
    build = staticmethod(build)
"""


def test_a_function_that_builds_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Told
) -> None:
    (tmp_path / "made_here.py").write_text(FACTORY)
    monkeypatch.delitem(sys.modules, "made_here", raising=False)
    assert events("made_here:build")["dtypes"]["float32"]["total"] == 4 * (50_000**2 + 5 * 50_000) + 8
    assert events("made_here:Made.build")["num_parameters"] == 50_000**2 + 3 * 50_000


@pytest.mark.slow
def test_a_configuration_of_transformers(tmp_path: Path, events: Told, command: Command) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config)
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "nonsense"}')
    status, _, stderr = command("estimate-memory unknown")
    assert (status, "doesn't describe a model that transformers knows" in stderr) == (2, True)
    config.save_pretrained(tmp_path / "base")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "whole")
    whole = events(tmp_path / "whole")
    assert whole["num_parameters"] == sum(one.numel() for one in model.parameters())
    assert whole["dtypes"]["float32"]["largest_names"] == ["model.layers.0", "model.layers.1"]
    base = events(tmp_path / "base", "--library_name", "transformers")
    assert base["num_parameters"] == whole["num_parameters"] - 50 * 16


MODEL_OF_A_USER = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class Config(PretrainedConfig):
    model_type = "invented"

    def __init__(self, width=3, **kwargs):
        self.width = width
        super().__init__(**kwargs)

class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(config.width, config.width)
        self.post_init()
"""


@pytest.mark.slow
def test_code_in_the_folder_is_run_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Told, command: Command
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "invented").mkdir()
    (tmp_path / "invented" / "model_of.py").write_text(MODEL_OF_A_USER)
    code = {"AutoConfig": "model_of.Config", "AutoModelForCausalLM": "model_of.Model"}
    config = json.dumps({"model_type": "invented", "width": 7, "auto_map": code})
    (tmp_path / "invented" / "config.json").write_text(config)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    status, _, stderr = command("estimate-memory invented")
    assert (status, "trust_remote_code" in stderr) == (2, True)
    assert events(tmp_path / "invented", "--trust-remote-code")["num_parameters"] == 56


def test_a_model_of_timm(events: Told, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def create_model(name: str, pretrained: bool) -> nn.Module:
        assert not pretrained
        if name != "vit_tiny":
            raise RuntimeError(f"Unknown model ({name})")
        return nn.Linear(10_000, 10_000)

    timm: Any = ModuleType("timm")
    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert events("vit_tiny", "--library_name", "timm")["num_parameters"] == 100_010_000
    assert "timm has no model 'vit_huge'" in command("estimate-memory vit_huge --library-name timm")[2]
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "pip install timm" in command("estimate-memory vit_tiny --library-name timm")[2]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file(net().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_the_estimate_is_printed_in_each_format(weights: Path, command: Command) -> None:
    estimate = estimate_memory(net(), ["float32", "int4"])
    # A file doesn't say which layer is which, but their sizes are the same.
    for form, expected in (
        ("table", draw_estimate(estimate, "net.safetensors")),
        ("svg", draw_estimate_svg(estimate, "net.safetensors")),
        ("html", draw_estimate_html(estimate, "net.safetensors")),
    ):
        for dtypes in ("--dtypes float32 int4", "--dtypes=float32,int4"):
            status, stdout, _ = command(f"estimate-memory {weights} {dtypes} --format {form}")
            assert (status, stdout) == (0, expected.removesuffix("\n") + "\n")


@pytest.mark.usefixtures("weights")
def test_what_is_no_model_is_refused(command: Command) -> None:
    torch.save({}, "model.pt")
    Path("empty").mkdir()
    Path("cut.safetensors").write_bytes(Path("net.safetensors").read_bytes()[:-5])
    bert = "google-bert/bert-base-cased"
    for line, status, message in (
        ("", 2, "required: MODEL"),
        (bert, 2, f"hf download {bert} config.json --local-dir bert-base-cased"),
        ("absent/model.safetensors", 2, "no file or directory 'absent/model.safetensors'"),
        ("model.pt", 2, "Pass safetensors"),
        ("empty", 2, "empty"),
        ("cut.safetensors", 1, "cut.safetensors"),
        ("net.safetensors --dtypes float8_e1", 2, "got 'float8_e1'"),
        ("net --format png", 2, "invalid choice: 'png'"),
        ("net --library_name other", 2, "invalid choice: 'other'"),
        ("net --nonsense", 2, "--nonsense"),
    ):
        found, _, errors = command(f"estimate-memory {line}")
        assert found == status, line
        assert errors.startswith(f"accelfn estimate-memory: {'damaged' if status == 1 else 'error'}: "), line
        assert message in errors
