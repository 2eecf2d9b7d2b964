"""``accelfn checkpoint``: look at checkpoints, check them, remove old ones, and convert them."""

from __future__ import annotations

import argparse
import os

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser


def run(options: argparse.Namespace) -> int:
    """Run one of ``verify``, ``list``, ``show``, ``prune`` and ``convert``.

    Returns:
        The exit status: 0; 1 where a checkpoint is damaged or a disk fails.
    """
    _check_options(options)
    # Not at the top: accelfn.checkpoint loads torch, which --help and bad input do without.
    from accelfn.launch.checkpoint_actions import ACTIONS

    return ACTIONS[options.action](options)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what is wrong with the arguments, before torch is loaded to find out."""
    path: str = options.source if options.action == "convert" else options.directory
    parent, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(path):
        # A crash may have left the checkpoint beside its name.
        beside: list[str] = os.listdir(parent) if os.path.isdir(parent) else []
        if not any(one.startswith(f".{name}.") for one in beside):
            what = "it is a file" if os.path.exists(path) else "there is no such directory"
            raise ConfigurationError(f"{path}: {what}. Check the path.")
    if options.action in ("list", "prune") and os.path.isfile(os.path.join(path, "manifest.json")):
        raise ConfigurationError(f"{path} is a checkpoint itself. Pass the directory that has it in it.")
    if options.action == "prune":
        for rule in ("last", "every", "best"):
            given = getattr(options, rule)
            if given is not None and given < 1:
                raise ConfigurationError(f"--{rule} must be at least 1, got {given}.")
        if options.best is not None and options.mode is None:
            raise ConfigurationError(
                "--best needs --mode: min where a low metric is good, max where a high one is."
            )
    if options.action == "convert":
        for pair in options.name:
            if not all(pair.partition("=")):
                raise ConfigurationError(f"--name must be OLD=NEW, such as model=unet: got {pair!r}.")


def make_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn checkpoint",
        description="Look at checkpoints, check them, remove old ones, and convert them.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="command")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")

    verify = add("verify", "check every byte of a checkpoint")
    verify.add_argument("directory", metavar="DIRECTORY", help="a checkpoint, or a directory of checkpoints")
    verify.add_argument("--all", action="store_true", help="all checkpoints in the directory, not the newest")

    listed = add("list", "list the checkpoints in a directory")
    listed.add_argument("directory", metavar="DIRECTORY", help="in which the checkpoints are")
    listed.add_argument("--json", action="store_true", help="as JSON")

    show = add("show", "show what is in a checkpoint; its tensors aren't read")
    show.add_argument("directory", metavar="DIRECTORY", help="a checkpoint, or a directory of checkpoints")
    show.add_argument(
        "path", metavar="PATH", nargs="?", default="", help="of a part, such as optimizer/groups"
    )
    show.add_argument("--all", action="store_true", help="long parts too")
    show.add_argument("--json", action="store_true", help="as JSON")

    prune = add("prune", "remove old checkpoints, and what dead saves left behind")
    prune.add_argument("directory", metavar="DIRECTORY", help="in which the checkpoints are")
    for rule, metavar, about in (
        ("--last", "N", "keep so many of the newest"),
        ("--every", "K", "keep those whose step is a multiple of K"),
        ("--best", "M", "keep so many of those with the best metric"),
    ):
        prune.add_argument(rule, metavar=metavar, type=int, help=about)
    prune.add_argument("--mode", choices=("min", "max"), help="whether a low or a high metric is good")
    prune.add_argument("--dry_run", action="store_true", help="only say what would be done")

    convert = add("convert", "convert a checkpoint into one that another program reads")
    convert.add_argument("source", metavar="SOURCE", help="a checkpoint, or a folder that Accelerate wrote")
    convert.add_argument("target", metavar="TARGET", help="the directory to make")
    forms = ("accelfn", "accelerate", "safetensors")
    convert.add_argument("--to", required=True, choices=forms, help="what it shall be")
    for flag, metavar, about in (
        ("--name", "OLD=NEW", "what a part of Accelerate is called in the tree, such as model=models/unet"),
        ("--leave_out", "PATH", "a part that isn't converted"),
    ):
        said = f"{about}; may be repeated"
        convert.add_argument(flag, metavar=metavar, action="append", default=[], help=said)
    for flag, metavar, default, about in (
        ("--leaf", "PATH", "model", "of the model"),
        ("--max_shard_size", "SIZE", "10GB", "of a file"),
    ):
        said = f"for safetensors: {about} ({default})"
        convert.add_argument(flag, metavar=metavar, default=default, help=said)
    convert.add_argument("--step", metavar="N", type=int, help="for accelfn: which step it is of")
    convert.add_argument("--overwrite", action="store_true", help="replace a checkpoint of accelfn")
    return parser
