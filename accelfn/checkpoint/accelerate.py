"""Read and write the folders of Hugging Face Accelerate's ``save_state``, as trees with names.

Accelerate numbers the objects that it saves in the order of preparation, and pickles most of them. The
pickles are read as data (see ``torch_file``): no code in them runs.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.deepspeed import find_deepspeed, read_deepspeed
from accelfn.checkpoint.sharded_folder import read_sharded_folder
from accelfn.checkpoint.torch_file import read_torch_file
from accelfn.checkpoint.weights import read_weights
from accelfn.checkpoint.weights_files import compact, staging, write_files, write_pickled
from accelfn.checkpoint.weights_index import WeightNames, plan_weights
from accelfn.context.config import GradScalerKwargs
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.training import ScalerState

_NUMBER, _FROM_0 = r"(?:_([1-9]\d*))?", r"_(0|[1-9]\d*)"
# Kinds of which a folder may contain several, and patterns of their files; folders end in a slash.
_KINDS = MappingProxyType(
    {
        "model": rf"(?:model{_NUMBER}\.safetensors|pytorch_model{_NUMBER}\.bin)(?:\.index\.json)?"
        rf"|pytorch_model_fsdp{_NUMBER}\.bin|pytorch_model_fsdp{_FROM_0}/",
        "optimizer": rf"optimizer{_NUMBER}\.bin|optimizer{_FROM_0}/",
        "scheduler": rf"scheduler{_NUMBER}\.bin",
        "sampler": rf"sampler{_NUMBER}\.bin",
        "loader": rf"dl_state_dict{_NUMBER}\.bin",
        "custom": rf"custom_checkpoint{_FROM_0}\.pkl",
    }
)
_FILE_STEMS = MappingProxyType({"loader": "dl_state_dict", "custom": "custom_checkpoint"})
_RANDOM = rf"random_states{_FROM_0}\.pkl"
_SHARD_OF_RANK = r"(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin"
_DEVICE_SEED = re.compile(r"torch_([a-z]+)_manual_seed")
_SCALER_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)


def _part_name(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number or kind == "custom" else kind


# --- reading -------------------------------------------------------------------------------------


class AccelerateFolder(NamedTuple):
    """The content of a folder.

    Attributes:
        tree: As :func:`read_accelerate` returns it.
        notes: What the tree can't hold but the user should know, in complete sentences.
    """

    tree: dict[str, Any]
    notes: tuple[str, ...]


def read_accelerate(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder that Accelerate 1.x wrote with ``save_state``, or accelfn with ``write_accelerate``.

    Models are read from safetensors, ``torch.save``, or FSDP's full or sharded layout, from one file or from
    several with an index; and models with their optimizers from what DeepSpeed's ``save_checkpoint`` wrote,
    also without Accelerate, at any stage of ZeRO. All tensors are on the CPU. No code from the files runs,
    and no module that they name is imported: the result contains only containers, plain values, tensors and
    arrays.

    Ranks: local. Random states of all ranks are read.

    Args:
        directory: The folder; it isn't changed. Files that Accelerate doesn't write are ignored. Of several
            checkpoints of DeepSpeed, the one that the file ``latest`` names is read.

    Returns:
        A tree with these parts, if the folder has them:

        - ``model``, ``model_1``, ...: state dicts; of tied weights the names in the file;
        - ``optimizer``, ...: ``{"state": {parameter: {...}}, "groups": [{"params": [parameters], ...}]}``. A
          parameter has its name if the file has names (as from FSDP); otherwise ``"#3"`` is the fourth
          parameter of the optimizer, resolved when an optimizer loads the state;
        - ``scheduler``, ``sampler``, ``loader``, ..., ``custom_0``, ...: the state of each;
        - ``scaler``: an :class:`accelfn.training.ScalerState`;
        - ``random``: the state of the generators by rank, None for a rank without a file;
        - ``step``: the number of steps that Accelerate counted.

    Raises:
        NoCheckpointError: There is no such folder, or it contains no file of Accelerate's.
        DamagedCheckpointError: A file is truncated, or its content doesn't match its name.
        CheckpointError: A file contains more than data; a model or optimizer in a sequence is missing, or is
            stored twice; the file of one of DeepSpeed's ranks is missing; or only the program that wrote the
            folder can assemble its layout.
    """
    return read_folder(Path(directory)).tree


def read_folder(folder: Path, kinds: Collection[str] = (*_KINDS, "scaler", "random")) -> AccelerateFolder:
    """Read the parts of some kinds, as :func:`read_accelerate` does."""
    if not folder.is_dir():
        raise NoCheckpointError(
            f"read_accelerate: {folder} {'is a file' if folder.exists() else 'does not exist'}. Pass the "
            "folder that Accelerate's save_state wrote."
        )
    _refuse_foreign_layouts(folder)
    tree: dict[str, Any] = {}
    notes: list[str] = []
    engines = find_deepspeed(folder)
    for number, path in engines.items() if {"model", "optimizer"} & {*kinds} else ():
        state = read_deepspeed(path, "optimizer" in kinds)
        parts = {"model": state.model, "optimizer": state.optimizer, "scheduler": state.scheduler}
        for kind, value in parts.items():
            if kind in kinds and value is not None:
                tree[_part_name(kind, number)] = value
        notes += state.notes
    for kind in _KINDS:
        if kind not in kinds or (engines and kind in ("model", "optimizer")):
            continue
        for number, path in _numbered(folder, kind).items():
            tree[_part_name(kind, number)] = _read(kind, path)
    for name in [name for name in tree if name.startswith("optimizer")]:
        model = name.replace("optimizer", "model")
        tree[name] = _named_optimizer(tree[name], model, tree.get(model, {}))
    if "scaler" in kinds and (folder / "scaler.pt").is_file():
        state = _read_dict(folder / "scaler.pt")
        if state:  # empty if the scaler was disabled
            tree["scaler"] = ScalerState(
                scale=torch.tensor(float(state["scale"]), dtype=torch.float32),
                growth_tracker=torch.tensor(int(state["_growth_tracker"]), dtype=torch.int32),
                found_inf=torch.zeros((), dtype=torch.float32),
                num_skipped=torch.zeros((), dtype=torch.int64),
            )
        defaults = {option: getattr(GradScalerKwargs(), option) for option in _SCALER_OPTIONS}
        changed = [
            f"{option}={state[option]!r}"
            for option in defaults
            if state.get(option, defaults[option]) != defaults[option]
        ]
        if changed:
            notes.append(f"The loss scaler had other options: pass GradScalerKwargs({', '.join(changed)}).")
    if "random" in kinds:
        tree.update(_read_random(folder))
    if not tree:
        raise NoCheckpointError(
            f"read_accelerate: {folder} contains no file that Accelerate writes (model.safetensors, "
            "optimizer.bin, random_states_0.pkl and so on). Pass the folder that save_state wrote."
        )
    return AccelerateFolder(tree, tuple(notes))


def is_accelerate(folder: Path) -> bool:
    """Whether a folder contains files that Accelerate writes.

    Raises:
        CheckpointError: Only the program that wrote the folder can assemble its layout.
    """
    if not folder.is_dir():
        return False
    _refuse_foreign_layouts(folder)
    files = (*_KINDS.values(), _RANDOM, r"scaler\.pt")
    return bool(find_deepspeed(folder)) or any(_matching(folder, pattern) for pattern in files)


def _refuse_foreign_layouts(folder: Path) -> None:
    shards = sorted(path.name for path in folder.iterdir() if re.fullmatch(_SHARD_OF_RANK, path.name))
    if shards:
        raise CheckpointError(
            f"read_accelerate: {shards[0]} holds one process's shard of an FSDP model, without the layout of "
            "the shards. Load the folder with the program that wrote it, and save it again with the state "
            "dict type FULL_STATE_DICT or SHARDED_STATE_DICT."
        )


def _matching(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """List the files whose names match, with their numbers."""
    found = ((re.fullmatch(pattern, f"{path.name}{'/' * path.is_dir()}"), path) for path in folder.iterdir())
    return sorted((int(next(filter(None, match.groups()), 0)), path) for match, path in found if match)


def _numbered(folder: Path, kind: str) -> dict[int, Path]:
    """Find the files of one kind by number, and check that no number is missing or occurs twice."""
    found: dict[int, Path] = {}
    for number, path in _matching(folder, _KINDS[kind]):
        if number in found:
            raise CheckpointError(
                f"read_accelerate: {found[number].name} and {path.name} are both {kind} {number}, from "
                "different saves. Move the older one to another folder."
            )
        if number != len(found):
            raise CheckpointError(
                f"read_accelerate: the folder has {path.name}, but {kind} {len(found)} is missing. Copy the "
                "missing file into the folder."
            )
        found[number] = path
    return found


def _read(kind: str, path: Path) -> Any:
    if kind == "model":
        state = read_sharded_folder(path, "model") if path.is_dir() else read_weights(path)
        odd = [name for name, value in state.items() if not isinstance(cast("object", value), torch.Tensor)]
        if odd:
            raise CheckpointError(
                f"read_accelerate: {', '.join(odd[:5])} in {path.name} must be tensors. Let get_extra_state "
                "return a tensor, and save again."
            )
        return {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}  # of torch.compile
    if kind == "optimizer":
        state = read_sharded_folder(path, "optimizer") if path.is_dir() else _read_dict(path)
        if not isinstance(state.get("state"), dict) or not isinstance(state.get("param_groups"), list):
            raise DamagedCheckpointError(
                f"{path.name} is not the state dict of an optimizer: it has no state and param_groups.",
                path.name,
            )
        return state
    return _read_dict(path) if kind == "scheduler" else read_torch_file(path)


def _read_dict(path: Path) -> dict[str, Any]:
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise DamagedCheckpointError(
            f"{path.name} must hold a state dict, but holds {type(content).__name__}.", path.name
        )
    return cast("dict[str, Any]", content)


def _named_optimizer(state: Mapping[str, Any], model: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Refer to an optimizer's parameters by the name in the file, with its model as prefix, or by number."""
    groups = cast("list[dict[str, Any]]", state["param_groups"])
    names: dict[Any, str] = {}
    for group in groups:
        for key, name in zip(group["params"], group.get("param_names", group["params"]), strict=True):
            names[key] = f"#{name}" if isinstance(name, int) else name
    if all(name in tensors for name in names.values()):  # FSDP gives optimizer and model the same number
        names = {key: f"{model}/{name}" for key, name in names.items()}
    unknown = [key for key in state["state"] if key not in names]
    if unknown:
        raise CheckpointError(
            f"read_accelerate: an optimizer has a state for parameter {unknown[0]!r}, which is in none of "
            "its groups."
        )
    others = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {
        "state": {names[key]: value for key, value in state["state"].items()},
        "groups": [
            {"params": [names[key] for key in group["params"]]}
            | {option: value for option, value in group.items() if option not in ("params", "param_names")}
            for group in groups
        ],
        **({"others": others} if others else {}),
    }


def _read_random(folder: Path) -> dict[str, Any]:
    """Read the random states of all ranks, in the form of ``random_states``, and the step next to them."""
    by_rank = {rank: _read_dict(path) for rank, path in _matching(folder, _RANDOM)}
    if not by_rank:
        return {}
    size = max(by_rank) + 1
    steps = [state["step"] for state in by_rank.values() if "step" in state]
    states = [_random_state(by_rank[rank], rank, size) if rank in by_rank else None for rank in range(size)]
    return {"random": states, **({"step": max(steps)} if steps else {})}


def _random_state(theirs: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    if theirs.get("random_state") is not None:
        version, numbers, gauss = theirs["random_state"]
        ours["python"] = {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss}
    ours["torch"] = theirs["torch_manual_seed"]
    kind, numbers, position, has_gauss, gauss = theirs.get("numpy_random_seed") or ("", (), 0, 0, 0.0)
    if kind == "MT19937":
        # int64, because NumPy's numbers don't fit int32.
        array = torch.tensor([*map(int, numbers), int(position)])
        ours["numpy"] = {"numbers": array, "gauss": float(gauss) if has_gauss else None}
    for key, value in theirs.items():
        device = _DEVICE_SEED.fullmatch(key)
        if device and value:
            # Accelerate saves the generators of all devices on each rank; here each rank has its own.
            ours[device[1]] = list(value) if size == 1 else [value[rank % len(value)]]
    return ours


# --- writing -------------------------------------------------------------------------------------


def write_accelerate(
    directory: str | os.PathLike[str],
    tree: Mapping[str, Any],
    *,
    scaler: GradScalerKwargs | None = None,
) -> Path:
    """Write a folder that Accelerate 1.x loads with ``load_state``.

    Models are written as safetensors. Accelerate requires ``torch.save`` for the other files; they contain
    plain values and tensors only. The complete folder appears in one step, by a rename.

    Accelerate has to prepare its objects in the order of their numbers.

    Ranks: local; one rank writes everything.

    Args:
        directory: The new folder. Missing parent directories are made.
        tree: Any of the parts that :func:`read_accelerate` lists; it isn't changed. An optimizer's parameters
            are numbered in the order of its groups. The scaler's count of skipped steps isn't written,
            because Accelerate has none.
        scaler: Options of the loss scaler. None: the defaults.

    Returns:
        The folder.

    Raises:
        FileExistsError: ``directory`` exists, and isn't an empty folder.
        TypeError: ``tree`` contains a value that is not plain, a tensor or an array. The message has its
            path.
        ValueError: A part has an unknown name, or one in a sequence is missing; an optimizer has a state for
            a parameter in none of its groups; the scaler has unscaled gradients; or a tensor is sparse or on
            the meta device.
        OSError: The files can't be written. Nothing is left behind; the next call for the same directory
            removes files that a killed program left.
    """
    folder = Path(directory)
    parts = dict(tree)
    models: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for kind in _KINDS:
        for number in range(len(parts)):
            name = _part_name(kind, number)
            if name not in parts:
                break
            value = parts.pop(name)
            stem = name.replace(kind, _FILE_STEMS.get(kind, kind))
            if kind == "model":
                models[stem] = _portable(name, value)
            else:
                suffix = "pkl" if kind == "custom" else "bin"
                state = _numbered_optimizer(value) if kind == "optimizer" else value
                objects[f"{stem}.{suffix}"] = _portable(name, state)
    scaler_state, random, step = (parts.pop(name, None) for name in ("scaler", "random", "step"))
    if parts:
        raise ValueError(
            f"write_accelerate: a folder of Accelerate has no place for {', '.join(map(repr, parts))}. Parts "
            "are model, model_1, ..., optimizer, scheduler, sampler, loader, custom_0, scaler, random and "
            "step, without gaps in the numbers."
        )
    if step is not None and not random:
        raise ValueError("write_accelerate: Accelerate stores the step with the random states. Add random.")
    if scaler_state is not None:
        objects["scaler.pt"] = _scaler_dict(scaler_state, scaler or GradScalerKwargs())
    for rank, state in enumerate(random or ()):
        if state is not None:
            objects[f"random_states_{rank}.pkl"] = _random_dict(state, random, step)
    if folder.is_symlink() or folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise FileExistsError(f"write_accelerate: {folder} exists already. Pass a new folder, or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging(folder) as stage:
        for stem, tensors in models.items():
            names = WeightNames(stem, ".safetensors")
            write_files(stage, plan_weights(tensors, sys.maxsize, names), names, tensors)
        for name, value in objects.items():
            write_pickled(stage / name, value)
        os.replace(stage, folder)
    return folder


def _numbered_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    number_of: dict[Any, int] = {}
    groups: list[dict[str, Any]] = []
    for group in state["groups"]:
        for name in group["params"]:
            if name in number_of:
                raise ValueError(f"write_accelerate: the parameter {name} is in an optimizer's groups twice.")
            number_of[name] = len(number_of)
        options = {option: value for option, value in group.items() if option != "params"}
        groups.append({**options, "params": [number_of[name] for name in group["params"]]})
    unknown = [name for name in state["state"] if name not in number_of]
    if unknown:
        raise ValueError(
            f"write_accelerate: an optimizer has a state for {unknown[0]}, which is in none of its groups."
        )
    states = {number: state["state"][name] for name, number in number_of.items() if name in state["state"]}
    return {"state": states, "param_groups": groups, **state.get("others", {})}


def _scaler_dict(state: ScalerState, options: GradScalerKwargs) -> dict[str, Any]:
    if state.is_unscaled or state.weight is not None:
        raise ValueError(
            "write_accelerate: the scaler's gradients were unscaled for a step that hasn't happened. Save "
            "after optimizer_step."
        )
    values = {option: getattr(options, option) for option in _SCALER_OPTIONS}
    return {"scale": float(state.scale), **values, "_growth_tracker": int(state.growth_tracker)}


def _random_dict(ours: Mapping[str, Any], all_ranks: Sequence[Any], step: int | None) -> dict[str, Any]:
    """Return the states of a rank's generators in Accelerate's form."""
    theirs: dict[str, Any] = {} if step is None else {"step": step}
    python = ours["python"]
    theirs["random_state"] = (python["version"], tuple(python["numbers"].tolist()), python["gauss"])
    if "numpy" in ours:
        # Plain numbers, which set_state accepts too, so that no array has to be pickled.
        *numbers, position = ours["numpy"]["numbers"].tolist()
        gauss = ours["numpy"]["gauss"]
        theirs["numpy_random_seed"] = ("MT19937", numbers, position, int(gauss is not None), gauss or 0.0)
    theirs["torch_manual_seed"] = ours["torch"].clone()
    for device in [name for name, value in ours.items() if isinstance(value, list)]:
        # Accelerate saves the generators of all of the machine's devices on every rank.
        theirs[f"torch_{device}_manual_seed"] = [
            generator.clone()
            for state in all_ranks
            if state is not None
            for generator in state.get(device, ())
        ]
    return theirs


def _portable(path: str, value: Any) -> Any:
    """Copy a value, with compact tensors on the CPU; refuse what ``weights_only=True`` wouldn't read."""
    kind: Any = type(cast("object", value))
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(
                f"write_accelerate: {path} has no dense data ({value.layout}, on {value.device}). Load it or "
                "convert it with to_dense first."
            )
        if kind in (torch.Tensor, torch.nn.Parameter):
            return compact(value)
    elif kind in (dict, OrderedDict, Counter):
        items = cast("dict[Any, Any]", value)
        return cast("Any", kind)(
            {_portable(f"{path}: a key", key): _portable(f"{path}[{key!r}]", items[key]) for key in items}
        )
    elif kind in (list, tuple, set, frozenset):
        return cast("Any", kind)(_portable(f"{path}[{index}]", item) for index, item in enumerate(value))
    elif kind in _PLAIN or _is_plain_array(value):
        return value
    raise TypeError(
        f"write_accelerate: {path} is {kind.__module__}.{kind.__qualname__}, which Accelerate couldn't load. "
        "Save its content as numbers, texts, containers of them, or plain tensors (full_tensor() of a "
        "DTensor)."
    )


def _is_plain_array(value: Any) -> bool:
    """Whether a value is an array or scalar of NumPy without objects. Doesn't import NumPy."""
    numpy: Any = sys.modules.get("numpy")
    is_array = numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
    return is_array and value.dtype.kind in "biufcUS"
