"""Folders of torch.distributed.checkpoint: read as state dicts, and merged into one file."""

import importlib
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import accelfn as af
from accelfn.checkpoint.sharded_folder import read_sharded_folder
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.launch.main import main
from accelfn.testing import run_ranks
from tests.checkpoint.campaign import kill_at_its_last_step
from tests.checkpoint.layouts import differing
from tests.checkpoint.small import Bomb

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # from torch, for saving in a single process

MODEL = {
    "0.weight": torch.randn(3, 4),
    "0.half": torch.randn(5).bfloat16(),
    "0.bias": torch.arange(3),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 2),
    "scalar": torch.tensor(2.0),
}
OPTIMIZER = {
    "state": {"0.weight": {"step": torch.tensor(2.0), "exp_avg": torch.randn(3, 4)}},
    "param_groups": [{"params": ["0.weight"], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None}],
}


def write(folder: Path, tree: dict[str, Any]) -> Path:
    dcp.save(tree, checkpoint_id=folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "pytorch_model_fsdp_0", {"model": MODEL})


# --- state dicts ---------------------------------------------------------------------------------


def test_state_dicts_are_read(source: Path, tmp_path: Path) -> None:
    model = read_sharded_folder(source, "model")
    assert list(model) == list(MODEL)
    assert not differing(model, MODEL)
    optimizer = read_sharded_folder(write(tmp_path / "optimizer_0", {"optimizer": OPTIMIZER}), "optimizer")
    assert str(optimizer) == str(OPTIMIZER)


def test_shards_of_two_ranks_are_assembled(tmp_path: Path) -> None:
    whole = torch.arange(15.0).reshape(5, 3)
    expected = {"rows": whole, "columns": whole, "replicated": torch.arange(4)}

    def save(ctx: af.Context) -> None:
        mesh = init_device_mesh("cpu", (2,))
        placed = zip(expected.items(), (Shard(0), Shard(1), Replicate()), strict=True)
        tensors = {name: distribute_tensor(value, mesh, [place]) for (name, value), place in placed}
        write(tmp_path / "sharded", {"model": tensors})

    run_ranks(save, 2, on="processes")
    assert len(list((tmp_path / "sharded").glob("*.distcp"))) == 2
    assert not differing(read_sharded_folder(tmp_path / "sharded", "model"), expected)
    assert not differing(
        load_file(af.checkpoint.merge_fsdp_weights(tmp_path / "sharded", tmp_path)), expected
    )


def test_code_is_named_and_not_run(source: Path, tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    entry = write(tmp_path / "optimizer_0", {"optimizer": {"a": Bomb(crater)}})
    with pytest.raises(
        CheckpointError, match=r"optimizer_0/__0_0\.distcp .* posix\.mkdir, which was not run"
    ):
        read_sharded_folder(entry, "optimizer")
    (source / ".metadata").write_bytes(pickle.dumps(Bomb(crater)))
    with pytest.raises(CheckpointError, match=r"_fsdp_0/\.metadata .* posix\.mkdir, which was not run"):
        read_sharded_folder(source, "model")
    assert not crater.exists()


@pytest.mark.parametrize(
    ("attributes", "num_chunks", "words"),
    [
        ({"length": 10**6}, 1, "truncated"),
        ({"relative_path": "../secret"}, 1, "secret"),
        ({"transform_descriptors": ["zstd"]}, 1, "transformed"),
        ({}, 0, "cover"),
        ({}, 2, "cover"),
    ],
)
def test_inconsistent_tables_are_refused(
    attributes: dict[str, Any], num_chunks: int, words: str, source: Path, tmp_path: Path
) -> None:
    shutil.copy(source / "__0_0.distcp", tmp_path / "secret")
    table = pickle.loads((source / ".metadata").read_bytes())
    for chunk in table.storage_data.values():
        chunk.__dict__.update(attributes)
    table.state_dict_metadata["model.0.bias"].chunks *= num_chunks
    (source / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match=words):
        read_sharded_folder(source, "model")


def test_incomplete_folders_are_damaged(source: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="must hold the key 'optimizer' alone"):
        read_sharded_folder(source, "optimizer")
    table = (source / ".metadata").read_bytes()
    (source / ".metadata").write_bytes(table[:-20])
    with pytest.raises(DamagedCheckpointError, match="can't be assembled"):
        read_sharded_folder(source, "model")
    (source / ".metadata").write_bytes(table)
    (source / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        read_sharded_folder(source, "model")
    (source / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is missing"):
        read_sharded_folder(source, "model")


# --- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [{"model": MODEL}, MODEL, {"one.name": MODEL["scalar"]}])
def test_the_file_has_the_saved_tensors(tmp_path: Path, tree: dict[str, Any]) -> None:
    source = write(tmp_path / "pytorch_model_fsdp_0", tree)
    file = af.checkpoint.merge_fsdp_weights(source, tmp_path / "new" / "out")
    assert file == tmp_path / "new" / "out" / "model.safetensors"
    assert not differing(load_file(file), tree.get("model", tree))
    assert [path.name for path in file.parent.iterdir()] == ["model.safetensors"]
    assert source.is_dir()


@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=6).filter(lambda name: name.strip(".") != ""),
        st.tuples(
            st.sampled_from([torch.float32, torch.float16, torch.int8, torch.int64, torch.bool]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_shapes_and_dtypes_are_merged(
    tmp_path_factory: pytest.TempPathFactory, forms: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in forms.items()}
    file = af.checkpoint.merge_fsdp_weights(write(folder / "sharded", {"model": tensors}), folder)
    assert not differing(load_file(file), tensors)
    shutil.rmtree(folder)


@pytest.mark.parametrize("is_below", [False, True])
@pytest.mark.parametrize("optimizer", ["optim", "optimizer", "optimizer_state_dict"])
@pytest.mark.parametrize("model", ["model", "state_dict"])
def test_the_model_beside_an_optimizer_is_merged(
    is_below: bool, optimizer: str, model: str, tmp_path: Path
) -> None:
    tree: dict[str, Any] = {model: MODEL, optimizer: OPTIMIZER, "step": torch.tensor(3)}
    folder = write(tmp_path / "sharded", {"app": tree} if is_below else tree)
    assert not differing(load_file(af.checkpoint.merge_fsdp_weights(folder, tmp_path)), MODEL)


def test_other_folders_are_refused_with_the_likely_one(tmp_path: Path) -> None:
    write(tmp_path / "run" / "pytorch_model_fsdp_0", {"model": MODEL})
    write(tmp_path / "run" / "optimizer_0", {"optimizer": {"state": {"w": {"m": torch.ones(1)}}}})
    write(tmp_path / "odd", {"model": {"w": torch.ones(2, dtype=torch.complex128)}})
    af.save_tree(tmp_path / "own", {"x": torch.ones(1)})
    errors: list[tuple[str, type[Exception], str]] = [
        ("run", NoCheckpointError, r"Pass .*pytorch_model_fsdp_0 instead"),
        ("run/optimizer_0", CheckpointError, "holds an optimizer's state and no model's"),
        ("absent", NoCheckpointError, "does not exist"),
        ("own", NoCheckpointError, "accelfn checkpoint convert"),
        ("odd", ValueError, r"no dtype for w \(torch.complex128\)"),
    ]
    for folder, error, words in errors:
        with pytest.raises(error, match=words):
            af.checkpoint.merge_fsdp_weights(tmp_path / folder, tmp_path)
    file = af.checkpoint.merge_fsdp_weights(tmp_path / "run" / "pytorch_model_fsdp_0", tmp_path)
    with pytest.raises(FileExistsError, match=r"model\.safetensors exists already"):
        af.checkpoint.merge_fsdp_weights(tmp_path / "run" / "pytorch_model_fsdp_0", tmp_path)
    assert not differing(load_file(file), MODEL)


def test_one_chunk_is_in_memory_at_a_time(tmp_path: Path) -> None:
    # Eight tensors of 1 MB. The bytes of a chunk are Python objects, which tracemalloc counts.
    source = write(tmp_path / "sharded", {"model": {str(n): torch.randn(1 << 18) for n in range(8)}})
    tracemalloc.start()
    try:
        af.checkpoint.merge_fsdp_weights(source, tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-weights", str(source), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "model.safetensors")
    assert main(["merge-weights", str(source), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    flags = ["--unsafe-serialization", "--remove_checkpoint_dir"]
    assert main(["merge-weights", *flags, str(source), str(tmp_path / "out")]) == 0
    assert not differing(torch.load(tmp_path / "out" / "pytorch_model.bin"), MODEL)
    assert not source.exists()
    assert main(["merge-weights", str(source), str(tmp_path)]) == 2
    assert "doesn't exist. Check the path." in capsys.readouterr().err
    (data,) = write(source, {"model": MODEL}).glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    assert main(["merge-weights", "--remove_checkpoint_dir", str(source), str(tmp_path / "new")]) == 1
    assert "can't be assembled" in capsys.readouterr().err
    assert [*(tmp_path / "new").iterdir()] == []
    assert source.is_dir()


@pytest.mark.parametrize("inside", ["", "merged/whole"])
def test_a_result_inside_of_the_folder_stays_where_the_folder_is_removed(source: Path, inside: str) -> None:
    merged = af.checkpoint.merge_fsdp_weights(source, source / inside, remove_checkpoint_dir=True)
    assert not differing(load_file(merged), MODEL)
    assert [path for path in source.rglob("*") if path.is_file()] == [merged]


def test_files_of_a_killed_merge_are_removed(source: Path, tmp_path: Path) -> None:
    for _ in range(2):
        kill_at_its_last_step(lambda: af.checkpoint.merge_fsdp_weights(source, tmp_path / "out"))
        assert len(list((tmp_path / "out").iterdir())) == 1
    af.checkpoint.merge_fsdp_weights(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
