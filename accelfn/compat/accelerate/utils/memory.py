"""Memory."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import collections.abc as _abc
import typing as _typing

from accelfn.training import (
    clear_device_cache as clear_device_cache,
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
)
import accelfn.training as _training
from accelfn.compat.missing import refuse as _refuse

should_reduce_batch_size: _abc.Callable[..., bool] = _training.is_out_of_memory


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
