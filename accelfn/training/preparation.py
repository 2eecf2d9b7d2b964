"""Prepare models, optimizers, loaders and schedulers: devices, precision, replication, sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import TypeVarTuple, Unpack

from accelfn.comm import Call, agree, catch
from accelfn.context import Context, takes_context
from accelfn.data import PreparedDataLoader, prepare_data_loader
from accelfn.errors import ConfigurationError
from accelfn.parallel import ModelPlan, plan_model
from accelfn.parallel.apply import adopt_layers, apply_compute, apply_model
from accelfn.parallel.facts import modules_of
from accelfn.parallel.gradient_hooks import refuse_hooks
from accelfn.parallel.handle import has_engine
from accelfn.parallel.optimizers import begin_training, check_plan, note_optimizer, stepping_of
from accelfn.parallel.pointers import newest, repoint
from accelfn.parallel.step_checks import average_closure, refuse_open_window
from accelfn.parallel.strategies.fp8 import with_msamp
from accelfn.parallel.strategies.replicate import check_wrapped, replicate
from accelfn.parallel.values import check_filled, materialize, names_on_meta, refuse_unfilled
from accelfn.training.optimizers import parameters_of
from accelfn.training.placement import check_devices, check_packed, is_placed
from accelfn.training.prepared import MARK, Mark, is_prepared, mark_of
from accelfn.training.unstepped import mark_siblings
from accelfn.tree import is_dtensor, send_to_device

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
O = TypeVar("O", bound=Optimizer)  # noqa: E741 -- beside M for modules
S = TypeVar("S", bound=LRScheduler)


@overload
def prepare(ctx: Context, one: T, /) -> T: ...
@overload
def prepare(ctx: Context, /, *objects: Unpack[Ts]) -> tuple[Unpack[Ts]]: ...
@takes_context
def prepare(ctx: Context, /, *objects: Any) -> Any:
    """Prepare models, optimizers, loaders and schedulers, and return them in the same order.

    Each object goes to the function of its kind: :func:`prepare_model`, :func:`prepare_optimizer`,
    :func:`prepare_data_loader` (also classes in ``custom_classes`` of the ``DataLoaderConfiguration``),
    :func:`prepare_scheduler`. Any other object is returned unchanged.

    Ranks: every rank of ``ctx``.

    Returns:
        The object itself for one, a tuple for several.

    Raises:
        TypeError: No object.

    >>> prepare(Context(), nn.Linear(1, 1), "anything")
    (Linear(in_features=1, out_features=1, bias=True), 'anything')
    """
    if not objects:
        raise TypeError("prepare: got nothing to prepare. Pass a model, an optimizer, a loader, ...")
    loaders = (DataLoader, PreparedDataLoader, *ctx.loading.custom_classes)
    # In this order: an optimizer follows its prepared model, and a scheduler may be of an optimizer after it.
    kinds: tuple[Kind, ...] = (
        (nn.Module, lambda _, item: prepare_model(ctx, item)),
        (Optimizer, lambda _, item: prepare_optimizer(ctx, item)),
        (loaders, lambda _, item: prepare_data_loader(ctx, item)),
        (LRScheduler, lambda _, item: prepare_scheduler(ctx, item)),
    )
    prepared = prepare_kinds(ctx, objects, kinds)
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


# Classes, and the function that prepares their objects, from an index and an object.
Kind = tuple[Any, Callable[[int, Any], Any]]


def prepare_kinds(ctx: Context, objects: Sequence[Any], kinds: Sequence[Kind]) -> list[Any]:
    """Prepare objects by the functions of their kinds, all of the first kind first; see :func:`prepare`.

    Before these, MS-AMP converts a model with its optimizer, and an engine takes over what it trains.

    Ranks: every rank of ``ctx``.
    """
    check_together(objects)
    prepared = with_msamp(ctx, objects)
    if ctx.strategy.engine is not None:
        from accelfn.training.engines import prepare_with_engine

        for index, item in prepare_with_engine(ctx, objects).items():
            prepared[index] = item
    for classes, prepare_kind in kinds:
        for index, item in enumerate(prepared):
            if isinstance(item, classes):
                prepared[index] = prepare_kind(index, item)
    return prepared


def check_together(objects: Sequence[object]) -> None:
    """Check objects that are prepared in one call, and note on the parameters how their optimizers step.

    Raises:
        ConfigurationError: An optimizer has no parameter of the models that are prepared with it.
        NotAvailableError: An optimizer can't be trained with.
    """
    models = [item for item in objects if isinstance(item, nn.Module)]
    # Not parameters(), which a model may override.
    modules = [module for model in models for module in model.modules()]
    known = {
        id(newest(one))
        for module in modules
        for one in vars(module)["_parameters"].values()
        if one is not None
    }
    for index, item in enumerate(objects):
        if known and isinstance(item, Optimizer) and not (known & parameters_of(item) or _is_known(item)):
            raise ConfigurationError(
                f"prepare: object {index}, a {type(item).__name__}, has no parameter of the models that are "
                "prepared with it, so its steps would not change them. Make it from model.parameters() of "
                "the same model, after everything that replaces parameters."
            )
        if isinstance(item, Optimizer):
            note_optimizer(item)


def _is_known(optimizer: Optimizer) -> bool:
    """Return whether a model of an optimizer's parameters was prepared before."""
    groups: list[dict[str, list[torch.Tensor]]] = optimizer.param_groups
    found = (newest(one) for group in groups for one in group["params"])
    return any(MARK in vars(one) for one in found if one is not None)


@takes_context
def prepare_model(
    ctx: Context, model: M, *, evaluation_mode: bool = False, plan: ModelPlan | None = None
) -> M:
    """Place a model on this rank's device, set the context's precision, and keep all ranks equal.

    The plan of it can be printed before: :func:`accelfn.plan_model`. With an ``fsdp_plugin``, or a mesh that
    shards, the model is sharded: the result is the model itself, with shards instead of its parameters, and
    optimizers over the old parameters continue with the new ones, whether they are prepared before or after.
    Its precision is then a policy of FSDP, and not autocast.

    In exact mode (``reduction="canonical"``) its gradients are summed in a fixed order, and the result is the
    model itself. Otherwise, on several processes the result is a ``DistributedDataParallel`` around the model
    (typed as the model, whose public attributes and methods it has); with one, and on ranks that are threads,
    the model itself. Gradients are averaged whatever computed the loss: a call of the model, another method
    of it, or a function over the model inside.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: Any module. It is moved, unless a device map has spread it or it is offloaded; its ``forward``
            runs under autocast from now on. Parameters on the meta device get memory, and the forward is
            refused until they are written, by :func:`accelfn.load_model` or otherwise. A
            ``DistributedDataParallel`` over the context's processes is adopted.
        evaluation_mode: Don't replicate: gradients will not be averaged. If the model is prepared again
            without it, for training, it is replicated then; so is a model that had no trainable parameter at
            first.
        plan: The plan of this model, instead of the context's.

    Returns:
        The model to call; a model that this context has prepared already is returned unchanged.

    Raises:
        ConfigurationError: Another context has prepared it, or it is inside of a prepared wrapper; or it is
            on several devices, and there are several ranks (the variable ``ACCELFN_BYPASS_DEVICE_MAP`` allows
            it); or it is quantised on another device.
            It was sharded by torch's FSDP, or is a ``DistributedDataParallel`` over other processes.
            Ranks share it, and a parameter has a hook on its gradient; or they replicate it, and the hook
            comes after the gradient's accumulation. There are several, and an embedding has ``max_norm``.
        NotAvailableError: An optimizer of its parameters, prepared before or in the same call of
            :func:`prepare`, can't step shards.
    """
    if ctx.strategy.engine is not None and plan is None and not is_prepared(ctx, model, "model"):
        from accelfn.training.engines import prepare_untrained

        engine = prepare_untrained(ctx, model, evaluation_mode)
        if engine is not None:
            setattr(model, MARK, mark_of(ctx)._replace(is_wrapped=True))
            setattr(engine, MARK, mark_of(ctx)._replace(is_unaveraged=True))
            return cast("M", engine)
    was_prepared = is_prepared(ctx, model, "model")
    if was_prepared:
        is_unaveraged = cast("Mark", getattr(model, MARK)).is_unaveraged
        if evaluation_mode or not is_unaveraged or has_engine(model):
            return model
    else:
        check_wrapped(ctx, model)
        _check_max_norm(ctx, model)
    if isinstance(model, DistributedDataParallel):
        inner = cast("nn.Module", cast("Any", model).module)
        _agreed(ctx, lambda: check_devices(ctx, inner))
        apply_compute(ctx, inner)
        return _marked(ctx, inner, replicate(ctx, model))
    if evaluation_mode:
        check_devices(ctx, model)
        model, empty = _placed(ctx, model)
        refuse_unfilled(model, empty)
        apply_compute(ctx, model)
        setattr(model, MARK, mark_of(ctx)._replace(is_unaveraged=True))
        return model
    if any(is_dtensor(parameter) for parameter in model.parameters()):
        _agreed(ctx, lambda: _check_shared(model, has_shards=True))
        adopt_layers(ctx, model)
        return _marked(ctx, model, model)
    settled = _agreed(ctx, lambda: _planned(ctx, model, plan))
    if settled.is_spread:
        check_packed(ctx, model)
        rows = settled.rows()
        if settled.pipeline is not None:  # the same on all stages
            rows = {name: rows[name] for name in ("mesh", "pipeline", "schedule")}
        agree(ctx, Call("prepare_model", repr(rows), lambda: rows))
        return _marked(ctx, model, apply_model(ctx, model, settled))
    if was_prepared:
        _agreed(ctx, lambda: check_filled("prepare_model", model))
        return _marked(ctx, model, replicate(ctx, model))
    model, empty = _placed(ctx, model)
    if empty and ctx.num_processes > 1:  # what none of them has can't be sent by rank 0
        agree(ctx, Call("prepare_model of tensors on the meta device", ", ".join(empty)))
    check_packed(ctx, model)
    result = apply_model(ctx, model, settled)
    refuse_unfilled(model, empty)  # after replicas have exchanged what is in the memory
    return _marked(ctx, model, result)


def _check_max_norm(ctx: Context, model: nn.Module) -> None:
    """Refuse, on several ranks, embeddings that a forward pass rescales: in the rows that the rank reads."""
    for name, module in modules_of(model).items() if ctx.num_processes > 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigurationError(
                f"prepare_model: {name or type(model).__name__} is an embedding with max_norm, whose forward "
                "pass rescales the rows that it reads, and each rank reads others. Leave max_norm out, and "
                "rescale all rows after each step, under torch.no_grad(): weight.mul_((max_norm / "
                "weight.norm(dim=1, keepdim=True)).clamp(max=1))."
            )


def _agreed(ctx: Context, action: Callable[[], T]) -> T:
    """Run a check that only this rank may fail; the others raise in their first exchange."""
    result, error = catch(action)
    if error is not None:
        agree(ctx, Call("prepare_model"), None, error)
        raise error
    return cast("T", result)


def _planned(ctx: Context, model: nn.Module, plan: ModelPlan | None) -> ModelPlan:
    settled = plan or plan_model(ctx, model)
    is_spread = settled.is_spread
    check_devices(ctx, model, is_spread=is_spread)
    if is_spread:
        _check_shared(model, has_shards=settled.shard is not None or settled.tensor is not None)
    return settled


def _check_shared(model: nn.Module, *, has_shards: bool) -> None:
    """Refuse what a model can't have whose parameters ranks share."""
    check_plan("prepare_model", stepping_of(model.parameters()), has_shards=has_shards)
    refuse_hooks(model)


def _placed(ctx: Context, model: M) -> tuple[M, tuple[str, ...]]:
    """Move a model to this rank's device; return also the names of what had no memory, and has it now."""
    if is_placed(model):
        return model, ()
    empty = names_on_meta(model)
    if empty:
        materialize(model, ctx.device)
    return model.to(ctx.device) if ctx.device_placement else model, empty


def _marked(ctx: Context, inner: nn.Module, result: M) -> M:
    mark = mark_of(ctx)._replace(is_unaveraged=not has_engine(result))
    setattr(inner, MARK, mark._replace(is_wrapped=result is not inner))
    mark_siblings(inner)
    if result is not inner:
        setattr(result, MARK, mark)
    return result


@takes_context
def prepare_optimizer(ctx: Context, optimizer: O) -> O:
    """Move the state of an optimizer to the devices of its parameters, and shard it as they are.

    A schedule-free optimizer is put into training mode.

    Ranks: local.

    Args:
        ctx: The world.
        optimizer: Over the parameters of a model that is prepared before or later.

    Returns:
        The optimizer itself.

    Raises:
        ConfigurationError: Another context has prepared it.
        NotAvailableError: Its package can't step the shards of its sharded model, or keeps the state where no
            checkpoint finds it.
    """
    if ctx.strategy.engine is not None and not is_prepared(ctx, optimizer, "optimizer"):
        raise ConfigurationError(
            f"prepare_optimizer: {ctx.strategy.engine} needs the model and its optimizer together. Write "
            "prepare(ctx, model, optimizer, ...)."
        )
    note_optimizer(optimizer)
    if is_prepared(ctx, optimizer, "optimizer"):
        repoint(optimizer)
        return optimizer
    repoint(optimizer)
    if ctx.device_placement:
        # Step counters stay where the optimizer put them: usually on the CPU.
        for parameter, state in cast("dict[torch.Tensor, dict[str, Any]]", optimizer.state).items():
            for name, value in state.items():
                if name != "step" and not is_dtensor(value):
                    state[name] = send_to_device(value, ctx.device if parameter.is_meta else parameter.device)
    begin_training(optimizer)
    if ctx.world.size > 1 and isinstance(cast("object", optimizer), Optimizer):
        optimizer.register_step_pre_hook(refuse_open_window)
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.register_step_pre_hook(partial(average_closure, ctx))
    setattr(optimizer, MARK, mark_of(ctx))
    return optimizer


@takes_context
def prepare_scheduler(ctx: Context, scheduler: S) -> S:
    """Check a learning rate scheduler, and return it; step it by :func:`accelfn.scheduler_step`.

    Ranks: local.

    Args:
        ctx: The world.
        scheduler: Of an optimizer that was prepared before, or is in the same call of :func:`prepare`.

    Raises:
        ConfigurationError: Another context has prepared its optimizer, or none has.
    """
    # Checks its optimizer's mark: an attribute of a scheduler would be in its state dict.
    optimizer: object = scheduler.optimizer
    if not is_prepared(ctx, optimizer, "optimizer of the scheduler"):
        raise ConfigurationError(
            f"the {type(optimizer).__name__} of the {type(scheduler).__name__} was not prepared. Prepare it "
            "first, or in the same call."
        )
    return scheduler
