import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import Collectives
from accelfn.testing import Fault, InjectedFaultError
from accelfn.testing.faults import inject


def never() -> None:
    raise AssertionError("nobody was to die")


def call_all(collectives: Collectives, count: int) -> None:
    """Call the seam ``count`` times, another function each time."""
    row = torch.zeros(1, dtype=torch.uint8)
    calls = (
        lambda: collectives.exchange(row),
        lambda: collectives.all_gather(row),
        lambda: collectives.all_reduce(row, "sum"),
        lambda: collectives.broadcast(row, 0),
        lambda: collectives.scatter(row, row, 0),
        lambda: collectives.all_to_all(row),
        lambda: collectives.barrier(),
    )
    for number in range(count):
        calls[number % len(calls)]()


@given(st.integers(0, 10))
def test_the_kth_call_of_any_kind_raises(at: int) -> None:
    faulty = inject(Collectives(), 1, 2, [Fault(kind="raise", rank=1, at=at)], never)
    call_all(faulty, at)
    with pytest.raises(InjectedFaultError, match=f"rank 1 raises at its collective {at}"):
        faulty.barrier()
    call_all(faulty, 3)


def test_faults_of_others_do_nothing() -> None:
    collectives = Collectives()
    assert inject(collectives, 0, 1, [Fault(kind="raise", rank=1)], never) is collectives


def test_death_is_left_to_the_world() -> None:
    died: list[int] = []
    faulty = inject(Collectives(chunk=99), 0, 1, [Fault(kind="die", rank=0, at=2)], lambda: died.append(1))
    call_all(faulty, 2)
    assert died == []
    call_all(faulty, 2)
    assert died == [1]
    assert faulty.chunk == 99
