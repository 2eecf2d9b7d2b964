"""How Megatron-LM splits a model over ranks and trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any

from accelfn.config.checks import POSITIVE, in_range, settle, settle_fields, where
from accelfn.errors import ConfigurationError

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "recompute_granularity": ("full", "selective"),
        "recompute_method": ("uniform", "block"),
        "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
        "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root"),
        "weight_decay_incr_style": ("constant", "linear", "cosine"),
    }
)


@dataclass(frozen=True, slots=True)
class MegatronLMPlugin:
    """How Megatron-LM splits a model over ranks and trains it; carried out by megatron-core.

    Every rank that isn't along tensor, pipeline or context parallelism is a replica with its own samples.

    Attributes:
        tp_degree: Ranks that share each layer. Default 1.
        pp_degree: Pipeline stages. Default 1.
        num_micro_batches: Microbatches in one batch of a replica: the loader's ``batch_size`` is the size of
            one, and a prepared loader returns this many together. Default 1.
        gradient_clipping: Bound on the gradient's norm where the step passes none; 0 for no clipping. Default
            1.0.
        sequence_parallelism: Whether activations between layers are sharded along the sequence, over the
            ranks along tensor parallelism. Default False.
        recompute_activations: Whether the backward pass recomputes activations, those of attention alone
            unless ``recompute_granularity`` is set. Default False.
        use_distributed_optimizer: Whether replicas shard the optimizer's state. Default False.
        pipeline_model_parallel_split_rank: First stage of a decoder; megatron-core has it no more. Default
            None.
        num_layers_per_virtual_pipeline_stage: Layers in one of several stages per rank, for the interleaved
            schedule. Default None.
        is_train_batch_min: Whether the smallest of several loaders gives the batch size. Default True.
        train_iters: Steps of the training. Default None.
        train_samples: Samples of the training, instead of steps. Default None.
        weight_decay_incr_style: How the weight decay changes: constant, linear or cosine. Default constant.
        start_weight_decay: First weight decay; None for the optimizer's. Default None.
        end_weight_decay: Last weight decay; None for the optimizer's. Default None.
        lr_decay_style: How the learning rate falls: constant, linear, cosine or inverse-square-root. Default
            linear.
        lr_decay_iters: Steps until it has fallen; None for ``train_iters``. Default None.
        lr_decay_samples: Samples until it has fallen; None for ``train_samples``. Default None.
        lr_warmup_iters: Steps in which it rises. Default None.
        lr_warmup_samples: Samples in which it rises. Default None.
        lr_warmup_fraction: Fraction of the steps until it has fallen in which it rises. Default None.
        min_lr: Lowest learning rate. Default 0.
        consumed_samples: Samples already used for training, evaluation and test, for Megatron's own
            datasets. Default None.
        no_wd_decay_cond: ``cond(name, parameter)`` returns whether a parameter has no weight decay. Default
            None.
        scale_lr_cond: ``cond(name, parameter)`` returns whether its learning rate is multiplied by
            ``lr_mult``. Default None.
        lr_mult: The factor for ``scale_lr_cond``. Default 1.0.
        megatron_dataset_flag: Whether :class:`accelfn.engines.MegatronLMDummyDataLoader` is prepared, for
            Megatron's own datasets. Default False.
        seq_length: Length of the sequences, which the model must take. Default None.
        encoder_seq_length: Length of an encoder's sequences. Default None.
        decoder_seq_length: Length of a decoder's sequences. Default None.
        tensorboard_dir: Of Megatron's own training loop, as the next three. Default None.
        set_all_logging_options: Default False.
        eval_iters: Batches of an evaluation, for the size of Megatron's own datasets. Default 100.
        eval_interval: Steps between evaluations, likewise. Default 1000.
        return_logits: Whether a call with labels returns the logits too. Default False.
        custom_train_step_class: A subclass of :class:`accelfn.engines.AbstractTrainStep`, for
            ``model(**batch)``. Default None.
        custom_train_step_kwargs: Its keyword arguments. Default None.
        custom_model_provider_function: ``provider(pre_process=..., post_process=...)`` returns a stage as a
            module of Megatron, which trains in place of the passed model. With
            ``num_layers_per_virtual_pipeline_stage`` it takes ``vp_stage`` too. Needed to train. Default
            None.
        custom_prepare_model_function: Called with the provider, returns the list of this rank's stages.
            Default None.
        custom_megatron_datasets_provider_function: Called with the numbers of samples for training,
            evaluation and test, returns the three datasets. Default None.
        custom_get_batch_function: Instead of the step's ``get_batch``. Default None.
        custom_loss_function: Instead of the step's loss. Default None.
        other_megatron_args: Further fields that the stage's ``TransformerConfig`` must have, as it must agree
            with the fields here that are about layers. Default None.
        use_custom_fsdp: Whether Megatron's own FSDP is used. Default False.
        no_load_optim: Whether the optimizer isn't loaded. Default False.
        no_save_optim: Whether the optimizer isn't saved. Default False.
        eod_mask_loss: Whether the loss ignores ends of documents, in Megatron's own datasets. Default False.
        optimizer_cpu_offload: Whether the optimizer runs on the CPU. Default False.
        overlap_cpu_optimizer_d2h_h2d: Whether its copies overlap with the step. Default False.
        use_precision_aware_optimizer: Whether the optimizer's state has fewer bits. Default False.
        decoder_last_pipeline_num_layers: Layers in the last stage; None for an equal number. Default None.
        recompute_granularity: "full" layers or "selective": their attention. Default None: "selective" with
            ``recompute_activations``.
        recompute_method: With "full": "uniform" recomputes all layers, "block" the first of each stage.
            Default None.
        recompute_num_layers: Layers in a recomputed unit, or number of them in each stage. Default None: 1.
        attention_backend: "auto" or True, "flash", "fused", "unfused" or "local". Default auto.
        expert_model_parallel_size: Ranks that share the experts of a layer. Default 1.
        context_parallel_size: Ranks that share a sequence. Default 1.
        attention_dropout: Dropout rate of attention; None for any. Default None.
        hidden_dropout: Dropout rate of hidden states; None for any. Default None.
        attention_softmax_in_fp32: False if the softmax of attention must not be computed in float32. Default
            True.
        expert_tensor_parallel_size: Ranks that share each expert. Default 1.
        calculate_per_token_loss: Whether ``model(**batch)`` averages over all tokens of the batch, and not
            over the means of its microbatches. Default True.
        use_rotary_position_embeddings: None for what the model has; anything else must agree. Default None.
    """

    tp_degree: int = field(default=1, metadata=POSITIVE)
    pp_degree: int = field(default=1, metadata=POSITIVE)
    num_micro_batches: int = field(default=1, metadata=POSITIVE)
    gradient_clipping: float = 1.0
    sequence_parallelism: bool = False
    recompute_activations: bool = False
    use_distributed_optimizer: bool = False
    _: KW_ONLY
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = field(default=None, metadata=POSITIVE)
    is_train_batch_min: bool = True
    train_iters: int | None = field(default=None, metadata=POSITIVE)
    train_samples: int | None = field(default=None, metadata=POSITIVE)
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = field(default=None, metadata=POSITIVE)
    lr_decay_samples: int | None = field(default=None, metadata=POSITIVE)
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = field(default=None, metadata=in_range(0, 1))
    min_lr: float = 0.0
    consumed_samples: Sequence[int] | None = None
    no_wd_decay_cond: Callable[[str, Any], bool] | None = None
    scale_lr_cond: Callable[[str, Any], bool] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = field(default=None, metadata=POSITIVE)
    encoder_seq_length: int | None = field(default=None, metadata=POSITIVE)
    decoder_seq_length: int | None = field(default=None, metadata=POSITIVE)
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = field(default=1000, metadata=POSITIVE)
    return_logits: bool = False
    custom_train_step_class: type | None = None
    custom_train_step_kwargs: Mapping[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: Mapping[str, Any] | None = None
    use_custom_fsdp: bool = False
    no_load_optim: bool = False
    no_save_optim: bool = False
    eod_mask_loss: bool = False
    optimizer_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    use_precision_aware_optimizer: bool = False
    decoder_last_pipeline_num_layers: int | None = field(default=None, metadata=POSITIVE)
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = field(default=None, metadata=POSITIVE)
    attention_backend: str | bool = "auto"
    expert_model_parallel_size: int = field(default=1, metadata=POSITIVE)
    context_parallel_size: int = field(default=1, metadata=POSITIVE)
    attention_dropout: float | None = field(default=None, metadata=in_range(0, 1))
    hidden_dropout: float | None = field(default=None, metadata=in_range(0, 1))
    attention_softmax_in_fp32: bool = True
    expert_tensor_parallel_size: int = field(default=1, metadata=POSITIVE)
    calculate_per_token_loss: bool = True
    use_rotary_position_embeddings: bool | None = None

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        if str(self.attention_backend).strip().lower() == "true":  # as Accelerate's default is spelled
            settle(self, attention_backend="auto")
        settle_fields(self)
        for name, words in _CHOICES.items():
            value: object = getattr(self, name)
            word = None if value is None else str(value).strip().lower()
            if word not in (None, *words):
                raise ConfigurationError(
                    f"{where(self, name)} must be one of {', '.join(words)}, got {value!r}."
                )
            settle(self, **{name: word})
        self._settle_samples()
        self._settle_recompute()
        self._check_pairs()

    def _settle_samples(self) -> None:
        if self.consumed_samples is None:
            return
        given = (self.consumed_samples,) if isinstance(self.consumed_samples, int) else self.consumed_samples
        samples = (*given, 0, 0)[: max(3, len(given))]
        if len(samples) != 3 or not all(type(one) is int and one >= 0 for one in samples):
            raise ConfigurationError(
                f"{where(self, 'consumed_samples')} takes at most three numbers of samples, of training, "
                f"evaluation and test, got {self.consumed_samples!r}."
            )
        settle(self, consumed_samples=samples)

    def _settle_recompute(self) -> None:
        if self.recompute_activations and self.recompute_granularity is None:
            settle(self, recompute_granularity="selective")
        if self.recompute_granularity == "full":
            settle(
                self,
                recompute_method=self.recompute_method or "uniform",
                recompute_num_layers=self.recompute_num_layers or 1,
            )
            return
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(self, name) is not None:
                raise ConfigurationError(
                    f'{where(self, name)} belongs to recompute_granularity="full", got '
                    f"{getattr(self, name)!r} with recompute_granularity={self.recompute_granularity!r}. Set "
                    "that, or leave it out."
                )

    def _check_pairs(self) -> None:
        for one, other in (
            ("train_iters", "train_samples"),
            ("lr_decay_iters", "lr_decay_samples"),
            ("lr_warmup_iters", "lr_warmup_samples"),
            ("lr_warmup_iters", "lr_warmup_fraction"),
            ("lr_warmup_samples", "lr_warmup_fraction"),
        ):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ConfigurationError(
                    f"{where(self, one)} and {other} exclude each other, got {getattr(self, one)} and "
                    f"{getattr(self, other)}. Pass one of the two."
                )
        if self.custom_prepare_model_function is not None and self.custom_model_provider_function is None:
            raise ConfigurationError(
                f"{where(self, 'custom_prepare_model_function')} is called with the provider: pass "
                "custom_model_provider_function too."
            )
        if self.scale_lr_cond is None and self.lr_mult != 1.0:
            raise ConfigurationError(
                f"{where(self, 'lr_mult')} is the factor of the parameters that scale_lr_cond selects, got "
                f"{self.lr_mult} without it. Pass scale_lr_cond, or leave lr_mult out."
            )
