"""The Accelerator: the functions behind the API of Hugging Face Accelerate.

It holds a Context and the newest states; each method calls a public function. Nothing else in the library
depends on it.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import accelfn.comm as comm
import accelfn.data as data
import accelfn.training as training
from accelfn.accelerator.extras import Extras
from accelfn.accelerator.proxies import (
    AcceleratedDataLoader,
    AcceleratedOptimizer,
    AcceleratedScheduler,
    AccumulateBlock,
    is_loader_of,
    unwrap_optimizer,
)
from accelfn.accelerator.saving import Saving
from accelfn.config import (
    AutocastKwargs,
    CanonicalReduction,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    Guard,
    KwargsHandler,
    MegatronLMPlugin,
    ParallelismConfig,
    PrecisionType,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)
from accelfn.context import Context, ContextOptions, close_context, init_context
from accelfn.data import MicroBatch, Uneven, plan_microbatch
from accelfn.data.metrics import gather_valid
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.optimizers import steps_in_backward
from accelfn.training.backward_pass import add_gradients
from accelfn.training.optimizers import list_parameters
from accelfn.training.preparation import Kind, prepare_kinds
from accelfn.training.scaler import may_skip

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_SCHEDULERS = (LRScheduler, AcceleratedScheduler)


def _loading(config: DataLoaderConfiguration | None, **fields: bool | None) -> DataLoaderConfiguration | None:
    """Merge arguments of older Accelerate versions into the loaders' configuration."""
    fields_set: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if config is None:
        return DataLoaderConfiguration(**fields_set) if fields_set else None
    for name, value in fields_set.items():
        if getattr(config, name) != value:
            raise ConfigurationError(
                f"{name}={value} contradicts dataloader_config.{name}={getattr(config, name)}. Pass one of "
                "the two."
            )
    return config


def _check_compat(compat: object) -> None:
    if compat not in (None, "accelerate"):
        raise ConfigurationError(f'compat must be "accelerate" or None: got {compat!r}.')
    if compat is not None:
        warnings.warn(
            'compat="accelerate": for each step of an optimizer its scheduler steps once per rank (unless '
            "split_batches is set), and the loss in a short last window is divided by the number of batches "
            "of a full one. On 4 ranks a schedule ends after a quarter of its steps; with windows of 4, a "
            "last window of one batch has a quarter of its gradient. Ranks that share sequences have equal "
            "weights, whatever their numbers of labels.",
            stacklevel=3,
        )


class Accelerator(Extras, Saving):
    """Train with Accelerate's method names.

    Takes the arguments of :func:`accelfn.init_context`; ``context`` uses an existing one, such as the one
    that ``accelfn.testing.run_ranks`` passes to a rank. Any number of Accelerators can coexist.

    Attributes:
        context: The frozen Context, for use with the functions.
        loops: The current batch of each loop over a prepared loader, innermost last.
        ended: The last batch of each pass that has ended or was left since a loop yielded a batch.
        window: The batch of the open ``accumulate`` block; None outside of one.
        sync_gradients: Whether the current batch closes its window, so that optimizers step. Can be set.
        last_micro: The current batch; or, after a loop ended or was left, its last batch.
        models: Prepared models that are alive, in order of preparation.
        optimizers: The same for optimizers: those inside the proxies that ``prepare`` returned.
        schedulers: The same for schedulers: those inside the proxies that ``prepare`` returned.
        loaders: The same for loaders.
        step: Number of ``accumulate`` blocks, in a program without prepared loaders.
        compat: ``"accelerate"`` for Accelerate's arithmetic, else None.
        uneven: What loops over prepared loaders do when ranks have different numbers of batches, as in
            :func:`accelfn.microbatches`.

    Accelerate steps a scheduler once for each rank, and divides the loss in a short last window by the number
    of batches of a full one, so learning rate and gradients depend on the number of ranks and batches. Here
    they don't, unless ``compat="accelerate"`` requests that arithmetic, which a warning explains.

    Raises:
        ConfigurationError: As :func:`accelfn.init_context` and :func:`accelfn.tracking.plan_trackers`.
        MissingExtraError: The package of a tracker in ``log_with`` isn't installed.
    """

    step: int
    uneven: Uneven

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | PrecisionType | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | DynamoBackend | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        guard: Guard | str | None = None,
        debug: bool | None = None,
        compat: Literal["accelerate"] | None = None,
        context: Context | None = None,
        reduction: str | CanonicalReduction | None = None,
    ) -> None:
        """Start a context, or use an existing one."""
        if isinstance(cast("object", device_placement), Context):
            raise TypeError(
                "Accelerator: the first argument is device_placement. Write Accelerator(context=ctx)."
            )
        arguments = locals()
        options: dict[str, Any] = {name: arguments[name] for name in ContextOptions.__annotations__}
        options["cpu"] = cpu or None
        options["dataloader_config"] = _loading(
            dataloader_config,
            split_batches=split_batches,
            dispatch_batches=dispatch_batches,
            even_batches=even_batches,
            use_seedable_sampler=use_seedable_sampler,
        )
        _check_compat(compat)
        defaults = {"device_placement": True, "step_scheduler_with_optimizer": True}
        extra = [name for name, value in options.items() if value is not defaults.get(name)]
        if context is not None and extra:
            raise ConfigurationError(
                "Accelerator(context=...) takes its options from the context, but got "
                f"{', '.join(extra)} too. Use context=ctx.replace(...) for a variant."
            )
        super().__init__(context if context is not None else init_context(**options))
        self.compat = compat
        try:
            self._check_trackers()
        except Exception:
            if context is None:  # it was started here, so close it here
                self.close()
            raise

    # --- the window ------------------------------------------------------------------------------

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest step of any prepared optimizer was skipped."""
        return any(self.step_was_skipped(optimizer) for optimizer in self.optimizers)

    # --- prepare ---------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None, **named: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers; see :func:`accelfn.prepare`.

        Args:
            *args: What to prepare. Any other object is returned unchanged.
            device_placement: One for each object: whether to move it to the device.
            **named: Objects with their names in checkpoints.

        Returns:
            The object itself for one, a tuple for several, in the order given.
        """
        items = [*args, *named.values()]
        self._check_to_prepare(items, named, device_placement)
        places = device_placement or [None] * len(items)
        kinds: tuple[Kind, ...] = (
            (nn.Module, lambda index, item: self.prepare_model(item, places[index])),
            (Optimizer, lambda index, item: self.prepare_optimizer(item, places[index])),
            (self._loaders(), lambda index, item: self.prepare_data_loader(item, places[index])),
            (_SCHEDULERS, lambda _, item: self.prepare_scheduler(item)),
        )
        prepared = prepare_kinds(self.context, items, kinds)
        self.checkpoint_names(**dict(zip(named, prepared[len(args) :], strict=True)))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _loaders(self) -> tuple[type[Any], ...]:
        return DataLoader, data.PreparedDataLoader, *self.context.loading.custom_classes

    def _check_to_prepare(
        self, items: Sequence[Any], named: Mapping[str, Any], device_placement: Sequence[bool] | None
    ) -> None:
        if not items:
            raise TypeError("prepare: got nothing to prepare. Pass a model, an optimizer, a loader, ...")
        engine = self.context.strategy.engine
        if device_placement is not None and len(device_placement) != len(items):
            raise ValueError(
                f"device_placement needs one entry for each object: got {len(device_placement)} for "
                f"{len(items)} objects."
            )
        if device_placement is not None and engine is not None:
            raise ValueError(
                f"device_placement has no effect with {engine}, which places models. Leave it out."
            )
        for name, item in named.items():
            if not isinstance(item, (nn.Module, Optimizer, *_SCHEDULERS, *self._loaders())):
                raise TypeError(
                    f"prepare: {name} is of type {type(item).__name__}, but names are for models, "
                    "optimizers, loaders and schedulers. To save it, pass it to register_for_checkpointing."
                )

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make another of the ``deepspeed_plugins`` the active one, for models prepared later.

        Raises:
            ConfigurationError: None has that name.
        """
        plugins = self.deepspeed_plugins
        if name not in plugins:
            raise ConfigurationError(
                f"select_deepspeed_plugin: there is no plugin {name!r}. Choose among: "
                f"{', '.join(plugins) or 'none'}."
            )
        self.context: Context = self.context.replace(deepspeed_plugin=plugins[name])

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place, cast and replicate a model; see :func:`accelfn.prepare_model`."""
        prepared = training.prepare_model(
            self._placing(device_placement), model, evaluation_mode=evaluation_mode
        )
        self.models.add(prepared)
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return an optimizer that steps only where a window closes."""
        if isinstance(optimizer, AcceleratedOptimizer) and optimizer.belongs_to(self):
            return optimizer
        optimizer = unwrap_optimizer(optimizer)
        training.prepare_optimizer(self._placing(device_placement), optimizer)
        self.optimizers.add(optimizer)
        self._scaling.welcome(optimizer)
        return AcceleratedOptimizer(self, optimizer)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[T] | data.PreparedDataLoader[T] | AcceleratedDataLoader[T] | Iterable[T],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> AcceleratedDataLoader[T]:
        """Shard a loader over the ranks; see :func:`accelfn.prepare_data_loader`."""
        if is_loader_of(self, data_loader):
            return cast("AcceleratedDataLoader[T]", data_loader)
        return AcceleratedDataLoader(
            self,
            data.prepare_data_loader(
                self._placing(device_placement), data_loader, slice_fn=slice_fn_for_dispatch
            ),
        )

    def prepare_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> AcceleratedScheduler:
        """Return a scheduler that steps only when its optimizer does."""
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler.belongs_to(self):
                return scheduler
            scheduler = scheduler.scheduler
        scheduler = training.prepare_scheduler(self.context, scheduler)
        self.schedulers.add(scheduler)
        return AcceleratedScheduler(self, scheduler)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first batches; see :func:`accelfn.skip_first_batches`."""
        return cast("Any", data.skip_first_batches(dataloader, num_batches))

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Remove the wrapper of ``prepare_model`` from a model; see :func:`accelfn.unwrap_model`."""
        return training.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def _placing(self, device_placement: bool | None) -> Context:
        if device_placement is None or device_placement == self.context.device_placement:
            return self.context
        return self.context.replace(device_placement=device_placement)

    # --- the training step -----------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Run forward and backward of one batch of a window; see :func:`accelfn.accumulate`.

        The window is that of the prepared loader with the current batch. In a program without prepared
        loaders, each block counts as one batch of full windows.

        Raises:
            ConfigurationError: A window has several batches, and there are prepared loaders, but no current
                batch.
        """
        micro = self.micro or self._count_batch()
        return AccumulateBlock(self, micro, training.accumulate(self.context, micro, *models))

    def _count_batch(self) -> MicroBatch:
        steps = self.gradient_accumulation_steps
        if steps > 1 and any(True for _ in self.loaders):
            raise ConfigurationError(
                "accumulate: no prepared loader has a current batch, so the end of the window of "
                f"{steps} batches is unknown. Call it inside of the loop over the loader that prepare "
                "returned."
            )
        index, place = self.step, self.step % steps
        self.step += 1
        closes = place == steps - 1
        # With its own index: exact mode distinguishes batches by it.
        return MicroBatch(index, 0, place, steps, closes, closes)

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Don't average gradients inside; of all prepared models if none is passed."""
        return training.no_sync(self.context, *(models or self.models))

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None = None, **kwargs: Any) -> None:
        """Compute gradients of a loss, divided for its ``accumulate`` window; see :func:`accelfn.backward`.

        With ``learning_rate=`` it calls ``lomo_backward``.
        """
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, **kwargs)
            return
        state = self._scaling.begin_loss(self.context)
        if self.compat is None:
            state = training.backward(self.context, loss, state, self.window, weight, **kwargs)
        else:  # a short last window is divided by the length of a full one, and ranks count equally
            steps = self.gradient_accumulation_steps
            micro = plan_microbatch(0, 0, steps, steps)
            state = add_gradients(self.context, loss, state, micro, weight, **kwargs)
        self._scaling.end_loss(state)

    def forward_backward(
        self, model: Any, loss_fn: Callable[[Any, Any], torch.Tensor | training.Loss], batch: Any
    ) -> torch.Tensor:
        """Compute the loss of the current batch and its gradients; see :func:`accelfn.forward_backward`.

        Replaces ``accumulate``, the call of the model and ``backward``. Returns the loss.
        """
        micro = self.micro or self._count_batch()
        with AccumulateBlock(self, micro, nullcontext()):
            if self.compat is not None:  # as in backward
                micro = micro._replace(window=self.gradient_accumulation_steps)
            state = self._scaling.begin_loss(self.context)
            state, loss = training.forward_backward(self.context, model, loss_fn, batch, state, micro)
            self._scaling.end_loss(state)
        return loss

    def forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a model, which may be pipelined; see :func:`accelfn.training.forward`."""
        return training.forward(self.context, model, *args, **kwargs)

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None, *, cache_enabled: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Compute in mixed precision inside; see :func:`accelfn.autocast`."""
        if cache_enabled is not None:
            handler = autocast_handler or self.context.precision.autocast
            autocast_handler = dataclasses.replace(handler, cache_enabled=cache_enabled)
        return training.autocast(self.context, autocast_handler)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients (of all optimizers when None) by the loss scale; see ``unscale_gradients``."""
        self._require_closing_window()
        chosen = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or self.optimizers
        self._scaling.unscale(self.context, map(unwrap_optimizer, chosen))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Bound the norm of gradients and return what it was; see :func:`accelfn.clip_grad_norm_`."""
        parameters, state = self._unscaled("clip_grad_norm_", parameters)
        return training.clip_grad_norm_(self.context, parameters, max_norm, norm_type, scaler_state=state)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Bound each entry of gradients; see :func:`accelfn.clip_grad_value_`."""
        parameters, state = self._unscaled("clip_grad_value_", parameters)
        training.clip_grad_value_(self.context, parameters, clip_value, scaler_state=state)

    def _unscaled(
        self, operation: str, parameters: Iterable[torch.Tensor] | torch.Tensor
    ) -> tuple[list[torch.Tensor], training.StepState]:
        self._require_closing_window()
        listed = list_parameters(operation, parameters)
        return listed, self._scaling.unscale_for(self.context, listed)

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step a prepared optimizer if the window closes; its proxy calls this."""
        if not self.sync_gradients:
            return None
        if steps_in_backward(optimizer):  # it stepped in backward
            return None
        if closure is None:
            return self._scaling.step(self.context, optimizer)
        if may_skip(self.context):
            raise NotAvailableError(
                'step(closure) can\'t be skipped, as with float16 or Guard(check_gradients="skip"). '
                "Use bf16, or step without it."
            )
        return optimizer.step(closure)

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the latest step of a prepared optimizer was skipped; proxies call this."""
        return self._scaling.was_skipped(self.context, unwrap_optimizer(optimizer))

    def scheduler_steps(self, scheduler: LRScheduler) -> int:
        """Return how often a scheduler steps for one step of its optimizer; its proxy calls this."""
        if self.compat is None or self.context.loading.split_batches:
            return 1
        total = getattr(scheduler, "total_steps", None)
        steps = self.num_processes
        return steps if total is None else max(0, min(steps, total - scheduler._step_count + 1))  # pyright: ignore[reportPrivateUsage]

    def _require_closing_window(self) -> None:
        if not self.sync_gradients:
            raise ConfigurationError(
                "gradients can only be unscaled and clipped where the accumulation window closes: before, "
                "they are neither complete nor averaged over the ranks. Put the call under "
                "`if accelerator.sync_gradients:`."
            )

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Generator[None, None, None]:
        """Let ranks without batches join collectives; see :func:`accelfn.join_uneven_inputs`.

        ``even_batches`` applies to all prepared loaders that are alive.
        """
        items = [
            unwrap_optimizer(joinable) if isinstance(joinable, Optimizer) else joinable
            for joinable in joinables
        ]
        before = self.uneven
        with training.join_uneven_inputs(self.context, items, [*self.loaders], even_batches) as joined:
            self.uneven = "join" if joined else before
            try:
                yield
            finally:
                self.uneven = before

    @property
    def micro(self) -> MicroBatch | None:
        """The batch that a prepared loader yielded last; None outside of such loops."""
        return next(reversed(self.loops.values())) if self.loops else None

    # --- across ranks ----------------------------------------------------------------------------

    def gather(self, tensor: T) -> T:
        """Join tensors of all ranks; see :func:`accelfn.gather`."""
        return comm.gather(self.context, tensor)

    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        *,
        micro: MicroBatch | None = None,
        of: Literal["batch", "pass"] | None = None,
    ) -> Any:
        """Gather from all ranks, without rows that are padding; see :func:`accelfn.gather_for_metrics`.

        In a loop over a prepared loader, rows belong to the current batch of the innermost loop; after one,
        to the pass that just ended: ``gather_for_metrics(torch.cat(rows))``. After a loop inside of another
        one, until its next batch, they may belong to either: to what has exactly as many, else to what they
        are a multiple of. With no loop, or any other number of rows, all are kept.

        Args:
            input_data: Any tree, as for the function.
            use_gather_object: Gather Python objects: a list with one for each row, or one for each rank.
            micro: The batch that it was computed from, such as an earlier ``accelerator.micro``; then no
                other batch is considered.
            of: What of ``micro`` the rows belong to, as for the function; ``micro`` is ``last_micro`` if only
                this is given.

        Raises:
            ValueError: The rows match several passes or batches, whose padding differs; or in a loop, they
                may be those of its pass.
        """
        ended: Sequence[MicroBatch] = ()
        if micro is None and of is None:
            micro, ended = self.micro, self.ended
        else:
            micro = micro or self.last_micro
        return gather_valid(self.context, input_data, micro, of, ended, as_objects=use_gather_object)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Combine tensors of all ranks; see :func:`accelfn.reduce`."""
        return comm.reduce(self.context, tensor, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Lengthen tensors to the longest of all ranks; see :func:`accelfn.pad_across_processes`."""
        return comm.pad_across_processes(self.context, tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here; see :func:`accelfn.wait_for_everyone`."""
        comm.wait_for_everyone(self.context)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process go first; see :func:`accelfn.main_process_first`."""
        return comm.main_process_first(self.context)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each node go first; see :func:`accelfn.comm.local_main_process_first`."""
        return comm.local_main_process_first(self.context)

    @contextmanager
    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> Generator[T, None, None]:
        """Yield this rank's part; see :func:`accelfn.split_between_processes`."""
        yield comm.split_between_processes(self.context, inputs, apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run a function on the main process only; see :func:`accelfn.on_main_process`."""
        decorate = comm.on_main_process(self.context)
        return decorate if function is None else decorate(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run a function on the first process of each node only."""
        decorate = comm.on_local_main_process(self.context)
        return decorate if function is None else decorate(function)

    def on_last_process(self, function: F) -> F:
        """Run a function on the last rank only."""
        return comm.on_last_process(self.context)(function)  # pyright: ignore[reportReturnType]

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Any:
        """Run a function on one rank only; also as ``@on_process(process_index=1)``."""
        decorate = comm.on_process(self.context, process_index)
        return decorate if function is None else decorate(function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int = 0
    ) -> Any:
        """Run a function on one local rank of each node only."""
        decorate = comm.on_local_process(self.context, local_process_index)
        return decorate if function is None else decorate(function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node; see :func:`accelfn.print_once`."""
        comm.print_once(self.context, *args, **kwargs)

    def set_trigger(self) -> None:
        """Set this rank's flag, which ``check_trigger`` checks on all ranks."""
        self._trigger = comm.set_trigger(self._trigger)

    def check_trigger(self) -> bool:
        """Return whether any rank has set its flag, and clear it."""
        self._trigger, fired = comm.check_trigger(self.context, self._trigger)
        return fired

    # --- ending ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the context if the constructor started it; see :func:`accelfn.close_context`."""
        close_context(self.context)

    def end_training(self) -> None:
        """End the trackers, and close the context if the constructor started it."""
        try:
            self._end_run()
        finally:
            self.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Accelerator has no attribute {name!r}.")
