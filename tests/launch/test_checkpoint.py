"""``accelfn checkpoint`` as a user runs it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.checkpoint import load_state, save_state, save_tree
from tests.checkpoint.accelerate_folder import write_folder

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(command: Command) -> Command:
    return lambda *words: command("checkpoint", *words)


def save(folder: Path, step: int, metric: float = 0.5, **more: Any) -> Path:
    tree = {"model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}, "epoch": step, **more}
    return save_state(af.Context(), folder / f"step_{step}", tree, step=step, metric=metric)


def damage(place: Path) -> None:
    (file,) = place.glob("tensors-*")
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    content[end + json.loads(content[8:end])["~crc32"]["data_offsets"][0] - 1] ^= 1  # of the last tensor
    file.write_bytes(content)


def dead_save(folder: Path) -> Path:
    """Make what a first save to a directory leaves that was killed long ago."""
    path = folder / "step_99"
    path.mkdir()
    (path / "tensors-00000.safetensors").write_bytes(b"part")
    for place in (path / "tensors-00000.safetensors", path):
        os.utime(place, (1000, 1000))
    return path


# --- verify --------------------------------------------------------------------------------------


def test_a_checkpoint_is_verified_file_by_file(tmp_path: Path, run: Command) -> None:
    other, place = save(tmp_path, 1), save(tmp_path, 2)
    for directory in (place, tmp_path):  # the newest
        status, stdout, _ = run("verify", directory)
        first, manifest, tensors = stdout.splitlines()
        assert (status, first) == (0, str(place))
        assert re.fullmatch(r"  manifest\.json +\d+ B  OK", manifest)
        assert re.fullmatch(r"  tensors-00000\.safetensors +\d+\.\d kB  OK", tensors)
    status, stdout, _ = run("verify", tmp_path, "--all")
    assert (status, [line for line in stdout.splitlines() if line[0] != " "]) == (0, [str(other), str(place)])
    damage(place)
    (place / "notes.txt").write_text("mine")
    status, stdout, _ = run("verify", place)
    _, manifest, tensors, notes = stdout.splitlines()
    assert (status, manifest.endswith("OK")) == (1, True)
    assert re.match(r"  tensors-00000\.safetensors .*DAMAGED: .*tensor 'model/w'", tensors)
    assert re.fullmatch(r"  notes\.txt +4 B  not part of the checkpoint, not verified", notes)
    assert run("verify", tmp_path, "--all")[0] == 1
    (place / "tensors-00000.safetensors").unlink()
    status, stdout, _ = run("verify", place)
    assert (status, "is missing, and the manifest names it" in stdout) == (1, True)
    (place / "manifest.json").write_text("{}")
    status, stdout, _ = run("verify", place)
    assert (status, "DAMAGED: " in stdout) == (1, True)


# --- list ----------------------------------------------------------------------------------------


def test_the_table_has_the_checkpoints_and_what_else_is_there(tmp_path: Path, run: Command) -> None:
    assert run("list", tmp_path)[1] == f"no checkpoint in {tmp_path}\n"
    save(tmp_path, 10, 0.25)
    save(tmp_path, 9)
    save_tree(tmp_path / "best", {"w": torch.ones(2)})
    (save(tmp_path, 11) / "tensors-00000.safetensors").unlink()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "theirs").mkdir()
    torch.save({}, tmp_path / "theirs" / "random_states_0.pkl")
    killed = dead_save(tmp_path).name
    status, stdout, _ = run("list", tmp_path)
    head, *rows = stdout.splitlines()
    assert (status, head.split()) == (0, ["name", "step", "metric", "ranks", "size", "written"])
    cells = {row.split()[0]: row.split()[1:] for row in rows[:3]}
    found = [cells[name][:3] for name in ("step_10", "step_9", "best")]
    assert found == [["10", "0.25", "1"], ["9", "0.5", "1"], ["-", "-", "1"]]
    assert re.fullmatch(r"\d+(\.\d)? k?B \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", " ".join(cells["best"][3:]))
    assert rows[3].startswith("damaged: step_11: ")
    hint = "turn it into one with `accelfn checkpoint convert`"
    assert rows[4:] == [
        f"unfinished: {killed} (left by a save that was killed)",
        "not a checkpoint: notes.txt (it is a file)",
        f"not a checkpoint: theirs (it is a checkpoint of Accelerate; {hint})",
    ]
    reported = json.loads(run("list", tmp_path, "--json")[1])
    assert {one["name"]: (one["step"], one["metric"]) for one in reported["checkpoints"]} == {
        "best": (None, None),
        "step_9": (9, 0.5),
        "step_10": (10, 0.25),
    }
    assert reported["leftovers"] == [{"name": killed, "dead": True}]
    assert [[*reported[kind]] for kind in ("damaged", "others")] == [["step_11"], ["notes.txt", "theirs"]]


# --- show ----------------------------------------------------------------------------------------


@pytest.fixture
def shown(run: Command) -> Callable[..., list[str]]:
    def show(place: Path, *more: str) -> list[str]:
        status, stdout, _ = run("show", place, *more)
        assert status == 0
        return stdout.splitlines()

    return show


Shown = Callable[..., list[str]]


def test_the_tensors_are_shown_with_types_and_sizes(tmp_path: Path, shown: Shown, run: Command) -> None:
    layer: Any = nn.Linear(3, 2)
    optimizer: Any = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weight = torch.ones(2)
    tree: dict[str, Any] = {"net": layer, "optimizer": optimizer, "epoch": 3, "twice": [weight, weight]}
    place = save_state(af.Context(), tmp_path / "run", tree, step=7, metric=0.25)
    lines = shown(place)
    assert lines[0] == str(place)
    about = r"step 7; metric 0\.25; saved by 1 rank of accelfn \S+; 1 file of tensors, \d+\.\d kB"
    assert re.fullmatch(about, lines[1])
    assert [tuple(re.split(r" {2,}", line)) for line in lines[2:]] == [
        ("net/bias", "float32 [2], 8 B"),
        ("net/weight", "float32 [2, 3], 24 B"),
        ("optimizer/state/net~1bias/momentum_buffer", "float32 [2], 8 B"),
        ("optimizer/state/net~1weight/momentum_buffer", "float32 [2, 3], 24 B"),
        ("twice/0", "float32 [2], 8 B"),
    ]
    assert run("show", place, "nope")[0] == 2
    damage(place)  # the tensors aren't read
    assert shown(place) == lines
    for path in ("optimizer/state/net~1weight", "optimizer/state/net/weight/momentum_buffer"):
        assert shown(place, path) == [re.sub(" {2,}", "  ", lines[5])]
    assert shown(place, "#random/torch")[0].startswith("#random/torch  uint8 ")


# --- prune ---------------------------------------------------------------------------------------


def test_the_plan_is_printed_and_done(tmp_path: Path, run: Command) -> None:
    for step, metric in ((10, 0.1), (20, 0.9), (30, 0.5), (40, 0.4)):
        save(tmp_path, step, metric)
    killed = dead_save(tmp_path)
    rules = ("--last", "1", "--every=20", "--best", "1", "--mode", "min")
    plan = [
        *("keep    step_10", "keep    step_20", "keep    step_40", "remove  step_30"),
        f"remove  {killed.name} (left by a save that was killed)",
    ]
    status, stdout, _ = run("prune", tmp_path, *rules, "--dry-run")
    assert (status, stdout.splitlines()) == (0, [*plan, "nothing was removed: --dry_run"])
    assert (tmp_path / "step_30").is_dir()
    assert killed.is_dir()
    status, stdout, _ = run("prune", tmp_path, *rules)
    assert (status, stdout.splitlines()) == (0, [*plan, "removed 1 checkpoint and 1 leftover"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_20", "step_40"]
    dead_save(tmp_path)  # without a rule only leftovers go
    assert run("prune", tmp_path)[1].splitlines()[-1] == "removed 0 checkpoints and 1 leftover"
    (tmp_path / "step_10" / "notes.txt").write_text("mine")
    assert run("prune", tmp_path, "--last", 1)[1].splitlines() == [
        "keep    step_10 (it contains other files: notes.txt; move them away)",
        *("keep    step_40", "remove  step_20", "removed 1 checkpoint and 0 leftovers"),
    ]


# --- convert -------------------------------------------------------------------------------------


def test_a_folder_of_accelerate_is_converted_with_other_names(tmp_path: Path, run: Command) -> None:
    model: Any = nn.Linear(3, 3)
    optimizer: Any = torch.optim.SGD(
        [{"params": [model.bias]}, {"params": [model.weight]}], 0.1, momentum=0.9
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    folder = write_folder(
        tmp_path / "theirs", {"model.safetensors": model.state_dict(), "optimizer.bin": state}
    )
    names = ("--name", "model=net", "--name=optimizer=opt", "--step", "7")
    status, stdout, _ = run("convert", folder, "here", "--to", "accelfn", *names)
    note = "note: It has no random states: loading it leaves the generators unchanged."
    assert (status, stdout.splitlines()) == (0, ["here: net, opt", note])
    other: Any = nn.Linear(3, 3)
    fresh: Any = torch.optim.SGD([{"params": [other.bias]}, {"params": [other.weight]}], 0.5)
    load_state(af.Context(), "here", {"net": other, "opt": fresh})
    assert torch.equal(other.weight, model.weight)
    assert str(fresh.state_dict()) == str(state)


def test_weights_are_extracted_and_targets_kept(tmp_path: Path, run: Command) -> None:
    place = save(tmp_path, 1)
    theirs, bare = write_folder(tmp_path / "theirs", {"custom_checkpoint_0.pkl": 1}), tmp_path / "bare"
    status, stdout, _ = run("convert", place, bare, "--to", "safetensors", "--max-shard-size", "24B")
    assert (status, "model-00001-of-00002.safetensors" in stdout) == (0, True)
    status, _, stderr = run("convert", place, bare, "--to", "safetensors")
    assert (status, "exists already" in stderr) == (2, True)
    assert run("convert", theirs, place, "--to", "accelfn")[0] == 2
    assert run("convert", theirs, place, "--to", "accelfn", "--overwrite")[0] == 0
    damage(save(tmp_path, 2))
    status, _, stderr = run("convert", tmp_path / "step_2", tmp_path / "new", "--to", "safetensors")
    assert (status, stderr.startswith("accelfn checkpoint convert: damaged: ")) == (1, True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("", "required: command"),
        ("look", "invalid choice: 'look'"),
        ("verify", "required: DIRECTORY"),
        ("verify /no/such", "the directory /no/such doesn't exist"),
        ("verify empty", "the directory is empty"),
        ("verify . --all", "it contains no checkpoint of accelfn"),
        ("list file", "the directory file is a file"),
        ("list step_1", "is a checkpoint. Pass its parent directory"),
        ("show . --nonsense", "--nonsense"),
        ("prune . --last 0", "argument --last: it must be an integer of at least 1, got '0'"),
        ("prune . --best 2", "--best needs --mode"),
        ("prune . --mode low", "invalid choice: 'low'"),
        ("prune step_1", "is a checkpoint. Pass its parent directory"),
        ("convert . new", "--to"),
        ("convert . new --to accelfn --name model", "argument --name: it must be OLD=NEW"),
    ],
)
def test_bad_input_is_one_sentence(line: str, output: str, tmp_path: Path, run: Command) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    if "step_1" in line:
        save(tmp_path, 1)
    status, _, stderr = run(*line.split())
    assert status == 2
    assert output in stderr.splitlines()[-1]
