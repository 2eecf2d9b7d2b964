"""Hooks of a module: code that runs before and after its forward, and may change what goes in and out.

Everything goes through torch's own forward hooks. ``forward`` stays what the class says, so its signature,
``torch.compile``, pickling and copying see nothing new, and the hook stands in ``module._hf_hook``, where
other libraries look for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.hooks.calls import CallStack
from accelfn.bigmodel.offload.dispatch import undispatch
from accelfn.bigmodel.offload.running import is_running
from accelfn.bigmodel.offload.uncompiled import uncompiled

__all__ = (
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "hook_of",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
)

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
            members += hook.hooks if isinstance(hook, SequentialHook) else (_checked(hook, "SequentialHook"),)
        self.hooks: tuple[ModelHook, ...] = tuple(members)
        self.no_grad: bool = any(hook.no_grad for hook in members)
        self._begun: CallStack[list[ModelHook]] = CallStack()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Let each member prepare ``module``, in order."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run each member, in order; the next one gets what the one before gave."""
        begun: list[ModelHook] = []
        self._begun.values.append(begun)
        for hook in self.hooks:
            begun.append(hook)
            args, kwargs = _before(hook, module, args, kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run each member, the last one first."""
        begun = self._begun.pop()
        left = [*self.hooks] if begun is None else begun
        try:
            while left:
                changed = left.pop().post_forward(module, output)
                output = output if changed is None else changed
        except BaseException:
            # Nobody else tells the members whose turn hasn't come.
            _give_back(left, module)
            raise
        return output

    def after_error(self, module: nn.Module) -> None:
        """Notify each member that has begun, the last one first."""
        _give_back(self._begun.pop() or [], module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Let each member undo what it did, the last one first."""
        for hook in reversed(self.hooks):
            module = hook.detach_hook(module)
        return module


def hook_of(module: nn.Module) -> ModelHook | None:
    """Return the hook of ``module``, or None."""
    return cast("ModelHook | None", vars(module).get(_ATTRIBUTE))


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
    _connect(module)
    if whole.no_grad and not isinstance(vars(module).get("forward"), _WithoutGradient):
        vars(module)["forward"] = _WithoutGradient(module)
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
        for around in _connections(module):
            around.disconnect()
        forward = vars(module).get("forward")
        if isinstance(forward, _WithoutGradient):
            forward.take_away()
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


class _Around:
    """Stands in torch's lists of hooks and calls what ``_hf_hook`` says at the time."""

    def __init__(self) -> None:
        self._calls: CallStack[tuple[ModelHook, BaseException | None]] = CallStack()
        # Kept, because a handle that is unpickled keeps torch from giving its number away again.
        self._handles: tuple[RemovableHandle, ...] = ()

    def connect(self, module: nn.Module) -> None:
        """Stand before and after the forward of ``module``."""
        self._handles = (
            module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after, always_call=True),
        )

    def disconnect(self) -> None:
        """Stand there no longer."""
        for handle in self._handles:
            handle.remove()

    @uncompiled
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run ``pre_forward``."""
        hook = hook_of(module)
        if hook is None:
            return None
        # torch runs no hooks after a KeyboardInterrupt. Then a call that is long over still seems to run.
        calls = self._calls.values
        while calls and not is_running(module, len(calls) + 1):
            calls.pop()[0].after_error(module)
        calls.append((hook, sys.exc_info()[1]))
        return _before(hook, module, args, kwargs)

    @uncompiled
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Run ``post_forward``, or ``after_error`` where torch calls it for an exception."""
        call = self._calls.pop()
        if call is None:  # another pre-hook raised before ours had its turn
            return None
        hook, handled = call
        # The caller may itself be in an except clause: only an exception that is new since then is ours.
        if sys.exc_info()[1] is handled:
            return hook.post_forward(module, output)
        hook.after_error(module)
        return None


class _WithoutGradient:
    """A module's forward, without gradients.

    Not done in the hooks: torch doesn't run them when the user interrupts the program, and gradients would
    stay off.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replaced: Any = vars(module).get("forward")  # somebody's own forward of this one module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if self._replaced is not None:
                return self._replaced(*args, **kwargs)
            return cast("Any", type(self._module)).forward(self._module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        if self._replaced is not None:
            return inspect.signature(self._replaced)
        forward = cast("Any", type(self._module)).forward.__get__(self._module)
        return inspect.signature(forward)

    def take_away(self) -> None:
        """Let the module have the forward that it had."""
        if self._replaced is None:
            del vars(self._module)["forward"]
        else:
            vars(self._module)["forward"] = self._replaced


def _before(
    hook: ModelHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given: Any = hook.pre_forward(module, *args, **kwargs)
    try:
        new_args, new_kwargs = given
    except (TypeError, ValueError):
        new_args = new_kwargs = None
    if type(new_args) is tuple and type(new_kwargs) is dict:  # what it should be, asked in the cheapest way
        return cast("tuple[Any, ...]", new_args), cast("dict[str, Any]", new_kwargs)
    if not isinstance(new_args, (tuple, list)) or not isinstance(new_kwargs, Mapping):
        raise TypeError(
            f"{type(hook).__name__}.pre_forward must return (args, kwargs), a tuple and a dict; it returned "
            f"{type(given).__name__}. End it with `return args, kwargs`."
        )
    return tuple(cast("list[Any]", new_args)), dict(cast("Mapping[str, Any]", new_kwargs))


def _give_back(begun: list[ModelHook], module: nn.Module) -> None:
    """Notify hooks of an error, the last one first, and each of them even if another one fails."""
    try:
        while begun:
            begun.pop().after_error(module)
    finally:
        if begun:
            _give_back(begun, module)


def _connect(module: nn.Module) -> None:
    if not _connections(module):
        _Around().connect(module)


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
