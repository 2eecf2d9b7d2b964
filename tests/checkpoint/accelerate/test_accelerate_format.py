import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from accelfn.checkpoint import (
    AccelerateState,
    from_accelerate,
    read_accelerate,
    to_accelerate,
    write_accelerate,
)
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from tests.checkpoint.campaign import kill_at_its_last_step

np: Any = pytest.importorskip("numpy")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

# Accelerate keeps its state for the whole process, so it runs in processes of its own.
PROGRAM = """
import random, sys
import numpy as np, torch
from torch import nn
from accelerate import Accelerator

class Counter:
    def __init__(self): self.held = {"n": 0, "seen": torch.zeros(3), "names": ["a", ("b", None)]}
    def state_dict(self): return self.held
    def load_state_dict(self, held): self.held = held

def build(seed):
    torch.manual_seed(seed); random.seed(seed); np.random.seed(seed)
    accelerator = Accelerator(cpu=True)
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    second = nn.Linear(2, 2)
    opt = torch.optim.AdamW([{"params": [p for p in first.parameters() if p.ndim > 1]},
                             {"params": [p for p in first.parameters() if p.ndim < 2], "weight_decay": 0.0}])
    opt_1 = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(opt)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt_1, 10)
    objects = accelerator.prepare(first, second, opt, opt_1, warm, cosine)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, (*objects, counter)

def train(accelerator, objects):
    first, second, opt, opt_1, warm, cosine, counter = objects
    for _ in range(3):
        accelerator.backward(second(first(torch.randn(5, 3))).square().sum())
        for one in (opt, opt_1, warm, cosine): one.step()
        opt.zero_grad(); opt_1.zero_grad()
        counter.held["n"] += 1; counter.held["seen"] = torch.randn(3)
    random.random(); np.random.rand(); random.gauss(0, 1); np.random.randn()

def report(objects, path):
    state = {"objects": [one.state_dict() for one in objects],
             "random": [random.getstate(), np.random.get_state(), torch.get_rng_state()]}
    torch.save(state, path)

mode, folder, path = sys.argv[1:]
accelerator, objects = build(0 if mode == "save" else 1)
train(accelerator, objects)
if mode == "save":
    report(objects, path)
    accelerator.save_state(folder)
    accelerator.save_state(folder + "-bin", safe_serialization=False)
else:
    accelerator.load_state(folder)
    report(objects, path)
"""


def run_accelerate(mode: str, folder: Path, report: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode, str(folder), str(report)],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")},
    )
    assert done.returncode == 0, done.stderr
    return torch.load(report, weights_only=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("accelerate") / "state"
    return folder, run_accelerate("save", folder, folder.with_suffix(".pt"))


def text(value: Any) -> str:
    """Print a value with every bit of its tensors, and dicts in one order."""
    kind = cast("Any", type(value))
    if issubclass(kind, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    if issubclass(kind, dict):
        return str(sorted((str(key), text(part)) for key, part in value.items()))
    if issubclass(kind, list | tuple):
        return f"{kind.__name__}{[text(part) for part in value]}"
    return f"{kind.__name__} {value!r}"


@pytest.mark.parametrize("suffix", ["", "-bin"])
def test_what_accelerate_saves_is_read(saved: tuple[Path, dict[str, Any]], suffix: str) -> None:
    folder, expected = saved
    state = read_accelerate(f"{folder}{suffix}")
    objects = [*state.models, *state.optimizers, *state.schedulers, *state.custom]
    assert [text(one) for one in objects] == [text(one) for one in expected["objects"]]
    python, numpy, native = expected["random"]
    (held,) = state.random
    assert held is not None
    assert held["random_state"] == python
    assert held["numpy_random_seed"][1].dtype == torch.uint32
    assert np.array_equal(held["numpy_random_seed"][1].numpy(), numpy[1])
    assert held["numpy_random_seed"][2:] == numpy[2:]
    assert torch.equal(held["torch_manual_seed"], native)
    assert state.scaler is None
    assert (state.samplers, state.loaders) == ((), ())


def names_of_groups() -> list[str]:
    return ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias"]


def test_what_is_written_is_loaded_by_accelerate(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, expected = saved
    like = {"optimizer": [f"model/{name}" for name in names_of_groups()], "model_1": ["weight", "bias"]}
    tree = from_accelerate(read_accelerate(folder), like=like)
    assert list(tree["optimizer"]["state"]) == like["optimizer"]
    assert tree["optimizer_1"]["groups"][0]["params"] == ["model_1/weight", "model_1/bias"]
    written = write_accelerate(tmp_path / "deep" / "state", to_accelerate(tree))
    assert sorted(path.name for path in written.parent.iterdir()) == ["state"]
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in folder.iterdir())
    loaded = run_accelerate("load", written, tmp_path / "report.pt")
    assert text(loaded["objects"]) == text(expected["objects"])
    assert str(loaded["random"]) == str(expected["random"])
    assert text(loaded["random"][2]) == text(expected["random"][2])
    assert text(read_accelerate(written)) == text(read_accelerate(folder))


def state_of_two() -> AccelerateState:
    """Build what two processes on devices with a scaler would write."""
    generator = np.random.RandomState(3)
    name, key, *rest = generator.get_state()
    one = {
        "step": 7,
        "random_state": random.Random(1).getstate(),
        "numpy_random_seed": (name, torch.tensor(key.tolist(), dtype=torch.uint32), *rest),
        "torch_manual_seed": torch.Generator().manual_seed(1).get_state(),
        "torch_cuda_manual_seed": [torch.arange(16, dtype=torch.uint8)],
    }
    return AccelerateState(
        models=({"w": torch.randn(2, 2), "b": torch.randn(2).bfloat16()}, {"v": torch.arange(3)}),
        optimizers=({"state": {0: {"momentum_buffer": None}}, "param_groups": [{"lr": 0.1, "params": [0]}]},),
        schedulers=({"last_epoch": 3, "nested": {"a": (1, 2.5)}},),
        samplers=({"seed": 1},),
        loaders=({"position": 4}, [1, 2]),
        scaler={
            "scale": 1024.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 9,
            "_growth_tracker": 4,
        },
        random=(one, {**one, "random_state": random.Random(2).getstate()}),
        custom=({"array": np.arange(3), "number": np.float64(0.5)}, {"empty": {}}),
    )


def test_everything_comes_back(tmp_path: Path) -> None:
    state = state_of_two()
    folder = write_accelerate(tmp_path / "state", state)
    assert text(read_accelerate(folder)) == text(state)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl", "dl_state_dict.bin", "dl_state_dict_1.bin"),
        *("model.safetensors", "model_1.safetensors", "optimizer.bin", "random_states_0.pkl"),
        *("random_states_1.pkl", "sampler.bin", "scaler.pt", "scheduler.bin"),
    ]


def test_random_states_of_accelerate_hold_arrays(tmp_path: Path) -> None:
    state = state_of_two().random[0]
    assert state is not None
    name, key, *rest = state["numpy_random_seed"]
    torch.save({**state, "numpy_random_seed": (name, key.numpy(), *rest)}, tmp_path / "random_states_3.pkl")
    assert text(read_accelerate(tmp_path).random) == text((None, None, None, state))


def test_the_scaler_is_what_torch_takes(tmp_path: Path) -> None:
    folder = write_accelerate(tmp_path / "state", state_of_two())
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(torch.load(folder / "scaler.pt"))
    assert scaler.state_dict() == state_of_two().scaler


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_sharded_weights_are_read_by_their_index(tmp_path: Path, suffix: str) -> None:
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    write: Any = save_file if suffix == ".safetensors" else torch.save
    files = {name: f"{stem}-0000{number}-of-00002{suffix}" for number, name in enumerate(("z", "a"), 1)}
    for name, file in files.items():
        write({name: torch.full((2,), ord(name))}, tmp_path / file)
    index = tmp_path / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (model,) = read_accelerate(tmp_path).models
    assert {name: tensor[1].item() for name, tensor in model.items()} == {"z": ord("z"), "a": ord("a")}

    index.write_text(json.dumps({"weight_map": {**files, "more": files["a"]}}))
    with pytest.raises(DamagedCheckpointError, match="different saves: more"):
        read_accelerate(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": f"../{files['a']}"}}))
    with pytest.raises(DamagedCheckpointError, match="no file of weights"):
        read_accelerate(tmp_path)
    index.write_text("{")
    with pytest.raises(DamagedCheckpointError, match="no index"):
        read_accelerate(tmp_path)
    index.write_text(json.dumps({"weight_map": files}))
    (tmp_path / files["z"]).unlink()
    with pytest.raises(DamagedCheckpointError, match="not there"):
        read_accelerate(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of saving in a single process
def test_folders_of_fsdp_are_read(tmp_path: Path) -> None:
    model = {"w": torch.randn(2, 3), "b": torch.randn(2)}
    optimizer: dict[str, Any] = {
        "state": {"w": {"exp_avg": torch.randn(2, 3)}, "b": {"exp_avg": torch.randn(2)}},
        "param_groups": [{"params": ["w", "b"], "lr": 0.1}],
    }
    full, parts = tmp_path / "full", tmp_path / "parts"
    full.mkdir()
    torch.save(model, full / "pytorch_model_fsdp.bin")
    torch.save(model, full / "pytorch_model_fsdp_1.bin")
    torch.save(optimizer, full / "optimizer.bin")
    torch.save(optimizer, full / "optimizer_1.bin")
    for number in range(2):
        dcp.save({"model": model}, checkpoint_id=parts / f"pytorch_model_fsdp_{number}")
        dcp.save({"optimizer": optimizer}, checkpoint_id=parts / f"optimizer_{number}")
    for folder in (full, parts):
        state = read_accelerate(folder)
        assert text(state) == text(AccelerateState(models=(model, model), optimizers=(optimizer, optimizer)))
        tree = from_accelerate(state)
        assert tree["optimizer_1"]["groups"] == [{"params": ["model_1/w", "model_1/b"], "lr": 0.1}]
        assert torch.equal(
            tree["optimizer"]["state"]["model/w"]["exp_avg"], optimizer["state"]["w"]["exp_avg"]
        )


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "name",
    [
        *("pytorch_model.bin", "pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin", "sampler.bin"),
        *("dl_state_dict.bin", "scaler.pt", "random_states_0.pkl", "custom_checkpoint_0.pkl"),
    ],
)
def test_no_file_runs_anything(name: str, tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    torch.save({"state": {"a": Bomb(crater)}}, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"^{name} holds more than data: it asks for posix\.mkdir"):
        read_accelerate(tmp_path)
    torch.save({"state": {}}, tmp_path / name, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=rf"{name} is of the format .* before torch 1\.6"):
        read_accelerate(tmp_path)
    assert not crater.exists()


def spoil(name: str) -> Callable[[Path], object]:
    def cut(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * 2 // 3])

    return cut


def move(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


def make(name: str, value: Any = None) -> Callable[[Path], object]:
    def touch(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        torch.save({} if value is None else value, folder / name)

    return touch


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        *((spoil(name), DamagedCheckpointError, name) for name in ("model_1.safetensors", "optimizer.bin")),
        *((spoil(name), DamagedCheckpointError, name) for name in ("random_states_1.pkl", "scaler.pt")),
        (move("model_1.safetensors", "model_2.safetensors"), CheckpointError, "no model 1"),
        (move("custom_checkpoint_0.pkl", "custom_checkpoint_2.pkl"), CheckpointError, "no custom object 0"),
        (make("pytorch_model.bin"), CheckpointError, "model.safetensors and pytorch_model.bin are both"),
        (make("model.safetensors.index.json"), CheckpointError, "are both model 0"),
        (make("pytorch_model_fsdp_rank0.bin"), CheckpointError, "FULL_STATE_DICT"),
        (make("optimizer_0_rank1.bin"), CheckpointError, "one process's part"),
        (make("pytorch_model/mp_rank_00_model_states.pt"), CheckpointError, "DeepSpeed"),
        (make("optimizer.bin"), DamagedCheckpointError, "optimizer.bin is no optimizer's state dict"),
        (make("scheduler.bin", []), DamagedCheckpointError, "no state dict, but list"),
    ],
)  # fmt: skip
def test_folders_that_are_not_whole_are_refused(
    change: Callable[[Path], object], error: type[CheckpointError], words: str, tmp_path: Path
) -> None:
    folder = write_accelerate(tmp_path / "state", state_of_two())
    change(folder)
    with pytest.raises(error, match=words):
        read_accelerate(folder)


def test_a_model_that_is_more_than_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "_extra_state": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="_extra_state in"):
        read_accelerate(tmp_path)
    torch.save({3: torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DamagedCheckpointError, match="no state dict of a model"):
        read_accelerate(tmp_path)


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    for path, words in (
        (tmp_path, "nothing that"),
        (tmp_path / "a", "not there"),
        (tmp_path / "notes.txt", "a file"),
    ):
        with pytest.raises(NoCheckpointError, match=words):
            read_accelerate(path)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    folder = write_accelerate(tmp_path / "state", state_of_two())
    for name in ("trainer_state.json", "model_01.safetensors", "model_0.safetensors", "random_states_x.pkl"):
        (folder / name).write_text("{}")
    assert text(read_accelerate(folder)) == text(
        state_of_two()._replace(models=read_accelerate(folder).models)
    )


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    folder = write_accelerate(tmp_path / "state", AccelerateState(models=({"a": weight, "b": weight},)))
    (model,) = read_accelerate(folder).models
    assert list(model) == ["a"]


def test_a_view_does_not_take_its_storage_along(tmp_path: Path) -> None:
    state = AccelerateState(custom=({"part": torch.zeros(10**6)[:3]},))
    folder = write_accelerate(tmp_path / "state", state)
    assert (folder / "custom_checkpoint_0.pkl").stat().st_size < 10**4


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (object(), TypeError, r"custom\[0\]\['a'\]\[1\] is builtins\.object"),
        (Path("a"), TypeError, r"\['a'\]\[1\] is pathlib"),
        (np.array([object()]), TypeError, r"\['a'\]\[1\] is numpy\.ndarray"),
        ({object(): 1}, TypeError, "a key of the type object"),
        (torch.ones(2, device="meta"), ValueError, "no data"),
        (torch.ones(2).to_sparse(), ValueError, "dense"),
    ],
    ids=["object", "path", "array of objects", "key", "meta", "sparse"],
)
def test_what_accelerate_could_not_read_is_not_written(
    value: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        write_accelerate(tmp_path / "state", AccelerateState(custom=({"a": [1, value]},)))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    folder = write_accelerate(tmp_path / "state", state_of_two())
    with pytest.raises(FileExistsError, match="is there already"):
        write_accelerate(folder, state_of_two())
    (tmp_path / "empty").mkdir()
    write_accelerate(tmp_path / "empty", state_of_two())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "state"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        write_accelerate(tmp_path / "state", state_of_two())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_write_left_goes_with_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        kill_at_its_last_step(lambda: write_accelerate(tmp_path / "state", state_of_two()))
        assert len(list(tmp_path.iterdir())) == 1
    write_accelerate(tmp_path / "state", state_of_two())
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
