"""Accelerate's state classes: views of the current context, which hold nothing themselves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

import accelfn.comm as comm
from accelfn.compat.constants import DistributedType
from accelfn.compat.current import current
from accelfn.context import Context
from accelfn.context.config import InitProcessGroupKwargs
from accelfn.errors import ConfigurationError

if TYPE_CHECKING:
    from accelfn.compat.accelerator import Accelerator
    from accelfn.compat.loaders import DataLoaderShard

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_PROCESSES = (
    *("backend", "device", "debug", "distributed_type", "num_processes", "process_index"),
    "local_process_index",
)
_OPTIONS = (
    *("mixed_precision", "dynamo_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"),
    "parallelism_config",
)
_WINDOW = (
    *("sync_gradients", "plugin_kwargs", "active_dataloader", "dataloader_references"),
    *("end_of_dataloader", "remainder"),
)


class SharedState(Mapping[str, Any]):
    """What a state class holds, by name: nothing before the program's first use of it, and after a reset."""

    _kind: type[Any]

    def __init__(self, names: tuple[str, ...]) -> None:
        """Read attributes of the class that this becomes an attribute of."""
        self._names = names

    def __set_name__(self, kind: type[Any], name: str) -> None:
        self._kind = kind

    def __getitem__(self, name: str) -> Any:
        if name not in [*self]:
            raise KeyError(name)
        return getattr(self._view, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names if self._view.initialized else ())

    def __len__(self) -> int:
        return len([*iter(self)])

    @property
    def _view(self) -> Any:
        return object.__new__(self._kind)  # which needs no Accelerator


def _held(state: PartialState | GradientState) -> dict[str, Any]:
    """Return what programs find in the ``__dict__`` of a state."""
    return {name: getattr(state, name) for name in state._shared_state}  # pyright: ignore[reportPrivateUsage]


class PartialState:
    """The processes, as the current context knows them. Every instance is the same view.

    Ranks: every rank, the first time: it joins the ranks.

    Args:
        cpu: Use the CPU even if there is an accelerator.
        **kwargs: ``backend``, ``timeout`` and ``init_method`` of the process group, used by the first state
            of the process.
    """

    __module__ = "accelerate.state"
    _shared_state: ClassVar[Mapping[str, Any]] = SharedState(_PROCESSES)
    __dict__ = property(_held)  # pyright: ignore[reportAssignmentType]

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
    def _context(self) -> Context:
        return current().start()

    @staticmethod
    def _reset_state() -> None:
        current().reset()

    @property
    def initialized(self) -> bool:
        """Whether the ranks have been joined."""
        return current().is_started

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._context.device

    @property
    def default_device(self) -> torch.device:
        """Device of this rank."""
        return self._context.device

    @property
    def backend(self) -> str | None:
        """Backend of the process group; None without one."""
        return self._context.world.backend

    @property
    def debug(self) -> bool:
        """Whether every operation is checked."""
        return self._context.debug if current().debug is None else bool(current().debug)

    @debug.setter
    def debug(self, debug: bool) -> None:
        current().debug = debug

    @property
    def distributed_type(self) -> Any:
        """Kind of world."""
        return DistributedType(self._context.distributed_type.value)

    @property
    def fork_launched(self) -> bool:
        """False: ranks are never forked."""
        return False

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self._context.num_processes

    @property
    def process_index(self) -> int:
        """Global rank."""
        return self._context.rank

    @property
    def local_process_index(self) -> int:
        """Rank on this node."""
        return self._context.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self._context.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._context.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its node."""
        return self._context.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._context.is_last_process

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here."""
        comm.wait_for_everyone(self._context)

    @contextmanager
    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> Generator[T, None, None]:
        """Yield this rank's part; see :func:`accelfn.split_between_processes`."""
        yield comm.split_between_processes(self._context, inputs, apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process go first."""
        return comm.main_process_first(self._context)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each node go first."""
        return comm.local_main_process_first(self._context)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run a function on the main process only."""
        return _decorated(comm.on_main_process(self._context), function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run a function on the first process of each node only."""
        return _decorated(comm.on_local_main_process(self._context), function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Run a function on the last rank only."""
        return comm.on_last_process(self._context)(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Any:
        """Run a function on one rank only."""
        return _decorated(comm.on_process(self._context, process_index), function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int = 0
    ) -> Any:
        """Run a function on one rank of each node only."""
        return _decorated(comm.on_local_process(self._context, local_process_index), function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node."""
        comm.print_once(self._context, *args, **kwargs)

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


def _decorated(decorate: Callable[[Any], Any], function: Callable[..., Any] | None) -> Any:
    return decorate if function is None else decorate(function)


class AcceleratorState(PartialState):
    """The processes and the options of the current Accelerator.

    Raises:
        ValueError: There is no Accelerator yet.
    """

    __module__ = "accelerate.state"
    _shared_state: ClassVar[Mapping[str, Any]] = SharedState((*_PROCESSES, *_OPTIONS))

    def __init__(self, *args: Any, _from_accelerator: bool = False, **kwargs: Any) -> None:
        """Show the current Accelerator's options."""
        if current().options is None and not _from_accelerator:
            raise ConfigurationError(
                "AcceleratorState shows the options of an Accelerator, and there is none. Make an "
                "Accelerator first, or use PartialState."
            )
        del args, kwargs

    @property
    def _context(self) -> Context:
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
        return current().options is not None

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self._context.mixed_precision

    @property
    def deepspeed_plugin(self) -> Any:
        """The program's plugin; None without one."""
        return self._plugin("deepspeed_plugin")

    @property
    def fsdp_plugin(self) -> Any:
        """The program's plugin; None without one."""
        return self._plugin("fsdp_plugin")

    @property
    def megatron_lm_plugin(self) -> Any:
        """The program's plugin; None without one."""
        return self._plugin("megatron_lm_plugin")

    @property
    def parallelism_config(self) -> Any:
        """The program's sizes of the mesh; None without one."""
        return self._plugin("parallelism_config")

    @property
    def dynamo_plugin(self) -> Any:
        """Options of torch.compile."""
        return self._plugin("dynamo_plugin") or self._context.strategy.dynamo

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 shards models."""
        return self._context.strategy.fsdp is not None

    @property
    def device_mesh(self) -> Any:
        """Torch's mesh; None without one."""
        accelerator = current().accelerator
        return None if accelerator is None else accelerator.torch_device_mesh

    @property
    def deepspeed_plugins(self) -> Mapping[str, Any] | None:
        """The program's plugins by name; None without one."""
        plugins = self._plugin("deepspeed_plugin")
        is_named = plugins is None or isinstance(plugins, Mapping)
        return cast("Any", plugins) if is_named else {"default": plugins}

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return one of several plugins by name."""
        return self._context.strategy.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make a plugin the active one."""
        accelerator = current().accelerator
        if accelerator is not None:
            accelerator.select_deepspeed_plugin(name)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"

    def _plugin(self, name: str) -> Any:
        accelerator, options = current().accelerator, current().options
        holder = options if accelerator is None else accelerator
        return None if holder is None else holder.given.get(name)


class GradientState:
    """Where the current Accelerator is in its data and in its window.

    Args:
        gradient_accumulation_plugin: Not used: the Accelerator has it.
        accelerator: Whose state; the current one by default.
    """

    __module__ = "accelerate.state"
    _shared_state: ClassVar[Mapping[str, Any]] = SharedState(_WINDOW)
    __dict__ = property(_held)  # pyright: ignore[reportAssignmentType]
    _of: Accelerator | None = None

    def __init__(
        self, gradient_accumulation_plugin: Any = None, *, accelerator: Accelerator | None = None
    ) -> None:
        """Show the state of an Accelerator."""
        del gradient_accumulation_plugin
        self._of = accelerator

    @property
    def _accelerator(self) -> Accelerator | None:
        return current().accelerator if self._of is None else self._of

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: the state is the Accelerator's."""

    @property
    def initialized(self) -> bool:
        """Whether there is an Accelerator."""
        return self._accelerator is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch closes its window."""
        accelerator = self._accelerator
        return True if accelerator is None else accelerator.sync_gradients

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        accelerator = self._accelerator
        if accelerator is not None:
            accelerator.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Batches in a full window."""
        accelerator = self._accelerator
        return 1 if accelerator is None else accelerator.gradient_accumulation_steps

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The options of accumulation."""
        accelerator = self._accelerator
        return {} if accelerator is None else accelerator.context.accumulation.to_dict()

    @property
    def adjust_scheduler(self) -> bool:
        """False: a scheduler steps where its optimizer does."""
        return False

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader closes its window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: gradients on XLA's devices are averaged by its engine."""
        return False

    @property
    def active_dataloader(self) -> DataLoaderShard[Any] | None:
        """The innermost loader in a loop; None outside of loops."""
        return current().loops[-1] if current().loops else None

    @property
    def dataloader_references(self) -> list[DataLoaderShard[Any] | None]:
        """The loaders in loops, outermost first, after None."""
        return [None, *current().loops]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loop over a prepared loader is running."""
        return bool(current().loops)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Rows in the last step of the loader; -1 if that is unknown."""
        active = self.active_dataloader
        return -1 if active is None else active.remainder

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
