"""``accelfn to-fsdp2``: a configuration for FSDP, rewritten for FSDP2."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.config.files import format_tree, read_text, read_tree
from accelfn.launch.config.options import RENAMED
from accelfn.launch.output import write_text

# Section of a file, and what stands before its keys: Accelerate's, and ours.
_SECTIONS = (("fsdp_config", "fsdp_"), ("fsdp", ""))
_DROPPED = MappingProxyType(
    {
        "backward_prefetch": "FSDP2 has no such choice",
        "sync_module_states": "FSDP2 has no such choice",
        "use_orig_params": "FSDP2 always keeps the parameters",
        "forward_prefetch": "not implemented for FSDP2",
        "limit_all_gathers": "it is always on",
    }
)
_RESHARDS = MappingProxyType(
    {
        "FULL_SHARD": True,
        "SHARD_GRAD_OP": False,
        "NO_SHARD": False,
        "HYBRID_SHARD": True,
        "HYBRID_SHARD_ZERO2": False,
    }
)


class Rewritten(NamedTuple):
    """A configuration for FSDP2.

    Attributes:
        tree: The whole configuration.
        notes: What was changed, in whole sentences; empty where nothing was.
    """

    tree: dict[str, Any]
    notes: tuple[str, ...]


def rewrite_for_fsdp2(tree: Mapping[str, Any]) -> Rewritten:
    """Rewrite the FSDP section of a configuration, of accelfn's or of Accelerate's layout. Pure.

    Args:
        tree: Names and values of the file; left as it is.

    Raises:
        ConfigurationError: The section isn't one, or its sharding strategy is unknown.

    >>> rewrite_for_fsdp2({"fsdp": {"version": 1, "sharding_strategy": "FULL_SHARD"}}).tree
    {'fsdp': {'version': 2, 'reshard_after_forward': True}}
    """
    found = [(section, prefix) for section, prefix in _SECTIONS if tree.get(section) is not None]
    if not found:
        return Rewritten(dict(tree), ())
    section, prefix = found[0]
    given = tree[section]
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{section} must hold names and values, got {given!r}. Correct the file.")
    fields = {str(key).removeprefix(prefix): value for key, value in cast("Mapping[Any, Any]", given).items()}
    if str(fields.get("version", 1)) == "2":
        return Rewritten(dict(tree), ())
    fields.pop("version", None)
    made: dict[str, Any] = {"version": 2}
    notes: list[str] = []
    for spelled, value in fields.items():
        name = RENAMED.get(f"fsdp_{spelled}", f"fsdp_{spelled}").removeprefix("fsdp_")
        if name != spelled and name in fields:
            notes.append(f"{prefix}{spelled} is dropped: {prefix}{name} says it.")
        elif name in _DROPPED:
            notes.append(f"{prefix}{spelled} is dropped: {_DROPPED[name]}.")
        elif name == "sharding_strategy":
            made["reshard_after_forward"] = _reshards(value)
            answer = str(made["reshard_after_forward"]).lower()
            notes.append(f"{prefix}{name}: {value} is {prefix}reshard_after_forward: {answer}.")
            if _spelled(value) == "NO_SHARD":
                notes.append("FSDP2 always shards. To keep whole copies, use plain data parallelism.")
        elif name != "reshard_after_forward" or "sharding_strategy" not in fields:
            made[name] = value
            if name != spelled:
                notes.append(f"{prefix}{spelled} is called {prefix}{name} now.")
            if name == "state_dict_type" and value == "LOCAL_STATE_DICT":
                notes.append("FSDP2 has no LOCAL_STATE_DICT: choose SHARDED_STATE_DICT or FULL_STATE_DICT.")
    notes.append(f"{prefix}version is 2.")
    return Rewritten(
        {**tree, section: {f"{prefix}{name}": value for name, value in made.items()}}, tuple(notes)
    )


def _spelled(strategy: object) -> str:
    """Return a strategy's name; torch also numbers them, from 1."""
    text = str(strategy).upper()
    names = tuple(_RESHARDS)
    return names[int(text) - 1] if text.isdecimal() and 0 < int(text) <= len(names) else text


def _reshards(strategy: object) -> bool:
    name = _spelled(strategy)
    if name not in _RESHARDS:
        raise ConfigurationError(
            f"unknown sharding strategy {strategy!r}: it must be one of {', '.join(_RESHARDS)}. Correct "
            "the file."
        )
    return _RESHARDS[name]


def run(options: argparse.Namespace) -> int:
    """Run ``accelfn to-fsdp2``. Effect: writes the new file, and says what was changed.

    Returns:
        The exit status.
    """
    if options.output_file is None and not options.overwrite:
        raise ConfigurationError(
            "give --output_file for the new file, or --overwrite to replace the old one."
        )
    for name in ("config_file", "output_file"):
        given: str | None = getattr(options, name)
        if given is not None and not given.strip():
            raise ConfigurationError(f"--{name} needs the name of a file, got {given!r}.")
    target = Path(options.output_file or options.config_file)
    if options.output_file is not None and os.path.lexists(target) and not options.overwrite:
        raise ConfigurationError(f"{target} is there already. Give another --output_file, or --overwrite.")
    tree = read_tree(read_text(options.config_file), options.config_file, typed=True)
    if not tree:
        raise ConfigurationError(f"{options.config_file} is empty. Make a new file, or give another one.")
    made = rewrite_for_fsdp2(tree)
    if made.notes or options.output_file is not None:
        write_text(target, format_tree(made.tree, str(target)))
    for note in made.notes:
        print(note)
    print(f"{target}: {'rewritten for FSDP2' if made.notes else 'nothing to change'}")
    return 0


def make_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn to-fsdp2",
        description="Rewrite the FSDP section of a configuration file for FSDP2.",
    )
    parser.add_argument("--config_file", metavar="FILE", required=True, help="configuration to read")
    parser.add_argument("--output_file", metavar="FILE", help="configuration to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser
