"""``accelfn checkpoint`` as a user runs it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.checkpoint import (
    find_files,
    folder_for_files,
    load_state,
    save_state,
    save_tree,
)
from accelfn.launch.main import main
from accelfn.testing import run_ranks
from tests.checkpoint.accelerate_folder import write_folder

ROOT = Path(__file__).parents[2]

Read = Callable[[], str]


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Read:
    return lambda: capsys.readouterr().out


def run(*argv: object) -> int:
    return main(["checkpoint", *map(str, argv)])


def save(folder: Path, step: int, metric: float = 0.5, **more: Any) -> Path:
    tree = {"model": {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}, "epoch": step, **more}
    return save_state(af.Context(), folder / f"step_{step}", tree, step=step, metric=metric)


def damage(place: Path) -> None:
    file = place / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
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


def test_a_sound_checkpoint_is_ok_file_by_file(tmp_path: Path, read: Read) -> None:
    save(tmp_path, 1)
    place = save(tmp_path, 2)
    for directory in (place, tmp_path):  # the newest
        assert run("verify", directory) == 0
        first, manifest, tensors = read().splitlines()
        assert first == str(place)
        assert re.fullmatch(r"  manifest\.json +\d\.\d kB  OK", manifest)
        assert re.fullmatch(r"  tensors-00000\.safetensors +\d+\.\d kB  OK", tensors)
    assert run("verify", tmp_path, "--all") == 0
    assert [line for line in read().splitlines() if line[0] != " "] == [str(tmp_path / "step_1"), str(place)]


def test_all_damaged_files_are_reported(tmp_path: Path, read: Read) -> None:
    place = save(tmp_path, 1)
    save(tmp_path, 2)
    damage(place)
    (place / "notes.txt").write_text("mine")
    assert run("verify", place) == 1
    lines = read().splitlines()
    assert re.fullmatch(r"  manifest\.json .*OK", lines[1])
    assert re.match(r"  tensors-00000\.safetensors .*DAMAGED: .*tensor 'model/w'", lines[2])
    assert re.fullmatch(r"  notes\.txt +4 B  not part of the checkpoint, not verified", lines[3])
    assert run("verify", tmp_path, "--all") == 1
    assert "step_2\n  manifest.json" in read()
    assert run("verify", tmp_path) == 0
    (place / "tensors-00000.safetensors").unlink()
    assert run("verify", place) == 1
    assert "is missing, and the manifest names it" in read()
    (place / "manifest.json").write_text("{}")
    assert run("verify", place) == 1
    assert "DAMAGED: " in read()


def test_attached_files_are_checked_and_others_are_no_damage(tmp_path: Path, read: Read) -> None:
    with folder_for_files(af.Context(), tmp_path / "at") as files:
        (files / "unet").mkdir()
        (files / "unet" / "config.json").write_text("{}")
        place = save_state(af.Context(), tmp_path / "at", {"w": torch.ones(2)}, files=files)
    folder = find_files(af.Context(), place)
    (folder / "unet" / "notes.txt").write_text("mine")
    assert run("verify", place) == 0
    lines = read().splitlines()
    assert re.fullmatch(r"  files-[0-9a-f]{8}/unet/config\.json +2 B  OK", lines[3])
    extra = r"  files-[0-9a-f]{8}/unet/notes\.txt +4 B  not part of the checkpoint, not verified"
    assert re.fullmatch(extra, lines[4])
    (folder / "unet" / "config.json").write_text("[]")
    assert run("verify", place) == 1
    assert re.search(r"/unet/config\.json +2 B  DAMAGED: .*config\.json is damaged", read())


def test_a_place_without_checkpoints_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", tmp_path) == 2
    assert "the directory is empty" in capsys.readouterr().err
    assert run("verify", tmp_path, "--all") == 2
    assert "it contains no checkpoint of accelfn" in capsys.readouterr().err


# --- list ----------------------------------------------------------------------------------------


def test_the_table_has_the_checkpoints_and_what_else_is_there(tmp_path: Path, read: Read) -> None:
    save(tmp_path, 10, 0.25)
    save(tmp_path, 9)
    save_tree(tmp_path / "best", {"w": torch.ones(2)})
    damage(save(tmp_path, 11))
    (tmp_path / "step_11" / "tensors-00000.safetensors").unlink()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "logs").mkdir()
    (tmp_path / "theirs").mkdir()
    torch.save({}, tmp_path / "theirs" / "random_states_0.pkl")
    killed = dead_save(tmp_path)
    assert run("list", tmp_path) == 0
    head, *rows = read().splitlines()
    assert head.split() == ["name", "step", "metric", "ranks", "size", "written"]
    cells = {row.split()[0]: row.split() for row in rows[:3]}
    assert [cells["step_10"][1:4], cells["step_9"][1:4]] == [["10", "0.25", "1"], ["9", "0.5", "1"]]
    assert cells["best"][1:4] == ["-", "-", "1"]
    assert re.fullmatch(r"\d+(\.\d)? k?B \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", " ".join(cells["best"][4:]))
    assert rows[3].startswith("damaged: step_11: ")
    hint = "turn it into one with `accelfn checkpoint convert`"
    assert rows[4:] == [
        f"unfinished: {killed.name} (left by a save that was killed)",
        "not a checkpoint: logs (the directory is empty)",
        "not a checkpoint: notes.txt (a file)",
        f"not a checkpoint: theirs (it is a checkpoint of Accelerate; {hint})",
    ]
    assert run("list", tmp_path, "--json") == 0
    reported = json.loads(read())
    assert {one["name"]: (one["step"], one["metric"]) for one in reported["checkpoints"]} == {
        "best": (None, None),
        "step_9": (9, 0.5),
        "step_10": (10, 0.25),
    }
    assert reported["leftovers"] == [{"name": killed.name, "dead": True}]
    assert [one["name"] for one in reported["damaged"]] == ["step_11"]
    assert [one["name"] for one in reported["others"]] == ["logs", "notes.txt", "theirs"]


def test_an_empty_directory_is_listed_too(tmp_path: Path, read: Read) -> None:
    assert run("list", tmp_path) == 0
    assert read() == f"no checkpoint in {tmp_path}\n"


# --- show ----------------------------------------------------------------------------------------


def shown(place: Path, read: Read, *more: str) -> list[str]:
    assert run("show", place, *more) == 0
    return read().splitlines()


def test_the_leaves_are_shown_with_types_and_sizes(tmp_path: Path, read: Read) -> None:
    layer: Any = nn.Linear(3, 2)
    optimizer: Any = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weight = torch.ones(2)
    tree: dict[str, Any] = {
        "net": layer,
        "optimizer": optimizer,
        "epoch": 3,
        "place": (1, float("inf"), torch.bfloat16),
        "text": "x" * 100,
        "twice": [weight, weight],
        "empty": {},
        "none": None,
    }
    place = save_state(af.Context(), tmp_path / "run", tree, step=7, metric=0.25)
    lines = shown(place, read)
    assert lines[0] == str(place)
    assert re.fullmatch(
        r"step 7; metric 0\.25; saved by 1 rank of accelfn \S+; 1 file of tensors, \d+\.\d kB", lines[1]
    )
    assert re.fullmatch(r"random states of 1 rank: python, torch(, numpy)?", lines[2])
    rows = [tuple(re.split(r" {2,}", line)) for line in lines[3:]]
    assert rows[:4] == [
        ("net/weight", "float32 [2, 3], 24 B"),
        ("net/bias", "float32 [2], 8 B"),
        ("optimizer/state/net~1weight/momentum_buffer", "float32 [2, 3], 24 B"),
        ("optimizer/state/net~1bias/momentum_buffer", "float32 [2], 8 B"),
    ]
    assert ("optimizer/groups/0/lr", "0.1") in rows
    assert rows[-7:] == [
        ("epoch", "3"),
        ("place", "(1, inf, torch.bfloat16)"),
        ("text", f"{'x' * 57}..."),
        ("twice/0", "float32 [2], 8 B"),
        ("twice/1", "same as twice/0"),
        ("empty", "{}"),
        ("none", "None"),
    ]
    # The tensors aren't read.
    damage(place)
    assert shown(place, read)[3:] == lines[3:]


def test_a_part_is_found_by_its_path_however_slashes_are_written(tmp_path: Path, read: Read) -> None:
    state = {"net/weight": {"step": torch.ones(())}, "net": {"weight": 1}}
    place = save(tmp_path, 1, optimizer={"state": state, "lr": 0.1})
    for path in ("optimizer/state/net/weight/step", "optimizer/state/net~1weight/step"):
        assert shown(place, read, path) == ["optimizer/state/net~1weight/step  float32 [], 4 B"]
    assert shown(place, read, "optimizer/lr") == ["optimizer/lr  0.1"]
    assert run("show", place, "optimizer/nope") == 2


def test_long_parts_are_cut(tmp_path: Path, read: Read) -> None:
    place = save(tmp_path, 1, many={f"n{index}": torch.ones(1) for index in range(324)})
    lines = shown(place, read)
    assert re.fullmatch(r"\.\.\. and 300 more in many  1\.2 kB", lines[-1])
    assert lines[-2].startswith("many/n23 ")
    assert len(shown(place, read, "--all")) == len(lines) - 1 + 300
    assert len(shown(place, read, "many")) == 324
    for size, expected in ((24, 24), (25, 25), (26, 25)):  # "1 more" says no less than the row itself
        place = save(tmp_path, 2, many={f"n{index}": torch.ones(1) for index in range(size)})
        lines = [line for line in shown(place, read) if "many" in line]
        assert len(lines) == expected


def test_what_differs_between_ranks_is_marked(tmp_path: Path, read: Read) -> None:
    def save_all(ctx: af.Context) -> None:
        own = torch.full((2,), float(ctx.rank))
        part = {"a": torch.ones(ctx.rank % 2 + 1), "b": (ctx.rank, 5)}
        tree = {"own": own, "rank": ctx.rank, "odd": ctx.rank % 2, "part": part, "same": torch.ones(1)}
        save_state(ctx, tmp_path / "run", tree)

    run_ranks(save_all, 3, on="memory")
    lines = shown(tmp_path / "run", read)
    assert re.fullmatch(r"random states of 3 ranks: python, torch(, numpy)?", lines[2])
    assert [tuple(re.split(r" {2,}", line)) for line in lines[3:]] == [
        *((f"own (rank {rank})", "float32 [2], 8 B") for rank in range(3)),
        *((f"rank (rank {rank})", f"{rank}") for rank in range(3)),
        *(("odd (rank 0,2)", "0"), ("odd (rank 1)", "1")),
        *(("part/a (rank 0,2)", "float32 [1], 4 B"), ("part/a (rank 1)", "float32 [2], 8 B")),
        *((f"part/b (rank {rank})", f"({rank}, 5)") for rank in range(3)),
        ("same", "float32 [1], 4 B"),
    ]
    assert run("show", tmp_path / "run", "--json") == 0
    reported = json.loads(read())
    assert reported["world_size"] == 3
    leaves = [one for one in reported["leaves"] if one["path"] in ("odd", "own")]
    tensor = {"path": "own", "kind": "tensor", "dtype": "float32", "shape": [2], "bytes": 8}
    assert leaves == [
        *({**tensor, "ranks": [rank]} for rank in range(3)),
        *({"path": "odd", "ranks": ranks, "value": value} for value, ranks in enumerate(([0, 2], [1]))),
    ]


def test_the_json_is_the_essence_of_the_manifest(tmp_path: Path, read: Read) -> None:
    place = save(tmp_path, 4, 0.5, dtype=torch.float16)
    assert run("show", tmp_path, "--json") == 0
    reported = json.loads(read())
    assert reported.pop("files") == {
        "tensors-00000.safetensors": os.path.getsize(place / "tensors-00000.safetensors")
    }
    assert reported.pop("created_by").startswith("accelfn ")
    assert {"python", "torch"} <= set(reported.pop("random"))
    tensor = {"kind": "tensor", "dtype": "float32"}
    assert reported == {
        "path": str(place),
        "step": 4,
        "metric": 0.5,
        "world_size": 1,
        "leaves": [
            {"path": "model/w", **tensor, "shape": [2, 3], "bytes": 24},
            {"path": "model/b", **tensor, "shape": [2], "bytes": 8},
            {"path": "epoch", "value": 4},
            {"path": "dtype", "value": "torch.float16"},
        ],
    }


# --- prune ---------------------------------------------------------------------------------------


def test_the_plan_is_printed_and_done(tmp_path: Path, read: Read) -> None:
    for step, metric in ((10, 0.1), (20, 0.9), (30, 0.5), (40, 0.4)):
        save(tmp_path, step, metric)
    killed = dead_save(tmp_path)
    rules = ("--last", "1", "--every=20", "--best", "1", "--mode", "min")
    plan = [
        "keep    step_10",
        "keep    step_20",
        "keep    step_40",
        "remove  step_30",
        f"remove  {killed.name} (left by a save that was killed)",
    ]
    assert run("prune", tmp_path, *rules, "--dry-run") == 0
    assert read().splitlines() == [*plan, "nothing was removed: --dry_run"]
    assert (tmp_path / "step_30").is_dir()
    assert killed.is_dir()
    assert run("prune", tmp_path, *rules) == 0
    assert read().splitlines() == [*plan, "removed 1 checkpoint and 1 leftover"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_20", "step_40"]


def test_a_checkpoint_with_somebodys_files_stays_and_the_plan_says_so(tmp_path: Path, read: Read) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step_1" / "notes.txt").write_text("mine")
    assert run("prune", tmp_path, "--last", 1) == 0
    assert read().splitlines() == [
        "keep    step_1 (it contains other files: notes.txt; move them away)",
        "keep    step_2",
        "removed 0 checkpoints and 0 leftovers",
    ]


def test_without_a_rule_only_leftovers_go(tmp_path: Path, read: Read) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    killed = dead_save(tmp_path)
    assert run("prune", tmp_path) == 0
    assert read().splitlines()[-1] == "removed 0 checkpoints and 1 leftover"
    assert not killed.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


# --- convert -------------------------------------------------------------------------------------


def test_a_folder_of_accelerate_is_converted_with_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    monkeypatch.chdir(tmp_path)
    names = ("--name", "model=net", "--name=optimizer=opt", "--step", "7")
    assert run("convert", folder, "here", "--to", "accelfn", *names) == 0
    assert capsys.readouterr().out.splitlines() == [
        "here: net, opt",
        "note: It has no random states: loading it leaves the generators unchanged.",
    ]
    other: Any = nn.Linear(3, 3)
    fresh: Any = torch.optim.SGD([{"params": [other.bias]}, {"params": [other.weight]}], 0.5)
    load_state(af.Context(), "here", {"net": other, "opt": fresh})
    assert torch.equal(other.weight, model.weight)
    assert str(fresh.state_dict()) == str(state)


def test_weights_are_extracted_and_targets_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = save(tmp_path, 1)
    theirs, bare = write_folder(tmp_path / "theirs", {"custom_checkpoint_0.pkl": 1}), tmp_path / "bare"
    assert run("convert", place, bare, "--to", "safetensors", "--max-shard-size", "24B") == 0
    assert "model-00001-of-00002.safetensors" in capsys.readouterr().out
    assert run("convert", place, bare, "--to", "safetensors") == 2
    assert "exists already" in capsys.readouterr().err
    assert run("convert", theirs, place, "--to", "accelfn") == 2
    assert run("convert", theirs, place, "--to", "accelfn", "--overwrite") == 0


def test_a_damaged_source_has_a_status_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = save(tmp_path, 1)
    damage(place)
    assert run("convert", place, tmp_path / "new", "--to", "safetensors") == 1
    assert "accelfn checkpoint convert: damaged: " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# --- bad input -----------------------------------------------------------------------------------

BAD: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), "command must be given"),
    (("look",), "got 'look'"),
    (("verify",), "DIRECTORY must be given"),
    (("verify", "/no/such"), "the directory /no/such doesn't exist"),
    (("list", "pyproject.toml"), "the directory pyproject.toml is a file"),
    (("show", ".", "--nonsense"), "--nonsense"),
    (("prune", ".", "--last", "0"), "--last must be at least 1, got 0"),
    (("prune", ".", "--best", "2"), "--best needs --mode"),
    (("prune", ".", "--mode", "low"), "got 'low'"),
    (("convert", ".", "new"), "--to"),
    (("convert", ".", "new", "--to", "accelfn", "--name", "model"), "--name must be OLD=NEW"),
)


@pytest.mark.parametrize(("argv", "output"), BAD, ids=str)
def test_bad_input_is_one_sentence(
    argv: tuple[str, ...], output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(*argv) == 2
    assert output in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("action", ["list", "prune"])
def test_a_checkpoint_is_no_directory_of_checkpoints(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = save(tmp_path, 1)
    assert run(action, place) == 2
    assert "is a checkpoint. Pass its parent directory" in capsys.readouterr().err


PROBE = """
import json, sys
from accelfn.launch.main import main
for argv in json.loads(sys.argv[1]):
    status = main(["checkpoint", *argv])
    heavy = sorted({"torch", "optree", "safetensors", "numpy"} & set(sys.modules))
    print(f"\\nstatus={status} heavy={heavy}")
"""


def test_help_and_bad_input_answer_without_torch() -> None:
    helps = [["--help"], *([action, "--help"] for action in ("verify", "list", "show", "prune", "convert"))]
    bad = [list(argv) for argv, _ in BAD]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([*helps, *bad])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("status=")]
    assert ends == ["status=0 heavy=[]"] * len(helps) + ["status=2 heavy=[]"] * len(bad)
