"""Models whose stages are on different ranks: a checkpoint has the whole model, and each rank its part of it.

When saving, each rank's document has its own stages alone, and those of the ranks along "pp" are joined. When
loading, what other ranks have is left out of the document before it is compared with what is here. So any
layout's checkpoint fits any other, and the rank that has a parameter is the one that checks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import nn

from accelfn.checkpoint.document.compare import Stored
from accelfn.checkpoint.document.nodes import below, children_of, step
from accelfn.checkpoint.manifest import Json
from accelfn.checkpoint.objects import (
    KnownNames,
    Names,
    inner_of,
    is_named_optimizer,
)
from accelfn.errors import CheckpointError
from accelfn.parallel.parameters import WholeModel, whole_of

_Node = dict[str, Any]


def first_names(staged: Mapping[str, WholeModel | None], stored: Iterable[str]) -> dict[str, str]:
    """Return what to call tied weights whose first name is on another stage, by the names they have. Pure.

    Args:
        staged: Models by their paths.
        stored: Names of the tensors of this rank.
    """
    own = frozenset(stored)
    names = {
        below(path, name): below(path, first)
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
) -> None:
    """Join what the ranks along "pp" have of models and optimizers. Writes into ``documents``.

    Args:
        documents: Of all ranks, in rank order.
        groups: The ranks along "pp", for each place on the other axes.
        staged: What each model was as a whole, by its path; None for an optimizer.
        order: Places of parameters in the whole models, by name.

    Raises:
        CheckpointError: An optimizer has parameters of no model in the tree.
    """
    for group in groups:
        found = [dict(_objects(documents[rank])) for rank in group]
        for path, whole in staged.items():
            nodes = [objects[path] for objects in found]
            states: list[_Node] = [node["state"] for node in nodes]
            if all(state == states[0] for state in states):
                continue  # every stage has all of it
            joined = _join_optimizers(path, states, order) if whole is None else _join_models(states, whole)
            for node in nodes:
                node["state"] = joined


def _objects(node: Json, path: str = "") -> Iterator[tuple[str, _Node]]:
    """Return the nodes of objects, by their paths."""
    if isinstance(node, dict) and node.get("$") == "object":
        yield path[1:], node
        return
    children = children_of(node, path)
    for key, child in children or ():
        yield from _objects(child, step(path, key))


def _join_models(states: Sequence[_Node], whole: WholeModel) -> _Node:
    joined = _union(states)
    for name, first in whole.first.items():
        if name in joined and first in joined:
            joined[name] = joined[first]
    return _sorted(joined, {name: place for place, name in enumerate(whole.tensors)})


def _join_optimizers(path: str, states: Sequence[_Node], order: Mapping[str, int]) -> _Node:
    every = [cast("list[_Node]", state["groups"]) for state in states]
    sizes = [len(groups) for groups in every]
    if len(set(sizes)) > 1:
        raise CheckpointError(
            f"save_state: {path or 'tree'} is an optimizer with {sizes} groups on the stages of a pipeline. "
            "Make it with the same groups on all ranks."
        )
    names = [name for groups in every for group in groups for name in group["params"]]
    unknown = [name for name in names if name not in order]
    if unknown:
        raise CheckpointError(
            f"save_state: {path or 'tree'} is an optimizer of which each stage of a pipeline has a part, and "
            f"{', '.join(unknown[:4])} of it are parameters of no pipelined model in the tree. Save it in "
            "one tree with its model."
        )
    groups = [_join_groups(parts, order) for parts in zip(*every, strict=True)]
    values = _union([cast("_Node", state["state"]) for state in states])
    stepped = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
    return {**states[0], "state": _sorted(values, stepped), "groups": groups}


def _join_groups(parts: Sequence[_Node], order: Mapping[str, int]) -> _Node:
    """Join one group of parameters, in the order of the whole model."""
    users = {
        name: user
        for part in parts
        for name, user in zip(part["params"], part.get("param_names", part["params"]), strict=True)
    }
    joined = {**parts[0], "params": sorted(users, key=lambda name: order[name])}
    if "param_names" in parts[0]:
        joined["param_names"] = [users[name] for name in joined["params"]]
    return joined


def _union(parts: Sequence[_Node]) -> _Node:
    """Join dicts; what several have is that of the first."""
    return {name: value for part in reversed(parts) for name, value in part.items()}


def _sorted(values: _Node, order: Mapping[str, int]) -> _Node:
    last = len(order)
    return dict(sorted(values.items(), key=lambda item: order.get(item[0], last)))


def leave_other_stages(objects: Iterable[Stored], names: Names) -> None:
    """Leave out of the states of models and optimizers what is on other stages. Writes into the states.

    Args:
        objects: Of the tree to load into, with their states.
        names: Of that tree.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    if not names.elsewhere:
        return
    # With those that are here: an end of a name that both have says nothing.
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
