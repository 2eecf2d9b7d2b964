"""Read folders that Hugging Face Accelerate writes, as trees with names.

Accelerate numbers what it saves in the order of preparation, and writes most of it as pickles. They are read
as data (see ``torch_file``): nothing in them is run.
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
from accelfn.checkpoint.torch_file import read_torch_file
from accelfn.checkpoint.weights import read_weights
from accelfn.context.config import GradScalerKwargs
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.training import ScalerState

_NUMBER, _FROM_0 = r"(?:_([1-9]\d*))?", r"_(0|[1-9]\d*)"
KINDS = MappingProxyType(
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
"""What a folder may have several of, and the names of its files; of folders with a slash behind them."""

ALWAYS_NUMBERED = "custom"
_RANDOM = rf"random_states{_FROM_0}\.pkl"
_BY_RANK = r"(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin"
_DEEPSPEED = ("*mp_rank_*", "*zero_pp_rank_*", "*/*mp_rank_*", "*/*zero_pp_rank_*")
_DEVICE_SEED = re.compile(r"torch_([a-z]+)_manual_seed")
_SCALER_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")


class AccelerateFolder(NamedTuple):
    """What a folder holds.

    Attributes:
        tree: As :func:`read_accelerate` returns it.
        notes: What isn't in the tree and has to be known, in whole sentences.
    """

    tree: dict[str, Any]
    notes: tuple[str, ...]


def read_accelerate(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder that Accelerate 1.x wrote with ``save_state``, or ``accelfn`` with ``write_accelerate``.

    Models are read from safetensors, ``torch.save`` or FSDP's full or sharded layout, whole or in shards with
    an index; all tensors are on the CPU. Nothing that a file asks for is imported or run: only containers,
    plain values, tensors and arrays come out.

    Ranks: local. All processes' random states are read.

    Args:
        directory: The folder. It isn't changed, and files that Accelerate doesn't write are left alone.

    Returns:
        A tree, with what is there of these:

        - ``model``, ``model_1``, ...: the state dict; of tied weights as the file has them;
        - ``optimizer``, ...: ``{"state": {parameter: {...}}, "groups": [{"params": [parameters], ...}]}``. A
          parameter goes by its name where the file has names (FSDP does); else ``"#3"`` is the fourth
          parameter of the optimizer, which is found when an optimizer loads the state;
        - ``scheduler``, ``sampler``, ``loader``, ...; ``custom_0``, ...: the state of each;
        - ``scaler``: an :class:`accelfn.training.ScalerState`;
        - ``random``: by rank the state of its generators, None for a rank that has no file here;
        - ``step``: the number of steps that Accelerate counted.

    Raises:
        NoCheckpointError: No such folder, or nothing in it that Accelerate writes.
        DamagedCheckpointError: A file is truncated or isn't what its name says.
        CheckpointError: A file holds more than data; one of several models or optimizers is missing, or is
            there in two forms; or the folder has a layout that only the program that wrote it can put
            together.
    """
    return read_folder(Path(directory)).tree


def read_folder(folder: Path, kinds: Collection[str] = (*KINDS, "scaler", "random")) -> AccelerateFolder:
    """Read what a folder has of some kinds, as :func:`read_accelerate` does."""
    if not folder.is_dir():
        raise NoCheckpointError(
            f"read_accelerate: {folder} is {'a file' if folder.exists() else 'not there'}. Pass the folder "
            "that save_state of Accelerate wrote."
        )
    _refuse_foreign_layouts(folder)
    tree: dict[str, Any] = {}
    notes: list[str] = []
    for kind in KINDS:
        for number, path in _numbered(folder, kind).items() if kind in kinds else ():
            tree[f"{kind}_{number}" if number or kind == ALWAYS_NUMBERED else kind] = _read(kind, path)
    models = {name: value for name, value in tree.items() if name.startswith("model")}
    for name in [name for name in tree if name.startswith("optimizer")]:
        tree[name] = _named_optimizer(tree[name], name.replace("optimizer", "model"), models)
    if "scaler" in kinds and (folder / "scaler.pt").is_file():
        scaler = _read_dict(folder / "scaler.pt")
        if scaler:  # empty where the scaler was disabled
            tree["scaler"] = _scaler_state(scaler)
        usual = {one: getattr(GradScalerKwargs(), one) for one in _SCALER_OPTIONS}
        other = [f"{one}={scaler[one]!r}" for one in usual if scaler.get(one, usual[one]) != usual[one]]
        if other:
            notes.append(f"The loss scaler had other options: pass GradScalerKwargs({', '.join(other)}).")
    if "random" in kinds:
        tree.update(_read_random(folder))
    if not tree:
        raise NoCheckpointError(
            f"read_accelerate: {folder} holds nothing that Accelerate writes (model.safetensors, "
            "optimizer.bin, random_states_0.pkl and so on). Pass the folder that save_state wrote."
        )
    return AccelerateFolder(tree, tuple(notes))


def is_accelerate(folder: Path) -> bool:
    """Whether a folder has anything in it that Accelerate writes.

    Raises:
        CheckpointError: It has a layout that only the program that wrote it can put together.
    """
    if not folder.is_dir():
        return False
    _refuse_foreign_layouts(folder)
    return any(_matching(folder, one) for one in (*KINDS.values(), _RANDOM, r"scaler\.pt"))


def _refuse_foreign_layouts(folder: Path) -> None:
    by_rank = sorted(path.name for path in folder.iterdir() if re.fullmatch(_BY_RANK, path.name))
    if by_rank:
        raise CheckpointError(
            f"read_accelerate: {by_rank[0]} holds one process's part of an FSDP model, and how the parts fit "
            "together isn't in the file. Load the folder with the program that wrote it and save it again "
            "with the state dict type FULL_STATE_DICT or SHARDED_STATE_DICT."
        )
    found = next((path for pattern in _DEEPSPEED for path in folder.glob(pattern)), None)
    if found is not None:
        raise CheckpointError(
            f"read_accelerate: {found.relative_to(folder)} is part of a checkpoint of DeepSpeed or "
            "Megatron-LM. Put its weights together with that package's own tool (zero_to_fp32.py for "
            "DeepSpeed), and read the result."
        )


def _matching(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(pattern, f"{path.name}{'/' * path.is_dir()}"), path) for path in folder.iterdir())
    return sorted((int(next(filter(None, match.groups()), 0)), path) for match, path in found if match)


def _numbered(folder: Path, kind: str) -> dict[int, Path]:
    """Find the files of one kind by their number. None may be missing, and none there in two forms."""
    found: dict[int, Path] = {}
    for number, path in _matching(folder, KINDS[kind]):
        if number in found:
            raise CheckpointError(
                f"read_accelerate: {found[number].name} and {path.name} are both {kind} {number}, of "
                "different saves, and nothing says which is the newer one. Move one of them away."
            )
        if number != len(found):
            raise CheckpointError(
                f"read_accelerate: {path.name} is there, but no {kind} {len(found)}. The folder isn't whole: "
                "copy the missing file into it."
            )
        found[number] = path
    return found


def _read(kind: str, path: Path) -> Any:
    if kind == "model":
        held = read_sharded_folder(path, "model") if path.is_dir() else read_weights(path)
        others = [name for name, one in held.items() if not isinstance(cast("object", one), torch.Tensor)]
        if others:
            raise CheckpointError(
                f"read_accelerate: {', '.join(others[:5])} in {path.name} is no tensor, and a model's "
                "weights here are tensors only. Let get_extra_state return a tensor, and save again."
            )
        plain = {name.replace("_orig_mod.", ""): one for name, one in held.items()}  # of torch.compile
        return plain if len(plain) == len(held) else held
    if kind == "optimizer":
        state = read_sharded_folder(path, "optimizer") if path.is_dir() else _read_dict(path)
        if not isinstance(state.get("state"), dict) or not isinstance(state.get("param_groups"), list):
            raise DamagedCheckpointError(
                f"{path.name} is no optimizer's state dict: it has no state and param_groups.", path.name
            )
        return state
    return _read_dict(path) if kind == "scheduler" else read_torch_file(path)


def _read_dict(path: Path) -> dict[str, Any]:
    read = read_torch_file(path)
    if not isinstance(read, dict):
        raise DamagedCheckpointError(f"{path.name} is no state dict, but {type(read).__name__}.", path.name)
    return cast("dict[str, Any]", read)


def _named_optimizer(
    state: Mapping[str, Any], model: str, models: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Name an optimizer's parameters: as the file does, with the model in front of it, or by number."""
    groups = cast("list[dict[str, Any]]", state["param_groups"])
    called: dict[Any, str] = {}
    for group in groups:
        for key, name in zip(group["params"], group.get("param_names", group["params"]), strict=True):
            called[key] = f"#{name}" if isinstance(name, int) else name
    having = [one for one, held in models.items() if all(name in held for name in called.values())]
    # FSDP saves the optimizer with a number together with the model of that number.
    owner = model if model in having else having[0] if len(having) == 1 else ""
    if owner:
        called = {key: f"{owner}/{name}" for key, name in called.items()}
    lost = [key for key in state["state"] if key not in called]
    if lost:
        raise CheckpointError(
            f"read_accelerate: an optimizer has a state for {lost[0]!r}, which no group has."
        )
    named = [
        {
            "params": [called[key] for key in group["params"]],
            **{option: value for option, value in group.items() if option not in ("params", "param_names")},
        }
        for group in groups
    ]
    others = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {
        "state": {called[key]: value for key, value in state["state"].items()},
        "groups": named,
        **({"others": others} if others else {}),
    }


def _scaler_state(state: Mapping[str, Any]) -> ScalerState:
    return ScalerState(
        scale=torch.tensor(float(state["scale"]), dtype=torch.float32),
        growth_tracker=torch.tensor(int(state["_growth_tracker"]), dtype=torch.int32),
        found_inf=torch.zeros((), dtype=torch.float32),
        num_skipped=torch.zeros((), dtype=torch.int64),
    )


def _read_random(folder: Path) -> dict[str, Any]:
    """Read the states of all ranks, as ``random_states`` returns them, and the step that is beside them."""
    found = {number: _read_dict(path) for number, path in _matching(folder, _RANDOM)}
    if not found:
        return {}
    size = max(found) + 1
    steps = [state["step"] for state in found.values() if "step" in state]
    states = [_random_state(found[rank], rank, size) if rank in found else None for rank in range(size)]
    return {"random": states, **({"step": max(steps)} if steps else {})}


def _random_state(state: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if state.get("random_state") is not None:
        version, numbers, gauss = state["random_state"]
        own["python"] = {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss}
    own["torch"] = state["torch_manual_seed"]
    kind, numbers, place, has_gauss, gauss = state.get("numpy_random_seed") or ("", (), 0, 0, 0.0)
    if kind == "MT19937":
        # NumPy's numbers don't fit int32.
        array = torch.tensor([*map(int, numbers), int(place)])
        own["numpy"] = {"numbers": array, "gauss": float(gauss) if has_gauss else None}
    for key, value in state.items():
        device = _DEVICE_SEED.fullmatch(key)
        if device and value:
            # Each process has the generators of all devices there; of several ranks each has its own here.
            own[device[1]] = list(value) if size == 1 else [value[rank % len(value)]]
    return own
