"""Pipelines for inference."""

from typing import NoReturn

from accelfn.bigmodel import (
    prepare_pippy as prepare_pippy,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> NoReturn:
    _refuse(__name__, name)
