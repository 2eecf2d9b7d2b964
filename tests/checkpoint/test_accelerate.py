import importlib
import json
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import accelfn as af
from accelfn.checkpoint import read_accelerate, write_accelerate
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.training import ScalerState
from tests.checkpoint.campaign import kill_at_its_last_step
from tests.checkpoint.printed import text

np: Any = pytest.importorskip("numpy")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")


def random_state(seed: int, devices: int = 0) -> dict[str, Any]:
    version, numbers, gauss = random.Random(seed).getstate()
    _, key, place, _, _ = np.random.RandomState(seed).get_state()
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "numpy": {"numbers": torch.tensor([*key.tolist(), place]), "gauss": seed / 2 if seed else None},
    }
    if devices:
        state["cuda"] = [torch.full((16,), seed, dtype=torch.uint8) for _ in range(devices)]
    return state


def tree_of_two() -> dict[str, Any]:
    """Return the tree of two processes with a scaler."""
    return {
        "model": {"w": torch.randn(2, 2), "b": torch.randn(2).bfloat16()},
        "model_1": {"v": torch.arange(3)},
        "optimizer": {
            "state": {"#0": {"momentum_buffer": None}},
            "groups": [{"params": ["#0"], "lr": 0.1}, {"params": ["#1", "#2"], "betas": (0.9, 0.99)}],
        },
        "scheduler": {"last_epoch": 3, "nested": {"a": (1, 2.5)}, "milestones": Counter({3: 1})},
        "sampler": {"seed": 1},
        "loader": {"position": 4},
        "loader_1": [1, 2],
        "custom_0": {"array": np.arange(3), "number": np.float64(0.5), "ordered": OrderedDict(b=1, a=2)},
        "custom_1": {"empty": {}},
        "scaler": ScalerState(
            torch.tensor(1024.0), torch.tensor(4, dtype=torch.int32), torch.tensor(0.0), torch.tensor(0)
        ),
        "random": [random_state(0, 1), random_state(1, 1)],
        "step": 7,
    }


def test_all_parts_survive_a_round_trip(tmp_path: Path) -> None:
    tree = tree_of_two()
    folder = write_accelerate(tmp_path / "deep" / "state", tree)
    loaded = read_accelerate(folder)
    assert list(loaded) == list(tree)
    assert text(loaded) == text(tree)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl", "dl_state_dict.bin", "dl_state_dict_1.bin"),
        *("model.safetensors", "model_1.safetensors", "optimizer.bin", "random_states_0.pkl"),
        *("random_states_1.pkl", "sampler.bin", "scaler.pt", "scheduler.bin"),
    ]
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(torch.load(folder / "scaler.pt"))
    assert scaler.get_scale() == 1024.0
    (folder / "trainer_state.json").write_text("{}")
    (folder / "model_01.safetensors").write_text("{}")
    assert text(read_accelerate(folder)) == text(tree)


@given(st.data())
def test_any_subset_of_the_parts_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tree = tree_of_two()
    for name in data.draw(
        st.sets(st.sampled_from(["model", "optimizer", "scheduler", "loader", "custom_1"]))
    ):
        for part in [part for part in tree if part.startswith(name)]:
            del tree[part]
    if data.draw(st.booleans()):
        tree["random"] = [None, tree["random"][1]]
    folder = write_accelerate(tmp_path_factory.mktemp("folder") / "state", tree)
    assert text(read_accelerate(folder)) == text(tree)


def test_accelerates_random_states_are_converted(tmp_path: Path) -> None:
    name, key, *rest = np.random.RandomState(3).get_state()
    for rank in (0, 2):
        state = {
            "step": 5,
            "random_state": random.Random(3).getstate(),
            "numpy_random_seed": (name, key, *rest),
            "torch_manual_seed": torch.Generator().manual_seed(3).get_state(),
            "torch_cuda_manual_seed": [torch.full((2,), device) for device in range(3)],
        }
        torch.save(state, tmp_path / f"random_states_{rank}.pkl")
    loaded = read_accelerate(tmp_path)
    expected = {**random_state(3), "numpy": {**random_state(3)["numpy"], "gauss": None}}
    assert loaded["random"][1] is None
    for rank in (0, 2):
        assert text(loaded["random"][rank]) == text({**expected, "cuda": [torch.full((2,), rank)]})
    assert loaded["step"] == 5


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_weights_in_several_files_are_read_by_their_index(tmp_path: Path, suffix: str) -> None:
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    write: Any = save_file if suffix == ".safetensors" else torch.save
    files = {name: f"{stem}-0000{number}-of-00002{suffix}" for number, name in enumerate(("z", "a"), 1)}
    for name, file in files.items():
        write({f"_orig_mod.{name}": torch.full((2,), ord(name))}, tmp_path / file)
    index = tmp_path / f"{stem}{suffix}.index.json"
    weight_map = {f"_orig_mod.{name}": file for name, file in files.items()}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model = read_accelerate(tmp_path)["model"]
    assert {name: tensor[1].item() for name, tensor in model.items()} == {"z": ord("z"), "a": ord("a")}
    index.write_text(json.dumps({"weight_map": {**weight_map, "more": files["a"]}}))
    with pytest.raises(DamagedCheckpointError, match="lacks more"):
        read_accelerate(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # from torch, for saving in a single process
def test_folders_of_fsdp_are_read(tmp_path: Path) -> None:
    models = [{"w": torch.randn(2, 3), "b": torch.randn(2)} for _ in range(2)]
    optimizer: dict[str, Any] = {
        "state": {"w": {"exp_avg": torch.randn(2, 3)}, "b": {"exp_avg": torch.randn(2)}},
        "param_groups": [{"params": ["w", "b"], "lr": 0.1}],
    }
    full, parts = tmp_path / "full", tmp_path / "parts"
    full.mkdir()
    for number, suffix in enumerate(("", "_1")):
        torch.save(models[number], full / f"pytorch_model_fsdp{suffix}.bin")
        torch.save(optimizer, full / f"optimizer{suffix}.bin")
        dcp.save({"model": models[number]}, checkpoint_id=parts / f"pytorch_model_fsdp_{number}")
        dcp.save({"optimizer": optimizer}, checkpoint_id=parts / f"optimizer_{number}")
    for folder in (full, parts):
        tree = read_accelerate(folder)
        assert text([tree["model"], tree["model_1"]]) == text(models)
        for name in ("model", "model_1"):
            loaded = tree[name.replace("model", "optimizer")]
            assert loaded["groups"] == [{"params": [f"{name}/w", f"{name}/b"], "lr": 0.1}]
            assert torch.equal(loaded["state"][f"{name}/w"]["exp_avg"], optimizer["state"]["w"]["exp_avg"])


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
def test_no_file_runs_code(name: str, tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    torch.save({"state": {"a": Bomb(crater)}}, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"(?s){name} .*posix\.mkdir"):
        read_accelerate(tmp_path)
    torch.save({"state": {}}, tmp_path / name, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=name):
        read_accelerate(tmp_path)
    assert not crater.exists()


def truncate(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * 2 // 3])

    return change


def move(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


def make(name: str, value: Any = None) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        torch.save({} if value is None else value, folder / name)

    return change


FILES = ("model_1.safetensors", "optimizer.bin", "random_states_1.pkl", "scaler.pt")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        *((truncate(file), DamagedCheckpointError, file) for file in FILES),
        (move("model_1.safetensors", "model_2.safetensors"), CheckpointError, "model 1 is missing"),
        (move("custom_checkpoint_0.pkl", "custom_checkpoint_2.pkl"), CheckpointError, "custom 0 is missing"),
        (make("pytorch_model.bin"), CheckpointError, "model.safetensors and pytorch_model.bin are both"),
        (make("model.safetensors.index.json"), CheckpointError, "are both model 0"),
        (make("pytorch_model_fsdp_rank0.bin"), CheckpointError, "FULL_STATE_DICT"),
        (make("optimizer_0_rank1.bin"), CheckpointError, "one process's shard"),
        (make("pytorch_model/mp_rank_00_model_states.pt"), CheckpointError, "DeepSpeed"),
        (make("optimizer.bin"), DamagedCheckpointError, "is not the state dict of an optimizer"),
        (
            make("optimizer.bin", {"state": {5: {}}, "param_groups": [{"params": [0]}]}),
            CheckpointError,
            "a state for parameter 5",
        ),
        (make("scheduler.bin", []), DamagedCheckpointError, "must hold a state dict, but holds list"),
    ],
)  # fmt: skip
def test_incomplete_and_inconsistent_folders_are_refused(
    change: Callable[[Path], object], error: type[CheckpointError], words: str, tmp_path: Path
) -> None:
    folder = write_accelerate(tmp_path / "state", tree_of_two())
    change(folder)
    with pytest.raises(error, match=words):
        read_accelerate(folder)


@pytest.mark.parametrize("state", [{"w": torch.ones(1), "_extra_state": 3}, {3: torch.ones(1)}])
def test_a_model_with_other_values_than_tensors_is_refused(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(DamagedCheckpointError, match=r"pytorch_model\.bin"):
        read_accelerate(tmp_path)


def test_other_paths_are_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    for path, words in (
        (tmp_path, "contains no file that Accelerate writes"),
        (tmp_path / "a", "does not exist"),
        (tmp_path / "notes.txt", "a file"),
    ):
        with pytest.raises(NoCheckpointError, match=words):
            read_accelerate(path)


def test_tied_weights_are_written_once_and_views_compactly(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    tree = {"model": {"a": weight, "b": weight}, "custom_0": {"part": torch.zeros(10**6)[:3]}}
    folder = write_accelerate(tmp_path / "state", tree)
    assert list(read_accelerate(folder)["model"]) == ["a"]
    assert (folder / "custom_checkpoint_0.pkl").stat().st_size < 10**4


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (object(), TypeError, r"custom_0\['a'\]\[1\] is builtins\.object"),
        (Path("a"), TypeError, r"\['a'\]\[1\] is pathlib"),
        (np.array([object()]), TypeError, r"\['a'\]\[1\] is numpy\.ndarray"),
        ({object(): 1}, TypeError, r"\['a'\]\[1\]: a key is builtins\.object"),
        (torch.ones(2, device="meta"), ValueError, "no dense data"),
        (torch.ones(2).to_sparse(), ValueError, "dense"),
    ],
    ids=["object", "path", "array of objects", "key", "meta", "sparse"],
)
def test_values_that_accelerate_could_not_load_are_refused(
    value: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        write_accelerate(tmp_path / "state", {"custom_0": {"a": [1, value]}})
    assert list(tmp_path.iterdir()) == []


OPTIMIZER: dict[str, Any] = {"state": {"b": {}}, "groups": [{"params": ["a"]}]}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"model": {}, "ema": {}, "model_2": {}}, "no place for 'ema', 'model_2'"),
        ({"step": 3}, "Add random"),
        ({"optimizer": OPTIMIZER}, "a state for b, which is in none"),
        (
            {"optimizer": {**OPTIMIZER, "groups": [{"params": ["a", "a"]}]}},
            "the parameter a is in an optimizer",
        ),
        ({"scaler": tree_of_two()["scaler"]._replace(unscaled=(1,))}, "a step that hasn't"),
    ],
)
def test_unknown_and_inconsistent_parts_are_refused(tree: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        write_accelerate(tmp_path / "state", tree)
    assert list(tmp_path.iterdir()) == []


def test_options_of_the_scaler_are_written(tmp_path: Path) -> None:
    options = af.GradScalerKwargs(growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    folder = write_accelerate(tmp_path / "state", {"scaler": tree_of_two()["scaler"]}, scaler=options)
    state = torch.load(folder / "scaler.pt")
    assert (state["growth_factor"], state["backoff_factor"], state["growth_interval"]) == (3.0, 0.25, 7)
    loaded, initial = read_accelerate(folder)["scaler"], af.init_scaler(af.Context())
    assert [field.dtype for field in loaded[:4]] == [field.dtype for field in initial[:4]]
    torch.save({}, folder / "scaler.pt")  # a disabled scaler
    torch.save({}, folder / "sampler.bin")
    assert read_accelerate(folder) == {"sampler": {}}


def test_existing_folders_are_not_overwritten(tmp_path: Path) -> None:
    folder = write_accelerate(tmp_path / "state", tree_of_two())
    with pytest.raises(FileExistsError, match="exists already"):
        write_accelerate(folder, tree_of_two())
    (tmp_path / "empty").mkdir()
    write_accelerate(tmp_path / "empty", tree_of_two())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "state"]


def test_files_of_a_failed_or_killed_write_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space"):
            write_accelerate(tmp_path / "state", tree_of_two())
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        kill_at_its_last_step(lambda: write_accelerate(tmp_path / "state", tree_of_two()))
        assert len(list(tmp_path.iterdir())) == 1
    write_accelerate(tmp_path / "state", tree_of_two())
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
