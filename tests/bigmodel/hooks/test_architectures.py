"""Hooks on models as users have them: caches in keyword arguments, outputs that are records, ties."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelfn.bigmodel.align_hooks import attach_align_device_hook, attach_align_device_hook_on_blocks
from accelfn.bigmodel.hooks import cpu_offload_with_hook

transformers: Any = pytest.importorskip("transformers")

TOKENS = torch.arange(3, 13).reshape(1, 10)


@pytest.fixture(scope="module")
def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def generated(model: Any) -> list[int]:
    return model.generate(TOKENS, max_new_tokens=6, do_sample=False)[0].tolist()


def each_module(model: nn.Module) -> None:
    attach_align_device_hook(model, "cpu:0", offload=True)


def blocks(model: nn.Module) -> None:
    names = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")
    attach_align_device_hook_on_blocks(
        model,
        {name: "cpu:1" if name == "lm_head" else "cpu:0" for name in names},
        {name: name in ("model.layers", "lm_head") for name in names},
    )


def whole(model: nn.Module) -> None:
    cpu_offload_with_hook(model, "cpu:0")


@pytest.mark.parametrize("attach", [each_module, blocks, whole])
def test_tokens_are_those_without_hooks(llama: Any, attach: Callable[[nn.Module], None]) -> None:
    model = copy.deepcopy(llama)
    attach(model)
    assert generated(model) == generated(llama)


def test_tied_weights_train_as_without_hooks(t5: Any) -> None:
    model, plain = copy.deepcopy(t5), copy.deepcopy(t5)
    each_module(model)
    losses = [one(input_ids=TOKENS, labels=TOKENS).loss for one in (model, plain)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    assert model.shared.weight is model.lm_head.weight
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
