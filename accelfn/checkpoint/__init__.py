"""Save and load the state of a run, trees, and weights; stop when the cluster preempts the job."""

from accelfn.checkpoint.accelerate import read_accelerate
from accelfn.checkpoint.attachments import folder_for_files
from accelfn.checkpoint.background import SaveHandle
from accelfn.checkpoint.convert import Conversion, convert_checkpoint
from accelfn.checkpoint.find import find_checkpoints, latest_checkpoint
from accelfn.checkpoint.keep import Keep, plan_retention, prune_checkpoints
from accelfn.checkpoint.load import find_checkpoint, find_files, load_latest, load_state, load_tree
from accelfn.checkpoint.save import save_state, save_tree
from accelfn.checkpoint.save_weights import save_model, save_object
from accelfn.checkpoint.sharded_folder import merge_fsdp_weights
from accelfn.checkpoint.stop_signals import EXIT_PREEMPTED, STOP_SIGNALS, PreemptionGuard, preemption
from accelfn.checkpoint.verify import CheckpointReport, verify_checkpoint
from accelfn.weights.index import find_weights
from accelfn.weights.load import LoadReport, load_model
from accelfn.weights.state import get_state_dict

__all__ = (
    "EXIT_PREEMPTED",
    "STOP_SIGNALS",
    "CheckpointReport",
    "Conversion",
    "Keep",
    "LoadReport",
    "PreemptionGuard",
    "SaveHandle",
    "convert_checkpoint",
    "find_checkpoint",
    "find_checkpoints",
    "find_files",
    "find_weights",
    "folder_for_files",
    "get_state_dict",
    "latest_checkpoint",
    "load_latest",
    "load_model",
    "load_state",
    "load_tree",
    "merge_fsdp_weights",
    "plan_retention",
    "preemption",
    "prune_checkpoints",
    "read_accelerate",
    "save_model",
    "save_object",
    "save_state",
    "save_tree",
    "verify_checkpoint",
)
