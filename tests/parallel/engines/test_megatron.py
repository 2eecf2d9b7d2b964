"""Models of megatron-core, trained on CPU ranks in every layout, against plain torch."""

from __future__ import annotations

import importlib
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Accelerator, Context
from accelfn.config import GradScalerKwargs, MegatronLMPlugin
from accelfn.errors import CheckpointMismatchError, ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks
from tests.parallel.engines.megatron_on_cpu import redirect_cuda

# Warnings are of megatron-core, in each step.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

prepare: Any = af.prepare  # what stands for Megatron's objects is replaced by other types
VOCABULARY = 61  # of 64 rows
STEPS = 3
# Ranks and options.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp_degree": 2}),
    "pp2": (2, {"pp_degree": 2, "num_micro_batches": 2}),
    "dp2": (2, {"num_micro_batches": 2, "use_distributed_optimizer": True}),
    "interleaved": (
        2,
        {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1},
    ),
    "recomputed": (1, {"recompute_granularity": "full"}),
    "all": (
        8,
        {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2, "use_distributed_optimizer": True},
    ),
}


def core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def named_shards(stage: Any) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """The parameters of a stage by their names in the complete model, and the dimension that is sharded."""
    for name, parameter in stage.named_parameters():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(stage.decoder.layers[int(parts[2])].layer_number)
        is_sharded = getattr(parameter, "tensor_model_parallel", False)
        yield ".".join(parts), parameter, parameter.partition_dim if is_sharded else None


def provider_of(precision: str = "no", seed: int = 0, **options: Any) -> Callable[..., Any]:
    """A provider of a GPT whose weights depend on their names alone."""
    plugin = MegatronLMPlugin(**options)
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def provide(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        part = plugin.num_layers_per_virtual_pipeline_stage
        config = core("transformer").TransformerConfig(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            tensor_model_parallel_size=plugin.tp_degree,
            pipeline_model_parallel_size=plugin.pp_degree,
            virtual_pipeline_model_parallel_size=None if part is None else 4 // plugin.pp_degree // part,
            overlap_p2p_comm=part is not None,
            batch_p2p_comm=part is None,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            fp16=precision == "fp16",
            bf16=precision == "bf16",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            recompute_granularity=plugin.recompute_granularity,
            recompute_method=plugin.recompute_method,
            recompute_num_layers=plugin.recompute_num_layers,
        )
        stage = core("models.gpt.gpt_model").GPTModel(
            config=config,
            transformer_layer_spec=core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(),
            vocab_size=64,
            max_sequence_length=32,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            vp_stage=vp_stage,
        )
        state = core("parallel_state")
        tp, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
        for name, parameter, dim in named_shards(stage):
            shape = list(parameter.shape)
            if dim is not None:
                shape[dim] *= tp
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            whole: Any = torch.randn(shape, generator=generator) * 0.1 + ("norm.weight" in name)
            with torch.no_grad():
                parameter.copy_(whole if dim is None else whole.chunk(tp, dim)[rank])
        return stage

    return provide


class Template(nn.Module):
    """What is passed to ``prepare``: its configuration is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.config = SimpleNamespace(
            vocab_size=VOCABULARY, num_hidden_layers=4, eos_token_id=0, return_dict=True
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


def optimizer_of(parameters: Any, kind: str = "AdamW") -> Any:
    if kind == "SGD":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import megatron-core here once, and not for seconds in each forked rank."""
    with warnings.catch_warnings():
        # It warns of every optional package that is missing, and uses deprecated parts of torch.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.optimizer")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")


class Ran(list[tuple[float, float]]):
    """Loss and norm of each step."""


class Plain(NamedTuple):
    """What plain torch comes to, with a model of Megatron on one rank."""

    ran: Ran
    weights: dict[str, torch.Tensor]
    evaluated: float
    generated: list[list[int]]


def logits_of(stage: Any, ids: torch.Tensor) -> torch.Tensor:
    return stage(ids, torch.arange(ids.shape[1]).expand_as(ids), None)


def plain(kind: str) -> Plain:
    def work(ctx: Context) -> Plain:
        redirect_cuda()
        core("parallel_state").initialize_model_parallel()
        core("tensor_parallel").model_parallel_cuda_manual_seed(0)
        stage = provider_of()(True, True)
        optimizer, ran = optimizer_of(stage.parameters(), kind), Ran()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

        def loss_of(batch: Any) -> torch.Tensor:
            logits = logits_of(stage, batch["input_ids"])[:, :-1]  # padding is at the ends
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        for batch in loader_of(rows(), batch_size=8):
            loss: Any = loss_of(batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            ran.append((loss.item(), norm.item()))
        ids = torch.stack([row["input_ids"] for row in rows(2)])
        generated: list[list[int]] = []
        with torch.no_grad():
            evaluated = loss_of({"input_ids": ids, "labels": ids}).item()
            for row, length in zip(ids, (3, 5), strict=True):
                found = [int(token) for token in row[:length]]
                while len(found) < 9 and (len(found) == length or found[-1]):
                    logits = logits_of(stage, torch.tensor([found]))
                    found.append(int(logits[0, -1, :VOCABULARY].argmax()))
                generated.append(found)
        weights = {name: parameter.detach().clone() for name, parameter, _ in named_shards(stage)}
        return Plain(ran, weights, evaluated, generated)

    return run_ranks(work, 1, on="processes", timeout_s=200)[0]


def on_ranks(fn: Callable[[Context], Any], size: int, **options: Any) -> list[Any]:
    """Run ``fn`` with a plugin of these options, and a provider of a GPT unless there is one."""

    def redirected(ctx: Context) -> Any:
        redirect_cuda()
        return fn(ctx)

    seed = options.pop("seed", 0)
    more = {name: options.pop(name) for name in ("mixed_precision", "kwargs_handlers") if name in options}
    sizes = {name: value for name, value in options.items() if not name.startswith("custom_")}
    provider = provider_of(more.get("mixed_precision", "no"), seed, **sizes)
    options = {"custom_model_provider_function": provider, **options}
    plugin = MegatronLMPlugin(**options)
    return run_ranks(redirected, size, on="processes", megatron_lm_plugin=plugin, timeout_s=200, **more)


def prepared(ctx: Context, kind: str = "AdamW") -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, scheduler and loader; the same global batches in every layout."""
    with torch.device("meta"):  # its weights aren't read
        model = Template()
    optimizer = optimizer_of(model.parameters(), kind)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    plugin = cast("MegatronLMPlugin", ctx.strategy.megatron)
    size = 8 // ctx.axis_size("dp_replicate") // plugin.num_micro_batches
    return prepare(ctx, model, optimizer, schedule, loader_of(rows(), batch_size=size))


def total_of(ctx: Context, loss: torch.Tensor, batch: Any) -> float:
    """Return the mean over the tokens of all ranks."""
    count = (batch["labels"][:, 1:] != -100).sum()
    totals = af.reduce(ctx, torch.stack((loss, count)))
    return float(totals[0] / totals[1])


class Shard(NamedTuple):
    """A rank's part of a parameter."""

    name: str
    value: torch.Tensor
    dim: int | None
    rank: int


def train(ctx: Context, kind: str) -> tuple[Ran, list[Shard]]:
    model, optimizer, schedule, loader = prepared(ctx, kind)
    scaler, ran = af.init_scaler(ctx), Ran()
    for batch, micro in af.microbatches(ctx, loader):
        scaler, loss = af.forward_backward(ctx, model, total_loss, batch, scaler, micro)
        mean = total_of(ctx, loss, batch)
        scaler = af.unscale_gradients(ctx, optimizer, scaler)
        norm = af.clip_grad_norm_(ctx, model.parameters(), 0.5, scaler_state=scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=schedule)
        ran.append((mean, norm.item()))
    rank = ctx.coordinate("tp")
    shards = [
        Shard(name, parameter.detach().clone(), dim, rank)
        for chunk in model.inner_chunks()
        for name, parameter, dim in named_shards(chunk)
    ]
    return ran, shards


def by_calls(ctx: Context, kind: str) -> tuple[list[float], list[float], list[list[int]]]:
    """Train as with Accelerate, where a call of the model is both passes; then evaluate and generate."""
    accelerator = Accelerator(context=ctx)
    model = Template()
    optimizer = optimizer_of(model.parameters(), kind)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    plugin = cast("MegatronLMPlugin", ctx.strategy.megatron)
    loader = loader_of(rows(), batch_size=8 // ctx.axis_size("dp_replicate") // plugin.num_micro_batches)
    prepared: Any = accelerator.prepare(model, optimizer, loader, schedule)
    model, optimizer, loader, schedule = prepared
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


@pytest.fixture(scope="module")
def references() -> dict[str, Plain]:
    return {kind: plain(kind) for kind in ("AdamW", "SGD")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_evaluates_and_generates_as_one_plain_process(
    layout: str, references: dict[str, Plain]
) -> None:
    size, options = LAYOUTS[layout]
    kind = "AdamW" if "use_distributed_optimizer" in options else "SGD"
    reference = references[kind]
    # Megatron's interleaved schedule evaluates no batch of fewer microbatches than stages.
    is_called = layout != "interleaved"

    def work(ctx: Context) -> tuple[Any, Any]:
        return train(ctx, kind), by_calls(ctx, kind) if is_called else None

    for (ran, shards), called in on_ranks(work, size, **options):
        torch.testing.assert_close(torch.tensor(ran), torch.tensor(reference.ran), rtol=1e-5, atol=1e-5)
        if called is not None:
            assert called[0] == pytest.approx([loss for loss, _ in reference.ran], abs=1e-5)
            assert called[1] == pytest.approx([reference.evaluated, called[1][1]], abs=1e-5)
            chosen = zip(called[2], reference.generated, strict=True)
            assert [row[: len(one)] for row, one in chosen] == reference.generated
        for name, value, dim, rank in shards if kind == "SGD" else ():  # Adam divides by rounding alone
            whole: Any = reference.weights[name]
            tp = options.get("tp_degree", 1)
            part = whole if dim is None else whole.tensor_split(tp, dim)[rank]
            torch.testing.assert_close(value, part, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_close_to_full_precision(precision: str, references: dict[str, Plain]) -> None:
    expected = references["AdamW"].ran
    # Sums over tokens overflow with the usual scale, which skips the first steps.
    handlers = [GradScalerKwargs(init_scale=256.0)] if precision == "fp16" else []
    options: dict[str, Any] = {"mixed_precision": precision, "kwargs_handlers": handlers}
    for ran, _ in on_ranks(lambda ctx: train(ctx, "AdamW"), 2, tp_degree=2, **options):
        torch.testing.assert_close(torch.tensor(ran), torch.tensor(expected), rtol=0.1, atol=0.1)


def half(ctx: Context, folder: str, part: int | None) -> list[float]:
    """Train the first half and save, or load and train the second half; or both."""
    model, optimizer, schedule, loader = prepared(ctx)
    scaler = af.init_scaler(ctx)
    tree = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
    if part:
        scaler = af.load_state(ctx, folder, tree)["scaler"]
    losses: list[float] = []
    for batch, micro in af.microbatches(ctx, loader):
        if part is None or (micro.index < 2) == (part == 0):
            scaler, loss = af.forward_backward(ctx, model, total_loss, batch, scaler, micro)
            losses.append(total_of(ctx, loss, batch))
            scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=0.5, scheduler=schedule)
    if part == 0:
        af.save_state(ctx, folder, {**tree, "scaler": scaler})
    return losses


@pytest.mark.parametrize(("layout", "precision"), [("tp2", "bf16"), ("pp2", "no"), ("dp2", "bf16")])
def test_a_checkpoint_goes_on_in_its_layout(layout: str, precision: str, tmp_path: Path) -> None:
    size, options = LAYOUTS[layout]
    losses: dict[int | None, list[list[float]]] = {}
    for part in (None, 0, 1):

        def run(ctx: Context, part: int | None = part) -> list[float]:
            return half(ctx, str(tmp_path / "state"), part)

        losses[part] = on_ranks(run, size, mixed_precision=precision, seed=part or 0, **options)
    assert [a + b for a, b in zip(losses[0], losses[1], strict=True)] == losses[None]


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    def run(ctx: Context) -> list[float]:
        return half(ctx, str(tmp_path), 0)

    def load(ctx: Context) -> None:
        with pytest.raises(CheckpointMismatchError, match="which only the same layout can load") as caught:
            half(ctx, str(tmp_path), 1)
        ((_, stored, own),) = caught.value.rows
        assert (stored[:18], own[:18]) == ("tp 2 x pp 1 x dp 1", "tp 1 x pp 2 x dp 1")

    on_ranks(run, 2, **LAYOUTS["tp2"][1])
    on_ranks(load, 2, **LAYOUTS["pp2"][1])


class Weighted(af.engines.GPTTrainStep):
    """A step whose loss is multiplied by an argument of its own."""

    def get_loss_func(self) -> Callable[..., Any]:
        factor = self.kwargs["factor"]

        def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
            mean = (losses * loss_mask).sum() / loss_mask.sum() * factor
            averaged = af.engines.avg_losses_across_data_parallel_group([mean])
            return mean, {"lm loss": averaged[0]}

        return loss_func


def by_custom_step(ctx: Context) -> tuple[float, float, int]:
    model, _, _, loader = prepared(ctx)
    model.train()
    batch = next(iter(loader))
    whole = af.engines.gather_across_data_parallel_groups(batch["input_ids"])
    found = model(**batch).loss.item()
    model.eval()
    means = [
        model(**{name: value[start : start + 2] for name, value in batch.items()}).loss for start in (0, 2)
    ]
    expected = 3 * af.engines.avg_losses_across_data_parallel_group(means).mean().item()
    return found, expected, len(whole)


def test_a_custom_step_computes_the_loss() -> None:
    options: dict[str, Any] = {
        "custom_train_step_class": Weighted,
        "custom_train_step_kwargs": {"factor": 3.0},
        "calculate_per_token_loss": False,
    }
    for found, expected, number in on_ranks(by_custom_step, 2, num_micro_batches=2, **options):
        assert found == pytest.approx(expected, abs=1e-5)  # the mean over means of the four microbatches
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
    template: Any = Template()
    template.config.model_type = "bert"
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
    for refused in (lambda: af.save_model(ctx, model, "nowhere"), lambda: af.get_state_dict(ctx, model)):
        with pytest.raises(NotAvailableError, match=r"bridge\.save_hf_pretrained"):
            refused()
    return losses


def test_a_model_of_another_kind_trains() -> None:
    for losses in on_ranks(train_bert, 2, custom_model_provider_function=bert_provider):
        assert losses == sorted(losses, reverse=True)


def schedules(ctx: Context) -> tuple[list[float], list[float], set[tuple[float, float]]]:
    model = Template()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    dummy = af.engines.MegatronLMDummyScheduler(optimizer, total_num_steps=4, warmup_num_steps=2)
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
    groups = [group for part in optimizer.parts for group in part.optimizer.param_groups]
    stepped = {(round(group["lr"], 6), group["weight_decay"]) for group in groups if group["params"]}
    return rates, schedule.get_last_lr(), stepped


def test_megatron_s_schedule_steps_once_with_the_optimizer() -> None:
    def is_vector(name: str, parameter: torch.Tensor) -> bool:
        del name
        return parameter.dim() < 2

    def is_embedding(name: str, parameter: torch.Tensor) -> bool:
        del parameter
        return name.startswith("embedding.")

    options = {"no_wd_decay_cond": is_vector, "scale_lr_cond": is_embedding, "lr_mult": 2.0}
    for rates, last, stepped in on_ranks(schedules, 2, num_micro_batches=2, min_lr=0.1, **options):
        assert stepped == {(0.1, 0.01), (0.1, 0.0), (0.2, 0.01)}
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
    model = Template()
    dummy = af.engines.MegatronLMDummyDataLoader(micro_batch_size=2)
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

    model = Template()
    stepped: Any = torch.optim.AdamW(model.parameters())
    model.layer(torch.ones(2)).sum().backward()
    stepped.step()
    fails(ConfigurationError, "has stepped already", lambda: prepare(ctx, model, stepped))
    nesterov = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    fails(NotAvailableError, "no nesterov", lambda: prepare(ctx, model, nesterov))
    groups: Any = [{"params": model.layer.weight, "weight_decay": 0.1}, {"params": model.layer.bias}]
    uneven = torch.optim.AdamW(groups, weight_decay=0.0)
    fails(ConfigurationError, "Pass one group; no_wd_decay_cond", lambda: prepare(ctx, model, uneven))
    fails(ConfigurationError, "needs the model and its optimizer together", lambda: prepare(ctx, model))
    dummy = af.engines.MegatronLMDummyDataLoader()
    fails(ConfigurationError, "megatron_dataset_flag=True", lambda: prepare(ctx, dummy, dummy, dummy))
    batches = loader_of(rows(), batch_sampler=[[0, 1], [2, 3]])
    fails(NotAvailableError, "makes them by list", lambda: prepare(ctx, batches))
    first = torch.optim.AdamW(model.parameters())
    endless = af.engines.MegatronLMDummyScheduler(first)
    fails(ConfigurationError, "Pass total_num_steps", lambda: prepare(ctx, model, first, endless))
    plugin = cast("MegatronLMPlugin", ctx.strategy.megatron)
    for options, expected in (
        ({"custom_model_provider_function": None}, "AutoBridge.from_hf_pretrained"),
        ({"attention_dropout": 0.5}, "attention_dropout=0.0 in its config, and the options ask for 0.5"),
        ({"other_megatron_args": {"num_layers": 8}}, "num_layers=4 in its config"),
        ({"use_rotary_position_embeddings": True}, "learned_absolute positions"),
        ({"seq_length": 64}, "seq_length=64 is above the model's 32"),
    ):
        other = ctx.replace(megatron_lm_plugin=replace(plugin, **cast("Any", options)))
        fails(ConfigurationError, expected, lambda other=other: prepare(other, model, first))
    trained, _ = prepare(ctx, model, first)
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
