"""Checkpoints and weights in object stores: whatever fails or is killed, the old ones stay."""

import functools
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.__main__ import main
from accelfn.bigmodel import load_checkpoint_and_dispatch
from accelfn.checkpoint import (
    Keep,
    convert_checkpoint,
    find_checkpoints,
    find_files,
    folder_for_files,
    prune_checkpoints,
    save_object,
    verify_checkpoint,
)
from accelfn.compat.accelerator import Accelerator as CompatAccelerator
from accelfn.context import Context
from accelfn.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MissingExtraError,
    NoCheckpointError,
    RemoteRankError,
)
from accelfn.storage.address import Address
from accelfn.testing import run_ranks
from tests.storage.objects import ADDRESS, Killed, Store, every_request, memory_store, object_store, store

__all__ = ["store"]

ERRORS: tuple[Callable[[str], BaseException], ...] = (
    lambda name: PermissionError(f"Access Denied: {name}"),  # without a number, as s3fs raises them
    lambda name: FileNotFoundError("The specified bucket does not exist"),
    lambda name: TimeoutError(),
    lambda name: RuntimeError("Connection reset"),
)


@pytest.fixture
def address(store: Store) -> Generator[str, None, None]:
    memory_store()
    yield ADDRESS
    memory_store()


def tree(step: int, size: int = 500) -> dict[str, Any]:
    return {"x": torch.full((size,), float(step)), "y": [torch.arange(9) * step], "step": step}


def save(place: str | os.PathLike[str], step: int, **options: Any) -> Any:
    return cast("Any", af.save_state(Context(), place, tree(step), step=step, **options))


def loaded(place: str | os.PathLike[str]) -> int | None:
    """Return the step of the newest checkpoint, all of whose values are right."""
    found = cast("Any", af.load_latest(Context(), place, tree(0)))
    if found is None:
        return None
    step = int(found["step"])
    assert torch.equal(found["x"], tree(step)["x"])
    assert torch.equal(found["y"][0], tree(step)["y"][0])
    return step


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [ADDRESS, "memory://runs", Path("memory://runs")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_is_saved_and_loaded(
    place: Any, asynchronous: bool, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert loaded(place) is None
    for step in (1, 2, 3, 4):
        path = save(f"{place}/step-{step}", step, asynchronous=asynchronous, keep=Keep(last=2))
        path = path.result() if asynchronous else path
        assert str(path) == f"{str(place).replace(':/r', '://r')}/step-{step}"
        assert isinstance(path, Address)
        assert loaded(place) == loaded(path) == step
    assert [one.name for one in find_checkpoints(place)] == ["step-3", "step-4"]
    report = verify_checkpoint(place)
    assert (report.path, report.step) == (path, 4)
    assert list(tmp_path.iterdir()) == []


def test_ranks_save_and_load_together(address: str) -> None:
    def run(ctx: Context) -> list[float]:
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        model = nn.Linear(3, 2)
        model, optimizer = af.prepare(ctx, model, torch.optim.AdamW(model.parameters()))
        value: dict[str, Any] = {"model": model, "optimizer": optimizer, "own": torch.tensor(float(ctx.rank))}
        for step in (1, 2):
            af.save_state(ctx, f"{ADDRESS}/{step}", value, step == 2, step=step, keep=Keep(last=1))
        back: Any = af.load_latest(ctx, ADDRESS, {**value, "own": torch.tensor(-1.0)})
        assert back is not None
        return [float(back["own"]), float(back["model"].weight.detach().sum())]

    zero, one = run_ranks(run, 2)
    assert (zero[0], one[0]) == (0, 1)
    assert zero[1] == one[1]


def test_the_callers_files_are_part_of_it(address: str, store: Store) -> None:
    ctx = Context()
    with folder_for_files(ctx, f"{address}/at") as folder:
        (folder / "tokens").mkdir()
        (folder / "tokens" / "vocab.txt").write_text("a b c")
        (folder / "empty").touch()
        save(f"{address}/at", 1, files=folder)
    files = find_files(ctx, address)
    assert store.objects[f"{files}/tokens/vocab.txt".removeprefix("objects://")][0] == b"a b c"
    assert [name.rpartition("/")[2] for name in verify_checkpoint(address).attachments] == [
        "empty",
        "vocab.txt",
    ]


@pytest.mark.parametrize("number", range(len(ERRORS)))
@pytest.mark.parametrize("rotated", [False, True])
def test_whatever_request_fails_the_old_one_stays_and_the_next_save_works(
    number: int, rotated: bool, address: str, store: Store
) -> None:
    place = address if rotated else f"{address}/at"

    def at(step: int) -> str:
        return f"{address}/{step}" if rotated else place

    save(at(1), 1)
    seen: set[int | None] = set()
    for faults, raised in every_request(store, ERRORS[number], lambda: save(at(2), 2, keep=Keep(last=1))):
        seen.add(now := loaded(place))
        if raised is None:
            assert now == 2, faults.request
        else:
            assert isinstance(raised, OSError), faults.request
            assert raised.errno is not None
            assert str(raised.filename).startswith("objects://bucket"), faults.request
        save(at(3), 3, keep=Keep(last=1))
        assert loaded(place) == 3
        assert len([name for name in store.names() if name.endswith("/manifest.json")]) == 1
    assert seen == {1, 2}


def test_whenever_a_program_is_killed_the_old_one_or_the_new_one_is_loaded(
    address: str, store: Store
) -> None:
    seen: set[int | None] = set()
    save(f"{address}/at", 1)
    for faults, raised in every_request(store, Killed, lambda: save(f"{address}/at", 2)):
        seen.add(loaded(address))
        assert isinstance(raised, Killed) == bool(faults.request)
        save(f"{address}/at", 3)
        assert loaded(address) == 3
    assert seen == {1, 2}


class KilledAtTheManifest:
    is_killed = False

    def __call__(self, kind: str, name: str) -> None:
        self.is_killed = self.is_killed or (kind == "upload" and name.endswith("manifest.json"))
        if self.is_killed:
            raise Killed


def test_what_killed_saves_left_is_removed_a_day_later_by_the_clock_of_the_store(
    address: str, store: Store
) -> None:
    save(f"{address}/at", 1)
    for place in ("at", "new"):
        store.watcher = KilledAtTheManifest()
        with pytest.raises(Killed):
            save(f"{address}/{place}", 2)
        store.watcher = lambda kind, name: None
    left = {*store.names()}
    assert {name.partition("/")[0] for name in left} == {"at", "new"}
    save(f"{address}/at", 4, keep=Keep(last=3))
    assert len(left - {*store.names()}) == 1  # the others may be of a save that runs
    # The clock of the store is a month ahead of this machine's.
    store.objects = {
        name: (content, time.time() + 30 * 86400) for name, (content, _) in store.objects.items()
    }
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.storage.objects.time.time", lambda: real() + 32 * 86400)
        save(f"{address}/at", 5, keep=Keep(last=3))
    assert [name.partition("-")[0] for name in store.names()] == ["at/manifest.json", "at/tensors"]


def test_every_byte_is_verified(address: str, store: Store) -> None:
    save(f"{address}/at", 1)
    for name, (content, when) in [*store.objects.items()]:
        for place in range(0, len(content), 37):
            damaged = bytearray(content)
            damaged[place] ^= 1
            store.objects[name] = bytes(damaged), when
            with pytest.raises(DamagedCheckpointError):
                verify_checkpoint(address)
            with pytest.raises(DamagedCheckpointError):
                loaded(address)
        store.objects[name] = content[:-1], when
        with pytest.raises(DamagedCheckpointError):
            loaded(address)
        del store.objects[name]
        with pytest.raises((DamagedCheckpointError, NoCheckpointError)):
            af.load_state(Context(), f"{address}/at", tree(0))
        store.objects[name] = content, when
    assert loaded(address) == 1


def test_lists_may_lack_new_names_and_have_old_ones(address: str, store: Store) -> None:
    save(f"{address}/at", 1)
    store.hidden = {name for name in store.objects if "tensors" in name}
    assert loaded(f"{address}/at") == 1
    verify_checkpoint(f"{address}/at")


def test_what_others_have_put_there_stays(address: str, store: Store) -> None:
    store.objects["bucket/runs/notes/mine.txt"] = b"mine", 0
    store.objects["bucket/runs/file"] = b"mine", 0
    with pytest.raises(CheckpointError, match="contains files but no checkpoint"):
        save(f"{address}/notes", 1)
    with pytest.raises(CheckpointError, match="is not a directory"):
        save(f"{address}/file", 1)
    with pytest.raises(NoCheckpointError, match="it is a file"):
        af.load_state(Context(), f"{address}/file", tree(0))
    with pytest.raises(NoCheckpointError, match="there is no such directory"):
        af.load_state(Context(), f"{address}/nothing", tree(0))
    for step in (1, 2, 3):
        save(f"{address}/{step}", step)
    store.objects["bucket/runs/1/mine.txt"] = b"mine", 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        removed = prune_checkpoints(address, Keep(last=1))
    assert [path.name for path in removed] == ["2"]
    assert "objects://bucket/runs/1 was not removed" in str(caught[0].message)
    assert {"notes/mine.txt", "file", "1/mine.txt", "1/manifest.json"} < {*store.names()}


def test_an_address_that_can_not_be_opened_is_an_error_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    model = nn.Linear(1, 1)
    acts: list[Callable[[str], object]] = [
        lambda at: af.save_tree(at, {"step": 1}),
        lambda at: save(at, 1),
        lambda at: save(at, 1, asynchronous=True).result(),
        lambda at: af.load_state(Context(), at, tree(0)),
        lambda at: af.load_latest(Context(), at, tree(0)),
        lambda at: af.save_model(Context(), model, at),
        lambda at: af.load_model(model, at),
    ]
    for act in acts:
        with pytest.raises(MissingExtraError, match=r"gs://bucket/run needs gcsfs: pip install gcsfs\.$"):
            act("gs://bucket/run")
        with pytest.raises(ValueError, match="hf\\+x://bucket can't be opened: Protocol not known"):
            act("hf+x://bucket")
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_is_missing_on_one_rank_is_told_on_all(address: str) -> None:
    def run(ctx: Context) -> str:
        place = address if ctx.rank == 0 else "nosuch://bucket/runs"
        with pytest.raises((RemoteRankError, ValueError), match="Protocol not known") as caught:
            af.save_state(ctx, place, tree(1))
        return type(caught.value).__name__

    assert run_ranks(run, 2) == ["RemoteRankError", "ValueError"]


# --- weights -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight if value < 0 else self.second.weight
        for parameter in self.parameters():
            parameter.data.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


WAYS = pytest.mark.parametrize(("size", "safe"), [("1GB", True), (60, True), ("1GB", False), (60, False)])


def value_of(place: str | os.PathLike[str]) -> float:
    model = Net(0)
    af.load_model(model, place)
    (value,) = {float(one) for parameter in model.parameters() for one in parameter.detach().flatten()}
    return value


@WAYS
def test_weights_are_saved_and_loaded(
    size: Any, safe: bool, address: str, store: Store, tmp_path: Path
) -> None:
    for other, is_safe in ((60, True), ("1GB", False), ("1GB", True), (60, False)):
        af.save_model(Context(), Net(1), f"{address}/net", other, is_safe)
        files = af.save_model(Context(), Net(2), f"{address}/net", size, safe)
        assert all(isinstance(file, Address) for file in files)
        assert sorted(str(file) for file in files) == [f"{address}/{name}" for name in store.names()]
        assert value_of(f"{address}/net") == value_of(files[-1]) == 2
    for device in ("cpu", "disk"):
        with af.bigmodel.init_empty_weights():
            model = Net(0)
        model = load_checkpoint_and_dispatch(
            model, f"{address}/net", device_map={"first": "cpu", "second": device}, offload_folder=tmp_path
        )
        assert torch.equal(model(torch.ones(2, 3)), Net(2)(torch.ones(2, 3)))
    with pytest.raises(ValueError, match="offload_folder"):
        load_checkpoint_and_dispatch(Net(0), f"{address}/net", device_map={"first": "cpu", "second": "disk"})


@WAYS
def test_whatever_request_fails_or_is_killed_a_reader_finds_the_old_model_or_the_new_one(
    size: Any, safe: bool, address: str, store: Store
) -> None:
    for error in (*ERRORS[:1], Killed):
        seen: set[float] = set()
        af.save_model(Context(), Net(1), f"{address}/net", 60, True)
        write = functools.partial(af.save_model, Context(), Net(2), f"{address}/net", size, safe)
        for faults, raised in every_request(store, error, write):
            seen.add(value_of(f"{address}/net"))
            if error is not Killed and raised is not None:
                assert isinstance(raised, OSError), faults.request
        assert seen == {1, 2}
        store.objects = {}


def test_a_save_of_a_model_that_fails_leaves_nothing(address: str, store: Store) -> None:
    def no_rights(name: str) -> BaseException:
        return PermissionError(name)

    write = functools.partial(af.save_model, Context(), Net(2), f"{address}/net", 60)
    for faults, raised in every_request(store, no_rights, write):
        if raised is not None and "list" not in faults.request:
            assert store.names() == [] or value_of(f"{address}/net") == 2, faults.request


def test_ties_objects_and_conversions(address: str, store: Store) -> None:
    af.save_model(Context(), Net(-3), f"{address}/tied")
    model = Net(-1)
    af.load_model(model, f"{address}/tied/model.safetensors")
    assert model.first.weight is model.second.weight
    save_object(Context(), {"a": torch.ones(3)}, f"{address}/one.pt")
    content = io.BytesIO(store.objects["bucket/runs/one.pt"][0])
    assert torch.equal(torch.load(content, weights_only=True)["a"], torch.ones(3))
    af.save_state(Context(), f"{address}/at", {"model": Net(4)})
    convert_checkpoint(f"{address}/at", f"{address}/weights", to="safetensors")
    assert value_of(f"{address}/weights") == 4
    with pytest.raises(FileExistsError):
        convert_checkpoint(f"{address}/at", f"{address}/weights", to="safetensors")
    for content in (b"", b"\x00" * 20):
        store.objects["bucket/runs/weights/model.safetensors"] = content, 0
        with pytest.raises(DamagedCheckpointError):
            value_of(f"{address}/weights")
    with pytest.raises(NoCheckpointError, match="doesn't exist"):
        value_of(f"{address}/nothing")


def test_a_file_that_changes_while_it_is_read_is_refused(address: str, store: Store) -> None:
    af.save_model(Context(), Net(1), f"{address}/net")
    name = "bucket/runs/net/model.safetensors"
    looks = 0

    def replace(kind: str, _: str) -> None:
        nonlocal looks
        looks += kind == "look at"
        content, when = store.objects[name]
        store.objects[name] = content, when + looks

    store.watcher = replace
    with pytest.raises(DamagedCheckpointError, match="was modified while it was read"):
        value_of(f"{address}/net")


@pytest.mark.parametrize("way", ["load_model", "load_checkpoint_in_model", "dispatch", "disk"])
@pytest.mark.parametrize("safe", [True, False])
def test_weights_that_are_replaced_while_they_are_read_are_never_mixed(
    way: str, safe: bool, address: str, store: Store, tmp_path: Path
) -> None:
    def load() -> float:
        model = Net(0)
        if way == "load_model":
            af.load_model(model, f"{address}/net")
        elif way == "load_checkpoint_in_model":
            af.bigmodel.load_checkpoint_in_model(model, f"{address}/net")
        else:
            with af.bigmodel.init_empty_weights():
                model = Net(0)
            places = {"first": "cpu", "second": "disk" if way == "disk" else "cpu"}
            load_checkpoint_and_dispatch(model, f"{address}/net", places, offload_folder=tmp_path / "off")
        (value,) = {float(one) for part in model.parameters() for one in part.detach().flatten()}
        return value

    for number in range(30):
        af.save_model(Context(), Net(1), f"{address}/net", safe_serialization=safe)
        left = number

        def replace(kind: str, name: str) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                af.save_model(Context(), Net(2), f"{address}/net", safe_serialization=safe)

        store.watcher = replace
        try:
            assert load() in (1, 2)
        except DamagedCheckpointError as error:
            assert "was modified while it was read" in str(error)  # noqa: PT017 -- of one of both ways
        except NoCheckpointError:
            pass
        store.watcher = lambda kind, name: None


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_the_old_one_or_the_new_one(
    address: str, store: Store
) -> None:
    long = {"p": {f"k{number}": 1.0 for number in range(4000)}}
    for number in range(14):
        af.save_tree(f"{address}/at", long)
        left = number

        def replace(kind: str, name: str) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                af.save_tree(f"{address}/at", {"n": 1})

        store.watcher = replace
        assert af.load_tree(f"{address}/at") in (long, {"n": 1})
        store.watcher = lambda kind, name: None


def test_weights_are_offloaded_to_disks_alone(
    address: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    af.save_model(Context(), Net(1), f"{address}/net")
    there = store.names()
    acts: list[Callable[[], object]] = [
        lambda: af.bigmodel.offload_state_dict(f"{address}/off", Net(1).state_dict()),
        lambda: af.bigmodel.disk_offload(Net(1), f"{address}/off"),
        lambda: af.bigmodel.OffloadedWeightsLoader(save_folder=f"{address}/off"),
        lambda: load_checkpoint_and_dispatch(
            Net(0), f"{address}/net", {"": "disk"}, offload_folder=f"{address}/off"
        ),
    ]
    for act in acts:
        with pytest.raises(ValueError, match=f"{address}/off is an address. Pass a directory"):
            act()
    assert store.names() == there
    assert list(tmp_path.iterdir()) == []


def test_an_index_names_no_file_elsewhere(address: str, store: Store) -> None:
    for name in ("../model.safetensors", "..\\model.safetensors", "sub\\model.safetensors"):
        content = json.dumps({"weight_map": {"first.weight": name}}).encode()
        store.objects["bucket/runs/net/model.safetensors.index.json"] = content, 0
        with pytest.raises(DamagedCheckpointError, match="not a weights file in the same directory"):
            value_of(f"{address}/net")


# --- the shim, and the command -------------------------------------------------------------------


def test_the_shim_numbers_its_checkpoints_there(address: str) -> None:
    def started() -> tuple[af.Accelerator, nn.Linear]:
        project = af.config.ProjectConfiguration(
            project_dir=address, automatic_checkpoint_naming=True, total_limit=2
        )
        accelerator = af.Accelerator(project_config=project, cpu=True)
        return accelerator, accelerator.prepare(nn.Linear(2, 2))

    accelerator, model = started()
    for _ in range(3):
        accelerator.save_state()
    there = [path.name for path in find_checkpoints(f"{address}/checkpoints")]
    assert there == ["checkpoint_1", "checkpoint_2"]
    accelerator, again = started()
    accelerator.load_state()
    assert torch.equal(again.weight, model.weight)
    assert str(accelerator.save_state()) == f"{address}/checkpoints/checkpoint_3"
    accelerator.save_model(again, f"{address}/model")
    af.load_model(model, f"{address}/model")


def test_hooks_of_programs_for_accelerate_write_what_is_uploaded(address: str, store: Store) -> None:
    accelerator = CompatAccelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))

    def save_notes(models: Any, weights: Any, folder: str) -> None:
        (Path(folder) / "notes.txt").write_text("mine")

    def load_notes(models: Any, folder: str) -> None:
        read.append((Path(folder) / "notes.txt").read_text())

    read: list[str] = []
    accelerator.register_save_state_pre_hook(save_notes)
    accelerator.register_load_state_pre_hook(load_notes)
    accelerator.save_state(f"{address}/at")
    before = model.weight.detach().clone()
    model.weight.data.zero_()
    accelerator.load_state(f"{address}/at")
    assert torch.equal(model.weight, before)
    assert read == ["mine"]
    (notes,) = (name for name in store.objects if name.endswith("notes.txt"))
    assert store.objects[notes][0] == b"mine"


def test_the_command_lists_shows_verifies_and_prunes(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(f"{address}/at-{step}", step)

    def output(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["accelfn", "checkpoint", *arguments])
        assert main() == 0
        return capsys.readouterr().out

    listed = [line.split()[0] for line in output("list", address).splitlines()]
    assert listed == ["name", "at-1", "at-2", "at-3"]
    assert f"{address}/at-3" in output("verify", address)
    assert "step" in output("show", f"{address}/at-2")
    assert "remove  at-1" in output("prune", address, "--last", "2")
    assert [path.name for path in find_checkpoints(address)] == ["at-2", "at-3"]


# --- the number of requests ----------------------------------------------------------------------


def requests(store: Store, act: Callable[[], object], kind: str) -> list[str]:
    found: list[str] = []

    def watch(one: str, name: str) -> None:
        if one == kind:
            found.append(name.rpartition("/")[2])

    store.watcher = watch
    act()
    store.watcher = lambda kind, name: None
    return found


def test_bytes_are_requested_once_and_many_at_a_time(address: str, store: Store) -> None:
    many = {str(number): torch.full((2000,), float(number)) for number in range(2000)}  # 16 MB
    tree = {**many, "large": torch.arange(5_000_000, dtype=torch.float32)}  # 20 MB
    af.save_state(Context(), f"{address}/at", tree)
    like = {name: torch.zeros_like(one) for name, one in tree.items()}
    found: list[Any] = []
    reads = requests(store, lambda: found.append(af.load_state(Context(), f"{address}/at", like)), "read")
    assert all(torch.equal(found[0][name], one) for name, one in tree.items())
    assert len([name for name in reads if name.startswith("tensors")]) <= 20
    asked = sum(store.asked.values())
    assert asked <= 1.1 * sum(len(content) for content, _ in store.objects.values())


def test_a_rank_asks_for_its_own_rows_of_weights(address: str, store: Store) -> None:
    whole = nn.Sequential(nn.Linear(600, 400), nn.Linear(400, 700))
    af.save_model(Context(), whole, f"{address}/net")
    size = len(store.objects["bucket/runs/net/model.safetensors"][0])

    def run(ctx: Context) -> tuple[int, bool]:
        with object_store() as own:
            own.objects = dict(store.objects)
            model = nn.Sequential(nn.Linear(600, 400), nn.Linear(400, 700))
            model = af.prepare(ctx, model)
            af.load_model(model, f"{address}/net")
            state = af.checkpoint.get_state_dict(ctx, model)
            right = all(torch.equal(one, state[name]) for name, one in whole.state_dict().items() if state)
            return sum(own.asked.values()), right

    mesh = af.ParallelismConfig(dp_shard_size=4)
    for asked, is_right in run_ranks(run, 4, on="processes", parallelism_config=mesh):
        assert is_right
        assert asked < 0.3 * size
