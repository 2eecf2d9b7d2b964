"""Models of transformers, trained by Megatron-LM on CPU ranks, against plain torch."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Accelerator, Context, GradScalerKwargs, MegatronLMPlugin
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks
from tests.parallel.engines.megatron_on_cpu import redirect_cuda

# Warnings are of megatron-core, in each step.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

prepare: Any = af.prepare  # what stands for Megatron's objects is replaced by other types
VOCABULARY = 61  # odd, so it is padded
STEPS = 3
# Model, ranks and options.
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2": ("gpt2", 2, {"tp_degree": 2}),
    "pp2": ("llama", 2, {"pp_degree": 2, "num_micro_batches": 2}),
    "dp2": ("gpt2", 2, {"num_micro_batches": 2, "use_distributed_optimizer": True}),
    "interleaved": (
        "gpt2",
        2,
        {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1},
    ),
    "recomputed": ("llama", 1, {"recompute_granularity": "full"}),
    "all": (
        "llama",
        8,
        {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2, "use_distributed_optimizer": True},
    ),
}


def model_of(family: str, seed: int = 0) -> Any:
    transformers: Any = importlib.import_module("transformers")
    cast("Any", torch).manual_seed(seed)
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=4,
                n_embd=32,
                n_head=4,
                vocab_size=VOCABULARY,
                n_positions=32,
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    )


def rows(number: int = 8 * STEPS) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(1, VOCABULARY, (number, 12), generator=torch.Generator().manual_seed(1))
    # The first rows are padded at their ends.
    return [
        {
            "input_ids": row,
            "attention_mask": (torch.arange(12) < (9 if index % 8 == 0 else 12)).long(),
            "labels": row.where(torch.arange(12) < (9 if index % 8 == 0 else 12), -100),
        }
        for index, row in enumerate(tokens)
    ]


def loader_of(items: list[dict[str, torch.Tensor]], **options: Any) -> Any:
    """Return a loader: a list is a dataset."""
    return DataLoader(cast("Any", items), **options)


def total_loss(model: Any, batch: Any) -> af.Loss:
    """The sum over tokens, with their number."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return af.Loss(model(**batch).loss * count, weight=count)


def optimizer_of(model: Any, kind: str = "AdamW") -> torch.optim.Optimizer:
    plain = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    if kind == "SGD":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import both packages here once, and not for seconds in each forked rank."""
    with warnings.catch_warnings():
        # They warn of every optional package that is missing, and use deprecated parts of torch.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.optimizer")


class Ran(list[tuple[float, float]]):
    """Loss and norm of each step."""


def plain(family: str, kind: str = "AdamW") -> tuple[Ran, Any]:
    model = model_of(family)
    optimizer: Any = optimizer_of(model, kind)
    ran = Ran()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for batch in loader_of(rows(), batch_size=8):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ran.append((loss.item(), norm.item()))
    return ran, model


def on_ranks(fn: Callable[[Context], Any], size: int, **options: Any) -> list[Any]:
    """Run ``fn`` with a plugin of these options."""

    def redirected(ctx: Context) -> Any:
        redirect_cuda()
        return fn(ctx)

    more = {name: options.pop(name) for name in ("mixed_precision", "kwargs_handlers") if name in options}
    plugin = MegatronLMPlugin(**options)
    return run_ranks(redirected, size, on="processes", megatron_lm_plugin=plugin, timeout_s=200, **more)


def prepared(ctx: Context, family: str, kind: str = "AdamW", seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, scheduler and loader; the same global batches in every layout."""
    plugin = ctx.strategy.megatron or MegatronLMPlugin()
    model = model_of(family, seed)
    optimizer = optimizer_of(model, kind)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    size = 8 // ctx.axis_size("dp_replicate") // plugin.num_micro_batches
    loader = loader_of(rows(), batch_size=size)
    return prepare(ctx, model, optimizer, schedule, loader)


def total_of(ctx: Context, loss: torch.Tensor, batch: Any) -> float:
    """Return the mean over the tokens of all ranks."""
    count = (batch["labels"][:, 1:] != -100).sum()
    totals = af.reduce(ctx, torch.stack((loss, count)))
    return float(totals[0] / totals[1])


def train(ctx: Context, family: str, kind: str, folder: Path | None = None) -> tuple[Ran, Any]:
    """Train, and return the weights with the names of the user's model."""
    model, optimizer, schedule, loader = prepared(ctx, family, kind)
    scaler, ran = af.init_scaler(ctx), Ran()
    for batch, micro in af.microbatches(ctx, loader):
        scaler, loss = af.forward_backward(ctx, model, total_loss, batch, scaler, micro)
        mean = total_of(ctx, loss, batch)
        scaler = af.unscale_gradients(ctx, optimizer, scaler)
        norm = af.clip_grad_norm_(ctx, model.parameters(), 0.5, scaler_state=scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=schedule)
        ran.append((mean, norm.item()))
    if folder is not None:
        af.save_model(ctx, model, folder)
    return ran, af.get_state_dict(ctx, model)


def by_calls(ctx: Context, family: str) -> tuple[list[float], list[float], list[list[int]]]:
    """Train as with Accelerate, where a call of the model is both passes; then evaluate and generate."""
    accelerator = Accelerator(context=ctx)
    model = model_of(family)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    plugin = ctx.strategy.megatron
    assert plugin is not None
    loader = loader_of(rows(), batch_size=8 // ctx.axis_size("dp_replicate") // plugin.num_micro_batches)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    losses: list[float] = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    ids = torch.stack([row["input_ids"] for row in rows(2)])
    evaluated = model(input_ids=ids, labels=ids).loss.item()
    kept = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    generated = model.megatron_generate(ids[:, :5].clone(), kept, max_new_tokens=4).tolist()
    return losses, [evaluated, optimizer.param_groups[0]["lr"]], generated


def by_hand(family: str) -> tuple[list[float], list[float], list[list[int]]]:
    """What :func:`by_calls` should come to."""
    ran, model = plain(family)
    ids = torch.stack([row["input_ids"] for row in rows(2)])
    with torch.no_grad():
        evaluated = model(input_ids=ids, labels=ids).loss.item()
        chosen = [
            model.generate(
                row[None, :length], max_length=9, do_sample=False, attention_mask=torch.ones(1, length)
            )[0].tolist()
            for row, length in zip(ids, (3, 5), strict=True)
        ]
    return [loss for loss, _ in ran], [evaluated, 1e-2 / (STEPS + 1)], chosen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_evaluates_and_generates_as_one_plain_process(
    layout: str, tmp_path: Path
) -> None:
    family, size, options = LAYOUTS[layout]
    kind = "AdamW" if "use_distributed_optimizer" in options else "SGD"

    # Megatron's interleaved schedule evaluates no batch of fewer microbatches than stages.
    is_called = layout != "interleaved"

    def work(ctx: Context) -> tuple[Any, Any]:
        return train(ctx, family, kind, tmp_path), by_calls(ctx, family) if is_called else None

    (expected, model), (losses, others, generated) = plain(family, kind), by_hand(family)
    stored = model_of(family, seed=9)
    ranks = on_ranks(work, size, **options)
    af.load_model(stored, tmp_path)
    for (ran, weights), called in ranks:
        torch.testing.assert_close(torch.tensor(ran), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        if is_called:
            assert called[0] == pytest.approx(losses, abs=1e-5)
            assert called[1] == pytest.approx(others, abs=1e-5)
            assert [row[: len(one)] for row, one in zip(called[2], generated, strict=True)] == generated
        if weights:  # the first rank has them
            assert weights.keys() == model.state_dict().keys()
    if kind == "SGD":  # Adam divides by what may be rounding alone
        for found in (ranks[0][0][1], stored.state_dict()):
            torch.testing.assert_close(dict(found), dict(model.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_close_to_full_precision(precision: str) -> None:
    expected, _ = plain("llama")
    # Sums over tokens overflow with the usual scale, which skips the first steps.
    handlers = [GradScalerKwargs(init_scale=256.0)] if precision == "fp16" else []
    options: dict[str, Any] = {"mixed_precision": precision, "kwargs_handlers": handlers}
    for ran, _ in on_ranks(lambda ctx: train(ctx, "llama", "AdamW"), 2, tp_degree=2, **options):
        torch.testing.assert_close(torch.tensor(ran), torch.tensor(expected), rtol=0.1, atol=0.1)
        assert [loss for loss, _ in ran] == pytest.approx([loss for loss, _ in expected], abs=5e-3)


def half(ctx: Context, folder: str, part: int) -> list[float]:
    """Train the first half and save, or load into another model and train the second half."""
    model, optimizer, schedule, loader = prepared(ctx, "gpt2", seed=part)
    scaler = af.init_scaler(ctx)
    tree = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    if part:
        scaler = af.load_state(ctx, folder, tree)["scaler"]
    losses: list[float] = []
    for batch, micro in af.microbatches(ctx, loader):
        if (micro.index < 2) == (part == 0):
            scaler, loss = af.forward_backward(ctx, model, total_loss, batch, scaler, micro)
            losses.append(total_of(ctx, loss, batch))
            scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=0.5, scheduler=schedule)
    if not part:
        af.save_state(ctx, folder, {**tree, "scaler": scaler})
    return losses


@pytest.mark.parametrize(
    ("saved", "loaded"), [("pp2", "dp2"), ("dp2", "tp2"), ("plain", "pp2"), ("tp2", "plain")]
)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(saved: str, loaded: str, tmp_path: Path) -> None:
    expected, _ = plain("gpt2")
    losses: list[float] = []
    for part, layout in enumerate((saved, loaded)):

        def run(ctx: Context, part: int = part) -> list[float]:
            return half(ctx, str(tmp_path / "state"), part)

        if layout == "plain":
            losses += run_ranks(run, 2, on="processes")[0]
        else:
            losses += on_ranks(run, 2, **LAYOUTS[layout][2])[0]
    assert losses == pytest.approx([loss for loss, _ in expected], abs=1e-5)


class Weighted(af.GPTTrainStep):
    """A step whose loss is multiplied by an argument of its own."""

    def get_loss_func(self) -> Callable[..., Any]:
        factor = self.kwargs["factor"]

        def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
            mean = (losses * loss_mask).sum() / loss_mask.sum() * factor
            averaged = af.avg_losses_across_data_parallel_group([mean])
            return mean, {"lm loss": averaged[0]}

        return loss_func


def by_custom_step(ctx: Context) -> tuple[float, int]:
    model, optimizer, _, loader = prepared(ctx, "gpt2")
    model.train()
    batch = next(iter(loader))
    whole = af.gather_across_data_parallel_groups(batch["input_ids"])
    del optimizer
    return model(**batch).loss.item(), len(whole)


def test_a_custom_step_computes_the_loss() -> None:
    options: dict[str, Any] = {
        "custom_train_step_class": Weighted,
        "custom_train_step_kwargs": {"factor": 3.0},
    }
    found = on_ranks(by_custom_step, 2, num_micro_batches=2, calculate_per_token_loss=False, **options)
    batch = next(iter(loader_of(rows(), batch_size=8)))
    # The mean over means of the four microbatches.
    model = model_of("gpt2")
    means = [
        model(**{name: value[start : start + 2] for name, value in batch.items()}).loss
        for start in range(0, 8, 2)
    ]
    for loss, number in found:
        assert loss == pytest.approx(3 * float(torch.stack(means).mean()), abs=1e-5)
        assert number == 8


def bert_provider(pre_process: bool, post_process: bool) -> Any:
    """A stage of Megatron's BERT."""
    specs: Any = importlib.import_module("megatron.core.models.bert.bert_layer_specs")
    bert: Any = importlib.import_module("megatron.core.models.bert.bert_model")
    transformer: Any = importlib.import_module("megatron.core.transformer")
    config = transformer.TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, masked_softmax_fusion=False
    )
    return bert.BertModel(
        config,
        num_tokentypes=0,
        transformer_layer_spec=specs.bert_layer_local_spec,
        vocab_size=64,
        max_sequence_length=16,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        add_binary_head=False,
    )


def train_bert(ctx: Context) -> list[float]:
    transformers: Any = importlib.import_module("transformers")
    template = transformers.BertForMaskedLM(
        transformers.BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=64)
    )
    model, optimizer = prepare(ctx, template, torch.optim.AdamW(template.parameters(), lr=1e-2))
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(3))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.where(ids % 2 == 0, -100),
    }
    scaler = af.init_scaler(ctx)
    losses: list[float] = []
    model.train()
    for _ in range(4):
        loss = model(**batch).loss
        scaler = af.optimizer_step(ctx, optimizer, af.backward(ctx, loss, scaler))
        losses.append(loss.item())
    with pytest.raises(NotAvailableError, match=r"megatron\.core\.dist_checkpointing"):
        af.save_state(ctx, "nowhere", {"model": model})
    return losses


def test_a_model_of_a_provider_trains() -> None:
    for losses in on_ranks(train_bert, 2, custom_model_provider_function=bert_provider):
        assert losses == sorted(losses, reverse=True)


def schedules(ctx: Context) -> tuple[list[float], list[float]]:
    model = model_of("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    dummy = af.MegatronLMDummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=2)
    loader = loader_of(rows(32), batch_size=1)
    model, optimizer, schedule, loader = prepare(ctx, model, optimizer, dummy, loader)
    scaler = af.init_scaler(ctx)
    rates: list[float] = []
    for batch, micro in af.microbatches(ctx, loader):
        rates.append(optimizer.param_groups[0]["lr"])
        scaler, _ = af.forward_backward(ctx, model, total_loss, batch, scaler, micro)
        scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=schedule)
        if micro.index == 5:
            break
    state = schedule.state_dict()
    schedule.step()
    schedule.load_state_dict(state)
    return rates, schedule.get_last_lr()


def test_megatron_s_schedule_steps_once_with_the_optimizer() -> None:
    for rates, last in on_ranks(schedules, 2, num_micro_batches=2, min_lr=0.1):
        assert rates == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1, 0.1])
        assert last == pytest.approx([0.1])


def datasets_of(numbers: list[int]) -> Any:
    """Such as Megatron's GPTDataset."""

    def row(index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((8,), index % VOCABULARY)
        more = {"loss_mask": torch.ones(8), "position_ids": torch.arange(8)}
        return {"tokens": tokens, "labels": tokens, **more}

    return tuple([row(index) for index in range(number)] for number in numbers)


def with_megatron_datasets(ctx: Context) -> tuple[list[int], list[list[int]], list[float]]:
    model = model_of("gpt2")
    dummy = af.MegatronLMDummyDataLoader(micro_batch_size=2)
    model, optimizer, training, evaluation, test = prepare(
        ctx, model, torch.optim.SGD(model.parameters(), lr=0.1), dummy, dummy, dummy
    )
    sizes = [len(loader) for loader in (training, evaluation, test)]
    read: list[list[int]] = []
    losses: list[float] = []
    model.train()
    scaler = af.init_scaler(ctx)
    for batch, micro in af.microbatches(ctx, training):
        read.append(batch["tokens"][:, 0].tolist())
        loss = model(**batch).loss
        scaler = af.optimizer_step(ctx, optimizer, af.backward(ctx, loss, scaler, micro))
        losses.append(loss.item())
    return sizes, read, losses


def test_megatron_s_own_datasets_go_on_after_the_consumed_samples() -> None:
    results = on_ranks(
        with_megatron_datasets,
        2,
        num_micro_batches=2,
        megatron_dataset_flag=True,
        train_iters=3,
        eval_iters=1,
        consumed_samples=[8],
        custom_megatron_datasets_provider_function=datasets_of,
    )
    assert [sizes for sizes, _, _ in results] == [[2, 1, 1]] * 2
    assert sorted(row for _, read, _ in results for rows in read for row in rows) == list(range(8, 24))
    assert results[0][2] == results[1][2]  # averaged over replicas


def test_ordinary_mistakes_are_named() -> None:
    on_ranks(mistakes, 1, num_micro_batches=2)


def mistakes(ctx: Context) -> None:
    def fails(kind: type[Exception], expected: str, action: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            action()
        assert expected in str(caught.value)

    model = model_of("gpt2")
    stepped: Any = torch.optim.AdamW(model.parameters())
    model(**next(iter(loader_of(rows(), batch_size=2)))).loss.backward()
    stepped.step()
    fails(ConfigurationError, "has stepped already", lambda: prepare(ctx, model, stepped))
    nesterov = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    fails(NotAvailableError, "no nesterov", lambda: prepare(ctx, model, nesterov))
    fails(ConfigurationError, "needs the model and its optimizer together", lambda: prepare(ctx, model))
    dummy = af.MegatronLMDummyDataLoader()
    fails(ConfigurationError, "megatron_dataset_flag=True", lambda: prepare(ctx, dummy, dummy, dummy))
    batches = loader_of(rows(), batch_sampler=[[0, 1], [2, 3]])
    fails(NotAvailableError, "makes them by list", lambda: prepare(ctx, batches))
    first = torch.optim.AdamW(model.parameters())
    endless = af.MegatronLMDummyScheduler(first)
    fails(ConfigurationError, "Pass total_num_steps", lambda: prepare(ctx, model, first, endless))
    model = model_of("gpt2")
    trained, _ = prepare(ctx, model, torch.optim.AdamW(model.parameters()))
    scaler = af.init_scaler(ctx)
    ids = torch.ones(4, 6, dtype=torch.long)

    def backward(loss_fn: Callable[[Any, Any], Any], batch: torch.Tensor = ids) -> Any:
        pieces: Iterator[Any] = iter(af.microbatches(ctx, [batch]))
        rows, micro = next(pieces)
        return af.forward_backward(ctx, trained, loss_fn, rows, scaler, micro)

    fails(
        ValueError,
        "a batch of 3 rows can't be split",
        lambda: backward(lambda model, x: model(x, labels=x).loss, ids[:3]),
    )
    fails(
        ConfigurationError,
        "called the model twice",
        lambda: backward(lambda model, x: model(x, labels=x).loss + model(x, labels=x).loss),
    )
    fails(
        ConfigurationError,
        "must call the model",
        lambda: backward(lambda model, x: torch.ones((), requires_grad=True)),
    )
    fails(
        ConfigurationError,
        "doesn't take token_type_ids",
        lambda: backward(lambda model, x: model(x, token_type_ids=x)),
    )
    trained.train()
    twice = trained(input_ids=ids, labels=ids).loss * 2
    fails(ConfigurationError, "can't be multiplied by 2", lambda: af.backward(ctx, twice, scaler))
    left = torch.tensor([[0, 1, 1]])
    fails(
        ConfigurationError,
        "padded at their beginning",
        lambda: trained.megatron_generate(ids[:1, :3], left, 9),
    )
    fails(ConfigurationError, "6 to 32 tokens", lambda: trained.megatron_generate(ids, max_new_tokens=99))
    fails(
        NotAvailableError,
        "num_beams=4",
        lambda: trained.megatron_generate(ids, max_new_tokens=2, num_beams=4),
    )
