"""Places in all forms that callers may use."""

import pytest
import torch

from accelfn.bigmodel.devices import (
    Place,
    check_device,
    current_place,
    read_place,
)


@pytest.mark.parametrize(
    ("written", "place"),
    [
        (0, 0),
        (3, 3),
        ("cpu", "cpu"),
        ("disk", "disk"),
        ("mps", "mps"),
        ("cpu:0", "cpu:0"),
        ("cpu:12", "cpu:12"),
        (torch.device("cpu"), "cpu"),
        (torch.device("cpu", 1), "cpu:1"),
    ],
)
def test_places_have_one_form(written: object, place: Place) -> None:
    assert read_place(written) == place


@pytest.mark.skipif(
    torch.accelerator.is_available() and str(torch.accelerator.current_accelerator()) != "cuda",
    reason="another kind of accelerator is here",
)
def test_devices_of_cuda_are_numbers() -> None:
    assert [read_place(one) for one in ("cuda", "cuda:1", torch.device("cuda", 2))] == [0, 1, 2]


def test_without_a_number_it_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [2]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    assert [read_place(one) for one in ("cuda", torch.device("cuda"))] == [2, 2]
    assert [read_place(one) for one in ("cuda:0", 1, torch.device("cuda", 3))] == [0, 1, 3]
    assert current_place() == 2
    current[0] = 1
    assert check_device(read_place("cuda")) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert read_place("mps:0") == read_place(torch.device("mps", 0)) == current_place() == "mps"


@pytest.mark.parametrize(
    "wrong", [-1, True, 1.0, None, "", "gpu", "0", "cpu:", "cpu:-1", "cpu:x", "tpu:0", "meta"]
)
def test_unknown_places_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"max_memory: unknown place .*'cpu', 'disk'"):
        read_place(wrong, "max_memory")


def test_devices_of_the_host() -> None:
    assert check_device("cpu") == check_device("cpu:3") == torch.device("cpu")
    with pytest.raises(ValueError, match="main_device: the disk can't compute"):
        check_device("disk", "main_device")
    with pytest.raises(ValueError, match="main_device: this machine has no accelerator 99"):
        check_device(99, "main_device")


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_that_is_here() -> None:
    assert check_device(0).index == 0
