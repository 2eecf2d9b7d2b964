"""Folders as Accelerate's ``save_state`` writes them, made without Accelerate."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from safetensors.torch import save_file

np = cast("Any", numpy)  # partly untyped


def write_folder(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write each value under its name: safetensors as such, everything else by ``torch.save``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write: Any = save_file if name.endswith(".safetensors") else torch.save
        write(value, folder / name)
    return folder


def random_file(seed: int, **others: Any) -> dict[str, Any]:
    """Return what the file of a rank's random states holds."""
    return {
        "random_state": random.Random(seed).getstate(),
        "numpy_random_seed": np.random.RandomState(seed).get_state(),
        "torch_manual_seed": torch.Generator().manual_seed(seed).get_state(),
        **others,
    }


def random_state(seed: int) -> dict[str, Any]:
    """Return the same states as a checkpoint has them."""
    version, numbers, gauss = random.Random(seed).getstate()
    _, key, place, _, _ = np.random.RandomState(seed).get_state()
    return {
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "numpy": {"numbers": torch.tensor([*key.tolist(), place]), "gauss": None},
    }
