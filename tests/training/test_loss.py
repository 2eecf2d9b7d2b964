"""What a loss function may return."""

import math
from typing import Any, cast

import pytest
import torch

from accelfn import Loss
from accelfn.training.loss import read_loss


def test_a_loss_function_may_return_a_tensor_or_a_loss_and_nothing_to_be_guessed_at() -> None:
    loss = Loss(torch.tensor(1.0, requires_grad=True), weight=2.0)
    assert read_loss("f", loss) is loss
    assert read_loss("f", loss.value) == Loss(loss.value)
    assert read_loss("f", Loss(loss.value.reshape(1, 1), 2.0)).value.shape == ()
    with pytest.raises(TypeError, match=r"f: .* got tuple\. .* in a pair would be a guess"):
        read_loss("f", (loss.value, 2.0))
    with pytest.raises(TypeError, match="got float"):
        read_loss("f", Loss(cast("Any", 1.0)))
    with pytest.raises(ValueError, match=r"f: the loss must be one number, .*shape \(2,\)"):
        read_loss("f", loss.value.expand(2))
    with pytest.raises(ValueError, match=r"f: the weight must be one number, .*shape \(2,\)"):
        read_loss("f", Loss(loss.value, torch.ones(2)))
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        read_loss("f", Loss(loss.value, -1))
    with pytest.raises(ValueError, match="must be at least 0, got nan"):
        read_loss("f", Loss(loss.value, math.nan))
    with pytest.raises(ValueError, match="depends on no parameter that is trained"):
        read_loss("f", loss.value.detach())
