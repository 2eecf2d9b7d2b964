"""What callers write for a dtype."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

__all__ = ("named_dtype",)

# As precision is written elsewhere.
_SHORT: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)


def named_dtype(name: str) -> torch.dtype | None:
    """Find a dtype by its name in torch, with or without ``torch.``, or by ``"bf16"`` and the like.

    >>> named_dtype("torch.float16"), named_dtype("bf16"), named_dtype("float15")
    (torch.float16, torch.bfloat16, None)
    """
    plain = name.removeprefix("torch.")
    found: object = _SHORT.get(plain) or getattr(torch, plain, None)
    return found if isinstance(found, torch.dtype) else None
