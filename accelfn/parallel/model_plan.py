"""What becomes of a model on a mesh, as a value that prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from accelfn.context import MeshPlan
from accelfn.parallel.attention import AttentionPlan
from accelfn.parallel.expert_plans import ExpertPlan
from accelfn.parallel.schedule import SchedulePlan
from accelfn.parallel.shard import ShardPlan
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.parallel.tensor_plans import TensorPlan

__all__ = ("Engine", "ModelPlan")

Engine = Literal["none", "ddp", "shard"]

_MIB = 1 << 20


class ModelPlan(NamedTuple):
    """What is done with a model when it is prepared. A value; ``print(plan)`` shows it as a table.

    Attributes:
        model: Name of the model's class.
        num_parameters: Elements of its parameters, tied ones counted once.
        num_trainable: Of these, those that are trained.
        mesh: The ranks.
        pipeline: How the model is cut into stages; None where it isn't. What follows is of this rank's.
        schedule: In which order stages work; None without any.
        tensor: How ranks share each layer; None where they don't.
        attention: How ranks that share sequences compute attention; None where they don't.
        experts: How experts are spread over ranks; None where each rank has all of them.
        engine: What averages gradients: "ddp" (every rank has the whole model), "shard" (FSDP), or "none".
        shard: How the parameters are sharded; None where they are not.
        recomputed: Names of the modules whose activations are computed again in the backward.
        compiled: Names of the modules that are compiled, "" for the model itself; before it is sharded.
        precision: In what the model computes, in words.
    """

    model: str
    num_parameters: int
    num_trainable: int
    mesh: MeshPlan
    pipeline: PipelinePlan | None
    schedule: SchedulePlan | None
    tensor: TensorPlan | None
    attention: AttentionPlan | None
    experts: ExpertPlan | None
    engine: Engine
    shard: ShardPlan | None
    recomputed: tuple[str, ...]
    compiled: tuple[str, ...]
    precision: str

    @property
    def is_spread(self) -> bool:
        """Whether ranks hold different parts of the model."""
        return self.pipeline is not None or self.tensor is not None or self.shard is not None

    def rows(self) -> dict[str, str]:
        """Return the lines of the table: text by title."""
        rows = [
            ("model", f"{self.model}, {self.num_parameters:,} parameters, {self.num_trainable:,} trained")
        ]
        axes = [f"{axis} {self.mesh.size(axis)}" for axis in self.mesh.active()]
        rows.append(("mesh", " x ".join(axes) if axes else "one rank"))
        if self.pipeline is not None:
            rows.append(("pipeline", str(self.pipeline)))
            rows.append(("schedule", str(self.schedule)))
        if self.tensor is not None:
            rows.extend(self.tensor.rows().items())
        if self.attention is not None:
            rows.append(("attention", _row_of_attention(self.attention)))
        if self.experts is not None:
            rows.append(("experts", _row_of_experts(self.experts, self.shard)))
        averaged = " x ".join(self.mesh.active("loss"))
        if self.engine == "ddp":
            rows.append(("gradients", f"averaged over {averaged}; every rank has the whole model"))
        elif self.engine == "none":
            rows.append(("gradients", "whole on each rank as they are"))
        rows.extend(_rows_of_shard(self.shard, averaged))
        rows.append(("precision", self.precision))
        if self.recomputed:
            rows.append(("recomputed", f"in the backward: {_listed(self.recomputed)}"))
        rows.append(("compiled", _listed(self.compiled) if self.compiled else "nothing"))
        return dict(rows)

    def __str__(self) -> str:
        """Return the plan as a table."""
        rows = self.rows()
        width = max(map(len, rows))
        indent = "\n" + " " * (width + 2)
        return "\n".join(
            f"{title.ljust(width)}  {text.replace(chr(10), indent)}" for title, text in rows.items()
        )


def _row_of_attention(plan: AttentionPlan) -> str:
    how = f"passed around by {plan.rotation}" if plan.axis == "cp" else "heads exchanged"
    what = f"a ring of {plan.size}, keys and values {how}" if plan.axis == "cp" else f"{how} over {plan.size}"
    return f"each sequence shared along {plan.axis}: {what}; in {_listed(plan.modules)}"


def _rows_of_shard(plan: ShardPlan | None, averaged: str) -> list[tuple[str, str]]:
    if plan is None:
        return []
    rest = "the rest of the model" if len(plan.units) > 1 else "the whole model"
    units = [*reversed(plan.units[:-1])]
    freed = "freed after its forward" if plan.reshard else "kept until its backward"
    kept = _mib(plan.shard_bytes) + (" in host memory" if plan.offload else "")
    largest = f"the largest unit is {_mib(plan.gathered_bytes)} while it computes"
    whole = f"until the last batch of a window each rank holds {_mib(plan.unreduced_bytes)}, whole gradients"
    rows = [
        ("gradients", f"averaged over {averaged} by FSDP, and sharded over {plan.num_shards}"),
        ("units", ", ".join([_listed(units), rest]) if units else rest),
        (
            "parameters",
            f"{kept} on each rank; {largest}, and {freed if units else 'kept until its backward'}",
        ),
        ("windows", f"{whole}; with sync_each_batch its shard of them"),
    ]
    if plan.prefetch:
        rows.append(("prefetch", "each unit asks for the next one in its forward"))
    if plan.ignored:
        rows.append(("ignored", f"whole on each rank: {_listed(plan.ignored)}"))
    return rows


def _row_of_experts(plan: ExpertPlan, shard: ShardPlan | None) -> str:
    counts = sorted({held.num_experts for held in plan.modules.values()})
    each = " or ".join(str(count) for count in counts)
    own = " or ".join(str(count // plan.size) for count in counts)
    text = f"{each} of {_listed(plan.modules)}, spread over {plan.size} ranks: {own} on each"
    if shard is None or shard.num_expert_shards == 1:
        return text
    return f"{text}, sharded over {shard.num_expert_shards}"


def _listed(names: Iterable[str]) -> str:
    found = [name or "the model" for name in names]
    if len(found) <= 4:
        return ", ".join(found)
    return f"{found[0]}, {found[1]}, ..., {found[-1]} ({len(found)})"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB" if size >= _MIB else f"{size / 1024:,.1f} KiB"
