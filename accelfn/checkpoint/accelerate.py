"""Read the folders of Hugging Face Accelerate's ``save_state``, as trees with names.

Accelerate numbers the objects that it saves in the order of preparation, and pickles most of them. The
pickles are read as data (see ``torch_file``): no code in them runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.sharded_folder import read_sharded_folder
from accelfn.config import GradScalerKwargs
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.training import StepState
from accelfn.weights.open import read_weights
from accelfn.weights.torch_file import read_torch_file

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
_RANDOM = rf"random_states{_FROM_0}\.pkl"
_SHARD_OF_RANK = r"(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin"
# Files of other programs, in the folder or in one inside of it.
_DEEPSPEED, _MEGATRON = r"(.*_)?mp_rank_\d+_(model|optim)_states\.pt", r"model_optim_rng\.pt"
_DEVICE_SEED = re.compile(r"torch_([a-z]+)_manual_seed")
_SCALER_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")


def _part_name(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number or kind == "custom" else kind


class AccelerateFolder(NamedTuple):
    """The content of a folder.

    Attributes:
        tree: As :func:`read_accelerate` returns it.
        notes: What the tree can't hold but the user should know, in complete sentences.
    """

    tree: dict[str, Any]
    notes: tuple[str, ...]


def read_accelerate(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder that Accelerate 1.x wrote with ``save_state``.

    Models are read from safetensors, ``torch.save``, or FSDP's full or sharded layout, from one file or from
    several with an index. All tensors are on the CPU. No code from the files runs, and no module that they
    name is imported: the result contains only containers, plain values, tensors and arrays.

    Ranks: local. Random states of all ranks are read.

    Args:
        directory: The folder; it isn't changed. Files that Accelerate doesn't write are ignored.

    Returns:
        A tree with these parts, if the folder has them:

        - ``model``, ``model_1``, ...: state dicts; of tied weights the names in the file;
        - ``optimizer``, ...: ``{"state": {parameter: {...}}, "groups": [{"params": [parameters], ...}]}``. A
          parameter has its name if the file has names (as from FSDP); otherwise ``"#3"`` is the fourth
          parameter of the optimizer, resolved when an optimizer loads the state;
        - ``scheduler``, ``sampler``, ``loader``, ..., ``custom_0``, ...: the state of each;
        - ``scaler``: an :class:`accelfn.training.StepState`;
        - ``random``: the state of the generators by rank, None for a rank without a file;
        - ``step``: the number of steps that Accelerate counted.

    Raises:
        NoCheckpointError: There is no such folder, or it contains no file of Accelerate's.
        DamagedCheckpointError: A file is truncated, or its content doesn't match its name.
        CheckpointError: A file contains more than data; a model or optimizer in a sequence is missing, or is
            stored twice; or only the program that wrote the folder can assemble its layout.
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
    for kind in (kind for kind in _KINDS if kind in kinds):
        for number, path in _numbered(folder, kind).items():
            tree[_part_name(kind, number)] = _read(kind, path)
    for name in [name for name in tree if name.startswith("optimizer")]:
        model = name.replace("optimizer", "model")  # FSDP gives optimizer and model the same number
        tree[name] = named_optimizer(tree[name], model, tree.get(model, {}))
    if "scaler" in kinds and (folder / "scaler.pt").is_file():
        state = _read_dict(folder / "scaler.pt")
        if state:  # empty if the scaler was disabled
            tree["scaler"] = StepState(
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
    return any(_matching(folder, pattern) for pattern in files)


def _refuse_foreign_layouts(folder: Path) -> None:
    shards = sorted(path.name for path in folder.iterdir() if re.fullmatch(_SHARD_OF_RANK, path.name))
    if shards:
        raise CheckpointError(
            f"read_accelerate: {shards[0]} holds one process's shard of an FSDP model, without the layout of "
            "the shards. Load the folder with the program that wrote it, and save it again with the state "
            "dict type FULL_STATE_DICT or SHARDED_STATE_DICT."
        )
    for path in sorted((*folder.glob("*.pt"), *folder.glob("*/*.pt"))):
        if re.fullmatch(_DEEPSPEED, path.name):
            raise CheckpointError(
                f"read_accelerate: DeepSpeed has written {path.relative_to(folder)}. Let the script that it "
                "puts into its folder, zero_to_fp32.py, write the weights, and load those with load_model."
            )
        if re.fullmatch(_MEGATRON, path.name):
            raise CheckpointError(
                f"read_accelerate: {path.relative_to(folder)} is part of a checkpoint of Megatron-LM, which "
                "only Megatron-LM can assemble. Convert it there, and read the result."
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


def named_optimizer(state: Mapping[str, Any], model: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Refer to an optimizer's parameters by the name in the file, with its model as prefix, or by number.

    Args:
        state: As torch has it: ``{"state": {...}, "param_groups": [...]}``.
        model: Path of the model in the tree.
        tensors: Of the model, by name. The prefix is left out unless it has all of the parameters.

    Returns:
        The state as :func:`accelfn.save_state` stores it.

    Raises:
        CheckpointError: A parameter with a state is in none of the groups.
    """
    groups = cast("list[dict[str, Any]]", state["param_groups"])
    names: dict[Any, str] = {}
    for group in groups:
        for key, name in zip(group["params"], group.get("param_names", group["params"]), strict=True):
            names[key] = f"#{name}" if isinstance(name, int) else name
    if all(name in tensors for name in names.values()):
        names = {key: f"{model}/{name}" for key, name in names.items()}
    unknown = [key for key in state["state"] if key not in names]
    if unknown:
        raise CheckpointError(
            f"An optimizer has a state for parameter {unknown[0]!r}, which is in none of its groups. Save it "
            "again with the program that wrote it, or leave the optimizer out."
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
