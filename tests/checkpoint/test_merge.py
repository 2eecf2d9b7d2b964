"""The weights that FSDP's ranks wrote together, as one file."""

import importlib
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import accelfn as af
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.launch.main import main
from accelfn.testing import run_ranks
from tests.checkpoint.campaign import kill_at_its_last_step

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of saving in a single process

MODEL = {
    "0.weight": torch.randn(3, 4),
    "0.half": torch.randn(5).bfloat16(),
    "0.bias": torch.arange(3),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 2),
    "scalar": torch.tensor(2.0),
}


def write(folder: Path, tree: dict[str, Any]) -> Path:
    dcp.save(tree, checkpoint_id=folder)
    return folder


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("tree", [{"model": MODEL}, MODEL], ids=["under one key", "bare"])
def test_the_file_holds_what_was_saved(tmp_path: Path, tree: dict[str, Any]) -> None:
    source = write(tmp_path / "pytorch_model_fsdp_0", tree)
    made = af.merge_fsdp_weights(source, tmp_path / "new" / "out")
    assert made == tmp_path / "new" / "out" / "model.safetensors"
    assert same(load_file(made), MODEL)
    assert [path.name for path in made.parent.iterdir()] == ["model.safetensors"]
    assert source.is_dir()


def test_one_name_alone_keeps_its_dots(tmp_path: Path) -> None:
    tensor = torch.randn(2)
    made = af.merge_fsdp_weights(write(tmp_path / "one", {"layer.weight": tensor}), tmp_path)
    assert same(load_file(made), {"layer.weight": tensor})


def test_by_torch_save_and_without_the_folder(tmp_path: Path) -> None:
    source = write(tmp_path / "sharded", {"model": MODEL})
    made = af.merge_fsdp_weights(source, tmp_path, safe_serialization=False, remove_checkpoint_dir=True)
    assert made.name == "pytorch_model.bin"
    assert same(torch.load(made), MODEL)
    assert not source.exists()


def save_by_two(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).reshape(5, 3)
    tensors = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "both": distribute_tensor(torch.arange(4), mesh, [Replicate()]),
    }
    dcp.save({"model": tensors}, checkpoint_id=folder)


def test_parts_of_two_ranks_are_put_together(tmp_path: Path) -> None:
    run_ranks(lambda ctx: save_by_two(str(tmp_path / "sharded")), 2, on="processes")
    whole = torch.arange(15.0).reshape(5, 3)
    made = af.merge_fsdp_weights(tmp_path / "sharded", tmp_path)
    assert same(load_file(made), {"rows": whole, "columns": whole, "both": torch.arange(4)})


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
def test_any_shapes_and_dtypes_come_back(
    tmp_path_factory: pytest.TempPathFactory, forms: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in forms.items()}
    made = af.merge_fsdp_weights(write(folder / "sharded", {"model": tensors}), folder)
    assert same(load_file(made), tensors)
    shutil.rmtree(folder)


def test_stock_safetensors_writes_the_same_tensors(tmp_path: Path) -> None:
    made = af.merge_fsdp_weights(write(tmp_path / "sharded", {"model": MODEL}), tmp_path)
    save_file(MODEL, tmp_path / "stock.safetensors", {"format": "pt"})
    assert same(load_file(made), load_file(tmp_path / "stock.safetensors"))


def test_a_damaged_folder_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "sharded", {"model": MODEL})
    (data,) = source.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(DamagedCheckpointError, match="can't be put together"):
        af.merge_fsdp_weights(source, tmp_path / "out", remove_checkpoint_dir=True)
    assert list((tmp_path / "out").iterdir()) == []
    assert source.is_dir()


def test_what_is_no_such_folder_is_told_with_what_to_give(tmp_path: Path) -> None:
    write(tmp_path / "run" / "pytorch_model_fsdp_0", {"model": MODEL})
    write(tmp_path / "run" / "optimizer_0", {"optimizer": {"state": {"w": {"m": torch.ones(1)}}}})
    with pytest.raises(NoCheckpointError, match=r"has .*pytorch_model_fsdp_0 in it: give that one"):
        af.merge_fsdp_weights(tmp_path / "run", tmp_path)
    with pytest.raises(CheckpointError, match="holds the state of an optimizer"):
        af.merge_fsdp_weights(tmp_path / "run" / "optimizer_0", tmp_path)
    with pytest.raises(NoCheckpointError, match="isn't there"):
        af.merge_fsdp_weights(tmp_path / "absent", tmp_path)
    af.save_tree(tmp_path / "own", {"x": torch.ones(1)})
    with pytest.raises(NoCheckpointError, match="accelfn checkpoint convert"):
        af.merge_fsdp_weights(tmp_path / "own", tmp_path)
    made = af.merge_fsdp_weights(tmp_path / "run" / "pytorch_model_fsdp_0", tmp_path)
    with pytest.raises(FileExistsError, match=r"model\.safetensors is there already"):
        af.merge_fsdp_weights(tmp_path / "run" / "pytorch_model_fsdp_0", tmp_path)
    assert same(load_file(made), MODEL)


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "sharded", {"model": {"w": torch.ones(2, dtype=torch.complex128)}})
    with pytest.raises(ValueError, match=r"no dtype for w \(torch.complex128\)"):
        af.merge_fsdp_weights(source, tmp_path)


def test_python_holds_one_part_at_a_time(tmp_path: Path) -> None:
    # Eight tensors of 1 MB; the bytes of an entry pass through Python's memory, which tracemalloc sees.
    source = write(tmp_path / "sharded", {"model": {str(n): torch.randn(1 << 18) for n in range(8)}})
    tracemalloc.start()
    try:
        af.merge_fsdp_weights(source, tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "sharded", {"model": MODEL})
    assert main(["merge-weights", str(source), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "model.safetensors")
    assert main(["merge-weights", str(source), str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
    flags = ["--unsafe-serialization", "--remove_checkpoint_dir"]
    assert main(["merge-weights", *flags, str(source), str(tmp_path / "out")]) == 0
    assert not source.exists()
    assert main(["merge-weights", str(source), str(tmp_path)]) == 2
    assert "doesn't exist" in capsys.readouterr().err
    write(source, {"model": MODEL})
    (source / ".metadata").write_bytes(b"cut")
    assert main(["merge-weights", str(source), str(tmp_path)]) == 1
    assert "damaged" in capsys.readouterr().err


def test_what_a_killed_merge_left_goes_with_the_next(tmp_path: Path) -> None:
    source = write(tmp_path / "sharded", {"model": MODEL})
    for _ in range(2):
        kill_at_its_last_step(lambda: af.merge_fsdp_weights(source, tmp_path / "out"))
        assert len(list((tmp_path / "out").iterdir())) == 1
    af.merge_fsdp_weights(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
