"""Configurations of Accelerate are taken over, or it is said why not."""

import re
from pathlib import Path

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import parse_flags
from accelfn.launch.config import ConfigFile, LaunchConfig, resolve
from accelfn.launch.config.accelerate import import_accelerate, read_any_config


def imported(text: str) -> ConfigFile:
    return import_accelerate(text, "default_config.yaml")


def config_of(flags: str) -> LaunchConfig:
    return resolve(parse_flags(flags.split()).flags, {}).config


# What the questionnaires of these versions wrote, and the flags that mean the same.
LAYOUTS = {
    "0.15": (
        """
{command_file: null, commands: null, compute_environment: LOCAL_MACHINE, deepspeed_config:
{gradient_accumulation_steps: 2, offload_optimizer_device: none, offload_param_device: cpu,
zero3_init_flag: true, zero3_save_16bit_model: true, zero_stage: 3}, distributed_type: DEEPSPEED,
downcast_bf16: 'no', dynamo_backend: 'NO', fp16: true, gpu_ids: null, megatron_lm_config: {},
num_machines: 1, num_processes: 4, rdzv_backend: static, same_network: true, tpu_name: null}
""",
        """
--use_deepspeed --mixed_precision=fp16 -n4 --zero_stage=3 --gradient_accumulation_steps=2
--offload_optimizer_device=none --offload_param_device=cpu
--zero3_init_flag --zero3_save_16bit_model
""",
    ),
    "0.20": (
        """
{distributed_type: FSDP, fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP,
fsdp_backward_prefetch_policy: BACKWARD_PRE, fsdp_offload_params: false, fsdp_sharding_strategy: 1,
fsdp_state_dict_type: FULL_STATE_DICT, fsdp_transformer_layer_cls_to_wrap: 'BertLayer,T5Block'},
machine_rank: 1, main_process_ip: 10.0.0.1, main_process_port: 4000, mixed_precision: bf16,
num_machines: 2, num_processes: 16, rdzv_backend: static, same_network: true, tpu_env: [],
tpu_use_cluster: false, tpu_use_sudo: false}
""",
        """
--use_fsdp --mixed_precision=bf16 -n16 --num_machines=2 --machine_rank=1 --main_process_ip=10.0.0.1
--main_process_port=4000 --rdzv_backend=static --fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP
--fsdp_backward_prefetch=BACKWARD_PRE --fsdp_state_dict_type=FULL_STATE_DICT
--fsdp_transformer_layer_cls_to_wrap=BertLayer,T5Block
""",
    ),
    "1.15": (
        """
{debug: true, distributed_type: FSDP, dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: max-autotune},
enable_cpu_affinity: true, fp8_config: {amax_compute_algorithm: max, amax_history_length: 512,
backend: TE, fp8_format: E4M3, override_linear_precision: [false, true, false]}, fsdp_config:
{fsdp_reshard_after_forward: false, fsdp_version: 2, fsdp_activation_checkpointing: true,
fsdp_activation_checkpointing_offload: true}, gpu_ids: all, mixed_precision: fp8, num_machines: 1,
num_processes: 8, parallelism_config: {parallelism_config_cp_comm_strategy: alltoall,
parallelism_config_cp_size: 2, parallelism_config_dp_shard_size: 4}}
""",
        """
--use_fsdp --debug -n8 --mixed_precision=fp8 --dynamo_backend=inductor --dynamo_mode=max-autotune
--enable_cpu_affinity --fp8_amax_compute_algo=max --fp8_amax_history_len=512 --fp8_backend=te
--fp8_format=E4M3 --fp8_override_linear_precision=no,yes,no --fsdp_version=2
--no_fsdp_reshard_after_forward --fsdp_activation_checkpointing
--fsdp_activation_checkpointing_offload
--use_parallelism_config --parallelism_config_cp_comm_strategy=alltoall
--parallelism_config_cp_size=2 --parallelism_config_dp_shard_size=4
""",
    ),
    "no": ("{distributed_type: NO, use_cpu: true}", "--cpu"),
    "tpu": (
        "{distributed_type: XLA, tpu_use_cluster: true, tpu_vm: [a, b], tpu_name: t, tpu_zone: z}",
        "--tpu --tpu_cluster --vm=a --vm=b --tpu_name=t --tpu_zone=z",
    ),
    "torchrun for DeepSpeed": (
        "{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_multinode_launcher: standard}}",
        "--use_deepspeed",
    ),
}


@pytest.mark.parametrize(("text", "flags"), LAYOUTS.values(), ids=[*LAYOUTS])
def test_layouts(text: str, flags: str) -> None:
    file = imported(text)
    assert (LaunchConfig(**file.values), file.notes) == (config_of(flags), ())


# The second is as ClusterConfig of 1.0.1 writes it for several processes on CPUs.
DROPPED = {
    "distributed_type: MULTI_XPU\nnum_processes: -1": (
        "--multi_gpu",
        ["distributed_type MULTI_XPU: imported as multi_gpu", "num_processes -1: dropped"],
    ),
    """
{distributed_type: MULTI_CPU, ipex_config: {ipex: true, use_xpu: true}, same_network: false, use_cpu: true,
mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: /hosts}, num_processes: 4}
""": (
        "--cpu -n4 --no_same_network",
        [
            "ipex: dropped; accelfn doesn't use Intel's extension",
            "use_xpu: dropped; torch detects an XPU itself",
            "mpirun_ccl: dropped; set CCL_WORKER_COUNT instead",
            "mpirun_hostfile: dropped; run: mpirun --hostfile FILE python train.py",
        ],
    ),
    """
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_multinode_launcher: pdsh, deepspeed_hostfile: hosts, zero_stage: 2,
  zero3_init_flag: true}
""": (
        "--use_deepspeed --zero_stage=2",
        [
            "deepspeed_multinode_launcher: dropped; start accelfn launch on every machine, or",
            "deepspeed_hostfile: dropped; start accelfn launch on every machine, or run: deepspeed",
            "zero3_init_flag: dropped; it needs zero_stage 3",
        ],
    ),
}


@pytest.mark.parametrize("text", DROPPED)
def test_what_has_no_place_is_said(text: str) -> None:
    flags, notes = DROPPED[text]
    file = imported(text)
    assert LaunchConfig(**file.values) == config_of(flags)
    assert [note[: len(begin)] for note, begin in zip(file.notes, notes, strict=True)] == notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: NO\nflying: yes", "default_config.yaml, line 2: unknown key 'flying'"),
        ("distributed_type: QUANTUM", "unknown distributed_type 'QUANTUM'. Correct it"),
        ("distributed_type: DEEPSPED", "'DEEPSPED'. Did you mean DEEPSPEED?"),
        (
            "mixed_precision: fp32",
            "default_config.yaml, line 1: mixed_precision: it must be one of no, fp16, bf16",
        ),
        (
            "num_machines: 2\nmain_process_ip: m\ndeepspeed_config: {deepspeed_multinode_launcher: pdsh}",
            "deepspeed_multinode_launcher: accelfn launch starts the processes of one machine. Remove",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_versoin: 2",
            "default_config.yaml, line 3: unknown key 'fsdp_config.fsdp_versoin'. Did you mean fsdp_version?",
        ),
        ("fsdp_config:\n  versoin: 2", "line 2: unknown key 'fsdp_config.versoin'. Did you mean version?"),
        (
            "deepspeed_config:\n  zero_stage: 2\n  overlap_comm: true",
            "line 3: unknown key 'deepspeed_config.overlap_comm'. If it is one of DeepSpeed's own",
        ),
    ],
)
def test_invalid_files_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        imported(text)


# A file as it is written for Accelerate, flags beside it, and further flags with which they mean the same.
BESIDE = {
    "machines": (
        "num_machines: 2\nnum_processes: 16",
        "--main_process_ip=h --machine_rank=1",
        "--num_machines=2 -n16",
    ),
    "fewer processes": ("gpu_ids: '0,1,2,3'\nnum_processes: 8", "-n4", "--gpu_ids=0,1,2,3"),
    "one process": ("distributed_type: MULTI_GPU\nnum_processes: 8", "-n1", ""),
    "one accelerator": ("distributed_type: MULTI_GPU", "--gpu_ids=3", ""),
    "one machine": (
        "num_machines: 2\nmachine_rank: 1\nmain_process_ip: h",
        "--num_machines=1",
        "--main_process_ip=h",
    ),
    "endpoint": ("main_process_ip: h\nmain_process_port: 5", "--rdzv_endpoint=h:6", ""),
    "affinity": ("distributed_type: MULTI_CPU\nenable_cpu_affinity: true", "", "--cpu"),
    "strategy": (
        "fsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}",
        "--use_fsdp",
        "--fsdp_sharding_strategy=2",
    ),
    "strategy of version 1": (
        "fsdp_config: {fsdp_version: 1, fsdp_reshard_after_forward: FULL_SHARD}",
        "--use_fsdp",
        "--fsdp_sharding_strategy=1",
    ),
    "cp": (
        "distributed_type: FSDP\nparallelism_config: {parallelism_config_cp_size: 2}",
        "--fsdp_version=2 -n2",
        "--use_fsdp --use_parallelism_config --parallelism_config_cp_size=2",
    ),
    "fp8": (
        "fp8_config:\n  override_linear_precision: (false, true, false)",
        "--mixed_precision=fp8",
        "--fp8_override_linear_precision=no,1,0",
    ),
    "comment": ("_comment: mine\nfsdp_config: {_comment: my}", "--use_fsdp", ""),
}


@pytest.mark.parametrize("name", BESIDE)
def test_flags_fill_and_correct_a_file_before_it_is_checked(name: str, tmp_path: Path) -> None:
    text, flags, meaning = BESIDE[name]
    path = tmp_path / "a.yaml"
    path.write_text(text if "distributed_type" in text else f"distributed_type: NO\n{text}")
    given = parse_flags(flags.split()).flags
    assert resolve(given, {}, read_any_config(str(path))).config == config_of(f"{flags} {meaning}")


def test_a_variable_of_the_shell_selects_accelerators_before_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\ngpu_ids: '0,1,2,3'")
    file = read_any_config(str(tmp_path / "a.yaml"))
    assert resolve({}, {"CUDA_VISIBLE_DEVICES": "5"}, file).config.gpu_ids == "all"
