"""The launch plan is a pure function: flags in, torchrun's command line and variables out."""

import dataclasses
import os
import subprocess
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import ConfigurationError
from accelfn.launch import LaunchPlan, Machine, Script, format_plan, parse_flags, plan_launch, resolve
from accelfn.launch.plan.commands import AGENT, WORKER

TWO_MACHINES = ("--num_machines", "2", "--num_processes", "8", "--main_process_ip", "10.0.0.1")


def plan_of(*argv: str, env: dict[str, str] | None = None, cores: int = 8) -> LaunchPlan:
    parsed = parse_flags(argv)
    assert parsed.script is not None
    script = Script(parsed.script, parsed.script_args)
    return plan_launch(resolve(parsed.flags, {}), script, env or {}, Machine(cores=cores))


def read_with_torchrun(plan: LaunchPlan) -> dict[str, object]:
    """Parse a plan with the parser that will read it."""
    from torch.distributed import run

    assert plan.argv[1] == AGENT
    parse_args = cast("Callable[[list[str]], object]", run.parse_args)  # pyright: ignore[reportUnknownMemberType]
    return vars(parse_args(list(plan.argv[2:])))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param(("--max_restarts", "1"), {"nnodes": "1", "nproc_per_node": "1"}, id="one process"),
        pytest.param(
            ("--num_processes", "4"),
            {"nproc_per_node": "4", "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"},
            id="one machine, any free port",
        ),
        pytest.param(
            ("--num_processes", "4", "--main_process_port", "0"),
            {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"},
            id="port 0 is any free port",
        ),
        pytest.param(
            ("--main_process_port", "4321"),
            {"rdzv_backend": "static", "rdzv_endpoint": "127.0.0.1:4321", "node_rank": 0},
            id="one machine, chosen port",
        ),
        pytest.param(
            ("--main_process_port", "4321", "--max_restarts", "2"),
            {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:4321", "local_addr": "127.0.0.1"},
            id="one machine, chosen port, several attempts",
        ),
        pytest.param(
            (*TWO_MACHINES, "--machine_rank", "1", "--max_restarts", "2"),
            {"rdzv_backend": "c10d", "rdzv_conf": "is_host=0", "local_addr": None},
            id="two machines, several attempts",
        ),
        pytest.param(
            (*TWO_MACHINES, "--machine_rank", "1"),
            {
                "nnodes": "2",
                "nproc_per_node": "4",
                "rdzv_backend": "static",
                "rdzv_endpoint": "10.0.0.1:29500",
                "node_rank": 1,
                "local_addr": None,
            },
            id="two machines, static",
        ),
        pytest.param(
            (*TWO_MACHINES, "--rdzv_backend", "c10d", "--main_process_port", "1234"),
            {"rdzv_backend": "c10d", "rdzv_endpoint": "10.0.0.1:1234", "rdzv_conf": ""},
            id="two machines, c10d",
        ),
        pytest.param(
            (*TWO_MACHINES, "--rdzv_backend=c10d", "--machine_rank=1", "--rdzv_conf=join_timeout=5"),
            {"rdzv_conf": "join_timeout=5,is_host=0"},
            id="c10d, the rank says who hosts the store",
        ),
        pytest.param(
            (*TWO_MACHINES, "--rdzv_backend=c10d", "--machine_rank=1", "--rdzv_conf=is_host=1"),
            {"rdzv_conf": "is_host=1"},
            id="c10d, the user's own word on the host stays",
        ),
        pytest.param(
            ("--num_processes=2", "--rdzv_endpoint=[fe80::1]:77", "--rdzv_id=a7"),
            {"rdzv_endpoint": "[fe80::1]:77", "rdzv_id": "a7"},
            id="endpoint and name",
        ),
        pytest.param(
            (
                "--max_restarts=3",
                "--monitor_interval=0.5",
                "--log_dir=logs",
                "--shutdown_timeout=9",
                "-t",
                "3",
                "-r",
                "1",
                "--role=w",
            ),
            {
                "max_restarts": 3,
                "monitor_interval": 0.5,
                "shutdown_timeout": 9,
                "log_dir": "logs",
                "tee": "3",
                "redirects": "1",
                "role": "w",
            },
            id="passed through",
        ),
    ],
)
def test_torchrun_understands_the_plan(flags: tuple[str, ...], expected: dict[str, object]) -> None:
    read = read_with_torchrun(plan_of(*flags, "train.py", "--x"))
    assert {name: read[name] for name in expected} == expected
    assert (read["training_script"], read["training_script_args"]) == (WORKER, ["train.py", "--x"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"nnodes": "1", "nproc_per_node": "1", "rdzv_endpoint": "127.0.0.1:0", "node_rank": 0}),
        (
            ("--main_process_port=77", "--max_restarts=3"),
            {"rdzv_endpoint": "127.0.0.1:77", "max_restarts": 3},
        ),
        ((*TWO_MACHINES, "--machine_rank=1"), {"rdzv_endpoint": "10.0.0.1:29500", "node_rank": 1}),
    ],
)
def test_elastic_agents_read_torchruns_options(flags: tuple[str, ...], expected: dict[str, object]) -> None:
    plan = plan_of("--elastic", "--heartbeat_timeout=2.5", *flags, "train.py", "--elastic")
    assert plan.argv[:4] == ("python", AGENT, "--elastic", "2.5")
    read = read_with_torchrun(dataclasses.replace(plan, argv=("python", AGENT, *plan.argv[4:])))
    assert {name: read[name] for name in expected} == expected
    assert read["training_script_args"] == ["train.py", "--elastic"]
    contact = plan.rendezvous or {"stops_on": (), "silent_s": 2.5}
    assert (contact["stops_on"], contact["silent_s"]) == ((), 2.5)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--rdzv_id=7", "--no_preflight"), "--rdzv_id and --no_preflight"),
        (("--rdzv_backend=c10d",), "--rdzv_backend"),
        (("--mpirun_hostfile=hosts",), "--mpirun_hostfile"),
        (("--use_deepspeed", "--deepspeed_hostfile=hosts"), "--deepspeed_hostfile"),
        (("--tpu",), "--tpu"),
        (("--compute_environment=AMAZON_SAGEMAKER",), "--compute_environment"),
        (("--enable_cpu_affinity",), "--enable_cpu_affinity"),
    ],
)
def test_other_ways_to_start_processes_are_not_elastic(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigurationError, match=f"by itself, which {named} would change"):
        plan_of("--elastic", *flags, "train.py")


@pytest.mark.parametrize(
    ("flag", "script", "rest"),
    [("-m", WORKER, ["-m", "train", "-x"]), ("--no_python", "train", ["-x"])],
)
def test_modules_and_programs(flag: str, script: str, rest: list[str]) -> None:
    read = read_with_torchrun(plan_of("--num_processes=2", flag, "train", "-x"))
    assert (read["training_script"], read["training_script_args"]) == (script, rest)
    assert read["no_python"] == (flag == "--no_python")


@pytest.mark.parametrize(
    ("flags", "argv"),
    [
        ((), ("python", "train", "-x")),
        (("-m",), ("python", "-m", "train", "-x")),
        (("--no_python",), ("train", "-x")),
    ],
)
def test_one_process_is_plain_python_in_a_world_of_one(flags: tuple[str, ...], argv: tuple[str, ...]) -> None:
    plan = plan_of(*flags, "train", "-x")
    assert (plan.way, plan.argv, plan.fills_port) == ("single", argv, "MASTER_PORT")
    assert {("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")} < set(plan.env_changes)


@given(st.lists(st.text(alphabet="-=_ax1 '\n", max_size=8)))
def test_script_arguments_pass_unchanged(script_args: list[str]) -> None:
    plan = plan_of("--num-processes", "2", "train.py", *script_args)
    assert plan.argv[-len(script_args) - 1 :] == ("train.py", *script_args)


@pytest.mark.parametrize(
    "script_args",
    [
        ("--", "a"),
        ("--", "--", "a", "--"),
        ("--m", "3"),  # torchrun alone: ambiguous, could be --max-restarts or --monitor-interval
        ("--num_processes", "7"),
        ("-h",),
        ("--dry_run",),
        ("-m", "--nnodes=3"),
        ("",),
    ],
    ids=repr,
)
def test_torchrun_keeps_its_hands_off_script_arguments(script_args: tuple[str, ...]) -> None:
    read = read_with_torchrun(plan_of("--num_processes=2", "train.py", *script_args))
    assert read["training_script_args"] == ["train.py", *script_args]
    assert (read["nnodes"], read["nproc_per_node"]) == ("1", "2")


@given(
    num_machines=st.integers(1, 64),
    local_size=st.integers(1, 64),
    cores=st.integers(1, 256),
    data=st.data(),
)
def test_machines_add_up_to_the_processes_asked_for(
    num_machines: int, local_size: int, cores: int, data: st.DataObject
) -> None:
    machine_rank = data.draw(st.integers(0, num_machines - 1))
    plan = plan_of(
        f"--num_processes={num_machines * local_size}",
        f"--num_machines={num_machines}",
        f"--machine_rank={machine_rank}",
        "--main_process_ip=10.0.0.1",
        "train.py",
        cores=cores,
    )
    assert f"--nproc-per-node={local_size}" in plan.argv
    assert f"--nnodes={num_machines}" in plan.argv
    threads = int(dict(plan.env_changes)["OMP_NUM_THREADS"])
    assert threads == 1 or threads * local_size <= cores
    assert (plan.hosts_port is not None) == (machine_rank == 0)
    assert (plan.rendezvous is not None) == (num_machines > 1)


def test_a_formatted_plan_runs_in_a_shell() -> None:
    plan = LaunchPlan(
        way="single",
        argv=("printf", "%s|%s|", "it's", "a b\n$HOME"),
        env_changes=(("ACCELFN_USE_CPU", "true"), ("OMP_NUM_THREADS", "2")),
    )
    shell = subprocess.run(["sh", "-c", format_plan(plan)], capture_output=True, text=True, check=True)
    assert shell.stdout == "it's|a b\n$HOME|"
    assert format_plan(plan).splitlines()[:2] == ["ACCELFN_USE_CPU=true \\", "OMP_NUM_THREADS=2 \\"]


def test_planning_leaves_the_environment_alone() -> None:
    before = dict(os.environ)
    plan_of("--mixed_precision", "bf16", "--cpu", "train.py")
    assert dict(os.environ) == before


@pytest.mark.parametrize("value", ["9", "hello", "1:5", "0:3,", "3\n", "0:3,1"])
@pytest.mark.parametrize("flag", ["tee", "redirects"])
def test_streams_that_torchrun_could_not_read(flag: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--{flag} "):
        plan_of("--num_processes=2", f"--{flag}={value}", "train.py")


def test_streams_of_a_process_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match=r"--tee 0:3,2:1 names local rank 2, .* are 0 to 1"):
        plan_of("--num_processes=2", "--tee=0:3,2:1", "train.py")


def test_redirected_output_needs_a_log_dir() -> None:
    with pytest.raises(
        ConfigurationError, match=r"--redirects 3 writes output to files only. Pass --log_dir"
    ):
        plan_of("--num_processes=2", "--redirects=3", "train.py")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1) | st.integers(0, 3))
def test_streams_are_those_that_torchrun_reads(value: int | list[tuple[int, int]]) -> None:
    from torch.distributed.elastic.multiprocessing import Std

    text = str(value) if isinstance(value, int) else ",".join(f"{rank}:{std}" for rank, std in value)
    assert f"--tee={text}" in plan_of("--num_processes=10", f"--tee={text}", "train.py").argv or text == "0"
    Std.from_str(text)


@pytest.mark.parametrize("conf", ["timeout", "timeout=", "=3", "timeout=3,", "a=1,,b=2"])
def test_options_of_the_meeting_that_torchrun_could_not_read(conf: str) -> None:
    with pytest.raises(ConfigurationError, match="--rdzv_conf must be comma-separated key=value pairs"):
        plan_of("--num_processes=2", f"--rdzv_conf={conf}", "train.py")


def test_options_of_the_meeting() -> None:
    assert "--rdzv-conf=a=1, b=x=y" in plan_of("--num_processes=2", "--rdzv_conf=a=1, b=x=y", "t.py").argv


def test_every_attempt_has_a_store_of_its_own() -> None:
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert (name, "1") in plan_of("--num_processes", "4", "--max_restarts", "1", "t.py").env_changes
    assert name not in dict(plan_of("--num_processes", "4", "t.py").env_changes)
