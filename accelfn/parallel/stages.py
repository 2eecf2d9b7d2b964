"""The forward pass of one stage of a model that is cut into several.

Every stage runs the model's own forward on the arguments of the whole model. Modules of other stages aren't
called; the first block of a stage gets what the stage before has sent; and where the forward calls the first
block of the next stage it is left, with that block's input as what is to be sent. So masks, positions and
Python's control flow are the model's own on each stage. Anything else that depends on another stage is
refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import modules_of
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.pointers import remember_whole
from accelfn.parallel.stage_plan import PipelinePlan
from accelfn.parallel.stand_in import (
    Scope,
    StandIn,
    find_stand_ins,
    stand_in_for,
    stand_in_of_parameter,
)

__all__ = ("StagedForward", "apply_stages", "run_stage")

# What models of transformers collect from all blocks, by their names of arguments and of fields of a config.
_OF_ALL_BLOCKS = (
    "past_key_values",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)


class StagedForward(WrappedForward):
    """The ``forward`` of a model of which some stages are here. Runs inside :func:`run_stage` only."""

    def __init__(self, model: nn.Module, plan: PipelinePlan) -> None:
        """Stand in for the ``forward`` of ``model``."""
        super().__init__(model.forward)
        self._model = model
        self._plan = plan
        modules = modules_of(model)
        self._units = [
            (name, stage, modules[name])
            for stage, one in enumerate(plan.stages)
            for name in (*one.blocks, *one.modules)
        ]
        self.scope = Scope()
        self.run: _Run | None = None  # while run_stage runs
        self._names = tuple(inspect.signature(model.forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model on the last stage, and elsewhere a tuple of what is sent."""
        run = self.run
        if run is None:
            raise ConfigurationError(
                f"{type(self._model).__name__} is cut into {len(self._plan.stages)} stages, and no rank has "
                "all of them: it can't be called. Use accelfn.forward_backward(ctx, model, loss_fn, ...) to "
                "train it, and accelfn.forward(ctx, model, ...) for its output."
            )
        kwargs = self._without_collecting(args, kwargs)
        self.scope.is_open = True
        try:
            with run.gates(self._units):
                output = self.__wrapped__(*args, **kwargs)
        except _LeaveError:
            return run.sent
        finally:
            self.scope.is_open = False
        run.check_output(output)
        return output

    def _without_collecting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments, with ``use_cache=False`` where the model has a default for it.

        Raises:
            ConfigurationError: The call, or the model's config, asks for what only all blocks have together.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        config: object = getattr(self._model, "config", None)
        for name in _OF_ALL_BLOCKS:
            by_config = False if name == "use_cache" else getattr(config, name, None)
            asked = given.get(name, by_config)
            if asked is not None and asked is not False:
                raise ConfigurationError(
                    f"{type(self._model).__name__} was asked for {name}, which is collected from all blocks, "
                    f"and each stage of a pipeline has some of them. Leave it out, or pass {name}="
                    f"{'None' if name == 'past_key_values' else 'False'}."
                )
        if "use_cache" in self._names and "use_cache" not in given:
            return {**kwargs, "use_cache": False}
        return kwargs


class _LeaveError(Exception):
    """Leaves the forward of a model where the next stage begins.

    An ``Exception``, so that hooks run that modules have for a forward that fails.
    """


class _Run:
    """One forward pass of one stage."""

    def __init__(self, plan: PipelinePlan, index: int, received: torch.Tensor | None, scope: Scope) -> None:
        self.plan = plan
        self.scope = scope
        self.index = index
        self.received = received
        self.has_begun = received is None
        self.skipped: list[str] = []
        self.sent: tuple[torch.Tensor, ...] | None = None

    @contextmanager
    def gates(self, units: Iterable[tuple[str, int, nn.Module]]) -> Generator[None, None, None]:
        """Let calls of blocks and other modules go through this run: ``units`` are name, stage, module.

        Around all of a module's hooks, whatever has been done with it since it was cut: so a module that
        doesn't run has no hooks that run, and one that runs has them see its real input.
        """
        before: list[tuple[nn.Module, Any]] = []
        try:
            for name, stage, module in units:
                before.append((module, vars(module).get(_CALL)))
                vars(module)[_CALL] = self._gate(name, stage, module)
            yield
        finally:
            for module, call in before:
                if call is None:
                    del vars(module)[_CALL]
                else:
                    vars(module)[_CALL] = call

    def _gate(self, name: str, stage: int, module: nn.Module) -> Callable[..., Any]:
        # Its own torch.compile, where it has one.
        inner: Callable[..., Any] = vars(module).get(_CALL) or cast("Any", module)._call_impl

        def gate(*args: Any, **kwargs: Any) -> Any:
            if stage < self.index:
                return self._skip(name, stage)
            if stage > self.index:
                return self._leave(name, stage, module, args, kwargs)
            if not self.has_begun and name == self.plan.stages[stage].blocks[0]:
                args, kwargs = self._begin(name, module, args, kwargs)
            self._check_input(name, args, kwargs)
            return inner(*args, **kwargs)

        return gate

    def _skip(self, name: str, stage: int) -> torch.Tensor:
        """Return something in the place of what a module of an earlier stage has returned there."""
        if self.has_begun:
            raise ConfigurationError(
                f"{name} is a module of stage {stage}, and the model calls it after the first block of stage "
                f"{self.index}. Blocks have to be called once each, in the order in which they are "
                "registered. If it is called only after the blocks, register it after them, or name it in "
                "plan_stages(..., last=...)."
            )
        self.skipped.append(name)
        return stand_in_for(cast("torch.Tensor", self.received), self.scope)

    def _leave(
        self, name: str, stage: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if stage != self.index + 1 or name != self.plan.stages[stage].blocks[0]:
            raise ConfigurationError(
                f"{name} is a module of stage {stage}, and the model calls it in stage {self.index}, before "
                f"{self.plan.stages[self.index + 1].blocks[0]}, with which the next one begins. Blocks have "
                "to be called in the order in which they are registered, and a module that is called before "
                "them has to be registered before them."
            )
        place = _place_of_input(module, args, kwargs)
        value = args[place] if isinstance(place, int) else kwargs.get(place)
        self._check_input(name, args, kwargs)
        if not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"{name} is the first block of stage {stage}, and its first argument is a "
                f"{type(value).__name__}: a stage can receive a tensor. Begin the stage with another block."
            )
        self.sent = (value,)
        raise _LeaveError

    def _begin(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put what was received in the place of the first argument of the stage's first block."""
        self.has_begun = True
        place = _place_of_input(module, args, kwargs)
        value = args[place] if isinstance(place, int) else kwargs.get(place)
        if not isinstance(value, StandIn):
            raise ConfigurationError(
                f"{name} is the first block of stage {self.index}, and its first argument doesn't come from "
                "the block before it. Blocks have to be called one after another, each with the output of "
                "the one before as its first argument."
            )
        if isinstance(place, int):
            return (*args[:place], self.received, *args[place + 1 :]), kwargs
        return args, {**kwargs, place: self.received}

    def _check_input(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = [f"args{one}" for one in find_stand_ins(args)]
        found += [f"kwargs{one}" for one in find_stand_ins(kwargs)]
        if found:
            raise ConfigurationError(
                f"{name} is called in stage {self.index}, and {found[0]} of its call depends on "
                f"{self._others()}. From one stage to the next only the first argument of a block is sent, "
                "and it has to come from the block before. Models of an encoder and a decoder, and those "
                "whose blocks share something that is computed, can't be cut there."
            )

    def _others(self) -> str:
        """Return in words what tensors may depend on that stand in for others."""
        called = f" ({_few(self.skipped)})" if self.skipped else ""
        return f"modules of other stages{called}, or parameters of them"

    def check_output(self, output: Any) -> None:
        """Check that the last stage has the whole output.

        Raises:
            ConfigurationError: Something in it depends on earlier stages, or a stage didn't run.
        """
        if self.index + 1 < len(self.plan.stages) or not self.has_begun:
            later = self.index + 1 if self.has_begun else self.index
            raise ConfigurationError(
                f"the forward ended without a call of {self.plan.stages[later].blocks[0]}, with which stage "
                f"{later} begins. Every block has to be called in each forward pass."
            )
        found = find_stand_ins(output)
        if found:
            raise ConfigurationError(
                f"output{found[0]} of the model depends on {self._others()}, and the last stage has nothing "
                "of them but the input of its first block. Return what comes out of the last block, or leave "
                "that output out."
            )


# What torch's Module.__call__ calls in the place of hooks and forward, where a module has it.
_CALL = "_compiled_call_impl"


def _place_of_input(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    """Return where a block's call has its first argument: its index, or its name."""
    return 0 if args else next(iter(inspect.signature(module.forward).parameters), "")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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
    for index, names in enumerate(by_stage):
        if index in own:
            continue
        for module in (part for name in names for part in modules[name].modules()):
            for kind in ("_parameters", "_buffers"):
                tensors = cast("dict[str, torch.Tensor | None]", vars(module)[kind])
                # As plain attributes, for models that look at the dtype of a weight.
                for key, one in tensors.items():
                    vars(module)[key] = None if one is None else stand_in_of_parameter(one, staged.scope)
                tensors.clear()
    model.forward = staged


def run_stage(
    model: nn.Module,
    plan: PipelinePlan,
    index: int,
    received: tuple[torch.Tensor, ...] | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run the forward pass of one stage.

    Ranks: any; doesn't communicate.

    Args:
        model: In which :func:`apply_stages` has left the stage; whatever has been put around it since.
        plan: That it was cut by.
        index: Of the stage.
        received: What the stage before has returned; None for the first one.
        args: Positional arguments of the whole model's call.
        kwargs: Keyword arguments of it.

    Returns:
        Of the last stage the model's output; of others a tuple of one tensor, to be sent to the next stage:
        the input of its first block, as the model computes it, and not in another dtype that a wrapper
        around the model gives its output.

    Raises:
        ConfigurationError: The model isn't cut, or can't run in these stages; the message says what depends
            on what.
    """
    if (received is None) != (index == 0):
        raise ConfigurationError(
            f"run_stage: the first stage receives nothing, and others what the one before has sent; got "
            f"{'nothing' if received is None else 'tensors'} for stage {index}."
        )
    staged = _staged(model)
    run = _Run(plan, index, None if received is None else received[0], staged.scope)
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
