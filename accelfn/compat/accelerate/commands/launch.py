"""Start a script on several processes."""

import collections.abc as _abc
import typing as _typing

import accelfn.compat.commands as _commands
from accelfn.compat.missing import refuse as _refuse

main: _abc.Callable[..., _typing.Any] = _commands.launch_main


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
