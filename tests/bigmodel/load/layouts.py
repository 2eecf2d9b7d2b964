"""Checkpoints in every layout that is read, written by other programs than the one that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, get_args

import safetensors.torch
import torch
from torch import nn

Layout: TypeAlias = Literal["file", "index", "flat", "folder", "other", "bin", "bin index", "bin folder"]
ModelT = TypeVar("ModelT", bound=nn.Module)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def save(tensors: dict[str, torch.Tensor], folder: Path, layout: Layout) -> Path:
    """Write tensors, and return the path to load."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".bin" if layout.startswith("bin") else ".safetensors"
    stem = "pytorch_model" if suffix == ".bin" else "model"
    if layout in ("file", "bin"):
        path = folder / f"{stem}{suffix}"
        write(path, tensors)
        return path
    names = list(tensors)
    shards = [names[0::3], names[1::3], names[2::3]]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        if shard or not number:
            file = f"{stem}-{number + 1:05d}-of-00003{suffix}"
            write(folder / file, {name: tensors[name] for name in shard})
            weight_map.update(dict.fromkeys(shard, file))
    name = {"flat": "weights.json", "other": f"somebody{suffix}.index.json"}.get(
        layout, f"{stem}{suffix}.index.json"
    )
    index = weight_map if layout == "flat" else {"metadata": {}, "weight_map": weight_map}
    (folder / name).write_text(json.dumps(index))
    return folder if layout in ("folder", "other", "bin folder") else folder / name


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".bin":
        torch.save(dict(tensors), path)
        return
    # safetensors wants each tensor in memory of its own.
    safetensors.torch.save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()},
        path,
        {"format": "pt"},
    )


def on_meta(model: ModelT) -> ModelT:
    """Take the values away, and leave buffers that no state dict holds."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, one in list(module.named_parameters(recurse=False)):
            if id(one) not in made:
                made[id(one)] = nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad)
            module.register_parameter(key, made[id(one)])
        kept = vars(module)["_non_persistent_buffers_set"]
        for key, buffer in list(module.named_buffers(recurse=False)):
            if key not in kept:
                module.register_buffer(key, buffer.to("meta"))
    return model


def made(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of any bytes."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    flat = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, whatever is not a number."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(value.detach().reshape(-1).view(torch.uint8) for value in (one, other)))
