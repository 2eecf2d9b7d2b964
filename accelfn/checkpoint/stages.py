"""Checkpoints of models whose pipeline stages are on different ranks: they hold the complete model.

When saving, each rank's document has only its own stages, and the documents of the ranks along "pp" are
joined. When loading, the parts of other ranks are removed from the document before it is compared with this
rank's objects. So a checkpoint of any layout fits any other, and the rank that has a parameter checks it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import nn

from accelfn.checkpoint.document.compare import Stored
from accelfn.checkpoint.document.nodes import child_path, children_of, join_path
from accelfn.checkpoint.manifest import Json
from accelfn.checkpoint.objects import KnownNames, Names, inner_of, is_named_optimizer
from accelfn.errors import CheckpointError
from accelfn.parallel.pointers import WholeModel, whole_of

_Node = dict[str, Any]


def first_names(staged: Mapping[str, WholeModel | None], stored: Iterable[str]) -> dict[str, str]:
    """Return new names for tied weights whose first name is on another stage, by their current names. Pure.

    Args:
        staged: Models by their paths.
        stored: Names of this rank's tensors.
    """
    own = frozenset(stored)
    names = {
        join_path(path, name): join_path(path, first)
        for path, whole in staged.items()
        if whole is not None
        for name, first in whole.first.items()
    }
    return {name: first for name, first in names.items() if name in own and first not in own}


def join_stages(
    documents: Sequence[Json],
    groups: Sequence[Sequence[int]],
    staged: Mapping[str, WholeModel | None],
    order: Mapping[str, int],
) -> list[Json]:
    """Join the states of models and optimizers over the ranks along "pp". Pure.

    Args:
        documents: Of all ranks, in rank order; ranks may share one.
        groups: The ranks along "pp", for each position on the other axes.
        staged: The complete model by its path; None for an optimizer.
        order: Position of each parameter in the complete models, by name.

    Returns:
        The documents of all ranks. Groups of ranks that shared documents share them.

    Raises:
        CheckpointError: An optimizer has parameters of no model in the tree.
    """
    known: dict[tuple[int, ...], list[Json]] = {}
    result = list(documents)
    for group in groups:
        key = tuple(id(documents[rank]) for rank in group)
        if key not in known:
            known[key] = [copy.deepcopy(documents[rank]) for rank in group]
            _join(known[key], staged, order)
        for rank, document in zip(group, known[key], strict=True):
            result[rank] = document
    return result


def _join(
    documents: Sequence[Json], staged: Mapping[str, WholeModel | None], order: Mapping[str, int]
) -> None:
    """Join the states of all stages, in place."""
    by_stage = [dict(_objects(document)) for document in documents]
    for path, whole in staged.items():
        nodes = [objects[path] for objects in by_stage]
        states: list[_Node] = [node["state"] for node in nodes]
        if all(state == states[0] for state in states):
            continue  # every stage has the complete state
        joined = _join_optimizers(path, states, order) if whole is None else _join_models(states, whole)
        for node in nodes:
            node["state"] = joined


def _objects(node: Json, path: str = "") -> Iterator[tuple[str, _Node]]:
    """List the nodes of objects with their paths."""
    if isinstance(node, dict) and node.get("$") == "object":
        yield path[1:], node
        return
    for key, child in children_of(node, path) or ():
        yield from _objects(child, child_path(path, key))


def _join_models(states: Sequence[_Node], whole: WholeModel) -> _Node:
    joined = _union(states)
    for name, first in whole.first.items():
        if name in joined and first in joined:
            joined[name] = joined[first]
    return _sorted(joined, {name: position for position, name in enumerate(whole.tensors)})


def _join_optimizers(path: str, states: Sequence[_Node], order: Mapping[str, int]) -> _Node:
    groups_of_stages = [cast("list[_Node]", state["groups"]) for state in states]
    sizes = [len(groups) for groups in groups_of_stages]
    if len(set(sizes)) > 1:
        raise CheckpointError(
            f"save_state: {path or 'tree'} is an optimizer with {sizes} groups on the stages of a pipeline. "
            "Make it with the same groups on all ranks."
        )
    names = [name for groups in groups_of_stages for group in groups for name in group["params"]]
    unknown = [name for name in names if name not in order]
    if unknown:
        raise CheckpointError(
            f"save_state: {path or 'tree'} is an optimizer that is split over the stages of a pipeline, and "
            f"its parameters {', '.join(unknown[:4])} are of no pipelined model in the tree. Save the "
            "optimizer in one tree with its model."
        )
    groups = [_join_groups(parts, order) for parts in zip(*groups_of_stages, strict=True)]
    values = _union([cast("_Node", state["state"]) for state in states])
    joined_names = (name for group in groups for name in group["params"])
    positions = {name: position for position, name in enumerate(joined_names)}
    return {**states[0], "state": _sorted(values, positions), "groups": groups}


def _join_groups(parts: Sequence[_Node], order: Mapping[str, int]) -> _Node:
    """Join one group of parameters, in the order of the complete model."""
    user_names = {
        name: user_name
        for part in parts
        for name, user_name in zip(part["params"], part.get("param_names", part["params"]), strict=True)
    }
    joined = {**parts[0], "params": sorted(user_names, key=lambda name: order[name])}
    if "param_names" in parts[0]:
        joined["param_names"] = [user_names[name] for name in joined["params"]]
    return joined


def _union(parts: Sequence[_Node]) -> _Node:
    """Merge dicts; the first dict with a key determines its value."""
    return {name: value for part in reversed(parts) for name, value in part.items()}


def _sorted(values: _Node, order: Mapping[str, int]) -> _Node:
    return dict(sorted(values.items(), key=lambda item: order.get(item[0], len(order))))


def remove_other_stages(objects: Iterable[Stored], names: Names) -> None:
    """Remove from the states of models and optimizers what other stages have. Writes into the states.

    Args:
        objects: Of the tree to load into, with their states.
        names: Of that tree.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    if not names.elsewhere:
        return
    # This rank's names too: the last part of a name identifies a parameter only if it is unique among all.
    known = KnownNames({**dict.fromkeys(names.elsewhere, 1), **dict.fromkeys(names.by_identity.values(), 0)})
    for stored in objects:
        state = stored.node
        if not isinstance(state, dict):
            continue
        if isinstance(stored.thing, nn.Module):
            inner = inner_of(stored.thing)
            whole = whole_of(inner)
            for name in () if whole is None else whole.tensors.keys() - inner.state_dict().keys():
                state.pop(name, None)
        elif is_named_optimizer(stored):
            for name in [name for name in state["state"] if known.find(name) == 1]:
                del state["state"][name]
            for group in state["groups"]:
                group["params"] = [name for name in group.get("params", ()) if known.find(name) != 1]
