"""The actions of ``accelfn checkpoint``, which need torch."""

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
from accelfn.checkpoint.commit import find_leftovers, is_dead, read_head
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.document.nodes import LEAVES, child_path, children_of
from accelfn.checkpoint.find import explain_absence, is_checkpoint, read_checkpoint, scan
from accelfn.checkpoint.keep import plan_prune
from accelfn.checkpoint.manifest import Json, Manifest
from accelfn.checkpoint.verify import verify_files
from accelfn.errors import ConfigurationError, DamagedCheckpointError, NoCheckpointError
from accelfn.launch.output import format_table, print_table
from accelfn.storage.address import as_path, is_address
from accelfn.storage.disk import is_there, list_names
from accelfn.storage.object_store import disk_at
from accelfn.tree.structure import size_text
from accelfn.weights.dtypes import dtype_from_name

_MAX_ROWS = 24  # per part, without --all
_MAX_CHARACTERS = 60


def _verify(options: argparse.Namespace) -> int:
    directory = options.directory
    disk = disk_at(directory)
    if not options.all or is_checkpoint(disk, str(as_path(directory))):
        return _verify_one(directory)
    found, broken = scan(disk, directory)
    paths = [checkpoint.path for checkpoint in (*found, *broken)]
    if not paths:
        raise NoCheckpointError(2, "it contains no checkpoint of accelfn", directory)
    return max(_verify_one(path) for path in sorted(paths))


def _verify_one(directory: str) -> int:
    try:
        path, files = verify_files(directory)
    except DamagedCheckpointError as error:
        print(f"{directory}\n  DAMAGED: {error}")
        return 1
    print(_display_path(path, directory))
    rows: list[tuple[str, ...]] = []
    for file in files:
        result = f"DAMAGED: {file.error}" if file.error else "OK"
        if file.is_extra:
            result = "not part of the checkpoint, not verified"
        rows.append((f"  {file.name}", size_text(file.size), result))
    print(format_table((), rows, right=(1,)))
    return int(any(file.error for file in files))


def _list(options: argparse.Namespace) -> int:
    disk, directory = disk_at(options.directory), str(as_path(options.directory))
    found, broken = scan(disk, directory)
    leftovers = find_leftovers(disk, directory)
    newest_s = max((checkpoint.modified_s for checkpoint in found), default=0.0)
    listed = {os.path.basename(checkpoint.path) for checkpoint in (*found, *broken)}
    listed |= {os.path.basename(path) for path in leftovers}
    others = sorted(name for name in list_names(disk, directory) if name not in listed)
    heads = [(checkpoint, read_head(disk, checkpoint.path)) for checkpoint in found]
    rows: list[dict[str, Any]] = [
        {
            "name": os.path.basename(checkpoint.path),
            "step": head.step,
            "metric": head.metric,
            "world_size": head.world_size,
            "num_bytes": head.num_bytes,
            "modified_s": checkpoint.modified_s,
        }
        for checkpoint, head in heads
        if head is not None  # removed in the meantime
    ]
    report: dict[str, Any] = {
        "directory": directory,
        "checkpoints": rows,
        "damaged": [
            {"name": os.path.basename(checkpoint.path), "error": str(checkpoint.error)}
            for checkpoint in broken
        ],
        "leftovers": [
            {"name": os.path.basename(path), "dead": is_dead(disk, path, newest_s)} for path in leftovers
        ],
        "others": [
            {"name": name, "what": explain_absence(disk, os.path.join(directory, name))} for name in others
        ],
    }
    if options.json:
        print(json.dumps(report, indent=2))
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
    for checkpoint in report["damaged"]:
        print(f"damaged: {checkpoint['name']}: {checkpoint['error']}")
    for leftover in report["leftovers"]:
        why = "left by a save that was killed" if leftover["dead"] else "a save is running, or no locks here"
        print(f"unfinished: {leftover['name']} ({why})")
    for other in report["others"]:
        print(f"not a checkpoint: {other['name']} ({other['what']})")
    return 0


def _display_path(path: str | os.PathLike[str], given: str) -> str:
    """Return a path as absolute or relative, like the path that the user gave."""
    return os.fspath(path) if is_address(given) or os.path.isabs(given) else os.path.relpath(path)


def _show(options: argparse.Namespace) -> int:
    disk = disk_at(options.directory)
    path, manifest = read_checkpoint(disk, options.directory, lambda found: (found.path, found.manifest))
    all_leaves = list(list_leaves(manifest))
    prefix = f"{options.path.strip('/').replace('~1', '/')}/".lstrip("/")
    leaves = [leaf for leaf in all_leaves if f"{leaf['path'].replace('~1', '/')}/".startswith(prefix)]
    if not leaves and prefix:
        parts = ", ".join(dict.fromkeys(_top(leaf) for leaf in all_leaves))
        raise ValueError(f"no {options.path!r} in {path}. Its parts are {parts}.")
    kinds = random_kinds(manifest)
    if options.json:
        report: dict[str, Any] = {
            "path": path,
            "step": manifest.step,
            "metric": manifest.metric,
            "world_size": manifest.world_size,
            "created_by": manifest.created_by,
            "files": {name: file.size for name, file in sorted(manifest.files.items())},
            "random": kinds,
            "leaves": leaves,
        }
        print(json.dumps(report, indent=2))
        return 0
    if not prefix:
        ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
        files = "1 file" if len(manifest.files) == 1 else f"{len(manifest.files)} files"
        facts = [f"step {manifest.step}"] if manifest.step is not None else []
        facts += [f"metric {manifest.metric:g}"] if manifest.metric is not None else []
        facts += [f"saved by {ranks} of {manifest.created_by}"]
        facts += [f"{files} of tensors, {size_text(manifest.num_bytes)}"]
        print(f"{_display_path(path, options.directory)}\n{'; '.join(facts)}")
        print(f"random states of {ranks}: {', '.join(kinds)}" if kinds else "no random states")
    rows: list[tuple[str, str]] = []
    by_part: dict[str, list[dict[str, Any]]] = {}
    for leaf in leaves:
        by_part.setdefault(_top(leaf), []).append(leaf)
    for part, inside in by_part.items():
        count = len(inside) if options.all or prefix or len(inside) <= _MAX_ROWS + 1 else _MAX_ROWS
        rows += map(_row, inside[:count])
        if count < len(inside):
            rest = sum(leaf.get("bytes", 0) for leaf in inside[count:])
            rows.append((f"... and {len(inside) - count} more in {part}", size_text(rest)))
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
    return name, text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."


def _prune(options: argparse.Namespace) -> int:
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
    counts = [(len(removed), "checkpoint"), (len(plan.dead) - len(remaining), "leftover")]
    texts = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts]
    print(f"removed {' and '.join(texts)}")
    for path in remaining:
        print(f"can't remove {path}; check its permissions", file=sys.stderr)
    return int(bool(remaining))


def _convert(options: argparse.Namespace) -> int:
    try:
        converted = convert_checkpoint(
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
        raise ConfigurationError(str(error)) from error
    print(f"{_display_path(converted.path, options.target)}: {', '.join(converted.parts)}")
    for note in converted.notes:
        print(f"note: {note}")
    return 0


# --- The leaves of a checkpoint ---------------------------------------------------------------


def list_leaves(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """List the leaves of a checkpoint's tree in order.

    Returns:
        For each leaf its ``path`` (a JSON pointer without the first slash), and either ``kind``, ``dtype``,
        ``shape`` and ``bytes`` of a tensor, or ``same_as``, the path of a tied tensor, or ``value``. Leaves
        of some ranks only have ``ranks``.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    yield from _leaves(manifest, manifest.tree, "", (), {})


def random_kinds(manifest: Manifest) -> list[str]:
    """List the random generators whose states a checkpoint contains.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    ranks = range(0 if manifest.random is None else manifest.world_size)
    states = [document_of(manifest.random, rank) for rank in ranks]
    return list({kind: None for state in states if isinstance(state, dict) for kind in state})


def _leaves(
    manifest: Manifest, node: Json, path: str, ranks: Sequence[int], known: dict[str, str]
) -> Iterator[dict[str, Any]]:
    kind = node.get("$") if isinstance(node, dict) else None
    size = _num_ranks(node)
    if size and kind not in (None, "object") and not ranks:
        # The node differs between ranks, here or inside a leaf or a special container.
        nodes = [document_of(node, rank) for rank in range(size)]
        distinct: list[Json] = []
        for each in nodes:
            if each not in distinct:
                distinct.append(each)
        for value in distinct:
            same_ranks = [rank for rank, each in enumerate(nodes) if each == value]
            yield from _leaves(manifest, value, path, same_ranks, known)
        return
    head: dict[str, Any] = {"path": path[1:], **({"ranks": list(ranks)} if ranks else {})}
    children = children_of(node, path)
    if children is not None and (
        isinstance(node, dict) or not all(_is_plain(child) for _, child in children)
    ):
        is_value = kind not in (None, "dict", "object") and all(_is_plain(child) for _, child in children)
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
    """Return the world size if a node differs between ranks, else 0."""
    if isinstance(node, dict) and node.get("$") == "by_rank":
        return len(cast("list[int]", node["of"]))
    inside = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return max((_num_ranks(child) for child in inside), default=0)


def _is_plain(node: Json) -> bool:
    """Return whether a node is a plain value: neither a tensor nor a container."""
    kind = node.get("$") if isinstance(node, dict) else None
    if kind in LEAVES or kind == "by_rank":
        return False
    return (
        not isinstance(node, list)
        and (kind is not None or not isinstance(node, dict))
        and (children_of(node, "") is None)
    )


def _value(node: Json) -> Any:
    """Return a plain value for JSON, or its repr."""
    try:
        value = decode(node, {})
    except Exception:  # noqa: BLE001 -- the class may be missing, or its constructor may raise
        return f"<{node.get('$') if isinstance(node, dict) else 'value'}>"
    return node if value == node else repr(value)


ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {"verify": _verify, "list": _list, "show": _show, "prune": _prune, "convert": _convert}
)
