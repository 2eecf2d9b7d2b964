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
    check_mesh,
    check_objects,
    check_process_control,
    check_random,
    check_trigger_state,
    check_world,
)
from accelfn.launch.selftest.saving import check_checkpoint
from accelfn.launch.selftest.table import CHECK_NAMES
from accelfn.launch.selftest.trial import Check

__all__ = ("CHECKS",)

CHECKS = tuple(
    Check(name, run)
    for name, run in zip(
        CHECK_NAMES,
        (
            *(check_world, check_collectives, check_objects, check_process_control, check_trigger_state),
            *(check_random, check_mesh, check_shuffled, check_uneven, check_split, check_dispatched),
            check_resumed,
            *(check_fp32, check_accumulation, check_bf16, check_configured, check_accelerator),
            check_checkpoint,
        ),
        strict=True,
    )
)
