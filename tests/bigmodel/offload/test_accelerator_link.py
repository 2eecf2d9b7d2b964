"""The link to an accelerator: what waits for what, with a stand-in where there is none, and on real ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from accelfn.bigmodel import transfer as module
from accelfn.bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model, read_offload
from accelfn.bigmodel.offload_folder import write_mapped
from accelfn.bigmodel.transfer import accelerator_link, is_packed, pack, plan_packing, unpack
from accelfn.bigmodel.weight_files import mapped_from
from tests.bigmodel.offload.trees import gradients

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


class StandIn:
    """Replaces torch in the tested module: streams and events only record calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.pinned: set[int] = set()
        self.num_pinned = 0
        told = self.told
        stand = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = "side"

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass

            def wait_event(self, event: Event) -> None:
                told.append(f"{self.name} waits for {event.name}")

        using = Stream()
        using.name = "computing"

        class Event:
            count = 0

            def __init__(self, device: Any = None) -> None:
                Event.count += 1
                self.name = f"event {Event.count}"

            def record(self, stream: Stream) -> None:
                told.append(f"{stream.name} records {self.name}")

            def synchronize(self) -> None:
                told.append(f"the host waits for {self.name}")

        class Accelerator:
            @staticmethod
            def current_stream(device: Any) -> Stream:
                return using

        self.Stream, self.Event, self.accelerator = Stream, Event, Accelerator

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            told.append(f"memory is of {stream.name}, too")

        def is_pinned(tensor: torch.Tensor) -> bool:
            return tensor.untyped_storage().data_ptr() in stand.pinned

        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
        monkeypatch.setattr(module, "torch", self)
        self._kept: list[torch.Tensor] = []

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = torch.empty(*size, **options)
        if pin_memory:
            self.num_pinned += 1
            self._kept.append(made)
            self.pinned.add(made.untyped_storage().data_ptr())
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def take(self) -> list[str]:
        told = self.told[:]
        self.told.clear()
        return told


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def test_a_block_in_pinned_memory_is_one_copy(stand: StandIn) -> None:
    hosts = [torch.randn(100), torch.randn(7)]
    packing = plan_packing(hosts)
    memory = stand.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=True)
    pack(hosts, packing, memory)
    link = accelerator_link(CPU, 1)
    arrive = link.begin(unpack(memory, packing), packing)
    assert stand.num_pinned == 1
    copies = unpack(arrive(), packing)
    assert all(torch.equal(left, right) for left, right in zip(hosts, copies, strict=True))
    assert copies[0].data_ptr() != memory.data_ptr()
    assert stand.take() == [
        "side records event 1",
        "computing waits for event 1",
        "memory is of computing, too",
    ]


def test_other_blocks_are_packed_by_a_thread_into_few_pieces(stand: StandIn) -> None:
    link = accelerator_link(CPU, 1)
    for number in range(6):
        hosts = [torch.full((100,), float(number)), torch.ones(7)]
        packing = plan_packing(hosts)
        copies = unpack(link.begin(hosts, packing)(), packing)
        assert all(torch.equal(left, right) for left, right in zip(hosts, copies, strict=True))
        link.release(hosts)
    assert stand.num_pinned == 2
    waited = [told for told in stand.take() if told.startswith("the host waits")]
    # For a piece of the pool that nothing reads it any more, and for the device that it is done with blocks.
    assert len(waited) == 4 + 4


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_the_host_does_not_run_ahead_of_the_device(stand: StandIn, num_ahead: int) -> None:
    link = accelerator_link(CPU, num_ahead)
    hosts = [torch.zeros(3)]
    packing = plan_packing(hosts)
    for _ in range(num_ahead):
        link.release(hosts)
    stand.take()
    link.begin(hosts, packing)()
    assert not any(told.startswith("the host") for told in stand.take())
    link.release(hosts)
    stand.take()
    link.begin(hosts, packing)()
    assert "the host waits for event 1" in stand.take()[:1] or num_ahead == 0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.tied = self.weight
        self.register_buffer("some", torch.arange(3))


def test_weights_are_laid_side_by_side_in_pinned_memory(stand: StandIn, tmp_path: Path) -> None:
    model: Any = Two()
    expected = model.weight.detach().clone()
    weight = model.weight
    module.pin((model.weight, model.tied, model.some))
    tensors = [model.weight, model.some]
    assert model.weight is model.tied is weight
    assert is_packed(tensors, plan_packing(tensors))
    assert torch.equal(model.weight, expected)
    assert torch.equal(model.some, torch.arange(3))
    assert stand.num_pinned == 1
    module.pin((model.weight, model.tied, model.some))
    assert stand.num_pinned == 1
    other = torch.randn(5)  # of a block that shares a weight with the first
    module.pin((model.weight, other))
    assert stand.num_pinned == 2
    assert other.is_pinned()
    assert model.weight.data_ptr() == tensors[0].data_ptr()


def test_mapped_tensors_are_not_pinned(stand: StandIn, tmp_path: Path) -> None:
    model: Any = Two()
    model.weight.data = write_mapped(tmp_path, {"w": model.weight})["w"]
    module.pin((model.weight, model.tied))
    assert mapped_from(model.weight) is not None
    assert stand.num_pinned == 0


# --- on real devices -----------------------------------------------------------------------------


def layers() -> Any:
    cast("Any", torch).random.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(4)))


@needs_cuda
@pytest.mark.parametrize("how", ["cpu", "disk", "both", "buffers"])
def test_an_offloaded_model_on_cuda_equals_the_plain_one(how: str, tmp_path: Path) -> None:
    plain, model = layers().cuda(), layers()
    if how == "cpu":
        cpu_offload(model, 0)
    elif how == "disk":
        disk_offload(model, tmp_path, 0)
    elif how == "buffers":
        cpu_offload(model, 0, offload_buffers=True)
    else:
        dispatch_model(model, {"0": 0, "1": "cpu", "2": "disk", "3": "cpu"}, offload_dir=tmp_path)
    x = torch.randn(8, 64)
    for _ in range(3):
        plain.zero_grad()
        model.zero_grad()
        out = model(x)
        seen = out.detach().clone()  # at once: anything else may wait for the device, and so for the copy
        expected = plain(x.cuda())
        assert out.device == x.device
        assert torch.equal(expected.cpu(), seen)
        expected.sum().backward()
        out.sum().backward()
        for left, right in zip(gradients(plain).values(), gradients(model).values(), strict=True):
            torch.testing.assert_close(cast("Any", left).cpu(), cast("Any", right).cpu())
        with torch.no_grad():
            seen = model(x).clone()
            assert torch.equal(plain(x.cuda()).cpu(), seen)
            assert torch.equal(plain(x.cuda()), model(x.cuda()))
    for (name, left), right in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(left.cpu(), right.cpu()), name
    assert copy.deepcopy(model)(x).device == x.device


@needs_cuda
def test_memory_on_cuda_stays_within_the_bound() -> None:
    model: Any = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).requires_grad_(False)
    cpu_offload(model, 0)
    x = torch.randn(1, 2048, device="cuda")
    model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    (facts,) = read_offload(model)
    # One more may wait for the device to be done with it, and activations are small.
    assert torch.cuda.max_memory_allocated() - before <= 1.5 * facts.bound_bytes + (1 << 20)


@needs_cuda
def test_one_that_computes_on_a_stream_of_its_own_waits_for_the_copy() -> None:
    plain, model = layers().cuda(), layers()
    cpu_offload(model, 0)
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        outs = [model(x) for _ in range(5)]
    torch.cuda.synchronize()
    with torch.no_grad():
        assert all(torch.equal(out, plain(x)) for out in outs[:1])
