"""Adapters of peft train beside a frozen model whose parameters are sharded, as in one process."""

# torch leaves backward and manual_seed partly untyped, and peft is not read here.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.parallel.layouts import LAYOUTS
from tests.parallel.test_transformers import close, make_llama

peft: Any = pytest.importorskip("peft")
# Between peft and transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

_STEPS, _ROWS = 3, 4


class Seen(NamedTuple):
    """What a training run came to."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]  # of the adapters, on the main process


def make_adapted() -> Any:
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_llama(False), config)
    torch.manual_seed(1)
    for name, one in model.named_parameters():
        if "lora_B" in name:  # zeros, with which no gradient reaches the other half
            torch.nn.init.normal_(one, std=0.3)
    return model


def train(ctx: Context, folder: Path) -> Seen:
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
        return Seen(losses, norms, {})
    assert all(torch.equal(whole[name], one) for name, one in before.items())
    inner: Any = af.unwrap_model(model)
    inner.save_pretrained(str(folder), state_dict=whole)
    weights: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(inner, state_dict=whole)
    return Seen(losses, norms, {name: one.clone() for name, one in weights.items()})


def test_adapters_train_beside_shards_as_in_one_process(tmp_path: Path) -> None:
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
        assert close(found.losses, plain.losses)
        assert close(found.norms, plain.norms)
    loaded = peft.PeftModel.from_pretrained(make_llama(False), str(tmp_path / "sharded"))
    read = peft.get_peft_model_state_dict(loaded)
    assert len(read) == 8  # two halves of two adapters in two layers
    for name, one in ranks[0].weights.items():
        assert torch.equal(one, read[name])
        assert torch.allclose(one, plain.weights[name], atol=1e-5)
