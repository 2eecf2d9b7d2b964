"""The layouts of ranks that models are trained, saved and loaded on in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import accelfn as af
from tests.parallel.tensor_models import PLAN

__all__ = ("LAYOUTS", "Layout")


class Layout(NamedTuple):
    """Sizes of a mesh."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    cp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1  # a part of ``shard``
    schedule: str = "1f1b"  # of stages along ``pp``
    split: tuple[str, ...] = ()  # where stages begin, other than the first; without: evenly

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.tp * self.cp * self.sp * self.pp

    @property
    def num_blocks(self) -> int:
        """Blocks that a model needs, for each stage one."""
        return max(2, self.pp * (1 if self.schedule in ("1f1b", "gpipe") else 2))

    def config(self, plan: Mapping[str, str] | None = PLAN) -> af.ParallelismConfig:
        """Return the mesh; ``plan`` says how ranks along ``tp`` share layers, None leaves it to the model."""
        stages = (
            af.config.PipelineParallelConfig(schedule=self.schedule, split=self.split)
            if self.pp > 1
            else None
        )
        handler = af.config.TorchTensorParallelConfig(plan=plan) if self.tp > 1 and plan else None
        return af.ParallelismConfig(
            dp_replicate_size=self.replicate,
            dp_shard_size=self.shard,
            tp_size=self.tp,
            cp_size=self.cp,
            sp_size=self.sp,
            pp_size=self.pp,
            ep_size=self.ep,
            tp_handler=handler,
            pp_handler=stages,
        )


LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(replicate=2),
    "dp4": Layout(replicate=4),
    "fsdp2": Layout(shard=2),
    "fsdp4": Layout(shard=4),
    "hsdp2x2": Layout(replicate=2, shard=2),
    "tp2": Layout(tp=2),
    "tp2xdp2": Layout(replicate=2, tp=2),
    "tp2xfsdp2": Layout(shard=2, tp=2),
    "cp2": Layout(cp=2),
    "cp2xfsdp2": Layout(shard=2, cp=2),
    "sp2": Layout(sp=2),
    "sp2xfsdp2": Layout(shard=2, sp=2),
    "tp2xcp2": Layout(tp=2, cp=2),
    "tp2xsp2": Layout(tp=2, sp=2),
    "ep2": Layout(shard=2, ep=2),
    "ep2xfsdp2": Layout(shard=4, ep=2),
    "ep2xdp2": Layout(replicate=2, shard=2, ep=2),
    "cp2xep2": Layout(shard=2, cp=2, ep=2),
    "sp2xep2": Layout(shard=2, sp=2, ep=2),
    "pp2": Layout(pp=2),
    "pp2-gpipe": Layout(pp=2, schedule="gpipe"),
    "pp2-interleaved": Layout(pp=2, schedule="interleaved1f1b"),
    "pp4": Layout(pp=4),
    "pp2xdp2": Layout(replicate=2, pp=2),
    "pp2xfsdp2": Layout(shard=2, pp=2),
    "pp2xtp2": Layout(tp=2, pp=2),
    "pp2xcp2": Layout(cp=2, pp=2),
    "pp2xsp2": Layout(sp=2, pp=2),
    "pp2xep2": Layout(shard=2, ep=2, pp=2),
}
