"""Images that are logged: whatever holds one, as pixels, and pixels as a PNG file."""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, cast

import torch

from accelfn.comm.wire import as_bytes

__all__ = ("as_array", "as_pillow", "encode_png", "read_pixels")

_CHANNELS = (1, 3, 4)
_COLOR_TYPES = MappingProxyType({1: 0, 3: 2, 4: 6})


def read_pixels(images: Any, name: str = "image") -> list[torch.Tensor]:
    """Return images as pixels.

    Args:
        images: One image, a batch of them as one array or tensor of four dimensions, or a list. An image is
            an array or tensor ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or 4 channels, or an image
            of Pillow with 8 bits a channel. Where both could be channels, the last dimension is. Floats lie
            in 0..1, integers in 0..255; what is outside is cut.
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
    tensor = _as_tensor(images, name)
    if tensor.dim() == 4:
        return [_one(image, name) for image in tensor]
    return [_one(tensor, name)]


def as_array(pixels: torch.Tensor) -> Any:
    """Return pixels as an array of numpy, as most packages take them: ``(H, W)`` where there is one channel.

    Args:
        pixels: uint8 on the CPU, ``(H, W, C)``.

    >>> as_array(torch.zeros(8, 9, 1, dtype=torch.uint8)).shape
    (8, 9)
    """
    return (pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).numpy()


def as_pillow(pixels: torch.Tensor) -> Any:
    """Return pixels as an image of Pillow, which the packages that take these need themselves.

    Args:
        pixels: uint8 on the CPU, ``(H, W, C)``.
    """
    pillow: Any = importlib.import_module("PIL.Image")
    return pillow.fromarray(as_array(pixels))


def encode_png(pixels: torch.Tensor) -> bytes:
    """Encode pixels as a PNG file, with nothing but the standard library.

    Args:
        pixels: uint8 on the CPU, ``(H, W, C)`` with 1, 3 or 4 channels.

    >>> encode_png(torch.zeros(1, 1, 3, dtype=torch.uint8))[1:4]
    b'PNG'
    """
    height, width, channels = pixels.shape
    # Before each row stands how it is predicted: 0, not at all.
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.reshape(height, -1)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    body = zlib.compress(as_bytes(rows.flatten()), 6)
    parts = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def _as_tensor(image: Any, name: str) -> torch.Tensor:
    if isinstance(image, torch.Tensor):
        return image.detach().cpu()
    if hasattr(image, "convert") and hasattr(image, "tobytes"):  # an image of Pillow
        if image.mode.startswith(("I", "F")):  # Pillow's own conversion would cut what is above 255
            raise ValueError(
                f"{name!r} has an image of Pillow with more than 8 bits a channel (mode {image.mode}). Scale "
                "it, and convert it to L or RGB."
            )
        mode = image.mode if image.mode in ("L", "RGB", "RGBA") else "RGB"
        width, height = image.size
        return torch.frombuffer(bytearray(image.convert(mode).tobytes()), dtype=torch.uint8).reshape(
            height, width, len(mode)
        )
    if hasattr(image, "__array__"):
        import numpy as np

        return torch.as_tensor(np.ascontiguousarray(image))
    raise TypeError(
        f"{name!r} must be images: arrays, tensors or images of Pillow, got {type(image).__name__}."
    )


def _one(image: torch.Tensor, name: str) -> torch.Tensor:
    shape = tuple(image.shape)
    if image.dim() == 2:
        image = image.unsqueeze(-1)
    elif image.dim() != 3 or (shape[-1] not in _CHANNELS and shape[0] not in _CHANNELS):
        raise ValueError(
            f"an image is of shape (H, W), (H, W, C) or (C, H, W), with 1, 3 or 4 channels: {name!r} has one "
            f"of shape {shape}."
        )
    elif shape[-1] not in _CHANNELS:
        image = image.permute(1, 2, 0)
    if not image.numel():
        raise ValueError(f"an image has at least one pixel: {name!r} has one of shape {shape}.")
    if image.dtype == torch.bool:
        return image.to(torch.uint8) * 255
    if image.is_floating_point():
        return (image.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    return image.clamp(0, 255).to(torch.uint8)
