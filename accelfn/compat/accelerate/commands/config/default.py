"""A configuration of launches without questions."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.commands import (
    default_config_file as default_config_file,
    write_basic_config as write_basic_config,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
