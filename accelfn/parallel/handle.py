"""The handle of a prepared model: what reduces its gradients, and whether it has since they last grew."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.pointers import repoint
from accelfn.tree import is_dtensor

__all__ = (
    "BY_HAND",
    "HANDLE",
    "IN_NO_SYNC",
    "BatchRun",
    "Communication",
    "DDPHandle",
    "Handle",
    "LocalHandle",
    "check_reduced",
    "follow_optimizers",
    "handle_of",
    "has_engine",
    "is_kept_equal",
    "is_replicated",
    "local_steps",
    "register",
    "uncompiled",
)

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

    @property
    def is_alive(self) -> bool:
        """Whether anything averages the gradients of the model still."""
        return True

    @abstractmethod
    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""

    def without_sync(self) -> AbstractContextManager[None]:
        """Return a block whose backward passes leave the gradients of each rank unaveraged."""
        return nullcontext()

    def trigger_sync(self) -> AbstractContextManager[None]:
        """Return a block whose backward passes average, also what forward passes under no_sync lead to."""
        return nullcontext()

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
        self._model = weakref.ref(model)
        register(self, model.parameters())
        setattr(model, HANDLE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalHandle:
        """Belong to the copy of the model: its gradients are whole too."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        model = cast("nn.Module", self._model())
        twin._model = weakref.ref(copy.deepcopy(model, memo))
        register(twin, copy.deepcopy(list(model.parameters()), memo))
        return twin

    @property
    def is_alive(self) -> bool:
        """Whether somebody holds the model still."""
        return self._model() is not None

    def why_unreduced(self) -> str | None:
        """Return None: there is nothing to average."""
        return None

    def communicates(self) -> Communication:
        """Return that layers wait for their other parts, in both passes."""
        return Communication(gradients=torch.is_grad_enabled(), parameters=True, at_once=True)


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


def register(handle: Handle, parameters: Iterable[torch.Tensor], *, instead_of: Handle | None = None) -> bool:
    """Let parameters know the handle of their model. Returns whether one is in another model too."""
    alone, is_shared = (handle,), False
    for parameter in parameters:
        known: tuple[Handle, ...] = vars(parameter).get(_HANDLES, ())
        before = tuple(one for one in known if one.is_alive and one is not instead_of)
        is_shared = is_shared or bool(before)
        setattr(parameter, _HANDLES, (*before, handle) if before else alone)
        for one in before:
            if isinstance(one, DDPHandle):
                one.is_shared = True
    return is_shared


class DDPHandle(Handle):
    """Of a ``DistributedDataParallel``, whose gradients are averaged whatever computed the loss.

    Torch averages what a forward pass of the wrapper has announced. Where a backward pass was not announced
    (its loss came from another method, from a function over the inner model, or it is the second after one
    forward pass), the first parameter that gets a gradient announces it.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        """Watch the parameters that ``model`` averages."""
        ignored: set[str] = cast("Any", model).parameters_to_ignore
        module = cast("nn.Module", cast("Any", model).module)
        self._model = weakref.ref(model)
        self._watch(
            [one for name, one in module.named_parameters() if one.requires_grad and name not in ignored]
        )
        model.register_forward_hook(self.after_forward)
        setattr(model, HANDLE, self)

    def _watch(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [weakref.ref(one) for one in parameters]
        self._backward = -1  # torch's number of the latest one
        self._is_announced = False  # by a forward pass whose backward pass is to come
        self._unreduced: str | None = BY_HAND
        self.is_shared: bool = register(self, parameters)
        for one in parameters:
            cast("Any", one).register_post_accumulate_grad_hook(self._on_gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> DDPHandle:
        """Watch the copy of the model, which averages too."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        model = self._model()
        twin._model = weakref.ref(cast("Any", copy.deepcopy(model, memo)))
        found = [reference() for reference in self._parameters]
        twin._watch([copy.deepcopy(one, memo) for one in found if one is not None])
        twin._unreduced = self._unreduced  # gradients are copied with the parameters
        return twin

    def __reduce__(self) -> Any:
        """Leave no world in a pickle: prepare what is loaded from it."""
        return DDPHandle._of_nothing, ()

    @classmethod
    def _of_nothing(cls) -> DDPHandle:
        handle = object.__new__(cls)
        handle._model = weakref.ref(cast("Any", nn.Module()))  # gone at once
        handle._parameters = []
        return handle

    @property
    def is_alive(self) -> bool:
        """Whether somebody holds the wrapper still."""
        return self._model() is not None

    @contextmanager
    def without_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients on each rank in backward passes inside.

        Raises:
            ConfigurationError: DistributedDataParallel has a static graph.
        """
        ddp = cast("Any", self._model())
        if ddp.static_graph and torch.is_grad_enabled():
            raise ConfigurationError(
                "no_sync: torch 2.13 fails in a backward pass that is not averaged when static_graph=True. "
                "Use static_graph=False, or windows of one batch."
            )
        with ddp.no_sync():
            yield

    @contextmanager
    def trigger_sync(self) -> Generator[None, None, None]:
        """Average gradients in backward passes inside, with all that have added up before.

        Raises:
            ConfigurationError: DistributedDataParallel looks for unused parameters, or has a static graph.
        """
        ddp = cast("Any", self._model())
        if ddp.find_unused_parameters or ddp.static_graph:
            option = "static_graph" if ddp.static_graph else "find_unused_parameters"
            raise ConfigurationError(
                f"trigger_sync_in_backward: with {option} DistributedDataParallel must know in the forward "
                "pass that its gradients will be averaged. Run the last forward pass outside of no_sync."
            )
        before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True  # `_begin` does the rest
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass send."""
        ddp = cast("Any", self._model())
        buffers = bool(ddp.will_sync_module_buffers())
        # Torch may broadcast its order of gradients in the next forward pass: once, early on.
        may_rebuild = not ddp._has_rebuilt_buckets and (ddp.static_graph or not ddp.find_unused_parameters)
        gradients = bool(ddp.require_backward_grad_sync) and torch.is_grad_enabled()
        return Communication(gradients, buffers, at_once=buffers or may_rebuild)

    # Not torch.compiler.disable, which imports torch's compiler here and now.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    def after_forward(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Hook after a forward pass: torch expects its backward pass now, if it averages that one."""
        if torch.is_grad_enabled() and cast("Any", model).require_backward_grad_sync:
            self._is_announced = True

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Hook after a gradient was added to ``.grad``, and before torch's own that averages it."""
        del parameter
        number: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if number != self._backward:
            self._backward = number
            self._begin()

    def _begin(self) -> None:
        ddp = cast("Any", self._model())
        if ddp is None:
            return
        # With a static graph, checkpointed blocks have backward passes of their own inside of one.
        is_announced, self._is_announced = self._is_announced, self._is_announced and ddp.static_graph
        if not is_announced and not ddp.require_backward_grad_sync:
            self._unreduced = IN_NO_SYNC
        elif is_announced:
            self._unreduced = None
        elif ddp.find_unused_parameters or ddp.static_graph or self.is_shared:
            option = "static_graph" if ddp.static_graph else "find_unused_parameters"
            self._unreduced = (
                "the loss wasn't computed by a call of the prepared model, of which torch has to know with "
                + ("parameters in two prepared models" if self.is_shared else f"{option}=True")
                + ". Compute it in the model's forward, and call the prepared model"
            )
        else:
            self._unreduced = None
            if _unfinished(ddp) is None:  # else this is a backward pass inside of another
                if ddp.reducer._rebuild_buckets():  # once, as before a forward pass
                    ddp._has_rebuilt_buckets = True
                ddp.reducer.prepare_for_backward([])

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        ddp = cast("Any", self._model())
        if ddp is None or self._unreduced is not None:
            return self._unreduced
        if ddp.static_graph:
            self._is_announced = False
        unfinished = _unfinished(ddp)
        if unfinished is None:
            return None
        return (
            "not all parameters of the model got one in the latest backward pass, so torch has averaged "
            "none. Let the loss depend on all of them, freeze the others before prepare, or use "
            f"DistributedDataParallelKwargs(find_unused_parameters=True). Torch says: {unfinished}"
        )


def _unfinished(ddp: Any) -> str | None:
    """Return what torch says of a reduction that has started and not ended; None where there is none."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        return str(error)
    return None


@contextmanager
def local_steps(*models: nn.Module) -> Generator[None, None, None]:
    """Let steps inside be on the gradients of each rank, as local SGD has them."""
    handles = [one for one in map(handle_of, models) if one is not None]
    before = [one.is_local for one in handles]
    for one in handles:
        one.is_local = True
    try:
        yield
    finally:
        for one, was in zip(handles, before, strict=True):
            one.is_local = was


def check_reduced(operation: str, ctx: Context, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse gradients that are those of this rank alone. Only looks at attributes.

    Shards (``DTensor``) are let through: who shards by hand reduces by hand.

    Ranks: any; doesn't communicate.

    Raises:
        ConfigurationError: A gradient was not averaged over the ranks since it last grew, or nobody averages
            it.
    """
    if ctx.num_processes == 1:
        return
    checked: object = None
    for parameter in parameters:
        handles: tuple[Handle, ...] = vars(parameter).get(_HANDLES, ())
        if handles and handles is checked:  # the same for nearly all
            continue
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
