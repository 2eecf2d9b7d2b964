"""Experiment trackers, logging, progress bars and profiling."""

from accelfn.tracking.adapters import (
    AimTracker,
    BuiltInTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)
from accelfn.tracking.jsonl import JSONLTracker
from accelfn.tracking.logs import ProgressBar, RankLogger, get_logger, tqdm
from accelfn.tracking.profiling import profile
from accelfn.tracking.tracker import BlankTracker, GeneralTracker
from accelfn.tracking.trackers import (
    OnError,
    TrackerPlan,
    Trackers,
    finish,
    get_tracker,
    init_trackers,
    log,
    log_images,
    log_table,
    plan_trackers,
)
from accelfn.tracking.values import plain_config, read_numbers

__all__ = (
    "AimTracker",
    "BlankTracker",
    "BuiltInTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLTracker",
    "MLflowTracker",
    "OnError",
    "ProgressBar",
    "RankLogger",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackerPlan",
    "Trackers",
    "TrackioTracker",
    "WandBTracker",
    "finish",
    "get_logger",
    "get_tracker",
    "init_trackers",
    "log",
    "log_images",
    "log_table",
    "plain_config",
    "plan_trackers",
    "profile",
    "read_numbers",
    "tqdm",
)
