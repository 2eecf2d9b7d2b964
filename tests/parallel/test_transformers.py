"""Sharded models of transformers train, evaluate and generate as in one process."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.parallel.layouts import LAYOUTS

transformers: Any = pytest.importorskip("transformers")
# Once here, and not in each forked rank: it imports its models when they are asked for.
_ = (transformers.LlamaForCausalLM, transformers.BertForMaskedLM)


_VOCABULARY, _LENGTH, _ROWS, _STEPS = 32, 6, 4, 3
_MAX_NORM = 0.1  # less than any norm here


def make_llama(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def make_bert(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[bool], nn.Module]] = {"llama": make_llama, "bert": make_bert}


# By layout, what is trained in it.
TRAINED = {"fsdp2": ("llama", "bert"), "tp2": ("llama",), "tp2xfsdp2": ("llama",)}


def make_data() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        {"input_ids": one, "labels": one}
        for one in torch.randint(1, _VOCABULARY, (_ROWS * _STEPS, _LENGTH), generator=random)
    ]


def make_loader(ctx: Context, data: list[dict[str, torch.Tensor]]) -> Any:
    return DataLoader[Any](data, batch_size=_ROWS // ctx.axis_size("dp"))  # pyright: ignore[reportArgumentType]


class Seen(NamedTuple):
    """What a training run came to."""

    losses: list[float]
    norms: list[float]
    predictions: torch.Tensor  # of the evaluation
    tokens: torch.Tensor | None  # generated


def reload(ctx: Context, name: str, tied: bool, model: nn.Module, folder: Path) -> Any:
    """Save a model, and load the files into a sharded one that never had memory for all of it."""
    af.save_model(ctx, model, folder)
    with af.init_empty_weights():
        empty = MODELS[name](tied)
    loaded = af.prepare_model(ctx, empty)
    af.load_model(loaded, folder)
    return loaded.eval()


def run(ctx: Context, name: str, tied: bool, folder: Path) -> Seen:
    """Train, evaluate, save and load, and generate if the model can."""
    model = MODELS[name](tied)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    model, optimizer = af.prepare(ctx, model, optimizer)
    dp = ctx.along("dp")
    loader = af.prepare(ctx, make_loader(ctx, make_data()))
    inner: Any = af.unwrap_model(model)
    assert (inner.get_output_embeddings().weight is inner.get_input_embeddings().weight) is tied
    scaler = af.init_scaler(ctx)
    losses: list[float] = []
    norms: list[float] = []
    for batch, micro in af.microbatches(ctx, loader):
        loss = model(**batch).loss
        scaler = af.backward(ctx, loss, scaler, micro)
        norm = af.clip_grad_norm_(ctx, model.parameters(), _MAX_NORM, scaler_state=scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        losses.append(float(af.reduce(dp, loss.detach(), "mean")))
        norms.append(float(norm))
    model.eval()
    predictions: list[torch.Tensor] = []
    with torch.no_grad():
        for batch, micro in af.microbatches(ctx, af.prepare(ctx, make_loader(ctx, make_data()[:-1]))):
            found = model(input_ids=batch["input_ids"]).logits.argmax(-1)
            predictions.append(af.gather_for_metrics(ctx, found, micro))
        loaded = reload(ctx, name, tied, inner, folder / f"{name} {tied}")
        ids = make_data()[0]["input_ids"][None]
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    tokens = None
    if name == "llama":
        prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
        tokens = inner.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False
        )
    return Seen(losses, norms, torch.cat(predictions), tokens)


def close(one: list[float], other: list[float]) -> bool:
    return all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [*TRAINED])
def test_models_of_transformers_train_in_every_layout_as_in_one_process(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]

    def work(ctx: Context) -> list[Seen]:
        folder = tmp_path / str(ctx.num_processes)
        return [run(ctx, model, tied, folder) for model in TRAINED[name] for tied in (True, False)]

    ranks = run_ranks(
        work, layout.size, "processes", timeout_s=120.0, parallelism_config=layout.config(plan=None)
    )
    plain = work(Context())
    for rank, found in enumerate(ranks):
        for index, (one, expected) in enumerate(zip(found, plain, strict=True)):
            where = f"rank {rank}, run {index}"
            assert close(one.losses, expected.losses), (where, one.losses, expected.losses)
            assert close(one.norms, expected.norms), (where, one.norms, expected.norms)
            assert torch.equal(one.predictions, expected.predictions), where
            assert (one.tokens is None) == (expected.tokens is None)
            if one.tokens is not None and expected.tokens is not None:
                assert torch.equal(one.tokens, expected.tokens), where
