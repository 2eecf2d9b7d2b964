"""Several ranks load one model: each by itself, its own parts, or all from the first."""

# torch leaves the mesh and what makes DTensors partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from accelfn.bigmodel.load import load_checkpoint_in_model
from accelfn.context import Context
from accelfn.errors import CheckpointMismatchError
from accelfn.testing import run_ranks
from tests.bigmodel.load.layouts import on_meta, save, write
from tests.seen import Seen, look


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what ranks need once here, and not in each of them."""
    for name in ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"):
        importlib.import_module(name)


class Plain(nn.Module):
    """Sizes that two ranks can't halve, a tie, two dtypes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(3, 5, bias=False)
        self.b.weight = self.a.weight
        self.c = nn.Linear(5, 1, dtype=torch.bfloat16)
        self.d = nn.BatchNorm1d(5)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.c((self.a(data) + self.b(data)).bfloat16())


def filled() -> Plain:
    model = Plain()
    with torch.no_grad():
        for number, value in enumerate(model.state_dict().values()):
            value.copy_(torch.linspace(-1, number + 1, value.numel()).view_as(value))
    return model


def spread(ctx: Context, start: str) -> Plain:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Plain()
    if start == "meta":
        on_meta(model)
    mesh = init_device_mesh("cpu", (ctx.num_processes,))
    fully_shard(model.c, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Take a step, so that what FSDP keeps of the parameters is seen to be theirs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss: Any = model(torch.ones(2, 3)).square().sum()
    loss.backward()
    optimizer.step()
    return whole(model)


def load_spread(ctx: Context, folder: str, start: str, broadcast: bool) -> Any:
    model = spread(ctx, start)
    place = f"{folder}/gone" if broadcast and ctx.rank else folder
    load_checkpoint_in_model(model, place, strict=True, broadcast_from_rank0=broadcast)
    assert not any(one.is_meta for one in model.parameters())
    return whole(model), trained(model)


@pytest.mark.parametrize(("start", "broadcast"), [("meta", False), ("real", False), ("meta", True)])
def test_each_rank_takes_its_parts(start: str, broadcast: bool, tmp_path: Path) -> None:
    saved = filled()
    save(whole(saved), tmp_path, "folder")
    load = functools.partial(load_spread, folder=str(tmp_path), start=start, broadcast=broadcast)
    wanted = trained(saved)
    for loaded, after in run_ranks(load, 2, on="processes"):
        assert same(loaded, whole(filled()))
        assert all(torch.allclose(after[name], wanted[name]) for name in wanted)


def load_parts(ctx: Context, folder: str) -> Any:
    model = spread(ctx, "real")
    load_checkpoint_in_model(model, folder)
    place = Path(folder) / f"rank{ctx.rank}"
    place.mkdir()
    own = {
        name: (value.to_local() if hasattr(value, "to_local") else value).detach()
        for name, value in model.state_dict().items()
    }
    write(place / "model.safetensors", own)
    others = [spread(ctx, start) for start in ("meta", "real")]
    for other in others:
        load_checkpoint_in_model(other, place, strict=True, full_state_dict=False)
    with pytest.raises(CheckpointMismatchError):
        load_checkpoint_in_model(model, place)
    with pytest.raises(ValueError, match="Choose one"):
        load_checkpoint_in_model(model, place, full_state_dict=False, broadcast_from_rank0=True)
    return [whole(other) for other in others]


def test_each_rank_has_a_checkpoint_of_its_parts(tmp_path: Path) -> None:
    save(whole(filled()), tmp_path, "folder")
    for found in run_ranks(functools.partial(load_parts, folder=str(tmp_path)), 2, on="processes"):
        assert all(same(loaded, whole(filled())) for loaded in found)


def load_plain(ctx: Context, folder: str, start: str, kind: str) -> Any:
    model = Plain()
    if start == "meta":
        on_meta(model)
    place = folder if ctx.is_main_process else f"{folder}/gone"
    options: dict[str, Any] = {"dtype": torch.float64} if kind == "cast" else {}
    if kind == "map":
        options["device_map"] = {"": "cpu", "a": "cpu:1"}
    load_checkpoint_in_model(model, place, strict=True, broadcast_from_rank0=True, **options)
    assert model.a.weight is model.b.weight
    return whole(model)


@pytest.mark.parametrize(("start", "kind"), [("meta", "plain"), ("real", "cast"), ("meta", "map")])
def test_only_the_first_rank_reads(start: str, kind: str, tmp_path: Path) -> None:
    save(whole(filled()), tmp_path, "bin folder")
    wanted = whole(filled().double() if kind == "cast" else filled())
    load = functools.partial(load_plain, folder=str(tmp_path), start=start, kind=kind)
    for loaded in run_ranks(load, 2, on="processes"):
        assert same(loaded, wanted)


def fail(ctx: Context, folder: str, kind: str) -> tuple[Seen, bool]:
    model = Plain()
    if kind == "other model" and ctx.rank:
        model.a = nn.Linear(3, 5, dtype=torch.float16)
    before = whole(model)
    options: dict[str, Any] = {"device_map": {"": "disk"}} if kind == "disk" else {}
    if kind == "late" and ctx.is_main_process:
        # Between its head and its tensors the file is cut: other ranks are on their way to receive.
        from accelfn.bigmodel import load as broadcast

        true_read: Any = broadcast.read_tensors

        def cut_and_read(*arguments: Any) -> None:
            file = Path(folder) / "model.safetensors"
            os.truncate(file, file.stat().st_size - 1)
            true_read(*arguments)

        cast("Any", broadcast).read_tensors = cut_and_read
    seen = look(lambda: load_checkpoint_in_model(model, folder, broadcast_from_rank0=True, **options))
    return seen, same(before, whole(model))


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("gone", "NoCheckpointError", "RemoteRankError"),
        ("misshapen", "CheckpointMismatchError", "CheckpointMismatchError"),
        ("other model", "MismatchError", "MismatchError"),
        ("late", "DamagedCheckpointError", "RemoteRankError"),
        ("disk", "ValueError", "ValueError"),
    ],
)
def test_an_error_reaches_all_ranks(kind: str, first: str, second: str, tmp_path: Path) -> None:
    tensors = whole(filled())
    if kind == "misshapen":
        tensors["a.weight"] = tensors["b.weight"] = torch.zeros(2, 2)
    write(tmp_path / "model.safetensors", tensors)
    folder = str(tmp_path / "nothing" if kind == "gone" else tmp_path)
    seen = run_ranks(functools.partial(fail, folder=folder, kind=kind), 2, on="processes")
    assert [one.error for one, _ in seen] == [first, second]
    assert all(is_same for _, is_same in seen)


def test_broadcasting_needs_a_process_group(tmp_path: Path) -> None:
    save(whole(filled()), tmp_path, "folder")
    with pytest.raises(ValueError, match="needs a process group"):
        load_checkpoint_in_model(Plain(), tmp_path, broadcast_from_rank0=True)


def test_with_a_context_the_environment_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(whole(filled()), tmp_path, "folder")
    monkeypatch.setenv("ACCELFN_MIXED_PRECISION", "nonsense")
    model = Plain()
    load_checkpoint_in_model(model, tmp_path, broadcast_from_rank0=True, ctx=Context())
    assert same(whole(model), whole(filled()))
