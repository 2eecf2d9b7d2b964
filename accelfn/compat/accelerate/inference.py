"""Pipelines for inference."""

import typing as _typing

from accelfn.bigmodel import (
    prepare_pippy as prepare_pippy,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
