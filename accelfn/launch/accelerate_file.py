"""Translate config files of Accelerate, of versions 0.10 to 1.15, into our options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.accelerate_names import (
    DISTRIBUTED_TYPES,
    DROPPED,
    FILE_SECTIONS,
    OTHER_LAUNCHERS,
    RENAMED,
)
from accelfn.launch.documents import NULLS, Document
from accelfn.launch.kinds import BOOL, suggest
from accelfn.launch.options import OPTIONS, Option

# Values that leave an option unset: DeepSpeed's defaults, no compilation, a free port, any number.
_UNSET_OPTIONS = (
    *(("gradient_accumulation_steps", "auto"), ("gradient_clipping", "auto")),
    *(("dynamo_backend", "no"), ("main_process_port", "0"), ("num_processes", "-1")),
)


def is_of_accelerate(tree: Mapping[str, Any]) -> bool:
    """Return whether this is a config file of Accelerate. Pure."""
    return "config_version" not in tree and not tree.keys().isdisjoint(("distributed_type", *FILE_SECTIONS))


def translate(document: Document, notes: list[str]) -> Iterator[tuple[tuple[str, ...], Option, object]]:
    """Yield the keys, our option and its value of each entry that has an effect.

    Args:
        document: The file.
        notes: A note for each dropped key is added to it.

    Raises:
        ConfigurationError: A key or the type is unknown, or a launcher would start other machines.
    """
    is_job = document.tree.get("compute_environment") == "AMAZON_SAGEMAKER"
    for keys, value in document.entries(FILE_SECTIONS):
        prefix = FILE_SECTIONS.get(keys[0], "") if keys[1:] else ""
        key = prefix + keys[-1].removeprefix(prefix)
        if key in OTHER_LAUNCHERS or key in DROPPED:
            if not _is_off(value):
                notes.append(_drop(document, keys, key))
        elif key == "distributed_type" and not is_job:
            name = _read_type(str(value).upper(), document.where(keys), notes)
            if name:
                yield keys, OPTIONS[name], "true"
        elif not keys[-1].startswith("_"):  # such as _comment
            if key == "fp16":  # until version 0.15
                key, value = "mixed_precision", "" if _is_off(value) else "fp16"
            name = "sagemaker_distributed_type" if key == "distributed_type" else RENAMED.get(key, key)
            if name not in OPTIONS:
                _refuse_key(keys, key, document.where(keys))
            yield keys, OPTIONS[name], _translate_value(OPTIONS[name], value, notes)


def _is_off(value: object) -> bool:
    """Return whether a key asks for nothing with this value."""
    text = str(value)
    return text in (*NULLS, "none", "standard") or (BOOL.can_read(text) and not BOOL.read(text))


def _drop(document: Document, keys: tuple[str, ...], key: str) -> str:
    """Return a note on a key without effect; refuse one that would start other machines."""
    if key in OTHER_LAUNCHERS and document.tree.get("num_machines", "1") != "1":
        raise ConfigurationError(
            f"{document.where(keys)}: {key}: accelfn launch starts the processes of one machine. Remove the "
            f"key, and {OTHER_LAUNCHERS[key]}"
        )
    return f"{key}: dropped; {OTHER_LAUNCHERS.get(key) or DROPPED[key]}."


def _read_type(kind: str, where: str, notes: list[str]) -> str:
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
    return name


def _translate_value(option: Option, value: object, notes: list[str]) -> object:
    """Return the value of an option in our words; empty if it is unset."""
    if isinstance(value, dict):  # such as additional_args
        items = cast("dict[str, object]", value).items()
        return [
            f"{name}={json.dumps(item) if isinstance(item, (dict, list)) else item}" for name, item in items
        ]
    text, choices = str(value).lower(), [choice.lower() for choice in option.kind.choices]
    if text == "false" and "no" in choices:
        text = value = "no"  # as which YAML reads it
    if (option.name, text) == ("num_processes", "-1"):
        notes.append("num_processes -1: dropped; one process per accelerator is started.")
    is_unset = (option.name, text) in _UNSET_OPTIONS or (text == "none" and "none" not in choices)
    return "" if is_unset else value


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


def settle(values: dict[str, Any], notes: list[str]) -> None:
    """Drop values that Accelerate writes without effect, and set what others imply."""
    is_alone = values.get("num_machines", 1) == 1
    for name, value in list(values.items()):
        is_idle = name == "rdzv_backend" or (name, value) == ("machine_rank", 0)
        if value is None or value == OPTIONS[name].default or (is_alone and is_idle):
            del values[name]
    if values.get("zero3_init_flag") is True and values.get("zero_stage", 3) != 3:
        del values["zero3_init_flag"]
        notes.append("zero3_init_flag: dropped; it needs zero_stage 3.")
    if any(name.startswith("parallelism_config_") for name in values):
        values["use_parallelism_config"] = True
