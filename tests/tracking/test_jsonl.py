"""The run folder: what is written, and what is left of it when a program is killed."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves open what tolist gives.

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn import Context
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch import find_runs, read_run
from accelfn.tracking import JSONLTracker, finish, get_tracker, init_trackers, log, log_table
from accelfn.tracking.values import as_pillow, read_pixels
from tests.launch.processes import environment


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def started(folder: Path, **options: Any) -> JSONLTracker:
    tracker = JSONLTracker("digits", folder, **options)
    tracker.start()
    return tracker


def test_the_lines_of_a_whole_run(tmp_path: Path) -> None:
    ctx = Context().replace(project_dir=tmp_path)
    trackers = init_trackers(
        ctx, "digits", config={"lr": 0.1, "sizes": (1, 2)}, init_kwargs={"jsonl": {"run_name": "one"}}
    )
    log(trackers, {"loss": torch.tensor(0.5), "none": None, "text": "ä", "more": {"a": [1, True]}}, step=1)
    log_table(trackers, "rows", ["a", "b"], [[1, "x"], [math.inf, None]], step=2)
    finish(trackers)
    folder = get_tracker(trackers, "jsonl", unwrap=True)
    assert folder == tmp_path / "digits" / "one"
    found = lines(folder)
    assert all(line.pop("time") > 1e9 for line in found)
    first = found.pop(0)
    assert (first["kind"], first["format"], first["project"], first["run"]) == ("start", 1, "digits", "one")
    assert first["process"] == os.getpid()
    assert found == [
        {"kind": "config", "values": {"lr": 0.1, "sizes": [1, 2]}},
        {
            "kind": "log",
            "step": 1,
            "values": {"loss": 0.5, "none": None, "text": "ä", "more": {"a": [1, True]}},
        },
        {
            "kind": "table",
            "step": 2,
            "name": "rows",
            "columns": ["a", "b"],
            "rows": [[1, "x"], ["Infinity", None]],
        },
        {"kind": "finish"},
    ]


def test_a_dataframe_is_logged_by_rows(tmp_path: Path) -> None:
    frame = Mock(columns=["a", 1], itertuples=Mock(return_value=iter([(1, 0.5), (2, math.nan)])))
    tracker = started(tmp_path)
    tracker.log_table("rows", dataframe=frame)
    frame.itertuples.assert_called_once_with(index=False)
    line = lines(tracker.folder)[-1]
    assert (line["columns"], line["rows"]) == (["a", "1"], [[1, 0.5], [2, "NaN"]])


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4
        ),
        max_size=4,
    )
)
def test_any_plain_value_is_one_line_of_standard_json(values: dict[str, Any]) -> None:
    import tempfile

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} isn't JSON")

    with tempfile.TemporaryDirectory() as folder:
        tracker = started(Path(folder))
        tracker.log(values, step=1)
        tracker.finish()
        text = (tracker.folder / "events.jsonl").read_bytes()
    assert text.count(b"\n") == 3
    found = json.loads(text.splitlines()[1], parse_constant=refuse)
    assert list(found["values"]) == list(values)


def test_each_run_has_its_own_folder_and_names_stay_inside_of_it(tmp_path: Path) -> None:
    assert started(tmp_path).folder != started(tmp_path).folder
    for project in ("../x/y", ".."):
        tracker = JSONLTracker(project, tmp_path, run_name="..")
        tracker.start()
        assert tracker.folder.resolve().parent.parent == tmp_path
        assert lines(tracker.folder)[0]["project"] == project


def test_a_run_of_the_same_name_is_refused_and_gone_on_with_where_that_is_asked(tmp_path: Path) -> None:
    first = started(tmp_path, run_name="one")
    first.log({"loss": 1.0}, step=1)
    ctx = Context().replace(project_dir=tmp_path)  # by which it isn't taken for a network that is down
    with pytest.raises(ConfigurationError, match=r"the run 'one' exists.*resume=True"):
        init_trackers(ctx, "digits", init_kwargs={"jsonl": {"run_name": "one"}})
    second = started(tmp_path, run_name="one", resume=True)
    second.log({"loss": 0.5}, step=2)
    assert [line["kind"] for line in lines(second.folder)] == ["start", "log", "start", "log"]


def test_resuming_without_a_name_continues_the_latest_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        tracker = started(tmp_path, run_name=name)
        tracker.log({"loss": 1.0}, step=1)
        if name == "first":
            tracker.finish()
    os.utime(tmp_path / "digits" / "first" / "events.jsonl", (1.0, 1.0))
    resumed = started(tmp_path, resume=True)
    resumed.log({"loss": 0.5}, step=2)
    resumed.finish()
    assert resumed.run_name == "second"
    assert [folder.name for folder in find_runs(tmp_path)] == ["first", "second"]
    run = read_run(resumed.folder)
    assert (run.num_starts, run.curves["loss"].steps, run.is_finished) == (2, (1, 2), True)
    JSONLTracker("letters", tmp_path, resume=True).start()  # nothing to go on with: a new one
    assert len(find_runs(tmp_path)) == 3


def test_what_follows_a_torn_line_stands_on_its_own(tmp_path: Path) -> None:
    first = started(tmp_path, run_name="one")
    with (first.folder / "events.jsonl").open("a") as file:
        file.write('{"kind": "log", "val')
    second = started(tmp_path, run_name="one", resume=True)
    second.log({"loss": 0.5}, step=2)
    text = (second.folder / "events.jsonl").read_text().splitlines()
    assert [json.loads(text[number])["kind"] for number in (0, 2, 3)] == ["start", "start", "log"]


def test_a_full_disk_is_reported_and_the_next_line_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = started(tmp_path)
    write = os.write

    def write_some(file: int, data: bytes) -> int:
        return write(file, data[:20])

    monkeypatch.setattr(os, "write", write_some)
    for _ in range(2):
        with pytest.raises(OSError, match=r"only 20 of \d+ bytes were written"):
            tracker.log({"loss": 1.0}, step=1)
    monkeypatch.undo()
    tracker.log({"loss": 0.5}, step=2)
    tracker.finish()
    whole = (tracker.folder / "events.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in whole if line.endswith("}")]
    assert [line["kind"] for line in kept] == ["start", "log", "finish"]
    assert kept[1]["values"] == {"loss": 0.5}


def test_a_run_that_has_not_begun_or_has_ended_says_so(tmp_path: Path) -> None:
    tracker = JSONLTracker("digits", tmp_path)
    with pytest.raises(ConfigurationError, match="is not open"):
        tracker.log({})
    tracker.finish()  # nothing to end
    assert not tracker.folder.exists()
    with pytest.raises(TypeError, match="jsonl doesn't support commit"):
        tracker.log({}, commit=True)


KILLED = """
import sys
from pathlib import Path
from accelfn.tracking import JSONLTracker
tracker = JSONLTracker("digits", sys.argv[1], run_name="one")
tracker.start()
step = 0
while True:
    tracker.log({"loss": [step] * 500}, step=step)
    if step == 20:
        print("ready", flush=True)
    step += 1
"""


def test_a_program_that_is_killed_leaves_whole_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
    found = lines(tmp_path / "digits" / "one")[1:]
    assert len(found) > 20
    assert [line["step"] for line in found] == list(range(len(found)))


# --- images --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_images_are_files_that_a_line_names(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    tracker = started(tmp_path)
    tracker.log_images({"faces": torch.zeros(2, 3, 4, 5)}, step=1)
    files = [f"images/faces-1-{os.getpid()}-{number}.png" for number in range(2)]
    line = lines(tracker.folder)[-1]
    line.pop("time")
    assert line == {"kind": "images", "step": 1, "name": "faces", "files": files, "captions": None}
    assert all((tracker.folder / file).is_file() for file in files)


def test_without_pillow_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"images need Pillow.*pip install pillow"):
        as_pillow(torch.zeros(1, 1, 3, dtype=torch.uint8))


def test_images_of_every_form_are_pixels() -> None:
    cases: tuple[tuple[Any, list[tuple[int, ...]]], ...] = (
        (torch.zeros(8, 9), [(8, 9, 1)]),
        (torch.zeros(8, 9, 3), [(8, 9, 3)]),
        (torch.zeros(3, 8, 9), [(8, 9, 3)]),
        (torch.zeros(2, 1, 8, 9), [(8, 9, 1)] * 2),
        ([torch.zeros(8, 9, 4), numpy.zeros((2, 2))], [(8, 9, 4), (2, 2, 1)]),
    )
    for images, shapes in cases:
        assert [tuple(one.shape) for one in read_pixels(images)] == shapes
    values = read_pixels(torch.tensor([[0.0, 0.5, 1.0, 7.0, -1.0, math.nan]]))[0].flatten().tolist()
    assert values == [0, 128, 255, 255, 0, 0]
    assert read_pixels(torch.tensor([[True, False]]))[0].flatten().tolist() == [255, 0]
    assert read_pixels(torch.tensor([[-5, 300]]))[0].flatten().tolist() == [0, 255]


@pytest.mark.slow
def test_images_of_pillow_are_pixels() -> None:
    image = pytest.importorskip("PIL.Image")
    assert tuple(read_pixels(image.new("RGB", (9, 8)))[0].shape) == (8, 9, 3)
    assert tuple(read_pixels(image.new("L", (9, 8)))[0].shape) == (8, 9, 1)
    assert tuple(read_pixels(image.new("P", (9, 8)))[0].shape) == (8, 9, 3)
    for mode in ("I;16", "I", "F"):
        with pytest.raises(ValueError, match=f"'faces' is a Pillow image with more than 8 bits .*{mode}"):
            read_pixels(image.new(mode, (9, 8)), "faces")


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.zeros(5), ValueError, r"'faces' has \(5,\)"),
        (torch.zeros(5, 6, 7), ValueError, r"'faces' has \(5, 6, 7\)"),
        (torch.zeros(0, 4), ValueError, "at least one pixel"),
        ("a path", TypeError, "'faces' must be arrays, .*got str"),
    ],
)
def test_invalid_images_are_refused(images: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_pixels(images, "faces")


def test_an_address_is_refused_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"s3://bucket/runs is an address.* as logging_dir"):
        JSONLTracker("project", "s3://bucket/runs")
    assert list(tmp_path.iterdir()) == []
