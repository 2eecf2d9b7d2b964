"""Forward and backward passes of one batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.context import BackwardPass, Context, note_failure, takes_context
from accelfn.data import MicroBatch
from accelfn.data.microbatch import check_micro
from accelfn.errors import ConfigurationError
from accelfn.parallel.engines import owner_of_step
from accelfn.parallel.handle import BatchRun, Handle, handle_of, raise_explained
from accelfn.parallel.optimizers import steps_in_backward
from accelfn.parallel.step_checks import check_averaged_at_once
from accelfn.parallel.strategies.pipeline import PipelineHandle
from accelfn.training.loss import Loss, check_loss, check_means, divide_loss, read_loss
from accelfn.training.metrics import join_losses
from accelfn.training.optimizers import parameters_in
from accelfn.training.scaler import StepState, check_scaler, with_loss
from accelfn.training.window import accumulate
from accelfn.tree import flatten

Model = TypeVar("Model")
Batch = TypeVar("Batch")


@takes_context
def backward(
    ctx: Context,
    loss: torch.Tensor,
    scaler_state: StepState,
    micro: MicroBatch | None = None,
    weight: torch.Tensor | float | None = None,
    **kwargs: Any,
) -> StepState:
    """Compute gradients of ``loss`` and add them to the parameters' own.

    A loss that is a mean is divided by the number of batches in its accumulation window. A sum comes with its
    ``weight``, such as its number of tokens: the gradients are then divided once, by the total weight of the
    window on all ranks, when they are unscaled or the optimizer steps. Ranks and batches may have different
    weights, including 0.

    With float16 the loss is multiplied by the loss scale. A prepared model averages its gradients over ranks,
    unless :func:`accumulate` keeps the window open. In exact mode it sums them, so a mean is divided by the
    number of ranks as well.

    Ranks: every rank of ``ctx``, where a prepared model takes part.

    Args:
        ctx: The world and the precision.
        loss: Shape ``()``, with a gradient: a mean over this rank's batch, or a sum.
        scaler_state: From :func:`init_scaler` or the last step.
        micro: Of the batch; needed where windows have several batches.
        weight: Of a sum, at least 0; of shape ``()`` where it is a tensor.
        **kwargs: For ``torch.Tensor.backward``, such as ``retain_graph=True``.

    Returns:
        The next state, for every later call: it has the weight, and whether the window is still open.

    Raises:
        TypeError: ``loss`` is no tensor.
        ValueError: The loss has another shape, or no gradient; or the state was superseded, or the current
            gradients were divided already, so new ones can't be added to them.
        ConfigurationError: Windows have several batches, and ``micro`` is missing; or in exact mode, a
            parameter got a second gradient from one batch, or a sparse one.
    """
    if not isinstance(micro, MicroBatch):
        check_micro("backward", micro)
        if ctx.accumulation.num_steps > 1:
            raise _window_error("backward", ctx)
    if weight is None and ctx.mesh is not None:
        check_means(ctx, "backward")
    return add_gradients(ctx, loss, scaler_state, micro, weight, **kwargs)


def add_gradients(
    ctx: Context,
    loss: torch.Tensor,
    scaler_state: StepState,
    micro: MicroBatch | None,
    weight: torch.Tensor | float | None,
    **kwargs: Any,
) -> StepState:
    """Run :func:`backward` without its checks of ``micro``, and of means where ranks share sequences."""
    check_scaler("backward", scaler_state)
    check_loss("backward", loss, weight)
    value = loss.reshape(()) if loss.dim() else loss
    differentiate(ctx, divide_loss(ctx, value, weight, scaler_state, micro), **kwargs)
    return with_loss("backward", scaler_state, weight, micro)


# What an engine's error means, by a part of its text.
_ADVICE = (
    (
        "mark a variable ready only once",
        (
            "a parameter got its gradient twice in one backward pass, and DistributedDataParallel averages "
            "only one. Where the model checkpoints a layer that it calls several times, pass "
            "use_reentrant=False to torch.utils.checkpoint; where a loss goes through two models, pass both "
            "to accumulate. Otherwise, if each step uses the same parameters, prepare the model with "
            "DistributedDataParallelKwargs(static_graph=True)."
        ),
    ),
    (
        "fsdp::chunk_cat",
        "a gradient is sparse, and FSDP reduces dense ones alone. Make the embedding with sparse=False.",
    ),
    (
        "mixed torch.Tensor and DTensor",
        (
            "the loss is a sum of a plain tensor, as a model returns it, and of one computed from parameters "
            "that ranks along tp share (DTensor), which torch can't differentiate together. Make the second "
            "one plain before they are added: penalty.full_tensor(), such as "
            "sum(one.square().sum().full_tensor() for one in model.parameters())."
        ),
    ),
)


def _window_error(operation: str, ctx: Context) -> ConfigurationError:
    """Return the error for a loss without its place in a window of several batches."""
    return ConfigurationError(
        f"{operation}: got no micro, so the loss would not be divided by the "
        f"{ctx.accumulation.num_steps} batches of its window (gradient_accumulation_steps). Pass the micro "
        "that microbatches yields with the batch; with an Accelerator, call backward inside of `with "
        "accelerator.accumulate(model):`. For a loss that is a window of its own, or windows counted by "
        "hand, use a context with gradient_accumulation_steps=1."
    )


def differentiate(ctx: Context, value: torch.Tensor, **kwargs: Any) -> None:
    """Add the gradients of ``value`` to the parameters' own, with options of ``torch.Tensor.backward``."""
    call_log = ctx.collectives.call_log
    running = BackwardPass()
    running.is_exact, running.value = ctx.reduction is not None, value
    before, call_log.backward = call_log.backward, running
    try:
        try:
            value.backward(**kwargs)  # pyright: ignore[reportUnknownMemberType]
        finally:
            call_log.backward, running.value = before, None  # a model may remember the pass
        for finish in running:
            finish()
    except Exception as error:
        note_failure(call_log, ctx.rank, error, "backward")
        for text, advice in _ADVICE if isinstance(error, RuntimeError) else ():
            if text in str(error):
                raise ConfigurationError(f"backward: {advice}") from error
        if isinstance(error, RuntimeError):
            raise_explained(error, ctx.collectives.translate_error)
        raise


@takes_context
def forward_backward(
    ctx: Context,
    model: Model,
    loss_fn: Callable[[Model, Batch], torch.Tensor | Loss],
    batch: Batch,
    scaler_state: StepState,
    micro: MicroBatch,
) -> tuple[StepState, torch.Tensor]:
    """Compute the loss of one batch of a window, and add its gradients to the parameters' own.

    Equivalent to :func:`accumulate` around a call of ``loss_fn`` and :func:`backward`, but independent of the
    order of forward and backward passes, so that it also runs pipelines::

        for batch, micro in af.microbatches(ctx, loader):
            scaler, loss = af.forward_backward(ctx, model, loss_fn, batch, scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, and the precision.
        model: First argument of ``loss_fn``: a module or a tree of modules, from ``prepare_model``.
        loss_fn: Returns a tensor of shape ``()``, the mean over the rows of its batch; or a :class:`Loss`,
            with its weight if it is a sum. Its ``aux`` isn't returned.
        batch: This rank's batch, the second argument of ``loss_fn``.
        scaler_state: From :func:`init_scaler`, the last batch or the last step.
        micro: Of the batch.

    Returns:
        The next state, as of :func:`backward`; and the loss of this rank's batch as ``loss_fn`` returned it,
        without a gradient: a mean, or an undivided sum. Of shape ``()``.

    Raises:
        TypeError: The model is no module, or ``loss_fn`` returned no loss.
        ValueError: As :func:`backward`.
        ConfigurationError: As :func:`accumulate` and :func:`backward`.

    >>> import accelfn as af
    >>> ctx, model = Context(), nn.Linear(2, 1, bias=False)
    >>> ((rows, micro),) = af.microbatches(ctx, [torch.ones(3, 2)])
    >>> scaler, loss = forward_backward(
    ...     ctx, model, lambda model, x: model(x).mean(), rows, af.init_scaler(ctx), micro
    ... )
    >>> loss.shape, model.weight.grad
    (torch.Size([]), tensor([[1., 1.]]))
    """
    check_scaler("forward_backward", scaler_state)
    check_micro("forward_backward", micro, is_needed=True)
    models = modules_in("forward_backward", model)
    with accumulate(ctx, micro, *models):
        following, loss = run_batch(
            ctx, "forward_backward", loss_fn, model, batch, scaler_state, micro, handle_of(models[0])
        )
    return following, loss.value.detach()


def run_batch(
    ctx: Context,
    operation: str,
    loss_fn: Callable[[Any, Any], object],
    model: Any,
    batch: Any,
    scaler: StepState,
    micro: MicroBatch,
    handle: Handle | None,
    *,
    share: float = 1.0,
    counts_weight: bool = True,
    num_batches: int = 1,
    differentiate: Callable[[Context, torch.Tensor], None] = differentiate,
) -> tuple[StepState, Loss]:
    """Run the part of :func:`forward_backward` inside of its :func:`accumulate`.

    Args:
        ctx: As in :func:`forward_backward`.
        operation: Name of the operation in errors.
        loss_fn: As in :func:`forward_backward`.
        model: As in :func:`forward_backward`.
        batch: As in :func:`forward_backward`.
        scaler: As in :func:`forward_backward`.
        micro: As in :func:`forward_backward`.
        handle: The model's, whose engine runs the batch; None without one.
        share: Factor of a mean in its window, relative to a batch of mean size.
        counts_weight: Whether gradients of sums are divided by the weights in the next state.
        num_batches: Size of the batch, in batches of the usual size.
        differentiate: Runs the backward pass.

    Returns:
        The next state, and the loss as ``loss_fn`` returned it.
    """
    with_gradient = torch.is_grad_enabled()

    def compute(model: Any, batch: Any) -> Loss:
        # An engine may first run a part without gradients.
        is_tried = with_gradient and not torch.is_grad_enabled()
        return read_loss(ctx, operation, loss_fn(model, batch), needs_gradient=not is_tried)

    def to_differentiate(loss: Loss, num_parts: int) -> torch.Tensor:
        factor = share / num_parts
        value = loss.value * factor if loss.weight is None and factor != 1.0 else loss.value
        return divide_loss(ctx, value, loss.weight if counts_weight else None, scaler, micro)

    run_backward = partial(differentiate, ctx)
    work = BatchRun(compute, model, batch, to_differentiate, run_backward, join_losses, num_batches)
    try:
        loss = work.run() if handle is None else handle.run(work)
    except Exception as error:
        note_failure(ctx.collectives.call_log, ctx.rank, error, operation)
        raise
    return with_loss(operation, scaler, loss.weight if counts_weight else None, micro), loss


def modules_in(operation: str, model: object) -> list[nn.Module]:
    """Return the modules of a tree of modules, or of a single one.

    Raises:
        TypeError: A leaf isn't a module, or there is none.
    """
    leaves, structure = flatten(model)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, nn.Module):
            raise TypeError(
                f"{operation}: {structure.paths('model')[index]} is of type {type(leaf).__name__}. Pass a "
                "module or a tree of modules, from prepare_model."
            )
    if not leaves:
        raise TypeError(
            f"{operation}: got no model. Pass model=, a module or a tree of modules, from prepare_model."
        )
    return leaves


@takes_context
def forward(ctx: Context, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return ``model(*args, **kwargs)``, also for pipelined models.

    A pipelined model can't be called, since no rank has all of it. Here a batch goes through its stages in
    microbatches, without gradients, and every rank along "pp" gets the output. Any other model is called
    directly.

    Ranks: every rank of ``ctx`` for pipelined models, those along "pp" with the same arguments.

    Args:
        ctx: The world.
        model: From :func:`accelfn.prepare_model`.
        *args: Arguments of the call. In a pipeline tensors with as many rows as the first one are split into
            microbatches, and everything else goes to each of them.
        **kwargs: Likewise.

    Returns:
        The model's output. In a pipeline its tensors have a row for each sample.

    Raises:
        ValueError: In a pipeline: arguments or output can't be split along their rows.
        ConfigurationError: In a pipeline: ranks along "pp" have different batches, or the model can't run in
            these stages.

    >>> import torch
    >>> forward(Context(), nn.Identity(), torch.ones(1))
    tensor([1.])
    """
    handle = handle_of(model)
    if isinstance(handle, PipelineHandle):
        return handle.forward(args, kwargs)
    return model(*args, **kwargs)


@takes_context
def lomo_backward(
    ctx: Context,
    loss: torch.Tensor,
    learning_rate: float,
    optimizer: Optimizer,
    micro: MicroBatch | None = None,
) -> None:
    """Compute gradients of ``loss`` and step a LOMO optimizer with them, in one pass.

    Each parameter is stepped as soon as its gradient is there, and averaged over the ranks; no optimizer step
    follows. Writes into the parameters. With the optimizer's ``clip_grad_norm``, a backward pass that only
    computes the norm comes first.

    Ranks: every rank of ``ctx``; one reduction for each parameter.

    Args:
        ctx: The world and the precision.
        loss: A mean over the batch, shape ``()``.
        learning_rate: Of this pass.
        optimizer: ``Lomo`` or ``AdaLomo`` of the package lomo-optim (``pip install 'accelfn[lomo]'``). On
            several ranks it must be prepared in one call with its model, or before it.
        micro: Of the batch; the loss is divided by the length of its window.

    Raises:
        TypeError: ``loss`` is no tensor, or ``optimizer`` no LOMO optimizer.
        ValueError: ``learning_rate`` is None.
        ConfigurationError: Windows have several batches, and ``micro`` is missing; or the context scales
            losses for float16, which LOMO does by itself, or is in exact mode, which sums gradients before a
            step. Or there are several ranks, and the model wasn't prepared for a step in backward.
    """
    check_micro("lomo_backward", micro)
    if micro is None and ctx.accumulation.num_steps > 1:
        raise _window_error("lomo_backward", ctx)
    loss = read_loss(ctx, "lomo_backward", loss).value
    if cast("object", learning_rate) is None:
        raise ValueError("lomo_backward: got no learning rate. LOMO steps at once, so pass one here.")
    if not steps_in_backward(optimizer):
        raise TypeError(
            f"lomo_backward: {type(optimizer).__name__} has no fused_backward. Pass Lomo or AdaLomo of the "
            "package lomo-optim: pip install 'accelfn[lomo]'."
        )
    if ctx.precision.scales_loss:
        raise ConfigurationError(
            "lomo_backward: the context scales losses for float16, which LOMO doesn't support. Use bf16, or "
            "float16 parameters without mixed precision, for which LOMO has its own scaler."
        )
    if ctx.reduction is not None:
        raise ConfigurationError(
            'lomo_backward: this context has reduction="canonical", which sums the gradients of a window '
            "before a step, but LOMO steps with each of them. Use another optimizer."
        )
    # Shards of ZeRO-3 are averaged by LOMO itself.
    averaged = [one for one in parameters_in([optimizer]) if not hasattr(one, "ds_tensor")]
    check_averaged_at_once("lomo_backward", ctx, averaged)
    if micro is not None and micro.window > 1:
        loss = loss / micro.window
    lomo = cast("Any", optimizer)
    if getattr(lomo, "clip_grad_norm", None):
        lomo.grad_norm(loss)
    lomo.fused_backward(loss, learning_rate)
    engine = owner_of_step("lomo_backward", parameters_in([optimizer])[:1])
    if engine is not None:
        engine.after_step_in_backward()
