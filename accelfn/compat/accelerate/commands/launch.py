"""Start a script on several processes."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import collections.abc as _abc
import typing as _typing

from accelfn.compat.commands import (
    launch_command as launch_command,
    launch_command_parser as launch_command_parser,
    load_config_from_file as load_config_from_file,
)
from accelfn.compat.helpers import (
    patch_environment as patch_environment,
)
import accelfn.compat.commands as _commands
from accelfn.compat.missing import refuse as _refuse

main: _abc.Callable[..., _typing.Any] = _commands.launch_main


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
