"""The processes and the options, without a context."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.constants import (
    DistributedType as DistributedType,
)
from accelfn.compat.states import (
    AcceleratorState as AcceleratorState,
    GradientState as GradientState,
    PartialState as PartialState,
    do_nothing as do_nothing,
    is_initialized as is_initialized,
)
from accelfn.compat.missing import refuse as _refuse

# What a state of a program's own may share among its instances.
SharedDict = dict


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
