"""The Accelerator."""

from typing import NoReturn

from accelfn.compat.accelerator import (
    Accelerator as Accelerator,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> NoReturn:
    _refuse(__name__, name)
