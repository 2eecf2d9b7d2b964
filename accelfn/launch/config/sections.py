"""Further sections of the configuration: precision, mesh, compiler, and the platforms to start on."""

from __future__ import annotations

from dataclasses import dataclass, field

from accelfn.launch.config.kinds import BOOL, COUNT, FILE, FLAGS_3, SWITCH, TEXT, TEXTS, choice, integer
from accelfn.launch.config.option import accelerate_names, option, plain_names

__all__ = (
    "DynamoSection",
    "Fp8Section",
    "MpirunSection",
    "ParallelismSection",
    "SageMakerSection",
    "SlurmSection",
    "TpuSection",
)

_DYNAMO_BACKENDS = (
    *(
        "no",
        "eager",
        "aot_eager",
        "inductor",
        "aot_ts_nvfuser",
        "nvprims_nvfuser",
        "cudagraphs",
        "ofi",
        "fx2trt",
    ),
    *("onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Section:
    """How fp8 is computed. Read where ``mixed_precision`` is fp8."""

    backend: str | None = field(
        default=None,
        metadata=option(
            choice("ao", "te", "msamp"),
            "the engine: torchao, Transformer Engine or MS-AMP",
            exports=accelerate_names("FP8_BACKEND"),
        ),
    )
    use_autocast_during_eval: bool = field(
        default=False,
        metadata=option(
            BOOL, "fp8 in evaluation too (te)", exports=accelerate_names("FP8_USE_AUTOCAST_DURING_EVAL")
        ),
    )
    margin: int = field(
        default=0,
        metadata=option(
            integer(0), "margin of the scaling factor (te)", exports=accelerate_names("FP8_MARGIN")
        ),
    )
    interval: int = field(
        default=1,
        metadata=option(
            COUNT, "steps between new scaling factors (te)", exports=accelerate_names("FP8_INTERVAL")
        ),
    )
    format: str = field(
        default="HYBRID",
        metadata=option(
            choice("HYBRID", "E4M3", "E5M2"),
            "format of the numbers (te)",
            exports=accelerate_names("FP8_FORMAT"),
        ),
    )
    amax_history_len: int = field(
        default=1024,
        metadata=option(
            COUNT,
            "steps that the scaling factor looks back (te)",
            exports=accelerate_names("FP8_AMAX_HISTORY_LEN"),
        ),
    )
    amax_compute_algo: str = field(
        default="most_recent",
        metadata=option(
            choice("max", "most_recent"),
            "how it uses them (te)",
            exports=accelerate_names("FP8_AMAX_COMPUTE_ALGO"),
        ),
    )
    override_linear_precision: tuple[bool, ...] = field(
        default=(False, False, False),
        metadata=option(FLAGS_3, "higher precision in fprop, dgrad, wgrad (te)"),
    )
    opt_level: str = field(
        default="O2",
        metadata=option(
            choice("O1", "O2"), "what is in fp8 (msamp)", exports=accelerate_names("FP8_OPT_LEVEL")
        ),
    )
    enable_fsdp_float8_all_gather: bool = field(
        default=True,
        metadata=option(
            BOOL, "FSDP gathers in fp8 (ao)", exports=accelerate_names("FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER")
        ),
    )
    pad_inner_dim: bool = field(
        default=True,
        metadata=option(
            BOOL, "pad matrices to what the kernels want (ao)", exports=accelerate_names("FP8_PAD_INNER_DIM")
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSection:
    """Sizes of the mesh. Read where ``use_parallelism_config`` is true."""

    dp_replicate_size: int = field(
        default=1,
        metadata=option(
            COUNT, "copies of the model", exports=plain_names("PARALLELISM_CONFIG_DP_REPLICATE_SIZE")
        ),
    )
    dp_shard_size: int = field(
        default=1,
        metadata=option(
            COUNT, "processes that share a copy", exports=plain_names("PARALLELISM_CONFIG_DP_SHARD_SIZE")
        ),
    )
    tp_size: int = field(
        default=1,
        metadata=option(
            COUNT, "processes that share a layer", exports=plain_names("PARALLELISM_CONFIG_TP_SIZE")
        ),
    )
    cp_size: int = field(
        default=1,
        metadata=option(
            COUNT, "processes that share a sequence", exports=plain_names("PARALLELISM_CONFIG_CP_SIZE")
        ),
    )
    sp_size: int = field(
        default=1,
        metadata=option(
            COUNT,
            "processes that share a sequence, by heads",
            exports=plain_names("PARALLELISM_CONFIG_SP_SIZE"),
        ),
    )
    pp_size: int = field(
        default=1,
        metadata=option(COUNT, "stages of the model", exports=plain_names("PARALLELISM_CONFIG_PP_SIZE")),
    )
    ep_size: int = field(
        default=1,
        metadata=option(
            COUNT, "processes that experts are spread over", exports=plain_names("PARALLELISM_CONFIG_EP_SIZE")
        ),
    )
    cp_backend: str = field(
        default="torch",
        metadata=option(
            choice("torch"), "engine of cp", exports=plain_names("PARALLELISM_CONFIG_CP_BACKEND")
        ),
    )
    cp_comm_strategy: str = field(
        default="allgather",
        metadata=option(
            choice("allgather", "alltoall"),
            "how cp exchanges keys and values",
            exports=plain_names("PARALLELISM_CONFIG_CP_COMM_STRATEGY"),
        ),
    )
    sp_backend: str = field(
        default="torch",
        metadata=option(
            choice("torch", "deepspeed"), "engine of sp", exports=plain_names("PARALLELISM_CONFIG_SP_BACKEND")
        ),
    )
    sp_seq_length: int | None = field(
        default=None,
        metadata=option(
            COUNT, "length of the sequences of sp", exports=plain_names("PARALLELISM_CONFIG_SP_SEQ_LENGTH")
        ),
    )
    sp_seq_length_is_variable: bool = field(
        default=True,
        metadata=option(
            BOOL,
            "sequences of sp have several lengths",
            exports=plain_names("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"),
        ),
    )
    sp_attn_implementation: str = field(
        default="sdpa",
        metadata=option(
            TEXT, "attention of sp", exports=plain_names("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSection:
    """torch.compile. Read where ``backend`` is given."""

    backend: str | None = field(
        default=None,
        metadata=option(
            choice(*_DYNAMO_BACKENDS),
            "compile models with this backend of torch.compile",
            exports=accelerate_names("DYNAMO_BACKEND"),
        ),
    )
    mode: str = field(
        default="default",
        metadata=option(
            choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            "what to optimise for",
            exports=accelerate_names("DYNAMO_MODE"),
        ),
    )
    use_fullgraph: bool = field(
        default=False,
        metadata=option(
            SWITCH, "a model must be one graph", exports=accelerate_names("DYNAMO_USE_FULLGRAPH")
        ),
    )
    use_dynamic: bool | None = field(
        default=None,
        metadata=option(
            SWITCH, "compile for all shapes at once", exports=accelerate_names("DYNAMO_USE_DYNAMIC")
        ),
    )
    use_regional_compilation: bool = field(
        default=False,
        metadata=option(
            SWITCH,
            "compile repeated blocks once",
            exports=accelerate_names("DYNAMO_USE_REGIONAL_COMPILATION"),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuSection:
    """TPUs. Read where ``tpu`` is true."""

    use_cluster: bool = field(
        default=False,
        metadata=option(SWITCH, "start on every machine of the TPU, through gcloud", flag="tpu_cluster"),
    )
    use_sudo: bool = field(
        default=False,
        metadata=option(SWITCH, "start there with sudo"),
    )
    name: str | None = field(
        default=None,
        metadata=option(TEXT, "name of the TPU"),
    )
    zone: str | None = field(
        default=None,
        metadata=option(TEXT, "zone of the TPU"),
    )
    vm: tuple[str, ...] | None = field(
        default=None,
        metadata=option(TEXTS, "machine of the TPU to start on; repeatable", flag="vm"),
    )
    env: tuple[str, ...] | None = field(
        default=None,
        metadata=option(TEXTS, "NAME=VALUE to set there; repeatable", flag="env"),
    )
    command_file: str | None = field(
        default=None,
        metadata=option(
            FILE, "file of shell commands that accelfn tpu-config runs there", flag="command_file"
        ),
    )
    commands: tuple[str, ...] | None = field(
        default=None,
        metadata=option(
            TEXTS, "shell command that accelfn tpu-config runs there; repeatable", flag="commands"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MpirunSection:
    """Starting through mpirun."""

    hostfile: str | None = field(
        default=None,
        metadata=option(FILE, "start through mpirun, on the machines that this file names"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """What ``--sbatch`` writes into a script for SLURM."""

    partition: str | None = field(
        default=None,
        metadata=option(TEXT, "partition to run in"),
    )
    account: str | None = field(
        default=None,
        metadata=option(TEXT, "account to charge"),
    )
    time: str | None = field(
        default=None,
        metadata=option(TEXT, "time limit, such as 08:00:00"),
    )
    job_name: str = field(
        default="accelfn",
        metadata=option(TEXT, "name of the job"),
    )
    gpus_per_node: int | None = field(
        default=None,
        metadata=option(integer(0), "accelerators of each machine (processes of each)"),
    )
    cpus_per_task: int | None = field(
        default=None,
        metadata=option(COUNT, "cores of each machine"),
    )
    mem: str | None = field(
        default=None,
        metadata=option(TEXT, "memory of each machine, such as 64G"),
    )
    output: str | None = field(
        default=None,
        metadata=option(TEXT, "file for the output, such as logs/%j.out"),
    )
    extra: tuple[str, ...] | None = field(
        default=None,
        metadata=option(TEXTS, "a further option of sbatch, such as --qos=high; repeatable"),
    )
    setup: tuple[str, ...] | None = field(
        default=None,
        metadata=option(TEXTS, "shell command before the launch, such as module load cuda; repeatable"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerSection:
    """Amazon SageMaker. Read where ``compute_environment`` is AMAZON_SAGEMAKER."""

    ec2_instance_type: str | None = field(
        default=None,
        metadata=option(TEXT, "machines to rent, such as ml.p3.2xlarge"),
    )
    iam_role_name: str | None = field(
        default=None,
        metadata=option(TEXT, "role to run as"),
    )
    image_uri: str | None = field(
        default=None,
        metadata=option(TEXT, "container image"),
    )
    profile: str | None = field(
        default=None,
        metadata=option(TEXT, "profile of the credentials"),
    )
    region: str = field(
        default="us-east-1",
        metadata=option(TEXT, "region to run in"),
    )
    base_job_name: str = field(
        default="accelfn-sagemaker",
        metadata=option(TEXT, "start of the job's name"),
    )
    pytorch_version: str = field(
        default="1.10.2",
        metadata=option(TEXT, "of the container"),
    )
    transformers_version: str = field(
        default="4.17.0",
        metadata=option(TEXT, "of the container"),
    )
    py_version: str = field(
        default="py38",
        metadata=option(TEXT, "of the container"),
    )
    inputs_file: str | None = field(
        default=None,
        metadata=option(FILE, "TSV of names and places of inputs"),
    )
    metrics_file: str | None = field(
        default=None,
        metadata=option(FILE, "TSV of names and patterns of metrics"),
    )
    distributed_type: str = field(
        default="NO",
        metadata=option(choice("NO", "DATA_PARALLEL", "MODEL_PARALLEL"), "how its processes share the work"),
    )
    aws_access_key_id: str | None = field(
        default=None,
        metadata=option(TEXT, "key, where there is no profile", flag="aws_access_key_id", secret=True),
    )
    aws_secret_access_key: str | None = field(
        default=None,
        metadata=option(TEXT, "its secret", flag="aws_secret_access_key", secret=True),
    )
