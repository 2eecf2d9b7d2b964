"""Accelerate's configuration records: changed at any time, and frozen when they are used."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch

import accelfn.context.config as config
from accelfn.bigmodel import BnbQuantizationConfig as FrozenBnbQuantizationConfig
from accelfn.compat.engines import HfDeepSpeedConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel.engines.deepspeed_plan import generated_config

_DTYPES = MappingProxyType(
    {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
)


class KwargsHandler:
    """Base of the handlers. A program's own handler may be a plain dataclass that inherits from it."""

    __module__ = "accelerate.utils.dataclasses"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, as a deep copy."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the default."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default.get(name) != value}


class MutableRecord(KwargsHandler):
    """A dataclass whose fields can be set at any time.

    Nothing is checked before :meth:`freeze`, which an ``Accelerator`` calls, also after a change: None means
    the default there.

    Raises:
        TypeError: A field is unknown, or there are too many positional arguments.
    """

    __module__ = "accelerate.utils.dataclasses"
    record: ClassVar[Any]  # accelfn's record
    order: ClassVar[tuple[str, ...]] = ()  # of the positional arguments, if it isn't the record's
    ignored: ClassVar[tuple[str, ...]] = ()  # fields without effect here
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    __dataclass_params__: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        """Set the fields of a subclass to those of its record, in the order of the positional arguments."""
        super().__init_subclass__()
        if "record" in vars(cls):
            # The decorator would look for the module, which is there only with the alias.
            made: Any = dataclasses.make_dataclass("Ignored", [(name, Any, None) for name in cls.ignored])
            known = {item.name: item for item in (*fields(cls.record), *fields(made))}
            named = {name: known[name] for name in dict.fromkeys((*cls.order, *known))}
            cls.__dataclass_fields__ = named
            cls.__dataclass_params__ = made.__dataclass_params__

    def __init__(self, *args: Any, **values: Any) -> None:
        """Set fields, by position or by name."""
        kind = type(self)
        names = [item.name for item in fields(self)]
        order = [*(kind.order or names)]
        if len(args) > len(order):
            raise TypeError(f"{kind.__name__} takes at most {len(order)} arguments, got {len(args)}.")
        given = dict(zip(order, args, strict=False))
        twice = given.keys() & values.keys()
        unknown = values.keys() - {*names}
        if twice or unknown:
            raise TypeError(
                f"{kind.__name__}: {'two values for' if twice else 'unknown field'} "
                f"{', '.join(sorted(twice or unknown))}. Its fields are {', '.join(names)}."
            )
        for item in fields(self):
            setattr(self, item.name, _default_of(item))
        for name, value in {**given, **values}.items():
            if value is not None or name in kind.ignored:
                setattr(self, name, value)

    @classmethod
    def launched(cls, name: str) -> Any:
        """Return the record of the launcher's variables; None if they don't ask for it.

        Args:
            name: The argument of ``Accelerator``.
        """
        read = getattr(config.read_settings(dict(os.environ)), name)
        return None if read is None else cls.of(read)

    @classmethod
    def of(cls, record: Any) -> Any:
        """Return the program's record for accelfn's."""
        return cls(**{item.name: getattr(record, item.name) for item in fields(record)})

    def freeze(self) -> Any:
        """Return accelfn's record of these values; None means the default.

        Raises:
            ConfigurationError: A value is invalid.
            TypeError: A value has the wrong type.
        """
        names = [item.name for item in fields(type(self).record)]
        values = {name: freeze(getattr(self, name)) for name in names}
        return type(self).record(**{name: value for name, value in values.items() if value is not None})

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the default and are meant for torch."""
        frozen = self.freeze()
        return frozen.to_kwargs() if hasattr(frozen, "to_kwargs") else super().to_kwargs()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no field {name!r}.")

    def __setattr__(self, name: str, value: Any) -> None:
        known = {item.name for item in fields(self)}
        if name not in known and not isinstance(
            vars(type(self)).get(name), property
        ):  # it would have no effect
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}. Its fields are {', '.join(sorted(known))}."
            )
        super().__setattr__(name, value)


def _default_of(item: Field[Any]) -> Any:
    value: Any = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, config.FrozenOptions) else value


def freeze(value: Any) -> Any:
    """Return accelfn's record for a program's, also inside a list or a dict of records."""
    if isinstance(value, MutableRecord):
        return value.freeze()
    if isinstance(value, dict):
        return {key: freeze(one) for key, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [freeze(one) for one in cast("Sequence[Any]", value)]
    return value


class AutocastKwargs(MutableRecord):
    """Options of ``torch.autocast``; see :class:`accelfn.AutocastKwargs`."""

    record: ClassVar[Any] = config.AutocastKwargs


class DistributedDataParallelKwargs(MutableRecord):
    """Options of torch's wrapper; see :class:`accelfn.DistributedDataParallelKwargs`."""

    record: ClassVar[Any] = config.DistributedDataParallelKwargs


class GradScalerKwargs(MutableRecord):
    """Options of the loss scaler; see :class:`accelfn.GradScalerKwargs`."""

    record: ClassVar[Any] = config.GradScalerKwargs


class InitProcessGroupKwargs(MutableRecord):
    """Options of the process group; see :class:`accelfn.InitProcessGroupKwargs`."""

    record: ClassVar[Any] = config.InitProcessGroupKwargs


class ProfileKwargs(MutableRecord):
    """Options of torch's profiler; see :class:`accelfn.ProfileKwargs`."""

    record: ClassVar[Any] = config.ProfileKwargs


class FP8RecipeKwargs(MutableRecord):
    """Options of 8-bit training; see :class:`accelfn.FP8RecipeKwargs`."""

    record: ClassVar[Any] = config.FP8RecipeKwargs
    order: ClassVar[tuple[str, ...]] = (
        *("opt_level", "use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len"),
        *("amax_compute_algo", "override_linear_precision", "use_mxfp8_block_scaling", "backend"),
    )


class AORecipeKwargs(MutableRecord):
    """Options of torchao's 8-bit training; see :class:`accelfn.AORecipeKwargs`."""

    record: ClassVar[Any] = config.AORecipeKwargs


class TERecipeKwargs(MutableRecord):
    """Options of TransformerEngine; see :class:`accelfn.TERecipeKwargs`."""

    record: ClassVar[Any] = config.TERecipeKwargs


class MSAMPRecipeKwargs(MutableRecord):
    """Options of MS-AMP; see :class:`accelfn.MSAMPRecipeKwargs`."""

    record: ClassVar[Any] = config.MSAMPRecipeKwargs


class TorchDynamoPlugin(MutableRecord):
    """Options of torch.compile; see :class:`accelfn.TorchDynamoPlugin`."""

    record: ClassVar[Any] = config.TorchDynamoPlugin


class GradientAccumulationPlugin(MutableRecord):
    """Options of accumulation; see :class:`accelfn.GradientAccumulationPlugin`."""

    record: ClassVar[Any] = config.GradientAccumulationPlugin


class DataLoaderConfiguration(MutableRecord):
    """How loaders are sharded; see :class:`accelfn.DataLoaderConfiguration`."""

    record: ClassVar[Any] = config.DataLoaderConfiguration


class ProjectConfiguration(MutableRecord):
    """Directories of the outputs; see :class:`accelfn.ProjectConfiguration`."""

    record: ClassVar[Any] = config.ProjectConfiguration

    def __init__(self, *args: Any, **values: Any) -> None:
        """Set fields, by position or by name."""
        super().__init__(*args, **values)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Any = None) -> None:
        """Set the project's directory, and that of logs if there is none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


class FullyShardedDataParallelPlugin(MutableRecord):
    """Options of FSDP; see :class:`accelfn.FullyShardedDataParallelPlugin`."""

    record: ClassVar[Any] = config.FullyShardedDataParallelPlugin
    order: ClassVar[tuple[str, ...]] = (
        *("fsdp_version", "sharding_strategy", "reshard_after_forward", "backward_prefetch"),
        *("mixed_precision_policy", "auto_wrap_policy", "cpu_offload", "ignored_modules"),
        *("state_dict_type", "state_dict_config", "optim_state_dict_config", "limit_all_gathers"),
        *("use_orig_params", "param_init_fn", "sync_module_states", "forward_prefetch"),
        *("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading"),
        *("transformer_cls_names_to_wrap", "min_num_params"),
    )

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set the policy to one dtype, or its name. A policy that is there stays, unless ``override`` is set.

        Raises:
            ConfigurationError: The name is unknown.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        dtype: Any = _DTYPES.get(mixed_precision, mixed_precision)
        if isinstance(dtype, str):
            raise ConfigurationError(
                f"set_mixed_precision doesn't know {dtype!r}. Use one of {', '.join(_DTYPES)}, or a dtype."
            )
        fsdp: Any = importlib.import_module("torch.distributed.fsdp")
        both = {"param_dtype": dtype, "reduce_dtype": dtype}
        self.mixed_precision_policy: Any = (
            fsdp.MixedPrecisionPolicy(**both, output_dtype=dtype)
            if self.fsdp_version == 2
            else fsdp.MixedPrecision(**both, buffer_dtype=torch.float32 if buffer_autocast else dtype)
        )


class DeepSpeedPlugin(MutableRecord):
    """Options of DeepSpeed; see :class:`accelfn.DeepSpeedPlugin`.

    Without a configuration it reads the launcher's variables. The configuration may be changed until
    ``prepare``: transformers' ``Trainer`` fills its "auto" late.

    Attributes:
        hf_ds_config: Always an object with the configuration as ``config``.
        deepspeed_config: This configuration.
    """

    record: ClassVar[Any] = config.DeepSpeedPlugin

    def __init__(self, *args: Any, **values: Any) -> None:
        """Set fields, by position or by name."""
        super().__init__(*args, **values)
        if self._given() is None:
            read = config.read_settings(dict(os.environ)).deepspeed_plugin
            for item in fields(self) if read is not None else ():
                if getattr(self, item.name) == _default_of(item):
                    setattr(self, item.name, getattr(read, item.name))
        given = self._given()
        if given is None:
            frozen = config.DeepSpeedPlugin(**{item.name: getattr(self, item.name) for item in fields(self)})
            given = {
                **generated_config(frozen),
                "gradient_accumulation_steps": frozen.gradient_accumulation_steps,
                "gradient_clipping": frozen.gradient_clipping,
            }
        self.hf_ds_config: Any = given if hasattr(given, "config") else HfDeepSpeedConfig(given)
        stage: Any = self.deepspeed_config.get("zero_optimization", {}).get("stage", "auto")
        if stage != "auto":
            self.zero_stage: int = stage

    def _given(self) -> Any:
        return None if self.hf_ds_config == "none" else self.hf_ds_config

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration."""
        return self.hf_ds_config.config

    @deepspeed_config.setter
    def deepspeed_config(self, changed: Mapping[str, Any]) -> None:
        if self.hf_ds_config.config is not changed:
            self.hf_ds_config = HfDeepSpeedConfig(dict(changed))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Fill "auto" of the sections "fp16" and "bf16"."""
        for name in ("fp16", "bf16"):
            section: Any = self.deepspeed_config.get(name) or {}
            if section.get("enabled") == "auto":
                section["enabled"] = mixed_precision == name

    def set_deepspeed_weakref(self) -> None:
        """Let transformers know the configuration, so that it loads models in shards at stage 3."""
        if self.hf_ds_config.is_zero3() and self.zero3_init_flag is not False:
            integration: Any = importlib.import_module("transformers.integrations.deepspeed")
            self.hf_ds_config = integration.HfDeepSpeedConfig(self.deepspeed_config)

    def frozen_for(self, num_steps: int | None) -> Any:
        """Return accelfn's record, for a program that asks for windows of ``num_steps``; None: of the plugin.

        A program with windows of 1 counts by itself, as a ``Trainer`` does, whatever the configuration says.
        """
        frozen = self.freeze()
        if num_steps != 1:
            return frozen
        counted = {"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}
        return dataclasses.replace(
            frozen, hf_ds_config={**frozen.config, **counted}, gradient_accumulation_steps="auto"
        )


class MegatronLMPlugin(MutableRecord):
    """Options of Megatron-LM, by name; see :class:`accelfn.MegatronLMPlugin`."""

    record: ClassVar[Any] = config.MegatronLMPlugin


class TorchTensorParallelConfig(MutableRecord):
    """Options of tensor parallelism."""

    record: ClassVar[Any] = config.TorchTensorParallelConfig


class TorchContextParallelConfig(MutableRecord):
    """Options of context parallelism."""

    record: ClassVar[Any] = config.TorchContextParallelConfig


class ParallelismConfig(MutableRecord):
    """Sizes of the mesh; see :class:`accelfn.ParallelismConfig`."""

    __module__ = "accelerate.parallelism_config"
    record: ClassVar[Any] = config.ParallelismConfig
    ignored: ClassVar[tuple[str, ...]] = ("sp_handler",)
    order: ClassVar[tuple[str, ...]] = (
        *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size"),
        *("sp_backend", "tp_handler", "cp_handler", "sp_handler"),
    )

    @property
    def tp_enabled(self) -> bool:
        """Whether ranks share layers."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether ranks share sequences by context parallelism."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether ranks share sequences by sequence parallelism."""
        return self.sp_size > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether ranks hold copies of the model."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether ranks share the parameters of a copy."""
        return self.dp_shard_size > 1

    @property
    def total_size(self) -> int:
        """Number of ranks of the mesh."""
        return int(self.freeze().total_size)

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that get the same batch."""
        return self.tp_size * self.cp_size * self.sp_size

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that get different batches."""
        return self.dp_replicate_size * self.dp_shard_size


@dataclasses.dataclass
class DeepSpeedSequenceParallelConfig:
    """What DeepSpeed's sequence parallelism asks for; accelfn's own, with ``sp_size``, needs none of it."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


class BnbQuantizationConfig(MutableRecord):
    """Options of bitsandbytes; see :class:`accelfn.BnbQuantizationConfig`."""

    record: ClassVar[Any] = FrozenBnbQuantizationConfig
