import copy
import importlib
import inspect
import pickle
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import AutocastKwargs, Context
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
    assert type(loaded) is Recorder
    loaded(torch.ones(1, 2))
    assert (loaded.seen, model.seen) == (torch.bfloat16, None)
    again = af.prepare(variant("fp16"), loaded)  # what another program saved is not prepared here
    again(torch.ones(1, 2))
    assert again.seen == torch.float16


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


@pytest.mark.parametrize("order", ["compiled, prepared", "prepared, compiled"])
@pytest.mark.parametrize("how", ["in place", "around"])
def test_what_the_user_compiles_computes_the_same_in_one_graph(order: str, how: str) -> None:
    dynamo = cast("Any", importlib.import_module("torch._dynamo.testing"))
    cast("Any", importlib.import_module("torch._dynamo")).reset()
    counter = dynamo.CompileCounterWithBackend("aot_eager")

    def compiled(model: nn.Module) -> nn.Module:
        if how == "in place":
            cast("Any", model).compile(backend=counter)
            return model
        return cast("nn.Module", cast("Any", torch).compile(model, backend=counter))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"y": (self.inner(x).relu(), [x])}

    plain = af.prepare(variant("bf16"), Net())
    model = Net()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 2)
    expected = plain(x)["y"][0]
    ready = compiled(model) if order.startswith("compiled") else model
    ready = af.prepare(variant("bf16"), ready)
    ready = ready if order.startswith("compiled") else compiled(ready)
    for _ in range(3):
        found = ready(x)["y"][0]
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
        found.sum().backward()
    assert counter.frame_count == 1  # one graph: no break, and none anew in the second step
    assert sorted(af.unwrap_model(ready, keep_torch_compile=False).state_dict()) == [
        "inner.bias",
        "inner.weight",
    ]


def test_a_forward_of_the_users_own_comes_back_when_precision_is_taken_off() -> None:
    model = nn.Linear(2, 2)
    own = model.forward

    def patched(x: torch.Tensor) -> torch.Tensor:  # as libraries do
        return own(x) + 1

    cast("Any", model).forward = patched
    expected = model(torch.ones(1, 2))
    plain = af.unwrap_model(af.prepare(variant("bf16"), model), keep_fp32_wrapper=False)
    assert torch.equal(plain(torch.ones(1, 2)), expected)


def test_unwrapping_leaves_the_model_itself_alone() -> None:
    model = af.prepare(variant("bf16"), Recorder())
    assert af.unwrap_model(model) is model
    plain = af.unwrap_model(model, keep_fp32_wrapper=False)
    plain(torch.ones(1, 2))
    assert vars(plain)["seen"] == torch.float32
    assert plain.inner is model.inner
    model(torch.ones(1, 2))
    assert model.seen == torch.bfloat16
    again = af.prepare(variant("bf16"), plain)
    again(torch.ones(1, 2))
    assert again.seen == torch.bfloat16
