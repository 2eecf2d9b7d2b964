"""transformer-engine's layers, with a stand-in for it: what it is asked for, and when."""

# torch leaves backward and its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

import copy
import sys
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.config import TERecipeKwargs
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel import plan_model
from accelfn.parallel.engines.transformer_engine import build_recipe
from accelfn.parallel.facts import modules_of
from accelfn.testing import run_ranks
from tests.parallel.engines.stand_ins import TransformerEngine
from tests.parallel.fp8_models import GPT, batches, loss_of, make, train


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TransformerEngine:
    return TransformerEngine(monkeypatch)


def context(**options: Any) -> Context:
    return Context().replace(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**options)])


def wide() -> GPT:
    """Return a GPT whose first block has an odd linear layer before others."""
    model = make()
    model.blocks[0].up, model.blocks[0].down = torch.nn.Linear(32, 24), torch.nn.Linear(24, 32)
    return model


def test_all_layers_that_fit_are_replaced_and_keep_their_parameters(engine: TransformerEngine) -> None:
    model = wide()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    plan = plan_model(context(), model).fp8
    assert plan is not None
    assert plan.kept == dict.fromkeys(("blocks.0.up", "blocks.0.down"), "size 24 is not a multiple of 16")
    assert "blocks.0.out" in plan.converted  # also what comes after an odd one
    assert "blocks.1.qkv" in plan.converted
    assert plan.norms == ("blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm")
    assert "by transformer-engine, chosen by TERecipeKwargs" in str(plan)
    prepared = af.prepare(context(), model)
    assert list(prepared.state_dict()) == names
    assert all(parameter is before[name] for name, parameter in prepared.named_parameters())
    expected = dict.fromkeys((*plan.converted, *plan.norms), True)
    found = {
        name: type(module).__module__.endswith("stand_ins")
        for name, module in modules_of(prepared).items()
        if name in expected or name in plan.kept
    }
    assert found == {**expected, **dict.fromkeys(plan.kept, False)}


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_products_are_in_fp8_in_training_and_in_evaluation_if_asked(
    engine: TransformerEngine, in_evaluation: bool
) -> None:
    ctx = context(use_autocast_during_eval=in_evaluation, amax_history_len=16)
    model = af.prepare(ctx, make())
    ids = batches(1)[0]

    def passes(one: torch.nn.Module) -> set[bool]:
        engine.passes.clear()
        loss_of(one, ids)
        return {is_on for _, is_on in engine.passes}

    assert passes(model) == {True}
    assert passes(model.eval()) == {in_evaluation}
    twin = copy.deepcopy(model).train()  # asks its own mode
    assert passes(twin) == {True}
    assert passes(model) == {in_evaluation}
    assert {recipe.amax_history_len for recipe in engine.recipes} == {16}


def test_every_option_is_passed_also_where_defaults_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    TransformerEngine(monkeypatch, is_old=True)
    found = build_recipe(TERecipeKwargs())
    assert vars(found) == {
        "kind": "delayed",
        "margin": 0,
        "fp8_format": "hybrid",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",  # its own default is another one
    }
    changed = build_recipe(
        TERecipeKwargs(fp8_format="E4M3", interval=2, override_linear_precision=(False, False, True))
    )
    assert (changed.fp8_format, changed.interval) == ("e4m3", 2)
    assert changed.override_linear_precision == (False, False, True)
    blocks = build_recipe(TERecipeKwargs(use_mxfp8_block_scaling=True, margin=1))
    assert vars(blocks) == {"kind": "blocks", "margin": 1, "fp8_format": "hybrid"}


def test_an_option_that_a_version_does_not_know_is_named(engine: TransformerEngine) -> None:
    with pytest.raises(ConfigurationError, match=r"doesn't take interval: .*'interval'"):
        build_recipe(TERecipeKwargs(interval=2))


def test_a_package_that_cannot_be_loaded_is_refused_by_name(
    engine: TransformerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(NotAvailableError, match=r"engine\.pytorch can't be imported.*use torchao"):
        af.prepare(context(), make())


def test_shards_train_and_optimizers_follow(engine: TransformerEngine) -> None:
    def work(ctx: Context, mode: str) -> tuple[list[float], set[bool]]:
        recipe: dict[str, Any] = {"kwargs_handlers": [TERecipeKwargs()]} if mode == "fp8" else {}
        ctx = ctx.replace(mixed_precision=mode, **recipe)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer, model = af.prepare(ctx, optimizer, model)
        return train(ctx, model, optimizer, batches(3)), {is_on for _, is_on in engine.passes}

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    for expected, (losses, passes) in run_ranks(
        lambda ctx: (work(ctx, "bf16")[0], work(ctx, "fp8")), 2, "processes", fsdp_plugin=plugin
    ):
        assert losses == pytest.approx(expected, abs=0.02)  # the stand-in computes in bf16
        assert passes == {True}


def test_what_does_not_go_together_is_refused(engine: TransformerEngine) -> None:
    with pytest.raises(ConfigurationError, match="transformer-engine can't be combined with reduction=\"can"):
        af.prepare(context().replace(reduction="canonical"), make())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)

    def refused(ctx: Context) -> str:
        with pytest.raises(ConfigurationError) as caught:
            plan_model(ctx.replace(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()]), make())
        return str(caught.value)

    assert "combined with activation_checkpointing" in run_ranks(refused, 2, fsdp_plugin=plugin)[0]
