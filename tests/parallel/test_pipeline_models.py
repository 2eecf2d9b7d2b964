"""Models of transformers whose stages exchange several tensors train in a pipeline; what is freed after."""

# transformers is untyped, and torch leaves backward partly so.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT, make_batch, summed_loss

transformers: Any = pytest.importorskip("transformers")
# Once here, and not in each forked rank: it imports its models when they are asked for.
_ = (transformers.T5Model, transformers.BartModel, transformers.OPTModel)

Batch = dict[str, torch.Tensor]


def make_t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return transformers.T5ForConditionalGeneration(config)


def make_t5_of_one_embedding() -> nn.Module:
    model: Any = make_t5()
    model.set_input_embeddings(model.shared)  # as transformers does where the table is resized
    return model


def make_bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=32,
        dropout=0.0,
    )
    return transformers.BartForConditionalGeneration(config)


def make_opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=48,
        word_embed_proj_dim=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=32,
        dropout=0.0,
    )
    return transformers.OPTForCausalLM(config)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "t5": make_t5,
    "t5 of one embedding": make_t5_of_one_embedding,
    "bart": make_bart,
    "opt": make_opt,
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MAKERS[name]().double()


def batch_of(name: str) -> Batch:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (4, 9), generator=random)
    mask = (torch.arange(9) < torch.tensor([[9], [6], [7], [3]])).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    if name != "opt":
        batch["decoder_input_ids"] = torch.randint(3, 64, (4, 6), generator=random)
    return batch


def loss_fn(model: nn.Module, batch: Batch) -> af.Loss:
    logits: torch.Tensor = model(**batch).logits
    labels = batch.get("decoder_input_ids", batch["input_ids"])
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return af.Loss(total, labels.numel())


def stages(schedule: str) -> af.ParallelismConfig:
    return af.ParallelismConfig(pp_size=2, pp_handler=af.config.PipelineParallelConfig(4, schedule))


def train(ctx: af.Context, model: nn.Module, fn: Callable[..., Any], batch: Any) -> float:
    ((own, micro),) = af.microbatches(ctx, [batch])
    return af.forward_backward(ctx, model, fn, own, af.init_scaler(ctx), micro)[1].item()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b"])
def test_stages_train_as_one_process_does(schedule: str) -> None:
    def work(ctx: af.Context) -> dict[str, tuple[float, dict[str, torch.Tensor], torch.Tensor]]:
        found: dict[str, tuple[float, dict[str, torch.Tensor], torch.Tensor]] = {}
        for name in MAKERS:
            model: Any = af.prepare(ctx, make(name))
            loss = train(ctx, model, loss_fn, batch_of(name))
            gradients = {
                key: one.grad
                for key, one in model.named_parameters(remove_duplicate=False)
                if one.grad is not None
            }
            found[name] = loss, gradients, af.forward(ctx, model, **batch_of(name)).logits
        return found

    ranks = run_ranks(work, 2, "processes", timeout_s=90, parallelism_config=stages(schedule))
    for name in MAKERS:
        model = make(name)
        loss, _, _ = loss_fn(model, batch_of(name))
        loss.backward()
        expected = {
            key: one.grad
            for key, one in model.named_parameters(remove_duplicate=False)
            if one.grad is not None
        }
        assert {key for rank in ranks for key in rank[name][1]} == expected.keys()
        for found_loss, gradients, logits in (rank[name] for rank in ranks):
            assert found_loss == pytest.approx(loss.item(), rel=1e-9)
            torch.testing.assert_close(logits, model(**batch_of(name)).logits)
            for key, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[key], msg=f"{name} {key}")


def test_several_tensors_need_a_schedule_that_computes_gradients_together() -> None:
    def work(ctx: af.Context) -> str:
        model = af.prepare(ctx, make("t5"))
        with pytest.raises(ConfigurationError) as caught:
            train(ctx, model, loss_fn, batch_of("t5"))
        return str(caught.value)

    config = stages("interleavedzerobubble")
    for said in run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=config):
        assert (
            "can't do where a stage sends several tensors: args[0], args[2] in the call of encoder." in said
        )


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
            train(ctx, model, fn, torch.ones(4, 4))
        torch.testing.assert_close(af.forward(ctx, model, torch.ones(4, 4)), whole)
        return str(caught.value)

    for said in run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages("1f1b")):
        assert "stage 0 of a pipeline would send an integer tensor (torch.int64" in said
        assert "args[1] in the call of layers.1" in said


def gpt_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> af.Loss:
    return af.Loss(*summed_loss(model, batch))


def test_a_model_in_stages_is_freed_without_the_garbage_collector() -> None:
    def work(ctx: af.Context) -> list[bool]:
        model: Any = af.prepare(ctx, GPT(num_blocks=4))
        train(ctx, model, gpt_loss, make_batch(0))
        af.forward(ctx, model, make_batch(0)[0])
        held = [weakref.ref(one) for one in (model, *model.parameters())]
        gc.disable()
        try:
            del model
            return [one() is None for one in held]
        finally:
            gc.enable()

    for freed in run_ranks(work, 2, "processes", timeout_s=60, parallelism_config=stages("1f1b")):
        assert len(freed) > 1
        assert all(freed)
