"""Accelerate's configuration records: changed at any time, and frozen when they are used."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

import accelfn.config as config
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
    """

    __module__ = "accelerate.utils.dataclasses"
    record: ClassVar[Any]  # accelfn's record
    ignored: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, record: Any = None, order: str = "", ignored: tuple[str, ...] = ()) -> None:
        """Add to a class the fields of accelfn's record.

        Args:
            record: Accelfn's record; None for a class of a program, which inherits from one of these.
            order: The first fields, if positional arguments have another order than the record's fields.
            ignored: Fields without effect here.
        """
        super().__init_subclass__()
        if record is None:
            return
        cls.record, cls.ignored = record, ignored
        defaults: dict[str, Any] = {item.name: _default_of(item) for item in fields(record)}
        names = dict.fromkeys((*order.split(), *defaults, *ignored))
        given = [(name, Any, field(default_factory=partial(copy.copy, defaults.get(name)))) for name in names]
        # Not by the decorator, which would look for the module: it is there only with the alias.
        made: Any = dataclasses.make_dataclass(cls.__name__, given, bases=(MutableRecord,))
        for name in (
            "__init__",
            "__repr__",
            "__eq__",
            "__hash__",
            "__dataclass_fields__",
            "__dataclass_params__",
        ):
            setattr(cls, name, vars(made)[name])

    if TYPE_CHECKING:  # the fields

        def __init__(self, *args: Any, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        """Set the fields that are None to their defaults."""
        for item in fields(self):
            if getattr(self, item.name) is None and item.name not in self.ignored:
                setattr(self, item.name, cast("Any", item.default_factory)())

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

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name) and name not in self.__dataclass_fields__:
            known = ", ".join(sorted(self.__dataclass_fields__))  # another one would have no effect
            raise AttributeError(f"{type(self).__name__} has no field {name!r}. Its fields are {known}.")
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


class AutocastKwargs(MutableRecord, record=config.AutocastKwargs):
    """Options of ``torch.autocast``; see :class:`accelfn.config.AutocastKwargs`."""


class DistributedDataParallelKwargs(MutableRecord, record=config.DistributedDataParallelKwargs):
    """Options of torch's wrapper; see :class:`accelfn.config.DistributedDataParallelKwargs`."""


class GradScalerKwargs(MutableRecord, record=config.GradScalerKwargs):
    """Options of the loss scaler; see :class:`accelfn.config.GradScalerKwargs`."""


class InitProcessGroupKwargs(MutableRecord, record=config.InitProcessGroupKwargs):
    """Options of the process group; see :class:`accelfn.config.InitProcessGroupKwargs`."""


class ProfileKwargs(MutableRecord, record=config.ProfileKwargs):
    """Options of torch's profiler; see :class:`accelfn.config.ProfileKwargs`."""


class FP8RecipeKwargs(
    MutableRecord,
    record=config.FP8RecipeKwargs,
    order="""
        opt_level use_autocast_during_eval margin interval fp8_format amax_history_len amax_compute_algo
        override_linear_precision use_mxfp8_block_scaling backend
    """,
):
    """Options of 8-bit training; see :class:`accelfn.config.FP8RecipeKwargs`."""


class AORecipeKwargs(MutableRecord, record=config.AORecipeKwargs):
    """Options of torchao's 8-bit training; see :class:`accelfn.config.AORecipeKwargs`."""


class TERecipeKwargs(MutableRecord, record=config.TERecipeKwargs):
    """Options of TransformerEngine; see :class:`accelfn.config.TERecipeKwargs`."""


class MSAMPRecipeKwargs(MutableRecord, record=config.MSAMPRecipeKwargs):
    """Options of MS-AMP; see :class:`accelfn.config.MSAMPRecipeKwargs`."""


class TorchDynamoPlugin(MutableRecord, record=config.TorchDynamoPlugin):
    """Options of torch.compile; see :class:`accelfn.config.TorchDynamoPlugin`."""


class GradientAccumulationPlugin(MutableRecord, record=config.GradientAccumulationPlugin):
    """Options of accumulation; see :class:`accelfn.GradientAccumulationPlugin`."""


class DataLoaderConfiguration(MutableRecord, record=config.DataLoaderConfiguration):
    """How loaders are sharded; see :class:`accelfn.DataLoaderConfiguration`."""


class ProjectConfiguration(MutableRecord, record=config.ProjectConfiguration):
    """Directories of the outputs; see :class:`accelfn.config.ProjectConfiguration`."""

    def __post_init__(self) -> None:
        """Set the fields that are None to their defaults, or to what follows from others."""
        super().__post_init__()
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Any = None) -> None:
        """Set the project's directory, and that of logs if there is none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


class FullyShardedDataParallelPlugin(
    MutableRecord,
    record=config.FullyShardedDataParallelPlugin,
    order="""
        fsdp_version sharding_strategy reshard_after_forward backward_prefetch mixed_precision_policy
        auto_wrap_policy cpu_offload ignored_modules state_dict_type state_dict_config
        optim_state_dict_config limit_all_gathers use_orig_params param_init_fn sync_module_states
        forward_prefetch activation_checkpointing activation_checkpointing_offload
        cpu_ram_efficient_loading transformer_cls_names_to_wrap min_num_params
    """,
):
    """Options of FSDP; see :class:`accelfn.FullyShardedDataParallelPlugin`."""

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


class DeepSpeedPlugin(MutableRecord, record=config.DeepSpeedPlugin):
    """Options of DeepSpeed; see :class:`accelfn.config.DeepSpeedPlugin`.

    Without a configuration it reads the launcher's variables. The configuration may be changed until
    ``prepare``: transformers' ``Trainer`` fills its "auto" late.

    Attributes:
        hf_ds_config: Always an object with the configuration as ``config``.
        deepspeed_config: This configuration.
    """

    def __post_init__(self) -> None:
        """Set the fields that are None to their defaults, or to what follows from others."""
        super().__post_init__()
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


class MegatronLMPlugin(MutableRecord, record=config.MegatronLMPlugin):
    """Options of Megatron-LM, by name; see :class:`accelfn.config.MegatronLMPlugin`."""


class TorchTensorParallelConfig(MutableRecord, record=config.TorchTensorParallelConfig):
    """Options of tensor parallelism."""


class TorchContextParallelConfig(MutableRecord, record=config.TorchContextParallelConfig):
    """Options of context parallelism."""


def _is_shared(size: str) -> Any:
    """Return a property: whether an axis of the mesh has more than one rank."""
    return property(lambda sizes: getattr(sizes, size) > 1)


class ParallelismConfig(
    MutableRecord,
    record=config.ParallelismConfig,
    ignored=("sp_handler",),
    order="""
        dp_replicate_size dp_shard_size tp_size cp_size cp_backend sp_size sp_backend tp_handler cp_handler
        sp_handler
    """,
):
    """Sizes of the mesh; see :class:`accelfn.ParallelismConfig`."""

    __module__ = "accelerate.parallelism_config"

    tp_enabled: ClassVar[Any] = _is_shared("tp_size")
    cp_enabled: ClassVar[Any] = _is_shared("cp_size")
    sp_enabled: ClassVar[Any] = _is_shared("sp_size")
    dp_replicate_enabled: ClassVar[Any] = _is_shared("dp_replicate_size")
    dp_shard_enabled: ClassVar[Any] = _is_shared("dp_shard_size")

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


class BnbQuantizationConfig(MutableRecord, record=FrozenBnbQuantizationConfig):
    """Options of bitsandbytes; see :class:`accelfn.bigmodel.BnbQuantizationConfig`."""
