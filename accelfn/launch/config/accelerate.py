"""From a configuration file of Accelerate, in any layout from 0.11 to 1.15, to one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from accelfn.errors import ConfigurationError
from accelfn.launch.config.fields import FIELD_OF, RENAMED, Field, build_config, read_value, suggest
from accelfn.launch.config.files import Entry
from accelfn.launch.config.record import LaunchConfig


class Imported(NamedTuple):
    """What a file of Accelerate says, in our words."""

    config: LaunchConfig
    notes: tuple[str, ...]  # a sentence on each key that was left out


# Sections of Accelerate, and the prefix of their keys in the table of fields.
_SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "fsdp_config": "fsdp_",
        "deepspeed_config": "",
        "megatron_lm_config": "megatron_lm_",
        "parallelism_config": "parallelism_config_",
        "dynamo_config": "dynamo_",
        "fp8_config": "fp8_",
        "mpirun_config": "mpirun_",
        "ipex_config": "",
    }
)
# Keys that say nothing more; why.
_DROPPED: Mapping[str, str] = MappingProxyType(
    {
        "additional_args": "arguments of the estimator can't be given yet",
        "mpirun_ccl": "it is Intel's library's own business; set CCL_WORKER_COUNT",
        "fsdp_limit_all_gathers": "it is always on",
        "fp8_use_mxfp8_block_scaling": "set ACCELFN_FP8_USE_MXFP8_BLOCK_SCALING",
        "ipex": "accelfn doesn't use Intel's extension; a script may import it itself",
        "use_xpu": "torch finds an XPU itself",
    }
)
# Those of them that ask for something only where they are true.
_SWITCHES = ("ipex", "use_xpu", "fsdp_limit_all_gathers", "fp8_use_mxfp8_block_scaling")
# By number, as layouts before 0.23 wrote them.
_NUMBERED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fsdp_sharding_strategy": (
            *("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
        ),
        "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    }
)
_ENGINES: Mapping[str, str] = MappingProxyType(
    {"FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm"}
)


def import_accelerate(tree: Mapping[str, Entry], path: str) -> Imported:
    """Turn a configuration of Accelerate into one of ours. Pure.

    Args:
        tree: From ``read_tree``.
        path: The file's name, for messages.

    Returns:
        The configuration, and a sentence on each key that was left out.

    Raises:
        ConfigurationError: A key is not known, a value isn't understood, or the values contradict each other.
    """
    values: dict[str, object] = {}
    notes: list[str] = []
    flat = dict(_flatten(tree))
    sagemaker = _text(flat.get("compute_environment")) == "AMAZON_SAGEMAKER"
    kind = (_text(flat.pop("distributed_type", None)) or "NO").upper()
    if kind in ("FALSE", "0"):
        kind = "NO"  # what YAML makes of an unquoted NO
    if sagemaker:
        values["sagemaker_distributed_type"] = kind
    else:
        _take_kind(kind, values, notes, path)
    if _is_true(flat.pop("fp16", None)):
        flat.setdefault("mixed_precision", Entry("fp16", ""))
    legacy = flat.pop("dynamo_backend", None) if "dynamo_config" not in tree else None
    if legacy is not None:
        flat["dynamo_backend"] = legacy
    if _text(flat.get("mixed_precision")).lower() in ("false", ""):
        flat.pop("mixed_precision", None)
    for key, entry in flat.items():
        _take(key, entry, values, notes, path)
    if values.get("num_machines", 1) == 1:
        # Accelerate writes these for one machine as well, where they mean nothing.
        values.pop("rdzv_backend", None)
        if values.get("machine_rank") == 0:
            del values["machine_rank"]
    if any(name.startswith("parallelism_config_") for name in values):
        values["use_parallelism_config"] = True
    if values.get("main_process_port") == 0:
        del values["main_process_port"]
    defaults = [name for name, value in values.items() if value is None or value == FIELD_OF[name].default]
    for name in defaults:
        del values[name]
    try:
        return Imported(build_config(values), tuple(notes))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path} says what can't be launched: {error}") from None


def _flatten(tree: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """List keys and values, those of sections under their flags' names."""
    found: list[tuple[str, Entry]] = []
    for key, entry in tree.items():
        prefix = _SECTIONS.get(key)
        if prefix is None or not isinstance(entry.value, Mapping):
            if prefix is None or entry.value:
                found.append((key, entry))
            continue
        for inner, one in entry.value.items():
            name = inner if inner.startswith(prefix) else prefix + inner
            found.append((name, one))
    return found


def _take_kind(kind: str, values: dict[str, object], notes: list[str], path: str) -> None:
    if kind in _ENGINES:
        values[_ENGINES[kind]] = True
    elif kind in ("TPU", "XLA"):
        values["tpu"] = True
    elif kind == "MULTI_CPU":
        values["cpu"] = True
    elif kind.startswith("MULTI_"):
        values["multi_gpu"] = True
        if kind != "MULTI_GPU":
            notes.append(f"distributed_type {kind}: taken as multi_gpu; torch finds the accelerators itself.")
    elif kind not in ("NO", ""):
        close = suggest(kind, (*_ENGINES, "MULTI_GPU", "MULTI_CPU", "XLA", "NO"))
        hint = f"Did you mean {close}?" if close else "Correct it, or write a new file with accelfn config."
        raise ConfigurationError(f"{path}: distributed_type {kind!r} is not known. {hint}")


def _take(key: str, entry: Entry, values: dict[str, object], notes: list[str], path: str) -> None:
    name = RENAMED.get(key, key)
    reason = _DROPPED.get(key)
    if reason is not None:
        if key in _SWITCHES and not _is_true(entry):
            return  # it asks for nothing
        notes.append(f"{key}: left out; {reason}.")
        return
    field = FIELD_OF.get(name)
    if field is None:
        where = f", {entry.where}" if entry.where else ""
        raise ConfigurationError(
            f"{path}{where}: accelfn doesn't know the key {key!r}. Remove it and try again."
        )
    text = _entry_text(entry, field)
    if text == "" or (text.lower() == "none" and "none" not in field.kind.choices):
        return
    if text == "auto" and name in ("gradient_accumulation_steps", "gradient_clipping"):
        return  # what DeepSpeed does anyway
    if name in _NUMBERED and text.isdecimal() and 0 < int(text) <= len(_NUMBERED[name]):
        text = _NUMBERED[name][int(text) - 1]
    if name == "dynamo_backend" and text.lower() in ("false", "no"):
        return  # what YAML makes of an unquoted NO
    if name == "num_processes" and text == "-1":
        notes.append("num_processes -1: left out; as many as there are accelerators are started.")
        return
    if name == "cpu" and (values.get("cpu") or values.get("multi_gpu")):
        return  # distributed_type has said it
    try:
        values[name] = read_value(field, text)
    except ValueError as error:
        where = f", {entry.where}" if entry.where else ""
        raise ConfigurationError(f"{path}{where}: {key}: {error}") from None


def _entry_text(entry: Entry, field: Field) -> str:
    if isinstance(entry.value, str):
        return entry.value
    if isinstance(entry.value, tuple):
        return ("\n" if field.kind.repeats else ",").join(_text(one) for one in entry.value)
    return ",".join(f"{key}={_text(one)}" for key, one in entry.value.items())


def _text(entry: Any) -> str:
    return entry.value if isinstance(entry, Entry) and isinstance(entry.value, str) else ""


def _is_true(entry: Entry | None) -> bool:
    return _text(entry).lower() in ("true", "yes", "on", "1")
