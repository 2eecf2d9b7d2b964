"""What ``accelfn checkpoint`` does, once its arguments make sense."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch

from accelfn.bigmodel.source import importing_from_here
from accelfn.checkpoint import Keep, convert_checkpoint, prune_checkpoints
from accelfn.checkpoint.conversion.parts import find_part
from accelfn.checkpoint.files.commit import find_leftovers, is_dead, is_leftover, read_head
from accelfn.checkpoint.files.disk import REAL_DISK
from accelfn.checkpoint.files.find import read_checkpoint, resolve, scan
from accelfn.checkpoint.files.keep import plan_prune
from accelfn.checkpoint.files.manifest import MANIFEST
from accelfn.checkpoint.files.verify import verify_files
from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from accelfn.launch.outline import draw_rows, outline, random_kinds, row_leaves
from accelfn.launch.output import print_table
from accelfn.tree.sizes import size_text

__all__ = ("ACTIONS",)


def _verify(options: argparse.Namespace) -> int:
    directory = options.directory
    if not options.all or os.path.isfile(os.path.join(directory, MANIFEST)):
        return _verify_one(directory)
    found, broken = scan(REAL_DISK, directory)
    paths = [one.path for one in (*found, *broken)]
    if not paths:
        raise NoCheckpointError(2, "there is no checkpoint of accelfn in it", directory)
    return max(_verify_one(path) for path in sorted(paths))


def _verify_one(directory: str) -> int:
    try:
        place, files = verify_files(directory)
    except DamagedCheckpointError as error:
        print(f"{directory}\n  DAMAGED: {error}")
        return 1
    print(_shown(place, directory))
    width = max(len(one.name) for one in files)
    sizes = [size_text(one.size) for one in files]
    for one, size in zip(files, sizes, strict=True):
        said = f"DAMAGED: {one.error}" if one.error else "OK"
        if one.is_extra:
            said = "not part of the checkpoint, not checked"
        elif one.node is not None:
            said = f"on the disk of node {one.node}, not checked"
        print(f"  {one.name:<{width}}  {size:>{max(map(len, sizes))}}  {said}")
    return int(any(one.error for one in files))


def _list(options: argparse.Namespace) -> int:
    directory: str = os.path.abspath(cast("str", options.directory))
    found, broken = scan(REAL_DISK, directory)
    listed = {os.path.basename(one.path) for one in (*found, *broken)}
    others = sorted(name for name in os.listdir(directory) if name not in listed and not is_leftover(name))
    rows: list[dict[str, Any]] = []
    for one in found:
        head = read_head(REAL_DISK, one.resolved)
        if head is not None:  # otherwise it was removed meanwhile
            rows.append(
                {
                    "name": os.path.basename(one.path),
                    "step": head.step,
                    "metric": head.metric,
                    "world_size": head.world_size,
                    "num_bytes": head.num_bytes,
                    "modified_s": one.modified_s,
                }
            )
    unfinished: list[dict[str, Any]] = [
        {"name": os.path.basename(one.path), "kind": one.kind, "dead": is_dead(REAL_DISK, one)}
        for one in find_leftovers(REAL_DISK, directory)
    ]
    if options.json:
        told: dict[str, Any] = {
            "directory": directory,
            "checkpoints": rows,
            "damaged": [{"name": os.path.basename(one.path), "error": str(one.error)} for one in broken],
            "leftovers": unfinished,
            "others": [{"name": name, "what": _what(os.path.join(directory, name))} for name in others],
        }
        print(json.dumps(told, indent=2))
        return 0
    if rows:
        print_table(
            ("name", "step", "metric", "ranks", "size", "written"),
            [
                (
                    row["name"],
                    _or_dash(row["step"]),
                    _or_dash(row["metric"]),
                    str(row["world_size"]),
                    size_text(row["num_bytes"]),
                    f"{datetime.datetime.fromtimestamp(row['modified_s']):%Y-%m-%d %H:%M:%S}",
                )
                for row in rows
            ],
            right=(1, 2, 3, 4),
        )
    else:
        print(f"no checkpoint in {options.directory}")
    for one in broken:
        print(f"damaged: {os.path.basename(one.path)}: {one.error}")
    for one in unfinished:
        said = "left by a dead save" if one["dead"] else "a save at work, or its disk is another machine's"
        print(f"unfinished: {one['name']} ({said})")
    for name in others:
        print(f"no checkpoint: {name} ({_what(os.path.join(directory, name))})")
    return 0


def _shown(path: str | os.PathLike[str], given: str) -> str:
    """Write a path as the user writes such paths: from the root, or from the working directory."""
    return os.fspath(path) if os.path.isabs(given) else os.path.relpath(path)


def _or_dash(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _what(path: str) -> str:
    """Return what something is that is no checkpoint."""
    if not os.path.isdir(path):
        return "a file"
    try:
        resolve(REAL_DISK, path)
    except NoCheckpointError as error:
        return str(error).rpartition(": ")[2].removesuffix(".")
    return "a directory"


def _show(options: argparse.Namespace) -> int:
    path, manifest = read_checkpoint(REAL_DISK, options.directory, lambda found: (found.path, found.manifest))
    part = find_part(manifest.tree, options.path)
    if part is None:
        tops = ", ".join(one.name for one in outline(manifest, manifest.tree, "").children)
        raise ValueError(f"there is no {options.path!r} in {path}. At the top it has {tops}.")
    row = outline(manifest, part.node, part.path, part.path)
    if options.json:
        told: dict[str, Any] = {
            "path": path,
            "step": manifest.step,
            "metric": manifest.metric,
            "world_size": manifest.world_size,
            "num_nodes": manifest.num_nodes,
            "generation": manifest.generation,
            "created_by": manifest.created_by,
            "files": {name: file.size for name, file in sorted(manifest.files.items())},
            "random": random_kinds(manifest),
            "leaves": list(row_leaves(row)),
        }
        print(json.dumps(told, indent=2))
        return 0
    if not part.path:
        ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
        files = "1 file" if len(manifest.files) == 1 else f"{len(manifest.files)} files"
        facts = [f"step {manifest.step}"] if manifest.step is not None else []
        facts += [f"metric {manifest.metric:g}"] if manifest.metric is not None else []
        facts += [f"saved by {ranks} of {manifest.created_by}"]
        facts += [f"{files} of tensors, {size_text(manifest.num_bytes)}"]
        kinds = ", ".join(random_kinds(manifest))
        print(f"{_shown(path, options.directory)}\n{'; '.join(facts)}")
        print(f"random states of {ranks}: {kinds}" if kinds else "no random states")
    holder = row._replace(children=(row._replace(name=part.path),)) if part.path or not row.children else row
    for line in draw_rows(holder, everything=options.all):
        print(line)
    return 0


def _prune(options: argparse.Namespace) -> int:
    keep = Keep(last=options.last, every=options.every, best=options.best, mode=options.mode or "min")
    plan = plan_prune(options.directory, keep)
    others = {path: ", ".join(extra) for path, extra in plan.extra}
    for one in plan.stay:
        why = f" (it contains {others[one.path]}; move that away)" if one.path in others else ""
        print(f"keep    {os.path.basename(one.path)}{why}")
    for one in plan.remove:
        print(f"remove  {os.path.basename(one.path)}")
    for one in plan.dead:
        print(f"remove  {os.path.basename(one.path)} (left by a dead save)")
    if options.dry_run:
        print("nothing was removed: --dry_run")
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said above
        gone = prune_checkpoints(options.directory, keep)
    left = [one.path for one in plan.dead if os.path.lexists(one.path)]
    counts = [(len(gone), "checkpoint"), (len(plan.dead) - len(left), "leftover")]
    said = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts]
    print(f"removed {' and '.join(said)}")
    for path in left:
        print(f"{path} can't be removed; check its rights", file=sys.stderr)
    return int(bool(left))


def _convert(options: argparse.Namespace) -> int:
    names = dict(pair.split("=", 1) for pair in options.name)
    like: dict[str, Any] = {}
    for given in options.model:
        like.update(_build(given))
    made = convert_checkpoint(
        options.source,
        options.target,
        to=options.to,
        names=names,
        like=like,
        leave_out=options.leave_out,
        leaf=options.leaf,
        step=options.step,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
    )
    print(f"{_shown(made.path, options.target)}: {', '.join(made.parts)}")
    for note in made.notes:
        print(f"note: {note}")
    return 0


def _build(given: str) -> Mapping[str, Any]:
    """Call the user's own function for a module, or for modules and optimizers by name."""
    name, _, spelled = given.rpartition("=")
    module_name, _, function_name = spelled.partition(":")
    with importing_from_here():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # of what the user's module imports
            raise ValueError(
                f"--model {given}: there is no module {error.name!r} here ({os.getcwd()}) or among the "
                "installed ones."
            ) from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise ValueError(f"--model {given}: the module {module_name} has no function {function_name!r}.")
        with torch.device("meta"):
            built: Any = function()
    if isinstance(built, torch.nn.Module):
        return {name or "model": built}
    if name or not isinstance(built, Mapping):
        raise ValueError(
            f"--model {given}: the function gave {type(built).__name__}, and must give a module"
            + ("." if name else ", or a dict of modules and optimizers by name.")
        )
    return cast("Mapping[str, Any]", built)


ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {"verify": _verify, "list": _list, "show": _show, "prune": _prune, "convert": _convert}
)
