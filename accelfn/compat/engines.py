"""Names of DeepSpeed and FSDP that libraries import: a configuration to ask, sharded checkpoints."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, cast

from torch import nn

import accelfn.checkpoint as checkpoint
from accelfn.compat.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelfn.config import DeepSpeedPlugin

Directory = str | os.PathLike[str]


class HfDeepSpeedConfig:
    """A DeepSpeed configuration, for asking what is in it.

    Attributes:
        config: The configuration, which may be changed.

    Args:
        config_file_or_dict: A mapping, the path of a JSON file, or its text, also in base64.
    """

    __module__ = "accelerate.utils.deepspeed"

    def __init__(self, config_file_or_dict: Any) -> None:
        """Read a configuration."""
        if isinstance(config_file_or_dict, dict):
            read: Any = copy.deepcopy(cast("dict[str, Any]", config_file_or_dict))
        else:
            read = DeepSpeedPlugin(hf_ds_config=config_file_or_dict).config
        self.config: dict[str, Any] = read
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the stage and the offload again, after a change."""
        self._stage: Any = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")
        }
        self._offload: bool = bool(devices & {"cpu", "nvme"}) and (self.is_zero2() or self.is_zero3())

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section that has a key with dots, or None, and the last part of the key."""
        *sections, last = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section)
            if node is None:
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key with dots."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a key with dots.

        Raises:
            ValueError: It isn't there, and ``must_exist``.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"the DeepSpeed configuration has no entry {ds_key_long!r}.")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a value is there and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a value is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether the stage is 2."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Return whether the stage is 3."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Return whether something is kept off the device."""
        return self._offload


class DeepSpeedEngineWrapper:
    """For ``isinstance`` only: accelfn's engine has no such object."""


class DeepSpeedOptimizerWrapper:
    """For ``isinstance`` only: accelfn's engine has no such object."""


class DeepSpeedSchedulerWrapper:
    """For ``isinstance`` only: accelfn's engine has no such object."""


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
