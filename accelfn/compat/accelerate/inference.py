"""Pipelines for inference."""

import typing

from accelfn.bigmodel import (
    prepare_pippy as prepare_pippy,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> typing.NoReturn:
    _refuse(__name__, name)
