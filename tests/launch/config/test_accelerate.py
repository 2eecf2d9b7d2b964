"""Configurations of Accelerate are taken over, or it is said why not."""

import re

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch.config import LaunchConfig
from accelfn.launch.config.accelerate import Imported, import_accelerate
from accelfn.launch.config.files import read_tree


def imported(text: str) -> Imported:
    return import_accelerate(read_tree(text, "default_config.yaml"), "default_config.yaml")


# As the questionnaires of these versions wrote them.
LAYOUT_0_11 = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MULTI_GPU
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
"""
LAYOUT_0_15 = """
command_file: null
commands: null
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  offload_optimizer_device: none
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
dynamo_backend: 'NO'
fp16: true
fsdp_config: {}
gpu_ids: null
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
megatron_lm_config: {}
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_name: null
tpu_zone: null
use_cpu: false
"""
LAYOUT_0_20 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: BertLayer,T5Block
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 4000
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
LAYOUT_1_15 = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: max-autotune
enable_cpu_affinity: true
fp8_config:
  amax_compute_algorithm: max
  amax_history_length: 512
  backend: TE
  fp8_format: E4M3
  override_linear_precision: [false, true, false]
fsdp_config:
  fsdp_reshard_after_forward: false
  fsdp_version: 2
gpu_ids: all
mixed_precision: fp8
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_comm_strategy: alltoall
  parallelism_config_cp_size: 2
  parallelism_config_dp_shard_size: 4
use_cpu: false
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LAYOUT_0_11, {"multi_gpu": True, "mixed_precision": "fp16", "num_processes": 2}),
        (
            LAYOUT_0_15,
            {
                "use_deepspeed": True, "mixed_precision": "fp16", "num_processes": 4, "zero_stage": 3,
                "gradient_accumulation_steps": 2, "offload_optimizer_device": "none",
                "offload_param_device": "cpu", "zero3_init_flag": True, "zero3_save_16bit_model": True,
            },
        ),
        (
            LAYOUT_0_20,
            {
                "use_fsdp": True, "mixed_precision": "bf16", "num_processes": 16, "num_machines": 2,
                "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 4000,
                "rdzv_backend": "static", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_state_dict_type": "FULL_STATE_DICT",
                "fsdp_transformer_layer_cls_to_wrap": ("BertLayer", "T5Block"),
            },
        ),
        (
            LAYOUT_1_15,
            {
                "use_fsdp": True, "debug": True, "num_processes": 8, "mixed_precision": "fp8",
                "dynamo_backend": "inductor", "dynamo_mode": "max-autotune", "enable_cpu_affinity": True,
                "fp8_amax_compute_algo": "max", "fp8_amax_history_len": 512, "fp8_backend": "te",
                "fp8_format": "E4M3", "fp8_override_linear_precision": (False, True, False),
                "fsdp_version": 2, "fsdp_reshard_after_forward": False, "use_parallelism_config": True,
                "parallelism_config_cp_comm_strategy": "alltoall", "parallelism_config_cp_size": 2,
                "parallelism_config_dp_shard_size": 4,
            },
        ),
        ("distributed_type: NO\nuse_cpu: true", {"cpu": True}),
        ("distributed_type: MULTI_CPU\nuse_cpu: true\nmpirun_config: {mpirun_hostfile: h}",
         {"cpu": True, "mpirun_hostfile": "h"}),
        ("distributed_type: XLA\ntpu_use_cluster: true\ntpu_vm: [a, b]\ntpu_name: t\ntpu_zone: z",
         {"tpu": True, "tpu_cluster": True, "vm": ("a", "b"), "tpu_name": "t", "tpu_zone": "z"}),
    ],
    ids=["0.11", "0.15", "0.20", "1.15", "no", "mpi", "tpu"],
)  # fmt: skip
def test_layouts(text: str, expected: dict[str, object]) -> None:
    found = imported(text)
    assert found.config == LaunchConfig(**expected)
    assert found.notes == ()


# As ClusterConfig of 1.0.1 writes it for several processes on CPUs.
LAYOUT_1_0_CPU = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
ipex_config:
  ipex: false
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
mpirun_config:
  mpirun_ccl: '1'
  mpirun_hostfile: /hosts
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: false
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


def test_options_of_intels_extension_are_dropped() -> None:
    output: dict[str, object] = {"cpu": True, "num_processes": 4, "mixed_precision": "no"}
    expected = LaunchConfig(**{**output, "same_network": False, "mpirun_hostfile": "/hosts"})
    found = imported(LAYOUT_1_0_CPU)
    assert found.config == expected
    assert [note.split(":")[0] for note in found.notes] == ["mpirun_ccl"]
    asked = imported(LAYOUT_1_0_CPU.replace("ipex: false", "ipex: true\n  use_xpu: true"))
    assert asked.config == expected
    assert "ipex: dropped; accelfn doesn't use Intel's extension" in asked.notes[0]
    assert "use_xpu: dropped; torch detects an XPU itself" in asked.notes[1]


def test_offloaded_checkpoints_of_activations() -> None:
    text = (
        "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true, X: true}\ndistributed_type: FSDP"
    )
    found = imported(text.replace("X", "fsdp_activation_checkpointing_offload"))
    assert found.config.fsdp_activation_checkpointing_offload
    assert found.notes == ()


def test_deepspeed_on_several_machines() -> None:
    section = (
        "deepspeed_multinode_launcher: pdsh, deepspeed_hostfile: hosts, zero_stage: 2, zero3_init_flag: true"
    )
    found = imported(
        f"distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: 16\ndeepspeed_config: {{{section}}}"
    )
    assert found.config == LaunchConfig(
        use_deepspeed=True,
        num_machines=2,
        num_processes=16,
        zero_stage=2,
        deepspeed_multinode_launcher="pdsh",
        deepspeed_hostfile="hosts",
    )
    assert found.notes == ("zero3_init_flag: dropped; it needs zero_stage 3.",)


def test_values_without_a_place_are_reported() -> None:
    found = imported("distributed_type: MULTI_XPU\nnum_processes: -1\nmpirun_config: {mpirun_ccl: 4}")
    assert found.config == LaunchConfig(multi_gpu=True)
    assert [note.split(":")[0] for note in found.notes] == [
        "distributed_type MULTI_XPU",
        "num_processes -1",
        "mpirun_ccl",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: NO\nflying: yes", "default_config.yaml: unknown key 'flying'"),
        ("distributed_type: QUANTUM", "unknown distributed_type 'QUANTUM'. Correct it"),
        ("distributed_type: DEEPSPED", "'DEEPSPED'. Did you mean DEEPSPEED?"),
        (
            "mixed_precision: fp32",
            "default_config.yaml: mixed_precision: it must be one of no, fp16, bf16, fp8",
        ),
        (
            "num_machines: 2\nnum_processes: 2",
            "has conflicting values: --num_machines 2 needs --main_process_ip",
        ),
    ],
)
def test_invalid_files_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        imported(text)
