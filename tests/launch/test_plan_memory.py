"""``accelfn plan-memory`` as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelfn as af
from accelfn.bigmodel import (
    DevicePlan,
    PlanOptions,
    draw_device_plan_html,
    draw_device_plan_svg,
    plan_named_map,
    read_shape,
)
from accelfn.launch.main import main

FACTORY = """
from torch import nn

class Block(nn.Sequential):
    pass

def build():
    blocks = [Block(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)) for _ in range(3)]
    model = nn.Sequential(*blocks)
    model._no_split_modules = ["Block"]
    return model
"""
BUDGETS = ("--max-memory", "0=600B", "cpu=0.5KB")


class Block(nn.Sequential):
    """As in the factory."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("plan_memory_model.py").write_text(FACTORY)
    monkeypatch.delitem(sys.modules, "plan_memory_model", raising=False)
    return "plan_memory_model:build"


def plan_of(name: str = "auto", budgets: dict[Any, Any] | None = None, **options: Any) -> DevicePlan:
    blocks = [Block(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)) for _ in range(3)]
    given: dict[str, Any] = {"no_split_module_classes": ["Block"], **options}
    made = PlanOptions(**given)
    return plan_named_map(read_shape(nn.Sequential(*blocks)), name, budgets or {0: 600, "cpu": 500}, made)


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ((), {}),
        (("--device_map", "sequential"), {"name": "sequential"}),
        (("--no-split",), {"no_split_module_classes": ()}),
        (("--no_split", "Absent", "Other"), {"no_split_module_classes": ("Absent", "Other")}),
        (("--dtype=float16",), {"dtype": "float16"}),
        (("--dtype", "int4", "--offload-buffers"), {"dtype": "int4", "offload_buffers": True}),
        (("--fallback_allocation",), {"fallback_allocation": True}),
    ],
)
def test_the_plan_of_the_flags_is_printed(
    flags: tuple[str, ...], plan: dict[str, Any], source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-memory", source, *BUDGETS, *flags]) == 0
    expected = plan_of(**plan)
    printed, errors = capsys.readouterr()
    # The options are those that were meant, not only their result.
    assert printed == f"{expected}\n"
    assert errors == ""


def test_maps_and_places_by_name(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = {0: 500, 1: 500, "cpu:0": 500, "disk": 10**6}
    given = ("0=500B", "cuda:1=500B", "cpu:0=500B", "disk=1MB")
    for name in ("auto", "balanced", "balanced_low_0", "sequential"):
        assert main(["plan-memory", source, "--device-map", name, "--max_memory", *given]) == 0
        assert capsys.readouterr().out == f"{plan_of(name, budgets)}\n"


def test_without_budgets_this_machine_is_planned_for(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", source]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("place")
    assert second.split()[0] in ("0", "mps", "cpu")


def test_programs_get_json(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", source, *BUDGETS, "--format", "json"]) == 0
    message = json.loads(capsys.readouterr().out)
    plan = plan_of()
    assert message["source"] == source
    assert message["device_map"] == plan.device_map
    for found, one in zip(message["places"], plan.places, strict=True):
        tensors = [{"name": leaf.name, "bytes": leaf.num_bytes, "kind": leaf.kind} for leaf in one.leaves]
        assert found == {
            "place": one.place,
            "budget": one.budget,
            "used": one.used,
            "reserved": one.reserved,
            "tensors": tensors,
        }
    assert (message["ties"], message["copies"]) == ([], [])
    assert message["warnings"] == list(plan.warnings)


def test_pictures_are_written_where_that_is_asked(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of()
    page = draw_device_plan_html(plan, f"Device plan of {source}")
    for form, expected in (("svg", draw_device_plan_svg(plan)), ("html", page), ("table", f"{plan}\n")):
        assert main(["plan-memory", source, *BUDGETS, "--format", form]) == 0
        assert capsys.readouterr().out == expected
        assert main(["plan-memory", source, *BUDGETS, "--format", form, "--output", f"a.{form}"]) == 0
        assert capsys.readouterr().out == ""
        assert Path(f"a.{form}").read_text() == expected


def test_a_file_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"layers.{number}.{key}" for number in range(3) for key in ("a", "b")]
    save_file({name: torch.zeros(10) for name in names}, tmp_path / "model.safetensors")
    flags = ("--max_memory", "0=200B", "--no_split", "layers.*", "--format", "json")
    assert main(["plan-memory", str(tmp_path), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["device_map"] == {
        "layers.0": 0,
        "layers.1": "disk",
        "layers.2": "disk",
    }
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1])
    assert main(["plan-memory", str(tmp_path), *flags]) == 1
    errors = capsys.readouterr().err
    assert "accelfn plan-memory: damaged: " in errors
    assert str(tmp_path / "model.safetensors") in errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "SOURCE"),
        (("absent:build",), "No module named 'absent'"),
        (("no/such",), "no file or directory 'no/such'"),
        (
            ("{source}", "--max_memory", "0"),
            "--max_memory takes PLACE=SIZE, such as 0=10GB or cpu=30GB: got '0'",
        ),
        (("{source}", "--max_memory", "=5GB"), "got '=5GB'"),
        (("{source}", "--max_memory", "0=5GB", "0=6GB"), "--max_memory specifies the place 0 twice"),
        (("{source}", "--max_memory", "0=5GB", "cuda:0=6GB"), "max_memory specifies the place 0 twice"),
        (("{source}", "--max_memory", "gpu=5GB"), "unknown place 'gpu'"),
        (("{source}", "--max_memory", "0=-5GB"), "max_memory[0]: a size must be"),
        (("{source}", "--max_memory", "0=10"), "got '10'"),
        (
            ("{source}", "--max_memory", "cpu=1KB", "disk=1B", "--dtype", "float8_x"),
            "dtype must be a torch dtype",
        ),
        (("{source}", "--max_memory", "cpu=100B", "disk=1B"), "the model doesn't fit: 0 needs 236 B"),
        (("{source}", "--device_map", "even"), "--device_map"),
        (("{source}", "--format", "png"), "--format"),
        (
            ("{source}", "--max_memory", "cpu=1GB", "--output", "/no/such/a"),
            "can't write '/no/such/a': the directory doesn't exist",
        ),
        (("{source}", "--nonsense"), "--nonsense"),
    ],
)
def test_bad_input_is_refused(
    argv: tuple[str, ...], message: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-memory", *(source if one == "{source}" else one for one in argv)]) == 2
    errors = capsys.readouterr().err
    assert "accelfn plan-memory: error: " in errors
    assert message in errors


RANKS_FACTORY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.up(x))

class Model(nn.Module):
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def batch():
    return torch.zeros(6, 5, 4)
"""
RANKS_FILE = """
num_processes: 12
use_fsdp: true
mixed_precision: bf16
gradient_accumulation_steps: 4
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
"""


TEXT = ("--batch_size", "2", "--sequence_length", "8")


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("plan_memory_ranks.py").write_text(RANKS_FACTORY)
    monkeypatch.delitem(sys.modules, "plan_memory_ranks", raising=False)
    return "plan_memory_ranks:Model"


def said(ctx: af.Context, model: nn.Module, **options: Any) -> str:
    """Return what the command prints: the plan, the memory and the traffic."""
    parts = (
        af.plan_model(ctx, model),
        af.plan_memory(ctx, model, **options),
        af.plan_traffic(ctx, model, **options),
    )
    return "\n\n".join(map(str, parts)) + "\n"


def model_of_ranks() -> nn.Module:
    names: dict[str, Any] = {}
    exec(RANKS_FACTORY, names)
    return names["Model"]()


def test_ranks_of_a_mesh_are_planned_for(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", ranks, "--mesh", "dp_shard=3,tp=2", "--mixed_precision", "bf16"]) == 0
    config = af.ParallelismConfig(dp_shard_size=3, tp_size=2)
    ctx = af.plan_context(6, parallelism_config=config, mixed_precision="bf16")
    model = model_of_ranks()
    assert capsys.readouterr().out == said(ctx, model)
    flags = ("--optimizer", "sgd", "--dtype", "float64", "--format", "json")
    assert main(["plan-memory", ranks, "--mesh", "dp_shard=3, tp=2", *flags]) == 0
    budget = af.plan_memory(ctx.replace(mixed_precision="no"), model.double(), optimizer="sgd")
    expected = {**budget._asdict(), "held": budget.held, "total": budget.total, "peak": budget.peak}
    found = json.loads(capsys.readouterr().out)
    traffic = found.pop("traffic")
    assert found == {"source": ranks, "mesh": {"dp_shard": 3, "tp": 2}, "bytes": expected}
    planned = af.plan_traffic(ctx.replace(mixed_precision="no"), model)
    assert traffic["exposed_s"] == planned.exposed_s
    assert [one["received"] for one in traffic["exchanges"]] == [one.received for one in planned.exchanges]


def test_what_a_batch_takes_is_planned_for(
    ranks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = af.ParallelismConfig(tp_size=2)
    ctx = af.plan_context(2, parallelism_config=config)
    model = model_of_ranks()
    budget = af.plan_memory(ctx, model, batch=torch.zeros(6, 5, 4))
    assert budget.activations
    asked = ("--mesh", "tp=2", "--batch", ranks.replace("Model", "batch"))
    assert main(["plan-memory", ranks, *asked]) == 0
    assert capsys.readouterr().out == said(ctx, model, batch=torch.zeros(6, 5, 4))
    assert main(["plan-memory", ranks, *asked, "--output", "budget.svg"]) == 0
    assert Path("budget.svg").read_text() == budget.svg()


def test_what_is_recomputed_accumulated_and_stepped_is_planned_for(
    ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    window = af.GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    stages = af.config.PipelineParallelConfig(num_microbatches=6)
    config = af.ParallelismConfig(pp_size=3, dp_shard_size=2, pp_handler=stages)
    ctx = af.plan_context(
        6, parallelism_config=config, fsdp_plugin=plugin, gradient_accumulation_plugin=window
    )
    batch = torch.zeros(6, 5, 4)
    flags = ["--mesh", "pp=3,dp_shard=2", "--num_microbatches", "6", "--activation_checkpointing"]
    flags += ["--gradient_accumulation_steps", "3", "--sync_each_batch"]
    flags += ["--batch", ranks.replace("Model", "batch"), "--cluster", "flops=1e3", "inside=1KB"]
    assert main(["plan-memory", ranks, *flags, "--optimizer", "torch.optim:Adafactor"]) == 0
    model = model_of_ranks()
    link = af.Link(bandwidth=1000, latency_s=5e-6)
    cluster = af.Cluster(flops=1e3, inside=link)
    budget = af.plan_memory(ctx, model, batch=batch, optimizer=torch.optim.Adafactor)
    traffic = af.plan_traffic(ctx, model, batch=batch, cluster=cluster)
    assert capsys.readouterr().out == f"{af.plan_model(ctx, model)}\n\n{budget}\n\n{traffic}\n"
    assert main(["plan-memory", ranks, "--mesh", "dp_shard=2", "--optimizer", "2.5"]) == 0
    assert "states of 2.5 bytes per parameter" in capsys.readouterr().out


def test_meshes_are_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(num_attention_heads=4, **sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM(config)

    def make_batch(ctx: af.Context, rows: int) -> Any:
        ids = torch.empty(rows, 8, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    found = af.search_meshes(
        4,
        model,
        memory=500_000,
        num_rows=8,
        make_batch=make_batch,
        cluster=af.Cluster(ranks_per_node=2),
        mixed_precision="bf16",
        axes=("dp_shard", "dp_replicate"),
    )
    assert found.layouts
    assert found.refused
    flags = ["--search", "--ranks", "4", "--memory", "500KB", "--batch_size", "8", "--sequence_length", "8"]
    flags += ["--cluster", "ranks_per_node=2", "--mixed_precision", "bf16", "--axes", "dp_shard,dp_replicate"]
    command = ["plan-memory", str(tmp_path), *flags]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert main([*command, "--why"]) == 0
    assert capsys.readouterr().out == f"{found}\n\n{found.why()}\n"
    assert main([*command, "--format", "svg"]) == 0
    assert capsys.readouterr().out == found.svg()
    assert main([*command, "--format", "json"]) == 0
    message = json.loads(capsys.readouterr().out)
    assert [one["mesh"] for one in message["layouts"]] == [one.name for one in found.layouts]
    assert [one["name"] for one in message["refused"]] == [one.name for one in found.refused]
    assert main([*command[:2], *flags[:9], "--axes", "cp,dp_shard"]) == 0
    assert "cp=2" in capsys.readouterr().out


def test_meshes_are_searched_with_any_batch(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    def make_batch(ctx: af.Context, rows: int) -> torch.Tensor:
        return torch.empty(rows, 5, 4, device="meta")

    flags = ["--search", "--ranks", "6", "--batch", ranks.replace("Model", "batch")]
    for memory, status in ((100_000, 0), (10, 1)):
        found = af.search_meshes(6, model_of_ranks(), memory=memory, num_rows=6, make_batch=make_batch)
        assert bool(found.layouts) == (status == 0)
        assert main(["plan-memory", ranks, *flags, "--memory", f"{memory}B"]) == status
        assert capsys.readouterr().out == f"{found}\n"


def test_a_batch_of_text_is_that_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, **sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    flags = ("--batch_size", "3", "--sequence_length", "8", "--format", "json")
    cases = {
        "dp_shard=2": (af.ParallelismConfig(dp_shard_size=2), 8),
        "cp=2": (af.ParallelismConfig(cp_size=2), 4),
    }
    for mesh, (sizes_of_mesh, length) in cases.items():
        ctx = af.plan_context(2, parallelism_config=sizes_of_mesh)
        ids = torch.zeros(3, length, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids if length == 8 else ids.clone()}
        budget = af.plan_memory(ctx, transformers.LlamaForCausalLM(config), batch=batch)
        assert main(["plan-memory", str(tmp_path), "--mesh", mesh, *flags]) == 0
        message = json.loads(capsys.readouterr().out)["bytes"]
        assert (message["activations"], message["moved"]) == (budget.activations, dict(budget.moved))


def test_ranks_of_a_configuration_file_are_planned_for(
    ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ranks.yaml").write_text(RANKS_FILE)
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    options: Any = {"fsdp_plugin": plugin, "mixed_precision": "bf16", "gradient_accumulation_steps": 4}
    model = model_of_ranks()
    cases: list[tuple[tuple[str, ...], int, Any]] = [
        ((), 12, {}),
        (("--mesh", "dp_shard=2"), 2, {"parallelism_config": af.ParallelismConfig(dp_shard_size=2)}),
    ]
    for flags, size, mesh in cases:
        assert main(["plan-memory", ranks, "--config_file", "ranks.yaml", *flags]) == 0
        ctx = af.plan_context(size, **options, **mesh)
        assert capsys.readouterr().out == said(ctx, model)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--mesh", "dp_shard"),
            "takes AXIS=SIZE with sizes from 1, such as dp_shard=8,tp=2: got 'dp_shard'",
        ),
        (("--mesh", "dp_shard=0"), "sizes from 1, such as dp_shard=8,tp=2: got 'dp_shard=0'"),
        (("--mesh", ""), "sizes from 1, such as dp_shard=8,tp=2: got ''."),
        (("--mesh", "dp_shad=2"), "no axis 'dp_shad'. Did you mean dp_shard?"),
        (("--mesh", "tp=2,tp=2"), "--mesh gives tp twice"),
        (("--mesh", "tp=3"), "aren't divisible by tp_size=3"),
        (("--mesh", "pp=8"), "stages"),
        (("--mesh", "tp=2", "--optimizer", "adamv"), "unknown optimizer 'adamv'. Did you mean 'adam'?"),
        (("--mesh", "tp=2", "--dtype", "int4"), "--dtype int4 is for inference only"),
        (("--mesh", "tp=2", "--format", "html"), "a plan for ranks can't be drawn as html"),
        (("--mesh", "tp=2", "--batch_size", "2"), "--batch_size and --sequence_length go together"),
        (
            ("--mesh", "tp=2", "--batch_size", "0"),
            "argument --batch_size: must be an integer of at least 1, got '0'",
        ),
        (
            (*TEXT, "--mesh", "tp=2", "--batch", "a:b"),
            "--batch names a function that makes one. Remove one",
        ),
        ((*TEXT, "--mesh", "tp=2"), "Model says nothing of input_ids. Use --batch MODULE:FUNCTION"),
        (TEXT, "--batch_size is for ranks. Add --mesh"),
        (("--mesh", "tp=2", "--batch", "absent_module:batch"), "No module named 'absent_module'"),
        (("--mesh", "tp=2", "--max_memory", "0=1GB"), "--max_memory is for the device map of one process"),
        (("--optimizer", "sgd"), "--optimizer is for ranks. Add --mesh"),
        (("--mesh", "tp=2", "--optimizer", "torch.optim:Adan"), "--optimizer torch.optim:Adan: "),
        (("--mesh", "tp=2", "--optimizer", "-1"), "bytes per parameter can't be negative, got -1"),
        (("--mesh", "tp=2", "--cluster", "nodes=3"), "--cluster nodes=3: no property 'nodes'"),
        (("--mesh", "tp=2", "--cluster", "nodes=3"), "between_latency_us and flops.\n"),
        (("--mesh", "tp=2", "--cluster", "between=x"), "--cluster between=x: between must be a number of"),
        ((*TEXT, "--search", "--ranks", "2", "--memory", "1XB"), "--memory must be a number of bytes"),
        (("--search", "--ranks", "2", "--memory", "1B"), "or --batch MODULE:FUNCTION instead"),
        (
            ("--search", "--ranks", "2", "--memory", "1B", "--batch_size", "2", "--batch", "a:b"),
            "--batch_size is for a batch of text, and --batch names a function that makes one. Remove one",
        ),
        (
            ("--search", "--ranks", "2", "--memory", "1B", "--batch", "a:b", "--axes", "cp"),
            "--axes cp shares sequences, and --batch doesn't say which dimension they have",
        ),
        (("--mesh", "tp=2", "--cluster", "flops=x"), "--cluster flops=x: could not convert"),
        (("--mesh", "tp=2", "--ranks", "8"), "--ranks is for a search of meshes. Add --search"),
        (("--search", "--memory", "1GB"), "--search needs --ranks: --search --ranks 8192"),
        (
            (*TEXT, "--search", "--ranks", "2", "--memory", "1GB", "--mesh", "tp=2"),
            "--search chooses what --mesh says. Remove one of the two",
        ),
        (("--config_file", "absent.yaml"), "absent.yaml"),
        (("--config_file", "empty.yaml"), "says neither num_processes nor a mesh"),
    ],
)
def test_ranks_that_can_not_be_planned_for(
    argv: tuple[str, ...], message: str, ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.yaml").write_text("mixed_precision: bf16\n")
    test_bad_input_is_refused(("{source}", *argv), message, ranks, capsys)


def test_files_of_weights_are_refused_for_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert main(["plan-memory", str(tmp_path), "--mesh", "dp_shard=2"]) == 2
    assert "doesn't describe the modules" in capsys.readouterr().err
