"""Facts about a machine, from a /dev and a /sys of our own making; and what a plan does with them."""

import re
from pathlib import Path

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch import Machine, Script, parse_flags, plan_launch, resolve
from accelfn.launch.plan.machine import read_machine


def make(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cards_of_nvidia_are_counted(tmp_path: Path) -> None:
    make(tmp_path, dev__nvidia0="", dev__nvidia1="", dev__nvidiactl="")
    assert read_machine({}, root=str(tmp_path)).devices == 2
    assert read_machine({"CUDA_VISIBLE_DEVICES": "1"}, root=str(tmp_path)).devices == 1
    assert read_machine({"CUDA_VISIBLE_DEVICES": ""}, root=str(tmp_path)).devices == 0


@pytest.mark.parametrize(
    ("models", "driver", "expected"),
    [
        (("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4070 Ti"), "535.104.05", True),
        (("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"), "550.40.06", True),
        (("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"), "550.40.07", False),
        (("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"), "560.28", False),
        (("NVIDIA GeForce RTX 4090",), "535.104.05", False),
        (("NVIDIA RTX 4000 Ada", "NVIDIA RTX 4000 Ada"), "535.104.05", False),
        (("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"), "", False),
    ],
)
def test_false_peer_access_is_detected(
    models: tuple[str, ...], driver: str, expected: bool, tmp_path: Path
) -> None:
    place = tmp_path / "proc/driver/nvidia"
    for number, model in enumerate(models):
        (place / f"gpus/{number}").mkdir(parents=True)
        (place / f"gpus/{number}/information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 40\n")
    if driver:
        line = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sat Aug 19 01:15:15 UTC 2023\n"
        (place / "version").write_text(f"{line}GCC version:  gcc version 12.2.0\n")
    assert read_machine({}, root=str(tmp_path)).has_false_peers is expected


def test_cards_of_amd_are_counted_and_so_is_that_there_are_none(tmp_path: Path) -> None:
    assert read_machine({"CUDA_VISIBLE_DEVICES": "0,1"}, root=str(tmp_path)).devices == 0
    for node, number in enumerate((0, 4711, 4712)):  # node 0 is the processor
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(str(number))
    assert read_machine({}, root=str(tmp_path)).devices == 2


@pytest.mark.parametrize(
    ("file", "variable"),
    [("dev/davinci0", "ASCEND_RT_VISIBLE_DEVICES"), ("dev/accel/accel1", "HABANA_VISIBLE_MODULES")],
)
def test_other_makers_have_variables_of_their_own(file: str, variable: str, tmp_path: Path) -> None:
    make(tmp_path, **{file.replace("/", "__"): ""})
    machine = read_machine({}, root=str(tmp_path))
    assert (machine.devices, machine.device_variable) == (None, variable)
    argv = ("--gpu_ids=0,1", "t.py")
    plan = plan_launch(resolve(parse_flags(argv).flags, {}), Script("t.py"), {}, machine)
    assert dict(plan.env_changes)[variable] == "0,1"


def test_intels_accelerators_are_known_by_their_maker(tmp_path: Path) -> None:
    make(tmp_path, sys__class__drm__renderD128__device__vendor="0x8086\n")
    assert read_machine({}, root=str(tmp_path)).device_variable == "ZE_AFFINITY_MASK"


def check(*argv: str, devices: int | None, env: dict[str, str] | None = None) -> str:
    parsed = parse_flags((*argv, "train.py"))
    plan = plan_launch(resolve(parsed.flags, {}), Script("train.py"), env or {}, Machine(devices=devices))
    found = re.search(r"--nproc-per-node=(\d+)", " ".join(plan.argv))
    return found[1] if found else "1"


def test_one_process_per_accelerator_by_default() -> None:
    assert check(devices=8) == "8"
    assert check("--cpu", devices=8) == "1"
    assert check("--gpu_ids=0,5", devices=8) == "2"
    assert check(devices=None) == "1"
    assert check("--num_machines=2", "--main_process_ip=h", "--machine_rank=0", devices=8) == "8"


@pytest.mark.parametrize(
    ("argv", "devices", "env", "message"),
    [
        (
            ("--num_processes=8",),
            4,
            {},
            "need as many accelerators, but this machine has 4. Use --num_processes 4, or --cpu",
        ),
        (("--multi_gpu",), 1, {}, "needs at least two accelerators: got 1."),
        (("--num_processes=2", "--multi_gpu"), 0, {}, "need as many accelerators, but there are 0."),
        (("--num_processes=4", "--gpu_ids=0,1"), 4, {}, "--gpu_ids 0,1 lists 2"),
        (
            ("--num_processes=2", "--multi_gpu"),
            0,
            {"CUDA_VISIBLE_DEVICES": ""},
            "with CUDA_VISIBLE_DEVICES= there are 0",
        ),
    ],
)
def test_more_processes_than_accelerators(
    argv: tuple[str, ...], devices: int, env: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check(*argv, devices=devices, env=env)


def test_the_default_number_of_processes_is_printed() -> None:
    plan = plan_launch(resolve({}, {}), Script("t.py"), {}, Machine(devices=2))
    assert plan.notes == ("2 processes on this machine, one per accelerator",)
    assert plan_launch(resolve({}, {}), Script("t.py"), {}, Machine(devices=1)).notes == ()


def test_hidden_accelerators_select_the_cpu() -> None:
    assert check("--num_processes=4", devices=0, env={"CUDA_VISIBLE_DEVICES": ""}) == "4"
    assert check("--num_processes=4", "--cpu", devices=2) == "4"


def test_processes_are_bound_by_torchrun() -> None:
    for count in ("1", "2"):
        argv = ("--enable_cpu_affinity", f"--num_processes={count}", "t.py")
        plan = plan_launch(resolve(parse_flags(argv).flags, {}), Script("t.py"), {}, Machine(devices=4))
        assert "--numa-binding=node" in plan.argv
    with pytest.raises(ConfigurationError, match="Leave it out on CPUs and TPUs"):
        check("--enable_cpu_affinity", "--cpu", devices=4)
