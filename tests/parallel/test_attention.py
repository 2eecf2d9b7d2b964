"""Attention over sequences that ranks share is that over whole ones, and what can't be is refused."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import accelfn as af
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.attention import plan_attention
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT, HEADS, LENGTH, VOCABULARY, make_batch

transformers: Any = pytest.importorskip("transformers")
_ = transformers.LlamaForCausalLM  # imported here once, and not in each forked rank

DIMS = {"ids": 1, "positions": 1, "labels": 1}
Batch = dict[str, torch.Tensor]


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


def make_llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        use_cache=False,  # with one, transformers doesn't look for several sequences in a row
    )
    return transformers.LlamaForCausalLM(config)


def make_recomputed() -> nn.Module:
    """Make a model that recomputes its blocks by itself, also outside of its own forward."""
    model = GPT()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def whole_batch(seed: int = 1) -> Batch:
    ids, labels = make_batch(seed)
    return {"ids": ids, "labels": labels, "positions": torch.arange(LENGTH).expand_as(ids)}


def of_gpt(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["ids"], batch["positions"])


def of_llama(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch["ids"], position_ids=batch["positions"]).logits


Model = tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], torch.Tensor]]
MODELS: dict[str, Model] = {
    "gpt": (GPT, of_gpt),
    "recomputed gpt": (make_recomputed, of_gpt),
    "llama": (make_llama, of_llama),
}


def gradients(name: str, ctx: af.Context | None) -> dict[str, torch.Tensor]:
    """Return the gradients of a step, of this rank's pieces or in one process."""
    make, logits_of = MODELS[name]
    model = make()
    batch = whole_batch()

    def loss_fn(model: nn.Module, batch: Batch) -> af.Loss:
        labels = batch["labels"]
        value = F.cross_entropy(logits_of(model, batch).flatten(0, 1), labels.flatten(), reduction="sum")
        return af.Loss(value, (labels != -100).sum())

    plain = ctx is None
    ctx = af.Context() if ctx is None else ctx
    model = af.prepare(ctx, model)
    optimizer = af.prepare(ctx, torch.optim.SGD(model.parameters(), lr=0.0))
    ((batch, micro),) = af.microbatches(ctx, [batch])
    assert batch["ids"].shape[1] == (LENGTH if plain else LENGTH // 2)
    scaler, _ = af.forward_backward(ctx, model, loss_fn, batch, af.init_scaler(ctx), micro)
    af.unscale_gradients(ctx, optimizer, scaler)
    named = af.unwrap_model(model).named_parameters()
    return {key: one.grad.clone() for key, one in named if one.grad is not None}


def near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest gradient."""
    assert one.keys() == other.keys()
    largest = max(float(other[key].abs().max()) for key in one)
    return max(float((one[key] - other[key]).abs().max()) for key in one) / largest


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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's compiler
def test_a_ring_gives_what_one_process_does_and_refuses_what_it_has_not() -> None:
    def work(ctx: af.Context) -> list[Any]:
        found: list[Any] = [gradients(name, ctx) for name in MODELS]
        compiled = ctx.replace(dynamo_plugin=af.TorchDynamoPlugin(backend="aot_eager"))
        found.append(gradients("gpt", compiled))
        found.extend(outputs(ctx, kv_heads, None) for kv_heads in (4, 2))
        x = torch.full((2, 4, 8), float(ctx.rank))
        found.append(
            [
                refused(ctx, Around(Attention()), x, torch.ones(4, 4)),
                refused(ctx, Around(Attention(is_causal=False)), x),
                refused(ctx, Around(Attention(dropout_p=0.5)), x),
                refused(ctx, Escaping(Attention()), x),
                refused(ctx, Around(Softmax()), x),
                refused(ctx, make_llama(), x[..., 0].long(), attention_mask=torch.ones(2, 4)),
                refused(ctx, Around(Attention()), torch.zeros(2, 4, 8)),
            ]
        )
        loss = af.prepare_model(ctx, Around(Attention()))(x).mean()
        with pytest.raises(ConfigurationError, match="backward: ranks along cp share sequences"):
            af.backward(ctx, loss, af.init_scaler(ctx))
        return found

    handler = af.config.TorchContextParallelConfig(cp_comm_strategy="alltoall")
    asked = options("cp", cp_handler=handler)
    ranks = run_ranks(work, 2, on="processes", timeout_s=120.0, **asked)
    expected = [gradients(name, None) for name in (*MODELS, "gpt")]
    for *trained, same, grouped, messages in ranks:
        for found, reference in zip(trained, expected, strict=True):
            assert near(found, reference) < 1e-5
        for found, kv_heads in ((same, 4), (grouped, 2)):
            torch.testing.assert_close(found, outputs(None, kv_heads, None))
        for message, words in zip(
            messages,
            (
                "takes no mask",
                "is causal",
                "no dropout",
                "outside of",
                "never called",
                "attention_mask",
                "sequences that weren't sharded",
            ),
            strict=True,
        ):
            assert words in message


def test_exchanged_heads_give_what_one_process_does_with_masks_too() -> None:
    def work(ctx: af.Context) -> list[Any]:
        found: list[Any] = [gradients(name, ctx) for name in MODELS]
        pieces = af.shard_sequence(ctx, whole_mask(), 3)
        rows = torch.ones(8, 8, dtype=torch.bool).tril(1)
        found.extend(
            [
                outputs(ctx, 2, None),
                outputs(ctx, 4, pieces, is_causal=False),
                outputs(ctx, 4, whole_mask(), is_causal=False),
                outputs(ctx, 4, af.shard_sequence(ctx, rows, 0), is_causal=False),
            ]
        )
        x = torch.full((2, 4, 8), float(ctx.rank))
        found.append(
            [
                refused(ctx, Around(Attention(is_causal=False)), x, torch.ones(4, 4)),
                refused(ctx, Around(Attention(1)), x),
            ]
        )
        return found

    ranks = run_ranks(work, 2, on="processes", timeout_s=120.0, **options("sp"))
    expected = [gradients(name, None) for name in MODELS]
    rows = torch.ones(8, 8, dtype=torch.bool).tril(1)
    for *trained, grouped, by_keys, by_whole, by_rows, messages in ranks:
        for found, reference in zip(trained, expected, strict=True):
            assert near(found, reference) < 1e-5
        torch.testing.assert_close(grouped, outputs(None, 2, None))
        for found in (by_keys, by_whole):
            torch.testing.assert_close(found, outputs(None, 4, whole_mask(), is_causal=False))
        torch.testing.assert_close(by_rows, outputs(None, 4, rows, is_causal=False))
        assert "4 by 4 doesn't cover" in messages[0]
        assert "got 1 heads of keys and values" in messages[1]


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
    model: nn.Module, axis: Any, size: int, message: str
) -> None:
    from accelfn.parallel import read_facts

    with pytest.raises(ConfigurationError, match=message):
        plan_attention(None, read_facts(model), axis, size, model)


def test_a_window_or_another_attention_of_transformers_is_refused() -> None:
    from accelfn.parallel import read_facts

    windowed: Any = make_llama()
    windowed.model.layers[1].self_attn.sliding_window = 4
    with pytest.raises(ConfigurationError, match=r"layers\.1\.self_attn has sliding_window=4"):
        plan_attention(None, read_facts(windowed), "sp", 2, windowed)
    eager: Any = make_llama()
    eager.set_attn_implementation("eager")
    with pytest.raises(ConfigurationError, match="computes attention by 'eager'"):
        plan_attention(None, read_facts(eager), "cp", 2, eager)


def test_ranks_that_are_threads_are_refused() -> None:
    def work(ctx: af.Context) -> str:
        with pytest.raises(NotAvailableError) as caught:
            af.prepare_model(ctx, GPT())
        return str(caught.value)

    for message in run_ranks(work, 2, **options("cp")):
        assert 'on="processes"' in message
