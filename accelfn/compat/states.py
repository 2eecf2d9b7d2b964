"""Accelerate's state classes: views of the current context, which hold nothing themselves."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, cast

import torch

import accelfn.accelerator as shim
from accelfn.compat.constants import DistributedType
from accelfn.compat.current import CurrentAccelerator, Loop, current
from accelfn.config import InitProcessGroupKwargs
from accelfn.context import Context
from accelfn.errors import ConfigurationError


class _Held:
    """What a state holds, by name: nothing before the program's first use of it, and after a reset."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __get__(self, state: Any, kind: type[Any]) -> dict[str, Any]:
        view = object.__new__(kind) if state is None else state  # which needs no Accelerator
        return {name: getattr(view, name) for name in self.names} if view.initialized else {}


def _of_context(path: str) -> Any:
    """Return a property that is read from a state's context."""
    read = attrgetter(path)
    return property(lambda state: read(state.context))


def _given(name: str) -> Any:
    """Return a property with the program's argument of that name; None without one."""

    def read(state: Any) -> Any:
        holder = current().accelerator or current().options
        return None if holder is None else holder.given.get(name)

    return property(read)


def _of_accelerator(path: str, without: Any) -> Any:
    """Return a property that is read from the current Accelerator; ``without`` if there is none."""
    read = attrgetter(path)
    return property(lambda state: without if state._accelerator is None else read(state._accelerator))


def _of_loader(name: str, without: Any) -> Any:
    """Return a property that is read from the innermost loader in a loop; ``without`` outside of loops."""
    return property(lambda state: getattr(state.active_dataloader, name, without))


class PartialState:
    """The processes, as the current context knows them. Every instance is the same view.

    Ranks: every rank, the first time: it joins the ranks.

    Args:
        cpu: Use the CPU even if there is an accelerator.
        **kwargs: ``backend``, ``timeout`` and ``init_method`` of the process group, used by the first state
            of the process.

    Attributes:
        device: Device of this rank; also ``default_device``.
        backend: Backend of the process group; None without one.
        num_processes: Number of ranks.
        process_index: Global rank.
        local_process_index: Rank on this node.
        is_main_process: Whether this is rank 0.
        is_local_main_process: Whether this is rank 0 of its node.
        is_last_process: Whether this is the last rank.
        fork_launched: False: ranks are never forked.
    """

    __module__ = "accelerate.state"
    _shared_state: Any = _Held(
        *("backend", "device", "debug", "distributed_type", "num_processes", "process_index"),
        "local_process_index",
    )
    __dict__ = property(lambda state: state._shared_state)  # pyright: ignore[reportAssignmentType]
    device: Any = _of_context("device")
    default_device: Any = _of_context("device")
    backend: Any = _of_context("world.backend")
    num_processes: Any = _of_context("num_processes")
    process_index: Any = _of_context("rank")
    local_process_index: Any = _of_context("local_rank")
    is_main_process: Any = _of_context("is_main_process")
    is_local_main_process: Any = _of_context("is_local_main_process")
    is_last_process: Any = _of_context("is_last_process")
    fork_launched = False
    # The shim's methods, which ask for nothing but `context`.
    wait_for_everyone: Any = shim.Accelerator.wait_for_everyone
    split_between_processes: Any = shim.Accelerator.split_between_processes
    main_process_first: Any = shim.Accelerator.main_process_first
    local_main_process_first: Any = shim.Accelerator.local_main_process_first
    on_main_process: Any = shim.Accelerator.on_main_process
    on_local_main_process: Any = shim.Accelerator.on_local_main_process
    on_last_process: Any = shim.Accelerator.on_last_process
    on_process: Any = shim.Accelerator.on_process
    on_local_process: Any = shim.Accelerator.on_local_process
    print: Any = shim.Accelerator.print

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        """Join the ranks, unless this process has done so."""
        joining = {name: kwargs.pop(name, None) for name in ("backend", "init_method", "timeout")}
        unknown = {name for name, value in kwargs.items() if not name.startswith("_") and value is not None}
        if unknown:
            raise TypeError(
                f"PartialState: unknown arguments {', '.join(sorted(unknown))}. It takes cpu, backend, "
                "init_method and timeout."
            )
        if current().is_started and not cpu:
            return
        given = {name: value for name, value in joining.items() if value is not None}
        current().start({"cpu": cpu or None, "kwargs_handlers": [InitProcessGroupKwargs(**given)]})

    @property
    def context(self) -> Context:
        """The context of the world."""
        return current().start()

    @staticmethod
    def _reset_state() -> None:
        current().reset()

    @property
    def initialized(self) -> bool:
        """Whether the ranks have been joined."""
        return current().is_started

    @property
    def debug(self) -> bool:
        """Whether every operation is checked."""
        return self.context.debug if current().debug is None else bool(current().debug)

    @debug.setter
    def debug(self, debug: bool) -> None:
        current().debug = debug

    @property
    def distributed_type(self) -> Any:
        """Kind of world."""
        return DistributedType(self.context.distributed_type.value)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.context.num_processes > 1

    def set_device(self) -> None:
        """Do nothing: the device is current since the ranks were joined."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the world, or destroy one group."""
        if group is None:
            current().close()
        else:
            torch.distributed.destroy_process_group(group)

    def __repr__(self) -> str:
        backend = "" if self.backend is None else f"  Backend: {self.backend}"
        return (
            f"Distributed environment: {self.distributed_type!s}{backend}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a view has no state of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        del state


class AcceleratorState(PartialState):
    """The processes and the options of the current Accelerator.

    Attributes:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        deepspeed_plugin: The program's plugin, or plugins by name; None without one.
        fsdp_plugin: The program's plugin; None without one.
        megatron_lm_plugin: The program's plugin; None without one.
        parallelism_config: The program's sizes of the mesh; None without one.

    Raises:
        ValueError: There is no Accelerator yet.
    """

    __module__ = "accelerate.state"
    _shared_state: Any = _Held(
        *vars(PartialState)["_shared_state"].names,
        *("mixed_precision", "dynamo_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"),
        "parallelism_config",
    )
    mixed_precision: Any = _of_context("mixed_precision")
    deepspeed_plugin: Any = _given("deepspeed_plugin")
    fsdp_plugin: Any = _given("fsdp_plugin")
    megatron_lm_plugin: Any = _given("megatron_lm_plugin")
    parallelism_config: Any = _given("parallelism_config")
    _dynamo_plugin: Any = _given("dynamo_plugin")

    def __init__(self, *args: Any, _from_accelerator: bool = False, **kwargs: Any) -> None:
        """Show the current Accelerator's options."""
        if current().options is None and not _from_accelerator:
            raise ConfigurationError(
                "AcceleratorState shows the options of an Accelerator, and there is none. Make an "
                "Accelerator first, or use PartialState."
            )
        del args, kwargs

    @property
    def context(self) -> Context:
        """The context of the Accelerator."""
        return current().context

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        if reset_partial_state:
            current().reset()
        else:
            current().forget()

    @property
    def initialized(self) -> bool:
        """Whether there is an Accelerator."""
        return is_initialized()

    @property
    def dynamo_plugin(self) -> Any:
        """Options of torch.compile."""
        return self._dynamo_plugin or self.context.strategy.dynamo

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards models."""
        return self.context.strategy.fsdp is not None

    @property
    def device_mesh(self) -> Any:
        """Torch's mesh; None without one."""
        accelerator = current().accelerator
        return None if accelerator is None else accelerator.torch_device_mesh

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The program's plugins by name; None without one."""
        plugins = self.deepspeed_plugin
        is_named = plugins is None or isinstance(plugins, Mapping)
        return cast("Any", plugins) if is_named else {"default": plugins}

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return one of several plugins by name."""
        return self.context.strategy.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make a plugin the active one."""
        accelerator = current().accelerator
        if accelerator is not None:
            accelerator.select_deepspeed_plugin(name)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


class GradientState:
    """Where the current Accelerator is in its data and in its window.

    Args:
        gradient_accumulation_plugin: Not used: the Accelerator has it.
        accelerator: Whose state; the current one by default.

    Attributes:
        sync_gradients: Whether the current batch closes its window.
        num_steps: Batches in a full window.
        end_of_dataloader: Whether the current batch is the last one of its loader.
        remainder: Rows in the last step of the loader; -1 if that is unknown.
        adjust_scheduler: False: a scheduler steps where its optimizer does.
        is_xla_gradients_synced: False: gradients on XLA's devices are averaged by its engine.
    """

    __module__ = "accelerate.state"
    _shared_state: Any = _Held(
        *("sync_gradients", "plugin_kwargs", "active_dataloader", "dataloader_references"),
        *("end_of_dataloader", "remainder"),
    )
    __dict__ = property(lambda state: state._shared_state)  # pyright: ignore[reportAssignmentType]
    adjust_scheduler = False
    is_xla_gradients_synced = False
    sync_gradients: Any = _of_accelerator("sync_gradients", True)
    num_steps: Any = _of_accelerator("context.gradient_accumulation_steps", 1)
    end_of_dataloader: Any = _of_loader("end_of_dataloader", False)
    remainder: Any = _of_loader("remainder", -1)
    _of: CurrentAccelerator | None = None

    def __init__(
        self, gradient_accumulation_plugin: Any = None, *, accelerator: CurrentAccelerator | None = None
    ) -> None:
        """Show the state of an Accelerator."""
        del gradient_accumulation_plugin
        self._of = accelerator

    @property
    def _accelerator(self) -> CurrentAccelerator | None:
        return current().accelerator if self._of is None else self._of

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: the state is the Accelerator's."""

    @property
    def initialized(self) -> bool:
        """Whether there is an Accelerator."""
        return self._accelerator is not None

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        accelerator = self._accelerator
        if accelerator is not None:
            accelerator.sync_gradients = sync_gradients

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The options of accumulation."""
        accelerator = self._accelerator
        return {} if accelerator is None else accelerator.context.accumulation.to_dict()

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader closes its window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def active_dataloader(self) -> Loop | None:
        """The innermost loader in a loop; None outside of loops."""
        return current().loops[-1] if current().loops else None

    @property
    def dataloader_references(self) -> list[Loop | None]:
        """The loaders in loops, outermost first, after None."""
        return [None, *current().loops]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loop over a prepared loader is running."""
        return bool(current().loops)

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def is_initialized() -> bool:
    """Return whether there is an Accelerator."""
    return current().options is not None


def do_nothing(*args: object, **kwargs: object) -> None:
    """Do nothing."""
    del args, kwargs
