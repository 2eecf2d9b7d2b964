"""Sections of the configuration, one row for each option: engines, precision, mesh, compiler, platforms.

A row is the kind, the default and the help; flags, variables and keys of files follow from the name.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelfn.launch.config.kinds import (
    BOOL,
    COUNT,
    FILE,
    FLAGS_3,
    NAMES,
    SIZE,
    SWITCH,
    TEXT,
    TEXTS,
    choice,
    integer,
    real,
    row,
)

_DYNAMO_BACKENDS = (
    *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi"),
    *("fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSection:
    """FSDP: parameters sharded over the processes. Read where ``use_fsdp`` is true."""

    version: int = row(integer(1, 2), 1, "1 or 2; accelfn carries both out by torch's fully_shard")
    offload_params: bool = row(BOOL, False, "keep parameters in host memory")
    min_num_params: int = row(
        SIZE, 100_000_000, "wrap modules of at least so many parameters, with SIZE_BASED_WRAP"
    )
    sharding_strategy: str = row(
        choice("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
        "FULL_SHARD",
        "what version 1 shards",
    )
    reshard_after_forward: bool = row(
        BOOL, True, "shard parameters again after the forward pass, in version 2"
    )
    auto_wrap_policy: str | None = row(
        choice("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), None, "which modules are wrapped"
    )
    transformer_layer_cls_to_wrap: tuple[str, ...] | None = row(
        NAMES, None, "classes to wrap, with TRANSFORMER_BASED_WRAP", exports="FSDP_TRANSFORMER_CLS_TO_WRAP"
    )
    backward_prefetch: str | None = row(
        choice("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        None,
        "when version 1 fetches ahead in backward",
    )
    state_dict_type: str | None = row(
        choice("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"), None, "form of saved weights"
    )
    forward_prefetch: bool = row(BOOL, False, "fetch ahead in forward, in version 1")
    use_orig_params: bool = row(BOOL, True, "keep the original parameters, in version 1")
    cpu_ram_efficient_loading: bool = row(BOOL, False, "only the main process loads the weights")
    sync_module_states: bool = row(BOOL, True, "broadcast the weights of process 0, in version 1")
    activation_checkpointing: bool = row(BOOL, False, "compute activations again in backward")
    activation_checkpointing_offload: bool = row(
        BOOL, False, "what is kept of them waits in host memory, in version 2, for scripts of Accelerate"
    )
    ignored_modules: str | None = row(TEXT, None, "modules that stay whole, as a pattern of names")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedSection:
    """DeepSpeed. Read where ``use_deepspeed`` is true."""

    config_file: str | None = row(FILE, None, "DeepSpeed's own JSON file")
    zero_stage: int | None = row(integer(0, 3), None, "ZeRO stage (0 to 3)", flag="zero_stage")
    offload_optimizer_device: str | None = row(
        choice("none", "cpu", "nvme"),
        None,
        "where optimizer states are kept",
        flag="offload_optimizer_device",
    )
    offload_param_device: str | None = row(
        choice("none", "cpu", "nvme"), None, "where parameters are kept", flag="offload_param_device"
    )
    offload_optimizer_nvme_path: str | None = row(
        TEXT, None, "folder for optimizer states on nvme", flag="offload_optimizer_nvme_path"
    )
    offload_param_nvme_path: str | None = row(
        TEXT, None, "folder for parameters on nvme", flag="offload_param_nvme_path"
    )
    gradient_clipping: float | None = row(
        real(0),
        None,
        "bound of the norm of gradients",
        flag="gradient_clipping",
        exports="ACCELERATE_GRADIENT_CLIPPING",
    )
    zero3_init_flag: bool | None = row(
        BOOL,
        None,
        "construct models already sharded (zero.Init), in stage 3",
        flag="zero3_init_flag",
        exports="ACCELERATE_DEEPSPEED_ZERO3_INIT",
    )
    zero3_save_16bit_model: bool | None = row(
        BOOL, None, "save whole 16-bit weights in stage 3", flag="zero3_save_16bit_model"
    )
    hostfile: str | None = row(FILE, None, "file that names the machines", exports="")
    exclusion_filter: str | None = row(TEXT, None, "machines and devices to leave out", exports="")
    inclusion_filter: str | None = row(TEXT, None, "machines and devices to use", exports="")
    multinode_launcher: str | None = row(
        choice("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"),
        None,
        "how several machines are started (pdsh)",
        exports="",
    )
    moe_layer_cls_names: tuple[str, ...] | None = row(NAMES, None, "classes of mixture-of-experts layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronSection:
    """Megatron-LM. Read where ``use_megatron_lm`` is true."""

    tp_degree: int = row(COUNT, 1, "processes that share a layer")
    pp_degree: int = row(COUNT, 1, "stages of the pipeline")
    num_micro_batches: int | None = row(COUNT, None, "micro-batches of the pipeline")
    sequence_parallelism: bool | None = row(BOOL, None, "shard activations along the sequence")
    recompute_activations: bool | None = row(BOOL, None, "compute activations again in backward")
    use_distributed_optimizer: bool | None = row(BOOL, None, "shard optimizer states")
    gradient_clipping: float | None = row(real(0), 1.0, "bound of the norm of gradients")
    recompute_granularity: str | None = row(choice("full", "selective"), None, "how much is computed again")
    recompute_method: str | None = row(choice("uniform", "block"), None, "which layers are computed again")
    recompute_num_layers: int | None = row(COUNT, None, "layers of a unit that is computed again")
    attention_backend: str | None = row(
        choice("auto", "flash", "fused", "unfused", "local", "true"), None, "how attention is computed"
    )
    expert_model_parallel_size: int | None = row(COUNT, None, "processes that share the experts")
    context_parallel_size: int | None = row(COUNT, None, "processes that share a sequence")
    attention_dropout: float | None = row(real(0, 1), None, "dropout of attention")
    hidden_dropout: float | None = row(real(0, 1), None, "dropout of hidden states")
    attention_softmax_in_fp32: bool | None = row(BOOL, None, "softmax of attention in fp32")
    expert_tensor_parallel_size: int | None = row(COUNT, None, "processes that share an expert")
    calculate_per_token_loss: bool | None = row(BOOL, None, "scale the loss by tokens")
    use_rotary_position_embeddings: bool | None = row(BOOL, None, "rotary position embeddings")
    decoder_last_pipeline_num_layers: int | None = row(COUNT, None, "layers of the last stage")
    use_custom_fsdp: bool = row(BOOL, False, "Megatron's own FSDP")
    no_load_optim: bool = row(BOOL, False, "leave the optimizer out when loading")
    eod_mask_loss: bool = row(BOOL, False, "no loss at ends of documents")
    overlap_cpu_optimizer_d2h_h2d: bool = row(BOOL, False, "copy while the optimizer runs on the CPU")
    no_save_optim: bool = row(BOOL, False, "leave the optimizer out when saving")
    optimizer_cpu_offload: bool = row(BOOL, False, "run the optimizer on the CPU")
    use_precision_aware_optimizer: bool = row(BOOL, False, "optimizer states in lower precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSection:
    """Sizes of the mesh. Read where ``use_parallelism_config`` is true."""

    dp_replicate_size: int = row(COUNT, 1, "copies of the model")
    dp_shard_size: int = row(COUNT, 1, "processes that share a copy")
    tp_size: int = row(COUNT, 1, "processes that share a layer")
    cp_size: int = row(COUNT, 1, "processes that share a sequence")
    sp_size: int = row(COUNT, 1, "processes that share a sequence, by heads")
    pp_size: int = row(COUNT, 1, "stages of the model")
    ep_size: int = row(COUNT, 1, "processes that experts are spread over")
    cp_backend: str = row(choice("torch"), "torch", "engine of cp")
    cp_comm_strategy: str = row(
        choice("allgather", "alltoall"), "allgather", "how cp exchanges keys and values"
    )
    sp_backend: str = row(choice("torch", "deepspeed"), "torch", "engine of sp")
    sp_seq_length: int | None = row(COUNT, None, "length of the sequences of sp")
    sp_seq_length_is_variable: bool = row(BOOL, True, "sequences of sp have several lengths")
    sp_attn_implementation: str = row(TEXT, "sdpa", "attention of sp")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSection:
    """torch.compile. Read where ``backend`` is given."""

    backend: str | None = row(
        choice(*_DYNAMO_BACKENDS), None, "compile models with this backend of torch.compile"
    )
    mode: str = row(
        choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        "default",
        "what to optimise for",
    )
    use_fullgraph: bool = row(SWITCH, False, "a model must be one graph")
    use_dynamic: bool | None = row(SWITCH, None, "compile for all shapes at once")
    use_regional_compilation: bool = row(SWITCH, False, "compile repeated blocks once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Section:
    """How fp8 is computed. Read where ``mixed_precision`` is fp8."""

    backend: str | None = row(
        choice("ao", "te", "msamp"), None, "the engine: torchao, Transformer Engine or MS-AMP"
    )
    use_autocast_during_eval: bool = row(BOOL, False, "fp8 in evaluation too (te)")
    margin: int = row(integer(0), 0, "margin of the scaling factor (te)")
    interval: int = row(COUNT, 1, "steps between new scaling factors (te)")
    format: str = row(choice("HYBRID", "E4M3", "E5M2"), "HYBRID", "format of the numbers (te)")
    amax_history_len: int = row(COUNT, 1024, "steps that the scaling factor looks back (te)")
    amax_compute_algo: str = row(choice("max", "most_recent"), "most_recent", "how it uses them (te)")
    override_linear_precision: tuple[bool, ...] = row(
        FLAGS_3, (False, False, False), "higher precision in fprop, dgrad, wgrad (te)", exports=""
    )
    opt_level: str = row(choice("O1", "O2"), "O2", "what is in fp8 (msamp)")
    enable_fsdp_float8_all_gather: bool = row(BOOL, True, "FSDP gathers in fp8 (ao)")
    pad_inner_dim: bool = row(BOOL, True, "pad matrices to what the kernels want (ao)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MpirunSection:
    """Starting through mpirun."""

    hostfile: str | None = row(FILE, None, "start through mpirun, on the machines that this file names")


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuSection:
    """TPUs. Read where ``tpu`` is true."""

    use_cluster: bool = row(
        SWITCH, False, "start on every machine of the TPU, through gcloud", flag="tpu_cluster"
    )
    use_sudo: bool = row(SWITCH, False, "start there with sudo")
    name: str | None = row(TEXT, None, "name of the TPU")
    zone: str | None = row(TEXT, None, "zone of the TPU")
    vm: tuple[str, ...] | None = row(TEXTS, None, "machine of the TPU to start on; repeatable", flag="vm")
    env: tuple[str, ...] | None = row(TEXTS, None, "NAME=VALUE to set there; repeatable", flag="env")
    command_file: str | None = row(
        FILE, None, "file of shell commands that accelfn tpu-config runs there", flag="command_file"
    )
    commands: tuple[str, ...] | None = row(
        TEXTS, None, "shell command that accelfn tpu-config runs there; repeatable", flag="commands"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """What ``--sbatch`` writes into a script for SLURM."""

    partition: str | None = row(TEXT, None, "partition to run in")
    account: str | None = row(TEXT, None, "account to charge")
    time: str | None = row(TEXT, None, "time limit, such as 08:00:00")
    job_name: str = row(TEXT, "accelfn", "name of the job")
    gpus_per_node: int | None = row(integer(0), None, "accelerators of each machine (processes of each)")
    cpus_per_task: int | None = row(COUNT, None, "cores of each machine")
    mem: str | None = row(TEXT, None, "memory of each machine, such as 64G")
    output: str | None = row(TEXT, None, "file for the output, such as logs/%j.out")
    extra: tuple[str, ...] | None = row(
        TEXTS, None, "a further option of sbatch, such as --qos=high; repeatable"
    )
    setup: tuple[str, ...] | None = row(
        TEXTS, None, "shell command before the launch, such as module load cuda; repeatable"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerSection:
    """Amazon SageMaker. Read where ``compute_environment`` is AMAZON_SAGEMAKER."""

    ec2_instance_type: str | None = row(TEXT, None, "machines to rent, such as ml.p3.2xlarge")
    iam_role_name: str | None = row(TEXT, None, "role to run as")
    image_uri: str | None = row(TEXT, None, "container image")
    profile: str | None = row(TEXT, None, "profile of the credentials")
    region: str = row(TEXT, "us-east-1", "region to run in")
    base_job_name: str = row(TEXT, "accelfn-sagemaker", "start of the job's name")
    pytorch_version: str = row(TEXT, "1.10.2", "of the container")
    transformers_version: str = row(TEXT, "4.17.0", "of the container")
    py_version: str = row(TEXT, "py38", "of the container")
    inputs_file: str | None = row(FILE, None, "TSV of names and places of inputs")
    metrics_file: str | None = row(FILE, None, "TSV of names and patterns of metrics")
    distributed_type: str = row(
        choice("NO", "DATA_PARALLEL", "MODEL_PARALLEL"), "NO", "how its processes share the work"
    )
    aws_access_key_id: str | None = row(
        TEXT, None, "key, where there is no profile", flag="aws_access_key_id", secret=True
    )
    aws_secret_access_key: str | None = row(
        TEXT, None, "its secret", flag="aws_secret_access_key", secret=True
    )
