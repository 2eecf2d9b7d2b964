"""Every program that ever failed has the verdict that is written down; a mended one stays equal."""

from __future__ import annotations

import pytest

from accelfn.testing.programs import check_programs, is_known
from tests.programs import records

FAILED = records.read_failed()
_SIZE = 12


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", range(0, len(FAILED), _SIZE))
def test_programs_that_failed_have_their_verdict(start: int) -> None:
    pairs = FAILED[start : start + _SIZE]
    refusals = records.read_refusals()
    verdicts = check_programs([program for _, program in pairs])
    for (kind, program), verdict in zip(pairs, verdicts, strict=True):
        assert verdict.kind == kind, f"{program}: {verdict.what}"
        if kind == "refused":
            assert records.one_line(verdict) == refusals[str(program)]


def test_each_refusal_is_of_a_program_that_failed() -> None:
    refused = [str(program) for kind, program in FAILED if kind == "refused"]
    assert [*records.read_refusals()] == refused


def test_the_sample_has_nothing_that_is_known_to_fail() -> None:
    findings = records.findings()
    assert [str(program) for program in records.read_sample() if is_known(program, findings)] == []
