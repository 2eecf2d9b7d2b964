"""A batch through the stages of a pipeline: torch's schedules, and the stages that they call.

Each stage runs the user's loss function, and in it the model's own forward, on a microbatch. The schedule
passes on the number of the microbatch alone: every rank along "pp" has the batch itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from accelfn.errors import ConfigurationError
from accelfn.parallel.schedule import SchedulePlan
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.parallel.stage_run import Outline
from accelfn.parallel.stages import outline_stage, run_stage

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ("PipelineProgram", "SentError", "StageCall", "make_schedule", "sent_of")

R = TypeVar("R")


class SentError(BaseException):
    """Leaves a loss function where it has called the model, on all stages but the last one.

    No ``Exception``, since a loss function may catch those.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Carry what is sent."""
        super().__init__()
        self.tensors = tensors


class StageCall:
    """The call of a model that is cut into stages: runs the stage whose turn it is.

    It keeps nothing alive. Outside of a schedule the model's forward refuses the call by name.
    """

    def __init__(
        self, model: nn.Module, plan: PipelinePlan, around: Callable[..., Any] | None = None
    ) -> None:
        """Replace the call of ``model``.

        Args:
            model: In which :func:`accelfn.parallel.stages.apply_stages` has left some stages.
            plan: That it was cut by.
            around: Calls what it is given, as ``around(call, *args, **kwargs)``; None for nothing.
        """
        self._model = weakref.ref(model)
        self._plan = plan
        self._around = around
        self._turn: Callable[..., Any] | None = None  # runs a stage, once
        self._calls = 0
        vars(model)["_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model on the last stage.

        Raises:
            SentError: Another stage was run, with what it sends.
            ConfigurationError: The loss function has called the model before.
        """
        model: Any = self._model()
        turn, self._turn = self._turn, None
        if turn is None and self._calls == 1:
            raise ConfigurationError(
                "the loss function has called the model twice, and a pipeline runs one forward pass of each "
                "batch. Call it once, on the rows of both calls."
            )
        if turn is None:  # in run_stage, or refused by the forward
            kind = cast("Any", type(model))
            call = kind._call_impl
            return (
                call(model, *args, **kwargs)
                if self._around is None
                else self._around(call, model, *args, **kwargs)
            )
        stage, output = turn(model, args, kwargs)
        self._calls = 1
        if stage + 1 < len(self._plan.stages):
            raise SentError(output)
        return output

    def run(
        self,
        stage: int,
        outlines: Sequence[Outline],
        received: tuple[torch.Tensor, ...],
        compute: Callable[[], Any],
    ) -> Any:
        """Return what ``compute``, which calls the model, gives on the last stage; of others what they send.

        Raises:
            ConfigurationError: ``compute`` has not called the model, or more than once.
            Exception: As ``compute``.
        """

        def turn(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
            return stage, run_stage(model, self._plan, stage, outlines, received, args, kwargs)

        return self._take(turn, compute)

    def outline(
        self,
        stage: int,
        before: Sequence[Outline],
        device: torch.device,
        compute: Callable[[], Any],
    ) -> tuple[Outline, Any]:
        """Return the outline of a stage, and on the last one what ``compute`` gives.

        Raises:
            ConfigurationError: As :meth:`run`.
            Exception: As ``compute``.
        """
        found: list[Outline] = []

        def turn(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
            outline, output = outline_stage(model, self._plan, stage, before, device, args, kwargs)
            found.append(outline)
            return stage, output

        result = self._take(turn, compute)
        return found[0], result

    def _take(self, turn: Callable[..., Any], compute: Callable[[], Any]) -> Any:
        self._turn, self._calls = turn, 0
        try:
            result = compute()
        except SentError as sent:
            return sent.tensors
        finally:
            called, self._calls = self._calls, 0
            self._turn = None
        if not called:
            raise ConfigurationError(
                "the loss function hasn't called the model that it was given, and a pipeline runs the model "
                "in that call. Call it once, and not a module inside of it."
            )
        return result


class PipelineProgram:
    """What the stages of a rank compute in one call of a schedule, by the number of the microbatch.

    Attributes:
        compute: ``compute(stage, received, index)`` returns what the stage sends, or on the last one what is
            differentiated; None where nothing is. The first stage receives nothing.
        stops: Whether an error ends the schedule on this rank at once. Otherwise its stages send zeros from
            then on, so that the schedule ends on all ranks, which then can tell each other.
        error: The first exception of this rank.
    """

    def __init__(
        self,
        compute: Callable[
            [int, tuple[torch.Tensor, ...], int], tuple[torch.Tensor, ...] | torch.Tensor | None
        ],
        *,
        stops: bool = False,
    ) -> None:
        """Run ``compute``."""
        self.compute = compute
        self.stops = stops
        self.error: Exception | None = None

    def attempt(self, action: Callable[[], R]) -> R | None:
        """Return what ``action`` does; None after an error.

        Raises:
            Exception: What it raised, where that ends the schedule.
        """
        if self.error is None:
            try:
                return action()
            except Exception as error:
                self.error = error
                if self.stops:
                    raise
        return None


class _StageModule(nn.Module):
    """What torch takes for a stage's module. Neither DDP's nor FSDP's: reductions are the handle's."""

    def __init__(
        self,
        index: int,
        own: Callable[[int], Sequence[nn.Parameter]],
        sent: tuple[torch.Tensor, ...],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.index = index
        self.program: PipelineProgram | None = None
        self.own = own
        self.sent = sent
        self.device = device

    def parameters(self, recurse: bool = True) -> Any:
        """Return those of the stage: a schedule with two backward passes asks for them."""
        del recurse
        return iter(self.own(self.index))

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        """Compute one microbatch."""
        program = cast("PipelineProgram", self.program)

        result = program.attempt(
            lambda: program.compute(self.index, received if self.index else (), int(index))
        )
        return _like(self.sent, self.device) if result is None else result

    def catch_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's backward pass of a stage, which after an error computes zeros."""

        def run(kind: str, values: dict[str, Any], last_backward: bool = False) -> Any:
            def compute() -> Any:
                try:
                    return backward(kind, values, last_backward=last_backward)
                except RuntimeError as error:
                    raise error.__cause__ or error  # noqa: B904 -- torch puts its own around every one

            computed = cast("PipelineProgram", self.program).attempt(compute)
            if computed is not None:
                return computed
            return tuple(map(torch.zeros_like, values.get("input_values", ()))), []

        return run


def _like(tensors: tuple[torch.Tensor, ...], device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """Return zeros of the same shapes and dtypes, which require gradients where they can."""
    return tuple(
        torch.zeros_like(one, device=device, requires_grad=one.is_floating_point()) for one in tensors
    )


def sent_of(
    outlines: Sequence[Outline], plan: PipelinePlan, schedule: SchedulePlan, *, is_trained: bool
) -> list[tuple[torch.Tensor, ...]]:
    """Return what each stage but the last one sends, of the outlines of all: tensors on the meta device.

    Raises:
        ConfigurationError: Gradients are needed, and a tensor has none, since it is of whole numbers; or the
            schedule can't compute those of several.
    """
    sent = [stage.sent_to(following) for stage, following in itertools.pairwise(outlines)]
    for index, tensors in enumerate(sent if is_trained else ()):
        block, paths = plan.stages[index + 1].blocks[0], outlines[index + 1].receives
        for path, one in zip(paths, tensors, strict=True):
            if not one.is_floating_point():
                raise ConfigurationError(
                    f"stage {index} of a pipeline would send a tensor of {one.dtype} and shape "
                    f"{tuple(one.shape)}, which is {path} of the call of {block}, and through which no "
                    "gradient comes back. Compute it from the model's arguments, which every stage has, or "
                    "begin the next stage with another block."
                )
        if schedule.splits_backward and len(tensors) > 1:
            # torch leaves out parameters whose gradients don't meet those of what was received.
            raise ConfigurationError(
                f"schedule={schedule.name!r} computes gradients of inputs and of weights apart, which torch "
                f"can't do where a stage sends several tensors: {', '.join(paths)} of the call of {block}. "
                'Use "1f1b", "interleaved1f1b", "loopedbfs" or "gpipe".'
            )
    return sent


def make_schedule(
    plan: SchedulePlan,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
    boundaries: Sequence[tuple[torch.Tensor, ...]],
    parameters: Callable[[int], Sequence[nn.Parameter]],
    *,
    is_trained: bool,
) -> Callable[[PipelineProgram], None]:
    """Make a schedule of torch's for batches of one shape, and return what runs it.

    Ranks: every rank of ``group`` runs it, with the same plan and boundaries.

    Args:
        plan: As the batch allows it.
        rank: This one's along "pp".
        group: The ranks along "pp".
        device: Of the tensors that are sent.
        boundaries: What each stage but the last one sends of a microbatch, on the meta device.
        parameters: Those of a stage, by its index.
        is_trained: Run backward passes too.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    modules: list[_StageModule] = []
    stages: list[Any] = []
    for index in plan.stages_of(rank):
        is_last = index + 1 == plan.num_stages
        sent = (torch.empty((), device="meta"),) if is_last else boundaries[index]
        module = _StageModule(index, parameters, sent, device)
        stage: Any = PipelineStage(
            module,
            index,
            plan.num_stages,
            device,
            # Shapes that are given: torch would find them out in a forward and a backward pass of nothing.
            input_args=_like(boundaries[index - 1], "meta") if index else (),
            output_args=_like(sent, "meta"),
            group=group,
        )
        stage.backward_maybe_with_nosync = module.catch_backward(stage.backward_maybe_with_nosync)
        modules.append(module)
        stages.append(stage)
    kind = cast("Any", get_schedule_class(plan.name))
    is_multiple = plan.stages_per_rank > 1 or plan.name not in ("gpipe", "1f1b")
    schedule = kind(
        stages if is_multiple else stages[0],
        plan.num_microbatches,
        loss_fn=_as_it_is if is_trained else None,
        scale_grads=False,
    )
    if plan.is_v_shaped and not is_trained:
        _leave_out_backward(schedule, plan)
    numbers = torch.arange(plan.num_microbatches)

    def run(program: PipelineProgram) -> None:
        for module in modules:
            module.program = program
        try:
            if is_trained:
                schedule.step(index=numbers, target=numbers, return_outputs=False)
            else:
                schedule.eval(index=numbers, return_outputs=False)
        except RuntimeError as error:
            if program.error is None:
                raise
            raise program.error from error.__cause__ if error.__cause__ is not program.error else None
        finally:
            for module, stage in zip(modules, stages, strict=True):
                module.program = None
                stage.clear_runtime_states()  # else it keeps activations until the next batch

    return run


def _leave_out_backward(schedule: Any, plan: SchedulePlan) -> None:
    """Let a schedule run forward passes alone: torch can't leave the backward passes out of a V."""
    from torch.distributed.pipelining import schedules

    torchs = cast("Any", schedules)
    forward = torchs._ComputationType.FORWARD
    passes = {
        rank: [
            torchs._Action(stage, forward, index)
            for stage in plan.stages_of(rank)
            for index in range(plan.num_microbatches)
        ]
        for rank in range(plan.num_ranks)
    }
    schedule.pipeline_order_with_comms = torchs._add_send_recv(passes, plan.rank_of, plan.num_stages)


def _as_it_is(value: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return what the last stage has computed, which is the loss."""
    del number
    return value
