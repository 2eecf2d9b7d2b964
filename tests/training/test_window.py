# torch types tolist as one of unknowns.
# pyright: reportUnknownMemberType=false

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn import Context, Loss
from accelfn.training.window import Piece, add_terms, average, cut_window, terms_of


@given(st.integers(1, 12), st.integers(1, 6))
def test_pieces_hold_each_row_once_in_order_and_differ_by_one_row(rows: int, steps: int) -> None:
    x = torch.arange(rows)
    pieces = cut_window({"x": x, "y": (x * 2, None), "scale": torch.tensor(0.5)}, steps)
    assert len(pieces) == min(rows, steps)
    assert torch.cat([piece.batch["x"] for piece in pieces]).tolist() == x.tolist()
    assert torch.cat([piece.batch["y"][0] for piece in pieces]).tolist() == (x * 2).tolist()
    assert all(piece.batch["scale"] == 0.5 for piece in pieces)
    sizes = [len(piece.batch["x"]) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert [piece.share for piece in pieces] == [size * len(pieces) / rows for size in sizes]


def test_a_window_of_one_step_is_the_batch_itself_whatever_it_is() -> None:
    batch = object()
    assert cut_window(batch, 1) == [Piece(batch, 1.0)]


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"x": torch.ones(4), "names": ["a", "b"]}, "batch['names'][0] is of type str"),
        ({"x": torch.ones(4), "y": torch.ones(3)}, "batch['y'] has 3 rows, where an earlier tensor has 4"),
        (torch.ones(0, 2), "this one has no rows"),
        ((torch.tensor(1.0), None), "this one has no such dimension"),
        (
            torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
            "batch is of type PackedSequence",
        ),
    ],
)
def test_a_batch_that_cant_be_cut_is_refused(batch: Any, found: str) -> None:
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2 .*" + re.escape(found)):
        cut_window(batch, 2)


def test_sums_are_divided_by_all_weight_and_means_by_their_rows() -> None:
    ctx = Context()
    whole = Piece(None, 1.0)
    first = terms_of(Loss(torch.tensor(4.0), 1.0, {"right": torch.tensor(3)}), whole, 2)
    second = terms_of(Loss(torch.tensor(2.0), torch.tensor(2), {"right": 0}), whole, 2)
    terms, _ = average(ctx, add_terms([first, second]))
    assert (terms.loss, terms.aux["right"]) == (2.0, 1.0)
    first = terms_of(Loss(torch.tensor(4.0), aux=[torch.ones(2)]), Piece(None, 4 / 3), 2)
    second = terms_of(Loss(torch.tensor(1.0), aux=[torch.zeros(2)]), Piece(None, 2 / 3), 2)
    terms, _ = average(ctx, add_terms([first, second]))
    assert terms.loss == pytest.approx(3.0)
    assert terms.aux[0].tolist() == [pytest.approx(2 / 3)] * 2


def test_what_doesnt_add_up_is_refused() -> None:
    piece, one = Piece(None, 1.0), torch.tensor(1.0)
    mean = terms_of(Loss(one), piece, 2)
    with pytest.raises(ValueError, match="a weight for one piece"):
        add_terms([mean, terms_of(Loss(one, 1.0), piece, 2)])
    for aux in ({"a": one}, torch.ones(2)):
        with pytest.raises(ValueError, match="another structure or other shapes"):
            add_terms([terms_of(Loss(one, aux=one), piece, 2), terms_of(Loss(one, aux=aux), piece, 2)])
    with pytest.raises(TypeError, match=r"aux\['name'\] is of type str, which has no average"):
        terms_of(Loss(one, aux={"name": "x"}), piece, 1)


def test_metrics_are_float32_or_float64() -> None:
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        terms = terms_of(Loss(torch.ones(1, dtype=dtype, requires_grad=True), 1), Piece(None, 1.0), 1)
        assert (terms.loss.dtype, terms.loss.shape, terms.loss.requires_grad) == (kept, (), False)
