"""8-bit weights, gradients and optimizer states by MS-AMP, by its documentation of version 0.4."""

from __future__ import annotations

import importlib
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from accelfn.config import MSAMPRecipeKwargs
from accelfn.context import Context
from accelfn.errors import NotAvailableError


def initialize(
    ctx: Context, model: nn.Module, optimizer: Optimizer, recipe: MSAMPRecipeKwargs
) -> tuple[nn.Module, Optimizer]:
    """Return a model and its optimizer in 8 bits. Moves the model to this rank's device, and writes into it.

    Ranks: local.

    Raises:
        NotAvailableError: MS-AMP can't be imported.
    """
    try:
        msamp: Any = importlib.import_module("msamp")
    except (ImportError, OSError) as error:
        raise NotAvailableError(
            f"mixed_precision='fp8' with MS-AMP: msamp can't be imported here: {error}. Use torchao, with "
            "AORecipeKwargs."
        ) from error
    found = msamp.initialize(model.to(ctx.device), optimizer, opt_level=str(recipe.opt_level))
    return cast("tuple[nn.Module, Optimizer]", found)
