"""Versions of packages."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.available import (
    STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC,
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
