"""Gradients that wait outside of ``.grad`` for a reduction, until an accumulation window closes."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from accelfn.parallel.values import count_writes
from accelfn.tree import from_local, local_of

K = TypeVar("K")


class WaitingGradients(Generic[K]):
    """Parameters whose gradients wait outside of ``.grad``, until an accumulation window closes.

    Meanwhile their ``.grad`` are zeros that take no memory. Whoever clears them, in any way, means the
    gradients that wait.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._held: list[tuple[K, torch.Tensor, torch.Tensor, int, torch.Tensor | None]] = []

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._held)

    def hold(self, key: K, parameter: torch.Tensor) -> None:
        """Set ``.grad`` of a parameter to zeros, until :meth:`release`."""
        zeros = _zeros_without_memory(parameter)
        self._held.append((key, parameter, zeros, count_writes(zeros), parameter.grad))
        parameter.grad = zeros

    def release(self) -> list[K]:
        """Restore ``.grad`` of all parameters, except where it was cleared; return the keys of these."""
        cleared: list[K] = []
        for key, parameter, zeros, num_writes, before in self._held:
            if parameter.grad is not zeros:
                cleared.append(key)
            elif count_writes(zeros) == num_writes:
                parameter.grad = before
            else:  # cleared in place
                parameter.grad = torch.zeros_like(parameter if before is None else before)
                cleared.append(key)
        self._held.clear()
        return cleared


def _zeros_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    zeros = torch.zeros((), dtype=local.dtype, device=local.device).expand(local.shape)
    return from_local(zeros, like=tensor)
