"""The state of a run: saved by all ranks as one checkpoint, loaded completely or not at all."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR

import accelfn as af
from accelfn.context import Context
from accelfn.errors import (
    CheckpointMismatchError,
    DamagedCheckpointError,
    Misfit,
    MismatchError,
    MissingRankError,
    NoCheckpointError,
    RemoteRankError,
)
from accelfn.testing import run_ranks
from accelfn.training import StepState
from accelfn.weights.write import SUMS
from tests.checkpoint.layouts import step
from tests.checkpoint.printed import text
from tests.checkpoint.small import Stateful
from tests.checkpoint.weights.models import tied

NOTHING: dict[str, Any] = {}


def trained(
    steps: int, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> dict[str, Any]:
    """Return a run after some steps."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = make(model.parameters(), lr=0.1, **options)
    return go_on({"model": model, "optimizer": optimizer, "schedule": StepLR(optimizer, 2)}, steps)


def go_on(run: dict[str, Any], steps: int) -> dict[str, Any]:
    for _ in range(steps):
        step(run["model"], run["optimizer"])
        run["schedule"].step()
    return run


def bits(run: dict[str, Any]) -> str:
    return text([part.state_dict() if hasattr(part, "state_dict") else part for part in run.values()])


# test_sharded and test_resume have those of layouts.OPTIMIZERS.
OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_training_goes_on_bit_for_bit(
    tmp_path: Path, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    first, second = trained(3, make, **options), trained(0, make, **options)
    af.save_state(Context(), tmp_path / "at", first)
    loaded = af.load_state(Context(), tmp_path / "at", second)
    assert loaded["model"] is second["model"]
    assert loaded["optimizer"] is second["optimizer"]
    assert bits(go_on(second, 4)) == bits(go_on(first, 4))


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
    like: dict[str, Any] = dict(zip(tree, (af.init_scaler(Context()), 0, [], None, fresh), strict=True))
    loaded = af.load_state(Context(), tmp_path / "at", like)
    assert isinstance(loaded["scaler"], StepState)
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
    with pytest.raises(ValueError, match="save_state: this StepState was superseded"):
        af.save_state(Context(), tmp_path / "at", {"scaler": scaler})


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
        zeros = torch.zeros(1000, dtype=torch.int64)
        like: dict[str, Any] = {"same": zeros, "own": zeros[:3].clone(), "rank": 9}
        return af.load_state(ctx, tmp_path / "at", like)

    for rank, loaded in enumerate(run_ranks(save, 4)):
        assert torch.equal(loaded["same"], torch.arange(1000))
        assert loaded["own"].tolist() == [rank // 2] * 3
        assert loaded["rank"] == rank
    stored: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "at").glob("*.safetensors")):
        found = load_file(file)
        del found[SUMS]
        assert not stored.keys() & found.keys()
        stored.update(found)
    assert {name for name in stored if not name.startswith("#")} == {"same", "own", "own@2"}


# --- what does not fit ---------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    af.save_state(Context(), tmp_path / "at", {**trained(2), "extra": torch.zeros(2), "ema": torch.ones(3)})
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).double(), nn.Linear(6, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    like = {"model": model, "optimizer": optimizer, "schedule": StepLR(optimizer, 2), "ema": torch.ones(4)}
    before = bits(like)
    with pytest.raises(CheckpointMismatchError) as caught:
        af.load_state(Context(), tmp_path / "at", {**like, "missing": nn.Linear(1, 1)})
    rows = {row.path: row[1:] for row in caught.value.rows}
    assert rows["model/2.weight"] == ("float32 [2, 6]", "float32 [3, 6]")
    assert rows["model/2.bias"] == ("float32 [2]", "nothing")
    assert rows["model/1.weight"] == ("float32 [6]", "float64 [6]")
    assert rows["optimizer/groups/0"] == ("parameter model/2.bias", "nothing")
    assert {"ema", "extra", "missing"} <= rows.keys()
    assert bits(like) == before


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


class Refusing(Stateful):
    """Refuses a state once, and takes up its old one then."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, refuses = state["value"], self.value != "refused"
        if refuses:
            self.value = "refused"
            raise RuntimeError("this object refuses")


@pytest.mark.parametrize("refusing", [0, 1])
def test_an_object_that_refuses_on_one_rank_leaves_all_ranks_as_they_were(
    tmp_path: Path, refusing: int
) -> None:
    def run(ctx: Context) -> None:
        def tree(steps: int, last: Stateful) -> dict[str, Any]:
            torch.manual_seed(steps)  # pyright: ignore[reportUnknownMemberType]
            free, generator = nn.Parameter(torch.ones(2) * steps), torch.Generator().manual_seed(steps)
            return {**trained(steps), "free": free, "random": generator, "a": Stateful(steps), "b": last}

        def all_bits() -> str:
            return bits({**like, "random": like["random"].get_state(), "own": torch.get_rng_state()})

        af.save_state(ctx, tmp_path / "at", tree(2, Stateful(5)))
        like = tree(1, (Refusing if ctx.rank == refusing else Stateful)(1))
        before = all_bits()
        kind = RuntimeError if ctx.rank == refusing else RemoteRankError
        with pytest.raises(kind, match="this object refuses"):
            af.load_state(ctx, tmp_path / "at", like)
        assert all_bits() == before

    run_ranks(run, 2, on="processes")


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"directory": "other"}, MismatchError, "directory"),
        ({"allow_drift": True}, MismatchError, "allow_drift"),
        ({"tree": {"bad": object()}}, TypeError, "bad"),
        ({"keep": 3}, TypeError, "save_state: keep must be"),
        ({"metric": torch.tensor(0.5)}, TypeError, "save_state: metric must be"),
        ({"step": 1.5}, TypeError, "save_state: step must be"),
    ],
)
def test_what_one_rank_does_otherwise_is_an_error_on_all_and_nothing_is_written(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    def run(ctx: Context) -> None:
        given: dict[str, Any] = {"directory": "at", "tree": {"x": 1}, **(options if ctx.rank else {})}
        given["directory"] = tmp_path / given["directory"]
        kinds = error if ctx.rank else (error, RemoteRankError)
        with pytest.raises(kinds, match=message):
            cast("Any", af.save_state)(ctx, **given)

    run_ranks(run, 2)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [1, 2])
def test_there_is_nothing_to_load(size: int, tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        with pytest.raises(NoCheckpointError, match="no such directory"):
            af.load_state(ctx, tmp_path / "at", NOTHING)

    run_ranks(run, size)


# --- a part of it --------------------------------------------------------------------------------


def test_a_program_that_evaluates_takes_the_model_alone(tmp_path: Path) -> None:
    saved, model = trained(2), trained(0)["model"]
    others = {"epoch": 3, "nested": {"a": torch.ones(2), "b": 1}}
    at = af.save_state(Context(), tmp_path / "at", {**saved, **others})
    with pytest.raises(CheckpointMismatchError, match="pass partial=True"):
        af.load_state(Context(), at, {"model": model})
    like = {"model": model, "nested": {"b": 0}}
    assert af.load_state(Context(), at, like, partial=True, random_state=False)["nested"] == {"b": 1}
    assert bits({"model": model}) == bits({"model": saved["model"]})


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
    fresh: dict[str, Any] = {"model": nn.Linear(2, 2), "generator": torch.Generator()}
    fresh.update(rows=torch.zeros(2), first=torch.zeros(6))
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
    af.save_state(Context(), tmp_path / "at", trained(1))
    other = trained(1, torch.optim.SGD, momentum=0.9)
    before = bits(other)
    with pytest.raises(CheckpointMismatchError) as caught:
        af.load_state(Context(), tmp_path / "at", other)
    assert caught.value.rows == (Misfit("optimizer", "AdamW", "SGD"),)
    assert bits(other) == before


def test_weights_that_were_saved_apart_are_not_put_into_one(tmp_path: Path) -> None:
    apart, model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"}), tied()
    af.save_state(Context(), tmp_path / "at", {"model": apart})
    before = bits({"model": model})
    with pytest.raises(CheckpointMismatchError, match=r"tied to a\.weight") as caught:
        af.load_state(Context(), tmp_path / "at", {"model": model})
    assert [row.path for row in caught.value.rows] == ["model/b.weight"]
    assert bits({"model": model}) == before
    with torch.no_grad():
        for weight in apart.parameters():  # equal bits, and NaN
            weight.fill_(float("nan"))
    af.save_state(Context(), tmp_path / "at", {"model": apart})
    af.load_state(Context(), tmp_path / "at", {"model": model})
    assert model["b"].weight is model["a"].weight
    assert model.get_parameter("a.weight").isnan().all()


@pytest.mark.parametrize("metric", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_saves_a_checkpoint_without_one(metric: float, tmp_path: Path) -> None:
    run_ranks(lambda ctx: af.save_state(ctx, tmp_path / "run", {"x": 1}, metric=metric), 2)
    assert af.checkpoint.verify_checkpoint(tmp_path / "run").metric is None
