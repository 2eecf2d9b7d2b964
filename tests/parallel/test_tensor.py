"""Ranks that share each layer train one model, as one process does."""

# torch leaves backward and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelfn import Context
from accelfn.context.config import TorchTensorParallelConfig
from accelfn.parallel.facts import read_facts
from accelfn.parallel.parameters import named, retie
from accelfn.parallel.tensor import apply_tensor, plan_tensor
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT, PLAN, SEQUENCE, VOCABULARY, make_batch, summed_loss


def mesh_of(ctx: Context) -> DeviceMesh:
    return init_device_mesh("cpu", (ctx.num_processes,), mesh_dim_names=("tp",))


def spread(
    ctx: Context, model: nn.Module, plan: Mapping[str, str] | None, *, loss_parallel: bool = False
) -> nn.Module:
    """Lay out a model over all ranks, with its ties."""
    record = TorchTensorParallelConfig(plan=plan, loss_parallel=loss_parallel)
    before = named(model)
    apply_tensor(model, plan_tensor(record, read_facts(model), ctx.num_processes), mesh_of(ctx))
    retie(before, model)
    return model


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def against_plain(
    ctx: Context, make: Callable[[], nn.Module], plan: Mapping[str, str] | None
) -> tuple[float, float, list[str]]:
    """Differences of the loss and gradients, and the gradients with another layout than their parameter."""
    plain, model = make(), spread(ctx, make(), plan)
    losses = [summed_loss(one, make_batch(1))[0] for one in (plain, model)]
    for loss in losses:
        loss.backward()
    astray = [
        name
        for name, one in model.named_parameters()
        if not hasattr(one, "placements") or cast("Any", one).placements != cast("Any", one.grad).placements
    ]
    return (
        float((losses[0] / losses[1] - 1).detach().abs()),
        difference(gradients_of(plain), gradients_of(model)),
        astray,
    )


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, PLAN),
        ({"tied": False}, PLAN),
        ({"views_by_count": True}, PLAN),
        ({"norms_heads": True}, {**PLAN, "blocks.*.attn.head_norm": "heads"}),
        ({}, SEQUENCE),
        ({"tied": False, "norms_heads": True}, {**SEQUENCE, "blocks.*.attn.head_norm": "heads"}),
    ],
    ids=["tied", "untied", "by-count", "head-norm", "sequence", "sequence-untied-head-norm"],
)
def test_loss_and_gradients_are_those_of_one_process(options: dict[str, bool], plan: dict[str, str]) -> None:
    for loss, gradients, astray in run_ranks(
        lambda ctx: against_plain(ctx, lambda: GPT(**cast("Any", options)), plan), 2, "processes"
    ):
        assert astray == []
        assert loss < 1e-6
        assert gradients < 2e-5  # of sums over 20 tokens, up to 50


# What can't be seen where gradients are compared: a norm of heads that is taken for whole.
def test_a_norm_of_heads_needs_its_style(tmp_path: object) -> None:
    plan = {**PLAN, "blocks.*.attn.head_norm": "whole"}
    for _, gradients, _ in run_ranks(
        lambda ctx: against_plain(ctx, lambda: GPT(norms_heads=True), plan), 2, "processes"
    ):
        assert gradients > 1e-2


def test_gradients_can_be_differentiated_again() -> None:
    def penalise(model: nn.Module) -> dict[str, torch.Tensor]:
        loss, _ = summed_loss(model, make_batch(1))
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + cast("Any", sum(whole(one).square().sum() for one in gradients))).backward()
        return gradients_of(model)

    def train(ctx: Context) -> list[float]:
        # Torch's fast kernels of attention have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            expected = penalise(GPT())
            found = [penalise(spread(ctx, GPT(), plan)) for plan in (PLAN, SEQUENCE)]
        scale = max(float(one.abs().max()) for one in expected.values())
        return [difference(one, expected) / scale for one in found]

    for found in run_ranks(train, 2, "processes"):
        assert max(found) < 1e-5


def llama(*, tied: bool, attention: str = "sdpa") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


def own_loss(model: nn.Module) -> torch.Tensor:
    """Return the loss that models of transformers compute themselves."""
    ids, labels = make_batch(1)
    return model(input_ids=ids, labels=labels, use_cache=False).loss


def trained_and_generated(ctx: Context, make: Callable[[], nn.Module], plan: Mapping[str, str] | None) -> Any:
    plain, model = make(), spread(ctx, make(), plan)
    losses = [own_loss(one) for one in (plain, model)]
    for loss in losses:
        loss.backward()
    prompt = make_batch(2)[0][:, :3]
    texts = [
        cast("Any", one)
        .eval()
        .generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
        for one in (plain, model)
    ]
    return (
        float((losses[0] / losses[1] - 1).detach().abs()),
        difference(gradients_of(plain), gradients_of(model)),
        torch.equal(*texts),
        len({id(one) for one in model.parameters()}) == len({id(one) for one in plain.parameters()}),
        all(hasattr(one, "placements") for one in model.parameters()),
    )


LLAMA_SEQUENCE = {
    "model.embed_tokens": "embedding",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.*norm": "sequence",
    "model.norm": "sequence",
    "lm_head": "gather",
}


@pytest.mark.parametrize("plan", [None, LLAMA_SEQUENCE], ids=["tp_plan", "sequence"])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_with_shared_keys_trains_and_generates_as_in_one_process(
    tied: bool, plan: Mapping[str, str] | None
) -> None:
    llama(tied=tied)  # import transformers once
    for loss, gradients, texts, ties, distributed in run_ranks(
        lambda ctx: trained_and_generated(ctx, lambda: llama(tied=tied), plan), 2, "processes"
    ):
        assert loss < 1e-6
        assert gradients < 1e-5
        assert texts
        assert ties
        assert distributed


BERT_PLAN = {
    "bert.embeddings.word_embeddings": "embedding",
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
    "cls.predictions.decoder": "gather",
}


def bert(*, tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_bert_trains_by_a_plan_of_the_users(tied: bool) -> None:
    bert(tied=tied)

    def train(ctx: Context) -> tuple[float, float]:
        plain, model = bert(tied=tied), spread(ctx, bert(tied=tied), BERT_PLAN)
        losses = [own_loss(one) for one in (plain, model)]
        for loss in losses:
            loss.backward()
        return float((losses[0] / losses[1] - 1).detach().abs()), difference(
            gradients_of(plain), gradients_of(model)
        )

    for loss, gradients in run_ranks(train, 2, "processes"):
        assert loss < 1e-6
        assert gradients < 1e-5


def test_a_loss_of_logits_that_stay_split() -> None:
    def train(ctx: Context) -> tuple[float, float, tuple[int, ...], bool]:
        from torch.distributed.tensor.parallel import loss_parallel

        plain, model = GPT(), spread(ctx, GPT(), PLAN, loss_parallel=True)
        batch = make_batch(1)
        expected, _ = summed_loss(plain, batch)
        expected.backward()
        with loss_parallel():
            loss, _ = summed_loss(model, batch)
            loss.backward()
        split = model(batch[0]).to_local()
        with torch.no_grad():
            logits = model(batch[0])
            close = torch.allclose(logits, plain(batch[0]), atol=1e-5)
        return (
            float((whole(loss) / expected - 1).detach().abs()),
            difference(gradients_of(plain), gradients_of(model)),
            tuple(split.shape),
            close,
        )

    for loss, gradients, shape, close in run_ranks(train, 2, "processes"):
        assert loss < 1e-6
        assert gradients < 2e-5
        assert shape == (4, 8, VOCABULARY // 2)
        assert close


class Around(nn.Module):
    """Reads parameters of its own and, through attention, of a layer that it doesn't call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.rand(8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 1)
        self.normed = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.down(torch.relu(self.up(x)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.normed(self.conv(x.transpose(1, 2)))


def test_what_is_whole_computes_on_plain_tensors() -> None:
    plan = {"up": "colwise", "down": "rowwise"}
    others = dict.fromkeys(("attention", "conv", "normed"), "whole")

    def train(ctx: Context) -> tuple[float, float, float]:
        plain, model = Around(), spread(ctx, Around(), {**plan, **others})
        twin = copy.deepcopy(model)
        x = torch.rand(3, 4, 8, generator=torch.Generator().manual_seed(0))
        for one in (plain, model):
            one(x).square().sum().backward()
        model(torch.zeros(3, 4, 8))  # the copy has parameters of its own
        twin(x).square().sum().backward()
        with pytest.raises(RuntimeError):
            model(torch.zeros(3, 4, 7))
        assert all(hasattr(parameter, "placements") for parameter in model.parameters())
        expected = gradients_of(plain)
        buffers = max(
            float((a - b).abs().max()) for a, b in zip(twin.buffers(), plain.buffers(), strict=True)
        )
        return difference(gradients_of(model), expected), difference(gradients_of(twin), expected), buffers

    for found in run_ranks(train, 2, "processes"):
        assert max(found) < 1e-4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
@pytest.mark.parametrize("plan", [PLAN, SEQUENCE], ids=["plain", "sequence"])
def test_compiled_blocks_are_one_graph(plan: dict[str, str]) -> None:
    def train(ctx: Context) -> float:
        plain, model = GPT(), spread(ctx, GPT(), plan)
        for block in cast("Any", model).blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        for one in (plain, model):
            summed_loss(one, make_batch(1))[0].backward()
        return difference(gradients_of(plain), gradients_of(model))

    assert max(run_ranks(train, 2, "processes")) < 2e-5


def test_on_meta_each_rank_can_fill_in_its_own_part() -> None:
    def lay_out(ctx: Context) -> tuple[bool, float]:
        from torch.distributed.tensor import distribute_tensor

        with torch.device("meta"):
            empty = GPT(tied=False)
        plain, model = GPT(tied=False), spread(ctx, empty, PLAN)
        on_meta = all(one.is_meta for one in model.parameters())
        model.to_empty(device="cpu")
        for name, one in model.named_parameters():
            to: Any = one.data
            to.copy_(distribute_tensor(plain.get_parameter(name).detach(), to.device_mesh, to.placements))
        losses = [summed_loss(one, make_batch(1))[0] for one in (plain, model)]
        return on_meta, float((losses[0] / losses[1] - 1).detach().abs())

    for on_meta, loss in run_ranks(lay_out, 2, "processes"):
        assert on_meta
        assert loss < 1e-6
