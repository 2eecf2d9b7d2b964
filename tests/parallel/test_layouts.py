"""Layouts train as one plain process does: the loss, the norm before clipping, the weights.

Those of which tests/programs knows no word: experts, other schedules of stages, and more than four ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.testing import run_ranks
from tests.parallel.expert_models import SparseGPT
from tests.parallel.layouts import LAYOUTS, Layout
from tests.parallel.tensor_models import GPT, LENGTH, VOCABULARY

pytestmark = pytest.mark.usefixtures("dtensors")

_ROWS = 8  # of a batch over all ranks
_STEPS = 3  # of the optimizer
_MAX_NORM = 0.1  # less than any norm here, so that each step is clipped


class Case(NamedTuple):
    """How a model is trained."""

    accumulation: int
    optimizer: str
    weighted: bool
    sparse: bool = False  # with experts
    num_blocks: int = 2  # of the model; a stage of a pipeline has one at least

    def make_model(self) -> nn.Module:
        return SparseGPT() if self.sparse else GPT(num_blocks=self.num_blocks)

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.accumulation} a window, {'weighted' if self.weighted else 'mean'}"


CASES = [Case(1, "AdamW", weighted=False), Case(1, "SGD", weighted=True), Case(3, "SGD", weighted=False)]


class Seen(NamedTuple):
    """What a training run came to: by optimizer step, and at its end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def make_data(case: Case) -> TensorDataset:
    """Make token ids and labels; where losses are weighted, rows have very different numbers of labels."""
    random = torch.Generator().manual_seed(3)
    num_rows = _ROWS * case.accumulation * _STEPS
    ids = torch.randint(0, VOCABULARY, (num_rows, LENGTH + 1), generator=random)
    labels = ids[:, 1:].clone()
    if case.weighted:
        share = torch.rand(num_rows, 1, generator=random)
        labels[torch.rand(labels.shape, generator=random) < share] = -100
    positions = torch.arange(LENGTH).expand(num_rows, -1)  # which a piece of a sequence doesn't show
    return TensorDataset(ids[:, :-1].contiguous(), positions, labels)


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer. Adam divides by what may be rounding alone, which a large ``eps`` keeps small."""
    if case.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def loss_of(model: nn.Module, case: Case, batch: Any) -> torch.Tensor:
    """Return the sum of the losses of all labels if they are weighted, else their mean."""
    ids, positions, labels = batch
    logits = model(ids, positions).flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten(), reduction="sum" if case.weighted else "mean")


def plain(case: Case) -> Seen:
    """Train in one process, by hand."""
    model = case.make_model()
    optimizer = make_optimizer(case, model)
    batches = iter(DataLoader[Any](make_data(case), batch_size=_ROWS))
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(_STEPS):
        window = [next(batches) for _ in range(case.accumulation)]
        count = sum(int((one[-1] != -100).sum()) for one in window) if case.weighted else len(window)
        total = 0.0
        for batch in window:
            loss = loss_of(model, case, batch) / count
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Seen(losses, norms, {name: one.detach() for name, one in model.named_parameters()})


def weight_of(case: Case, labels: torch.Tensor) -> torch.Tensor | None:
    """Return what a summed loss is divided by."""
    return (labels != -100).sum() if case.weighted else None


def summed_or_mean(case: Case, model: nn.Module, batch: Any) -> af.Loss:
    """Return the loss of a batch, with its weight if it is a sum."""
    return af.Loss(loss_of(model, case, batch), weight_of(case, batch[-1]))


def by_functions(ctx: af.Context, case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, Any, Any]]:
    """Train with the functions; yield each batch's loss and weight, the model, and a step's norm."""
    model: nn.Module = case.make_model()
    optimizer = make_optimizer(case, model)
    loader = DataLoader[Any](make_data(case), batch_size=_ROWS // ctx.axis_size("dp"))
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)

    for batch, micro in af.microbatches(ctx, loader):
        norm = None
        weight = weight_of(case, batch[-1])
        scaler, loss = af.forward_backward(ctx, model, partial(summed_or_mean, case), batch, scaler, micro)
        if micro.sync:
            scaler = af.unscale_gradients(ctx, optimizer, scaler)
            norm = af.clip_grad_norm_(ctx, model.parameters(), _MAX_NORM, scaler_state=scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        yield loss, weight, model, norm


def whole(value: Any) -> torch.Tensor:
    """Return a parameter of all ranks."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def train(ctx: af.Context, case: Case, way: Callable[..., Iterator[Any]]) -> Seen:
    """Train on this rank."""
    ctx = ctx.replace(gradient_accumulation_steps=case.accumulation)
    others = ctx.along("loss")
    losses: list[float] = []
    norms: list[float] = []
    total, count = torch.zeros(()), torch.zeros(())
    model: Any = None
    for loss, weight, prepared, norm in way(ctx, case):
        model = prepared
        total += whole(loss)
        count += 1 if weight is None else weight
        if norm is not None:
            both = af.reduce(others, torch.stack([total, count]))
            losses.append(float(both[0] / both[1]))
            norms.append(float(norm))
            total, count = torch.zeros(()), torch.zeros(())
    named = af.unwrap_model(model).named_parameters()
    # A stage of a pipeline may have the other name of the tied parameter.
    own = {name.replace("head", "embed"): whole(one.detach()).clone() for name, one in named}
    return Seen(losses, norms, own)


def far(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference."""
    assert len(one) == len(other) == _STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def moved(case: Case, seen: Seen, reference: Seen) -> float:
    """Return how far the weights are from the reference's, beside the way that those went."""
    start = dict(case.make_model().named_parameters())
    assert seen.weights.keys() == reference.weights.keys() == start.keys()
    names = [*start]
    way = torch.cat([(reference.weights[name] - start[name].detach()).flatten() for name in names])
    off = torch.cat([(seen.weights[name] - reference.weights[name]).flatten() for name in names])
    return float(off.square().sum().sqrt() / way.square().sum().sqrt())


_PLUGIN = af.FullyShardedDataParallelPlugin(fsdp_version=2)
_RECOMPUTED = {"fsdp_plugin": replace(_PLUGIN, activation_checkpointing=True)}
_OFFLOADED = {"fsdp_plugin": replace(_PLUGIN, cpu_offload=True)}
_COMPILED = {"dynamo_backend": "aot_eager"}
# The loss is a sum: with torch's first scale the first steps would be skipped.
_FLOAT16 = {"mixed_precision": "fp16", "kwargs_handlers": [af.config.GradScalerKwargs(init_scale=64.0)]}
LARGE = {
    "tp2 in hsdp2x2": Layout(replicate=2, shard=2, tp=2),
    "tp2 in fsdp2 in pp2": Layout(pp=2, shard=2, tp=2),
}
UNKNOWN = [name for name in LAYOUTS if "ep" in name or "-" in name] + ["pp4", "tp2xcp2", "tp2xsp2"]
UNKNOWN.remove("ep2")  # is trained with options below
_PLAIN: dict[str, Any] = {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*UNKNOWN, *LARGE])
def test_layouts_that_programs_do_not_know_train_as_one_process(name: str) -> None:
    layout = {**LAYOUTS, **LARGE}[name]
    cases = [case for case in CASES if is_allowed(case, layout)]
    if layout.size > 2:  # where a step is costly
        cases = cases[-1:]
    runs: list[tuple[dict[str, Any], Case]] = [(_PLAIN, case) for case in cases]
    if layout.size <= 4:
        runs.append(({"mixed_precision": "bf16"}, cases[0]))
    check(layout, runs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at each parameter's
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ep2", [_PLAIN, _RECOMPUTED, _OFFLOADED, _FLOAT16]),
        ("pp2xfsdp2", [_COMPILED, _FLOAT16]),
        ("pp2xcp2", [_COMPILED, _FLOAT16]),
    ],
)
def test_layouts_go_with_what_else_a_context_asks_for(name: str, options: list[dict[str, Any]]) -> None:
    check(LAYOUTS[name], [(one, Case(3, "SGD", weighted=True)) for one in options])


def is_allowed(case: Case, layout: Layout) -> bool:
    """Return whether a layout takes a case."""
    if layout.cp * layout.sp > 1 and not case.weighted:
        return False
    # AdamW hides how large the gradients of experts are.
    return layout.ep == 1 or case.optimizer == "SGD"


def check(layout: Layout, runs: Sequence[tuple[dict[str, Any], Case]]) -> None:
    """Train on the layout's ranks, each time with options of the context, and compare with one process."""
    runs = [
        (options, case._replace(sparse=layout.ep > 1, num_blocks=layout.num_blocks)) for options, case in runs
    ]

    def work(ctx: af.Context) -> list[Seen]:
        return [train(ctx.replace(**options), case, by_functions) for options, case in runs]

    ranks = run_ranks(
        work,
        layout.size,
        on="processes",
        timeout_s=300.0,
        parallelism_config=layout.config(),
        dataloader_config=af.DataLoaderConfiguration(sequence={0: 1, 1: 1, 2: 1}),
        fsdp_plugin=_PLUGIN if layout.shard > 1 else None,
    )
    for index, (options, case) in enumerate(runs):
        reference = plain(case)
        precision = options.get("mixed_precision", "no")
        bounds = (1e-5, 1e-5, 1e-4) if precision == "no" else (0.01, 0.05, 0.2)
        found_anywhere = {name: value for rank in ranks for name, value in rank[index].weights.items()}
        for seen in (rank[index] for rank in ranks):
            seen = seen._replace(weights={**found_anywhere, **seen.weights})  # with those of other stages
            differences = (
                far(seen.losses, reference.losses),
                far(seen.norms, reference.norms),
                moved(case, seen, reference),
            )
            within = [found < bound for found, bound in zip(differences, bounds, strict=True)]
            assert all(within), f"{options}, {case}: {differences}"
