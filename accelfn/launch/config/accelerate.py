"""Import config files of Accelerate, of versions 0.11 to 1.15."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.config.files import NULLS, join_items
from accelfn.launch.config.options import OPTIONS, RENAMED, Option, read_value, suggest
from accelfn.launch.config.record import LaunchConfig


class Imported(NamedTuple):
    """An imported config file of Accelerate."""

    config: LaunchConfig
    notes: tuple[str, ...]  # one sentence per dropped key


# Sections of Accelerate, and the prefix of their keys in our table.
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
# Keys of launchers that start the other machines too, and how to start them instead.
_REACHING: Mapping[str, str] = MappingProxyType(
    {
        "mpirun_hostfile": "run: mpirun --hostfile FILE python train.py",
        **dict.fromkeys(
            (
                "deepspeed_hostfile",
                "deepspeed_multinode_launcher",
                "deepspeed_exclusion_filter",
                "deepspeed_inclusion_filter",
            ),
            "start accelfn launch on every machine, or run: deepspeed --hostfile FILE train.py",
        ),
    }
)
# Dropped keys, and the reason.
_DROPPED: Mapping[str, str] = MappingProxyType(
    {
        **_REACHING,
        "mpirun_ccl": "set CCL_WORKER_COUNT instead",
        "fsdp_limit_all_gathers": "always on",
        "fp8_use_mxfp8_block_scaling": "set ACCELFN_FP8_USE_MXFP8_BLOCK_SCALING instead",
        "ipex": "accelfn doesn't use Intel's extension; import it in the script",
        "use_xpu": "torch detects an XPU itself",
    }
)
# Dropped keys that matter only if true.
_SWITCHES = ("ipex", "use_xpu", "fsdp_limit_all_gathers", "fp8_use_mxfp8_block_scaling")
# Written as numbers before Accelerate 0.23.
_NUMBERED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: OPTIONS[name].kind.choices
        for name in ("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_state_dict_type")
    }
)
_ENGINES: Mapping[str, str] = MappingProxyType(
    {"FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm"}
)


def import_accelerate(tree: Mapping[str, Any], path: str) -> Imported:
    """Convert a config file of Accelerate. Pure.

    Args:
        tree: From ``read_tree``, with scalars as texts.
        path: The path, for messages.

    Raises:
        ConfigurationError: A key is unknown, a value is invalid, or values conflict.
    """
    values: dict[str, object] = {}
    notes: list[str] = []
    flat = _flatten(tree)
    kind = str(flat.pop("distributed_type", None) or "NO").upper()
    if flat.get("compute_environment") == "AMAZON_SAGEMAKER":
        if kind not in ("FALSE", "0"):
            flat["sagemaker_distributed_type"] = kind
    else:
        _read_type(kind, values, notes, path)
    if _is_true(flat.pop("fp16", None)):
        flat.setdefault("mixed_precision", "fp16")
    if str(flat.get("mixed_precision", "")).lower() in ("false", ""):
        flat.pop("mixed_precision", None)
    for key, value in flat.items():
        _read_entry(key, value, values, notes, path)
    reaching = [key for key in _REACHING if key in flat and _is_set(key, flat[key])]
    if reaching and values.get("num_machines", 1) != 1:
        raise ConfigurationError(
            f"{path}: {reaching[0]}: accelfn launch starts the processes of one machine. Remove the key, and "
            f"{_REACHING[reaching[0]]}"
        )
    if values.get("num_machines", 1) == 1:
        # Accelerate writes these for one machine too, without effect.
        values.pop("rdzv_backend", None)
        if values.get("machine_rank") == 0:
            del values["machine_rank"]
    if values.get("zero3_init_flag") is True and values.get("zero_stage", 3) != 3:
        del values["zero3_init_flag"]
        notes.append("zero3_init_flag: dropped; it needs zero_stage 3.")
    if any(name.startswith("parallelism_config_") for name in values):
        values["use_parallelism_config"] = True
    if values.get("main_process_port") == 0:
        del values["main_process_port"]
    try:
        return Imported(LaunchConfig(**values), tuple(notes))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path} has conflicting values: {error}") from None


def _flatten(tree: Mapping[str, Any]) -> dict[str, object]:
    """Return the entries of all sections, by flag name."""
    entries: dict[str, object] = {}
    for key, value in tree.items():
        prefix = _SECTIONS.get(key)
        if prefix is None:
            entries[key] = value
        elif isinstance(value, dict):
            section = cast("dict[str, object]", value)
            entries |= {prefix + name.removeprefix(prefix): entry for name, entry in section.items()}
    return entries


def _read_type(kind: str, values: dict[str, object], notes: list[str], path: str) -> None:
    if kind in _ENGINES:
        values[_ENGINES[kind]] = True
    elif kind in ("TPU", "XLA"):
        values["tpu"] = True
    elif kind == "MULTI_CPU":
        values["cpu"] = True
    elif kind.startswith("MULTI_"):
        values["multi_gpu"] = True
        if kind != "MULTI_GPU":
            notes.append(
                f"distributed_type {kind}: imported as multi_gpu; torch detects the accelerators itself."
            )
    elif kind not in ("NO", "FALSE", "0"):  # YAML reads an unquoted NO as false
        close = suggest(kind, (*_ENGINES, "MULTI_GPU", "MULTI_CPU", "XLA", "NO"))
        hint = f"Did you mean {close}?" if close else "Correct it, or write a new file with accelfn config."
        raise ConfigurationError(f"{path}: unknown distributed_type {kind!r}. {hint}")


def _read_entry(key: str, value: object, values: dict[str, object], notes: list[str], path: str) -> None:
    name = RENAMED.get(key, key)
    if key in _DROPPED:
        if _is_set(key, value):
            notes.append(f"{key}: dropped; {_DROPPED[key]}.")
        return
    if name not in OPTIONS:
        raise ConfigurationError(f"{path}: unknown key {key!r}. Remove it and try again.")
    option = OPTIONS[name]
    try:
        text = _text_of(option, value)
        if text.lower() in ("", "null", "~") or (
            text.lower() == "none" and "none" not in option.kind.choices
        ):
            return
        if text == "auto" and name in ("gradient_accumulation_steps", "gradient_clipping"):
            return  # DeepSpeed's default
        if name in _NUMBERED and text.isdecimal() and 0 < int(text) <= len(_NUMBERED[name]):
            text = _NUMBERED[name][int(text) - 1]
        if name == "dynamo_backend" and text.lower() in ("false", "no"):
            return  # YAML reads an unquoted NO as false
        if name == "num_processes" and text == "-1":
            notes.append("num_processes -1: dropped; one process per accelerator is started.")
            return
        if name == "cpu" and (values.get("cpu") or values.get("multi_gpu")):
            return  # distributed_type takes precedence
        parsed = read_value(option, text)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {key}: {error}") from None
    if parsed != option.default:
        values[name] = parsed


def _is_set(key: str, value: object) -> bool:
    """Return whether the value of a dropped key asks for something."""
    is_default = key == "deepspeed_multinode_launcher" and value == "standard"
    return not is_default and value not in NULLS and (key not in _SWITCHES or _is_true(value))


def _text_of(option: Option, value: object) -> str:
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return option.kind.separator.join(
            f"{name}={json.dumps(item) if isinstance(item, (dict, list)) else item}" for name, item in items
        )
    return join_items(option, value)


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "yes", "on", "1")
