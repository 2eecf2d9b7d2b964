"""Start a script on several processes."""

import collections.abc
import typing

import accelfn.compat.commands as _commands
from accelfn.compat.missing import refuse as _refuse

main: collections.abc.Callable[..., typing.Any] = _commands.launch_main


def __getattr__(name: str) -> typing.NoReturn:
    _refuse(__name__, name)
