"""Prepared optimizers."""

from typing import NoReturn

from accelfn.accelerator import (
    AcceleratedOptimizer as AcceleratedOptimizer,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> NoReturn:
    _refuse(__name__, name)
