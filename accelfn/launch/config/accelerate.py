"""Import config files of Accelerate, of versions 0.11 to 1.15."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.config.files import (
    NULLS,
    ConfigFile,
    find_line,
    is_of_accelerate,
    join_items,
    parse_config,
    read_text,
    read_tree,
)
from accelfn.launch.config.options import OPTIONS, RENAMED, Option, read_entry, suggest


class Imported(NamedTuple):
    """An imported config file of Accelerate."""

    values: dict[str, object]  # by option name, without defaults; they may need others, or contradict
    lines: dict[str, str]  # of each value
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
_ENGINES: Mapping[str, str] = MappingProxyType(
    {"FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm"}
)


def read_any_config(path: str) -> ConfigFile:
    """Read a config file of accelfn or of Accelerate.

    Raises:
        ConfigurationError: It can't be read, or its content is invalid.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    text = read_text(path)
    if not is_of_accelerate(read_tree(text, path)):
        return parse_config(text, path)
    values, lines, notes = import_accelerate(text, path)
    notes = (f"{path} is a config file of Accelerate, and was imported.", *notes)
    return ConfigFile(path=path, values=values, lines=lines, notes=notes)


def import_accelerate(text: str, path: str) -> Imported:
    """Convert a config file of Accelerate. Pure.

    Args:
        text: Its content.
        path: The path, for messages.

    Raises:
        ConfigurationError: It isn't YAML or JSON, a key is unknown, or a value is invalid.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    values: dict[str, object] = {}
    lines: dict[str, str] = {}
    notes: list[str] = []
    flat, keys = _flatten(read_tree(text, path))
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
        line = find_line(text, keys.get(key, (key,)))
        where = f"{path}, {line}" if line else path
        name = _read_entry(keys.get(key, (key,)), key, value, values, notes, where)
        lines[name or key] = line
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
    return Imported(values, {name: line for name, line in lines.items() if line}, tuple(notes))


def _flatten(tree: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, tuple[str, ...]]]:
    """Return the entries of all sections by flag name, and where each is in the file."""
    entries: dict[str, object] = {}
    keys: dict[str, tuple[str, ...]] = {}
    for key, value in tree.items():
        prefix = _SECTIONS.get(key)
        if prefix is None:
            entries[key], keys[key] = value, (key,)
        elif isinstance(value, dict):
            for inner, entry in cast("dict[str, object]", value).items():
                name = prefix + inner.removeprefix(prefix)
                entries[name], keys[name] = entry, (key, inner)
    return entries, keys


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


def _refuse_key(keys: tuple[str, ...], key: str, where: str) -> NoReturn:
    close = suggest(key, (*OPTIONS, *RENAMED))
    hint = "Remove it and try again."
    if close is not None:
        prefix = _SECTIONS.get(keys[0], "")
        is_bare = not keys[-1].startswith(prefix)
        hint = f"Did you mean {close.removeprefix(prefix) if is_bare else close}?"
    elif keys[0] == "deepspeed_config":
        hint = (
            "If it is one of DeepSpeed's own, it belongs into DeepSpeed's JSON file, which deepspeed_config "
            "names as deepspeed_config_file."
        )
    raise ConfigurationError(f"{where}: unknown key {'.'.join(keys)!r}. {hint}")


def _read_entry(
    keys: tuple[str, ...],
    key: str,
    value: object,
    values: dict[str, object],
    notes: list[str],
    where: str,
) -> str | None:
    """Write what an entry says into ``values``, and return the name of its option, if it sets one."""
    name = RENAMED.get(key, key)
    if key in _DROPPED:
        if _is_set(key, value):
            notes.append(f"{key}: dropped; {_DROPPED[key]}.")
        return None
    if keys[-1].startswith("_"):
        return None  # such as _comment
    if name not in OPTIONS:
        _refuse_key(keys, key, where)
    option = OPTIONS[name]
    try:
        text = _text_of(option, value)
        if text.lower() in ("", "null", "~") or (
            text.lower() == "none" and "none" not in option.kind.choices
        ):
            return None
        if text == "auto" and name in ("gradient_accumulation_steps", "gradient_clipping"):
            return None  # DeepSpeed's default
        if name == "dynamo_backend" and text.lower() in ("false", "no"):
            return None  # YAML reads an unquoted NO as false
        if name == "num_processes" and text == "-1":
            notes.append("num_processes -1: dropped; one process per accelerator is started.")
            return None
        if name == "cpu" and (values.get("cpu") or values.get("multi_gpu")):
            return None  # distributed_type takes precedence
        name, parsed = read_entry(option, text)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {key}: {error}") from None
    if parsed != OPTIONS[name].default:
        values[name] = parsed
    return name


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
