"""Choose the next tokens of sequences."""

from __future__ import annotations

from typing import Any

import torch

from accelfn.errors import ConfigurationError, NotAvailableError


def sequence_length(
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    longest: int,
    max_length: int | None,
    max_new_tokens: int | None,
) -> tuple[torch.Tensor, int]:
    """Return the length of each prompt, and that of the result.

    Raises:
        ConfigurationError: The prompts are padded at their beginning, or the result would be too long.
    """
    rows, width = inputs.shape
    lengths = torch.full((rows,), width, device=inputs.device)
    if attention_mask is not None:
        lengths = attention_mask.sum(1)
        if not bool((attention_mask.cumsum(1)[:, -1] == attention_mask.cumprod(1).sum(1)).all()):
            raise ConfigurationError(
                "megatron_generate: the prompts are padded at their beginning. Pad them at their ends: "
                'tokenizer.padding_side = "right".'
            )
    total = width + max_new_tokens if max_new_tokens is not None else max_length
    if total is None or not width <= total <= longest:
        raise ConfigurationError(
            f"megatron_generate: the result must have {width} to {longest} tokens (the prompts', and the "
            f"model's positions), got {total}. Pass max_new_tokens or max_length."
        )
    return lengths, total


def choose(
    logits: torch.Tensor, temperature: float | None, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """Return the most probable token of each row; or a drawn one, if an option is set."""
    if temperature is None and top_k is None and top_p is None:
        return logits.argmax(-1)
    scores = logits / (temperature or 1.0)
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p is not None:
        ordered, order = scores.sort(descending=True)
        probabilities = ordered.softmax(-1)
        # The first token beyond the bound still counts.
        is_out = probabilities.cumsum(-1) - probabilities >= top_p
        scores = scores.masked_fill(is_out.scatter(1, order, is_out), -torch.inf)
    return torch.multinomial(scores.softmax(-1), 1)[:, 0]


def check_options(
    temperature: float | None, top_k: int | None, top_p: float | None, others: dict[str, Any]
) -> None:
    """Check the options of generation.

    Raises:
        ConfigurationError: One isn't in its range.
        NotAvailableError: One that isn't supported is set.
    """
    for name, value, is_good, bounds in (
        ("temperature", temperature, temperature is None or temperature > 0, "above 0"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
    ):
        if not is_good:
            raise ConfigurationError(f"megatron_generate: {name} must be {bounds}, got {value}.")
    neutral = {"num_beams": (None, 1), "length_penalty": (None, 1.0)}
    for name, value in others.items():
        if value not in neutral.get(name, ()):
            raise NotAvailableError(
                f"megatron_generate: {name}={value!r} isn't supported. It chooses the most probable token, "
                "or draws one with temperature, top_k and top_p."
            )
