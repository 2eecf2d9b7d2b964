"""Whenever a save of a model is interrupted, a reader finds the complete old model or the new one."""

import functools
import io
import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import safetensors.torch
import torch

import accelfn as af
from accelfn import Context
from accelfn.checkpoint import find_weights
from accelfn.storage.disk import REAL_DISK
from tests.checkpoint.watched_disk import installed
from tests.checkpoint.weights.models import Bag

Naming = Literal["transformers", "diffusers"]
Disk = Mapping[str, bytes]


def bag(value: int) -> Bag:
    return Bag(**{name: torch.full((4,), value, dtype=torch.uint8) for name in "abc"})


class Layout(NamedTuple):
    num_files: int
    safe: bool

    def save(self, folder: Path, value: int, names: Naming) -> tuple[Path, ...]:
        size = {1: 12, 2: 8, 3: 4}[self.num_files]
        return af.save_model(Context(), bag(value), folder, size, self.safe, names)


LAYOUTS = [Layout(num_files, safe) for safe in (True, False) for num_files in (1, 2, 3)]
ENTRIES: dict[Naming, tuple[str, ...]] = {  # in the order in which each library looks for them
    "transformers": (
        *("model.safetensors", "model.safetensors.index.json"),
        *("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ),
    "diffusers": (
        *("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"),
        *("diffusion_pytorch_model.bin.index.json", "diffusion_pytorch_model.bin"),
    ),
}


@functools.cache
def read_file(content: bytes, safe: bool) -> dict[str, int]:
    loaded: dict[str, torch.Tensor] = (
        safetensors.torch.load(content) if safe else torch.load(io.BytesIO(content), weights_only=True)
    )
    for tensor in loaded.values():
        assert torch.equal(tensor, tensor[0].expand(4))
    return {name: int(tensor[0]) for name, tensor in loaded.items()}


def read(disk: Disk, order: tuple[str, ...]) -> int | None:
    """Read a model as other libraries do, and return the number that fills it; None without a model."""
    entry = next((name for name in order if name in disk), None)
    if entry is None:
        return None
    safe = "safetensors" in entry
    if not entry.endswith(".json"):
        values = read_file(disk[entry], safe)
    else:
        weight_map: dict[str, str] = json.loads(disk[entry])["weight_map"]
        values = {name: read_file(disk[file], safe)[name] for name, file in weight_map.items()}
    assert sorted(values) == ["a", "b", "c"]
    assert len(set(values.values())) == 1, f"a mix: {values}"
    return values["a"]


def content(folder: Path) -> Disk:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Watch(NamedTuple):
    """States of a directory during a save.

    Attributes:
        kills: The states that a kill may leave.
        cuts: The states that a power cut may leave: contents that weren't flushed are lost, and any subset of
            the renames and removals since the last flush of the directory has happened.
    """

    kills: list[Disk]
    cuts: list[Disk]


def watched(folder: Path, save: Callable[[], object]) -> Watch:
    kills: list[Disk] = []
    cuts: list[Disk] = []
    durable: dict[str, bytes] = dict(content(folder))
    pending: list[tuple[str, bytes | None]] = []
    flushed: set[int] = set()

    def look() -> None:
        kills.append(content(folder))
        for chosen in itertools.product((True, False), repeat=len(pending)):
            state = dict(durable)
            for (name, data), happened in zip(pending, chosen, strict=True):
                if happened and data is not None:
                    state[name] = data
                elif happened:
                    state.pop(name, None)
            cuts.append(state)

    def move(source: str, target: str) -> None:
        is_flushed = os.stat(source).st_ino in flushed
        pending.append((Path(target).name, Path(source).read_bytes() if is_flushed else b"torn"))
        REAL_DISK.rename(source, target)
        look()

    def remove(path: str) -> None:
        REAL_DISK.remove_file(path)
        if Path(path).parent == folder:
            pending.append((Path(path).name, None))
        look()

    def sync(descriptor: int) -> None:
        REAL_DISK.sync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)
        look()

    def sync_folder(path: str) -> None:
        REAL_DISK.sync_folder(path)
        if Path(path) == folder:
            for name, data in pending:
                if data is not None:
                    durable[name] = data
                else:
                    durable.pop(name, None)
            pending.clear()
        look()

    disk = replace(REAL_DISK, rename=move, remove_file=remove, sync=sync, sync_folder=sync_folder)
    with installed(disk):
        save()
    look()
    return Watch(kills, cuts)


@pytest.mark.parametrize("names", ENTRIES)
@pytest.mark.parametrize("new", LAYOUTS, ids=str)
def test_a_reader_finds_the_old_model_or_the_new_one(new: Layout, names: Naming, tmp_path: Path) -> None:
    # For readers with any order of preference.
    orders = list(itertools.permutations(ENTRIES[names]))
    for number, old in enumerate((None, *LAYOUTS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if old is not None:
            old.save(folder, 1, names)
        watch = watched(folder, lambda folder=folder: new.save(folder, 2, names))
        before = None if old is None else 1
        for seen in (watch.kills, watch.cuts):
            for order in orders:
                values = [read(disk, order) for disk in seen]
                assert set(values) <= {before, 2}
                assert {before, 2} <= set(values)  # otherwise the test observes too few states
                assert values[-1] == 2
        for order in orders:  # the old model never comes back
            values = [read(disk, order) for disk in watch.kills]
            assert values == sorted(values, key=lambda value: value or 0)


@pytest.mark.parametrize("names", ENTRIES)
@pytest.mark.parametrize("new", LAYOUTS, ids=str)
def test_stale_sets_of_other_programs_never_become_visible(
    new: Layout, names: Naming, tmp_path: Path
) -> None:
    # Other programs left a stale set of each kind, of which the library reads the first.
    (tmp_path / "old").mkdir()
    for value, old in enumerate((Layout(1, True), Layout(2, True), Layout(1, False), Layout(2, False)), 3):
        old.save(tmp_path / "old", value, names)
        for path in (tmp_path / "old").iterdir():
            path.rename(tmp_path / path.name)
    (tmp_path / "old").rmdir()
    order = ENTRIES[names]
    first = read(content(tmp_path), order)
    assert first in (3, 4)
    watch = watched(tmp_path, lambda: new.save(tmp_path, 2, names))
    for seen in (watch.kills, watch.cuts):
        assert {read(disk, order) for disk in seen} == {first, 2}


@pytest.mark.parametrize("old", LAYOUTS, ids=str)
@pytest.mark.parametrize("new", [Layout(1, True), Layout(3, True), Layout(2, False)], ids=str)
def test_after_a_kill_the_model_loads_and_the_next_save_cleans_up(
    old: Layout, new: Layout, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    old.save(folder, 1, "transformers")
    (folder / "config.json").write_text("{}")
    watch = watched(folder, lambda: new.save(folder, 2, "transformers"))
    for number, disk in enumerate(watch.kills):
        state = tmp_path / f"state{number}"
        state.mkdir()
        for name, data in disk.items():
            (state / name).write_bytes(data)
        assert len(find_weights(state).files) in (old.num_files, new.num_files)
        model = bag(0)
        af.load_model(model, state)
        value = read(content(state), ENTRIES["transformers"])
        assert [int(buffer[0]) for buffer in model.buffers()] == [value] * 3
        files = new.save(state, 3, "transformers")
        assert {path.name for path in state.iterdir()} == {"config.json", *(path.name for path in files)}
        assert read(content(state), ENTRIES["transformers"]) == 3


def test_one_program_saves_at_a_time(tmp_path: Path) -> None:
    refused: list[OSError] = []

    def rename(source: str, target: str) -> None:
        if not refused:
            with pytest.raises(BlockingIOError, match="another program or rank is saving") as caught:
                Layout(1, True).save(tmp_path, 5, "transformers")
            refused.append(caught.value)
        REAL_DISK.rename(source, target)

    with installed(replace(REAL_DISK, rename=rename)):
        Layout(1, True).save(tmp_path, 1, "transformers")
    assert refused[0].filename == str(tmp_path)
    Layout(1, True).save(tmp_path, 2, "transformers")
    assert read(content(tmp_path), ENTRIES["transformers"]) == 2


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize("old", [Layout(1, True), Layout(2, True), Layout(1, False)], ids=str)
def test_a_failure_of_any_step_keeps_one_complete_model(old: Layout, step: int, tmp_path: Path) -> None:
    # An error, unlike a kill, leaves no temporary files.
    old.save(tmp_path, 1, "transformers")
    before = content(tmp_path)
    calls = itertools.count()

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(*arguments: Any) -> Any:
            if next(calls) == step:
                raise OSError(28, "No space left on device")
            return getattr(REAL_DISK, name)(*arguments)

        return refuse

    with installed(
        replace(REAL_DISK, **{name: refusing(name) for name in ("rename", "sync", "sync_folder")})
    ):
        failed, name = False, None
        try:
            Layout(2, True).save(tmp_path, 2, "transformers")
        except OSError as error:
            failed, name = error.errno == 28, error.filename
    after = content(tmp_path)
    assert failed == (step < next(calls))
    assert not failed or name is not None or step in (3, 4, 6)  # a rename; what is flushed is named
    assert len(list(tmp_path.iterdir())) == len(after)
    assert read(after, ENTRIES["transformers"]) in ((1, 2) if failed else (2,))
    if step < 7:  # three files are flushed, the shards renamed and flushed, and the index is next
        assert after == before
    Layout(3, True).save(tmp_path, 3, "transformers")
    assert len(content(tmp_path)) == 4


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [1, 2])
def test_without_locks_a_reader_finds_one_model_whenever_another_program_saves(
    first: int, second: int, tmp_path: Path
) -> None:
    left = 0

    def then(name: str, folder: Path) -> Callable[..., None]:
        def call(*paths: str) -> None:
            nonlocal left
            getattr(REAL_DISK, name)(*paths)
            left -= 1
            if left == 0:
                Layout(second, True).save(folder, 3, "transformers")

        return call

    def lock(path: str) -> None:
        """Say that there are no locks."""

    for old, step in itertools.product((None, 2), range(1, 7)):
        folder = tmp_path / f"{old} {step}"
        own = {name: then(name, folder) for name in ("rename", "remove_file")}
        with installed(replace(REAL_DISK, lock=lock, **own)):
            if old:
                Layout(old, True).save(folder, 1, "transformers")
            left = step
            Layout(first, True).save(folder, 2, "transformers")
        for order in itertools.permutations(ENTRIES["transformers"]):
            assert read(content(folder), order) in (2, 3)
