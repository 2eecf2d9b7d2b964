"""Remove what ``prepare_model`` has put around a model."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context
from accelfn.parallel.engines import wraps_model
from accelfn.parallel.forward import copied_without
from accelfn.parallel.strategies.compilation import without_compile
from accelfn.parallel.strategies.precision import MixedPrecisionForward
from accelfn.training.prepared import MARK

M = TypeVar("M", bound=nn.Module)


def unwrap_model(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Remove the wrappers of ``prepare_model`` and ``torch.compile`` from a model.

    Ranks: local.

    Args:
        model: Prepared or not.
        keep_fp32_wrapper: Keep ``forward`` under autocast. Otherwise the result is a shallow copy in full
            precision; ``model`` itself isn't changed.
        keep_torch_compile: Keep a compiled model compiled.

    Raises:
        TypeError: Got a Context, which other functions take first.

    >>> import accelfn as af
    >>> model = nn.Linear(1, 1)
    >>> unwrap_model(af.prepare_model(Context(), model)) is model
    True
    """
    if isinstance(model, Context):
        raise TypeError("unwrap_model: takes no Context. Write unwrap_model(model).")
    compiled: nn.Module | None = None
    inner = model
    while True:  # wrappers may be nested in either order
        if isinstance(inner, (DistributedDataParallel, nn.DataParallel)) or wraps_model(inner):
            inner = cast("nn.Module", inner.module)
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            compiled = inner
            inner = cast("nn.Module", inner._orig_mod)
        else:
            break
    plain = inner if keep_fp32_wrapper else without_precision(inner)
    if plain is not inner:
        vars(plain).pop(MARK, None)  # the copy in full precision isn't prepared
    if not keep_torch_compile:
        return without_compile(plain)
    if compiled is None:
        return plain
    if plain is inner and compiled._orig_mod is inner:
        return compiled if keep_fp32_wrapper else without_precision(compiled)
    return cast("nn.Module", cast("Any", torch).compile(plain))


def without_precision(model: M) -> M:
    """Return a module that shares everything with ``model`` but computes in full precision."""
    if not isinstance(model.__dict__.get("forward"), MixedPrecisionForward):
        return model
    return copied_without(model, MixedPrecisionForward)
