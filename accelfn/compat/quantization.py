"""Quantisation with a configuration that may have been changed."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

import accelfn.bigmodel as bigmodel
from accelfn.compat.records import freeze

M = TypeVar("M", bound=nn.Module)


def load_and_quantize_model(model: M, bnb_quantization_config: Any, *args: Any, **kwargs: Any) -> M:
    """Quantise the linear layers of a model; see :func:`accelfn.load_and_quantize_model`."""
    return bigmodel.load_and_quantize_model(model, freeze(bnb_quantization_config), *args, **kwargs)
