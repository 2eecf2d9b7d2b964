"""Models that are distributed over ranks: gathered one tensor at a time, complete in the files."""

# torch leaves the mesh and what makes DTensors partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import importlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.errors import MismatchError, RemoteRankError
from accelfn.testing import run_ranks

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import these modules before the ranks fork."""
    importlib.import_module("torch.distributed.fsdp")


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, value in enumerate(model.state_dict().values()):
            value.copy_(torch.linspace(-1, number, value.numel()).view_as(value))
    return model


def plain() -> nn.Module:
    """Return a model with tied layers, sizes that no number of ranks divides, buffers, and two dtypes."""
    model = nn.Sequential(
        OrderedDict(
            a=nn.Linear(3, 3, bias=False),
            b=nn.Linear(3, 3, bias=False),
            c=nn.Linear(3, 5),
            d=nn.BatchNorm1d(5),
        )
    )
    model.get_submodule("b").weight = model.get_submodule("a").weight
    return filled(model)


def fsdp(ctx: Context) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain()
    mesh = init_device_mesh("cpu", (ctx.num_processes,))
    fully_shard(model.get_submodule("c"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fails(*_: object) -> None:
    raise ZeroDivisionError


def two_meshes(ctx: Context) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = plain()
    line = init_device_mesh("cpu", (ctx.num_processes,))
    grid = init_device_mesh("cpu", (2, ctx.num_processes // 2))
    for number, module in enumerate(model.children()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            mesh, placements = (grid, [Replicate(), Shard(0)]) if number % 2 else (line, [Shard(0)])
            tensor = distribute_tensor(parameter.detach(), mesh, placements)
            module.register_parameter(name, nn.Parameter(tensor))
    return model


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("way", "size"), [(fsdp, 2), (two_meshes, 4)])
def test_a_distributed_model_is_exported_and_loaded_again(way: Any, size: int, tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[State, list[str], bool, tuple[Path, ...]]:
        model = way(ctx)
        state = af.get_state_dict(ctx, model)
        files = af.save_model(ctx, model, tmp_path / "sharded", max_shard_size=100)
        af.save_model(ctx, model, tmp_path / "pickled", safe_serialization=False)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()
        report = af.load_model(model, tmp_path / "sharded")
        again = af.get_state_dict(ctx, model)
        return state, [*report.missing, *report.unexpected], equal(state, again), files

    results = run_ranks(run, size, "processes")
    whole = plain().state_dict()
    assert equal(results[0][0], whole)
    assert [state for state, *_ in results[1:]] == [{}] * (size - 1)
    assert all(is_equal and report == [] for _, report, is_equal, _ in results)
    files = results[0][3]
    assert [result[3] for result in results] == [files] * size
    assert len(files) > 2
    loaded = {name: value for file in files[:-1] for name, value in load_file(file).items()}
    tied = {"b.weight"} if way is fsdp else set[str]()  # distribute_tensor breaks the tie
    assert equal(loaded, {name: value for name, value in whole.items() if name not in tied})
    pickled = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    assert equal(pickled, whole)
    if tied:
        assert pickled["b.weight"].data_ptr() == pickled["a.weight"].data_ptr()
        with safe_open(files[0], "pt") as opened:
            assert opened.metadata() == {"format": "pt", "b.weight": "a.weight"}


def test_tied_shards_are_one_tensor_in_the_state_dict() -> None:
    def run(ctx: Context) -> bool:
        state = af.get_state_dict(ctx, fsdp(ctx))
        return not state or state["a.weight"] is state["b.weight"]

    assert run_ranks(run, 2, "processes") == [True, True]


@pytest.mark.parametrize("what", ["full", "no directory", "state"])
def test_an_error_between_gathers_raises_on_every_rank(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    af.save_model(Context(), plain(), tmp_path / "old")
    before = (tmp_path / "old" / "model.safetensors").read_bytes()

    def run(ctx: Context) -> str:
        model = fsdp(ctx)
        folder = tmp_path / ("file" if what == "no directory" else "old")
        if what == "state" and ctx.rank == 1:
            model.register_state_dict_post_hook(fails)
        if what == "full" and ctx.is_main_process:
            files: Any = importlib.import_module("accelfn.checkpoint.files")
            source_of, written = files._source_of, []

            def full(entry: Any) -> torch.Tensor:
                written.append(entry)
                if len(written) == 2:
                    raise OSError(28, "No space left on device")
                return source_of(entry)

            files._source_of = full  # this rank is a separate process
        with pytest.raises((OSError, RemoteRankError, ZeroDivisionError)) as caught:
            af.save_model(ctx, model, folder)
        first = f"{type(caught.value).__name__}: {caught.value}"
        if what != "state":  # the ranks are still synchronised
            assert af.get_state_dict(ctx, model).keys() == (
                plain().state_dict().keys() if ctx.rank == 0 else set()
            )
        return first

    main, other = run_ranks(run, 2, "processes")
    if what == "state":
        assert main.startswith("RemoteRankError: rank 1 failed in save_model: ZeroDivisionError")
        assert other.startswith("ZeroDivisionError")
    else:
        error = "OSError: [Errno 28]" if what == "full" else "NotADirectoryError"
        assert main.startswith(error)
        assert other.startswith(f"RemoteRankError: rank 0 failed in save_model: {error}")
    assert (tmp_path / "old" / "model.safetensors").read_bytes() == before
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["model.safetensors"]


def test_different_models_are_detected_before_gathering(tmp_path: Path) -> None:
    def run(ctx: Context) -> list[str]:
        model = fsdp(ctx)
        if ctx.rank == 1:
            model.register_buffer("more", torch.zeros(1))
        errors: list[str] = []
        for call in (
            lambda: af.save_model(ctx, model, tmp_path / "new"),
            lambda: af.get_state_dict(ctx, model),
        ):
            with pytest.raises(MismatchError) as caught:
                call()
            errors.append(str(caught.value))
        return errors

    first, second = run_ranks(run, 2, "processes")
    assert first == second
    assert all("more" in error for error in first)
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_is_gathered_at_a_time(tmp_path: Path) -> None:
    def run(ctx: Context) -> int:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2,))
        model = nn.Module()
        for number in range(5):
            local = torch.full((8, 4), number + ctx.rank)
            model.register_buffer(f"t{number}", DTensor.from_local(local, mesh, [Shard(0)]))
        alive: list[Any] = []
        most = 0
        real: Any = DTensor.full_tensor

        def watched(self: Any, **options: Any) -> torch.Tensor:
            nonlocal most
            import weakref

            whole = real(self, **options)
            alive.append(weakref.ref(whole))
            most = max(most, sum(reference() is not None for reference in alive))
            return whole

        DTensor.full_tensor = watched  # this rank is a separate process
        af.save_model(ctx, model, tmp_path)
        af.get_state_dict(ctx, model)
        return most

    assert run_ranks(run, 2, "processes") == [1, 1]
    assert load_file(tmp_path / "model.safetensors")["t3"][:, 0].tolist() == [3] * 8 + [4] * 8


def test_each_node_writes_where_asked(tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[Path, ...]:
        folder = tmp_path / f"disk{ctx.world.node_rank}"
        if ctx.rank == 3:  # one of the disks has a shard of an older save
            folder.mkdir()
            (folder / "model-00001-of-00002.safetensors").write_bytes(b"older")
        af.wait_for_everyone(ctx)
        return af.save_model(ctx, nn.Linear(2, 2), folder, max_shard_size=16)

    project = af.ProjectConfiguration(save_on_each_node=True)
    guard = af.Guard(check_replicas_before_saving=False)
    results = run_ranks(run, 4, num_nodes=2, project_config=project, guard=guard)
    assert [[path.name for path in result] for result in results] == [[path.name for path in results[0]]] * 4
    for disk in ("disk0", "disk1"):
        files = {path.name for path in (tmp_path / disk).iterdir()}
        assert files == {path.name for path in results[0]}
        index = json.loads((tmp_path / disk / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) <= files


def test_nodes_that_share_a_disk_cannot_both_write(tmp_path: Path) -> None:
    def run(ctx: Context) -> str:
        try:
            af.save_model(ctx, nn.Linear(2, 2), tmp_path)
        except (BlockingIOError, RemoteRankError) as error:
            return str(error)
        return ""

    project = af.ProjectConfiguration(save_on_each_node=True)
    guard = af.Guard(check_replicas_before_saving=False)
    results = run_ranks(run, 2, num_nodes=2, project_config=project, guard=guard)
    assert all("another program or rank is saving" in message for message in results)
    assert list(tmp_path.iterdir()) == []
