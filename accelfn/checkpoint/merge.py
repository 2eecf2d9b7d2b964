"""One file of weights, of the sharded folder that FSDP's ranks wrote together."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from accelfn.checkpoint.header import SAFETENSORS_NAMES
from accelfn.checkpoint.sharded_folder import TABLE, ShardedTensor, explaining_damage, open_sharded_folder
from accelfn.checkpoint.weights_files import staging, write_pickled, write_safetensors
from accelfn.errors import CheckpointError, NoCheckpointError

# What Accelerate calls the folders within one of its checkpoints.
_WEIGHTS, _OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> Path:
    """Put the weights of a sharded folder of ``torch.distributed.checkpoint`` together into one file.

    The file appears whole or not at all. As safetensors, one tensor at a time is in this process's memory.
    Nothing that the folder holds is run.

    Ranks: local; one process does it all.

    Args:
        checkpoint_dir: The folder with ``.metadata`` in it, such as Accelerate's ``pytorch_model_fsdp_0``.
        output_path: The directory to write to; it is made where it is missing.
        safe_serialization: True: ``model.safetensors``. False: ``pytorch_model.bin``, by ``torch.save``; all
            weights are in memory then.
        remove_checkpoint_dir: Remove the folder, once the file is on the disk.

    Returns:
        Path of the file.

    Raises:
        NoCheckpointError: There is no such folder; with what is there instead.
        CheckpointError: It holds something else than weights, or more than data.
        DamagedCheckpointError: A file is missing, cut short, or contradicts the table.
        ValueError: safetensors has no dtype for a tensor.
        FileExistsError: The file is there already.
        OSError: It can't be written. Nothing is left behind.
    """
    source = Path(checkpoint_dir)
    _check_source(source)
    tensors = _named(source)
    target = Path(output_path) / ("model.safetensors" if safe_serialization else "pytorch_model.bin")
    if os.path.lexists(target):
        raise FileExistsError(
            f"merge_fsdp_weights: {target} is there already. Remove it, or give another directory."
        )
    if safe_serialization:
        odd = [name for name, one in tensors.items() if one.dtype not in SAFETENSORS_NAMES]
        if odd:
            raise ValueError(
                f"merge_fsdp_weights: safetensors has no dtype for {odd[0]} ({tensors[odd[0]].dtype}). Pass "
                "safe_serialization=False (--unsafe_serialization)."
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    with staging(target) as stage, explaining_damage(source):
        place = stage / target.name
        if safe_serialization:
            forms = {name: (one.dtype, one.shape) for name, one in tensors.items()}
            write_safetensors(place, forms, lambda name: _read(tensors[name]), {"format": "pt"})
        else:
            write_pickled(place, {name: _read(one) for name, one in tensors.items()})
        os.replace(stage / target.name, target)
    if remove_checkpoint_dir:
        shutil.rmtree(source)
    return target


def _check_source(source: Path) -> None:
    if (source / TABLE).is_file():
        return
    if not source.is_dir():
        what = "is a file" if source.exists() else "isn't there"
        raise NoCheckpointError(
            f"merge_fsdp_weights: {source} {what}. Give the folder with the shards in it."
        )
    within = sorted(one.name for one in source.iterdir() if (one / TABLE).is_file())
    weights = [name for name in within if not name.startswith("optimizer")]
    if weights:
        hint = f"It has {source / weights[0]} in it: give that one."
    elif (source / "manifest.json").is_file():
        hint = "It is a checkpoint of accelfn: convert it with accelfn checkpoint convert --to safetensors."
    else:
        hint = f"Accelerate writes such a folder as {_WEIGHTS} within a checkpoint."
    raise NoCheckpointError(
        f"merge_fsdp_weights: {source} has no {TABLE}, the table of a sharded folder. {hint}"
    )


def _named(source: Path) -> dict[str, ShardedTensor]:
    """List the tensors by their names, without a key that all of them stand under."""
    folder = open_sharded_folder(source)
    tops = {path[0] for path in (*(one.path for one in folder.tensors), *(path for path, _ in folder.others))}
    shared = len(tops) == 1 and all(len(one.path) > 1 for one in folder.tensors)
    if tops & {"optimizer", "optim", "param_groups"}:
        raise CheckpointError(
            f"merge_fsdp_weights: {source} holds the state of an optimizer, no weights. Give the folder "
            f"of the model, which Accelerate writes as {_WEIGHTS} beside {_OPTIMIZER}."
        )
    named = {".".join(map(str, one.path[shared:])): one for one in folder.tensors}
    if not named:
        raise CheckpointError(f"merge_fsdp_weights: {source} holds no tensor.")
    return named


def _read(tensor: ShardedTensor) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    tensor.fill(whole)
    return whole
