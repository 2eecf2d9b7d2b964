from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelfn.bigmodel import convert_file_size_to_int, get_balanced_memory, get_max_memory
from accelfn.errors import MissingExtraError
from accelfn.weights.places import Place, available_memory
from tests.bigmodel.plan.trees import M3

# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (5, 5),
        (0.9 * 10**9, 9 * 10**8),
        ("10Gb", 10**10),  # not gigabits
        (" 1.5 mb ", 1_500_000),
        (".5KB", 500),
        ("2 GiB", 2**31),
        ("1MiB", 2**20),
        ("0B", 0),
    ],
)
def test_a_size(given_: float | str, expected: int) -> None:
    assert convert_file_size_to_int(given_) == expected


@pytest.mark.parametrize(
    "given_", ["10", "", "GB", "-5GB", "1e3GB", "ten GB", "5PB", "5 G", -1, -0.5, float("nan"), float("inf")]
)
def test_invalid_sizes_are_refused(given_: Any) -> None:
    with pytest.raises(ValueError, match="such as '10GB': got ") as caught:
        convert_file_size_to_int(given_)
    assert repr(given_) in str(caught.value)


@pytest.mark.parametrize("given_", [None, True, [5], torch.tensor(5)])
def test_sizes_of_other_types_are_refused(given_: Any) -> None:
    with pytest.raises(TypeError, match="a size must be a number of bytes or a string"):
        convert_file_size_to_int(given_)


# --- specified budgets -------------------------------------------------------------------------------


def test_budgets_are_converted_and_sorted() -> None:
    given_ = {"disk": "1TB", "cpu": "1GiB", "cpu:1": 3, "cuda:2": "5 GB", 0: 7, torch.device("cpu", 0): 4}
    before = dict(given_)
    found = get_max_memory(given_)
    assert found == {0: 7, 2: 5 * 10**9, "cpu:0": 4, "cpu:1": 3, "cpu": 2**30, "disk": 10**12}
    assert list(found) == [0, 2, "cpu:0", "cpu:1", "cpu", "disk"]
    assert given_ == before
    assert get_max_memory({}) == {}
    assert list(get_max_memory({"cpu": 1, "mps": 1, 3: 1})) == [3, "mps", "cpu"]


@pytest.mark.parametrize(
    "wrong", [-1, True, 1.0, None, "", "gpu", "0", "cpu:", "cpu:-1", "cpu:x", "tpu:0", "meta"]
)
def test_unknown_places_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"max_memory: unknown place .*'cpu', 'disk'"):
        get_max_memory({wrong: 5})


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({0: -5}, r"max_memory\[0\]: a size must be .* got -5"),
        ({"cpu": "10"}, r"max_memory\['cpu'\]: a size must be .* got '10'"),
        ({0: 1, "cuda:0": 2}, "max_memory specifies the place 0 twice, once as 'cuda:0'"),
    ],
)
def test_invalid_budgets_are_refused(given_: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_max_memory(given_)
    with pytest.raises(TypeError, match=r"max_memory\[0\]: a size must be .* got True"):
        get_max_memory({0: True})


# --- free memory of a machine --------------------------------------------------------------------------

MEMINFO = "MemTotal:       1000 kB\nMemFree: 5 kB\nMemAvailable:    400 kB\n"


def machine(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 400 * 1024),
        # The second version of control groups; limits of groups above hold too.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "100000\n",
                "sys/fs/cgroup/a/memory.current": "60000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 10000\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            50000,
        ),
        # In a container the group may be named by what is outside of it.
        (
            {
                "proc/self/cgroup": "0::/../other\n",
                "sys/fs/cgroup/memory.max": "3000\n",
                "sys/fs/cgroup/memory.current": "4000\n",
            },
            0,
        ),
        # The first version.
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/docker/7\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/docker/7/memory.limit_in_bytes": "200000\n",
                "sys/fs/cgroup/memory/docker/7/memory.usage_in_bytes": "150000\n",
                "sys/fs/cgroup/memory/docker/7/memory.stat": "inactive_file 1\ntotal_inactive_file 20000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            70000,
        ),
    ],
    ids=["none", "second", "outside", "first"],
)
def test_the_free_memory_of_a_host(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, {"proc/meminfo": MEMINFO, **files})) == expected


def test_other_systems_are_queried_through_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=12345))
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    assert available_memory(tmp_path) == 12345
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelfn\[bigmodel\]'"):
        available_memory(tmp_path)


class Driver:
    """Two devices, one of which fails."""

    def mem_get_info(self, number: int) -> tuple[int, int]:
        if number:
            raise RuntimeError("busy")
        return 1000, 5000


def of_any_kind(_: object) -> Driver:
    return Driver()


def accelerator(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", of_any_kind)


def test_accelerators_are_queried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    accelerator(monkeypatch, "cuda")
    with caplog.at_level(logging.INFO, "accelfn.weights.places"):
        found = get_max_memory()
    assert list(found) == [0, "cpu"]
    assert found[0] == 1000
    assert "accelerator 1 isn't used: busy" in caplog.text
    # By default a tenth is left for activations.
    assert get_balanced_memory(M3())[0] == 900
    assert get_balanced_memory(M3(), {0: 1000})[0] == 1000
    # Without a number it is the current device.
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert get_max_memory({"cuda": 5}) == get_max_memory({torch.device("cuda"): 5}) == {1: 5}
    accelerator(monkeypatch, "mps")
    assert list(get_max_memory()) == ["mps"]
    assert get_max_memory({"mps:0": 5}) == {"mps": 5}


# --- balance -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "low_zero", "expected"),
    [
        ({0: 200, 1: 200}, False, {0: 200, 1: 200}),
        ({0: 300, 1: 500}, False, {0: 215, 1: 500}),
        ({0: 0, 1: 300, 2: 300}, False, {0: 0, 1: 215, 2: 300}),
        ({0: 300, "cpu": 1000}, False, {0: 300, "cpu": 1000}),
        ({0: 300, 1: 300, 2: 300}, True, {0: 0, 1: 215, 2: 300}),
        ({0: 300, 1: 100, 2: 100}, True, {0: 36, 1: 100, 2: 100}),
        ({"cpu:0": 300, "cpu:1": 300, "disk": 5}, False, {"cpu:0": 215, "cpu:1": 300, "disk": 5}),
        ({"cpu": 9}, True, {"cpu": 9}),
        ({0: "1GB", 2: "1GB"}, False, {0: 215, 2: 10**9}),
    ],
)
def test_the_documented_balance(given_: Any, low_zero: bool, expected: dict[Place, int]) -> None:
    before = dict(given_)
    assert get_balanced_memory(M3(), given_, low_zero=low_zero) == expected
    assert given_ == before
