"""The command line: what it answers, and how quickly, before anything is started."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.launch.main import main
from accelfn.launch.plan_commands import AGENT
from tests.launch.processes import ROOT, environment

ANSWERS: list[tuple[list[str], int]] = [
    (["--help"], 0),
    (["--version"], 0),
    (["launch", "--help"], 0),
    (["launch", "--dry_run", "pyproject.toml"], 0),
    (["launch", "--print_config"], 0),
    (["launch", "absent.py"], 2),
    (["launch", "--nonsense"], 2),
    (["config", "show"], 0),
    (["plan-memory", "--help"], 0),
    (["plan-memory", "train:build", "--max-memory", "0"], 2),
    (["plan-memory", "absent"], 2),
    (["estimate-memory", "--help"], 0),
    (["estimate-memory", "bert-base-cased"], 2),
    (["env", "--help"], 0),
    (["env", "--nonsense"], 2),
    (["test", "--help"], 0),
    (["test", "train.py"], 2),
    (["merge-weights", "--help"], 0),
    (["merge-weights", "absent", "out"], 2),
    (["to-fsdp2", "--config_file", "absent.yaml", "--overwrite"], 2),
    (["tpu-config", "--tpu_name", "t", "--command", "ls", "--debug"], 0),
    (["checkpoint", "--help"], 0),
    *((["checkpoint", action, "--help"], 0) for action in ("verify", "list", "show", "prune", "convert")),
    (["checkpoint", "list", "absent"], 2),
    (["checkpoint", "prune", ".", "--best", "2"], 2),
    (["runs", "--help"], 0),
    (["runs", "list", "."], 0),
    (["runs", "show", "absent", "--dir", "."], 2),
    ([], 2),
]


def test_answers_do_not_import_torch(tmp_path: Path) -> None:
    run = tmp_path / "digits" / "one"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text('{"kind": "log", "step": 0, "values": {"loss": 0.5}}\n')
    (tmp_path / "pyproject.toml").touch()
    probe = """
import json, sys
from accelfn.launch.main import main
statuses = [main(argv) for argv in json.loads(sys.argv[1])]
heavy = {"torch", "optree", "safetensors", "numpy"} & set(sys.modules)
print(json.dumps([statuses, sorted(heavy)]))
"""
    more = ["runs", "show", "latest", "--dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", probe, json.dumps([*(argv for argv, _ in ANSWERS), more])],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[*(status for _, status in ANSWERS), 0], []]


def test_an_interrupt_while_the_command_loads_is_silent() -> None:
    # Raised by the import of a module, as the signal would come there.
    code = """
import importlib.abc, os, signal, sys
class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "accelfn.launch.plan":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from accelfn.__main__ import main
sys.exit(main())
"""
    command = [sys.executable, "-c", code, "launch", "--help"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.fixture
def _as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "environ", environment())
    monkeypatch.setattr(os, "execvpe", None)  # nothing is started


# What other tests say of a command's own arguments isn't repeated here.
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("launhc", "invalid choice: 'launhc' (choose from "),
        ("--versoin", "unrecognized arguments: --versoin. See accelfn --help"),
        ("config default --overwite", "unrecognized arguments: --overwite"),
        ("config show all", "unrecognized arguments: all"),
        ("config default --overwrite --config_file docs", "the config file docs is a directory"),
        ("config --config_file docs", "the config file docs is a directory"),
        ("config update", "no config file"),
        ("config show --config_file=", "--config_file needs a file name, got ''"),
        ("merge-weights from", "arguments are required: OUTPUT. See accelfn merge-weights --help"),
        ("plan-memory a --batch_size x", "it must be an integer of at least 1, got 'x'"),
        ("plan-memory train:build --device_map", "argument --device_map: expected one argument"),
        ("plan-memory a/b/c", "no file or directory 'a/b/c'. Pass a directory"),
        ("checkpoint list absent", "the directory absent doesn't exist"),
        ("runs plot x", "invalid choice: 'plot'"),
        ("migrate x.py", "invalid choice: 'migrate'"),
        ("test --config_file=", "--config_file needs a file name, got ''"),
        ("test --timeout 0", "--timeout must be positive"),
        ("test --only the-weather", "'mesh', 'loader, shuffled', 'loader, even batches'"),
        ("env --yaml", "unrecognized arguments: --yaml"),
        ("env --config_file absent.yaml", "no config file 'absent.yaml'"),
        ("launch", "no script given"),
        ("launch --config_file= README.md", "--config_file needs a file name, got ''"),
        ("launch --config_file absent.yaml README.md", "no config file 'absent.yaml'"),
        (
            "launch --num_processes=2 --rdzv_backend=static --max_restarts=2 README.md",
            "needs --rdzv_backend c10d",
        ),
        ("launch absent.py", "the script 'absent.py' doesn't exist in "),
        ("launch docs", "the script 'docs' is a directory"),
        ("launch --no_python absent-program", "no program 'absent-program'"),
        ("launch --no_python ./README.md", "the program './README.md' is not executable"),
        ("launch -m nosuchmodule", "no module 'nosuchmodule' in "),
        ("launch -m README.py", "For a file leave -m out"),
        ("launch --tee 9 README.md", "--tee: it must be 0 (none), 1 (stdout)"),
        ("launch --log_dir=LICENSE README.md", "LICENSE: File exists."),
        ("launch --num_processes=2 --log_dir=/proc/x README.md", "/proc/x: No such file or directory."),
        ("launch --tpu README.md", "--tpu needs torch_xla, which isn't installed for "),
        ("launch --use_deepspeed --deepspeed_config_file=docs README.md", "the file 'docs' is a directory"),
        ("launch --mpirun_hostfile=hosts README.md", "run: mpirun --hostfile FILE python train.py"),
        ("launch --deepspeed-hostfile hosts README.md", "or run: deepspeed --hostfile FILE train.py"),
        ("launch --sbatch job.sh README.md", "in a batch script, run: srun "),
    ],
)
@pytest.mark.usefixtures("_as_a_user")
def test_bad_input_is_one_sentence_and_status_2(
    line: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert len(stderr.splitlines()) == 1
    assert message in stderr


@pytest.mark.usefixtures("_as_a_user")
def test_deepspeed_is_asked_for_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert main(["launch", "--use_deepspeed", "--num_processes=2", "README.md"]) == 2
    assert "pip install 'accelfn[deepspeed]'" in capsys.readouterr().err


@pytest.mark.usefixtures("_as_a_user")
def test_dry_run_prints_the_whole_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my script.py").touch()
    assert main(["launch", "--num-processes=2", "--cpu", "--dry-run", "my script.py", "--lr", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["ACCELERATE_USE_CPU=true \\", "ACCELFN_USE_CPU=true \\"]
    assert lines[-1].startswith(f"{sys.executable} {AGENT} --nnodes=1 --nproc-per-node=2 ")
    assert lines[-1].endswith("worker.py 'my script.py' --lr 1")


@pytest.mark.usefixtures("_as_a_user")
def test_a_busy_port_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert main(["launch", "--cpu", "--main_process_port", port, "README.md"]) == 2
    assert f"port {port} of this machine is in use" in capsys.readouterr().err


# The first is printed by argparse at its end, the second by us.
COMMANDS = pytest.mark.parametrize("argv", [("launch", "--help"), ("config", "show", "--all")], ids=" ".join)


def write_to(target: int, argv: tuple[str, ...]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "accelfn", *argv],
            env=environment(),
            stdout=target,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(target)
    return done.returncode, done.stderr


@COMMANDS
def test_a_reader_that_has_read_enough_is_no_error(argv: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert write_to(writing, argv) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
@COMMANDS
def test_a_full_disk_is_one_sentence(argv: tuple[str, ...]) -> None:
    message = "accelfn: error: can't write the output: No space left on device.\n"
    assert write_to(os.open("/dev/full", os.O_WRONLY), argv) == (1, message)
