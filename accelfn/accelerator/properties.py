"""Properties of an Accelerator that it reads from its context, under Accelerate's names."""

from __future__ import annotations

import dataclasses
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, NoReturn, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import Self

import accelfn.comm as comm
from accelfn.accelerator.proxies import AcceleratedDataLoader
from accelfn.accelerator.registry import WeakRegistry
from accelfn.accelerator.scaler_states import Scaling
from accelfn.config import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedType,
    FP8Backend,
    ParallelismConfig,
    ProjectConfiguration,
)
from accelfn.context import Context
from accelfn.data import MicroBatch, Uneven
from accelfn.parallel.strategies.fp8 import fp8_backend_of

T_co = TypeVar("T_co", covariant=True)
Hooks = OrderedDict[int, Callable[..., None]]


class _Read(Generic[T_co]):
    """A property that is read from the context."""

    def __init__(self, read: Callable[[Context], T_co]) -> None:
        self._read = read
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: ContextProperties, owner: type) -> T_co: ...
    def __get__(self, instance: ContextProperties | None, owner: type) -> Self | T_co:
        return self if instance is None else self._read(instance.context)

    def __set__(self, instance: ContextProperties, value: Any) -> NoReturn:
        raise AttributeError(f"{self._name} is the context's, and can't be set.")


class ContextProperties:
    """Properties of the context, and its few settings that may be changed.

    Attributes:
        context: The frozen Context. Changing a setting replaces it.
        state: The context, in place of Accelerate's state objects.
        device: Device of this rank.
        distributed_type: Kind of world.
        num_processes: Number of ranks.
        process_index: Global rank.
        local_process_index: Rank on this node.
        is_main_process: Whether this is rank 0.
        is_local_main_process: Whether this is rank 0 of its node.
        is_last_process: Whether this is the last rank.
        use_distributed: Whether there is more than one rank.
        multi_device: Whether there are several ranks on accelerators.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        native_amp: Whether torch's autocast is used.
        fp8_backend: Engine of 8-bit matrix products: AO, TE or MSAMP; None without mixed precision "fp8".
        dataloader_config: How loaders are sharded.
        split_batches: Whether each batch of a loader is split into one part for each rank.
        dispatch_batches: Whether rank 0 reads for all ranks.
        use_seedable_sampler: The option's value; a shuffled order is always a function of seed and epoch.
        non_blocking: Whether copies to the device are asynchronous.
        use_stateful_dataloader: Whether loaders are torchdata's.
        device_placement: Whether models and batches are moved to the device.
        rng_types: Random states that a loader synchronises at the start of an epoch.
        step_scheduler_with_optimizer: Whether a scheduler only steps when its optimizer does.
        project_configuration: Where outputs are written.
        project_dir: Directory for outputs.
        logging_dir: Directory for logs.
        log_with: Configured trackers: names, trackers and classes of these.
        should_save_model: Whether this rank writes a model's weights for its node.
        parallelism_config: Sizes of the mesh's axes; None without a configured mesh.
        deepspeed_plugin: The active options of DeepSpeed; None without it.
        deepspeed_plugins: All of them by name, if several were passed.
        data_parallel_rank: Index of this rank's copy of the model.
        data_parallel_shard_rank: Index among the ranks that share the parameters of one copy.
        tensor_parallel_rank: Index among the ranks that share each layer.
        pipeline_parallel_rank: Index among the ranks with different pipeline stages.
        context_parallel_rank: Index among the ranks that share each sequence by context parallelism.
        is_fsdp2: Whether models are sharded by FSDP2, which also supports version 1's plugin.
        is_composable_parallelism_enabled: The same: FSDP2 can be combined with every other axis.
    """

    context: Context
    state: _Read[Context] = _Read(lambda ctx: ctx)
    device: _Read[torch.device] = _Read(lambda ctx: ctx.device)
    distributed_type: _Read[DistributedType] = _Read(lambda ctx: ctx.distributed_type)
    num_processes: _Read[int] = _Read(lambda ctx: ctx.num_processes)
    process_index: _Read[int] = _Read(lambda ctx: ctx.rank)
    local_process_index: _Read[int] = _Read(lambda ctx: ctx.local_rank)
    is_main_process: _Read[bool] = _Read(lambda ctx: ctx.is_main_process)
    is_local_main_process: _Read[bool] = _Read(lambda ctx: ctx.is_local_main_process)
    is_last_process: _Read[bool] = _Read(lambda ctx: ctx.is_last_process)
    use_distributed: _Read[bool] = _Read(lambda ctx: ctx.num_processes > 1)
    multi_device: _Read[bool] = _Read(lambda ctx: ctx.num_processes > 1 and ctx.device.type != "cpu")
    mixed_precision: _Read[str] = _Read(lambda ctx: ctx.mixed_precision)
    native_amp: _Read[bool] = _Read(lambda ctx: ctx.precision.compute_dtype is not None)
    fp8_backend: _Read[FP8Backend | None] = _Read(fp8_backend_of)
    dataloader_config: _Read[DataLoaderConfiguration] = _Read(lambda ctx: ctx.loading)
    split_batches: _Read[bool] = _Read(lambda ctx: ctx.loading.split_batches)
    dispatch_batches: _Read[bool | None] = _Read(lambda ctx: ctx.loading.dispatch_batches)
    use_seedable_sampler: _Read[bool] = _Read(lambda ctx: ctx.loading.use_seedable_sampler)
    non_blocking: _Read[bool] = _Read(lambda ctx: ctx.loading.non_blocking)
    use_stateful_dataloader: _Read[bool] = _Read(lambda ctx: ctx.loading.use_stateful_dataloader)
    device_placement: _Read[bool] = _Read(lambda ctx: ctx.device_placement)
    rng_types: _Read[tuple[str, ...]] = _Read(lambda ctx: ctx.rng_types)
    step_scheduler_with_optimizer: _Read[bool] = _Read(lambda ctx: ctx.step_scheduler_with_optimizer)
    project_configuration: _Read[ProjectConfiguration] = _Read(lambda ctx: ctx.project)
    project_dir: _Read[str | os.PathLike[str] | None] = _Read(lambda ctx: ctx.project.project_dir)
    logging_dir: _Read[str | os.PathLike[str] | None] = _Read(lambda ctx: ctx.project.logging_dir)
    log_with: _Read[tuple[Any, ...]] = _Read(lambda ctx: ctx.log_with)
    should_save_model: _Read[bool] = _Read(lambda ctx: ctx.is_local_main_process)
    parallelism_config: _Read[ParallelismConfig | None] = _Read(lambda ctx: ctx.strategy.parallelism)
    deepspeed_plugin: _Read[DeepSpeedPlugin | None] = _Read(lambda ctx: ctx.strategy.deepspeed)
    deepspeed_plugins: _Read[Mapping[str, DeepSpeedPlugin]] = _Read(
        lambda ctx: ctx.strategy.deepspeed_plugins
    )
    data_parallel_rank: _Read[int] = _Read(lambda ctx: ctx.coordinate("dp_replicate"))
    data_parallel_shard_rank: _Read[int] = _Read(lambda ctx: ctx.coordinate("dp_shard"))
    tensor_parallel_rank: _Read[int] = _Read(lambda ctx: ctx.coordinate("tp"))
    pipeline_parallel_rank: _Read[int] = _Read(lambda ctx: ctx.coordinate("pp"))
    context_parallel_rank: _Read[int] = _Read(lambda ctx: ctx.coordinate("cp"))
    is_fsdp2: _Read[bool] = _Read(lambda ctx: ctx.strategy.fsdp is not None)
    is_composable_parallelism_enabled: _Read[bool] = _Read(lambda ctx: ctx.strategy.fsdp is not None)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches in a full window."""
        return self.context.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self.context = self.context.replace(gradient_accumulation_steps=num_steps)

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches. Can be set, for loaders prepared later."""
        return self.context.loading.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        loading = dataclasses.replace(self.context.loading, even_batches=even)
        self.context = self.context.replace(dataloader_config=loading)

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """Torch's mesh over the axes of more than one rank; None where there is none.

        Raises:
            NotAvailableError: The ranks are threads.
        """
        mesh = self.context.mesh
        axes = () if mesh is None else mesh.plan.active()
        return None if mesh is None or not axes else mesh.device_mesh(*axes)


class Holdings(ContextProperties):
    """The state of an Accelerator, whose docstring describes its public attributes."""

    def __init__(self, context: Context) -> None:
        """Start with ``context``, and no prepared objects."""
        self.context = context
        self.loops: dict[object, MicroBatch] = {}
        self.ended: list[MicroBatch] = []
        self.last_micro: MicroBatch | None = None
        self.models: WeakRegistry[nn.Module] = WeakRegistry()
        self.optimizers: WeakRegistry[Optimizer] = WeakRegistry()
        self.schedulers: WeakRegistry[LRScheduler] = WeakRegistry()
        self.loaders: WeakRegistry[AcceleratedDataLoader[Any]] = WeakRegistry()
        self.uneven: Uneven = "error"
        self.window: MicroBatch | None = None
        self.sync_gradients = True
        self.step: int = 0
        self._trigger = comm.TriggerState()
        self._scaling = Scaling(self.context, self.optimizers)
        self._registered: dict[str, Any] = {}
        self._save_hooks = Hooks()
        self._load_hooks = Hooks()
        self._next_number = self.context.project.iteration
