"""What is known of the gradients of a prepared model: whether they were averaged since they last grew."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.tree import is_dtensor

__all__ = (
    "HANDLE",
    "IN_NO_SYNC",
    "DDPHandle",
    "Handle",
    "check_reduced",
    "handle_of",
    "is_kept_equal",
    "is_replicated",
    "local_steps",
    "register",
    "uncompiled",
)

# Where a prepared model keeps its handle; a plain attribute, so it is in no state dict.
HANDLE = "_accelfn_replica"

# Where a parameter keeps those of the models that it is trained in.
_HANDLES = "_accelfn_handles"

IN_NO_SYNC = (
    "the latest backward pass added to them under no_sync, and none after it has averaged them. End the "
    "window with a backward pass outside of no_sync; steps that ranks are to make by themselves stand inside "
    "of it"
)


class Handle(ABC):
    """Of one model that is kept equal on all ranks."""

    is_local = False  # inside of `local_steps`

    @property
    def is_alive(self) -> bool:
        """Whether anything averages the gradients of the model still."""
        return True

    @abstractmethod
    def why_unreduced(self) -> str | None:
        """Return why the gradients at hand are those of this rank alone; None where they are averaged."""


def handle_of(model: nn.Module) -> Handle | None:
    """Return the handle of a model that this rank keeps equal with others, also of a compiled one."""
    return vars(uncompiled(model)).get(HANDLE)


def is_replicated(model: nn.Module) -> bool:
    """Whether a model, which may be compiled, is kept equal on all ranks."""
    handle = handle_of(model)
    return handle is not None and handle.is_alive


def is_kept_equal(parameter: torch.Tensor) -> bool:
    """Whether a parameter is of a model that is kept equal on all ranks."""
    return any(one.is_alive for one in vars(parameter).get(_HANDLES, ()))


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside of what ``torch.compile`` has made of it."""
    return cast("nn.Module", vars(model).get("_modules", {}).get("_orig_mod", model))


def register(handle: Handle, parameters: Iterable[torch.Tensor]) -> bool:
    """Let parameters know the handle of their model. Returns whether one is in another model too."""
    alone, is_shared = (handle,), False
    for parameter in parameters:
        before = tuple(one for one in vars(parameter).get(_HANDLES, ()) if one.is_alive)
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
        self._unreduced: str | None = None
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
        """Return why the gradients at hand are those of this rank alone; None where they are averaged."""
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
    """Return what torch says of a reduction that has begun and not ended; None where there is none."""
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
        if parameter.grad is None:
            continue
        handles: tuple[Handle, ...] = vars(parameter).get(_HANDLES, ())
        if handles and handles is checked:  # the same for nearly all
            continue
        checked = handles
        alive = [one for one in handles if one.is_alive]
        if any(one.is_local for one in alive):
            continue
        reasons = [one.why_unreduced() for one in alive]
        if alive and None not in reasons:
            raise ConfigurationError(
                f"{operation}: the gradients at hand were not averaged over the {ctx.num_processes} ranks, "
                f"whose models would drift apart: {reasons[0]}."
            )
        if not alive and not is_dtensor(parameter.grad):
            raise ConfigurationError(
                f"{operation}: nobody averages the gradient of a parameter of shape {tuple(parameter.shape)} "
                f"over the {ctx.num_processes} ranks, whose models would drift apart. Prepare its model, "
                "without evaluation_mode and after everything that adds or unfreezes parameters, and keep "
                "what prepare gives back. If you reduce gradients yourself, call the step() of the torch "
                "optimizer."
            )
