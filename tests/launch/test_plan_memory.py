"""``accelfn plan-memory``: it prints what the functions say."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import accelfn as af
from accelfn.bigmodel import (
    DevicePlan,
    PlanOptions,
    plan_named_map,
    read_shape,
)
from accelfn.launch.main import main

FACTORIES = """
import torch
from torch import nn

class Block(nn.Sequential):
    pass

def build():
    model = nn.Sequential(*(Block(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)) for _ in range(3)))
    model._no_split_modules = ["Block"]
    return model

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.up(x))

class Model(nn.Module):
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
MODULE = "models_to_plan_for"
BUDGETS = ("--max-memory", "0=600B", "cpu=0.5KB")
Shown = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{MODULE}.py").write_text(FACTORIES)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def make(name: str) -> Any:
    names: dict[str, Any] = {"__name__": "here"}
    exec(FACTORIES, names)
    return names[name]()


def plan_of(name: str = "auto", budgets: dict[Any, Any] | None = None, **options: Any) -> DevicePlan:
    given: dict[str, Any] = {"no_split_module_classes": ["Block"], **options}
    shape = read_shape(make("build"))
    return plan_named_map(shape, name, budgets or {0: 600, "cpu": 500}, PlanOptions(**given))


def printed(capsys: Shown, line: str, source: str = "build", status: int = 0) -> str:
    assert main(["plan-memory", f"{MODULE}:{source}", *line.split()]) == status
    return capsys.readouterr().out


# --- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ("", {}),
        ("--device_map sequential --no-split", {"name": "sequential", "no_split_module_classes": ()}),
        ("--no_split Absent Other", {"no_split_module_classes": ("Absent", "Other")}),
        ("--dtype int4", {"dtype": "int4"}),
    ],
)
def test_the_plan_of_the_flags_is_printed(flags: str, plan: dict[str, Any], capsys: Shown) -> None:
    # The options are those that were meant, not only their result.
    assert printed(capsys, f"{' '.join(BUDGETS)} {flags}") == f"{plan_of(**plan)}\n"


def test_programs_get_json(capsys: Shown) -> None:
    plan = plan_of()
    message = json.loads(printed(capsys, f"{' '.join(BUDGETS)} --json"))
    places = [
        {name: getattr(one, name) for name in ("place", "budget", "used", "reserved")} for one in plan.places
    ]
    assert message == {
        "source": f"{MODULE}:build",
        "device_map": plan.device_map,
        "places": places,
        "warnings": list(plan.warnings),
    }


def test_a_file_of_weights(tmp_path: Path, capsys: Shown) -> None:
    names = [f"layers.{number}.{key}" for number in range(3) for key in ("a", "b")]
    save_file({name: torch.zeros(10) for name in names}, tmp_path / "model.safetensors")
    flags = ("--max_memory", "0=200B", "--no_split", "layers.*", "--json")
    assert main(["plan-memory", str(tmp_path), *flags]) == 0
    places = {"layers.0": 0, "layers.1": "disk", "layers.2": "disk"}
    assert json.loads(capsys.readouterr().out)["device_map"] == places
    assert main(["plan-memory", str(tmp_path), "--mesh", "dp_shard=2"]) == 2
    assert "doesn't describe the modules" in capsys.readouterr().err
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-1])
    assert main(["plan-memory", str(tmp_path), *flags]) == 1
    errors = capsys.readouterr().err
    assert "accelfn plan-memory: damaged: " in errors
    assert str(tmp_path / "model.safetensors") in errors


# --- ranks ---------------------------------------------------------------------------------------


def said(ctx: af.Context, **options: Any) -> str:
    """Return what the command prints: the plan, the memory and the traffic."""
    model = make("Model")
    parts = (
        af.plan_model(ctx, model),
        af.plan_memory(ctx, model, **options),
        af.parallel.plan_traffic(ctx, model, **options),
    )
    return "\n\n".join(map(str, parts)) + "\n"


def test_ranks_of_a_mesh_are_planned_for(capsys: Shown) -> None:
    config = af.ParallelismConfig(dp_shard_size=3, tp_size=2)
    ctx = af.plan_context(6, parallelism_config=config, mixed_precision="bf16")
    assert printed(capsys, "--mesh dp_shard=3,tp=2 --mixed_precision bf16", "Model") == said(ctx)
    flags = "--mesh dp_shard=3,tp=2 --optimizer sgd --dtype float64 --json"
    found = json.loads(printed(capsys, flags, "Model"))
    ctx, model = ctx.replace(mixed_precision="no"), make("Model").double()
    budget = af.plan_memory(ctx, model, optimizer="sgd")
    expected = {**budget._asdict(), "held": budget.held, "total": budget.total, "peak": budget.peak}
    traffic = found.pop("exchanges")
    assert found == {"source": f"{MODULE}:Model", "mesh": {"dp_shard": 3, "tp": 2}, "bytes": expected}
    planned = af.parallel.plan_traffic(ctx, model)
    assert traffic == [one._asdict() for one in planned.exchanges]


def test_what_is_recomputed_and_accumulated_is_planned_for(capsys: Shown) -> None:
    ctx = af.plan_context(
        2,
        parallelism_config=af.ParallelismConfig(dp_shard_size=2),
        fsdp_plugin=af.FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True),
        gradient_accumulation_steps=3,
    )
    flags = "--mesh dp_shard=2 --activation_checkpointing --gradient_accumulation_steps 3"
    assert printed(capsys, flags, "Model") == said(ctx)
    found = printed(capsys, "--mesh dp_shard=2 --optimizer 2.5", "Model")
    assert "states of 2.5 bytes per parameter" in found


def test_ranks_of_a_configuration_file_are_planned_for(capsys: Shown) -> None:
    Path("ranks.yaml").write_text(
        "{num_processes: 12, use_fsdp: true, mixed_precision: bf16, gradient_accumulation_steps: 4, "
        "fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}}\n"
    )
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    options: Any = {"fsdp_plugin": plugin, "mixed_precision": "bf16", "gradient_accumulation_steps": 4}
    mesh: Any = {"parallelism_config": af.ParallelismConfig(dp_shard_size=2)}
    for flags, ctx in (
        ("", af.plan_context(12, **options)),
        ("--mesh dp_shard=2", af.plan_context(2, **options, **mesh)),
    ):
        assert printed(capsys, f"--config_file ranks.yaml {flags}", "Model") == said(ctx)


def save_llama(folder: Path) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, **sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
def test_ranks_of_a_model_of_transformers(tmp_path: Path, capsys: Shown) -> None:
    model = save_llama(tmp_path)
    text = "--batch_size 8 --sequence_length 8"
    ctx = af.plan_context(2, parallelism_config=af.ParallelismConfig(tp_size=2))
    assert main(["plan-memory", str(tmp_path), "--mesh", "tp=2", *text.split()]) == 0
    ids = torch.empty(8, 8, dtype=torch.long)
    budget = af.plan_memory(ctx, model, batch={"input_ids": ids, "labels": ids})
    assert budget.activations
    assert str(budget) in capsys.readouterr().out


# --- bad input -----------------------------------------------------------------------------------

TEXT = "--batch_size 2 --sequence_length 8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max_memory 0", "--max_memory takes PLACE=SIZE, such as 0=10GB or cpu=30GB: got '0'"),
        ("--max_memory =5GB", "got '=5GB'"),
        ("--max_memory 0=5GB cuda:0=6GB", "max_memory specifies the place 0 twice"),
        ("--max_memory gpu=5GB", "unknown place 'gpu'"),
        ("--max_memory 0=-5GB", "max_memory[0]: a size must be"),
        ("--max_memory cpu=1KB disk=1B --dtype float8_x", "dtype must be a torch dtype"),
        ("--max_memory cpu=100B disk=1B", "the model doesn't fit: 0 needs 236 B"),
        ("--device_map even", "--device_map"),
        ("--mesh dp_shard", "each of pp, dp_replicate, dp_shard, cp, sp, tp, ep once with a size from 1"),
        ("--mesh dp_shard=0", "such as dp_shard=8,tp=2: got 'dp_shard=0'"),
        ("--mesh dp_shad=2", "got 'dp_shad=2'"),
        ("--mesh tp=2,tp=2", "got 'tp=2'"),
        ("--mesh tp=3", "isn't divisible by tp_size=3"),
        ("--mesh tp=2 --optimizer adamv", "unknown optimizer 'adamv'. Did you mean 'adam'?"),
        ("--mesh tp=2 --optimizer -1", "bytes per parameter can't be negative, got -1"),
        ("--mesh tp=2 --dtype int4", "--dtype int4 is for inference only"),
        ("--mesh tp=2 --batch_size 2", "--batch_size and --sequence_length go together"),
        (f"--mesh tp=2 {TEXT}", "Model says nothing of input_ids. Plan it in Python"),
        (TEXT, "--batch_size is for ranks: add --mesh"),
        ("--mesh tp=2 --max_memory 0=1GB", "--max_memory is for the device map of one process"),
        ("--config_file empty.yaml", "says neither num_processes nor a mesh"),
    ],
)
def test_bad_input_is_refused(line: str, message: str, capsys: Shown) -> None:
    Path("empty.yaml").write_text("mixed_precision: bf16\n")
    source = "build" if line.startswith(("--max_memory", "--device_map")) else "Model"
    assert main(["plan-memory", f"{MODULE}:{source}", *line.split()]) == 2
    errors = capsys.readouterr().err
    assert "accelfn plan-memory: error: " in errors
    assert message in errors
