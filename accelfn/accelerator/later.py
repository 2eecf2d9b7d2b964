"""Methods of the Accelerator that wait for a part of accelfn: they have their names and say what is missing.

A part that comes takes its methods from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from accelfn.errors import NotAvailableError

__all__ = ("Unavailable",)

_WHOLE = "Until then each rank works on whole sequences."


def _refuse(name: str, part: str, advice: str) -> NotAvailableError:
    return NotAvailableError(f"Accelerator.{name} needs {part}, which accelfn does not support yet. {advice}")


class Unavailable:
    """The names of parts that this version does not have.

    Questions that have a true answer without the part are answered; everything else raises
    ``NotAvailableError``.
    """

    # --- sequences -------------------------------------------------------------------------------

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Any = None,
    ) -> AbstractContextManager[None]:
        """Cut sequences between ranks inside: not in this version."""
        raise _refuse("maybe_context_parallel", "context parallelism", _WHOLE)

    # --- fp8 -------------------------------------------------------------------------------------

    @property
    def fp8_backend(self) -> str | None:
        """Engine of 8-bit matrix products: None, as this version has none."""
        return None
