"""The forward pass of one stage of a model that is cut into several.

Every stage runs the model's own forward on the arguments of the whole model. Modules of other stages aren't
called, and tensors stand in for what they return; where the forward calls the first block of the next stage
it is left. What the call of a stage's first block has of such tensors is what the stage receives: the values
that the call has at the same places in the stage before. So masks, positions and Python's control flow are
the model's own on each stage. Whatever else depends on another stage is refused by name.

Which places these are, and what the modules of earlier stages return, is found out once for batches of one
shape, by running the stages one after another (:func:`outline_stage`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import modules_of
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.pointers import remember_whole
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.parallel.stage_run import LeaveError, Outline, StageRun
from accelfn.parallel.stand_in import Scope, stand_in_of_parameter

__all__ = ("StagedForward", "apply_stages", "outline_stage", "run_stage")

# What models of transformers collect from all blocks, by their names of arguments and of fields of a config.
_OF_ALL_BLOCKS = (
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)


class StagedForward(WrappedForward):
    """The ``forward`` of a model of which some stages are here. Runs inside :func:`run_stage` only.

    It doesn't keep the model alive, of which it is an attribute.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan) -> None:
        """Stand in for the ``forward`` of ``model``."""
        forward = model.forward
        super().__init__(_WeakMethod(forward) if isinstance(forward, MethodType) else forward)
        self._plan = plan
        stages: dict[str, list[int]] = {}
        for index, one in enumerate(plan.stages):
            for name in (*one.blocks, *one.modules):
                stages.setdefault(name, []).append(index)
        modules = modules_of(model)
        self._units = [(name, tuple(own), modules[name]) for name, own in stages.items()]
        self.scope: Scope = Scope()
        self.run: StageRun | None = None  # while run_stage runs
        self._names = tuple(inspect.signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model on the last stage, and elsewhere a tuple of what is sent."""
        run = self.run
        model = getattr(self.__wrapped__, "__self__", None)
        if run is None:
            raise ConfigurationError(
                f"{type(model).__name__} is cut into {len(self._plan.stages)} stages, and no rank has "
                "all of them: it can't be called. Use accelfn.forward_backward(ctx, model, loss_fn, ...) to "
                "train it, and accelfn.forward(ctx, model, ...) for its output."
            )
        kwargs = self._without_collecting(model, args, kwargs)
        self.scope.is_open = True
        try:
            with run.gates(self._units):
                output = self.__wrapped__(*args, **kwargs)
        except LeaveError:
            return run.sent
        finally:
            self.scope.is_open = False
        return run.check_output(output)

    def _without_collecting(
        self, model: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the keyword arguments, with ``use_cache=False`` where the model has a default for it.

        Raises:
            ConfigurationError: The call, or the model's config, asks for what only all blocks have together.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        config: object = getattr(model, "config", None)
        for name in _OF_ALL_BLOCKS:
            by_config = False if name == "use_cache" else getattr(config, name, None)
            asked = given.get(name, by_config)
            if asked is not None and asked is not False:
                raise ConfigurationError(
                    f"{type(model).__name__} was asked for {name}, which is collected from all blocks, "
                    f"and each stage of a pipeline has some of them. Leave it out, or pass {name}="
                    f"{'None' if name == 'past_key_values' else 'False'}."
                )
        if "use_cache" in self._names and "use_cache" not in given:
            return {**kwargs, "use_cache": False}
        return kwargs


class _WeakMethod:
    """A bound method that doesn't keep its object alive."""

    def __init__(self, method: MethodType) -> None:
        self.__func__: Callable[..., Any] = method.__func__
        self._owner = weakref.ref(method.__self__)
        self.__signature__ = inspect.signature(method)

    @property
    def __self__(self) -> Any:
        return self._owner()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @override
    def __reduce__(self) -> tuple[type[_WeakMethod], tuple[MethodType]]:
        """Copy and pickle it with its object."""
        return _WeakMethod, (MethodType(self.__func__, self.__self__),)


def apply_stages(model: nn.Module, plan: PipelinePlan, own: Sequence[int]) -> None:
    """Leave of a model only what its stages ``own`` need; the rest stays as modules without tensors.

    Names of what remains are as before, and lists keep their lengths. Writes into ``model``, which from then
    on runs by :func:`run_stage` only.

    Ranks: local.

    Args:
        model: That was planned for; may be on the meta device.
        plan: From :func:`plan_stages`.
        own: Indexes of the stages that this rank runs.

    Raises:
        ConfigurationError: There is no such stage, or the model isn't that of the plan. Nothing was changed.
    """
    if not own or not set(own) <= set(range(len(plan.stages))):
        raise ConfigurationError(
            f"apply_stages: own must be some of the stages 0 to {len(plan.stages) - 1}, got {list(own)}."
        )
    modules = modules_of(model)
    by_stage = [[*stage.blocks, *stage.modules] for stage in plan.stages]
    missing = [name for names in by_stage for name in names if name not in modules]
    if missing:
        raise ConfigurationError(
            f"apply_stages: the plan is of another model: {type(model).__name__} has no {', '.join(missing)}."
        )
    remember_whole(model)
    staged = StagedForward(model, plan)
    kept = {part for index in own for name in by_stage[index] for part in modules[name].modules()}
    for module in {part for name in plan.elsewhere(own) for part in modules[name].modules()} - kept:
        for kind in ("_parameters", "_buffers"):
            tensors = cast("dict[str, torch.Tensor | None]", vars(module)[kind])
            # As plain attributes, for models that look at the dtype of a weight.
            for key, one in tensors.items():
                vars(module)[key] = None if one is None else stand_in_of_parameter(one, staged.scope)
            tensors.clear()
    model.forward = staged


def outline_stage(
    model: nn.Module,
    plan: PipelinePlan,
    index: int,
    before: Sequence[Outline],
    device: torch.device | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Outline, Any]:
    """Run the forward pass of one stage on zeros, to find out what other stages have to know of it.

    Ranks: any; doesn't communicate.

    Args:
        model: As of :func:`run_stage`.
        plan: That it was cut by.
        index: Of the stage.
        before: Outlines of the stages before it, of the same batch.
        device: Of what the stage will receive.
        args: Positional arguments of the whole model's call.
        kwargs: Keyword arguments of it.

    Returns:
        The outline of the stage, and of the last one the model's output; of others nothing.

    Raises:
        ConfigurationError: As :func:`run_stage`.
    """
    staged = _staged(model)
    run = StageRun(staged.scope, plan, index, before, (), device)
    output = _call(model, staged, run, args, kwargs)
    return Outline(run.receives, run.results, run.offers), output


def run_stage(
    model: nn.Module,
    plan: PipelinePlan,
    index: int,
    outlines: Sequence[Outline],
    received: tuple[torch.Tensor, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run the forward pass of one stage.

    Ranks: any; doesn't communicate.

    Args:
        model: In which :func:`apply_stages` has left the stage; whatever has been put around it since.
        plan: That it was cut by.
        index: Of the stage.
        outlines: Of all stages, from :func:`outline_stage`, for a batch of the same shapes.
        received: What the stage before has returned; of the first one nothing.
        args: Positional arguments of the whole model's call.
        kwargs: Keyword arguments of it.

    Returns:
        Of the last stage the model's output; of others the tensors to be sent to the next stage: what is in
        the call of its first block, as the model computes it, and not in another dtype that a wrapper around
        the model gives its output.

    Raises:
        ConfigurationError: The model isn't cut, or can't run in these stages; the message says what depends
            on what.
    """
    if len(outlines) != len(plan.stages) or len(received) != len(outlines[index].receives):
        raise ConfigurationError(
            f"run_stage: stage {index} of {len(plan.stages)} takes an outline of each stage and the tensors "
            f"that the one before has returned; got {len(outlines)} outlines and {len(received)} tensors."
        )
    staged = _staged(model)
    device = received[0].device if received else "cpu"  # the first stage skips no module
    return _call(model, staged, StageRun(staged.scope, plan, index, outlines, received, device), args, kwargs)


def _call(
    model: nn.Module, staged: StagedForward, run: StageRun, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    staged.run = run
    try:
        output = model(*args, **kwargs)
    finally:
        staged.run = None
    return output if run.sent is None else run.sent


def _staged(model: nn.Module) -> StagedForward:
    """Return what apply_stages has put around the forward of a model, or of one that a wrapper holds."""
    for module in cast("Iterable[nn.Module]", model.modules()):
        forward: object = vars(module).get("forward")
        while isinstance(forward, WrappedForward):
            if isinstance(forward, StagedForward):
                return forward
            forward = forward.__wrapped__
    raise ConfigurationError(
        f"run_stage: {type(model).__name__} isn't cut into stages. Call apply_stages before."
    )
