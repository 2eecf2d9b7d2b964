"""The built-in trackers: one adapter a module; a package is imported when its tracker starts."""

from accelfn.tracking.built_in.aim import AimTracker
from accelfn.tracking.built_in.base import BuiltInTracker, ProjectTracker, is_installed
from accelfn.tracking.built_in.clearml import ClearMLTracker
from accelfn.tracking.built_in.comet_ml import CometMLTracker
from accelfn.tracking.built_in.dvclive import DVCLiveTracker
from accelfn.tracking.built_in.jsonl import JSONLTracker
from accelfn.tracking.built_in.mlflow import MLflowTracker
from accelfn.tracking.built_in.swanlab import SwanLabTracker
from accelfn.tracking.built_in.tensorboard import TensorBoardTracker
from accelfn.tracking.built_in.trackio import TrackioTracker
from accelfn.tracking.built_in.wandb import WandBTracker

__all__ = (
    "AimTracker",
    "BuiltInTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "JSONLTracker",
    "MLflowTracker",
    "ProjectTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "is_installed",
)
