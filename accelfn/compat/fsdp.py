"""Checkpoints of sharded models, as a Trainer asks for them: accelfn's, where it looks for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

import accelfn.checkpoint as checkpoint
from accelfn.compat.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

Directory = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: nn.Module, output_dir: Directory, model_index: int = 0
) -> None:
    """Save a sharded model; see :func:`accelfn.save_state`.

    Ranks: every rank.
    """
    place = Path(output_dir) / f"{FSDP_MODEL_NAME}_{model_index}"
    checkpoint.save_state(accelerator.context, place, {"model": model})


def load_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: nn.Module, input_dir: Directory, model_index: int = 0
) -> None:
    """Load what :func:`save_fsdp_model` has saved, on any number of ranks; no random states.

    Ranks: every rank.
    """
    place = Path(input_dir) / f"{FSDP_MODEL_NAME}_{model_index}"
    checkpoint.load_state(accelerator.context, place, {"model": model}, random_state=False)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Directory,
    optimizer_index: int = 0,
) -> None:
    """Save the optimizer of a sharded model; see :func:`accelfn.save_state`.

    Ranks: every rank.
    """
    place = Path(output_dir) / f"{OPTIMIZER_NAME}_{optimizer_index}"
    checkpoint.save_state(accelerator.context, place, {"optimizer": optimizer})


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Directory,
    optimizer_index: int = 0,
) -> None:
    """Load what :func:`save_fsdp_optimizer` has saved, on any number of ranks; no random states.

    Ranks: every rank.
    """
    place = Path(input_dir) / f"{OPTIMIZER_NAME}_{optimizer_index}"
    checkpoint.load_state(accelerator.context, place, {"optimizer": optimizer}, random_state=False)
