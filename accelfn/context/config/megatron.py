"""Options of Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, cast

from accelfn.context.config.checks import (
    check_bools,
    check_callables,
    check_ints,
    check_reals,
    settle,
    settle_options,
    settle_path,
    unchecked,
    where,
    wrong_type,
)
from accelfn.errors import ConfigurationError

__all__ = ("MegatronLMPlugin",)

_CHOICES = (
    ("recompute_granularity", ("full", "selective"), True),
    ("recompute_method", ("uniform", "block"), True),
    ("attention_backend", ("auto", "flash", "fused", "unfused", "local"), False),
    ("weight_decay_incr_style", ("constant", "linear", "cosine"), False),
    ("lr_decay_style", ("constant", "linear", "cosine", "inverse-square-root", "WSD"), False),
)


@dataclass(frozen=True, slots=True)
class MegatronLMPlugin:
    """How Megatron-LM splits and trains a model.

    Attributes:
        tp_degree: Ranks that share each layer. Default 1.
        pp_degree: Pipeline stages. Default 1.
        num_micro_batches: Micro-batches per step. Default 1.
        gradient_clipping: Largest gradient norm, 0 for no clipping; ``None`` is as 0. Default 1.0.
        sequence_parallelism: Whether activations are split along the sequence too. Default False.
        recompute_activations: Whether selective recomputation is on. Default False.
        recompute_granularity: "full", "selective" or ``None`` for no recomputation. Default None.
        recompute_method: "uniform", "block" or ``None``; for full recomputation. Default None.
        recompute_num_layers: Layers in one recomputed unit, at least 1. Default None.
        use_distributed_optimizer: Whether optimizer state is sharded over data-parallel ranks. Default False.
        use_custom_fsdp: Whether Megatron's own FSDP is used. Default False.
        no_load_optim: Whether loading leaves the optimizer out. Default False.
        no_save_optim: Whether saving leaves the optimizer out. Default False.
        eod_mask_loss: Whether the loss leaves out ends of documents. Default False.
        optimizer_cpu_offload: Whether optimizer state rests in host memory. Default False.
        overlap_cpu_optimizer_d2h_h2d: Whether its copies overlap with computation. Default False.
        use_precision_aware_optimizer: Whether optimizer state may have low precision. Default False.
        decoder_last_pipeline_num_layers: Layers of the last stage; ``None`` for an even split. Default None.
        attention_backend: "auto", "flash", "fused", "unfused" or "local"; True is "auto". Default auto.
        expert_model_parallel_size: Ranks that share the experts. Default 1.
        expert_tensor_parallel_size: Ranks that share each expert. Default 1.
        context_parallel_size: Ranks that share each sequence. Default 1.
        attention_dropout: Probability, 0 to 1. Default 0.0.
        hidden_dropout: Probability, 0 to 1. Default 0.0.
        attention_softmax_in_fp32: Whether attention weights are computed in fp32. Default True.
        calculate_per_token_loss: Whether the loss is averaged over tokens, not micro-batches. Default True.
        use_rotary_position_embeddings: Whether positions are rotary. Default True.
        pipeline_model_parallel_split_rank: First stage of the decoder. Default None.
        num_layers_per_virtual_pipeline_stage: Layers in one virtual stage. Default None.
        is_train_batch_min: Whether the smallest of several loaders gives the batch size. Default True.
        train_iters: Iterations of training. Default None.
        train_samples: Samples of training. Default None.
        weight_decay_incr_style: "constant", "linear" or "cosine". Default constant.
        start_weight_decay: Weight decay at the start. Default None.
        end_weight_decay: Weight decay at the end. Default None.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD". Default linear.
        lr_decay_iters: Iterations of decay. Default None.
        lr_decay_samples: Samples of decay. Default None.
        lr_warmup_iters: Iterations of warm-up. Default None.
        lr_warmup_samples: Samples of warm-up. Default None.
        lr_warmup_fraction: Part of the decay that is warm-up, 0 to 1. Default None.
        min_lr: Smallest learning rate. Default 0.0.
        consumed_samples: Samples already used for training, validation and test; filled up with 0 to
            three. Default None.
        no_wd_decay_cond: Called with name and parameter, says whether weight decay is left out. Default None.
        scale_lr_cond: Called with name and parameter, says whether ``lr_mult`` applies. Default None.
        lr_mult: Factor on the learning rate of those. Default 1.0.
        megatron_dataset_flag: Whether datasets are Megatron's own. Default False.
        seq_length: Tokens in a sequence. Default None.
        encoder_seq_length: Tokens in a sequence of the encoder. Default None.
        decoder_seq_length: Tokens in a sequence of the decoder. Default None.
        tensorboard_dir: Directory of Megatron's tensorboard files. Default None.
        set_all_logging_options: Whether Megatron logs all it can. Default False.
        eval_iters: Iterations of one evaluation. Default 100.
        eval_interval: Iterations between two evaluations. Default 1000.
        return_logits: Whether steps return logits beside the loss. Default False.
        custom_train_step_class: Class of the train step instead of the built-in ones. Default None.
        custom_train_step_kwargs: Its arguments. Default None.
        custom_model_provider_function: Builds the model. Default None.
        custom_prepare_model_function: Wraps the model; needs the provider. Default None.
        custom_megatron_datasets_provider_function: Builds the datasets. Default None.
        custom_get_batch_function: Reads a batch. Default None.
        custom_loss_function: Computes the loss. Default None.
        other_megatron_args: Further arguments of Megatron by name; they win over the fields. Default None.
    """

    tp_degree: int = 1
    pp_degree: int = 1
    _: KW_ONLY
    num_micro_batches: int = 1
    gradient_clipping: float | None = 1.0
    sequence_parallelism: bool = False
    recompute_activations: bool = False
    # The peer defaults to full uniform recomputation of single layers, which costs a third of the speed of
    # every run that did not ask for it. None is Megatron's own default.
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    use_distributed_optimizer: bool = False
    use_custom_fsdp: bool = False
    no_load_optim: bool = False
    no_save_optim: bool = False
    eod_mask_loss: bool = False
    optimizer_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    use_precision_aware_optimizer: bool = False
    decoder_last_pipeline_num_layers: int | None = None
    # The peer has True here, which names no backend; it is read as "auto".
    attention_backend: str | bool = "auto"
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    # 1 and not the peer's 2: splitting sequences halves the data-parallel size, so it must be asked for.
    context_parallel_size: int = 1
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    attention_softmax_in_fp32: bool = True
    calculate_per_token_loss: bool = True
    use_rotary_position_embeddings: bool = True
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0.0
    consumed_samples: Iterable[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: type | None = None
    custom_train_step_kwargs: Mapping[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        if self.attention_backend is True:
            settle(self, attention_backend="auto")
        # Sixty fields of few kinds: the kind is read off the annotation, so that none is forgotten.
        kinds = {item.name: str(item.type) for item in fields(self)}
        check_bools(self, *(name for name, kind in kinds.items() if kind == "bool"))
        sizes = [name for name, kind in kinds.items() if kind == "int"]
        check_ints(self, *(name for name in sizes if name != "eval_iters"), minimum=1)
        check_ints(self, "eval_iters", minimum=0)
        optional_sizes = [name for name, kind in kinds.items() if kind == "int | None"]
        warmups = ("lr_warmup_iters", "lr_warmup_samples", "pipeline_model_parallel_split_rank")
        check_ints(self, *(name for name in optional_sizes if name not in warmups), minimum=1, optional=True)
        check_ints(self, *warmups, minimum=0, optional=True)
        check_callables(
            self,
            "custom_train_step_class",
            *(name for name, kind in kinds.items() if kind.startswith("Callable")),
        )
        check_reals(
            self, "gradient_clipping", "start_weight_decay", "end_weight_decay", minimum=0.0, optional=True
        )
        check_reals(self, "min_lr", "lr_mult", minimum=0.0)
        check_reals(self, "attention_dropout", "hidden_dropout", minimum=0.0, maximum=1.0)
        check_reals(self, "lr_warmup_fraction", minimum=0.0, maximum=1.0, optional=True)
        settle_options(self, "custom_train_step_kwargs", "other_megatron_args", optional=True)
        settle_path(self, "tensorboard_dir")
        self._check_choices()
        self._settle_consumed()
        if self.custom_prepare_model_function is not None and self.custom_model_provider_function is None:
            raise ConfigurationError(
                f"{where(self, 'custom_prepare_model_function')} wraps what custom_model_provider_function "
                "builds, got None for the latter. Pass both."
            )

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold one copy of the model: tensor times pipeline times context."""
        return self.tp_degree * self.pp_degree * self.context_parallel_size

    def _check_choices(self) -> None:
        for name, words, optional in _CHOICES:
            value = getattr(self, name)
            if value is None and optional:
                continue
            if value not in words:
                raise ConfigurationError(
                    f"{where(self, name)} does not know {value!r}. Use one of {', '.join(words)}"
                    + (" or None." if optional else ".")
                )

    def _settle_consumed(self) -> None:
        consumed = unchecked(self, "consumed_samples")
        if consumed is None:
            return
        counts = tuple(cast("Iterable[object]", consumed)) if isinstance(consumed, Iterable) else ()
        if not (1 <= len(counts) <= 3 and all(type(count) is int and count >= 0 for count in counts)):
            raise wrong_type(self, "consumed_samples", "a list of one to three counts, or None")
        settle(self, consumed_samples=counts + (0,) * (3 - len(counts)))
