"""Runs on the disk: read back as they were logged, and listed, shown and drawn without torch."""

import json
import math
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn import Context
from accelfn.errors import ConfigurationError
from accelfn.launch import Curve, RunRecord, draw_runs_svg, find_runs, read_run
from accelfn.launch.main import main
from accelfn.launch.runs import _thin, _ticks  # pyright: ignore[reportPrivateUsage]
from accelfn.tracking import JSONLTracker, finish, init_trackers, log, log_images, log_table


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
    log_images(trackers, {"faces": torch.zeros(4, 4)})
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
    assert dict(run.texts) == {"note": "well"}
    assert [len(files) for files in run.images.values()] == [1]
    assert run.tables == (("rows", 7, ("a",), ((1,), (2,))),)
    assert run.num_steps == 3
    assert run.last_s >= run.started_s > 1e9


@given(st.lists(st.floats(), max_size=5), st.booleans())
def test_any_number_comes_back(values: list[float], numbered: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tracker = JSONLTracker("p", folder)
        tracker.start()
        for number, value in enumerate(values):
            tracker.log({"x": value}, step=number if numbered else None)
        tracker.finish()
        found = read_run(tracker.folder).curves.get("x", Curve((), ()))
    assert found.steps == tuple(range(len(values)))
    assert repr(found.values) == repr(tuple(values))


def test_a_step_that_is_logged_again_counts_as_it_was_last(tmp_path: Path) -> None:
    steps = [step(1, a=1.0), step(2, a=2.0), step(3, a=3.0)]
    again = [begin("one", 2e9), step(2, a=20.0), step(4, a=40.0)]
    run = read_run(write(tmp_path, begin("one"), *steps, {"kind": "finish"}, *again))
    assert run.curves["a"] == Curve((1, 2, 3, 4), (1.0, 20.0, 3.0, 40.0))
    assert (run.num_starts, run.is_finished, run.started_s) == (2, False, 1e9)


def test_unreadable_and_unknown_lines_are_skipped(tmp_path: Path) -> None:
    strange = ("[1]", '{"kind": "log", "values": 3}', '{"kind": "log", "step": "x", "values": {"a": 1}}', "{")
    later: dict[str, Any] = {"kind": "__class__", "values": {}}
    run = read_run(write(tmp_path, begin("one"), step(1, a=1.0), *strange, later, step(2, a=2.0)))
    assert run.curves["a"] == Curve((1, 2), (1.0, 2.0))
    assert run.num_damaged == 4


def test_a_value_without_a_step_gets_the_next_one(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, begin("one"), step(1, a=1.0), step(None, a=2.0), step(None, b=3.0)))
    assert run.curves["a"] == Curve((1, 2), (1.0, 2.0))
    assert run.curves["b"] == Curve((0,), (3.0,))


def test_lines_that_fit_nothing_cost_only_themselves(tmp_path: Path) -> None:
    strange = [
        '{"kind": "images", "name": "x"}',
        '{"kind": "log", "step": 1e400, "values": {"a": 1, "never": 1}}',
        '{"kind": ["log"]}',
        "[" * 5000,
    ]
    folder = write(tmp_path, begin("one"), step(1, a=1.0), *strange, {"kind": "images", "files": []})
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "log", "step": 2, "values": {"a": 2.0, "t": "\xff"}}\n')
    run = read_run(folder)
    assert (run.num_damaged, dict(run.images), set(run.curves)) == (3, {}, {"a"})
    assert run.curves["a"] == Curve((1, 2), (1.0, 2.0))
    assert dict(run.texts) == {"t": "\ufffd"}


def test_a_newer_format_and_a_missing_run_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'one' has format 2, but this accelfn reads format 1"):
        read_run(write(tmp_path / "a", begin("one", format=2)))
    with pytest.raises(FileNotFoundError, match="no run in"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="no directory"):
        find_runs(tmp_path / "nowhere")


# --- drawing -------------------------------------------------------------------------------------


def run_of(**curves: Curve) -> RunRecord:
    return RunRecord(folder=Path("x"), name="<one>", config={"lr": 0.1}, curves=curves, texts={}, images={})


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-(10**9), 10**9), st.floats(allow_nan=True)), max_size=6), max_size=3
    ),
    st.booleans(),
)
def test_any_curves_make_a_picture(curves: list[list[tuple[int, float]]], log_scale: bool) -> None:
    runs = [run_of(a=Curve(*zip(*sorted(dict(one).items()), strict=True))) for one in curves if one]
    picture = draw_runs_svg(runs, ["a"], log_scale=log_scale)
    root = ElementTree.fromstring(picture)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_every_run_has_a_line_of_its_own_look() -> None:
    picture = draw_runs_svg([run_of(a=Curve((0, 1), (0.0, float(number)))) for number in range(20)], ["a"])
    lines = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}polyline")
    looks = {(line.attrib["stroke"], line.attrib.get("stroke-dasharray")) for line in lines}
    assert len(looks) == 20


@given(st.floats(-1e299, 1e299), st.floats(-1e299, 1e299))
def test_ticks_are_few_and_reach_over_all(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = _ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(ticks)
    rounding = max(abs(low), abs(high)) * 1e-9
    assert ticks[0] <= low + rounding
    assert ticks[-1] >= high - rounding


def test_of_many_points_the_peaks_stay() -> None:
    points = [(number, 0.0) for number in range(100_000)]
    points[54_321] = (54_321, 9.0)
    points[54_322] = (54_322, -9.0)
    kept = _thin(points)
    assert len(kept) < 2000
    assert {(54_321, 9.0), (54_322, -9.0), points[-1]} <= set(kept)


def test_gaps_points_and_names_are_drawn_as_they_are() -> None:
    run = run_of(**{"a<b": Curve((0, 1, 2, 3), (1.0, 2.0, math.nan, 3.0)), "empty": Curve((0,), (math.nan,))})
    picture = draw_runs_svg([run, run_of()], ["a<b", "empty"])
    assert (picture.count("<polyline"), picture.count("<circle")) == (1, 1)
    assert "a&lt;b" in picture
    assert "&lt;one&gt;" in picture
    assert "no values" in picture


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "runs/digits/first", begin("first", 1e9), {"kind": "config", "values": {"lr": 0.1}})
    write(
        tmp_path / "runs/digits/second",
        begin("second", 2e9),
        *(step(number, loss=1 / (number + 1), b=0, c=0, d=0) for number in range(4)),
        step(3, note="x"),
        {"kind": "images", "name": "faces", "files": ["images/1.png"]},
        {"kind": "table", "name": "rows", "step": 2, "columns": ["a"], "rows": [[1]]},
        {"kind": "finish", "time": 2e9 + 75},
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["runs", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("runs")
def test_the_list_is_in_order_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    head, first, second = output(capsys, "list").splitlines()
    assert head.split() == ["run", "started", "state", "steps", "last", "values"]
    assert (first.split()[0], first.split()[-2:]) == ("digits/first", ["open", "0"])
    assert second.endswith("finished      4  loss 0.25, b 0, c 0, and 1 more")
    assert [one["run"] for one in json.loads(output(capsys, "list", "--json"))] == ["first", "second"]


def test_one_run_that_cannot_be_read_does_not_hide_the_others(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(runs / "digits/later", begin("later", 3e9, format=99))
    assert main(["runs", "list", "--dir", str(runs)]) == 0
    found = capsys.readouterr()
    assert [line.split()[0] for line in found.out.splitlines()] == ["run", "digits/first", "digits/second"]
    assert f"{runs / 'digits/later'}: the run 'later' has format 99" in found.err
    assert output(capsys, "show", "latest").startswith("run      second\n")


def test_what_was_logged_does_nothing_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a\x1b[31m\nb"
    write(tmp_path / "one", begin(name), step(1, **{name: 1.0}), step(1, note="\ud800\x07"))
    for action in (("list", str(tmp_path)), ("show", "one", "--dir", str(tmp_path))):
        text = output(capsys, *action)
        assert "a\\x1b[31m\\nb" in text
        assert not any(sign in text for sign in "\x1b\x07\ud800")


def test_an_empty_folder_has_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "list", str(tmp_path)) == f"no runs in {str(tmp_path)!r}\n"


@pytest.mark.parametrize("given_as", ["second", "sec", "digits/second", "latest", "runs/digits/second"])
@pytest.mark.usefixtures("runs")
def test_a_run_is_found_by_what_it_is_called(given_as: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "show", given_as)
    assert text.startswith("run      second\nproject  digits\n")
    assert "finished, 0:01:15" in text
    assert "loss      4      1  0.25  0.25    1" in text
    assert "note  x" in text
    assert "images faces: 1, last: runs/digits/second/images/1.png" in text
    assert "table rows, step 2\na\n1" in text
    assert json.loads(output(capsys, "show", given_as, "--json"))["last"]["loss"] == 0.25


@pytest.mark.usefixtures("runs")
def test_curves_are_drawn_to_a_file_or_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output(capsys, "plot", "second", "first", "--names", "loss")
    assert ElementTree.fromstring(printed).tag.endswith("svg")
    assert printed.count("<polyline") == 1
    assert output(capsys, "plot", "latest", "--output", "curves.svg", "--log-scale") == ""
    assert (tmp_path / "curves.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "third"), "no run 'third' in 'runs'. Runs there: digits/first, digits/second."),
        (("show", "d"), "'d' is ambiguous. Pass one of: digits/first, digits/second."),
        (("plot", "first"), "nothing to plot: no metrics were logged."),
        (("plot", "second", "--names", "los"), "no run has the metrics 'los'. Available: loss, b, c, d."),
        (("plot", "second", "--output", "no/x.svg"), "no/x.svg: can't be written"),
        (("list", "nowhere"), "no directory 'nowhere'. Pass the logging_dir of the runs."),
    ],
)
@pytest.mark.usefixtures("runs")
def test_errors_are_one_sentence(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith(f"accelfn runs {arguments[0]}: error: {message}")
    assert found.err.count("\n") == 1


def test_a_wrong_flag_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("draw",), ("list", "--colour")):
        assert main(["runs", *arguments]) == 2
        assert "accelfn runs" in capsys.readouterr().err


def test_on_a_terminal_a_picture_takes_a_file(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["runs", "plot", "latest", "--names", "loss", "--dir", str(runs)]) == 2
    assert "Pass --output FILE.svg" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("list",), ("show", "second"), ("plot", "second"), ("--help",)])
def test_no_torch_is_loaded(arguments: tuple[str, ...], runs: Path) -> None:
    code = (
        "import sys; from accelfn.launch.main import main\n"
        f"try: main(['runs', *{arguments!r}])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=runs.parent,
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.endswith("False\n"), done.stderr
