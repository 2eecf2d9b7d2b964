# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
import accelfn.accelerator.accelerator as module
from accelfn import Accelerator, Context, DataLoaderConfiguration
from accelfn.config import GradScalerKwargs
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.training.models import filled, sgd

Weights = dict[str, torch.Tensor]


def data(num: int = 11) -> Any:
    x = torch.randn(num, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR, Any]:
    model = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return model, optimizer, scheduler, DataLoader(data(), batch_size=1, shuffle=True)


def weights(model: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def by_functions(ctx: Context, clip: bool) -> Weights:
    model, optimizer, scheduler, loader = af.prepare(ctx, *make())
    scaler = af.init_scaler(ctx)
    for _ in range(3):
        for (x, y), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, nn.functional.mse_loss(model(x), y), scaler, micro)
            if micro.sync:
                if clip:
                    scaler = af.unscale_gradients(ctx, optimizer, scaler)
                    af.clip_grad_norm_(ctx, model.parameters(), 0.1, scaler_state=scaler)
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                af.scheduler_step(ctx, scheduler, scaler)
    return weights(model)


def by_the_shim(accelerator: Accelerator, clip: bool) -> Weights:
    model, optimizer, scheduler, loader = accelerator.prepare(*make())
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 4, "mixed_precision": "fp16"},
        {"reduction": af.config.CanonicalReduction(num_microbatches=6)},
    ],
    ids=["fp16", "exact"],
)
@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
def test_one_loop_through_both_ends_with_equal_bits(options: dict[str, Any], clip: bool) -> None:
    def run(ctx: Context) -> tuple[Weights, Weights]:
        return by_functions(ctx, clip), by_the_shim(Accelerator(context=ctx), clip)

    # A first scale that overflows, so that skipped steps are compared too.
    handlers = [GradScalerKwargs(init_scale=2.0**17, growth_interval=2)]
    loading = DataLoaderConfiguration(data_seed=3)
    found = run_ranks(run, 2, kwargs_handlers=handlers, dataloader_config=loading, **options)
    for pair in found:
        for one in pair:
            assert all(torch.equal(found[0][0][name], value) for name, value in one.items())
    assert any(not torch.equal(value, found[0][0][name]) for name, value in weights(make()[0]).items())


@pytest.mark.parametrize("world", [1, 2])
def test_two_models_with_two_optimizers_update_when_they_should(world: int) -> None:
    def run(ctx: Context) -> tuple[int, int]:
        accelerator = Accelerator(context=ctx)
        models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        steps = [0, 0]
        optimizers = [sgd(one) for one in models]
        for index, optimizer in enumerate(optimizers):

            def count(*_: Any, index: int = index) -> None:
                steps[index] += 1

            optimizer.register_step_post_hook(count)
        loader: Any = DataLoader(torch.ones(8 * world, 1), batch_size=1)  # pyright: ignore[reportArgumentType]
        first, second, *prepared, loader = accelerator.prepare(*models, *optimizers, loader)
        for x in loader:
            for one, optimizer in zip((first, second), prepared, strict=True):
                with accelerator.accumulate(one):
                    accelerator.backward(one(x).mean())
                    optimizer.step()
                    optimizer.zero_grad()
        return steps[0], steps[1]

    assert run_ranks(run, world, gradient_accumulation_steps=2) == [(4, 4)] * world


def test_an_evaluation_inside_and_a_break_do_not_disturb_the_window() -> None:
    def run(ctx: Context) -> list[bool]:
        accelerator = Accelerator(context=ctx)
        model, optimizer, _, loader = accelerator.prepare(*make())
        held_out = accelerator.prepare(DataLoader(data(5), batch_size=1))
        syncs: list[bool] = []
        for _ in range(2):
            for x, y in loader:
                for rows, _ in held_out:
                    assert accelerator.micro is not None
                    accelerator.gather_for_metrics(rows)
                    if len(syncs) % 2:
                        break
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(x), y))
                    syncs.append(accelerator.sync_gradients)
                    optimizer.step()
                    optimizer.zero_grad()
            assert accelerator.micro is None
        for _ in loader:
            break
        assert accelerator.micro is None
        return syncs

    epoch = [False, False, False, True, False, True]
    assert run_ranks(run, 2, gradient_accumulation_steps=4) == [epoch * 2] * 2


def rows_up_to(number: int, batch_size: int = 2) -> Any:
    return DataLoader(torch.arange(number), batch_size=batch_size)  # pyright: ignore[reportArgumentType]


def test_an_evaluation_inside_of_training_is_gathered_by_batch_and_at_its_end() -> None:
    def run(ctx: Context) -> list[list[int]]:
        accelerator = Accelerator(context=ctx)
        training, held_out = accelerator.prepare(rows_up_to(33, 8), rows_up_to(97, 8))
        found: list[list[int]] = []
        trained: list[torch.Tensor] = []
        for batch in training:
            rows: list[torch.Tensor] = []
            by_batch: list[int] = []
            for held in held_out:
                rows.append(held)
                by_batch += accelerator.gather_for_metrics(held).tolist()
            # 56 rows on each rank, exactly as many as the evaluation has: also 7 for each one of the batch.
            once = accelerator.gather_for_metrics(torch.cat(rows)).tolist()
            assert sorted(once) == sorted(by_batch) == list(range(97))
            found.append(accelerator.gather_for_metrics(batch).tolist())
            several = batch.repeat_interleave(7)
            found.append(accelerator.gather_for_metrics(several, micro=accelerator.micro)[::7].tolist())
            trained.append(batch)
        assert accelerator.gather_for_metrics(torch.cat(trained)).shape == (33,)
        return found

    batches = [list(range(16)), list(range(16, 32)), [32]]
    assert run_ranks(run, 2) == [[batch for batch in batches for _ in range(2)]] * 2


@given(
    num=st.integers(0, 40),
    batch_size=st.integers(1, 4),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    even=st.booleans(),
    dispatched=st.booleans(),
    stop=st.integers(0, 5),
)
def test_metrics_are_those_of_the_functions(
    num: int, batch_size: int, world: int, drop_last: bool, even: bool, dispatched: bool, stop: int
) -> None:
    def trees(batch: torch.Tensor) -> list[Any]:
        """Everything that a program may gather beside a batch; the pass never has as many as 41 times."""
        names = [f"{one}" for one in batch.tolist()]
        return [batch, batch.sum(), batch.repeat(41), names, {"x": batch, "name": names}]

    def run(ctx: Context) -> None:
        accelerator = Accelerator(context=ctx)
        assert (
            len(accelerator.gather_for_metrics(torch.zeros(3))) == 3 * world
        )  # no loop yet: all is gathered
        source = DataLoader(rows_up_to(num).dataset, batch_size=batch_size, drop_last=drop_last)
        loader = accelerator.prepare(source)
        accelerator.uneven = "stop_first"
        by_shim: list[Any] = []
        rows: list[torch.Tensor] = []
        for number, batch in enumerate(loader):
            rows.append(batch)
            by_shim += [accelerator.gather_for_metrics(one) for one in trees(batch)]
            if number == stop:
                break
        assert accelerator.micro is None
        if not rows:
            return
        after = accelerator.gather_for_metrics(torch.cat(rows))  # once, behind the loop
        by_function: list[Any] = []
        once, rows = torch.empty(0), []
        for batch, micro in af.microbatches(ctx, af.prepare_data_loader(ctx, source), "stop_first"):
            rows.append(batch)
            by_function += [af.gather_for_metrics(ctx, one, micro) for one in trees(batch)]
            once = af.gather_for_metrics(ctx, torch.cat(rows), micro, of="pass")
            if micro.index == stop:
                break
        assert str(by_shim) == str(by_function)
        assert after.tolist() == once.tolist()
        assert sorted(after.tolist()) == sorted(row for batch in by_shim[::5] for row in batch.tolist())
        objects = accelerator.gather_for_metrics([ctx.rank] * 97, use_gather_object=True)
        # Behind the loop, and not as many for each row of it.
        assert len(objects) == 97 * world or len(torch.cat(rows)) == 1

    config = DataLoaderConfiguration(even_batches=even, dispatch_batches=dispatched)
    run_ranks(run, world, dataloader_config=config)


def test_a_loop_over_anything_else_counts_its_own_windows() -> None:
    accelerator = Accelerator(context=Context().replace(gradient_accumulation_steps=3))
    syncs: list[bool] = []
    for _ in range(7):
        with accelerator.accumulate():
            syncs.append(accelerator.sync_gradients)
    assert syncs == [False, False, True] * 2 + [False]


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_gradients_are_clipped_only_where_the_window_closes(mode: Any) -> None:
    ctx = Context().replace(mixed_precision=mode, gradient_accumulation_steps=2)
    accelerator = Accelerator(context=ctx)
    model, _ = accelerator.prepare(*make()[:2])
    for closes in (False, True):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).mean())
            for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
                if closes:
                    clip(model.parameters(), 1.0)
                    continue
                with pytest.raises(ConfigurationError, match=r"if accelerator\.sync_gradients:"):
                    clip(model.parameters(), 1.0)


def test_triggers_splitting_and_roles() -> None:
    def run(ctx: Context) -> dict[str, Any]:
        accelerator = Accelerator(context=ctx)
        if ctx.rank == 1:
            accelerator.set_trigger()
        calls: list[str] = []
        for name in ("on_main_process", "on_local_main_process", "on_last_process"):
            getattr(accelerator, name)(lambda name=name: calls.append(name))()
        accelerator.on_main_process()(lambda: calls.append("with parentheses"))()
        accelerator.on_local_main_process()(lambda: calls.append("with parentheses"))()
        accelerator.on_process(lambda: calls.append("0"))()
        accelerator.on_process(process_index=1)(lambda: calls.append("1"))()
        accelerator.on_local_process(local_process_index=1)(lambda: calls.append("local 1"))()
        with accelerator.split_between_processes([1, 2, 3]) as part, accelerator.main_process_first():
            pass
        return {
            "fired": (accelerator.check_trigger(), accelerator.check_trigger()),
            "calls": calls,
            "part": part,
            "sum": int(accelerator.reduce(torch.tensor(ctx.rank))),
            "who": (accelerator.process_index, accelerator.is_main_process, accelerator.should_save_model),
            "several": accelerator.use_distributed,
        }

    main, last = run_ranks(run, 2)
    assert main["fired"] == last["fired"] == (True, False)
    assert main["calls"] == ["on_main_process", "on_local_main_process", *["with parentheses"] * 2, "0"]
    assert last["calls"] == ["on_last_process", "1", "local 1"]
    assert (main["part"], last["part"]) == ([1, 2], [3])
    assert main["sum"] == last["sum"] == main["several"] == last["several"] == 1
    assert (main["who"], last["who"]) == ((0, True, True), (1, False, False))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mixed_precision": "bf16"}, "mixed_precision"),
        ({"device_placement": False}, "device_placement"),
        ({"cpu": True, "gradient_accumulation_steps": 1}, "gradient_accumulation_steps, cpu"),
        ({"split_batches": True}, "dataloader_config"),
    ],
)
def test_options_beside_a_context_are_refused_and_not_ignored(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Accelerator(context=Context(), **options)


def test_its_own_context_is_made_and_closed() -> None:
    accelerator = Accelerator(
        cpu=True, split_batches=True, mixed_precision="bf16", gradient_accumulation_steps=2
    )
    assert accelerator.dataloader_config.split_batches
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 2)
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.context.gradient_accumulation_steps == 3
    accelerator.close()
    with pytest.raises(ConfigurationError, match="contradicts"):
        Accelerator(split_batches=False, dataloader_config=DataLoaderConfiguration(split_batches=True))


def test_prepare_says_what_is_wrong_with_its_arguments() -> None:
    accelerator = Accelerator(context=Context())
    with pytest.raises(TypeError, match="nothing to prepare"):
        accelerator.prepare()
    with pytest.raises(ValueError, match="got 2 for 1 objects"):
        accelerator.prepare("one", device_placement=[True, False])


def test_the_shim_is_thin() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    (shim,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    lengths: dict[str, int] = {}
    for method in shim.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            code = method.body[1:]  # behind the docstring
            lengths[method.name] = code[-1].end_lineno - code[0].lineno + 1 if code else 0  # pyright: ignore[reportOptionalOperand]
    assert len(lengths) > 30
    assert {name: length for name, length in lengths.items() if length > 15} == {}


@pytest.mark.parametrize("overflows", [True, False])
def test_a_moving_scale_reaches_gradients_of_optimizers_that_have_not_stepped(overflows: bool) -> None:
    accelerator = Accelerator(
        context=Context().replace(
            mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=1)]
        )
    )
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = accelerator.prepare(torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0))
    accelerator.backward(q.sum() * 0.5)
    accelerator.backward(p.sum() * (float("inf") if overflows else 0.0))
    first.step()
    first.zero_grad()
    accelerator.backward(p.sum() * 0.5)  # here the scale moves
    first.step()
    first.zero_grad()
    second.step()
    assert (p.item(), q.item()) == (0.5, 0.5)


def test_rows_belong_to_the_innermost_loop_or_to_the_pass_that_just_ended() -> None:
    def run(ctx: Context) -> tuple[list[int], list[int], str, str]:
        accelerator = Accelerator(context=ctx)
        long, short, evaluated = (accelerator.prepare(rows_up_to(number, 4)) for number in (15, 13, 7))

        def count(rows: torch.Tensor, **options: Any) -> int:
            return len(accelerator.gather_for_metrics(rows, **options))

        rows, last = torch.cat(list(long)), accelerator.last_micro
        after = [count(rows), count(torch.cat(list(short))), count(rows, micro=last, of="pass")]
        after.append(count(rows.repeat_interleave(3), micro=last, of="pass"))
        # The second has 8 rows, as the pass has.
        within = [count(batch.repeat_interleave(2), of="batch") for batch in short]
        assert len(list(zip(long, short, strict=True))) == 2
        with pytest.raises(ValueError, match="match several passes") as zipped:
            count(rows)
        training = iter(long)
        next(training)
        rows = torch.cat(list(evaluated))
        with pytest.raises(ValueError, match=r"Pass micro=.* of=\"pass\"") as nested:
            count(rows)
        after += [count(rows, of="pass"), count(rows, micro=accelerator.micro)]
        return after, within, str(zipped.value), str(nested.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert first[:2] == ([15, 13, 15, 45, 7, 8], [16, 10])


def test_what_was_collected_within_a_loop_is_told_to_be_of_its_pass() -> None:
    def run(ctx: Context) -> int:
        accelerator = Accelerator(context=ctx)
        accelerator.uneven = "pad"
        rows: list[torch.Tensor] = []
        number = 0
        for batch in accelerator.prepare(rows_up_to(9)):
            rows.append(batch)
            if len(rows) == 3:
                with pytest.raises(ValueError, match=r"collected over the pass, use of=\"pass\""):
                    accelerator.gather_for_metrics(torch.cat(rows))
                number = len(accelerator.gather_for_metrics(torch.cat(rows), of="pass"))
        return number

    assert run_ranks(run, 2, dataloader_config=DataLoaderConfiguration(even_batches=False)) == [9, 9]
