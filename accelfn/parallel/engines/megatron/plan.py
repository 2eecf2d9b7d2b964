"""Plan how Megatron-LM trains a model: pure, printable, and where everything that doesn't fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from accelfn.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.facts import table_text

# Megatron's optimizer, by the class that it stands for.
_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {"Adam": "adam", "AdamW": "adam", "FusedAdam": "adam", "SGD": "sgd", "FusedSGD": "sgd"}
)


class MegatronPlan(NamedTuple):
    """How Megatron-LM trains a model.

    Attributes:
        tp: Ranks along tensor parallelism, which hold neighbouring parts of each layer.
        pp: Stages, each on ranks of its own.
        dp: Replicas, each with its own samples.
        num_chunks: Parts of the model on each rank.
        num_micro_batches: Microbatches in one batch of a replica.
        optimizer: "adam" or "sgd"; None without an optimizer.
        shards_state: Whether replicas shard the optimizer's state.
        precision: "no", "fp16" or "bf16".
        max_norm: Bound on the gradient's norm where the step passes none; 0 for none.
    """

    tp: int
    pp: int
    dp: int
    num_chunks: int
    num_micro_batches: int
    optimizer: str | None
    shards_state: bool
    precision: str
    max_norm: float

    @property
    def schedule(self) -> str:
        """Name of the order of forward and backward passes."""
        if self.pp == 1:
            return "none"
        return "1f1b" if self.num_chunks == 1 else "interleaved1f1b"

    @property
    def layout(self) -> str:
        """The ranks along each axis."""
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}"

    def rows(self) -> dict[str, str]:
        """Return the plan as lines of text, by what each is about."""
        return {
            "engine": "Megatron-LM",
            "ranks": self.layout,
            "schedule": f"{self.schedule}, {self.num_micro_batches} microbatches",
            "optimizer": (self.optimizer or "none") + ", sharded over replicas" * self.shards_state,
            "precision": {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}[self.precision],
            "clipping": f"at norm {self.max_norm:g}" if self.max_norm else "only where the step asks for it",
        }

    def __str__(self) -> str:
        """Return the rows as a table."""
        return table_text(self.rows())


def plan_megatron(
    plugin: MegatronLMPlugin,
    size: int,
    *,
    precision: str = "no",
    optimizer: str | None = None,
    accumulation: int = 1,
    num_layers: int | None = None,
) -> MegatronPlan:
    """Plan how Megatron-LM trains a model. Pure.

    Args:
        plugin: The options.
        size: Number of ranks.
        precision: "no", "fp16" or "bf16".
        optimizer: Class name of the optimizer; None without one.
        accumulation: Length of the context's accumulation windows.
        num_layers: Of the model, for ``num_layers_per_virtual_pipeline_stage``.

    Raises:
        ConfigurationError: Sizes don't divide what they must, or two options contradict each other.
        NotAvailableError: An option that isn't supported.

    >>> print(plan_megatron(MegatronLMPlugin(2, 2, 4), 8, optimizer="AdamW"))
    engine     Megatron-LM
    ranks      tp 2 x pp 2 x dp 2
    schedule   1f1b, 4 microbatches
    optimizer  adam
    precision  float32
    clipping   at norm 1
    """
    defaults = MegatronLMPlugin()
    for name, why in _UNAVAILABLE.items():
        value = getattr(plugin, name)
        if value != getattr(defaults, name) and value not in ("unfused", "local"):
            raise NotAvailableError(f"Megatron-LM: {name}={value!r} {why}.")
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
    if optimizer is not None and optimizer not in _OPTIMIZERS:
        raise NotAvailableError(
            f"Megatron-LM has two optimizers, Adam and SGD, and would replace the {optimizer} by one of "
            f"them. Pass one of {', '.join(_OPTIMIZERS)}."
        )
    return MegatronPlan(
        tp=tp,
        pp=pp,
        dp=size // (tp * pp),
        num_chunks=_count_chunks(plugin, num_layers),
        num_micro_batches=plugin.num_micro_batches,
        optimizer=None if optimizer is None else _OPTIMIZERS[optimizer],
        shards_state=plugin.use_distributed_optimizer,
        precision=precision,
        max_norm=plugin.gradient_clipping,
    )


def _count_chunks(plugin: MegatronLMPlugin, num_layers: int | None) -> int:
    pp, part = plugin.pp_degree, plugin.num_layers_per_virtual_pipeline_stage
    last = plugin.decoder_last_pipeline_num_layers
    for name, value in (
        ("num_layers_per_virtual_pipeline_stage", part),
        ("decoder_last_pipeline_num_layers", last),
    ):
        if value is not None and pp == 1:
            raise ConfigurationError(f"Megatron-LM: {name}={value} needs a pipeline: set pp_degree above 1.")
    if part is None:
        return 1
    if last is not None:
        raise ConfigurationError(
            "Megatron-LM: num_layers_per_virtual_pipeline_stage and decoder_last_pipeline_num_layers exclude "
            "each other. Pass one of the two."
        )
    if num_layers is None or num_layers % (pp * part):
        raise ConfigurationError(
            f"Megatron-LM: num_layers_per_virtual_pipeline_stage={part} x pp_degree={pp} must divide the "
            f"number of layers, and the passed model's config has num_hidden_layers={num_layers}."
        )
    if plugin.num_micro_batches % pp:
        raise ConfigurationError(
            f"Megatron-LM: the interleaved schedule (num_layers_per_virtual_pipeline_stage) needs a multiple "
            f"of pp_degree={pp} microbatches, got num_micro_batches={plugin.num_micro_batches}."
        )
    return num_layers // (pp * part)


_ONLY_DECODERS = "is of models with an encoder and a decoder, which aren't supported. Use seq_length"
_IN_YOUR_LOOP = "accelfn runs no training loop of Megatron: use your own, and log_with for trackers"
_NEEDS_TE = "needs TransformerEngine, whose layers and optimizers accelfn doesn't build"
_NO_OFFLOAD = "isn't supported. Use use_distributed_optimizer"
# Options that aren't carried out, unless they have their defaults.
_UNAVAILABLE: Mapping[str, str] = MappingProxyType(
    {
        "context_parallel_size": (
            f"{_NEEDS_TE}. Ring attention without Megatron-LM is ParallelismConfig(cp_size=...)"
        ),
        "expert_model_parallel_size": (
            "needs a model with experts. Without Megatron-LM they are ParallelismConfig(ep_size=...)"
        ),
        "expert_tensor_parallel_size": "needs a model with experts",
        "pipeline_model_parallel_split_rank": "is no longer in megatron-core",
        "use_custom_fsdp": (
            "isn't supported. Use fsdp_plugin without Megatron-LM, or use_distributed_optimizer"
        ),
        "attention_backend": _NEEDS_TE,
        "use_precision_aware_optimizer": _NEEDS_TE,
        "optimizer_cpu_offload": _NO_OFFLOAD,
        "overlap_cpu_optimizer_d2h_h2d": _NO_OFFLOAD,
        "no_load_optim": "isn't used: leave the optimizer out of load_state's tree",
        "no_save_optim": "isn't used: leave the optimizer out of save_state's tree",
        "eod_mask_loss": "isn't used: set it in the GPTDatasetConfig of your datasets' provider",
        "encoder_seq_length": _ONLY_DECODERS,
        "decoder_seq_length": _ONLY_DECODERS,
        "tensorboard_dir": _IN_YOUR_LOOP,
        "set_all_logging_options": _IN_YOUR_LOOP,
    }
)
