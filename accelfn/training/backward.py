"""Forward and backward passes of one batch, and the accumulation window around them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.context import (
    BackwardPass,
    Context,
    check_context,
    device_module,
    device_random_state,
    note_failure,
    set_device_random_state,
)
from accelfn.data import MicroBatch
from accelfn.data.microbatch import Draws, check_micro
from accelfn.devices import device_type
from accelfn.errors import ConfigurationError
from accelfn.parallel.agreement import at_place
from accelfn.parallel.engines import owner_of_step
from accelfn.parallel.handle import (
    BatchRun,
    Handle,
    check_averaged_at_once,
    handle_of,
    local_steps,
    raise_explained,
    syncing,
)
from accelfn.parallel.optimizers import steps_in_backward
from accelfn.parallel.strategies.exact import exact_batch
from accelfn.parallel.strategies.pipeline import PipelineHandle
from accelfn.training.prepare import is_averaged
from accelfn.training.scaler import ScalerState, check_scaler, parameters_in
from accelfn.tree import flatten


class Loss(NamedTuple):
    """The result of a loss function that isn't just a mean.

    Attributes:
        value: Shape ``()``, with a gradient: a mean over the rows, or with ``weight`` a sum.
        weight: Divisor of the sum, such as the number of tokens; at least 0, and shape ``()`` if it is a
            tensor. The weights of the window and of all ranks are added first.
        aux: A tree of tensors and numbers that is averaged as the loss is: of means, or with ``weight`` of
            sums. None for nothing.
    """

    value: torch.Tensor
    weight: torch.Tensor | float | None = None
    aux: Any = None


def check_means(ctx: Context, operation: str) -> None:
    """Refuse a mean where ranks share sequences: its number of tokens is unknown.

    Ranks have different numbers of ignored labels and of padding.

    Raises:
        ConfigurationError: There are ranks along "cp" or "sp".
    """
    if ctx.mesh is not None and ctx.mesh.plan.size("seq") > 1:
        raise ConfigurationError(
            f"{operation}: ranks along {' x '.join(ctx.mesh.plan.active('seq'))} share sequences and have "
            "different numbers of labels, so the mean of each rank's would be wrong. Pass the sum, as of "
            'cross_entropy(..., reduction="sum"), and its weight, (labels != -100).sum(): to backward, or as '
            "accelfn.Loss(total, weight=count) in forward_backward or make_train_step."
        )


def read_loss(ctx: Context, operation: str, result: object, *, needs_gradient: bool = True) -> Loss:
    """Check a loss, and return it as a :class:`Loss` with ``value`` of shape ``()``.

    Raises:
        ConfigurationError: It is a mean, and ranks share sequences.
        TypeError: It is neither a tensor nor a :class:`Loss` with one.
        ValueError: The loss or its weight has several elements, the weight is negative or NaN, or the loss
            has no gradient.
    """
    loss = result if isinstance(result, Loss) else Loss(cast("torch.Tensor", result))
    value, weight, aux = loss
    check_loss(operation, value, weight, needs_gradient=needs_gradient)
    if weight is None and ctx.mesh is not None:
        check_means(ctx, operation)
    return Loss(value.reshape(()), weight, aux) if value.dim() else loss


def check_loss(operation: str, value: object, weight: object, *, needs_gradient: bool = True) -> None:
    """Check a loss and its weight by themselves; errors as in :func:`read_loss`."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{operation}: the loss must be a tensor, got {type(value).__name__}. Pass the mean of a batch. "
            "In a train step loss_fn may also return accelfn.Loss(total, weight=count) or Loss(mean, "
            "aux={...}), but no other pair."
        )
    if value.numel() != 1:
        raise _not_one_number(operation, "loss", value)
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise _not_one_number(operation, "weight", weight)
    elif weight is not None and not cast("float", weight) >= 0:
        raise ValueError(f"{operation}: the weight must be at least 0, got {weight}.")
    if needs_gradient and not value.requires_grad:
        raise ValueError(
            f"{operation}: the loss has no gradient. It was detached, computed under torch.no_grad() or from "
            "what gather, reduce, broadcast or scatter returned (all_gather and reduce_scatter have "
            "gradients), or all parameters that it depends on are frozen."
        )


def _not_one_number(operation: str, name: str, tensor: torch.Tensor) -> ValueError:
    return ValueError(
        f"{operation}: the {name} must be one number, got a tensor of shape {tuple(tensor.shape)}. "
        "Take the mean of losses, or their sum with its weight."
    )


def join_losses(parts: Sequence[Loss]) -> Loss:
    """Return the loss of a batch from those of its equally large parts: tensors without gradients.

    Raises:
        ValueError: Some have a weight and some have none, or their ``aux`` differ in structure.
    """
    leaves, structure = flatten(parts[0])
    columns: list[list[Any]] = [[] for _ in leaves]
    for part in parts:
        part_leaves, other = flatten(part)
        if other != structure:
            raise ValueError(
                "forward_backward: the loss function returned a weight, or an aux of another structure, for "
                "one microbatch and not for another. Return the same for each."
            )
        for column, leaf in zip(columns, part_leaves, strict=True):
            column.append(
                leaf.detach() if isinstance(leaf, torch.Tensor) else torch.tensor(leaf, device="cpu")
            )
    device = parts[0].value.device
    sums = [torch.stack([leaf.to(device) for leaf in column]).sum(0) for column in columns]
    if parts[0].weight is None:
        sums = [leaf / len(parts) for leaf in sums]
    return cast("Loss", structure.unflatten(sums))


@contextmanager
def draw_for(ctx: Context, micro: MicroBatch) -> Generator[None, None, None]:
    """Make random numbers inside depend on the samples of a batch, whichever rank has it.

    Seeds torch's default generators (those of the CPU and of the context's device), and restores their states
    afterwards. Doesn't wait for the device.

    Ranks: every rank of ``ctx``; doesn't communicate.

    Args:
        ctx: In exact mode.
        micro: Of the batch, with its place in the data. One that doesn't come from
            :func:`accelfn.microbatches` is identified by its index and epoch alone.
    """
    assert ctx.reduction is not None  # called in exact mode only
    number = micro.index * ctx.num_processes + ctx.rank
    draws = micro.draws or Draws(f"batch {number} of epoch {micro.epoch}")
    block, draws.blocks = draws.blocks, draws.blocks + 1
    seed = _fold(ctx.reduction.seed, draws.name, block)
    on_device: Any = None if ctx.device.type == "cpu" else device_module(ctx.device.type)
    state = torch.default_generator.get_state()
    device_state = None if on_device is None else device_random_state(ctx.device)
    torch.default_generator.manual_seed(seed)
    if on_device is not None:
        on_device.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        if device_state is not None:
            set_device_random_state(ctx.device, device_state)


def _fold(*parts: object) -> int:
    """Hash values to a seed, by their text. Pure."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


Model = TypeVar("Model")
Batch = TypeVar("Batch")


def backward(
    ctx: Context,
    loss: torch.Tensor,
    scaler_state: ScalerState,
    micro: MicroBatch | None = None,
    weight: torch.Tensor | float | None = None,
    **kwargs: Any,
) -> ScalerState:
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
    check_context("backward", ctx)
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
    scaler_state: ScalerState,
    micro: MicroBatch | None,
    weight: torch.Tensor | float | None,
    **kwargs: Any,
) -> ScalerState:
    """Run :func:`backward` with the mean over ranks of their losses, also where they share sequences."""
    check_scaler("backward", scaler_state)
    check_loss("backward", loss, weight)
    value = loss.reshape(()) if loss.dim() else loss
    differentiate(ctx, _to_differentiate(ctx, value, weight, scaler_state, micro), **kwargs)
    return _next_state("backward", scaler_state, weight, micro)


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


def forward_backward(
    ctx: Context,
    model: Model,
    loss_fn: Callable[[Model, Batch], torch.Tensor | Loss],
    batch: Batch,
    scaler_state: ScalerState,
    micro: MicroBatch,
) -> tuple[ScalerState, torch.Tensor]:
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
    check_context("forward_backward", ctx)
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
    scaler: ScalerState,
    micro: MicroBatch,
    handle: Handle | None,
    *,
    share: float = 1.0,
    counts_weight: bool = True,
    num_batches: int = 1,
    differentiate: Callable[[Context, torch.Tensor], None] = differentiate,
) -> tuple[ScalerState, Loss]:
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
        return _to_differentiate(ctx, value, loss.weight if counts_weight else None, scaler, micro)

    add_gradients = partial(differentiate, ctx)
    work = BatchRun(compute, model, batch, to_differentiate, add_gradients, join_losses, num_batches)
    try:
        loss = work.run() if handle is None else handle.run(work)
    except Exception as error:
        note_failure(ctx.collectives.call_log, ctx.rank, error, operation)
        raise
    return _next_state(operation, scaler, loss.weight if counts_weight else None, micro), loss


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


def _to_differentiate(
    ctx: Context,
    value: torch.Tensor,
    weight: torch.Tensor | float | None,
    scaler_state: ScalerState,
    micro: MicroBatch | None,
) -> torch.Tensor:
    """Return the loss divided for its window, and multiplied by the loss scale."""
    if scaler_state.unscaled:
        raise ValueError(
            "backward: the gradients were unscaled already, and adding scaled ones would mix the two. "
            "Unscale and clip only where micro.sync is True, and pass on the state that optimizer_step "
            "returns."
        )
    if weight is None:
        if scaler_state.weight is not None:
            raise ValueError(
                "backward: earlier losses in this window have a weight, and this one has none. Pass a weight "
                "for all of them, or for none."
            )
        number = 1 if micro is None else micro.window
        if ctx.reduction is not None:  # without exact mode, averaging gradients divides by the ranks
            number *= ctx.world.size
        if number > 1:
            value = value / number
    return value * scaler_state.scale if ctx.precision.scales_loss else value


def _next_state(
    operation: str, scaler_state: ScalerState, weight: torch.Tensor | float | None, micro: MicroBatch | None
) -> ScalerState:
    """Return the state after a backward pass: with the loss weight, and whether the window is still open."""
    total = scaler_state.weight if weight is None else _add_weight(scaler_state, weight)
    is_open = True if micro is not None and not micro.sync else None
    following = ScalerState(*scaler_state[:5], total, is_open)  # a third of the cost of _replace
    scaler_state.superseded_by = operation
    return following


def _add_weight(scaler_state: ScalerState, weight: torch.Tensor | float) -> torch.Tensor:
    before = scaler_state.weight
    if before is None:
        # Sums of integers are exact in it, in any order.
        is_wide = device_type(scaler_state.scale.device.type).has_float64
        dtype = torch.float64 if is_wide else torch.float32
        before = torch.zeros_like(scaler_state.scale, dtype=dtype)
    return before + (weight.detach().reshape(()).to(before) if isinstance(weight, torch.Tensor) else weight)


@contextmanager
def no_sync(ctx: Context, *models: nn.Module) -> Generator[None, None, None]:
    """Don't average the gradients of ``models`` in backward passes inside; they accumulate on each rank.

    A step inside uses each rank's own gradients, as in local SGD. A step outside needs a backward pass
    outside before it, which averages the accumulated gradients.

    Ranks: all of ``ctx`` in the same way; doesn't communicate.
    """
    check_context("no_sync", ctx)
    del ctx
    with syncing(False, *models), local_steps(*models):
        yield


@contextmanager
def trigger_sync_in_backward(ctx: Context, model: nn.Module) -> Generator[None, None, None]:
    """Average the gradients of ``model`` in a backward pass inside, whose forward pass was under no_sync.

    Gradients accumulated by earlier backward passes are averaged with it. For windows whose length is only
    known after their forward passes.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: From :func:`prepare_model`; models without an engine are ignored.

    Raises:
        ConfigurationError: ``static_graph`` is on, which needs torch to know in the forward pass.
    """
    check_context("trigger_sync_in_backward", ctx)
    del ctx
    with syncing(True, model):
        yield


def accumulate(ctx: Context, micro: MicroBatch, *models: nn.Module) -> AbstractContextManager[None]:
    """Run forward and backward of one batch of a window: ranks average gradients only where it closes.

    In exact mode, torch's random numbers inside depend on the batch's samples, whichever rank has them; the
    default generators are restored afterwards.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, and whether each batch is averaged all the same (``sync_each_batch``).
        micro: Of the batch.
        *models: Prepared models that get gradients inside.

    Raises:
        ConfigurationError: There are several ranks, and the gradients of a model aren't averaged: it was not
            prepared, or with ``evaluation_mode``; or the context is in exact mode, and the model was prepared
            without it.
    """
    check_context("accumulate", ctx)
    check_micro("accumulate", micro, is_needed=True)
    if ctx.world.size == 1 and ctx.reduction is None:
        return nullcontext()
    return accumulate_block(ctx, micro, models)


@contextmanager
def accumulate_block(
    ctx: Context, micro: MicroBatch, models: Sequence[nn.Module], *, is_held: bool = False
) -> Generator[None, None, None]:
    """Run :func:`accumulate`; ``is_held`` as in :func:`accelfn.parallel.strategies.exact.exact_batch`."""
    for index, model in enumerate(models):
        if ctx.world.size > 1 and not is_averaged(model):
            raise ConfigurationError(
                f"accumulate: model {index}, a {type(model).__name__}, was not prepared for training, so its "
                "gradients are not averaged over the ranks. Pass the model that prepare_model(ctx, model) "
                "returns, without evaluation_mode."
            )
    # Part of the agreement on forward passes, so that ranks at different batches don't match.
    place = f"batch {micro.index} of epoch {micro.epoch} ({micro.window} a window)"
    with at_place(place, *models), ExitStack() as stack:
        if ctx.reduction is not None:
            for model in dict.fromkeys(models):
                stack.enter_context(exact_batch(model, micro, micro.place, micro.window, is_held))
            stack.enter_context(draw_for(ctx, micro))
        if not micro.sync and not ctx.accumulation.sync_each_batch:
            stack.enter_context(syncing(False, *models, is_in_window=True))
        yield


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
    check_context("forward", ctx)
    handle = handle_of(model)
    if isinstance(handle, PipelineHandle):
        return handle.forward(args, kwargs)
    return model(*args, **kwargs)


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
    check_context("lomo_backward", ctx)
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
