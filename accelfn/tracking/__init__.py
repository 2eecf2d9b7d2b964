"""What a run leaves to look at: experiment trackers and profiles."""

from accelfn.tracking.built_in import (
    AimTracker,
    BuiltInTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    JSONLTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)
from accelfn.tracking.choose import TrackerPlan, plan_trackers
from accelfn.tracking.profiling import profile
from accelfn.tracking.tracker import BlankTracker, GeneralTracker
from accelfn.tracking.trackers import (
    OnError,
    TrackerHistory,
    Trackers,
    finish,
    get_tracker,
    init_trackers,
    log,
    log_images,
    log_table,
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
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackerHistory",
    "TrackerPlan",
    "Trackers",
    "TrackioTracker",
    "WandBTracker",
    "finish",
    "get_tracker",
    "init_trackers",
    "log",
    "log_images",
    "log_table",
    "plain_config",
    "plan_trackers",
    "profile",
    "read_numbers",
)
