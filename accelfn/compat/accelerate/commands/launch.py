"""Start a script on several processes."""

from typing import NoReturn

import accelfn.compat.commands as _commands
from accelfn.compat.missing import refuse as _refuse

main = _commands.launch_main


def __getattr__(name: str) -> NoReturn:
    _refuse(__name__, name)
