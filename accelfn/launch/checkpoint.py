"""``accelfn checkpoint``: verify, list, show, prune and convert checkpoints."""

from __future__ import annotations

import argparse
import os

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser
from accelfn.storage.address import as_path
from accelfn.storage.disk import kind_of, list_names
from accelfn.storage.object_store import disk_at


def run(options: argparse.Namespace) -> int:
    """Run ``verify``, ``list``, ``show``, ``prune`` or ``convert``.

    Returns:
        The exit status: 1 if a checkpoint is damaged or can't be removed, else 0.
    """
    _check_options(options)
    # Imported late, because accelfn.checkpoint imports torch.
    from accelfn.launch.checkpoint_actions import ACTIONS

    return ACTIONS[options.action](options)


def _check_options(options: argparse.Namespace) -> None:
    """Check the arguments before torch is imported."""
    path: str = options.source if options.action == "convert" else options.directory
    place, disk = as_path(path), disk_at(path)
    kind = kind_of(disk, place)
    if kind != "directory" and not os.path.isdir(path):  # a link may lead to one
        # After a crash, the checkpoint may still have a temporary name.
        parent = os.fspath(place.parent)
        siblings = list_names(disk, parent) if kind_of(disk, parent) == "directory" else []
        if not any(sibling.startswith(f".{place.name}.") for sibling in siblings):
            problem = "doesn't exist" if kind is None else "is a file"
            raise ConfigurationError(f"the directory {path} {problem}. Check the path.")
    if options.action in ("list", "prune") and kind_of(disk, place / "manifest.json") == "file":
        raise ConfigurationError(f"{path} is a checkpoint. Pass its parent directory.")
    if options.action == "prune":
        for rule in ("last", "every", "best"):
            given = getattr(options, rule)
            if given is not None and given < 1:
                raise ConfigurationError(f"--{rule} must be at least 1, got {given}.")
        if options.best is not None and options.mode is None:
            raise ConfigurationError(
                "--best needs --mode: min if a low metric is better, max if a high one is."
            )
    if options.action == "convert":
        for pair in options.name:
            if not all(pair.partition("=")):
                raise ConfigurationError(f"--name must be OLD=NEW, such as model=unet, got {pair!r}.")


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn checkpoint",
        description="Verify, list, show, prune and convert checkpoints.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="command")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")

    verify = add("verify", "verify the checksums of a checkpoint")
    verify.add_argument("directory", metavar="DIRECTORY", help="checkpoint, or directory of checkpoints")
    verify.add_argument("--all", action="store_true", help="verify all checkpoints, not only the newest")

    listed = add("list", "list the checkpoints in a directory")
    listed.add_argument("directory", metavar="DIRECTORY", help="directory of checkpoints")
    listed.add_argument("--json", action="store_true", help="print JSON")

    show = add("show", "show the content of a checkpoint, without reading tensors")
    show.add_argument("directory", metavar="DIRECTORY", help="checkpoint, or directory of checkpoints")
    show.add_argument(
        "path", metavar="PATH", nargs="?", default="", help="path of a part, such as optimizer/groups"
    )
    show.add_argument("--all", action="store_true", help="show all entries of long parts")
    show.add_argument("--json", action="store_true", help="print JSON")

    prune = add("prune", "remove old checkpoints and the remains of failed saves")
    prune.add_argument("directory", metavar="DIRECTORY", help="directory of checkpoints")
    for rule, metavar, about in (
        ("--last", "N", "keep the N newest"),
        ("--every", "K", "keep those with a step divisible by K"),
        ("--best", "M", "keep the M with the best metric"),
    ):
        prune.add_argument(rule, metavar=metavar, type=int, help=about)
    prune.add_argument("--mode", choices=("min", "max"), help="whether a low or a high metric is better")
    prune.add_argument("--dry_run", action="store_true", help="print what would be removed")

    convert = add("convert", "convert a checkpoint to another format")
    convert.add_argument("source", metavar="SOURCE", help="checkpoint, or directory of Accelerate or DCP")
    convert.add_argument("target", metavar="TARGET", help="directory to create")
    forms = ("accelfn", "safetensors", "dcp")
    convert.add_argument(
        "--to", required=True, choices=forms, help="format; dcp: torch.distributed.checkpoint"
    )
    for flag, metavar, about in (
        ("--name", "OLD=NEW", "rename a part of another program's checkpoint, such as model=models/unet"),
        ("--leave_out", "PATH", "part to omit"),
    ):
        convert.add_argument(flag, metavar=metavar, action="append", default=[], help=f"{about}; repeatable")
    convert.add_argument(
        "--leaf",
        metavar="PATH",
        help="path of the model, for safetensors (model), or for dcp, to write it alone",
    )
    convert.add_argument(
        "--max_shard_size", metavar="SIZE", default="10GB", help="maximum file size, for safetensors (10GB)"
    )
    convert.add_argument("--step", metavar="N", type=int, help="step of the checkpoint, for accelfn")
    convert.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint of accelfn")
    return parser
