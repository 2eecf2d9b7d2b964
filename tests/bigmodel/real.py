"""Models of transformers, and a program that loads and runs one of them in little memory.

`python -m tests.bigmodel.real NAME FOLDER` prints a line of JSON: what was generated, and in what memory.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any, cast

import torch
import transformers

import accelfn as af
from accelfn.bigmodel import read_offload

NAMES = ("llama", "t5", "mixtral")
MIB = 1 << 20

_SIZES: dict[str, Any] = {"vocab_size": 8000, "num_attention_heads": 8}
_DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 4, "max_position_embeddings": 256}


def build(name: str, num_layers: int | None = None) -> Any:
    """Build one of them: Llama and Mixtral with an output layer of their own, T5 with tied weights."""
    made: Any = transformers
    if name == "llama":
        sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": num_layers or 12}
        return made.LlamaForCausalLM(made.LlamaConfig(**_DECODER, **sizes, tie_word_embeddings=False)).eval()
    if name == "mixtral":
        sizes = {"hidden_size": 384, "intermediate_size": 768, "num_local_experts": 4}
        sizes |= {"num_hidden_layers": num_layers or 8}
        return made.MixtralForCausalLM(
            made.MixtralConfig(**_DECODER, **sizes, tie_word_embeddings=False)
        ).eval()
    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1536, "num_layers": num_layers or 6, "num_heads": 8}
    config = made.T5Config(vocab_size=8000, **sizes, decoder_start_token_id=0, pad_token_id=0)
    return made.T5ForConditionalGeneration(config).eval()


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


def run(name: str, folder: str) -> dict[str, Any]:
    """Load and run a model within its budgets."""
    # The libraries' own memory: how much of their code the kernel maps at a time isn't always the same.
    tokens_of(af.cpu_offload(build(name, 1), "cpu:0"))
    gc.collect()
    with af.init_empty_weights():
        model = build(name)
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
    print(json.dumps(run(sys.argv[1], sys.argv[2])))
