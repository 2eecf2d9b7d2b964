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

_MESH = "Until then all ranks hold the whole model, and process_index is the place among them."


def _refuse(name: str, part: str, advice: str) -> NotAvailableError:
    return NotAvailableError(
        f"Accelerator.{name} needs {part}, and this version of accelfn has no machinery for that yet. "
        f"{advice}"
    )


class Unavailable:
    """The names of parts that this version does not have.

    Questions that have a true answer without the part are answered; everything else raises
    ``NotAvailableError``.
    """

    # --- a mesh of ranks -------------------------------------------------------------------------

    @property
    def parallelism_config(self) -> Any:
        """Sizes of the mesh: None, as this version has no mesh."""
        return None

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh as torch has it: None, as this version has no mesh."""
        return None

    @property
    def data_parallel_rank(self) -> int:
        """Place on the mesh's axis of whole replicas: not in this version."""
        raise _refuse("data_parallel_rank", "a mesh of ranks", _MESH)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Place on the mesh's axis of shards: not in this version."""
        raise _refuse("data_parallel_shard_rank", "a mesh of ranks", _MESH)

    @property
    def tensor_parallel_rank(self) -> int:
        """Place on the mesh's axis of tensor parallelism: not in this version."""
        raise _refuse("tensor_parallel_rank", "a mesh of ranks", _MESH)

    @property
    def pipeline_parallel_rank(self) -> int:
        """Place on the mesh's axis of pipeline parallelism: not in this version."""
        raise _refuse("pipeline_parallel_rank", "a mesh of ranks", _MESH)

    @property
    def context_parallel_rank(self) -> int:
        """Place on the mesh's axis of context parallelism: not in this version."""
        raise _refuse("context_parallel_rank", "a mesh of ranks", _MESH)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Any = None,
    ) -> AbstractContextManager[None]:
        """Cut sequences between ranks inside: not in this version."""
        raise _refuse("maybe_context_parallel", "a mesh of ranks", _MESH)

    # --- FSDP, fp8, big models -------------------------------------------------------------------

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP2: never in this version."""
        return False

    @property
    def fp8_backend(self) -> str | None:
        """Engine of 8-bit matrix products: None, as this version has none."""
        return None
