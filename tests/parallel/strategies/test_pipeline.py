"""Tests of accelfn.parallel.strategies.pipeline: what is trained, and what is refused, in stages."""

# torch leaves backward partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import accelfn as af
from accelfn.errors import ConfigurationError
from accelfn.parallel.strategies import pipeline
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel.tensor_models import GPT, PLAN, VOCABULARY, WIDTH, make_batch, summed_loss

Batch = tuple[torch.Tensor, torch.Tensor]


def stages(
    schedule: str = "1f1b", num_microbatches: int | None = None, *, tp: int = 1
) -> af.ParallelismConfig:
    handler = af.config.PipelineParallelConfig(num_microbatches, schedule)
    return af.ParallelismConfig(pp_size=2, pp_handler=handler, tp_size=tp)


def loss_fn(model: nn.Module, batch: Batch) -> af.Loss:
    total, count = summed_loss(model, batch)
    return af.Loss(total, count)


def mean_of_rows(model: nn.Module, batch: Batch) -> af.Loss:
    """Return a mean over rows, and with it what is averaged as it is."""
    total, _ = summed_loss(model, batch)
    return af.Loss(total / len(batch[0]), aux={"sum": total, "rows": len(batch[0])})


def run(ctx: af.Context, model: nn.Module, batch: Any, fn: Callable[..., Any] = loss_fn) -> torch.Tensor:
    ((own, micro),) = af.microbatches(ctx, [batch])
    return af.forward_backward(ctx, model, fn, own, af.init_scaler(ctx), micro)[1]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients of the stages of this rank; the tied one by its first name."""
    found = af.unwrap_model(model).named_parameters()
    return {name.replace("head", "embed"): one.grad.clone() for name, one in found if one.grad is not None}


def plain(batch: Batch, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model = GPT(num_blocks=4, **options)
    total, _ = summed_loss(model, batch)
    total.backward()
    return total.item(), gradients(model)


def test_looped_bfs_computes_what_one_process_does() -> None:
    def work(ctx: af.Context) -> list[tuple[float, dict[str, torch.Tensor]]]:
        model = af.prepare(ctx, GPT(num_blocks=4))
        ids = make_batch(8, 8)[0]
        torch.testing.assert_close(af.training.forward(ctx, model, ids), GPT(num_blocks=4)(ids).detach())
        found: list[tuple[float, dict[str, torch.Tensor]]] = []
        for rows in (8, 3, 8):  # also one of another shape
            model.zero_grad()
            found.append((run(ctx, model, make_batch(rows, rows)).item(), gradients(model)))
        return found

    ranks = run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages("loopedbfs", 4))
    for index, rows in enumerate((8, 3, 8)):
        loss, expected = plain(make_batch(rows, rows))
        assert {name for rank in ranks for name in rank[index][1]} == expected.keys()
        for found_loss, found in (rank[index] for rank in ranks):
            assert found_loss == pytest.approx(loss, rel=1e-5)
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_an_overflow_in_one_stage_makes_every_rank_skip_its_step() -> None:
    def work(ctx: af.Context) -> list[tuple[bool, float, bool]]:
        made: nn.Module = GPT(num_blocks=4)
        model, optimizer = af.prepare(ctx, made, torch.optim.SGD(made.parameters(), lr=0.1))
        scaler = af.init_scaler(ctx)
        weight: Any = dict(af.unwrap_model(model).named_parameters()).get("blocks.3.up.weight")
        assert (weight is None) == (ctx.rank == 0)
        hook = None if weight is None else weight.register_hook(partial(torch.mul, other=torch.inf))
        seen: list[tuple[bool, float, bool]] = []
        for batch, micro in af.microbatches(ctx, [make_batch(0), make_batch(1)]):
            before = [one.detach().clone() for one in model.parameters()]
            scaler, _ = af.forward_backward(ctx, model, loss_fn, batch, scaler, micro)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
            after = [*model.parameters()]
            has_moved = not all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
            seen.append((af.step_was_skipped(ctx, scaler), scaler.scale.item(), has_moved))
            if hook is not None:
                hook.remove()
        return seen

    ranks = run_ranks(
        work,
        2,
        "processes",
        timeout_s=60,
        parallelism_config=stages(),
        mixed_precision="fp16",
        kwargs_handlers=[af.config.GradScalerKwargs(init_scale=64.0)],
    )
    assert ranks == [[(True, 32.0, False), (False, 32.0, True)]] * 2


def test_what_a_pipeline_cannot_run_is_refused_by_name_on_every_rank() -> None:
    def twice(model: nn.Module, batch: Batch) -> Any:
        model(batch[0])
        return loss_fn(model, batch)

    def never(model: nn.Module, batch: Batch) -> Any:
        return torch.zeros((), requires_grad=True)

    def fails(model: nn.Module, batch: Batch) -> Any:
        model(batch[0])
        raise KeyError("mine")

    def catches(model: nn.Module, batch: Batch) -> Any:
        try:
            return loss_fn(model, batch)
        except:  # noqa: E722 -- what a user may have written
            return torch.zeros((), requires_grad=True)

    def elsewhere(model: nn.Module, batch: Batch) -> Any:
        """Use a weight that is in the first stage where the last one computes the loss."""
        total, _ = summed_loss(model, batch)
        return total + cast("GPT", model).positions.weight.square().sum()

    def work(ctx: af.Context) -> tuple[list[str], float]:
        model = af.prepare(ctx, GPT())
        said: list[str] = []

        def attempt(action: Callable[[], Any]) -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 -- which one is what is tested
                said.append(f"{type(error).__name__}: {error}")

        attempt(lambda: model(make_batch(0)[0]))
        for one in (twice, never, fails, catches, elsewhere):
            attempt(lambda one=one: run(ctx, model, make_batch(0), one))
        attempt(lambda: run(ctx, model, make_batch(0, 4 if ctx.rank else 2)))
        attempt(lambda: run(ctx, model, ("words", make_batch(0)[1])))
        attempt(lambda: af.training.forward(ctx, model, torch.zeros(0, 8, dtype=torch.int64)))
        return said, run(ctx, model, make_batch(0)).item()  # nothing has been hurt

    ranks = run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages())
    for said, loss in ranks:
        assert len(said) == 9, said
        assert "accelfn.forward_backward(ctx, model, loss_fn, ...)" in said[0]
        assert "called the model twice" in said[1]
        assert "didn't call the model" in said[2]
        assert "KeyError: 'mine'" in said[3]
        assert "except Exception" in said[4]
        assert "loss depends on tensors whose values are on another stage" in said[5]
        assert "ranks 0 and 1 hold stages of one model, but have different batches: 2 and 4 rows" in said[6]
        assert "batch[0] is of type str" in said[7]
        assert "forward: in a pipeline" in said[8]
        assert "no rows" in said[8]
        assert loss == pytest.approx(summed_loss(GPT(), make_batch(0))[0].item(), rel=1e-5)


class Same(torch.autograd.Function):
    """The same tensor, as kernels of one's own have it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def also_a_function(forward: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return forward(x) + 0 * cast("torch.Tensor", Same.apply(x)).sin()


class Recomputed(GPT):
    """A model that recomputes its blocks by itself: one after another, or several at once."""

    together = 1
    reentrant = False

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        for block in self.blocks:
            block.forward = partial(also_a_function, block.forward)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for place in range(0, len(self.blocks), self.together):
            some = nn.Sequential(*self.blocks[place : place + self.together])
            run: Callable[..., Any] = some if self.together > 1 else some[0]
            x = cast("Any", checkpoint)(run, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch, and reentrant
def test_a_model_recomputes_its_own_blocks_where_none_is_on_two_stages() -> None:
    def work(ctx: af.Context) -> tuple[float, dict[str, torch.Tensor], list[str]]:
        said: list[str] = []
        for name, value in (("reentrant", True), ("together", 4)):
            model = af.prepare(ctx, Recomputed())
            setattr(model, name, value)
            try:
                run(ctx, model, make_batch(0))
            except Exception as error:  # noqa: BLE001 -- which one is what is tested
                said.append(str(error))
        model = af.prepare(ctx, Recomputed())
        return run(ctx, model, make_batch(0)).item(), gradients(model), said

    loss, expected = plain(make_batch(0))
    for own, found, said in run_ranks(work, 2, "processes", parallelism_config=stages()):
        assert own == pytest.approx(loss)
        assert all(torch.allclose(one, expected[name], atol=1e-4) for name, one in found.items())
        assert "blocks.2 is the first block of stage 1, and the model calls it without gradients" in said[0]
        assert "recomputes modules of several stages of the pipeline at once" in said[1]


class Scaled(GPT):
    """A model with a parameter of its own, around the layers that ranks share."""

    tp_plan = PLAN

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.scale = nn.Parameter(torch.full((VOCABULARY,), 0.5))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(ids, positions) * self.scale


@pytest.mark.slow
def test_a_parameter_of_the_model_itself_is_in_stages_whose_layers_ranks_share() -> None:
    def work(ctx: af.Context) -> tuple[float, Any]:
        model: Any = af.prepare(ctx, Scaled())
        return run(ctx, model, make_batch(0)).item(), local_of(model.scale.grad)

    model = Scaled()
    total, _ = summed_loss(model, make_batch(0))
    total.backward()
    for loss, gradient in run_ranks(work, 4, "processes", parallelism_config=stages(tp=2)):
        assert loss == pytest.approx(total.item())
        assert torch.allclose(gradient, cast("torch.Tensor", model.scale.grad), atol=1e-4)


def test_what_is_beside_a_step_is_as_without_stages() -> None:
    """Dropout, evaluation, means with what is beside them, and an optimizer that was made before."""

    def take_out(model: nn.Module, batch: dict[str, torch.Tensor]) -> af.Loss:
        labels = batch.pop("labels")
        return loss_fn(model, (batch.pop("ids"), labels))

    def work(ctx: af.Context) -> tuple[list[float], torch.Tensor, tuple[Any, ...], int]:
        ids, labels = batch = make_batch(0, 8)
        model = GPT(dropout=0.5)
        optimizer = af.prepare(ctx, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        model = af.prepare(ctx, model)
        drawn: list[float] = []
        for _ in range(2):  # the first time the shapes of what is sent are found out before
            af.set_seed(0)
            drawn.append(run(ctx, model, {"ids": ids, "labels": labels}, take_out).item())
        model.eval()
        output = af.training.forward(ctx, model, ids=ids[:6])
        train_step = af.make_train_step(ctx, mean_of_rows, optimizer, model=model)
        _, metrics = train_step(af.init_train_state(ctx, optimizer), batch)
        means = metrics.loss.item(), metrics.aux["sum"].item(), metrics.aux["rows"].item()
        return drawn, output, means, len(optimizer.param_groups[0]["params"])

    whole = GPT()
    ids, _ = batch = make_batch(0, 8)
    total = summed_loss(whole, batch)[0].item()
    ranks = run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages())
    for drawn, output, means, num_parameters in ranks:
        torch.testing.assert_close(output, whole(ids[:6]).detach())
        assert drawn[0] == drawn[1] != pytest.approx(total, rel=1e-3)
        assert means == pytest.approx((total / 8, total / 2, 4), rel=1e-5)
        assert 0 < num_parameters < len(list(whole.parameters()))


def test_a_new_shape_of_batch_costs_one_exchange_more() -> None:
    """The first of all costs one for each stage; so does one after a size that something else has, too."""

    def work(ctx: af.Context) -> list[tuple[int, int, float]]:
        model = af.prepare(ctx, GPT(num_blocks=4, tied=False))
        found: list[tuple[int, int, float]] = []
        for rows, length in shapes:
            with (
                mock.patch.object(pipeline, "gather_bytes", side_effect=pipeline.gather_bytes) as exchanges,
                mock.patch.object(dist, "send", side_effect=dist.send) as votes,
            ):
                loss = run(ctx, model, [part[:, :length] for part in make_batch(0, rows)]).item()
            found.append((exchanges.call_count, votes.call_count, loss))
        return found

    shapes = [(8, 4), (8, 6), (8, 6), (4, 5), (4 * WIDTH, 5), (4, 7), (8, 5)]
    whole = GPT(num_blocks=4, tied=False)
    losses = [
        summed_loss(whole, (ids[:, :n], labels[:, :n]))[0].item()
        for rows, n in shapes
        for ids, labels in [make_batch(0, rows)]
    ]
    for found in run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages("loopedbfs")):
        exchanges, votes, seen = zip(*found, strict=True)
        assert seen == pytest.approx(losses, rel=1e-5)
        assert exchanges == (2 + 4, 2 + 1, 2, 2 + 1, 2 + 1, 2 + 1 + 4, 2 + 1)
        assert votes[0] > 0 == sum(votes[1:])


def test_a_window_of_a_train_step_is_one_call_of_a_schedule() -> None:
    def count_calls(ctx: af.Context) -> list[int]:
        model = GPT()
        optimizer = af.prepare(ctx, torch.optim.SGD(model.parameters(), lr=0.01))
        step = af.make_train_step(ctx, loss_fn, optimizer, model=af.prepare(ctx, model), max_norm=1.0)
        state, counts = af.init_train_state(ctx, optimizer), list[int]()
        called_by_torch = cast("Any", Schedule1F1B).step
        for rows in (12, 10):  # 10 rows in pieces are uneven
            with mock.patch.object(
                Schedule1F1B, "step", autospec=True, side_effect=called_by_torch
            ) as called:
                state, _ = step(state, make_batch(0, rows))
            counts.append(called.call_count)
        return counts

    options: Any = {"parallelism_config": stages(num_microbatches=2), "gradient_accumulation_steps": 3}
    assert run_ranks(count_calls, 2, "processes", timeout_s=60, **options) == [[1, 1]] * 2


def test_hooks_of_the_model_see_what_it_returns() -> None:
    def run_hooked(ctx: af.Context) -> tuple[list[str], float, dict[str, torch.Tensor]]:
        seen: list[str] = []

        def halve(module: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits * 0.5

        def look(module: nn.Module, args: Any, logits: torch.Tensor) -> None:
            seen.append(type(logits).__name__)

        model, batch = GPT(num_blocks=4), make_batch(4, 4)
        model.register_forward_hook(halve)
        model = af.prepare(ctx, model)
        model.register_forward_hook(look)
        return seen, run(ctx, model, batch).item(), gradients(model)

    ((_, loss, expected),) = run_ranks(run_hooked, 1)
    ranks = run_ranks(run_hooked, 2, "processes", timeout_s=60, parallelism_config=stages("1f1b", 2))
    assert [set(seen) for seen, *_ in ranks] == [set(), {"Tensor"}]
    found: dict[str, torch.Tensor] = {}
    for _, value, some in ranks:
        assert value == pytest.approx(loss)
        found |= some
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("axis", ["dp_replicate_size", "dp_shard_size"])
def test_stages_of_replicas_and_shards_compute_in_the_precision_of_shards(axis: str) -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GPT(num_blocks=4, tied=False)

        def forward(self, ids: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return self.inner(ids) * time

    def timed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch[0], torch.tensor(999.0)).square().mean()  # 1000 in bfloat16

    def computed(ctx: af.Context) -> float:
        model = af.prepare(ctx, Timed())
        return run(ctx, model, make_batch(4, 4), timed_loss).item()

    options = cast("Any", {"pp_size": 2, "pp_handler": stages(num_microbatches=2).pp_handler, axis: 2})
    layout = af.ParallelismConfig(**options)
    shards = af.ParallelismConfig(dp_shard_size=2)
    processes = partial(run_ranks, computed, mixed_precision="bf16", timeout_s=60)
    expected = processes(2, "processes", parallelism_config=shards)
    assert processes(4, "processes", parallelism_config=layout) == pytest.approx(2 * expected, rel=1e-5)


def test_a_tensor_without_a_gradient_is_not_sent_in_training() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * signs

    class Signs(nn.Module):
        """The second block gets whole numbers of what the first one has computed."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Scaled() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            signs = x.sign().long()
            for layer in self.layers:
                x = layer(x, signs)
                signs = x.sign().long()
            return x

    def fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    def work(ctx: af.Context) -> str:
        torch.manual_seed(0)
        model = Signs()
        whole = model(torch.ones(4, 4)).detach()
        model = af.prepare(ctx, model)
        with pytest.raises(ConfigurationError) as caught:
            run(ctx, model, torch.ones(4, 4), fn)
        torch.testing.assert_close(af.training.forward(ctx, model, torch.ones(4, 4)), whole)
        return str(caught.value)

    for said in run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages()):
        assert "stage 0 of a pipeline would send an integer tensor (torch.int64" in said
        assert "args[1] in the call of layers.1" in said


def test_a_model_in_stages_is_freed_without_the_garbage_collector() -> None:
    def work(ctx: af.Context) -> list[bool]:
        model: Any = af.prepare(ctx, GPT(num_blocks=4))
        run(ctx, model, make_batch(0))
        af.training.forward(ctx, model, make_batch(0)[0])
        held = [weakref.ref(one) for one in (model, *model.parameters())]
        gc.disable()
        try:
            del model
            return [one() is None for one in held]
        finally:
            gc.enable()

    for freed in run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages()):
        assert len(freed) > 1
        assert all(freed)
