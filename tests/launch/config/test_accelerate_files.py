"""Files of Accelerate as people have them: understood, or refused with file, line and remedy."""

import json
import re
from pathlib import Path

import pytest
import yaml

from accelfn.errors import ConfigurationError
from accelfn.launch import Machine, Script, parse_flags, plan_launch, resolve
from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_file import read_config

# Each file, after what is expected of it: the flags that mean the same, how a machine with eight
# accelerators starts it, and the notes; or the error.
ALL = (Path(__file__).parent / "accelerate_files.txt").read_text()
CASES: dict[str, tuple[list[list[str]], str]] = {
    name: ([line.split(": ", 1) for line in head.splitlines()], text)
    for name, head, text in re.findall(r"=== (.*)\n((?:\w+: .*\n)+)---\n((?:(?!===).*\n)+)", ALL)
}
UNDERSTOOD = [name for name, (expected, _) in CASES.items() if expected[0][0] == "flags"]
REFUSED = [name for name in CASES if name not in UNDERSTOOD]


def config_of(flags: str) -> LaunchConfig:
    return resolve(parse_flags(flags.split()).flags, {}).config


@pytest.mark.parametrize("path", ["default_config.yaml", "default_config.json"])
@pytest.mark.parametrize("name", UNDERSTOOD)
def test_a_file_means_what_it_means_there(
    name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, flags), (_, started), *notes), text = CASES[name]
    Path(path).write_text(text if path.endswith(".yaml") else json.dumps(yaml.safe_load(text)))
    file = read_config(path)
    resolved = resolve({}, {}, file)
    assert resolved.config == config_of(flags)
    plan = plan_launch(resolved, Script("train.py"), {}, Machine(devices=8))
    processes = re.search(r"--nproc-per-node=(\d+)", " ".join(plan.argv))
    assert f"{plan.way} {processes[1] if processes else ''}".strip() == started
    expected = [begin for _, begin in notes]
    assert [note[: len(begin)] for note, begin in zip(file.notes[1:], expected, strict=True)] == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_with_line_and_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, message),), text = CASES[name]
    Path("a.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        resolve({}, {}, read_config("a.yaml"))
    if not message.startswith("--"):
        assert str(caught.value).startswith("a.yaml")
    assert message in str(caught.value)


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
    assert resolve(given, {}, read_config(str(path))).config == config_of(f"{flags} {meaning}")


def test_a_variable_of_the_shell_selects_accelerators_before_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\ngpu_ids: '0,1,2,3'")
    file = read_config(str(tmp_path / "a.yaml"))
    assert resolve({}, {"CUDA_VISIBLE_DEVICES": "5"}, file).config.gpu_ids == "all"
