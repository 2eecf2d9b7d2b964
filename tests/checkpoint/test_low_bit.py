"""The low-bit states of torchao's optimizers: exact in checkpoints, on the same ranks and on others."""

# torch leaves backward and its optimizers partly untyped, and torchao has no types.
# pyright: reportUnknownMemberType=false

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.errors import CheckpointMismatchError, NotAvailableError
from accelfn.testing import run_ranks
from accelfn.tree import is_dtensor, local_of

pytestmark = [
    pytest.mark.slow,  # they import torchao
    pytest.mark.filterwarnings(
        "ignore:.*is an Enum subclass:UserWarning", "ignore:.*is deprecated:DeprecationWarning"
    ),
]

KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
SHARDED: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin()}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what the ranks need: once here, and not in each of them."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torchao.optim"):
        importlib.import_module(name)


def as_it_is(step: Any, **options: Any) -> Any:
    """Stand for torch.compile, with which torchao compiles its step."""
    del options
    return step


class Model(nn.Module):
    """``rows`` of 256 weights: 16 rows or more in a shard have 8 bits, and are complete blocks."""

    def __init__(self, rows: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(256, rows)
        self.down = nn.Linear(rows, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def prepared(ctx: Context, kind: str, rows: int = 64) -> tuple[Any, Any]:
    model = Model(rows)
    optimizers = importlib.import_module("torchao.optim")
    make = AdamW if kind == "AdamW" else getattr(optimizers, kind)
    return af.prepare(ctx, model, make(model.parameters(), lr=0.01))


def train(
    ctx: Context, model: nn.Module, optimizer: Any, steps: range, compiles: bool = False
) -> list[float]:
    losses: list[float] = []
    for step in steps:
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x[:, :8]).square().mean()
        scaler = af.backward(ctx, loss, af.init_scaler(ctx))
        with nullcontext() if compiles else patch.object(torch, "compile", as_it_is):
            af.optimizer_step(ctx, optimizer, scaler)
        losses.append(loss.item())
    return losses


def complete(value: torch.Tensor) -> torch.Tensor:
    """Return the float values of a low-bit state, and of any other, from all ranks."""
    local: Any = local_of(value)
    local = local.dequantize() if hasattr(local, "dequantize") and hasattr(local, "scale") else local
    if not is_dtensor(value):
        return local.clone()
    whole: Any = value
    from torch.distributed.tensor import DTensor

    sizes = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, whole.device_mesh, whole.placements, **sizes).full_tensor()


def states(optimizer: Any) -> list[torch.Tensor]:
    return [complete(value) for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["ddp", "fsdp"])
def test_low_bits_train_as_adamw_and_continue_with_the_same_bits(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def run(ctx: Context) -> None:
        expected = train(ctx, *prepared(ctx, "AdamW"), range(4))
        for kind in KINDS:
            model, optimizer = prepared(ctx, kind)
            losses = train(ctx, model, optimizer, range(4))
            torch.testing.assert_close(losses, expected, rtol=0.02, atol=0)
            tree = {"model": model, "optimizer": optimizer}
            handle = af.save_state(ctx, tmp_path / kind, tree, asynchronous=True)
            kept, after = states(optimizer), train(ctx, model, optimizer, range(4, 7))
            handle.result()
            again, fresh = prepared(ctx, kind)
            af.load_state(ctx, tmp_path / kind, {"model": again, "optimizer": fresh})
            assert all(map(torch.equal, states(fresh), kept))
            found = [type(local_of(one)).__name__ for state in fresh.state.values() for one in state.values()]
            assert found.count("OptimState" + kind.removeprefix("AdamW")) == 2
            assert train(ctx, again, fresh, range(4, 7)) == after

    run_ranks(run, 2, on="processes", **options)


def test_low_bits_load_on_other_numbers_of_ranks_and_under_other_strategies(tmp_path: Path) -> None:
    def save(ctx: Context) -> dict[str, list[torch.Tensor]]:
        saved: dict[str, list[torch.Tensor]] = {}
        for kind in KINDS:
            model, optimizer = prepared(ctx, kind)
            train(ctx, model, optimizer, range(2))
            af.save_state(ctx, tmp_path / kind, {"model": model, "optimizer": optimizer})
            saved[kind] = states(optimizer)
        return saved

    saved = run_ranks(save, 2, on="processes", **SHARDED)[0]

    def load(ctx: Context) -> None:
        for kind in KINDS:
            model, optimizer = prepared(ctx, kind)
            af.load_state(ctx, tmp_path / kind, {"model": model, "optimizer": optimizer})
            assert all(map(torch.equal, states(optimizer), saved[kind]))
            assert len(train(ctx, model, optimizer, range(2, 3))) == 1

    load(Context())
    run_ranks(load, 2, on="processes")
    run_ranks(load, 4, on="processes", **SHARDED)


def test_shards_with_blocks_of_their_own_load_in_the_same_layout_only(tmp_path: Path) -> None:
    """Rank 0 has 16 rows, which have 8 bits, and rank 1 has 15, which stay float32."""

    def save(ctx: Context) -> None:
        model, optimizer = prepared(ctx, "AdamW8bit", rows=31)
        train(ctx, model, optimizer, range(2))
        is_low = [type(local_of(state["exp_avg"])) is not torch.Tensor for state in optimizer.state.values()]
        assert is_low[0] == (ctx.rank == 0)
        af.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer})
        kept, after = states(optimizer), train(ctx, model, optimizer, range(2, 4))
        again, fresh = prepared(ctx, "AdamW8bit", rows=31)
        af.load_state(ctx, tmp_path, {"model": again, "optimizer": fresh})
        assert all(map(torch.equal, states(fresh), kept))
        assert train(ctx, again, fresh, range(2, 4)) == after

    run_ranks(save, 2, on="processes", **SHARDED)
    model, optimizer = prepared(Context(), "AdamW8bit", rows=31)
    with pytest.raises(CheckpointMismatchError, match=r"low bits of the part \[0, 0\]\+\[16, 256\]"):
        af.load_state(Context(), tmp_path, {"model": model, "optimizer": optimizer})
    assert not optimizer.state


def test_blocks_that_a_layout_would_cut_are_refused(tmp_path: Path) -> None:
    model, optimizer = prepared(Context(), "AdamW8bit", rows=63)
    train(Context(), model, optimizer, range(1))
    af.save_state(Context(), tmp_path, {"model": model, "optimizer": optimizer})

    def load(ctx: Context) -> None:
        model, optimizer = prepared(ctx, "AdamW8bit", rows=63)
        with pytest.raises(CheckpointMismatchError, match="load it on the same number of ranks"):
            af.load_state(ctx, tmp_path, {"model": model, "optimizer": optimizer})

    run_ranks(load, 2, on="processes", **SHARDED)


def test_compiled_steps_of_sharded_low_bits_train_as_adamw_and_bfloat16_is_refused() -> None:
    def run(ctx: Context) -> None:
        model, optimizer = prepared(ctx, "AdamW8bit")
        losses = train(ctx, model, optimizer, range(3), compiles=True)
        torch.testing.assert_close(losses, train(ctx, *prepared(ctx, "AdamW"), range(3)), rtol=0.02, atol=0)
        narrow = Model().to(torch.bfloat16)
        optimizer = importlib.import_module("torchao.optim").AdamW8bit(narrow.parameters())
        with pytest.raises(NotAvailableError, match=r'AdamW8bit can.t step .* mixed_precision="bf16"'):
            af.prepare(ctx, narrow, optimizer)

    run_ranks(run, 2, on="processes", timeout_s=300, **SHARDED)
