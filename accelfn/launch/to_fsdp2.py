"""``accelfn to-fsdp2``: convert a config file from FSDP to FSDP2."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.accelerate_names import FSDP_STRATEGIES, ONLY_FSDP_1, RENAMED
from accelfn.launch.command_line import CommandParser
from accelfn.launch.config_file import read_text
from accelfn.launch.documents import format_tree, read_tree
from accelfn.launch.options import OPTIONS, read_value
from accelfn.launch.output import write_text

# The FSDP section and the prefix of its keys: Accelerate's and ours.
_SECTIONS = (("fsdp_config", "fsdp_"), ("fsdp", ""))


class Rewritten(NamedTuple):
    """A config file converted to FSDP2.

    Attributes:
        tree: The content of the file.
        notes: One sentence per change; empty if nothing changed.
    """

    tree: dict[str, Any]
    notes: tuple[str, ...]


def rewrite_for_fsdp2(tree: Mapping[str, Any]) -> Rewritten:
    """Convert the FSDP section of a config file of accelfn or Accelerate. Pure.

    Args:
        tree: The content of the file.

    Raises:
        ConfigurationError: The section isn't a mapping.
        ValueError: Its sharding strategy is unknown.

    >>> rewrite_for_fsdp2({"fsdp": {"version": 1, "sharding_strategy": "FULL_SHARD"}}).tree
    {'fsdp': {'version': 2, 'reshard_after_forward': True}}
    """
    section, prefix = next((pair for pair in _SECTIONS if tree.get(pair[0]) is not None), ("", ""))
    if not section:
        return Rewritten(dict(tree), ())
    entries = tree[section]
    if not isinstance(entries, Mapping):
        raise ConfigurationError(f"{section} must be a section, got {entries!r}. Correct the file.")
    fields = {
        str(key).removeprefix(prefix): entry for key, entry in cast("Mapping[Any, Any]", entries).items()
    }
    if str(fields.get("version", 1)) == "2":
        return Rewritten(dict(tree), ())
    fields.pop("version", None)
    converted: dict[str, Any] = {"version": 2}
    notes: list[str] = []
    for spelled, value in fields.items():
        name = RENAMED.get(f"fsdp_{spelled}", f"fsdp_{spelled}").removeprefix("fsdp_")
        if name != spelled and name in fields:
            notes.append(f"{prefix}{spelled} is dropped: {prefix}{name} replaces it.")
        elif name in ONLY_FSDP_1:
            notes.append(f"{prefix}{spelled} is dropped: {ONLY_FSDP_1[name]}.")
        elif name == "sharding_strategy" or str(value).upper() in FSDP_STRATEGIES:
            strategy = str(read_value(OPTIONS["fsdp_sharding_strategy"], str(value)))
            converted["reshard_after_forward"] = FSDP_STRATEGIES[strategy]
            text = str(FSDP_STRATEGIES[strategy]).lower()
            notes.append(f"{prefix}{name}: {value} becomes {prefix}reshard_after_forward: {text}.")
            if strategy == "NO_SHARD":
                notes.append("FSDP2 always shards. For replicas, use plain data parallelism.")
        elif name != "reshard_after_forward" or "sharding_strategy" not in fields:
            converted[name] = value
            if name != spelled:
                notes.append(f"{prefix}{spelled} is renamed to {prefix}{name}.")
            if name == "state_dict_type" and value == "LOCAL_STATE_DICT":
                notes.append("FSDP2 has no LOCAL_STATE_DICT. Use SHARDED_STATE_DICT or FULL_STATE_DICT.")
    notes.append(f"{prefix}version is set to 2.")
    section_2 = {f"{prefix}{name}": value for name, value in converted.items()}
    return Rewritten({**tree, section: section_2}, tuple(notes))


def run(options: argparse.Namespace) -> int:
    """Convert a config file. Effect: writes the new file, and prints the changes."""
    if options.output_file is None and not options.overwrite:
        raise ConfigurationError(
            "pass --output_file for the new file, or --overwrite to replace the old one."
        )
    target = Path(options.output_file or options.config_file)
    if options.output_file is not None and os.path.lexists(target) and not options.overwrite:
        raise ConfigurationError(f"{target} exists. Pass another --output_file, or --overwrite.")
    tree = read_tree(read_text(options.config_file), options.config_file, typed=True)
    if not tree:
        raise ConfigurationError(f"{options.config_file} is empty. Pass another file.")
    converted = rewrite_for_fsdp2(tree)
    if converted.notes or options.output_file is not None:
        write_text(target, format_tree(converted.tree, str(target)))
    for note in converted.notes:
        print(note)
    print(f"{target}: {'converted to FSDP2' if converted.notes else 'nothing to change'}")
    return 0


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn to-fsdp2",
        description="Convert the FSDP section of a config file to FSDP2.",
    )
    parser.add_argument("--config_file", metavar="FILE", required=True, help="config file to read")
    parser.add_argument("--output_file", metavar="FILE", help="config file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser
