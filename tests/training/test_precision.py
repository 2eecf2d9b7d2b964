import copy
import inspect
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import AutocastKwargs
from accelfn.testing import Where, run_ranks


class Output(NamedTuple):
    logits: torch.Tensor
    label: str


class Recorder(nn.Module):
    """Says in which dtype it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> Any:
        found = self.inner(x)
        self.seen = found.dtype
        return {"out": Output(found, "name"), "mask": found > 0}


def variant(mode: str) -> Context:
    return Context().replace(mixed_precision=mode)


@pytest.mark.parametrize(
    ("mode", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_forward_computes_in_the_asked_dtype_and_gives_float32(mode: str, dtype: torch.dtype) -> None:
    model = af.prepare(variant(mode), Recorder())
    assert af.init_scaler(variant(mode)).scale.item() == (65536.0 if mode == "fp16" else 1.0)
    found = model(torch.ones(1, 2))
    assert model.seen == dtype
    assert found["out"].logits.dtype == torch.float32
    assert found["out"].label == "name"
    assert found["mask"].dtype == torch.bool
    assert list(model.state_dict()) == ["inner.weight", "inner.bias"]
    assert next(model.parameters()).dtype == torch.float32


def computed() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_autocast_can_be_an_island_of_full_precision_and_nests() -> None:
    ctx, off = variant("bf16"), AutocastKwargs(enabled=False)
    with af.autocast(ctx):
        assert computed() == torch.bfloat16
        with af.autocast(ctx, off):
            assert computed() == torch.float32
            with af.autocast(ctx):
                assert computed() == torch.bfloat16
        assert computed() == torch.bfloat16
    assert computed() == torch.float32
    with af.autocast(ctx.replace(kwargs_handlers=[off])):
        assert computed() == torch.float32
    with af.autocast(Context(), AutocastKwargs()):
        assert computed() == torch.float32


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_a_prepared_model_is_still_what_it_was(on: Where) -> None:
    """Class, attributes, signature, names: as a user and as libraries look at them."""

    def run(ctx: Context) -> None:
        plain = Recorder()
        prepared = af.prepare(ctx, Recorder())
        model = af.unwrap_model(prepared)
        assert isinstance(model, Recorder)
        assert type(model) is Recorder
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        assert (list(model.state_dict()), list(model.buffers())) == (list(plain.state_dict()), [])
        assert [str(one) for one in model.modules()] == [str(one) for one in plain.modules()]
        assert model.inner.weight is next(model.parameters())
        model.load_state_dict(plain.state_dict())
        model.seen = torch.float64
        assert model.seen == torch.float64
        prepared(torch.ones(1, 2))["out"].logits.sum().backward()
        assert model.seen == torch.bfloat16
        twin = copy.deepcopy(prepared)
        twin(torch.ones(1, 2))["out"].logits.sum().backward()
        assert cast("Any", af.unwrap_model(twin)).seen == torch.bfloat16
        assert repr(model) == repr(plain)

    run_ranks(run, 2, on, mixed_precision="bf16")
