"""Trackers as functions: who acts, what they get, and what happens when one fails."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves open what tolist gives.

import argparse
import dataclasses
import enum
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, call

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context
from accelfn.errors import ConfigurationError, MissingExtraError, NotAvailableError, RemoteRankError
from accelfn.testing import run_ranks
from accelfn.tracking import (
    BlankTracker,
    DVCLiveTracker,
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackerPlan,
    WandBTracker,
    finish,
    get_tracker,
    init_trackers,
    log,
    log_images,
    log_table,
    plain_config,
    plan_trackers,
)


class Memory(GeneralTracker):
    """Remembers every call."""

    name = "memory"
    requires_logging_directory = False

    def __init__(self, project_name: str = "", **options: Any) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = [("built", project_name, options)]

    def note(self, kind: str, *given: Any) -> None:
        self.calls.append((kind, *given))

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.calls

    def start(self) -> None:
        self.note("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.note("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.note("log", values, step, kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.note("images", list(values), step)

    def log_table(self, table_name: str, *given: Any, **kwargs: Any) -> None:
        columns, data, _, step = given
        self.note("table", table_name, columns, data, step)

    def finish(self) -> None:
        self.note("finish")


class Everywhere(Memory):
    name = "everywhere"
    main_process_only = False


class Broken(Memory):
    """Fails in the calls that ``breaks`` names."""

    name = "broken"

    def __init__(self, project_name: str = "", breaks: tuple[str, ...] = ("log",)) -> None:
        super().__init__(project_name)
        self.breaks = breaks

    def note(self, kind: str, *given: Any) -> None:
        if kind in self.breaks:
            raise ConnectionError(f"no network in {kind}")
        super().note(kind, *given)


def kinds(tracker: Any) -> list[str]:
    return [call[0] for call in tracker.calls]


# --- a run ---------------------------------------------------------------------------------------


def test_an_instance_is_taken_as_it_is_and_gets_every_call_in_order() -> None:
    memory = Memory("mine", color="red")
    trackers = init_trackers(Context(), "project", log_with=memory, config={"lr": 0.1})
    log(trackers, {"loss": torch.tensor(0.5)}, step=3, log_kwargs={"memory": {"commit": True}})
    log_images(trackers, {"faces": torch.zeros(2, 2)}, step=3)
    log_table(trackers, "rows", ["a", "b"], [[1, torch.tensor(2)]], step=4)
    finish(trackers)
    finish(trackers)
    with pytest.raises(ConfigurationError, match="log: the trackers are finished"):
        log(trackers, {"a": 1})
    assert memory.calls == [
        ("built", "mine", {"color": "red"}),
        ("start",),
        ("config", {"lr": 0.1}),
        ("log", {"loss": 0.5}, 3, {"commit": True}),
        ("images", ["faces"], 3),
        ("table", "rows", ["a", "b"], [[1, 2]], 4),
        ("finish",),
    ]


def test_a_class_is_built_with_the_project_and_its_arguments() -> None:
    options = {"memory": {"color": "red"}}
    trackers = init_trackers(Context(), "project", log_with=[Memory], init_kwargs=options)
    memory = get_tracker(trackers, "memory")
    assert isinstance(memory, Memory)
    assert memory.calls[0] == ("built", "project", {"color": "red"})
    assert get_tracker(trackers, "memory", unwrap=True) is memory.calls


def test_a_class_that_requires_a_directory_gets_the_one_of_the_context(tmp_path: Path) -> None:
    class Filed(Memory):
        name = "filed"
        requires_logging_directory = True

    ctx = Context().replace(project_dir=tmp_path, log_with=Filed)
    memory = get_tracker(init_trackers(ctx, "project"), "filed")
    assert memory.calls[0] == ("built", "project", {"logging_dir": str(tmp_path)})
    with pytest.raises(ConfigurationError, match="'filed' needs a directory"):
        init_trackers(Context(), "project", log_with=Filed)


def test_all_are_started_before_any_gets_the_configuration() -> None:
    order: list[str] = []

    class First(Memory):
        def note(self, kind: str, *given: Any) -> None:
            order.append(f"{kind} {self.name}")

    class Second(First):
        name = "second"

    init_trackers(Context(), "project", log_with=[First, Second], config={})
    assert order == ["start memory", "start second", "config memory", "config second"]


def test_the_main_process_acts_and_others_return_at_once() -> None:
    def run(ctx: Context) -> tuple[list[str], bool, tuple[str, ...], int]:
        trackers = init_trackers(ctx, "project", log_with=[Memory, Everywhere], config={"a": 1})
        log(trackers, {"rank": ctx.rank}, step=0)
        finish(trackers)
        memory, everywhere = get_tracker(trackers, "memory"), get_tracker(trackers, "everywhere")
        seen = everywhere.calls[3][1]["rank"]
        return kinds(memory) if ctx.rank == 0 else [], isinstance(memory, BlankTracker), trackers.names, seen

    found = run_ranks(run, 3)
    names = ("memory", "everywhere")
    calls = ["built", "start", "config", "log", "finish"]
    assert found == [(calls, False, names, 0), ([], True, names, 1), ([], True, names, 2)]


class Untouchable:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_nothing_communicates_and_values_are_touched_only_where_a_tracker_acts() -> None:
    def run(ctx: Context) -> int:
        trackers = init_trackers(ctx, "project", log_with=Memory)
        if ctx.is_main_process:  # alone
            log(trackers, {"a": 1})
            finish(trackers)
        else:
            log(trackers, {"a": Untouchable()})
            log_images(trackers, {"a": Untouchable()})
        return int(af.reduce(ctx, torch.ones(())))

    assert run_ranks(run, 2) == [2, 2]


def test_a_stand_in_takes_what_runs_of_packages_take_beside_calls() -> None:
    blank = BlankTracker("wandb")
    run = blank.tracker
    run.summary["best"] = 1
    run.name = "renamed"
    with run.context("validation") as inside:
        assert inside["loss"] is blank
    with pytest.raises(ValueError, match="of the user"), run.context():
        raise ValueError("of the user")
    assert (list(run.scan_history()), "best" in run.summary, bool(run)) == ([], False, False)
    assert run.dir / "images" is blank
    with pytest.raises(AttributeError):
        blank.__wrapped__  # noqa: B018 -- what inspect looks for


# --- what is chosen ------------------------------------------------------------------------------


def names(log_with: Any, directory: str | None = None, there: tuple[str, ...] = ()) -> tuple[str, ...]:
    return plan_trackers(log_with, directory, installed=lambda one: one.name in (*there, "jsonl")).names


def test_all_means_what_is_installed_and_skips_with_a_note_what_lacks_a_directory() -> None:
    there = ("tensorboard", "wandb", "aim")
    plan = plan_trackers("all", installed=lambda one: one.name in there)
    assert plan.names == ("wandb",)
    assert [note.split()[0] for note in plan.skipped] == ["aim", "tensorboard"]
    assert names("all", "runs", there) == ("jsonl", "aim", "tensorboard", "wandb")
    mixed = names(["all", "wandb", Memory()], "runs", there)
    assert mixed == ("wandb", "memory", "jsonl", "aim", "tensorboard")
    mine: Any = type("Mine", (Memory,), {"name": "wandb"})  # a class with the name of a built-in one
    assert plan_trackers(["all", mine], installed=lambda one: one.name == "wandb").chosen == (mine,)


def test_notes_on_all_are_printed_once_on_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: object) -> TrackerPlan:
        return TrackerPlan(chosen=(Memory,), skipped=("aim writes to a directory",))

    monkeypatch.setattr("accelfn.tracking.trackers.plan_trackers", plan)
    with pytest.warns(UserWarning, match='log_with="all": aim writes') as caught:
        run_ranks(lambda ctx: init_trackers(ctx, "project").names, 2)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("log_with", "error", "message"),
    [
        ("tensorbord", ConfigurationError, "there is no tracker 'tensorbord'. Did you mean 'tensorboard'"),
        (["jsonl", "nothing like it"], ConfigurationError, "Known are all, jsonl, aim, "),
        ("wandb", MissingExtraError, "needs wandb, which isn't installed. Run: pip install wandb"),
        ("tensorboard", MissingExtraError, "tensorboard or tensorboardX.* pip install tensorboard"),
        ("aim", MissingExtraError, r"pip install 'aim<4'"),
        ([Memory, Memory()], ConfigurationError, "several trackers with the name memory"),
        (3, TypeError, "subclasses of accelfn.tracking.GeneralTracker, got int"),
        (dict, TypeError, "got dict"),
    ],
)
def test_invalid_log_with_is_refused(log_with: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        names(log_with)
    for nothing in (None, (), []):
        assert names(nothing) == ()


def test_attributes_that_are_missing_are_named() -> None:
    class Half(GeneralTracker):
        name = "half"

    class Bare(GeneralTracker):
        def __init__(self) -> None: ...

    with pytest.raises(NotImplementedError, match="Half lacks requires_logging_directory, tracker"):
        Half()
    with pytest.raises(NotImplementedError, match="Bare lacks name, requires_logging_dir"):
        plan_trackers(Bare())
    with pytest.raises(NotImplementedError, match="Half lacks"):
        plan_trackers(Half)


def test_arguments_for_a_tracker_that_is_not_chosen_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="init_kwargs: this run has no tracker 'wandb', only memory"):
        init_trackers(Context(), "project", log_with=Memory, init_kwargs={"wandb": {}})
    trackers = init_trackers(Context(), "project", log_with=Memory)
    with pytest.raises(ConfigurationError, match="log_kwargs: this run has no tracker 'wandb'"):
        log(trackers, {}, log_kwargs={"wandb": {}})
    with pytest.raises(ConfigurationError, match="get_tracker: this run has no tracker 'wandb'"):
        get_tracker(trackers, "wandb")
    with pytest.raises(ValueError, match="on_error must be"):
        init_trackers(Context(), "project", log_with=Memory, on_error=cast("Any", "ignore"))


@pytest.mark.parametrize("step", [torch.tensor(7), torch.tensor([7]), True])
def test_a_step_of_another_package_is_a_number(step: Any) -> None:
    memory = Memory()
    trackers = init_trackers(Context(), "project", log_with=memory)
    log(trackers, {"a": 1}, step=step)
    log_images(trackers, {}, step=step)
    log_table(trackers, "t", data=[[1]], step=step)
    steps = [memory.calls[-3][2], memory.calls[-2][2], memory.calls[-1][4]]
    assert steps == [int(step)] * 3


def test_a_table_has_rows_that_fit_its_columns() -> None:
    trackers = init_trackers(Context(), "project", log_with=Memory)
    with pytest.raises(ValueError, match="needs either data or a dataframe"):
        log_table(trackers, "t")
    with pytest.raises(ValueError, match=r"must have 2 cells.*row 1 has 1"):
        log_table(trackers, "t", ["a", "b"], [[1, 2], [3]])
    for data in (torch.ones(2, 1), iter([[1.0], (torch.tensor(1.0),)])):  # from anything
        log_table(trackers, "t", ["a"], cast("Any", data))
        assert get_tracker(trackers, "memory", unwrap=True)[-1][3] == [[1.0], [1.0]]


# --- a tracker that fails ------------------------------------------------------------------------


def test_a_failing_tracker_warns_once_and_the_others_continue() -> None:
    memory, broken, down = Memory(), Broken(breaks=("config", "log", "finish")), Broken(breaks=("start",))
    with pytest.warns(UserWarning, match="'broken' failed in start.*continues without it"):
        trackers = init_trackers(Context(), "project", log_with=[down, Memory()])
    assert (len(trackers.active), kinds(down)) == (1, ["built"])
    assert isinstance(get_tracker(trackers, "broken"), BlankTracker)
    with pytest.warns(UserWarning, match="'broken' failed in store_init_.*ConnectionError: no net") as caught:  # noqa: PT031 -- the number of warnings of all of it is the point
        trackers = init_trackers(Context(), "project", log_with=[broken, memory], config={"a": 1})
        for step in range(3):
            log(trackers, {"a": step}, step=step)
        finish(trackers)
    assert len(caught) == 1
    assert Path(caught[0].filename).name == Path(__file__).name
    assert trackers.failures == {"broken": 5}
    assert kinds(memory) == ["built", "start", "config", "log", "log", "log", "finish"]


def test_wrong_arguments_of_a_tracker_are_an_error_on_every_rank() -> None:
    def run(ctx: Context) -> str:
        try:
            init_trackers(ctx, "project", log_with=Broken, init_kwargs={"broken": {"brakes": ()}})
            af.wait_for_everyone(ctx)
        except (TypeError, RemoteRankError) as error:
            return type(error).__name__
        return "nothing"

    assert run_ranks(run, 2) == ["TypeError", "RemoteRankError"]


def test_where_it_is_asked_for_a_failure_is_every_ranks() -> None:
    def run(ctx: Context) -> str:
        trackers = init_trackers(ctx, "project", log_with=[Broken(), Memory()], on_error="raise")
        try:
            log(trackers, {"a": 1})
            af.wait_for_everyone(ctx)
        except RemoteRankError as error:
            return f"{error.rank} {error.cause} {error.operation}"
        except ConnectionError:
            return kinds(get_tracker(trackers, "memory"))[-1]
        return "nothing"

    assert run_ranks(run, 2) == ["log", "0 ConnectionError tracker.log"]


def test_unsupported_values_are_reported_once() -> None:
    class Plain(GeneralTracker):
        name = "plain"
        requires_logging_directory = False
        tracker = "behind"  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    trackers = init_trackers(Context(), "project", log_with=Plain)
    with pytest.warns(UserWarning, match="'plain' doesn't support images") as caught:  # noqa: PT031 -- of both
        log_images(trackers, {"a": torch.zeros(1, 1)})
        log_table(trackers, "t", ["a"], [[1]])
    assert len(caught) == 1
    strict = init_trackers(Context(), "project", log_with=Plain, on_error="raise")
    with pytest.raises(NotAvailableError, match="doesn't support tables"):
        log_table(strict, "t", ["a"], [[1]])


# --- values --------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@given(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES), st.integers(0, 999))
def test_a_tensor_of_one_element_is_a_number_and_others_are_lists(
    shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    one = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)
    found = af.tracking.read_numbers({"deep": {"a": one}})["deep"]["a"]
    assert found == (one.item() if one.numel() == 1 else one.tolist())


def test_other_values_stay_unchanged() -> None:
    values = {"a": None, "b": "x", "c": [1, 2.5], "d": numpy.float32(0.5), "e": numpy.arange(2), "f": (True,)}
    found = af.tracking.read_numbers(values)
    assert found == {"a": None, "b": "x", "c": [1, 2.5], "d": 0.5, "e": [0, 1], "f": [True]}
    assert type(found["d"]) is float


def test_a_sharded_tensor_is_refused_by_its_name_and_the_rest_of_the_step_is_logged() -> None:
    def run(ctx: af.Context) -> list[float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (ctx.num_processes,))
        spread = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
        with pytest.raises(NotAvailableError, match=r"'norms/0' is sharded.*full_tensor"):
            af.tracking.read_numbers({"norms": [spread]})
        memory = Memory()
        trackers = init_trackers(ctx, "project", log_with=memory)
        if ctx.is_main_process:
            with pytest.warns(UserWarning, match="the value 'norms' failed in log"):
                log(trackers, {"norms": [spread], "loss": 0.5}, step=1)
            assert memory.calls[-1] == ("log", {"loss": 0.5}, 1, {})
        return af.tracking.read_numbers({"norms": distribute_tensor(torch.ones(2), mesh, [Replicate()])})[
            "norms"
        ]

    assert run_ranks(run, 2, on="processes") == [[1, 1]] * 2


class Mode(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass
class Options:
    path: Path
    mode: Mode = Mode.FAST


def test_a_configuration_becomes_plain() -> None:
    config = argparse.Namespace(options=Options(Path("a/b")), kinds={"b", "a"}, size=torch.ones(2), f=len)
    assert plain_config(config) == {
        "options": {"path": "a/b", "mode": "fast"},
        "kinds": ["a", "b"],
        "size": [1.0, 1.0],
        "f": "<built-in function len>",
    }
    with pytest.raises(TypeError, match=r"config must be a mapping.*got list"):
        plain_config([1])


# --- the context ---------------------------------------------------------------------------------


def test_the_context_keeps_what_is_asked_for() -> None:
    memory = Memory()
    ctx = Context().replace(log_with=["WandB", memory, "wandb"])
    assert ctx.log_with == ("wandb", memory)
    assert ctx.replace(mixed_precision="bf16").log_with == ctx.log_with
    assert ctx.replace(log_with=[]).log_with == ()
    assert pickle.loads(pickle.dumps(ctx)).log_with == ("wandb",)  # it travels with the names alone
    with pytest.raises(ConfigurationError, match="Did you mean 'mlflow'"):
        Context().replace(log_with="mlfow")


def test_without_any_word_a_run_goes_into_json_lines(tmp_path: Path) -> None:
    trackers = init_trackers(Context().replace(project_dir=tmp_path), "digits")
    finish(trackers)
    assert trackers.names == ("jsonl",)
    assert [path.name for path in tmp_path.glob("digits/*/*")] == ["events.jsonl"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Fail on warnings that no test expects, wherever they are raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_can_not_be_logged_is_refused_and_nothing_is_kept() -> None:
    trackers = init_trackers(Context(), "run", log_with=(memory := Memory()))
    for values, step, message in (
        ([1, 2], None, "log: values must be a mapping of names to values, got list"),
        ({"a": 1}, 1.5, "log: step must be an integer or None, got 1.5"),
    ):
        with pytest.raises(TypeError, match=message):
            log(trackers, cast("Any", values), cast("Any", step))
    assert kinds(memory) == ["built", "start"]


# --- the built-in ones, without their packages ----------------------------------------------------


def test_mlflow_tags_are_json() -> None:
    assert MLflowTracker("x", tags='{"a": 1}').tags == {"a": 1}
    for tags in ("{", "[1]"):
        with pytest.raises(ConfigurationError, match="tags must be a JSON object"):
            MLflowTracker("x", tags=tags)


def test_dvclive_takes_one_that_is_there() -> None:
    live = Mock()
    trackers = init_trackers(Context(), "digits", log_with=DVCLiveTracker(live=live), on_error="raise")
    log(trackers, {"loss": 0.5, "x": {"y": "z"}}, step=4)
    finish(trackers)
    assert live.step == 4
    metrics = [call.log_metric("loss", 0.5), call.log_metric("x/y", "z")]
    assert live.mock_calls == [*metrics, call.next_step(), call.end()]


def test_a_package_that_is_gone_when_it_is_needed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoardTracker, "modules", ("no_such_package",))
    with pytest.raises(MissingExtraError, match="needs no_such_package, which isn't installed"):
        TensorBoardTracker("x", "y").start()


def test_a_folder_that_a_run_left_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_by_a_run").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(WandBTracker, "modules", ("left_by_a_run",))
    assert not WandBTracker.is_installed()
