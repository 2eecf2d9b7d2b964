"""Read and write whole trees as programs of torch save them with ``torch.distributed.checkpoint`` (DCP).

Such a tree has models and optimizers by the names of their parameters, as
``torch.distributed.checkpoint.state_dict`` returns them: a model is its state dict, an optimizer is
``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``. torchtitan stores the same in
another form: the entries of the model's state dict are at the top, and an optimizer is flattened to
``{"state.<name>.<key>": ..., "param_groups.<name>.<option>": ...}``. Both are read; the first one is written.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from accelfn.checkpoint.accelerate import named_optimizer
from accelfn.checkpoint.document.nodes import parts_of
from accelfn.checkpoint.model_files import staging
from accelfn.checkpoint.sharded_folder import MODELS, OPTIMIZERS, EntryPath, read_sharded_tree
from accelfn.checkpoint.stand_ins import Optimizer, State, states_in
from accelfn.errors import CheckpointError
from accelfn.storage.disk import naming
from accelfn.storage.object_store import disk_at
from accelfn.training import StepState

_STATE, _GROUPS = "state.", "param_groups."

# --- reading -------------------------------------------------------------------------------------


def read_dcp(directory: Path, choose: Callable[[Sequence[str]], Collection[str]]) -> dict[str, Any]:
    """Read a tree, in dicts of stand-ins and plain values, with complete tensors on the CPU.

    Tensors at the top, beside no model under a key of its own, are those of ``model``; a folder of an
    optimizer alone is that of ``optimizer``.

    Args:
        directory: The folder with ``.metadata`` in it.
        choose: Gets the names of the parts of the tree, and returns those that are to be read.

    Raises:
        CheckpointError: A file contains more than data, or is compressed or encrypted.
        DamagedCheckpointError: A file is missing, truncated, or inconsistent with the table.
    """

    def arrange(tensors: Sequence[EntryPath], others: Sequence[EntryPath]) -> Mapping[EntryPath, EntryPath]:
        places = dict(_places(tensors, others))
        chosen = choose([*dict.fromkeys(place[0] for place in places.values())])
        return {path: place for path, place in places.items() if place[0] in chosen}

    tree = {name: _with_stand_ins(value) for name, value in read_sharded_tree(directory, arrange).items()}
    states = list(states_in(tree))
    models = {path: part.state_dict() for path, part in states if not isinstance(part, Optimizer)}
    # A model comes before others with the same names, such as its average.
    paths = sorted(models, key=lambda path: path.rpartition("/")[2] not in MODELS)
    for _, optimizer in states:
        if isinstance(optimizer, Optimizer):
            state = optimizer.state_dict()
            names = {name for group in state["param_groups"] for name in group["params"]}
            model = next((path for path in paths if names and names <= models[path].keys()), "")
            optimizer.load_state_dict(named_optimizer(state, model, models.get(model, {})))
    return tree


def _places(
    tensors: Sequence[EntryPath], others: Sequence[EntryPath]
) -> Iterator[tuple[EntryPath, EntryPath]]:
    """Yield the path of each entry in the folder, and that in the tree."""
    tops = [*dict.fromkeys(path[0] for path in (*tensors, *others))]
    if _are_of_optimizer(tops):
        yield from ((path, ("optimizer", *path)) for path in (*tensors, *others))
        return
    names = [path[0] for path in tensors if len(path) == 1]
    beside = {path[0] for path in tensors if len(path) > 1 and not OPTIMIZERS.fullmatch(path[0])}
    # Only names of parameters have dots. Without one, tensors beside a model under any key are values.
    is_named = any("." in name for name in names) and not beside & {*MODELS}
    is_flat = bool(names) and (is_named or not beside)
    for path in tensors:
        yield path, ("model", *path) if is_flat and len(path) == 1 else path
    for path in others:
        is_extra = len(path) == 1 and path[0].rpartition(".")[2] == "_extra_state"
        yield path, ("model", *path) if is_flat and is_extra else path


def _are_of_optimizer(keys: Collection[Any]) -> bool:
    """Whether these are the keys of an optimizer's state, in either form."""
    flat = [key for key in keys if str(key).startswith((_STATE, _GROUPS))]
    return "param_groups" in keys or (
        len(flat) == len(keys) and any(str(key).startswith(_GROUPS) for key in keys)
    )


def _with_stand_ins(value: Any) -> Any:
    """Return the state of an object as a stand-in; a dict or list of objects as one of stand-ins."""
    if isinstance(value, list):
        some = cast("list[Any]", value)
        return [_with_stand_ins(one) for one in some] if all(isinstance(one, dict) for one in some) else some
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    if _are_of_optimizer(entries):
        return Optimizer(_nested(entries))
    if entries.keys() == {*StepState._fields}:  # written as a dict, see torch_form
        return StepState(**entries)
    is_outer = any(
        isinstance(child, dict)
        and (
            _are_of_optimizer(cast("dict[str, Any]", child)) or (name in MODELS and _has_tensors_alone(child))
        )
        for name, child in entries.items()
    )
    # Of several models or schedules.
    is_outer = is_outer or all(isinstance(child, dict) and child != {} for child in entries.values())
    return {name: _with_stand_ins(child) for name, child in entries.items()} if is_outer else State(entries)


def _has_tensors_alone(state: Any) -> bool:
    values = cast("dict[str, Any]", state).values()
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def _nested(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in torch's form, if it is flattened or has lost the kind of its keys."""
    if "param_groups" not in state:
        return _unflattened(state)
    # The folder has texts in place of numbers, and nothing in place of an empty dict.
    groups = cast("list[dict[str, Any]]", state["param_groups"])
    numbers = {str(name): name for group in groups for name in group["params"]}
    of_parameters = cast("dict[str, Any]", state.get("state", {}))
    return {**state, "state": {numbers.get(name, name): value for name, value in of_parameters.items()}}


def _unflattened(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flattened state in torch's form. Parameters with the same options become one group."""
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(_GROUPS):
            name, _, option = key.removeprefix(_GROUPS).rpartition(".")
            options.setdefault(name, {})[option] = value
    state: dict[str, Any] = {}
    for key, value in flat.items():
        if key.startswith(_STATE):
            parts = key.removeprefix(_STATE).split(".")
            # Names have dots, and so do keys of nested states: the parameter has the longest name that fits.
            ends = [end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in options]
            end = ends[0] if ends else len(parts) - 1
            inner = state.setdefault(".".join(parts[:end]), {})
            for part in parts[end:-1]:
                inner = inner.setdefault(part, {})
            inner[parts[-1]] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, own in options.items():
        # An optimizer that was made with names has those of the whole group among its options.
        rest = {option: value for option, value in own.items() if option != "param_names"}
        groups.setdefault(_text(own), {"params": [], **rest})["params"].append(name)
    return {"state": state, "param_groups": [*groups.values()]}


def _text(options: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal options, with all digits of tensors."""
    values: dict[str, Any] = {
        name: (str(value.dtype), cast("Any", value).tolist()) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    return repr(sorted(values.items()))


# --- writing -------------------------------------------------------------------------------------


def write_dcp(directory: Path, tree: Mapping[str, Any]) -> None:
    """Write a tree to a new directory, which appears complete, by one rename.

    Ranks: local; one process writes.

    Args:
        directory: On a disk; must not exist, or be empty.
        tree: From :func:`torch_form`, or the state dict of a model.

    Raises:
        CheckpointError: torch refuses the tree.
        OSError: The directory can't be written. Nothing is left behind.
    """
    # Not at the top: few programs need it.
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    disk = disk_at(directory)
    with staging(directory) as stage:
        with naming(os.fspath(directory)):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*single process", UserWarning)
                    # Complete tensors, which are written alone even if the program has a process group.
                    dcp.save(dict(tree), storage_writer=dcp.FileSystemWriter(stage), no_dist=True)
            except dcp.CheckpointException as error:  # not an Exception
                raise _cause_of(error.failures[0][0]) from None
            disk.sync_folder(os.fspath(stage))
        disk.rename(os.fspath(stage), os.fspath(directory))


def _cause_of(error: BaseException) -> BaseException:
    """Return the error to raise for one of torch's, whose writer of archives hides errors of the disk."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    if not isinstance(error, Exception):  # such as KeyboardInterrupt
        return error
    refusal = CheckpointError(
        f"torch.distributed.checkpoint can't store the tree: {error}. Rename or leave out that part."
    )
    refusal.__cause__ = error
    return refusal


def torch_form(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of stand-ins and values as torch's programs save it: dicts, lists and plain values."""
    states = dict(states_in(tree))
    models = [path for path, part in states.items() if not isinstance(part, Optimizer)]
    return _torch_form(tree, models)


def _torch_form(value: Any, models: Sequence[str]) -> Any:
    if isinstance(value, Optimizer):
        return _optimizer(value.state_dict(), models)
    if isinstance(value, State):
        return _torch_form(value.state_dict(), models)
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, pathlib.PurePath):
        return str(value)
    parts = parts_of(value)
    if parts is None or parts.kind == "node":
        return value
    children = [_torch_form(child, models) for child in parts.children]
    if isinstance(value, list):
        return children
    if parts.kind == "tuple":
        return tuple(children)
    return dict(zip(parts.keys, children, strict=True))


def _optimizer(state: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state with the names that its parameters have in their model."""
    groups = cast("list[dict[str, Any]]", state["groups"])
    names = [name for group in groups for name in group["params"]]
    prefixes = [f"{path}/" for path in models]
    prefix = next((one for one in prefixes if all(name.startswith(one) for name in names)), "")
    is_numbered = is_unnamed(state)

    def name_of(name: Any) -> Any:
        if not isinstance(name, str):
            return name
        if is_numbered:
            return int(name.removeprefix("#"))
        # Without one model for all, as a module would name them that has the models as parts.
        parts = name.removeprefix(prefix).split("/")
        return ".".join(part.replace("~1", "/").replace("~0", "~") for part in parts)

    return {
        "state": {str(name_of(name)): _torch_form(value, ()) for name, value in state["state"].items()},
        "param_groups": [
            {**_torch_form(group, ()), "params": [name_of(name) for name in group["params"]]}
            for group in groups
        ],
        **_torch_form(state.get("others", {}), ()),
    }


def is_unnamed(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state has numbers in place of all names."""
    names = [name for group in state["groups"] for name in group["params"]]
    return bool(names) and all(name.startswith("#") for name in names)


def lost_keys(tree: Any, path: str = "") -> Iterator[str]:
    """List the dicts with keys that aren't texts; a DCP folder has their texts instead."""
    if isinstance(tree, dict):
        items = cast("dict[Any, Any]", tree)
        if not all(isinstance(key, str) for key in items):
            yield path
        for key, value in items.items():
            yield from lost_keys(value, f"{path}/{key}".lstrip("/"))


def numbered_keys(tree: Any, path: str = "") -> Iterator[str]:
    """List the dicts of plain values whose keys are texts of numbers, and may have been numbers."""
    state = tree.state_dict() if type(tree) is State else tree
    if isinstance(state, dict):
        items = cast("dict[Any, Any]", state)
        if items and not _has_tensors_alone(items) and all(str(key).isdecimal() for key in items):
            yield path
        for key, value in items.items():
            yield from numbered_keys(value, f"{path}/{key}".lstrip("/"))
