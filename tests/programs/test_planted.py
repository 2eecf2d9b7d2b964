"""Faults planted in the library are found by the programs that are drawn, and shrink to a few features."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from accelfn.parallel.buffers import BufferSync
from accelfn.parallel.strategies.thread_ddp import ThreadDDP
from accelfn.testing.programs import campaign, finding_of
from tests.programs import records
from tests.programs.grammar import GRAMMAR


def gradients_are_not_averaged(self: Any) -> None:
    """Of replicas in memory."""
    self._unreduced = None


def buffers_are_not_broadcast(self: BufferSync) -> bool:
    """Each rank goes on with its own."""
    return False


def windows_are_divided_by_their_full_length(
    ctx: Any, value: Any, weight: Any, scaler_state: Any, micro: Any
) -> Any:
    """Also the short one at the end of the data."""
    full = micro and micro._replace(window=ctx.gradient_accumulation_steps)
    return _divided(ctx, value, weight, scaler_state, full)


_BACKWARD = importlib.import_module("accelfn.training.backward_pass")
_divided = _BACKWARD.divide_loss


# Each with features of which the finding has one.
FAULTS: list[tuple[Any, str, Callable[..., Any], set[str]]] = [
    (ThreadDDP, "_average", gradients_are_not_averaged, {"dp", "world"}),
    (BufferSync, "is_due", buffers_are_not_broadcast, {"dp", "shard", "world", "block"}),
    (_BACKWARD, "divide_loss", windows_are_divided_by_their_full_length, {"accumulation"}),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("owner", "name", "fault", "features"), FAULTS, ids=[one[2].__name__ for one in FAULTS]
)
def test_a_planted_fault_is_found_and_shrinks_to_few_features(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    fault: Callable[..., Any],
    features: set[str],
) -> None:
    monkeypatch.setattr(owner, name, fault)
    avoid = records.findings()
    report = campaign(GRAMMAR, minutes=8, max_programs=200, max_findings=1, avoid=avoid)
    (shrunk,) = report.findings
    number = sum(report.verdicts.values())
    print(f"{fault.__name__}: {report.seconds:.0f} s, {number} programs: {shrunk.program}")
    # A save compares the replicas, and says so itself.
    assert shrunk.verdict.kind == "different" or "ReplicaDriftError" in shrunk.verdict.what
    assert len(finding_of(shrunk.program)) <= 3
    assert {name for name, _ in finding_of(shrunk.program)} & features
