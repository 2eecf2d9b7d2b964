"""How an Accelerator calls what it saves: by the name that was given, never by the order of preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from torch import nn
from torch.optim import Optimizer

from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError
from accelfn.training import unwrap_model
from accelfn.training.prepare import parameters_of

__all__ = (
    "class_of",
    "describe_loader",
    "describe_model",
    "describe_optimizer",
    "describe_scheduler",
    "list_parameters",
    "name_things",
    "optimizers_of",
)

T = TypeVar("T")


def name_things(
    kind: str, things: Iterable[T], given: Callable[[T], str | None], describe: Callable[[T], str]
) -> dict[str, T]:
    """Name each of some things: as it was named, else by its kind, else by what it is. Pure.

    Args:
        kind: Such as ``"model"``: the name of the only one that has none.
        things: In any order.
        given: Gives the name that a thing was given, or None.
        describe: Says what a thing is, in a way that doesn't depend on when it was prepared.

    Raises:
        ConfigurationError: Two would have one name.

    >>> name_things("loader", [[1, 2], [3]], lambda loader: None, lambda loader: str(len(loader)))
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
                f"Two prepared objects ({kind}) would both be saved as {name!r}, and nothing but their order "
                "distinguishes them. Name them where they are prepared, as in prepare(teacher=..., "
                "student=...), or with checkpoint_names(teacher=..., student=...)."
            )
        named[name] = thing
    return named


def describe_model(model: nn.Module) -> str:
    """Return what a model is: its class."""
    return type(unwrap_model(model, keep_torch_compile=False)).__name__


def describe_optimizer(models: Mapping[str, nn.Module]) -> Callable[[Optimizer], str]:
    """Return what says which models an optimizer changes."""

    def describe(optimizer: Optimizer) -> str:
        own = parameters_of(optimizer)
        found = [name for name, model in models.items() if own & {id(one) for one in model.parameters()}]
        return "+".join(sorted(found)) or type(optimizer).__name__

    return describe


def describe_scheduler(optimizers: Mapping[str, Optimizer]) -> Callable[[Any], str]:
    """Return what says whose learning rate a prepared schedule sets."""

    def describe(scheduler: Any) -> str:
        (inner,) = optimizers_of(scheduler)
        found = [name for name, optimizer in optimizers.items() if optimizer is inner]
        return "+".join(found) or type(scheduler.scheduler).__name__

    return describe


def class_of(thing: Any) -> str:
    """Return the class of an optimizer, or of the schedule inside of a prepared one."""
    inner: object = cast("dict[str, Any]", vars(thing)).get("scheduler", thing)
    return type(inner).__name__


def list_parameters(optimizer: Optimizer) -> list[object]:
    """List the parameters of an optimizer."""
    groups: list[dict[str, list[object]]] = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


def optimizers_of(scheduler: Any) -> list[object]:
    """List the optimizer whose learning rate a prepared schedule sets, without its proxy."""
    own: Any = scheduler.optimizer
    return [cast("dict[str, Any]", vars(own)).get("optimizer", own)]


def describe_loader(loader: Any) -> str:
    """Return what a prepared loader reads: the class of its dataset, and how many samples there are."""
    dataset = getattr(loader, "dataset", loader)
    return f"{type(dataset).__name__}.{passes_of(loader).reader.length}"
