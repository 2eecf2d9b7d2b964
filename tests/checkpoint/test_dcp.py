"""Checkpoints become folders of torch.distributed.checkpoint, and those of torch's programs checkpoints."""

import errno
import importlib
import os
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import accelfn as af
from accelfn.checkpoint import convert_checkpoint
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.launch.main import main
from accelfn.storage.disk import REAL_DISK
from accelfn.testing import run_ranks
from tests.checkpoint.accelerate_folder import write_folder
from tests.checkpoint.campaign import kill_at_its_last_step
from tests.checkpoint.layouts import Odd, differing, step, whole
from tests.checkpoint.printed import text
from tests.checkpoint.small import Bomb, Stateful
from tests.checkpoint.watched_disk import installed

dcp: Any = importlib.import_module("torch.distributed.checkpoint")
states: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # from torch, for saving in a single process

CTX = af.Context()


def write(folder: Path, tree: dict[str, Any]) -> Path:
    dcp.save(tree, checkpoint_id=folder)
    return folder


def keys(folder: Path) -> list[str]:
    return [*dcp.FileSystemReader(folder).read_metadata().state_dict_metadata]


def build(seed: int) -> dict[str, Any]:
    """Return a model with ties, buffers, a frozen and a bfloat16 weight, and what trains it."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model = Odd()
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "scheduler": schedule}


def train(objects: dict[str, Any], num: int) -> dict[str, torch.Tensor]:
    for _ in range(num):
        step(objects["model"], objects["optimizer"])
        objects["scheduler"].step()
    return whole(objects["model"], objects["optimizer"])


# --- to torch ------------------------------------------------------------------------------------


def test_a_run_goes_on_in_torch_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    run = build(0)
    before = train(run, 3)
    af.save_state(CTX, tmp_path / "own", {**run, "epoch": 3})
    made = convert_checkpoint(tmp_path / "own", tmp_path / "dcp", to="dcp")
    assert made.parts == ("model", "optimizer", "scheduler", "epoch")
    assert made.notes == ("The random states are left out.",)
    other = build(1)
    model, optimizer = states.get_state_dict(other["model"], other["optimizer"])
    tree = {"model": model, "optimizer": optimizer, "scheduler": other["scheduler"].state_dict(), "epoch": 0}
    dcp.load(tree, checkpoint_id=made.path)
    states.set_state_dict(
        other["model"], other["optimizer"], model_state_dict=model, optim_state_dict=tree["optimizer"]
    )
    other["scheduler"].load_state_dict(tree["scheduler"])
    assert tree["epoch"] == 3
    assert not differing(whole(other["model"], other["optimizer"]), before)

    convert_checkpoint(made.path, tmp_path / "back", to="accelfn", step=4)
    third = build(2)
    assert af.load_state(CTX, tmp_path / "back", {**third, "epoch": 0})["epoch"] == 3
    after = train(run, 3)
    for again in (other, third):
        assert not differing(train(again, 3), after)
        assert text(again["optimizer"].state_dict()["param_groups"]) == text(
            run["optimizer"].state_dict()["param_groups"]
        )


def test_a_model_alone_is_at_the_top(tmp_path: Path) -> None:
    model = build(0)["model"]
    own = af.save_state(CTX, tmp_path / "own", {"nets": {"a": model}, "epoch": 1})
    made = convert_checkpoint(own, tmp_path / "dcp", to="dcp", leaf="nets/a")
    assert made.parts == ("nets/a",)
    state = build(1)["model"].state_dict()
    assert keys(made.path) == [*state]
    dcp.load(state, checkpoint_id=made.path)
    assert text(state) == text(model.state_dict())
    weights = write_folder(tmp_path / "theirs", {"model.safetensors": {"w": torch.ones(2)}})
    assert keys(convert_checkpoint(weights, tmp_path / "new", to="dcp", leaf="model").path) == ["w"]


def test_an_optimizer_of_two_models_has_the_names_of_one_module(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        nets = {"a/b": nn.Linear(2, 2), "c": nn.Linear(2, 2)}
        both = [parameter for net in nets.values() for parameter in net.parameters()]
        return {"nets": nets, "opt": torch.optim.SGD(both, lr=0.1, momentum=0.9)}

    run, other = make(), make()
    module, fresh = nn.ModuleDict(run["nets"]), nn.ModuleDict(other["nets"])
    step(module, run["opt"])
    own = af.save_state(CTX, tmp_path / "own", run)
    made = convert_checkpoint(own, tmp_path / "dcp", to="dcp")
    # A slash in the key of a model is one in the names.
    tree = {"opt": states.get_optimizer_state_dict(nn.ModuleDict({"nets": fresh}), other["opt"])}
    assert "nets.a/b.weight" in tree["opt"]["state"]
    dcp.load(tree, checkpoint_id=made.path)
    states.set_optimizer_state_dict(nn.ModuleDict({"nets": fresh}), other["opt"], tree["opt"])
    assert text(other["opt"].state_dict()) == text(run["opt"].state_dict())


def test_parameters_without_names_keep_their_numbers(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    files = {"model.safetensors": model.state_dict(), "optimizer.bin": optimizer.state_dict()}
    folder = write_folder(tmp_path / "theirs", files)
    made = convert_checkpoint(folder, tmp_path / "dcp", to="dcp", names={"model": "net"})
    assert made.parts == ("net", "optimizer")
    assert "optimizer: parameters have numbers" in made.notes[0]
    fresh = nn.Linear(2, 2)
    other = torch.optim.SGD(fresh.parameters(), lr=0.5, momentum=0.9)
    step(fresh, other)
    tree = {"optimizer": other.state_dict()}
    dcp.load(tree, checkpoint_id=made.path)
    other.load_state_dict(tree["optimizer"])
    assert text(other.state_dict()) == text(optimizer.state_dict())
    convert_checkpoint(made.path, tmp_path / "back", to="accelfn")
    third = torch.optim.SGD(fresh.parameters(), lr=0.5)
    af.load_state(CTX, tmp_path / "back", {"net": fresh, "optimizer": third})
    assert text(third.state_dict()) == text(optimizer.state_dict())


VALUES: dict[str, Any] = {
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6).view(2, 3).t(),
    "list": [1, [torch.ones(2), {"deep": (1, None, b"\0")}]],
    "tuple": (torch.zeros(1), "text"),
    "odd": [float("inf"), 1 + 2j, {1, 2}, torch.float16, torch.device("cpu"), torch.Size((1, 2))],
    "array": numpy.arange(3),
}


def test_values_are_the_same_there_and_back(tmp_path: Path) -> None:
    own = af.save_state(CTX, tmp_path / "own", {"values": VALUES, "three": 3})
    made = convert_checkpoint(own, tmp_path / "dcp", to="dcp")
    convert_checkpoint(made.path, tmp_path / "back", to="accelfn")
    back = af.load_tree(tmp_path / "back")
    assert text(back) == text({"values": VALUES, "three": 3})


def test_values_that_torch_has_in_another_form_become_it(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "scaler": af.init_scaler(CTX),
        "generator": torch.Generator().manual_seed(3),
        "path": Path("a/b"),
        "queue": deque([1, 2]),
        "milestones": Stateful({3: 1}),
    }
    own = af.save_state(CTX, tmp_path / "own", tree)
    made = convert_checkpoint(own, tmp_path / "dcp", to="dcp")
    assert (
        made.notes[1] == "milestones/value: keys that are no texts have become texts, as torch writes them."
    )
    back = convert_checkpoint(made.path, tmp_path / "back", to="accelfn")
    assert back.notes[0].startswith("milestones/value: keys are texts, as torch writes numbers.")
    read = af.load_tree(back.path)
    assert text(read["scaler"]) == text(tree["scaler"])
    assert read["milestones"] == {"value": {"3": 1}}
    assert (read["path"], read["queue"]) == (str(Path("a/b")), [1, 2])
    assert torch.equal(read["generator"], tree["generator"].get_state())


def test_what_ranks_had_for_themselves_is_that_of_the_first(tmp_path: Path) -> None:
    def save(ctx: af.Context) -> None:
        af.save_state(ctx, tmp_path / "own", {"seen": {"n": ctx.rank}, "epoch": 1})

    run_ranks(save, 2)
    made = convert_checkpoint(tmp_path / "own", tmp_path / "dcp", to="dcp")
    assert "What each rank had for itself is that of rank 0." in made.notes
    made = convert_checkpoint(tmp_path / "own", tmp_path / "less", to="dcp", leave_out=["seen"])
    assert (made.parts, keys(made.path)) == (("epoch",), ["epoch"])
    assert made.notes == ("The random states are left out.",)


# --- from torch ----------------------------------------------------------------------------------


def torch_tree(objects: dict[str, Any], *, is_flat: bool) -> dict[str, Any]:
    """Return what a program of torch saves, or one of torchtitan."""
    options = states.StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model, optimizer = states.get_state_dict(objects["model"], objects["optimizer"], options=options)
    others = {"lr_scheduler": {"last_epoch": 3}, "train_state": {"step": 3, "ntokens_seen": 7}}
    if is_flat:
        return {**model, **others, "optimizer": optimizer, "dataloader": {"dp_rank_0": b"opaque"}}
    return {"model": model, **others, "optimizer": optimizer}


@pytest.mark.parametrize("form", ["torch", "below a key", "torchtitan"])
def test_a_run_of_torch_goes_on(form: str, tmp_path: Path) -> None:
    run = build(0)
    train(run, 3)
    tree = torch_tree(run, is_flat=form == "torchtitan")
    write(tmp_path / "dcp", {"app": tree} if form == "below a key" else tree)
    made = convert_checkpoint(tmp_path / "dcp", tmp_path / "own", to="accelfn", step=3)
    names = {"model", "optimizer", "lr_scheduler", "train_state"}
    names |= {"dataloader"} if form == "torchtitan" else set()
    assert set(made.parts) == ({"app"} if form == "below a key" else names)
    other = build(1)
    wanted: Any = {name: other.get(name, {}) for name in names} | {"train_state": {"step": 0}}
    loaded: Any = af.load_state(CTX, made.path, {"app": wanted} if form == "below a key" else wanted)
    loaded = loaded.get("app", loaded)
    assert loaded["train_state"] == {"step": 3, "ntokens_seen": 7}
    assert loaded.get("dataloader") == ({"dp_rank_0": b"opaque"} if form == "torchtitan" else None)
    other["scheduler"].load_state_dict(run["scheduler"].state_dict())
    assert not differing(train(other, 3), train(run, 3))


def sharded(ctx: af.Context, seed: int) -> dict[str, Any]:
    """Return the objects of a run over all ranks. Ranks: every rank of ``ctx``."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))
    if ctx.num_processes > 1:
        fully_shard(model[0])
        fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


@pytest.mark.parametrize("is_flat", [False, True], ids=["torch", "torchtitan"])
def test_a_run_of_two_sharded_ranks_goes_on_in_any_world(is_flat: bool, tmp_path: Path) -> None:
    def save(ctx: af.Context) -> list[dict[str, torch.Tensor]]:
        run = sharded(ctx, 0)
        found: list[dict[str, torch.Tensor]] = []
        for number in range(2):
            step(run["model"], run["optimizer"], 2)
            found.append(whole(run["model"], run["optimizer"]))
            if number == 0:
                write(tmp_path / "dcp", torch_tree(run, is_flat=is_flat))
        return found

    def load(ctx: af.Context) -> list[dict[str, torch.Tensor]]:
        run = sharded(ctx, 1)
        af.load_state(ctx, tmp_path / "own", run, partial=True)
        found = [whole(run["model"], run["optimizer"])]
        step(run["model"], run["optimizer"], 2)
        return [*found, whole(run["model"], run["optimizer"])]

    (expected, *_) = run_ranks(save, 2, on="processes")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    convert_checkpoint(tmp_path / "dcp", tmp_path / "own", to="accelfn")
    for size in (1, 2):
        for found in run_ranks(load, size, on="processes"):
            assert [differing(*pair) for pair in zip(found, expected, strict=True)] == [[], []]


def test_a_run_of_two_sharded_ranks_of_ours_goes_on_in_torch(tmp_path: Path) -> None:
    def save(ctx: af.Context) -> dict[str, torch.Tensor]:
        run = sharded(ctx, 0)
        step(run["model"], run["optimizer"], 2)
        af.save_state(ctx, tmp_path / "own", run)
        return whole(run["model"], run["optimizer"])

    def load(ctx: af.Context) -> dict[str, torch.Tensor]:
        run = sharded(ctx, 1)
        model, optimizer = states.get_state_dict(run["model"], run["optimizer"])
        tree = {"model": model, "optimizer": optimizer}
        dcp.load(tree, checkpoint_id=tmp_path / "dcp")
        parts = {"model_state_dict": model, "optim_state_dict": tree["optimizer"]}
        states.set_state_dict(run["model"], run["optimizer"], **parts)
        return whole(run["model"], run["optimizer"])

    (expected, *_) = run_ranks(save, 2, on="processes")
    convert_checkpoint(tmp_path / "own", tmp_path / "dcp", to="dcp")
    for found in run_ranks(load, 2, on="processes"):
        assert not differing(found, expected)


W, V = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"weight": W}, {"model": {"weight": W}}),
        ({"a.w": W, "a._extra_state": 1}, {"model": {"a.w": W, "a._extra_state": 1}}),
        ({"a.w": W, "lr": {"rate": V}, "step": 1}, {"model": {"a.w": W}, "lr": {"rate": V}, "step": 1}),
        ({"state_dict": {"w": W}, "seen": V}, {"state_dict": {"w": W}, "seen": V}),
        ({"net": {"w": W}, "seen": V}, {"net": {"w": W}, "seen": V}),
        ({"model": {"a.w": W}, "b.seen": V}, {"model": {"a.w": W}, "b.seen": V}),
    ],
)
def test_a_model_is_found_at_the_top_and_values_stay(
    saved: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    made = convert_checkpoint(write(tmp_path / "dcp", saved), tmp_path / "own", to="accelfn")
    assert text(af.load_tree(made.path)) == text(expected)


GROUP = {"lr": torch.tensor(0.1, dtype=torch.float64), "betas": (0.9, 0.99)}


@pytest.mark.parametrize("below", [(), ("optim",)])
@pytest.mark.parametrize("is_flat", [False, True])
def test_an_optimizer_alone_is_found_by_its_keys(
    below: tuple[str, ...], is_flat: bool, tmp_path: Path
) -> None:
    nested = {
        "state": {"a.w": {"m": W, "deep": {"x": V}}},
        "param_groups": [{"params": ["a.w", "a"], **GROUP}],
    }
    flat = {"state.a.w.m": W, "state.a.w.deep.x": V}
    for name in ("a.w", "a"):
        flat |= {f"param_groups.{name}.{key}": value for key, value in GROUP.items()}
    tree: dict[str, Any] = flat if is_flat else nested
    write(tmp_path / "dcp", {"optim": tree} if below else tree)
    made = convert_checkpoint(tmp_path / "dcp", tmp_path / "own", to="accelfn")
    (found,) = af.load_tree(made.path).values()
    assert made.parts == (below or ("optimizer",))
    assert text(found) == text({"state": nested["state"], "groups": nested["param_groups"]})


@pytest.mark.parametrize("has_names", [False, True])
def test_a_flattened_optimizer_has_a_group_for_each_set_of_options(has_names: bool, tmp_path: Path) -> None:
    groups = {"b": 1, "a": 1, "c": 2, "d": 1}
    options: dict[str, Any] = {f"param_groups.{name}.lr": lr for name, lr in groups.items()}
    if has_names:  # as get_optimizer_state_dict has them, if the optimizer was made with names
        options |= {f"param_groups.{name}.param_names": [name] for name in "cd"}
        options |= {f"param_groups.{name}.param_names": ["a", "b"] for name in "ab"}
    source = write(tmp_path / "dcp", {**options, "state.a.m": W})
    read = af.load_tree(convert_checkpoint(source, tmp_path / "own", to="accelfn").path)["optimizer"]
    expected = [({"a", "b"}, 1), ({"c"}, 2), ({"d"}, 1)] if has_names else [({"a", "b", "d"}, 1), ({"c"}, 2)]
    assert [(set(group["params"]), group["lr"]) for group in read["groups"]] == expected
    assert [*read["state"]] == ["a"]


def test_an_optimizer_belongs_to_the_model_that_has_its_parameters(tmp_path: Path) -> None:
    optimizers: dict[str, Any] = {
        name: {"state": {}, "param_groups": [{"params": [name]}]} for name in ("w", "v", "both", "none")
    }
    optimizers["both"]["param_groups"] = [{"params": ["w", "v"]}]
    models = {"average": {"w": W}, "model": {"w": W}, "critic": {"v": V}}
    write(tmp_path / "dcp", {**models, **{f"{name}_opt": state for name, state in optimizers.items()}})
    read = af.load_tree(convert_checkpoint(tmp_path / "dcp", tmp_path / "own", to="accelfn").path)
    groups = {name: read[f"{name}_opt"]["groups"][0]["params"] for name in optimizers}
    assert groups == {"w": ["model/w"], "v": ["critic/v"], "both": ["w", "v"], "none": ["none"]}
    names = {"model": "nets/main", "w_opt": "opt"}
    made = convert_checkpoint(tmp_path / "dcp", tmp_path / "new", to="accelfn", names=names)
    assert af.load_tree(made.path)["opt"]["groups"][0]["params"] == ["nets/main/w"]


def test_weights_are_extracted(tmp_path: Path) -> None:
    run = build(0)
    train(run, 1)
    for is_flat in (False, True):
        source = write(
            tmp_path / f"dcp{is_flat}", {**torch_tree(run, is_flat=is_flat), "bomb": Bomb(tmp_path)}
        )
        made = convert_checkpoint(source, tmp_path / f"weights{is_flat}", to="safetensors")
        fresh = build(1)["model"]
        af.load_model(fresh, made.path)
        assert text(fresh.state_dict()) == text(run["model"].state_dict())
        alone = convert_checkpoint(source, tmp_path / f"alone{is_flat}", to="dcp", leaf="model")
        assert keys(alone.path) == [*fresh.state_dict()]
    source = write(tmp_path / "app", {"app": torch_tree(run, is_flat=False)})
    made = convert_checkpoint(source, tmp_path / "below", to="safetensors", leaf="app/model")
    assert text(load_file(made.path / "model.safetensors")["mean"]) == text(run["model"].mean)


# --- what is refused -----------------------------------------------------------------------------


def test_code_is_not_run_and_what_holds_it_can_be_left_out(tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    source = write(tmp_path / "dcp", {"model": {"w": W}, "loader": {"state": Bomb(crater)}})
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp .* posix\.mkdir, which was not run"):
        convert_checkpoint(source, tmp_path / "own", to="accelfn")
    assert not (tmp_path / "own").exists()
    made = convert_checkpoint(source, tmp_path / "own", to="accelfn", leave_out=["loader"])
    assert made.parts == ("model",)
    assert not crater.exists()


def test_damage_is_reported(tmp_path: Path) -> None:
    source = write(tmp_path / "dcp", {"model": {"w": torch.ones(100)}})
    (data,) = source.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-100])
    for form in ("accelfn", "safetensors"):
        with pytest.raises(DamagedCheckpointError, match="can't be assembled"):
            convert_checkpoint(source, tmp_path / "own", to=form)
    (source / ".metadata").unlink()
    with pytest.raises(NoCheckpointError, match=r"torch\.distributed\.checkpoint"):
        convert_checkpoint(source, tmp_path / "own", to="accelfn")
    lost: dict[str, Any] = {"state": {"b": {}}, "param_groups": [{"params": ["a"]}]}
    lost["state"]["b"]["m"] = W
    with pytest.raises(CheckpointError, match="a state for parameter 'b', which is in none"):
        convert_checkpoint(write(tmp_path / "lost", lost), tmp_path / "own", to="accelfn")
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("source", "target", "options", "error", "words"),
    [
        ("own", "s3://bucket/run", {"to": "dcp"}, ValueError, "s3://bucket/run is an address"),
        ("own", "dcp", {"to": "dcp"}, FileExistsError, "exists already"),
        ("own", "new", {"to": "dcp", "leaf": "net"}, ValueError, "there is no 'net' in the tree"),
        ("own", "new", {"to": "dcp", "leaf": "epoch"}, ValueError, "'epoch' is not the state of a model"),
        ("own", "new", {"to": "dcp", "leave_out": ["net"]}, ValueError, "there is no 'net'"),
        ("list", "new", {"to": "dcp"}, ValueError, "is no dict with texts as keys"),
        (
            "twice",
            "new",
            {"to": "dcp"},
            CheckpointError,
            "can't store the tree: duplicated flatten key a.b.c",
        ),
        (
            "dcp",
            "new",
            {"to": "safetensors", "leaf": "net"},
            ValueError,
            "no model 'net'. There are model, n",
        ),
        ("dcp", "new", {"to": "safetensors", "leaf": "n"}, ValueError, "no model 'n'"),
        ("dcp", "new", {"to": "accelfn", "leaf": "model"}, ValueError, "has no leaf, got 'model'"),
        ("dcp", "new", {"to": "accelfn", "names": {"net": "b"}}, ValueError, "no 'net' in the folder"),
        (
            "dcp",
            "new",
            {"to": "accelfn", "names": {"n": "model/n"}},
            ValueError,
            "can't be the path of a part",
        ),
    ],
)
def test_what_does_not_apply_is_refused(
    source: str, target: str, options: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    af.save_tree(tmp_path / "own", {"model": {"w": W}, "epoch": 1})
    af.save_tree(tmp_path / "list", [W])
    af.save_tree(tmp_path / "twice", {"a": {"b.c": 1}, "a.b": {"c": 2}})
    write(tmp_path / "dcp", {"model": {"w": W}, "n": 1})
    place = target if "://" in target else tmp_path / target
    with pytest.raises(error, match=words):
        convert_checkpoint(tmp_path / source, place, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "list", "own", "twice"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    own = af.save_tree(tmp_path / "own", {"model": {"w": torch.ones(200_000)}})

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    with installed(replace(REAL_DISK, rename=full)), pytest.raises(OSError, match="No space"):
        convert_checkpoint(own, tmp_path / "dcp", to="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]

    def run(ctx: af.Context) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=rf"{os.strerror(errno.EFBIG)}.*/dcp'"):
            convert_checkpoint(own, tmp_path / "dcp", to="dcp")

    run_ranks(run, 1, on="processes")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    own = af.save_tree(tmp_path / "own", {"model": {"w": W}})
    for _ in range(2):
        kill_at_its_last_step(lambda: convert_checkpoint(own, tmp_path / "dcp", to="dcp"))
        assert len(list(tmp_path.iterdir())) == 2
    convert_checkpoint(own, tmp_path / "dcp", to="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "own"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = str(af.save_tree(tmp_path / "own", {"model": {"w": W}, "epoch": 1}))
    whole_tree, alone, back = (str(tmp_path / name) for name in ("whole", "alone", "back"))
    assert main(["checkpoint", "convert", own, whole_tree, "--to", "dcp"]) == 0
    assert capsys.readouterr().out == f"{whole_tree}: model, epoch\n"
    assert main(["checkpoint", "convert", own, alone, "--to", "dcp", "--leaf", "model"]) == 0
    assert (keys(tmp_path / "whole"), keys(tmp_path / "alone")) == (["model.w", "epoch"], ["w"])
    capsys.readouterr()
    assert main(["checkpoint", "convert", whole_tree, back, "--to", "accelfn", "--step", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"{back}: model, epoch\n")
    assert main(["checkpoint", "convert", own, "memory://dcp", "--to", "dcp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "memory://dcp is an address" in line


def test_objects_below_the_top_come_back_as_objects(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]
    optimizer = torch.optim.AdamW(models[2].parameters())
    models[2](torch.ones(2)).sum().backward()
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    tree: dict[str, Any] = {
        "models": {"g": models[0], "d": models[1]},
        "nets": [models[2]],
        "optimizers": [optimizer],
        "step": 3,
    }
    af.save_state(af.Context(), tmp_path / "at", tree)
    convert_checkpoint(tmp_path / "at", tmp_path / "dcp", to="dcp")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "back", to="accelfn")
    others = [nn.Linear(2, 2) for _ in range(3)]
    other = torch.optim.AdamW(others[2].parameters())
    like: dict[str, Any] = {
        "models": {"g": others[0], "d": others[1]},
        "nets": [others[2]],
        "optimizers": [other],
        "step": 0,
    }
    assert af.load_state(af.Context(), tmp_path / "back", like)["step"] == 3
    for one, same in zip(models, others, strict=True):
        assert torch.equal(one.weight, same.weight)
    for one, same in zip(models[2].parameters(), others[2].parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], other.state[same]["exp_avg"])
