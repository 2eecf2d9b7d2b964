"""``accelfn env``: a report that can be pasted, and read by programs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn import __version__
from accelfn.launch import env
from accelfn.launch.config.secrets import hide_in_text
from accelfn.launch.env import describe_environment, format_report, relevant_variables
from accelfn.launch.main import main


def test_the_report_names_versions_variables_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "two.yaml"
    config.write_text("num_processes: 2\naws_secret_access_key: abc\n")
    monkeypatch.setenv("ACCELFN_CONFIG", str(config))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("ACCELFN_API_KEY", "hush")
    assert main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["accelfn"] == __version__
    assert report["packages"]["torch"] == torch.__version__
    assert "safetensors" in report["packages"]
    assert report["torch"]["backends"]
    assert report["variables"]["NCCL_DEBUG"] == "INFO"
    assert report["configuration"]["file"] == str(config)
    assert report["configuration"]["contents"] == {
        "num_processes": "2",
        "aws_secret_access_key": "(hidden)",
    }
    assert "unknown key 'aws_secret_access_key'" in report["configuration"]["error"]
    assert "hush" not in out
    assert "abc" not in out
    assert main(["env", "--config-file", str(config)]) == 0
    text = capsys.readouterr().out
    assert f"- accelfn: {__version__}\n" in text
    assert "  - NCCL_DEBUG: INFO\n" in text
    assert "num_processes: 2" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "sagemaker:\n  aws_secret_access_key: hush\n"),
        ("a.yaml", "sagemaker: {aws_secret_access_key: hush, region: us-east-2}\n"),
        ("a.yaml", "sagemaker:\n  aws_secret_access_key: |\n    hush\n    hush\n"),
        ("a.yaml", "sagemaker:\n  aws_secret_access_key:\n    hush\n"),
        ("a.yaml", "? aws_secret_access_key\n: hush\n"),
        ("a.yaml", "aws_secret_access_key: [hush, {deep: hush}]\n"),
        ("a.yaml", "tpu_options:\n  env: [HF_TOKEN=hush, 'WANDB_API_KEY=hush']\n"),
        ("a.yaml", "slurm:\n  setup:\n    - export HF_TOKEN='hush hush'; module load cuda\n"),
        ("a.yaml", "slurm: {setup: ['curl -H \"Authorization: Bearer hush\" https://ann:hush@host/a']}\n"),
        ("a.yaml", "num_processes: HF_TOKEN=hush\n"),
        ("a.yaml", "aws_secret_access_key: hush: hush\n"),
        ("a.json", '{"sagemaker": {"aws_secret_access_key": "hush"}, "aws_access_key_id": "hush"}'),
        ("a.json", '{"sagemaker": {"aws_secret_access_key": "hush"'),
    ],
)
def test_no_secret_of_a_configuration_is_shown(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "describe_torch", dict[str, Any])
    (tmp_path / name).write_text(text)
    report = describe_environment({}, str(tmp_path / name))
    assert "hush" not in format_report(report)
    assert "hush" not in json.dumps(report)


def test_errors_are_part_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(env: object) -> dict[str, Any]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(env, "describe_torch", fail)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    report = describe_environment({"WORLD_SIZE": "2"}, str(tmp_path / "binary.yaml"))
    assert report["torch"] == {"error": "OSError: libcuda.so.1: cannot open shared object file"}
    assert "WORLD_SIZE" in str(report["launcher"])
    assert "can't read the config file" in report["configuration"]
    assert describe_environment({}, str(tmp_path / "absent.yaml"))["configuration"].startswith("none (")
    assert format_report(report)


def test_the_world_of_a_launcher_is_named() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert describe_environment(env)["launcher"] == "env: rank 1 of 2, node 0 of 1"


@given(
    st.dictionaries(
        st.from_regex(r"(ACCELFN|HOME|NCCL|AWS)_[A-Z]{1,3}(_API_KEY|TOKEN|_SECRET_X|)", fullmatch=True),
        st.text(),
    )
)
def test_nothing_secret_and_nothing_private_is_shown(env: dict[str, str]) -> None:
    shown = relevant_variables(env)
    assert shown.keys() == {name for name in env if name.startswith(("ACCELFN_", "NCCL_"))}
    for name, value in shown.items():
        secret = any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"))
        assert value == ("(hidden)" if secret else hide_in_text(env[name]))


def test_no_secret_in_the_value_of_a_variable_is_shown() -> None:
    assert relevant_variables({"ACCELFN_ENV": "HF_TOKEN=hush\nA=1"}) == {"ACCELFN_ENV": "HF_TOKEN=***\nA=1"}


def test_devices_are_described_as_torch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelfn.context import DeviceFacts, Hardware

    class Properties:
        name, total_memory, major, minor = "Stand-in", 8 << 30, 9, 0

    class Module:
        @staticmethod
        def get_device_properties(index: int) -> Properties:
            return Properties()

    hardware = Hardware(devices=(DeviceFacts(type="cuda", count=2), DeviceFacts(type="cpu")))
    monkeypatch.setattr("accelfn.context.read_hardware", lambda: hardware)

    def module_of(kind: str) -> type[Module]:
        return Module

    def reaches(one: int, other: int) -> bool:
        return (one, other) == (0, 1)

    monkeypatch.setattr(torch, "get_device_module", module_of)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    facts = env.describe_torch({})
    assert facts["accelerators"][1] == "cuda:1 Stand-in, 8.0 GiB, capability 9.0"
    assert facts["peer-to-peer access"] == ["cuda:0 to 1", "cuda:1 to none"]


@pytest.mark.parametrize(("given", "output"), [("absent.yaml", "no config file"), ("", "needs a file name")])
def test_a_file_that_was_asked_for_must_be_there(
    given: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "--config_file", given]) == 2
    assert output in capsys.readouterr().err


def test_an_unknown_flag_is_refused() -> None:
    assert main(["env", "--yaml"]) == 2
