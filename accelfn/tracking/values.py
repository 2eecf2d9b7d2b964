"""What is logged, made plain: numbers, texts, lists and mappings of these; and images as pixels."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch

from accelfn.errors import MissingExtraError, NotAvailableError
from accelfn.tree import is_dtensor, local_of

_CHANNELS = (1, 3, 4)


def read_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with numbers in place of tensors and arrays.

    What has one element becomes a number, all else a list of numbers, at any depth of mappings and lists.
    All that is no tensor or array stays what it is.

    Ranks: local.

    Args:
        values: Names and values.

    Raises:
        NotAvailableError: A tensor is sharded over ranks.

    >>> read_numbers({"loss": torch.tensor(0.5), "by_layer": [torch.ones(1), torch.zeros(2)], "lr": 1e-3})
    {'loss': 0.5, 'by_layer': [1.0, [0.0, 0.0]], 'lr': 0.001}
    """
    return {str(name): _read(value, str(name)) for name, value in values.items()}


def _read(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(name): _read(one, f"{path}/{name}") for name, one in items}
    if isinstance(value, (list, tuple)):
        items = enumerate(cast("Sequence[Any]", value))
        return [_read(one, f"{path}/{place}") for place, one in items]
    if isinstance(value, torch.Tensor):
        if is_dtensor(value) and not all(one.is_replicate() for one in cast("Any", value).placements):
            raise NotAvailableError(
                f"{path!r} is a tensor that is sharded over ranks, and what is logged is read on one of "
                "them. Log .full_tensor() of it, which every rank must call."
            )
        local: Any = local_of(value).detach()
        return local.item() if local.numel() == 1 else local.tolist()
    # Arrays and numbers of numpy, without importing it.
    if all(hasattr(value, name) for name in ("tolist", "dtype", "shape")):
        return value.item() if value.size == 1 else value.tolist()
    return value


def plain_config(config: object) -> dict[str, Any]:
    """Return a configuration as names and plain values, which any tracker can keep.

    Args:
        config: A mapping, a dataclass or an ``argparse.Namespace``; dataclasses, enums, paths, dtypes, sets
            and tensors inside of it become plain too, and of anything else its text is taken.

    Raises:
        TypeError: It is nothing of these.

    >>> plain_config({"dtype": torch.bfloat16, "sizes": (64, 10), "seed": None})
    {'dtype': 'torch.bfloat16', 'sizes': [64, 10], 'seed': None}
    """
    plain = _plain(config)
    if not isinstance(plain, dict):
        raise TypeError(
            f"config must be a mapping, a dataclass or an argparse.Namespace: got {type(config).__name__}."
        )
    return cast("dict[str, Any]", plain)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(name): _plain(one) for name, one in items}
    if isinstance(value, AbstractSet):
        return sorted(map(_plain, cast("AbstractSet[Any]", value)), key=str)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    read = _read(value, "config")
    if read is not value:
        return read
    return os.fspath(value) if isinstance(value, pathlib.PurePath) else str(cast("object", value))


def flatten_names(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of nested mappings, with ``/`` between the names.

    >>> dict(flatten_names({"model": {"layers": 2, "width": 64}, "lr": 0.1}))
    {'model/layers': 2, 'model/width': 64, 'lr': 0.1}
    """
    for name, value in values.items():
        path = f"{above}/{name}" if above else name
        if isinstance(value, Mapping):
            yield from flatten_names(cast("Mapping[str, Any]", value), path)
        else:
            yield path, value


def read_pixels(images: Any, name: str = "image") -> list[torch.Tensor]:
    """Return images as pixels.

    Args:
        images: One image, a batch of them as one array or tensor of four dimensions, or a list. An image is
            an array or tensor ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or 4 channels, or an image
            of Pillow with 8 bits a channel. Where both could be channels, the last dimension is. Floats are
            in 0..1, integers in 0..255; what is outside is clamped.
        name: What they are called, for messages.

    Returns:
        uint8 on the CPU, ``(H, W, C)`` each.

    Raises:
        ValueError: Something has another shape.
        TypeError: Something isn't an image.

    >>> [tuple(one.shape) for one in read_pixels(torch.zeros(2, 3, 8, 9))]
    [(8, 9, 3), (8, 9, 3)]
    """
    if isinstance(images, (list, tuple)):
        return [pixels for one in cast("Sequence[Any]", images) for pixels in read_pixels(one, name)]
    if isinstance(images, torch.Tensor):
        tensor = images.detach().cpu()
    elif hasattr(images, "convert") and images.mode.startswith(("I", "F")):
        raise ValueError(  # Pillow's own conversion would clamp what is above 255
            f"{name!r} has an image of Pillow with more than 8 bits a channel (mode {images.mode}). Scale "
            "it, and convert it to L or RGB."
        )
    elif hasattr(images, "__array__") or hasattr(images, "__array_interface__"):
        import numpy as np

        is_other = hasattr(images, "convert") and images.mode not in ("L", "RGB", "RGBA")
        tensor = torch.as_tensor(np.array(images.convert("RGB") if is_other else images))
    else:
        raise TypeError(
            f"{name!r} must be images: arrays, tensors or images of Pillow, got {type(images).__name__}."
        )
    return [_one(image, name) for image in (tensor if tensor.dim() == 4 else [tensor])]


def _one(image: torch.Tensor, name: str) -> torch.Tensor:
    shape = tuple(image.shape)
    if image.dim() == 2:
        image = image.unsqueeze(-1)
    elif image.dim() == 3 and shape[-1] not in _CHANNELS and shape[0] in _CHANNELS:
        image = image.permute(1, 2, 0)
    if image.dim() != 3 or image.shape[-1] not in _CHANNELS or not image.numel():
        raise ValueError(
            f"an image is of shape (H, W), (H, W, C) or (C, H, W), with 1, 3 or 4 channels and at least one "
            f"pixel: {name!r} has one of shape {shape}."
        )
    if image.dtype == torch.bool:
        return image.to(torch.uint8) * 255
    if image.is_floating_point():
        return (image.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    return image.clamp(0, 255).to(torch.uint8)


def as_array(pixels: torch.Tensor) -> Any:
    """Return pixels as an array of numpy, as most packages take them: ``(H, W)`` where there is one channel.

    Args:
        pixels: uint8 on the CPU, ``(H, W, C)``.

    >>> as_array(torch.zeros(8, 9, 1, dtype=torch.uint8)).shape
    (8, 9)
    """
    return (pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).numpy()


def as_pillow(pixels: torch.Tensor) -> Any:
    """Return pixels as an image of Pillow.

    Args:
        pixels: uint8 on the CPU, ``(H, W, C)``.

    Raises:
        MissingExtraError: Pillow isn't installed.
    """
    try:
        pillow: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError("images need Pillow, which isn't installed: pip install pillow") from error
    return pillow.fromarray(as_array(pixels))
