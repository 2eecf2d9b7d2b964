import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import TriggerState, check_trigger, set_trigger
from accelfn.context import Context
from accelfn.testing import Where, run_ranks


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.booleans())
def test_all_ranks_see_what_any_rank_has_set(who: list[bool], debug: bool) -> None:
    def work(ctx: Context) -> list[bool]:
        state = TriggerState()
        if who[ctx.rank]:
            state = set_trigger(state)
        state, first = check_trigger(ctx, state)
        state, second = check_trigger(ctx, state)
        return [first, second, state.is_set]

    assert run_ranks(work, len(who), debug=debug) == [[any(who), False, False]] * len(who)


def test_setting_changes_nothing_but_the_new_state() -> None:
    state = TriggerState()
    assert set_trigger(set_trigger(state)).is_set
    assert not state.is_set


@pytest.mark.parametrize("on", ["gloo", "processes"])
def test_other_worlds_agree_too(on: Where) -> None:
    assert run_ranks(lambda ctx: check_trigger(ctx, TriggerState(ctx.rank == 1))[1], 2, on) == [True, True]
