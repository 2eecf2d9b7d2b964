"""DeepSpeed's launcher: its hostfile, its filters, and the command."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import ConfigurationError
from accelfn.launch import LaunchPlan, Machine, Script, parse_flags, plan_launch, resolve
from accelfn.launch.config import LaunchConfig
from accelfn.launch.main import main
from accelfn.launch.plan.commands import WORKER, format_plan
from accelfn.launch.plan.deepspeed import choose_hosts, read_hosts

TWO = {"n0": 4, "n1": 4}


def plan_of(*argv: str, hosts: Mapping[str, int] = TWO) -> LaunchPlan:
    parsed = parse_flags(("--use_deepspeed", "--deepspeed_hostfile=/h/hosts", *argv))
    assert parsed.script is not None
    script = Script(parsed.script, parsed.script_args)
    env = {"OMP_NUM_THREADS": "1"}
    return plan_launch(resolve(parsed.flags, {}), script, env, Machine(cores=8, hosts=hosts))


def test_one_process_starts_through_torchrun_too() -> None:
    parsed = parse_flags(("--use_deepspeed", "--num_processes=1", "train.py"))
    plan = plan_launch(resolve(parsed.flags, {}), Script("train.py"), {}, Machine(cores=8))
    assert plan.way == "torchrun"
    assert "--nproc-per-node=1" in plan.argv


def test_the_command_for_pdsh_sets_the_variables_of_each_process() -> None:
    plan = plan_of("--zero_stage=3", "--main_process_port=77", "train.py", "--x", "a b")
    assert plan.argv == (
        *("python", "-m", "deepspeed.launcher.runner", "--no_local_rank", "--hostfile=/h/hosts"),
        *("--launcher=pdsh", "--master_port=77", "--no_python", "env"),
        *("ACCELERATE_DEEPSPEED_ZERO_STAGE=3", "ACCELERATE_USE_DEEPSPEED=true"),
        *("ACCELFN_DEEPSPEED_ZERO_STAGE=3", "ACCELFN_USE_DEEPSPEED=true"),
        *("python", WORKER, "train.py", "--x", "a b"),
    )
    assert dict(plan.env_changes)["ACCELFN_DEEPSPEED_ZERO_STAGE"] == "3"
    assert format_plan(plan).endswith("train.py --x 'a b'")


@pytest.mark.parametrize("launcher", ["openmpi", "mvapich", "mpich"])
def test_mpi_gets_the_address_of_the_first_host(launcher: str) -> None:
    plan = plan_of(f"--deepspeed_multinode_launcher={launcher}", "-m", "train")
    assert {f"--launcher={launcher}", "MASTER_ADDR=n0", "MASTER_PORT=29500"} <= set(plan.argv)
    assert plan.argv[-4:] == ("python", WORKER, "-m", "train")
    with pytest.raises(ConfigurationError, match=f"{launcher} starts every slot of every host"):
        plan_of(f"--deepspeed_multinode_launcher={launcher}", "--deepspeed_exclusion_filter=n1", "train.py")


def test_srun_hands_variables_on_and_runs_python_itself() -> None:
    plan = plan_of("--deepspeed_multinode_launcher=slurm", "--main_process_ip=10.0.0.1", "train.py")
    assert plan.argv[-3:] == ("--master_port=29500", WORKER, "train.py")
    assert ("MASTER_ADDR", "10.0.0.1") in plan.env_changes
    with pytest.raises(ConfigurationError, match="slurm runs Python"):
        plan_of("--deepspeed_multinode_launcher=slurm", "--no_python", "train")


def test_without_ssh_each_machine_is_started_by_itself() -> None:
    flags = ("--deepspeed_multinode_launcher=nossh", "--num_machines=2", "--machine_rank=1", "train.py")
    plan = plan_of(*flags)
    assert {"--no_ssh", "--node_rank=1", "--master_addr=n0"} <= set(plan.argv)
    with pytest.raises(ConfigurationError, match=r"contradicts the hostfile.* Use --num_machines 3"):
        plan_of(*flags, hosts={**TWO, "n2": 4})


def test_the_launcher_standard_is_torchrun() -> None:
    flags = ("--deepspeed_multinode_launcher=standard", "--num_machines=2", "--main_process_ip=n0")
    assert plan_of(*flags, "--machine_rank=0", "--num_processes=8", "train.py").way == "torchrun"


def test_processes_and_hosts_are_those_of_the_filter() -> None:
    filtered = plan_of("--deepspeed_inclusion_filter=n1:0,2", "train.py")
    assert "--include=n1:0,2" in filtered.argv
    assert "--force_multi" in filtered.argv, "a single host is not always this one"
    assert filtered.local_size == 2
    assert "--force_multi" not in plan_of("train.py", hosts={"localhost": 2}).argv
    fewer = plan_of("--num_processes=4", "train.py")
    assert "--num_gpus=2" in fewer.argv
    assert fewer.local_size == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num_processes=3", "--num_processes 3 contradicts the hostfile: 2 hosts with 8 slots"),
        ("--num_processes=16", "--num_processes 16 contradicts"),
        ("--num_processes=4 --deepspeed_multinode_launcher=openmpi", "--num_processes 4 contradicts"),
        ("--num_machines=3", r"--num_machines 3 contradicts the hostfile.* Use --num_machines 2"),
        ("--gpu_ids=0,1", r"--deepspeed_inclusion_filter, such as node1:0,1"),
        ("--deepspeed_inclusion_filter=n0 --deepspeed_exclusion_filter=n1", "exclude each other"),
        ("--deepspeed_inclusion_filter=n9", "names 'n9', which the hostfile doesn't list. It lists n0, n1"),
        ("--deepspeed_exclusion_filter=n0:7", "names slot 7 of n0, whose slots are 0 to 3"),
        ("--deepspeed_exclusion_filter=n0@n1", "leaves no slot"),
        ("--deepspeed_inclusion_filter=n0:a", "hosts joined by @"),
        ("--deepspeed_multinode_launcher=standard --deepspeed_inclusion_filter=n0", "torchrun starts this"),
        ("--deepspeed_multinode_launcher=nossh", "needs --num_machines and --machine_rank"),
        ("--mpirun_hostfile=/h/hosts", "--mpirun_hostfile and --deepspeed_hostfile exclude"),
        ("--tpu", "--use_deepspeed and --tpu exclude each other"),
        ("--max_restarts=1", "--max_restarts is for torchrun, and has no effect with DeepSpeed's launcher"),
    ],
)
def test_what_contradicts_the_hostfile_or_the_launcher_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(*flags.split(), "train.py")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--deepspeed_multinode_launcher=pdsh", "pdsh needs --deepspeed_hostfile"),
        ("--deepspeed_inclusion_filter=n0", "chooses among the hosts of --deepspeed_hostfile"),
    ],
)
def test_options_of_the_launcher_without_hosts_are_refused(flag: str, message: str) -> None:
    resolved = resolve(parse_flags(("--use_deepspeed", flag, "train.py")).flags, {})
    with pytest.raises(ConfigurationError, match=message):
        plan_launch(resolved, Script("train.py"), {}, Machine(cores=8))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n1", "hosts, line 3 must be a host and its number of slots, such as node1 slots=8; got 'n1'"),
        ("n1 slots 4", "line 3 must be"),
        ("n1 slots=0", "line 3 must be"),
        ("n0 slots=2", "line 3 names the host 'n0' again"),
    ],
)
def test_a_bad_line_of_a_hostfile_is_named(line: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        read_hosts(f"# hosts\nn0 slots=4\n{line}\n", "hosts")


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), min_size=1), st.data())
def test_what_is_included_and_what_is_excluded_are_all_slots(
    hosts: dict[str, int], data: st.DataObject
) -> None:
    every = [f"{host}:{slot}" for host, slots in hosts.items() for slot in range(slots)]
    text = "@".join(data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True)))
    included = choose_hosts(hosts, LaunchConfig(deepspeed_inclusion_filter=text))
    assert sum(included.values()) == text.count("@") + 1
    if len(every) > text.count("@") + 1:
        excluded = choose_hosts(hosts, LaunchConfig(deepspeed_exclusion_filter=text))
        both = {host: included.get(host, 0) + excluded.get(host, 0) for host in hosts}
        assert both == hosts


def test_a_missing_package_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr("os.execvpe", None)
    script = tmp_path / "train.py"
    script.touch()
    assert main(["launch", "--use_deepspeed", "--num_machines=1", str(script)]) == 2
    assert "needs DeepSpeed, which isn't installed for " in (error := capsys.readouterr().err)
    assert "pip install 'accelfn[deepspeed]'" in error
