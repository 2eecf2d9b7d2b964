"""Tensors that stand in for what another stage computes: of the right shape and dtype, of no value.

What is computed from one is one. So a stage that runs the whole model's forward knows of each tensor whether
it is what the whole model has there, also without gradients and with frozen parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.utils import _pytree
from typing_extensions import override

from accelfn.errors import ConfigurationError

__all__ = (
    "Scope",
    "StandIn",
    "find_stand_ins",
    "leaves_of_call",
    "stand_in_for",
    "stand_in_of_parameter",
)

# Of the first argument these use shape, dtype and device alone; and those of all but the first one.
_LIKE_FIRST = frozenset(
    (
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_tensor",
    )
)
_LIKE_OTHERS = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
# These give values out of tensors, for Python to decide by.
_READS = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "equal",
        "allclose",
        "is_nonzero",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__contains__",
        "__array__",
    )
)
_NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class Scope:
    """Where tensors may be computed with that stand in for others: in a model's forward, while it runs."""

    def __init__(self) -> None:
        self.is_open = False


class StandIn(torch.Tensor):
    """A tensor of no value, and what is computed from one. Made by :func:`stand_in_for`."""

    scope: Scope

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; its tensors stand in too, unless they depend on shapes alone."""
        kwargs = kwargs or _NO_KEYWORDS
        name = getattr(func, "__name__", str(func))
        if name in _READS:
            raise ConfigurationError(
                f"{name}() was called on a tensor whose values an earlier stage of the pipeline has. What "
                "the model's forward does around its blocks must not depend on such values."
            )
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result: Any = func(*args, **kwargs)
        written = args[0] if name == "__setitem__" else kwargs.get("out", result)
        if not any(isinstance(one, torch.Tensor) for one in _pytree.tree_leaves(written)):
            return result
        scope = next(one.scope for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, StandIn))
        if not scope.is_open:
            raise ConfigurationError(
                f"{name}() was called outside of a forward pass on a tensor whose values another stage of "
                "the pipeline has. A model has to return tensors as such, or in tuples, lists, dicts and "
                "outputs of transformers; parameters of other stages can't be used."
            )
        used: Any = (args, kwargs)
        if name in _LIKE_FIRST:
            used = (args[1:], kwargs)
        elif name in _LIKE_OTHERS:
            used = args[:1]
        if not find_stand_ins(used):
            return result
        given = (*args, kwargs.get("out"))
        if not isinstance(written, StandIn) and any(written is one for one in given):
            raise ConfigurationError(
                f"{name}() wrote values that an earlier stage of the pipeline has into a tensor, which the "
                "model may have under other names. Compute a new tensor instead."
            )

        def stand_in(value: Any) -> Any:
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, StandIn)
            return stand_in_for(value, scope) if is_plain else value

        return _pytree.tree_map(stand_in, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return one for the copy of the model, of the same memory: nobody writes into it."""
        return stand_in_for(self, copy.deepcopy(self.scope, memo))


def stand_in_for(tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
    """Return a tensor of the shape, dtype and device of ``tensor``, of which nobody may use the values."""
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        made = cast("StandIn", cast("Any", tensor.detach()).as_subclass(StandIn))
    made.scope = scope
    return made


def stand_in_of_parameter(tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
    """Return a tensor of the shape and dtype of ``tensor`` that takes the memory of one element."""
    device = "cpu" if tensor.is_meta else tensor.device
    return stand_in_for(torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape), scope)


def find_stand_ins(tree: Any) -> list[str]:
    """List where a tree has tensors that stand in for others: paths such as ``[0]['mask']``."""
    if not any(isinstance(leaf, StandIn) for leaf in _pytree.tree_iter(tree)):
        return []  # the usual case, for which paths are computed in vain
    return [
        _pytree.keystr(path)
        for path, leaf in _pytree.tree_flatten_with_path(tree)[0]
        if isinstance(leaf, StandIn)
    ]


def leaves_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a call's arguments by their paths, such as ``args[0]`` and ``kwargs['mask']``."""
    return {
        f"{name}{_pytree.keystr(path)}": leaf
        for name, tree in (("args", args), ("kwargs", kwargs))
        for path, leaf in _pytree.tree_flatten_with_path(tree)[0]
    }
