"""The folders of Accelerate's ``save_state`` are read completely, as data, or refused by name."""

import importlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from safetensors.torch import save_file

import accelfn as af
from accelfn.checkpoint import read_accelerate
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from tests.checkpoint.accelerate_folder import random_file, random_state, write_folder
from tests.checkpoint.printed import text
from tests.checkpoint.small import Bomb

np = cast("Any", numpy)  # partly untyped
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

# A run of two processes with two models and a scaler.
MODELS: dict[str, dict[str, torch.Tensor]] = {
    "model": {"w": torch.ones(2, 2), "b": torch.ones(2).bfloat16()},
    "model_1": {"v": torch.arange(3)},
}
SCHEDULER: dict[str, Any] = {"last_epoch": 3, "nested": {"a": (1, 2.5)}, "milestones": Counter({3: 1})}
CUSTOM: dict[str, Any] = {"array": np.arange(3), "number": np.float64(0.5), "ordered": OrderedDict(b=1, a=2)}
FILES: dict[str, Any] = {
    "model.safetensors": MODELS["model"],
    "model_1.safetensors": MODELS["model_1"],
    "optimizer.bin": {
        "state": {0: {"momentum_buffer": None}},
        "param_groups": [{"params": [0], "lr": 0.1}, {"params": [1, 2], "betas": (0.9, 0.99)}],
    },
    "scheduler.bin": SCHEDULER,
    "sampler.bin": {"seed": 1},
    "dl_state_dict.bin": {"position": 4},
    "dl_state_dict_1.bin": [1, 2],
    "custom_checkpoint_0.pkl": CUSTOM,
    "custom_checkpoint_1.pkl": {},
    "scaler.pt": {"scale": 1024.0, "_growth_tracker": 4},
    "random_states_0.pkl": random_file(0, step=7),
    "random_states_2.pkl": random_file(
        2, step=7, torch_cuda_manual_seed=[torch.full((2,), n) for n in range(3)]
    ),
}


def test_all_parts_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "state", FILES)
    (folder / "trainer_state.json").write_text("{}")  # of others
    (folder / "model_01.safetensors").write_text("{}")
    tree = read_accelerate(folder)
    scaler = tree.pop("scaler")
    assert (float(scaler.scale), int(scaler.growth_tracker)) == (1024.0, 4)
    assert [field.dtype for field in scaler[:4]] == [
        field.dtype for field in af.init_scaler(af.Context())[:4]
    ]
    assert text(tree) == text(
        {
            **MODELS,
            "optimizer": {
                "state": {"#0": {"momentum_buffer": None}},
                "groups": [{"params": ["#0"], "lr": 0.1}, {"params": ["#1", "#2"], "betas": (0.9, 0.99)}],
            },
            "scheduler": SCHEDULER,
            "sampler": {"seed": 1},
            "loader": {"position": 4},
            "loader_1": [1, 2],
            "custom_0": CUSTOM,
            "custom_1": {},
            "random": [random_state(0), None, {**random_state(2), "cuda": [torch.full((2,), 2)]}],
            "step": 7,
        }
    )


def test_a_disabled_scaler_has_no_state(tmp_path: Path) -> None:
    assert read_accelerate(write_folder(tmp_path, {"scaler.pt": {}, "sampler.bin": {}})) == {"sampler": {}}


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
    for number, suffix in enumerate(("", "_1")):
        names = (f"pytorch_model_fsdp{suffix}.bin", f"optimizer{suffix}.bin")
        write_folder(full, dict(zip(names, (models[number], optimizer), strict=True)))
        dcp.save({"model": models[number]}, checkpoint_id=parts / f"pytorch_model_fsdp_{number}")
        dcp.save({"optimizer": optimizer}, checkpoint_id=parts / f"optimizer_{number}")
    for folder in (full, parts):
        tree = read_accelerate(folder)
        assert text([tree["model"], tree["model_1"]]) == text(models)
        for name in ("model", "model_1"):
            loaded = tree[name.replace("model", "optimizer")]
            assert loaded["groups"] == [{"params": [f"{name}/w", f"{name}/b"], "lr": 0.1}]
            assert torch.equal(loaded["state"][f"{name}/w"]["exp_avg"], optimizer["state"]["w"]["exp_avg"])


def test_no_file_runs_code(tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    for name in ("pytorch_model.bin", "pytorch_model_fsdp.bin", "scaler.pt", *FILES):
        if not name.endswith(".safetensors") and "_1." not in name:
            folder = write_folder(tmp_path / f"of {name}", {name: {"state": {"a": Bomb(crater)}}})
            with pytest.raises(CheckpointError, match=rf"(?s){name} .*posix\.mkdir"):
                read_accelerate(folder)
            torch.save({"state": {}}, folder / name, _use_new_zipfile_serialization=False)
            with pytest.raises(CheckpointError, match=name):
                read_accelerate(folder)
    assert not crater.exists()


def truncate(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size * 2 // 3)


def move(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


def make(name: str, value: Any = None) -> Callable[[Path], object]:
    return lambda folder: write_folder(folder, {name: {} if value is None else value})


CUT = ("model_1.safetensors", "optimizer.bin", "random_states_2.pkl", "scaler.pt")
UNKNOWN: dict[str, Any] = {"state": {5: {}}, "param_groups": [{"params": [0]}]}
ODD = {"w": torch.ones(1), "_extra_state": 3}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        *((truncate(file), DamagedCheckpointError, file) for file in CUT),
        (move("model_1.safetensors", "model_2.safetensors"), CheckpointError, "model 1 is missing"),
        (move("custom_checkpoint_0.pkl", "custom_checkpoint_2.pkl"), CheckpointError, "custom 0 is missing"),
        (make("pytorch_model.bin"), CheckpointError, "model.safetensors and pytorch_model.bin are both"),
        (make("model.safetensors.index.json"), CheckpointError, "are both model 0"),
        (make("pytorch_model_fsdp_rank0.bin"), CheckpointError, "FULL_STATE_DICT"),
        (make("optimizer_0_rank1.bin"), CheckpointError, "one process's shard"),
        (make("pytorch_model/mp_rank_00_model_states.pt"), CheckpointError, r"zero_to_fp32\.py"),
        (make("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), CheckpointError, r"zero_to_fp32\.py"),
        (make("mp_rank_00/model_optim_rng.pt"), CheckpointError, "Megatron-LM"),
        (make("optimizer.bin"), DamagedCheckpointError, "is not the state dict of an optimizer"),
        (make("optimizer.bin", UNKNOWN), CheckpointError, "a state for parameter 5"),
        (make("scheduler.bin", []), DamagedCheckpointError, "must hold a state dict, but holds list"),
        (make("pytorch_model_2.bin", ODD), CheckpointError, r"_extra_state in pytorch_model_2\.bin must be"),
        (make("pytorch_model_2.bin", {3: torch.ones(1)}), DamagedCheckpointError, r"pytorch_model_2\.bin"),
    ],
)
def test_what_is_incomplete_inconsistent_or_foreign_is_refused(
    change: Callable[[Path], object], error: type[CheckpointError], words: str, tmp_path: Path
) -> None:
    change(write_folder(tmp_path, FILES))
    with pytest.raises(error, match=words):
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
