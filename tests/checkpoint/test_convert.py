"""Runs that move from Accelerate to accelfn and back, bit for bit."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn.checkpoint import (
    Conversion,
    convert_checkpoint,
    load_state,
    load_tree,
    read_accelerate,
    save_state,
    save_tree,
    verify_checkpoint,
    write_accelerate,
)
from accelfn.checkpoint.random_state import random_states, restore_random_states
from accelfn.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedCheckpointError,
    NoCheckpointError,
)
from accelfn.testing import run_ranks
from tests.checkpoint.printed import text

np: Any = pytest.importorskip("numpy")

# Accelerate has global state, so it runs in separate processes.
PROGRAM = """
import random, sys
import numpy as np, torch
from torch import nn
from accelerate import Accelerator

class Counter:
    def __init__(self): self.state = {"n": 0, "seen": torch.zeros(3), "names": ["a", ("b", None)]}
    def state_dict(self): return self.state
    def load_state_dict(self, state): self.state = state

def build(seed):
    torch.manual_seed(seed); random.seed(seed); np.random.seed(seed)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    second = nn.Linear(2, 2)
    opt = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.ndim > 1]},
                             {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}])
    opt_1 = torch.optim.SGD(reversed(list(second.parameters())), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    objects = accelerator.prepare(model, second, opt, opt_1, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, (*objects, counter)

def train(accelerator, objects):
    model, second, opt, opt_1, schedule, counter = objects
    for _ in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(second(model(torch.randn(5, 3))).square().sum())
            for stepped in (opt, opt_1, schedule): stepped.step()
            opt.zero_grad(); opt_1.zero_grad()
        counter.state["n"] += 1; counter.state["seen"] = torch.randn(3)
    random.random(); np.random.rand(); random.gauss(0, 1); np.random.randn()

mode, folder, path = sys.argv[1:]
accelerator, objects = build(0 if mode == "save" else 1)
train(accelerator, objects)
if mode == "save":
    accelerator.save_state(folder)
    accelerator.save_state(folder + "-bin", safe_serialization=False)
else:
    accelerator.load_state(folder)
torch.save({"objects": [each.state_dict() for each in objects],
            "next": [random.random(), np.random.rand(), torch.rand(2)]}, path)
"""


def run_accelerate(mode: str, folder: Path, report: Path) -> dict[str, Any]:
    pytest.importorskip("accelerate")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, str(folder), str(report)],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")},
    )
    assert result.returncode == 0, result.stderr
    return torch.load(report, weights_only=False)


class Counter:
    """An object that a user registers for checkpointing."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def build() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    second = nn.Linear(2, 2)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
    other = torch.optim.SGD(reversed(list(second.parameters())), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {
        "model": model,
        "model_1": second,
        "optimizer": optimizer,
        "optimizer_1": other,
        "scheduler": schedule,
        "custom_0": Counter(),
    }


PARTS = ("model", "model_1", "optimizer", "optimizer_1", "scheduler", "custom_0")


def train(objects: dict[str, Any]) -> None:
    model, second, optimizer, other, schedule, counter = objects.values()
    for _ in range(3):
        second(model(torch.randn(5, 3))).square().sum().backward()
        for stepped in (optimizer, other, schedule):
            stepped.step()
    counter.state = {"n": 5, "seen": torch.rand(3), "names": []}


def states_of(objects: Any) -> list[str]:
    """Return the states of objects as texts, with an optimizer's options in a fixed order."""
    return [text(each.state_dict() if hasattr(each, "state_dict") else each) for each in objects]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("accelerate") / "state"
    return folder, run_accelerate("save", folder, folder.with_suffix(".pt"))


@pytest.mark.parametrize("suffix", ["", "-bin"])
def test_a_run_of_accelerate_continues_in_accelfn(
    saved: tuple[Path, dict[str, Any]], suffix: str, tmp_path: Path
) -> None:
    folder, expected = saved
    result = convert_checkpoint(f"{folder}{suffix}", tmp_path / "here", to="accelfn", step=7)
    assert result == Conversion(path=tmp_path / "here", parts=(*PARTS, "step"))
    report = verify_checkpoint(result.path)
    assert (report.step, report.world_size, report.files) == (7, 1, ("tensors-00000.safetensors",))
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        objects = build()
        loaded = load_state(af.Context(), result.path, {**objects, "step": 0})
        drawn = [random.random(), np.random.rand(), torch.rand(2)]
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
    assert loaded["step"] == 3
    assert states_of(objects.values()) == states_of(expected["objects"])
    assert text(drawn) == text(expected["next"])


def test_a_run_of_accelfn_continues_in_accelerate(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, expected = saved
    objects = build()
    train(objects)
    checkpoint = save_state(af.Context(), tmp_path / "here", objects)
    drawn = [random.random(), np.random.rand(), torch.rand(2)]
    result = convert_checkpoint(checkpoint, tmp_path / "there", to="accelerate")
    assert result.parts == PARTS
    loaded = run_accelerate("load", result.path, tmp_path / "loaded.pt")
    assert states_of(loaded["objects"]) == states_of(objects.values())
    assert text(loaded["next"]) == text(drawn)
    assert states_of(loaded["objects"]) != states_of(expected["objects"])


def test_converting_back_restores_the_files(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = saved
    here = convert_checkpoint(folder, tmp_path / "here", to="accelfn")
    back = convert_checkpoint(here.path, tmp_path / "back", to="accelerate")
    assert text(read_accelerate(folder)) == text(read_accelerate(back.path))
    # Also through the objects of a run.
    objects = {**build(), "step": 0}
    states = random_states(af.Context())
    loaded = load_state(af.Context(), here.path, objects)
    again = save_state(af.Context(), tmp_path / "again", loaded)
    restore_random_states(af.Context(), states, is_own=True)
    last = convert_checkpoint(again, tmp_path / "last", to="accelerate")
    for name in os.listdir(folder):
        if not name.endswith(".safetensors"):
            first, final = (torch.load(path / name, weights_only=False) for path in (folder, last.path))
            assert text(_numpy_as_list(first)) == text(_numpy_as_list(final))


def _numpy_as_list(state: Any) -> Any:
    if "numpy_random_seed" in state:
        name, key, *rest = state["numpy_random_seed"]
        state["numpy_random_seed"] = (name, [int(number) for number in key], *rest)
    return state


def test_an_optimizer_that_does_not_match_is_refused_on_load(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = saved
    result = convert_checkpoint(folder, tmp_path / "here", to="accelfn", leave_out=["random"])
    assert result.notes == ("It has no random states: loading it leaves the generators unchanged.",)
    objects: dict[str, Any] = {**build(), "step": 0}
    objects["optimizer_1"] = torch.optim.SGD(objects["model_1"].parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointMismatchError, match=r"optimizer_1/state/#0/momentum_buffer"):
        load_state(af.Context(), result.path, objects)  # the shapes reveal another order of parameters
    objects["optimizer_1"] = torch.optim.SGD([objects["model_1"].weight], lr=0.1)
    with pytest.raises(CheckpointMismatchError, match=r"parameter #1"):
        load_state(af.Context(), result.path, objects)
    convert_checkpoint(folder, tmp_path / "part", to="accelfn", leave_out=["optimizer_1"])
    del objects["optimizer_1"]
    load_state(af.Context(), tmp_path / "part", objects, random_state=False)


def rank_states(size: int) -> list[dict[str, Any]]:
    """Return the random states of ranks with one device each."""
    return [
        {
            "python": {"version": 3, "numbers": torch.tensor([*range(rank, 624 + rank), 624]), "gauss": None},
            "torch": torch.Generator().manual_seed(rank).get_state(),
            "numpy": {"numbers": torch.tensor([*range(rank, 624 + rank), 3]), "gauss": 0.5},
            "cuda": [torch.full((16,), 10 * rank, dtype=torch.uint8)],
        }
        for rank in range(size)
    ]


def test_random_states_of_all_ranks_are_converted(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.ones(2)}, "random": rank_states(3), "step": 4}
    folder = write_accelerate(tmp_path / "there", tree)
    result = convert_checkpoint(folder, tmp_path / "here", to="accelfn")
    assert verify_checkpoint(result.path).world_size == 3

    def restored(ctx: af.Context) -> list[Any]:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(2))
        load_state(ctx, result.path, {"model": model, "step": 0})
        states = random_states(ctx)
        return [states["python"]["numbers"][0].item(), states["torch"], states["numpy"]["gauss"]]

    states = run_ranks(restored, 3, on="processes")
    for rank, (first, torch_state, gauss) in enumerate(states):
        assert first == rank
        assert torch.equal(torch_state, rank_states(3)[rank]["torch"])
        assert gauss == 0.5
    back = convert_checkpoint(result.path, tmp_path / "back", to="accelerate")
    assert text(read_accelerate(back.path)) == text(tree)


def test_missing_random_states_are_refused(tmp_path: Path) -> None:
    first, _, last = rank_states(3)
    tree = {"model": {"w": torch.ones(2)}, "random": [first, None, last]}
    folder = write_accelerate(tmp_path / "there", tree)
    with pytest.raises(CheckpointError, match=r"rank 1 out of 3 ranks \(random_states_1\.pkl\)"):
        convert_checkpoint(folder, tmp_path / "here", to="accelfn")
    assert convert_checkpoint(folder, tmp_path / "here", to="accelfn", leave_out=["random"]).notes


def test_parts_are_renamed(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    critic: Any = torch.optim.SGD(second.parameters(), 0.1, momentum=0.9)
    second(torch.ones(1, 2)).sum().backward()
    critic.step()
    packed: Any = critic.state_dict()
    tree: dict[str, Any] = {
        "model": dict(first.state_dict()),
        "model_1": dict(second.state_dict()),
        "optimizer": {"state": packed["state"], "groups": packed["param_groups"]},
        "scaler": af.init_scaler(af.Context())._replace(scale=torch.tensor(8.0)),
        "random": rank_states(1),
        "step": 4,
    }
    options = af.GradScalerKwargs(growth_interval=50)
    folder = write_accelerate(tmp_path / "there", tree, scaler=options)
    names = {
        "model": "models/g",
        "model_1": "models/c",
        "optimizer": "opt",
        "scaler": "amp",
        "step": "at/step",
    }
    result = convert_checkpoint(folder, tmp_path / "here", to="accelfn", names=names)
    assert set(result.parts) == set(names.values())
    assert result.notes == ("The loss scaler had other options: pass GradScalerKwargs(growth_interval=50).",)
    models = {"g": nn.Linear(2, 3), "c": nn.Linear(2, 3)}
    fresh = torch.optim.SGD(models["c"].parameters(), 0.5, momentum=0.1)
    ctx = af.Context()
    mine: Any = {"models": models, "opt": fresh, "amp": af.init_scaler(ctx), "at": {"step": 0}}
    loaded = load_state(ctx, result.path, mine, random_state=False)
    assert loaded["at"] == {"step": 4}
    assert loaded["amp"].scale == 8.0
    assert text(fresh.state_dict()) == text(critic.state_dict())
    assert text(models["g"].state_dict()) == text(first.state_dict())

    back = convert_checkpoint(result.path, tmp_path / "back", to="accelerate", names=names, scaler=options)
    assert text(read_accelerate(back.path)) == text(read_accelerate(folder))


def test_a_tied_weight_is_loaded_by_either_name(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    folder = write_accelerate(tmp_path / "there", {"model": dict(model.state_dict())})
    assert list(load_file(folder / "model.safetensors")) == ["embed.weight"]
    result = convert_checkpoint(folder, tmp_path / "here", to="accelfn")
    other = Tied()
    load_state(af.Context(), result.path, {"model": other})
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight
    apart = Tied()
    apart.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(CheckpointMismatchError, match=r"model/head\.weight"):
        load_state(af.Context(), result.path, {"model": apart})
    weights = convert_checkpoint(result.path, tmp_path / "weights", to="safetensors")
    assert list(load_file(weights.path / "model.safetensors")) == ["embed.weight"]


def test_a_checkpoint_of_several_ranks_becomes_one_folder(tmp_path: Path) -> None:
    def save(ctx: af.Context) -> None:
        torch.manual_seed(ctx.rank)  # pyright: ignore[reportUnknownMemberType]
        own = torch.full((2,), float(ctx.rank))
        save_state(ctx, tmp_path / "here", {"model": {"w": torch.ones(3)}, "custom_0": {"own": own}})

    run_ranks(save, 2, on="memory")
    result = convert_checkpoint(tmp_path / "here", tmp_path / "there", to="accelerate")
    assert result.notes == ("custom_0 differs between ranks: rank 0's was used.",)
    state = read_accelerate(result.path)
    assert len(state["random"]) == 2
    assert text(state["custom_0"]) == text({"own": torch.zeros(2)})


def test_parts_that_share_memory_can_be_left_out(tmp_path: Path) -> None:
    weight = torch.rand(4)
    checkpoint = save_tree(
        tmp_path / "here", {"ema": {"w": weight}, "model": {"w": weight, "half": weight[:2]}}
    )
    result = convert_checkpoint(checkpoint, tmp_path / "there", to="accelerate", leave_out=["ema"])
    model = read_accelerate(result.path)["model"]
    assert text(model) == text({"w": weight, "half": weight[:2]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "accelerate"}, "no place for 'epoch'"),
        ({"to": "accelerate", "names": {"model": "net"}}, "there is no 'net' in the tree. It has 'model'"),
        ({"to": "accelfn"}, "is a checkpoint of accelfn already"),
        ({"to": "pickle"}, "to must be one of accelfn, accelerate, safetensors, got 'pickle'"),
        ({"to": "safetensors", "leaf": "net"}, "there is no 'net' in the tree, which has model, epoch"),
        (
            {"to": "safetensors", "leaf": "epoch"},
            "'epoch' is not the state of a model: it has no named tensors",
        ),
        ({"to": "safetensors", "leaf": "mixed"}, "'mixed' is not .* model: rate must be tensors"),
        ({"to": "safetensors", "max_shard_size": "ten"}, "max_shard_size must be"),
    ],
)
def test_parts_and_options_that_do_not_apply_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tree = {"model": {"w": torch.ones(2)}, "epoch": 3, "mixed": {"w": torch.ones(2), "rate": 1.0}}
    checkpoint = save_tree(tmp_path / "here", tree)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(checkpoint, tmp_path / "there", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "accelerate"}, "is a folder of Accelerate already"),
        ({"to": "accelfn", "names": {"modle": "net"}}, "there is no 'modle' in the folder. It has model"),
        ({"to": "accelfn", "leave_out": ["optimizer"]}, "there is no 'optimizer' in the folder"),
        ({"to": "accelfn", "names": {"model": "a//b"}}, "'a//b' can't be the path of a part"),
        ({"to": "accelfn", "names": {"model": "a", "model_1": "a/b"}}, "'a' can't be the path of a part"),
        ({"to": "safetensors"}, "there is no model 'model'. There are net, model_1"),
    ],
)
def test_unknown_names_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "model_1": {"v": torch.ones(3)}}
    folder = write_accelerate(tmp_path / "there", state)
    if options["to"] == "safetensors":
        options = {**options, "names": {"model": "net"}}
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(folder, tmp_path / "here", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_state_of_a_data_loader_is_refused(tmp_path: Path) -> None:
    ctx = af.Context()
    data: Any = torch.utils.data.TensorDataset(torch.arange(6.0))
    loader = af.prepare(ctx, torch.utils.data.DataLoader(data, batch_size=2))
    checkpoint = save_state(ctx, tmp_path / "here", {"loader": loader, "model": {"w": torch.ones(1)}})
    with pytest.raises(ValueError, match=r"'loader' is the state of accelfn's data loader.*leave_out"):
        convert_checkpoint(checkpoint, tmp_path / "there", to="accelerate")
    assert convert_checkpoint(
        checkpoint, tmp_path / "there", to="accelerate", leave_out=["loader"]
    ).parts == ("model",)


@pytest.mark.parametrize("form", ["accelfn", "accelerate"])
def test_weights_are_extracted_to_safetensors(form: str, tmp_path: Path) -> None:
    weights = {f"layers.{number}": torch.rand(100) for number in range(4)}
    weights["half"] = torch.rand(3).to(torch.bfloat16)
    if form == "accelfn":
        source = save_tree(tmp_path / "source", {"nets": {"a": weights}, "epoch": 1})
        leaf = "nets/a"
    else:
        source = write_accelerate(tmp_path / "source", {"model": weights})
        leaf = "model"
    single = convert_checkpoint(source, tmp_path / "one", to="safetensors", leaf=leaf)
    assert single.parts == ("model.safetensors",)
    assert text(load_file(single.path / "model.safetensors")) == text(weights)
    result = convert_checkpoint(source, tmp_path / "many", to="safetensors", leaf=leaf, max_shard_size=900)
    index = json.loads((result.path / "model.safetensors.index.json").read_text())
    assert sorted(result.parts) == sorted(path.name for path in result.path.iterdir())
    assert index["metadata"]["total_size"] == 1606
    read = {name: load_file(result.path / file)[name] for name, file in index["weight_map"].items()}
    assert text(read) == text(weights)


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    checkpoint = save_tree(tmp_path / "here", {"model": {"w": torch.zeros(2, dtype=torch.complex128)}})
    with pytest.raises(ValueError, match=r"no dtype for w \(torch\.complex128\)"):
        convert_checkpoint(checkpoint, tmp_path / "weights", to="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_existing_targets_are_not_overwritten(tmp_path: Path) -> None:
    folder = write_accelerate(tmp_path / "there", {"model": {"w": torch.ones(2)}})
    here = tmp_path / "here"
    save_tree(here, {"old": 1})
    with pytest.raises(FileExistsError, match="exists already"):
        convert_checkpoint(folder, here, to="accelfn")
    assert load_tree(here) == {"old": 1}
    convert_checkpoint(folder, here, to="accelfn", overwrite=True)
    assert text(load_tree(here)) == text({"model": {"w": torch.ones(2)}})
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        convert_checkpoint(folder, other, to="accelfn", overwrite=True)
    for form in ("accelerate", "safetensors"):
        with pytest.raises(FileExistsError, match="or remove it"):
            convert_checkpoint(here, other, to=form, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "other", "there"]


def test_sources_that_are_missing_or_damaged_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoCheckpointError, match="the directory is empty"):
        convert_checkpoint(tmp_path / "empty", tmp_path / "new", to="accelfn")
    with pytest.raises(NoCheckpointError, match="there is no such directory"):
        convert_checkpoint(tmp_path / "absent", tmp_path / "new", to="accelfn")
    checkpoint = save_tree(tmp_path / "here", {"model": {"w": torch.ones(2)}})
    file = checkpoint / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError):
        convert_checkpoint(checkpoint, tmp_path / "new", to="accelerate")
    assert not (tmp_path / "new").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_tree(tmp_path / "here", {"model": {"w": torch.ones(2)}})

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for form in ("accelerate", "safetensors"):
        with pytest.raises(OSError, match="No space"):
            convert_checkpoint(checkpoint, tmp_path / "there", to=cast("Any", form))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
