"""Prepare models, optimizers, loaders and schedulers: devices, precision, replication, sharding."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader
from typing_extensions import TypeVarTuple, Unpack

from accelfn.comm import Call, agree, catch, check_replicas
from accelfn.context import Context, Precision, WorldIdentity, check_context
from accelfn.context.config import AutocastKwargs
from accelfn.data import PreparedDataLoader, prepare_data_loader
from accelfn.errors import ConfigurationError
from accelfn.parallel import ModelPlan, plan_model, read_facts
from accelfn.parallel.engines import REPLACED, EngineOptimizer, wraps_model
from accelfn.parallel.facts import modules_of
from accelfn.parallel.forward import WrappedForward, copied_without, plain_forward
from accelfn.parallel.handle import (
    average_closure,
    handles_of,
    has_engine,
    refuse_open_window,
    uncompiled,
)
from accelfn.parallel.optimizers import begin_training, check_plan, note_optimizer, stepping_of
from accelfn.parallel.parameters import (
    check_filled,
    materialize,
    names_on_meta,
    newest,
    refuse_hooks,
    refuse_unfilled,
    repoint,
)
from accelfn.parallel.plan import apply_model
from accelfn.parallel.strategies.attention import share_attention
from accelfn.parallel.strategies.compilation import compile_, modules_to_compile, without_compile
from accelfn.parallel.strategies.fp8 import apply_fp8, plan_fp8_of, run_in_fp8, with_msamp
from accelfn.parallel.strategies.precision import MixedPrecisionForward, autocast_in, with_precision
from accelfn.parallel.strategies.replicate import check_wrapped, replicate
from accelfn.training.engines import prepare_trained, prepare_untrained
from accelfn.tree import is_dtensor, send_to_device

M = TypeVar("M", bound=nn.Module)


def autocast(ctx: Context, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
    """Compute in the context's precision inside a ``with`` block.

    Prepared models do so in their ``forward``; use this for computations outside of them, and to compute
    parts in full precision.

    Ranks: local.

    Args:
        ctx: Has precision and device.
        autocast_handler: Used instead of the context's, such as ``AutocastKwargs(enabled=False)``.

    >>> with autocast(Context().replace(mixed_precision="bf16")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    check_context("autocast", ctx)
    return autocast_in(ctx.precision, ctx.device.type, autocast_handler)


def without_precision(model: M) -> M:
    """Return a module that shares everything with ``model`` but computes in full precision."""
    if not isinstance(model.__dict__.get("forward"), MixedPrecisionForward):
        return model
    return copied_without(model, MixedPrecisionForward)


# Attribute that dispatch_model and its like set on a model: its weights must not be moved.
_DISPATCHED = "_accelfn_dispatched"


def verify_device_map(model: nn.Module) -> bool:
    """Return whether a device map has spread a model, or a module inside of it, over several devices.

    Ranks: local.

    Args:
        model: With the map in ``hf_device_map``, as loaders set it.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> verify_device_map(model)
    False
    >>> model.hf_device_map = {"0": "cpu", "1": "disk"}
    >>> verify_device_map(model)
    True
    """
    return any(len(_device_map_of(module)) > 1 for module in model.modules())


def is_placed(model: nn.Module) -> bool:
    """Return whether a model must not be moved: a device map has spread it, or it is offloaded.

    Ranks: local.
    """
    return verify_device_map(model) or any(_DISPATCHED in vars(module) for module in model.modules())


def check_devices(ctx: Context, model: nn.Module, *, is_spread: bool = False) -> None:
    """Refuse a model on several devices if there are several ranks, and a quantised one on another device.

    Ranks: local.

    Args:
        ctx: The world.
        model: Not prepared yet.
        is_spread: Whether ranks share it.

    Raises:
        ConfigurationError: It is on several devices, there are several ranks, and the variable
            ``ACCELFN_BYPASS_DEVICE_MAP`` isn't true. Or it is quantised, on another device than the
            context's.
    """
    _check_quantised(ctx, model)
    if ctx.num_processes == 1 or ctx.strategy.bypass_device_map:
        return
    gets_memory = is_spread or not is_placed(model)
    places: dict[str, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not (gets_memory and tensor.is_meta):  # on this rank's device
            places.setdefault(str(tensor.device), name)
    if verify_device_map(model):
        found = "a device map has spread it over several"
    elif len(places) > 1:
        found = ", ".join(f"{name} is on {device}" for device, name in places.items())
    else:
        return
    raise ConfigurationError(
        f"prepare_model: each of the {ctx.num_processes} ranks holds the full model on one device, but this "
        f"model is on several: {found}. Load it without a device map (device_map=None) and move it to one "
        "device, or run a single process. If each rank has several devices for it, set the variable "
        "ACCELFN_BYPASS_DEVICE_MAP=true."
    )


def _check_quantised(ctx: Context, model: nn.Module) -> None:
    """Refuse quantised weights on another device than this rank's: they can't be moved."""
    places = {_device_of(place) for place in _device_map_of(model).values()}
    if not is_quantized(model):
        return
    wrong = sorted(place for place in places if place != _device_of(ctx.device))
    if wrong and (len(places) == 1 or {"cpu", "disk"} & set(wrong)):
        raise ConfigurationError(
            f"prepare_model: the model is quantised, and its device map puts weights on "
            f"{', '.join(wrong)}, while this rank trains on {ctx.device}. Load it with "
            f"device_map={{'': {str(ctx.device)!r}}}."
        )


def _device_of(place: object) -> str:
    """Normalise a device's name: ``0``, ``"cuda"`` and ``"cuda:0"`` are the same."""
    text = str(place)
    return text if text in ("cpu", "disk", "mps") else text.rpartition(":")[2] if text[-1:].isdigit() else "0"


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model, or a module inside it, was loaded in 8 or 4 bits."""
    return any(
        bool(vars(module).get("is_loaded_in_8bit") or vars(module).get("is_loaded_in_4bit"))
        for module in model.modules()
    )


def check_packed(ctx: Context, model: nn.Module) -> None:
    """Refuse quantised weights that differ between ranks, since preparing doesn't make them equal.

    Engines broadcast tensors, but scales of quantised weights aren't tensors of a module: ranks would have
    one rank's numbers with the scales of another. Shards aren't compared.

    Ranks: every rank of ``ctx``; one digest of each such tensor is compared. Models without any don't
    communicate.

    Raises:
        ReplicaDriftError: They differ; with names and ranks.
    """
    if ctx.num_processes == 1 or not is_quantized(model):
        return
    plain = {
        name
        for name, parameter in (*model.named_parameters(), *model.named_buffers())
        if type(parameter) in (torch.Tensor, nn.Parameter)
    }
    packed = {
        name: _parts_of(one)
        for name, one in cast("Mapping[str, object]", model.state_dict(keep_vars=True)).items()
        if name not in plain and isinstance(one, torch.Tensor) and not is_dtensor(one)
    }
    check_replicas(ctx, packed, name="quantized")


def _parts_of(tensor: torch.Tensor) -> Any:
    """Return the tensors inside a wrapper subclass, by name; or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach()
    names, _ = cast("tuple[list[str], object]", tensor.__tensor_flatten__())
    return {name: _parts_of(getattr(tensor, name)) for name in names}


def _device_map_of(module: nn.Module) -> Mapping[str, Any]:
    found = getattr(module, "hf_device_map", None)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
O = TypeVar("O", bound=Optimizer)  # noqa: E741 -- beside M for modules
S = TypeVar("S", bound=LRScheduler)

# Attribute of a prepared object: its mark. A plain attribute, in no state dict.
_MARK = "_accelfn_prepared"


class Mark(NamedTuple):
    """The context that prepared an object, without its world, so that nothing is kept alive."""

    rank: int
    size: int
    device: str
    precision: Precision
    world: WorldIdentity
    is_exact: bool = False  # whether gradients are summed in exact mode
    is_wrapped: bool = False  # whether prepare returned another object, around this one
    is_alone: bool = False  # whether its gradients aren't averaged

    def fits(self, ctx: Context) -> bool:
        """Return whether ``ctx`` would prepare an object in the same way."""
        return self._replace(is_wrapped=False, is_alone=False) == mark_of(ctx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        """Keep the mark on a copy: it is prepared as the original is."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle without the mark: a loaded object isn't prepared."""
        return type(None), ()


def mark_of(ctx: Context) -> Mark:
    """Return the mark of objects prepared by ``ctx``."""
    is_exact = ctx.reduction is not None
    return Mark(ctx.rank, ctx.num_processes, str(ctx.device), ctx.precision, ctx.world.identity, is_exact)


@overload
def prepare(ctx: Context, one: T, /) -> T: ...
@overload
def prepare(ctx: Context, /, *objects: Unpack[Ts]) -> tuple[Unpack[Ts]]: ...
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
    check_context("prepare", ctx)
    if not objects:
        raise TypeError("prepare: got nothing to prepare. Pass a model, an optimizer, a loader, ...")
    check_together(objects)
    loaders = (DataLoader, PreparedDataLoader, *ctx.loading.custom_classes)
    # In this order: an optimizer follows its prepared model, and a scheduler may be of an optimizer after it.
    kinds: tuple[tuple[Any, Callable[..., Any]], ...] = (
        (nn.Module, prepare_model),
        (Optimizer, prepare_optimizer),
        (loaders, prepare_data_loader),
        (LRScheduler, prepare_scheduler),
    )
    prepared = with_msamp(ctx, objects)
    trained = {} if ctx.strategy.engine is None else prepare_with_engine(ctx, objects)
    for index, item in trained.items():
        prepared[index] = item
    for kind, prepare_kind in kinds:
        for index, item in enumerate(prepared):
            if isinstance(item, kind) and index not in trained:
                prepared[index] = prepare_kind(ctx, item)
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def prepare_with_engine(ctx: Context, objects: Sequence[object]) -> dict[int, Any]:
    """Prepare a model, its optimizer and its schedulers together, with the engine of the context.

    Ranks: every rank of ``ctx``.

    Returns:
        What replaces each of them, by index. Objects that are prepared already aren't in it.
    """
    kinds = (nn.Module, "model"), (Optimizer, "optimizer")
    known = {
        index
        for index, item in enumerate(objects)
        for kind, name in kinds
        if isinstance(item, kind) and _is_prepared(ctx, item, name)
    }
    trained = prepare_trained(ctx, {i: item for i, item in enumerate(objects) if i not in known})
    for index, item in trained.items():
        if isinstance(item, (nn.Module, Optimizer)):
            setattr(item, _MARK, mark_of(ctx))
        if isinstance(item, EngineOptimizer):
            setattr(item.optimizer, _MARK, mark_of(ctx))
        before = objects[index]
        if isinstance(before, nn.Module):
            setattr(before, _MARK, mark_of(ctx)._replace(is_wrapped=True))
        elif isinstance(before, Optimizer):  # a scheduler may be over it
            setattr(before, _MARK, mark_of(ctx))
            setattr(before, REPLACED, item is not before)
    return trained


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
    return any(_MARK in vars(one) for one in found if one is not None)


def parameters_of(optimizer: Optimizer) -> frozenset[int]:
    """Return the ids of an optimizer's parameters, or of their successors."""
    if isinstance(optimizer, EngineOptimizer):
        return frozenset(map(id, optimizer.model_parameters))
    groups: list[dict[str, list[torch.Tensor]]] = optimizer.param_groups
    return frozenset(id(newest(parameter)) for group in groups for parameter in group["params"])


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
    check_context("prepare_model", ctx)
    if ctx.strategy.engine is not None and plan is None and not _is_prepared(ctx, model, "model"):
        engine = prepare_untrained(ctx, model, evaluation_mode)
        if engine is not None:
            setattr(model, _MARK, mark_of(ctx)._replace(is_wrapped=True))
            setattr(engine, _MARK, mark_of(ctx)._replace(is_alone=True))
            return cast("M", engine)
    was_prepared = _is_prepared(ctx, model, "model")
    if was_prepared:
        is_alone = cast("Mark", getattr(model, _MARK)).is_alone
        if evaluation_mode or not is_alone or has_engine(model):
            return model
    else:
        check_wrapped(ctx, model)
        _check_max_norm(ctx, model)
    if isinstance(model, DistributedDataParallel):
        inner = cast("nn.Module", cast("Any", model).module)
        _agreed(ctx, lambda: check_devices(ctx, inner))
        _with_compute(ctx, inner)
        return _marked(ctx, inner, replicate(ctx, model))
    if evaluation_mode:
        check_devices(ctx, model)
        model, empty = _placed(ctx, model)
        refuse_unfilled(model, empty)
        model = _with_compute(ctx, model)
        setattr(model, _MARK, mark_of(ctx)._replace(is_alone=True))
        return model
    settled = _agreed(ctx, lambda: _planned(ctx, model, plan))
    if not settled.is_spread and was_prepared:
        _agreed(ctx, lambda: check_filled("prepare_model", model))
        return _marked(ctx, model, replicate(ctx, model))
    empty: tuple[str, ...] = ()
    if not settled.is_spread:
        model, empty = _placed(ctx, model)
    if empty and ctx.num_processes > 1:  # what none of them has can't be sent by rank 0
        agree(ctx, Call("prepare_model of tensors on the meta device", ", ".join(empty)))
    _reset_forward(model)
    check_packed(ctx, model)
    if settled.is_spread:
        rows = settled.rows()
        if settled.pipeline is not None:  # the same on all stages
            rows = {name: rows[name] for name in ("mesh", "pipeline", "schedule")}
        agree(ctx, Call("prepare_model", repr(rows), lambda: rows))
    result = apply_model(ctx, model, settled)
    refuse_unfilled(model, empty)  # after replicas have exchanged what is in the memory
    if settled.shard is None or settled.shard.autocasts:
        with_precision(ctx, model)
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
    if settled.is_spread:
        has_shards = settled.shard is not None or settled.tensor is not None
        check_plan("prepare_model", stepping_of(model.parameters()), has_shards=has_shards)
    check_devices(ctx, model, is_spread=settled.is_spread)
    if settled.is_spread:
        refuse_hooks(model)
    return settled


def _placed(ctx: Context, model: M) -> tuple[M, tuple[str, ...]]:
    """Move a model to this rank's device; return also the names of what had no memory, and has it now."""
    if is_placed(model):
        return model, ()
    empty = names_on_meta(model)
    if empty:
        materialize(model, ctx.device)
    return model.to(ctx.device) if ctx.device_placement else model, empty


def _reset_forward(model: nn.Module) -> None:
    """Remove wrappers around the forward of an unpickled model that was prepared elsewhere."""
    if isinstance(vars(model).get("forward"), WrappedForward):
        model.forward = plain_forward(model)


def _with_compute(ctx: Context, model: M) -> M:
    """Compile a model and set the context's precision. Writes into it."""
    _reset_forward(model)
    share_attention(ctx, model)
    options, facts = ctx.strategy.dynamo, read_facts(model)
    fp8 = plan_fp8_of(ctx, facts, model)
    apply_fp8(model, fp8)
    compile_(model, options, modules_to_compile(options, facts, model))
    run_in_fp8(model, fp8)
    return with_precision(ctx, model)


def _marked(ctx: Context, inner: nn.Module, result: M) -> M:
    mark = mark_of(ctx)._replace(is_alone=not has_engine(result))
    setattr(inner, _MARK, mark._replace(is_wrapped=result is not inner))
    for parameter in inner.parameters():
        setattr(parameter, _MARK, True)
    if result is not inner:
        setattr(result, _MARK, mark)
    return result


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
    check_context("prepare_optimizer", ctx)
    if ctx.strategy.engine is not None and not _is_prepared(ctx, optimizer, "optimizer"):
        raise ConfigurationError(
            f"prepare_optimizer: {ctx.strategy.engine} needs the model and its optimizer together. Write "
            "prepare(ctx, model, optimizer, ...)."
        )
    note_optimizer(optimizer)
    if _is_prepared(ctx, optimizer, "optimizer"):
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
    setattr(optimizer, _MARK, mark_of(ctx))
    return optimizer


def prepare_scheduler(ctx: Context, scheduler: S) -> S:
    """Check a learning rate scheduler, and return it; step it by :func:`accelfn.scheduler_step`.

    Ranks: local.

    Args:
        ctx: The world.
        scheduler: Of an optimizer that was prepared before, or is in the same call of :func:`prepare`.

    Raises:
        ConfigurationError: Another context has prepared its optimizer, or none has.
    """
    check_context("prepare_scheduler", ctx)
    # Checks its optimizer's mark: an attribute of a scheduler would be in its state dict.
    optimizer: object = scheduler.optimizer
    if not _is_prepared(ctx, optimizer, "optimizer of the scheduler"):
        raise ConfigurationError(
            f"the {type(optimizer).__name__} of the {type(scheduler).__name__} was not prepared. Prepare it "
            "first, or in the same call."
        )
    return scheduler


def unwrap_model(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Remove the wrappers of ``prepare_model`` and ``torch.compile`` from a model.

    Ranks: local.

    Args:
        model: Prepared or not.
        keep_fp32_wrapper: Keep ``forward`` under autocast. Otherwise the result is a shallow copy in full
            precision; ``model`` itself isn't changed.
        keep_torch_compile: Keep a compiled model compiled.

    Raises:
        TypeError: Got a Context, which other functions take first.

    >>> model = nn.Linear(1, 1)
    >>> unwrap_model(prepare_model(Context(), model)) is model
    True
    """
    if isinstance(model, Context):
        raise TypeError("unwrap_model: takes no Context. Write unwrap_model(model).")
    compiled: nn.Module | None = None
    inner = model
    while True:  # wrappers may be nested in either order
        if isinstance(inner, (DistributedDataParallel, nn.DataParallel)) or wraps_model(inner):
            inner = cast("nn.Module", inner.module)
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            compiled = inner
            inner = cast("nn.Module", inner._orig_mod)
        else:
            break
    plain = inner if keep_fp32_wrapper else without_precision(inner)
    if plain is not inner:
        vars(plain).pop(_MARK, None)  # the copy in full precision isn't prepared
    if not keep_torch_compile:
        return without_compile(plain)
    if compiled is None:
        return plain
    if plain is inner and compiled._orig_mod is inner:
        return compiled if keep_fp32_wrapper else without_precision(compiled)
    return cast("nn.Module", cast("Any", torch).compile(plain))


def is_averaged(model: nn.Module) -> bool:
    """Return whether a model's gradients are averaged, or it has none; it may be compiled."""
    if has_engine(model):
        return True
    prepared = vars(uncompiled(model)).get(_MARK) is not None
    return prepared and not any(parameter.requires_grad for parameter in model.parameters())


def _reductions(mark: Mark, ctx: Context) -> str:
    """Describe the two reductions if they differ."""
    if mark.is_exact == (ctx.reduction is not None):
        return ""
    before, now = ("canonical", "mean") if mark.is_exact else ("mean", "canonical")
    return f', and reduction "{now}" where it was "{before}"'


def _has_wrapper(inner: nn.Module) -> bool:
    """Return whether what ``prepare`` returned around a model is alive."""

    def is_alive() -> bool:
        return any(handle.is_alive for one in inner.parameters() for handle in handles_of(one))

    if is_alive():
        gc.collect()  # a wrapper is in reference cycles
    return is_alive()


def _is_prepared(ctx: Context, item: object, kind: str) -> bool:
    # Only a module's own attribute, since wrappers pass on attribute access; optimizer proxies may pass it
    # on.
    own: object = getattr(item, "__dict__", {}).get(_MARK)
    mark = cast("Mark | None", getattr(item, _MARK, None) if isinstance(item, Optimizer) else own)
    if mark is None:
        return False
    if mark.is_wrapped:
        if isinstance(item, nn.Module) and not _has_wrapper(item):
            vars(item).pop(_MARK)  # what prepare returned is gone
            return False
        raise ConfigurationError(
            f"the {kind} was prepared already, and what prepare returned wraps it. Use the wrapper: "
            "calling the inner model skips gradient synchronisation."
        )
    if not mark.fits(ctx):
        raise ConfigurationError(
            f"the {kind} was prepared by another context (rank {mark.rank} of {mark.size} on {mark.device}, "
            "mixed precision "
            f"{mark.precision.mode!r}), and this one is rank {ctx.rank} of {ctx.num_processes} on "
            f"{ctx.device} with "
            f"{ctx.mixed_precision!r}{_reductions(mark, ctx)}. Prepare a {kind} once, with one context."
        )
    return True
