"""The order in which ``save_state`` and ``load_state`` do things, where another would lose something."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.checkpoint import Keep
from accelfn.checkpoint.commit import abandon, begin_save
from accelfn.checkpoint.disk import REAL_DISK, Disk
from accelfn.context import Context
from accelfn.errors import CheckpointError, RemoteRankError
from accelfn.testing import run_ranks
from tests.checkpoint.files.test_power_loss import reading
from tests.checkpoint.model_disk import Model, Operation, crashes, settled
from tests.checkpoint.watched_disk import installed, watched

ALL = "/runs/all"


def locked(disk: Disk) -> Disk:
    """Return a disk that ranks on threads use one at a time."""
    lock = threading.Lock()

    def alone(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with lock:
                return act(*arguments)

        return call

    acts = {one.name: getattr(disk, one.name) for one in fields(disk)}
    return replace(disk, **{name: alone(act) for name, act in acts.items() if callable(act)})


def save(model: Model, ranks: int, name: str, step: int, keep: Keep | None = None) -> None:
    def run(ctx: Context) -> None:
        tree = {"a": torch.tensor([step, 7]), "b": torch.full((3,), float(step))}
        af.save_state(ctx, f"{ALL}/{name}", tree, step=step, keep=keep)

    with installed(locked(model.disk())):
        run_ranks(run, ranks)
    model.log.append(Operation("acknowledged", 0))


def newest(model: Model, places: Sequence[str]) -> int | str | None:
    """Return the highest step on a disk; None for no checkpoint, a text for a torn one."""
    found = [reading(model, f"{ALL}/{place}") for place in places]
    torn = [one for one in found if isinstance(one, str)]
    return torn[0] if torn else max((one for one in found if isinstance(one, int)), default=None)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("before", "name", "keep"),
    [((), "a", None), (("a",), "a", None), (("a",), "b", Keep(last=1)), (("a", "b"), "c", Keep(last=2))],
    ids=["first", "replaced", "the other removed", "the oldest removed"],
)
def test_a_power_cut_at_any_instant_leaves_the_old_one_or_the_new_one(
    ranks: int, before: tuple[str, ...], name: str, keep: Keep | None
) -> None:
    model = Model()
    for step, one in enumerate(before, start=1):
        save(model, ranks, one, step)
    model = settled(model)
    save(model, ranks, name, 9, keep)
    found: set[int | str | None] = set()
    for end in range(len(model.log) + 1):
        done = any(one.kind == "acknowledged" for one in model.log[:end])
        for state in crashes(model.start, model.log[:end]):
            step = newest(state, ("a", "b", "c"))
            assert step == 9 or not done
            found.add(step)
    assert found == {9, len(before) or None}


def test_what_fails_on_one_rank_is_removed_when_the_others_write_no_more(tmp_path: Path) -> None:
    """In the background, where ranks don't meet: who fails at once waits for who is slow."""

    def run(ctx: Context) -> None:
        def watch(kind: str, path: str) -> None:
            if kind == "create" and "tensors-" in path:
                if ctx.rank == 0:
                    raise OSError(28, "full", path)
                time.sleep(0.3)

        with installed(watched(watch)):
            tree = {"a": torch.zeros(100), "b": torch.ones(100)}
            handle = af.save_state(ctx, tmp_path / "at", tree, True)
            with pytest.raises(OSError if ctx.rank == 0 else RemoteRankError, match="full"):
                handle.result()

    run_ranks(run, 2, on="processes")
    assert list(tmp_path.iterdir()) == []


def test_a_save_to_where_another_one_is_writing_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    af.save_tree(tmp_path / "at", {"step": 1})
    running = begin_save(REAL_DISK, tmp_path / "at")

    def save_in_background(ctx: Context) -> None:
        af.save_state(ctx, tmp_path / "at", {"step": 2}, True).result()

    def run(ctx: Context) -> None:
        with pytest.raises((CheckpointError, RemoteRankError), match="at is being written"):
            af.save_state(ctx, tmp_path / "at", {"step": 2})
        with pytest.raises((CheckpointError, RemoteRankError), match="at is being written"):
            save_in_background(ctx)

    run_ranks(run, 2)
    abandon(REAL_DISK, running)
    assert af.load_tree(tmp_path / "at") == {"step": 1}


class Refusing:
    """An object whose ``load_state_dict`` raises."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("it refuses")


@pytest.mark.parametrize("refusing", [0, 1])
def test_nothing_is_written_into_before_all_ranks_have_agreed(tmp_path: Path, refusing: int) -> None:
    def tree(value: float) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(int(value))
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        return {"free": nn.Parameter(torch.full((2,), value)), "generator": generator, "model": model}

    class Willing(Refusing):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def run(ctx: Context) -> None:
        af.save_state(ctx, tmp_path / "at", {**tree(1.0), "thing": Willing()})
        like: dict[str, Any] = {**tree(2.0), "thing": Refusing() if ctx.rank == refusing else Willing()}
        drawn = torch.get_rng_state()
        with pytest.raises((RuntimeError, RemoteRankError), match="it refuses"):
            af.load_state(ctx, tmp_path / "at", like)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert like["free"].tolist() == [2.0, 2.0]
        assert like["generator"].initial_seed() == 2
        assert torch.equal(like["generator"].get_state(), tree(2.0)["generator"].get_state())
        assert like["model"].weight.unique().tolist() == [2.0]

    run_ranks(run, 2, on="processes")


def test_the_same_tensor_comes_back_as_one_and_lies_there_once(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    path = af.save_tree(tmp_path / "at", {"one": base, "same": base.view_as(base), "turned": base.clone().T})
    loaded = cast("dict[str, torch.Tensor]", af.load_tree(path))
    assert loaded["turned"].stride() == (1, 3)
    assert torch.equal(loaded["turned"], base.T)
    loaded["one"][1, 0] = 9
    assert loaded["same"][1, 0] == 9
    assert af.verify_checkpoint(path).num_tensors == 2
