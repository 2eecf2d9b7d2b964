"""Experiment trackers, logging, progress bars and profiling."""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from accelfn.tracking.adapters import (
    AimTracker as AimTracker,
    BuiltInTracker as BuiltInTracker,
    ClearMLTracker as ClearMLTracker,
    CometMLTracker as CometMLTracker,
    DVCLiveTracker as DVCLiveTracker,
    MLflowTracker as MLflowTracker,
    SwanLabTracker as SwanLabTracker,
    TensorBoardTracker as TensorBoardTracker,
    TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
)
from accelfn.tracking.jsonl import JSONLTracker as JSONLTracker
from accelfn.tracking.logs import (
    RankLogger as RankLogger,
    get_logger as get_logger,
    tqdm as tqdm,
)
from accelfn.tracking.profiling import profile as profile
from accelfn.tracking.tracker import (
    BlankTracker as BlankTracker,
    GeneralTracker as GeneralTracker,
)
from accelfn.tracking.trackers import (
    OnError as OnError,
    TrackerPlan as TrackerPlan,
    Trackers as Trackers,
    finish as finish,
    get_tracker as get_tracker,
    init_trackers as init_trackers,
    log as log,
    log_images as log_images,
    log_table as log_table,
    plan_trackers as plan_trackers,
)
from accelfn.tracking.values import (
    plain_config as plain_config,
    read_numbers as read_numbers,
)
