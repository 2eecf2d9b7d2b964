"""torchdata's StatefulDataLoader, which knows the states of datasets that its workers read."""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast

from torch.utils.data import DataLoader

from accelfn.context import Context
from accelfn.data.sampled import options_of, remake
from accelfn.errors import MissingExtraError

__all__ = ("check_stateful", "is_stateful", "num_workers_of", "remake_stateful")

_HOME = "torchdata.stateful_dataloader"


def is_stateful(ctx: Context, source: DataLoader[Any]) -> bool:
    """Return whether the states of workers are kept: it was asked for, or the loader is of that class."""
    return ctx.loading.use_stateful_dataloader or _is_torchdatas(source)


def check_stateful(ctx: Context) -> None:
    """Refuse to go on without torchdata where it was asked for.

    Raises:
        MissingExtraError: It isn't installed.
    """
    if ctx.loading.use_stateful_dataloader:
        _import()


def remake_stateful(source: DataLoader[Any], dataset: Any, **changes: Any) -> DataLoader[Any]:
    """Make a StatefulDataLoader with the options of ``source``; arguments as :func:`remake`'s.

    Raises:
        MissingExtraError: torchdata isn't installed.
    """
    if _is_torchdatas(source) and type(source) is not _import():
        return remake(source, dataset, **changes)  # a class of the user's own, derived from it
    every = {"snapshot_every_n_steps": getattr(source, "snapshot_every_n_steps", 1)}
    return cast("Any", _import())(dataset, **{"batch_size": None, **options_of(source), **every, **changes})


def num_workers_of(state: Any) -> int | None:
    """Return how many workers a state of a StatefulDataLoader is of; None where it is no such state."""
    snapshot: Any = state.get("_snapshot")
    return None if snapshot is None else len(snapshot["_worker_snapshots"])


def _is_torchdatas(source: DataLoader[Any]) -> bool:
    # Without an import: whoever has such a loader has imported its package.
    kind = getattr(sys.modules.get(_HOME), "StatefulDataLoader", None)
    return kind is not None and isinstance(source, kind)


def _import() -> type[DataLoader[Any]]:
    try:
        return importlib.import_module(_HOME).StatefulDataLoader
    except ImportError as error:
        raise MissingExtraError(
            "DataLoaderConfiguration(use_stateful_dataloader=True) needs torchdata. Install it: "
            "pip install 'accelfn[data]'"
        ) from error
