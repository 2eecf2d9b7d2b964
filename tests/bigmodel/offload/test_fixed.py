"""What moves a whole model is refused while it is fixed, and goes without a trace."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from accelfn.bigmodel.dispatch import allow_moves, refuse_moves


class Mine(nn.Linear):
    """A model with a way of its own to move."""

    def to(self, *args: Any, **kwargs: Any) -> Mine:
        self.was_asked = True
        return cast("Any", super()).to(*args, **kwargs)


def test_only_what_was_hung_there_is_taken_off() -> None:
    model = nn.Linear(2, 2)
    before = set(vars(model))
    refuse_moves(model)
    refuse_moves(model)
    with pytest.raises(RuntimeError, match=r"this Linear's weights.*cuda\(\).*undispatch"):
        model.cuda()
    allow_moves(model)
    allow_moves(model)
    assert set(vars(model)) == before
    vars(model)["cuda"] = print
    allow_moves(model)
    assert vars(model)["cuda"] is print


def test_a_dtype_goes_by_the_own_way_of_the_class() -> None:
    model = Mine(2, 2)
    refuse_moves(model)
    assert model.to(torch.float64) is model
    assert model.was_asked
    assert model.weight.dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"this Mine's weights.*to\('cpu'\)"):
        model.to("cpu", torch.float32)
    assert model.weight.dtype == torch.float64


def test_modules_below_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    refuse_moves(model)
    assert model[0].to("meta").weight.is_meta
