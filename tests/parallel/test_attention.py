"""Attention over sequences that ranks share is that over whole ones, and what can't be is refused."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT, HEADS

DIMS = {"ids": 1, "positions": 1, "labels": 1}


class Attention(nn.Module):
    """Attention alone, as ``options`` of torch's function have it; with fewer heads of keys and values."""

    def __init__(self, kv_heads: int = 4, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 4 * kv_heads)
        self.options = {"is_causal": True, "enable_gqa": kv_heads != 4, **options}

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (-1, 4)).transpose(1, 2).split(2, -1)
        return F.scaled_dot_product_attention(q, k, v, mask, **self.options).transpose(1, 2).flatten(2)


class Around(nn.Module):
    """A model around one module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.attn = module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.attn(*args, **kwargs)


class Escaping(Around):
    """Calls attention outside of the module that has its name."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = self.attn(*args)[:, None]
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)


class Softmax(Attention):
    """Computes attention without torch's function."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ self.q(x)


def make_llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes, **options))


def outputs(ctx: af.Context | None, kv_heads: int, mask: torch.Tensor | None, **options: Any) -> list[Any]:
    """Return attention of a whole sequence and the gradient of its input; computed by pieces on ranks."""
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    model: nn.Module = Around(Attention(kv_heads, **options))
    if ctx is None:
        x.requires_grad_()
        y = model(x, mask)
        y.square().sum().backward()
        return [y.detach(), x.grad]
    model = af.prepare_model(ctx, model)
    piece = af.shard_sequence(ctx, x, 1).requires_grad_()
    y = model(piece, mask)
    y.square().sum().backward()
    return list(af.gather_sequence(ctx, [y.detach(), piece.grad], 1))


def refused(ctx: af.Context, model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """Return the message with which a forward pass is refused."""
    model = af.prepare_model(ctx, model)
    with pytest.raises(ConfigurationError) as caught:
        model(*args, **kwargs)
    with pytest.raises(ConfigurationError):  # and not once only
        model(*args, **kwargs)
    return str(caught.value)


def whole_mask() -> torch.Tensor:
    """Leave out the keys of the second row's last tokens."""
    mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    mask[1, ..., 5:] = False
    return mask


def options(axis: str, **more: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {f"{axis}_size": 2}
    return {
        "parallelism_config": af.ParallelismConfig(**sizes, **more),
        "dataloader_config": af.DataLoaderConfiguration(sequence=DIMS),
    }


def check(messages: Sequence[str], words: Sequence[str]) -> None:
    for message, part in zip(messages, words, strict=True):
        assert part in message


def test_a_ring_gives_what_one_process_does_and_refuses_what_it_has_not() -> None:
    def work(ctx: af.Context) -> tuple[list[Any], list[str]]:
        found = [outputs(ctx, kv_heads, None) for kv_heads in (4, 2)]
        x = torch.full((2, 4, 8), float(ctx.rank))
        messages = [
            refused(ctx, Around(Attention()), x, torch.ones(4, 4)),
            refused(ctx, Around(Attention(is_causal=False)), x),
            refused(ctx, Around(Attention(dropout_p=0.5)), x),
            refused(ctx, Escaping(Attention()), x),
            refused(ctx, Around(Softmax()), x),
            refused(ctx, Around(Attention()), torch.zeros(2, 4, 8)),
        ]
        loss = af.prepare_model(ctx, Around(Attention()))(x).mean()
        with pytest.raises(ConfigurationError, match="backward: ranks along cp share sequences"):
            af.backward(ctx, loss, af.init_scaler(ctx))
        return found, messages

    handler = af.config.TorchContextParallelConfig(cp_comm_strategy="alltoall")
    for found, messages in run_ranks(work, 2, on="processes", **options("cp", cp_handler=handler)):
        for one, kv_heads in zip(found, (4, 2), strict=True):
            torch.testing.assert_close(one, outputs(None, kv_heads, None))
        own = ["outside of", "never called", "sequences that weren't sharded"]
        check(messages, ["takes no mask", "is causal", "no dropout", *own])


def test_exchanged_heads_give_what_one_process_does_with_masks_too() -> None:
    rows = torch.ones(8, 8, dtype=torch.bool).tril(1)

    def work(ctx: af.Context) -> tuple[list[Any], list[str]]:
        found = [
            outputs(ctx, 2, None),
            outputs(ctx, 4, af.shard_sequence(ctx, whole_mask(), 3), is_causal=False),
            outputs(ctx, 4, whole_mask(), is_causal=False),
            outputs(ctx, 4, af.shard_sequence(ctx, rows, 0), is_causal=False),
        ]
        x = torch.full((2, 4, 8), float(ctx.rank))
        return found, [
            refused(ctx, Around(Attention(is_causal=False)), x, torch.ones(4, 4)),
            refused(ctx, Around(Attention(1)), x),
        ]

    by_keys = outputs(None, 4, whole_mask(), is_causal=False)
    expected = [outputs(None, 2, None), by_keys, by_keys, outputs(None, 4, rows, is_causal=False)]
    for found, messages in run_ranks(work, 2, on="processes", **options("sp")):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        check(messages, ["4 by 4 doesn't cover", "got 1 heads of keys and values"])


@pytest.mark.slow
def test_masks_windows_and_other_attention_of_transformers_are_refused() -> None:
    def work(ctx: af.Context) -> list[str]:
        ids = torch.full((2, 4), ctx.rank)
        said = [refused(ctx, make_llama(), ids, attention_mask=torch.ones(2, 4))]
        windowed, eager = make_llama(), make_llama(attn_implementation="eager")
        windowed.model.layers[1].self_attn.sliding_window = 4
        for model in (windowed, eager):
            with pytest.raises(ConfigurationError) as caught:
                af.plan_model(ctx, model)
            said.append(str(caught.value))
        return said

    make_llama()  # imports transformers once, and not in each forked rank
    for messages in run_ranks(work, 2, on="processes", **options("cp")):
        layer = "layers.1.self_attn has sliding_window=4"
        check(messages, ["attention_mask", layer, "computes attention by 'eager'"])


def test_a_plan_says_who_computes_attention_together() -> None:
    ctx = af.plan_context(2, **options("cp"))
    plan = af.plan_model(ctx, GPT())
    assert plan.attention is not None
    assert plan.attention.modules == ("blocks.0.attn", "blocks.1.attn")
    assert "each sequence shared along cp: a ring of 2, keys and values passed around by allgather" in str(
        plan
    )
    assert "heads exchanged over 2" in str(af.plan_model(af.plan_context(2, **options("sp")), GPT()))
    budget = af.plan_memory(ctx, GPT())
    assert budget.held == af.plan_memory(af.plan_context(2), GPT()).held


@pytest.mark.parametrize(
    ("model", "axis", "size", "message"),
    [
        (nn.Linear(2, 2), "cp", 2, "Linear has no attention module"),
        (nn.TransformerEncoderLayer(8, 2), "cp", 2, "self_attn is torch's nn.MultiheadAttention"),
        (GPT(), "sp", 3, rf"num_heads={HEADS} on each rank, got sp_size=3. Use 1 or 2 or 4"),
    ],
)
def test_a_model_that_can_not_share_sequences_is_refused_when_it_is_planned(
    model: nn.Module, axis: str, size: int, message: str
) -> None:
    sizes: dict[str, Any] = {f"{axis}_size": size}
    ctx = af.plan_context(size, parallelism_config=af.ParallelismConfig(**sizes))
    with pytest.raises(ConfigurationError, match=message):
        af.plan_model(ctx, model)


def test_ranks_that_are_threads_are_refused() -> None:
    def work(ctx: af.Context) -> str:
        with pytest.raises(NotAvailableError) as caught:
            af.prepare_model(ctx, GPT())
        return str(caught.value)

    for message in run_ranks(work, 2, **options("cp")):
        assert 'on="processes"' in message
