from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.bigmodel.pipeline.run import cut_batch, join_results


@given(num_rows=st.integers(1, 9), num_chunks=st.integers(1, 12))
def test_micro_batches_put_together_are_the_batch(num_rows: int, num_chunks: int) -> None:
    batch: dict[str, Any] = {
        "x": torch.randn(num_rows, 3),
        "shared": torch.arange(num_rows + 1),
        "mode": "sum",
    }
    pieces = cut_batch(batch, num_chunks)
    assert len(pieces) <= num_chunks
    assert [rows for rows, _ in pieces] == [len(piece["x"]) for _, piece in pieces]
    assert all(piece["shared"] is batch["shared"] and piece["mode"] == "sum" for _, piece in pieces)
    joined = join_results([(piece["x"], piece["mode"]) for _, piece in pieces], [rows for rows, _ in pieces])
    assert torch.equal(joined[0], batch["x"])
    assert joined[1] == "sum"


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((torch.tensor(1.0), 3), "no batch dimension"),
        ((), "no batch dimension"),
        (torch.zeros(0, 3), "the batch has no rows"),
    ],
)
def test_a_batch_needs_rows(batch: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cut_batch(batch, 2)


@pytest.mark.parametrize("shape", [(8,), ()])
def test_a_result_needs_the_rows_of_its_micro_batch(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"has the shape \({'8,' if shape else ''}\) for 2 rows"):
        join_results([torch.zeros(shape)], [2])
