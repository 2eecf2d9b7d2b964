"""Values as texts, to compare them to the last bit."""

from typing import Any, cast

import torch


def text(value: Any) -> str:
    """Print a value with every bit of its tensors, and dicts in one order."""
    kind = cast("Any", type(value))
    if issubclass(kind, torch.Tensor) or kind.__name__ == "ndarray":
        return f"{kind.__name__} {value.dtype} {value.tolist()}"
    if issubclass(kind, dict):
        return str(sorted((str(key), text(part)) for key, part in value.items()))
    if issubclass(kind, list | tuple):
        return f"{kind.__name__}{[text(part) for part in value]}"
    return f"{kind.__name__} {value!r}"
