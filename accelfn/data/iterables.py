"""Take any iterable of batches for a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

__all__ = ("BatchStream", "loader_over")

T = TypeVar("T")


class BatchStream(IterableDataset[Any]):
    """The batches of an iterable, as a stream. For everything else it is that iterable."""

    def __init__(self, source: Iterable[Any]) -> None:
        """Return what ``source`` gives."""
        vars(self)["_source"] = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)  # a TypeError where it has none, as everywhere

    def __getattr__(self, name: str) -> Any:
        if name == "_source" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._source, name, value)


def loader_over(source: Iterable[T], custom_classes: tuple[type, ...]) -> DataLoader[T]:
    """Make a loader whose batches are the items of ``source``, as they are.

    Args:
        source: Can be gone through any number of times.
        custom_classes: Classes whose instances can, though they look as if they couldn't.

    Raises:
        TypeError: It can't be iterated over, only once, or is no collection of batches.
    """
    kind = type(cast("object", source)).__name__
    if not isinstance(cast("object", source), Iterable) or isinstance(source, (str, bytes, Mapping)):
        raise TypeError(
            f"prepare_data_loader takes a torch DataLoader or another iterable of batches, got {kind}."
        )
    if isinstance(source, Iterator) and not isinstance(source, custom_classes):
        raise TypeError(
            f"prepare_data_loader: {kind} is an iterator, which can be gone through only once, and a loader "
            "is gone through once an epoch. Pass what makes it, such as a list, or an object whose __iter__ "
            "gives a new one; if its own __iter__ begins anew each time, name its class in "
            "DataLoaderConfiguration(custom_classes=...)."
        )
    dataset = source if isinstance(source, IterableDataset) else BatchStream(source)
    return DataLoader(cast("Any", dataset), batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: T) -> T:
    return batch
