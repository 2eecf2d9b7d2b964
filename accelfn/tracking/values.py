"""Convert logged values to plain numbers, strings, lists and mappings, and images to pixels."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch

from accelfn.errors import MissingExtraError, NotAvailableError
from accelfn.tree import is_dtensor, local_of

_CHANNELS = (1, 3, 4)


def read_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with tensors and arrays replaced by numbers, also inside mappings and lists.

    A tensor with one element becomes a number, others become lists of numbers.

    Ranks: local.

    Args:
        values: Values by name.

    Raises:
        NotAvailableError: A tensor is sharded over ranks.

    >>> read_numbers({"loss": torch.tensor(0.5), "by_layer": [torch.ones(1), torch.zeros(2)], "lr": 1e-3})
    {'loss': 0.5, 'by_layer': [1.0, [0.0, 0.0]], 'lr': 0.001}
    """
    return walk(values, _read)


def walk(value: Any, convert: Callable[[Any, str], Any], path: str = "") -> Any:
    """Return mappings and lists with every other value inside them converted.

    Args:
        value: The value.
        convert: Takes a value and its path, whose names are joined by ``/``.
        path: Name of the value.
    """
    at = f"{path}/" if path else ""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(name): walk(item, convert, f"{at}{name}") for name, item in items}
    if isinstance(value, (list, tuple)):
        return [
            walk(item, convert, f"{at}{index}") for index, item in enumerate(cast("Sequence[Any]", value))
        ]
    return convert(value, path)


def _read(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        if is_dtensor(value) and not all(each.is_replicate() for each in cast("Any", value).placements):
            raise NotAvailableError(
                f"{path!r} is sharded over ranks, but logged on one of them. Log its .full_tensor(), which "
                "every rank must call."
            )
        local: Any = local_of(value).detach()
        return local.item() if local.numel() == 1 else local.tolist()
    # NumPy arrays and scalars, without importing numpy.
    if all(hasattr(value, name) for name in ("tolist", "dtype", "shape")):
        return value.item() if value.size == 1 else value.tolist()
    return value


def plain_config(config: object) -> dict[str, Any]:
    """Convert a configuration to plain values that any tracker can log.

    Args:
        config: A mapping, a dataclass or an ``argparse.Namespace``. Nested dataclasses, enums, paths, dtypes,
            sets and tensors are converted too, and other objects to strings.

    Raises:
        TypeError: ``config`` has another type.

    >>> plain_config({"dtype": torch.bfloat16, "sizes": (64, 10), "seed": None})
    {'dtype': 'torch.bfloat16', 'sizes': [64, 10], 'seed': None}
    """
    plain = walk(config, _plain)
    if not isinstance(plain, dict):
        raise TypeError(
            f"config must be a mapping, a dataclass or an argparse.Namespace, got {type(config).__name__}."
        )
    return cast("dict[str, Any]", plain)


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, enum.Enum):
        return walk(value.value, _plain, path)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, argparse.Namespace):
        return walk(vars(value), _plain, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return walk(held, _plain, path)
    if isinstance(value, AbstractSet):
        return sorted(walk([*cast("AbstractSet[Any]", value)], _plain, path), key=str)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return walk([*cast("Sequence[Any]", value)], _plain, path)
    converted = _read(value, path)
    return str(cast("object", value)) if converted is value else converted


def flatten_names(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, with names joined by ``/``.

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
    """Convert images to pixels.

    Args:
        images: An image, a batch as a four-dimensional array or tensor, or a list. An image is an array or
            tensor ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or 4 channels, or a Pillow image with
            8 bits per channel. If both the first and the last dimension may be channels, the last one is.
            Floats are clamped to 0..1, integers to 0..255.
        name: Name of the images, for messages.

    Returns:
        For each image a uint8 tensor ``(H, W, C)`` on the CPU.

    Raises:
        ValueError: An image has another shape or more than 8 bits per channel.
        TypeError: A value isn't an image.

    >>> [tuple(image.shape) for image in read_pixels(torch.zeros(2, 3, 8, 9))]
    [(8, 9, 3), (8, 9, 3)]
    """
    if isinstance(images, (list, tuple)):
        return [pixels for image in cast("Sequence[Any]", images) for pixels in read_pixels(image, name)]
    if isinstance(images, torch.Tensor):
        tensor = images.detach().cpu()
    elif hasattr(images, "convert") and images.mode.startswith(("I", "F")):
        raise ValueError(  # Pillow would clamp values above 255
            f"{name!r} is a Pillow image with more than 8 bits per channel (mode {images.mode}). Scale it, "
            "and convert it to L or RGB."
        )
    elif hasattr(images, "__array__") or hasattr(images, "__array_interface__"):
        import numpy as np

        needs_rgb = hasattr(images, "convert") and images.mode not in ("L", "RGB", "RGBA")
        tensor = torch.as_tensor(np.array(images.convert("RGB") if needs_rgb else images))
    else:
        raise TypeError(f"{name!r} must be arrays, tensors or Pillow images, got {type(images).__name__}.")
    return [_to_uint8(image, name) for image in (tensor if tensor.dim() == 4 else [tensor])]


def _to_uint8(image: torch.Tensor, name: str) -> torch.Tensor:
    shape = tuple(image.shape)
    if image.dim() == 2:
        image = image.unsqueeze(-1)
    elif image.dim() == 3 and shape[-1] not in _CHANNELS and shape[0] in _CHANNELS:
        image = image.permute(1, 2, 0)
    if image.dim() != 3 or image.shape[-1] not in _CHANNELS or not image.numel():
        raise ValueError(
            "an image must have the shape (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels and at "
            f"least one pixel: {name!r} has {shape}."
        )
    if image.dtype == torch.bool:
        return image.to(torch.uint8) * 255
    if image.is_floating_point():
        return (image.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    return image.clamp(0, 255).to(torch.uint8)


def as_array(pixels: torch.Tensor) -> Any:
    """Convert pixels ``(H, W, C)`` to a NumPy array, ``(H, W)`` if there is one channel.

    >>> as_array(torch.zeros(8, 9, 1, dtype=torch.uint8)).shape
    (8, 9)
    """
    return (pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).numpy()


def as_pillow(pixels: torch.Tensor) -> Any:
    """Convert pixels ``(H, W, C)`` to a Pillow image.

    Raises:
        MissingExtraError: Pillow isn't installed.
    """
    try:
        pillow: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError(
            "images need Pillow, which isn't installed. Run: pip install pillow"
        ) from error
    return pillow.fromarray(as_array(pixels))
