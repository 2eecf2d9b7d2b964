"""Weights that leave memory for a folder, and are mapped from there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from accelfn.bigmodel.load.mapped import map_tensors
from accelfn.checkpoint.weights.index import read_header

__all__ = ("write_mapped",)


def write_mapped(
    folder: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Write tensors to a file in a folder, and give them mapped from it.

    The file has no name any more once it is mapped (but for Windows, which doesn't allow that): it takes its
    space on the disk until the last of the tensors is gone, and nothing is left to be mistaken for another
    model's weights later.

    Args:
        folder: It is made if it isn't there.
        tensors: By name, with values.

    Raises:
        OSError: The folder can't be written, or the disk is full. Nothing is left there.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    path = place / f".accelfn-{secrets.token_hex(8)}.safetensors"
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
        return map_tensors(path, read_header(path).entries)
    finally:
        if os.name == "posix":
            path.unlink(missing_ok=True)
