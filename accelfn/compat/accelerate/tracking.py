"""Experiment trackers."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
import typing as _typing

from accelfn.tracking import (
    AimTracker as AimTracker,
    ClearMLTracker as ClearMLTracker,
    CometMLTracker as CometMLTracker,
    DVCLiveTracker as DVCLiveTracker,
    GeneralTracker as GeneralTracker,
    MLflowTracker as MLflowTracker,
    SwanLabTracker as SwanLabTracker,
    TensorBoardTracker as TensorBoardTracker,
    TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
)
from accelfn.compat.trackers import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers,
    on_main_process as on_main_process,
    register_tracker_class as register_tracker_class,
)
from accelfn.compat.missing import refuse as _refuse


def __getattr__(name: str) -> _typing.NoReturn:
    _refuse(__name__, name)
