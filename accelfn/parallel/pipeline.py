"""A batch through the stages of a pipeline: torch's schedules, and the stages that they call.

Each stage runs the user's loss function, and in it the model's own forward, on a microbatch. The schedule
passes on the number of the microbatch alone: every rank along "pp" has the batch itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.errors import ConfigurationError
from accelfn.parallel.schedule import SchedulePlan
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.parallel.stages import run_stage

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ("PipelineProgram", "Sent", "SentError", "StageCall", "make_schedule", "sent_of")


class Sent(NamedTuple):
    """What a stage sends: shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def on(self, device: torch.device | str) -> torch.Tensor:
        """Return a tensor of zeros like it, which requires a gradient."""
        return torch.zeros(
            self.shape, dtype=self.dtype, device=device, requires_grad=self.dtype.is_floating_point
        )


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
        self._stage: int | None = None
        self._received: tuple[torch.Tensor, ...] | None = None
        self._calls = 0
        vars(model)["_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model on the last stage.

        Raises:
            SentError: Another stage was run, with what it sends.
            ConfigurationError: The loss function has called the model before.
        """
        model: Any = self._model()
        stage, self._stage = self._stage, None
        if stage is None and self._calls == 1:
            raise ConfigurationError(
                "the loss function has called the model twice, and a pipeline runs one forward pass of each "
                "batch. Call it once, on the rows of both calls."
            )
        if stage is None:  # in run_stage, or refused by the forward
            kind = cast("Any", type(model))
            call = kind._call_impl
            return (
                call(model, *args, **kwargs)
                if self._around is None
                else self._around(call, model, *args, **kwargs)
            )
        output = run_stage(model, self._plan, stage, self._received, args, kwargs)
        self._calls = 1
        if stage + 1 < len(self._plan.stages):
            raise SentError(output)
        return output

    def run(self, stage: int, received: tuple[torch.Tensor, ...] | None, compute: Callable[[], Any]) -> Any:
        """Return what ``compute``, which calls the model, gives on the last stage; of others what they send.

        Raises:
            ConfigurationError: ``compute`` has not called the model, or more than once.
            Exception: As ``compute``.
        """
        self._stage, self._received, self._calls = stage, received, 0
        try:
            result = compute()
        except SentError as sent:
            return sent.tensors
        finally:
            called, self._calls = self._calls, 0
            self._stage = self._received = None
        if not called:
            raise ConfigurationError(
                "the loss function hasn't called the model that it was given, and a pipeline runs the model "
                "in that call. Call it once, and not a module inside of it."
            )
        return result


class PipelineProgram:
    """What the stages of a rank compute in one call of a schedule, by the number of the microbatch.

    Attributes:
        compute: ``compute(stage, received, index)`` gives what the stage sends, or on the last one what is
            differentiated.
        error: The first exception of it, which torch's would hide.
    """

    def __init__(
        self,
        compute: Callable[
            [int, tuple[torch.Tensor, ...] | None, int], tuple[torch.Tensor, ...] | torch.Tensor
        ],
    ) -> None:
        """Run ``compute``."""
        self.compute = compute
        self.error: Exception | None = None


class _StageModule(nn.Module):
    """What torch takes for a stage's module. Neither DDP's nor FSDP's: reductions are the handle's."""

    def __init__(self, index: int, own: Callable[[int], Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self.index = index
        self.program: PipelineProgram | None = None
        self.own = own

    def parameters(self, recurse: bool = True) -> Any:
        """Return those of the stage: a schedule with two backward passes asks for them."""
        del recurse
        return iter(self.own(self.index))

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> Any:
        """Compute one microbatch."""
        program = cast("PipelineProgram", self.program)
        try:
            return program.compute(self.index, received if self.index else None, int(index))
        except Exception as error:
            program.error = program.error or error
            raise


def sent_of(tensors: tuple[torch.Tensor, ...]) -> tuple[Sent, ...]:
    """Return what a stage sends, of the tensors that it has sent.

    Raises:
        ConfigurationError: One has no gradient, since it is of whole numbers.
    """
    for one in tensors:
        if not one.is_floating_point():
            raise ConfigurationError(
                f"a stage of a pipeline would send a tensor of {one.dtype} and shape {tuple(one.shape)}, "
                "through which no gradient comes back. Let the first block of a stage take what the block "
                "before computes in floating point."
            )
    return tuple(Sent(tuple(one.shape), one.dtype) for one in tensors)


def make_schedule(
    plan: SchedulePlan,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
    boundaries: Sequence[tuple[Sent, ...]],
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
        boundaries: What each stage but the last one sends of a microbatch.
        parameters: Those of a stage, by its index.
        is_trained: Run backward passes too.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    modules: list[_StageModule] = []
    stages: list[Any] = []
    for index in plan.stages_of(rank):
        is_last = index + 1 == plan.num_stages
        module = _StageModule(index, parameters)
        # Shapes that are given: torch would find them out in a forward and a backward pass of nothing.
        received = tuple(one.on("meta") for one in boundaries[index - 1]) if index else ()
        sent = (
            (torch.zeros((), device="meta", requires_grad=True),)
            if is_last
            else tuple(one.on("meta") for one in boundaries[index])
        )
        modules.append(module)
        stages.append(
            PipelineStage(
                module, index, plan.num_stages, device, input_args=received, output_args=sent, group=group
            )
        )
    kind = cast("Any", get_schedule_class(plan.name))
    is_multiple = plan.stages_per_rank > 1 or plan.name not in ("gpipe", "1f1b")
    schedule = kind(
        stages if is_multiple else stages[0],
        plan.num_microbatches,
        loss_fn=_as_it_is if is_trained else None,
        scale_grads=False,
    )
    numbers = torch.arange(plan.num_microbatches)

    def run(program: PipelineProgram) -> None:
        for module in modules:
            module.program = program
        try:
            if is_trained:
                schedule.step(index=numbers, target=numbers, return_outputs=False)
            else:
                schedule.eval(index=numbers)
        except RuntimeError as error:
            if program.error is None:
                raise
            raise program.error from error.__cause__ if error.__cause__ is not program.error else None
        finally:
            for module in modules:
                module.program = None

    return run


def _as_it_is(value: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return what the last stage has computed, which is the loss."""
    del number
    return value
