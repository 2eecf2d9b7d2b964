"""``accelfn env``: a report that can be pasted, and read by programs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelfn import __version__
from accelfn.context import DeviceFacts, Hardware
from accelfn.launch import env
from accelfn.launch.env import describe_environment, format_report

Command = Callable[..., tuple[int, str, str]]


def test_the_report_names_versions_variables_and_the_configuration(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    Path("two.yaml").write_text("num_processes: 2\ntpu: true\ntpu_options: {env: [HF_TOKEN=hush]}\n")
    monkeypatch.setenv("ACCELFN_CONFIG", "two.yaml")
    monkeypatch.setenv("NCCL_DEBUG", "hush")
    status, stdout, _ = command("env --json")
    report = json.loads(stdout)
    assert (status, report["accelfn"], report["packages"]["torch"]) == (0, __version__, torch.__version__)
    assert report["torch"]["backends"]
    assert {"NCCL_DEBUG", "ACCELFN_CONFIG"} <= {*report["variables"]}
    assert report["configuration"] == {"file": "two.yaml", "num_processes": "2", "tpu": "true"}
    assert "hush" not in stdout, "values of variables, and texts of the file, may be secrets"
    text = command("env --config-file two.yaml")[1]
    assert f"- accelfn: {__version__}\n" in text
    assert "  - num_processes: 2" in text
    assert command("env --config-file absent.yaml")[0] == 2


def test_errors_are_part_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(env, "describe_torch", fail)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    two = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert describe_environment(two, "absent")["launcher"] == "env: rank 1 of 2, node 0 of 1"
    report = describe_environment({"WORLD_SIZE": "2"}, str(tmp_path / "binary.yaml"))
    assert report["torch"] == {"error": "OSError: libcuda.so.1: cannot open shared object file"}
    assert "WORLD_SIZE" in str(report["launcher"])
    assert "can't read the config file" in report["configuration"]
    assert describe_environment({}, str(tmp_path / "absent.yaml"))["configuration"].startswith("none (")
    assert [*format_report(report)]


def test_devices_are_described_as_torch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Stand-in", total_memory=8 << 30, major=9, minor=0)
    module = SimpleNamespace(get_device_properties={0: properties, 1: properties}.get)
    hardware = Hardware(devices=(DeviceFacts(type="cuda", count=2), DeviceFacts(type="cpu")))
    monkeypatch.setattr("accelfn.context.read_hardware", lambda: hardware)
    monkeypatch.setattr(torch, "get_device_module", {"cuda": module}.get)
    facts = env.describe_torch()
    assert facts["accelerators"]["cuda:1"] == str(properties)
