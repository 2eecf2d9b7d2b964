"""Parsers of commands: none of them is here."""

import typing as _typing

from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
