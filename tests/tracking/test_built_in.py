"""The adapters with their real packages, offline, and what was logged read back from where they put it.

Each test is skipped where the package isn't installed.
"""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from accelfn import Context
from accelfn.errors import NotAvailableError
from accelfn.tracking import (
    TensorBoardTracker,
    Trackers,
    finish,
    get_tracker,
    init_trackers,
    log,
    log_images,
    log_table,
)
from tests.launch.processes import ROOT

# What the packages warn of is theirs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CONFIG: dict[str, Any] = {"lr": 0.1, "model": {"layers": 2, "name": "mlp"}, "sizes": [64, 10], "seed": None}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def begin(name: str, folder: Path | None = None, **options: Any) -> Trackers:
    ctx = Context() if folder is None else Context().replace(project_dir=folder)
    return init_trackers(
        ctx, "digits", log_with=name, config=CONFIG, init_kwargs={name: options}, on_error="raise"
    )


def log_steps(trackers: Trackers, *, tables: bool = True) -> None:
    for step in range(3):
        log(trackers, {"loss": torch.tensor(1.0 / 2**step), "eval_top": step, "none": None}, step=step)
    log_images(trackers, {"faces": torch.rand(2, 8, 8, 3)}, step=2)
    if tables:
        log_table(trackers, "rows", ["a", "b"], [[1, "x"], [2, "y"]], step=2)
    else:
        with pytest.raises(NotAvailableError, match="doesn't support tables"):
            log_table(trackers, "rows", ["a"], [[1]])
    finish(trackers)


# --- TensorBoard ---------------------------------------------------------------------------------


def events(folder: Path) -> Any:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.mark.parametrize("package", ["tensorboard", "tensorboardX"])
def test_tensorboard(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("numpy")
    pytest.importorskip(package)
    monkeypatch.setattr(TensorBoardTracker, "modules", (package,))
    trackers = begin("tensorboard", tmp_path)
    writer = get_tracker(trackers, "tensorboard", unwrap=True)
    assert type(writer).__module__.startswith(package if package == "tensorboardX" else "torch.utils")
    log(trackers, {"note": "well", "both": {"a": 1, "b": torch.tensor(2.5)}}, step=1)
    log_steps(trackers)

    found = events(tmp_path / "digits")
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert found.Tags()["images"] == ["faces/0", "faces/1"]
    assert (found.Images("faces/0")[0].width, found.Images("faces/0")[0].height) == (8, 8)
    texts = {
        tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]
    }
    assert texts["note/text_summary"] == "well"
    assert texts["rows/text_summary"] == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |"
    (settings,) = (tmp_path / "digits").glob("*/hparams.yml")
    assert json.loads(settings.read_text()) == CONFIG
    group = (tmp_path / "digits").glob("both*" if package == "tensorboard" else "both/*")
    assert sorted(folder.name.removeprefix("both_") for folder in group) == ["a", "b"]


def test_tensorboard_leaves_out_lists_and_none(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("tensorboard")
    trackers = begin("tensorboard", tmp_path)
    recwarn.clear()
    for step in range(2):
        log(trackers, {"list": [1, 2], "none": None, "many": torch.ones(3), "loss": 1}, step=step)
    finish(trackers)
    output = [str(one.message) for one in recwarn if "can't log" in str(one.message)]
    assert output == [
        f"tensorboard can't log a value of type list; skipping {name!r} (warned once)."
        for name in ("list", "many")
    ]
    assert Path(next(one.filename for one in recwarn if "can't log" in str(one.message))) == Path(__file__)
    assert len(events(tmp_path / "digits").Scalars("loss")) == 2


# --- the others ----------------------------------------------------------------------------------


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package: Any = pytest.importorskip("mlflow")
    for name in ("EXPERIMENT_NAME", "RUN_ID", "TAGS", "NESTED_RUN"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    before = package.get_tracking_uri()
    package.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    yield package
    package.end_run()
    package.set_tracking_uri(before)


def test_mlflow(mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "a"}')
    options = {"logging_dir": f"file://{tmp_path}/files", "run_name": "one", "description": "of the test"}
    config = {**CONFIG, "long": "x" * 7000, "a@b": 1, **{f"p{number}": number for number in range(150)}}
    trackers = init_trackers(
        Context(),
        "digits",
        log_with="mlflow",
        config=config,
        init_kwargs={"mlflow": options},
        on_error="raise",
    )
    run_id = get_tracker(trackers, "mlflow", unwrap=True).info.run_id
    log(trackers, {"acc@5": 0.5, "../up": 1}, step=0)
    log_steps(trackers)

    client = mlflow.MlflowClient()
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("one", "FINISHED", "a")
    assert client.get_experiment(run.info.experiment_id).name == "digits"
    params = run.data.params
    assert (params["a_b"], run.data.metrics["acc_5"], run.data.metrics["up"]) == ("1", 0.5, 1.0)
    assert (params["lr"], params["model/layers"], params["p149"]) == ("0.1", "2", "149")
    assert "long" not in params
    history = client.get_metric_history(run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    images = {one.path for one in client.list_artifacts(run_id, "images")}
    assert images == {"images/faces-2-0.png", "images/faces-2-1.png"}
    assert [one.path for one in client.list_artifacts(run_id)] == ["images", "rows.json"]
    # The experiment is there now, and is used again; a run can be gone on with.
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    again = init_trackers(Context(), "digits", log_with="mlflow", on_error="raise")
    log(again, {"loss": 0.125}, step=3)
    finish(again)
    assert len(client.get_metric_history(run_id, "loss")) == 4


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = begin("wandb", mode="offline", dir=str(tmp_path))
    run = get_tracker(trackers, "wandb", unwrap=True)
    assert run.config["model"] == CONFIG["model"]
    log(trackers, {"loss": torch.tensor(0.75)}, step=0)
    log_table(trackers, "mixed", data=[[1, "x"], ["y", 2.5]], step=0)
    with pytest.warns(UserWarning, match="wandb can't log a value of type object; skipping 'odd'"):
        log(trackers, {"odd": object(), "even": 2}, step=0)
    log_steps(trackers)
    # The end of a run doesn't wait for its file, the end of the package does.
    importlib.import_module("wandb").teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    form: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    records = [form.FromString(data) for data in wandb_records(file.read_bytes())]
    steps = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    found = [(one["_step"], one["loss"]) for one in steps if "loss" in one]
    assert found == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert steps[0]["even"] == 2
    (last,) = (one for one in steps if "faces" in one or any(name.startswith("faces") for name in one))
    assert any(name.startswith("rows") for name in last)
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/*.png"))) == 2
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))) == 2


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Read the records of a file in LevelDB's format of logs, behind seven bytes that say what it is."""
    block, place, parts = 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield parts
            parts = b""


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package decides where it writes when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    pytest.importorskip("trackio")
    trackers = begin("trackio", auto_log_cpu=False, auto_log_gpu=False)
    log_steps(trackers)
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        metrics = [
            (step, json.loads(values))
            for step, values in database.execute("select step, metrics from metrics order by id")
        ]
        configs = [json.loads(one) for (one,) in database.execute("select config from configs")]
    database.close()
    assert [(step, one["loss"]) for step, one in metrics if "loss" in one] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert any("faces/1" in one for _, one in metrics)
    assert any("rows" in one for _, one in metrics)
    assert configs[-1]["model"] == CONFIG["model"]


def test_aim(tmp_path: Path) -> None:
    package: Any = pytest.importorskip("aim")
    options: dict[str, Any] = {"system_tracking_interval": None, "capture_terminal_logs": False}
    trackers = begin("aim", tmp_path, **options)
    run_hash = get_tracker(trackers, "aim", unwrap=True).hash
    log_images(trackers, {"one": (torch.rand(8, 8), "a caption")}, step=0)
    log_steps(trackers, tables=False)
    # A run that is only read is there when Aim's index has been built.
    run = package.Run(run_hash, repo=str(tmp_path), **options)
    assert run["hparams"]["model"]["layers"] == 2
    assert run.name == "digits"
    found = {one.name: list(one.values.sparse_numpy()[1]) for one in run.metrics()}
    assert (found["loss"], found["eval_top"]) == ([1.0, 0.5, 0.25], [0.0, 1.0, 2.0])
    assert {one["name"] for one in run.collect_sequence_info(("images",))["images"]} == {"faces", "one"}
    run.close()


def test_dvclive(tmp_path: Path) -> None:
    pytest.importorskip("dvclive")
    trackers = begin("dvclive", dir=str(tmp_path / "live"), save_dvc_exp=False, dvcyaml=False)
    log_steps(trackers, tables=False)
    rows = (tmp_path / "live/plots/metrics/loss.tsv").read_text().split()
    assert rows == ["step", "loss", "0", "1.0", "1", "0.5", "2", "0.25"]
    assert "layers: 2" in (tmp_path / "live/params.yaml").read_text()
    images = tmp_path / "live" / "plots" / "images"
    assert sorted(path.name for path in images.iterdir()) == ["faces-0.png", "faces-1.png"]


def test_comet_ml(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    config: Any = importlib.import_module("comet_ml").ExperimentConfig(offline_directory=str(tmp_path / "c"))
    trackers = begin("comet_ml", online=False, experiment_config=config, mode="create")
    log(trackers, {"note": "well", "both": {"a": 1}}, step=0)
    log_images(trackers, {"black": torch.zeros(1, 8, 8), "mask": torch.zeros(8, 8, dtype=torch.bool)}, step=0)
    log_steps(trackers)
    (file,) = (tmp_path / "c").glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        lines = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        names = archive.namelist()
    metrics = [one["payload"]["metric"] for one in lines if one["type"] == "metric_msg"]
    found = [(one["step"], one["metricValue"]) for one in metrics if one["metricName"] == "loss"]
    assert found == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert any(one["metricName"] == "both_a" for one in metrics)
    text = json.dumps(lines)
    assert all(word in text for word in ("layers", "faces", "black", "mask", "rows.csv"))
    assert len(names) > 1


# A program of its own: at its end it looks through what the process has imported, which under pytest takes
# minutes.
CLEARML = """
import json, sys
import clearml, torch
from accelfn import Context
from accelfn.tracking import finish, get_tracker, init_trackers, log, log_images, log_table

automatic = ("connect_arg_parser", "connect_frameworks", "resource_monitoring", "connect_streams")
off = {f"auto_{name}": False for name in automatic}
trackers = init_trackers(
    Context(), "digits", log_with="clearml", config=json.loads(sys.argv[1]), init_kwargs={"clearml": off},
    on_error="raise",
)
task = get_tracker(trackers, "clearml", unwrap=True)
again = init_trackers(Context(), "other", log_with="clearml", on_error="raise")
finish(again)  # the task is somebody else's
assert clearml.Task.current_task() is task
for step in range(3):
    log(trackers, {"loss": torch.tensor(1.0 / 2**step), "eval_top": step, "none": None}, step=step)
log(trackers, {"single": 3.0})
log_images(trackers, {"faces": torch.rand(2, 8, 8, 3)}, step=2)
log_table(trackers, "rows", ["a", "b"], [[1, "x"], [2, "y"]], step=2)
finish(trackers)
print("FOLDER", task.get_offline_mode_folder())
"""


def test_clearml(tmp_path: Path) -> None:
    pytest.importorskip("clearml")
    # Its reports go out from a process that it forks while threads are at work, which hangs at times.
    (tmp_path / "clearml.conf").write_text("sdk { development { report_use_subprocess: false } }\n")
    done = subprocess.run(
        [sys.executable, "-c", CLEARML, json.dumps(CONFIG)],
        env={
            **os.environ,
            "CLEARML_CONFIG_FILE": str(tmp_path / "clearml.conf"),
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
            "CLEARML_OFFLINE_MODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(done.stdout.partition("FOLDER ")[2].split()[0])
    lines = [line for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
    reports = [report for line in lines for report in cast("list[dict[str, Any]]", json.loads(line))]
    found = [
        (one["iter"], one["value"])
        for one in reports
        if (one.get("metric"), one.get("variant")) == ("loss", "train")
    ]
    assert found == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert {(one.get("metric"), one.get("variant")) for one in reports} >= {
        ("top", "eval"),
        ("faces", "train 1"),
        ("rows", "train"),
    }


def test_swanlab(tmp_path: Path) -> None:
    package: Any = pytest.importorskip("swanlab")
    trackers = begin("swanlab", mode="offline", log_dir=str(tmp_path / "swan"))
    log(trackers, {"note": "well"}, step=0)
    run = get_tracker(trackers, "swanlab", unwrap=True)
    assert package.config["FRAMEWORK"] == "accelfn"
    assert package.config["model"] == CONFIG["model"]
    folder = Path(run.dir)
    log_steps(trackers, tables=False)
    assert list(folder.rglob("*"))
