"""The Accelerator of programs written for Accelerate: the shim, with their options, names and arithmetic."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

import accelfn.comm as comm
import accelfn.training as training
from accelfn.accelerator.proxies import AccumulateBlock, is_loader_of
from accelfn.compat import records
from accelfn.compat.current import current
from accelfn.compat.handlers import Handlers, copied
from accelfn.compat.helpers import parse_flag_from_env
from accelfn.compat.loaders import DataLoaderShard, prepare_loader
from accelfn.compat.operations import gather_object
from accelfn.compat.records import freeze
from accelfn.compat.saving import LocalSaving
from accelfn.compat.scaler import ScalerView
from accelfn.compat.shards import BatchSamplerShard
from accelfn.compat.states import AcceleratorState, GradientState
from accelfn.compat.trackers import registered
from accelfn.config import DynamoBackend, LoggerType
from accelfn.context import ContextOptions
from accelfn.data import plan_microbatch
from accelfn.errors import ConfigurationError
from accelfn.launch.kinds import suggest
from accelfn.tree import flatten, slice_tensors

_PLUGINS = ("fsdp_plugin", "megatron_lm_plugin", "parallelism_config", "dynamo_plugin")
_ULYSSES = (
    " Ranks share sequences with ParallelismConfig(sp_size=...), and loaders yield their parts with "
    "DataLoaderConfiguration(sequence={...})."
)
_ARITHMETIC = (
    "accelfn.compat: this program has Accelerate's arithmetic: for each step of an optimizer its scheduler "
    "steps once per rank (unless split_batches is set), and the loss in a short last window is divided by "
    "the length of a full one{sequences}. accelfn.Accelerator has no such rules."
)
_SEQUENCES = (
    "; and the losses of ranks that share sequences are averaged, whatever their numbers of labels: "
    "divide a sum by the labels of all ranks times the number of ranks, as transformers' Trainer does"
)


class Accelerator(Handlers, LocalSaving):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The shim's :class:`accelfn.Accelerator`, as programs written for Accelerate know it.

    It becomes the current one of the process. Options are records that may be changed at any time; loaders
    keep torch's order of a shuffle; :meth:`accumulate` counts its calls, and :meth:`gather_for_metrics`
    shortens every tensor at the end of a loader.
    """

    __module__ = "accelerate.accelerator"

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: str | DynamoBackend | None = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        """Join the ranks, unless this process has done so, and become the current Accelerator."""
        if deepspeed_plugin is not None and deepspeed_plugins is not None:
            raise ConfigurationError("Accelerator: pass deepspeed_plugin or deepspeed_plugins, not both.")
        deepspeed_plugin = deepspeed_plugins if deepspeed_plugin is None else deepspeed_plugin
        if torch_tp_plugin is not None:
            parallelism_config = parallelism_config or records.ParallelismConfig(
                tp_size=torch_tp_plugin.tp_size
            )
        if isinstance(project_config, records.ProjectConfiguration) and project_config.project_dir is None:
            project_config.set_directories(project_dir)
        if deepspeed_plugin is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            deepspeed_plugin = records.DeepSpeedPlugin()
        if fsdp_plugin is None:
            fsdp_plugin = records.FullyShardedDataParallelPlugin.launched("fsdp_plugin")
        if parallelism_config is None:
            parallelism_config = records.ParallelismConfig.launched("parallelism_config")
        steps = gradient_accumulation_steps
        arguments: dict[str, Any] = {
            "device_placement": device_placement,
            "mixed_precision": mixed_precision,
            # 1 is that of the variable, or of the plugin
            "gradient_accumulation_steps": None if steps == 1 else steps,
            "cpu": cpu or None,
            "dataloader_config": dataloader_config,
            "deepspeed_plugin": deepspeed_plugin,
            "fsdp_plugin": fsdp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
            "rng_types": rng_types,
            "project_dir": project_dir,
            "project_config": project_config,
            "gradient_accumulation_plugin": gradient_accumulation_plugin,
            "step_scheduler_with_optimizer": step_scheduler_with_optimizer,
            "kwargs_handlers": kwargs_handlers,
            "dynamo_backend": dynamo_backend,
            "dynamo_plugin": dynamo_plugin,
            "parallelism_config": parallelism_config,
        }
        options: dict[str, Any] = {**freeze(arguments), "log_with": registered(log_with)}
        window: Any = options["gradient_accumulation_plugin"]
        self._own_window: int | None = window and window.num_steps
        if isinstance(deepspeed_plugin, records.DeepSpeedPlugin):
            options["deepspeed_plugin"] = deepspeed_plugin.frozen_for(self._own_window)
        context = current().begin(cast("ContextOptions", options))
        if split_batches is not None and split_batches != context.loading.split_batches:
            warnings.warn(
                "Accelerator: split_batches is an option of the loaders, and has no effect here, as in "
                "Accelerate 1.15. Pass "
                f"dataloader_config=DataLoaderConfiguration(split_batches={split_batches}).",
                stacklevel=2,
            )
        if not isinstance(project_config, records.ProjectConfiguration):
            project_config = records.ProjectConfiguration.of(context.project)
        if not isinstance(dataloader_config, records.DataLoaderConfiguration):
            dataloader_config = records.DataLoaderConfiguration.of(context.loading)
        late = {
            **{name: arguments[name] for name in _PLUGINS},
            "project_config": project_config,
            "dataloader_config": dataloader_config,
            "kwargs_handlers": [*(kwargs_handlers or ())],
            "rng_types": [*context.rng_types],
            "log_with": [LoggerType(one) if one in LoggerType else one for one in context.log_with],
        }
        self.given: dict[str, Any] = {**late, "deepspeed_plugin": deepspeed_plugin}
        self._taken: dict[str, Any] = copied(late)
        super().__init__(context=context)
        self.compat = "accelerate"
        current().adopt(self)
        if self.num_processes > 1 or self.gradient_accumulation_steps > 1:
            self._say_arithmetic()

    def _say_arithmetic(self) -> None:
        if "arithmetic" not in current().notes and self.is_main_process:
            shared = self.context.axis_size("cp") * self.context.axis_size("sp") > 1
            text = _ARITHMETIC.format(sequences=_SEQUENCES if shared else "")
            warnings.warn(text, stacklevel=3)  # at the line that makes the Accelerator
        current().notes |= {"arithmetic"}

    # --- views -----------------------------------------------------------------------------------

    @property
    def state(self) -> AcceleratorState:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The processes and options."""
        return AcceleratorState(_from_accelerator=True)

    @property
    def gradient_state(self) -> GradientState:
        """Where this Accelerator is in its data and its window."""
        return GradientState(accelerator=self)

    @property
    def distributed_type(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Kind of world."""
        return self.state.distributed_type

    @property
    def scaler(self) -> ScalerView | None:
        """The loss scale of fp16; None in other precisions."""
        return ScalerView(self._scaling, self.context) if self.context.precision.scales_loss else None

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """One if this rank has set its trigger; None if not."""
        return torch.tensor(1, device=self.device) if self._trigger.is_set else None

    def __getattr__(self, name: str) -> Any:
        near = suggest(name, [one for one in dir(self) if not one.startswith("_")])
        hint = "" if near is None else f" Did you mean {near}?"
        hint = _ULYSSES if name == "deepspeed_ulysses_dl_adapter" else hint
        raise AttributeError(f"Accelerator has no attribute {name!r} under accelfn.{hint}")

    _models: Any = property(lambda self: [*self.models])
    _optimizers: Any = property(lambda self: [*self.optimizers])
    _schedulers: Any = property(lambda self: [*self.schedulers])
    _dataloaders: Any = property(lambda self: [*self.loaders])
    _custom_objects: Any = property(lambda self: [*self._registered.values()])
    _save_model_state_pre_hook: Any = property(lambda self: self._save_hooks)
    _load_model_state_pre_hook: Any = property(lambda self: self._load_hooks)

    # --- prepare ---------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None, **named: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers."""
        plugin = self.given["deepspeed_plugin"]
        if isinstance(
            plugin, records.DeepSpeedPlugin
        ):  # the program may have filled its configuration meanwhile
            self.context = self.context.replace(deepspeed_plugin=plugin.frozen_for(self._own_window))
        prepared = super().prepare(*args, device_placement=device_placement, **named)
        self._number()
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoaderShard[Any]:
        """Shard a loader over the ranks, in torch's order of a shuffle."""
        if is_loader_of(self, data_loader):
            return data_loader
        prepared = prepare_loader(self, self._placing(device_placement), data_loader, slice_fn_for_dispatch)
        self._number()
        return prepared

    # --- the training step -----------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Run forward and backward of one batch. Each call counts; a loader's last batch ends the window."""
        state, steps = self.gradient_state, self.gradient_accumulation_steps
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step: int = 0
            is_closing = True
        else:
            self.step += 1
            is_closing = self.step % steps == 0
        place = steps - 1 if is_closing else 0
        micro = plan_microbatch(place, 0, steps, steps)
        inner = training.accumulate(self.context, micro, *models)
        return AccumulateBlock(self, micro, inner)

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Don't average gradients inside; of all prepared models if none is passed."""
        if self.num_processes == 1:
            return nullcontext()
        return super().no_sync(*(() if model is None else (model,)))

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of a loss, divided by the length of a window."""
        kwargs.pop("scale_wrt_gas", None)  # an engine's: the loss isn't divided twice here
        super().backward(loss, *args, **kwargs)

    def _is_open(self) -> bool:
        """Return whether a window is open whose gradients a program may change so far.

        Gradients at a loss scale are refused, since they would be divided in each batch.
        """
        is_scaled = self.context.precision.scales_loss or self._scaling.state.weight is not None
        return not (self.sync_gradients or is_scaled or self.context.strategy.engine)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale; see :func:`accelfn.unscale_gradients`."""
        if not self._is_open():
            super().unscale_gradients(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Bound the norm of gradients; in an open window that of this rank's own gradients so far."""
        if self._is_open():
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Bound each entry of gradients; in an open window of this rank's own gradients so far."""
        if self._is_open():
            nn.utils.clip_grad_value_(parameters, clip_value)
        else:
            super().clip_grad_value_(parameters, clip_value)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Generator[None, None, None]:
        """Let ranks without batches join collectives; see :func:`accelfn.join_uneven_inputs`.

        ``even_batches`` applies to prepared loaders of map-style data.
        """
        is_even = self.even_batches
        shards = [loader.batch_sampler for loader in self.loaders]
        sharded = [shard for shard in shards if isinstance(shard, BatchSamplerShard)]
        before = [shard.even_batches for shard in sharded]
        if even_batches is not None and self.num_processes > 1:
            if len(sharded) < len(shards):
                warnings.warn(
                    "join_uneven_inputs: even_batches is only supported for map-style datasets. Prepared "
                    "loaders of streams, and those that rank 0 reads for all, stay as they are.",
                    stacklevel=3,
                )
            self.even_batches = even_batches
            for shard in sharded:
                shard.even_batches = even_batches
        try:
            with super().join_uneven_inputs(joinables):
                yield
        finally:
            self.even_batches = is_even
            for shard, even in zip(sharded, before, strict=True):
                shard.even_batches = even

    # --- across ranks ----------------------------------------------------------------------------

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gather from all ranks; at the end of a loader every tensor is cut to the rows of its last step."""
        is_all_tensors = all(isinstance(leaf, torch.Tensor) for leaf in flatten(input_data)[0])
        is_objects = use_gather_object or not is_all_tensors
        gathered = gather_object(input_data) if is_objects else comm.gather(self.context, input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return gathered
        if is_objects:
            return gathered[: state.remainder]
        is_cut = all(leaf.ndim for leaf in flatten(gathered)[0])
        return slice_tensors(gathered, slice(state.remainder)) if is_cut else gathered

    # --- saving ----------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Save and load further objects, in the order of registration."""
        first = len(self._registered)
        numbered = {f"object_{first + number}": item for number, item in enumerate(objects)}
        super().register_for_checkpointing(**numbered, **named)

    # --- ending ----------------------------------------------------------------------------------

    def end_training(self) -> None:
        """End the trackers, and leave the world."""
        try:
            super().end_training()
        finally:
            if current().accelerator is self:
                current().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Return the Accelerator itself."""
        return self
