"""The launch plan is a pure function: flags in, torchrun's command line and variables out."""

import os
import re
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.launch import LaunchOptions, LaunchPlan, format_plan, parse_launch_options, plan_launch
from accelfn.launch.command import find_busy_port

TWO_MACHINES = ("--num_machines", "2", "--num_processes", "8", "--main_process_ip", "10.0.0.1")


def plan_of(*argv: str, env: dict[str, str] | None = None, cpu_count: int = 8) -> LaunchPlan:
    options, _ = parse_launch_options(argv)
    return plan_launch(options, env or {}, cpu_count)


def read_with_torchrun(plan: LaunchPlan) -> dict[str, object]:
    """Parse a plan with the parser that will read it."""
    from torch.distributed import run

    parse_args = cast("Callable[[list[str]], object]", run.parse_args)  # pyright: ignore[reportUnknownMemberType]
    return vars(parse_args(list(plan.argv[3:])))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param((), {"nnodes": "1", "nproc_per_node": "1"}, id="one process"),
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
            (
                "--max_restarts",
                "3",
                "--monitor_interval",
                "0.5",
                "--log_dir",
                "logs",
                "-t",
                "3",
                "--role",
                "w",
            ),
            {"max_restarts": 3, "monitor_interval": 0.5, "log_dir": "logs", "tee": "3", "role": "w"},
            id="passed through",
        ),
        pytest.param(("-m",), {"module": True, "no_python": False}, id="module"),
        pytest.param(("--no_python",), {"module": False, "no_python": True}, id="no python"),
    ],
)
def test_torchrun_understands_the_plan(flags: tuple[str, ...], expected: dict[str, object]) -> None:
    read = read_with_torchrun(plan_of(*flags, "train.py", "--x"))
    assert {name: read[name] for name in expected} == expected
    assert (read["training_script"], read["training_script_args"]) == ("train.py", ["--x"])


@pytest.mark.parametrize(
    ("flags", "env", "expected"),
    [
        pytest.param((), {}, {"OMP_NUM_THREADS": "8"}, id="one process takes all cores"),
        pytest.param(("--num_processes", "3"), {}, {"OMP_NUM_THREADS": "2"}, id="cores are shared"),
        pytest.param(("--num_processes", "20"), {}, {"OMP_NUM_THREADS": "1"}, id="never below one"),
        pytest.param(
            (*TWO_MACHINES, "--machine_rank", "0"), {}, {"OMP_NUM_THREADS": "2"}, id="shared on one machine"
        ),
        pytest.param((), {"OMP_NUM_THREADS": "5"}, {}, id="the user's variable stays"),
        pytest.param(
            ("--num_cpu_threads_per_process", "3"),
            {"OMP_NUM_THREADS": "5"},
            {"OMP_NUM_THREADS": "3"},
            id="a flag beats the variable",
        ),
        pytest.param(
            ("--mixed_precision", "bf16", "--gradient_accumulation_steps", "4", "--cpu", "--debug"),
            {"OMP_NUM_THREADS": "1"},
            {
                "ACCELFN_DEBUG_MODE": "true",
                "ACCELFN_GRADIENT_ACCUMULATION_STEPS": "4",
                "ACCELFN_MIXED_PRECISION": "bf16",
                "ACCELFN_USE_CPU": "true",
            },
            id="defaults of contexts",
        ),
    ],
)
def test_only_given_flags_change_the_environment(
    flags: tuple[str, ...], env: dict[str, str], expected: dict[str, str]
) -> None:
    before = dict(env)
    assert dict(plan_of(*flags, "train.py", env=env).env_changes) == expected
    assert env == before


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
    assert (read["training_script"], read["training_script_args"]) == ("train.py", list(script_args))
    assert (read["nnodes"], read["nproc_per_node"]) == ("1", "2")


@given(st.lists(st.booleans(), min_size=2, max_size=2))
def test_dash_and_underscore_spell_the_same_flag(dashes: list[bool]) -> None:
    first, second = ("-" if dash else "_" for dash in dashes)
    flag = f"--gradient{first}accumulation{second}steps"
    for argv in ((flag, "4", "train_it-now.py"), (f"{flag}=4", "train_it-now.py")):
        options, _ = parse_launch_options(argv)
        assert options == LaunchOptions(script="train_it-now.py", gradient_accumulation_steps=4)


@given(
    num_machines=st.integers(1, 64),
    local_size=st.integers(1, 64),
    cpu_count=st.integers(1, 256),
    data=st.data(),
)
def test_machines_add_up_to_the_processes_asked_for(
    num_machines: int, local_size: int, cpu_count: int, data: st.DataObject
) -> None:
    options = LaunchOptions(
        script="train.py",
        num_processes=num_machines * local_size,
        num_machines=num_machines,
        machine_rank=data.draw(st.integers(0, num_machines - 1)),
        main_process_ip="10.0.0.1",
    )
    plan = plan_launch(options, {}, cpu_count)
    assert f"--nproc-per-node={local_size}" in plan.argv
    assert f"--nnodes={num_machines}" in plan.argv
    threads = int(dict(plan.env_changes)["OMP_NUM_THREADS"])
    assert threads == 1 or threads * local_size <= cpu_count
    assert (plan.hosts_port is not None) == (options.machine_rank == 0)


def test_a_value_may_stand_where_a_script_could() -> None:
    options, dry_run = parse_launch_options(
        ["--dry-run", "--log-dir", "train.py", "-t", "3", "--", "--odd.py", "x"]
    )
    assert options == LaunchOptions(script="--odd.py", script_args=("x",), log_dir="train.py", tee="3")
    assert dry_run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 0}, "--num_processes must be at least 1, got 0"),
        ({"num_machines": 0}, "--num_machines must be at least 1, got 0"),
        ({"max_restarts": -1}, "--max_restarts must be at least 0, got -1"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps must be at least 1, got 0"),
        ({"num_cpu_threads_per_process": 0}, "--num_cpu_threads_per_process must be at least 1, got 0"),
        ({"monitor_interval": 0.0}, "--monitor_interval must be more than 0 seconds, got 0.0"),
        ({"monitor_interval": float("nan")}, "--monitor_interval must be more than 0 seconds, got nan"),
        ({"main_process_port": 70000}, "--main_process_port must be 0 to 65535, got 70000"),
        ({"module": True, "no_python": True}, "Give one of the two"),
        ({"machine_rank": 1}, "--machine_rank must be 0 to 0 with --num_machines 1, got 1"),
        (
            {"num_processes": 5, "num_machines": 2},
            "got 5 processes on 2 machines. Use 4 or 6 processes",
        ),
        ({"num_processes": 1, "num_machines": 3}, "got 1 processes on 3 machines. Use 3 processes"),
        ({"num_processes": 2, "num_machines": 2}, "--num_machines 2 needs --main_process_ip"),
        (
            {"num_processes": 2, "num_machines": 2, "main_process_ip": "h"},
            "needs --machine_rank (0 to 1, different on every machine)",
        ),
        (
            {"num_processes": 2, "num_machines": 2, "main_process_ip": "h", "main_process_port": 0},
            "Give one number on every machine",
        ),
    ],
)
def test_impossible_options_cannot_be_built(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(LaunchOptions(script="train.py"), **changes)


def test_a_formatted_plan_does_in_a_shell_what_the_plan_says() -> None:
    plan = LaunchPlan(
        argv=("printf", "%s|%s|", "it's", "a b\n$HOME"),
        env_changes=(("ACCELFN_USE_CPU", "true"), ("OMP_NUM_THREADS", "2")),
    )
    shell = subprocess.run(["sh", "-c", format_plan(plan)], capture_output=True, text=True, check=True)
    assert shell.stdout == "it's|a b\n$HOME|"
    assert format_plan(plan).splitlines()[:2] == ["ACCELFN_USE_CPU=true \\", "OMP_NUM_THREADS=2 \\"]


def test_a_busy_port_is_found_and_a_free_one_is_not() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        plan = plan_of("--main_process_port", str(port), "train.py")
        assert find_busy_port(plan) == port
        elsewhere = plan_of(*TWO_MACHINES, "--machine_rank=1", f"--main_process_port={port}", "train.py")
        assert find_busy_port(elsewhere) is None
    assert find_busy_port(plan) is None
    assert find_busy_port(plan_of("train.py")) is None


def test_planning_leaves_the_environment_alone() -> None:
    before = dict(os.environ)
    plan_of("--mixed_precision", "bf16", "--cpu", "train.py")
    assert dict(os.environ) == before
