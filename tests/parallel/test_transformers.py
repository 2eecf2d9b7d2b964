"""Sharded models of transformers are saved, loaded and generate; adapters of peft train beside them."""

# torch leaves backward and manual_seed partly untyped, and transformers and peft much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import accelfn as af
from accelfn.context import Context
from accelfn.errors import AccelfnError, ConfigurationError
from accelfn.testing import run_ranks
from tests.parallel.layouts import LAYOUTS

pytestmark = [
    pytest.mark.slow,
    # Between peft and transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


_VOCABULARY, _ROWS, _STEPS = 32, 4, 3


def make_llama(tied: bool) -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


class Seen(NamedTuple):
    """What a model came to after a step."""

    logits: torch.Tensor
    tokens: torch.Tensor  # generated


def run(ctx: Context, tied: bool, folder: Path) -> Seen:
    """Train for a step, save, load into a model that never had memory for all of it, and generate."""
    model = make_llama(tied)
    model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
    inner: Any = af.unwrap_model(model)
    assert (inner.get_output_embeddings().weight is inner.get_input_embeddings().weight) is tied
    ids = torch.arange(1, 25).view(_ROWS, 6)
    own = af.split_between_processes(ctx.along("dp"), ids)
    scaler = af.backward(ctx, model(input_ids=own, labels=own).loss, af.init_scaler(ctx))
    af.optimizer_step(ctx, optimizer, scaler)
    af.save_model(ctx, inner, folder)
    with af.init_empty_weights():
        empty = make_llama(tied)
    loaded = af.prepare_model(ctx, empty)
    af.load_model(loaded, folder)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        assert torch.equal(loaded.eval()(input_ids=ids).logits, logits)
    return Seen(logits, inner.generate(prompt, **options))


@pytest.mark.parametrize("name", ["fsdp2", "tp2", "tp2xfsdp2"])
def test_models_are_trained_loaded_and_generate_as_in_one_process(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]

    def work(ctx: Context) -> list[Seen]:
        return [run(ctx, tied, tmp_path / f"{ctx.num_processes} {tied}") for tied in (True, False)]

    make_llama(True)  # imports transformers here once, and not in each forked rank
    config = layout.config(plan=None)  # the model's own
    ranks = run_ranks(work, layout.size, "processes", timeout_s=120.0, parallelism_config=config)
    plain = work(Context())
    for found in ranks:
        for one, expected in zip(found, plain, strict=True):
            torch.testing.assert_close(one.logits, expected.logits, rtol=1e-4, atol=1e-5)
            assert torch.equal(one.tokens, expected.tokens)


class Adapted(NamedTuple):
    """What a training run of adapters came to."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]  # of the adapters, on the main process


def make_adapted() -> Any:
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_llama(False), config)
    torch.manual_seed(1)
    for name, one in model.named_parameters():
        if "lora_B" in name:  # zeros, with which no gradient reaches the other half
            torch.nn.init.normal_(one, std=0.3)
    return model


def train(ctx: Context, folder: Path) -> Adapted:
    model = make_adapted()
    before = {name: one.detach().clone() for name, one in model.named_parameters() if not one.requires_grad}
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
    model, optimizer = af.prepare(ctx, model, optimizer)
    scaler = af.init_scaler(ctx)
    losses: list[float] = []
    norms: list[float] = []
    ids = torch.randint(1, 32, (_STEPS, _ROWS, 6), generator=torch.Generator().manual_seed(2))
    for rows in ids:
        own = rows.chunk(ctx.num_processes)[ctx.rank]
        loss = model(input_ids=own, labels=own).loss
        scaler = af.backward(ctx, loss, scaler)
        norms.append(float(af.clip_grad_norm_(ctx, trained, 0.1, scaler_state=scaler)))
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        losses.append(float(af.reduce(ctx, loss.detach(), "mean")))
    whole = af.get_state_dict(ctx, model)
    if not ctx.is_main_process:
        return Adapted(losses, norms, {})
    assert all(torch.equal(whole[name], one) for name, one in before.items())
    inner: Any = af.unwrap_model(model)
    peft: Any = importlib.import_module("peft")
    inner.save_pretrained(str(folder), state_dict=whole)
    weights: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(inner, state_dict=whole)
    return Adapted(losses, norms, {name: one.clone() for name, one in weights.items()})


def test_adapters_train_beside_shards_as_in_one_process(tmp_path: Path) -> None:
    peft: Any = importlib.import_module("peft")
    layout = LAYOUTS["fsdp2"]
    ranks = run_ranks(
        lambda ctx: train(ctx, tmp_path / "sharded"),
        layout.size,
        "processes",
        timeout_s=120.0,
        parallelism_config=layout.config(),
    )
    plain = train(Context(), tmp_path / "plain")
    for found in ranks:
        assert [*found.losses, *found.norms] == pytest.approx([*plain.losses, *plain.norms], rel=1e-5)
    loaded = peft.PeftModel.from_pretrained(make_llama(False), str(tmp_path / "sharded"))
    read = peft.get_peft_model_state_dict(loaded)
    assert len(read) == 8  # two halves of two adapters in two layers
    for name, one in ranks[0].weights.items():
        assert torch.equal(one, read[name])
        assert torch.allclose(one, plain.weights[name], atol=1e-5)


def test_a_model_that_transformers_has_split_is_taken_as_it_is(tmp_path: Path) -> None:
    make_llama(tied=False).save_pretrained(tmp_path / "weights")
    ids = torch.randint(0, _VOCABULARY, (_ROWS, 8), generator=torch.Generator().manual_seed(3))

    def run(ctx: Context, first: int, last: int) -> list[float]:
        transformers: Any = importlib.import_module("transformers")
        options: dict[str, Any] = {}
        if ctx.num_processes > 1:
            utils: Any = importlib.import_module("transformers.distributed.configuration_utils")
            options["distributed_config"] = utils.DistributedConfig(tp_size=2)
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weights", **options)
        if ctx.rank == 1:
            torch.nn.init.zeros_(model.model.norm.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = af.prepare(ctx, model, optimizer)
        scaler, losses = af.init_scaler(ctx), list[float]()
        tree = {"model": model, "optimizer": optimizer}
        if first:
            af.load_state(ctx, tmp_path / "checkpoint", tree)
        for _ in range(first, last):
            loss = model(input_ids=ids, labels=ids).loss
            scaler = af.backward(ctx, loss, scaler)
            scaler = af.unscale_gradients(ctx, optimizer, scaler)
            norm = af.clip_grad_norm_(ctx, model.parameters(), 1.0, scaler_state=scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
            losses += [loss.item(), norm.item()]
        if not first:
            af.save_state(ctx, tmp_path / "checkpoint", tree)
        return losses

    def split(first: int, last: int) -> list[list[float]]:
        layout = af.ParallelismConfig(tp_size=2)
        return run_ranks(lambda ctx: run(ctx, first, last), 2, "processes", parallelism_config=layout)

    (expected,) = run_ranks(lambda ctx: run(ctx, 0, 2), 1)
    assert split(0, 2) == [pytest.approx(expected, rel=1e-5)] * 2
    (expected,) = run_ranks(lambda ctx: run(ctx, 2, 4), 1)  # from what two ranks saved
    assert split(2, 4) == [pytest.approx(expected, rel=1e-4)] * 2
    with pytest.raises(ConfigurationError, match=r"With ParallelismConfig\(tp_size=2\) and nothing else"):
        run_ranks(lambda ctx: run(ctx, 0, 1), 2, "processes")

    def refused(ctx: Context) -> list[str]:
        transformers: Any = importlib.import_module("transformers")
        utils: Any = importlib.import_module("transformers.distributed.configuration_utils")
        found: list[str] = []
        for kind in ("hook", "muon"):
            split_by = utils.DistributedConfig(tp_size=2)
            model = transformers.LlamaForCausalLM.from_pretrained(
                tmp_path / "weights", distributed_config=split_by
            )
            weight = model.model.layers[0].mlp.up_proj.weight
            if kind == "hook":
                weight.register_hook(torch.clone)
            optimizer = torch.optim.Muon([weight]) if kind == "muon" else torch.optim.SGD([weight])
            with pytest.raises(AccelfnError) as caught:
                af.prepare(ctx, model, optimizer)
            found.append(str(caught.value))
        return found

    layout = af.ParallelismConfig(tp_size=2)
    for hook, muon in run_ranks(refused, 2, "processes", parallelism_config=layout):
        assert "has a hook on its gradient" in hook
        assert "Muon can't step" in muon
