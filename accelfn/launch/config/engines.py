"""Sections of the configuration for the engines that cut a model: FSDP, DeepSpeed, Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass, field

from accelfn.launch.config.kinds import BOOL, COUNT, FILE, NAMES, SIZE, TEXT, choice, integer, real
from accelfn.launch.config.option import accelerate_names, option, plain_names

__all__ = ("DeepSpeedSection", "FsdpSection", "MegatronSection")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSection:
    """FSDP: parameters cut over the processes. Read where ``use_fsdp`` is true."""

    version: int = field(
        default=1,
        metadata=option(
            integer(1, 2),
            "1 or 2; accelfn carries both out by torch's fully_shard",
            exports=plain_names("FSDP_VERSION"),
        ),
    )
    offload_params: bool = field(
        default=False,
        metadata=option(BOOL, "keep parameters in host memory", exports=plain_names("FSDP_OFFLOAD_PARAMS")),
    )
    min_num_params: int = field(
        default=100_000_000,
        metadata=option(
            SIZE,
            "wrap modules of at least so many parameters, with SIZE_BASED_WRAP",
            exports=plain_names("FSDP_MIN_NUM_PARAMS"),
        ),
    )
    sharding_strategy: str = field(
        default="FULL_SHARD",
        metadata=option(
            choice("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
            "what version 1 cuts",
            exports=plain_names("FSDP_SHARDING_STRATEGY"),
        ),
    )
    reshard_after_forward: bool = field(
        default=True,
        metadata=option(
            BOOL,
            "cut parameters again after the forward pass, in version 2",
            exports=plain_names("FSDP_RESHARD_AFTER_FORWARD"),
        ),
    )
    auto_wrap_policy: str | None = field(
        default=None,
        metadata=option(
            choice("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
            "which modules are wrapped",
            exports=plain_names("FSDP_AUTO_WRAP_POLICY"),
        ),
    )
    transformer_layer_cls_to_wrap: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            NAMES,
            "classes to wrap, with TRANSFORMER_BASED_WRAP",
            exports=plain_names("FSDP_TRANSFORMER_CLS_TO_WRAP"),
        ),
    )
    backward_prefetch: str | None = field(
        default=None,
        metadata=option(
            choice("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
            "when version 1 fetches ahead in backward",
            exports=plain_names("FSDP_BACKWARD_PREFETCH"),
        ),
    )
    state_dict_type: str | None = field(
        default=None,
        metadata=option(
            choice("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
            "form of saved weights",
            exports=plain_names("FSDP_STATE_DICT_TYPE"),
        ),
    )
    forward_prefetch: bool = field(
        default=False,
        metadata=option(
            BOOL, "fetch ahead in forward, in version 1", exports=plain_names("FSDP_FORWARD_PREFETCH")
        ),
    )
    use_orig_params: bool = field(
        default=True,
        metadata=option(
            BOOL, "keep the original parameters, in version 1", exports=plain_names("FSDP_USE_ORIG_PARAMS")
        ),
    )
    cpu_ram_efficient_loading: bool = field(
        default=False,
        metadata=option(
            BOOL,
            "only the main process loads the weights",
            exports=plain_names("FSDP_CPU_RAM_EFFICIENT_LOADING"),
        ),
    )
    sync_module_states: bool = field(
        default=True,
        metadata=option(
            BOOL,
            "hand out the weights of process 0, in version 1",
            exports=plain_names("FSDP_SYNC_MODULE_STATES"),
        ),
    )
    activation_checkpointing: bool = field(
        default=False,
        metadata=option(
            BOOL,
            "compute activations again in backward",
            exports=plain_names("FSDP_ACTIVATION_CHECKPOINTING"),
        ),
    )
    activation_checkpointing_offload: bool = field(
        default=False,
        metadata=option(
            BOOL,
            "what is kept of them waits in host memory, in version 2, for scripts of Accelerate",
            exports=plain_names("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"),
        ),
    )
    ignored_modules: str | None = field(
        default=None,
        metadata=option(
            TEXT,
            "modules that stay whole, as a pattern of names",
            exports=plain_names("FSDP_IGNORED_MODULES"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSection:
    """DeepSpeed. Read where ``use_deepspeed`` is true."""

    config_file: str | None = field(
        default=None,
        metadata=option(FILE, "DeepSpeed's own JSON file", exports=accelerate_names("DEEPSPEED_CONFIG_FILE")),
    )
    zero_stage: int | None = field(
        default=None,
        metadata=option(
            integer(0, 3),
            "what ZeRO cuts",
            flag="zero_stage",
            exports=accelerate_names("DEEPSPEED_ZERO_STAGE"),
        ),
    )
    offload_optimizer_device: str | None = field(
        default=None,
        metadata=option(
            choice("none", "cpu", "nvme"),
            "where optimizer states lie",
            flag="offload_optimizer_device",
            exports=accelerate_names("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
        ),
    )
    offload_param_device: str | None = field(
        default=None,
        metadata=option(
            choice("none", "cpu", "nvme"),
            "where parameters lie",
            flag="offload_param_device",
            exports=accelerate_names("DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        ),
    )
    offload_optimizer_nvme_path: str | None = field(
        default=None,
        metadata=option(
            TEXT,
            "folder for optimizer states on nvme",
            flag="offload_optimizer_nvme_path",
            exports=accelerate_names("DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
        ),
    )
    offload_param_nvme_path: str | None = field(
        default=None,
        metadata=option(
            TEXT,
            "folder for parameters on nvme",
            flag="offload_param_nvme_path",
            exports=accelerate_names("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
        ),
    )
    gradient_clipping: float | None = field(
        default=None,
        metadata=option(
            real(0),
            "bound of the norm of gradients",
            flag="gradient_clipping",
            exports=accelerate_names("GRADIENT_CLIPPING"),
        ),
    )
    zero3_init_flag: bool | None = field(
        default=None,
        metadata=option(
            BOOL,
            "build models cut, in stage 3",
            flag="zero3_init_flag",
            exports=accelerate_names("DEEPSPEED_ZERO3_INIT"),
        ),
    )
    zero3_save_16bit_model: bool | None = field(
        default=None,
        metadata=option(
            BOOL,
            "save whole 16-bit weights in stage 3",
            flag="zero3_save_16bit_model",
            exports=accelerate_names("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        ),
    )
    hostfile: str | None = field(
        default=None,
        metadata=option(FILE, "file that names the machines"),
    )
    exclusion_filter: str | None = field(
        default=None,
        metadata=option(TEXT, "machines and devices to leave out"),
    )
    inclusion_filter: str | None = field(
        default=None,
        metadata=option(TEXT, "machines and devices to use"),
    )
    multinode_launcher: str | None = field(
        default=None,
        metadata=option(
            choice("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"),
            "how several machines are started (pdsh)",
        ),
    )
    moe_layer_cls_names: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            NAMES,
            "classes of mixture-of-experts layers",
            exports=accelerate_names("DEEPSPEED_MOE_LAYER_CLS_NAMES"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSection:
    """Megatron-LM. Read where ``use_megatron_lm`` is true."""

    tp_degree: int = field(
        default=1,
        metadata=option(COUNT, "processes that share a layer", exports=plain_names("MEGATRON_LM_TP_DEGREE")),
    )
    pp_degree: int = field(
        default=1,
        metadata=option(COUNT, "stages of the pipeline", exports=plain_names("MEGATRON_LM_PP_DEGREE")),
    )
    num_micro_batches: int | None = field(
        default=None,
        metadata=option(
            COUNT, "micro-batches of the pipeline", exports=plain_names("MEGATRON_LM_NUM_MICRO_BATCHES")
        ),
    )
    sequence_parallelism: bool | None = field(
        default=None,
        metadata=option(
            BOOL,
            "cut activations along the sequence",
            exports=plain_names("MEGATRON_LM_SEQUENCE_PARALLELISM"),
        ),
    )
    recompute_activations: bool | None = field(
        default=None,
        metadata=option(
            BOOL,
            "compute activations again in backward",
            exports=plain_names("MEGATRON_LM_RECOMPUTE_ACTIVATIONS"),
        ),
    )
    use_distributed_optimizer: bool | None = field(
        default=None,
        metadata=option(
            BOOL, "cut optimizer states", exports=plain_names("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER")
        ),
    )
    gradient_clipping: float | None = field(
        default=1.0,
        metadata=option(
            real(0), "bound of the norm of gradients", exports=plain_names("MEGATRON_LM_GRADIENT_CLIPPING")
        ),
    )
    recompute_granularity: str | None = field(
        default=None,
        metadata=option(
            choice("full", "selective"),
            "how much is computed again",
            exports=plain_names("MEGATRON_LM_RECOMPUTE_GRANULARITY"),
        ),
    )
    recompute_method: str | None = field(
        default=None,
        metadata=option(
            choice("uniform", "block"),
            "which layers are computed again",
            exports=plain_names("MEGATRON_LM_RECOMPUTE_METHOD"),
        ),
    )
    recompute_num_layers: int | None = field(
        default=None,
        metadata=option(
            COUNT,
            "layers of a unit that is computed again",
            exports=plain_names("MEGATRON_LM_RECOMPUTE_NUM_LAYERS"),
        ),
    )
    attention_backend: str | None = field(
        default=None,
        metadata=option(
            choice("auto", "flash", "fused", "unfused", "local", "true"),
            "how attention is computed",
            exports=plain_names("MEGATRON_LM_ATTENTION_BACKEND"),
        ),
    )
    expert_model_parallel_size: int | None = field(
        default=None,
        metadata=option(
            COUNT,
            "processes that share the experts",
            exports=plain_names("MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE"),
        ),
    )
    context_parallel_size: int | None = field(
        default=None,
        metadata=option(
            COUNT, "processes that share a sequence", exports=plain_names("MEGATRON_LM_CONTEXT_PARALLEL_SIZE")
        ),
    )
    attention_dropout: float | None = field(
        default=None,
        metadata=option(
            real(0, 1), "dropout of attention", exports=plain_names("MEGATRON_LM_ATTENTION_DROPOUT")
        ),
    )
    hidden_dropout: float | None = field(
        default=None,
        metadata=option(
            real(0, 1), "dropout of hidden states", exports=plain_names("MEGATRON_LM_HIDDEN_DROPOUT")
        ),
    )
    attention_softmax_in_fp32: bool | None = field(
        default=None,
        metadata=option(
            BOOL, "softmax of attention in fp32", exports=plain_names("MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32")
        ),
    )
    expert_tensor_parallel_size: int | None = field(
        default=None,
        metadata=option(
            COUNT,
            "processes that share an expert",
            exports=plain_names("MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE"),
        ),
    )
    calculate_per_token_loss: bool | None = field(
        default=None,
        metadata=option(
            BOOL, "scale the loss by tokens", exports=plain_names("MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS")
        ),
    )
    use_rotary_position_embeddings: bool | None = field(
        default=None,
        metadata=option(
            BOOL,
            "rotary position embeddings",
            exports=plain_names("MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS"),
        ),
    )
    decoder_last_pipeline_num_layers: int | None = field(
        default=None,
        metadata=option(
            COUNT,
            "layers of the last stage",
            exports=plain_names("MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS"),
        ),
    )
    use_custom_fsdp: bool = field(
        default=False,
        metadata=option(BOOL, "Megatron's own FSDP", exports=plain_names("MEGATRON_LM_USE_CUSTOM_FSDP")),
    )
    no_load_optim: bool = field(
        default=False,
        metadata=option(
            BOOL, "leave the optimizer out when loading", exports=plain_names("MEGATRON_LM_NO_LOAD_OPTIM")
        ),
    )
    eod_mask_loss: bool = field(
        default=False,
        metadata=option(
            BOOL, "no loss at ends of documents", exports=plain_names("MEGATRON_LM_EOD_MASK_LOSS")
        ),
    )
    overlap_cpu_optimizer_d2h_h2d: bool = field(
        default=False,
        metadata=option(
            BOOL,
            "copy while the optimizer runs on the CPU",
            exports=plain_names("MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D"),
        ),
    )
    no_save_optim: bool = field(
        default=False,
        metadata=option(
            BOOL, "leave the optimizer out when saving", exports=plain_names("MEGATRON_LM_NO_SAVE_OPTIM")
        ),
    )
    optimizer_cpu_offload: bool = field(
        default=False,
        metadata=option(
            BOOL, "run the optimizer on the CPU", exports=plain_names("MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD")
        ),
    )
    use_precision_aware_optimizer: bool = field(
        default=False,
        metadata=option(
            BOOL,
            "optimizer states in lower precision",
            exports=plain_names("MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER"),
        ),
    )
