"""The launch plan is a pure function: flags in, torchrun's command line out, as torchrun itself reads it."""

import dataclasses
import subprocess
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import ConfigurationError
from accelfn.launch import LaunchPlan, format_plan
from accelfn.launch.plan_commands import AGENT, WORKER
from tests.launch.plan.plans import plan_of

TWO = "--num_machines=2 --num_processes=8 --main_process_ip=10.0.0.1"


def read_with_torchrun(plan: LaunchPlan) -> dict[str, object]:
    """Parse a plan with the parser that will read it."""
    from torch.distributed import run

    assert plan.argv[1] == AGENT
    parse_args = cast("Callable[[list[str]], object]", run.parse_args)  # pyright: ignore[reportUnknownMemberType]
    return vars(parse_args(list(plan.argv[2:])))


# Flags, and what torchrun reads.
READ = """
--max_restarts=1 | nnodes=1 nproc_per_node=1
--num_processes=4 | nproc_per_node=4 rdzv_backend=c10d rdzv_endpoint=127.0.0.1:0
--num_processes=4 --main_process_port=0 | nproc_per_node=4 rdzv_backend=c10d rdzv_endpoint=127.0.0.1:0
--main_process_port=4321 | rdzv_backend=static rdzv_endpoint=127.0.0.1:4321 node_rank=0
--main_process_port=4321 --max_restarts=2 | rdzv_backend=c10d
--main_process_port=4321 --max_restarts=2 | rdzv_endpoint=127.0.0.1:4321 local_addr=127.0.0.1
TWO --machine_rank=1 --max_restarts=2 | rdzv_backend=c10d rdzv_conf=is_host=0 local_addr=None
TWO --machine_rank=1 | nnodes=2 nproc_per_node=4 rdzv_backend=static
TWO --machine_rank=1 | node_rank=1 local_addr=None rdzv_endpoint=10.0.0.1:29500
TWO --rdzv_backend=c10d --main_process_port=1234 | rdzv_backend=c10d rdzv_endpoint=10.0.0.1:1234 rdzv_conf=
TWO --rdzv_backend=c10d --machine_rank=1 --rdzv_conf=join_timeout=5 | rdzv_conf=join_timeout=5,is_host=0
TWO --rdzv_backend=c10d --machine_rank=1 --rdzv_conf=is_host=1 | rdzv_conf=is_host=1
--num_processes=2 --rdzv_endpoint=[fe80::1]:77 --rdzv_id=a7 | rdzv_endpoint=[fe80::1]:77 rdzv_id=a7
--monitor_interval=0.5 --shutdown_timeout=9 --role=w | monitor_interval=0.5 shutdown_timeout=9 role=w
--log_dir=logs -t 3 -r 1 | log_dir=logs tee=3 redirects=1
--enable_cpu_affinity --num_processes=1 | numa_binding=node
--use_deepspeed --num_processes=1 | nproc_per_node=1
"""


def shows(read: dict[str, object], expected: str) -> bool:
    return all(
        str(read[name]) == text for name, _, text in (word.partition("=") for word in expected.split())
    )


@pytest.mark.parametrize("case", READ.replace("TWO", TWO).split("\n")[1:-1])
def test_torchrun_understands_the_plan(case: str) -> None:
    flags, _, expected = case.partition(" | ")
    read = read_with_torchrun(plan_of(f"{flags} train.py --x"))
    assert shows(read, expected), read
    assert (read["training_script"], read["training_script_args"]) == (WORKER, ["train.py", "--x"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "nnodes=1 nproc_per_node=1 rdzv_endpoint=127.0.0.1:0 node_rank=0"),
        ("--main_process_port=77 --max_restarts=3", "rdzv_endpoint=127.0.0.1:77 max_restarts=3"),
        (f"{TWO} --machine_rank=1", "rdzv_endpoint=10.0.0.1:29500 node_rank=1"),
    ],
)
def test_elastic_agents_read_torchruns_options(flags: str, expected: str) -> None:
    plan = plan_of(f"--elastic --heartbeat_timeout=2.5 {flags} train.py --elastic")
    assert plan.argv[:4] == ("python", AGENT, "--elastic", "2.5")
    read = read_with_torchrun(dataclasses.replace(plan, argv=("python", AGENT, *plan.argv[4:])))
    assert shows(read, expected), read
    assert read["training_script_args"] == ["train.py", "--elastic"]
    contact = plan.rendezvous or {"stops_on": (), "silent_s": 2.5}
    assert (contact["stops_on"], contact["silent_s"]) == ((), 2.5)


@pytest.mark.parametrize(
    ("flag", "rest"), [("-m", ["-m", "train", "-x"]), ("--no_python", ["--exec", "train", "-x"])]
)
def test_modules_and_programs(flag: str, rest: list[str]) -> None:
    read = read_with_torchrun(plan_of(f"--num_processes=2 {flag} train -x"))
    assert (read["training_script"], read["training_script_args"]) == (WORKER, rest)


@pytest.mark.parametrize(
    ("flag", "argv"), [("", "python train"), ("-m", "python -m train"), ("--no_python", "train")]
)
def test_one_process_is_plain_python_in_a_world_of_one(flag: str, argv: str) -> None:
    plan = plan_of(f"{flag} train -x")
    assert (plan.way, plan.argv, plan.fills_port) == ("single", (*argv.split(), "-x"), "MASTER_PORT")
    assert {("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")} < set(plan.env_changes)


@given(
    st.lists(st.text(alphabet="-=_ax1 '\n", max_size=8) | st.sampled_from(["--", "--m", "-h", "--nnodes=3"]))
)
def test_script_arguments_pass_unchanged(script_args: list[str]) -> None:
    # torchrun alone takes --m for an abbreviation of its own, and -- away.
    read = read_with_torchrun(plan_of("--num-processes 2 train.py", *script_args))
    assert read["training_script_args"] == ["train.py", *script_args]
    assert (read["nnodes"], read["nproc_per_node"]) == ("1", "2")


@given(st.integers(2, 64), st.integers(1, 64), st.integers(1, 256), st.data())
def test_machines_add_up_to_the_processes_asked_for(
    num_machines: int, local_size: int, cores: int, data: st.DataObject
) -> None:
    machine_rank = data.draw(st.integers(0, num_machines - 1))
    flags = f"--num_processes={num_machines * local_size} --num_machines={num_machines}"
    plan = plan_of(f"{flags} --machine_rank={machine_rank} --main_process_ip=h train.py", cores=cores)
    assert {f"--nproc-per-node={local_size}", f"--nnodes={num_machines}"} <= set(plan.argv)
    threads = int(dict(plan.env_changes)["OMP_NUM_THREADS"])
    assert threads == 1 or threads * local_size <= cores
    assert (plan.hosts_port is not None) == (machine_rank == 0)
    assert plan.rendezvous is not None


def test_a_formatted_plan_runs_in_a_shell() -> None:
    plan = LaunchPlan(
        way="single",
        argv=("printf", "%s|%s|", "it's", "a b\n$HOME"),
        env_changes=(("ACCELFN_USE_CPU", "true"), ("OMP_NUM_THREADS", "2")),
    )
    shell = subprocess.run(["sh", "-c", format_plan(plan)], capture_output=True, text=True, check=True)
    assert shell.stdout == "it's|a b\n$HOME|"
    assert format_plan(plan).splitlines()[:2] == ["ACCELFN_USE_CPU=true \\", "OMP_NUM_THREADS=2 \\"]


def test_every_attempt_has_a_store_of_its_own() -> None:
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert (name, "1") in plan_of("--num_processes 4 --max_restarts 1 t.py").env_changes
    assert name not in dict(plan_of("--num_processes 4 t.py").env_changes)


STREAMS = [f"--{name}={text}" for name in ("tee", "redirects") for text in ("9", "1:5", "0:3,")]
PAIRS = [f"--rdzv_conf={conf}" for conf in ("timeout", "timeout=", "=3", "timeout=3,", "a=1,,b=2")]
OTHER = ("rdzv_backend=c10d", "tpu", "compute_environment=AMAZON_SAGEMAKER", "enable_cpu_affinity")
REFUSED = [
    *((flag, "it must be 0 .none., 1") for flag in STREAMS),
    ("--redirects=3", "--redirects 3 writes output to files only. Pass --log_dir"),
    *((flag, "--rdzv_conf: it must be comma-separated key=value pairs") for flag in PAIRS),
    ("--elastic --rdzv_id=7 --no_preflight", "itself, which --rdzv_id and --no_preflight would change"),
    *((f"--elastic --{flag}", f"which --{flag.partition('=')[0]} would change") for flag in OTHER),
]


@pytest.mark.parametrize(("flag", "message"), REFUSED)
def test_what_could_not_be_started_is_refused(flag: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(f"--num_processes=2 {flag} train.py")


# --- a mesh --------------------------------------------------------------------------------------

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


def start_mesh(words: str) -> dict[str, str]:
    """Plan a launch with a mesh; in ``words`` an axis and its size stand for the flag."""
    flags = (
        f"--parallelism_config_{axis}_size={size}" if axis in AXES else f"--{axis}={size}"
        for axis, _, size in (word.partition("=") for word in words.split())
    )
    return dict(plan_of(f"--cpu --use_parallelism_config {' '.join(flags)} t.py").env_changes)


@pytest.mark.parametrize(
    "words",
    [
        "num_processes=2 tp=2",
        "num_processes=8 use_fsdp=yes tp=2 dp_shard=2 dp_replicate=2",
        "num_processes=8 use_fsdp=yes tp=2",  # FSDP takes the other four
        "num_processes=3",  # all sizes are 1: copies
        "num_processes=4 use_fsdp=yes fsdp_version=1 dp_replicate=2 dp_shard=2",
    ],
)
def test_a_mesh_that_has_a_place_for_each_process(words: str) -> None:
    variables = start_mesh(words)
    assert variables["ACCELFN_USE_PARALLELISM_CONFIG"] == "true"
    for axis in ("dp_replicate", "dp_shard", "tp"):
        size = next((word[-1] for word in words.split() if word.startswith(f"{axis}=")), "1")
        assert variables.get(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", "1") == size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("num_processes=2 tp=4", r"needs 4 processes \(tp 4\), got 2\. Use --num_processes 4\.$"),
        ("tp=2", r"2 processes \(tp 2\), got 1"),
        (
            "num_processes=8 dp_shard=2 tp=2",
            r"4 processes \(dp_shard 2 x tp 2\), got 8.* or --parallelism_config_dp_replicate_size 2\.",
        ),
        ("num_processes=6 use_fsdp=yes tp=4", "needs 4 processes"),
        ("num_processes=2 use_fsdp=yes tp=2", "--use_fsdp has nothing to shard over"),
        ("num_processes=4 use_fsdp=yes tp=2 dp_replicate=2", "--use_fsdp has nothing to shard over"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_what_would(words: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        start_mesh(words)


def test_an_address_has_no_effect_on_one_machine() -> None:
    alone = plan_of("--cpu --num_processes=2 --main_process_ip=10.1.2.3 t.py")
    assert alone.argv == plan_of("--cpu --num_processes=2 t.py").argv
    assert plan_of("--cpu --num_processes=1 --main_process_ip=10.1.2.3 t.py").way == "single"
