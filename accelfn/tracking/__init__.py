"""What a run shows and leaves to look at: experiment trackers, logs, progress, profiles."""

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
from accelfn.tracking.logger import RankLogger, get_logger
from accelfn.tracking.profiling import profile
from accelfn.tracking.progress import ProgressBar, tqdm
from accelfn.tracking.tracebacks import install_rich_tracebacks
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
    "ProgressBar",
    "RankLogger",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackerHistory",
    "TrackerPlan",
    "Trackers",
    "TrackioTracker",
    "WandBTracker",
    "finish",
    "get_logger",
    "get_tracker",
    "init_trackers",
    "install_rich_tracebacks",
    "log",
    "log_images",
    "log_table",
    "plain_config",
    "plan_trackers",
    "profile",
    "read_numbers",
    "tqdm",
)
