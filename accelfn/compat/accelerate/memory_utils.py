"""Memory."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from typing import NoReturn

from accelfn.training import (
    find_executable_batch_size as find_executable_batch_size,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> NoReturn:
    _refuse(__name__, name)
