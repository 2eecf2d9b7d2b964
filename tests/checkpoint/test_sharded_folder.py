import importlib
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from accelfn.checkpoint.sharded_folder import read_sharded_folder
from accelfn.errors import CheckpointError, DamagedCheckpointError
from accelfn.testing import run_ranks

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of saving in a single process

MODEL = {
    "0.weight": torch.randn(3, 4),
    "0.bias": torch.arange(3),
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


def change_table(folder: Path, change: Callable[[Any], object]) -> None:
    table = pickle.loads((folder / ".metadata").read_bytes())
    change(table)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def test_a_state_dict_comes_back_whole(tmp_path: Path) -> None:
    read = read_sharded_folder(write(tmp_path / "pytorch_model_fsdp_0", {"model": MODEL}), "model")
    assert list(read) == list(MODEL)
    assert all(
        read[name].dtype == MODEL[name].dtype and torch.equal(read[name], MODEL[name]) for name in MODEL
    )
    optimizer = read_sharded_folder(write(tmp_path / "optimizer_0", {"optimizer": OPTIMIZER}), "optimizer")
    assert str(optimizer) == str(OPTIMIZER)


def save_by_two(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        "rows": distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(1)]),
        "both": distribute_tensor(torch.arange(4), mesh, [Replicate()]),
    }
    dcp.save({"model": tensors}, checkpoint_id=folder)


def test_parts_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "pytorch_model_fsdp_0"
    run_ranks(lambda ctx: save_by_two(str(folder)), 2, on="processes")
    assert len(list(folder.glob("*.distcp"))) == 2
    read = read_sharded_folder(folder, "model")
    assert torch.equal(read["rows"], torch.arange(15.0).reshape(5, 3))
    assert torch.equal(read["columns"], torch.arange(15.0).reshape(5, 3))
    assert torch.equal(read["both"], torch.arange(4))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_bombs_are_named_and_do_not_go_off(tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    entry = write(tmp_path / "optimizer_0", {"optimizer": {"a": Bomb(crater)}})
    with pytest.raises(
        CheckpointError, match=r"optimizer_0/__0_0\.distcp .* posix\.mkdir, which was not run"
    ):
        read_sharded_folder(entry, "optimizer")
    table = write(tmp_path / "pytorch_model_fsdp_0", {"model": MODEL})
    (table / ".metadata").write_bytes(pickle.dumps(Bomb(crater)))
    with pytest.raises(CheckpointError, match=r"_fsdp_0/\.metadata .* posix\.mkdir, which was not run"):
        read_sharded_folder(table, "model")
    assert not crater.exists()


def lengthen(table: Any) -> None:
    for info in table.storage_data.values():
        info.length += 10**6


def elsewhere(table: Any) -> None:
    for info in table.storage_data.values():
        info.relative_path = "../secret"


def no_chunks(table: Any) -> None:
    table.state_dict_metadata["model.0.weight"].chunks.clear()


def doubled(table: Any) -> None:
    table.state_dict_metadata["model.0.bias"].chunks *= 2


def transformed(table: Any) -> None:
    for info in table.storage_data.values():
        info.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((lengthen, "cut short"), (elsewhere, "secret"), (no_chunks, "cover"), (doubled, "cover")),
        (transformed, "transformed"),
    ],
)
def test_tables_that_lie_are_refused(change: Callable[[Any], object], words: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "pytorch_model_fsdp_0", {"model": MODEL})
    shutil.copy(folder / "__0_0.distcp", tmp_path / "secret")
    change_table(folder, change)
    with pytest.raises(CheckpointError, match=words):
        read_sharded_folder(folder, "model")


def test_folders_that_are_not_whole_are_damaged(tmp_path: Path) -> None:
    folder = write(tmp_path / "pytorch_model_fsdp_0", {"model": MODEL})
    with pytest.raises(DamagedCheckpointError, match="not 'optimizer' alone"):
        read_sharded_folder(folder, "optimizer")
    table = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(table[:-20])
    with pytest.raises(DamagedCheckpointError, match="can't be put together"):
        read_sharded_folder(folder, "model")
    (folder / ".metadata").write_bytes(table)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match="is not there"):
        read_sharded_folder(folder, "model")
    (folder / ".metadata").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is not there"):
        read_sharded_folder(folder, "model")
