"""Train a model with Megatron-LM: its handle, its optimizer, their state, and what prepares them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.config import MegatronLMPlugin
from accelfn.context import Context
from accelfn.errors import CheckpointMismatchError, ConfigurationError, Misfit, NotAvailableError
from accelfn.parallel.engines.engine import EngineHandle, EngineOptimizer, EngineState, EngineStep
from accelfn.parallel.engines.megatron.build import (
    build_optimizer,
    build_stages,
    import_core,
    join_groups,
    optimizer_options,
)
from accelfn.parallel.engines.megatron.model import MegatronModel, split
from accelfn.parallel.engines.megatron.plan import plan_megatron
from accelfn.parallel.engines.megatron.schedule import (
    MegatronLMDummyScheduler,
    MegatronLMScheduler,
    plan_length,
)
from accelfn.parallel.handle import BatchRun

L = TypeVar("L")


class MegatronHandle(EngineHandle):
    """The handle of a model that Megatron-LM trains."""

    name: ClassVar[str] = "Megatron-LM"
    optimizer: MegatronOptimizer  # set by that

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
        number = self.model.plan.num_micro_batches
        return self.model.run_schedule(
            split(batch.batch, number),
            batch.loss_fn,
            lambda loss: batch.to_differentiate(loss, number),
            batch.join,
        )

    def state(self) -> EngineState:
        """Return this rank's part of the model's and the optimizer's state."""
        plan = self.model.plan
        layout = f"{plan.layout}, {plan.num_chunks} parts per rank"
        return EngineState(
            _RankState(layout, self._read_model, self._write_model),
            _RankState(layout, self.optimizer.read_state, self.optimizer.write_state),
            lambda: None,
        )

    def _read_model(self) -> dict[str, Any]:
        """Return the tensors of each part of the model, and the weights that are stepped."""
        chunks = [
            # TransformerEngine's extra states have other forms.
            {name: value for name, value in chunk.state_dict().items() if isinstance(value, torch.Tensor)}
            for chunk in self.model.inner_chunks()
        ]
        return {"chunks": chunks, "weights": list(self.optimizer.weights())}

    def _write_model(self, state: dict[str, Any]) -> None:
        for chunk, stored in zip(self.model.inner_chunks(), state["chunks"], strict=True):
            chunk.load_state_dict(stored, strict=False)
        with torch.no_grad():
            for weight, value in zip(self.optimizer.weights(), state["weights"], strict=True):
                weight.copy_(value)

    def check_weights(self) -> None:
        """Refuse: the weights have Megatron's names, by rank."""
        raise NotAvailableError(
            "Megatron-LM: the weights have the names of megatron-core, and each rank has its own part. "
            "Export them with Megatron-Bridge: bridge.save_hf_pretrained(model.inner_chunks(), folder). "
            "save_state and load_state go on in the same layout."
        )


class MegatronOptimizer(EngineOptimizer):
    """Megatron's optimizer, with the options of the user's optimizer."""

    handle: MegatronHandle

    def __init__(self, optimizer: Optimizer, handle: MegatronHandle, megatron: Any) -> None:
        """Step ``megatron`` with the learning rates and weight decays of ``optimizer``."""
        super().__init__(optimizer, handle.model.parameters(), handle)
        self.megatron = megatron
        self.num_steps: int = 0  # that updated the parameters
        handle.optimizer = self

    @property
    def parts(self) -> list[Any]:
        """Megatron's optimizers, one for each kind of parameter."""
        return [
            one for one in self.megatron.chained_optimizers if not getattr(one, "is_stub_optimizer", False)
        ]

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield the weights that are stepped: in half precision, or sharded over replicas, copies."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                yield from group["params"]

    def step_engine(self, divisor: float, max_norm: float | None) -> EngineStep:
        """Reduce the gradients, divide them by ``divisor``, clip, and update the parameters.

        Ranks: every rank of the context.
        """
        model = self.handle.model
        core, plan, chunks = model.core, model.plan, cast("list[Any]", list(model.chunks))
        core.distributed.finalize_model_grads(chunks)
        divisor *= model.take_divisor()
        self._write_options(plan.max_norm if max_norm is None else max_norm)
        if plan.precision == "fp16":
            for part in self.parts:  # divides, and looks for overflows on the way
                part.grad_scaler = core.optimizer.grad_scaler.ConstantGradScaler(divisor)
        elif divisor != 1.0:
            for chunk in chunks:
                chunk.scale_gradients(1.0 / divisor)
        succeeded, norm, _ = self.megatron.step()
        for chunk in chunks:
            chunk.zero_grad_buffer()
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

    def read_state(self) -> dict[str, Any]:
        """Return the options of each group, and what this rank's parts hold beside the weights."""
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.param_groups
        ]
        parts = [part.optimizer.state_dict() for part in self.parts]
        return {"num_steps": self.num_steps, "groups": groups, "parts": parts}

    def write_state(self, state: dict[str, Any]) -> None:
        """Write what :meth:`read_state` has returned into this rank's parts."""
        self.num_steps = state["num_steps"]
        for group, options in zip(self.param_groups, state["groups"], strict=True):
            group.update(options)
        for part, stored in zip(self.parts, state["parts"], strict=True):
            part.optimizer.load_state_dict(stored)


class _RankState:
    """This rank's part of a state, in the form of any object with a state; it fits the same layout alone."""

    def __init__(
        self, layout: str, read: Callable[[], dict[str, Any]], write: Callable[[dict[str, Any]], None]
    ) -> None:
        self._layout, self._read, self._write = layout, read, write

    def state_dict(self) -> dict[str, Any]:
        return {"layout": self._layout, **self._read()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["layout"] != self._layout:
            raise CheckpointMismatchError(
                "Megatron-LM saves each rank's own part, which only the same layout can load. Use that "
                "one, or convert the weights with Megatron-Bridge.",
                [Misfit("layout", state["layout"], self._layout)],
            )
        self._write(state)


def prepare_megatron(
    ctx: Context,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    batch_sizes: Iterable[int | None] = (),
) -> tuple[MegatronModel, MegatronOptimizer, Any]:
    """Build a model of Megatron by the plugin's provider, its optimizer, and its schedule if it is asked for.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: With a ``megatron_lm_plugin``.
        model: Any model; its ``config`` is read, and its weights aren't.
        optimizer: Over its parameters, which hasn't stepped yet; from now on its groups are the source of
            learning rate and weight decay.
        scheduler: A scheduler over the optimizer, a :class:`MegatronLMDummyScheduler`, or None.
        batch_sizes: Of the loaders that are prepared with the model: the samples of a step of all replicas.

    Raises:
        ConfigurationError: There is no provider, or something doesn't fit; see :func:`plan_megatron`.
        NotAvailableError: Likewise.
        MissingExtraError: megatron-core isn't installed.
    """
    plugin = cast("MegatronLMPlugin", ctx.strategy.megatron)
    length = None
    if isinstance(scheduler, MegatronLMDummyScheduler):
        sizes = [size for size in batch_sizes if size is not None]
        size = (min if plugin.is_train_batch_min else max)(sizes, default=None)
        length = plan_length(scheduler, plugin, size)
    if plugin.custom_model_provider_function is None:
        raise ConfigurationError(
            "Megatron-LM trains models of megatron-core, and neither the sizes nor the weights of the "
            f"{type(model).__name__} are converted. Set custom_model_provider_function of the "
            "MegatronLMPlugin: it returns a stage. Megatron-Bridge builds that of a Hugging Face model with "
            "its weights: bridge = AutoBridge.from_hf_pretrained(name); stage = bridge.to_megatron_provider("
            "load_weights=False).provide(pre_process, post_process); bridge.load_hf_weights([stage])."
        )
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
    chunks = build_stages(ctx, core, plan, plugin)
    built = MegatronModel(ctx, core, plan, plugin, chunks, config).train(model.training)
    trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [] if number else trained  # the user's own would keep the memory of the old model
        group.pop("param_names", None)
    handle = MegatronHandle(built, built.parameters())
    stepping = MegatronOptimizer(optimizer, handle, build_optimizer(core, plan, plugin, chunks, options))
    if length is not None:
        scheduler = MegatronLMScheduler(core, optimizer, plugin, length)
    return built, stepping, scheduler
