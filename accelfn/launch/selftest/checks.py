"""The list of checks, in their order."""

from __future__ import annotations

from accelfn.launch.selftest.learning import (
    check_accelerator,
    check_accumulation,
    check_bf16,
    check_configured,
    check_fp32,
)
from accelfn.launch.selftest.loading import (
    check_dispatched,
    check_resumed,
    check_shuffled,
    check_split,
    check_uneven,
)
from accelfn.launch.selftest.ranks import (
    check_collectives,
    check_objects,
    check_process_control,
    check_random,
    check_trigger_state,
    check_world,
)
from accelfn.launch.selftest.saving import check_checkpoint
from accelfn.launch.selftest.trial import Check

__all__ = ("CHECKS",)

CHECKS = (
    Check("ranks and settings", check_world),
    Check("collectives", check_collectives),
    Check("objects across ranks", check_objects),
    Check("process control", check_process_control),
    Check("trigger", check_trigger_state),
    Check("random states", check_random),
    Check("loader, shuffled", check_shuffled),
    Check("loader, even batches", check_uneven),
    Check("loader, split batches", check_split),
    Check("loader, dispatched", check_dispatched),
    Check("loader, resumed", check_resumed),
    Check("training, fp32", check_fp32),
    Check("training, accumulation", check_accumulation),
    Check("training, bf16", check_bf16),
    Check("training, as configured", check_configured),
    Check("training, Accelerator", check_accelerator),
    Check("checkpoint round trip", check_checkpoint),
)
