"""What training and checkpoints need of an engine that owns gradients, optimizer and step of a model.

An adapter of such an engine (DeepSpeed, Megatron-LM) has three classes: a :class:`EngineHandle` on the
model, an :class:`EngineOptimizer` in place of the user's optimizer, and for checkpoints an
:class:`EngineState`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import optree
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.handle import HANDLE, Handle, handle_of, handles_of
from accelfn.parallel.optimizers import OptimizerProxy

# Attribute of an optimizer that an engine has replaced.
REPLACED = "_accelfn_replaced"


class EngineStep(NamedTuple):
    """The result of an engine's step.

    Attributes:
        norm: Norm of the complete gradient before clipping, as the engine has it: reading a tensor would
            wait for the device. None if the engine doesn't compute it.
        overflowed: Whether a gradient was not finite, so that nothing was updated.
    """

    norm: torch.Tensor | float | None
    overflowed: bool


class EngineState(NamedTuple):
    """An engine's model and optimizer as plain torch objects, for checkpoints.

    Attributes:
        model: Has the engine's parameters under the names of the user's model; sharded ones are ``DTensor``.
            Or any object with a state, if only the same layout can load it.
        optimizer: An optimizer over these parameters, with the engine's state of each, or any such object;
            None for a model without one.
        write_back: Writes what was loaded into the two back into the engine. Every rank must call it.
    """

    model: object
    optimizer: object | None
    write_back: Callable[[], None]


class EngineHandle(Handle):
    """The handle of a model whose engine owns gradients from the backward pass to the step."""

    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True
    name: ClassVar[str] = "the engine"
    # The bound of the next step and the tensor that gets the norm; set by `clip_at_step`.
    _clipping: tuple[float, torch.Tensor] | None = None

    def why_unreduced(self) -> str | None:
        """Return that only the engine's optimizer steps them."""
        return f"{self.name} reduces them in the step of the optimizer that prepare returned. Use that one"

    def clip_at_step(self, max_norm: float, norm_type: float, device: torch.device) -> torch.Tensor:
        """Make the next step clip; return a tensor on ``device`` for the norm, NaN until then."""
        if norm_type != 2:
            raise NotAvailableError(
                f"clip_grad_norm_: {self.name} clips by the L2 norm alone, got norm_type={norm_type}."
            )
        norm = torch.full((), float("nan"), device=device)
        self._clipping = (max_norm, norm)
        return norm

    def take_clipping(self, max_norm: float | None) -> tuple[float | None, torch.Tensor | None]:
        """Return the bound of this step and the tensor for its norm, and forget them."""
        clipping, self._clipping = self._clipping, None
        if clipping is None:
            return max_norm, None
        return (clipping[0] if max_norm is None else min(max_norm, clipping[0])), clipping[1]

    def after_step_in_backward(self) -> None:
        """Free what the passes gathered, after an optimizer stepped shards inside of backward."""

    def close(self) -> None:
        """Free what the engine holds. The model can't be used any more."""

    def check_weights(self) -> None:
        """Refuse files of weights by themselves, if the state doesn't have the names of the user's model."""

    @abstractmethod
    def state(self) -> EngineState:
        """Return the model's and optimizer's state as plain objects.

        Ranks: every rank of the context.
        """


class EngineOptimizer(OptimizerProxy):
    """An optimizer that an engine owns: its step reduces, unscales, clips and applies gradients.

    Attributes:
        optimizer: The torch optimizer inside, with the groups that schedulers change.
        model_parameters: The model's parameters that it trains.
        handle: The handle of the model.
    """

    def __init__(
        self, optimizer: Optimizer, model_parameters: Iterable[torch.Tensor], handle: EngineHandle
    ) -> None:
        """Stand for ``optimizer``."""
        super().__init__(optimizer)
        self.model_parameters: tuple[torch.Tensor, ...] = tuple(model_parameters)
        self.handle = handle

    def step_engine(self, divisor: float, max_norm: float | None) -> EngineStep:
        """Reduce the gradients, divide them by ``divisor``, clip, and update the parameters.

        Gradients that aren't finite are not applied where the engine checks for them. Clears the gradients.

        Ranks: every rank of the context.
        """
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step on the gradients as they are; :func:`accelfn.optimizer_step` also divides them."""
        if closure is not None:
            raise NotAvailableError(f"step: {self.handle.name} can't step with a closure. Leave it out.")
        self.run_step(1.0, None)

    def run_step(self, divisor: float, max_norm: float | None) -> EngineStep:
        """Run :meth:`step_engine` with the bound that ``clip_grad_norm_`` has set, and report the norm."""
        bound, norm = self.handle.take_clipping(max_norm)
        result = self.step_engine(divisor, bound)
        if norm is not None and result.norm is not None:
            norm.copy_(torch.as_tensor(result.norm), non_blocking=True)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine's step clears the gradients that it holds."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class EngineScheduler(LRScheduler):
    """An engine's own scheduler, which the engine's step steps; ``step`` does nothing.

    Attributes:
        optimizer: Has the groups with learning rates.
        scheduler: The engine's.
    """

    def __init__(self, optimizer: Optimizer, scheduler: Any) -> None:
        """Stand for ``scheduler``."""
        # Not LRScheduler.__init__, which steps.
        self.optimizer = optimizer
        self.scheduler = scheduler

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: the engine's step steps it."""

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state of it."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the engine's state of it."""
        self.scheduler.load_state_dict(state_dict)


def owner_of_step(operation: str, parameters: Sequence[torch.Tensor]) -> EngineHandle | None:
    """Return the handle of the engine that steps the parameters; None if torch's optimizers step them.

    Raises:
        ConfigurationError: Only some of them belong to one engine.
    """
    owners = {
        next((handle for handle in handles_of(one) if isinstance(handle, EngineHandle)), None)
        for one in parameters
    }
    if len(owners) > 1:
        raise ConfigurationError(
            f"{operation}: got parameters of several models, of which an engine owns one. Clip the "
            "parameters of each model by themselves."
        )
    return owners.pop() if owners else None


def wraps_model(module: nn.Module) -> bool:
    """Return whether a module is an engine around a model, its ``module``."""
    handle = vars(module).get(HANDLE)
    return isinstance(handle, EngineHandle) and isinstance(getattr(module, "module", None), nn.Module)


def with_plain_objects(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Replace the objects of engines in a tree by plain ones, see :class:`EngineState`.

    Ranks: every rank of the context, if the tree has such objects.

    Returns:
        The tree, and a function that takes the tree after a state was loaded into it: it writes the plain
        objects back into their engines, and returns the tree with the engines' objects.

    Raises:
        TypeError: The tree contains itself.
    """
    states: dict[int, EngineState] = {}
    originals: dict[int, Any] = {}

    def plain(leaf: Any) -> Any:
        handle = _engine_of(leaf)
        if handle is None:
            return leaf
        if id(handle) not in states:
            states[id(handle)] = handle.state()
        state = states[id(handle)]
        found = state.model if isinstance(leaf, nn.Module) else state.optimizer
        originals[id(found)] = leaf
        return found

    def write_back(loaded: Any) -> Any:
        for state in states.values():
            state.write_back()
        return optree.tree_map(original, loaded)

    def original(leaf: Any) -> Any:
        return originals.get(id(leaf), leaf)

    try:
        leaves = optree.tree_leaves(tree)
    except RecursionError:
        raise TypeError(
            "the tree has a container that contains itself, or nests too deep. Take the reference to itself "
            "out of it, or give the container's class a state_dict."
        ) from None
    if all(_engine_of(leaf) is None for leaf in leaves):
        return tree, lambda loaded: loaded
    return optree.tree_map(plain, tree), write_back


def with_plain_weights(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Replace an engine's model as :func:`with_plain_objects` does, for files of weights.

    Ranks: every rank of the context, if it is an engine's.

    Raises:
        NotAvailableError: Its weights don't have the names of the user's model.
    """
    handle = _engine_of(model)
    if handle is not None:
        handle.check_weights()
    return with_plain_objects(model)


def _engine_of(leaf: Any) -> EngineHandle | None:
    if isinstance(leaf, nn.Module):
        handle = handle_of(leaf)
        return handle if isinstance(handle, EngineHandle) else None
    for one in (leaf, vars(leaf).get("optimizer")) if isinstance(leaf, Optimizer) else ():
        if isinstance(one, EngineOptimizer):
            return one.handle
    return None
