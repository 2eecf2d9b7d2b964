"""States that are cut over ranks: any cut and any world takes up what any other has saved, bit for bit."""

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import accelfn as af
from accelfn.checkpoint.manifest import MANIFEST, Manifest, parse_manifest
from accelfn.context import Context
from accelfn.errors import CheckpointMismatchError, DamagedCheckpointError, Misfit, RemoteRankError
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import OPTIMIZERS, Layout, differing, flat, laid_out, mesh_of, step, whole
from tests.checkpoint.small import flip


def manifest_of(path: Path) -> Manifest:
    return parse_manifest((path / MANIFEST).read_bytes())


# --- any layout to any layout --------------------------------------------------------------------

# World sizes 4, 3, 2 and 1; neither tells of the other which of them an error would hide in.
JOURNEY = (
    Layout("fsdp", (4,)),
    Layout("tp_fsdp", (2, 2)),
    Layout("ddp", (2,)),
    Layout("fsdp", (3,)),
    Layout("ddp", (1,)),
    Layout("hsdp", (2, 2)),
    Layout("tp", (2,)),
    Layout("fsdp", (2,)),
    Layout("fsdp", (1,)),
)
SHORT = (JOURNEY[3], JOURNEY[4], JOURNEY[6])


@pytest.mark.parametrize(
    ("journey", "optimizers"),
    [(SHORT, ["adamw"]), pytest.param(JOURNEY, [*OPTIMIZERS], marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_every_layout_takes_up_what_another_has_saved(
    tmp_path: Path, journey: tuple[Layout, ...], optimizers: list[str]
) -> None:
    """Layouts as torch makes them: each takes up what the one before has saved, steps, and saves again."""
    last: dict[str, Any] = {}
    for number, layout in enumerate(journey):

        def run(ctx: Context, number: int = number, layout: Layout = layout) -> list[dict[str, Any]]:
            came: dict[str, Any] = {}
            left: dict[str, Any] = {}
            for name in optimizers:
                model = laid_out(ctx, layout, seed=number)
                optimizer = OPTIMIZERS[name](model.parameters())
                tree = {"model": model, "optimizer": optimizer}
                if number:
                    af.load_state(ctx, tmp_path / f"{name}-{number - 1}", tree)
                came[name] = whole(model, optimizer)
                step(model, optimizer, 2)
                af.save_state(ctx, tmp_path / f"{name}-{number}", tree)
                left[name] = whole(model, optimizer)
                inner = af.unwrap_model(model)
                assert not inner.get_buffer("scratch").any()
                assert inner.get_parameter("head.weight") is inner.get_parameter("embed.weight")
            return [came, left]

        results = run_ranks(run, layout.size, "processes")
        for rank, (came, left) in enumerate(results):
            for name in optimizers:
                where = f"{name} on rank {rank} of {layout}"
                assert not number or not differing(came[name], last[name]), where
                assert not differing(left[name], results[0][1][name]), where
        last = results[0][1]
        for name in optimizers:
            check_parts(tmp_path / f"{name}-{number}", last[name])


def check_parts(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """See that every element is stored once, whatever number of ranks holds it, and can be read anywhere."""
    manifest = manifest_of(path)
    for name, stored in manifest.tensors.items():
        assert sum(math.prod(part.shape) for part in stored.parts) == math.prod(stored.shape), name
    assert not {"model/head.weight", "model/embed.weight"} <= manifest.tensors.keys()  # they are tied
    af.verify_checkpoint(path)
    assert not differing(flat(af.load_tree(path)), expected)


# --- what is special about cut states ------------------------------------------------------------


def small(layout: Layout) -> nn.Module:
    return fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), mesh=mesh_of(layout))  # pyright: ignore[reportReturnType]


def test_parameters_keep_their_names_after_an_evaluation(tmp_path: Path) -> None:
    def run(ctx: Context) -> list[str]:
        def evaluated(num: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = small(Layout("fsdp", (2,)))
            optimizer = torch.optim.AdamW(
                reversed(list(model.parameters())) if num == 0 else model.parameters()
            )
            step(model, optimizer, num)
            with torch.no_grad():
                model(torch.ones(2, 5))  # leaves gathered parameters behind
            return model, optimizer

        model, optimizer = evaluated(2)
        af.save_state(ctx, tmp_path / "at", {"model": model, "optimizer": optimizer})
        fresh, other = evaluated(0)
        af.load_state(ctx, tmp_path / "at", {"model": fresh, "optimizer": other})
        return differing(whole(model, optimizer), whole(fresh, other))

    assert run_ranks(run, 2, "processes") == [[], []]


def test_the_number_of_steps_is_cut_with_no_parameter(tmp_path: Path) -> None:
    def run(ctx: Context) -> dict[str, str]:
        def new() -> tuple[nn.Module, torch.optim.Optimizer]:
            numbers = nn.ParameterDict({"scale": torch.tensor(2.0), "row": torch.ones(1)})
            model = distribute_module(numbers, mesh_of(Layout("tp", (2,))))
            return model, torch.optim.AdamW(model.parameters(), foreach=False)

        model, optimizer = new()
        step(model, optimizer, 2)
        af.save_state(ctx, tmp_path / "at", {"model": model, "optimizer": optimizer})
        fresh, other = new()
        af.load_state(ctx, tmp_path / "at", {"model": fresh, "optimizer": other})
        assert not differing(whole(model, optimizer), whole(fresh, other))
        state = cast("dict[str, Any]", other.state[fresh.get_parameter("scale")])
        return {key: type(value).__name__ for key, value in state.items()}

    expected = {"step": "Tensor", "exp_avg": "DTensor", "exp_avg_sq": "DTensor"}
    assert run_ranks(run, 2, "processes") == [expected] * 2


def test_a_module_without_memory_is_refused(tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[Misfit, ...]:
        layout = Layout("fsdp", (2,))
        model = small(layout)
        af.save_state(ctx, tmp_path / "at", {"model": model, "average": torch.ones(3)})
        with torch.device("meta"):
            fresh = small(layout)
            like = {"model": fresh, "average": torch.zeros(3)}
        with pytest.raises(CheckpointMismatchError, match="to_empty") as caught:
            af.load_state(ctx, tmp_path / "at", like)
        fresh.to_empty(device="cpu")
        loaded: Any = af.load_state(ctx, tmp_path / "at", like)
        optimizer = torch.optim.SGD(model.parameters())
        assert not differing(whole(model, optimizer), whole(fresh, optimizer))
        assert torch.equal(loaded["average"], torch.ones(3))
        return caught.value.rows

    for rows in run_ranks(run, 2, "processes"):
        assert [row.path for row in rows] == [
            f"model/{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")
        ]
        assert rows[0].stored == "float32 [7, 5]"


def test_cut_tensors_of_the_tree_itself_in_the_background(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        mesh = mesh_of(Layout("fsdp", (3,)))
        full = torch.arange(35.0).reshape(7, 5)

        def cut(tensor: torch.Tensor, *placements: Any) -> DTensor:
            return distribute_tensor(tensor.clone(), mesh, placements)

        tree: dict[str, Any] = {
            "rows": cut(full, Shard(0)),
            "columns": nn.Parameter(cut(full, Shard(1))),
            "whole": full.clone(),
            "copied": cut(full, Replicate()),
            "empty": cut(torch.zeros(0, 3), Shard(0)),
            "flags": cut(full > 9, Shard(1)),
            "number": cut(torch.tensor(4), Replicate()),
        }
        handle = af.save_state(ctx, tmp_path / "at", tree, True)
        with torch.no_grad():
            for name in ("rows", "columns", "whole", "copied"):
                tree[name].zero_()
        handle.result()
        zeros = torch.zeros(7, 5)
        like: dict[str, Any] = {
            "rows": nn.Parameter(cut(zeros, Shard(1))),
            "columns": zeros.clone(),
            "whole": cut(zeros, Shard(1)),
            "copied": cut(zeros, Shard(0)),
            "empty": torch.zeros(0, 3),
            "flags": cut(full < 0, Shard(0)),
            "number": torch.tensor(0),
        }
        others = {"empty": torch.zeros(0, 3), "flags": full > 9, "number": torch.tensor(4)}
        loaded = af.load_state(ctx, tmp_path / "at", like)
        assert loaded["rows"] is like["rows"]
        for name, value in loaded.items():
            assert isinstance(value, DTensor) == isinstance(like[name], DTensor)
            expected = others.get(name, full)
            assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected), name

    run_ranks(run, 3, "processes")


# --- damage --------------------------------------------------------------------------------------


def test_damage_anywhere_is_an_error_everywhere_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "at"

    def run(ctx: Context) -> int:
        def new() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = small(Layout("fsdp", (2,)))
            return model, torch.optim.SGD(model.parameters(), momentum=0.9)

        model, optimizer = new()
        step(model, optimizer)
        af.save_state(ctx, path, {"model": model, "optimizer": optimizer})
        fresh, other = new()
        before = whole(fresh, other)

        def on_main(act: Callable[[], object]) -> None:
            af.wait_for_everyone(ctx)
            if ctx.is_main_process:
                act()
            af.wait_for_everyone(ctx)

        def refused_after(file: Path, damage: Callable[[], object]) -> None:
            content = file.read_bytes()
            on_main(damage)
            with pytest.raises((DamagedCheckpointError, RemoteRankError), match=file.name):
                af.load_state(ctx, path, {"model": fresh, "optimizer": other})
            assert not differing(whole(fresh, other), before)
            on_main(partial(file.write_bytes, content))

        cases = 0
        for file in sorted(path.glob("*.safetensors")):
            content = file.read_bytes()
            start = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:start])
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            for end in ends:
                refused_after(file, partial(flip, file, start + end - 1))
            refused_after(file, file.unlink)
            cases += len(ends)
        af.load_state(ctx, path, {"model": fresh, "optimizer": other})
        assert not differing(whole(fresh, other), whole(model, optimizer))
        return cases

    cases = run_ranks(run, 2, "processes", timeout_s=60)
    assert len(os.listdir(path)) == 3  # every rank has written some
    assert cases[0] > 15
