"""Which parameters of transformers a parameter of Megatron consists of, and how they are packed. Pure.

A rank has a part of each parameter along tensor parallelism. Megatron keeps queries, keys and values in one
matrix, sorted by group of heads, and both inputs of a gated unit in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from accelfn.parallel.engines.megatron.plan import MegatronPlan
from accelfn.parallel.engines.megatron.shape import ModelShape


class Piece(NamedTuple):
    """A parameter of the user's model.

    Attributes:
        name: Its name there.
        dim: Dimension that is sharded over the ranks; None if each has it whole.
        blocks: Equal blocks along ``dim`` that are sharded separately.
    """

    name: str
    dim: int | None = None
    blocks: int = 1


class Rule(NamedTuple):
    """A parameter of Megatron.

    Attributes:
        name: Its name in a stage.
        pieces: What it consists of.
        form: How they are packed.
    """

    name: str
    pieces: tuple[Piece, ...]
    form: Literal["same", "transposed", "grouped", "fused", "stacked", "padded"] = "same"


class Held(NamedTuple):
    """The parameters of a part of a stage.

    Attributes:
        rules: One for each of them.
        first_layer: Number of its first layer in the model.
    """

    rules: tuple[Rule, ...]
    first_layer: int


def rules_of(plan: MegatronPlan, stage: int, chunk: int) -> Held:
    """Return the rules of a part of a stage. Pure.

    Args:
        plan: The plan.
        stage: The stage.
        chunk: The part of it: parts are spread over the stages in turn.
    """
    order = [(one, rank) for one in range(plan.num_chunks) for rank in range(plan.pp)]
    before = order[: order.index((chunk, stage))]
    first = sum(plan.layers[rank][one] for one, rank in before)
    is_first, is_last = not before, len(before) == len(order) - 1
    shape = plan.shape
    layer_rules = _gpt2_layer if shape.family == "gpt2" else _llama_layer
    rules: list[Rule] = []
    for index in range(plan.layers[stage][chunk]):
        rules += layer_rules(shape, f"decoder.layers.{index}.", first + index)
    ends = _gpt2_ends(shape, plan.pp) if shape.family == "gpt2" else _llama_ends(shape, plan.pp)
    if is_first:
        rules = [*ends[0], *rules]
    if is_last:
        rules += ends[1]
    return Held(tuple(rules), first)


def _norm(name: str, source: str, *, has_bias: bool) -> list[Rule]:
    kinds = ("weight", "bias") if has_bias else ("weight",)
    return [Rule(f"{name}.{kind}", (Piece(f"{source}.{kind}"),)) for kind in kinds]


def _gpt2_layer(shape: ModelShape, name: str, number: int) -> list[Rule]:
    del shape
    source = f"transformer.h.{number}."
    attention, mlp = f"{name}self_attention.", f"{name}mlp."
    # GPT-2's linear layers have transposed weights.
    return [
        *_norm(f"{name}input_layernorm", f"{source}ln_1", has_bias=True),
        Rule(f"{attention}linear_qkv.weight", (Piece(f"{source}attn.c_attn.weight", 1, 3),), "fused"),
        Rule(f"{attention}linear_qkv.bias", (Piece(f"{source}attn.c_attn.bias", 0, 3),), "fused"),
        Rule(f"{attention}linear_proj.weight", (Piece(f"{source}attn.c_proj.weight", 0),), "transposed"),
        Rule(f"{attention}linear_proj.bias", (Piece(f"{source}attn.c_proj.bias"),)),
        *_norm(f"{name}pre_mlp_layernorm", f"{source}ln_2", has_bias=True),
        Rule(f"{mlp}linear_fc1.weight", (Piece(f"{source}mlp.c_fc.weight", 1),), "transposed"),
        Rule(f"{mlp}linear_fc1.bias", (Piece(f"{source}mlp.c_fc.bias", 0),)),
        Rule(f"{mlp}linear_fc2.weight", (Piece(f"{source}mlp.c_proj.weight", 0),), "transposed"),
        Rule(f"{mlp}linear_fc2.bias", (Piece(f"{source}mlp.c_proj.bias"),)),
    ]


def _gpt2_ends(shape: ModelShape, stages: int) -> tuple[list[Rule], list[Rule]]:
    first = [
        Rule("embedding.word_embeddings.weight", (Piece("transformer.wte.weight", 0),), "padded"),
        Rule("embedding.position_embeddings.weight", (Piece("transformer.wpe.weight"),)),
    ]
    return first, [
        *_norm("decoder.final_layernorm", "transformer.ln_f", has_bias=True),
        *_output(shape, stages),
    ]


def _output(shape: ModelShape, stages: int) -> list[Rule]:
    if shape.is_tied and stages == 1:
        return []  # the embedding itself
    return [Rule("output_layer.weight", (Piece("lm_head.weight", 0),), "padded")]


def _llama_layer(shape: ModelShape, name: str, number: int) -> list[Rule]:
    source = f"model.layers.{number}."
    rules = _norm(f"{name}input_layernorm", f"{source}input_layernorm", has_bias=False)
    kinds = ("weight", "bias") if shape.has_bias else ("weight",)
    for kind in kinds:
        parts = tuple(Piece(f"{source}self_attn.{part}_proj.{kind}", 0) for part in "qkv")
        rules.append(Rule(f"{name}self_attention.linear_qkv.{kind}", parts, "grouped"))
        row = 1 if kind == "weight" else None  # each rank adds the whole bias, after the sum
        out = Piece(f"{source}self_attn.o_proj.{kind}", row)
        rules.append(Rule(f"{name}self_attention.linear_proj.{kind}", (out,)))
        gated = tuple(Piece(f"{source}mlp.{part}_proj.{kind}", 0) for part in ("gate", "up"))
        rules.append(Rule(f"{name}mlp.linear_fc1.{kind}", gated, "stacked"))
        rules.append(Rule(f"{name}mlp.linear_fc2.{kind}", (Piece(f"{source}mlp.down_proj.{kind}", row),)))
    return [
        *rules,
        *_norm(f"{name}pre_mlp_layernorm", f"{source}post_attention_layernorm", has_bias=False),
    ]


def _llama_ends(shape: ModelShape, stages: int) -> tuple[list[Rule], list[Rule]]:
    first = [Rule("embedding.word_embeddings.weight", (Piece("model.embed_tokens.weight", 0),), "padded")]
    return first, [*_norm("decoder.final_layernorm", "model.norm", has_bias=False), *_output(shape, stages)]


def shard_piece(piece: Piece, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Return a rank's part of a parameter; the last ranks' may be shorter. Pure.

    >>> shard_piece(Piece("w", 0, 3), torch.arange(12), 2, 1)
    tensor([ 2,  3,  6,  7, 10, 11])
    """
    if piece.dim is None or tp == 1:
        return whole
    parts: list[torch.Tensor] = []
    for block in whole.chunk(piece.blocks, piece.dim):
        size = -(-block.shape[piece.dim] // tp)  # as DTensors are sharded
        start = min(rank * size, block.shape[piece.dim])
        length = min(size, block.shape[piece.dim] - start)
        parts.append(block.narrow(piece.dim, start, length))
    return torch.cat(parts, piece.dim)


def unshard_piece(piece: Piece, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the parts of all ranks: the inverse of :func:`shard_piece`. Pure."""
    if piece.dim is None or len(parts) == 1:
        return parts[0]
    dim = piece.dim
    blocks = zip(*(part.chunk(piece.blocks, dim) for part in parts), strict=True)
    return torch.cat([torch.cat(block, dim) for block in blocks], dim)


def pack(rule: Rule, parts: Sequence[torch.Tensor], shape: ModelShape, tp: int) -> torch.Tensor:
    """Return this rank's parameter of Megatron from its parts of the user's parameters. Pure."""
    first = parts[0]
    if rule.form == "transposed":
        return first.t()
    if rule.form == "stacked":
        return torch.cat(list(parts))
    if rule.form == "padded":
        missing = -(-shape.vocab_size // tp) - first.shape[0]
        return torch.cat((first, first.new_zeros(missing, *first.shape[1:])))
    if rule.form == "fused":
        parts = (first.t() if first.dim() > 1 else first).chunk(3)
    if rule.form in ("fused", "grouped"):
        groups = shape.num_groups // tp
        by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, 1).flatten(0, 1)
    return first


def unpack(rule: Rule, packed: torch.Tensor, shape: ModelShape, tp: int, rank: int) -> list[torch.Tensor]:
    """Return this rank's parts of the user's parameters: the inverse of :func:`pack`. Pure."""
    if rule.form == "transposed":
        return [packed.t()]
    if rule.form == "stacked":
        return list(packed.chunk(2))
    if rule.form == "padded":
        size = -(-shape.vocab_size // tp)
        return [packed[: max(0, min(size, shape.vocab_size - rank * size))]]
    if rule.form in ("fused", "grouped"):
        groups = shape.num_groups // tp
        by_group = packed.reshape(groups, -1, *packed.shape[1:])
        heads = shape.num_heads // shape.num_groups * shape.head_size
        ends = (heads, heads + shape.head_size)  # of a group's queries and keys
        parts = [part.flatten(0, 1) for part in torch.tensor_split(by_group, ends, 1)]
        if rule.form == "grouped":
            return parts
        joined = torch.cat(parts)
        return [joined.t() if joined.dim() > 1 else joined]
    return [packed]
