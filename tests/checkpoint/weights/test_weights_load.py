"""Weights are loaded into models, by accelfn and by other libraries."""

# transformers and torch.load leave their results partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import importlib
import json
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.checkpoint import LoadReport, find_weights
from accelfn.errors import CheckpointMismatchError, DamagedCheckpointError, Misfit, NoCheckpointError
from accelfn.launch.main import main
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import differing
from tests.checkpoint.small import Bomb
from tests.checkpoint.weights.models import Bag, of_transformers, snapshot, tied, zero

Names = Literal["transformers", "diffusers"]
INDEX = "model.safetensors.index.json"
NOTHING = LoadReport((), ())


# --- into a model --------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["transformers", "diffusers"])
@pytest.mark.parametrize("safe", [True, False])
@given(
    st.lists(st.sampled_from([(), (0,), (3,), (2, 5), (1, 1, 4)]), min_size=1, max_size=6), st.integers(1, 90)
)
def test_a_model_is_restored_bit_for_bit(
    safe: bool, names: Names, shapes: list[tuple[int, ...]], limit: int
) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    values = {
        f"t{number}": torch.randint(0, 2, shape).to(dtypes[number % 4]) for number, shape in enumerate(shapes)
    }
    model, other = Bag(**values), Bag(**{name: torch.zeros_like(value) for name, value in values.items()})
    places = {name: value.data_ptr() for name, value in other.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        af.save_model(Context(), model, folder, limit, safe, names)
        assert af.load_model(other, folder) == NOTHING
    assert not differing(snapshot(model), snapshot(other))
    assert {name: value.data_ptr() for name, value in other.state_dict().items()} == places


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", [16, 10**6])
def test_tied_weights_are_stored_once_and_stay_tied(safe: bool, limit: int, tmp_path: Path) -> None:
    model, other = tied(bias=True), tied(bias=True)
    files = af.save_model(Context(), model, tmp_path, limit, safe)
    assert af.load_model(other, tmp_path) == NOTHING
    assert not differing(snapshot(model), snapshot(other))
    assert other["a"].weight is other["b"].weight
    if safe and limit == 10**6:
        with safe_open(files[0], "pt") as opened:
            assert "b.weight" not in list(opened.keys())
            assert opened.metadata() == {"format": "pt", "b.weight": "a.weight"}
    if not safe and limit == 10**6:  # the second name costs little
        stored = torch.load(files[0], weights_only=True)
        assert stored["a.weight"].data_ptr() == stored["b.weight"].data_ptr()
    apart = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
    assert af.load_model(apart, tmp_path) == NOTHING  # the file has the tie
    assert not differing(snapshot(model), snapshot(apart))


@pytest.mark.parametrize("kept", ["a.weight", "b.weight"])
def test_either_name_of_tied_weights_is_enough(kept: str, tmp_path: Path) -> None:
    value = torch.randn(2, 2)
    save_file({kept: value}, tmp_path / "model.safetensors")
    model = tied()
    assert af.load_model(model, tmp_path) == NOTHING
    assert torch.equal(snapshot(model)["a.weight"], value)


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    stored = {"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(2, 2)}
    save_file(stored, tmp_path / "model.safetensors")
    model = tied()
    af.load_model(model, tmp_path)
    stored["b.weight"][1, 1] = 1
    save_file(stored, tmp_path / "model.safetensors")
    with torch.no_grad():
        model.get_parameter("a.weight").fill_(7)
    with pytest.raises(CheckpointMismatchError) as caught:
        af.load_model(model, tmp_path, strict=False)
    assert caught.value.rows == (Misfit("b.weight", "other values than a.weight", "tied to a.weight"),)
    assert model.get_parameter("a.weight").eq(7).all()


def test_views_of_one_storage_are_stored_separately(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    model = Bag(whole=base, head=base[:2], row=base.view(10, 100)[3], step=base[::250])
    (file,) = af.save_model(Context(), model, tmp_path / "safe")
    assert not differing(load_file(file), snapshot(model))
    (file,) = af.save_model(Context(), model, tmp_path / "pickled", safe_serialization=False)
    stored = torch.load(file, weights_only=True)
    assert not differing(stored, snapshot(model))
    assert stored["head"].untyped_storage().nbytes() == 8
    assert file.stat().st_size < 8000  # 4000 of "whole", and each storage once


def test_all_misfits_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    stored = {name: torch.ones(2) for name in ("same", "shape", "dtype")}
    af.save_model(Context(), Bag(**stored, extra=torch.ones(1)), tmp_path)
    wanted = {"same": torch.zeros(2), "shape": torch.zeros(3), "dtype": torch.zeros(2).bfloat16()}
    model = Bag(**wanted, missing=torch.zeros(()))
    misfits = (
        Misfit("shape", "float32 (2,)", "float32 (3,)"),
        Misfit("dtype", "float32 (2,)", "bfloat16 (2,)"),
    )
    names = (Misfit("missing", "nothing", "float32 ()"), Misfit("extra", "float32 (1,)", "nothing"))
    for strict, rows in ((True, (*misfits, *names)), (False, misfits)):
        with pytest.raises(CheckpointMismatchError, match="Nothing was changed") as caught:
            af.load_model(model, tmp_path, strict)
        assert caught.value.rows == rows
        assert f"load_checkpoint_in_model(model, path, strict={strict}) casts" in str(caught.value)
        assert all(value.eq(0).all() for value in model.buffers())
    model = Bag(same=torch.zeros(2), shape=torch.zeros(2), missing=torch.zeros(()))
    assert af.load_model(model, tmp_path, strict=False) == LoadReport(("missing",), ("dtype", "extra"))
    assert model.get_buffer("same").eq(1).all()
    assert model.get_buffer("missing").eq(0)


def test_what_has_no_memory_or_is_no_module_is_refused(tmp_path: Path) -> None:
    af.save_model(Context(), nn.Linear(1, 1), tmp_path)
    with pytest.raises(ValueError, match=r"weight, bias have no memory \(meta device\)"):
        af.load_model(nn.Linear(1, 1, device="meta"), tmp_path)
    with pytest.raises(TypeError, match="takes a module, got str"):
        af.load_model("model", tmp_path)  # pyright: ignore[reportArgumentType]


def test_wrapped_models_are_loaded_by_their_own_names(tmp_path: Path) -> None:
    def run(ctx: Context) -> bool:
        model = af.prepare(ctx, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
        af.save_model(ctx, model, tmp_path)
        before = snapshot(model)
        names = ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert [*af.get_state_dict(ctx, model)] == names
        assert [*af.get_state_dict(ctx, model, unwrap=False)] == [f"module.{name}" for name in names]
        zero(model)
        af.load_model(model, tmp_path)
        return not differing(before, snapshot(model))

    assert run_ranks(run, 2, "processes") == [True, True]


def test_wrappers_inside_a_model_do_not_change_names(tmp_path: Path) -> None:
    wrapper = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    model = nn.Sequential(
        compiled, wrapper.checkpoint_wrapper(nn.Linear(2, 2)), nn.DataParallel(nn.Linear(2, 2)), nn.Module()
    )
    model[3].module = nn.Linear(2, 2)  # the user's name, not a wrapper's
    own = [f"{prefix}.{name}" for prefix in ("0", "1", "2", "3.module") for name in ("weight", "bias")]
    state = af.get_state_dict(Context(), model)
    assert list(state) == own
    assert state["2.bias"].data_ptr() == model.get_parameter("2.module.bias").data_ptr()
    (file,) = af.save_model(Context(), model, tmp_path)
    assert sorted(load_file(file)) == sorted(own)
    before = snapshot(model)
    for load in (af.load_model, af.bigmodel.load_checkpoint_in_model):
        zero(model)
        load(model, file)
        assert not differing(before, snapshot(model))


def test_names_that_differ_only_by_wrappers_are_refused() -> None:
    model = nn.Module()
    model.module = nn.DataParallel(nn.Linear(1, 1, bias=False))
    model.module.register_parameter("weight", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"module\.weight and module\.module\.weight would both be called"):
        af.get_state_dict(Context(), model)


# --- through other libraries ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize(("limit", "safe"), [("10GB", True), ("2KB", True), ("10GB", False), ("2KB", False)])
def test_transformers_and_accelfn_load_what_the_other_saved_with_its_ties(
    kind: str, limit: str, safe: bool, tmp_path: Path
) -> None:
    model = of_transformers(kind)
    model.config.save_pretrained(tmp_path)
    for again in range(2):  # the shards of the second save have other names
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(again)
        files = af.save_model(Context(), model, tmp_path, limit, safe)
        assert (len(files) > 2) == (limit == "2KB")
        loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert not differing(snapshot(model), snapshot(loaded))
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        ours = of_transformers(kind)
        assert af.load_model(ours, tmp_path) == NOTHING
        assert not differing(snapshot(model), snapshot(ours))
    model.save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    ours = of_transformers(kind)
    assert af.load_model(ours, tmp_path / "theirs") == NOTHING
    assert not differing(snapshot(model), snapshot(ours))
    af.save_model(Context(), model, tmp_path / "theirs")  # replaces the files of transformers
    configs = {"config.json", "generation_config.json"}
    assert {path.name for path in (tmp_path / "theirs").iterdir()} - configs == {"model.safetensors"}


def test_stock_safetensors_loads_a_model(tmp_path: Path) -> None:
    model, other = tied(), tied()
    (file,) = af.save_model(Context(), model, tmp_path)
    stock: Any = safetensors.torch
    assert stock.load_model(other, file) == (set(), [])
    assert not differing(snapshot(model), snapshot(other))
    stock.save_model(model, tmp_path / "theirs.safetensors")
    other = tied()
    af.load_model(other, tmp_path / "theirs.safetensors")
    assert not differing(snapshot(model), snapshot(other))


# --- malformed files -----------------------------------------------------------------------------


def sharded(folder: Path) -> dict[str, Any]:
    af.save_model(Context(), nn.Linear(2, 2), folder, max_shard_size=8)
    return json.loads((folder / INDEX).read_text())


NAMES: list[Any] = [
    *("../model.safetensors", "/etc/passwd.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "."),
    *("C:model.safetensors", "model\0.safetensors", "", "pytorch_model.bin", INDEX, "missing.safetensors"),
    *("x" * 300 + ".safetensors", "folder.safetensors", None, 3, ["model.safetensors"]),
    *("out.safetensors", "circle.safetensors", "pipe.safetensors"),
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_an_index_must_name_files_in_its_directory(name: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    index = sharded(folder)
    outside = tmp_path / "model.safetensors"
    save_file({"bias": torch.ones(2)}, outside)
    (folder / "folder.safetensors").mkdir()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (folder / "out.safetensors").symlink_to(outside)
    (folder / "circle.safetensors").symlink_to(folder / "circle.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    index["weight_map"]["bias"] = name
    (folder / INDEX).write_text(json.dumps(index))
    model = nn.Linear(2, 2)
    before = snapshot(model)
    with pytest.raises(DamagedCheckpointError) as caught:
        af.load_model(model, folder)
    assert caught.value.file == INDEX
    assert INDEX in str(caught.value) or str(folder) in str(caught.value)
    assert not differing(before, snapshot(model))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "null", "{}", '{"weight_map": {}}', '{"weight_map": []}', "\xff", "[" * 10**5),
        '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}',
    ],
    ids=lambda text: text[:20],
)
def test_a_malformed_index_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedCheckpointError, match=r"index\.json"):
        find_weights(tmp_path)


def test_links_within_the_directory_and_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--name"
    snapshot_folder, blobs = repository / "snapshots" / "0123", repository / "blobs"
    sharded(snapshot_folder)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot_folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    assert len(find_weights(snapshot_folder).files) == 2
    af.load_model(nn.Linear(2, 2), snapshot_folder)
    (tmp_path / "link").symlink_to(snapshot_folder)
    assert find_weights(tmp_path / "link").is_safe
    inside = snapshot_folder / "other.safetensors"
    (snapshot_folder / "model.safetensors").symlink_to(inside.name)
    save_file({}, inside)
    assert find_weights(snapshot_folder).files == ("model.safetensors",)
    (snapshot_folder / "model.safetensors").unlink()
    (snapshot_folder / "model.safetensors").symlink_to("../../../secret")
    (tmp_path / "secret").write_bytes(inside.read_bytes())
    with pytest.raises(DamagedCheckpointError, match="leads out of the directory"):
        find_weights(snapshot_folder)
    (snapshot_folder / "model.safetensors").unlink()
    snapshot_folder.parent.rename(repository / "elsewhere")  # not the layout of the hub's cache
    with pytest.raises(DamagedCheckpointError, match="leads out of the directory"):
        find_weights(repository / "elsewhere" / "0123")


def test_find_weights_chooses_by_the_libraries_names(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="doesn't exist"):
        find_weights(tmp_path / "missing")
    with pytest.raises(NoCheckpointError, match="has no weights"):
        find_weights(tmp_path)
    model = nn.Linear(2, 2)
    (tmp_path / "apart").mkdir()
    af.save_model(Context(), model, tmp_path / "apart")
    (file,) = af.save_model(Context(), model, tmp_path, safe_serialization=False)
    assert find_weights(tmp_path).files == find_weights(file).files == ("pytorch_model.bin",)
    (tmp_path / "apart" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert find_weights(tmp_path).files == ("model.safetensors",)  # preferred to pickled files
    index = af.save_model(Context(), model, tmp_path / "many", max_shard_size=8)[-1]
    assert find_weights(index) == find_weights(tmp_path / "many")
    assert find_weights(index).weight_map is not None
    af.save_model(Context(), model, tmp_path, names="diffusers")
    with pytest.raises(
        ValueError, match=r"has model\.safetensors and diffusion_pytorch_model\.safetensors\. Pass"
    ):
        find_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a weights file by its name"):
        find_weights(tmp_path / "config.json")


@pytest.mark.filterwarnings("ignore::UserWarning")  # from torch, for saving in a single process
@pytest.mark.parametrize("load", [af.load_model, af.bigmodel.load_checkpoint_in_model])
def test_other_checkpoints_are_named_with_remedies_that_work(
    load: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved, model = nn.Linear(2, 2), nn.Linear(2, 2)
    af.save_state(Context(), "state", {"model": saved, "epoch": 3})
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    dcp.save(saved.state_dict(), checkpoint_id="shards")
    for folder in ("state", "shards"):
        zero(model)
        with pytest.raises(NoCheckpointError) as caught:
            load(model, folder)
        _, command, _ = str(caught.value).split("`")
        assert main(command.replace("DIRECTORY", f"{folder}-weights").split()[1:]) == 0
        load(model, f"{folder}-weights")
        assert torch.equal(model.weight, saved.weight)
        if folder == "state":
            (call,) = re.findall(r"load_state\(.*?True\)", str(caught.value))
            zero(model)
            eval(f"af.{call}", {"af": af, "ctx": Context(), "model": model})
            assert torch.equal(model.weight, saved.weight)


def test_only_what_the_index_says_is_taken_from_a_file(tmp_path: Path) -> None:
    sharded(tmp_path)
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"other": torch.ones(2)}, second)  # of another save
    with pytest.raises(DamagedCheckpointError, match="lacks bias, which the index lists for it"):
        af.load_model(nn.Linear(2, 2), tmp_path)
    save_file({"bias": torch.ones(2), "weight": torch.full((2, 2), 9.0), "other": torch.ones(1)}, second)
    model = nn.Linear(2, 2)
    assert af.load_model(model, tmp_path) == NOTHING
    assert model.bias.eq(1).all()
    assert model.weight.ne(9).all()


def test_a_flipped_bit_of_a_pickled_file_is_found(tmp_path: Path) -> None:
    file, weight = tmp_path / "pytorch_model.bin", torch.arange(64.0)
    torch.save({"w": weight}, file)
    data = bytearray(file.read_bytes())
    data[data.index(weight.numpy().tobytes()) + 5] ^= 64
    file.write_bytes(data)
    model = Bag(w=torch.ones(64))
    with pytest.raises(DamagedCheckpointError, match="a tensor doesn't match its checksum"):
        af.load_model(model, tmp_path)
    assert model.get_buffer("w").eq(1).all()


@pytest.mark.parametrize(
    "what", ["harm", "list", "number", "key", "sparse", "cut", "module", "legacy harm", "text", "empty"]
)
def test_a_pickled_file_must_hold_a_dict_of_tensors(what: str, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    contents: dict[str, Any] = {
        "harm": {"w": torch.zeros(2), "x": Bomb(sign)},
        "list": [torch.zeros(2)],
        "number": {"w": 3},
        "key": {1: torch.zeros(2)},
        "sparse": {"w": torch.zeros(2).to_sparse()},
        "cut": {"w": torch.zeros(2)},
        "module": nn.Linear(2, 2),
    }
    file = tmp_path / "pytorch_model.bin"
    if what in contents:
        torch.save(contents[what], file)
    else:
        file.write_bytes({"legacy harm": pickle.dumps(Bomb(sign)), "text": b"no zip", "empty": b""}[what])
    if what == "cut":
        file.write_bytes(file.read_bytes()[:-30])
    model = Bag(w=torch.ones(2))
    with pytest.raises(
        af.errors.CheckpointError, match=file.name if what != "number" else "w +int"
    ) as caught:
        af.load_model(model, tmp_path)
    is_damaged = what not in ("harm", "sparse", "module", "number")
    assert isinstance(caught.value, DamagedCheckpointError) == is_damaged
    assert "weights_only" not in str(caught.value)  # load_model has no such option
    assert not sign.exists()
    assert model.get_buffer("w").eq(1).all()
