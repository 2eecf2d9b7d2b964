"""What a dry run of a batch finds is what real runs keep and receive."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel import read_facts
from accelfn.testing import run_ranks
from tests.parallel.expert_models import SparseGPT
from tests.parallel.layouts import LAYOUTS
from tests.parallel.tensor_models import GPT, LENGTH, PLAN, SEQUENCE, VOCABULARY
from tests.parallel.traffic import Traffic, held

transformers: Any = pytest.importorskip("transformers")
# Once here, and not in each forked rank: it imports its models when they are asked for.
_ = (transformers.LlamaForCausalLM, transformers.BertForMaskedLM, transformers.GPT2LMHeadModel)

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ROWS = 8


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZES)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=64, attention_probs_dropout_prob=0.0, **SIZES)
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(image_size=32, patch_size=8, **SIZES)
    return transformers.ViTForImageClassification(config)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 4))


def of_text() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (ROWS, 24))
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (mlp, lambda: torch.ones(64, 8)),
    "gpt": (GPT, lambda: (torch.zeros(ROWS, LENGTH, dtype=torch.long),)),
    "llama": (llama, of_text),
    "bert": (bert, of_text),
    "gpt2": (gpt2, of_text),
    "vit": (vit, lambda: {"pixel_values": torch.ones(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}),
}


class Saved:
    """A block in which the storages are found that autograd keeps."""

    class _Token:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def __init__(self) -> None:
        self._tokens: list[weakref.ref[Any]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda token: token.tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        token = self._Token(tensor)
        self._tokens.append(weakref.ref(token))
        return token

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*cast("Any", error))

    def beside(self, own: list[torch.Tensor]) -> int:
        """Return the bytes that are kept, but for storages of ``own``."""
        alive = [token.tensor for one in self._tokens if (token := one()) is not None]
        return held([*alive, *own]) - held(own)


class Alive(TorchDispatchMode):
    """A block in which it is counted how much memory is there at once, of what is made in it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        """Return the bytes that are there."""
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        return sum(size for _, size in self._storages.values())


def call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_autograd_keeps(name: str, precision: str) -> None:
    make, make_batch = MODELS[name]
    ctx = af.plan_context(1, mixed_precision=precision)
    model, batch = make(), make_batch()
    model.eval()  # which the plan is not for
    before = {key: one.clone() for key, one in model.state_dict().items()}
    random = torch.get_rng_state()
    budget = af.plan_memory(ctx, model, batch=batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training
    after = model.state_dict()
    assert all(torch.equal(after[key], one) for key, one in before.items())
    model.train()
    with Saved() as saved, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        result = call(model, batch)
    real = saved.beside([*model.parameters(), *model.buffers()])
    assert budget.activations == pytest.approx(real, rel=0.01)
    del result
