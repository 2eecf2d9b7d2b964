"""``save_object`` writes a complete file once, or none."""

# torch leaves tolist partly untyped.
# pyright: reportUnknownMemberType=false

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import accelfn as af
from accelfn import Context
from accelfn.checkpoint import save_object
from accelfn.errors import RemoteRankError
from accelfn.storage.disk import REAL_DISK
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import differing
from tests.checkpoint.watched_disk import installed

BASE = torch.arange(6.0).view(2, 3)
TENSORS = {"base": BASE, "again": BASE, "turned": BASE.t(), "part": BASE[1:], "scalar": torch.tensor(3)}


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_an_object_is_written_once_and_readable_by_all(on: Any, tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[bool, bool]:
        save_object(ctx, {"rank": ctx.rank, "list": [1, 2]}, tmp_path / "object.pt")
        save_object(ctx, TENSORS, str(tmp_path / "tensors.safetensors"), safe_serialization=True)
        loaded = torch.load(tmp_path / "object.pt", weights_only=True)
        stored = load_file(tmp_path / "tensors.safetensors")
        return loaded == {"rank": 0, "list": [1, 2]}, not differing(stored, TENSORS)

    assert run_ranks(run, 2, on) == [(True, True)] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"object.pt", "tensors.safetensors"}


def test_a_file_object_works_with_torch_save() -> None:
    files = [io.BytesIO(), io.BytesIO()]

    def run(ctx: Context) -> None:
        save_object(ctx, [ctx.rank], files[ctx.rank])

    run_ranks(run, 2)
    assert torch.load(io.BytesIO(files[0].getvalue()), weights_only=True) == [0]
    assert files[1].getvalue() == b""
    with pytest.raises(TypeError, match="safetensors need a path, got BytesIO"):
        save_object(Context(), TENSORS, files[0], safe_serialization=True)


def test_each_node_writes_where_asked(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        save_object(ctx, ctx.rank, tmp_path / f"{ctx.world.node_rank}.pt")

    run_ranks(run, 4, num_nodes=2, project_config=af.config.ProjectConfiguration(save_on_each_node=True))
    assert [torch.load(tmp_path / f"{node}.pt", weights_only=True) for node in range(2)] == [0, 2]


class Unwilling:
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


ODD: list[tuple[Any, bool, type[Exception], str]] = [
    ([1], True, TypeError, "hold a dict of tensors by name, got list"),
    ({"a": 1}, True, TypeError, "hold a dict of tensors by name, got a dict with int under 'a'"),
    ({1: torch.ones(1)}, True, TypeError, "got a dict with Tensor under 1"),
    ({"w": torch.ones(1, device="meta")}, True, ValueError, "can't save w: no data"),
    ({"w": torch.ones(2).to_sparse()}, True, ValueError, "can't save w: a tensor has the layout"),
    ({"w": torch.ones(2, dtype=torch.complex128)}, True, ValueError, "safetensors lacks torch.complex128"),
    (Unwilling(), False, RuntimeError, "no"),
]


@pytest.mark.parametrize(("obj", "safe", "error", "message"), ODD)
def test_a_failed_write_keeps_the_old_file_and_raises_on_every_rank(
    obj: Any, safe: bool, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def run(ctx: Context) -> str:
        with pytest.raises((error, RemoteRankError)) as caught:
            save_object(ctx, obj, path, safe)
        assert message in str(caught.value)
        return type(caught.value).__name__

    assert run_ranks(run, 2) == [error.__name__, "RemoteRankError"]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("refused", ["sync", "rename"])
@pytest.mark.parametrize("safe", [True, False])
def test_a_full_disk_keeps_the_old_file(refused: str, safe: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    disk = replace(REAL_DISK, **{refused: fails})
    with installed(disk), pytest.raises(OSError, match="No space left"):
        save_object(Context(), {"w": torch.ones(2)}, path, safe)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
