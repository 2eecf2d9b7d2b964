"""Links bring what they are given, keep memory low, and work in whatever mode and process they are called."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accelfn.bigmodel import transfer as links
from accelfn.bigmodel.offload_folder import write_mapped
from accelfn.bigmodel.transfer import (
    Link,
    mapped_link,
    open_link,
    plan_packing,
    release_pages,
    thread_link,
    unpack,
)
from accelfn.bigmodel.weight_files import mapped_from, read_in

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are only let go on Linux")


def resident_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of a mapped tensor are in memory."""
    address = tensor.data_ptr()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(one, 16) for one in first.split("-"))
            inside = start <= address < end
        elif inside and first == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("it is mapped nowhere")


@pytest.mark.parametrize("size", [3, 1 << 18])
@pytest.mark.parametrize("inference", [False, True])
def test_a_simulated_device_gets_copies(size: int, inference: bool) -> None:
    hosts = [torch.randn(size), torch.randint(0, 9, (size,))]
    packing = plan_packing(hosts)
    with torch.inference_mode(inference):
        arrive = thread_link().begin(hosts, packing)
        memory = arrive()
        assert arrive() is memory
    assert not memory.is_inference()
    for host, copy in zip(hosts, unpack(memory, packing), strict=True):
        assert torch.equal(host, copy)
        assert host.data_ptr() != copy.data_ptr()


def test_links_of_places() -> None:
    assert not open_link("cpu:1", 1).in_place
    assert open_link("cpu", 1).in_place
    with pytest.raises(ValueError, match="execution_device: this machine has no accelerator 99"):
        open_link(99, 1)


@on_linux
@pytest.mark.parametrize("make", [thread_link, mapped_link])
def test_mapped_weights_release_their_memory(make: Any, tmp_path: Path) -> None:
    link: Link = make()
    weight = write_mapped(tmp_path, {"w": torch.randn(1 << 18)})["w"]
    expected = weight.clone()
    assert resident_bytes(weight) >= weight.nbytes
    packing = plan_packing([weight])
    link.begin([weight], packing)()
    hosts = [weight, torch.zeros(3)]
    link.release(hosts)
    release_pages(hosts)
    assert resident_bytes(weight) < 20_000
    assert torch.equal(weight, expected)


@on_linux
def test_modified_pages_are_not_released(tmp_path: Path) -> None:
    weight = write_mapped(tmp_path, {"w": torch.zeros(1 << 18)})["w"]
    weight[100_000] = 7
    release_pages([weight])
    assert weight[100_000] == 7
    assert mapped_from(weight) is not None


@on_linux
def test_mapped_weights_are_read_ahead(tmp_path: Path) -> None:
    weight = write_mapped(tmp_path, {"w": torch.randn(1 << 18)})["w"]
    release_pages([weight])
    assert resident_bytes(weight) < 20_000
    read_in([weight, torch.zeros(3)])
    assert resident_bytes(weight) >= weight.nbytes


@on_linux
def test_released_weights_are_not_read_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun = threading.Event(), threading.Event()
    read: list[int] = []

    def wait_and_read(tensors: Any) -> None:
        begun.set()
        gate.wait(30)
        read.append(len(tensors))
        read_in(tensors)

    monkeypatch.setattr(links, "read_in", wait_and_read)
    link = mapped_link()
    first, second = (write_mapped(tmp_path, {"w": torch.randn(1 << 18)})["w"] for _ in range(2))
    for weight in (first, second):
        link.begin([torch.zeros(1), weight], plan_packing([weight]))
    begun.wait(30)
    link.release([torch.zeros(1), second])
    threading.Timer(0.05, gate.set).start()
    link.release([torch.zeros(1), first])
    assert read == [1]
    release_pages([first, second])
    assert resident_bytes(first) < 20_000
    assert resident_bytes(second) < 20_000
