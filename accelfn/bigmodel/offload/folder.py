"""Weights that leave memory for a folder, and are mapped from there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

import torch

from accelfn.bigmodel.load.mapped import map_tensors
from accelfn.bigmodel.load.writing import writing_to
from accelfn.bigmodel.offload.packing import is_dense
from accelfn.checkpoint.files.header import format_header
from accelfn.checkpoint.files.stored_dtype import SAFETENSORS_NAMES
from accelfn.checkpoint.weights.files import Entry, write_tensors
from accelfn.checkpoint.weights.index import read_header

__all__ = ("write_mapped",)


def write_mapped(
    folder: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Write tensors to a file in a folder, and give them mapped from it.

    The file has no name any more once it is mapped (but for Windows, which doesn't allow that): it takes its
    space on the disk until the last of the tensors is gone, and nothing is left to be mistaken for another
    model's weights later.

    Each begins where torch would have it begin, at a multiple of 64 bytes, so that results are the same bits.

    Args:
        folder: It is made if it isn't there. Errors call it ``offload_dir``.
        tensors: By name, with values. They keep their strides if they fill their memory.

    Raises:
        ValueError: safetensors has no such dtype.
        OSError: The folder can't be written, or the disk is full. Nothing is left there.
    """
    unfit = [name for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_NAMES]
    if unfit:
        raise ValueError(
            f"{unfit[0]!r} can't lie on the disk: safetensors has no {tensors[unfit[0]].dtype}. Leave it on "
            "the CPU."
        )
    # Memory as it is, in whatever order its dimensions lie there.
    laid = {
        name: tensor.detach().as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.detach()
        for name, tensor in tensors.items()
    }
    forms = [(name, SAFETENSORS_NAMES[one.dtype], tuple(one.shape)) for name, one in laid.items()]
    _, places = format_header(forms, {}, fill=True)
    entries = [Entry(name, laid[name].dtype, tuple(laid[name].shape)) for name in places]
    with writing_to(folder, "offload_dir") as place:
        path = place / f".accelfn-{secrets.token_hex(8)}.safetensors"
        try:
            write_tensors(path, entries, (laid[name] for name in places), {}, fill=True)
            mapped = map_tensors(path, read_header(path).entries)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    if os.name == "posix":
        path.unlink(missing_ok=True)
    return {
        name: mapped[name].as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else mapped[name]
        for name, tensor in tensors.items()
    }
