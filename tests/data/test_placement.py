"""Batches come to the device: whatever their kind, and on CUDA beside what is computed."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

from accelfn import Context, prepare_data_loader
from accelfn.data import placement
from accelfn.data.placement import SideStream, placer

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class Movable:
    """What moves by itself, as batches of tokenizers do."""

    def __init__(self) -> None:
        self.place = CPU

    def to(self, device: torch.device) -> "Movable":
        self.place = torch.device(device)
        return self


@pytest.mark.parametrize(
    "batch",
    [torch.zeros(2), [torch.zeros(2), torch.zeros(1)], (torch.zeros(2),), {"x": torch.zeros(2)}, [], "text"],
)
def test_on_the_cpu_batches_of_the_commonest_kinds_are_handed_out_as_they_are(batch: Any) -> None:
    assert placer(CPU, False)(batch) is batch


@pytest.mark.parametrize("device", [CPU, META])
def test_other_batches_are_moved_by_leaf_and_what_moves_by_itself_is_asked_to(device: torch.device) -> None:
    movable = Movable()
    movable.place = CPU if device == META else META
    moved = placer(device, False)(
        {"pair": Pair(torch.zeros(1), [torch.zeros(2)]), "text": "a", "own": movable}
    )
    assert {moved["pair"].left.device, moved["pair"].right[0].device, movable.place} == {device}
    assert (moved["text"], moved["own"]) == ("a", movable)


class Log:
    """Stands in for a CUDA device: the order in which it is asked for things."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        log = self.told

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = "computing" if device is None else "side"

            def wait_stream(self, other: "Stream") -> None:
                log.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                log.append(f"the host waits for {self.name}")

        class Copied(torch.Tensor):
            def record_stream(self, s: Any) -> None:
                log.append(f"memory is kept for {s.name}")

        def stream(one: Stream) -> AbstractContextManager[None]:
            log.append(f"in {one.name}")
            return nullcontext()

        def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
            log.append(f"copy of {tuple(tensor.shape)}{'' if non_blocking else ', blocking'}")
            return tensor.clone().as_subclass(Copied)

        monkeypatch.setattr(torch.cuda, "Stream", Stream)

        def current_stream(device: torch.device) -> Stream:
            return Stream()

        def is_pinned(tensor: torch.Tensor) -> bool:
            return tensor.dim() == 2

        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            log.append("pinned")
            return tensor

        monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.Tensor, "to", to)


def test_on_cuda_copies_run_beside_what_is_computed_and_the_host_waits_for_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Log(monkeypatch)
    source: dict[str, Any] = {"x": torch.zeros(3, 1), "y": torch.ones(3), "name": "a"}
    batch = SideStream(torch.device("cuda", 0), non_blocking=False)(source)
    assert log.told == [
        "in side",
        "copy of (3, 1)",
        "pinned",
        "copy of (3,)",
        "computing waits for side",
        "memory is kept for computing",
        "memory is kept for computing",
        "the host waits for side",
    ]
    assert batch["y"].sum() == 3
    assert batch["name"] == "a"


def test_with_non_blocking_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(monkeypatch)
    placer(torch.device("cuda", 0), non_blocking=True)([torch.zeros(3, 1)])
    assert log.told[-1] == "memory is kept for computing"


def test_on_cuda_what_moves_by_itself_does_so_in_the_computing_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, movable = pack_sequence([torch.ones(2), torch.ones(1)]), Movable()
    log = Log(monkeypatch)
    sent: list[Any] = []

    def send(tree: Any, device: torch.device, non_blocking: bool) -> Any:
        sent.append(tree)
        return tree

    monkeypatch.setattr(placement, "send_to_device", send)
    SideStream(torch.device("cuda", 0), non_blocking=True)([packed, movable])
    assert sent == [packed, movable]
    assert isinstance(sent[0], PackedSequence)
    assert log.told == []


def test_a_loader_that_is_not_to_place_leaves_batches_where_they_are() -> None:
    ctx = Context().replace(device_placement=False)
    batches = cast("Dataset[torch.Tensor]", [torch.zeros(1, device="meta")])
    loader = prepare_data_loader(ctx, DataLoader(batches, batch_size=None))
    assert next(iter(loader)).is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_on_a_real_device_are_what_was_read(non_blocking: bool, pin_memory: bool) -> None:
    data = torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096)
    loader = DataLoader(cast("Dataset[torch.Tensor]", data), 8, pin_memory=pin_memory)
    placed = placer(torch.device("cuda", 0), non_blocking)
    busy = torch.rand(2048, 2048, device="cuda")
    for batch, expected in zip(loader, data.view(8, 8, 4096), strict=True):
        moved = placed({"x": batch, "text": "a"})
        busy = busy @ busy.softmax(0)
        assert torch.equal((moved["x"] * 2).cpu(), expected * 2)
