# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context

NEWEST = af.init_scaler(Context())
values = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6)


def with_grads(numbers: list[float]) -> list[torch.Tensor]:
    parameters = [torch.zeros((), requires_grad=True) for _ in numbers]
    for parameter, number in zip(parameters, numbers, strict=True):
        parameter.grad = torch.tensor(number)
    return parameters


@given(values, st.floats(0.125, 10), st.sampled_from([1.0, 2.0, math.inf]))
def test_the_norm_is_returned_and_then_bounded(numbers: list[float], bound: float, kind: float) -> None:
    parameters = with_grads(numbers)
    before = torch.linalg.vector_norm(torch.tensor(numbers), kind)
    norm = af.clip_grad_norm_(Context(), parameters, bound, kind, scaler_state=NEWEST)
    torch.testing.assert_close(norm, before)
    after = torch.stack([one.grad for one in parameters if one.grad is not None])
    assert torch.linalg.vector_norm(after, kind) <= bound * 1.001
    if before < bound * 0.99:
        torch.testing.assert_close(after, torch.tensor(numbers))
    without = torch.zeros(1, requires_grad=True)
    assert af.clip_grad_norm_(Context(), without, bound, kind, scaler_state=NEWEST) == 0


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="max_norm must be positive"):
        af.clip_grad_norm_(Context(), [], bound, scaler_state=NEWEST)
    with pytest.raises(ValueError, match="clip_value must be positive"):
        af.clip_grad_value_(Context(), [], bound, scaler_state=NEWEST)


@pytest.mark.parametrize("clip", [af.clip_grad_norm_, af.clip_grad_value_])
def test_gradients_that_are_not_ready_are_refused(clip: Callable[..., Any]) -> None:
    ctx, parameter = Context(), torch.ones(1, requires_grad=True)
    with pytest.raises(TypeError, match="scaler_state"):  # without it nobody knows whether they are sums
        clip(ctx, parameter, 1.0)
    state = af.backward(ctx, parameter.sum(), NEWEST._replace(), weight=2)
    with pytest.raises(ValueError, match="not divided by loss scale and weight yet"):
        clip(ctx, parameter, 1.0, scaler_state=state)
    windows = af.microbatches(ctx.replace(gradient_accumulation_steps=2), [0, 0])
    _, micro = next(windows)
    opened = af.backward(ctx, parameter.sum(), NEWEST._replace(), micro)
    with pytest.raises(ValueError, match=r"window is still open.*if micro\.sync"):
        clip(ctx, parameter, 1.0, scaler_state=opened)
    closed = af.backward(ctx, parameter.sum(), opened, next(windows)[1])
    with pytest.raises(ValueError, match="superseded: backward returned a newer one"):
        clip(ctx, parameter, 1.0, scaler_state=opened)
    clip(ctx, parameter, 1.0, scaler_state=closed)
    torch.testing.assert_close(parameter.grad, torch.ones(1))


def test_sparse_gradients_are_clipped_as_dense_ones() -> None:
    grads = dict[bool, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
    for sparse in (False, True):
        model = torch.nn.Embedding(4, 2, sparse=sparse)
        torch.nn.init.ones_(model.weight)
        model(torch.tensor([1, 2, 2])).square().sum().backward()
        norm = af.clip_grad_norm_(Context(), model.parameters(), 1.0, scaler_state=NEWEST)
        assert model.weight.grad is not None
        by_norm = model.weight.grad.to_dense().clone()
        af.clip_grad_value_(Context(), model.parameters(), 0.25, scaler_state=NEWEST)
        grads[sparse] = norm, by_norm, model.weight.grad.to_dense()
    torch.testing.assert_close(grads[True], grads[False])
