"""Tests of accelfn.parallel.pipeline: what is trained, and what is refused, in stages."""

# torch leaves backward partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import accelfn as af
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT, make_batch, summed_loss

Batch = tuple[torch.Tensor, torch.Tensor]
SCHEDULES = ("gpipe", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_computes_what_one_process_does(schedule: str) -> None:
    def work(ctx: af.Context) -> list[tuple[float, dict[str, torch.Tensor]]]:
        model = af.prepare(ctx, GPT(num_blocks=4))
        ids = make_batch(8, 8)[0]
        torch.testing.assert_close(af.forward(ctx, model, ids), GPT(num_blocks=4)(ids).detach())
        found: list[tuple[float, dict[str, torch.Tensor]]] = []
        for rows in (8, 4, 8) if schedule == "dualpipev" else (8, 3, 8):  # also one of another shape
            model.zero_grad()
            found.append((run(ctx, model, make_batch(rows, rows)).item(), gradients(model)))
        return found

    ranks = run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages(schedule, 4))
    for index, rows in enumerate((8, 4, 8) if schedule == "dualpipev" else (8, 3, 8)):
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
        kwargs_handlers=[af.GradScalerKwargs(init_scale=64.0)],
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
        attempt(lambda: af.forward(ctx, model, torch.zeros(0, 8, dtype=torch.int64)))
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


def test_what_is_beside_a_step_is_as_without_stages() -> None:
    """Evaluation, frozen stages, weighted means, windows that sync each batch, another schedule."""

    def work(ctx: af.Context) -> dict[str, Any]:
        found: dict[str, Any] = {}
        ids, _ = batch = make_batch(0, 8)
        model = GPT(dropout=0.5)
        optimizer = af.prepare(ctx, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        model = af.prepare(ctx, model)
        found["drawn"] = []
        for _ in range(2):  # the first time the shapes of what is sent are found out before
            af.set_seed(0)
            found["drawn"].append(run(ctx, model, batch).item())
        model.eval()
        found["output"] = af.forward(ctx, model, ids=ids[:6])
        train_step = af.make_train_step(ctx, mean_of_rows, optimizer, model=model)
        _, metrics = train_step(af.init_train_state(ctx, optimizer), batch)
        found["metrics"] = metrics.loss.item(), metrics.aux["sum"].item(), metrics.aux["rows"].item()
        found["parameters of the optimizer"] = len(optimizer.param_groups[0]["params"])

        frozen = GPT()
        for one in (frozen.embed, frozen.positions, frozen.blocks[0]):
            one.requires_grad_(False)
        frozen = af.prepare(ctx, frozen)
        run(ctx, frozen, batch)
        found["frozen"] = gradients(frozen)

        each = ctx.replace(
            gradient_accumulation_plugin=af.config.GradientAccumulationPlugin(2, sync_each_batch=True)
        )
        model = af.prepare(each, GPT())
        scaler = af.init_scaler(each)
        for own, micro in af.microbatches(each, [make_batch(0, 4), make_batch(1, 4)]):
            scaler, _ = af.forward_backward(each, model, loss_fn, own, scaler, micro)
        found["each"] = gradients(model)
        return found

    ranks = run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages())
    whole = GPT()
    ids, _ = batch = make_batch(0, 8)
    expected = whole(ids[:6])
    total = summed_loss(whole, batch)[0].item()
    frozen = GPT()
    for one in (frozen.embed, frozen.positions, frozen.blocks[0]):
        one.requires_grad_(False)
    summed_loss(frozen, batch)[0].backward()
    both = GPT()
    (summed_loss(both, make_batch(0, 4))[0] + summed_loss(both, make_batch(1, 4))[0]).backward()
    for rank in ranks:
        torch.testing.assert_close(rank["output"], expected.detach())
        assert rank["drawn"][0] == rank["drawn"][1] != pytest.approx(total, rel=1e-3)
        assert rank["metrics"] == pytest.approx((total / 8, total / 2, 4), rel=1e-5)
        assert 0 < rank["parameters of the optimizer"] < len(list(whole.parameters()))
        for name, model in (("frozen", frozen), ("each", both)):
            for key, gradient in rank[name].items():
                torch.testing.assert_close(gradient, gradients(model)[key], rtol=1e-4, atol=1e-5)
    assert ranks[0]["frozen"] == {} or "embed.weight" not in ranks[0]["frozen"]
    assert ranks[0]["each"].keys() & ranks[1]["each"].keys() == {"embed.weight"}


def mean_twice(model: nn.Module, batch: Batch) -> af.Loss:
    loss = mean_of_rows(model, batch).value
    return af.Loss(loss, aux=2 * loss)


@pytest.mark.parametrize("fn", [loss_fn, mean_twice], ids=["sum", "mean"])
def test_a_window_of_a_train_step_is_one_call_of_a_schedule(
    fn: Callable[[nn.Module, Batch], af.Loss],
) -> None:
    batches = [make_batch(0, 12), make_batch(1, 10), make_batch(2, 12)]  # 10 rows in pieces are uneven

    def train(ctx: af.Context) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]:
        model = GPT()
        optimizer = af.prepare(ctx, torch.optim.SGD(model.parameters(), lr=0.01))
        model = af.prepare(ctx, model)
        step = af.make_train_step(ctx, fn, optimizer, model=model, max_norm=1.0)
        state, found = af.init_train_state(ctx, optimizer), list[list[torch.Tensor]]()
        for batch in batches:
            state, metrics = step(state, batch)
            found.append([one for one in (metrics.loss, metrics.grad_norm, metrics.aux) if one is not None])
        return found, af.unwrap_model(model).state_dict()

    def count_calls(ctx: af.Context) -> tuple[Any, int]:
        step = cast("Any", Schedule1F1B).step
        with mock.patch.object(Schedule1F1B, "step", autospec=True, side_effect=step) as called:
            return train(ctx), called.call_count

    expected, whole = train(af.init_context(gradient_accumulation_steps=3, cpu=True))
    ranks = run_ranks(
        count_calls,
        2,
        "processes",
        timeout_s=60,
        parallelism_config=stages(num_microbatches=2),
        gradient_accumulation_steps=3,
    )
    for (found, parameters), num_calls in ranks:
        assert num_calls == len(batches)
        for now, then in zip(found, expected, strict=True):
            torch.testing.assert_close(now, then, rtol=1e-4, atol=1e-5)
        for name, one in parameters.items():
            torch.testing.assert_close(one, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_llama_is_cut_into_stages_by_itself(tp: int) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=True,
        )
        return transformers.LlamaForCausalLM(config)

    def llama_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> af.Loss:
        output = model(input_ids=batch["ids"], attention_mask=batch["mask"])
        labels = batch["ids"][:, 1:].masked_fill(batch["mask"][:, 1:] == 0, -100)
        logits = output.logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return af.Loss(total, (labels != -100).sum())

    random = torch.Generator().manual_seed(0)
    mask = (torch.arange(16) < torch.tensor([[16], [9], [12], [5]])).long()
    batch = {"ids": torch.randint(0, 64, (4, 16), generator=random), "mask": mask}

    def work(ctx: af.Context) -> tuple[float, dict[str, Any], torch.Tensor]:
        model: Any = af.prepare(ctx, make())
        loss = run(ctx, model, batch, llama_loss).item()
        found = {
            name: one.grad.full_tensor() if tp > 1 else one.grad for name, one in model.named_parameters()
        }
        return loss, found, af.forward(ctx, model, input_ids=batch["ids"]).logits

    ranks = run_ranks(work, 2 * tp, "processes", timeout_s=90, parallelism_config=stages(tp=tp))
    model = make()
    loss, _, _ = llama_loss(model, batch)
    loss.backward()
    expected = {name: one.grad for name, one in model.named_parameters(remove_duplicate=False)}
    assert {name for rank in ranks for name in rank[1]} == expected.keys()
    for found_loss, found, logits in ranks:
        assert found_loss == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(logits, model(input_ids=batch["ids"]).logits, rtol=1e-4, atol=1e-5)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
