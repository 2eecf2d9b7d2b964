"""Enums of configuration values.

Every member is a string equal to its value, so ``"bf16" == PrecisionType.BF16`` holds and members can be
serialised as strings.
"""

from collections.abc import Iterable
from enum import Enum, EnumMeta
from typing import cast


class _MembershipByValue(EnumMeta):
    # Python before 3.12 raises TypeError for `"fp16" in PrecisionType`.
    def __contains__(cls, value: object) -> bool:
        # A metaclass does not know that the members of its classes are Enum objects.
        members = cast("Iterable[Enum]", cls.__members__.values())
        return any(value == member.value for member in members)


class StringEnum(str, Enum, metaclass=_MembershipByValue):
    """Base of the enums below: ``value in Enum`` asks for a value, ``str(member)`` gives it."""

    def __str__(self) -> str:
        """Return the value, without the name of the class."""
        return str(self.value)

    def __hash__(self) -> int:
        """Hash as the value does, since members are equal to their values."""
        return hash(str(self.value))

    @classmethod
    def values(cls) -> tuple[str, ...]:
        """Return all values in the order of their definition."""
        return tuple(str(member.value) for member in cls)


class DistributedType(StringEnum):
    """What kind of world a process is part of."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(StringEnum):
    """Mixed precision of a training step."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class GuardMode(StringEnum):
    """How much is checked before ranks communicate; see ``Guard``."""

    FULL = "full"
    SAMPLED = "sampled"
    OFF = "off"


class GradientCheck(StringEnum):
    """What else than an error follows gradients that aren't finite; see ``Guard``."""

    SKIP = "skip"


class DynamoBackend(StringEnum):
    """Backend of ``torch.compile``; ``NO`` means that nothing is compiled."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class DynamoMode(StringEnum):
    """Preset of options of ``torch.compile``."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


class DDPCommunicationHookType(StringEnum):
    """How data-parallel gradients are compressed on the wire."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class RNGType(StringEnum):
    """Random number generators that can be kept equal on all ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    XLA = "xla"
    NPU = "npu"
    XPU = "xpu"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class LoggerType(StringEnum):
    """Built-in experiment trackers; ``ALL`` stands for each one that is installed."""

    ALL = "all"
    JSONL = "jsonl"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class LogLevel(StringEnum):
    """Names of the standard logging levels; ``WARN`` and ``FATAL`` are other names of two of them."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"
    NOTSET = "NOTSET"
    WARN = "WARN"
    FATAL = "FATAL"


class FP8Backend(StringEnum):
    """Engine that runs 8-bit matrix products: transformer-engine, torchao or MS-AMP."""

    TE = "TE"
    AO = "AO"
    MSAMP = "MSAMP"


class FP8Format(StringEnum):
    """8-bit number format; ``HYBRID`` is E4M3 in forward and E5M2 for gradients."""

    HYBRID = "HYBRID"
    E4M3 = "E4M3"
    E5M2 = "E5M2"


class FP8AmaxAlgorithm(StringEnum):
    """How a scaling factor is taken from the history of largest values."""

    MAX = "max"
    MOST_RECENT = "most_recent"


class FP8OptLevel(StringEnum):
    """Optimization level of MS-AMP."""

    O1 = "O1"
    O2 = "O2"


class ProfileActivity(StringEnum):
    """What the profiler watches."""

    CPU = "cpu"
    CUDA = "cuda"
    XPU = "xpu"
    HPU = "hpu"
    MTIA = "mtia"


class ShardingStrategy(StringEnum):
    """What FSDP version 1 splits over ranks."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"


class BackwardPrefetch(StringEnum):
    """When FSDP version 1 asks for the next parameters in the backward pass."""

    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"
    NO_PREFETCH = "NO_PREFETCH"


class StateDictType(StringEnum):
    """Layout of an FSDP state dict."""

    FULL_STATE_DICT = "FULL_STATE_DICT"
    LOCAL_STATE_DICT = "LOCAL_STATE_DICT"
    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"


class AutoWrapPolicy(StringEnum):
    """How FSDP finds the submodules that are sharded on their own."""

    TRANSFORMER_BASED_WRAP = "TRANSFORMER_BASED_WRAP"
    SIZE_BASED_WRAP = "SIZE_BASED_WRAP"
    NO_WRAP = "NO_WRAP"


class OffloadDevice(StringEnum):
    """Where DeepSpeed keeps what it moves off the accelerator."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class ContextParallelStrategy(StringEnum):
    """How context-parallel ranks exchange keys and values."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"
