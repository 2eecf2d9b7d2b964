"""What ``accelfn checkpoint`` does, once its arguments make sense."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from accelfn.checkpoint import Keep, convert_checkpoint, prune_checkpoints
from accelfn.checkpoint.by_rank import document_of
from accelfn.checkpoint.commit import find_leftovers, is_dead, is_leftover, read_head
from accelfn.checkpoint.disk import REAL_DISK
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.document.nodes import LEAVES, child_path, children_of
from accelfn.checkpoint.find import read_checkpoint, resolve, scan, verify_files
from accelfn.checkpoint.header import dtype_from_name
from accelfn.checkpoint.keep import plan_prune
from accelfn.checkpoint.manifest import MANIFEST, Json, Manifest
from accelfn.errors import ConfigurationError, DamagedCheckpointError, NoCheckpointError
from accelfn.launch.output import format_table, print_table
from accelfn.tree.structure import size_text

_MOST_ROWS = 24  # of a part, without --all
_MOST_CHARACTERS = 60


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
    rows: list[tuple[str, ...]] = []
    for one in files:
        said = f"DAMAGED: {one.error}" if one.error else "OK"
        if one.is_extra:
            said = "not part of the checkpoint, not checked"
        elif one.node is not None:
            said = f"on the disk of node {one.node}, not checked"
        rows.append((f"  {one.name}", size_text(one.size), said))
    print(format_table((), rows, right=(1,)))
    return int(any(one.error for one in files))


def _list(options: argparse.Namespace) -> int:
    directory: str = os.path.abspath(options.directory)
    found, broken = scan(REAL_DISK, directory)
    listed = {os.path.basename(one.path) for one in (*found, *broken)}
    others = sorted(name for name in os.listdir(directory) if name not in listed and not is_leftover(name))
    heads = [(one, read_head(REAL_DISK, one.resolved)) for one in found]
    rows: list[dict[str, Any]] = [
        {
            "name": os.path.basename(one.path),
            "step": head.step,
            "metric": head.metric,
            "world_size": head.world_size,
            "num_bytes": head.num_bytes,
            "modified_s": one.modified_s,
        }
        for one, head in heads
        if head is not None  # otherwise it was removed meanwhile
    ]
    told: dict[str, Any] = {
        "directory": directory,
        "checkpoints": rows,
        "damaged": [{"name": os.path.basename(one.path), "error": str(one.error)} for one in broken],
        "leftovers": [
            {"name": os.path.basename(one.path), "kind": one.kind, "dead": is_dead(REAL_DISK, one)}
            for one in find_leftovers(REAL_DISK, directory)
        ],
        "others": [{"name": name, "what": _what(os.path.join(directory, name))} for name in others],
    }
    if options.json:
        print(json.dumps(told, indent=2))
        return 0
    if rows:
        table = [
            (
                row["name"],
                *("-" if row[key] is None else f"{row[key]:g}" for key in ("step", "metric", "world_size")),
                size_text(row["num_bytes"]),
                f"{datetime.datetime.fromtimestamp(row['modified_s']):%Y-%m-%d %H:%M:%S}",
            )
            for row in rows
        ]
        print_table(("name", "step", "metric", "ranks", "size", "written"), table, right=(1, 2, 3, 4))
    else:
        print(f"no checkpoint in {options.directory}")
    for one in told["damaged"]:
        print(f"damaged: {one['name']}: {one['error']}")
    for one in told["leftovers"]:
        said = "left by a dead save" if one["dead"] else "a save at work, or its disk is another machine's"
        print(f"unfinished: {one['name']} ({said})")
    for one in told["others"]:
        print(f"no checkpoint: {one['name']} ({one['what']})")
    return 0


def _shown(path: str | os.PathLike[str], given: str) -> str:
    """Write a path as the user writes such paths: from the root, or from the working directory."""
    return os.fspath(path) if os.path.isabs(given) else os.path.relpath(path)


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
    every = list(list_leaves(manifest))
    wanted = f"{options.path.strip('/').replace('~1', '/')}/".lstrip("/")
    leaves = [one for one in every if f"{one['path'].replace('~1', '/')}/".startswith(wanted)]
    if not leaves and wanted:
        tops = ", ".join(dict.fromkeys(_top(one) for one in every))
        raise ValueError(f"there is no {options.path!r} in {path}. At the top it has {tops}.")
    kinds = random_kinds(manifest)
    if options.json:
        told: dict[str, Any] = {
            "path": path,
            "step": manifest.step,
            "metric": manifest.metric,
            "world_size": manifest.world_size,
            "num_nodes": manifest.num_nodes,
            "created_by": manifest.created_by,
            "files": {name: file.size for name, file in sorted(manifest.files.items())},
            "random": kinds,
            "leaves": leaves,
        }
        print(json.dumps(told, indent=2))
        return 0
    if not wanted:
        ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
        files = "1 file" if len(manifest.files) == 1 else f"{len(manifest.files)} files"
        facts = [f"step {manifest.step}"] if manifest.step is not None else []
        facts += [f"metric {manifest.metric:g}"] if manifest.metric is not None else []
        facts += [f"saved by {ranks} of {manifest.created_by}"]
        facts += [f"{files} of tensors, {size_text(manifest.num_bytes)}"]
        print(f"{_shown(path, options.directory)}\n{'; '.join(facts)}")
        print(f"random states of {ranks}: {', '.join(kinds)}" if kinds else "no random states")
    rows: list[tuple[str, str]] = []
    by_part: dict[str, list[dict[str, Any]]] = {}
    for one in leaves:
        by_part.setdefault(_top(one), []).append(one)
    for part, inside in by_part.items():
        cut = len(inside) if options.all or wanted or len(inside) <= _MOST_ROWS + 1 else _MOST_ROWS
        rows += map(_row, inside[:cut])
        if cut < len(inside):
            rest = sum(one.get("bytes", 0) for one in inside[cut:])
            rows.append((f"... and {len(inside) - cut} more in {part}", size_text(rest)))
    if rows:
        print_table((), rows)
    return 0


def _top(leaf: Mapping[str, Any]) -> str:
    return leaf["path"].partition("/")[0]


def _row(leaf: Mapping[str, Any]) -> tuple[str, str]:
    ranks = ",".join(map(str, leaf.get("ranks", ())))
    name = f"{leaf['path']}{f' (rank {ranks})' if ranks else ''}"
    if "dtype" in leaf:
        what = "" if leaf["kind"] == "tensor" else f"{leaf['kind']} "
        return name, f"{what}{leaf['dtype']} {leaf['shape']}, {size_text(leaf['bytes'])}"
    if "same_as" in leaf:
        return name, f"same as {leaf['same_as']}"
    text = str(leaf["value"])
    return name, text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


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
    try:
        made = convert_checkpoint(
            options.source,
            options.target,
            to=options.to,
            names=dict(pair.split("=", 1) for pair in options.name),
            leave_out=options.leave_out,
            leaf=options.leaf,
            step=options.step,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
        )
    except DamagedCheckpointError:
        raise
    except ValueError as error:
        flags = {"names=": "names is --name", "leave_out": "leave_out is --leave_out"}
        hints = [flag for word, flag in flags.items() if word in str(error)]
        said = f" On the command line {', '.join(hints)}." if hints else ""
        raise ConfigurationError(f"{error}{said}") from error
    print(f"{_shown(made.path, options.target)}: {', '.join(made.parts)}")
    for note in made.notes:
        print(f"note: {note}")
    return 0


# --- What a checkpoint holds, leaf by leaf ---------------------------------------------------------------


def list_leaves(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """List what the tree of a checkpoint holds, in its order.

    Returns:
        For each leaf its ``path`` (a JSON pointer without its first slash), and either ``kind``, ``dtype``,
        ``shape`` and ``bytes`` of a tensor; or ``same_as``, the path of the same tensor; or ``value``. And
        ``ranks``, where it is that of some ranks alone.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    yield from _leaves(manifest, manifest.tree, "", (), {})


def random_kinds(manifest: Manifest) -> list[str]:
    """List the generators whose states a checkpoint has.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    ranks = range(0 if manifest.random is None else manifest.world_size)
    own = [document_of(manifest.random, rank) for rank in ranks]
    return list({kind: None for one in own if isinstance(one, dict) for kind in one})


def _leaves(
    manifest: Manifest, node: Json, path: str, ranks: Sequence[int], known: dict[str, str]
) -> Iterator[dict[str, Any]]:
    kind = node.get("$") if isinstance(node, dict) else None
    size = _num_ranks(node)
    if size and kind not in (None, "object") and not ranks:
        # It differs between ranks, here or inside of a leaf or a container that has a form of its own.
        own = [document_of(node, rank) for rank in range(size)]
        values: list[Json] = []
        for one in own:
            if one not in values:
                values.append(one)
        for value in values:
            yield from _leaves(
                manifest, value, path, [rank for rank, one in enumerate(own) if one == value], known
            )
        return
    head: dict[str, Any] = {"path": path[1:], **({"ranks": list(ranks)} if ranks else {})}
    children = children_of(node, path)
    if children is not None and (isinstance(node, dict) or not all(_is_plain(one) for _, one in children)):
        is_value = kind not in (None, "dict", "object") and all(_is_plain(one) for _, one in children)
        if children and not is_value:
            for key, child in children:
                yield from _leaves(manifest, child, child_path(path, key), ranks, known)
            return
    if isinstance(node, dict) and kind in LEAVES:
        first = known.setdefault(node["name"], path[1:])
        if first != path[1:]:
            yield {**head, "same_as": first}
            return
        stored = manifest.tensors[node["name"]]
        shape = list(stored.shape)
        size = math.prod(shape) * dtype_from_name(stored.dtype).itemsize
        yield {**head, "kind": kind, "dtype": stored.dtype, "shape": shape, "bytes": size}
    else:
        yield {**head, "value": _value(node)}


def _num_ranks(node: Json) -> int:
    """Return for how many ranks there are parts by rank in a node; 0 where there are none."""
    if isinstance(node, dict) and node.get("$") == "by_rank":
        return len(cast("list[int]", node["of"]))
    inside = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return max((_num_ranks(one) for one in inside), default=0)


def _is_plain(node: Json) -> bool:
    """Whether a node is one value: no tensor, and nothing with values inside."""
    kind = node.get("$") if isinstance(node, dict) else None
    if kind in LEAVES or kind == "by_rank":
        return False
    return (
        not isinstance(node, list)
        and (kind is not None or not isinstance(node, dict))
        and (children_of(node, "") is None)
    )


def _value(node: Json) -> Any:
    """Return a plain value as JSON has it, and what JSON lacks as a text."""
    try:
        value = decode(node, {})
    except Exception:  # noqa: BLE001 -- of a class that isn't imported, or what a constructor says to a file
        return f"<{node.get('$') if isinstance(node, dict) else 'value'}>"
    return node if value == node else repr(value)


ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {"verify": _verify, "list": _list, "show": _show, "prune": _prune, "convert": _convert}
)
