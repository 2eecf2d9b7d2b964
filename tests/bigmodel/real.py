"""Models of transformers, and a program that loads and runs one of them in little memory.

`python -m tests.bigmodel.real FOLDER` prints a line of JSON: what was generated, and in what memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any, cast

import torch

import accelfn as af
from accelfn.bigmodel import read_offload

MIB = 1 << 20

_LLAMA: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def create(kind: str, sizes: dict[str, Any]) -> Any:
    """Build a model of transformers, which is imported for those who need it."""
    model: Any = getattr(importlib.import_module("transformers"), kind)
    return model(model.config_class(**sizes)).eval()


WIDTHS = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 2}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {"vocab_size": 64, "encoder_layers": 2, "decoder_layers": 2, **HEADS, **WIDTHS},
    ),
    # More than ten experts, whose numbers aren't in the order of letters.
    "mixtral": (
        "MixtralForCausalLM",
        {
            "vocab_size": 50,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 11,
        },
    ),
}


def tiny(name: str) -> Any:
    """Build one with a few thousand parameters."""
    return create(*TINY[name])


def build(**sizes: int) -> Any:
    """Build a Llama of some forty million parameters."""
    return create("LlamaForCausalLM", {**_LLAMA, **sizes})


def tokens_of(model: Any) -> list[list[int]]:
    """Let a model generate from a fixed prompt."""
    prompt = torch.arange(3, 17).reshape(2, 7)
    with torch.no_grad():
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
        )
    return cast("list[list[int]]", found.tolist())


def memory(field: str) -> int:
    """Return a field of the kernel's status of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def budgets_of(total: int) -> dict[int | str, int]:
    """Give budgets that put parts of a model on each of two devices, in memory, and on the disk."""
    return {"cpu:0": total // 4, "cpu:1": total // 5, "cpu": total // 4}


def run(folder: str) -> dict[str, Any]:
    """Load and run a Llama within its budgets."""
    # The libraries' own memory: how much of their code the kernel maps at a time isn't always the same.
    tokens_of(af.cpu_offload(build(num_hidden_layers=1), "cpu:0"))
    gc.collect()
    with af.init_empty_weights():
        model = build()
    total = sum(parameter.nbytes for parameter in model.parameters())
    budgets = budgets_of(total)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    af.load_checkpoint_and_dispatch(model, folder, device_map="auto", max_memory=budgets)
    loaded = memory("VmHWM") - before
    tokens = tokens_of(model)
    return {
        "tokens": tokens,
        "places": sorted({str(place) for place in model.hf_device_map.values()}),
        "total": total,
        "budgets": sum(budgets.values()),
        "streamed": sum(facts.bound_bytes for facts in read_offload(model)),
        "peak": max((facts.peak_bytes for facts in read_offload(model)), default=0),
        "loaded": loaded,
        "taken": memory("VmHWM") - before,
        "largest": max(parameter.nbytes for parameter in model.parameters()),
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
