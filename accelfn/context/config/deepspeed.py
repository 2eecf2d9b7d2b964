"""Options of DeepSpeed."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, cast

from accelfn.context.config.checks import (
    check_bools,
    check_ints,
    check_reals,
    check_texts,
    settle,
    settle_choice,
    settle_names,
    settle_options,
    unchecked,
    where,
    wrong_type,
)
from accelfn.context.config.enums import FP8OptLevel, OffloadDevice
from accelfn.errors import ConfigurationError

__all__ = ("DeepSpeedPlugin",)


@dataclass(frozen=True, slots=True)
class DeepSpeedPlugin:
    """How DeepSpeed shards and offloads.

    Attributes:
        hf_ds_config: A DeepSpeed configuration: mapping, JSON text, url-safe base64 of JSON text, an object
            with such a mapping as ``config``, or the path of a file (kept as text; the file is not read
            here). "none" is ``None``. Default None: one is made from the other fields.
        gradient_accumulation_steps: Micro-batches per step, at least 1, or "auto". Default auto.
        gradient_clipping: Largest gradient norm; 0 for no clipping, or "auto". Default auto.
        zero_stage: What is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and
            parameters. Default 2.
        is_train_batch_min: Whether the smallest of several loaders gives the batch size. Default True.
        offload_optimizer_device: Where optimizer state rests: none, cpu or nvme. Default none.
        offload_param_device: Where parameters rest: none, cpu or nvme. Default none.
        offload_optimizer_nvme_path: Directory on the disk; needed for nvme. Default "none".
        offload_param_nvme_path: Directory on the disk; needed for nvme. Default "none".
        zero3_init_flag: Whether models are born sharded. Default: True at stage 3. False at other stages,
            where it has no meaning.
        zero3_save_16bit_model: Whether stage 3 can gather a 16-bit model to save it. Default False.
        transformer_moe_cls_names: Class names of expert layers, as an iterable or with commas. Default None.
        enable_msamp: Whether MS-AMP is used; not with stage 3. Default False.
        msamp_opt_level: "O1" or "O2". Default O1.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str = "auto"
    gradient_clipping: float | str = "auto"
    zero_stage: int = 2
    is_train_batch_min: bool = True
    offload_optimizer_device: OffloadDevice | str = OffloadDevice.NONE
    offload_param_device: OffloadDevice | str = OffloadDevice.NONE
    offload_optimizer_nvme_path: str = "none"
    offload_param_nvme_path: str = "none"
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool = False
    transformer_moe_cls_names: Iterable[str] | None = None
    enable_msamp: bool = False
    msamp_opt_level: FP8OptLevel | str = FP8OptLevel.O1

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        if self.gradient_accumulation_steps != "auto":
            check_ints(self, "gradient_accumulation_steps", minimum=1)
        if self.gradient_clipping != "auto":
            check_reals(self, "gradient_clipping", minimum=0.0)
        check_ints(self, "zero_stage", minimum=0, maximum=3)
        check_bools(self, "is_train_batch_min", "zero3_save_16bit_model", "enable_msamp")
        check_bools(self, "zero3_init_flag", optional=True)
        check_texts(self, "offload_optimizer_nvme_path", "offload_param_nvme_path")
        settle_choice(self, "offload_optimizer_device", OffloadDevice)
        settle_choice(self, "offload_param_device", OffloadDevice)
        settle_choice(self, "msamp_opt_level", FP8OptLevel)
        settle_names(self, "transformer_moe_cls_names")
        self._settle_config()
        self._check_paths()
        if self.enable_msamp and self.zero_stage == 3:
            raise ConfigurationError(
                f"{where(self, 'enable_msamp')} does not work with zero_stage=3, got both. "
                "Use zero_stage 0, 1 or 2, or another fp8 backend."
            )
        wanted = self.zero3_init_flag is not False
        settle(self, zero3_init_flag=wanted and self.zero_stage == 3)

    def _settle_config(self) -> None:
        config = unchecked(self, "hf_ds_config")
        if config is None:
            return
        # transformers keeps the mapping in an object; it is recognised by its shape, not imported.
        if not isinstance(config, (str, PathLike, Mapping)):
            config = getattr(config, "config", None)
        if isinstance(config, (str, PathLike)):
            config = _read_config_text(
                where(self, "hf_ds_config"), fspath(cast("str | PathLike[str]", config))
            )
        if not (config is None or isinstance(config, (str, Mapping))) or (
            config is None and not isinstance(self.hf_ds_config, str)
        ):
            raise wrong_type(self, "hf_ds_config", "a mapping, a path, JSON text or base64 of JSON text")
        settle(self, hf_ds_config=cast("object", config))
        if isinstance(config, Mapping):
            settle_options(self, "hf_ds_config")
            if "zero_optimization" not in config:
                raise ConfigurationError(
                    f"{where(self, 'hf_ds_config')} must have a zero_optimization section, got the keys "
                    f"{list(cast('Mapping[str, object]', config))}. Add one, with a stage."
                )

    def _check_paths(self) -> None:
        # With a configuration of the user's own the paths stand in there.
        if self.hf_ds_config is not None:
            return
        for kind in ("optimizer", "param"):
            device = getattr(self, f"offload_{kind}_device")
            path = getattr(self, f"offload_{kind}_nvme_path")
            if device == OffloadDevice.NVME and path.lower() == "none":
                raise ConfigurationError(
                    f"{where(self, f'offload_{kind}_nvme_path')} is needed to offload to nvme, got {path!r}. "
                    "Pass a directory on that disk."
                )


def _read_config_text(place: str, text: str) -> Mapping[str, Any] | str | None:
    """Return the mapping that a text encodes, the text itself if it is a path, ``None`` for "none"."""
    stripped = text.strip()
    if stripped.lower() == "none":
        return None
    if not stripped:
        raise ConfigurationError(f"{place} must not be empty, got {text!r}. Pass a path, or leave it out.")
    if stripped.startswith("{"):
        try:
            return cast("Mapping[str, Any]", json.loads(stripped))
        except json.JSONDecodeError as error:
            raise ConfigurationError(
                f"{place} looks like JSON but is not: {error}. Got {text!r}. Correct it, or pass a path."
            ) from error
    try:
        decoded = json.loads(base64.urlsafe_b64decode(stripped))
    except (binascii.Error, ValueError):
        return text
    return cast("Mapping[str, Any]", decoded) if isinstance(decoded, dict) else text
