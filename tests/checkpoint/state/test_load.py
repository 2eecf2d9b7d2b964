"""Loading: what doesn't fit is refused on all ranks before anything changes; and the newest that is whole."""

import copy
import ctypes
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.context import Context
from accelfn.errors import CheckpointError, CheckpointMismatchError, DamagedCheckpointError, RemoteRankError
from accelfn.storage.disk import REAL_DISK
from accelfn.testing import run_ranks
from tests.checkpoint import layouts
from tests.checkpoint.small import flip, names
from tests.checkpoint.watched_disk import installed, locked

TENSORS = "tensors-00000.safetensors"


def stepped(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    layouts.step(model, optimizer)
    return model, optimizer


def test_an_optimizer_that_save_state_saved_is_refused_by_load_tree_before_anything_changes(
    tmp_path: Path,
) -> None:
    model, optimizer = stepped()
    af.save_state(Context(), tmp_path / "at", {"model": model, "optimizer": optimizer})
    other, its_optimizer = stepped(1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointMismatchError, match="load_state") as caught:
        af.load_tree(tmp_path / "at", {"model": other, "optimizer": its_optimizer})
    assert [row.path for row in caught.value.rows] == ["optimizer"]
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    af.save_tree(tmp_path / "tree", {"model": model, "optimizer": optimizer})
    af.load_tree(tmp_path / "tree", {"model": other, "optimizer": its_optimizer})
    assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])


class Unnamed(nn.Module):
    """Has parameters that it doesn't name."""

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no names")


@pytest.mark.parametrize("call", ["load_state", "load_latest"])
@pytest.mark.parametrize("on", ["memory", "processes"])
def test_what_one_rank_cannot_ask_for_is_an_error_on_all(tmp_path: Path, on: Any, call: str) -> None:
    def run(ctx: Context) -> None:
        load: Any = getattr(af, call)
        af.save_state(ctx, tmp_path / "at", {"x": 1})
        with pytest.raises(
            TypeError if ctx.rank else RemoteRankError, match="partial must be a bool or a list"
        ):
            load(ctx, tmp_path / "at", {"x": 0}, partial="x" if ctx.rank else False)
        with pytest.raises(RuntimeError if ctx.rank else RemoteRankError, match="no names"):
            load(ctx, tmp_path / "at", {"x": Unnamed() if ctx.rank else nn.Linear(1, 1)})
        assert load(ctx, tmp_path / "at", {"x": 0}) == {"x": 1}

    run_ranks(run, 2, on=on)


# --- in place ------------------------------------------------------------------------------------


def kib(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0])


def large(seed: int) -> dict[str, Any]:
    """Return a model of 16 MiB in another layout than the usual one, and an optimizer that has stepped."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model = nn.ParameterList(torch.randn(1024, 2048).T if seed else torch.randn(2048, 1024) for _ in "ab")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model:
        parameter.grad = parameter.detach()
    cast("Any", optimizer).step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def tensors_of(state: Any) -> list[torch.Tensor]:
    values = [*state["model"].parameters(), *state["optimizer"].state.values()]
    return [
        one for value in values for one in ([value] if isinstance(value, nn.Parameter) else value.values())
    ]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system doesn't count memory so")
def test_a_state_that_is_there_already_is_loaded_with_little_memory_or_not_changed_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelfn.checkpoint.load._KEPT_BYTES", 1 << 24)
    saved, state = large(0), large(1)
    af.save_state(Context(), tmp_path / "at", saved)
    versions = [one._version for one in state["model"]]
    ctypes.CDLL(None).malloc_trim(0)  # else new memory may be what was free already
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    af.load_state(Context(), tmp_path / "at", state)
    assert kib("VmHWM") - before < 24 << 10  # 48 MiB were loaded
    assert all(map(torch.equal, tensors_of(state), tensors_of(saved)))
    # As after any other operation in place, so that a backward pass through older values is an error.
    assert all(one._version > version for one, version in zip(state["model"], versions, strict=True))
    state = large(1)
    values = [one.clone() for one in tensors_of(state)]
    flip(tmp_path / "at" / TENSORS)
    with pytest.raises(DamagedCheckpointError, match="aren't what was written"):
        af.load_state(Context(), tmp_path / "at", state)
    assert all(map(torch.equal, tensors_of(state), values))


def test_a_checkpoint_that_vanishes_while_it_is_loaded_is_replaced_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelfn.checkpoint.load._KEPT_BYTES", 0)

    for value in (1.0, 2.0):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, value)
        af.save_state(Context(), tmp_path / f"{value}", {"model": model})
    opened = 0

    def open_file(folder: Any, name: str) -> int:
        nonlocal opened
        opened += name == TENSORS
        if opened == 3:  # after both ranks have verified it
            shutil.rmtree(tmp_path / "2.0", ignore_errors=True)
        return REAL_DISK.open_file(folder, name)

    def run(ctx: Context) -> float:
        model = nn.Linear(1, 1, bias=False)
        af.load_state(ctx, tmp_path, {"model": model})
        return model.weight.item()

    with installed(locked(replace(REAL_DISK, open_file=open_file))):
        assert run_ranks(run, 2) == [1.0, 1.0]


@pytest.mark.parametrize("kept", [0, 1 << 24])
def test_what_shares_no_memory_in_the_tree_shares_none_after_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr("accelfn.checkpoint.load._KEPT_BYTES", kept)
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    shared = one.weight
    af.save_state(Context(), tmp_path / "at", {"model": one, "again": shared, "plain": shared.detach()})
    like: dict[str, Any] = {
        "model": other,
        "again": nn.Parameter(torch.zeros(2, 2)),
        "plain": torch.zeros(2, 2),
    }
    loaded = af.load_state(Context(), tmp_path / "at", like)
    values = [other.weight, loaded["again"], loaded["plain"]]
    assert loaded["again"] is like["again"]
    assert all(torch.equal(value, shared) for value in values)
    assert len({value.data_ptr() for value in values}) == 3


# --- the newest ----------------------------------------------------------------------------------


class Cached(nn.Module):
    """Has something that it computes again when it is loaded, in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.calls, self.way = nn.Parameter(torch.zeros(2)), list[str](), way
        if way == "before":
            cast("Any", self).register_load_state_dict_pre_hook(partial(self.note, "before"))
        elif way == "after":
            cast("Any", self).register_load_state_dict_post_hook(partial(self.note, "after"))

    def note(self, name: str, *_: object) -> None:
        self.calls.append(name)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.calls += ["method"] if self.way == "method" else []
        cast("Any", super())._load_from_state_dict(*args, **kwargs)


@pytest.mark.parametrize("way", ["before", "after", "method"])
def test_a_module_runs_its_own_code_when_it_is_loaded(tmp_path: Path, way: str) -> None:
    ctx, saved, loaded = Context(), Cached(way), Cached(way)
    nn.init.ones_(saved.weight)
    af.save_state(ctx, tmp_path / "at", {"model": nn.Sequential(saved)})
    af.load_state(ctx, tmp_path / "at", {"model": nn.Sequential(loaded)})
    assert loaded.weight.eq(1).all()
    assert loaded.calls == [way]


@pytest.mark.parametrize("fsdp", [None, af.FullyShardedDataParallelPlugin()], ids=["replicas", "shards"])
def test_a_rate_that_was_set_by_hand_is_that_of_the_checkpoint(tmp_path: Path, fsdp: Any) -> None:
    def prepared(ctx: Context) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))

    def run(ctx: Context) -> None:
        model, optimizer = prepared(ctx)
        layouts.step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.125
        af.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer})
        layouts.step(model, optimizer)
        other, its_optimizer = prepared(ctx)
        af.load_state(ctx, tmp_path, {"model": other, "optimizer": its_optimizer})
        assert its_optimizer.param_groups[0]["lr"] == 0.125
        layouts.step(other, its_optimizer)
        found = layouts.whole(other, its_optimizer)
        assert not layouts.differing(found, layouts.whole(model, optimizer))

    run_ranks(run, 2, on="processes", fsdp_plugin=fsdp)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_the_newest_is_loaded_if_there_is_any(tmp_path: Path, on: Any) -> None:
    def run(ctx: Context) -> list[Any]:
        runs, model = tmp_path / "runs", nn.Linear(2, 1)
        found: list[Any] = [af.load_latest(ctx, runs, {"model": model, "step": 0})]
        for step in (9, 10):
            nn.init.constant_(model.weight, step)
            tree = {"model": model, "step": step, "rank": ctx.rank}
            af.save_state(ctx, runs / f"step-{step}", tree, step=step)
        nn.init.zeros_(model.weight)
        for place in (runs, runs / "step-9"):  # also a checkpoint itself
            loaded = af.load_latest(ctx, place, {"model": model, "step": 0, "rank": -1}, random_state=False)
            assert loaded is not None
            assert loaded["model"] is model
            found += [loaded["step"], loaded["rank"] == ctx.rank, model.weight[0, 0].item()]
        af.wait_for_everyone(ctx)
        return found

    assert run_ranks(run, 2, on=on) == [[None, 10, True, 10.0, 9, True, 9.0]] * 2


def test_an_empty_directory_has_no_latest_and_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("mine")
    assert af.load_latest(Context(), tmp_path / "empty", {"step": 0}) is None
    with pytest.raises(NotADirectoryError):
        af.load_latest(Context(), tmp_path / "empty" / "notes.txt", {"step": 0})


def test_the_next_older_one_is_loaded_where_the_newest_is_damaged(tmp_path: Path) -> None:
    for step in range(4):
        af.save_state(Context(), tmp_path / f"step-{step}", {"x": torch.full((64,), step)}, step=step)
    flip(tmp_path / "step-3" / TENSORS)  # is seen when its bytes are read
    (tmp_path / "step-2" / "manifest.json").write_bytes(b"{}")  # is seen when it is listed

    def run(ctx: Context) -> Any:
        loaded = af.load_latest(ctx, tmp_path, {"x": torch.zeros(64, dtype=torch.int64)}, random_state=False)
        return None if loaded is None else loaded["x"][0].item()

    for ranks in (1, 2):
        with (
            pytest.warns(UserWarning, match=r"step-2/manifest.json is damaged.*Loading .*step-3 instead"),
            pytest.warns(UserWarning, match=r"step-3.* is damaged.*Loading .*step-1 instead"),
        ):
            assert run_ranks(run, ranks) == [1] * ranks
    (tmp_path / "step-1" / TENSORS).unlink()
    flip(tmp_path / "step-0" / TENSORS)
    with pytest.warns(UserWarning, match="is damaged"):
        with pytest.raises(DamagedCheckpointError):
            run(Context())


def test_what_does_not_fit_is_no_reason_to_load_an_older_one(tmp_path: Path) -> None:
    af.save_state(Context(), tmp_path / "step-0", {"x": torch.zeros(2)}, step=0)
    af.save_state(Context(), tmp_path / "step-1", {"x": torch.zeros(3)}, step=1)
    with pytest.raises(CheckpointMismatchError, match=r"load_latest: .*step-1 does not fit"):
        af.load_latest(Context(), tmp_path, {"x": torch.zeros(2)})


def test_a_path_that_is_not_shared_is_an_error_that_says_so(tmp_path: Path) -> None:
    """Each of two nodes has a disk of its own at the same path."""
    shared = tmp_path / "shared"

    def on_own_disk(act: Callable[..., Any], node: str, *arguments: Any) -> Any:
        return act(*(one.replace("/shared", node) if isinstance(one, str) else one for one in arguments))

    def run(ctx: Context) -> None:
        acts = {field.name: getattr(REAL_DISK, field.name) for field in fields(REAL_DISK)}
        own = {
            name: partial(on_own_disk, act, f"/node{ctx.rank}") for name, act in acts.items() if callable(act)
        }
        tree = {"x": ctx.rank, "y": torch.ones(ctx.rank + 1)}
        refused = partial(
            pytest.raises, (CheckpointError, RemoteRankError), match="on a disk that all ranks share"
        )
        with installed(replace(REAL_DISK, **own)):
            with refused():
                af.save_state(ctx, shared / "at", tree)
            with refused():
                af.load_state(ctx, shared / "old", {"x": 0})

    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
    af.save_tree(tmp_path / "node0" / "old", {"x": 1})
    for _ in range(2):
        run_ranks(run, 2, on="processes")
        assert names(tmp_path / "node0") == ["old"]
        (tmp_path / "node1" / "at").mkdir(exist_ok=True)  # as of an earlier run: then rank 0 misses a file
