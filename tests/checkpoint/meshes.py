"""Meshes of ranks that models are prepared on, for tests of what is saved."""

from __future__ import annotations

from typing import Any, NamedTuple

import accelfn as af
from tests.parallel.tensor_models import PLAN

__all__ = ("LAYOUTS", "Sizes")


class Sizes(NamedTuple):
    """Of a mesh."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard * self.tp

    def options(self) -> dict[str, Any]:
        """Arguments of ``init_context``."""
        handler = af.config.TorchTensorParallelConfig(plan=PLAN) if self.tp > 1 else None
        config = af.ParallelismConfig(
            dp_replicate_size=self.replicate,
            dp_shard_size=self.shard,
            tp_size=self.tp,
            tp_handler=handler,
        )
        return {"parallelism_config": config}


LAYOUTS = {
    "one": Sizes(),
    "dp2": Sizes(replicate=2),
    "fsdp2": Sizes(shard=2),
    "hsdp2x2": Sizes(replicate=2, shard=2),
    "tp2": Sizes(tp=2),
    "tp2xfsdp2": Sizes(shard=2, tp=2),
}
