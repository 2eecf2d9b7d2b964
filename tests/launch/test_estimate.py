"""``accelfn estimate-memory`` as a user runs it."""

# pyright: reportUnknownMemberType=false

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelfn as af
from accelfn.bigmodel.drawing import draw_estimate, draw_estimate_html, draw_estimate_svg
from accelfn.bigmodel.estimate import estimate_memory
from accelfn.launch.main import main


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


Told = Callable[..., dict[str, Any]]


@pytest.fixture
def events(capsys: pytest.CaptureFixture[str]) -> Told:
    def run(*argv: object) -> dict[str, Any]:
        assert main(["estimate-memory", *map(str, argv), "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_file_a_folder_and_an_index_of_weights(tmp_path: Path, events: Told) -> None:
    model = net().half()
    (tmp_path / "one").mkdir()
    save_file(model.state_dict(), tmp_path / "one" / "model.safetensors")
    af.save_model(af.Context(), model, tmp_path / "many", max_shard_size=300)
    index = tmp_path / "many" / "model.safetensors.index.json"
    assert index.is_file()
    sizes = {
        "float32": 4 * 212,
        "float16": 2 * 212,
        "bfloat16": 2 * 212,
        "float8": 212,
        "int8": 212,
        "int4": 106,
    }
    for place in (tmp_path / "one", tmp_path / "one" / "model.safetensors", tmp_path / "many", index):
        found = events(place)
        assert found["model"] == str(place)
        assert found["num_parameters"] == 212
        assert {name: one["total"] for name, one in found["dtypes"].items()} == sizes
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

def nothing():
    return 3
"""


def test_a_function_that_builds_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made_here.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    try:
        assert events("made_here:build")["dtypes"]["float32"]["total"] == 4 * (50_000**2 + 5 * 50_000) + 8
        assert events("made_here:Made.build")["num_parameters"] == 50_000**2 + 3 * 50_000
        for source, message in (
            ("made_here:nothing", "must return a module, but returned int"),
            ("made_here:absent", "has no attribute 'absent'"),
            ("absent_module:build", "No module named 'absent_module'"),
        ):
            assert main(["estimate-memory", source]) == 2
            errors = capsys.readouterr().err
            assert errors.startswith(f"accelfn estimate-memory: error: {source}")
            assert message in errors
    finally:
        sys.modules.pop("made_here", None)


def test_a_configuration_of_transformers(tmp_path: Path, events: Told) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "base")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "whole")
    whole = events(tmp_path / "whole")
    assert whole["num_parameters"] == sum(one.numel() for one in model.parameters())
    assert whole["dtypes"]["float32"]["largest_names"] == ["model.layers.0", "model.layers.1"]
    base = events(tmp_path / "base", "--library_name", "transformers")
    assert base["num_parameters"] == whole["num_parameters"] - 50 * 16


CUSTOM = {
    "config.json": json.dumps(
        {
            "model_type": "invented",
            "width": 7,
            "auto_map": {"AutoConfig": "config_of.Config", "AutoModelForCausalLM": "model_of.Model"},
        }
    ),
    "config_of.py": """
from transformers import PretrainedConfig

class Config(PretrainedConfig):
    model_type = "invented"

    def __init__(self, width=3, **kwargs):
        self.width = width
        super().__init__(**kwargs)
""",
    "model_of.py": """
from torch import nn
from transformers import PreTrainedModel
from .config_of import Config

class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(config.width, config.width)
        self.post_init()
""",
}


def test_code_in_the_folder_is_run_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "invented").mkdir()
    for name, text in CUSTOM.items():
        (tmp_path / "invented" / name).write_text(text)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["estimate-memory", str(tmp_path / "invented")]) == 2
    assert "trust_remote_code" in capsys.readouterr().err
    before = set(sys.modules)
    try:
        assert events(tmp_path / "invented", "--trust-remote-code")["num_parameters"] == 56
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("transformers_modules"):
                del sys.modules[name]


def test_a_model_of_timm(
    events: Told, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def create_model(name: str, pretrained: bool) -> nn.Module:
        assert not pretrained
        if name != "vit_tiny":
            raise RuntimeError(f"Unknown model ({name})")
        return nn.Linear(10_000, 10_000)

    timm: Any = ModuleType("timm")
    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert events("vit_tiny", "--library_name", "timm")["num_parameters"] == 100_010_000
    assert main(["estimate-memory", "vit_huge", "--library-name", "timm"]) == 2
    assert "timm has no model 'vit_huge'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["estimate-memory", "vit_tiny", "--library-name", "timm"]) == 2
    assert "pip install timm" in capsys.readouterr().err


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file(net().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


def test_each_format_is_printed_or_written(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate = estimate_memory(net(), ["float32", "int4"])
    table = draw_estimate(estimate, "net.safetensors")
    # A file doesn't say which layer is which, but their sizes are the same.
    drawn = {
        "table": table,
        "svg": draw_estimate_svg(estimate, "net.safetensors"),
        "html": draw_estimate_html(estimate, "net.safetensors"),
    }
    for form, expected in drawn.items():
        argv = ["estimate-memory", str(weights), "--dtypes", "float32", "int4"]
        assert main([*argv, "--format", form]) == 0
        assert capsys.readouterr().out == expected.removesuffix("\n") + "\n"
        target = weights.parent / f"a-b.{form.replace('table', 'txt')}"
        assert main([*argv, "--output", str(target)]) == 0
        assert capsys.readouterr().out == ""
        assert target.read_text() == expected.removesuffix("\n") + "\n"
    assert main(["estimate-memory", str(weights), "--dtypes=float32,int4", "--format=table"]) == 0
    assert capsys.readouterr().out == table + "\n"
    other = weights.parent / "other.svg"
    assert main(["estimate-memory", str(weights), "--format", "json", "--output", str(other)]) == 0
    assert json.loads(other.read_text())["num_parameters"] == 212
    ElementTree.fromstring((weights.parent / "a-b.svg").read_text())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "MODEL must be given"),
        (
            ("google-bert/bert-base-cased",),
            "hf download google-bert/bert-base-cased config.json --local-dir bert-base-cased",
        ),
        (
            ("absent/folder/model.safetensors",),
            "no file or directory 'absent/folder/model.safetensors'",
        ),
        (
            ("nets.safetensors", "--output", "absent/a.svg"),
            "can't write 'absent/a.svg': the directory doesn't exist",
        ),
        (("net", "--format", "png"), "got 'png'"),
        (("net", "--library_name", "other"), "got 'other'"),
        (("net", "--nonsense"), "--nonsense"),
    ],
)
def test_bad_input_is_refused(
    argv: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["estimate-memory", *argv]) == 2
    errors = capsys.readouterr().err
    assert "accelfn estimate-memory: error: " in errors
    assert message in errors


def test_unreadable_models_are_refused(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({}, weights.parent / "model.pt")
    (weights.parent / "empty").mkdir()
    (weights.parent / "unknown").mkdir()
    (weights.parent / "unknown" / "config.json").write_text('{"model_type": "nonsense"}')
    (weights.parent / "cut.safetensors").write_bytes(weights.read_bytes()[:-5])
    for name, status, message in (
        ("model.pt", 2, "Pass safetensors"),
        ("empty", 2, "empty"),
        ("unknown", 2, "doesn't describe a model that transformers knows"),
        ("cut.safetensors", 1, "cut.safetensors"),
    ):
        assert main(["estimate-memory", str(weights.parent / name)]) == status, name
        errors = capsys.readouterr().err
        assert errors.startswith(f"accelfn estimate-memory: {'damaged' if status == 1 else 'error'}: ")
        assert message in errors
    assert main(["estimate-memory", str(weights), "--dtypes", "float8_e1"]) == 2
    assert "got 'float8_e1'" in capsys.readouterr().err
    (weights.parent / "a.svg").mkdir()
    assert main(["estimate-memory", str(weights), "--output", str(weights.parent / "a.svg")]) == 2
    assert "a.svg: can't be written" in capsys.readouterr().err
