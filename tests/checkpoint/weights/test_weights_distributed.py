"""Models that are distributed over ranks: gathered one tensor at a time, complete in the files."""

# torch leaves the mesh and what makes DTensors partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import importlib
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode

import accelfn as af
from accelfn import Context
from accelfn.bigmodel import load_checkpoint_in_model
from accelfn.checkpoint import convert_checkpoint
from accelfn.errors import MismatchError, RemoteRankError
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.checkpoint.layouts import Layout, Odd, Tensors, differing, laid_out, whole
from tests.checkpoint.weights.models import Bag, of_transformers, zero
from tests.parallel.layouts import LAYOUTS


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


def fsdp(ctx: Context) -> nn.Module:
    return laid_out(ctx, Layout("fsdp", (ctx.num_processes,)), seed=0)


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


@pytest.mark.parametrize(("way", "size"), [(fsdp, 2), (two_meshes, 4)])
def test_a_distributed_model_is_exported_and_loaded_again(way: Any, size: int, tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[Tensors, list[str], tuple[Path, ...]]:
        model = way(ctx)
        state = af.get_state_dict(ctx, model)
        assert way is not fsdp or not state or state["embed.weight"] is state["head.weight"]  # tied
        files = af.save_model(ctx, model, tmp_path / "sharded", max_shard_size=100)
        af.save_model(ctx, model, tmp_path / "pickled", safe_serialization=False)
        zero(model)
        report = af.load_model(model, tmp_path / "sharded")
        again = af.get_state_dict(ctx, model)
        return state, [*report.missing, *report.unexpected, *differing(state, again)], files

    (state, _, files), *others = results = run_ranks(run, size, "processes")
    expected = plain().state_dict()
    assert not differing(state, expected)
    assert [rest for rest, *_ in others] == [{}] * (size - 1)
    assert [[], files] * size == [part for result in results for part in result[1:]]
    assert len(files) > 2
    loaded = {name: value for file in files[:-1] for name, value in load_file(file).items()}
    tied = {"head.weight"} if way is fsdp else set[str]()  # distribute_tensor breaks the tie
    assert not differing(loaded, {name: value for name, value in expected.items() if name not in tied})
    pickled = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    assert not differing(pickled, expected)
    if tied:
        assert pickled["head.weight"].data_ptr() == pickled["embed.weight"].data_ptr()
        with safe_open(files[1], "pt") as opened:
            assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("what", ["full", "no directory", "state"])
def test_an_error_between_gathers_raises_on_every_rank(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    af.save_model(Context(), plain(), tmp_path / "old")
    before = (tmp_path / "old" / "model.safetensors").read_bytes()

    def run(ctx: Context) -> str:
        model = fsdp(ctx)
        folder = tmp_path / ("file" if what == "no directory" else "old")
        if what == "state" and ctx.rank == 1:
            model.register_state_dict_post_hook(fail)
        if what == "full" and ctx.is_main_process:
            files: Any = importlib.import_module("accelfn.weights.write")
            source_of, written = files._source_of, []

            def full(entry: Any) -> torch.Tensor:
                written.append(entry)
                if len(written) == 2:
                    raise OSError(28, "No space left on device")
                return source_of(entry)

            files._source_of = full  # this rank is a separate process
        with pytest.raises((OSError, RemoteRankError, ZeroDivisionError)) as caught:
            af.save_model(ctx, model, folder)
        if what != "state":  # the ranks are still synchronised
            assert bool(af.get_state_dict(ctx, model)) == ctx.is_main_process
        return f"{type(caught.value).__name__}: {caught.value}"

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
        with pytest.raises(MismatchError, match="more") as of_save:
            af.save_model(ctx, model, tmp_path / "new")
        with pytest.raises(MismatchError, match="more") as of_state:
            af.get_state_dict(ctx, model)
        return [str(of_save.value), str(of_state.value)]

    first, second = run_ranks(run, 2, "processes")
    assert first == second
    assert list(tmp_path.iterdir()) == []


def test_only_a_ranks_part_of_a_stored_tensor_goes_to_its_device(tmp_path: Path) -> None:
    whole = torch.arange(64.0).reshape(8, 8)
    save_file({"weight": whole}, tmp_path / "model.safetensors")

    def run(ctx: Context) -> list[int]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        largest: list[int] = []

        class Watch(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func in (torch.Tensor.to, torch.Tensor.copy_):
                    largest[-1] = max(largest[-1], args[func is torch.Tensor.copy_].numel())
                return func(*args, **(kwargs or {}))

        for load in (af.load_model, load_checkpoint_in_model):
            mesh = init_device_mesh("cpu", (2,))
            model = Bag(weight=distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)]))
            largest.append(0)
            with Watch():
                load(model, tmp_path)
            assert torch.equal(local_of(cast("Any", model).weight), whole.chunk(2, 1)[ctx.rank])
        return largest

    assert run_ranks(run, 2, "processes") == [[32, 32], [32, 32]]


def test_one_tensor_is_gathered_at_a_time(tmp_path: Path) -> None:
    def run(ctx: Context) -> int:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2,))
        parts = {f"t{number}": torch.full((8, 4), number + ctx.rank) for number in range(5)}
        model = Bag(**{name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()})
        alive: list[Any] = []
        counts: list[int] = []
        real: Any = DTensor.full_tensor

        def watched(self: Any, **options: Any) -> torch.Tensor:
            whole = real(self, **options)
            alive.append(weakref.ref(whole))
            counts.append(sum(reference() is not None for reference in alive))
            return whole

        DTensor.full_tensor = watched  # this rank is a separate process
        af.save_model(ctx, model, tmp_path)
        af.get_state_dict(ctx, model)
        return max(counts)

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

    project = af.config.ProjectConfiguration(save_on_each_node=True)
    guard = af.Guard(check_replicas_before_saving=False)
    results = run_ranks(run, 4, num_nodes=2, project_config=project, guard=guard)
    files = [path.name for path in results[0]]
    assert len(files) == 3
    assert [[path.name for path in result] for result in results] == [files] * 4
    for disk in ("disk0", "disk1"):
        assert sorted(path.name for path in (tmp_path / disk).iterdir()) == sorted(files)


# --- models of transformers ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("pp2", "LlamaForCausalLM"), ("ep2", "MixtralForCausalLM")])
def test_models_of_transformers_load_and_save_in_layouts(name: str, kind: str, tmp_path: Path) -> None:
    theirs = of_transformers(kind, 0)
    theirs.save_pretrained(tmp_path / "theirs")  # ties by the first name, experts separately
    af.save_model(Context(), theirs, tmp_path / "plain")
    af.save_state(Context(), tmp_path / "state", {"model": theirs})
    expected = {f"model/{name}": value for name, value in theirs.state_dict().items()}
    none = torch.optim.SGD([torch.ones(1)])

    def work(ctx: Context) -> None:
        ours = of_transformers(kind, 1)
        af.load_model(ours, tmp_path / "plain")
        ours = af.prepare(ctx, ours)  # loaded before it was prepared
        assert not differing(whole(ours, none, ctx), expected)
        model: nn.Module = af.prepare(ctx, of_transformers(kind, 1))
        load: Any
        for load in (
            lambda: af.load_model(model, tmp_path / "plain"),
            lambda: af.bigmodel.load_checkpoint_in_model(model, tmp_path / "theirs", strict=True),
            lambda: af.load_state(ctx, tmp_path / "state", {"model": model}, random_state=False),
        ):
            for parameter in model.parameters():
                local_of(parameter).data.zero_()
            load()
            assert not differing(whole(model, none, ctx), expected)
        af.save_model(ctx, model, tmp_path / "ours")
        af.save_state(ctx, tmp_path / "ours-state", {"model": model})

    layout = LAYOUTS[name]
    run_ranks(work, layout.size, "processes", timeout_s=120.0, parallelism_config=layout.config())
    convert_checkpoint(tmp_path / "ours-state", tmp_path / "converted", to="safetensors")
    ids = torch.arange(6).unsqueeze(0)
    for folder in ("ours", "converted"):
        (file,) = (tmp_path / folder).iterdir()
        assert file.read_bytes() == (tmp_path / "plain" / file.name).read_bytes()
        theirs.config.save_pretrained(tmp_path / folder)
        read: Any = type(theirs).from_pretrained(tmp_path / folder)
        assert torch.equal(read(ids).logits, theirs(ids).logits)
