"""Runs on the disk: read back as they were logged, listed and shown."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelfn import Context
from accelfn.errors import ConfigurationError
from accelfn.launch import Curve, find_runs, read_run
from accelfn.tracking import finish, init_trackers, log, log_table

Command = Callable[..., tuple[int, str, str]]


def write(folder: Path, *entries: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in entries]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def begin(name: str, time: float = 1e9, **more: Any) -> dict[str, Any]:
    return {"kind": "start", "format": 1, "project": "digits", "run": name, "time": time, **more}


def step(number: int | None, **values: Any) -> dict[str, Any]:
    return {"kind": "log", "step": number, "values": values}


# --- reading -------------------------------------------------------------------------------------


def test_what_the_tracker_wrote_is_read_back(tmp_path: Path) -> None:
    ctx = Context().replace(project_dir=tmp_path)
    trackers = init_trackers(ctx, "digits", config={"lr": 0.1}, init_kwargs={"jsonl": {"run_name": "one"}})
    for number in range(3):
        log(trackers, {"loss": torch.tensor(1.0 / 2**number), "eval": {"top": number}}, step=number * 10)
    log(trackers, {"note": "well", "none": None, "gap": math.nan, "edge": -math.inf})
    log_table(trackers, "rows", ["a"], [[1], [2]], step=7)
    (folder,) = find_runs(tmp_path)
    open_run = read_run(folder)
    finish(trackers)
    run = read_run(folder / "events.jsonl")
    assert (open_run.is_finished, run.is_finished, run.num_starts, run.num_damaged) == (False, True, 1, 0)
    assert (run.project, run.name, run.folder) == ("digits", "one", tmp_path / "digits" / "one")
    assert dict(run.config) == {"lr": 0.1}
    assert run.curves["loss"] == Curve((0, 10, 20), (1.0, 0.5, 0.25))
    assert run.curves["eval/top"] == Curve((0, 10, 20), (0.0, 1.0, 2.0))
    assert math.isnan(run.curves["gap"].values[0])
    assert run.curves["edge"].values == (-math.inf,)
    assert [one["values"]["note"] for one in run.events if "note" in one.get("values", ())] == ["well"]
    (table,) = (one for one in run.events if one["kind"] == "table")
    assert (table["name"], table["step"], table["columns"], table["rows"]) == ("rows", 7, ["a"], [[1], [2]])
    assert run.num_steps == 3
    assert run.last_s >= run.started_s > 1e9


def test_a_step_that_is_logged_again_counts_as_it_was_last(tmp_path: Path) -> None:
    steps = [step(1, a=1.0), step(2, a=2.0), step(3, a=3.0)]
    again = [begin("one", 2e9), step(2, a=20.0), step(None, a=40.0, b=0.0)]
    run = read_run(write(tmp_path, begin("one"), *steps, {"kind": "finish"}, *again))
    assert run.curves["a"] == Curve((1, 2, 3), (1.0, 20.0, 40.0)), "without a step: the one after the last"
    assert run.curves["b"] == Curve((0,), (0.0,))
    assert (run.num_starts, run.is_finished, run.started_s) == (2, False, 1e9)


def test_lines_that_fit_nothing_cost_only_themselves(tmp_path: Path) -> None:
    strange = [
        *("[1]", '{"kind": "log", "values": 3}', "{", "[" * 5000, '{"values": {"a": 7}}'),
        '{"kind": "log", "step": 1e400, "values": {"a": 1, "never": 1}}',
    ]
    folder = write(tmp_path, begin("one"), step(1, a=1.0), *strange, {"kind": "__class__", "values": {}})
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "log", "step": 2, "values": {"a": 2.0, "t": "\xff"}}\n')
    run = read_run(folder)
    assert run.num_damaged == len(strange)
    assert run.curves == {"a": Curve((1, 2), (1.0, 2.0))}


def test_a_newer_format_and_a_missing_run_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'one' has format 2, but this accelfn reads format 1"):
        read_run(write(tmp_path / "a", begin("one", format=2)))
    with pytest.raises(FileNotFoundError, match="no run in"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="no directory"):
        find_runs(tmp_path / "nowhere")


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write(tmp_path / "runs/digits/first", begin("first", 1e9), {"kind": "config", "values": {"lr": 0.1}})
    write(
        tmp_path / "runs/digits/second",
        begin("second", 2e9),
        *(step(number, loss=1 / (number + 1), b=0, c=0, d=0) for number in range(4)),
        step(3, note="x"),
        {"kind": "finish", "time": 2e9 + 75},
    )
    return tmp_path / "runs"


def test_the_list_is_in_order_of_time_and_hides_none_for_another(runs: Path, command: Command) -> None:
    head, first, second = command("runs list")[1].splitlines()
    assert head.split() == ["run", "started", "state", "steps", "last", "values"]
    assert (first.split()[0], first.split()[-2:]) == ("digits/first", ["open", "0"])
    assert second.endswith("finished      4  loss 0.25, b 0, c 0, and 1 more")
    write(runs / "digits/later", begin("later", 3e9, format=99))
    status, stdout, stderr = command("runs list --dir runs")
    assert status == 0
    assert [line.split()[0] for line in stdout.splitlines()] == ["run", "digits/first", "digits/second"]
    assert "runs/digits/later: the run 'later' has format 99" in stderr
    assert command("runs show second")[1].startswith("run      second\n")


def test_what_was_logged_does_nothing_to_the_terminal(tmp_path: Path, command: Command) -> None:
    name = "a\x1b[31m\nb"
    write(tmp_path / "one", begin(name), step(1, **{name: 1.0}), {"kind": "config", "values": {"\x07": 1}})
    for line in ("runs list .", "runs show one --dir ."):
        status, text, _ = command(line)
        assert (status, "a\\x1b[31m\\nb" in text) == (0, True)
        assert not any(sign in text for sign in "\x1b\x07\ud800")


@pytest.mark.parametrize("given_as", ["second", "latest", "runs/digits/second"])
@pytest.mark.usefixtures("runs")
def test_a_run_is_found_by_what_it_is_called(given_as: str, command: Command) -> None:
    _, text, _ = command(f"runs show {given_as}")
    assert text.startswith("run      second\nproject  digits\n")
    assert "finished, 0:01:15" in text
    assert "loss      4      1  0.25  0.25    1" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "show third",
            "the run 'third' is not in 'runs'. Pass one of: runs/digits/first, runs/digits/second.",
        ),
        ("show digits", "the run 'digits' is not in 'runs'. Pass one of: "),
        ("list nowhere", "no directory 'nowhere'. Pass the logging_dir of the runs."),
        ("list --colour", "unrecognized arguments: --colour"),
    ],
)
@pytest.mark.usefixtures("runs")
def test_errors_are_one_sentence(line: str, message: str, command: Command) -> None:
    status, stdout, stderr = command(f"runs {line}")
    assert (status, stdout, stderr.count("\n")) == (2, "", 1)
    assert message in stderr
