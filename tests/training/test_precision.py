import copy
import io
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import AutocastKwargs, Context
from accelfn.training import MixedPrecisionForward


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
    found = model(torch.ones(1, 2))
    assert model.seen == dtype
    assert found["out"].logits.dtype == torch.float32
    assert found["out"].label == "name"
    assert found["mask"].dtype == torch.bool
    assert list(model.state_dict()) == ["inner.weight", "inner.bias"]
    assert next(model.parameters()).dtype == torch.float32


def test_float16_on_the_cpu_is_not_silently_float32() -> None:
    ctx = variant("fp16")
    with af.autocast(ctx):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    assert af.init_scaler(ctx).scale.item() == 65536.0


def test_autocast_can_be_an_island_of_full_precision_and_nests() -> None:
    ctx = variant("bf16")
    x = torch.ones(2, 2)
    with af.autocast(ctx):
        assert (x @ x).dtype == torch.bfloat16
        with af.autocast(ctx, AutocastKwargs(enabled=False)):
            assert (x @ x).dtype == torch.float32
            with af.autocast(ctx):
                assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32
    off = Context().replace(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    with af.autocast(off):
        assert (x @ x).dtype == torch.float32
    with af.autocast(Context(), AutocastKwargs()):
        assert (x @ x).dtype == torch.float32


def test_copies_compute_by_themselves_and_pickles_come_back() -> None:
    ctx = variant("bf16")
    model = af.prepare(ctx, Recorder())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.inner.weight.zero_()
    assert twin(torch.ones(1, 2))["out"].logits.abs().sum() > 0
    assert twin.seen == torch.bfloat16
    assert model.seen is None
    assert af.prepare(ctx, twin) is twin

    loaded = pickle.loads(pickle.dumps(model))
    assert isinstance(vars(loaded)["forward"], MixedPrecisionForward)
    loaded(torch.ones(1, 2))
    assert (loaded.seen, model.seen) == (torch.bfloat16, None)
    again = af.prepare(variant("fp16"), loaded)  # what another program saved is not prepared here
    again(torch.ones(1, 2))
    assert again.seen == torch.float16
    assert (
        af.unwrap_model(again, keep_fp32_wrapper=False)(torch.ones(1, 2))["out"].logits.dtype == torch.float32
    )

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    Recorder().load_state_dict(torch.load(file))


def test_unwrapping_leaves_the_model_itself_alone() -> None:
    model = af.prepare(variant("bf16"), Recorder())
    assert af.unwrap_model(model) is model
    plain = af.unwrap_model(model, keep_fp32_wrapper=False)
    plain(torch.ones(1, 2))
    assert vars(plain)["seen"] == torch.float32
    assert plain.inner is model.inner
    model(torch.ones(1, 2))
    assert model.seen == torch.bfloat16
