"""Hooks of a module: code that runs before and after its forward, and may change what goes in and out.

Everything goes through torch's own forward hooks. ``forward`` stays what the class says, so its signature,
``torch.compile``, pickling and copying see nothing new, and the hook stands in ``module._hf_hook``, where
other libraries look for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.block_hooks import CallStack, moved, uncompiled
from accelfn.bigmodel.block_stream import caller_of_hook, is_within
from accelfn.bigmodel.devices import (
    Place,
    PlaceLike,
    check_device,
    current_place,
    is_on,
    is_simulated,
    read_place,
)
from accelfn.bigmodel.dispatch import undispatch
from accelfn.parallel.forward import WrappedForward

_ATTRIBUTE = "_hf_hook"


class ModelHook:
    """What runs around a module's forward. A subclass writes the methods that it needs.

    One hook may serve several modules, and several threads at once: what it remembers from
    :meth:`pre_forward` to :meth:`post_forward` belongs into a place of each call.

    Attributes:
        no_grad: Whether the module's forward runs without gradients. Read when the hook is added.
    """

    no_grad: bool = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare ``module`` when the hook is added to it.

        Returns:
            The module that gets the hook: nearly always the one that came.
        """
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before each forward.

        Returns:
            The arguments that forward gets, positional ones and named ones.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run after each forward that has returned.

        Returns:
            The output that the caller gets. None keeps ``output``, as with torch's own hooks.
        """
        return output

    def after_error(self, module: nn.Module) -> None:
        """Run instead of :meth:`post_forward` where an exception ends the call that ``pre_forward`` began.

        What ``pre_forward`` took is given back here; the exception goes on to the caller. ``pre_forward``
        itself may be what raised it.
        """

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo what :meth:`init_hook` did, when the hook is removed or another takes its place."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: in their order before forward, in the reverse order after it.

    So they are nested, and what one does to the arguments the same one undoes in the output, in its turn.
    The forward runs without gradients if any member says so.

    Args:
        hooks: Members. A member that is itself a sequence gives its own members.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        members: list[ModelHook] = []
        for hook in hooks:
            members += members_of(_checked(hook, "SequentialHook"))
        self.hooks: tuple[ModelHook, ...] = tuple(members)
        self.no_grad: bool = any(hook.no_grad for hook in members)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Let each member prepare ``module``, in order."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run each member, in order; the next one gets what the one before gave."""
        for hook in self.hooks:
            args, kwargs = _before(hook, module, args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run each member, the last one first."""
        return _after([*self.hooks], module, output)

    def after_error(self, module: nn.Module) -> None:
        """Notify each member, the last one first."""
        _release([*self.hooks], module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Let each member undo what it did, the last one first."""
        for hook in reversed(self.hooks):
            module = hook.detach_hook(module)
        return module


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return the hook of ``module``, or None."""
    return cast("ModelHook | None", vars(module).get(_ATTRIBUTE))


def members_of(hook: ModelHook | None) -> tuple[ModelHook, ...]:
    """Return the hooks that a sequence is made of; another hook alone, and nothing for None."""
    return () if hook is None else hook.hooks if isinstance(hook, SequentialHook) else (hook,)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Let ``hook`` run around the forward of ``module``, which is changed.

    The hook runs whenever the module is called. ``module.forward(...)``, called directly, passes it by, as it
    passes by all hooks of torch. Its ``pre_forward`` runs before the module's own pre-hooks, so they see the
    arguments that it gives. Copies and pickles of the module take the hook along, but not those of
    ``torch.fx`` graphs, which torch rebuilds without hooks.

    Args:
        module: Any module.
        hook: What to run.
        append: Run it inside of the hook that the module has. Otherwise it takes that one's place, and the
            old one undoes what it did.

    Returns:
        The module that ``hook.init_hook`` gave: nearly always ``module`` itself.

    Raises:
        TypeError: ``hook`` is no :class:`ModelHook`.

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
    # init_hook may have hooked what it gives back.
    whole = hook if old is None else SequentialHook(old, hook)
    vars(module)[_ATTRIBUTE] = whole
    if not _connections(module):
        _Around(module)
    if whole.no_grad and not isinstance(vars(module).get("forward"), _WithoutGradient):
        vars(module)["forward"] = _WithoutGradient(module.forward)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook away that :func:`add_hook_to_module` gave to ``module``; without one, nothing happens.

    Args:
        module: Any module.
        recurse: Do so for all modules inside of it too, and undo what ``dispatch_model`` and its like did.

    Returns:
        The module that the hook's ``detach_hook`` gave: nearly always ``module`` itself.
    """
    hook = hook_of(module)
    whole = module
    if hook is not None:
        # Gone before it is told, so that a detach_hook that fails doesn't leave half a hook.
        del vars(module)[_ATTRIBUTE]
        for handle in (handle for around in _connections(module) for handle in around.handles):
            handle.remove()
        forward = vars(module).get("forward")
        if isinstance(forward, _WithoutGradient):
            del vars(module)["forward"]
            if forward.__wrapped__ != module.forward:  # somebody's own of this one module
                vars(module)["forward"] = forward.__wrapped__
        whole = hook.detach_hook(module)
    if recurse:
        undispatch(module)
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return whole


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks away from ``module`` and from all modules inside of it.

    What ``dispatch_model`` and its like did to them is undone too; their weights stay where they are.
    """
    remove_hook_from_module(module, recurse=True)


class _Call(NamedTuple):
    """A forward that runs: its hooks that have begun, the exception handled around it, and its frame."""

    begun: list[ModelHook]
    handled: BaseException | None
    frame: FrameType


class _Around:
    """Stands in torch's lists of hooks and calls what ``_hf_hook`` says at the time."""

    def __init__(self, module: nn.Module) -> None:
        self._calls: CallStack[_Call] = CallStack()
        # Kept, because a handle that is unpickled keeps torch from giving its number away again.
        self.handles: tuple[RemovableHandle, ...] = (
            module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after, always_call=True),
        )

    @uncompiled
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run ``pre_forward``."""
        calls = self._calls.values
        # torch runs no hooks after a KeyboardInterrupt. Then a call that is long over still seems to run.
        while calls and not is_within(calls[-1].frame):
            _release(calls.pop().begun, module)
        call = _Call([], sys.exc_info()[1], caller_of_hook())
        calls.append(call)
        for hook in members_of(hook_of(module)):
            call.begun.append(hook)
            args, kwargs = _before(hook, module, args, kwargs)
        return (args, kwargs) if call.begun else None

    @uncompiled
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Run ``post_forward``, or ``after_error`` where torch calls it for an exception."""
        call = self._calls.pop()
        if call is None:  # another pre-hook raised before ours had its turn
            return None
        # The caller may itself be in an except clause: only an exception that is new since then is ours.
        if sys.exc_info()[1] is call.handled:
            return _after(call.begun, module, output)
        return _release(call.begun, module)


class _WithoutGradient(WrappedForward):
    """A module's forward, without gradients.

    Not done in the hooks: torch doesn't run them when the user interrupts the program, and gradients would
    stay off.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.__wrapped__(*args, **kwargs)


def _before(
    hook: ModelHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given: Any = hook.pre_forward(module, *args, **kwargs)
    try:
        new_args, new_kwargs = given
    except (TypeError, ValueError):
        new_args = new_kwargs = None
    if isinstance(new_args, (tuple, list)) and isinstance(new_kwargs, Mapping):
        return tuple(cast("list[Any]", new_args)), dict(cast("Mapping[str, Any]", new_kwargs))
    raise TypeError(
        f"{type(hook).__name__}.pre_forward must return (args, kwargs), a tuple and a dict; it returned "
        f"{type(given).__name__}. End it with `return args, kwargs`."
    )


def _after(begun: list[ModelHook], module: nn.Module, output: Any) -> Any:
    """Run ``post_forward`` of hooks, the last one first."""
    try:
        while begun:
            changed = begun.pop().post_forward(module, output)
            output = output if changed is None else changed
    finally:  # nobody else tells the members whose turn hasn't come
        _release(begun, module)
    return output


def _release(begun: list[ModelHook], module: nn.Module) -> None:
    """Notify hooks of an error, the last one first, and each of them even if another one fails."""
    try:
        while begun:
            begun.pop().after_error(module)
    finally:
        if begun:
            _release(begun, module)


def _connections(module: nn.Module) -> list[_Around]:
    # torch has no other question for the hooks of a module
    hooks = cast("Mapping[int, Any]", vars(module)["_forward_pre_hooks"])
    owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
    return [owner for owner in owners if isinstance(owner, _Around)]


def _checked(hook: object, what: str) -> ModelHook:
    if isinstance(hook, ModelHook):
        return hook
    advice = "Make one: write () behind the class." if isinstance(hook, type) else "Derive its class from it."
    raise TypeError(f"{what}: a hook must be an accelfn ModelHook, got {hook!r}. {advice}")


class CpuOffload(ModelHook):
    """Keeps a whole model in the host's memory until it runs, and on its device from then on.

    The parameters stay the same objects, so optimizers keep working and gradients arrive in ``.grad``, which
    moves along. But a backward must come before the model goes back: autograd remembers the parameters, and
    finds them where they are then.

    Args:
        execution_device: Where the model runs: a number, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is
            simulated. None is the current accelerator, or the CPU without one.
        prev_module_hook: The model that ran before: it goes back to the host before this one comes. Copies
            and pickles of this hook take that model along.

    Raises:
        ValueError: There is no such device here.
    """

    def __init__(
        self,
        execution_device: PlaceLike | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        place = (
            current_place() if execution_device is None else read_place(execution_device, "execution_device")
        )
        self.execution_device: torch.device = check_device(place, "execution_device")
        self.prev_module_hook = prev_module_hook
        self._place = place
        self._at: Place = "cpu"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Bring the model to the host."""
        self._bring(module, "cpu")
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the model before back to the host, and bring this one and its arguments to its device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        self._bring(module, self._place)
        return moved(args, self.execution_device), moved(kwargs, self.execution_device)

    @property
    def is_loaded(self) -> bool:
        """Whether the model was brought to its device and not back since."""
        return self._at == self._place

    def _bring(self, module: nn.Module, place: Place) -> None:
        device = check_device(place)
        # Tensors can't tell whether they are on a device that is simulated.
        is_there = not is_simulated(self._place) or self._at == place
        tensors = (*module.parameters(), *module.buffers())
        if not is_there or not all(is_on(tensor, device) for tensor in tensors):
            self.move(module, place)
        self._at = place

    def move(self, module: nn.Module, place: Place) -> None:
        """Move all parameters and buffers of a module to a place, with their gradients."""
        module.to(check_device(place))


class UserCpuOffloadHook:
    """A model and its :class:`CpuOffload`: what a user holds in hand to send the model back to the host."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Bring the model to the host; nothing happens if it is there."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook away. The model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: PlaceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep ``model`` in the host's memory until it runs; then it comes to its device as a whole, and stays.

    With several models in a row each one gets the hook of the one before, so that one at a time is on the
    device. Compared with ``cpu_offload``, which brings a model block by block and takes each one away again,
    it needs room for a whole model, and pays once where a model runs several times.

    Args:
        model: Changed: it gets a hook, and is brought to the host.
        execution_device: Where it runs: a number, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is
            simulated. None is the current accelerator, or the CPU without one.
        prev_module_hook: What this function gave for the model that runs before this one.

    Returns:
        The model itself, and what sends it back to the host: ``hook.offload()``.

    Raises:
        ValueError: There is no such device here.

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
