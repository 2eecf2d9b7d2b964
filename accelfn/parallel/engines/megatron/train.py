"""Train a model with Megatron-LM: its handle, its optimizer, and what prepares the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accelfn.context import Context
from accelfn.context.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.engines.engine import EngineHandle, EngineOptimizer, EngineState, EngineStep
from accelfn.parallel.engines.megatron.build import (
    Core,
    build_stages,
    import_core,
    join_groups,
    require_provider,
    wrap_stages,
)
from accelfn.parallel.engines.megatron.model import MegatronModel, MegatronOutput, split
from accelfn.parallel.engines.megatron.optimizer import build_optimizer, optimizer_options
from accelfn.parallel.engines.megatron.plan import MegatronPlan, plan_megatron
from accelfn.parallel.engines.megatron.state import MegatronModelState, MegatronOptimizerState
from accelfn.parallel.engines.megatron.steps import AbstractTrainStep, step_of
from accelfn.parallel.handle import BatchRun, EngineName

L = TypeVar("L")


class MegatronHandle(EngineHandle):
    """The handle of a model that Megatron-LM trains."""

    engine: ClassVar[EngineName] = "megatron"
    name: ClassVar[str] = "Megatron-LM"
    splits_batches: ClassVar[bool] = False

    def __init__(self, core: Core, model: MegatronModel, plugin: MegatronLMPlugin) -> None:
        """Attach to ``model``."""
        super().__init__(model, model.parameters())
        self.core = core
        self.plan: MegatronPlan = model.plan
        self.optimizer: MegatronOptimizer | None = None
        self._steps: AbstractTrainStep = step_of(plugin, model.config)
        self._per_token = plugin.calculate_per_token_loss
        # Sum of the weights of whole steps since the last update, on this replica.
        self._weight: torch.Tensor | None = None
        model.run_step = self.run_step

    def __deepcopy__(self, memo: dict[int, Any]) -> MegatronHandle:
        """Refuse: Megatron's buffers belong to one model."""
        raise ConfigurationError(
            "a model that Megatron-LM trains can't be copied. Copy it before it is prepared, or save its "
            "weights and load them."
        )

    @property
    def model(self) -> MegatronModel:
        """The model."""
        return cast("MegatronModel", self._model())

    def run(self, batch: BatchRun[L]) -> L:
        """Run the microbatches of a batch; return its loss, without a gradient, on every rank.

        Ranks: every rank of the context.

        Raises:
            ValueError: The batch can't be split along its rows.
            ConfigurationError: The loss function doesn't call the model once.
        """
        number = self.plan.num_micro_batches
        results = self.model.run_schedule(
            split(batch.batch, number),
            lambda model, piece: batch.loss_fn(model, piece),
            lambda loss: batch.to_differentiate(loss, number),
        )
        return self.model.from_last(batch.join(results) if results else None)

    def run_step(self, named: Mapping[str, Any], trains: bool) -> Any:
        """Run a call of the model outside of a loss function: all microbatches, and both passes in training.

        Ranks: every rank of the context.

        Returns:
            The mean loss over all replicas; as the output of transformers if the model's config says so. Its
            backward pass does nothing more.

        Raises:
            NotAvailableError: The context scales losses for float16, with a scale that isn't known here.
        """
        if trains and self.plan.precision == "fp16":
            raise NotAvailableError(
                "Megatron-LM: model(**batch) runs the backward pass at once, and float16 needs the loss "
                'scale before. Use accelfn.forward_backward, or mixed_precision="bf16".'
            )
        model, steps, number = self.model, self._steps, self.plan.num_micro_batches
        sums: list[torch.Tensor] = []  # of losses and of weights, by microbatch

        def count(loss_func: Callable[[Any], Any], output: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            first, *middle, _ = loss_func(output)
            if middle and self._per_token:
                sums.append(torch.stack((first.detach().double(), middle[0].double())))
                return first * number, {}  # Megatron divides by the number
            mean = first / middle[0].clamp(min=1) if middle else first
            sums.append(torch.stack((mean.detach().double(), torch.ones_like(mean, dtype=torch.float64))))
            return mean.clone(), {}

        def run_stage(iterator: Any, chunk: nn.Module) -> tuple[Any, Callable[..., Any]]:
            output, loss_func = steps.forward_step(iterator, chunk)
            return output, partial(count, loss_func)

        pieces = split(dict(named), number if trains else 1)
        with torch.set_grad_enabled(trains):
            model.run_megatron(pieces, run_stage, trains=trains)
        totals = cast("torch.Tensor", model.from_last(torch.stack(sums).sum(0) if sums else None))
        if trains and self._per_token:
            self._weight = totals[1] if self._weight is None else self._weight + totals[1]
        totals = totals.clone()
        _sum(totals, self.core.parallel_state.get_data_parallel_group())
        loss = (totals[0] / totals[1]).float()
        if trains:
            loss = cast("torch.Tensor", cast("Any", _Done).apply(torch.zeros((), requires_grad=True), loss))
        return MegatronOutput(loss) if getattr(model.config, "return_dict", False) else loss

    def take_divisor(self) -> float:
        """Return what averaged gradients of whole steps are divided by, and forget it."""
        weight, self._weight = self._weight, None
        if weight is None:
            return 1.0
        _sum(weight, self.core.parallel_state.get_data_parallel_group())
        # Without any token there is nothing to learn from.
        return float(weight) / self.plan.dp or math.inf

    def state(self) -> EngineState:
        """Return this rank's part of the model's and the optimizer's state."""
        optimizer = self.optimizer
        model = MegatronModelState(self.model, () if optimizer is None else optimizer.parts)
        return EngineState(
            model, None if optimizer is None else MegatronOptimizerState(self.plan, optimizer), lambda: None
        )

    def check_weights(self) -> None:
        """Refuse: the weights have Megatron's names, by rank."""
        raise NotAvailableError(
            "Megatron-LM: the weights have the names of megatron-core, and each rank has its own part. "
            "Export them with Megatron-Bridge: bridge.save_hf_pretrained(model.inner_chunks(), folder). "
            "save_state and load_state go on in the same layout."
        )


def _sum(tensor: torch.Tensor, group: Any) -> None:
    """Sum a tensor over ranks, in place."""
    cast("Any", dist).all_reduce(tensor, group=group)


class _Done(torch.autograd.Function):
    """A loss whose gradients were computed already."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        del ctx, anchor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        del ctx
        if float(grads[0]) != 1.0:
            raise ConfigurationError(
                "Megatron-LM: model(**batch) has computed the gradients of its loss already, and they can't "
                f"be multiplied by {float(grads[0]):g} afterwards. Accumulate by num_micro_batches instead "
                "of gradient_accumulation_steps, or use accelfn.forward_backward."
            )
        return None, None


class MegatronOptimizer(EngineOptimizer):
    """Megatron's optimizer, with the options of the user's optimizer."""

    def __init__(self, optimizer: Optimizer, handle: MegatronHandle, megatron: Any) -> None:
        """Step ``megatron`` with the learning rates and weight decays of ``optimizer``."""
        super().__init__(optimizer, handle.model.parameters(), handle)
        self.megatron = megatron
        self._plan = handle.plan
        self.num_steps: int = 0  # that updated the parameters
        handle.optimizer = self

    @property
    def parts(self) -> list[Any]:
        """Megatron's optimizers, one for each kind of parameter."""
        return [
            one for one in self.megatron.chained_optimizers if not getattr(one, "is_stub_optimizer", False)
        ]

    def step_engine(self, divisor: float, max_norm: float | None) -> EngineStep:
        """Reduce the gradients, divide them by ``divisor``, clip, and update the parameters.

        Ranks: every rank of the context.
        """
        handle = cast("MegatronHandle", self.handle)
        core, chunks = handle.core, list(handle.model.chunks)
        core.distributed.finalize_model_grads(chunks)
        divisor *= handle.take_divisor()
        self._write_options(self._plan.max_norm if max_norm is None else max_norm)
        scales = self._plan.precision == "fp16"
        for part in self.parts:
            if scales:  # divides, and looks for overflows on the way
                part.grad_scaler = core.grad_scaler.ConstantGradScaler(divisor)
        if not scales and divisor != 1.0:
            for chunk in chunks:
                cast("Any", chunk).scale_gradients(1.0 / divisor)
        succeeded, norm, _ = self.megatron.step()
        for chunk in chunks:
            cast("Any", chunk).zero_grad_buffer()
        self.megatron.zero_grad()
        self.num_steps += bool(succeeded)
        return EngineStep(norm, not succeeded)

    def _write_options(self, max_norm: float) -> None:
        """Write the user's options, which schedulers change, into Megatron's groups."""
        options: Any = self.param_groups[0]  # all are alike
        for part in self.parts:
            part.config.clip_grad = max_norm
            for group in cast("list[dict[str, Any]]", part.optimizer.param_groups):
                group["lr"] = options["lr"] * group.get("user_lr_mult", 1.0)
                group["weight_decay"] = options["weight_decay"] * group.get("user_decay_mult", 1.0)


def prepare_megatron(
    ctx: Context, model: nn.Module, optimizer: Optimizer
) -> tuple[MegatronModel, MegatronOptimizer]:
    """Build a model of Megatron by the plugin's provider, and its optimizer.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: With a ``megatron_lm_plugin``.
        model: Any model; its ``config`` is read, and its weights aren't.
        optimizer: Over its parameters, which hasn't stepped yet; from now on its groups are the source of
            learning rate and weight decay.

    Raises:
        ConfigurationError: There is no provider, or something doesn't fit; see :func:`plan_megatron`.
        NotAvailableError: Likewise.
        MissingExtraError: megatron-core isn't installed.
    """
    plugin = cast("MegatronLMPlugin", ctx.strategy.megatron)
    require_provider(plugin, model)
    config = getattr(model, "config", None)
    plan = plan_megatron(
        plugin,
        ctx.num_processes,
        precision=ctx.precision.mode,
        optimizer=type(optimizer).__name__,
        accumulation=ctx.accumulation.num_steps,
        num_layers=getattr(config, "num_hidden_layers", None),
    )
    options = optimizer_options(optimizer)
    core = import_core()
    join_groups(ctx, core, plan)
    chunks = wrap_stages(core, plan, build_stages(ctx, core, plan, plugin))
    built = MegatronModel(ctx, core, plan, chunks, config, returns_logits=plugin.return_logits)
    built.train(model.training)
    handle = MegatronHandle(core, built, plugin)
    trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [] if number else trained  # the user's own would keep the memory of the old model
        group.pop("param_names", None)
    return built, MegatronOptimizer(optimizer, handle, build_optimizer(core, plan, plugin, built, options))
