"""The prepared objects of an Accelerator that are still alive, and their names in checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError
from accelfn.training import unwrap_model
from accelfn.training.optimizers import parameters_of

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Objects in order of registration, with names. They are held weakly."""

    def __init__(self) -> None:
        """Start empty."""
        self._things: dict[int, tuple[weakref.ref[Any], str | None]] = {}

    def add(self, thing: T, name: str | None = None) -> None:
        """Add an object, or name it."""
        number, things = id(thing), self._things

        def forget(reference: weakref.ref[T]) -> None:
            # Also drops the name: another object may get the same id.
            if number in things and things[number][0] is reference:
                del things[number]

        things[number] = weakref.ref(thing, forget), name or self.name_of(thing)

    def clear(self) -> None:
        """Remove all objects."""
        self._things.clear()

    def name_of(self, thing: T) -> str | None:
        """Return the name of an object; None without one."""
        return self._things[id(thing)][1] if thing in self else None

    def __contains__(self, thing: object) -> bool:
        found = self._things.get(id(thing))
        return found is not None and found[0]() is thing

    def __iter__(self) -> Iterator[T]:
        found = [reference() for reference, _ in tuple(self._things.values())]
        return iter([thing for thing in found if thing is not None])

    def __reduce__(self) -> tuple[type[WeakRegistry[T]], tuple[()]]:
        """Copy and pickle without the objects: copied objects add themselves."""
        return WeakRegistry, ()


def _name_things(
    kind: str, things: Iterable[T], given: Callable[[T], str | None], describe: Callable[[T], str]
) -> dict[str, T]:
    """Choose names for objects: the given name, else the kind, else the kind with a description. Pure.

    Args:
        kind: Such as ``"model"``: the name of the only unnamed object.
        things: In any order.
        given: Returns the given name of an object, or None.
        describe: Describes an object independently of the order of preparation.

    Raises:
        ConfigurationError: Two objects would have one name.

    >>> _name_things("loader", [[1, 2], [3]], lambda loader: None, lambda loader: str(len(loader)))
    {'loader.2': [1, 2], 'loader.1': [3]}
    """
    names = [(given(thing), thing) for thing in things]
    is_alone = sum(name is None for name, _ in names) == 1
    named: dict[str, T] = {}
    for name, thing in names:
        if name is None:
            name = kind if is_alone else f"{kind}.{describe(thing)}"
        if name in named:
            raise ConfigurationError(
                f"Two prepared objects ({kind}) would both be saved as {name!r}, and only their order "
                "distinguishes them. Name them in prepare(teacher=..., student=...), or with "
                "checkpoint_names(teacher=..., student=...)."
            )
        named[name] = thing
    return named


def name_all(
    models: WeakRegistry[nn.Module],
    optimizers: WeakRegistry[Optimizer],
    schedulers: WeakRegistry[LRScheduler],
    loaders: WeakRegistry[Any],
) -> dict[str, dict[str, Any]]:
    """Return all prepared objects, by kind and name.

    Raises:
        ConfigurationError: Two objects would have one name.
    """
    named_models = _name_things("model", models, models.name_of, _describe_model)

    def describe_optimizer(optimizer: Optimizer) -> str:
        own = parameters_of(optimizer)
        found = [name for name, one in named_models.items() if own & {id(part) for part in one.parameters()}]
        return "+".join(sorted(found)) or type(optimizer).__name__

    named_optimizers = _name_things("optimizer", optimizers, optimizers.name_of, describe_optimizer)

    def describe_scheduler(scheduler: LRScheduler) -> str:
        own: Any = scheduler.optimizer
        inner = cast("dict[str, Any]", vars(own)).get("optimizer", own)
        found = [name for name, optimizer in named_optimizers.items() if optimizer is inner]
        return "+".join(found) or type(scheduler).__name__

    # A loader that skips batches of another one shares its position.
    places: list[Any] = []
    for one in loaders:
        if not any(passes_of(one).position is passes_of(other).position for other in places):
            places.append(one)
    return {
        "models": cast("dict[str, Any]", named_models),
        "optimizers": cast("dict[str, Any]", named_optimizers),
        "schedulers": _name_things("scheduler", schedulers, schedulers.name_of, describe_scheduler),
        "loaders": _name_things("loader", places, loaders.name_of, _describe_loader),
    }


def _describe_model(model: nn.Module) -> str:
    return type(unwrap_model(model, keep_torch_compile=False)).__name__


def _describe_loader(loader: Any) -> str:
    dataset: Mapping[Any, Any] = getattr(loader, "dataset", loader)
    return f"{type(dataset).__name__}.{passes_of(loader).reader.length}"
