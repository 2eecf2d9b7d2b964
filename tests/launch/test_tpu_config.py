"""``accelfn tpu-config``: the gcloud command, from flags or a file."""

import shlex
from pathlib import Path

import pytest

from accelfn.launch.main import main


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ACCELFN_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["tpu-config", *argv, "--debug"]) == 0
    return shlex.split(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("--command a --command b c", "ssh t '--command=cd /usr/share; a; b; c' --worker=all"),
        ("--command a --tpu_zone z", "ssh t '--command=cd /usr/share; a' --worker=all --zone=z"),
        ("--command a --install_accelfn", "'--command=cd /usr/share; pip install -U accelfn; a'"),
        ("--command a --install_accelfn --accelfn_version 1.2", " pip install accelfn==1.2; a'"),
        ("--command a --use_alpha", "gcloud alpha compute tpus tpu-vm ssh t "),
    ],
)
def test_flags(line: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shlex.join(printed(capsys, "--tpu-name", "t", *line.split())).count(command) == 1


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: XLA\ntpu_name: t\ntpu_zone: z\ncommands: [echo a, echo b]\n",
        "tpu_options: {name: t, zone: z, commands: [echo a, echo b]}\n",
    ],
    ids=["Accelerate's", "ours"],
)
def test_a_configuration_gives_what_flags_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "tpu.yaml").write_text(text)
    config = ("--config_file", str(tmp_path / "tpu.yaml"))
    assert printed(capsys, *config)[-4:] == [
        *("t", "--command=cd /usr/share; echo a; echo b", "--worker=all", "--zone=z")
    ]
    (tmp_path / "commands").write_text("# set up\necho a\n\n  echo b\n")
    of_file = ("--tpu_name", "t", "--command_file", str(tmp_path / "commands"))
    assert printed(capsys, *of_file)[-2] == "--command=cd /usr/share; echo a; echo b"
    assert printed(capsys, *config, "--tpu_name", "u", "--tpu_zone", "y", "--command", "echo c")[-4:] == [
        *("u", "--command=cd /usr/share; echo c", "--worker=all", "--zone=y")
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "no TPU given"),
        (("--tpu_name", "t"), "no command given"),
        (("--tpu_name", "t", "--command_file", "absent"), "no command file 'absent'"),
        (("--config_file", "absent.yaml"), "no config file 'absent.yaml'"),
        (("--tpu_name", "t", "--command", "x"), "gcloud is not on the PATH"),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["tpu-config", *argv]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_gcloud_is_run_and_its_status_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/seen"\nexit 3\n')
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["tpu-config", "--tpu_name", "t", "--command", "echo 'a b'; ls"]) == 3
    assert (tmp_path / "seen").read_text().splitlines() == [
        *("compute", "tpus", "tpu-vm", "ssh", "t"),
        *("--command=cd /usr/share; echo 'a b'; ls", "--worker=all"),
    ]
