"""Optimizers of torch and of other packages under each strategy: trained, skipped, saved, and refused."""

# torch leaves backward and its optimizers partly untyped; the packages have no types.
# pyright: reportUnknownMemberType=false

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig, StepState
from accelfn.data import plan_microbatch
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks
from accelfn.tree import local_of

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

Make = Callable[[list[nn.Parameter]], Optimizer]


def made(package: str, name: str, **options: Any) -> Make:
    return lambda parameters: getattr(importlib.import_module(package), name)(parameters, **options)


class Kind(NamedTuple):
    """An optimizer, and how near to one process its losses are on several."""

    make: Make
    steps_shards: bool = True
    rtol: float = 2e-4


class Orthogonal(Optimizer):
    """A program's own optimizer, which multiplies whole matrices."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = parameter.grad / parameter.grad.norm()
                    for _ in range(3 if update.dim() == 2 else 0):
                        update = 1.5 * update - 0.5 * update @ update.mT @ update
                    parameter.sub_(group["lr"] * update)


def muon(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.01)


TORCH, FREE, BITS = "torch.optim", "schedulefree", "bitsandbytes.optim"
KINDS: dict[str, Kind] = {
    "AdamW foreach": Kind(made(TORCH, "AdamW", lr=0.01, foreach=True)),
    "Adam fused": Kind(made(TORCH, "Adam", lr=0.01, fused=True)),
    "SGD fused": Kind(made(TORCH, "SGD", lr=0.1, momentum=0.9, fused=True), steps_shards=False),
    "Adagrad fused": Kind(made(TORCH, "Adagrad", lr=0.01, fused=True), steps_shards=False),
    "Adafactor": Kind(made(TORCH, "Adafactor", lr=0.01), steps_shards=False),
    "Rprop": Kind(made(TORCH, "Rprop", lr=1e-3), steps_shards=False),
    "Muon": Kind(muon, steps_shards=False),
    "own": Kind(Orthogonal),
    **{name: Kind(made(TORCH, name, lr=0.01)) for name in ("Adamax", "NAdam", "RAdam", "Adadelta", "ASGD")},
}
OTHERS: dict[str, Kind] = {
    "AdamWScheduleFree": Kind(made(FREE, "AdamWScheduleFree", lr=0.01)),
    "SGDScheduleFree": Kind(made(FREE, "SGDScheduleFree", lr=0.1)),
    "AdamW8bit": Kind(made(BITS, "AdamW8bit", lr=0.01), steps_shards=False, rtol=2e-3),
    "PagedAdamW8bit": Kind(made(BITS, "PagedAdamW8bit", lr=0.01), steps_shards=False, rtol=2e-3),
    "Lion8bit": Kind(made(BITS, "Lion8bit", lr=1e-3), steps_shards=False, rtol=2e-3),
}
SETS = [
    pytest.param({name: KINDS[name] for name in ("Adam fused", "SGD fused", "Muon", "own")}, id="sample"),
    pytest.param(KINDS, id="torch", marks=pytest.mark.slow),
    pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
]


class Model(nn.Module):
    """Weights of 8192 elements, which 8-bit optimizers quantise; the norm stays unsharded under a TP plan."""

    def __init__(self) -> None:
        super().__init__()
        self._tp_plan = {"up": "colwise", "down": "rowwise"}
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def prepared(ctx: Context, make: Make) -> tuple[nn.Module, Any]:
    model = Model()
    return af.prepare(ctx, model, make([*model.parameters()]))


def batch_of(ctx: Context, number: int, rows: int = 8) -> torch.Tensor:
    """Return this rank's rows; ranks along "tp" have the same."""
    data = torch.randn(rows, 64, generator=torch.Generator().manual_seed(number))
    size, place = (1, 0) if ctx.axis_size("tp") > 1 else (ctx.num_processes, ctx.rank)
    return data.chunk(size)[place]


def train(
    ctx: Context, model: nn.Module, optimizer: Optimizer, scaler: StepState, steps: range
) -> tuple[list[float], StepState]:
    """Train with windows of two batches; return the mean loss of each batch."""
    losses: list[float] = []
    for step in steps:
        for place in range(2):
            x = batch_of(ctx, 2 * step + place)
            micro = plan_microbatch(2 * step + place, 0, 100, 2)
            with af.accumulate(ctx, micro, model):
                loss = (model(x) - x.flip(-1)).square().mean()
                scaler = af.backward(ctx, loss, scaler, micro)
            losses.append(float(af.reduce(ctx, loss.detach(), "mean")))
        scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
    return losses, scaler


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [local_of(parameter).detach().clone() for parameter in model.parameters()]


def overflow(ctx: Context, model: nn.Module, optimizer: Optimizer, scaler: StepState) -> StepState:
    """Let one rank's gradient overflow; no rank steps then."""
    before = locals_of(model)
    scaler = af.backward(ctx, model(batch_of(ctx, 50)).square().mean(), scaler)
    if ctx.rank == 0:
        parameter = max(model.parameters(), key=torch.Tensor.numel)
        assert parameter.grad is not None
        local_of(parameter.grad).fill_(torch.inf)
    scaler = af.optimizer_step(ctx, optimizer, scaler)
    assert af.step_was_skipped(ctx, scaler)
    assert all(map(torch.equal, locals_of(model), before))
    return scaler


def train_and_resume(ctx: Context, make: Make, directory: Path) -> list[float]:
    """Return the losses; check that a checkpoint continues with the same bits."""
    model, optimizer = prepared(ctx, make)
    losses, scaler = train(ctx, model, optimizer, af.init_scaler(ctx), range(2))
    if ctx.precision.scales_loss:
        scaler = overflow(ctx, model, optimizer, scaler)
    af.save_state(ctx, directory, {"model": model, "optimizer": optimizer, "scaler": scaler})
    after, _ = train(ctx, model, optimizer, scaler, range(2, 4))
    again, fresh = prepared(ctx, make)
    like: dict[str, Any] = {"model": again, "optimizer": fresh, "scaler": af.init_scaler(ctx)}
    tree = af.load_state(ctx, directory, like)
    resumed, _ = train(ctx, again, fresh, tree["scaler"], range(2, 4))
    assert resumed == after
    assert all(map(torch.equal, locals_of(again), locals_of(model)))
    return [*losses, *after]


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
}


@pytest.mark.parametrize("kinds", SETS)
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("fsdp", "no"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("ddp", "no"), ("tp", "no"), ("ddp", "fp16"), ("fsdp", "fp16"), ("tp", "fp16"))
        ),
    ],
)
def test_each_optimizer_trains_and_resumes_on_two_processes_as_on_one(
    strategy: str, precision: str, kinds: dict[str, Kind], tmp_path: Path
) -> None:
    names = [name for name, kind in kinds.items() if strategy == "ddp" or kind.steps_shards]

    def run(ctx: Context) -> dict[str, list[float]]:
        ctx = ctx.replace(mixed_precision=precision)
        folder = tmp_path / str(ctx.num_processes)
        return {name: train_and_resume(ctx, kinds[name].make, folder / name) for name in names}

    expected = run(Context())
    first, second = run_ranks(run, 2, on="processes", **STRATEGIES[strategy])
    assert first == second
    for name, losses in first.items():
        assert losses[-1] < losses[0], name
        rtol = kinds[name].rtol if precision == "no" else 5e-3
        assert losses == pytest.approx(expected[name], rel=rtol), name


@pytest.mark.parametrize("kinds", SETS)
@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_an_optimizer_that_cannot_step_shards_is_refused_before_the_model_is_sharded(
    strategy: str, kinds: dict[str, Kind]
) -> None:
    def run(ctx: Context) -> None:
        model = Model()
        with pytest.raises(NotAvailableError, match=r"prepare_model: LBFGS can't step .* Use AdamW"):
            af.prepare(ctx, model, torch.optim.LBFGS(model.parameters()))  # which steps by its own closure
        for kind in kinds.values():
            if kind.steps_shards:
                continue
            model = Model()
            before = locals_of(model)
            with pytest.raises(NotAvailableError, match=r"prepare_model: .* Use (AdamW|foreach)"):
                af.prepare(ctx, model, kind.make([*model.parameters()]))
            assert all(map(torch.equal, locals_of(model), before))
            # The next optimizer counts, and one that comes after the model is refused itself.
            af.prepare(ctx, model, AdamW(model.parameters(), fused=True))
            with pytest.raises(NotAvailableError, match="prepare_optimizer: "):
                af.training.prepare_optimizer(ctx, kind.make([*model.parameters()]))
            # So is one that nobody prepared, at its first step.
            model = Model()
            optimizer = kind.make([*model.parameters()])
            model = af.prepare_model(ctx, model)
            scaler = af.backward(ctx, model(batch_of(ctx, 0)).mean(), af.init_scaler(ctx))
            before = locals_of(model)
            with pytest.raises(NotAvailableError, match="optimizer_step: "):
                af.optimizer_step(ctx, optimizer, scaler)
            assert all(map(torch.equal, locals_of(model), before))

    run_ranks(run, 2, on="processes", **STRATEGIES[strategy])


def test_an_optimizer_that_needs_all_parameters_is_refused_in_stages() -> None:
    def run(ctx: Context) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2)))
        with pytest.raises(NotAvailableError, match=r"prepare_model: LBFGS can't step .* has a part"):
            af.prepare(ctx, model, torch.optim.LBFGS(model.parameters()))

    run_ranks(run, 2, parallelism_config=af.ParallelismConfig(pp_size=2))


class CPUOffloadOptimizer(SGD):
    """Stands in for torchao's, which can't be made without an accelerator."""

    __module__ = "torchao.optim.cpu_offload"


def test_optimizers_that_no_strategy_can_train_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing these warns of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(ctx: Context) -> None:
        model = Model()
        for optimizer, text in (
            (ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1), "Use AdamW with an fsdp_plugin"),
            (CPUOffloadOptimizer(model.parameters(), lr=0.1), r"cpu_offload=True\)"),
        ):
            with pytest.raises(NotAvailableError, match=text):
                af.prepare(ctx, model, optimizer)

    run_ranks(run, 2, on="processes")


# --- schedule-free: training and evaluation mode ---------------------------------------------------


@pytest.mark.slow
def test_prepare_puts_a_schedule_free_optimizer_into_training_mode() -> None:
    make = OTHERS["AdamWScheduleFree"].make
    model, optimizer = prepared(Context(), make)
    assert optimizer.param_groups[0]["train_mode"]
    train(Context(), model, optimizer, af.init_scaler(Context()), range(2))
    trained = locals_of(model)
    optimizer.eval()
    averages = locals_of(model)
    # A new optimizer that continues from a state in evaluation mode goes back to the trained weights.
    other: Any = make([*model.parameters()])
    other.load_state_dict(optimizer.state_dict())
    af.prepare(Context(), other)
    torch.testing.assert_close(locals_of(model), trained)
    assert not all(map(torch.equal, averages, trained))
    closure: Any = importlib.import_module(FREE).SGDScheduleFreeClosure(model.parameters())
    with pytest.raises(NotAvailableError, match="Use the class without Closure"):
        af.prepare(Context(), model, closure)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_mode_is_saved_and_a_step_in_evaluation_mode_is_refused(strategy: str, tmp_path: Path) -> None:
    make = OTHERS["AdamWScheduleFree"].make

    def run(ctx: Context) -> None:
        model, optimizer = prepared(ctx, make)
        _, scaler = train(ctx, model, optimizer, af.init_scaler(ctx), range(2))
        optimizer.eval()
        scaler = af.backward(ctx, model(batch_of(ctx, 0)).mean(), scaler)
        before = locals_of(model)
        with pytest.raises(ConfigurationError, match="AdamWScheduleFree is in evaluation mode"):
            af.optimizer_step(ctx, optimizer, scaler)
        assert all(map(torch.equal, locals_of(model), before))
        optimizer.zero_grad()
        af.save_state(ctx, tmp_path, {"model": model, "optimizer": optimizer})
        again, fresh = prepared(ctx, make)
        af.load_state(ctx, tmp_path, {"model": again, "optimizer": fresh})
        assert not fresh.param_groups[0]["train_mode"]
        assert all(map(torch.equal, locals_of(again), before))
        results: list[list[float]] = []
        for one, its in ((model, optimizer), (again, fresh)):
            its.train()
            results.append(train(ctx, one, its, af.init_scaler(ctx), range(2, 4))[0])
        assert results[0] == results[1]

    run_ranks(run, 2, on="processes", **STRATEGIES[strategy])
