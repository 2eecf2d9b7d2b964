"""The state of a run: saved by all ranks as one checkpoint, loaded completely or not at all."""

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader, Dataset

import accelfn as af
from accelfn.context import Context
from accelfn.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedCheckpointError,
    Misfit,
    MismatchError,
    MissingRankError,
    NoCheckpointError,
    RemoteRankError,
)
from accelfn.testing import run_ranks
from accelfn.training import ScalerState

NOTHING: dict[str, Any] = {}


class Numbers(Dataset[torch.Tensor]):
    """The numbers below some number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Loop(NamedTuple):
    """What a training loop holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def train(self, steps: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.model(torch.randn(5, 4, generator=generator)).square().sum().backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def bits(self) -> str:
        states = (self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict())
        return repr(plain(states))


def plain(tree: Any) -> Any:
    """Return a tree with its tensors as lists of numbers."""

    def numbers(leaf: Any) -> Any:
        return cast("Any", leaf).tolist() if isinstance(leaf, torch.Tensor) else leaf

    return cast("Any", optree).tree_map(numbers, tree)


def new_loop(make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Loop:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = make(model.parameters(), lr=0.1, **options)
    return Loop(model, optimizer, StepLR(optimizer, 2))


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.LBFGS, {}),
]


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS[:-1])
def test_training_goes_on_bit_for_bit(
    tmp_path: Path, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    straight, first, second = (new_loop(make, **options) for _ in range(3))
    first.model.load_state_dict(straight.model.state_dict())
    straight.train(3)
    first.train(3)
    af.save_state(Context(), tmp_path / "at", first.tree)
    loaded = af.load_state(Context(), tmp_path / "at", second.tree)
    assert loaded["model"] is second.model
    assert loaded["optimizer"] is second.optimizer
    straight.train(4, seed=1)
    second.train(4, seed=1)
    assert second.bits() == straight.bits()


def test_states_keep_a_dtype_that_parameters_do_not_have(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight]["master"] = torch.tensor([1.0, 1.0 + 2**-20, 3.0])
    af.save_state(Context(), tmp_path / "at", {"weight": weight, "optimizer": optimizer})
    other = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    fresh = torch.optim.SGD([other])
    loaded = af.load_state(Context(), tmp_path / "at", {"weight": other, "optimizer": fresh})
    assert torch.equal(fresh.state[other]["master"], optimizer.state[weight]["master"])
    assert loaded["weight"] is other  # the optimizer steps this very tensor
    assert torch.equal(other, weight)


def test_neither_the_order_of_objects_nor_of_parameters_matters(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*one.parameters(), *other.parameters()])
    (one(torch.ones(1, 2)) + 3 * other(torch.ones(1, 2))).sum().backward()
    af.optimizer_step(Context(), optimizer, af.init_scaler(Context()))
    af.save_state(Context(), tmp_path / "at", {"one": one, "other": other, "optimizer": optimizer})
    second, first = nn.Linear(2, 2), nn.Linear(2, 2)
    turned = torch.optim.AdamW([*second.parameters(), *first.parameters()])
    af.load_state(Context(), tmp_path / "at", {"optimizer": turned, "other": second, "one": first})
    assert torch.equal(first.weight, one.weight)
    assert torch.equal(second.weight, other.weight)
    assert torch.equal(turned.state[second.weight]["exp_avg"], optimizer.state[other.weight]["exp_avg"])
    assert torch.equal(turned.state[first.bias]["exp_avg"], optimizer.state[one.bias]["exp_avg"])


def test_records_and_values_come_back_new_and_generators_in_place(tmp_path: Path) -> None:
    scaler = af.init_scaler(Context())._replace(num_skipped=torch.tensor(3))
    generator = torch.Generator().manual_seed(5)
    expected = torch.rand(2, generator=generator.clone_state())
    tree = {"scaler": scaler, "epoch": 3, "losses": [0.5, 0.25], "best": 0.25, "generator": generator}
    af.save_state(Context(), tmp_path / "at", tree)
    fresh = torch.Generator()
    like: dict[str, Any] = {
        "scaler": af.init_scaler(Context()),
        "epoch": 0,
        "losses": [],
        "best": None,
        "generator": fresh,
    }
    loaded = af.load_state(Context(), tmp_path / "at", like)
    assert isinstance(loaded["scaler"], ScalerState)
    assert int(loaded["scaler"].num_skipped) == 3
    assert int(like["scaler"].num_skipped) == 0  # records are never written into
    assert (loaded["epoch"], loaded["losses"], loaded["best"]) == (3, [0.5, 0.25], 0.25)
    assert loaded["generator"] is fresh
    assert torch.equal(torch.rand(2, generator=fresh), expected)


def test_what_is_known_of_gradients_is_not_kept(tmp_path: Path) -> None:
    scaler = af.init_scaler(Context())
    scaler = scaler._replace(unscaled=(1234,), weight=torch.tensor(2.0), is_open=True)
    af.save_state(Context(), tmp_path / "at", {"scaler": scaler})
    loaded = af.load_state(Context(), tmp_path / "at", {"scaler": af.init_scaler(Context())})
    assert loaded["scaler"][4:] == ((), None, None)


def test_a_scaler_state_that_was_superseded_is_not_saved(tmp_path: Path) -> None:
    optimizer, scaler = torch.optim.SGD([nn.Parameter(torch.ones(1))]), af.init_scaler(Context())
    af.optimizer_step(Context(), optimizer, scaler)  # what it returns is dropped
    with pytest.raises(ValueError, match="save_state: this ScalerState was superseded"):
        af.save_state(Context(), tmp_path / "at", {"scaler": scaler})


def test_loaders_go_on_where_they_were(tmp_path: Path) -> None:
    def loader() -> DataLoader[torch.Tensor]:
        return af.prepare(Context(), DataLoader(Numbers(20), batch_size=3, shuffle=True))

    first = loader()
    batches = iter(first)
    seen = [next(batches) for _ in range(2)]
    tree: dict[str, Any] = {"loader": first, "state": af.loader_state(first)}
    af.save_state(Context(), tmp_path / "at", tree)
    rest = torch.cat(list(batches))
    for name in ("loader", "state"):
        second = loader()
        like: dict[str, Any] = {
            "loader": second if name == "loader" else loader(),
            "state": af.loader_state(second),
        }
        loaded = af.load_state(Context(), tmp_path / "at", like)
        assert loaded["state"] == tree["state"]
        if name == "state":
            af.restore_loader(second, loaded["state"])
        assert torch.equal(torch.cat(list(second)), rest)
    assert torch.equal(torch.cat([*seen, rest]).sort().values, torch.arange(20))


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]

    draw()
    af.save_state(Context(), tmp_path / "at", NOTHING)
    expected = [draw(), draw()]
    af.load_state(Context(), tmp_path / "at", NOTHING)
    assert [draw(), draw()] == expected
    af.load_state(Context(), tmp_path / "at", NOTHING, random_state=False)
    assert draw() != expected[0]


def test_each_rank_has_its_own_random_numbers_and_a_new_rank_others(tmp_path: Path) -> None:
    def save(ctx: Context) -> list[float]:
        af.set_seed(7, ctx=ctx, device_specific=True)
        af.save_state(ctx, tmp_path / "at", NOTHING)
        return torch.rand(3).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def load(ctx: Context) -> list[float]:
        af.load_state(ctx, tmp_path / "at", NOTHING)
        return torch.rand(3).tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    drawn = run_ranks(save, 2, on="processes")
    assert drawn[0] != drawn[1]
    more = run_ranks(load, 3, on="processes")
    assert more[:2] == drawn
    assert more[2] not in drawn
    assert run_ranks(load, 1, on="processes") == drawn[:1]


def test_a_tensor_that_is_equal_everywhere_is_written_once_and_others_are_kept(tmp_path: Path) -> None:
    def save(ctx: Context) -> dict[str, Any]:
        tree = {"same": torch.arange(1000), "own": torch.full((3,), ctx.rank // 2), "rank": ctx.rank}
        af.save_state(ctx, tmp_path / "at", tree)
        like: dict[str, Any] = {
            "same": torch.zeros(1000, dtype=torch.int64),
            "own": torch.zeros(3, dtype=torch.int64),
            "rank": 9,
        }
        return af.load_state(ctx, tmp_path / "at", like)

    for rank, loaded in enumerate(run_ranks(save, 4)):
        assert torch.equal(loaded["same"], torch.arange(1000))
        assert loaded["own"].tolist() == [rank // 2] * 3
        assert loaded["rank"] == rank
    stored: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "at").glob("*.safetensors")):
        found = load_file(file)
        assert not stored.keys() & found.keys()
        stored.update(found)
    assert {name for name in stored if not name.startswith("#")} == {"same", "own", "own@2"}


def test_saving_over_a_checkpoint_keeps_the_old_one_until_the_new_one_is_there(tmp_path: Path) -> None:
    for step in range(3):
        path = af.save_state(Context(), tmp_path / "at", {"step": step}, step=step)
        assert path == tmp_path / "at"
        assert af.load_state(Context(), tmp_path / "at", {"step": -1}) == {"step": step}
    assert os.listdir(tmp_path) == ["at"]
    with pytest.raises(TypeError, match="bad"):
        af.save_state(Context(), tmp_path / "at", {"step": 3, "bad": object()})
    assert af.load_state(Context(), tmp_path / "at", {"step": -1}) == {"step": 2}
    assert os.listdir(tmp_path) == ["at"]


def test_a_directory_of_checkpoints_gives_the_newest(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        af.save_state(Context(), tmp_path / f"step-{step}", {"step": step}, step=step)
    assert af.load_state(Context(), tmp_path, {"step": -1}) == {"step": 10}
    af.save_state(Context(), tmp_path / "step-11", {"step": 11}, step=11, keep=af.checkpoint.Keep(last=2))
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-11"]


# --- what does not fit ---------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    loop = new_loop()
    loop.train(2)
    af.save_state(Context(), tmp_path / "at", {**loop.tree, "extra": torch.zeros(2), "ema": torch.ones(3)})
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).double(), nn.Linear(6, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    like = {
        "model": model,
        "optimizer": optimizer,
        "schedule": StepLR(optimizer, 2),
        "ema": torch.ones(4),
        "missing": nn.Linear(1, 1),
    }
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(CheckpointMismatchError) as caught:
        af.load_state(Context(), tmp_path / "at", like)
    rows = {row.path: row for row in caught.value.rows}
    assert rows["model/2.weight"] == Misfit("model/2.weight", "float32 [2, 6]", "float32 [3, 6]")
    assert rows["model/2.bias"] == Misfit("model/2.bias", "float32 [2]", "nothing")
    assert rows["model/1.weight"] == Misfit("model/1.weight", "float32 [6]", "float64 [6]")
    assert rows["optimizer/groups/0"] == Misfit("optimizer/groups/0", "parameter model/2.bias", "nothing")
    assert {"ema", "extra", "missing"} <= rows.keys()
    after = (model.state_dict(), optimizer.state_dict())
    assert repr(after) == repr(before)


def test_without_strict_a_module_takes_what_it_has_a_place_for(tmp_path: Path) -> None:
    af.save_state(Context(), tmp_path / "at", {"model": nn.Linear(2, 2)})
    wider = nn.Sequential()
    wider.weight = nn.Parameter(torch.zeros(2, 2))
    wider.other = nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointMismatchError, match="model/other"):
        af.load_state(Context(), tmp_path / "at", {"model": wider})
    af.load_state(Context(), tmp_path / "at", {"model": wider}, strict=False)
    assert wider.weight.abs().sum() > 0
    wider.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(CheckpointMismatchError, match="model/weight"):
        af.load_state(Context(), tmp_path / "at", {"model": wider}, strict=False)


class Counter:
    """An object that speaks for itself, and may refuse."""

    def __init__(self, value: int, refuses: bool = False) -> None:
        self.value = value
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses and state["value"] != self.value:
            self.refuses = False  # its old state is restored then
            self.value = -1
            raise RuntimeError("this counter refuses")
        self.value = state["value"]


@pytest.mark.parametrize("refusing", [0, 1])
def test_an_object_that_refuses_on_one_rank_leaves_all_ranks_as_they_were(
    tmp_path: Path, refusing: int
) -> None:
    def run(ctx: Context) -> tuple[int, int, bool, bool]:
        loop = new_loop()
        loop.train(2)
        tree = {**loop.tree, "first": Counter(5), "second": Counter(6)}
        af.save_state(ctx, tmp_path / "at", tree)
        fresh = new_loop()
        fresh.train(1)
        before, drawn = fresh.bits(), torch.get_rng_state()
        first, second = Counter(1), Counter(2, refuses=ctx.rank == refusing)
        like = {**fresh.tree, "first": first, "second": second}
        kind = RuntimeError if ctx.rank == refusing else RemoteRankError
        with pytest.raises(kind, match="this counter refuses"):
            af.load_state(ctx, tmp_path / "at", like)
        return first.value, second.value, fresh.bits() == before, torch.equal(torch.get_rng_state(), drawn)

    def seeded(ctx: Context) -> tuple[int, int, bool, bool]:
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        return run(ctx)

    assert run_ranks(seeded, 2, on="processes") == [(1, 2, True, True)] * 2


# --- ranks that differ, and directories that can't be --------------------------------------------


def test_saving_on_one_rank_alone_is_an_error_on_all(tmp_path: Path) -> None:
    def run(ctx: Context) -> str:
        def act() -> None:
            if ctx.is_main_process:
                af.save_state(ctx, tmp_path / "at", NOTHING)
            else:
                af.wait_for_everyone(ctx)

        with pytest.raises((MismatchError, MissingRankError)) as caught:
            act()
        return str(caught.value)

    assert all("save_state" in text for text in run_ranks(run, 2))
    assert not (tmp_path / "at").exists()


def test_directories_that_differ_between_ranks_are_an_error_on_all(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        with pytest.raises(MismatchError):
            af.save_state(ctx, tmp_path / f"at{ctx.rank}", NOTHING)

    run_ranks(run, 2)
    assert os.listdir(tmp_path) == []


def test_what_one_rank_cannot_save_no_rank_saves(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        tree = {"bad": object() if ctx.rank == 1 else 1}
        with pytest.raises(TypeError if ctx.rank == 1 else RemoteRankError, match="bad"):
            af.save_state(ctx, tmp_path / "at", tree)

    run_ranks(run, 2)
    assert os.listdir(tmp_path) == []


def test_places_that_can_be_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for name in ("file", "full", "n" * 256):
        with pytest.raises((CheckpointError, OSError)):
            af.save_state(Context(), tmp_path / name, NOTHING)
    with pytest.raises(OSError, match="file"):
        af.save_state(Context(), tmp_path / "file" / "below", NOTHING)
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="no such directory"):
        af.load_state(Context(), tmp_path / "at", NOTHING)

    def run(ctx: Context) -> None:
        with pytest.raises(NoCheckpointError, match="no such directory"):
            af.load_state(ctx, tmp_path / "at", NOTHING)

    run_ranks(run, 2)


def test_damage_on_the_disk_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    loop = new_loop()
    loop.train(1)
    path = af.save_state(Context(), tmp_path / "at", loop.tree)
    file = path / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)
    fresh = new_loop()
    before = fresh.bits()
    with pytest.raises(DamagedCheckpointError, match=r"tensors-00000\.safetensors") as caught:
        af.load_state(Context(), path, fresh.tree)
    assert caught.value.file == file.name
    assert fresh.bits() == before


# --- in the background ---------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_in_the_background_the_state_of_the_moment_is_saved(tmp_path: Path, on: Any) -> None:
    def run(ctx: Context) -> tuple[list[float], str]:
        weight = torch.ones(50_000)
        handle = af.save_state(ctx, tmp_path / "at", {"weight": weight, "rank": ctx.rank}, True)
        weight.add_(1)
        path = handle.result(timeout=60)
        assert handle.done()
        assert handle.exception() is None
        like: dict[str, Any] = {"weight": torch.zeros(50_000), "rank": -1}
        loaded = af.load_state(ctx, path, like)
        assert loaded["rank"] == ctx.rank
        return [loaded["weight"].min().item(), loaded["weight"].max().item()], path.name

    assert run_ranks(run, 2, on=on) == [([1.0, 1.0], "at")] * 2


def test_an_error_in_the_background_is_told_by_the_handle_or_at_the_next_save(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        af.save_state(ctx, tmp_path / "at", {"step": 1})
        kind = OSError if ctx.rank == 0 else RemoteRankError
        for asks in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if ctx.rank == 0:
                    patch.setattr(os, "fsync", _refuse)
                handle = af.save_state(ctx, tmp_path / "at", {"step": 2}, True)
                if asks:
                    with pytest.raises(kind, match="no disk"):
                        handle.result()
                else:
                    assert isinstance(handle.exception(), kind)
                    handle._is_reported = False  # pyright: ignore[reportPrivateUsage] -- as if nobody had asked
            if not asks:
                with pytest.raises(kind, match="no disk"):
                    af.save_state(ctx, tmp_path / "at", {"step": 3})
            assert af.load_state(ctx, tmp_path / "at", {"step": 0}) == {"step": 1}

    run_ranks(run, 2, on="processes")
    assert os.listdir(tmp_path) == ["at"]


def _refuse(descriptor: int) -> None:
    raise OSError(5, "no disk")


def test_one_save_at_a_time_and_the_end_of_a_context_waits(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        for step in range(5):
            af.save_state(ctx, tmp_path / "at", {"step": step, "x": torch.zeros(10_000)}, True)
        af.close_context(ctx)

    run_ranks(run, 2, on="processes")
    assert af.load_tree(tmp_path / "at")["step"] == 4


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_any_world_loads_what_any_other_saved(sizes: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        value: dict[str, Any] = {"a": torch.arange(6.0), "b": [torch.tensor(3), "text"], "n": 1}

        def run(ctx: Context) -> dict[str, Any]:
            like: dict[str, Any] = {"a": torch.zeros(6), "b": [torch.tensor(0), ""], "n": 0}
            loaded = af.load_state(ctx, f"{folder}/at", like)
            loaded["n"] += 1
            af.save_state(ctx, f"{folder}/at", loaded)
            return loaded

        af.save_state(Context(), f"{folder}/at", value)
        for number, size in enumerate(sizes):
            for loaded in run_ranks(run, size):
                assert torch.equal(loaded["a"], value["a"])
                assert loaded["b"][1] == "text"
                assert loaded["n"] == number + 2


# --- a part of it --------------------------------------------------------------------------------


def test_a_program_that_evaluates_takes_the_model_alone(tmp_path: Path) -> None:
    loop = new_loop()
    loop.train(2)
    af.save_state(
        Context(), tmp_path / "at", {**loop.tree, "epoch": 3, "nested": {"a": torch.ones(2), "b": 1}}
    )
    model = new_loop().model
    with pytest.raises(CheckpointMismatchError, match="pass partial=True"):
        af.load_state(Context(), tmp_path / "at", {"model": model})
    loaded = af.load_state(
        Context(), tmp_path / "at", {"model": model, "nested": {"b": 0}}, partial=True, random_state=False
    )
    assert loaded == {"model": model, "nested": {"b": 1}}
    assert repr(model.state_dict()) == repr(loop.model.state_dict())


def test_only_the_parts_that_are_named_may_be_left_out(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"models": {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, "x": torch.ones(1)}
    af.save_state(Context(), tmp_path / "at", tree)
    like: dict[str, Any] = {"models": {"a": nn.Linear(1, 1)}}
    with pytest.raises(CheckpointMismatchError) as caught:
        af.load_state(Context(), tmp_path / "at", like, partial=["models/b"])
    assert [row.path for row in caught.value.rows] == ["x"]
    af.load_state(Context(), tmp_path / "at", like, partial=["models/b", "x", "nothing"])
    assert torch.equal(like["models"]["a"].weight, tree["models"]["a"].weight)
    with pytest.raises(CheckpointMismatchError, match="models/c") as caught:
        af.load_state(Context(), tmp_path / "at", {"models": {"c": nn.Linear(1, 1)}}, partial=True)
    assert "partial" not in str(caught.value).partition("\n")[0]
    with pytest.raises(TypeError, match="list of paths, got 'x'"):
        af.load_state(Context(), tmp_path / "at", like, partial="x")


def test_what_is_shared_with_a_part_that_is_left_out_comes_back(tmp_path: Path) -> None:
    model, generator = nn.Linear(2, 2), torch.Generator().manual_seed(3)
    first, rows = torch.arange(6.0), torch.arange(6.0)
    tree = {
        "one": {"model": model, "generator": generator, "rows": rows, "first": first},
        "two": {"model": model, "generator": generator, "rows": rows[2:4], "first": first},
    }
    af.save_state(Context(), tmp_path / "at", tree)
    fresh: dict[str, Any] = {
        "model": nn.Linear(2, 2),
        "generator": torch.Generator(),
        "rows": torch.zeros(2),
        "first": torch.zeros(6),
    }
    loaded: dict[str, Any] = af.load_state(Context(), tmp_path / "at", {"two": fresh}, partial=True)["two"]
    assert torch.equal(loaded["model"].weight, model.weight)
    assert torch.equal(loaded["generator"].get_state(), generator.get_state())
    assert loaded["rows"].tolist() == [2, 3]
    assert torch.equal(loaded["first"], first)


def test_of_what_is_left_out_no_byte_is_read(tmp_path: Path) -> None:
    at = af.save_state(Context(), tmp_path / "at", {"a": torch.zeros(4), "b": torch.ones(1000)})
    file = at / "tensors-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(torch.ones(1000).numpy().tobytes(), bytes(4000)))
    like = {"a": torch.ones(4)}
    assert torch.equal(af.load_state(Context(), at, like, partial=True)["a"], torch.zeros(4))
    with pytest.raises(DamagedCheckpointError):
        af.load_state(Context(), at, {**like, "b": torch.zeros(1000)})


def test_an_optimizer_of_another_class_is_refused_by_name(tmp_path: Path) -> None:
    loop = new_loop()
    loop.train(1)
    af.save_state(Context(), tmp_path / "at", loop.tree)
    other = new_loop(torch.optim.SGD, momentum=0.9)
    before = other.bits()
    with pytest.raises(CheckpointMismatchError) as caught:
        af.load_state(Context(), tmp_path / "at", other.tree)
    assert caught.value.rows == (Misfit("optimizer", "AdamW", "SGD"),)
    assert other.bits() == before


class Tied(nn.Module):
    """Two layers that may have one weight."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if is_tied:
            self.outer.weight = self.inner.weight


def test_weights_that_were_saved_apart_are_not_put_into_one(tmp_path: Path) -> None:
    apart = Tied(False)
    af.save_state(Context(), tmp_path / "at", {"model": apart})
    model = Tied(True)
    before = model.inner.weight.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    with pytest.raises(CheckpointMismatchError, match=r"tied to inner\.weight") as caught:
        af.load_state(Context(), tmp_path / "at", {"model": model})
    assert [row.path for row in caught.value.rows] == ["model/outer.weight"]
    assert model.inner.weight.tolist() == before  # pyright: ignore[reportUnknownMemberType]
    with torch.no_grad():
        apart.outer.weight.copy_(apart.inner.weight.fill_(float("nan")))  # equal bits, and NaN
    af.save_state(Context(), tmp_path / "at", {"model": apart})
    af.load_state(Context(), tmp_path / "at", {"model": model})
    assert model.outer.weight is model.inner.weight
    assert model.inner.weight.isnan().all()


@pytest.mark.parametrize("options", [{"keep": 3}, {"metric": torch.tensor(0.5)}, {"step": 1.5}])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_no_option_is_refused_by_name_before_anything_is_written(
    options: dict[str, Any], world: int, tmp_path: Path
) -> None:
    def save(ctx: Context) -> None:
        cast("Any", af.save_state)(ctx, tmp_path / "run", {"x": 1}, **options)

    with pytest.raises(TypeError, match=f"save_state: {next(iter(options))} must be"):
        run_ranks(save, world)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("metric", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_saves_a_checkpoint_without_one(metric: float, tmp_path: Path) -> None:
    run_ranks(lambda ctx: af.save_state(ctx, tmp_path / "run", {"x": 1}, metric=metric), 2)
    assert af.checkpoint.verify_checkpoint(tmp_path / "run").metric is None
