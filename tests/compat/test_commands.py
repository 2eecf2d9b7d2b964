"""What programs import of Accelerate's command line."""

import pathlib
import subprocess
import sys

import pytest

from accelfn.compat.commands import launch_command_parser, load_config_from_file, write_basic_config
from tests.launch.processes import environment

SCRIPT = """
import sys
import accelerate
state = accelerate.PartialState()
if state.is_main_process:
    print(state.num_processes, accelerate.Accelerator(cpu=True).compat, sys.argv[1:])
"""
# As trl's command line does it.
PROGRAM = """
import sys
import accelfn.compat
accelfn.compat.install()
from accelerate.commands.launch import launch_command, launch_command_parser
for script in ("script.py", "fails.py"):
    args = launch_command_parser().parse_args(["--cpu", script, "--lr", "1"])
    args.num_processes = 2
    args.training_script_args.append("x")
    launch_command(args)
    print("afterwards")
"""


def test_a_parser_has_accelerates_names() -> None:
    args = launch_command_parser().parse_args(["--num-processes=2", "--cpu", "a.py", "--lr", "1"])
    assert (args.num_processes, args.cpu, args.multi_gpu, args.mixed_precision) == (2, True, None, None)
    assert (args.training_script, args.training_script_args) == ("a.py", ["--lr", "1"])
    assert args.config_file is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num_procs=2", "a.py"], "Did you mean --num_processes?"),
        (["--num_processes=two", "a.py"], "it must be an integer"),
        (["--cpu"], "no script given"),
    ],
)
def test_a_wrong_command_line_ends_with_its_error(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch_command_parser().parse_args(argv)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_scripts_are_launched_on_ranks_with_the_alias_until_one_fails(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(ACCELFN_CONFIG=""),
        timeout=100,
        check=False,
    )
    assert done.stdout == "2 accelerate ['--lr', '1', 'x']\nafterwards\n", done.stderr
    assert done.returncode != 0


def test_a_written_configuration_is_the_one_that_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ACCELFN_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "inner" / "config.yaml"
    for place in (tmp_path / "accelfn" / "config.yaml", path):  # the usual one, and one of the user's
        assert write_basic_config("bf16") == place
        monkeypatch.setenv("ACCELFN_CONFIG", str(path))
    assert load_config_from_file(None).to_dict()["mixed_precision"] == "bf16"
    assert write_basic_config("no") is False
    assert "stays as it is" in capsys.readouterr().out
    assert load_config_from_file(None).to_dict()["mixed_precision"] == "bf16"
