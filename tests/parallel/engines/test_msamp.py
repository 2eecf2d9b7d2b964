"""MS-AMP, with a stand-in for it: what it is asked for, and what it is given together."""

# torch leaves backward and its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from typing import Any

import pytest
import torch

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.config import MSAMPRecipeKwargs
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.parallel.engines.stand_ins import MSAMP, Adam8
from tests.parallel.fp8_models import batches, make, train


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> MSAMP:
    return MSAMP(monkeypatch)


FP8: dict[str, Any] = {"mixed_precision": "fp8", "kwargs_handlers": [MSAMPRecipeKwargs(opt_level="O1")]}


def objects() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_model_and_optimizer_are_converted_together_and_once(engine: MSAMP) -> None:
    ctx = Context().replace(**FP8)
    model, optimizer = af.prepare(ctx, *objects())
    assert engine.calls == [("GPT", "AdamW", "O1")]
    assert isinstance(optimizer, Adam8)
    losses = train(ctx, model, optimizer, batches(8))
    assert losses[-1] < losses[0] - 0.5
    assert af.prepare(ctx, model, optimizer) == (model, optimizer)
    assert len(engine.calls) == 1


def test_one_without_the_other_is_refused(engine: MSAMP) -> None:
    ctx = Context().replace(**FP8)
    with pytest.raises(ConfigurationError, match=r"got 1 model\(s\) and 0 optimizer\(s\)"):
        af.prepare(ctx, make())
    with pytest.raises(ConfigurationError, match="MS-AMP converts a model together with its optimizer"):
        af.prepare_model(ctx, make())
    with pytest.raises(ConfigurationError, match="MS-AMP converts a model together with its optimizer"):
        af.prepare_model(ctx, make(), evaluation_mode=True)
    assert not engine.calls


def test_shards_are_refused(engine: MSAMP) -> None:
    def refused(ctx: Context) -> str:
        with pytest.raises(ConfigurationError) as caught:
            af.prepare(ctx.replace(**FP8), *objects())
        assert not engine.calls
        return str(caught.value)

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    for text in run_ranks(refused, 2, "processes", fsdp_plugin=plugin):
        assert "MS-AMP can't be combined with dp_shard_size or fsdp_plugin" in text
