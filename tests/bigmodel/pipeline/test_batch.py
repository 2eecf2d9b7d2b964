from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.bigmodel.pipeline.batch import join_results, micro_batch, read_batch, read_example

CPU = torch.device("cpu")
EXAMPLE = read_example(
    (torch.zeros(4, 3), [torch.zeros(2), 7]), {"mask": torch.zeros(4, 1, dtype=torch.bool), "mode": "sum"}
)


def a_batch(rows: int, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    said: dict[str, Any] = {
        "x": torch.randn(rows, 3),
        "shared": torch.arange(2.0),
        "number": 7,
        "mask": torch.ones(rows, 1, dtype=torch.bool),
        "mode": "sum",
        **changes,
    }
    # The order of keyword arguments doesn't matter.
    return (said["x"], [said["shared"], said["number"]]), {"mode": said["mode"], "mask": said["mask"]}


@given(num_rows=st.integers(1, 9), rows=st.integers(1, 4))
def test_micro_batches_put_together_are_the_batch(num_rows: int, rows: int) -> None:
    args, kwargs = a_batch(num_rows)
    batch = read_batch(EXAMPLE, args, kwargs)
    assert batch.num_rows == num_rows
    count = -(-num_rows // rows)
    parts = [micro_batch(EXAMPLE, batch, index, rows, CPU) for index in range(count)]
    for x, shared, number, mask, mode in parts:
        assert x.shape == (rows, 3)
        assert mask.shape == (rows, 1)
        assert torch.equal(shared, torch.arange(2.0))
        assert (number, mode) == (7, "sum")
    x, mask = join_results([(part[0], part[3]) for part in parts], num_rows)
    assert torch.equal(x, args[0])
    assert torch.equal(mask, kwargs["mask"])
    missing = count * rows - num_rows
    if missing:  # the last row fills up
        assert torch.equal(parts[-1][0][rows - missing :], args[0][-1:].expand(missing, 3))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x": torch.zeros(4, 5)}, r"args\[0\] is float32 \(4, 5\), .* for float32 \(any, 3\)"),
        ({"x": torch.zeros(4, 3, 1)}, r"args\[0\] is float32 \(4, 3, 1\)"),
        ({"x": torch.zeros(4, 3, dtype=torch.float64)}, r"args\[0\] is float64"),
        ({"x": "rows"}, r"args\[0\] is 'rows', and the model was prepared for float32 \(4, 3\)"),
        ({"shared": torch.zeros(3)}, r"args\[1\]\[0\] is float32 \(3\), .* for float32 \(2\)"),
        ({"number": 8}, r"args\[1\]\[1\] is 8, and the model was prepared for 7"),
        ({"number": 7.0}, r"args\[1\]\[1\] is 7.0"),
        ({"number": torch.tensor(7)}, r"args\[1\]\[1\] is int64 \(\)"),
        ({"mode": "mean"}, r"kwargs\['mode'\] is 'mean'"),
        ({"mask": torch.ones(3, 1, dtype=torch.bool)}, r"kwargs\['mask'\] has 3 rows, .* before it has 4"),
        ({"x": torch.zeros(0, 3), "mask": torch.ones(0, 1, dtype=torch.bool)}, "the batch has no rows"),
        ({"shared": (torch.zeros(2),)}, "another structure than those of the example"),
    ],
)
def test_a_batch_that_is_not_like_the_example_is_refused(changes: dict[str, Any], says: str) -> None:
    args, kwargs = a_batch(4, **changes)
    with pytest.raises(ValueError, match=says):
        read_batch(EXAMPLE, args, kwargs)


def test_other_keyword_arguments_are_refused() -> None:
    args, kwargs = a_batch(4)
    with pytest.raises(
        ValueError, match=r"\['mask', 'mode', 'more'\], and the example had \['mask', 'mode'\]"
    ):
        read_batch(EXAMPLE, args, {**kwargs, "more": 1})
    with pytest.raises(ValueError, match=r"got the keyword arguments \['mode'\]"):
        read_batch(EXAMPLE, args, {"mode": "sum"})


def test_an_example_needs_rows() -> None:
    with pytest.raises(ValueError, match="no batch dimension"):
        read_example((torch.tensor(1.0), 3), {})
    with pytest.raises(ValueError, match="no batch dimension"):
        read_example((), {})
    with pytest.raises(ValueError, match="the batch of the example is empty"):
        read_example((torch.zeros(0, 3),), {})
