# torch leaves state dicts partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from accelfn import Accelerator, Context
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_that_is_gone_is_not_left_out_of_a_checkpoint(world: int, tmp_path: Path) -> None:
    def run(ctx: Context) -> str:
        accelerator = Accelerator(context=ctx)
        model = accelerator.prepare(nn.Linear(2, 1))
        critic = accelerator.prepare(critic=nn.Linear(3, 1))
        kept = accelerator.prepare(critic_optimizer=optimizer_of(critic))
        accelerator.prepare(optimizer_of(model))  # what it gives back isn't kept
        gc.collect()
        with pytest.raises(ConfigurationError) as caught:
            accelerator.save_state(tmp_path / "at")
        del kept
        return str(caught.value)

    for text in run_ranks(run, world):
        assert "the 2nd optimizer that was prepared (AdamW) is gone" in text
        assert "Keep what prepare returned" in text
    assert not (tmp_path / "at").exists()


def test_a_schedule_or_a_model_that_is_gone_is_not_left_out_either(tmp_path: Path) -> None:
    accelerator = Accelerator(context=Context())
    model, optimizer = accelerator.prepare(model := nn.Linear(2, 1), optimizer_of(model))
    accelerator.prepare(StepLR(optimizer, 1))
    gc.collect()
    with pytest.raises(ConfigurationError, match=r"the 1st scheduler that was prepared \(StepLR\) is gone"):
        accelerator.save_state(tmp_path / "at")
    again = Accelerator(context=Context())
    model, optimizer = again.prepare(model := nn.Linear(2, 1), optimizer_of(model))
    del model
    gc.collect()
    with pytest.raises(ConfigurationError, match=r"the 1st model that was prepared \(Linear\) is gone"):
        again.save_state(tmp_path / "at")


def test_what_is_gone_with_all_that_it_belongs_to_is_nobodys_loss(tmp_path: Path) -> None:
    accelerator = Accelerator(context=Context())
    for _ in range(3):  # each cycle leaves nothing
        model, optimizer = accelerator.prepare(model := nn.Linear(2, 1), optimizer_of(model))
        scheduler = accelerator.prepare(StepLR(optimizer, 1))
        accelerator.save_state(tmp_path / "at")
        del model, optimizer, scheduler
        gc.collect()
    assert accelerator.optimizers.lost() == accelerator.models.lost() == accelerator.schedulers.lost() == []
    other = accelerator.prepare(nn.Linear(3, 1))
    accelerator.save_state(tmp_path / "other")
    del other


def test_what_took_the_place_of_another_is_saved_in_its_stead(tmp_path: Path) -> None:
    accelerator = Accelerator(context=Context())
    model, optimizer = accelerator.prepare(model := nn.Linear(2, 1), optimizer_of(model))
    scheduler = accelerator.prepare(StepLR(optimizer, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = accelerator.prepare(StepLR(optimizer, 2))
    gc.collect()
    accelerator.save_state(tmp_path / "at")
    del scheduler


def test_what_was_released_is_not_missed(tmp_path: Path) -> None:
    accelerator = Accelerator(context=Context())
    model: Any = accelerator.prepare(nn.Linear(2, 1))
    accelerator.prepare(optimizer_of(model))
    gc.collect()
    accelerator.free_memory()
    model = accelerator.prepare(model)
    accelerator.save_state(tmp_path / "at")


def test_a_loader_that_is_gone_is_not_missed(tmp_path: Path) -> None:
    accelerator = Accelerator(context=Context())
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.prepare(DataLoader([1, 2]))  # pyright: ignore[reportArgumentType]
    gc.collect()
    accelerator.save_state(tmp_path / "at")
    del model
