"""Logging by rank."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.logs import (
    get_logger as get_logger,
)
import accelfn.tracking as _tracking
from accelfn.compat.missing import refuse as _refuse

MultiProcessAdapter = _tracking.RankLogger


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
