"""Hooks of a module: code that runs before and after its forward, and may change its inputs and outputs.

They are run by torch's own forward hooks. ``forward`` itself isn't replaced, so its signature,
``torch.compile``, pickling and copying work as usual. The hook is stored in ``module._hf_hook``, where other
libraries look for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.block_hooks import CallStack, attach, moved, read_device, uncompiled
from accelfn.bigmodel.block_stream import caller_of_hook, is_within
from accelfn.bigmodel.dispatch import undispatch
from accelfn.parallel.forward import WrappedForward
from accelfn.weights.places import Place, PlaceLike, check_device, is_on, is_simulated

_ATTRIBUTE = "_hf_hook"


class ModelHook:
    """Code that runs around a module's forward. Subclasses override the methods that they need.

    One hook may be used by several modules and threads at once, so state between :meth:`pre_forward` and
    :meth:`post_forward` must be kept per call.

    Attributes:
        no_grad: Whether the module's forward runs without gradients. Read when the hook is added.
    """

    no_grad: bool = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare ``module`` when the hook is added to it.

        Returns:
            The module to attach the hook to, usually the same one.
        """
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before each forward.

        Returns:
            The positional and keyword arguments for forward.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after each forward that has returned.

        Returns:
            The output for the caller. None keeps ``output``, as with torch's own hooks.
        """
        return output

    def after_error(self, module: nn.Module) -> None:
        """Run instead of :meth:`post_forward` after an exception, which may be from ``pre_forward`` itself.

        Release here what ``pre_forward`` has acquired. The exception is propagated to the caller.
        """

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo what :meth:`init_hook` did, when the hook is removed or replaced."""
        return module


class SequentialHook(ModelHook):
    """Several nested hooks: they run in order before forward, and in reverse order after it.

    The forward runs without gradients if any hook has ``no_grad``.

    Args:
        hooks: The hooks. Sequences among them are flattened.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        members: list[ModelHook] = []
        for hook in hooks:
            members += members_of(_checked(hook, "SequentialHook"))
        self.hooks: tuple[ModelHook, ...] = tuple(members)
        self.no_grad: bool = any(hook.no_grad for hook in members)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Let each hook prepare ``module``, in order."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run each hook in order; each gets the arguments from the previous one."""
        for hook in self.hooks:
            args, kwargs = _before(hook, module, args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run each hook in reverse order."""
        return _after([*self.hooks], module, output)

    def after_error(self, module: nn.Module) -> None:
        """Notify each hook in reverse order."""
        _release([*self.hooks], module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Let each hook undo what it did, in reverse order."""
        for hook in reversed(self.hooks):
            module = hook.detach_hook(module)
        return module


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return the hook of ``module``, or None."""
    return cast("ModelHook | None", vars(module).get(_ATTRIBUTE))


def members_of(hook: ModelHook | None) -> tuple[ModelHook, ...]:
    """Return the hooks of a sequence, a single hook, or nothing for None, as a tuple."""
    return () if hook is None else hook.hooks if isinstance(hook, SequentialHook) else (hook,)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach ``hook`` to the forward of ``module``, in place.

    The hook runs whenever the module is called, but not if ``module.forward(...)`` is called directly, like
    all torch hooks. Its ``pre_forward`` runs before the module's existing pre-hooks, which see the arguments
    that it returns. Copies and pickles of the module include the hook, except for ``torch.fx`` graphs, which
    torch rebuilds without hooks.

    Args:
        module: Any module.
        hook: The hook.
        append: Run it inside the module's existing hook. Otherwise it replaces that one, which is detached.

    Returns:
        The module that ``hook.init_hook`` returned, usually ``module`` itself.

    Raises:
        TypeError: ``hook`` isn't a :class:`ModelHook`.

    >>> class Doubling(ModelHook):
    ...     def post_forward(self, module, output):
    ...         return 2 * output
    >>> module = add_hook_to_module(nn.Identity(), Doubling())
    >>> module(torch.ones(2))
    tensor([2., 2.])
    """
    _checked(hook, "add_hook_to_module")
    old = hook_of(module)
    if old is not None and not append:
        module = remove_hook_from_module(module)
        old = None
    module = hook.init_hook(module)
    # init_hook may have attached hooks to the module that it returns.
    combined = hook if old is None else SequentialHook(old, hook)
    vars(module)[_ATTRIBUTE] = combined
    if not _runners(module):
        _HookRunner(module)
    if combined.no_grad and not isinstance(vars(module).get("forward"), _WithoutGradient):
        vars(module)["forward"] = _WithoutGradient(module.forward)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of :func:`add_hook_to_module` from ``module``; without one, nothing happens.

    Args:
        module: Any module.
        recurse: Include all modules below it, and undo ``dispatch_model``, ``cpu_offload`` and
            ``disk_offload``.

    Returns:
        The module that the hook's ``detach_hook`` returned, usually ``module`` itself.
    """
    hook = hook_of(module)
    detached = module
    if hook is not None:
        # Removed before detach_hook, which may fail.
        del vars(module)[_ATTRIBUTE]
        for handle in (handle for runner in _runners(module) for handle in runner.handles):
            handle.remove()
        forward = vars(module).get("forward")
        if isinstance(forward, _WithoutGradient):
            del vars(module)["forward"]
            if forward.__wrapped__ != module.forward:  # an instance attribute before
                vars(module)["forward"] = forward.__wrapped__
        detached = hook.detach_hook(module)
    if recurse:
        undispatch(module)
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return detached


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of ``module`` and of all modules below it.

    ``dispatch_model``, ``cpu_offload`` and ``disk_offload`` are undone too; the weights stay where they are.
    """
    remove_hook_from_module(module, recurse=True)


class _Call(NamedTuple):
    """A running forward: its hooks that have started, the exception being handled around it, its frame."""

    started: list[ModelHook]
    handled: BaseException | None
    frame: FrameType


class _HookRunner:
    """Runs the current ``_hf_hook`` of a module as torch hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._calls: CallStack[_Call] = CallStack()
        # Kept, since unpickling a handle reserves its id, which torch could assign again otherwise.
        self.handles: tuple[RemovableHandle, ...] = attach(module, self)

    @uncompiled
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run ``pre_forward``."""
        calls = self._calls.values
        # torch runs no hooks after a KeyboardInterrupt, so interrupted calls are still recorded.
        while calls and not is_within(calls[-1].frame):
            _release(calls.pop().started, module)
        call = _Call([], sys.exc_info()[1], caller_of_hook())
        calls.append(call)
        for hook in members_of(hook_of(module)):
            call.started.append(hook)
            args, kwargs = _before(hook, module, args, kwargs)
        return (args, kwargs) if call.started else None

    @uncompiled
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Run ``post_forward``, or ``after_error`` if torch calls it after an exception."""
        call = self._calls.pop()
        if call is None:  # another pre-hook raised before ours was called
            return None
        # The caller may be in an except clause, so only another exception is from this forward.
        if sys.exc_info()[1] is call.handled:
            return _after(call.started, module, output)
        return _release(call.started, module)


class _WithoutGradient(WrappedForward):
    """A module's forward, without gradients.

    Not in the hooks, since torch runs none after a KeyboardInterrupt, and gradients would stay disabled.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.__wrapped__(*args, **kwargs)


def _before(
    hook: ModelHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    result: Any = hook.pre_forward(module, *args, **kwargs)
    try:
        new_args, new_kwargs = result
    except (TypeError, ValueError):
        new_args = new_kwargs = None
    if isinstance(new_args, (tuple, list)) and isinstance(new_kwargs, Mapping):
        return tuple(cast("list[Any]", new_args)), dict(cast("Mapping[str, Any]", new_kwargs))
    raise TypeError(
        f"{type(hook).__name__}.pre_forward must return (args, kwargs), a tuple and a dict; it returned "
        f"{type(result).__name__}. End it with `return args, kwargs`."
    )


def _after(started: list[ModelHook], module: nn.Module, output: Any) -> Any:
    """Run ``post_forward`` of hooks in reverse order."""
    try:
        while started:
            changed = started.pop().post_forward(module, output)
            output = output if changed is None else changed
    finally:  # if one fails, the remaining ones get after_error
        _release(started, module)
    return output


def _release(started: list[ModelHook], module: nn.Module) -> None:
    """Run ``after_error`` of hooks in reverse order, of each one even if others fail."""
    try:
        while started:
            started.pop().after_error(module)
    finally:
        if started:
            _release(started, module)


def _runners(module: nn.Module) -> list[_HookRunner]:
    hooks = cast("Mapping[int, Any]", vars(module)["_forward_pre_hooks"])
    owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
    return [owner for owner in owners if isinstance(owner, _HookRunner)]


def _checked(hook: object, what: str) -> ModelHook:
    if isinstance(hook, ModelHook):
        return hook
    advice = (
        "Pass an instance of the class." if isinstance(hook, type) else "Derive its class from ModelHook."
    )
    raise TypeError(f"{what}: hook must be a ModelHook, got {hook!r}. {advice}")


class CpuOffload(ModelHook):
    """Keeps a whole model in host memory until it runs, and on its device from then on.

    Parameters stay the same objects, so optimizers keep working, and gradients are moved along. Backward must
    run before the model is offloaded again, since autograd refers to the parameters on the device.

    Args:
        execution_device: Where the model runs: an index, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is
            simulated. None is the current accelerator, or the CPU.
        prev_module_hook: The hook of the model that ran before, which is offloaded before this one is moved.
            Copies and pickles of this hook include that model.

    Raises:
        ValueError: This machine has no such device.
    """

    def __init__(
        self,
        execution_device: PlaceLike | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self._place, device = read_device(execution_device)
        self.execution_device: torch.device = device
        self.prev_module_hook = prev_module_hook
        self._at: Place = "cpu"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the host."""
        self._move_to(module, "cpu")
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model, and move this one and its arguments to its device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        self._move_to(module, self._place)
        return moved(args, self.execution_device), moved(kwargs, self.execution_device)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is on its device."""
        return self._at == self._place

    def _move_to(self, module: nn.Module, place: Place) -> None:
        device = check_device(place)
        # Tensors on a simulated device are on the CPU, so the last place is recorded.
        may_be_there = not is_simulated(self._place) or self._at == place
        tensors = (*module.parameters(), *module.buffers())
        if not may_be_there or not all(is_on(tensor, device) for tensor in tensors):
            self.move(module, place)
        self._at = place

    def move(self, module: nn.Module, place: Place) -> None:
        """Move all parameters and buffers of a module to a place, with their gradients."""
        module.to(check_device(place))


class UserCpuOffloadHook:
    """A model and its :class:`CpuOffload`, with which the user offloads the model."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the host, unless it is there."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook. The model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: PlaceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep ``model`` in host memory until it runs; then move it to its device, where it stays.

    For several models that run in turn, pass each one the hook of the previous model, so that one at a time
    is on the device. ``cpu_offload`` transfers each block in every forward; this function moves the whole
    model once for several forwards, and needs memory for it on the device.

    Args:
        model: A hook is attached to it, and it is moved to the host.
        execution_device: Where it runs: an index, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is
            simulated. None is the current accelerator, or the CPU.
        prev_module_hook: The hook that this function returned for the model that runs before this one.

    Returns:
        The model itself, and a hook whose ``offload()`` moves it to the host.

    Raises:
        ValueError: This machine has no such device.

    >>> import torch
    >>> first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    >>> second, second_hook = cpu_offload_with_hook(nn.Linear(2, 1), "cpu", prev_module_hook=first_hook)
    >>> second(first(torch.zeros(3, 2))).shape
    torch.Size([3, 1])
    >>> second_hook.offload()
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    model = add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
