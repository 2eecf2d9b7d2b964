"""What started processes get as variables, that a context reads it, and what depends on the machine."""

import re
from pathlib import Path

import pytest

from accelfn.config import DeepSpeedPlugin, MegatronLMPlugin, read_settings
from accelfn.errors import ConfigurationError
from accelfn.launch import Machine, Script, parse_flags, plan_launch, resolve
from accelfn.launch.machine import read_machine
from tests.launch.plan.plans import plan_of

WORLD = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "RANK", "WORLD_SIZE"}
ONE = {"OMP_NUM_THREADS": "1"}


def variables_of(flags: str, env: dict[str, str] | None = None, file: str = "") -> dict[str, str]:
    changes = dict(plan_of(f"{flags} train.py", env=env, file=file).env_changes)
    return {name: value for name, value in changes.items() if name not in WORLD}


def twice(text: str) -> dict[str, str]:
    pairs = [word.split("=") for word in text.split()]
    return {f"{prefix}_{name}": value for prefix in ("ACCELFN", "ACCELERATE") for name, value in pairs}


DEBUG = {"ACCELFN_DEBUG": "true", "ACCELERATE_DEBUG_MODE": "true"}
FP8 = "--mixed_precision=fp8 --fp8_backend=te --fp8_override_linear_precision=false,true,false"
OFI = twice("DYNAMO_BACKEND=OFI DYNAMO_USE_FULLGRAPH=true")
EXPORTS: list[tuple[str, dict[str, str], dict[str, str]]] = [
    # Processes share the cores, unless the user says how.
    ("", {}, {"OMP_NUM_THREADS": "8"}),
    ("--num_processes 3", {}, {"OMP_NUM_THREADS": "2"}),
    ("--num_processes 20", {}, {"OMP_NUM_THREADS": "1"}),
    ("", {"OMP_NUM_THREADS": "5"}, {}),
    ("--num_cpu_threads_per_process 3", {"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "3"}),
    ("--mixed_precision bf16 --cpu", ONE, twice("MIXED_PRECISION=bf16 USE_CPU=true")),
    ("--gradient_accumulation_steps 4 --debug", ONE, {**twice("GRADIENT_ACCUMULATION_STEPS=4"), **DEBUG}),
    ("--gpu_ids 1,3", {**ONE, "CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1,3"}),
    ("--dynamo_backend=ofi", ONE, twice("DYNAMO_BACKEND=OFI")),
    ("--dynamo_backend=ofi --dynamo_use_fullgraph", {}, {**OFI, "OMP_NUM_THREADS": "8"}),
    (FP8, ONE, twice("MIXED_PRECISION=fp8 FP8_BACKEND=TE FP8_OVERRIDE_DGRAD=true")),
]


@pytest.mark.parametrize(("flags", "env", "expected"), EXPORTS)
def test_only_what_was_given_changes_the_environment(
    flags: str, env: dict[str, str], expected: dict[str, str]
) -> None:
    before = dict(env)
    assert variables_of(flags, env) == expected
    assert env == before


def test_a_file_gives_way_to_the_shell_and_its_inactive_sections_are_not_exported() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in variables_of("", {"CUDA_VISIBLE_DEVICES": "5"}, "gpu_ids: 0,1")
    assert variables_of("", file="gpu_ids: 0,1")["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert variables_of("", ONE, "fsdp: {version: 2}\ndeepspeed: {zero_stage: 2}") == {}


def test_a_context_reads_exported_options_of_fsdp_and_the_mesh() -> None:
    flags = (
        "--num_processes=2 --use_fsdp --fsdp_version=2 --fsdp_offload_params --use_parallelism_config "
        "--parallelism_config_dp_shard_size=2 --fsdp_auto_wrap_policy=transformer_based_wrap "
        "--fsdp_transformer_layer_cls_to_wrap=Block"
    )
    settings = read_settings(variables_of(flags))
    plugin, mesh = settings.fsdp_plugin, settings.parallelism_config
    assert plugin is not None
    assert mesh is not None
    assert (plugin.fsdp_version, plugin.offloads_params) == (2, True)
    assert (plugin.transformer_cls_names_to_wrap, mesh.dp_shard_size) == (("Block",), 2)


def test_a_context_reads_exported_options_of_the_engines() -> None:
    flags = "--offload_optimizer_device=cpu --zero3_init_flag=no --deepspeed_moe_layer_cls_names=A,B"
    variables = variables_of(f"--use_deepspeed --zero_stage=3 --gradient_clipping=0.5 {flags}")
    assert read_settings(variables).deepspeed_plugin == DeepSpeedPlugin(
        zero_stage=3,
        offload_optimizer_device="cpu",
        zero3_init_flag=False,
        transformer_moe_cls_names=("A", "B"),
        gradient_clipping=0.5,
    )
    disk = "--use_deepspeed --offload_optimizer_device=nvme --offload_optimizer_nvme_path=/n"
    plugin = read_settings(variables_of(disk)).deepspeed_plugin
    assert plugin is not None
    assert plugin.offload_optimizer_nvme_path == "/n"
    megatron = read_settings(variables_of("--use_megatron_lm --megatron_lm_tp_degree=2")).megatron_lm_plugin
    assert megatron == MegatronLMPlugin(tp_degree=2)


# --- the machine ---------------------------------------------------------------------------------


def machine_of(root: Path, files: dict[str, str], env: dict[str, str] | None = None) -> Machine:
    """Read a machine with these files in a /dev, /sys and /proc of our own making."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_machine(env or {}, root=str(root))


def test_cards_are_counted_and_so_is_that_there_are_none(tmp_path: Path) -> None:
    assert machine_of(tmp_path / "none", {}, {"CUDA_VISIBLE_DEVICES": "0,1"}).devices == 0
    nvidia = {"dev__nvidia0": "", "dev__nvidia1": "", "dev__nvidiactl": ""}
    for visible, count in ((None, 2), ("1", 1), ("", 0)):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert machine_of(tmp_path / "nvidia", nvidia, env).devices == count
    nodes = {
        f"sys__class__kfd__kfd__topology__nodes__{node}__gpu_id": gpu
        for node, gpu in enumerate(("0", "47", "48"))
    }
    assert machine_of(tmp_path / "amd", nodes).devices == 2  # node 0 is the processor


@pytest.mark.parametrize(
    ("file", "text", "variable"),
    [
        ("dev__davinci0", "", "ASCEND_RT_VISIBLE_DEVICES"),
        ("dev__accel__accel1", "", "HABANA_VISIBLE_MODULES"),
        ("sys__class__drm__renderD128__device__vendor", "0x8086\n", "ZE_AFFINITY_MASK"),
    ],
)
def test_other_makers_have_variables_of_their_own(
    file: str, text: str, variable: str, tmp_path: Path
) -> None:
    machine = machine_of(tmp_path, {file: text})
    assert (machine.devices, machine.device_variable) == (None, variable)
    plan = plan_launch(resolve(parse_flags(["--gpu_ids=0,1"]).flags, {}), Script("t.py"), {}, machine)
    assert dict(plan.env_changes)[variable] == "0,1"


@pytest.mark.parametrize(
    ("models", "driver", "expected"),
    [
        ("GeForce RTX 4090, GeForce RTX 4070 Ti", "535.104.05", True),
        ("GeForce RTX 4090, GeForce RTX 4090", "550.40.06", True),
        ("GeForce RTX 4090, GeForce RTX 4090", "550.40.07", False),
        ("GeForce RTX 4090", "535.104.05", False),
        ("RTX 4000 Ada, RTX 4000 Ada", "535.104.05", False),
        ("GeForce RTX 4090, GeForce RTX 4090", "", False),
    ],
)
def test_false_peer_access_is_detected(models: str, driver: str, expected: bool, tmp_path: Path) -> None:
    place = tmp_path / "proc/driver/nvidia"
    for number, model in enumerate(models.split(", ")):
        (place / f"gpus/{number}").mkdir(parents=True)
        (place / f"gpus/{number}/information").write_text(f"Model: \t\t NVIDIA {model}\nIRQ:   \t\t 40\n")
    if driver:
        line = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sat Aug 19 01:15:15 UTC 2023\n"
        (place / "version").write_text(f"{line}GCC version:  gcc version 12.2.0\n")
    assert machine_of(tmp_path, {}).has_false_peers is expected


def test_false_peer_access_is_disabled() -> None:
    def reported(flags: str, env: dict[str, str] | None = None) -> dict[str, str]:
        changes = plan_of(f"{flags} t.py", env=env, has_false_peers=True).env_changes
        return {name: value for name, value in changes if name.startswith("NCCL")}

    assert reported("--num_processes=2") == {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    assert reported("--num_processes=2", {"NCCL_P2P_DISABLE": "0"}) == {"NCCL_IB_DISABLE": "1"}
    assert reported("--num_processes=2 --cpu") == {}


def processes_of(flags: str, devices: int | None, env: dict[str, str] | None = None) -> str:
    plan = plan_of(f"{flags} t.py", env=env, devices=devices)
    found = re.search(r"--nproc-per-node=(\d+)", " ".join(plan.argv))
    return found[1] if found else "1"


def test_one_process_per_accelerator_by_default() -> None:
    assert processes_of("", 8) == "8"
    assert processes_of("--cpu", 8) == processes_of("", None) == "1"
    assert processes_of("--gpu_ids=0,5", 8) == "2"
    assert processes_of("--num_machines=2 --main_process_ip=h --machine_rank=0", 8) == "8"
    # Hidden accelerators select the CPU.
    assert processes_of("--num_processes=4", 0, {"CUDA_VISIBLE_DEVICES": ""}) == "4"
    assert processes_of("--num_processes=4 --cpu", 2) == "4"
    assert plan_of("t.py", devices=2).notes == ("2 processes on this machine, one per accelerator",)
    assert plan_of("t.py", devices=1).notes == ()


HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
TOO_MANY: list[tuple[str, int, dict[str, str], str]] = [
    ("--num_processes=8", 4, {}, "but it has 4. Use --num_processes 4, or --cpu"),
    ("--multi_gpu", 1, {}, "needs at least two accelerators: got 1."),
    ("--num_processes=2 --multi_gpu", 0, {}, "accelerators, but it has 0. Use --cpu"),
    ("--num_processes=4 --gpu_ids=0,1", 4, {}, "--gpu_ids 0,1 lists 2"),
    ("--num_processes=2 --multi_gpu", 0, HIDDEN, "but it has 0 (CUDA_VISIBLE_DEVICES is set). Use"),
    ("--enable_cpu_affinity --cpu", 4, {}, "Leave it out on CPUs and TPUs"),
]


@pytest.mark.parametrize(("flags", "devices", "env", "message"), TOO_MANY)
def test_more_processes_than_accelerators(
    flags: str, devices: int, env: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        processes_of(flags, devices, env)
