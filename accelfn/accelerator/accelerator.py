"""The Accelerator: a convenience over the functions for people who know Hugging Face Accelerate.

It holds a Context and the newest states, and each method is a call of a public function. Nothing in the
library depends on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import accelfn.checkpoint as checkpoint
import accelfn.comm as comm
import accelfn.data as data
import accelfn.training as training
from accelfn.accelerator.proxies import (
    AcceleratedDataLoader,
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Loaders,
    parameters_of,
    unwrap_optimizer,
)
from accelfn.context import Context, close_context, init_context
from accelfn.context.config import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedType,
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
from accelfn.data import MicroBatch, Uneven, plan_microbatch
from accelfn.errors import ConfigurationError, NotAvailableError

__all__ = ("Accelerator",)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Parts of Accelerate's surface whose machinery is not there yet.
_NOT_YET = (
    *("save_state", "load_state", "register_for_checkpointing", "save", "get_state_dict", "save_iteration"),
    *(
        "register_save_state_pre_hook",
        "register_load_state_pre_hook",
    ),
    *(
        "init_trackers",
        "log",
        "get_tracker",
        "trackers",
        "end_training",
        "profile",
        "lomo_backward",
        "fp8_backend",
    ),
    *(
        "trigger_sync_in_backward",
        "maybe_context_parallel",
        "verify_device_map",
        "free_memory",
        "clear",
        "is_fsdp2",
    ),
    *("tensor_parallel_rank", "pipeline_parallel_rank", "context_parallel_rank", "data_parallel_rank"),
    *("data_parallel_shard_rank", "torch_device_mesh", "parallelism_config", "should_save_model"),
)


class Accelerator:
    """Train with Accelerate's method names.

    Takes the arguments of :func:`accelfn.init_context`; ``context`` builds it over one that exists, such as
    the one that ``accelfn.testing.run_ranks`` hands to a rank. Any number of Accelerators live side by side.

    Attributes:
        context: The frozen Context behind it, for use with the functions.
        micro: The batch that a prepared loader handed out last; None outside of such a loop.
        last_micro: The last batch of the loop that ended last: what is gathered after a loop belongs to it.
        loaders: Prepared loaders that somebody holds.
        uneven: What loops over prepared loaders do when ranks have different numbers of batches, as in
            :func:`accelfn.microbatches`.

    Raises:
        ConfigurationError: As :func:`accelfn.init_context`.
    """

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
        guard: Guard | str | None = None,
        context: Context | None = None,
    ) -> None:
        """Start a context, or take the one given."""
        if split_batches is not None:
            if dataloader_config is not None and dataloader_config.split_batches != split_batches:
                raise ConfigurationError(
                    f"split_batches={split_batches} contradicts dataloader_config.split_batches="
                    f"{dataloader_config.split_batches}. Give one of the two."
                )
            dataloader_config = dataloader_config or DataLoaderConfiguration(split_batches=split_batches)
        asked: dict[str, Any] = {
            "device_placement": device_placement,
            "mixed_precision": mixed_precision,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "cpu": cpu or None,
            "dataloader_config": dataloader_config,
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "rng_types": rng_types,
            "log_with": log_with,
            "project_dir": project_dir,
            "project_config": project_config,
            "gradient_accumulation_plugin": gradient_accumulation_plugin,
            "step_scheduler_with_optimizer": step_scheduler_with_optimizer,
            "kwargs_handlers": kwargs_handlers,
            "dynamo_backend": dynamo_backend,
            "dynamo_plugin": dynamo_plugin,
            "parallelism_config": parallelism_config,
            "guard": guard,
        }
        defaults = {"device_placement": True, "step_scheduler_with_optimizer": True}
        extra = [name for name, value in asked.items() if value is not defaults.get(name)]
        if context is not None and extra:
            raise ConfigurationError(
                "Accelerator(context=...) takes its options from the context, got "
                f"{', '.join(extra)} "
                "too. Use context=ctx.replace(...) for a variant."
            )
        self.context = context if context is not None else init_context(**asked)
        self.micro: MicroBatch | None = None
        self.last_micro: MicroBatch | None = None
        self.loaders = Loaders()
        self.uneven: Uneven = "error"
        self._window: MicroBatch | None = None  # of the `accumulate` block that is open
        self._sync = True
        self._batches_without_loader = 0
        self._trigger = comm.TriggerState()
        self._optimizers: list[Optimizer] = []
        self._scaler = training.init_scaler(self.context)
        # By optimizer: the state of its gradients, and after its steps since the latest update of the scale.
        self._unscaled: dict[int, training.ScalerState] = {}
        self._stepped: dict[int, training.ScalerState] = {}
        self._latest: dict[int, training.ScalerState] = {}  # after each optimizer's latest step

    # --- who and where ---------------------------------------------------------------------------

    @property
    def state(self) -> Context:
        """The context: what Accelerate keeps in its state objects."""
        return self.context

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.context.device

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of world."""
        return self.context.distributed_type

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self.context.num_processes

    @property
    def process_index(self) -> int:
        """Global rank."""
        return self.context.rank

    @property
    def local_process_index(self) -> int:
        """Rank on this node."""
        return self.context.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.context.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its node."""
        return self.context.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.context.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.context.num_processes > 1

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self.context.mixed_precision

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches in a full window."""
        return self.context.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self.context = self.context.replace(gradient_accumulation_steps=num_steps)

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are shared out."""
        return self.context.loading

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where outputs go."""
        return self.context.project

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder for outputs."""
        return self.context.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder for logs."""
        return self.context.project.logging_dir

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch at hand closes its window, so that optimizers step."""
        return self._sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest step of any prepared optimizer was skipped."""
        return any(self.step_was_skipped(optimizer) for optimizer in self._optimizers)

    # --- prepare ---------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers; see :func:`accelfn.prepare`.

        Returns:
            The object itself for one, a tuple for several, in the order given.
        """
        if not args:
            raise TypeError("prepare: got nothing to prepare. Pass a model, an optimizer, a loader, ...")
        if device_placement is not None and len(device_placement) != len(args):
            raise ValueError(
                f"device_placement needs one entry for each object: got {len(device_placement)} for "
                f"{len(args)} objects."
            )
        places = device_placement or [None] * len(args)
        prepared = tuple(self._prepare_one(item, place) for item, place in zip(args, places, strict=True))
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, item: Any, device_placement: bool | None) -> Any:
        if isinstance(item, nn.Module):
            return self.prepare_model(item, device_placement)
        if isinstance(item, Optimizer):
            return self.prepare_optimizer(item, device_placement)
        if isinstance(item, LRScheduler):
            return self.prepare_scheduler(item)
        if isinstance(item, AcceleratedScheduler):
            return self.prepare_scheduler(item)
        loaders = (DataLoader, data.PreparedDataLoader, AcceleratedDataLoader)
        if isinstance(item, (*loaders, *self.dataloader_config.custom_classes)):
            return self.prepare_data_loader(cast("DataLoader[Any]", item), device_placement)
        return item

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place, cast and replicate a model; see :func:`accelfn.prepare_model`."""
        return training.prepare_model(self._placing(device_placement), model, evaluation_mode=evaluation_mode)

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Give an optimizer that steps only where a window closes."""
        if isinstance(optimizer, AcceleratedOptimizer) and optimizer.belongs_to(self):
            return optimizer
        optimizer = unwrap_optimizer(optimizer)
        training.prepare_optimizer(self._placing(device_placement), optimizer)
        self._optimizers.append(optimizer)
        return AcceleratedOptimizer(self, optimizer)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[T] | data.PreparedDataLoader[T] | AcceleratedDataLoader[T] | Iterable[T],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> AcceleratedDataLoader[T]:
        """Share a loader out between the ranks; see :func:`accelfn.prepare_data_loader`."""
        if isinstance(data_loader, AcceleratedDataLoader):
            if data_loader.belongs_to(self):
                return data_loader
            data_loader = data_loader.loader
        return AcceleratedDataLoader(
            self,
            data.prepare_data_loader(
                self._placing(device_placement), data_loader, slice_fn=slice_fn_for_dispatch
            ),
        )

    def prepare_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> AcceleratedScheduler:
        """Give a schedule that moves only when its optimizer steps."""
        if isinstance(scheduler, AcceleratedScheduler):
            if scheduler.belongs_to(self):
                return scheduler
            scheduler = scheduler.scheduler
        return AcceleratedScheduler(self, training.prepare_scheduler(self.context, scheduler))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Give a loader without the first batches; see :func:`accelfn.skip_first_batches`."""
        return cast("Any", data.skip_first_batches(dataloader, num_batches))

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Take off what ``prepare_model`` put around a model; see :func:`accelfn.unwrap_model`."""
        return training.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def _placing(self, device_placement: bool | None) -> Context:
        if device_placement is None or device_placement == self.context.device_placement:
            return self.context
        return self.context.replace(device_placement=device_placement)

    # --- the training step -----------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Generator[None, None, None]:
        """Run forward and backward of one batch of a window; see :func:`accelfn.accumulate`.

        The window is that of the prepared loader whose batch is at hand. In a loop over anything else, each
        block counts as one batch of windows of full length.
        """
        micro = self.micro
        if micro is None:
            steps = self.gradient_accumulation_steps
            place = self._batches_without_loader % steps
            micro = plan_microbatch(place, 0, steps, steps)
            self._batches_without_loader += 1
        before, self._window, self._sync = self._window, micro, micro.sync
        try:
            with training.accumulate(self.context, micro, *models):
                yield
        finally:
            self._window = before

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Leave gradients unaveraged inside; see :func:`accelfn.no_sync`."""
        return training.no_sync(self.context, *models)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of a loss, in ``accumulate`` its window's part; see :func:`accelfn.backward`."""
        if kwargs:
            raise NotAvailableError(
                f"backward: {', '.join(kwargs)} has no machinery in this version of accelfn yet. Pass the "
                "loss alone."
            )
        self._update_scale()
        training.backward(self.context, loss, self._scaler, self._window)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Compute in mixed precision inside; see :func:`accelfn.autocast`."""
        return training.autocast(self.context, autocast_handler)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients (of all optimizers when None) by the loss scale; see ``unscale_gradients``."""
        self._require_closing_window()
        chosen = (
            self._optimizers
            if optimizer is None
            else [optimizer]
            if isinstance(optimizer, Optimizer)
            else optimizer
        )
        for one in map(unwrap_optimizer, chosen):
            state = self._unscaled.get(id(one), self._scaler)
            self._unscaled[id(one)] = training.unscale_gradients(self.context, one, state)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Bound the norm of gradients and return what it was; see :func:`accelfn.clip_grad_norm_`."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._unscale_for(parameters)
        return training.clip_grad_norm_(self.context, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Bound each entry of gradients; see :func:`accelfn.clip_grad_value_`."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._unscale_for(parameters)
        training.clip_grad_value_(self.context, parameters, clip_value)

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Let a prepared optimizer step if the window closes; its proxy calls this."""
        if not self._sync:
            return None
        if not self.context.precision.scales_loss:
            return optimizer.step() if closure is None else optimizer.step(closure)
        if closure is not None:
            raise NotAvailableError(
                "step(closure) can't be combined with loss scaling: use bf16, or step without closure."
            )
        state = self._unscaled.pop(id(optimizer), self._scaler)
        state = training.optimizer_step(self.context, optimizer, state, clear_gradients=False)
        self._stepped[id(optimizer)] = self._latest[id(optimizer)] = state
        return None

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the latest step of a prepared optimizer was skipped; proxies call this."""
        state = self._latest.get(id(unwrap_optimizer(optimizer)))
        return state is not None and training.step_was_skipped(self.context, state)

    def _require_closing_window(self) -> None:
        if self.context.precision.scales_loss and not self._sync:
            raise ConfigurationError(
                "with float16, gradients are unscaled and clipped only where the window closes: what the "
                "next "
                "backward adds is scaled. Put it under `if accelerator.sync_gradients:`."
            )

    def _unscale_for(self, parameters: Sequence[torch.Tensor]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        self.unscale_gradients([one for one in self._optimizers if parameters_of(one) & wanted])

    def _update_scale(self) -> None:
        """Follow the steps since the last backward. One scale serves all optimizers, so it moves once."""
        if not self._stepped:
            return
        found = torch.stack([state.found_inf for state in self._stepped.values()]).max()
        before = self._scaler
        self._scaler = training.update_scaler(self.context, before._replace(found_inf=found))
        # Other optimizers may be amid a window, with gradients at the old scale: they follow.
        waiting = [one for one in self._optimizers if not {id(one)} & {*self._stepped, *self._unscaled}]
        training.rescale_gradients(waiting, before, self._scaler)
        self._stepped, self._unscaled = {}, {}

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Generator[None, None, None]:
        """Let ranks without batches keep the others company; see :func:`accelfn.join_uneven_inputs`.

        ``even_batches`` is for all prepared loaders that somebody holds.
        """
        items = [unwrap_optimizer(one) if isinstance(one, Optimizer) else one for one in joinables]
        loaders = [one.loader for one in self.loaders]
        before = self.uneven
        with training.join_uneven_inputs(self.context, items, loaders, even_batches) as joined:
            self.uneven = "join" if joined else before
            try:
                yield
            finally:
                self.uneven = before

    # --- across ranks ----------------------------------------------------------------------------

    def gather(self, tensor: T) -> T:
        """Join tensors of all ranks; see :func:`accelfn.gather`."""
        return comm.gather(self.context, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Join what came of the batch at hand, without padding; see :func:`accelfn.gather_for_metrics`."""
        micro = self.micro or self.last_micro
        if use_gather_object:
            return data.gather_objects_for_metrics(self.context, input_data, micro)
        if micro is None:
            return comm.gather(self.context, input_data)
        return data.gather_for_metrics(self.context, input_data, micro)

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
        """Let the first process of each node go first; see :func:`accelfn.local_main_process_first`."""
        return comm.local_main_process_first(self.context)

    @contextmanager
    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> Generator[T, None, None]:
        """Give this rank its part in a ``with`` block; see :func:`accelfn.split_between_processes`."""
        yield comm.split_between_processes(self.context, inputs, apply_padding)

    def on_main_process(self, function: F) -> F:
        """Run a function on the main process alone; see :func:`accelfn.on_main_process`."""
        return comm.on_main_process(self.context)(function)  # pyright: ignore[reportReturnType] -- None elsewhere

    def on_local_main_process(self, function: F) -> F:
        """Run a function on the first process of each node alone."""
        return comm.on_local_main_process(self.context)(function)  # pyright: ignore[reportReturnType]

    def on_last_process(self, function: F) -> F:
        """Run a function on the last rank alone."""
        return comm.on_last_process(self.context)(function)  # pyright: ignore[reportReturnType]

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Any:
        """Run a function on one rank alone; also as ``@on_process(process_index=1)``."""
        decorate = comm.on_process(self.context, process_index)
        return decorate if function is None else decorate(function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int = 0
    ) -> Any:
        """Run a function on one local rank of each node alone."""
        decorate = comm.on_local_process(self.context, local_process_index)
        return decorate if function is None else decorate(function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node; see :func:`accelfn.print_once`."""
        comm.print_once(self.context, *args, **kwargs)

    def set_trigger(self) -> None:
        """Set the flag that ``check_trigger`` asks all ranks for."""
        self._trigger = comm.set_trigger(self._trigger)

    def check_trigger(self) -> bool:
        """Ask whether any rank has set the flag, and clear it."""
        self._trigger, fired = comm.check_trigger(self.context, self._trigger)
        return fired

    # --- saving and ending -----------------------------------------------------------------------

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> tuple[Path, ...]:
        """Write a model's weights as safetensors; see :func:`accelfn.save_model`."""
        if not safe_serialization:
            raise NotAvailableError(
                "save_model writes safetensors: accelfn writes no pickle. Leave safe_serialization True."
            )
        return checkpoint.save_model(self.context, model, save_directory, max_shard_size)

    def close(self) -> None:
        """End what the constructor started; see :func:`accelfn.close_context`."""
        close_context(self.context)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_YET:
            raise AttributeError(f"Accelerator.{name} has no machinery in this version of accelfn yet.")
        raise AttributeError(f"Accelerator has no attribute {name!r}.")
