"""A tree on disk, and when it is time to write it."""

from accelfn.checkpoint.accelerate.reading import AccelerateState, read_accelerate
from accelfn.checkpoint.accelerate.tree import from_accelerate, to_accelerate
from accelfn.checkpoint.accelerate.writing import write_accelerate
from accelfn.checkpoint.conversion.convert import Conversion, convert_checkpoint
from accelfn.checkpoint.conversion.merge import merge_fsdp_weights
from accelfn.checkpoint.files.find import find_checkpoints, latest_checkpoint
from accelfn.checkpoint.files.keep import Keep, plan_retention, prune_checkpoints
from accelfn.checkpoint.files.verify import CheckpointReport, verify_checkpoint
from accelfn.checkpoint.preemption import EXIT_PREEMPTED, STOP_SIGNALS, PreemptionGuard, preemption
from accelfn.checkpoint.state.attachments import folder_for_files
from accelfn.checkpoint.state.background import SaveHandle
from accelfn.checkpoint.state.load import find_checkpoint, load_latest, load_state, load_tree
from accelfn.checkpoint.state.save import save_state, save_tree
from accelfn.checkpoint.weights.index import WeightsFiles, find_weights
from accelfn.checkpoint.weights.load import LoadReport, load_model
from accelfn.checkpoint.weights.plan import WeightNames, WeightsPlan, parse_size, plan_weights
from accelfn.checkpoint.weights.save import save_model, save_object
from accelfn.checkpoint.weights.state import get_state_dict

__all__ = (
    "EXIT_PREEMPTED",
    "STOP_SIGNALS",
    "AccelerateState",
    "CheckpointReport",
    "Conversion",
    "Keep",
    "LoadReport",
    "PreemptionGuard",
    "SaveHandle",
    "WeightNames",
    "WeightsFiles",
    "WeightsPlan",
    "convert_checkpoint",
    "find_checkpoint",
    "find_checkpoints",
    "find_weights",
    "folder_for_files",
    "from_accelerate",
    "get_state_dict",
    "latest_checkpoint",
    "load_latest",
    "load_model",
    "load_state",
    "load_tree",
    "merge_fsdp_weights",
    "parse_size",
    "plan_retention",
    "plan_weights",
    "preemption",
    "prune_checkpoints",
    "read_accelerate",
    "save_model",
    "save_object",
    "save_state",
    "save_tree",
    "to_accelerate",
    "verify_checkpoint",
    "write_accelerate",
)
