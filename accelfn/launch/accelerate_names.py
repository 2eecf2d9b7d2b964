"""Accelerate's words where they differ from ours: sections, keys and strategies of its files and flags."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Sections of a file, and the prefix of their keys among our options.
FILE_SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "fsdp_config": "fsdp_",
        "deepspeed_config": "",
        "megatron_lm_config": "megatron_lm_",
        "parallelism_config": "parallelism_config_",
        "dynamo_config": "dynamo_",
        "fp8_config": "fp8_",
        "mpirun_config": "mpirun_",
        "ipex_config": "",
    }
)
#: Values of ``distributed_type``, and the option that each sets; YAML reads an unquoted NO as false.
DISTRIBUTED_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("", "NO", "FALSE", "MPS"), ""),
        "FSDP": "use_fsdp",
        "DEEPSPEED": "use_deepspeed",
        "MEGATRON_LM": "use_megatron_lm",
        "MULTI_CPU": "cpu",
        "XLA": "tpu",
        "TPU": "tpu",
        "MULTI_GPU": "multi_gpu",
        **dict.fromkeys(("MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA"), "multi_gpu"),
        **dict.fromkeys(("MULTI_SDAA", "MULTI_HPU", "MULTI_NEURON"), "multi_gpu"),
    }
)
#: Strategies of FSDP in the order of their numbers, and whether they reshard after the forward pass.
FSDP_STRATEGIES: Mapping[str, bool] = MappingProxyType(
    {
        "FULL_SHARD": True,
        "SHARD_GRAD_OP": False,
        "NO_SHARD": False,
        "HYBRID_SHARD": True,
        "HYBRID_SHARD_ZERO2": False,
    }
)
#: Keys and flags of any version that have another name here.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "use_cpu": "cpu",
        "tpu_use_cluster": "tpu_cluster",
        "tpu_env": "env",
        "tpu_vm": "vm",
        "fp8_amax_history_length": "fp8_amax_history_len",
        "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
        "fp8_optimization_level": "fp8_opt_level",
        "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
        "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    }
)
_DEEPSPEED = "start accelfn launch on every machine, or run: deepspeed --hostfile FILE train.py"
#: Keys and flags of torchrun, mpirun and launchers that start the other machines too; what to do instead.
OTHER_LAUNCHERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("np", "nproc_per_node"), "pass --num_processes, the number on all machines"),
        "nnodes": "pass --num_machines",
        "node_rank": "pass --machine_rank",
        "master_addr": "pass --main_process_ip",
        "master_port": "pass --main_process_port",
        "mpirun_hostfile": "run: mpirun --hostfile FILE python train.py",
        "sbatch": "in a batch script, run: srun --ntasks-per-node=1 accelfn launch train.py",
        "deepspeed_hostfile": _DEEPSPEED,
        "deepspeed_multinode_launcher": _DEEPSPEED,
        "deepspeed_exclusion_filter": _DEEPSPEED,
        "deepspeed_inclusion_filter": _DEEPSPEED,
    }
)
#: Further keys without effect here, and the reason.
DROPPED: Mapping[str, str] = MappingProxyType(
    {
        "mpirun_ccl": "set CCL_WORKER_COUNT instead",
        "fsdp_limit_all_gathers": "always on",
        "fp8_use_mxfp8_block_scaling": "set ACCELFN_FP8_USE_MXFP8_BLOCK_SCALING instead",
        "ipex": "accelfn doesn't use Intel's extension; import it in the script",
        "use_xpu": "torch detects an XPU itself",
    }
)
#: Keys of FSDP 1 that FSDP 2 doesn't have, and the reason.
ONLY_FSDP_1: Mapping[str, str] = MappingProxyType(
    {
        "backward_prefetch": "FSDP2 has no such option",
        "sync_module_states": "FSDP2 has no such option",
        "use_orig_params": "FSDP2 always keeps the original parameters",
        "forward_prefetch": "FSDP2 doesn't implement it",
        "limit_all_gathers": "always on in FSDP2",
    }
)
