"""The adapters against stand-ins that have the documented interface of their packages.

So each of them runs everywhere. With the real packages, where these are installed: ``test_built_in.py``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from accelfn import Context
from accelfn.tracking import GeneralTracker, finish, get_tracker, init_trackers, log, log_images, log_table

pytest.importorskip("numpy")  # in which the packages take images


class Recorder:
    """Takes any call, and writes it down with the path on which it was reached."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], path: str = "") -> None:
        self.calls, self.path = calls, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(self.calls, f"{self.path}.{name}" if self.path else name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((self.path, args, kwargs))
        return Recorder(self.calls, f"{self.path}()")

    def __setitem__(self, name: str, value: Any) -> None:
        self.calls.append((f"{self.path}[]", (name, value), {}))


class Package(ModuleType):
    """A module whose attributes are recorders."""

    def __init__(self, name: str, **values: Any) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for key, value in values.items():
            setattr(self, key, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(self.calls, name)

    def of(self, path: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for one, args, kwargs in self.calls if one == path]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put_in_place(name: str, **values: Any) -> Package:
        package = Package(name, **values)
        monkeypatch.setitem(sys.modules, name, package)
        return package

    return put_in_place


def run(name: str, tmp_path: Any, *, tables: bool = True, **options: Any) -> GeneralTracker:
    """Log a little of everything."""
    ctx = Context().replace(project_dir=tmp_path)
    trackers = init_trackers(
        ctx,
        "digits",
        log_with=name,
        config={"lr": 0.1, "deep": {"a": 1}},
        init_kwargs={name: options},
        on_error="raise",
    )
    log(trackers, {"loss": torch.tensor(0.5), "note": "well", "both": {"a": 1}, "none": None}, step=3)
    log_images(trackers, {"faces": torch.zeros(2, 3, 4, 5)}, step=3)
    if tables:
        log_table(trackers, "rows", ["a", "b"], [[1, "x"]], step=3)
    tracker = get_tracker(trackers, name)
    finish(trackers)
    return tracker


CONFIG = {"lr": 0.1, "deep": {"a": 1}}
VALUES: dict[str, Any] = {"loss": 0.5, "note": "well", "both": {"a": 1}, "none": None}


def shapes(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[tuple[int, ...]]:
    return [args[0].shape for args, _ in calls]


def test_wandb(put: Any, tmp_path: Any) -> None:
    package = put("wandb")
    run("wandb", tmp_path, entity="us")
    assert package.of("init") == [((), {"project": "digits", "entity": "us"})]
    assert package.of("init().config.update") == [((CONFIG,), {"allow_val_change": True})]
    logged = package.of("init().log")
    assert logged[0] == ((VALUES,), {"step": 3})
    assert [list(args[0]) for args, _ in logged[1:]] == [["faces"], ["rows"]]
    assert shapes(package.of("Image")) == [(4, 5, 3)] * 2
    assert package.of("Table") == [
        ((), {"columns": ["a", "b"], "data": [[1, "x"]], "allow_mixed_types": True})
    ]
    assert package.of("init().finish") == [((), {})]


def test_trackio(put: Any, tmp_path: Any) -> None:
    package = put("trackio")
    run("trackio", tmp_path, group="one")
    assert package.of("init") == [((), {"project": "digits", "group": "one"})]
    assert package.of("init().config.update") == [((CONFIG,), {})]
    logged = package.of("init().log")
    assert logged[0] == ((VALUES,), {"step": 3})
    assert [list(args[0]) for args, _ in logged[1:]] == [["faces/0", "faces/1"], ["rows"]]
    assert package.of("init().finish") == [((), {})]


@pytest.mark.parametrize("begin", ["start", "Experiment"])
def test_comet_ml(begin: str, put: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = put("comet_ml")
    if begin == "Experiment":  # before version 3.41

        def older(self: Package, name: str) -> Any:
            if name.startswith("__") or name == "start":
                raise AttributeError(name)
            return Recorder(self.calls, name)

        monkeypatch.setattr(Package, "__getattr__", older)
    run("comet_ml", tmp_path, workspace="us")
    assert package.of(begin) == [((), {"project_name": "digits", "workspace": "us"})]
    made = f"{begin}()"
    assert package.of(f"{made}.log_parameters") == [((CONFIG,), {})]
    assert package.of(f"{made}.set_step") == [((3,), {})]
    assert package.of(f"{made}.log_metric") == [(("loss", 0.5), {"step": 3})]
    assert package.of(f"{made}.log_other") == [(("note", "well"), {})]
    assert package.of(f"{made}.log_metrics") == [(({"a": 1},), {"prefix": "both", "step": 3})]
    assert [args[0].size for args, _ in package.of(f"{made}.log_image")] == [(5, 4)] * 2
    table = package.of(f"{made}.log_table")
    assert table == [(("rows.csv",), {"tabular_data": [[1, "x"]], "headers": ["a", "b"]})]
    assert package.of(f"{made}.end") == [((), {})]


def test_aim(put: Any, tmp_path: Any) -> None:
    package, pillow = put("aim"), put("PIL.Image")
    with pytest.warns(UserWarning, match="aim can't log a value of type dict; skipping 'both'"):
        tracker = run("aim", tmp_path, tables=False, experiment="one")
    assert package.of("Run") == [((), {"repo": str(tmp_path), "experiment": "one"})]
    assert tracker.tracker.name == "digits"
    assert package.of("Run()[]") == [(("hparams", CONFIG), {})]
    tracked = package.of("Run().track")
    assert tracked[0] == ((0.5,), {"name": "loss", "step": 3})
    assert [kwargs["name"] for _, kwargs in tracked] == ["loss", "note", "faces", "faces"]
    assert shapes(pillow.of("fromarray")) == [(4, 5, 3)] * 2
    assert package.of("Text") == [(("well",), {})]
    assert package.of("Run().close") == [((), {})]
    tracker.log_images(
        {"face": (torch.zeros(2, 2), "mine"), "other": torch.zeros(2, 2)},
        step=4,
        aim_image={"quality": 50},
        track={"context": {"subset": "eval"}},
    )
    assert [kwargs for _, kwargs in package.of("Image")[-2:]] == [
        {"quality": 50, "caption": "mine"},
        {"quality": 50},
    ]
    last = package.of("Run().track")[-1][1]
    assert last == {"name": "other", "step": 4, "context": {"subset": "eval"}}


def test_mlflow(put: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXPERIMENT_NAME", "RUN_ID", "TAGS", "NESTED_RUN"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    missing: list[str] = []
    package = put("mlflow", get_experiment_by_name=missing.append)
    put("mlflow.utils")
    put("mlflow.utils.validation", MAX_PARAM_VAL_LENGTH=500)
    with pytest.warns(UserWarning, match="mlflow can't log a value of type str; skipping 'note'"):
        run("mlflow", tmp_path, logging_dir="files", tags={"a": "b"}, run_name="one")
    assert missing == ["digits"]
    made = package.of("create_experiment")
    assert made == [(("digits",), {"artifact_location": "files", "tags": {"a": "b"}})]
    ((_, begun),) = package.of("start_run")
    assert (begun["run_id"], begun["run_name"], begun["nested"], begun["tags"]) == (
        None,
        "one",
        False,
        {"a": "b"},
    )
    assert package.of("log_params") == [(({"lr": 0.1, "deep/a": 1},), {})]
    assert package.of("log_metrics") == [(({"loss": 0.5, "both/a": 1},), {"step": 3})]
    files = [kwargs["artifact_file"] for _, kwargs in package.of("log_image")]
    assert files == ["images/faces-3-0.png", "images/faces-3-1.png"]
    assert package.of("log_table") == [(({"a": [1], "b": ["x"]},), {"artifact_file": "rows.json"})]
    assert package.of("end_run") == [((), {})]


def test_variables_win_over_arguments_of_mlflow(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = put("mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    monkeypatch.setenv("MLFLOW_RUN_ID", "run-1")
    monkeypatch.setenv("MLFLOW_TAGS", '{"a": 1}')
    monkeypatch.setenv("MLFLOW_NESTED_RUN", "true")
    init_trackers(
        Context(),
        "ours",
        log_with="mlflow",
        init_kwargs={"mlflow": {"run_id": "x", "tags": {"b": 2}, "nested_run": False}},
        on_error="raise",
    )
    assert package.of("get_experiment_by_name") == [(("theirs",), {})]
    ((_, begun),) = package.of("start_run")
    assert (begun["run_id"], begun["tags"], begun["nested"]) == ("run-1", {"a": 1}, True)


def test_clearml(put: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARML_TASK", "task of the variable")
    package = put("clearml")
    task: Any = Recorder(package.calls, "Task")
    task.current_task = lambda: None
    package.Task = task
    with pytest.warns(UserWarning, match="clearml can't log a value of type str; skipping 'note'"):
        tracker = run("clearml", tmp_path, output_uri=False)
    named = {"project_name": "digits", "task_name": "task of the variable", "output_uri": False}
    assert package.of("Task.init") == [((), named)]
    assert package.of("Task.init().connect_configuration") == [((CONFIG,), {})]
    logger = "Task.init().get_logger()"
    assert package.of(f"{logger}.report_scalar") == [
        ((), {"title": title, "series": "train", "value": value, "iteration": 3})
        for title, value in (("loss", 0.5), ("both/a", 1))
    ]
    assert [one["series"] for _, one in package.of(f"{logger}.report_image")] == ["train 0", "train 1"]
    ((_, table),) = package.of(f"{logger}.report_table")
    assert table["table_plot"] == [["a", "b"], [1, "x"]]
    tracker.log({"eval_loss": 2.0}, step=None)
    assert package.of(f"{logger}.report_single_value") == [((), {"name": "eval_loss", "value": 2.0})]
    tracker.log({"eval_loss": 2.0}, step=4)
    assert package.of(f"{logger}.report_scalar")[-1][1]["series"] == "eval"
    assert package.of("Task.init().close") == [((), {})]


def test_a_task_of_clearml_that_is_at_work_stays_open(put: Any, tmp_path: Any) -> None:
    package = put("clearml")
    with pytest.warns(UserWarning, match="clearml can't log a value of type str"):
        run("clearml", tmp_path)
    assert package.of("Task.init") == []
    assert package.of("Task.current_task().close") == []


def test_dvclive(put: Any, tmp_path: Any) -> None:
    package = put("dvclive")
    tracker = run("dvclive", tmp_path, tables=False, dir="here")
    assert package.of("Live") == [((), {"dir": "here"})]
    assert package.of("Live().log_params") == [((CONFIG,), {})]
    assert package.of("Live().log_metric") == [
        (("loss", 0.5), {}),
        (("note", "well"), {}),
        (("both/a", 1), {}),
    ]
    assert tracker.tracker.step == 3
    assert len(package.of("Live().next_step")) == 1
    assert [args[0] for args, _ in package.of("Live().log_image")] == ["faces-0.png", "faces-1.png"]
    assert package.of("Live().end") == [((), {})]


def test_swanlab(put: Any, tmp_path: Any) -> None:
    package = put("swanlab")
    run("swanlab", tmp_path, tables=False, mode="offline")
    assert package.of("init") == [((), {"project": "digits", "mode": "offline"})]
    assert package.of("config.update") == [(({"FRAMEWORK": "accelfn"},), {}), ((CONFIG,), {})]
    ((values, _), (images, _)) = package.of("init().log")
    assert list(values[0]) == ["loss", "note", "both/a"]
    assert list(images[0]) == ["faces"]
    assert package.of("Text") == [(("well",), {})]
    assert package.of("init().finish") == [((), {})]


@pytest.mark.parametrize("name", ["aim", "dvclive", "swanlab"])
def test_trackers_without_tables_warn(name: str, put: Any, tmp_path: Any) -> None:
    put(name)
    trackers = init_trackers(Context().replace(project_dir=tmp_path), "digits", log_with=name)
    with pytest.warns(UserWarning, match=f"'{name}' failed in log_table.*doesn't support tables"):
        log_table(trackers, "rows", ["a"], [[1]])
