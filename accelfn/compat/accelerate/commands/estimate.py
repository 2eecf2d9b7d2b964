"""The memory that a model needs."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.bigmodel import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    init_empty_weights as init_empty_weights,
)
from accelfn.compat.helpers import (
    convert_bytes as convert_bytes,
)
from accelfn.compat.available import (
    is_timm_available as is_timm_available,
    is_transformers_available as is_transformers_available,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
