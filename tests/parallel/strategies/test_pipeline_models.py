"""Models of transformers train in a pipeline, whatever their stages exchange; no user cuts them."""

# transformers is untyped, and torch leaves backward partly so.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ConfigurationError, RemoteRankError
from accelfn.testing import run_ranks

pytestmark = pytest.mark.slow


Batch = dict[str, torch.Tensor]


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
    "max_position_embeddings": 32,
    "dropout": 0.0,
}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 16, "max_position_embeddings": 32, "dropout": 0.0, **SIZES}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 4, "n_head": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# What random programs don't have: see TRANSFORMERS in tests/programs/models.py.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5 of one embedding": ("T5Config", "T5ForConditionalGeneration", {"dropout_rate": 0.0, **T5}),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, **NO_DROPOUT}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, **SIZES}),
    "bloom": ("BloomConfig", "BloomForCausalLM", BLOOM),
}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import the models here once, and not in each forked rank."""
    for name in KINDS:
        make(name)


def of_transformers(model: str, config: str, sizes: Mapping[str, Any]) -> Any:
    transformers: Any = importlib.import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def make(name: str) -> Any:
    config, model, sizes = KINDS[name]
    torch.manual_seed(0)
    made = of_transformers(model, config, sizes)
    if name == "t5 of one embedding":
        made.set_input_embeddings(made.shared)  # as transformers does where the table is resized
    return made.double()


def batch_of(name: str) -> Batch:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (4, 9), generator=random)
    mask = (torch.arange(9) < torch.tensor([[9], [6], [7], [3]])).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    if name in ("t5 of one embedding", "bart"):
        batch["decoder_input_ids"] = torch.randint(3, 64, (4, 6), generator=random)
    return batch


def loss_fn(model: nn.Module, batch: Batch) -> af.Loss:
    logits: torch.Tensor = model(**batch).logits
    labels = batch.get("decoder_input_ids", batch["input_ids"])
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return af.Loss(total, labels.numel())


def stages(schedule: str) -> af.ParallelismConfig:
    return af.ParallelismConfig(pp_size=2, pp_handler=af.config.PipelineParallelConfig(4, schedule))


def train(ctx: af.Context, model: nn.Module, fn: Callable[..., Any], batch: Any) -> float:
    ((own, micro),) = af.microbatches(ctx, [batch])
    return af.forward_backward(ctx, model, fn, own, af.init_scaler(ctx), micro)[1].item()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b"])
def test_stages_train_as_one_process_does(schedule: str) -> None:
    def work(ctx: af.Context) -> dict[str, tuple[float, dict[str, torch.Tensor], torch.Tensor]]:
        found: dict[str, tuple[float, dict[str, torch.Tensor], torch.Tensor]] = {}
        for name in KINDS:
            model: Any = af.prepare(ctx, make(name))
            loss = train(ctx, model, loss_fn, batch_of(name))
            gradients = {
                key: one.grad
                for key, one in model.named_parameters(remove_duplicate=False)
                if one.grad is not None
            }
            found[name] = loss, gradients, af.training.forward(ctx, model, **batch_of(name)).logits
        return found

    ranks = run_ranks(work, 2, "processes", timeout_s=90, parallelism_config=stages(schedule))
    for name in KINDS:
        model = make(name)
        loss, _, _ = loss_fn(model, batch_of(name))
        loss.backward()
        expected = {
            key: one.grad
            for key, one in model.named_parameters(remove_duplicate=False)
            if one.grad is not None
        }
        assert {key for rank in ranks for key in rank[name][1]} == expected.keys()
        for found_loss, gradients, logits in (rank[name] for rank in ranks):
            assert found_loss == pytest.approx(loss.item(), rel=1e-9)
            torch.testing.assert_close(logits, model(**batch_of(name)).logits)
            for key, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[key], msg=f"{name} {key}")


def test_a_weight_of_a_later_stage_that_all_blocks_use_is_refused_by_name() -> None:
    sizes = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], **SIZES}

    def work(ctx: af.Context) -> list[str]:
        said: list[str] = []
        model = of_transformers("DebertaV2ForMaskedLM", "DebertaV2Config", sizes).eval()
        listed: Any = make("gpt2")
        listed.config.output_hidden_states = True
        for one in (model, listed):
            with pytest.raises((ConfigurationError, RemoteRankError)) as caught:
                af.training.forward(ctx, af.prepare(ctx, one), input_ids=torch.arange(8).view(2, 4))
            said.append(str(caught.value))
        return said

    for first, second in run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages("gpipe")):
        assert "kwargs['rel_embeddings'] of its call depends on" in first
        assert "output_hidden_states collects from all blocks" in second
