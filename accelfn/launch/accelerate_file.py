"""Import config files of Accelerate, of versions 0.10 to 1.15."""

from __future__ import annotations

import dataclasses
import json
from typing import NoReturn, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.accelerate_names import (
    DISTRIBUTED_TYPES,
    DROPPED,
    FILE_SECTIONS,
    OTHER_LAUNCHERS,
    RENAMED,
)
from accelfn.launch.config_file import (
    NULLS,
    ConfigFile,
    is_of_accelerate,
    join_items,
    parse_config,
    read_document,
    read_text,
    read_tree,
)
from accelfn.launch.kinds import suggest
from accelfn.launch.options import OPTIONS, Option, read_entry

# Values of a key without effect here with which it asks for nothing.
_UNSET = (*NULLS, "false", "False", "no", "0", "none", "standard")


def read_any_config(path: str) -> ConfigFile:
    """Read a config file of accelfn or of Accelerate.

    Raises:
        ConfigurationError: It can't be read, or its content is invalid.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    text = read_text(path)
    if not is_of_accelerate(read_tree(text, path)):
        return parse_config(text, path)
    file = import_accelerate(text, path)
    note = f"{path} is a config file of Accelerate, and was imported."
    return dataclasses.replace(file, notes=(note, *file.notes))


def import_accelerate(text: str, path: str) -> ConfigFile:
    """Convert a config file of Accelerate. Pure.

    Args:
        text: Its content.
        path: The path, for messages.

    Returns:
        Its values that aren't defaults, which may need others, or contradict; a note for each dropped key.

    Raises:
        ConfigurationError: It isn't YAML or JSON, a key is unknown, or a value is invalid.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    document = read_document(text, path)
    is_job = document.tree.get("compute_environment") == "AMAZON_SAGEMAKER"
    values: dict[str, object] = {}
    lines: dict[str, str] = {}
    notes: list[str] = []
    others: dict[str, str] = {}  # keys of launchers that start the other machines, and where they stand
    for keys, value in document.entries(FILE_SECTIONS):
        prefix = FILE_SECTIONS.get(keys[0], "") if keys[1:] else ""
        key = prefix + keys[-1].removeprefix(prefix)
        if key in OTHER_LAUNCHERS or key in DROPPED:
            if value not in _UNSET:
                others |= {key: document.where(keys)} if key in OTHER_LAUNCHERS else {}
                notes.append(f"{key}: dropped; {OTHER_LAUNCHERS.get(key) or DROPPED[key]}.")
        elif key == "distributed_type" and not is_job:
            values |= _read_type(str(value).upper(), document.where(keys), notes)
        elif not keys[-1].startswith("_"):  # such as _comment
            name, read = _read_entry(keys, key, value, document.where(keys))
            if read is not None and read != OPTIONS[name].default:
                values[name] = read
            lines[name] = document.lines.get(keys, "")
    _settle(values, notes)
    for key, where in others.items() if values.get("num_machines", 1) != 1 else ():
        raise ConfigurationError(
            f"{where}: {key}: accelfn launch starts the processes of one machine. Remove the key, and "
            f"{OTHER_LAUNCHERS[key]}"
        )
    return ConfigFile(path=path, values=values, lines=lines, notes=tuple(notes))


def _read_type(kind: str, where: str, notes: list[str]) -> dict[str, object]:
    """Return the option that a ``distributed_type`` sets."""
    if kind not in DISTRIBUTED_TYPES:
        close = suggest(kind, DISTRIBUTED_TYPES)
        hint = f"Did you mean {close}?" if close else "Correct it, or write a new file with accelfn config."
        raise ConfigurationError(f"{where}: unknown distributed_type {kind!r}. {hint}")
    name = DISTRIBUTED_TYPES[kind]
    if name == "multi_gpu" and kind != "MULTI_GPU":
        notes.append(
            f"distributed_type {kind}: imported as multi_gpu; torch detects the accelerators itself."
        )
    return {name: True} if name else {}


def _read_entry(keys: tuple[str, ...], key: str, value: object, where: str) -> tuple[str, object]:
    """Return the option that an entry sets, and its value; None if it sets none."""
    if key == "fp16":  # until version 0.15
        key, value = "mixed_precision", "fp16" if str(value).lower() in ("true", "yes") else ""
    if key == "distributed_type":  # of a job on SageMaker
        key = "sagemaker_distributed_type"
    name = RENAMED.get(key, key)
    if name not in OPTIONS:
        _refuse_key(keys, key, where)
    option = OPTIONS[name]
    try:
        text = _text_of(option, value)
        choices = tuple(one.lower() for one in option.kind.choices)
        if text.lower() == "false" and "no" in choices:
            text = "no"  # as which YAML reads it
        is_unset = text in NULLS or (text.lower() == "none" and "none" not in choices)
        # DeepSpeed's default, and no compilation.
        is_auto = text == "auto" and name in ("gradient_accumulation_steps", "gradient_clipping")
        if is_unset or is_auto or (name, text.lower()) == ("dynamo_backend", "no"):
            return name, None
        if (name, text) == ("num_processes", "-1"):
            return name, -1
        return read_entry(option, text)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {key}: {error}") from None


def _refuse_key(keys: tuple[str, ...], key: str, where: str) -> NoReturn:
    close = suggest(key, (*OPTIONS, *RENAMED))
    hint = "Remove it and try again."
    if close is not None:
        prefix = FILE_SECTIONS.get(keys[0], "")
        is_bare = not keys[-1].startswith(prefix)
        hint = f"Did you mean {close.removeprefix(prefix) if is_bare else close}?"
    elif keys[0] == "deepspeed_config":
        hint = (
            "If it is one of DeepSpeed's own, it belongs into DeepSpeed's JSON file, which deepspeed_config "
            "names as deepspeed_config_file."
        )
    raise ConfigurationError(f"{where}: unknown key {'.'.join(keys)!r}. {hint}")


def _text_of(option: Option, value: object) -> str:
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return option.kind.separator.join(
            f"{name}={json.dumps(item) if isinstance(item, (dict, list)) else item}" for name, item in items
        )
    return join_items(option, value)


def _settle(values: dict[str, object], notes: list[str]) -> None:
    """Drop values that Accelerate writes without effect, and set what others imply."""
    if values.get("num_machines", 1) == 1:
        values.pop("rdzv_backend", None)
        if values.get("machine_rank") == 0:
            del values["machine_rank"]
    if values.get("multi_gpu"):
        values.pop("cpu", None)
    if values.get("main_process_port") == 0:
        del values["main_process_port"]
    if values.get("num_processes") == -1:
        del values["num_processes"]
        notes.append("num_processes -1: dropped; one process per accelerator is started.")
    if values.get("zero3_init_flag") is True and values.get("zero_stage", 3) != 3:
        del values["zero3_init_flag"]
        notes.append("zero3_init_flag: dropped; it needs zero_stage 3.")
    if any(name.startswith("parallelism_config_") for name in values):
        values["use_parallelism_config"] = True
