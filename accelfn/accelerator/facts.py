"""What an Accelerator knows of its context, under Accelerate's names."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch.distributed.device_mesh import DeviceMesh

from accelfn.context import Context
from accelfn.context.config import (
    DataLoaderConfiguration,
    DistributedType,
    ParallelismConfig,
    ProjectConfiguration,
)

__all__ = ("ContextProperties",)


class ContextProperties:
    """Questions that the context answers, and the few settings of it that may be changed.

    Attributes:
        context: The frozen Context behind it. To change a setting puts another one in its place.
    """

    context: Context

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
    def should_save_model(self) -> bool:
        """Whether this rank is the one of its node that writes a model's weights."""
        return self.context.is_local_main_process

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to the device."""
        return self.context.device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether a schedule moves only when its optimizer does."""
        return self.context.step_scheduler_with_optimizer

    @property
    def rng_types(self) -> tuple[str, ...]:
        """Random states that a loader synchronises at the start of an epoch."""
        return self.context.rng_types

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Sizes of the mesh's axes; None where nobody asked for a mesh."""
        return self.context.strategy.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """Torch's mesh over the axes of more than one rank; None where there is none.

        Raises:
            NotAvailableError: The ranks are threads.
        """
        mesh = self.context.mesh
        axes = () if mesh is None else mesh.plan.active()
        return None if mesh is None or not axes else mesh.device_mesh(*axes)

    @property
    def data_parallel_rank(self) -> int:
        """Which copy of the model this rank works on."""
        return self.context.coordinate("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Place among the ranks that share the parameters of one copy."""
        return self.context.coordinate("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Place among the ranks that share each layer."""
        return self.context.coordinate("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Stage that this rank works on."""
        return self.context.coordinate("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Place among the ranks that share each sequence by context parallelism."""
        return self.context.coordinate("cp")

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP2, which runs version 1's plugin too."""
        return self.context.strategy.fsdp is not None

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """The same: FSDP2 goes with every other axis."""
        return self.is_fsdp2

    @property
    def multi_device(self) -> bool:
        """Whether there are several ranks on accelerators."""
        return self.use_distributed and self.context.device.type != "cpu"

    @property
    def native_amp(self) -> bool:
        """Whether torch's autocast is at work."""
        return self.context.precision.compute_dtype is not None

    @property
    def split_batches(self) -> bool:
        """Whether each batch of a loader is cut into one part for each rank."""
        return self.context.loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all."""
        return self.context.loading.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches. May be set, for loaders that are prepared then."""
        return self.context.loading.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        loading = dataclasses.replace(self.context.loading, even_batches=even)
        self.context = self.context.replace(dataloader_config=loading)

    @property
    def use_seedable_sampler(self) -> bool:
        """What was asked for; a shuffled order is always a function of seed and epoch."""
        return self.context.loading.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device are asynchronous."""
        return self.context.loading.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's."""
        return self.context.loading.use_stateful_dataloader
