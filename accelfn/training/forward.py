"""The output of a model on every rank, whatever the model is spread over."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelfn.context import Context, check_context
from accelfn.parallel import PipelineHandle, handle_of

__all__ = ("forward",)


def forward(ctx: Context, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return ``model(*args, **kwargs)``, also of a model that is cut into stages.

    Such a model can't be called, since no rank has all of it. Here a batch goes through its stages in
    microbatches, without gradients, and every rank along "pp" gets the output. Any other model is called as
    it is.

    Ranks: every rank of ``ctx``, where the model is cut into stages, and those along "pp" with the same
    arguments.

    Args:
        ctx: The world.
        model: As :func:`accelfn.prepare_model` gave it.
        *args: Of its call. In a pipeline tensors with as many rows as the first one are cut into
            microbatches, and all else comes whole to each of them.
        **kwargs: As ``args``.

    Returns:
        The model's output. In a pipeline its tensors have a row for each sample.

    Raises:
        ValueError: In a pipeline: arguments or output can't be cut along their rows.
        ConfigurationError: In a pipeline: ranks along "pp" have different batches, or the model can't run in
            these stages.

    >>> import torch
    >>> forward(Context(), nn.Identity(), torch.ones(1))
    tensor([1.])
    """
    check_context("forward", ctx)
    handle = handle_of(model)
    if isinstance(handle, PipelineHandle):
        return handle.forward(args, kwargs)
    return model(*args, **kwargs)
