"""How an Accelerator calls what it saves: by the name that was given, never by the order of preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from accelfn.errors import ConfigurationError
from accelfn.training import unwrap_model
from accelfn.training.prepare import parameters_of

__all__ = ("name_things", "of_loader", "of_model", "of_optimizer", "of_scheduler")

T = TypeVar("T")


def name_things(
    kind: str, things: Iterable[T], given: Mapping[int, str], describe: Callable[[T], str]
) -> dict[str, T]:
    """Name each of some things: as it was named, else by its kind, else by what it is. Pure.

    Args:
        kind: Such as ``"model"``: the name of the only one that has none.
        things: In any order.
        given: Names by ``id``.
        describe: Says what a thing is, in a way that doesn't depend on when it was prepared.

    Raises:
        ConfigurationError: Two would have one name.

    >>> name_things("loader", [[1, 2], [3]], {}, lambda loader: str(len(loader)))
    {'loader.2': [1, 2], 'loader.1': [3]}
    """
    things = list(things)
    nameless = [thing for thing in things if id(thing) not in given]
    named: dict[str, T] = {}
    for thing in things:
        name = given.get(id(thing))
        if name is None:
            name = kind if len(nameless) == 1 else f"{kind}.{describe(thing)}"
        if name in named:
            raise ConfigurationError(
                f"Two prepared objects would both be saved as {name!r}, and nothing but their order tells "
                "them apart. Name them where they are prepared, as in prepare(teacher=..., student=...), or "
                "with checkpoint_names(teacher=..., student=...)."
            )
        named[name] = thing
    return named


def of_model(model: nn.Module) -> str:
    """Say what a model is: its class."""
    return type(unwrap_model(model, keep_torch_compile=False)).__name__


def of_optimizer(models: Mapping[str, nn.Module]) -> Callable[[Optimizer], str]:
    """Say which models an optimizer changes."""

    def describe(optimizer: Optimizer) -> str:
        own = parameters_of(optimizer)
        found = [name for name, model in models.items() if own & {id(one) for one in model.parameters()}]
        return "+".join(found) or type(optimizer).__name__

    return describe


def of_scheduler(optimizers: Mapping[str, Optimizer]) -> Callable[[Any], str]:
    """Say whose learning rate a schedule sets."""

    def describe(scheduler: Any) -> str:
        found = [name for name, optimizer in optimizers.items() if _real(scheduler.optimizer) is optimizer]
        return "+".join(found) or type(scheduler.scheduler).__name__

    return describe


def _real(optimizer: Any) -> Any:
    return vars(optimizer).get("optimizer", optimizer)


def of_loader(loader: Any) -> str:
    """Say what a loader reads: the class of its dataset, and how much there is of it."""
    prepared = loader.loader
    dataset: Any = getattr(prepared, "dataset", None)
    return f"{type(dataset).__name__}.{prepared.reader.length}"
