"""Plan how Megatron-LM trains a model: pure, printable, and where everything that doesn't fit is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from accelfn.context.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.engines.megatron.shape import ModelShape


class MegatronPlan(NamedTuple):
    """How Megatron-LM trains a model.

    Attributes:
        shape: The model's sizes.
        tp: Ranks along tensor parallelism, which hold neighbouring parts of each layer.
        pp: Stages, each on ranks of its own.
        dp: Replicas, each with its own samples.
        layers: Number of layers in each part of the model, by stage and part of the stage.
        num_micro_batches: Microbatches in one batch of a replica.
        recompute: Fields of megatron-core's configuration; empty for no recomputation.
        optimizer: "adam" or "sgd"; None without an optimizer.
        shards_state: Whether replicas shard the optimizer's state.
        precision: "no", "fp16" or "bf16".
        max_norm: Bound on the gradient's norm where the step passes none; 0 for none.
        attention_dropout: Dropout rate of attention.
        hidden_dropout: Dropout rate of hidden states and of the embedding.
    """

    shape: ModelShape
    tp: int
    pp: int
    dp: int
    layers: tuple[tuple[int, ...], ...]
    num_micro_batches: int
    recompute: Mapping[str, Any]
    optimizer: str | None
    shards_state: bool
    precision: str
    max_norm: float
    attention_dropout: float
    hidden_dropout: float

    @property
    def schedule(self) -> str:
        """Name of the order of forward and backward passes."""
        if self.pp == 1:
            return "none"
        return "1f1b" if len(self.layers[0]) == 1 else "interleaved1f1b"

    @property
    def num_chunks(self) -> int:
        """Parts of the model on each rank."""
        return len(self.layers[0])

    def rows(self) -> dict[str, str]:
        """Return the plan as lines of text, by what each is about."""
        shape = self.shape
        layers = "set by the provider"
        if shape.family != "custom":
            layers = " | ".join("+".join(map(str, stage)) for stage in self.layers)
        recompute = "nothing"
        if self.recompute:
            recompute = " ".join(str(value) for value in self.recompute.values())
        return {
            "engine": "Megatron-LM",
            "model": shape.family,
            "ranks": f"tp {self.tp} x pp {self.pp} x dp {self.dp}",
            "layers": layers,
            "schedule": f"{self.schedule}, {self.num_micro_batches} microbatches",
            "recompute": recompute,
            "optimizer": (self.optimizer or "none") + ", sharded over replicas" * self.shards_state,
            "precision": {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}[self.precision],
            "dropout": f"attention {self.attention_dropout:g}, hidden {self.hidden_dropout:g}",
            "clipping": f"at norm {self.max_norm:g}" if self.max_norm else "only where the step asks for it",
        }

    def __str__(self) -> str:
        """Return the rows as a table."""
        rows = self.rows()
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


def plan_megatron(
    plugin: MegatronLMPlugin,
    shape: ModelShape,
    size: int,
    *,
    precision: str = "no",
    optimizer: str | None = None,
    accumulation: int = 1,
) -> MegatronPlan:
    """Plan how Megatron-LM trains a model. Pure.

    Args:
        plugin: The options.
        shape: From :func:`read_shape`.
        size: Number of ranks.
        precision: "no", "fp16" or "bf16".
        optimizer: Class name of the optimizer; None without one.
        accumulation: Length of the context's accumulation windows.

    Raises:
        ConfigurationError: Sizes don't divide what they must, or two options contradict each other.
        NotAvailableError: An option that isn't supported.

    >>> print(plan_megatron(MegatronLMPlugin(2, 2, 4), ModelShape("custom"), 8, optimizer="AdamW"))
    engine     Megatron-LM
    model      custom
    ranks      tp 2 x pp 2 x dp 2
    layers     set by the provider
    schedule   1f1b, 4 microbatches
    recompute  nothing
    optimizer  adam
    precision  float32
    dropout    attention 0, hidden 0
    clipping   at norm 1
    """
    _refuse_unavailable(plugin)
    if precision not in ("no", "fp16", "bf16"):
        raise NotAvailableError(
            f"Megatron-LM: mixed_precision={precision!r} needs TransformerEngine's layers, which accelfn "
            'doesn\'t build. Use "bf16", "fp16" or "no".'
        )
    tp, pp = plugin.tp_degree, plugin.pp_degree
    if size % (tp * pp):
        raise ConfigurationError(
            f"Megatron-LM: tp_degree x pp_degree = {tp} x {pp} = {tp * pp} must divide the number of ranks, "
            f"which is {size}. Start a multiple of {tp * pp} processes, or change the degrees."
        )
    if accumulation > 1 and plugin.num_micro_batches > 1:
        raise ConfigurationError(
            f"Megatron-LM: gradient_accumulation_steps={accumulation} and num_micro_batches="
            f"{plugin.num_micro_batches} both accumulate gradients. Use num_micro_batches="
            f"{accumulation * plugin.num_micro_batches} alone."
        )
    if plugin.use_distributed_optimizer and optimizer in ("Adam", "SGD", "FusedSGD"):
        raise NotAvailableError(
            f"Megatron-LM: use_distributed_optimizer shards the state of AdamW alone, got {optimizer}. Pass "
            "AdamW, or leave it out."
        )
    layers = _split_layers(plugin, shape)
    _check_shape(plugin, shape)
    if len(layers[0]) > 1 and plugin.num_micro_batches % pp:
        raise ConfigurationError(
            f"Megatron-LM: the interleaved schedule (num_layers_per_virtual_pipeline_stage) needs a multiple "
            f"of pp_degree={pp} microbatches, got num_micro_batches={plugin.num_micro_batches}."
        )
    attention, hidden, embedding = shape.dropouts
    if plugin.hidden_dropout is None and hidden != embedding:
        raise ConfigurationError(
            f"Megatron-LM has one dropout rate for hidden states and the embedding, and the model has "
            f"{hidden} and {embedding}. Set hidden_dropout."
        )
    recompute = {}
    if plugin.recompute_granularity is not None:
        recompute = {
            name: getattr(plugin, name)
            for name in ("recompute_granularity", "recompute_method", "recompute_num_layers")
            if getattr(plugin, name) is not None
        }
    return MegatronPlan(
        shape=shape,
        tp=tp,
        pp=pp,
        dp=size // (tp * pp),
        layers=layers,
        num_micro_batches=plugin.num_micro_batches,
        recompute=MappingProxyType(recompute),
        optimizer=None if optimizer is None else optimizer_kind(optimizer),
        shards_state=plugin.use_distributed_optimizer,
        precision=precision,
        max_norm=plugin.gradient_clipping,
        attention_dropout=attention if plugin.attention_dropout is None else plugin.attention_dropout,
        hidden_dropout=hidden if plugin.hidden_dropout is None else plugin.hidden_dropout,
    )


def optimizer_kind(name: str) -> str:
    """Return "adam" or "sgd" for the class name of an optimizer.

    Raises:
        NotAvailableError: It is another one.

    >>> optimizer_kind("AdamW")
    'adam'
    """
    kinds = {"Adam": "adam", "AdamW": "adam", "FusedAdam": "adam", "SGD": "sgd", "FusedSGD": "sgd"}
    if name not in kinds:
        raise NotAvailableError(
            f"Megatron-LM has two optimizers, Adam and SGD, and would replace the {name} by one of them. "
            f"Pass one of {', '.join(kinds)}."
        )
    return kinds[name]


def _split_layers(plugin: MegatronLMPlugin, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    pp, total = plugin.pp_degree, shape.num_layers
    part, last = plugin.num_layers_per_virtual_pipeline_stage, plugin.decoder_last_pipeline_num_layers
    for name, value in (
        ("num_layers_per_virtual_pipeline_stage", part),
        ("decoder_last_pipeline_num_layers", last),
    ):
        if value is not None and pp == 1:
            raise ConfigurationError(f"Megatron-LM: {name}={value} needs a pipeline: set pp_degree above 1.")
        if value is not None and shape.family == "custom":
            raise ConfigurationError(
                f"Megatron-LM: {name}={value}, but custom_model_provider_function splits the layers. Leave "
                "it out."
            )
    if shape.family == "custom":
        return ((0,),) * pp
    if part is not None and last is not None:
        raise ConfigurationError(
            "Megatron-LM: num_layers_per_virtual_pipeline_stage and decoder_last_pipeline_num_layers exclude "
            "each other. Pass one of the two."
        )
    if last is not None:
        rest, remainder = divmod(total - last, pp - 1)
        if rest < 1 or remainder:
            raise ConfigurationError(
                f"Megatron-LM: decoder_last_pipeline_num_layers={last} leaves {total - last} of {total} "
                f"layers for the other {pp - 1} stages, which must have equally many, at least one."
            )
        return ((rest,),) * (pp - 1) + ((last,),)
    each, remainder = divmod(total, pp)
    if remainder:
        raise ConfigurationError(
            f"Megatron-LM: {total} layers can't be split into pp_degree={pp} equal stages. Use one of "
            f"{_divisors(total)} stages, or set decoder_last_pipeline_num_layers."
        )
    if part is None:
        return ((each,),) * pp
    if each % part:
        raise ConfigurationError(
            f"Megatron-LM: num_layers_per_virtual_pipeline_stage={part} must divide the {each} layers of "
            f"each of {pp} stages. Use one of {_divisors(each)}."
        )
    # A single part per rank is the plain schedule.
    return ((part,) * (each // part),) * pp


def _check_shape(plugin: MegatronLMPlugin, shape: ModelShape) -> None:
    if shape.family == "custom":
        return
    tp = plugin.tp_degree
    for what, number in (
        ("heads", shape.num_heads),
        ("heads of keys and values", shape.num_groups),
        ("units of the feed-forward layers", shape.ffn_size),
    ):
        if number % tp:
            raise ConfigurationError(
                f"Megatron-LM: tp_degree={tp} must divide the model's {number} {what}. Use one of "
                f"{_divisors(math.gcd(shape.num_heads, shape.num_groups, shape.ffn_size))}."
            )
    rotary = plugin.use_rotary_position_embeddings
    if rotary is not None and rotary != (shape.rope_base is not None):
        raise ConfigurationError(
            f"Megatron-LM: use_rotary_position_embeddings={rotary}, but the {shape.family} model has "
            f"{'learned' if rotary else 'rotary'} positions, and so its weights. Leave it out."
        )
    if plugin.seq_length is not None and plugin.seq_length > shape.max_length:
        raise ConfigurationError(
            f"Megatron-LM: seq_length={plugin.seq_length} is above the model's {shape.max_length} positions."
        )


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)


_ONLY_DECODERS = "is of models with an encoder and a decoder, which aren't supported. Use seq_length"
_IN_YOUR_LOOP = "accelfn runs no training loop of Megatron: use your own, and log_with for trackers"
_NEEDS_TE = "needs TransformerEngine, whose layers and optimizers accelfn doesn't build"


def _refuse_unavailable(plugin: MegatronLMPlugin) -> None:
    has_provider = plugin.custom_model_provider_function is not None
    for name, is_asked, why in (
        (
            "sequence_parallelism",
            plugin.sequence_parallelism and not has_provider,
            "needs a norm of TransformerEngine or Apex, and the model is built with torch's",
        ),
        (
            "context_parallel_size",
            plugin.context_parallel_size > 1,
            f"{_NEEDS_TE}. Ring attention without Megatron-LM is ParallelismConfig(cp_size=...)",
        ),
        (
            "expert_model_parallel_size",
            plugin.expert_model_parallel_size > 1,
            "needs a model with experts. Without Megatron-LM they are ParallelismConfig(ep_size=...)",
        ),
        ("expert_tensor_parallel_size", plugin.expert_tensor_parallel_size > 1, "needs a model with experts"),
        (
            "pipeline_model_parallel_split_rank",
            plugin.pipeline_model_parallel_split_rank is not None,
            "is no longer in megatron-core",
        ),
        (
            "use_custom_fsdp",
            plugin.use_custom_fsdp,
            "isn't supported. Use fsdp_plugin without Megatron-LM, or use_distributed_optimizer",
        ),
        ("attention_backend", plugin.attention_backend in ("flash", "fused"), _NEEDS_TE),
        ("use_precision_aware_optimizer", plugin.use_precision_aware_optimizer, _NEEDS_TE),
        (
            "optimizer_cpu_offload",
            plugin.optimizer_cpu_offload or plugin.overlap_cpu_optimizer_d2h_h2d,
            "isn't supported. Use use_distributed_optimizer",
        ),
        ("no_load_optim", plugin.no_load_optim, "isn't used: leave the optimizer out of load_state's tree"),
        ("no_save_optim", plugin.no_save_optim, "isn't used: leave the optimizer out of save_state's tree"),
        (
            "eod_mask_loss",
            plugin.eod_mask_loss,
            "isn't used: set it in the GPTDatasetConfig of your datasets' provider",
        ),
        ("encoder_seq_length", plugin.encoder_seq_length is not None, _ONLY_DECODERS),
        ("decoder_seq_length", plugin.decoder_seq_length is not None, _ONLY_DECODERS),
        ("tensorboard_dir", plugin.tensorboard_dir is not None, _IN_YOUR_LOOP),
        ("set_all_logging_options", plugin.set_all_logging_options, _IN_YOUR_LOOP),
    ):
        if is_asked:
            raise NotAvailableError(f"Megatron-LM: {name}={getattr(plugin, name)!r} {why}.")
