"""The handle of a prepared model: what reduces its gradients, and whether it has since they last grew."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, Generic, Literal, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.parameters import repoint
from accelfn.tree import is_dtensor

L = TypeVar("L")

# Where a prepared model keeps its handle; a plain attribute, so it is in no state dict.
HANDLE = "_accelfn_replica"

# Where a parameter keeps those of the models that it is trained in.
_HANDLES = "_accelfn_handles"

BY_HAND = (
    "no backward pass has computed them, so they were set by hand. Call backward on a loss of the prepared "
    "model; if you average gradients yourself, call the step() of the torch optimizer"
)
IN_NO_SYNC = (
    "the latest backward pass added to them under no_sync, and none after it has averaged them. End the "
    "window with a backward pass outside of no_sync; steps that ranks are to make by themselves stand inside "
    "of it"
)


# Where an optimizer keeps how many parameters of each group were found to be those of prepared models.
_SETTLED = "_accelfn_settled"


class Communication(NamedTuple):
    """What a forward pass, and the backward pass after it, send between ranks.

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
        """Return what ranks must have in common, and can compare."""
        sharded = " parameters=True" if self.parameters else ""
        return f"gradients={self.gradients} buffers={self.buffers}{sharded}"


class BatchRun(NamedTuple, Generic[L]):
    """One batch, and what its loss and its gradients are computed by.

    Attributes:
        loss_fn: ``loss_fn(model, batch)`` gives a loss; of a part of the batch, that of the part.
        model: What it is called with.
        batch: This rank's.
        to_differentiate: Gives what is differentiated of the loss of one of so many equal parts of the batch.
        differentiate: Adds the gradients of that to the parameters' own.
        join: Gives the loss of a batch, of those of its equal parts.
        num_batches: How many batches of the usual size it is as large as.
    """

    loss_fn: Callable[[Any, Any], L]
    model: Any
    batch: Any
    to_differentiate: Callable[[L, int], torch.Tensor]
    differentiate: Callable[[torch.Tensor], None]
    join: Callable[[Sequence[L]], L]
    num_batches: int = 1

    def run(self) -> L:
        """Run the forward pass of the whole batch, and then its backward pass. Returns the loss."""
        loss = self.loss_fn(self.model, self.batch)
        self.differentiate(self.to_differentiate(loss, 1))
        return loss


class Handle(ABC):
    """What the rest of the library asks of a prepared model: one for each engine that reduces gradients."""

    engine: ClassVar[Literal["none", "ddp", "shard", "pipeline"]] = "ddp"
    averaged_over: ClassVar[tuple[str, ...]] = ("dp_replicate", "dp_shard", "cp", "sp")
    has_whole_parameters: ClassVar[bool] = True  # and so equal ones on all ranks
    holds_gradients: ClassVar[bool] = False  # elsewhere than in .grad, as long as they aren't reduced
    cuts_batches: ClassVar[bool] = False  # into microbatches, so that a whole window can be one of them
    is_local = False  # inside of `local_steps`
    is_joined = False  # inside of `joined`
    is_shared = False  # whether a parameter is in another prepared model too
    _syncs = True  # outside of `without_sync`

    def __init__(
        self, model: nn.Module, parameters: Iterable[torch.Tensor], *, instead_of: Handle | None = None
    ) -> None:
        """Belong to ``model``, whose ``parameters`` know it in the place of ``instead_of``."""
        self._model = weakref.ref(model)
        register(self, parameters, instead_of=instead_of)
        setattr(model, HANDLE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """Belong to the copy of the model, whose gradients are reduced too."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        model = copy.deepcopy(self._model(), memo)
        vars(twin).update(vars(self), _model=weakref.ref(cast("nn.Module", model)))
        watched = copy.deepcopy(self._watched(), memo)
        register(twin, watched.values())
        twin._watch(watched)  # copies of parameters come without hooks
        return twin

    def __reduce__(self) -> tuple[Callable[..., Handle], tuple[type[Handle]]]:
        """Pickle without the world: a model that is loaded belongs to none until it is prepared."""
        return _dead, (type(self),)

    def _watched(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters that are reduced, by name."""
        return dict(cast("nn.Module", self._model()).named_parameters())

    def _watch(self, parameters: Mapping[str, torch.Tensor]) -> None:  # noqa: B027 -- some have no hooks
        """Hook the parameters that are reduced."""

    @property
    def is_alive(self) -> bool:
        """Whether somebody holds the model still. That of one from a pickle has none."""
        return self._model() is not None

    @abstractmethod
    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""

    def without_sync(self) -> AbstractContextManager[None]:
        """Return a block whose backward passes leave the gradients of each rank unaveraged."""
        return self._syncing(False)

    def trigger_sync(self) -> AbstractContextManager[None]:
        """Return a block whose backward passes average, also what forward passes under no_sync lead to."""
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
        """Return what the next forward pass and its backward pass send."""
        return Communication()

    def run(self, batch: BatchRun[L]) -> L:
        """Compute the loss of a batch and its gradients, in the order that suits the engine."""
        return batch.run()

    def reduce(self) -> None:  # noqa: B027 -- most reduce in the backward pass
        """Average gradients that have added up under :meth:`without_sync`, with no backward pass to come."""

    def discard(self) -> None:  # noqa: B027 -- most hold none
        """Release gradients that are held elsewhere than in ``.grad``."""


class LocalHandle(Handle):
    """Of a model whose gradients are whole as they are, since all ranks have the same data.

    Its forward pass communicates all the same: each rank has a part of the layers.
    """

    engine: ClassVar[Literal["none", "ddp", "shard", "pipeline"]] = "none"
    averaged_over: ClassVar[tuple[str, ...]] = ()
    has_whole_parameters: ClassVar[bool] = False

    def __init__(self, model: nn.Module) -> None:
        """Let the parameters of ``model`` know."""
        super().__init__(model, model.parameters())

    def why_unreduced(self) -> str | None:
        """Return None: there is nothing to average."""
        return None

    def communicates(self) -> Communication:
        """Return that layers wait for their other parts, in both passes."""
        return Communication(gradients=torch.is_grad_enabled(), parameters=True, at_once=True)


def _dead(kind: type[Handle]) -> Handle:
    """Return a handle of no model."""
    handle = object.__new__(kind)
    vars(handle)["_model"] = weakref.ref(nn.Module())  # gone at once
    return handle


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of a model that this rank keeps equal with others, also of a compiled one."""
    return vars(uncompiled(model)).get(HANDLE)


def has_engine(model: nn.Module) -> bool:
    """Return whether the gradients of a model, which may be compiled, are averaged, or needn't be."""
    handle = handle_of(model)
    return handle is not None and handle.is_alive


def is_replicated(model: nn.Module) -> bool:
    """Return whether a model, which may be compiled, is replicated: whole and equal on all ranks."""
    handle = handle_of(model)
    return handle is not None and handle.is_alive and handle.has_whole_parameters


def is_kept_equal(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is of a model that is replicated: whole and equal on all ranks."""
    return any(one.is_alive and one.has_whole_parameters for one in vars(parameter).get(_HANDLES, ()))


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside of what ``torch.compile`` has made of it."""
    return cast("nn.Module", vars(model).get("_modules", {}).get("_orig_mod", model))


def register(handle: Handle, parameters: Iterable[torch.Tensor], *, instead_of: Handle | None = None) -> None:
    """Let parameters know the handle of their model, and handles whether they have one in common."""
    alone = (handle,)
    for parameter in parameters:
        known: tuple[Handle, ...] = vars(parameter).get(_HANDLES, ())
        before = tuple(one for one in known if one.is_alive and one is not instead_of)
        setattr(parameter, _HANDLES, (*before, handle) if before else alone)
        for one in before:
            one.is_shared = handle.is_shared = True


@contextmanager
def swapped(name: str, value: object, owners: Iterable[object]) -> Generator[None, None, None]:
    """Let objects have another value of an attribute of their own inside, and then what they had before."""
    states = [vars(one) for one in owners]
    before = [{name: one[name]} if name in one else {} for one in states]
    for one in states:
        one[name] = value
    try:
        yield
    finally:
        for one, was in zip(states, before, strict=True):
            del one[name]
            one.update(was)


def raise_explained(error: Exception, translate_error: Callable[[Exception], Exception]) -> NoReturn:
    """Raise what is known of a lost rank, where torch waits inside and says less; else the error."""
    explained = translate_error(error)
    if explained is error:
        raise error
    raise explained from (explained.__cause__ or error)


@contextmanager
def naming_lost_ranks(ctx: Context) -> Generator[None, None, None]:
    """Raise errors of torch as :func:`raise_explained` does."""
    try:
        yield
    except RuntimeError as error:
        raise_explained(error, ctx.collectives.translate_error)


def local_steps(*models: nn.Module) -> AbstractContextManager[None]:
    """Let steps inside be on the gradients of each rank, as local SGD has them."""
    return swapped("is_local", True, [one for one in map(handle_of, models) if one is not None])


def joined(*models: nn.Module) -> AbstractContextManager[None]:
    """Let ranks make different numbers of forward passes and steps inside, which torch's Join evens out."""
    return swapped("is_joined", True, [one for one in map(handle_of, models) if one is not None])


@contextmanager
def syncing(syncs: bool, *models: nn.Module) -> Generator[None, None, None]:
    """Let backward passes inside average the gradients of ``models``, or leave them as each rank has them.

    Averaged are also what forward passes that were not to be averaged lead to, and what has added up before.
    Models that nobody averages are let through.

    Ranks: all in the same way; doesn't communicate by itself.

    Raises:
        ConfigurationError: DistributedDataParallel looks for unused parameters, or has a static graph: both
            take what they know from a forward pass that is going to be averaged.
    """
    with ExitStack() as stack:
        for one in map(handle_of, models):
            if one is not None:
                stack.enter_context(one.trigger_sync() if syncs else one.without_sync())
        yield


def check_reduced(operation: str, ctx: Context, parameters: Iterable[torch.Tensor]) -> bool:
    """Refuse gradients that are those of this rank alone. Only looks at attributes.

    Shards (``DTensor``) are let through: who shards by hand reduces by hand.

    Ranks: any; doesn't communicate.

    Returns:
        Whether all ranks have to step: there are several, and neither :func:`local_steps` nor :func:`joined`
        lets them differ.

    Raises:
        ConfigurationError: A gradient was not averaged over the ranks since it last grew, or nobody averages
            it.
    """
    if ctx.num_processes == 1:
        return False
    checked: object = None
    together = True
    for parameter in parameters:
        handles: tuple[Handle, ...] = vars(parameter).get(_HANDLES, ())
        if handles and handles is checked:  # the same for nearly all
            continue
        together = together and not any(one.is_local or one.is_joined for one in handles)
        if parameter.grad is None and not any(one.holds_gradients for one in handles):
            continue
        checked = handles
        alive = [one for one in handles if one.is_alive]
        if any(one.is_local and not one.holds_gradients for one in alive):
            continue
        reasons = [one.why_unreduced() for one in alive]
        if alive and None not in reasons:
            raise ConfigurationError(
                f"{operation}: the current gradients were not averaged over the {ctx.num_processes} ranks, "
                f"whose models would drift apart: {reasons[0]}."
            )
        if not alive and not is_dtensor(parameter.grad):
            raise ConfigurationError(
                f"{operation}: nobody averages the gradient of a parameter of shape {tuple(parameter.shape)} "
                f"over the {ctx.num_processes} ranks, whose models would drift apart. Prepare its model, "
                "without evaluation_mode and after everything that adds or unfreezes parameters, and keep "
                "what prepare returns. If you reduce gradients yourself, call the step() of the torch "
                "optimizer."
            )
    return together


def follow_optimizers(operation: str, ctx: Context, optimizers: Iterable[Optimizer]) -> None:
    """Point optimizers at the parameters of models that were prepared after them.

    Does so once: what an optimizer holds afterwards doesn't change any more.

    Ranks: any; doesn't communicate.

    Raises:
        ConfigurationError: No parameter of an optimizer is one of a prepared model.
    """
    if ctx.num_processes == 1 or ctx.reduction is not None:  # exact mode replaces no parameters
        return
    for optimizer in optimizers:
        groups = optimizer.param_groups
        sizes = tuple([len(group["params"]) for group in groups])
        if vars(optimizer).get(_SETTLED) == sizes:
            continue
        repoint(optimizer)
        parameters: list[torch.Tensor] = [one for group in groups for one in group["params"]]
        known = [_HANDLES in vars(one) for one in parameters]
        if all(known):
            setattr(optimizer, _SETTLED, tuple([len(group["params"]) for group in groups]))
        elif not any(known) and not any(is_dtensor(one) for one in parameters):
            raise ConfigurationError(
                f"{operation}: no parameter of the {type(optimizer).__name__} is one of a prepared model, so "
                f"nobody averages their gradients over the {ctx.num_processes} ranks. Prepare the model, and "
                "make the optimizer from its parameters."
            )
