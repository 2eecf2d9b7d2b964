"""Train a model with DeepSpeed: build its engine, and the objects that stand for the model's optimizer."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelfn.context import Context, takes_context
from accelfn.errors import ConfigurationError, MissingExtraError, NotAvailableError
from accelfn.parallel.engines.deepspeed_plan import (
    CpuOptimizer,
    DeepSpeedFacts,
    DeepSpeedPlan,
    plan_deepspeed,
)
from accelfn.parallel.engines.deepspeed_state import plain_state
from accelfn.parallel.engines.engine import (
    EngineHandle,
    EngineOptimizer,
    EngineScheduler,
    EngineState,
    EngineStep,
)
from accelfn.parallel.forward_agreement import check_each_forward
from accelfn.parallel.handle import Communication
from accelfn.parallel.optimizers import why_not_flat
from accelfn.parallel.strategies.precision import with_precision
from accelfn.parallel.values import names_on_meta
from accelfn.tree import convert_to_fp32, map_tensors

# The first version whose caller may count micro-batches.
_MINIMUM = (0, 19)


class DummyOptim(Optimizer):
    """Stands for the optimizer of DeepSpeed's configuration until ``prepare``.

    Args:
        params: As of torch's optimizers.
        lr: Fills the "auto" of the configuration.
        weight_decay: Likewise.
        **kwargs: Kept in ``defaults``.
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, **kwargs: Any) -> None:
        """Store the parameters and the options."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **kwargs})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refuse: there is no optimizer before ``prepare``."""
        raise ConfigurationError(
            "DummyOptim stands for an optimizer that prepare makes. Use the optimizer that prepare returns."
        )


class DummyScheduler:
    """Stands for the scheduler of DeepSpeed's configuration until ``prepare``.

    Args:
        optimizer: The ``DummyOptim``, or the optimizer that is prepared with it.
        total_num_steps: Optimizer steps in all; fills the "auto" of the configuration.
        warmup_num_steps: Likewise.
        lr_scheduler_callable: Makes a scheduler of torch's over the optimizer that it gets.
        **kwargs: Kept as ``kwargs``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], LRScheduler] | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the options."""
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class DeepSpeedHandle(EngineHandle):
    """The handle of a model that DeepSpeed trains or shards."""

    name: ClassVar[str] = "DeepSpeed"

    def __init__(
        self,
        model: nn.Module,
        plan: DeepSpeedPlan,
        groups: Sequence[Sequence[torch.Tensor]],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """Attach to DeepSpeed's engine ``model``."""
        self.plan = plan
        self.scales_loss = False  # in float16 at stage 0, where accelfn's scaler looks for overflows
        self._groups, self._dtypes = groups, dtypes
        super().__init__(model, model.parameters())

    def communicates(self) -> Communication:
        """Return that stages above 1 reduce in the backward pass, and that stage 3 gathers parameters."""
        stage = self.plan.stage
        trains = torch.is_grad_enabled() and bool(self._groups)
        return Communication(gradients=trains and stage > 1, parameters=stage == 3, at_once=stage == 3)

    def after_step_in_backward(self) -> None:
        """Free gathered parameters, which have the values from before the step."""
        cast("Any", self._model()).optimizer.partition_all_parameters()

    def close(self) -> None:
        """Free what the engine holds. The model can't be used any more."""
        model = cast("Any", self._model())
        if model is not None:
            model.destroy()

    def state(self) -> EngineState:
        """Return the model and optimizer as plain objects with row shards."""
        model = cast("Any", self._model())
        if self.plan.stage == 0:
            return EngineState(model.module, model.optimizer if self._groups else None, lambda: None)
        return plain_state(model, self.plan.stage, self._groups, self._dtypes)


class DeepSpeedOptimizer(EngineOptimizer):
    """The optimizer of a model that DeepSpeed trains."""

    handle: DeepSpeedHandle

    def __init__(self, engine: Any, parameters: Iterable[torch.Tensor], handle: DeepSpeedHandle) -> None:
        """Stand for the optimizer of DeepSpeed's ``engine``."""
        inner = engine.optimizer if handle.plan.stage == 0 else engine.optimizer.optimizer
        super().__init__(inner, parameters, handle)
        self._engine = engine

    def step_engine(self, divisor: float, max_norm: float | None) -> EngineStep:
        """Reduce, unscale, clip and step, with DeepSpeed; see :class:`EngineOptimizer`."""
        planned = self.handle.plan.max_norm
        if planned and max_norm is not None and max_norm != planned:
            raise ConfigurationError(
                f"max_norm={max_norm} contradicts DeepSpeed's gradient_clipping={planned}. Set one of the "
                'two, and leave the other out or "auto".'
            )
        bound = planned or max_norm or 0.0
        if self.handle.plan.stage == 0:
            return self._step_replicas(divisor, bound)
        zero = self._engine.optimizer
        zero.clip_grad, zero.loss_scale = bound, divisor
        try:
            self._engine.step()
        finally:
            zero.clip_grad, zero.loss_scale = 0.0, 1.0
        return EngineStep(self._engine.get_global_grad_norm(), bool(getattr(zero, "overflow", False)))

    def _step_replicas(self, divisor: float, bound: float) -> EngineStep:
        """Step at stage 0, where each rank has all gradients in the parameters."""
        engine = self._engine
        engine.buffered_allreduce_fallback()
        gradients = [one.grad for one in self.model_parameters if one.grad is not None]
        with torch.no_grad():
            if divisor != 1.0:
                torch._foreach_div_(gradients, divisor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            norm = torch.nn.utils.get_total_norm(gradients)
        overflowed = self.handle.scales_loss and not bool(torch.isfinite(norm))
        if overflowed:
            engine.zero_grad()
            engine.skipped_steps += 1
            return EngineStep(norm, True)
        if bound:
            torch.nn.utils.clip_grads_with_norm_(self.model_parameters, bound, norm)
        engine.step()
        return EngineStep(norm, False)


def load_deepspeed() -> Any:
    """Return the package deepspeed.

    Raises:
        MissingExtraError: It isn't installed.
        NotAvailableError: It is too old.
    """
    try:
        package: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise MissingExtraError(
            "DeepSpeed is not installed. Run: pip install 'accelfn[deepspeed]'"
        ) from error
    version = tuple(int(part) for part in str(package.__version__).split(".")[:2])
    if version < _MINIMUM:
        raise NotAvailableError(
            f"DeepSpeed {package.__version__} is too old: accelfn counts the micro-batches of a window, "
            f"which needs {'.'.join(map(str, _MINIMUM))}. Run: pip install -U 'accelfn[deepspeed]'"
        )
    return package


@takes_context
def deepspeed_facts(
    ctx: Context,
    model: nn.Module,
    optimizer: Optimizer | None,
    scheduler: LRScheduler | DummyScheduler | None = None,
    batch_sizes: Iterable[int | None] = (),
) -> DeepSpeedFacts:
    """Read what :func:`accelfn.parallel.engines.plan_deepspeed` depends on.

    Raises:
        MissingExtraError: DeepSpeed isn't installed.
        NotAvailableError: It is too old.
    """
    package = load_deepspeed()
    constants = vars(importlib.import_module(f"{package.__name__}.runtime.constants"))
    config: Any = getattr(model, "config", None)
    sizes = [getattr(config, "hidden_size", None), *(getattr(config, "hidden_sizes", None) or ())]
    hidden = [size for size in sizes if isinstance(size, int)]
    defaults: Mapping[str, Any] = {} if optimizer is None else optimizer.defaults
    is_dummy = isinstance(scheduler, DummyScheduler)
    made = is_dummy and scheduler.lr_scheduler_callable is not None
    return DeepSpeedFacts(
        world_size=ctx.num_processes,
        mixed_precision=ctx.mixed_precision,
        num_steps=ctx.gradient_accumulation_steps,
        batch_sizes=tuple(batch_sizes),
        hidden_size=max(hidden, default=None),
        classes=frozenset(type(module).__name__ for module in model.modules()),
        optimizer="none" if optimizer is None else "dummy" if isinstance(optimizer, DummyOptim) else "torch",
        optimizer_class=type(optimizer).__name__,
        lr=float(defaults.get("lr", 1e-3)),
        weight_decay=float(defaults.get("weight_decay", 0.0)),
        scheduler="none" if scheduler is None else "made" if made else "dummy" if is_dummy else "torch",
        total_num_steps=scheduler.total_num_steps if is_dummy else None,
        warmup_num_steps=scheduler.warmup_num_steps if is_dummy else 0,
        known_keys=frozenset(value for value in constants.values() if isinstance(value, str)),
    )


def apply_deepspeed(
    ctx: Context,
    model: nn.Module,
    plan: DeepSpeedPlan,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | DummyScheduler | None = None,
) -> tuple[nn.Module, DeepSpeedOptimizer | None, LRScheduler | None]:
    """Build DeepSpeed's engine as planned. Its parameters get the values of rank 0.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: Over all ranks of torch's default process group.
        model: Written into.
        plan: From :func:`accelfn.parallel.engines.plan_deepspeed`.
        optimizer: Over the model's parameters, without state; None for a model that isn't trained.
        scheduler: Over the optimizer.

    Returns:
        The engine around the model, the optimizer in place of the one that was passed, and the scheduler to
        use; None for one that wasn't passed.

    Raises:
        ConfigurationError: The optimizer has state or other parameters; the model is on the meta device; or
            the context isn't that of all ranks.
        NotAvailableError: The ranks are threads.
        Exception: Raised by DeepSpeed.
    """
    package = load_deepspeed()
    _check(ctx, model, plan, optimizer)
    names = {id(parameter) for parameter in model.parameters()}
    groups: list[list[torch.Tensor]] = [
        list(group["params"]) for group in ([] if optimizer is None else optimizer.param_groups)
    ]
    if any(id(one) not in names for group in groups for one in group):
        raise ConfigurationError(
            f"prepare: the {type(optimizer).__name__} has parameters of another model than the one that "
            "is prepared with it. Make it from model.parameters() of the same model."
        )
    dtypes = {name: one.dtype for name, one in (*model.named_parameters(), *model.named_buffers())}
    if plan.leaf_classes:
        leaves = {type(one) for one in model.modules() if type(one).__name__ in plan.leaf_classes}
        package.utils.set_z3_leaf_modules(model, list(leaves))
    arguments: dict[str, Any] = {"model": model, "config": dict(plan.config)}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = [
            {**group, "params": list(group["params"])} for group in optimizer.param_groups
        ]
    elif optimizer is not None:
        chosen = plan.cpu_optimizer
        arguments["optimizer"] = optimizer if chosen is None else _on_host(package, chosen, optimizer)
    _join_group(package, ctx)
    engine = package.initialize(**arguments)[0]
    # Also at stage 0, where there are no hooks of ZeRO that it would have to wait for.
    engine._support_torch_style_backward = True
    if optimizer is None and plan.stage == 3:
        # The backward pass of an optimizer like LOMO calls it, and what only shards lacks it.
        engine.optimizer.set_gradient_accumulation_boundary = _ignore
    handle = DeepSpeedHandle(engine, plan, groups, dtypes)
    handle.scales_loss = ctx.precision.scales_loss
    check_each_forward(ctx, engine)
    if plan.stage == 0:  # the model keeps its dtype
        with_precision(ctx, engine.module)
    _cast_around(engine, plan.dtype)
    if optimizer is None:
        return engine, None, None
    own = DeepSpeedOptimizer(engine, [one for group in groups for one in group], handle)
    if isinstance(scheduler, DummyScheduler):
        make = scheduler.lr_scheduler_callable
        scheduler = EngineScheduler(own, engine.lr_scheduler) if make is None else make(own.optimizer)
    elif scheduler is not None:
        scheduler.optimizer = own.optimizer  # DeepSpeed's own, if that steps on the host
    return engine, own, scheduler


def _check(ctx: Context, model: nn.Module, plan: DeepSpeedPlan, optimizer: Optimizer | None) -> None:
    if not dist.is_initialized():
        threads = ctx.num_processes > 1
        raise NotAvailableError(
            "DeepSpeed needs torch's process group, and "
            + (
                'these ranks are threads. In a test, use run_ranks(..., on="processes").'
                if threads
                else "this process has none. Start it with accelfn launch --num_processes 1, or torchrun."
            )
        )
    if dist.get_world_size() != ctx.num_processes:
        raise ConfigurationError(
            f"DeepSpeed trains on all {dist.get_world_size()} ranks of torch's default group, and this "
            f"context has {ctx.num_processes}. Use the context of all of them."
        )
    empty = names_on_meta(model)
    if empty:
        raise ConfigurationError(
            f"{empty[0]} is on the meta device, and DeepSpeed needs values. Load the model first, or create "
            "it in zero3_init(ctx)."
        )
    if ctx.guard.check_gradients:
        raise ConfigurationError(
            "Guard(check_gradients=...) can't see gradients that DeepSpeed holds. Leave it out, and set "
            '"check_grad_overflow": true in the section "bf16" of its configuration.'
        )
    why = None if optimizer is None or plan.stage == 0 else why_not_flat(optimizer)
    if why is not None:
        raise ConfigurationError(
            f"DeepSpeed flattens parameters, which a {type(optimizer).__name__} can't step: {why}. Use "
            "AdamW, or an fsdp_plugin."
        )
    if optimizer is not None and any(_has_stepped(state) for state in optimizer.state.values()):
        raise ConfigurationError(
            f"the {type(optimizer).__name__} has state, which DeepSpeed can't take over. Prepare it before "
            "it steps, and load its state with load_state."
        )


def _has_stepped(state: Any) -> bool:
    """Return whether an optimizer's state of one parameter is more than what its constructor makes."""
    return not isinstance(state, dict) or float(cast("dict[str, Any]", state).get("step", 1)) > 0


def _join_group(package: Any, ctx: Context) -> None:
    """Make DeepSpeed use torch's process group."""
    # DeepSpeed reads it at every step, and has no argument for it; launchers set it.
    os.environ.setdefault("LOCAL_RANK", str(ctx.local_rank))
    package.init_distributed(verbose=False)


def _ignore(is_boundary: bool) -> None:
    """Do nothing where a window closes."""


def _on_host(package: Any, chosen: CpuOptimizer, optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's optimizer for state in host memory, with the groups of ``optimizer``."""
    name, options = chosen
    module = name.removeprefix("DeepSpeedCPU").lower()
    kind = getattr(importlib.import_module(f"{package.__name__}.ops.{module}"), name)
    wanted = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    defaults = {key: value for key, value in optimizer.defaults.items() if key in wanted}
    if name != "DeepSpeedCPUAdam":
        defaults.pop("amsgrad", None)
    groups = [
        {"params": list(group["params"]), **{key: group[key] for key in defaults if key in group}}
        for group in optimizer.param_groups
    ]
    return kind(groups, **defaults, **dict(options))


def _cast_around(engine: nn.Module, dtype: str | None) -> None:
    """Cast inputs of a model to its dtype, and outputs to float32, as mixed precision does elsewhere."""
    if dtype is None:
        return
    low = getattr(torch, dtype)

    def before(module: nn.Module, *inputs: Any) -> Any:
        return map_tensors(lambda one: one.to(low) if one.is_floating_point() else one, inputs)

    def after(module: nn.Module, arguments: Any, output: Any) -> Any:
        return convert_to_fp32(output)

    engine.register_forward_pre_hook(before, with_kwargs=True)
    engine.register_forward_hook(after)


@takes_context
@contextmanager
def zero3_init(ctx: Context, *, enabled: bool | None = None) -> Generator[None, None, None]:
    """Create models sharded inside, so that no rank has a complete one: ``deepspeed.zero.Init``.

    transformers' ``from_pretrained`` loads each rank's shards inside, and optimizers of lomo-optim that are
    made inside step shards.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: With a ``deepspeed_plugin`` of stage 3.
        enabled: Whether to shard; None for ``zero3_init_flag``, which is on by default at stage 3.

    Raises:
        ConfigurationError: The context has no such plugin.
        NotAvailableError: There is no process group.
    """
    plugin = ctx.strategy.deepspeed
    if plugin is None or plugin.stage != 3:
        stage = "none" if plugin is None else f"one of stage {plugin.stage}"
        raise ConfigurationError(
            f"zero3_init needs a deepspeed_plugin of stage 3, and the context has {stage}. Pass "
            "DeepSpeedPlugin(zero_stage=3)."
        )
    package = load_deepspeed()
    facts = DeepSpeedFacts(
        world_size=ctx.num_processes,
        mixed_precision=ctx.mixed_precision,
        num_steps=ctx.gradient_accumulation_steps,
        optimizer="none",
    )
    plan = plan_deepspeed(plugin, facts)
    _check(ctx, nn.Module(), plan, None)
    _join_group(package, ctx)
    is_on = plugin.zero3_init_flag is not False if enabled is None else enabled
    # transformers asks whether such an object is alive.
    noted = None
    if is_on and "transformers" in sys.modules:
        integration: Any = importlib.import_module("transformers.integrations.deepspeed")
        noted = integration.HfDeepSpeedConfig(dict(plan.config))
    importlib.import_module("torch._dynamo")  # an optimizer's first import of it fails inside
    with package.zero.Init(config_dict_or_path=dict(plan.config), enabled=is_on):
        yield
    del noted


def gathered_parameters(
    parameters: torch.Tensor | Iterable[torch.Tensor], *, modifier_rank: int | None = None
) -> AbstractContextManager[Any]:
    """Gather sharded parameters inside: ``deepspeed.zero.GatheredParameters``.

    Ranks: every rank of the world.

    Args:
        parameters: Of a model of stage 3; others are left as they are.
        modifier_rank: The rank whose changes all ranks get afterwards; None if nothing is changed.
    """
    return load_deepspeed().zero.GatheredParameters(parameters, modifier_rank=modifier_rank)
