"""What is checked, or set right, before an optimizer steps on the parameters of prepared models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from accelfn.comm import reduce
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import HANDLES, IN_NO_SYNC, Handle, handles_of
from accelfn.parallel.optimizers import check_steps_shards
from accelfn.parallel.pointers import repoint
from accelfn.tree import is_dtensor

# Attribute of an optimizer: sizes of its groups when all their parameters were those of prepared models.
_SETTLED = "_accelfn_settled"


def check_reduced(operation: str, ctx: Context, parameters: Iterable[torch.Tensor]) -> bool:
    """Refuse gradients that are only this rank's own. Reads attributes only.

    Unprepared shards (``DTensor``) pass: whoever shards by hand reduces by hand.

    Ranks: any; doesn't communicate.

    Returns:
        Whether all ranks must step: there are several, and neither :func:`local_steps` nor :func:`joined`
        lets them differ.

    Raises:
        ConfigurationError: A gradient was not averaged over the ranks since it last changed, or has no engine
            that averages it.
    """
    if ctx.world.size == 1:
        return False
    checked: object = None
    together = True
    for parameter in parameters:
        handles: tuple[Handle, ...] = vars(parameter).get(HANDLES, ())
        if handles and handles is checked:  # the same for nearly all
            continue
        has_gradient = parameter.grad is not None
        for handle in handles:
            together = together and not handle.is_local and not handle.is_joined
            has_gradient = has_gradient or handle.holds_gradients
        if not has_gradient:
            continue
        checked = handles
        alive = [handle for handle in handles if handle.is_alive]
        reason: str | None = None
        for handle in alive:
            found = None if handle.is_local and not handle.holds_gradients else handle.why_unreduced()
            if found is None:  # one that averages is enough
                reason = None
                break
            reason = reason or found
        if reason is not None:
            raise ConfigurationError(
                f"{operation}: the current gradients were not averaged over the {ctx.num_processes} ranks, "
                f"whose models would drift apart: {reason}."
            )
        if not alive and not is_dtensor(parameter.grad):
            raise ConfigurationError(
                f"{operation}: the gradient of a parameter of shape {tuple(parameter.shape)} is not averaged "
                f"over the {ctx.num_processes} ranks, whose models would drift apart. Prepare its model, "
                "without evaluation_mode and after everything that adds parameters, and use the model that "
                "prepare returns. Freeze what is to be trained later only after prepare. If you reduce "
                "gradients yourself, call step() of the torch optimizer."
            )
    return together


def send_buffers(optimizers: Iterable[Optimizer]) -> None:
    """Send rank 0's buffers of the models that optimizers train, where forward passes have changed them.

    From then on a rank computes with them alone too, such as the main process in an evaluation.

    Ranks: every rank of the world of these models.
    """
    for optimizer in optimizers:
        # The first of a group stands for all: this runs in each step.
        for group in optimizer.param_groups:
            for parameter in group["params"][:1]:
                for handle in handles_of(parameter):
                    if handle.buffers is not None and handle.buffers.is_due():
                        handle.buffers.send()


def refuse_open_window(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step of torch's own optimizer inside of an open window. For its hooks before a step.

    Gradients of each rank outside of a window pass: the program may average them itself.

    Ranks: any; doesn't communicate.

    Raises:
        ConfigurationError: The latest backward pass was in a window that isn't closed yet.
    """
    # The first of a group stands for all: this runs in each step.
    parameters: list[torch.Tensor] = [one for group in optimizer.param_groups for one in group["params"][:1]]
    for parameter in parameters:
        handles: tuple[Handle, ...] = vars(parameter).get(HANDLES, ())
        for handle in handles:
            if handle.is_in_window and not handle.is_local and handle.why_unreduced() is IN_NO_SYNC:
                raise ConfigurationError(
                    f"step of the {type(optimizer).__name__}: the accumulation window is still open, so each "
                    "rank has gradients of its own, and the models would drift apart. Step where the window "
                    "closes, under `if micro.sync:`, or train with gradient_accumulation_steps=1."
                )


def average_closure(
    ctx: Context, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let LBFGS see the mean over the ranks of what its closure returns. For its hooks before a step.

    It decides by the loss how far to go, and ranks must go equally far.

    Ranks: every rank of ``ctx``, as the closure; unless they step by themselves, as in ``local_steps``.
    """
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if closure is None or any(one.is_local for one in handles_of(optimizer.param_groups[0]["params"][0])):
        return None

    def averaged() -> torch.Tensor:
        loss = torch.as_tensor(closure()).detach().to("cpu", torch.float64)
        return reduce(ctx.tagged("closure"), loss, "mean")

    return (optimizer, averaged), {}


def check_averaged_at_once(operation: str, ctx: Context, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse a step inside of backward on gradients that are not averaged as soon as they are computed.

    Ranks: any; doesn't communicate.

    Raises:
        ConfigurationError: There are several ranks, and a parameter isn't in a model that was prepared for
            such a step, or also in another one.
    """
    for parameter in parameters if ctx.num_processes > 1 else ():
        handles: tuple[Handle, ...] = vars(parameter).get(HANDLES, ())
        alive = [handle for handle in handles if handle.is_alive]
        if parameter.requires_grad and not (len(alive) == 1 and alive[0].averages_at_once):
            raise ConfigurationError(
                f"{operation}: the gradient of a parameter of shape {tuple(parameter.shape)} is not averaged "
                f"over the {ctx.num_processes} ranks before the optimizer steps with it, so their models "
                "would drift apart. Prepare model and optimizer in one call, prepare(ctx, model, optimizer), "
                "or the optimizer first; and each parameter in one model, without evaluation_mode."
            )


def follow_optimizers(operation: str, ctx: Context, optimizers: Iterable[Optimizer]) -> None:
    """Point optimizers at the parameters of models that were prepared after them; once per optimizer.

    Ranks: any; doesn't communicate.

    Raises:
        ConfigurationError: No parameter of an optimizer is one of a prepared model.
        NotAvailableError: The parameters are shards, which its package can't step.
    """
    if ctx.num_processes == 1 or ctx.reduction is not None:  # exact mode replaces no parameters
        return
    for optimizer in optimizers:
        groups = optimizer.param_groups
        sizes = tuple([len(group["params"]) for group in groups])
        if vars(optimizer).get(_SETTLED) == sizes:
            continue
        check_steps_shards(operation, optimizer)
        repoint(optimizer)
        parameters: list[torch.Tensor] = [parameter for group in groups for parameter in group["params"]]
        known = [HANDLES in vars(parameter) for parameter in parameters]
        if all(known):
            setattr(optimizer, _SETTLED, tuple([len(group["params"]) for group in groups]))
        elif not any(known) and not any(is_dtensor(parameter) for parameter in parameters):
            raise ConfigurationError(
                f"{operation}: no parameter of the {type(optimizer).__name__} is in a prepared model, so its "
                f"gradients are not averaged over the {ctx.num_processes} ranks. Prepare the model, and make "
                "the optimizer from its parameters."
            )
