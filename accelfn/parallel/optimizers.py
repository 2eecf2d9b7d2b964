"""Optimizers with needs of their own: those that step in backward, have modes, or can't step shards."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch.optim import Optimizer

from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.pointers import newest, note_holder
from accelfn.tree import is_dtensor

# Attribute of a parameter: how its optimizer steps it.
_STEPPING = "_accelfn_stepping"

# Why an optimizer can't be prepared, and what to use instead; by package and class.
_UNAVAILABLE = MappingProxyType(
    {
        ("torch", "ZeroRedundancyOptimizer"): (
            "keeps the state of each parameter on one rank, where a checkpoint can't store it by name. Use "
            "AdamW with an fsdp_plugin, which shards the state, too"
        ),
        ("torchao", "CPUOffloadOptimizer"): (
            "steps copies of the parameters on the host, so neither clipping nor a checkpoint reaches them. "
            "Use FullyShardedDataParallelPlugin(cpu_offload=True), or PagedAdamW8bit of bitsandbytes"
        ),
        **dict.fromkeys(
            [("schedulefree", f"{name}ScheduleFreeClosure") for name in ("AdamW", "SGD", "RAdam")],
            "steps with a closure only, which no step here has. Use the class without Closure in its name",
        ),
    }
)

# torch's optimizers whose step depends on the shape of a parameter.
_NEEDS_SHAPES = frozenset({("torch", "Muon"), ("torch", "Adafactor")})

# torch's optimizers with a step, or a fused step, for which DTensor has no rule.
_NOT_ON_SHARDS = frozenset({("torch", "Adafactor"), ("torch", "Rprop")})
_NOT_FUSED_ON_SHARDS = frozenset({("torch", "SGD"), ("torch", "Adagrad")})

# State that an optimizer keeps in attributes, and not in its state dict.
_HIDDEN = MappingProxyType(
    {("lomo_optim", "AdaLomo"): ("step_num", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")}
)


def hidden_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that are part of its state, but not in its state dict."""
    names = [name for known in _classes_of(optimizer) for name in _HIDDEN.get(known, ())]
    return {name: getattr(optimizer, name) for name in names}


def _classes_of(optimizer: Optimizer) -> list[tuple[str, str]]:
    """Return the classes of an optimizer, by package and name."""
    return [(base.__module__.partition(".")[0], base.__name__) for base in type(optimizer).__mro__]


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class OptimizerProxy(Optimizer):
    """An optimizer in place of another one, which has the groups that schedulers change, and the state."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Stand for ``optimizer``."""
        # Not Optimizer.__init__: `optimizer` has the parameters' groups and state.
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride] -- shared, not owned
        """State of each parameter."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Groups of parameters and their options."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Default options of groups."""
        return self.optimizer.defaults


class Stepping(NamedTuple):
    """How an optimizer steps the parameters that it has.

    Attributes:
        kind: Name of its class.
        why_not_shards: Why it can't step shards, and what to use instead; None if it can.
        is_in_backward: Whether it steps inside of backward.
        needs_all: Whether it needs all parameters of a model on its rank, so that stages aren't enough.
    """

    kind: str
    why_not_shards: str | None
    is_in_backward: bool
    needs_all: bool


def read_stepping(optimizer: Optimizer) -> Stepping:
    """Return how an optimizer steps. Pure."""
    classes = {*_classes_of(optimizer)}
    is_in_backward, is_lbfgs = steps_in_backward(optimizer), ("torch", "LBFGS") in classes
    why: str | None = None
    if is_in_backward:
        why = "it needs complete gradients in backward. Leave out the fsdp_plugin and the mesh"
    elif is_lbfgs:
        why = (
            "it takes products of all parameters and gradients, and each rank has a part. Use AdamW, or "
            "leave out the fsdp_plugin and the mesh"
        )
    elif any(package == "bitsandbytes" for package, _ in classes):
        why = (
            "bitsandbytes' kernels don't take DTensors. Use AdamW8bit of torchao.optim, which does, or "
            "torch's AdamW(..., fused=True)"
        )
    elif any(package == "torchao" for package, _ in classes) and any(
        parameter.dtype != torch.float32 for parameter in _parameters_of(optimizer)
    ):
        why = (
            "torchao 0.18 fails on shards of parameters that aren't float32. Keep them in float32, and "
            'compute in bfloat16: mixed_precision="bf16"'
        )
    elif ("torch", "Muon") in classes:
        why = (
            "it orthogonalises whole matrices, and from shards its steps would be some percent off. Use "
            "AdamW, or leave out the fsdp_plugin and the mesh"
        )
    elif classes & _NOT_ON_SHARDS:
        why = "torch 2.13 can't compute its step on DTensors. Use AdamW or RMSprop"
    elif classes & _NOT_FUSED_ON_SHARDS and any(group.get("fused") for group in optimizer.param_groups):
        why = "torch 2.13 can't compute its fused step on DTensors. Use foreach=True instead of fused=True"
    return Stepping(type(optimizer).__name__, why, is_in_backward, is_in_backward or is_lbfgs)


def why_not_flat(optimizer: Optimizer) -> str | None:
    """Return why an optimizer can't step flattened parameters, as engines keep them; None if it can."""
    classes = {*_classes_of(optimizer)}
    packages = {package for package, _ in classes}
    if "schedulefree" in packages:
        return "it has two sets of parameters, of which the engine has one"
    if "torchao" in packages:
        return "its blocks of low precision don't fit into partitions of any length"
    return "its step depends on the shape of a parameter" if classes & _NEEDS_SHAPES else None


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps inside of backward, like ``Lomo`` and ``AdaLomo``."""
    return callable(getattr(optimizer, "fused_backward", None))


def note_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer can be trained with, and note on its parameters how it steps them.

    Their model is prepared accordingly, if it isn't yet.

    Ranks: local.

    Raises:
        NotAvailableError: It can't be trained with, or its parameters are shards, which it can't step; with
            what to use instead.
    """
    for known in _classes_of(optimizer):
        why = _UNAVAILABLE.get(known)
        if why is not None:
            raise NotAvailableError(f"prepare_optimizer: {known[1]} of {known[0]} {why}.")
    check_steps_shards("prepare_optimizer", optimizer)
    stepping = read_stepping(optimizer)
    for parameter in _parameters_of(optimizer):
        attributes = vars(parameter)
        attributes.pop(_STEPPING, None)  # of an optimizer before this one
        if stepping.why_not_shards is not None:
            attributes[_STEPPING] = stepping
    note_holder(optimizer, _parameters_of(optimizer))


def stepping_of(parameters: Iterable[torch.Tensor]) -> list[Stepping]:
    """Return how the optimizers of parameters step that can't step shards; each once."""
    found = (vars(parameter).get(_STEPPING) for parameter in parameters)
    return list(dict.fromkeys(one for one in found if one is not None))


def check_steps_shards(operation: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer with sharded parameters that its package can't step.

    Ranks: local.

    Raises:
        NotAvailableError: With what to use instead.
    """
    if any(is_dtensor(newest(parameter)) for parameter in _parameters_of(optimizer)):
        check_plan(operation, [read_stepping(optimizer)], has_shards=True)


def check_plan(operation: str, steppings: Iterable[Stepping], *, has_shards: bool) -> None:
    """Refuse to spread parameters over ranks as shards or stages that their optimizers can't step.

    Ranks: local.

    Args:
        operation: Name of the operation in errors.
        steppings: How the optimizers step.
        has_shards: Whether there are shards; otherwise complete parameters in pipeline stages.

    Raises:
        NotAvailableError: With what to use instead.
    """
    for stepping in steppings:
        if stepping.why_not_shards is not None and (has_shards or stepping.needs_all):
            raise NotAvailableError(
                f"{operation}: {stepping.kind} can't step the parameters of a model that is spread over "
                f"ranks: {stepping.why_not_shards}."
            )


def check_can_step(operation: str, optimizers: Iterable[Optimizer]) -> None:
    """Refuse a step of an optimizer in evaluation mode, with a closure, or that steps in backward.

    Ranks: local.

    Raises:
        ConfigurationError: One is, has or does.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("train_mode") is False:
                raise ConfigurationError(
                    f"{operation}: {type(optimizer).__name__} is in evaluation mode, where the parameters "
                    "are averages that a step must not start from. Call its train() after each evaluation, "
                    "before the forward pass, and after loading a checkpoint that was saved in evaluation "
                    "mode."
                )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                f"{operation}: LBFGS needs a closure, which computes the loss several times a step. Call its "
                "own step(closure), where the closure clears the gradients, runs forward and backward of a "
                "complete window, and returns the loss."
            )
        if steps_in_backward(optimizer):
            raise ConfigurationError(
                f"{operation}: {type(optimizer).__name__} steps inside of lomo_backward. Call that, and "
                "neither backward nor a step."
            )


def begin_training(optimizer: Optimizer) -> None:
    """Put a schedule-free optimizer into training mode. Writes into the parameters if it has a state."""
    if any("train_mode" in group for group in optimizer.param_groups):
        cast("Any", optimizer).train()
