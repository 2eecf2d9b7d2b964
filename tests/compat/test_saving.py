"""Saving as programs for Accelerate do it: on the main process alone, and in the folder that they name."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

import os
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.checkpoint.random_state import random_states
from accelfn.compat.accelerator import Accelerator
from accelfn.compat.current import current
from accelfn.compat.helpers import save
from accelfn.errors import CheckpointError, MismatchError
from accelfn.testing import run_ranks

pytestmark = pytest.mark.usefixtures("alone")


def joined(ctx: Context) -> Accelerator:
    """Return an Accelerator of one of several ranks that are threads; the others must not use compat."""
    current().forget()
    current().world = ctx
    return Accelerator()


def test_the_main_process_saves_without_the_others(tmp_path: pathlib.Path) -> None:
    def run(ctx: Context) -> None:
        torch.manual_seed(0)
        accelerator: Any = joined(ctx) if ctx.rank == 0 else af.Accelerator(context=ctx)
        model = accelerator.prepare(nn.Linear(2, 1))
        if ctx.rank == 0:
            accelerator.save_state(tmp_path / "state")
            accelerator.save_model(model, tmp_path / "model")
            accelerator.save(accelerator.get_state_dict(model), tmp_path / "weights.pt")
            save(accelerator.unwrap_model(model).state_dict(), tmp_path / "more.pt")
        af.wait_for_everyone(ctx)
        if ctx.rank == 1:
            other = joined(ctx)
            other.register_for_checkpointing(torch.optim.SGD([torch.ones(1)], 0.1))
            other.save_state(tmp_path / "state")
            assert other.save_model(model, tmp_path / "nothing") == ()
            assert other.get_state_dict(model).keys() == {"weight", "bias"}
        af.wait_for_everyone(ctx)
        current().world = None

    run_ranks(run, 2)
    assert sorted(os.listdir(tmp_path)) == ["model", "more.pt", "state", "weights.pt"]
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert af.verify_checkpoint(tmp_path / "state").world_size == 1
    expected = torch.load(tmp_path / "weights.pt")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, expected["weight"])
    accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "random_states_1" / "manifest.json").is_file()


def test_each_rank_gets_its_own_random_states_back(tmp_path: pathlib.Path) -> None:
    for name in ("saved_by_both", "saved_alone"):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 1))
        accelerator.save_state(tmp_path / name)
        del accelerator, model
    torch.manual_seed(5)
    af.save_tree(tmp_path / "saved_by_both" / "random_states_1", random_states(Context()))
    expected = torch.rand(3)

    def run(ctx: Context) -> None:
        accelerator: Any = joined(ctx) if ctx.rank == 1 else af.Accelerator(context=ctx)
        model = accelerator.prepare(model=nn.Linear(2, 1))
        torch.manual_seed(6)
        untouched = torch.rand(1), torch.rand(1)
        for name, drawn in (("saved_by_both", expected[:1]), ("saved_alone", untouched[0])):
            torch.manual_seed(6)
            accelerator.load_state(tmp_path / name, partial=True, random_state=ctx.rank == 1)
            assert ctx.rank == 0 or torch.equal(torch.rand(1), drawn)
        del model
        current().world = None

    run_ranks(run, 2)


def test_what_one_rank_cannot_save_alone_says_so(tmp_path: pathlib.Path) -> None:
    def run(ctx: Context) -> None:
        options = af.Accelerator(context=ctx)
        if ctx.rank == 0:
            options.register_for_checkpointing(torch.optim.SGD([torch.ones(1)], 0.1))
            options.save_state(tmp_path / "at")
        options.wait_for_everyone()

    with pytest.raises(MismatchError, match=r"save_state is inside `if .* is_main_process`, move it out"):
        run_ranks(run, 2)


@pytest.mark.parametrize(
    "call",
    ["save_state", *(pytest.param(one, marks=pytest.mark.slow) for one in ("save_model", "get_state_dict"))],
)
def test_shards_are_saved_by_all_ranks_and_the_main_process_alone_is_told(
    tmp_path: pathlib.Path, call: str
) -> None:
    def run(ctx: Context) -> None:
        current().world = ctx
        accelerator = Accelerator(fsdp_plugin=af.FullyShardedDataParallelPlugin())
        model = accelerator.prepare(nn.Linear(2, 2))
        calls: dict[str, Any] = {
            "save_state": lambda: accelerator.save_state(tmp_path / "state"),
            "save_model": lambda: accelerator.save_model(model, tmp_path / "model"),
            "get_state_dict": lambda: accelerator.get_state_dict(model),
        }
        calls[call]()
        if accelerator.is_main_process:
            calls[call]()
        accelerator.wait_for_everyone()

    with pytest.raises(MismatchError, match=rf"{call} is inside `if .* is_main_process`, move it out"):
        run_ranks(run, 2, on="processes")


def test_what_hooks_write_stays_in_the_folder_of_the_checkpoint(tmp_path: pathlib.Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    seen: list[str] = []

    def write(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        os.makedirs(os.path.join(output_dir, "unet"), exist_ok=True)
        torch.save(models[0].state_dict(), os.path.join(output_dir, "unet", "model.bin"))
        weights.pop()

    def read(models: list[nn.Module], input_dir: str) -> None:
        seen.append(input_dir)
        models.pop().load_state_dict(torch.load(os.path.join(input_dir, "unet", "model.bin")))

    handle = accelerator.register_save_state_pre_hook(write)
    accelerator.register_load_state_pre_hook(read)
    for _ in range(2):  # into a new folder, and over an earlier checkpoint
        accelerator.save_state(str(tmp_path / "at"))
        assert {*os.listdir(tmp_path / "at")} > {"unet", "manifest.json"}
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(str(tmp_path / "at"))
    assert seen == [str(tmp_path / "at")]
    assert model.weight.any()
    handle.remove()
    accelerator.save_state(str(tmp_path / "pickled"), safe_serialization=False)
    assert (tmp_path / "pickled" / "pytorch_model.bin").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="contains files but no checkpoint"):
        accelerator.save_state(str(tmp_path / "mine"))
