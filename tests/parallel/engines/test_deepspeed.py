"""DeepSpeed trains as torch does, at every stage, and comes back from what a dead run has saved."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import DeepSpeedPlugin
from accelfn.errors import ConfigurationError, DistributedError, MissingExtraError, NotAvailableError
from accelfn.parallel.engines import deepspeed as adapter
from accelfn.testing import run_ranks
from tests.parallel.engines import deepspeed_models as dm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(850), pytest.mark.usefixtures("deepspeed_ops")]

LAYOUTS = [(0, False), (1, False), (2, False), (3, False), (2, True), (3, True)]
IDS = ["zero0", "zero1", "zero2", "zero3", "zero2 offload", "zero3 offload"]


class Case(NamedTuple):
    """How an engine is trained: every pair of two settings is in one of the cases."""

    dtype: str
    steps: int
    dummy: bool
    way: str


CASES = [
    Case("no", 1, False, "functions"),
    Case("no", 3, True, "shim"),
    Case("bf16", 1, True, "functions"),
    Case("bf16", 3, False, "shim"),
    Case("no", 3, False, "functions, weighted"),
    Case("bf16", 1, False, "shim"),
]


@pytest.mark.parametrize(("stage", "offload"), LAYOUTS, ids=IDS)
def test_it_trains_as_plain_torch_and_a_killed_run_continues_bit_for_bit(
    stage: int, offload: bool, tmp_path: Path
) -> None:
    place = str(tmp_path / "step-1")

    def configured(ctx: Context, case: Case) -> Context:
        return dm.with_deepspeed(ctx, stage, case.dtype, case.steps, dummy=case.dummy, offload=offload)

    def train(ctx: Context, case: Case) -> dm.Run:
        if case.way == "shim":
            return dm.by_shim(configured(ctx, case), dummy=case.dummy)
        return dm.by_functions(
            configured(ctx, case), dummy=case.dummy, weighted=case.way.endswith("weighted")
        )

    def half(ctx: Context, **more: Any) -> dm.Run:
        return dm.by_functions(configured(ctx, Case("bf16", 3, False, "functions")), **more)

    def on_rank(ctx: Context) -> tuple[list[dm.Run], dm.Run, dm.Run]:
        last = configured(ctx, CASES[3])
        runs = [train(ctx, case) for case in CASES]
        return runs, half(ctx), dm.by_shim(last, folder=str(tmp_path / "shim"))

    (found, undisturbed, reloaded), _ = dm.on_processes(on_rank)
    for case, run in zip(CASES, found, strict=True):
        losses, norms, parameters = dm.distances(run, dm.by_hand(case.dtype, case.steps))
        if case.dtype == "no":
            assert losses < 1e-6, case
            assert norms < 1e-5, case
            assert parameters < 1e-6, case
        else:  # gradients are averaged in bf16, and stage 0 computes under autocast
            assert losses < 2e-2, case
            assert norms < 3e-2, case
            assert parameters < 3e-3, case
    assert reloaded.losses == found[3].losses
    with pytest.raises(DistributedError):
        dm.on_processes(lambda ctx: half(ctx, save=(1, place), die_at=2))
    resumed, _ = dm.on_processes(lambda ctx: half(ctx, load=place))
    assert resumed.losses == undisturbed.losses[3:]
    assert resumed.norms == undisturbed.norms[1:]
    assert all(torch.equal(resumed.weights[name], one) for name, one in undisturbed.weights.items())


def test_a_checkpoint_loads_into_any_stage_number_of_ranks_and_strategy(tmp_path: Path) -> None:
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2)

    def zero(stage: int, size: int, **more: Any) -> dm.Run:
        return dm.on_processes(lambda ctx: dm.by_functions(dm.with_deepspeed(ctx, stage), **more), size)[0]

    def sharded(**more: Any) -> dm.Run:
        return dm.on_processes(lambda ctx: dm.by_functions(ctx, **more), 2, fsdp_plugin=plugin)[0]

    def plain(**more: Any) -> dm.Run:
        return run_ranks(lambda ctx: dm.by_functions(ctx, **more), 1)[0]

    whole = plain()
    for number, write in enumerate(
        (lambda **more: zero(1, 2, **more), lambda **more: zero(3, 2, **more), sharded)
    ):
        place = str(tmp_path / f"{number}")
        write(save=(4, place))
        for read in (lambda **more: zero(3, 1, **more), lambda **more: zero(2, 4, **more), sharded, plain):
            rest = read(load=place)
            assert len(rest.losses) == 5
            joined = dm.Run([*whole.losses[:4], *rest.losses], [*whole.norms[:4], *rest.norms], rest.weights)
            losses, _, parameters = dm.distances(joined, whole)
            assert losses < 1e-5
            assert parameters < 1e-6


def mean_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return dm.squares(model, batch[0], batch[1]).mean()


def test_a_train_step_over_an_engine_trains_as_plain_torch() -> None:
    def on_rank(ctx: Context) -> dm.Run:
        ctx = dm.with_deepspeed(ctx, 3, steps=3)
        model, optimizer, scheduler, batches = af.prepare(ctx, *dm.objects(ctx, dummy=False))
        step = af.make_train_step(ctx, mean_of, optimizer, model=model, max_norm=0.5, scheduler=scheduler)
        state, norms, rows = af.init_train_state(ctx, optimizer), list[float](), list(batches)
        for start in range(0, len(rows), 3):
            window = zip(*rows[start : start + 3], strict=True)
            state, metrics = step(state, tuple(torch.cat(parts) for parts in window))
            assert metrics.grad_norm is not None
            norms.append(float(metrics.grad_norm))
        return dm.Run([], norms, dm.weights_of(ctx, model))

    found, _ = dm.on_processes(on_rank)
    _, norms, parameters = dm.distances(found, dm.by_hand("no", 3)._replace(losses=[]))
    assert norms < 1e-5
    assert parameters < 1e-6


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = dm.make()
    return model, dm.adamw(model.parameters())


def test_weights_are_saved_and_loaded_as_of_any_model(tmp_path: Path) -> None:
    def on_rank(ctx: Context) -> dict[str, torch.Tensor]:
        ctx = dm.with_deepspeed(ctx, 3)
        model, _ = af.prepare(ctx, *_pair())
        af.save_model(ctx, model, tmp_path / "weights")
        with torch.no_grad(), af.engines.gathered_parameters(model.parameters(), modifier_rank=0):
            for parameter in model.parameters():
                parameter.zero_()
        # The float32 parameters of the optimizer are those that count.
        af.load_model(model, tmp_path / "weights")
        return dm.weights_of(ctx, model)

    found, _ = dm.on_processes(on_rank)
    expected = dict(dm.make().named_parameters())
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    plain = dm.make()
    af.load_model(plain, tmp_path / "weights")


def test_a_teacher_computes_beside_a_student() -> None:
    def on_rank(ctx: Context) -> tuple[list[float], list[float]]:
        plugins = {
            "student": DeepSpeedPlugin(hf_ds_config=dm.config(2)),
            "teacher": DeepSpeedPlugin(hf_ds_config=dm.config(3)),
        }
        ctx = ctx.replace(deepspeed_plugin=plugins)
        teaching = ctx.replace(deepspeed_plugin=plugins["teacher"])
        teacher = af.prepare_model(teaching, dm.make(), evaluation_mode=True)
        student, optimizer, batches = af.prepare(ctx, *_pair(), dm.loader(ctx))
        scaler, losses = af.init_scaler(ctx), list[float]()
        for (x, _), micro in af.microbatches(ctx, batches):
            with torch.no_grad():
                wanted = teacher(x) + 1.0
            with af.accumulate(ctx, micro, student):
                loss = (student(x + 0.1) - wanted).square().mean()
                scaler = af.backward(ctx, loss, scaler, micro)
            losses.append(float(loss.detach()))
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        return losses, [float(one.sum()) for one in dm.weights_of(teaching, teacher).values()]

    (losses, teacher), _ = dm.on_processes(on_rank)
    assert losses[-1] < losses[0]
    assert teacher == [float(one.detach().sum()) for one in dict(dm.make().named_parameters()).values()]


def test_models_are_created_sharded_and_lomo_steps_shards_in_backward() -> None:
    def on_rank(ctx: Context) -> dm.Run:
        lomo: Any = importlib.import_module("lomo_optim")
        ctx = dm.with_deepspeed(ctx, 3)
        with af.engines.zero3_init(ctx):
            model = dm.make()
            assert sum(parameter.numel() for parameter in model.parameters()) == 0  # held by DeepSpeed
            optimizer = lomo.Lomo(model, lr=1e-2)
        model, optimizer, batches = af.prepare(ctx, model, optimizer, dm.loader(ctx))
        losses: list[float] = []
        for (x, y), micro in af.microbatches(ctx, batches):
            loss = dm.squares(model, x, y).mean()
            af.training.lomo_backward(ctx, loss, 1e-2, optimizer, micro)
            losses.append(float(af.reduce(ctx, loss.detach(), "mean")))
        return dm.Run(losses, [], dm.weights_of(ctx, model))

    found, _ = dm.on_processes(on_rank)
    model, losses = dm.make(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in torch.utils.data.DataLoader(cast("Any", dm.rows()), batch_size=dm.BATCH):
        loss = mean_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    expected = dm.Run(losses, [], {name: one.detach() for name, one in model.named_parameters()})
    distance, _, parameters = dm.distances(found, expected)
    assert distance < 1e-5
    assert parameters < 1e-6


def test_a_configured_scheduler_steps_with_the_engine() -> None:
    def on_rank(ctx: Context) -> list[float]:
        whole = dm.config(2, dummy=True)
        whole["scheduler"] = {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "warmup_type": "linear",
            },
        }
        ctx = ctx.replace(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=whole))
        model = dm.make()
        optimizer = af.engines.DummyOptim(model.parameters(), lr=0.4)
        scheduler: Any = af.engines.DummyScheduler(optimizer, warmup_num_steps=4)
        model, optimizer, scheduler, batches = af.prepare(ctx, model, optimizer, scheduler, dm.loader(ctx))
        scaler, rates = af.init_scaler(ctx), list[float]()
        for (x, y), micro in af.microbatches(ctx, batches):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, dm.squares(model, x, y).mean(), scaler, micro)
            rates.append(float(scheduler.get_last_lr()[0]))
            scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=scheduler)
        return rates

    rates, _ = dm.on_processes(on_rank)
    # Once a step, whatever the number of ranks; DeepSpeed's first step has the rate before it.
    assert rates[:6] == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3, 0.4])


def test_what_does_not_fit_is_refused_by_name() -> None:
    def together(ctx: Context) -> None:
        """One of them without the other, or with another's."""
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: af.prepare_model(ctx, dm.make()), "needs the model and its optimizer together"),
            (
                lambda: af.training.prepare_optimizer(ctx, _pair()[1]),
                "needs the model and its optimizer together",
            ),
            (lambda: af.prepare(ctx, *_pair(), *_pair()), "one model with one optimizer"),
            (lambda: af.prepare(ctx, dm.make(), _pair()[1]), "no parameter of the models|another model"),
            (lambda: af.plan_model(ctx, dm.make()), "that engine's plan"),
        ]
        for call, message in calls:
            with pytest.raises(ConfigurationError, match=message):
                call()

    def optimizers(ctx: Context) -> None:
        """Those that need shapes, or have state."""
        model = dm.make()
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        with pytest.raises(ConfigurationError, match="flattens parameters, which a Muon can't step"):
            af.prepare(ctx, model, torch.optim.Muon(matrices))
        stepped = dm.adamw(model.parameters())
        dm.squares(model, torch.ones(1, dm.WIDTH), torch.ones(1, 1)).mean().backward()
        stepped.step()
        with pytest.raises(ConfigurationError, match="has state, which DeepSpeed can't take over"):
            af.prepare(ctx, model, stepped)
        af.prepare(ctx, model, torch.optim.Adagrad(model.parameters(), lr=1e-2))

    def steps(ctx: Context) -> None:
        """By the optimizer that was replaced, or with gradients bound one by one."""
        own_model, own = _pair()
        model, _, batches = af.prepare(ctx, own_model, own, dm.loader(ctx))
        (x, y), micro = next(iter(af.microbatches(ctx, batches)))
        with af.accumulate(ctx, micro, model):
            scaler = af.backward(ctx, dm.squares(model, x, y).mean(), af.init_scaler(ctx), micro)
        with pytest.raises(NotAvailableError, match="clips them by their norm alone"):
            af.clip_grad_value_(ctx, model.parameters(), 1.0, scaler_state=scaler)
        with pytest.raises(ConfigurationError, match="Use the optimizer that prepare returned"):
            af.optimizer_step(ctx, own, scaler)

    def bounds(ctx: Context) -> None:
        plugin = DeepSpeedPlugin(hf_ds_config=dm.config(1, gradient_clipping=0.5))
        with pytest.raises(ConfigurationError, match=r"max_norm=1.0 contradicts .*gradient_clipping=0.5"):
            dm.by_functions(ctx.replace(deepspeed_plugin=plugin), max_norm=1.0)

    def on_rank(ctx: Context) -> None:
        together(dm.with_deepspeed(ctx, 2))
        optimizers(dm.with_deepspeed(ctx, 1))
        for stage in (0, 2, 3):
            steps(dm.with_deepspeed(ctx, stage))
        bounds(ctx)

    dm.on_processes(on_rank)


def test_threads_are_refused() -> None:
    def on_rank(ctx: Context) -> None:
        with pytest.raises(NotAvailableError, match="these ranks are threads"):
            af.prepare(dm.with_deepspeed(ctx, 2), *_pair())

    run_ranks(on_rank, 2)


def test_one_process_without_a_group_is_told_how_to_start() -> None:
    with pytest.raises(NotAvailableError, match="accelfn launch --num_processes 1"):
        af.prepare(dm.with_deepspeed(Context(), 2), *_pair())


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelfn\[deepspeed\]'"):
        adapter.load_deepspeed()
