"""Quantisation by bitsandbytes."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.quantization import (
    load_and_quantize_model as load_and_quantize_model,
)
from accelfn.bigmodel import (
    has_4bit_bnb_layers as has_4bit_bnb_layers,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
