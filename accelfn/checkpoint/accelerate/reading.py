"""Checkpoint folders that Hugging Face Accelerate writes: read them, and write ones that it loads.

Accelerate numbers what it saves in the order of preparation, and writes most of it as pickles. They are read
as data (see ``torch_file``): nothing in them is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open

from accelfn.checkpoint.accelerate.sharded_folder import read_sharded_folder
from accelfn.checkpoint.accelerate.torch_file import read_torch_file
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError

__all__ = ("AccelerateState", "read_accelerate")

TensorDict: TypeAlias = "dict[str, torch.Tensor]"

# The forms that a model or an optimizer may have, by what stands before and after its number. The first of
# all has no number, except where it always has one.
_MODELS = (
    *(("model", ".safetensors"), ("model", ".safetensors.index.json")),
    *(("pytorch_model", ".bin"), ("pytorch_model", ".bin.index.json")),
    *(("pytorch_model_fsdp", ".bin"), ("pytorch_model_fsdp", "/")),
)
_OPTIMIZERS = (("optimizer", ".bin"), ("optimizer", "/"))
_ALWAYS_NUMBERED = (("pytorch_model_fsdp", "/"), ("optimizer", "/"), ("custom_checkpoint", ".pkl"))
_BY_RANK = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)?_rank\d+\.bin")
_DEEPSPEED = ("*mp_rank_*", "*zero_pp_rank_*", "*/*mp_rank_*", "*/*zero_pp_rank_*")


class AccelerateState(NamedTuple):
    """What stands in one folder of Accelerate, in its order and in its own words.

    Attributes:
        models: State dict of each model.
        optimizers: State dict of each optimizer, as torch gives it.
        schedulers: State dict of each scheduler.
        samplers: State of each sampler, where there are any.
        loaders: State of each stateful loader.
        scaler: State dict of the gradient scaler; None where there is none.
        random: What ``random_states_{rank}.pkl`` holds, by rank; None for a rank that has no file here.
        custom: State dict of each object that was registered.
    """

    models: tuple[TensorDict, ...] = ()
    optimizers: tuple[dict[str, Any], ...] = ()
    schedulers: tuple[dict[str, Any], ...] = ()
    samplers: tuple[Any, ...] = ()
    loaders: tuple[Any, ...] = ()
    scaler: dict[str, Any] | None = None
    random: tuple[dict[str, Any] | None, ...] = ()
    custom: tuple[Any, ...] = ()


def read_accelerate(directory: str | Path) -> AccelerateState:
    """Read a folder that Accelerate 1.x wrote with ``save_state``, or ``accelfn`` with ``write_accelerate``.

    Models are read from safetensors, ``torch.save`` or FSDP's full or sharded layout, whole or in shards with
    an index; all tensors are on the CPU. Nothing that a file asks for is imported or run: only containers,
    plain values, tensors and arrays come out.

    Ranks: local. All processes' random states are read.

    Args:
        directory: The folder. It isn't changed, and files that Accelerate doesn't write are left alone.

    Raises:
        NoCheckpointError: No such folder, or nothing in it that Accelerate writes.
        DamagedCheckpointError: A file is cut short or isn't what its name says.
        CheckpointError: A file holds more than data; one of several models or optimizers is missing, or is
            there in two forms; or the folder has a layout that only the program that wrote it can put
            together.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise NoCheckpointError(
            f"read_accelerate: {folder} is {'a file' if folder.exists() else 'not there'}. Pass the folder "
            "that save_state of Accelerate wrote."
        )
    _refuse_foreign_layouts(folder)
    read_object = read_torch_file
    state = AccelerateState(
        models=tuple(_read_model(path) for path in _numbered(folder, "model", _MODELS)),
        optimizers=tuple(_read_optimizer(path) for path in _numbered(folder, "optimizer", _OPTIMIZERS)),
        schedulers=_read_all(folder, "scheduler", (("scheduler", ".bin"),), _read_dict),
        samplers=_read_all(folder, "sampler", (("sampler", ".bin"),), read_object),
        loaders=_read_all(folder, "loader's state", (("dl_state_dict", ".bin"),), read_object),
        scaler=_read_dict(folder / "scaler.pt") if (folder / "scaler.pt").is_file() else None,
        random=_read_random(folder),
        custom=_read_all(folder, "custom object", (("custom_checkpoint", ".pkl"),), read_object),
    )
    if all(part is None or part == () for part in state):
        raise NoCheckpointError(
            f"read_accelerate: {folder} holds nothing that Accelerate writes (model.safetensors, "
            "optimizer.bin, random_states_0.pkl and so on). Pass the folder that save_state wrote."
        )
    return state


def _refuse_foreign_layouts(folder: Path) -> None:
    by_rank = sorted(path.name for path in folder.iterdir() if _BY_RANK.fullmatch(path.name))
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


def _read_all(
    folder: Path, what: str, forms: Sequence[tuple[str, str]], read: Callable[[Path], Any]
) -> tuple[Any, ...]:
    return tuple(read(path) for path in _numbered(folder, what, forms))


def _numbered(folder: Path, what: str, forms: Sequence[tuple[str, str]]) -> list[Path]:
    """List the files of one kind by their number. None may be missing, and none there in two forms."""
    found: dict[int, list[Path]] = {}
    for stem, ending in forms:
        for path in folder.iterdir():
            number = _number(path, stem, ending)
            if number is not None:
                found.setdefault(number, []).append(path)
    for number, paths in sorted(found.items()):
        if len(paths) > 1:
            raise CheckpointError(
                f"read_accelerate: {' and '.join(sorted(path.name for path in paths))} are both {what} "
                f"{number}, of different saves, and nothing says which is the newer one. Move one of them "
                "away."
            )
    missing = [number for number in range(max(found, default=-1)) if number not in found]
    if missing:
        last = found[max(found)][0].name
        raise CheckpointError(
            f"read_accelerate: {last} is there, but no {what} {missing[0]}. The folder isn't whole: copy the "
            "missing file into it."
        )
    return [found[number][0] for number in sorted(found)]


def _number(path: Path, stem: str, ending: str) -> int | None:
    always = (stem, ending) in _ALWAYS_NUMBERED
    suffix = "" if ending == "/" else re.escape(ending)
    match = re.fullmatch(rf"{stem}(?:_(0|[1-9]\d*))?{suffix}", path.name)
    if match is None or match[1] == (None if always else "0"):
        return None
    if not (path.is_dir() if ending == "/" else path.is_file()):
        return None
    return int(match[1] or 0)


def _read_model(path: Path) -> TensorDict:
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    if path.is_dir():
        return _tensors(read_sharded_folder(path, "model"), path)
    return _read_safetensors(path) if path.suffix == ".safetensors" else _tensors(read_torch_file(path), path)


def _read_optimizer(path: Path) -> dict[str, Any]:
    state = read_sharded_folder(path, "optimizer") if path.is_dir() else _read_dict(path)
    if not isinstance(state.get("state"), dict) or not isinstance(state.get("param_groups"), list):
        raise DamagedCheckpointError(
            f"{path.name} is no optimizer's state dict: it has no state and param_groups.", path.name
        )
    return state


def _read_safetensors(path: Path) -> TensorDict:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{path.name} can't be read: {error}. Copy it again.", path.name
        ) from error


def _read_shards(path: Path) -> TensorDict:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        files = cast("dict[str, str]", index["weight_map"])
        wanted = sorted(set(files.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path.name} is no index of weights: {error!r}.", path.name) from error
    tensors: TensorDict = {}
    for name in wanted:
        file = path.parent / name
        if file.name != name or file.suffix not in (".safetensors", ".bin"):
            raise DamagedCheckpointError(
                f"{path.name} names {name!r}, which is no file of weights.", path.name
            )
        if not file.is_file():
            raise DamagedCheckpointError(f"{path.name} names {name}, which is not there. Copy it too.", name)
        read = _read_model(file)
        listed = {key for key, holder in files.items() if holder == name}
        if listed != set(read):
            odd = sorted(listed ^ set(read))
            raise DamagedCheckpointError(
                f"{path.name} and {name} are of different saves: {', '.join(odd[:5])} stands in one of them "
                "only.",
                name,
            )
        tensors.update(read)
    return {name: tensors[name] for name in files}


def _tensors(value: Any, path: Path) -> TensorDict:
    read = cast("dict[Any, Any]", value) if isinstance(value, dict) else {}
    if not isinstance(value, dict) or any(not isinstance(key, str) for key in read):
        raise DamagedCheckpointError(f"{path.name} is no state dict of a model.", path.name)
    others = [key for key, tensor in read.items() if not isinstance(tensor, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"read_accelerate: {', '.join(others[:5])} in {path.name} is no tensor, and a model's weights "
            "here are tensors only. Let get_extra_state give a tensor, and save again."
        )
    return dict(read)


def _read_dict(path: Path) -> dict[str, Any]:
    read = read_torch_file(path)
    if not isinstance(read, dict):
        raise DamagedCheckpointError(f"{path.name} is no state dict, but {type(read).__name__}.", path.name)
    return cast("dict[str, Any]", read)


def _read_random(folder: Path) -> tuple[dict[str, Any] | None, ...]:
    names = [re.fullmatch(r"random_states_(0|[1-9]\d{0,6})\.pkl", path.name) for path in folder.iterdir()]
    ranks = sorted(int(match[1]) for match in names if match)
    states: list[dict[str, Any] | None] = [None] * (ranks[-1] + 1 if ranks else 0)
    for rank in ranks:
        state = _read_dict(folder / f"random_states_{rank}.pkl")
        numpy_state = state.get("numpy_random_seed")
        if isinstance(numpy_state, tuple | list):
            name, keys, *rest = cast("Sequence[Any]", numpy_state)
            state["numpy_random_seed"] = (
                name,
                torch.tensor([int(key) for key in keys], dtype=torch.uint32),
                *rest,
            )
        states[rank] = state
    return tuple(states)
