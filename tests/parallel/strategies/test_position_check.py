"""Ranks that share sequences refuse models that need other positions outside of attention."""

# torch leaves backward and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT

WIDTH, LENGTH, WORDS = 6, 16, 13


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Alone(nn.Module):
    """Computes positions alone, with what could be taken for mixing, and counts its calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.5)
        self.expert, self.latents = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.expert(x.flatten(0, 1)[: x.shape[1]])  # of the tokens of all rows, as many as positions
        self.latents(x.mean(1, keepdim=True).expand(-1, 3, -1))  # as many of each row, however many positions
        return x + self.drop(self.line(self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]))).relu()


class Noise(nn.Module):
    """Draws random numbers in evaluation too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1)


class Cumulated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class Mean(nn.Module):
    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.share * x.mean(1, keepdim=True)


class NoisyMean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x + 0.1 * x.mean(1, keepdim=True), 0.1)


class Shares(nn.Module):
    """A softmax along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.line(x).softmax(1)


class Gated(nn.Module):
    """Adds something by a gate, which begins closed."""

    def __init__(self, kind: str, start: float = 0.0, *, is_trained: bool = True) -> None:
        super().__init__()
        self.line, self.kind, self.start = nn.Linear(WIDTH, WIDTH), kind, start
        self.gate = nn.Parameter(torch.full((WIDTH,), start), requires_grad=is_trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = {"sums": x.cumsum(1), "mean": x.mean(1, keepdim=True), "alone": self.line(x)}[self.kind]
        return x + (self.gate - self.start) * added


class Experts(nn.Module):
    """Tokens go to one of two experts each, which get as many as choose them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y[choice == number] = expert(x[choice == number]).to(y.dtype)
        return x + y


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class Counted(nn.Module):
    """Counts positions itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[1])[:, None]


class Net(nn.Module):
    """Attention and another module; returns a dict, with a loss that needs all positions."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attn, self.other = nn.Embedding(WORDS, WIDTH), Attention(), other
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, extra: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.other(self.attn(self.embed(ids) + extra["row"][:, None, :WIDTH]))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def first_pass(ctx: af.Context, other: nn.Module, rows: int = 2) -> str:
    """Return with what words a first pass is refused; "" if it isn't, and leaves no trace."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=random)
    # An input that every rank has, and as many numbers as a rank has positions.
    extra = {"row": torch.randn(rows, LENGTH // 2, generator=random), "more": None}
    ids, labels = af.shard_sequence(ctx, (ids, ids.roll(1, 1)), {0: 1, 1: 1})
    model = cast("Any", af.prepare_model(ctx, Net(other)))
    before = torch.get_rng_state()
    kept = {name: one.detach().clone() for name, one in model.named_parameters()}
    versions = [one._version for one in model.parameters()]
    try:
        with torch.random.fork_rng([]):  # the pass itself draws
            model(ids, extra, labels=labels)["loss"]
    except ConfigurationError as error:
        return str(error)
    finally:
        assert torch.equal(before, torch.get_rng_state())
        assert model.training
        for name, one in model.named_parameters():
            assert torch.equal(kept[name], one)
        assert versions == [one._version for one in model.parameters()]
    for name, buffer in model.named_buffers():
        assert not name.endswith("calls") or buffer == 1
    return ""


@pytest.mark.parametrize("axis", ["cp", pytest.param("sp", marks=pytest.mark.slow)])
def test_little_of_other_positions_is_found(axis: str) -> None:
    def work(ctx: af.Context) -> tuple[list[str], list[str]]:
        gates = [Gated(kind, start) for kind in ("sums", "mean") for start in (0.0, 1.0)]
        mixing = [Mean(0.1), Mean(0.05), Mean(0.01), NoisyMean(), Shares(), *gates]
        # Frozen, a gate stays closed.
        alone = [Gated("mean", is_trained=False), Experts()]
        return [first_pass(ctx, one) for one in mixing], [first_pass(ctx, one) for one in alone]

    sizes: Any = {f"{axis}_size": 2}
    for found, of_alone in run_ranks(
        work, 2, on="processes", parallelism_config=af.ParallelismConfig(**sizes)
    ):
        for message in found:
            assert "what other returns for a position depends on other positions" in message
        assert of_alone == [""] * 2


@pytest.mark.parametrize("reshards", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gates_that_are_sharded_are_tried_and_train_as_they_were(reshards: bool) -> None:
    def logits_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(ids, {"row": torch.zeros(2, LENGTH // 2)}, ids)["logits"]

    def work(ctx: af.Context) -> tuple[str, bool]:
        ids = torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        complete = Net(Gated("alone"))
        expected = af.shard_sequence(ctx, logits_of(complete, ids), 1)
        own = logits_of(af.prepare_model(ctx, complete), af.shard_sequence(ctx, ids, 1))
        is_equal = torch.allclose(own, expected, atol=1e-5)
        model = af.prepare_model(ctx, Net(Gated("mean")))
        with pytest.raises(ConfigurationError) as caught:
            logits_of(model, af.shard_sequence(ctx, ids, 1))
        return str(caught.value), is_equal

    plugin = af.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshards,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["Gated"],
    )
    sizes = af.ParallelismConfig(cp_size=2)
    for message, is_equal in run_ranks(work, 2, on="processes", parallelism_config=sizes, fsdp_plugin=plugin):
        assert "what other returns for a position depends on other positions" in message
        assert is_equal


@pytest.mark.parametrize("axis", ["cp", pytest.param("sp", marks=pytest.mark.slow)])
def test_modules_that_need_other_positions_are_named(axis: str) -> None:
    def work(ctx: af.Context) -> list[str]:
        others = [Alone(), Noise(), Cumulated(), Mean(), Shifted(), Counted()]
        found = [first_pass(ctx, other) for other in others]
        # As many rows as positions on a rank.
        found += [first_pass(ctx, other, LENGTH // 2) for other in (Alone(), Mean())]
        ids = torch.randint(0, WORDS, (2, LENGTH // 2), generator=torch.Generator().manual_seed(ctx.rank))
        with pytest.raises(ConfigurationError) as caught:  # positions of its own
            af.prepare_model(ctx, GPT())(ids)
        return [*found, str(caught.value)]

    sizes: Any = {f"{axis}_size": 2}
    for found in run_ranks(work, 2, on="processes", parallelism_config=af.ParallelismConfig(**sizes)):
        assert [*found[:2], found[6]] == [""] * 3
        for message in (*found[2:6], found[7]):
            assert "what other returns for a position depends on other positions" in message
        assert "what blocks.0.norm1 returns" in found[8]
