"""Who this process is and how it was configured: records, environment, ``init_context``."""

from accelfn.context.collectives import Collectives, ReduceOp, chunk_bytes
from accelfn.context.context import Context, close_context, configure
from accelfn.context.device import DeviceFacts, DevicePlan, Hardware, plan_device, read_hardware
from accelfn.context.environment import EnvironmentPlan, detect_environment
from accelfn.context.init import DEFAULT_TIMEOUT, init_context
from accelfn.context.options import ContextOptions, Strategy
from accelfn.context.precision import Precision, check_precision
from accelfn.context.process_group import process_group_collectives
from accelfn.context.world import Made, World

__all__ = (
    "DEFAULT_TIMEOUT",
    "Collectives",
    "Context",
    "ContextOptions",
    "DeviceFacts",
    "DevicePlan",
    "EnvironmentPlan",
    "Hardware",
    "Made",
    "Precision",
    "ReduceOp",
    "Strategy",
    "World",
    "check_precision",
    "chunk_bytes",
    "close_context",
    "configure",
    "detect_environment",
    "init_context",
    "plan_device",
    "process_group_collectives",
    "read_hardware",
)
