"""The handle of a model that is cut into the stages of a pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import nn

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import IN_NO_SYNC, BatchRun, Handle
from accelfn.parallel.norm import count_stages
from accelfn.parallel.pipeline_engine import Line, PipelineEngine
from accelfn.parallel.pointers import named, whole_of
from accelfn.parallel.schedule import SchedulePlan
from accelfn.parallel.shard_handle import ShardHandle
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.tree import is_dtensor, local_of

__all__ = ("PipelineHandle",)

L = TypeVar("L")


class PipelineHandle(Handle):
    """Of a model of which each rank along "pp" has some stages; in one stage another handle reduces.

    Gradients of a parameter that several stages hold are added up where a window closes.
    """

    engine: ClassVar[Literal["none", "ddp", "shard", "pipeline"]] = "pipeline"
    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True
    cuts_batches: ClassVar[bool] = True

    def __init__(
        self, ctx: Context, model: nn.Module, plan: PipelinePlan, schedule: SchedulePlan, inner: Handle
    ) -> None:
        """Run the stages of ``model`` in ``schedule``.

        Args:
            ctx: The world.
            model: With the stages of this rank alone.
            plan: That it was cut by.
            schedule: Of a batch that can be cut as was asked for.
            inner: Reduces the gradients of the stages over their replicas and shards.
        """
        self._inner = inner
        self._is_open = False  # whether gradients of shared parameters are those of this rank's stages alone
        mesh = cast("Any", ctx.mesh)
        lines = {mesh.plan.group(rank, "pp") for rank in range(ctx.num_processes)}
        self._engine = PipelineEngine(
            ctx,
            model,
            plan,
            schedule,
            Line(sorted(lines), ctx.along("pp"), mesh.device_mesh("pp").get_group()),
            around=inner.compute if isinstance(inner, ShardHandle) else None,
            waits_inside=mesh.plan.size("dp_shard", "cp", "sp") > 1,
        )
        whole = whole_of(model)
        first: Mapping[str, str] = {} if whole is None else whole.first
        parameters = {first.get(name, name): one for name, one in named(model).items()}
        self._shared: list[tuple[weakref.ref[nn.Parameter], tuple[int, ...]]] = []
        for name, stages in plan.shared.items():
            ranks = tuple(sorted({schedule.rank_of(stage) for stage in stages}))
            own = parameters.get(name)
            if len(ranks) > 1 and own is not None and own.requires_grad:
                self._shared.append((weakref.ref(cast("nn.Parameter", own)), ranks))
                count_stages(own, len(ranks))
        super().__init__(model, model.parameters(), instead_of=inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineHandle:
        """Refuse: what a copy holds would be trained by nobody."""
        raise ConfigurationError(
            "a prepared model that is cut into stages can't be copied. Copy it before it is prepared, and "
            "prepare the copy with evaluation_mode=True, or save it and load the weights."
        )

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        return IN_NO_SYNC if self._is_open else self._inner.why_unreduced()

    def discard(self) -> None:
        """Release gradients that have added up and were not averaged yet."""
        self._inner.discard()
        self._is_open = False

    def run(self, batch: BatchRun[L]) -> L:
        """Run one batch through the schedule. Returns its loss, without a gradient, on every rank.

        Ranks: every rank of the context.

        Raises:
            ValueError: The batch can't be cut along its rows.
            ConfigurationError: Ranks along "pp" have different batches; the loss function doesn't call the
                model once; or the model can't run in these stages.
            Exception: As the loss function, and RemoteRankError on the other ranks where it failed at once.
        """
        prepared = self._engine.prepare(
            "forward_backward",
            batch.batch,
            partial(batch.loss_fn, batch.model),
            is_trained=True,
            num_batches=batch.num_batches,
        )
        self._open()
        try:
            with self._inner.without_sync():
                loss = self._engine.run(prepared, batch.join, to_differentiate=batch.to_differentiate)
        except BaseException:
            self._inner.discard()
            raise
        if self._syncs:
            self._close()
        return cast("L", loss)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the model on every rank, as :meth:`PipelineEngine.forward`."""
        return self._engine.forward(args, kwargs)

    def _shared_now(self) -> Generator[tuple[nn.Parameter, tuple[int, ...]], None, None]:
        for reference, ranks in self._shared:
            parameter = reference()
            if parameter is not None:
                yield parameter, ranks

    def _open(self) -> None:
        """Leave the sum that a shared parameter has on the first rank that holds it, to be counted once."""
        if self._is_open:
            return
        self._is_open = True
        for parameter, ranks in self._shared_now():
            if self._engine.rank != ranks[0]:
                parameter.grad = None

    def _close(self) -> None:
        """Reduce the gradients of the stages, and add up those of parameters that several stages hold."""
        self._inner.reduce()
        for parameter, ranks in self._shared_now():
            _add_up(parameter, ranks, self._engine.rank, self._engine.group)
        self._is_open = False


def _add_up(parameter: nn.Parameter, ranks: Sequence[int], rank: int, group: Any) -> None:
    """Let each of ``ranks`` have the sum of their gradients of a parameter, added in the order of ranks."""
    import torch.distributed as dist

    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    elif is_dtensor(gradient) and is_dtensor(parameter):
        wanted = cast("Any", parameter).placements
        if cast("Any", gradient).placements != wanted:
            gradient = cast("torch.Tensor", cast("Any", gradient).redistribute(placements=wanted))
    parameter.grad = gradient
    with torch.no_grad():
        own = local_of(gradient).contiguous()
        parts = {one: own if one == rank else torch.empty_like(own) for one in ranks}
        # One after another in one order of pairs, so that no two ranks wait for each other.
        for sender in ranks:
            for receiver in ranks:
                if sender == rank != receiver:
                    dist.send(own, group=group, group_dst=receiver)
                elif receiver == rank != sender:
                    dist.recv(parts[sender], group=group, group_src=sender)
        total = parts[ranks[0]].clone()
        for one in ranks[1:]:
            total += parts[one]
        local_of(gradient).copy_(total)
