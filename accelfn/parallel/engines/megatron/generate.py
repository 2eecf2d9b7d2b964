"""Choose the next tokens of sequences, by a model on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelfn.errors import ConfigurationError, NotAvailableError


def generate(
    next_logits: Callable[[torch.Tensor], torch.Tensor],
    agree: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    longest: int,
    max_length: int | None,
    max_new_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    end: int | None,
) -> torch.Tensor:
    """Return sequences with further tokens; see :meth:`MegatronModel.megatron_generate`.

    Args:
        next_logits: Returns the logits after the last token of each row.
        agree: Returns one rank's tensor on all ranks of the model.
        inputs: Prompts, shape (rows, tokens).
        attention_mask: 0 for padding at their ends.
        longest: Tokens in the longest sequence of the model.
        max_length: Tokens in the result.
        max_new_tokens: Tokens after the longest prompt.
        temperature: Divides the logits.
        top_k: Tokens to choose from.
        top_p: Their least total probability.
        end: Token that ends a sequence.

    Raises:
        ConfigurationError: The prompts are padded at their beginning, or the result would be too long; or an
            option isn't in its range.
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
    _check_options(temperature, top_k, top_p)
    samples = temperature is not None or top_k is not None or top_p is not None
    tokens = torch.cat((inputs, inputs.new_full((rows, total - width), 0 if end is None else end)), 1)
    is_done = torch.zeros(rows, dtype=torch.bool, device=inputs.device)
    for position in range(int(lengths.min()), total):
        logits = next_logits(tokens[:, :position]).float()
        chosen = agree(_sample(logits, temperature, top_k, top_p) if samples else logits.argmax(-1))
        is_prompt = position < lengths
        is_free = ~is_prompt & ~is_done
        tokens[is_free, position] = chosen[is_free]
        if end is not None:
            is_done |= is_free & (chosen == end)
            if bool(is_done.all()):
                return tokens[:, : max(position + 1, width)]
    return tokens


def _sample(
    logits: torch.Tensor, temperature: float | None, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    """Draw a token for each row."""
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


def _check_options(temperature: float | None, top_k: int | None, top_p: float | None) -> None:
    for name, value, is_good, bounds in (
        ("temperature", temperature, temperature is None or temperature > 0, "above 0"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
    ):
        if not is_good:
            raise ConfigurationError(f"megatron_generate: {name} must be {bounds}, got {value}.")


def refuse_options(options: dict[str, Any]) -> None:
    """Refuse options of generation that aren't supported.

    Raises:
        NotAvailableError: One is set.
    """
    known = {"num_beams": (None, 1), "length_penalty": (None, 1.0)}
    for name, value in options.items():
        if name not in known or value not in known[name]:
            raise NotAvailableError(
                f"megatron_generate: {name}={value!r} isn't supported. It chooses the most probable token, "
                "or draws one with temperature, top_k and top_p."
            )
