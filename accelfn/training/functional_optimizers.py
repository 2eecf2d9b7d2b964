"""torch's optimizers as pairs of pure functions over pytrees, and what goes with them."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer
from typing_extensions import NamedTuple

from accelfn.context import Context
from accelfn.errors import NotAvailableError
from accelfn.parallel.norm import norm_of_pieces
from accelfn.tree import Sharded, flatten, global_norm, map_tensors
from accelfn.tree.maps import leaves_like

__all__ = (
    "FunctionalOptimizer",
    "clip_by_global_norm",
    "ema_update",
    "functional",
    "masked",
    "not_elementwise",
)

Params = TypeVar("Params")
# Key of the number of updates in a state, beside the names that the optimizer's class has.
_COUNT = "num_updates"
# Classes of torch.optim whose new value of an element depends on this element's gradient and state alone.
_ELEMENTWISE = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


class FunctionalOptimizer(NamedTuple):
    """An optimizer as a pair of pure functions.

    Attributes:
        init: ``init(params)`` returns the first state, a tree: for each name of the class's state a tree like
            the parameters, and ``num_updates``.
        update: ``update(grads, state, params)`` returns ``(params, state)``. Where a gradient is None,
            nothing changes.
        donates: Whether ``update`` writes into the parameters and the state that it gets.
        name: Of the class, for errors.
        is_elementwise: Whether pieces of parameters can be updated instead of the whole: each element by
            itself.
    """

    init: Callable[[Any], dict[str, Any]]
    update: Callable[[Any, dict[str, Any], Any], tuple[Any, dict[str, Any]]]
    donates: bool = False
    name: str = "this optimizer"
    is_elementwise: bool = False


def functional(
    optimizer: type[Optimizer],
    *,
    donate: bool = False,
    is_elementwise: bool | None = None,
    **options: Any,
) -> FunctionalOptimizer:
    """Return an optimizer class of torch as a pair of functions over pytrees.

    The numbers are those of the class, bit by bit, since its own code computes them, on copies. Of a
    parameter that is :class:`accelfn.tree.Sharded`, the piece is updated, with a gradient that is its piece,
    and its state is Sharded alike.

    Ranks: local. All ranks that update with equal gradients stay equal.

    Args:
        optimizer: A class whose step needs neither a closure nor anything but parameters, gradients and
            their state.
        donate: Update parameters and state in place, as the class does, instead of copies; the results are
            the tensors that were passed.
        is_elementwise: Whether the class updates each element by itself, so that it can update pieces of
            parameters. Known of torch's own classes.
        **options: Of the class. A function ``number of updates -> value``, such as a schedule of the learning
            rate, is called in each update.

    Raises:
        TypeError: ``optimizer`` is no class of optimizers, or has no such option.
        ValueError: An option is invalid.
        NotAvailableError: (in an update) The class keeps its state somewhere else. Or a parameter is Sharded,
            and the class doesn't update each element by itself.

    >>> adam = functional(torch.optim.AdamW, lr=lambda step: 0.1 / (step + 1))
    >>> params = {"w": torch.ones(2)}
    >>> state = adam.init(params)
    >>> params, state = adam.update({"w": torch.tensor([1.0, -1.0])}, state, params)
    >>> params, list(state)
    ({'w': tensor([0.8990, 1.0990])}, ['num_updates', 'step', 'exp_avg', 'exp_avg_sq'])
    """
    given: Any = optimizer
    if not isinstance(given, type) or not issubclass(given, Optimizer):
        raise TypeError(
            f"functional: the first argument is a class of optimizers, such as torch.optim.AdamW, got "
            f"{optimizer!r}."
        )
    if optimizer is torch.optim.LBFGS:
        raise TypeError("functional: LBFGS evaluates the loss within its step. Use it as a class.")
    if is_elementwise is None:
        own: object = getattr(torch.optim, optimizer.__name__, None)
        is_elementwise = own is optimizer and optimizer.__name__ in _ELEMENTWISE
    scheduled = {name: value for name, value in options.items() if callable(value)}

    def make(params: list[torch.Tensor], state: dict[str, list[Any]], count: int) -> Any:
        made: Any = copy.copy(template)
        chosen = {name: schedule(count) for name, schedule in scheduled.items()}
        made.param_groups = [{**template.param_groups[0], **chosen, "params": params}]
        made.state = defaultdict[torch.Tensor, dict[str, Any]](dict)
        for name, values in state.items():
            for param, value in zip(params, values, strict=True):
                if value is not None:
                    made.state[param][name] = value
        return made

    def init(params: Any) -> dict[str, Any]:
        leaves, structure = flatten(params)
        check_pieces(leaves)
        fresh = [_copied(_piece_of(leaf)) for leaf in leaves]
        made = make(fresh, {}, 0)
        for leaf in fresh:
            leaf.grad = torch.zeros_like(leaf)
        begin = getattr(made, "_init_group", None)
        if begin is not None:  # torch makes the state in the first step; this is its function for it
            number = len(inspect.signature(begin).parameters) - 1
            begin(made.param_groups[0], *([] for _ in range(number)))
        for name, value in late.items():
            for leaf in fresh:
                like = leaf if isinstance(value, torch.Tensor) and value.shape == example.shape else value
                made.state[leaf][name] = torch.zeros_like(like) if isinstance(like, torch.Tensor) else like
        count = torch.zeros((), dtype=torch.int64, device="cpu")
        return {_COUNT: count, **_state_of(made, fresh, leaves, structure)}

    def check_pieces(leaves: Sequence[Any]) -> None:
        if not is_elementwise and any(isinstance(leaf, Sharded) for leaf in leaves):
            raise not_elementwise("functional", optimizer.__name__)

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        leaves, structure = flatten(params)
        check_pieces(leaves)
        own_grads = leaves_like("functional: parameters and gradients", structure, grads, _is_none)
        if any(map(_is_differentiated, (*leaves, *own_grads))):
            raise NotAvailableError(
                "functional: an update isn't differentiable. Differentiate the loss, and update outside "
                "of torch.func.grad."
            )
        count = int(state[_COUNT])
        changed = leaves if donate else [_copied(leaf) for leaf in leaves]
        own = [_piece_of(leaf).detach() for leaf in changed]
        slots = {
            name: [
                _piece_at(name, value if donate else _copied(value), leaf)
                for value, leaf in zip(
                    leaves_like("functional: parameters and state", structure, tree, _is_none),
                    leaves,
                    strict=True,
                )
            ]
            for name, tree in state.items()
            if name != _COUNT and (count or name not in late)
        }
        for leaf, grad in zip(own, own_grads, strict=True):
            leaf.grad = None if grad is None else _piece_of(grad).detach()
        made = make(own, slots, count)
        before = dict(made.param_groups[0])
        made.step()
        if any(before.get(name) is not value for name, value in made.param_groups[0].items()):
            raise NotAvailableError(
                f"functional: {optimizer.__name__} keeps a part of its state in its parameter groups, which "
                "isn't in the tree. Use it as a class."
            )
        new_state = {_COUNT: state[_COUNT] + 1, **_state_of(made, own, leaves, structure)}
        return structure.unflatten(changed), new_state

    first = {name: schedule(0) for name, schedule in scheduled.items()}
    build: Any = optimizer
    example = torch.zeros(1, 1, device="cpu")
    template: Any = build([example], **{**options, **first})
    late: dict[str, Any] = {}
    late = _names_after_a_step(make, init({"": example}), example)
    return FunctionalOptimizer(init, update, donate, optimizer.__name__, is_elementwise)


def _names_after_a_step(
    make: Callable[..., Any], first: Mapping[str, Any], example: torch.Tensor
) -> dict[str, Any]:
    """Return what the state has after the first step alone, such as SGD's momentum, a copy of the gradient.

    ``init`` holds its place, so that a state that is saved later fits a new one.
    """
    made = make([example], {}, 0)
    example.grad = torch.zeros_like(example)
    try:
        made.step()
    except Exception:  # noqa: BLE001 -- such as capturable=True, which needs a GPU
        return {}
    return {name: value for name, value in made.state[example].items() if name not in first}


def not_elementwise(operation: str, name: str) -> NotAvailableError:
    """Return the error for an optimizer that is to update pieces of parameters, and can't."""
    return NotAvailableError(
        f"{operation}: {name} isn't known to update each element of a parameter by itself, so it can't "
        "update pieces of it. Use whole parameters; or AdamW; or, if it does, "
        "functional(..., is_elementwise=True)."
    )


def masked(optimizer: FunctionalOptimizer, mask: Callable[[str], bool] | Any) -> FunctionalOptimizer:
    """Return an optimizer that updates some parameters only, and has no state for the others.

    Args:
        optimizer: From :func:`functional`.
        mask: A tree of bools like the parameters; or a function that gets the path of a leaf, such as
            ``"['layers'][0]['bias']"``.

    >>> sgd = masked(functional(torch.optim.SGD, lr=1.0), {"a": True, "b": False})
    >>> params = {"a": torch.ones(1), "b": torch.ones(1)}
    >>> sgd.update(params, sgd.init(params), params)[0]
    {'a': tensor([0.]), 'b': tensor([1.])}
    """

    def chosen(tree: Any, params: Any) -> dict[str, Any]:
        structure = flatten(params)[1]
        paths = structure.paths("")
        keeps = (
            [mask(path) for path in paths]
            if callable(mask)
            else leaves_like("masked: parameters and mask", structure, mask)
        )
        leaves = leaves_like("masked: parameters and gradients", structure, tree, _is_none)
        return {path: leaf for path, leaf, keep in zip(paths, leaves, keeps, strict=True) if keep}

    def init(params: Any) -> dict[str, Any]:
        return optimizer.init(chosen(params, params))

    def update(grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        changed, new_state = optimizer.update(chosen(grads, params), state, chosen(params, params))
        leaves, structure = flatten(params)
        paths = structure.paths("")
        merged = [changed.get(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
        return structure.unflatten(merged), new_state

    return optimizer._replace(init=init, update=update)


def clip_by_global_norm(
    grads: Params, max_norm: float, *, ctx: Context | None = None
) -> tuple[Params, torch.Tensor]:
    """Return gradients scaled so that their norm is at most ``max_norm``, and the norm before.

    Ranks: local; with DTensors, every rank of their mesh; with ``ctx``, every rank of it.

    Args:
        grads: A tree of tensors, of DTensors, or of :class:`accelfn.tree.Sharded`: the norm is that of the
            whole.
        max_norm: Positive.
        ctx: The ranks over which leaves are Sharded; the other leaves are the same on all of them.

    >>> clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
    ({'w': tensor([0.6000, 0.8000])}, tensor(5.))
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be positive, got {max_norm!r}.")
    norm = global_norm(grads) if ctx is None else norm_of_pieces(ctx, flatten(grads)[0])
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_

    def shrunk(grad: torch.Tensor) -> torch.Tensor:
        if isinstance(grad, Sharded):
            return grad.like(shrunk(grad.local))
        return grad * factor.to(grad.device)

    return map_tensors(shrunk, grads), norm


def ema_update(average: Params, params: Params, decay: float) -> Params:
    """Return ``decay * average + (1 - decay) * params`` for each leaf: an exponential moving average.

    Of leaves that are :class:`accelfn.tree.Sharded` alike, the pieces are averaged.

    >>> ema_update({"w": torch.zeros(1)}, {"w": torch.ones(1)}, 0.75)
    {'w': tensor([0.2500])}
    """

    def moved(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if isinstance(one, Sharded) and isinstance(other, Sharded) and one.place == other.place:
            return one.like(moved(one.local, other.local))
        return torch.lerp(one, other.to(one.dtype), 1.0 - decay)

    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"ema_update: decay must be from 0 to 1, got {decay!r}.")
    left, structure = flatten(average)
    right = leaves_like("ema_update: average and parameters", structure, params)
    return structure.unflatten([moved(one, other) for one, other in zip(left, right, strict=True)])


def _state_of(
    optimizer: Any, own: Sequence[torch.Tensor], params: Sequence[torch.Tensor], structure: Any
) -> dict[str, Any]:
    """Return the state of each parameter as one tree like the parameters for each name.

    Args:
        optimizer: Has the state.
        own: Its parameters.
        params: The parameters that they are the values of, or of which they are the pieces.
        structure: Of these.
    """

    def value(name: str, local: torch.Tensor, param: torch.Tensor) -> Any:
        found = optimizer.state[local].get(name)
        if isinstance(param, Sharded) and isinstance(found, torch.Tensor) and found.shape == local.shape:
            return param.like(found)
        return found

    names = dict.fromkeys(name for local in own for name in optimizer.state[local])
    return {
        name: structure.unflatten([value(name, *pair) for pair in zip(own, params, strict=True)])
        for name in names
    }


def _piece_of(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.local if isinstance(leaf, Sharded) else leaf


def _piece_at(name: str, value: Any, param: torch.Tensor) -> Any:
    """Return the value of a state, or its piece; as its parameter is split."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    ours, theirs = (one.place if isinstance(one, Sharded) else None for one in (param, value))
    if ours != theirs:
        raise ValueError(
            f"functional: the state {name!r} is {_place(value)}, and its parameter {_place(param)}. Both "
            "must be the same piece, or the whole: make the state with init(params), and load into that."
        )
    return _piece_of(value)


def _place(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, Sharded):
        return f"the whole of shape {tuple(tensor.shape)}"
    dim = tensor.split_dim
    rows = tensor.local.shape[dim]
    return f"entries {tensor.start} to {tensor.start + rows} along dim {dim} of shape {tuple(tensor.shape)}"


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _is_none(value: object) -> bool:
    return value is None


def _is_differentiated(value: Any) -> bool:
    """Return whether torch.func differentiates by a value; ``detach`` would hide that."""
    return isinstance(value, torch.Tensor) and cast("Any", torch)._C._functorch.is_gradtrackingtensor(value)
