"""How DeepSpeed trains: the plugin, and the configuration file that it may name."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from accelfn.config.checks import (
    FrozenOptions,
    Record,
    in_range,
    settle,
    settle_fields,
    where,
    wrong_type,
)
from accelfn.config.enums import FP8OptLevel, OffloadDevice
from accelfn.config.handlers import GradScalerKwargs
from accelfn.errors import ConfigurationError

_PRECISIONS = ("fp16", "bf16")

# Steps until a fixed loss scale grows.
_NEVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DeepSpeedPlugin(Record):
    """How DeepSpeed shards and offloads.

    A configuration of DeepSpeed decides where it names a value; the other fields fill what it leaves
    ``"auto"``.

    Attributes:
        hf_ds_config: A DeepSpeed configuration: a mapping, the path of a JSON file, JSON as text or in
            base64, or an object with such a mapping as ``config``. Default None: made from the other fields.
        gradient_accumulation_steps: Micro-batches per step, at least 1, or "auto" for the context's. Default
            auto.
        gradient_clipping: Largest gradient norm; 0 for none, "auto" for that of each step's ``max_norm``.
            Default auto.
        zero_stage: What is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and
            parameters. Default 2.
        is_train_batch_min: Whether the smallest of several loaders gives the batch size. Default True.
        offload_optimizer_device: Where optimizer state is kept: none, cpu or nvme. Default none.
        offload_param_device: Where parameters are kept, at stage 3: none, cpu or nvme. Default none.
        offload_optimizer_nvme_path: Directory on the disk, for nvme. Default "none".
        offload_param_nvme_path: Directory on the disk, for nvme. Default "none".
        zero3_init_flag: Whether models are created sharded, at stage 3. Default None: yes.
        zero3_save_16bit_model: Whether DeepSpeed's own files at stage 3 have a 16-bit model. Default False.
        transformer_moe_cls_names: Class names of expert layers, which stage 3 gathers as a whole, as an
            iterable or with commas. Default None.
        enable_msamp: Whether MS-AMP is used. Default False.
        msamp_opt_level: "O1" or "O2". Default O1.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str = "auto"
    gradient_clipping: float | str = "auto"
    zero_stage: int = field(default=2, metadata=in_range(0, 3))
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
        """Check and normalise the fields, and read the configuration."""
        settle_fields(self)
        settle(self, hf_ds_config=read_deepspeed_config(self))
        if self.gradient_accumulation_steps == 0:
            raise ConfigurationError(
                f"{where(self, 'gradient_accumulation_steps')} must be at least 1 or 'auto', got 0."
            )
        if self.hf_ds_config is not None:
            return
        if self.zero3_init_flag and self.zero_stage != 3:
            raise ConfigurationError(
                f"{where(self, 'zero3_init_flag')} shards models while they are created, which needs "
                f"zero_stage=3, got {self.zero_stage}. Leave one of the two out."
            )
        for what, least in (("param", 3), ("optimizer", 1)):
            device = getattr(self, f"offload_{what}_device")
            if device != OffloadDevice.NONE and self.zero_stage < least:
                raise ConfigurationError(
                    f"{where(self, f'offload_{what}_device')}={str(device)!r} needs a zero_stage of at least "
                    f"{least}, got {self.zero_stage}. Raise the stage, or leave it out."
                )
            if (device == OffloadDevice.NVME) != (getattr(self, f"offload_{what}_nvme_path") != "none"):
                raise ConfigurationError(
                    f"{where(self, f'offload_{what}_nvme_path')} is the directory for "
                    f"offload_{what}_device='nvme': set both or none."
                )
        if self.enable_msamp:
            raise ConfigurationError(
                f"{where(self, 'enable_msamp')} isn't supported. Leave it out; without DeepSpeed, MS-AMP is "
                'mixed_precision="fp8" with MSAMPRecipeKwargs.'
            )

    @property
    def config(self) -> dict[str, Any] | None:
        """A copy of the DeepSpeed configuration; None if the plugin has none."""
        return copy.deepcopy(dict(self.hf_ds_config)) if self.hf_ds_config is not None else None

    @property
    def stage(self) -> int:
        """The stage of ZeRO: that of the configuration, or ``zero_stage``."""
        stage = _section(self.hf_ds_config, "zero_optimization").get("stage", "auto")
        return self.zero_stage if stage == "auto" else int(stage)

    @property
    def mixed_precision(self) -> str | None:
        """The precision that the configuration switches on: "fp16" or "bf16"; None if it leaves it open."""
        for name in _PRECISIONS:
            if _section(self.hf_ds_config, name).get("enabled") is True:
                return name
        return None

    @property
    def scaler(self) -> GradScalerKwargs | None:
        """The loss scale of the section "fp16"; None if it names none.

        Its hysteresis and least scale have no counterpart and are ignored.
        """
        section = _section(self.hf_ds_config, "fp16")
        fixed = section.get("loss_scale", 0)
        if fixed != "auto" and fixed > 0:
            return GradScalerKwargs(init_scale=float(fixed), growth_interval=_NEVER)
        names = {"initial_scale_power", "loss_scale_window"} & section.keys()
        if not names or any(section[name] == "auto" for name in names):
            return None
        default = GradScalerKwargs()
        power, window = section.get("initial_scale_power"), section.get("loss_scale_window")
        return GradScalerKwargs(
            init_scale=default.init_scale if power is None else 2.0 ** int(power),
            growth_interval=default.growth_interval if window is None else int(window),
        )

    @property
    def accumulation(self) -> int | None:
        """The number of micro-batches per step that the plugin asks for; None if it leaves it open."""
        config: Mapping[str, Any] = self.hf_ds_config or {}
        steps = config.get("gradient_accumulation_steps", self.gradient_accumulation_steps)
        return None if steps == "auto" else int(steps)


def _section(config: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    found = (config or {}).get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


def read_deepspeed_config(plugin: DeepSpeedPlugin) -> Mapping[str, Any] | None:
    """Return the DeepSpeed configuration that a plugin names; None for none. Reads a file if it names one.

    Raises:
        TypeError: It is no mapping, path or text.
        ConfigurationError: The file or text is no JSON object, or has no section ``zero_optimization``.
    """
    value: Any = plugin.hf_ds_config
    place = where(plugin, "hf_ds_config")
    if value is None or value == "none":
        return None
    found: Any = getattr(value, "config", value)
    if isinstance(found, (str, os.PathLike)):
        found = _parsed(place, os.fspath(cast("str | os.PathLike[str]", found)))
    if not isinstance(found, Mapping):
        raise wrong_type(plugin, "hf_ds_config", "a mapping, the path of a JSON file, or JSON")
    config = _without_comments(cast("Mapping[str, Any]", found))
    if not isinstance(config.get("zero_optimization"), Mapping):
        raise ConfigurationError(
            f"{place} has no section 'zero_optimization', which says what is sharded. Add "
            '"zero_optimization": {"stage": 2}; stage 0 shards nothing.'
        )
    return FrozenOptions(config)


def _without_comments(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a section without keys such as ``_comment``."""
    return {
        key: _without_comments(cast("Mapping[str, Any]", value))
        if isinstance(value, Mapping)
        else copy.deepcopy(value)
        for key, value in section.items()
        if not str(key).startswith("_")
    }


def _parsed(place: str, text: str) -> Any:
    if os.path.exists(text):
        with open(text, encoding="utf-8") as file:
            content = file.read()
        source = text
    elif text.lstrip().startswith("{"):
        content, source = text, "the text"
    else:
        try:
            content, source = base64.urlsafe_b64decode(text).decode(), "the base64 text"
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise ConfigurationError(
                f"{place}: there is no file {text!r}, and it is neither JSON nor base64 of JSON."
            ) from None
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{place}: {source} is not JSON: {error}.") from None
