"""Who this process is and how it was configured: records, environment, ``init_context``."""

from accelfn.context.call_log import CallLog, Entry, OpenPass, Unsettled
from accelfn.context.callsite import call_site
from accelfn.context.collectives import Collectives, Part, ReduceOp, StartedAllGather, chunk_bytes
from accelfn.context.context import Context, check_context, close_context, configure, with_mesh
from accelfn.context.device import DeviceFacts, DevicePlan, Hardware, plan_device, read_hardware
from accelfn.context.environment import EnvironmentPlan, detect_environment
from accelfn.context.failure import (
    Departure,
    announce_end,
    as_error,
    explain_departure,
    news,
    publish,
    refuse_if_over,
    text_of,
)
from accelfn.context.init import init_context
from accelfn.context.mesh import AXES, JOINED, Mesh, MeshPlan, build_mesh, plan_mesh
from accelfn.context.message_board import MessageBoard, store_board
from accelfn.context.options import ContextOptions, Strategy
from accelfn.context.peer_monitor import PeerMonitor, late_error
from accelfn.context.planned import plan_context
from accelfn.context.precision import Precision, check_precision
from accelfn.context.process_group import make_gloo_group, process_group_collectives
from accelfn.context.watchdog import start_watchdog
from accelfn.context.world import Background, Owned, Settling, World, WorldIdentity

__all__ = (
    "AXES",
    "JOINED",
    "Background",
    "CallLog",
    "Collectives",
    "Context",
    "ContextOptions",
    "Departure",
    "DeviceFacts",
    "DevicePlan",
    "Entry",
    "EnvironmentPlan",
    "Hardware",
    "Mesh",
    "MeshPlan",
    "MessageBoard",
    "OpenPass",
    "Owned",
    "Part",
    "PeerMonitor",
    "Precision",
    "ReduceOp",
    "Settling",
    "StartedAllGather",
    "Strategy",
    "Unsettled",
    "World",
    "WorldIdentity",
    "announce_end",
    "as_error",
    "build_mesh",
    "call_site",
    "check_context",
    "check_precision",
    "chunk_bytes",
    "close_context",
    "configure",
    "detect_environment",
    "explain_departure",
    "init_context",
    "late_error",
    "make_gloo_group",
    "news",
    "plan_context",
    "plan_device",
    "plan_mesh",
    "process_group_collectives",
    "publish",
    "read_hardware",
    "refuse_if_over",
    "start_watchdog",
    "store_board",
    "text_of",
    "with_mesh",
)
