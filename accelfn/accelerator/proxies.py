"""What ``Accelerator.prepare`` returns for optimizers, schedulers and loaders: they follow the window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import Self

import accelfn.training as training
from accelfn.data import MicroBatch, PreparedDataLoader, microbatches
from accelfn.data.passes import Passes

if TYPE_CHECKING:
    from accelfn.accelerator.accelerator import Accelerator

T = TypeVar("T")

# Whose rows may still be gathered when other loops have followed.
_REMEMBERED_PASSES = 8


class AcceleratedOptimizer(Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` act only where an accumulation window closes."""

    def __init__(self, accelerator: Accelerator, optimizer: Optimizer) -> None:
        """Use ``Accelerator.prepare`` instead."""
        # Not Optimizer.__init__: the parameters have their groups and state already, in `optimizer`.
        self.optimizer = optimizer
        self._accelerator = accelerator

    def belongs_to(self, accelerator: Accelerator) -> bool:
        """Return whether ``accelerator`` prepared it."""
        return self._accelerator is accelerator

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride] -- shared, not owned
        """State of each parameter."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Groups of parameters and their options."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of groups that don't have their own."""
        return self.optimizer.defaults

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
        """Put a schedule-free optimizer into training mode; others have none."""
        self._tell("train")

    def eval(self) -> None:
        """Put a schedule-free optimizer into evaluation mode; others have none."""
        self._tell("eval")

    def _tell(self, what: str) -> None:
        method = getattr(self.optimizer, what, None)
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
        if name in ("optimizer", "_accelerator"):  # not set yet: copy and pickle look before __init__ has run
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not Optimizer's, which would put its profiling hooks around this class's step, for all proxies.
        self.__dict__.update(state)
        self._accelerator.optimizers.add(self.optimizer)  # a copied accelerator knows no optimizers yet


class AcceleratedScheduler:
    """A learning rate schedule that moves once for each step that its optimizer really makes.

    Where the accelerator was asked for Accelerate's arithmetic, it moves as many times as there are ranks.
    Attributes other than those below are passed through to the scheduler.
    """

    def __init__(self, accelerator: Accelerator, scheduler: LRScheduler) -> None:
        """Use ``Accelerator.prepare`` instead."""
        self.scheduler = scheduler
        self._accelerator = accelerator

    def belongs_to(self, accelerator: Accelerator) -> bool:
        """Return whether ``accelerator`` prepared it."""
        return self._accelerator is accelerator

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on by one, unless the optimizer did not step.

        Of ``ReduceLROnPlateau`` every rank calls it: its metric is averaged over them.
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
        if name in ("scheduler", "_accelerator"):  # not set yet: copy and pickle look before __init__ has run
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class AccumulateBlock:
    """The block of ``Accelerator.accumulate``: a ``with`` statement that each batch goes through.

    A class, since a generator would cost more.
    """

    __slots__ = ("_accelerator", "_before", "_inner", "_micro")

    def __init__(
        self, accelerator: Accelerator, micro: MicroBatch, inner: AbstractContextManager[None]
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


class Loop:
    """One loop over a prepared loader.

    Attributes:
        num_before: Passes that the accelerator remembered as it began.
    """

    __slots__ = ("num_before",)

    def __init__(self, num_before: int) -> None:
        """Begin with as many."""
        self.num_before: int = num_before


class AcceleratedDataLoader(PreparedDataLoader[T]):
    """A prepared loader that tells its accelerator which batch is being worked on."""

    _accelerator: Accelerator

    def __init__(self, accelerator: Accelerator, loader: PreparedDataLoader[T]) -> None:
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
        if not accelerator.loops:
            del accelerator.ended[:-_REMEMBERED_PASSES]
        loop = Loop(len(accelerator.ended))
        try:
            for batch, micro in microbatches(accelerator.context, self, accelerator.uneven):
                del accelerator.ended[loop.num_before :]
                accelerator.last_micro = accelerator.loops[loop] = micro
                yield batch
        finally:  # also after a break: an evaluation inside a loop must not change what that one sees
            if loop in accelerator.loops:
                accelerator.last_micro = accelerator.loops.pop(loop)
                accelerator.ended.append(accelerator.last_micro)


def is_loader_of(accelerator: Accelerator, loader: object) -> bool:
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
