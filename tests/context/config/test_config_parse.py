from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context.config.enums import PrecisionType, ShardingStrategy
from accelfn.context.config.parse import (
    BOOL,
    DEVICE,
    NAMES,
    SIZE,
    TEXT,
    Form,
    choice,
    int_at_least,
    one_of,
    optional,
    or_auto,
    real_at_least,
)
from accelfn.errors import ConfigurationError


@pytest.mark.parametrize("word", ["y", "yes", "t", "true", "on", "1", "True", "YES", " on "])
def test_words_for_true(word: str) -> None:
    assert BOOL.parse("X", word) is True


@pytest.mark.parametrize("word", ["n", "no", "f", "false", "off", "0", "False", "NO", " off "])
def test_words_for_false(word: str) -> None:
    assert BOOL.parse("X", word) is False


@given(st.integers())
def test_integers_round_trip(number: int) -> None:
    assert int_at_least(min(number, 0)).parse("X", str(number)) == number


@given(st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_reals_round_trip(number: float) -> None:
    assert real_at_least(0.0).parse("X", repr(number)) == number


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        (DEVICE, "cuda:1", "cuda:1"),
        (NAMES, "A, B,,C ", ("A", "B", "C")),
        (SIZE, "1e8", 100_000_000),
        (SIZE, "12345678901234567891", 12345678901234567891),
        (TEXT, " a b ", "a b"),
        (choice(PrecisionType), "BF16", PrecisionType.BF16),
        (choice(ShardingStrategy, numbered=True), "2", ShardingStrategy.SHARD_GRAD_OP),
        (one_of("WSD"), "wsd", "WSD"),
        (optional(BOOL), "None", None),
        (optional(BOOL), "yes", True),
        (or_auto(int_at_least(1)), "auto", "auto"),
        (or_auto(int_at_least(1)), "4", 4),
    ],
)
def test_understood(form: Form[Any], text: str, value: object) -> None:
    assert form.parse("X", text) == value


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (BOOL, "maybe"),
        (BOOL, ""),
        (DEVICE, "cuda:"),
        (DEVICE, "CUDA 1"),
        (NAMES, " , "),
        (SIZE, "1.5"),
        (SIZE, "-1"),
        (SIZE, "inf"),
        (SIZE, "nan"),
        (TEXT, "  "),
        (choice(PrecisionType), "int4"),
        (choice(PrecisionType), "1"),
        (int_at_least(1), "0"),
        (int_at_least(1), "1_0"),
        (int_at_least(0, 3), "4"),
        (real_at_least(0.0), "nan"),
        (real_at_least(0.0), "inf"),
        (real_at_least(0.0, 1.0), "1.5"),
        (one_of("a", "b"), "c"),
        (optional(BOOL), "auto"),
        (or_auto(BOOL), "none"),
    ],
)
def test_not_understood(form: Form[Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        form.parse("SOME_NAME", text)
    message = str(caught.value)
    assert "SOME_NAME" in message
    assert repr(text) in message
    assert form.accepts in message
