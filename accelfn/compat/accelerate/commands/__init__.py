"""The command line."""

import typing

from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> typing.NoReturn:
    _refuse(__name__, name)
