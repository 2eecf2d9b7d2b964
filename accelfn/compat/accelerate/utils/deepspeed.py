"""DeepSpeed."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.compat.engines import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    HfDeepSpeedConfig as HfDeepSpeedConfig,
)
from accelfn.parallel.engines import (
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
