"""Names of the files of a checkpoint."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.constants import (
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
