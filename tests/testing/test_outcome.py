"""Of several errors the one that was the cause of the others."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import CollectiveTimeoutError, MissingRankError, RemoteRankError
from accelfn.testing.outcome import Outcome, conclude

FINE = Outcome(value=7)
OWN = Outcome(error=OSError("the disk"))
TIMED_OUT = Outcome(error=CollectiveTimeoutError("nobody came"))
MISSED = Outcome(error=MissingRankError("gone"))
TOLD = Outcome(error=RemoteRankError(1, "OSError", "the disk"))
LINGERING = Outcome(error=CollectiveTimeoutError("ended"), ended=False)
KILLED = Outcome(error=MissingRankError("killed"), seen_to_die=True)

# From the likeliest cause to the surest consequence; a rank that was ended has said nothing at all.
ORDER = (OWN, TIMED_OUT, MISSED, TOLD, LINGERING)


@given(st.permutations((*ORDER, FINE)), st.integers(1, 6))
def test_the_likeliest_cause_is_raised_whatever_its_rank(drawn: Sequence[Outcome], size: int) -> None:
    outcomes = drawn[:size]
    failed = [one for one in ORDER if one in outcomes]
    if not failed:
        assert conclude(outcomes, "memory") == [7]
        return
    with pytest.raises(BaseException) as caught:  # noqa: PT011 -- which one is asserted
        conclude(outcomes, "memory")
    assert caught.value is failed[0].error


def test_a_rank_that_was_seen_to_die_comes_before_what_is_only_heard() -> None:
    with pytest.raises(MissingRankError, match="killed"):
        conclude([TOLD, TIMED_OUT, MISSED, LINGERING, KILLED], "processes")


def test_the_note_tells_who_failed_too_and_who_did_not_end() -> None:
    with pytest.raises(RemoteRankError) as caught:
        conclude([FINE, TOLD, LINGERING, TOLD, LINGERING], "processes")
    # Notes are of Python 3.11 and later. The error is one for all tests, so the last note is ours.
    for note in getattr(caught.value, "__notes__", [])[-1:]:
        assert note == (
            "raised on rank 1 of 5 (processes); also failed: rank 3 RemoteRankError; "
            "did not end in time: rank 2, rank 4"
        )


def test_ranks_of_which_none_ended_are_a_timeout() -> None:
    with pytest.raises(CollectiveTimeoutError, match="ended"):
        conclude([FINE, LINGERING, LINGERING], "processes")
