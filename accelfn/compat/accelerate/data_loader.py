"""Loaders."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from torch.utils.data import DataLoader as DataLoader

from accelfn.compat.loaders import (
    BatchSamplerShard as BatchSamplerShard,
    DataLoaderDispatcher as DataLoaderDispatcher,
    DataLoaderShard as DataLoaderShard,
    SeedableRandomSampler as SeedableRandomSampler,
    prepare_data_loader as prepare_data_loader,
    get_sampler as get_sampler,
)
from accelfn.compat.streams import (
    IterableDatasetShard as IterableDatasetShard,
)
from accelfn.data import (
    skip_first_batches as skip_first_batches,
)
import accelfn.data.loader as _loader
from accelfn.compat.missing import refuse as _refuse

# For `isinstance`, as the bases of prepared loaders.
DataLoaderAdapter = DataLoaderShard
DataLoaderStateMixin = DataLoaderShard
SkipBatchSampler = _loader.Skipped
SkipDataLoader = _loader.Skipped


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
