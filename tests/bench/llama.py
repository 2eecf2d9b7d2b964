"""A Llama of any size."""

import importlib
from typing import Any


def llama(width: int, inner: int, layers: int, heads: int, vocabulary: int, **options: Any) -> Any:
    """Return transformers' model, on torch's current device."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        **options,
    )
    return transformers.LlamaForCausalLM(config)
