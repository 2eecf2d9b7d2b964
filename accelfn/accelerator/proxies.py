"""The optimizers, schedulers and loaders that ``Accelerator.prepare`` returns: they follow the window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import Self

import accelfn.training as training
from accelfn.accelerator.registry import WeakRegistry
from accelfn.context import Context
from accelfn.data import MicroBatch, PreparedDataLoader, Uneven, microbatches
from accelfn.data.passes import Passes
from accelfn.parallel.optimizers import OptimizerProxy

T = TypeVar("T")


class AcceleratorLike(Protocol):
    """What these objects ask of their Accelerator, which makes them."""

    context: Context
    uneven: Uneven
    optimizers: WeakRegistry[Optimizer]
    loaders: WeakRegistry[Any]
    loops: dict[object, MicroBatch]
    ended: list[MicroBatch]
    last_micro: MicroBatch | None
    window: MicroBatch | None
    sync_gradients: bool

    @property
    def compat(self) -> str | None:
        """Whose arithmetic it has."""
        ...

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step a prepared optimizer if the window closes."""

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the latest step of a prepared optimizer was skipped."""
        ...

    def scheduler_steps(self, scheduler: LRScheduler) -> int:
        """Return how often a scheduler steps for one step of its optimizer."""
        ...


class AcceleratedOptimizer(OptimizerProxy):
    """An optimizer whose ``step`` and ``zero_grad`` act only where an accumulation window closes.

    After a loop that was left within a window they act too: ``zero_grad`` drops what was accumulated.
    """

    def __init__(self, accelerator: AcceleratorLike, optimizer: Optimizer) -> None:
        """Use ``Accelerator.prepare`` instead."""
        super().__init__(optimizer)
        self._accelerator = accelerator

    def belongs_to(self, accelerator: AcceleratorLike) -> bool:
        """Return whether ``accelerator`` prepared it."""
        return self._accelerator is accelerator

    @property
    def step_was_skipped(self) -> bool:
        """Whether the latest step was skipped because a float16 gradient overflowed."""
        return self._accelerator.step_was_skipped(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step where the window closes, and return what the optimizer returns; elsewhere do nothing."""
        return self._accelerator.step_optimizer(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients where the window closes; elsewhere do nothing."""
        if self._accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def train(self) -> None:
        """Put a schedule-free optimizer into training mode; does nothing for others."""
        self._call_if_present("train")

    def eval(self) -> None:
        """Put a schedule-free optimizer into evaluation mode; does nothing for others."""
        self._call_if_present("eval")

    def _call_if_present(self, name: str) -> None:
        method = getattr(self.optimizer, name, None)
        if callable(method):
            method()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_accelerator"):  # copy and pickle look them up before they are set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not Optimizer's, which would wrap this class's step with profiling hooks, for all proxies.
        self.__dict__.update(state)
        self._accelerator.optimizers.add(self.optimizer)  # a copied accelerator has none yet


class AcceleratedScheduler:
    """A learning rate scheduler that steps once with each real step of its optimizer.

    With Accelerate's arithmetic it steps once for each rank. Other attributes are the scheduler's.
    """

    def __init__(self, accelerator: AcceleratorLike, scheduler: LRScheduler) -> None:
        """Use ``Accelerator.prepare`` instead."""
        self.scheduler = scheduler
        self._accelerator = accelerator

    def belongs_to(self, accelerator: AcceleratorLike) -> bool:
        """Return whether ``accelerator`` prepared it."""
        return self._accelerator is accelerator

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once, unless the optimizer didn't step.

        With ``ReduceLROnPlateau`` every rank must call it: its metric is averaged over them.
        """
        accelerator = self._accelerator
        if accelerator.context.step_scheduler_with_optimizer:
            if not accelerator.sync_gradients or accelerator.step_was_skipped(self.scheduler.optimizer):
                return
            for _ in range(accelerator.scheduler_steps(self.scheduler)):
                self._step(*args, **kwargs)
        else:
            self._step(*args, **kwargs)

    def _step(self, *args: Any, **kwargs: Any) -> None:
        metric = args[0] if args else kwargs.get("metrics")
        if isinstance(self.scheduler, ReduceLROnPlateau) and metric is not None:
            training.scheduler_step(self._accelerator.context, self.scheduler, metric=metric)
        else:
            cast("Any", self.scheduler).step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "_accelerator"):  # copy and pickle look them up before they are set
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class AccumulateBlock:
    """The context manager of ``Accelerator.accumulate``, entered for each batch.

    A class, since a generator would be slower.
    """

    __slots__ = ("_accelerator", "_before", "_inner", "_micro")

    def __init__(
        self, accelerator: AcceleratorLike, micro: MicroBatch, inner: AbstractContextManager[None]
    ) -> None:
        """Use ``Accelerator.accumulate`` instead."""
        self._accelerator = accelerator
        self._micro = micro
        self._inner = inner
        self._before: MicroBatch | None = None

    def __enter__(self) -> None:
        accelerator, micro = self._accelerator, self._micro
        self._before, accelerator.window = accelerator.window, micro
        accelerator.sync_gradients = micro.sync
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._accelerator.window = self._before
        return self._inner.__exit__(kind, error, trace)


class AcceleratedDataLoader(PreparedDataLoader[T]):
    """A prepared loader that sets its accelerator's current batch."""

    _accelerator: AcceleratorLike

    def __init__(self, accelerator: AcceleratorLike, loader: PreparedDataLoader[T]) -> None:
        """Use ``Accelerator.prepare`` instead."""
        vars(self).update(vars(loader), _accelerator=accelerator)
        accelerator.loaders.add(self)

    def _twin(self, passes: Passes[Any]) -> Self:
        twin = super()._twin(passes)
        loaders = self._accelerator.loaders
        loaders.add(twin, loaders.name_of(self))
        return twin

    def __iter__(self) -> Iterator[T]:
        accelerator = self._accelerator
        loop = object()
        try:
            for batch, micro in microbatches(accelerator.context, self, accelerator.uneven):
                accelerator.ended.clear()
                accelerator.last_micro = accelerator.loops[loop] = micro
                yield batch
        finally:  # also after a break: a nested evaluation must not change the outer loop's batch
            if loop in accelerator.loops:
                accelerator.last_micro = accelerator.loops.pop(loop)
                accelerator.ended.append(accelerator.last_micro)
            if not accelerator.loops and accelerator.compat is None:  # Accelerate's stays in its window
                accelerator.sync_gradients = True


def is_loader_of(accelerator: AcceleratorLike, loader: object) -> bool:
    """Return whether ``accelerator`` prepared a loader."""
    return isinstance(loader, AcceleratedDataLoader) and loader._accelerator is accelerator  # pyright: ignore[reportPrivateUsage]


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer behind a proxy."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def unwrap(thing: Any) -> Any:
    """Return the optimizer or schedule behind a proxy; anything else is returned as it is."""
    if isinstance(thing, AcceleratedScheduler):
        return thing.scheduler
    return unwrap_optimizer(thing) if isinstance(thing, Optimizer) else thing
