from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context.config import Guard, GuardMode
from accelfn.errors import ConfigurationError

LENGTHS = st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(days=3650))


def test_the_defaults() -> None:
    guard = Guard()
    assert guard.mode is None
    assert guard.call_sites
    assert (guard.timeout_s, guard.long_timeout_s) == (300.0, 1800.0)
    assert not guard.watchdog
    assert guard.check_replicas_every is None
    assert guard.check_replicas_before_saving


@pytest.mark.parametrize("mode", list(GuardMode))
def test_a_mode_is_a_name_or_a_member(mode: GuardMode) -> None:
    assert Guard(mode=mode) == Guard(mode=mode.value) == Guard(mode=mode.value.upper())
    assert Guard(mode=mode.value).mode is mode


def test_another_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"Guard\.mode .*'some'.* full, sampled, off"):
        Guard(mode="some")


@pytest.mark.parametrize("name", ["timeout", "long_timeout"])
def test_a_timeout_is_a_length_of_time(name: str) -> None:
    for value in (5, 5.0, "5", None):
        with pytest.raises(TypeError, match=rf"Guard\.{name}.*datetime\.timedelta"):
            Guard(**{name: value})  # pyright: ignore[reportArgumentType]
    for length in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ConfigurationError, match=rf"Guard\.{name} must be longer than zero"):
            Guard(**{name: length})  # pyright: ignore[reportArgumentType]


@given(LENGTHS, LENGTHS)
def test_long_operations_never_wait_less_than_others(timeout: timedelta, long_timeout: timedelta) -> None:
    guard = Guard(timeout=timeout, long_timeout=long_timeout)
    assert guard.timeout_s == timeout.total_seconds() > 0
    assert guard.long_timeout_s == max(timeout.total_seconds(), long_timeout.total_seconds())


@pytest.mark.parametrize("value", [0, -3])
def test_replicas_are_checked_every_so_many_steps_or_never(value: int) -> None:
    assert Guard(check_replicas_every=1).check_replicas_every == 1
    with pytest.raises(ConfigurationError, match=rf"Guard\.check_replicas_every .*{value}"):
        Guard(check_replicas_every=value)


@pytest.mark.parametrize("value", ["5", 2.0, True])
def test_a_number_of_steps_is_a_whole_number(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Guard\.check_replicas_every"):
        Guard(check_replicas_every=value)
