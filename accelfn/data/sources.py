"""Datasets that offer their data in shards, of which each rank reads some."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from accelfn.errors import ConfigurationError

__all__ = ("count_shards", "forgets_by", "has_exact_state", "take_shards")


def count_shards(dataset: Any) -> int | None:
    """Count the shards of a dataset; None where it offers none.

    Raises:
        ConfigurationError: It was split between ranks already.
    """
    if _is_hugging_face(dataset) and getattr(dataset, "_distributed", None) is not None:
        raise ConfigurationError(
            "the dataset was split by split_dataset_by_node already, and splitting it again would leave out "
            'samples. Pass sharding="already_sharded", or the dataset as it was before.'
        )
    if not callable(getattr(dataset, "shard", None)):
        return None
    for name in ("num_shards", "n_shards"):
        number = getattr(dataset, name, None)
        if isinstance(number, int):
            return number
    return None


def take_shards(dataset: Any, rank: int, size: int) -> Any:
    """Return a dataset of the shards of ``rank``; each shard is that of one rank of ``size``."""
    if not _is_hugging_face(dataset):
        return dataset.shard(num_shards=size, index=rank)
    split: Any = importlib.import_module("datasets.distributed").split_dataset_by_node
    # Where the shards can't be dealt out equally, it would let every rank read all and skip most.
    options = {"strategy": "shards"} if "strategy" in inspect.signature(split).parameters else {}
    return split(dataset, rank=rank, world_size=size, **options)


def _is_hugging_face(dataset: Any) -> bool:
    # Without an import: whoever has such a dataset has imported its package.
    return any(base.__module__.partition(".")[0] == "datasets" for base in type(dataset).__mro__)


def has_exact_state(dataset: Any) -> bool:
    """Return whether what a dataset gives after its state was restored is what it would have given.

    That of the ``datasets`` package leaves out what waits in a shuffle buffer, and may leave out a batch
    where batches of tables are mapped.
    """
    if not _is_hugging_face(dataset):
        return True
    is_table = bool(getattr(getattr(dataset, "_formatting", None), "is_table", False))
    waiting: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        name = type(part).__name__
        if part is None or "Shuffled" in name or (is_table and getattr(part, "batched", False)):
            return False
        for child in cast("dict[str, Any]", vars(part)).values():
            children = cast("list[Any]", child if isinstance(child, list) else [child])
            waiting += [one for one in children if hasattr(one, "_init_state_dict")]
    return True


def forgets_by(dataset: Any) -> dict[str, Any] | None:
    """Return the state by which a dataset begins anew in any epoch; None where only its own will do."""
    return {} if _is_hugging_face(dataset) else None
