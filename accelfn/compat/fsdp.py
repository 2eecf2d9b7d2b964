"""Checkpoints of sharded models, as a Trainer asks for them: accelfn's, where it looks for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import accelfn.checkpoint as checkpoint
from accelfn.compat.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelfn.context import Context

Directory = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: nn.Module, output_dir: Directory, model_index: int = 0
) -> None:
    """Save a sharded model; see :func:`accelfn.save_state`.

    Ranks: every rank.
    """
    del fsdp_plugin
    _save(accelerator.context, _place(output_dir, FSDP_MODEL_NAME, model_index), {"model": model})


def load_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: nn.Module, input_dir: Directory, model_index: int = 0
) -> None:
    """Load what :func:`save_fsdp_model` has saved, on any number of ranks.

    Ranks: every rank.
    """
    del fsdp_plugin
    _load(accelerator.context, _place(input_dir, FSDP_MODEL_NAME, model_index), {"model": model})


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: Directory,
    optimizer_index: int = 0,
) -> None:
    """Save the optimizer of a sharded model; see :func:`accelfn.save_state`.

    Ranks: every rank.
    """
    del fsdp_plugin, model
    _save(accelerator.context, _place(output_dir, OPTIMIZER_NAME, optimizer_index), {"optimizer": optimizer})


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: Directory,
    optimizer_index: int = 0,
) -> None:
    """Load what :func:`save_fsdp_optimizer` has saved, on any number of ranks.

    Ranks: every rank.
    """
    del fsdp_plugin, model
    _load(accelerator.context, _place(input_dir, OPTIMIZER_NAME, optimizer_index), {"optimizer": optimizer})


def _place(directory: Directory, name: str, index: int) -> Path:
    return Path(directory) / f"{name.removesuffix('.bin')}_{index}"


def _save(ctx: Context, place: Path, tree: dict[str, Any]) -> None:
    checkpoint.save_state(ctx, place, tree)


def _load(ctx: Context, place: Path, tree: dict[str, Any]) -> None:
    # The program restores its random states itself.
    checkpoint.load_state(ctx, place, tree, random_state=False)
