"""The handle of a prepared model: reduces its gradients, and knows whether they are reduced."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.comm import Call
from accelfn.context import Context

L = TypeVar("L")

# Attribute of a prepared model: its handle. A plain attribute, so it is in no state dict.
HANDLE = "_accelfn_handle"

# Attribute of a parameter: the handles of the models that it is trained in.
HANDLES = "_accelfn_handles"

BY_HAND = (
    "no backward pass computed them, so they were set by hand. Call backward on a loss of the prepared "
    "model; if you average gradients yourself, call step() of the torch optimizer"
)
IN_NO_SYNC = (
    "the latest backward pass added to them under no_sync or in an open window, and no later one averaged "
    "them. End the window with a backward pass through the same model, outside of no_sync (where its last "
    "batch uses another model, add 0 * model(x).sum() to the loss); for steps on each rank's own gradients, "
    "call optimizer_step inside of no_sync"
)


class Communication(NamedTuple):
    """What a forward pass, and the backward pass after it, communicate between ranks.

    Attributes:
        gradients: Whether the backward pass reduces gradients, or sums them between parts of a layer.
        buffers: Whether the forward pass begins with a broadcast of buffers.
        parameters: Whether units gather their parameters.
        at_once: Whether this rank waits for others as soon as the forward pass begins.
    """

    gradients: bool = False
    buffers: bool = False
    parameters: bool = False
    at_once: bool = False

    def __str__(self) -> str:
        """Return the part that must be equal on all ranks."""
        sharded = " parameters=True" if self.parameters else ""
        return f"gradients={self.gradients} buffers={self.buffers}{sharded}"


class Gathering(NamedTuple):
    """What a forward pass has gathered.

    Attributes:
        call: Equal on all ranks.
        is_new: Whether the forward pass before gathered something else.
    """

    call: Call
    is_new: bool


class BatchRun(NamedTuple, Generic[L]):
    """One batch, and the functions that compute its loss and gradients.

    Attributes:
        loss_fn: ``loss_fn(model, batch)`` returns the loss of a batch, or of a part of it.
        model: The first argument of ``loss_fn``.
        batch: This rank's batch.
        to_differentiate: Returns the tensor to differentiate, from the loss of one of a number of equal parts
            of the batch, and that number.
        differentiate: Adds the gradients of that tensor to the parameters' own.
        join: Returns the loss of a batch from the losses of its equal parts.
        num_batches: Size of the batch, in batches of the usual size.
    """

    loss_fn: Callable[[Any, Any], L]
    model: Any
    batch: Any
    to_differentiate: Callable[[L, int], torch.Tensor]
    differentiate: Callable[[torch.Tensor], None]
    join: Callable[[Sequence[L]], L]
    num_batches: int = 1

    def run(self) -> L:
        """Run the forward and backward pass of the complete batch; return the loss."""
        loss = self.loss_fn(self.model, self.batch)
        self.differentiate(self.to_differentiate(loss, 1))
        return loss


class Buffers(Protocol):
    """What keeps buffers equal that forward passes change, for a handle."""

    is_announced: bool  # by the agreement on a forward pass

    def is_due(self) -> bool:
        """Return whether the next forward pass sends buffers."""
        ...

    def send(self) -> None:
        """Overwrite the buffers of all ranks by those of rank 0."""


class Handle(ABC):
    """The handle of a prepared model; one subclass for each engine that reduces gradients."""

    has_whole_parameters: ClassVar[bool] = True  # and so equal ones on all ranks
    holds_gradients: ClassVar[bool] = False  # outside of .grad, until they are reduced
    averages_at_once: ClassVar[bool] = False  # each gradient, as soon as it is computed
    splits_batches: ClassVar[bool] = False  # into microbatches, so a window can be one batch
    is_local = False  # inside of `local_steps`
    is_joined = False  # inside of `joined`
    is_in_window = False  # whether `accumulate` has turned averaging off last, rather than the program
    is_shared = False  # whether a parameter is in another prepared model too
    buffers: Buffers | None = None  # where forward passes may change buffers
    _syncs = True  # outside of `without_sync`

    def __init__(
        self, model: nn.Module, parameters: Iterable[torch.Tensor], *, instead_of: Handle | None = None
    ) -> None:
        """Attach to ``model`` and its ``parameters``, replacing the handle ``instead_of``."""
        self._model = weakref.ref(model)
        register(self, parameters, instead_of=instead_of)
        setattr(model, HANDLE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """Attach to the copy of the model, whose gradients are reduced too."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        model = copy.deepcopy(self._model(), memo)
        vars(twin).update(vars(self), _model=weakref.ref(cast("nn.Module", model)), buffers=None)
        watched = copy.deepcopy(self._watched(), memo)
        register(twin, watched.values())
        twin._watch(watched)  # copies of parameters come without hooks
        return twin

    def __reduce__(self) -> tuple[Callable[..., Handle], tuple[type[Handle]]]:
        """Pickle without the world: a loaded model belongs to none until it is prepared."""
        return _dead, (type(self),)

    def _watched(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters that are reduced, by name."""
        return dict(cast("nn.Module", self._model()).named_parameters())

    def _watch(self, parameters: Mapping[str, torch.Tensor]) -> None:  # noqa: B027 -- some have no hooks
        """Hook the parameters that are reduced."""

    def hold(self, hooks: Sequence[RemovableHandle]) -> None:
        """Remove hooks when the model is gone: a wrapper may be, while what is inside is prepared again."""
        weakref.finalize(self._model(), _remove, hooks).atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether the model still exists; False for a handle from a pickle."""
        return self._model() is not None

    @abstractmethod
    def why_unreduced(self) -> str | None:
        """Return why the current gradients are only this rank's own; None where they are averaged."""

    def without_sync(self) -> AbstractContextManager[None]:
        """Return a context manager in which backward passes don't average gradients."""
        return self._syncing(False)

    def trigger_sync(self) -> AbstractContextManager[None]:
        """Return a context manager in which backward passes average, even after forwards under no_sync."""
        return self._syncing(True)

    @contextmanager
    def _syncing(self, syncs: bool) -> Generator[None, None, None]:
        before = self._syncs
        self._set_syncs(syncs)
        try:
            yield
        finally:
            self._set_syncs(before)

    def _set_syncs(self, syncs: bool) -> None:
        self._syncs = syncs

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass communicate."""
        return Communication()

    def gathering(self) -> Gathering | None:
        """Return what the latest forward pass gathered, which ranks must do alike; None for nothing."""
        return None

    def compute_method(self, method: Callable[..., L], *args: Any, **kwargs: Any) -> L:
        """Call a method of the model in place of a forward pass."""
        if self.buffers is not None and self.buffers.is_due():
            self.buffers.send()
        return method(*args, **kwargs)

    def run(self, batch: BatchRun[L]) -> L:
        """Compute the loss of a batch and its gradients, in the engine's order; return the loss."""
        return batch.run()

    def reduce(self) -> None:  # noqa: B027 -- most reduce in the backward pass
        """Average gradients accumulated under :meth:`without_sync`, without a backward pass."""

    def discard(self) -> None:  # noqa: B027 -- most hold none
        """Drop gradients that are held outside of ``.grad``."""

    def scale_held(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:  # noqa: B027
        """Multiply those of ``parameters`` that are held outside of ``.grad``, before their ``.grad``."""


class LocalHandle(Handle):
    """The handle of a model whose gradients need no reduction, since all ranks have the same data.

    Its forward pass communicates all the same: each rank has a part of the layers.
    """

    has_whole_parameters: ClassVar[bool] = False

    def __init__(self, model: nn.Module) -> None:
        """Attach to ``model``."""
        super().__init__(model, model.parameters())

    def why_unreduced(self) -> str | None:
        """Return None: there is nothing to average."""
        return None

    def communicates(self) -> Communication:
        """Return that layers wait for other ranks' parts, in both passes."""
        return Communication(gradients=torch.is_grad_enabled(), parameters=True, at_once=True)


def _dead(kind: type[Handle]) -> Handle:
    """Return a handle without a model."""
    handle = object.__new__(kind)
    vars(handle)["_model"] = weakref.ref(nn.Module())  # dead at once
    return handle


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of a prepared model, which may be compiled; None without one."""
    return vars(uncompiled(model)).get(HANDLE)


def has_engine(model: nn.Module) -> bool:
    """Return whether a model, which may be compiled, has an engine for its gradients."""
    handle = handle_of(model)
    return handle is not None and handle.is_alive


def is_replicated(model: nn.Module) -> bool:
    """Return whether a model, which may be compiled, is replicated: complete and equal on all ranks."""
    handle = handle_of(model)
    return handle is not None and handle.is_alive and handle.has_whole_parameters


def handles_of(parameter: torch.Tensor) -> tuple[Handle, ...]:
    """Return the handles of the models that a parameter is trained in."""
    return tuple(handle for handle in vars(parameter).get(HANDLES, ()) if handle.is_alive)


def is_kept_equal(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is of a model that is replicated: complete and equal on all ranks."""
    return any(handle.is_alive and handle.has_whole_parameters for handle in vars(parameter).get(HANDLES, ()))


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside of ``torch.compile(model)``, or the model itself."""
    modules: dict[str, nn.Module] = vars(model).get("_modules", {})
    return modules.get("_orig_mod", model)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def register(handle: Handle, parameters: Iterable[torch.Tensor], *, instead_of: Handle | None = None) -> None:
    """Store a handle on its parameters, and mark handles that have parameters in common as shared."""
    alone = (handle,)
    for parameter in parameters:
        known: tuple[Handle, ...] = vars(parameter).get(HANDLES, ())
        before = tuple(other for other in known if other.is_alive and other is not instead_of)
        setattr(parameter, HANDLES, (*before, handle) if before else alone)
        for other in before:
            other.is_shared = handle.is_shared = True


@contextmanager
def swapped(name: str, value: object, owners: Iterable[object]) -> Generator[None, None, None]:
    """Set an attribute of objects inside, and restore it afterwards. One may be named several times."""
    states = [*{id(owner): vars(owner) for owner in owners}.values()]
    before = [{name: state[name]} if name in state else {} for state in states]
    for state in states:
        state[name] = value
    try:
        yield
    finally:
        for state, old in zip(states, before, strict=True):
            del state[name]
            state.update(old)


def raise_explained(error: Exception, translate_error: Callable[[Exception], Exception]) -> NoReturn:
    """Raise the error that names a lost rank, where torch waited inside; else the error itself."""
    explained = translate_error(error)
    if explained is error:
        raise error
    raise explained from (explained.__cause__ or error)


@contextmanager
def naming_lost_ranks(ctx: Context) -> Generator[None, None, None]:
    """Translate errors of torch inside as :func:`raise_explained` does."""
    try:
        yield
    except RuntimeError as error:
        raise_explained(error, ctx.collectives.translate_error)


def local_steps(*models: nn.Module) -> AbstractContextManager[None]:
    """Allow steps on each rank's own gradients inside, for local SGD."""
    return swapped("is_local", True, [handle for handle in map(handle_of, models) if handle is not None])


def joined(*models: nn.Module) -> AbstractContextManager[None]:
    """Allow different numbers of forward passes and steps per rank inside, which torch's Join evens out."""
    return swapped("is_joined", True, [handle for handle in map(handle_of, models) if handle is not None])


@contextmanager
def syncing(syncs: bool, *models: nn.Module, is_in_window: bool = False) -> Generator[None, None, None]:
    """Turn averaging of gradients on or off in the backward passes of ``models`` inside.

    Turned on, it includes gradients of forward passes under no_sync and gradients accumulated before. Models
    without a handle are ignored.

    Ranks: all in the same way; doesn't communicate by itself.

    Raises:
        ConfigurationError: DistributedDataParallel has a static graph, which needs a forward pass that is
            going to be averaged.
    """
    with ExitStack() as stack:
        for handle in map(handle_of, models):
            if handle is not None:
                handle.is_in_window = is_in_window
                stack.enter_context(handle.trigger_sync() if syncs else handle.without_sync())
        yield
