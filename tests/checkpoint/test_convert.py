"""Runs that move from Accelerate to accelfn, bit for bit; and weights that move on as safetensors."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn.checkpoint import Conversion, convert_checkpoint, verify_checkpoint
from accelfn.checkpoint.random_state import random_states
from accelfn.errors import CheckpointError, CheckpointMismatchError, DamagedCheckpointError, NoCheckpointError
from accelfn.storage.disk import REAL_DISK
from accelfn.testing import run_ranks
from tests.checkpoint.accelerate_folder import random_file, random_state, write_folder
from tests.checkpoint.printed import text
from tests.checkpoint.small import Stateful, flip
from tests.checkpoint.watched_disk import installed
from tests.checkpoint.weights.models import tied

np = cast("Any", numpy)  # partly untyped

# --- beside Accelerate -----------------------------------------------------------------------------

# It has global state, so it runs in a process of its own.
PROGRAM = """
import random, sys
import numpy as np, torch
from accelerate import Accelerator
from tests.checkpoint.test_convert import build

torch.manual_seed(0); random.seed(0); np.random.seed(0)
accelerator = Accelerator(cpu=True)
*parts, counter = build().values()
accelerator.register_for_checkpointing(counter)
model, second, opt, opt_1, schedule = prepared = accelerator.prepare(*parts)
for step in range(3):
    with accelerator.accumulate(model):
        accelerator.backward(second(model(torch.randn(5, 3))).square().sum())
        for stepped in (opt, opt_1, schedule): stepped.step()
        opt.zero_grad(); opt_1.zero_grad()
    counter.value = {"n": step, "seen": torch.randn(3), "names": ["a", ("b", None)]}
random.random(); np.random.rand(); random.gauss(0, 1); np.random.randn()
folder, path = sys.argv[1:]
accelerator.save_state(folder)
accelerator.save_state(folder + "-bin", safe_serialization=False)
torch.save({"objects": [each.state_dict() for each in (*prepared, counter)],
            "next": [random.random(), np.random.rand(), torch.rand(2)]}, path)
"""


def build() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    second = nn.Linear(2, 2)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
    other = torch.optim.SGD(reversed(list(second.parameters())), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    parts = ("model", "model_1", "optimizer", "optimizer_1", "scheduler", "custom_0")
    return dict(zip(parts, (model, second, optimizer, other, schedule, Stateful()), strict=True))


def states_of(objects: Any) -> list[str]:
    """Return the states of objects as texts, with an optimizer's options in a fixed order."""
    return [text(each.state_dict() if hasattr(each, "state_dict") else each) for each in objects]


@pytest.mark.slow
def test_a_run_of_accelerate_goes_on(tmp_path: Path) -> None:
    folder, report = tmp_path / "state", tmp_path / "report.pt"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(report)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")},
    )
    assert result.returncode == 0, result.stderr
    expected = torch.load(report, weights_only=False)
    for suffix in ("", "-bin"):
        made = convert_checkpoint(f"{folder}{suffix}", tmp_path / f"at{suffix}", to="accelfn", step=7)
        assert made == Conversion(path=tmp_path / f"at{suffix}", parts=(*build(), "step"))
        found = verify_checkpoint(made.path)
        assert (found.step, found.world_size, found.files) == (7, 1, ("tensors-00000.safetensors",))
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            objects = build()
            loaded = af.load_state(af.Context(), made.path, {**objects, "step": 0})
            drawn = [random.random(), np.random.rand(), torch.rand(2)]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
        assert loaded["step"] == 3
        assert states_of(objects.values()) == states_of(expected["objects"])
        assert text(drawn) == text(expected["next"])


# --- from folders ----------------------------------------------------------------------------------

WEIGHTS = {"model.safetensors": {"w": torch.ones(2)}}


def stepped(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with a state for each parameter."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    return optimizer


def test_an_optimizer_that_does_not_match_is_refused_on_load(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    files = {
        "model.safetensors": model.state_dict(),
        "optimizer.bin": stepped(model.parameters()).state_dict(),
    }
    folder = write_folder(tmp_path / "state", files)
    made = convert_checkpoint(folder, tmp_path / "here", to="accelfn")
    assert made.notes == ("It has no random states: loading it leaves the generators unchanged.",)
    turned = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointMismatchError, match=r"optimizer/state/#0/momentum_buffer"):
        af.load_state(af.Context(), made.path, {"model": model, "optimizer": turned})  # by its shape
    fewer = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(CheckpointMismatchError, match=r"parameter #1"):
        af.load_state(af.Context(), made.path, {"model": model, "optimizer": fewer})
    convert_checkpoint(folder, tmp_path / "part", to="accelfn", leave_out=["optimizer"])
    af.load_state(af.Context(), tmp_path / "part", {"model": model})


def test_random_states_of_all_ranks_are_converted(tmp_path: Path) -> None:
    states = {f"random_states_{rank}.pkl": random_file(rank, step=4) for rank in range(3)}
    folder = write_folder(tmp_path / "there", {**WEIGHTS, **states})
    made = convert_checkpoint(folder, tmp_path / "here", to="accelfn")
    assert verify_checkpoint(made.path).world_size == 3

    def restored(ctx: af.Context) -> Any:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(2))
        assert af.load_state(ctx, made.path, {"model": model, "step": 0})["step"] == 4
        return text(random_states(ctx))

    assert run_ranks(restored, 3, on="processes") == [text(random_state(rank)) for rank in range(3)]


def test_missing_random_states_are_refused(tmp_path: Path) -> None:
    states = {f"random_states_{rank}.pkl": random_file(rank) for rank in (0, 2)}
    folder = write_folder(tmp_path / "there", {**WEIGHTS, **states})
    with pytest.raises(CheckpointError, match=r"rank 1 out of 3 ranks \(random_states_1\.pkl\)"):
        convert_checkpoint(folder, tmp_path / "here", to="accelfn")
    assert convert_checkpoint(folder, tmp_path / "here", to="accelfn", leave_out=["random"]).notes


def test_parts_are_renamed(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    critic = stepped(second.parameters())
    files = {
        "model.safetensors": first.state_dict(),
        "model_1.safetensors": second.state_dict(),
        "optimizer.bin": critic.state_dict(),
        "scaler.pt": {"scale": 8.0, "_growth_tracker": 0, "growth_interval": 50},
        "random_states_0.pkl": random_file(0, step=4),
    }
    names = {"model": "models/g", "model_1": "models/c", "optimizer": "opt", "scaler": "amp"}
    names["step"] = "at/step"
    folder = write_folder(tmp_path / "there", files)
    made = convert_checkpoint(folder, tmp_path / "here", to="accelfn", names=names)
    assert set(made.parts) == set(names.values())
    assert made.notes == ("The loss scaler had other options: pass GradScalerKwargs(growth_interval=50).",)
    models = {"g": nn.Linear(2, 3), "c": nn.Linear(2, 3)}
    fresh = torch.optim.SGD(models["c"].parameters(), 0.5, momentum=0.1)
    ctx = af.Context()
    mine: Any = {"models": models, "opt": fresh, "amp": af.init_scaler(ctx), "at": {"step": 0}}
    loaded = af.load_state(ctx, made.path, mine, random_state=False)
    assert loaded["at"] == {"step": 4}
    assert loaded["amp"].scale == 8.0
    assert text(fresh.state_dict()) == text(critic.state_dict())
    assert text(models["g"].state_dict()) == text(first.state_dict())


def test_a_tied_weight_is_loaded_by_either_name(tmp_path: Path) -> None:
    """Accelerate stores it once."""
    weight = torch.randn(2, 2)
    folder = write_folder(tmp_path / "there", {"model.safetensors": {"a.weight": weight}})
    made = convert_checkpoint(folder, tmp_path / "here", to="accelfn")
    model, apart = tied(), nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    af.load_state(af.Context(), made.path, {"model": model})
    assert model["b"].weight is model["a"].weight
    assert torch.equal(model.get_parameter("a.weight"), weight)
    with pytest.raises(CheckpointMismatchError, match=r"model/b\.weight"):
        af.load_state(af.Context(), made.path, {"model": apart})


# --- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["accelfn", "accelerate"])
def test_weights_are_extracted_to_safetensors(form: str, tmp_path: Path) -> None:
    weights = {f"layers.{number}": torch.rand(100) for number in range(4)}
    weights["half"] = torch.rand(3).to(torch.bfloat16)
    if form == "accelfn":
        tied = {**weights, "tied": weights["half"]}  # stored once, under its first name
        source, leaf = af.save_tree(tmp_path / "source", {"nets": {"a": tied}, "epoch": 1}), "nets/a"
    else:
        source, leaf = write_folder(tmp_path / "source", {"model.safetensors": weights}), "model"
    single = convert_checkpoint(source, tmp_path / "one", to="safetensors", leaf=leaf)
    assert single.parts == ("model.safetensors",)
    assert text(load_file(single.path / "model.safetensors")) == text(weights)
    result = convert_checkpoint(source, tmp_path / "many", to="safetensors", leaf=leaf, max_shard_size=900)
    index = json.loads((result.path / "model.safetensors.index.json").read_text())
    assert sorted(result.parts) == sorted(path.name for path in result.path.iterdir())
    assert index["metadata"]["total_size"] == 1606
    read = {name: load_file(result.path / file)[name] for name, file in index["weight_map"].items()}
    assert text(read) == text(weights)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("theirs", {"names": {"modle": "net"}}, "there is no 'modle' in the folder. It has model"),
        ("theirs", {"leave_out": ["optimizer"]}, "there is no 'optimizer' in the folder"),
        ("theirs", {"names": {"model": "a//b"}}, "'a//b' can't be the path of a part"),
        ("theirs", {"names": {"model": "a", "model_1": "a/b"}}, "'a' can't be the path of a part"),
        ("theirs", {"to": "safetensors", "names": {"model": "net"}}, "There are net, model_1"),
        ("ours", {}, "is a checkpoint of accelfn already"),
        ("ours", {"to": "pickle"}, "to must be one of accelfn, safetensors, dcp, got 'pickle'"),
        ("ours", {"to": "safetensors", "leaf": "net"}, "there is no 'net' in the tree, which has model"),
        ("ours", {"to": "safetensors", "leaf": "epoch"}, "'epoch' is not .* it has no named tensors"),
        ("ours", {"to": "safetensors", "leaf": "mixed"}, "'mixed' is not .* model: rate must be tensors"),
        ("ours", {"to": "safetensors", "leaf": "wide"}, r"no dtype for w \(torch\.complex128\)"),
        ("ours", {"to": "safetensors", "max_shard_size": "ten"}, "max_shard_size must be"),
    ],
)
def test_names_parts_and_options_that_do_not_apply_are_refused(
    source: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if source == "theirs":
        write_folder(tmp_path / source, {**WEIGHTS, "model_1.safetensors": {"v": torch.ones(3)}})
    else:
        models = {"model": {"w": torch.ones(2)}, "mixed": {"w": torch.ones(2), "rate": 1.0}}
        wide = {"w": torch.zeros(2, dtype=torch.complex128)}
        af.save_tree(tmp_path / source, {**models, "epoch": 3, "wide": wide})
    options.setdefault("to", "accelfn")
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / source, tmp_path / "new", **options)
    assert [path.name for path in tmp_path.iterdir()] == [source]


# --- sources and targets ---------------------------------------------------------------------------


def test_existing_targets_are_not_overwritten(tmp_path: Path) -> None:
    folder, here = write_folder(tmp_path / "there", WEIGHTS), tmp_path / "here"
    af.save_tree(here, {"old": 1})
    with pytest.raises(FileExistsError, match="exists already"):
        convert_checkpoint(folder, here, to="accelfn")
    assert af.load_tree(here) == {"old": 1}
    convert_checkpoint(folder, here, to="accelfn", overwrite=True)
    assert text(af.load_tree(here)) == text({"model": {"w": torch.ones(2)}})
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        convert_checkpoint(folder, other, to="accelfn", overwrite=True)
    with pytest.raises(FileExistsError, match="or remove it"):
        convert_checkpoint(here, other, to="safetensors", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "other", "there"]


def test_sources_that_are_missing_or_damaged_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, why in (("empty", "the directory is empty"), ("absent", "there is no such directory")):
        with pytest.raises(NoCheckpointError, match=why):
            convert_checkpoint(tmp_path / name, tmp_path / "new", to="accelfn")
    file = af.save_tree(tmp_path / "here", {"model": {"w": torch.ones(2)}}) / "tensors-00000.safetensors"
    flip(file)
    with pytest.raises(DamagedCheckpointError):
        convert_checkpoint(tmp_path / "here", tmp_path / "new", to="safetensors")
    assert not (tmp_path / "new").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = af.save_tree(tmp_path / "here", {"model": {"w": torch.ones(2)}})

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    with installed(replace(REAL_DISK, rename=full)), pytest.raises(OSError, match="No space"):
        convert_checkpoint(checkpoint, tmp_path / "there", to="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
