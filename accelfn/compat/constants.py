"""Names of files and choices that programs import."""

from __future__ import annotations

from typing import Any

import accelfn.config as config
from accelfn.config import AutoWrapPolicy, BackwardPrefetch, ShardingStrategy, StringEnum

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
RNG_STATE_NAME = "random_states"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
FSDP_MODEL_NAME = "pytorch_model_fsdp"
FSDP_SHARDING_STRATEGY = ShardingStrategy.values()
FSDP_AUTO_WRAP_POLICY = AutoWrapPolicy.values()
FSDP_BACKWARD_PREFETCH = BackwardPrefetch.values()
FSDP_STATE_DICT_TYPE = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
FSDP2_STATE_DICT_TYPE = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
DEEPSPEED_MULTINODE_LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
TORCH_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune")
CUDA_DISTRIBUTED_TYPES = ("DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP")
TORCH_DISTRIBUTED_OPERATION_TYPES = (
    *CUDA_DISTRIBUTED_TYPES,
    *(f"MULTI_{kind}" for kind in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "CPU", "HPU", "NEURON")),
)
FSDP_PYTORCH_VERSION = "2.1.0"
FSDP2_PYTORCH_VERSION = "2.6.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"


class QualifiedEnum(StringEnum):
    """Base of the enums of which ``str`` and f-strings give ``Name.MEMBER``."""

    def __str__(self) -> str:
        """Return ``Name.MEMBER``."""
        return f"{type(self).__name__}.{self.name}"


DistributedType: Any = QualifiedEnum(
    "DistributedType",
    {member.name: member.value for member in config.DistributedType},
    module="accelerate.utils.dataclasses",
)
DistributedType.__doc__ = config.DistributedType.__doc__


class ComputeEnvironment(QualifiedEnum):
    """Where a launch runs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(QualifiedEnum):
    """How a launch on SageMaker is distributed."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(QualifiedEnum):
    """Engine of 8-bit matrix products."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"
