"""A checkpoint that isn't what was written, or was made to harm: refused, and nothing is changed by it."""

import json
import os
import pickle
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.checkpoint import Keep
from accelfn.context import Context
from accelfn.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedCheckpointError,
    NoCheckpointError,
    NotAvailableError,
    RemoteRankError,
)
from accelfn.testing import run_ranks
from tests.checkpoint.campaign import forked, listing
from tests.checkpoint.small import Bomb, flip, rewrite, said, seal
from tests.checkpoint.state.test_faults import check, state
from tests.checkpoint.watched_disk import watched

MANIFEST = "manifest.json"
TENSORS = "tensors-00000.safetensors"
BOTH = pytest.mark.parametrize("name", [MANIFEST, TENSORS])
Change = Callable[[dict[str, Any]], object]


def tree_of(value: float) -> dict[str, Any]:
    """Return a state that has something of everything."""
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return {"model": model, "own": torch.full((4,), value), "free": nn.Parameter(torch.ones(2)), "step": 1}


def saved(path: Path, value: float = 1.0) -> Path:
    return af.save_state(Context(), path, tree_of(value), step=3, metric=0.5)


def bits(tree: dict[str, Any]) -> str:
    return repr((tree["model"].state_dict(), tree["own"], tree["free"], tree["step"], torch.get_rng_state()))


def refused(
    path: Path,
    kinds: type[Exception] | tuple[type[Exception], ...] = DamagedCheckpointError,
    reads: tuple[Callable[[Path], object], ...] = (af.load_tree, af.verify_checkpoint),
) -> str:
    """Check that nothing takes up what is at ``path``, and that trying to changes nothing."""
    like = tree_of(0.0)
    before, there = bits(like), listing(path)
    with pytest.raises(kinds) as caught:
        af.load_state(Context(), path, like)
    for read in reads:
        with pytest.raises(kinds):
            read(path)
    assert bits(like) == before
    assert listing(path) == there
    return str(caught.value)


def test_a_sound_one_is_described(tmp_path: Path) -> None:
    report = af.verify_checkpoint(saved(tmp_path / "at"))
    assert (report.path, report.files) == (tmp_path / "at", (TENSORS,))
    assert report.num_bytes == (tmp_path / "at" / TENSORS).stat().st_size
    assert report.num_tensors == len(said(tmp_path / "at")["tensors"])
    assert (report.step, report.metric, report.world_size) == (3, 0.5, 1)
    assert af.verify_checkpoint(tmp_path) == report


# --- damage --------------------------------------------------------------------------------------


def test_every_byte_counts(tmp_path: Path) -> None:
    path = af.save_tree(tmp_path / "at", {"a": torch.arange(5), "b": torch.ones(2, 2), "name": "x"})
    unnoticed: list[tuple[str, int]] = []
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(len(content)):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            file.write_bytes(changed)
            for read in (af.verify_checkpoint, af.load_tree):
                try:
                    read(path)
                except DamagedCheckpointError:
                    continue
                unnoticed.append((file.name, place))
        file.write_bytes(content)
    assert unnoticed == []
    af.verify_checkpoint(path)


@given(st.data(), st.sampled_from([MANIFEST, TENSORS]))
def test_any_change_of_bytes_and_of_the_length_is_found(data: st.DataObject, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder) / "at")
        content = (path / name).read_bytes()
        start = data.draw(st.integers(0, 10**6)) % (len(content) + 1)
        rest = content[start + data.draw(st.integers(0, 40) | st.just(10**6)) :]
        changed = content[:start] + data.draw(st.binary(max_size=40) | st.just(content)) + rest
        (path / name).write_bytes(changed)
        if changed == content:
            af.verify_checkpoint(path)
        else:
            # The states of random numbers, which load_tree doesn't return, aren't read by it.
            assert name in refused(path, reads=(af.verify_checkpoint,))


def test_a_file_that_is_missing_and_one_too_many(tmp_path: Path) -> None:
    path = saved(tmp_path / "at")
    report = af.verify_checkpoint(path)
    extra = path / "weights.safetensors"
    shutil.copy(path / TENSORS, extra)
    (path / ".hidden").write_text("")
    load_state = partial(af.load_state, Context(), like=tree_of(0.0))
    reads: tuple[Callable[[Path], object], ...] = (af.verify_checkpoint, af.load_tree, load_state)
    for read in reads:
        with pytest.warns(UserWarning, match=f"not part of the checkpoint: .hidden, {extra.name}"):
            found = read(path)
        assert read is not af.verify_checkpoint or found == report
    extra.unlink()
    (path / ".hidden").unlink()
    kept = (path / TENSORS).read_bytes()
    (path / TENSORS).unlink()
    assert "is missing" in refused(path)
    (path / TENSORS).write_bytes(kept)
    (path / MANIFEST).unlink()
    assert "no manifest.json" in refused(path, NoCheckpointError)


@BOTH
def test_a_file_of_another_checkpoint_of_the_same_shapes(tmp_path: Path, name: str) -> None:
    one, other = saved(tmp_path / "one"), saved(tmp_path / "other", 2.0)
    assert (one / TENSORS).stat().st_size == (other / TENSORS).stat().st_size
    shutil.copy(other / name, one / name)
    assert "aren't what was written" in refused(one)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@BOTH
def test_something_else_than_a_file(tmp_path: Path, name: str) -> None:
    file = saved(tmp_path / "at") / name
    elsewhere = file.rename(tmp_path / "elsewhere")
    for make in (
        lambda: file.symlink_to(elsewhere),
        lambda: file.symlink_to("/dev/zero"),
        lambda: os.mkfifo(file),
        file.mkdir,
    ):
        make()
        assert "must be a plain file" in refused(file.parent)
        file.rmdir() if file.is_dir() else file.unlink()


def test_errors_name_leaves_as_the_tree_does(tmp_path: Path) -> None:
    path = af.save_tree(tmp_path / "at", {"optimizer": {"model/p.weight": {"a~b": torch.arange(50)}}})
    flip(path / TENSORS, -5)
    with pytest.raises(DamagedCheckpointError, match=r"tensor 'optimizer/model/p\.weight/a~b' aren't"):
        af.verify_checkpoint(path)


# --- made to harm --------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("protocol", [0, 2, 5, "torch"])
def test_no_pickle_goes_off(tmp_path: Path, name: str, protocol: int | str) -> None:
    path, marker = saved(tmp_path / "at"), tmp_path / "marker"
    if isinstance(protocol, str):
        torch.save(Bomb(marker), path / name)
    else:
        (path / name).write_bytes(pickle.dumps(Bomb(marker), protocol))
    refused(path)
    content = (path / name).read_bytes()
    if name == MANIFEST:  # sealed, so that the checksum is right
        seal(path, content.partition(b"\n")[0])
    else:
        rewrite(path, lambda manifest: manifest["files"].update({TENSORS: [0, len(content), 0, 0]}))
    refused(path)
    assert not marker.exists()


def renamed(name: str) -> Change:
    """Return a change of the name of the file of tensors in the manifest."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"] = {name: manifest["files"][TENSORS]}

    return change


def parts(*boxes: tuple[list[int], list[int]]) -> Change:
    """Return a change of the boxes of a tensor of four elements in the manifest."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"]["own"][2:] = [None, 0]
        manifest["layouts"] = [[[0, *box] for box in boxes]]

    return change


def field(*path: str | int, value: Any) -> Change:
    """Return a change of a value in the manifest."""

    def change(manifest: dict[str, Any]) -> None:
        here: Any = manifest
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value

    return change


def both(*changes: Change) -> Change:
    """Return several changes as one."""

    def change(manifest: dict[str, Any]) -> None:
        for one in changes:
            one(manifest)

    return change


OWN = ("tensors", "own")
HARMFUL: dict[str, Change] = {
    **{
        f"file {name[:20]!r}": renamed(name)
        for name in (
            *("../x", "/etc/passwd", "a\0b", "x" * 5000, "", ".", "..", "a/b", "a\\b", "ä", ".x", "-x\n"),
            *(MANIFEST, "../at/" + TENSORS, "./" + TENSORS, "\ud800"),
        )
    },
    "parts overlap": parts(([0], [3]), ([2], [1])),
    "parts overlap, all": parts(([0], [2]), ([0], [2])),
    "parts leave a gap": parts(([0], [1]), ([3], [1])),
    "no part": parts(),
    "a part outside": parts(([1], [4])),
    "a part before": parts(([-1], [4])),
    "a part of another form": parts(([0, 0], [2, 2])),
    "a part of a number": parts(([0.0], [4])),  # pyright: ignore[reportArgumentType]
    "huge": field(*OWN, 1, value=[1 << 60]),
    "huge, in parts": parts(([0], [1 << 60]), ([1 << 60], [1 << 60])),
    "another shape": field(*OWN, 1, value=[2, 2]),
    "another dtype": field(*OWN, 0, value="int32"),
    "no dtype": field(*OWN, 0, value="load"),
    "a dtype of no text": field(*OWN, 0, value=3),
    "a rank without a file": field(*OWN, 2, value=1),
    "a rank below all": field(*OWN, 2, value=-1),
    "a rank of no number": field(*OWN, 2, value=[0]),
    "a rank of no number in a layout": both(
        parts(([0], [2]), ([2], [2])), field("layouts", 0, 1, 0, value={})
    ),
    "no rank": field(*OWN, 2, value=None),
    "no such layout": field(*OWN, value=["float32", [4], None, 0]),
    "a layout from the end": both(parts(([0], [2]), ([2], [2])), field(*OWN, 3, value=-1)),
    "a rank and a layout": both(parts(([0], [2]), ([2], [2])), field(*OWN, 2, value=0)),
    "file of no rank": field("files", TENSORS, 0, value=1),
    "file too small": field("files", TENSORS, 1, value=10),
    "file negative": field("files", TENSORS, 1, value=-1),
    "header": field("files", TENSORS, 2, value=0),
    "checksums": field("files", TENSORS, 3, value=0),
    "a file without checksums": field("files", TENSORS, value=[0, 10, 0]),
    "no files": field("files", value={}),
    "a list of files": field("files", value=[]),
    "no tensors": field("tensors", value={}),
    "an entry that no tensor has": lambda manifest: manifest["tensors"].pop("own"),
    "version 0": field("version", value=0),
    "version as text": field("version", value="1"),
    "another format": field("format", value="zip"),
    "chunk_bytes": field("chunk_bytes", value=1),
    "world_size": field("world_size", value=0),
    "step": field("step", value="1"),
    "metric": field("metric", value="1"),
    "by rank": field("tree", "own", value={"$": "by_rank", "values": [], "of": []}),
    "by rank, negative": field("tree", "own", value={"$": "by_rank", "values": [1], "of": [-1]}),
    "random by rank": field("random", value={"$": "by_rank", "values": [], "of": [3]}),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_manifest_that_was_made_to_harm(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "at")
    shutil.copy(path / TENSORS, tmp_path / "x")  # where one of them points to
    rewrite(path, HARMFUL[name])
    like = tree_of(0.0)
    before = bits(like)
    why = "is no name of a file of tensors" if name.startswith("file '") else "."
    with pytest.raises(CheckpointError, match=why):
        af.load_state(Context(), path, like)
    assert bits(like) == before


def test_parts_that_overlap_leave_no_memory_of_others_to_be_read(tmp_path: Path) -> None:
    path = af.save_tree(tmp_path / "at", {"x": torch.ones(2), "y": torch.ones(2)})

    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"] = {"x": ["float32", [4], None, 0]}
        manifest["layouts"] = [[[0, [0], [2]], [0, [0], [2]]]]  # each at 0, so that nothing is at 2
        manifest["tree"].pop("y")

    rewrite(path, change)
    for read in (af.load_tree, af.verify_checkpoint):
        with pytest.raises(DamagedCheckpointError, match="overlap"):
            read(path)


@pytest.mark.parametrize("opening", [b'{"tree":[', b"["])
def test_a_manifest_that_nests_without_end(tmp_path: Path, opening: bytes) -> None:
    path = saved(tmp_path / "at")
    seal(path, opening * 200_000)
    refused(path)
    line = json.dumps({**said(saved(tmp_path / "other")), "tree": "HERE"}).replace(
        '"HERE"', "[" * 20_000 + "]" * 20_000
    )
    seal(path, line.encode())
    refused(path)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_a_tree_that_contains_itself(tmp_path: Path, on: Any) -> None:
    endless: list[Any] = [1]
    endless.append(endless)

    def run(ctx: Context) -> str:
        with pytest.raises(TypeError, match=r"^the tree has a container that contains itself"):
            af.load_state(ctx, tmp_path / "new", {"own": endless})
        with pytest.raises((TypeError, RemoteRankError)) as caught:
            af.save_state(ctx, tmp_path / "new", {"own": endless if ctx.rank == 1 else [1]})
        return str(caught.value)

    first, second = run_ranks(run, 2, on=on)
    assert "rank 1 failed in save_state: TypeError: the tree has a container that contains itself" in first
    assert second.startswith("the tree has a container that contains itself")
    assert not any(tmp_path.iterdir())


def test_an_optimizer_alone_says_that_its_model_is_missing(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    af.save_state(Context(), tmp_path / "new", {"model": model, "optimizer": optimizer})
    with pytest.raises(CheckpointMismatchError, match=r"parameter #0, .*: put its model in the tree too"):
        af.load_state(Context(), tmp_path / "new", {"optimizer": optimizer}, partial=True)
    af.load_state(Context(), tmp_path / "new", {"model": model, "optimizer": optimizer})


def test_a_manifest_of_a_version_to_come(tmp_path: Path) -> None:
    path = saved(tmp_path / "at")
    rewrite(path, field("version", value=2))
    assert "Update accelfn" in refused(path, NotAvailableError)


# --- while it is read ----------------------------------------------------------------------------


def test_a_checkpoint_that_is_removed_while_it_is_looked_at_is_not_damaged(tmp_path: Path) -> None:
    af.save_state(Context(), tmp_path / "step-1", {"a": torch.ones(2)}, step=1)

    def watch(kind: str, path: str) -> None:
        if kind == "open_file" and path.endswith("step-1/manifest.json") and os.path.exists(path):
            af.save_state(Context(), tmp_path / "step-2", {"a": torch.zeros(2)}, step=2, keep=Keep(last=1))

    assert af.latest_checkpoint(tmp_path, disk=watched(watch)) == tmp_path / "step-2"
    assert os.listdir(tmp_path) == ["step-2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the other program is forked")
@pytest.mark.parametrize(("ranks", "rotated"), [(1, False), (2, True)])
def test_each_load_is_whole_while_another_program_saves_and_removes(
    tmp_path: Path, ranks: int, rotated: bool
) -> None:
    def save(step: int) -> None:
        at = tmp_path / (f"step-{step}" if rotated else "at")
        af.save_state(Context(), at, state(step), step=step, keep=Keep(last=1) if rotated else None)

    def load(ctx: Context) -> int | None:
        try:
            found = af.load_state(ctx, tmp_path if rotated else tmp_path / "at", state(0))
        except CheckpointError as error:
            # It is removed again and again as it is read, or after one rank has found it.
            if "changes all the time" not in str(error) and "and rank 1 doesn't" not in str(error):
                raise
            return None
        check(found, cast("int", found["step"]))
        return found["step"]

    save(0)
    child = forked(lambda: [save(step) for step in range(1, 60)])
    steps: list[list[int | None]] = []
    end = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < end:
        steps.append(run_ranks(load, ranks))
    whole = [step for step, *_ in steps if step is not None]
    assert all(len(set(ranks)) == 1 for ranks in steps)
    assert whole == sorted(whole)
    assert whole
    assert run_ranks(load, ranks) == [59] * ranks


def test_random_states_that_cannot_be_restored_change_nothing_on_any_rank(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        tree = tree_of(1.0)
        af.save_state(ctx, tmp_path / "at", tree)
        if ctx.is_main_process:
            rewrite(tmp_path / "at", break_last)
        torch.manual_seed(7 + ctx.rank)  # pyright: ignore[reportUnknownMemberType]
        before = random.getstate(), torch.get_rng_state()
        nn.init.constant_(tree["model"].weight, 3.0)
        af.gather_object(ctx, 0)
        with pytest.raises((TypeError, RuntimeError, RemoteRankError)):
            af.load_state(ctx, tmp_path / "at", tree)
        assert tree["model"].weight.unique().tolist() == [3.0]
        assert random.getstate() == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
        af.load_state(ctx, tmp_path / "at", tree, random_state=False)
        assert tree["model"].weight.unique().tolist() == [1.0]

    def break_last(manifest: dict[str, Any]) -> None:
        """Give torch's generator, on rank 1, the numbers of Python's, which have another form."""
        names = ["#random/torch", "#random/python/numbers@1"]
        manifest["random"]["torch"]["name"] = {"$": "by_rank", "values": names, "of": [0, 1]}

    run_ranks(run, 2, on="processes")
