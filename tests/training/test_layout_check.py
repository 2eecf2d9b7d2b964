"""A layout of ranks computes what one process does, or the module is named at which they part."""

# torch leaves autograd's functions and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn.errors import ConfigurationError, RemoteRankError, ReplicaDriftError
from accelfn.testing import run_ranks
from tests.parallel.layouts import LAYOUTS
from tests.parallel.tensor_models import GPT, LENGTH, VOCABULARY

ROWS = 4


class Scaled(nn.Module):
    """Multiplies by another number on each rank."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class ScaledGradient(Scaled):
    """Multiplies gradients alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Backwards.apply(x, self.factor)


def net(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), *more, nn.Tanh(), nn.Linear(5, 1))


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch.pop("x")) - batch["y"]).square().mean()


def rows(count: int = ROWS) -> dict[str, torch.Tensor]:
    x = torch.linspace(-1, 1, count * 3).view(count, 3)
    return {"x": x, "y": x.sum(1, keepdim=True).exp()}


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"reduction": "canonical"}])
def test_replicas_are_equal_to_one_process(options: Any) -> None:
    def work(ctx: af.Context) -> af.training.LayoutReport:
        torch.manual_seed(ctx.rank)  # all start from rank 0's values
        model, batch = net(nn.LayerNorm(5)), rows()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = torch.get_rng_state()
        report = af.verify_layout(ctx, model, batch, mean_loss)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(state, torch.get_rng_state())
        assert model.training
        assert list(batch) == ["x", "y"]
        return report

    first, second = run_ranks(work, 2, **options)
    assert first == second
    assert first.is_equal
    assert first.first_module is None
    assert list(first.outputs) == ["0", "1", "2", "3", "4", "Sequential"]
    assert len(first.gradients) == 6
    assert "layout     dp_replicate 2" in str(first)
    assert str(first).endswith("equal to one process")


def planted(make: Callable[[af.Context], nn.Module], loss_fn: Any = mean_loss) -> af.training.LayoutReport:
    """Return what is found of a model with a fault."""

    def work(ctx: af.Context) -> af.training.LayoutReport:
        torch.manual_seed(0)
        return af.verify_layout(ctx, net(make(ctx)), rows(), loss_fn)

    return run_ranks(work, 2)[0]


def test_the_first_module_that_differs_is_named() -> None:
    found = planted(lambda ctx: nn.Sequential(nn.Identity(), Scaled(1.0 + ctx.rank)))
    assert not found.is_equal
    assert found.first_module == "2.1"
    assert [name for name, one in found.outputs.items() if one > found.tolerance][:2] == ["2.1", "2"]
    assert str(found).endswith("not equal to one process, at first in 2.1")


def test_a_fault_of_the_backward_pass_is_named_by_a_parameter() -> None:
    found = planted(lambda ctx: ScaledGradient(1.0 + ctx.rank))
    assert not found.is_equal
    assert found.loss == pytest.approx(found.loss_of_one)
    assert found.first_module == "0"
    assert found.gradients["4.weight"] < 1e-5


class Turned(nn.Module):
    """Multiplies by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_both_parts_of_complex_numbers_are_compared(factor: float) -> None:
    def turned_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        z = model(batch["x"])
        # Without a value, but with a gradient of the imaginary part that depends on all rows.
        fault = ((z.imag - z.imag.detach()) * z.imag.detach().mean(0)).sum(1).mean()
        return z.real.square().mean() + z.imag.square().mean() + factor * fault

    def work(ctx: af.Context) -> af.training.LayoutReport:
        return af.verify_layout(ctx, Turned(), rows(), turned_loss)

    found = run_ranks(work, 2)[0]
    assert found.is_equal == (factor == 0.0)
    assert found.outputs == {"Turned": 0.0}
    assert (found.gradients["weight"] < 1e-5) == found.is_equal


def test_a_loss_that_depends_on_the_number_of_rows_is_no_module() -> None:
    def summed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().sum()

    found = planted(lambda _: nn.Identity(), summed)
    assert not found.is_equal
    assert found.first_module is None
    assert "in the loss, not in a module" in str(found)


def refused(ctx: af.Context) -> list[str]:
    """Return the errors of what can't be verified."""

    def said(model: Any, batch: Any) -> str:
        with pytest.raises((ConfigurationError, TypeError, ValueError)) as caught:
            af.verify_layout(ctx, model, batch, mean_loss)
        return str(caught.value)

    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5)

    prepared = af.prepare(ctx, net())
    with torch.device("meta"):
        empty = net()
    return [
        said(prepared, rows()),
        said(empty, rows()),
        said(net(Noise()), rows()),
        said(net(), rows(5)),
        said([net()], rows()),
    ]


def test_what_can_not_be_verified_is_refused() -> None:
    found = run_ranks(refused, 2)[0]
    assert "the model is prepared already. Pass it before prepare_model" in found[0]
    assert "0.weight is on the meta device" in found[1]
    assert "draws random numbers, which differ between layouts" in found[2]
    assert "2 ranks along dp divide the batch, whose 5 rows" in found[3]
    assert "model must be a module, got list" in found[4]


def test_batches_of_each_rank_are_refused_and_an_error_of_one_rank_reaches_all() -> None:
    def other(ctx: af.Context) -> str:
        batch = rows()
        batch["y"] += ctx.rank
        with pytest.raises(ReplicaDriftError) as caught:
            af.verify_layout(ctx, net(), batch, mean_loss)
        return str(caught.value)

    assert all("batch[1]" in said for said in run_ranks(other, 2))

    def failing(ctx: af.Context) -> str:
        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            if ctx.rank == 1:
                raise KeyError("labels")
            return mean_loss(model, batch)

        with pytest.raises((KeyError, RemoteRankError)) as caught:
            af.verify_layout(ctx, net(), rows(), loss_fn)
        return type(caught.value).__name__

    assert run_ranks(failing, 2) == ["RemoteRankError", "KeyError"]


# --- ranks that are processes ---------------------------------------------------------------------


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    places = torch.arange(LENGTH).expand(ROWS, -1)
    return {"ids": ids[:, :-1], "positions": places, "labels": ids[:, 1:]}


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> af.Loss:
    logits = model(batch["ids"], batch["positions"]).flatten(0, 1).float()
    total = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    return af.Loss(total, batch["labels"].numel())


class Pooled(nn.Module):
    """Classifies sequences by the mean of their positions, which ranks that share them don't have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pool = GPT(), nn.AdaptiveAvgPool1d(1)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.pool(self.inner(ids, positions).transpose(1, 2)).squeeze(2)


def pooled_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> af.Loss:
    logits = model(batch["ids"], batch["positions"])
    total = F.cross_entropy(logits, batch["labels"][:, 0], reduction="sum")
    return af.Loss(total, len(logits))


def spread(ctx: af.Context) -> tuple[bool, int, str, str | None]:
    """Return whether a right model is equal, how many modules were compared, and where a wrong one isn't."""
    compiled: Any = torch.compile
    right = af.verify_layout(ctx, compiled(GPT(), backend="eager"), tokens(), token_loss)
    found = None
    if ctx.axis_size("seq") > 1:
        found = af.verify_layout(ctx, Pooled(), tokens(), pooled_loss).first_module
        bare = ctx.replace(dataloader_config=af.DataLoaderConfiguration())
        with pytest.raises(ConfigurationError, match="it isn't known which tensors of the batch have them"):
            af.verify_layout(bare, GPT(), tokens(), token_loss)
    return right.is_equal, len(right.outputs), str(right), found


@pytest.mark.slow
@pytest.mark.usefixtures("dtensors")
@pytest.mark.parametrize("case", ["cp2 bf16", "sp2", "pp2", "tp2xfsdp2"])
def test_layouts_of_processes_are_equal_to_one(case: str) -> None:
    name, _, mode = case.partition(" ")
    sequence: dict[str, int] = {"ids": 1, "positions": 1, "labels": 1}
    found = run_ranks(
        spread,
        LAYOUTS[name].size,
        on="processes",
        mixed_precision=mode or "no",
        parallelism_config=LAYOUTS[name].config(),
        dataloader_config=af.DataLoaderConfiguration(sequence=sequence),
    )
    is_equal, num_modules, printed, first = found[0]
    assert all(one == found[0] for one in found)
    assert is_equal, printed
    assert num_modules == (17 if "tp" in name else 25)  # with tp, not those that return parts of rows
    assert first == ("pool" if "cp" in name or "sp" in name else None)
