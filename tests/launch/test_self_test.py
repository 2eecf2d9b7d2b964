"""``accelfn test`` as a user runs it."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelfn.launch.main import main
from accelfn.launch.self_test import self_test_command
from accelfn.launch.self_test_checks import CHECKS

ROOT = Path(__file__).parents[2]
NAMES = [check.name for check in CHECKS]


def run(*argv: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCELFN_")}
    return subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_everything_passes_here(num_processes: str) -> None:
    done = run("accelfn", "test", "--cpu", "--num-processes", num_processes)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "accelfn test"
    assert [line[11:].split("  ")[0] for line in lines[1:-1]] == NAMES
    assert lines[-1].startswith(f"{len(NAMES)} of {len(NAMES)} checks passed in ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "mesh"),
    [
        ("-n 2 --use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false", "dp_shard 2"),
        ("-n 2 --use_fsdp --mixed_precision bf16", "dp_shard 2"),
        ("-n 2 --use_parallelism_config --parallelism_config_tp_size 2", "tp 2"),
        ("-n 4 --use_fsdp --use_parallelism_config --parallelism_config_tp_size 2", "dp_shard 2 x tp 2"),
    ],
)
def test_the_configured_mesh_is_tried(flags: str, mesh: str) -> None:
    names = ("mesh", "loader, shuffled", "loader, even batches", "random states", "training, fp32")
    names = (*names, "training, as configured", "checkpoint round trip")
    only = [part for name in names for part in ("--only", name)]
    done = run("accelfn", "test", "--cpu", *flags.split(), *only, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert rows.keys() == {*names}
    assert rows["mesh"]["remark"] == mesh


def test_a_broken_setup_fails_with_the_reason() -> None:
    only = ("--only", "random states", "--only", "trigger")
    done = run("accelfn", "test", "--cpu", "--num_processes", "2", "--fault", "seed", *only)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 2 checks passed" in done.stdout
    assert "1 leaf differs between ranks" in done.stdout
    assert "rank 1  numbers after set_seed(11)" in done.stdout


def test_a_rank_that_dies_fails_its_current_check() -> None:
    arguments = ("--cpu", "--num_processes", "2", "--fault", "death", "--only", "collectives", "--json")
    done = run("accelfn", "test", *arguments, "--only", "trigger")
    assert done.returncode == 1
    reported = json.loads(done.stdout)
    assert not reported["passed"]
    assert reported["status"] != 0
    # Which of the two depends on whether the other rank has come to say so before it is ended.
    assert [(one["name"], one["verdict"] in ("FAIL", "cut off")) for one in reported["checks"]] == [
        ("collectives", True),
        ("trigger", False),
    ]
    assert reported["checks"][1]["verdict"] == "not run"


def test_ranks_that_cannot_join_report_the_reason() -> None:
    flags = ("--cpu", "--num_processes", "2", "--only", "trigger")
    done = run("accelfn", "test", *flags, GLOO_SOCKET_IFNAME="nosuch0")
    assert done.returncode == 1
    assert "  FAIL     joining of rank " in done.stdout
    assert "Unable to find address for: nosuch0" in done.stdout
    assert "  not run  trigger" in done.stdout
    assert "torch/distributed/elastic" not in done.stderr  # what torchrun has to say of it
    assert done.stderr.splitlines()[-1] == "accelfn test: the launch ended with status 1."


def test_a_rank_that_dies_before_it_joins_ends_with_a_table(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1': os._exit(9)\n")
    flags = ("--cpu", "--num_processes", "2", "--only", "trigger")
    done = run("accelfn", "test", *flags, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    assert ", with exit status 9" in done.stderr
    assert "  not run  trigger" in done.stdout


@pytest.mark.parametrize(
    "argv", [("--cpu", "noop.py"), ("noop.py",), ("-m", "noop"), ("--cpu", "--", "noop.py")]
)
def test_a_script_is_refused_and_not_run(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noop.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    assert main(["test", *argv]) == 2
    assert "accelfn test: error: accelfn test takes no script, got 'noop" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_no_check_is_no_pass() -> None:
    done = run("accelfn", "test", "--cpu", "--num_proceses", "2")
    assert done.returncode == 2
    assert "unknown flag --num_proceses. Did you mean --num_processes?" in done.stderr


@pytest.mark.slow
def test_fp16_learns_what_one_process_learns() -> None:
    flags = (
        "--cpu",
        "--num_processes",
        "2",
        "--mixed_precision",
        "fp16",
        "--only",
        "training, as configured",
    )
    done = run("accelfn", "test", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    # No step is skipped by one of the two: what is left is rounding of fp16.
    assert float(done.stdout.splitlines()[1].rpartition(" ")[2]) < 5e-3


def test_a_port_where_nobody_answers_is_named_in_seconds() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = run("accelfn.launch.self_test_rank", "--timeout", "2", ACCELFN_USE_CPU="true", **world)
    assert done.returncode == 1
    assert "the ranks can't be set up: rank 1 could not join its world of 2" in done.stderr
    assert port in done.stderr


def test_a_setup_that_accelfn_does_not_support_yet_fails() -> None:
    done = run("accelfn.launch.self_test_rank", ACCELFN_USE_CPU="true", ACCELFN_CPU_AFFINITY="true")
    assert done.returncode == 1
    assert "the ranks can't be set up" in done.stderr
    assert "CPU_AFFINITY" in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train.py"], "accelfn test takes no script, got 'train.py'"),
        (["--timeout", "0"], "--timeout must be positive"),
        (["--fault", "bad-luck"], "got 'bad-luck'"),
        (["--only", "the weather"], "'mesh', 'loader, shuffled', 'loader, even batches'"),
        (["--num_processes", "0"], "--num_processes: it must be an integer, 1 or more"),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence_and_status_2(argv: list[str], message: str) -> None:
    done = run("accelfn", "test", *argv)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_the_configuration_file_and_other_flags_go_to_the_launch() -> None:
    options = argparse.Namespace(
        config_file="two.yaml", timeout=60.0, fault="", folder="shared", only=["trigger"]
    )
    command = self_test_command(options, ["--num_processes", "2"], "results")
    assert command[1:] == (
        *("-m", "accelfn", "launch", "--config_file", "two.yaml", "--num_processes", "2"),
        *("-m", "accelfn.launch.self_test_rank", "--report", "results", "--timeout", "60"),
        *("--folder", str(Path.cwd() / "shared"), "--only", "trigger"),
    )


def ranks_of(folder: Path) -> list[int]:
    """Find the ranks that were told to use a folder."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        # The launcher has the same words, behind its own.
        if str(folder).encode() in words and words[1:4:2] != [b"-m", b"launch"] and b"-u" in words[:2]:
            found.append(int(process.name))
    return found


# Where the tests run in a shell's background, SIGINT is ignored, and stays so in what they start.
FOREGROUND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from accelfn.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False)],
)
def test_a_signal_ends_the_ranks_too(tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCELFN_")}
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", FOREGROUND, "test", "--cpu", "--num_processes", "2"),
            *("--folder", str(tmp_path), "--fault", "hang", "--only", "collectives"),
        ],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 60
        while len(pids := ranks_of(tmp_path)) < 2:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        if to_group:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        killed = number == signal.SIGKILL
        assert process.wait(60) == (-number if killed else 128 + number)
        while killed and ranks_of(tmp_path):  # the launch, which it would have waited for, ends by itself
            assert time.monotonic() < until + 60
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    # A killed rank has no command line any more, and still exists until its parent has read its status.
    until = time.monotonic() + 60
    while any(map(exists, pids)):
        assert time.monotonic() < until
        time.sleep(0.05)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended() -> None:
    argv = ("--cpu", "--num_processes", "2", "--fault", "hang", "--timeout", "15")
    done = run("accelfn", "test", *argv, "--only", "collectives", "--only", "trigger")
    assert done.returncode == 1
    assert "CollectiveTimeoutError" in done.stdout
    assert "0 of 2 checks passed" in done.stdout
    assert "the ranks could not reconnect" in done.stdout
    alone = run("accelfn", "test", *argv, "--only", "collectives")  # and no check tells that it is lost
    assert (alone.returncode, "0 of 1 checks passed" in alone.stdout) == (1, True)
