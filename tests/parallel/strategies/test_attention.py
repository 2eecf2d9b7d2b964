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
    return list(af.data.gather_sequence(ctx, [y.detach(), piece.grad], 1))


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


def attended(ctx: af.Context | None) -> list[Any]:
    """Return attention with and without masks and causality."""

    def shard(mask: torch.Tensor, dim: int) -> torch.Tensor:
        return mask if ctx is None else af.shard_sequence(ctx, mask, dim)

    rows = torch.ones(8, 8, dtype=torch.bool).tril(1)
    return [
        outputs(ctx, 4, None),
        outputs(ctx, 2, None),
        outputs(ctx, 1, None),
        outputs(ctx, 4, None, is_causal=False),
        outputs(ctx, 1, None, is_causal=False),
        outputs(ctx, 4, shard(whole_mask(), 3), is_causal=False),
        outputs(ctx, 4, whole_mask(), is_causal=False),
        outputs(ctx, 4, shard(rows, 0), is_causal=False),
        outputs(ctx, 4, rows, is_causal=False),
    ]


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_ranks_give_what_one_process_does_and_refuse_what_they_have_not(axis: str) -> None:
    def work(ctx: af.Context) -> tuple[list[Any], list[str]]:
        found = attended(ctx)
        x = torch.full((2, 4, 8), float(ctx.rank))
        dropped = af.prepare_model(ctx, Around(Attention(dropout_p=1 - 1e-7)))
        assert not dropped(x).any()
        messages = [
            refused(ctx, Around(Attention(is_causal=False)), x, torch.ones(4, 4)),
            refused(ctx, Escaping(Attention()), x),
            refused(ctx, Around(Softmax()), x),
            refused(ctx, Around(Attention()), torch.zeros(2, 4, 8)),
        ]
        loss = af.prepare_model(ctx, Around(Attention()))(x).mean()
        with pytest.raises(ConfigurationError, match=f"backward: ranks along {axis} share sequences"):
            af.backward(ctx, loss, af.init_scaler(ctx))
        return found, messages

    handler = af.config.TorchContextParallelConfig(cp_comm_strategy="alltoall")
    more = {"cp_handler": handler} if axis == "cp" else {}
    for found, messages in run_ranks(work, 2, on="processes", **options(axis, **more)):
        for one, other in zip(found, attended(None), strict=True):
            torch.testing.assert_close(one, other)
        check(
            messages, ["4 by 4 doesn't cover", "outside of", "never called", "sequences that weren't sharded"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_documents_that_are_packed_in_a_row_attend_to_themselves(axis: str) -> None:
    ids = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(3))
    # Documents that end within a shard, and with one.
    lengths = ((6, 10), (8, 8))
    positions = torch.stack([torch.cat([*map(torch.arange, row)]) for row in lengths])

    def work(ctx: af.Context) -> list[Any]:
        torch.manual_seed(0)
        model = af.prepare_model(ctx, make_llama(num_key_value_heads=2))
        shards = [af.shard_sequence(ctx, one, 1) for one in (ids, positions)]
        first = model(shards[0], position_ids=shards[1], use_cache=False).logits
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        model.train()
        logits = model(shards[0], None, shards[1], use_cache=False).logits
        torch.testing.assert_close(first, logits)
        # Recomputed after a pass on a row that is one document.
        model(shards[0], position_ids=af.shard_sequence(ctx, torch.arange(16)[None], 1))
        logits.square().sum().backward()
        gradients = [af.reduce(ctx, one.grad) for one in model.parameters() if one.grad is not None]
        return [af.data.gather_sequence(ctx, logits.detach(), 1), *gradients]

    def planned(model: Any, batch: Any) -> torch.Tensor:
        return model(batch, position_ids=torch.zeros_like(batch)).logits.sum()

    # A plan has no values, which say where documents begin.
    assert af.plan_memory(af.plan_context(2, **options(axis)), make_llama(), batch=ids, loss_fn=planned)
    expected = run_ranks(work, 1)[0]
    for found in run_ranks(work, 2, on="processes", **options(axis)):
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1:], expected[1:])


@pytest.mark.slow
def test_masks_windows_and_other_attention_of_transformers_are_refused() -> None:
    def work(ctx: af.Context) -> list[str]:
        ids = torch.full((2, 4), ctx.rank)
        places = af.shard_sequence(ctx, torch.arange(8)[None], 1)
        said = [refused(ctx, make_llama(), ids, attention_mask=torch.ones(2, 4), position_ids=places)]
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
        check(messages, ["called with attention_mask", layer, "computes attention by 'eager'"])


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


class Hybrid(nn.Module):
    """Two blocks, the second of which has no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(Attention(), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.slow
@pytest.mark.usefixtures("dtensors")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_a_stage_may_have_no_attention() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> af.Loss:
        return af.Loss(model(batch["x"]).square().sum(), batch["x"].numel())

    def work(ctx: af.Context) -> str:
        torch.manual_seed(0)
        x = torch.randn(4, 8, 8)
        report = af.verify_layout(ctx, Hybrid(), {"x": x}, loss_fn)
        assert report.is_equal
        return str(af.plan_model(ctx, Hybrid()))

    loading = af.DataLoaderConfiguration(sequence={"x": 1})
    mesh = af.ParallelismConfig(cp_size=2, pp_size=2)
    plans = run_ranks(work, 4, on="processes", parallelism_config=mesh, dataloader_config=loading)
    assert ["no module of this stage" in plan for plan in plans] == [False, False, True, True]


def test_ranks_that_are_threads_are_refused() -> None:
    def work(ctx: af.Context) -> str:
        with pytest.raises(NotAvailableError) as caught:
            af.prepare_model(ctx, GPT())
        return str(caught.value)

    for message in run_ranks(work, 2, **options("cp")):
        assert 'on="processes"' in message
