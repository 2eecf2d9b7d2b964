"""``accelfn checkpoint``: verify, list, show, prune and convert checkpoints."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from accelfn.errors import ConfigurationError, DamagedCheckpointError, NoCheckpointError
from accelfn.launch.command_line import CommandParser, positive
from accelfn.launch.output import print_table
from accelfn.storage.address import as_path, is_address
from accelfn.storage.disk import is_there, kind_of, list_names
from accelfn.storage.object_store import disk_at


def run(options: argparse.Namespace) -> int:
    """Run ``verify``, ``list``, ``show``, ``prune`` or ``convert``.

    Returns:
        The exit status: 1 if a checkpoint is damaged or can't be removed, else 0.
    """
    _check_options(options)
    return _ACTIONS[options.action](options)


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
    if options.action == "prune" and options.best is not None and options.mode is None:
        raise ConfigurationError("--best needs --mode: min if a low metric is better, max if a high one is.")


def _renaming(text: str) -> tuple[str, str]:
    old, _, new = text.partition("=")
    if not (old and new):
        raise argparse.ArgumentTypeError(f"it must be OLD=NEW, such as model=unet, got {text!r}.")
    return old, new


# The actions import what they need late, because accelfn.checkpoint imports torch.


def _verify(options: argparse.Namespace) -> int:
    from accelfn.checkpoint.find import is_checkpoint, scan

    directory = options.directory
    disk = disk_at(directory)
    if not options.all or is_checkpoint(disk, str(as_path(directory))):
        return _verify_one(directory)
    paths = [checkpoint.path for found in scan(disk, directory) for checkpoint in found]
    if not paths:
        raise NoCheckpointError(2, "it contains no checkpoint of accelfn", directory)
    return max(_verify_one(path) for path in sorted(paths))


def _verify_one(directory: str) -> int:
    from accelfn.checkpoint.verify import verify_files

    try:
        path, files = verify_files(directory)
    except DamagedCheckpointError as error:
        print(f"{directory}\n  DAMAGED: {error}")
        return 1
    print(_displayed(path, directory))
    rows: list[tuple[str, ...]] = []
    for file in files:
        result = f"DAMAGED: {file.error}" if file.error else "OK"
        extra = "not part of the checkpoint, not verified"
        rows.append((f"  {file.name}", _size(file.size), extra if file.is_extra else result))
    print_table((), rows, right=(1,))
    return int(any(file.error for file in files))


def _list(options: argparse.Namespace) -> int:
    from accelfn.checkpoint.commit import find_leftovers, is_dead, read_head
    from accelfn.checkpoint.find import explain_absence, scan

    disk, directory = disk_at(options.directory), str(as_path(options.directory))
    found, broken = scan(disk, directory)
    newest_s = max((checkpoint.modified_s for checkpoint in found), default=0.0)
    heads = [(checkpoint, read_head(disk, checkpoint.path)) for checkpoint in found]
    rows: list[dict[str, Any]] = [
        {
            "name": os.path.basename(checkpoint.path),
            **{name: getattr(head, name) for name in ("step", "metric", "world_size", "num_bytes")},
            "modified_s": checkpoint.modified_s,
        }
        for checkpoint, head in heads
        if head is not None  # removed in the meantime
    ]
    damaged = {os.path.basename(checkpoint.path): str(checkpoint.error) for checkpoint in broken}
    leftovers = {
        os.path.basename(path): is_dead(disk, path, newest_s) for path in find_leftovers(disk, directory)
    }
    known = {*damaged, *leftovers, *(os.path.basename(checkpoint.path) for checkpoint in found)}
    others = {
        name: explain_absence(disk, os.path.join(directory, name))
        for name in sorted({*list_names(disk, directory)} - known)
    }
    if options.json:
        unfinished = [{"name": name, "dead": dead} for name, dead in leftovers.items()]
        report = {"checkpoints": rows, "damaged": damaged, "leftovers": unfinished, "others": others}
        print(json.dumps({"directory": directory, **report}, indent=2))
        return 0
    table = [
        (
            row["name"],
            *("-" if row[key] is None else f"{row[key]:g}" for key in ("step", "metric", "world_size")),
            _size(row["num_bytes"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["modified_s"])),
        )
        for row in rows
    ]
    if table:
        print_table(("name", "step", "metric", "ranks", "size", "written"), table, right=(1, 2, 3, 4))
    else:
        print(f"no checkpoint in {options.directory}")
    for name, error in damaged.items():
        print(f"damaged: {name}: {error}")
    for name, dead in leftovers.items():
        why = "left by a save that was killed" if dead else "a save is running, or no locks here"
        print(f"unfinished: {name} ({why})")
    for name, what in others.items():
        print(f"not a checkpoint: {name} ({what})")
    return 0


def _show(options: argparse.Namespace) -> int:
    from accelfn.checkpoint.find import read_checkpoint
    from accelfn.weights.dtypes import dtype_from_name

    disk = disk_at(options.directory)
    path, manifest = read_checkpoint(disk, options.directory, lambda found: (found.path, found.manifest))
    prefix = f"{options.path.strip('/')}/".lstrip("/")
    rows = [
        (name, f"{kind} {list(shape)}, {_size(math.prod(shape) * dtype_from_name(kind).itemsize)}")
        for name, (kind, shape, _) in manifest.tensors.items()
        if f"{name}/".replace("~1", "/").startswith(prefix.replace("~1", "/"))
        and (prefix or not name.startswith("#"))  # of random states
    ]
    if not rows and prefix:
        parts = ", ".join(dict.fromkeys(name.partition("/")[0] for name in manifest.tensors))
        raise ValueError(f"no tensor of {options.path!r} in {path}. Parts with tensors are {parts}.")
    if not prefix:
        about = [f"step {manifest.step}"] if manifest.step is not None else []
        about += [f"metric {manifest.metric:g}"] if manifest.metric is not None else []
        about += [f"saved by {_count(manifest.world_size, 'rank')} of {manifest.created_by}"]
        about += [f"{_count(len(manifest.files), 'file')} of tensors, {_size(manifest.num_bytes)}"]
        print(f"{_displayed(path, options.directory)}\n{'; '.join(about)}")
    print_table((), rows)
    return 0


def _prune(options: argparse.Namespace) -> int:
    from accelfn.checkpoint import Keep, prune_checkpoints
    from accelfn.checkpoint.keep import plan_prune

    keep = Keep(last=options.last, every=options.every, best=options.best, mode=options.mode or "min")
    plan = plan_prune(options.directory, keep)
    extra = {path: ", ".join(names) for path, names in plan.extra}
    for checkpoint in plan.stay:
        path = checkpoint.path
        why = f" (it contains other files: {extra[path]}; move them away)" if path in extra else ""
        print(f"keep    {os.path.basename(path)}{why}")
    for checkpoint in plan.remove:
        print(f"remove  {os.path.basename(checkpoint.path)}")
    for path in plan.dead:
        print(f"remove  {os.path.basename(path)} (left by a save that was killed)")
    if options.dry_run:
        print("nothing was removed: --dry_run")
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # printed above
        removed = prune_checkpoints(options.directory, keep)
    remaining = [path for path in plan.dead if is_there(disk_at(path), path)]
    num_cleaned = len(plan.dead) - len(remaining)
    print(f"removed {_count(len(removed), 'checkpoint')} and {_count(num_cleaned, 'leftover')}")
    for path in remaining:
        print(f"can't remove {path}; check its permissions", file=sys.stderr)
    return int(bool(remaining))


def _convert(options: argparse.Namespace) -> int:
    from accelfn.checkpoint import convert_checkpoint

    names = ("to", "leave_out", "leaf", "step", "max_shard_size", "overwrite")
    converted = convert_checkpoint(
        options.source,
        options.target,
        names=dict(options.name),
        **{name: getattr(options, name) for name in names},
    )
    print(f"{_displayed(converted.path, options.target)}: {', '.join(converted.parts)}")
    for note in converted.notes:
        print(f"note: {note}")
    return 0


def _displayed(path: str | os.PathLike[str], given: str) -> str:
    """Return a path as absolute or relative, like the path that the user gave."""
    return os.fspath(path) if is_address(given) or os.path.isabs(given) else os.path.relpath(path)


def _size(num_bytes: int) -> str:
    from accelfn.tree.structure import size_text

    return size_text(num_bytes)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {"verify": _verify, "list": _list, "show": _show, "prune": _prune, "convert": _convert}
)


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn checkpoint", description="Verify, list, show, prune and convert checkpoints."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="command")

    def add(name: str, about: str, directory: str = "") -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        if directory:
            action.add_argument("directory", metavar="DIRECTORY", help=directory)
        return action

    one, many = "checkpoint, or directory of checkpoints", "directory of checkpoints"
    verify = add("verify", "verify the checksums of a checkpoint", one)
    verify.add_argument("--all", action="store_true", help="verify all checkpoints, not only the newest")
    listed = add("list", "list the checkpoints in a directory", many)
    listed.add_argument("--json", action="store_true", help="print JSON")
    show = add("show", "show the tensors of a checkpoint, without reading them", one)
    show.add_argument("path", metavar="PATH", nargs="?", default="", help="path of a part, such as optimizer")
    prune = add("prune", "remove old checkpoints and the remains of failed saves", many)
    for rule, metavar, about in (
        ("--last", "N", "keep the N newest"),
        ("--every", "K", "keep those with a step divisible by K"),
        ("--best", "M", "keep the M with the best metric"),
    ):
        prune.add_argument(rule, metavar=metavar, type=positive, help=about)
    prune.add_argument("--mode", choices=("min", "max"), help="whether a low or a high metric is better")
    prune.add_argument("--dry_run", action="store_true", help="print what would be removed")
    convert = add("convert", "convert a checkpoint to another format")
    convert.add_argument("source", metavar="SOURCE", help="checkpoint, or directory of Accelerate or DCP")
    convert.add_argument("target", metavar="TARGET", help="directory to create")
    forms = ("accelfn", "safetensors", "dcp")
    convert.add_argument(
        "--to", required=True, choices=forms, help="format; dcp: torch.distributed.checkpoint"
    )
    repeated: Any = {"action": "append", "default": []}
    convert.add_argument(
        "--name",
        metavar="OLD=NEW",
        type=_renaming,
        help="rename a part of another program; repeatable",
        **repeated,
    )
    convert.add_argument("--leave_out", metavar="PATH", help="part to omit; repeatable", **repeated)
    convert.add_argument("--leaf", metavar="PATH", help="path of the model, for safetensors (model) and dcp")
    convert.add_argument(
        "--max_shard_size", metavar="SIZE", default="10GB", help="maximum file size, for safetensors (10GB)"
    )
    convert.add_argument("--step", metavar="N", type=int, help="step of the checkpoint, for accelfn")
    convert.add_argument("--overwrite", action="store_true", help="replace an existing checkpoint of accelfn")
    return parser
