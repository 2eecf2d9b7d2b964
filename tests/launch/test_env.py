"""``accelfn env``: a report that can be pasted, and read by programs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn import __version__
from accelfn.context import DeviceFacts, Hardware
from accelfn.launch import env
from accelfn.launch.env import describe_environment, format_report, relevant_variables


def test_the_report_names_versions_variables_and_the_configuration(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> None:
    Path("two.yaml").write_text("num_processes: 2\naws_secret_access_key: abc\n")
    monkeypatch.setenv("ACCELFN_CONFIG", "two.yaml")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("ACCELFN_API_KEY", "hush")
    status, stdout, _ = command("env --json")
    report = json.loads(stdout)
    assert (status, report["accelfn"], report["packages"]["torch"]) == (0, __version__, torch.__version__)
    assert "safetensors" in report["packages"]
    assert report["torch"]["backends"]
    assert report["variables"]["NCCL_DEBUG"] == "INFO"
    contents = {"num_processes": "2", "aws_secret_access_key": "(hidden)"}
    assert (report["configuration"]["file"], report["configuration"]["contents"]) == ("two.yaml", contents)
    assert "unknown key 'aws_secret_access_key'" in report["configuration"]["error"]
    assert "hush" not in stdout
    assert "abc" not in stdout
    text = command("env --config-file two.yaml")[1]
    assert f"- accelfn: {__version__}\n" in text
    assert "  - NCCL_DEBUG: INFO\n" in text
    assert "num_processes: 2" in text


@pytest.mark.parametrize(
    "text",
    [
        "sagemaker: {aws_secret_access_key: hush, region: us-east-2}",
        "sagemaker:\n  aws_secret_access_key: |\n    hush\n    hush",
        "? aws_secret_access_key\n: [hush, {deep: hush}]",
        "tpu_options:\n  env: [HF_TOKEN=hush, 'WANDB_API_KEY=hush']",
        "machines: [{password: hush}]",
        "aws_secret_access_key: hush: hush",
        '{"sagemaker": {"aws_secret_access_key": "hush"',
    ],
)
def test_no_secret_of_a_configuration_is_shown(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "describe_torch", dict[str, Any])
    (tmp_path / "a.yaml").write_text(text)
    report = describe_environment({}, str(tmp_path / "a.yaml"))
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
        assert value == ("(hidden)" if secret else env[name])


def test_devices_are_described_as_torch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Stand-in", total_memory=8 << 30, major=9, minor=0)
    module = SimpleNamespace(get_device_properties={0: properties, 1: properties}.get)
    hardware = Hardware(devices=(DeviceFacts(type="cuda", count=2), DeviceFacts(type="cpu")))
    monkeypatch.setattr("accelfn.context.read_hardware", lambda: hardware)
    monkeypatch.setattr(torch, "get_device_module", {"cuda": module}.get)
    reaches = {(0, 1): True, (1, 0): False}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: reaches[pair])  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    facts = env.describe_torch({})
    assert facts["accelerators"][1] == "cuda:1 Stand-in, 8.0 GiB, capability 9.0"
    assert facts["peer-to-peer access"] == ["cuda:0 to 1", "cuda:1 to none"]
