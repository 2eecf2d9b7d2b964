"""FSDP."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.fsdp import (
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accelfn.checkpoint import (
    merge_fsdp_weights as merge_fsdp_weights,
)
from accelfn.compat.constants import (
    FSDP_MODEL_NAME as FSDP_MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
)
from accelfn.compat.helpers import (
    get_parameters_from_modules as get_parameters_from_modules,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
