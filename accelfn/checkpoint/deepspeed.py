"""Read the folders of DeepSpeed's ``save_checkpoint``, as state dicts with names.

ZeRO stores each rank's part of flattened parameters and of their optimizer state. One process assembles the
parts. The files are pickled and read as data (see ``torch_file``), without DeepSpeed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.torch_file import Record, read_torch_file
from accelfn.errors import CheckpointError, DamagedCheckpointError

_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_(?P<kind>model|optim)_states\.pt"
)
_SPLIT = re.compile(r"layer_\d+.*|expp_rank_.*")  # files of expert or pipeline parallelism
_MEGATRON = ("mp_rank_*/model_optim_rng.pt", "iter_*/mp_rank_*", "latest_checkpointed_iteration.txt")
# Accelerate's tags.
_TAG = re.compile(r"pytorch_model(?:_([1-9]\d*))?")
# Classes in the files, of which only fields are read.
_RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
# Keys of the file of the model, apart from what the user passed as client_state.
_KNOWN = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
        *("checkpoint_parallel_dimensions", "sparse_tensor_module_names", "universal_checkpoint_info"),
    }
)
_HALF = (torch.float16, torch.bfloat16)


class DeepSpeedState(NamedTuple):
    """What a folder holds of one model.

    Attributes:
        model: Its state dict. What DeepSpeed kept in 16 bits is float32. Tied weights are one tensor.
        optimizer: With ``state`` and ``param_groups``; parameters have names, or numbers at stage 0. None if
            there is none.
        scheduler: The state of the scheduler that DeepSpeed stepped; None if there is none.
        notes: What the user should know, in complete sentences.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    notes: tuple[str, ...]


class _Piece(NamedTuple):
    """A rank's part of a parameter: elements of one of its flat tensors."""

    rank: int
    flat: int
    offset: int
    numel: int


# --- finding -------------------------------------------------------------------------------------


def find_deepspeed(folder: Path) -> dict[int, Path]:
    """Find DeepSpeed's files in a folder, by number of the model; empty if there are none.

    The folder is Accelerate's, with a subfolder for each model; or DeepSpeed's, whose file ``latest`` names
    one of several subfolders; or such a subfolder.

    Raises:
        CheckpointError: The folder is Megatron-LM's; ``latest`` names a missing subfolder; or there are
            several subfolders without it.
    """
    foreign = next((path for pattern in _MEGATRON for path in folder.glob(pattern)), None)
    if foreign is not None:
        raise CheckpointError(
            f"read_accelerate: {foreign.relative_to(folder)} is part of a checkpoint of Megatron-LM, which "
            "only Megatron-LM can assemble. Convert it there, and read the result."
        )
    if _has_states(folder):
        return {0: folder}
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and _has_states(path))
    tagged = {path: _TAG.fullmatch(path.name) for path in inside}
    numbered = {int(match[1] or 0): path for path, match in tagged.items() if match}
    if numbered:
        missing = next((number for number in range(max(numbered)) if number not in numbered), None)
        if missing is not None:
            name = f"pytorch_model_{missing}" if missing else "pytorch_model"
            raise CheckpointError(
                f"read_accelerate: the folder has {numbered[max(numbered)].name}, but {name} is missing. "
                "Copy the missing folder."
            )
        return dict(sorted(numbered.items()))
    latest = folder / "latest"
    if inside and latest.is_file():
        tag = latest.read_text().strip()
        chosen = [path for path in inside if path.name == tag]
        if not chosen:
            raise CheckpointError(
                f"read_accelerate: the file latest names {tag!r}, and there is no such folder with "
                "DeepSpeed's files. Copy the folder, or pass the path of another one."
            )
        return {0: chosen[0]}
    if len(inside) > 1:
        raise CheckpointError(
            f"read_accelerate: {folder} has several checkpoints of DeepSpeed "
            f"({', '.join(path.name for path in inside[:5])}), and no file latest. Pass one of them."
        )
    return dict(enumerate(inside))


def _has_states(folder: Path) -> bool:
    return any(folder.glob("*_model_states.pt")) or any(folder.glob("*_optim_states.pt"))


# --- reading -------------------------------------------------------------------------------------


def read_deepspeed(folder: Path, with_optimizer: bool = True) -> DeepSpeedState:
    """Read the files of one model, of any stage of ZeRO and any number of ranks.

    Args:
        folder: One of :func:`find_deepspeed`'s.
        with_optimizer: Assemble the optimizer's state too.

    Raises:
        CheckpointError: A rank's file is missing; the model was split by tensor, expert or pipeline
            parallelism; DeepSpeed is too old; or a file holds more than data.
        DamagedCheckpointError: A file is truncated, or the parts don't fit together.
    """
    models, optimizers = _files(folder)
    main = _read(models[min(models)])
    _check_layout(folder, main)
    notes = _notes(folder, main)
    scheduler = cast("dict[str, Any] | None", main.get("lr_scheduler"))
    with _explaining_damage(folder):
        if main.get("param_shapes") is None and not optimizers:
            if min(models) >= 0:
                raise CheckpointError(
                    f"read_accelerate: {folder.name} is of a model that ZeRO stage 3 sharded without an "
                    "optimizer, and lacks the weights. Save it with accelfn's save_model."
                )
            model, optimizer = _unsharded(folder, main, with_optimizer)
            return DeepSpeedState(model, optimizer, scheduler, notes)
        start = min(optimizers, default=0)
        first = _read_optimizer(optimizers[start]) if optimizers else {}
        size = _check_ranks(folder, main, models, optimizers, first)
        states = [first, *(_read_optimizer(optimizers[rank]) for rank in range(1, size))]
        layout = _Layout(folder, main, states)
        others = [main, *(_read(models[rank]) for rank in range(1, size) if rank in models)]
        scale = _loss_scale(layout.states[0])
        if scale is not None:
            notes += (f"The loss scale was {scale:g}: pass GradScalerKwargs(init_scale={scale:g}).",)
        optimizer = layout.optimizer() if with_optimizer else None
        return DeepSpeedState(layout.model(others), optimizer, scheduler, notes)


def _files(folder: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """Return the files of the model and of the optimizer by rank; -1 for one that is the same for all."""
    found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if _SPLIT.fullmatch(path.name) or (match and int(match["part"])):
            raise _split_error(f"{folder.name}/{path.name}")
        if match:
            rank = int(match["rank"] or -1)
            if rank in found[match["kind"]]:
                raise CheckpointError(
                    f"read_accelerate: {path.name} and {found[match['kind']][rank].name} in {folder.name} "
                    "are both of the same rank, from different saves. Move the older ones to another folder."
                )
            found[match["kind"]][rank] = path
    if not found["model"]:
        raise CheckpointError(
            f"read_accelerate: {folder.name} has no file of the model (mp_rank_00_model_states.pt, or "
            "zero_pp_rank_0_mp_rank_00_model_states.pt for stage 3). Copy the missing files."
        )
    if len(found["model"]) > 1 and -1 in found["model"]:
        raise CheckpointError(
            f"read_accelerate: {folder.name} has files of stage 3 and of lower stages, from different saves. "
            "Move the older ones to another folder."
        )
    return found["model"], found["optim"]


def _read(path: Path) -> dict[str, Any]:
    content = read_torch_file(path, records=_RECORDS)
    if not isinstance(content, dict):
        raise DamagedCheckpointError(f"{path.name} must hold a dict of DeepSpeed's.", path.name)
    return cast("dict[str, Any]", content)


def _read_optimizer(path: Path) -> dict[str, Any]:
    return _read(path)["optimizer_state_dict"]


@contextmanager
def _explaining_damage(folder: Path) -> Generator[None]:
    """Convert errors while parts are assembled.

    Raises:
        DamagedCheckpointError: The parts don't fit together.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"{folder.name} can't be assembled: {error}. Copy the folder again from its source.", folder.name
        ) from error


def _check_layout(folder: Path, main: Mapping[str, Any]) -> None:
    if not isinstance(main.get("module"), dict):  # of PipelineModule
        raise _split_error(folder.name)
    degrees = cast("Mapping[str, Any]", main.get("checkpoint_parallel_dimensions") or {})
    split = [name for name in ("tp_degree", "pp_degree") if (degrees.get(name) or 1) > 1]
    if (main.get("mp_world_size") or 1) > 1 or split or main.get("ds_autoep_layers"):
        raise _split_error(folder.name)


def _split_error(name: str) -> CheckpointError:
    return CheckpointError(
        f"read_accelerate: {name} is of a model that was split by tensor, expert or pipeline parallelism "
        "(Megatron-LM, or DeepSpeed's MoE, AutoTP or PipelineModule). Load it with the program that wrote "
        "it, and save the weights with names."
    )


def _check_ranks(
    folder: Path,
    main: Mapping[str, Any],
    models: Mapping[int, Path],
    optimizers: Mapping[int, Path],
    first: Mapping[str, Any],
) -> int:
    """Return the number of ranks, after checking that each one's files are there."""
    counts = cast("int | list[int]", first.get("partition_count", main.get("dp_world_size") or 0))
    size = max(counts) if isinstance(counts, list) else counts
    needed = [("optim", optimizers), *([("model", models)] if min(models) >= 0 else [])]
    for kind, files in needed:
        missing = [rank for rank in range(size) if rank not in files]
        extra = [rank for rank in files if rank >= size]
        if missing or not size:
            raise CheckpointError(
                f"read_accelerate: {folder.name} lacks the {kind}_states file of rank "
                f"{', '.join(map(str, missing[:5])) or 0} out of {size or 'all'} ranks "
                f"(zero_pp_rank_{missing[0] if missing else 0}_mp_rank_00_{kind}_states.pt). Copy it from "
                "its machine."
            )
        if extra:
            raise CheckpointError(
                f"read_accelerate: {folder.name} was written by {size} ranks, and has "
                f"{files[extra[0]].name} of another save. Move it to another folder."
            )
    return size


def _notes(folder: Path, main: Mapping[str, Any]) -> tuple[str, ...]:
    notes: list[str] = []
    if main.get("global_steps"):
        notes.append(f"DeepSpeed had counted {main['global_steps']} optimizer steps in {folder.name}.")
    mine = [str(key) for key in main if key not in _KNOWN]
    if mine:
        notes.append(f"The client_state of DeepSpeed's save_checkpoint is left out: {', '.join(mine[:10])}.")
    return tuple(notes)


def _loss_scale(state: Mapping[str, Any]) -> float | None:
    scaler = state.get("loss_scaler")
    if not isinstance(scaler, Record) or "cur_scale" not in scaler:
        return None
    scale = float(scaler.get("cur_scale"))
    return None if scale == 1.0 else scale


# --- ZeRO ----------------------------------------------------------------------------------------


class _Layout:
    """Where the parts of each trained parameter are."""

    def __init__(self, folder: Path, main: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Find the parts of each parameter on each rank."""
        self.main, self.states = main, states
        self.is_stage_3 = "fp32_flat_groups" in states[0]
        flat_key = "fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"
        base_key = "optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"
        version = main.get("ds_version") or "of unknown version"
        if any(state.get("ds_zero_partition_groups") for state in states):
            raise _split_error(folder.name)
        if not self.is_stage_3 and any("param_slice_mappings" not in state for state in states):
            raise CheckpointError(
                f"read_accelerate: DeepSpeed {version} wrote {folder.name} without the positions of the "
                "parameters (param_slice_mappings). Load it with DeepSpeed 0.10 or newer, and save it again."
            )
        if any(not isinstance(state[base_key], dict) for state in states):
            raise CheckpointError(
                f'read_accelerate: {folder.name} was saved with "elastic_checkpoint": true, which leaves out '
                "the optimizer's options. Save it again without."
            )
        self.flats = [cast("list[torch.Tensor]", list(state[flat_key])) for state in states]
        self.bases = [cast("dict[str, Any]", state[base_key]) for state in states]
        self.pieces: dict[str, list[_Piece]] = {}
        self.names: list[list[str]] = []  # by flat tensor
        self.shapes: dict[str, tuple[int, ...]] = {}
        module = cast("Mapping[str, torch.Tensor]", main["module"])
        shapes = cast("Sequence[Mapping[str, Any]] | None", main.get("param_shapes"))
        for index in range(len(self.flats[0])):
            pieces = self._by_partition(index, shapes or ()) if self.is_stage_3 else self._by_slices(index)
            known = pieces if shapes is None else shapes[index]
            self.names.append(list(known))
            self.pieces.update({name: pieces.get(name, []) for name in known})
            self.shapes.update(
                {name: tuple(module[name].shape if shapes is None else shapes[index][name]) for name in known}
            )

    def _by_slices(self, index: int) -> dict[str, list[_Piece]]:
        """Find the parts at stages 1 and 2, where each rank says which ones it has."""
        found: dict[str, list[_Piece]] = {}
        for rank, state in enumerate(self.states):
            slices = cast("Mapping[str, Record]", state["param_slice_mappings"][index])
            for name, one in slices.items():
                found.setdefault(name, []).append(_Piece(rank, index, one.get("start"), one.get("numel")))
        return found

    def _by_partition(self, index: int, shapes: Sequence[Mapping[str, Any]]) -> dict[str, list[_Piece]]:
        """Find the parts at stage 3, where each parameter is split evenly, the last part padded."""
        found: dict[str, list[_Piece]] = {}
        offset = 0
        for name, shape in shapes[index].items():
            total = math.prod(shape)
            count = math.ceil(total / len(self.states))
            for rank in range(len(self.states)):
                own = max(0, min(count, total - rank * count))
                found.setdefault(name, []).append(_Piece(rank, index, offset, own))
            offset += count
        return found

    def _assemble(self, name: str, flats: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        parts = [
            flats[piece.rank, piece.flat].reshape(-1).narrow(0, piece.offset, piece.numel)
            for piece in self.pieces[name]
            if piece.numel
        ]
        shape = self.shapes[name]
        if sum(part.numel() for part in parts) != math.prod(shape):
            raise ValueError(f"the parts of {name} don't cover its shape {list(shape)}")
        return torch.cat(parts).view(shape) if parts else torch.zeros(shape)

    def model(self, mains: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the complete state dict.

        Args:
            mains: The files of the model, of each rank at stage 3, else the only one.
        """
        flats = {(rank, i): flat for rank, flats in enumerate(self.flats) for i, flat in enumerate(flats)}
        trained = {name: self._assemble(name, flats) for name in self.pieces}
        frozen = self._frozen(mains) if self.is_stage_3 else {}
        tied = cast("Mapping[str, str]", self.main.get("shared_params") or {})
        buffers = cast("Sequence[str]", self.main.get("buffer_names") or ())
        model: dict[str, torch.Tensor] = {}
        for name, value in cast("Mapping[str, torch.Tensor]", self.main["module"]).items():
            first = tied.get(name, name)
            if first in trained or first in frozen:
                model[name] = trained[first] if first in trained else frozen[first]
            elif self.is_stage_3 and name not in buffers:
                raise ValueError(f"the weights of {name} are missing")
            elif first in model:
                model[name] = model[first]
            else:
                model[name] = _wide(value)
        return model

    def _frozen(self, mains: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        shapes = cast("Mapping[str, Any]", self.main.get("frozen_param_shapes") or {})
        return {
            name: _wide(
                torch.cat([main["frozen_param_fragments"][name].reshape(-1) for main in mains])
                .narrow(0, 0, math.prod(shape))
                .view(tuple(shape))
            )
            for name, shape in shapes.items()
        }

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state by name of the parameter."""
        groups = cast("list[dict[str, Any]]", self.bases[0]["param_groups"])
        named: list[dict[str, Any]] = [
            {
                **{option: value for option, value in group.items() if option not in ("params", "step")},
                "params": [
                    name for index in cast("list[int]", group["params"]) for name in self.names[index]
                ],
            }
            for group in groups
        ]
        steps = {index: group["step"] for group in groups if "step" in group for index in group["params"]}
        state: dict[str, dict[str, Any]] = {}
        for name, pieces in self.pieces.items():
            own = self._state_of(name, [piece for piece in pieces if piece.numel])
            index = pieces[0].flat
            if own and index in steps:  # of FusedAdam, which counts the steps of a group
                own.setdefault("step", steps[index])
            if own:
                state[name] = {
                    key: _torch_step(value) if key == "step" else value for key, value in own.items()
                }
        return {"state": state, "param_groups": named}

    def _state_of(self, name: str, pieces: Iterable[_Piece]) -> dict[str, Any]:
        flats: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
        scalars: dict[str, Any] = {}
        for piece in pieces:
            states = cast("Mapping[int, Mapping[str, Any]]", self.bases[piece.rank]["state"])
            for key, value in states.get(piece.flat, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    flats.setdefault(key, {})[piece.rank, piece.flat] = value
                else:
                    scalars.setdefault(key, value)
        return scalars | {key: self._assemble(name, values) for key, values in flats.items()}


def _is_exact(master: torch.Tensor, value: torch.Tensor) -> bool:
    return torch.equal(master, value.to(master.dtype))


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in _HALF else value


def _torch_step(value: Any) -> Any:
    """Return a count of steps as torch's optimizers keep it."""
    return value.clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))


# --- stage 0 -------------------------------------------------------------------------------------


def _unsharded(
    folder: Path, main: Mapping[str, Any], with_optimizer: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """Return the model and optimizer of stage 0, where one file has all."""
    model = dict(cast("Mapping[str, torch.Tensor]", main["module"]))
    optimizer = cast("dict[str, Any] | None", main.get("optimizer"))
    if optimizer is None or "param_groups" in optimizer:
        return model, optimizer if with_optimizer else None
    if "fp32_groups" not in optimizer:
        raise CheckpointError(
            f"read_accelerate: {folder.name} is of ZeRO stage 0 in 16 bits with a fused optimizer, whose "
            "float32 weights have no names. Load it with DeepSpeed, and save it with stage 1 or higher, or "
            "with accelfn's save_state."
        )
    masters = [one for group in optimizer["fp32_groups"] for one in group]
    model = _with_masters(folder, model, masters)
    state = cast("dict[str, Any]", optimizer["optimizer_state_dict"])
    return model, state if with_optimizer else None


def _with_masters(
    folder: Path, model: Mapping[str, torch.Tensor], masters: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Replace 16-bit weights by the float32 ones, which have no names: each one rounds to its weight."""
    tied: dict[int, list[str]] = {}
    for name, value in model.items():
        tied.setdefault(value.data_ptr() if value.numel() else id(value), []).append(name)
    found: dict[str, torch.Tensor] = {}
    for master in masters:
        matching = [
            names
            for names in tied.values()
            if model[names[0]].shape == master.shape
            and torch.equal(model[names[0]], master.to(model[names[0]].dtype))
        ]
        same = [other for other in masters if other.shape == master.shape and torch.equal(other, master)]
        # Weights may be equal in 16 bits and differ in float32; then it can't be told which one is which.
        if not matching or (len(matching) != len(same) and not _is_exact(master, model[matching[0][0]])):
            raise CheckpointError(
                f"read_accelerate: {folder.name} is of ZeRO stage 0 in 16 bits, whose float32 weights have "
                f"no names, and one of shape {list(master.shape)} can't be assigned. Load it with DeepSpeed, "
                "and save it with stage 1 or higher, or with accelfn's save_state."
            )
        for names in matching:
            found.update(dict.fromkeys(names, master))
    return {name: found[name] if name in found else _wide(value) for name, value in model.items()}
