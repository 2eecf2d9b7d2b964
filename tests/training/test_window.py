"""How the batch of a train step becomes the pieces of a window, and what they tell becomes one metric."""

# torch types tolist as one of unknowns.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context, Loss, StepMetrics
from tests.training.optimizers import Sgd


def metrics_of(
    loss_fn: Callable[[Any, Any], Any], batch: Any, steps: int = 2, params: Any = None
) -> StepMetrics:
    ctx = Context().replace(gradient_accumulation_steps=steps)
    state = af.init_train_state(ctx, Sgd(1.0), torch.ones(()) if params is None else params)
    return af.make_train_step(ctx, loss_fn, Sgd(1.0))(state, batch)[1]


@given(st.integers(1, 12), st.integers(1, 6))
def test_pieces_hold_each_row_once_in_order_and_differ_by_one_row(rows: int, steps: int) -> None:
    pieces: list[Any] = []

    def loss_fn(param: Any, piece: Any) -> Any:
        pieces.append(piece)
        return (param * piece["x"]).mean()

    x = torch.arange(rows).float()
    metrics = metrics_of(loss_fn, {"x": x, "y": (x * 2, None), "scale": torch.tensor(0.5)}, steps)
    assert metrics.loss == pytest.approx(float(x.mean()))  # longer pieces count more
    assert len(pieces) == min(rows, steps)
    assert torch.cat([piece["x"] for piece in pieces]).tolist() == x.tolist()
    assert torch.cat([piece["y"][0] for piece in pieces]).tolist() == (x * 2).tolist()
    assert all(piece["scale"] == 0.5 for piece in pieces)
    sizes = [len(piece["x"]) for piece in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_a_window_of_one_step_is_the_batch_itself_whatever_it_is() -> None:
    batch, seen = object(), list[object]()
    metrics_of(lambda param, piece: (seen.append(piece), param)[1], batch, 1)
    assert seen == [batch]


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"x": torch.ones(4), "names": ["a", "b"]}, "batch['names'][0] is of type str"),
        ({"x": torch.ones(4), "y": torch.ones(3)}, "batch['y'] has 3 rows, where an earlier tensor has 4"),
        (torch.ones(0, 2), "this one has no rows"),
        ((torch.tensor(1.0), None), "this one has no such dimension"),
        (torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]), "is of type PackedSequence"),
    ],
)
def test_a_batch_that_cant_be_cut_is_refused(batch: Any, found: str) -> None:
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2 .*" + re.escape(found)):
        metrics_of(lambda param, piece: param, batch)


@pytest.mark.parametrize(
    ("others", "error", "text"),
    [
        ([{}, {"weight": 1.0}], ValueError, "a weight for one piece"),
        ([{"aux": 1.0}, {"aux": {"a": 1.0}}], ValueError, "another structure or other shapes"),
        ([{"aux": torch.ones(1)}, {"aux": torch.ones(2)}], ValueError, "another structure or other shapes"),
        ([{"aux": {"name": "x"}}] * 2, TypeError, r"aux\['name'\] is of type str, which can't be averaged"),
    ],
)
def test_what_doesnt_add_up_is_refused(others: list[Any], error: type[Exception], text: str) -> None:
    pieces = iter(others)
    with pytest.raises(error, match=text):
        metrics_of(lambda param, piece: Loss(param, **next(pieces)), torch.ones(2))


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_metrics_are_plain_numbers_in_float32_or_float64(dtype: torch.dtype, kept: torch.dtype) -> None:
    counts = iter((3, torch.tensor(0)))  # numbers and tensors
    metrics = metrics_of(
        lambda param, piece: Loss(param * 4, 2, {"right": next(counts)}),
        torch.ones(2),
        params=torch.ones(1, dtype=dtype),
    )
    assert (metrics.loss.dtype, metrics.loss.shape, metrics.loss.requires_grad) == (kept, (), False)
    assert (float(metrics.loss), float(metrics.aux["right"])) == (2.0, 0.75)
