"""Files with the configuration of launches."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.commands import (
    default_config_file as default_config_file,
    load_config_from_file as load_config_from_file,
)
from accelfn.compat.constants import (
    DistributedType as DistributedType,
    ComputeEnvironment as ComputeEnvironment,
    SageMakerDistributedType as SageMakerDistributedType,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
