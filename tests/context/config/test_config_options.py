import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context.config.options import FrozenOptions, thaw

TREES = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), TREES, max_size=4))
def test_freezing_and_thawing_is_the_identity(options: dict[str, Any]) -> None:
    frozen = FrozenOptions(options)
    assert thaw(frozen) == options == frozen
    assert pickle.loads(pickle.dumps(frozen)) == frozen == copy.deepcopy(frozen)
    assert hash(frozen) == hash(FrozenOptions(dict(reversed(options.items()))))


def test_options_do_not_follow_the_dict_they_came_from() -> None:
    inner = {"a": [1, 2]}
    frozen = FrozenOptions({"inner": inner})
    inner["a"].append(3)
    inner["b"] = [4]
    assert frozen == {"inner": {"a": (1, 2)}}


def test_options_cannot_be_changed() -> None:
    frozen: Any = FrozenOptions({"a": 1})
    with pytest.raises(TypeError):
        frozen["a"] = 2
    with pytest.raises(AttributeError, match="cannot be changed"):
        frozen._items = {}
