"""Where each tensor lies, and where it is used."""

from __future__ import annotations

import pytest

from accelfn.bigmodel.offload.dispatch_plan import Lies, plan_dispatch, read_map
from accelfn.bigmodel.places import Place

LEAVES = {"a.weight": True, "a.bias": True, "a.count": False, "b.weight": True}


def lies(places: dict[str, Place], **options: object) -> dict[str, tuple[Place, Place]]:
    plan = plan_dispatch(LEAVES, places, **options)  # pyright: ignore[reportArgumentType]
    return {name: (one.at, one.used) for name, one in plan.lies.items()}


def test_the_longest_name_counts() -> None:
    found = lies({"": "cpu", "a": "cpu:0", "a.bias": "cpu:1"}, main="cpu")
    assert found == {
        "a.weight": ("cpu:0", "cpu:0"),
        "a.bias": ("cpu:1", "cpu:1"),
        "a.count": ("cpu:0", "cpu:0"),
        "b.weight": ("cpu", "cpu"),
    }


def test_what_lies_on_the_host_is_used_on_the_main_device() -> None:
    assert lies({"a": "disk", "b": "cpu"}, main=0) == {
        "a.weight": ("disk", 0),
        "a.bias": ("disk", 0),
        "a.count": (0, 0),
        "b.weight": ("cpu", 0),
    }
    assert lies({"": "disk"}, main=0, offload_buffers=True)["a.count"] == ("disk", 0)


@pytest.mark.parametrize(
    ("places", "main"),
    [
        ({"a": "cpu", "b": "disk"}, "cpu"),
        ({"a": 1, "b": 0}, 0),
        ({"a": "cpu:0", "b": 1}, 1),
        ({"a": "cpu:1", "b": "cpu:0"}, "cpu:0"),
        ({"a": "disk", "b": "mps"}, "mps"),
    ],
)
def test_the_main_device_is_the_first_accelerator_by_its_number(
    places: dict[str, Place], main: Place
) -> None:
    assert plan_dispatch(LEAVES, places).main == main


def test_a_tied_tensor_that_is_on_the_device_anyway_does_not_travel_there() -> None:
    plan = plan_dispatch(LEAVES, {"a": 0, "b": "cpu"}, [("a.weight", "b.weight")])
    assert plan.lies["b.weight"] == Lies(0, 0)
    assert plan.torn == ()


def test_ties_between_devices_are_named() -> None:
    plan = plan_dispatch(LEAVES, {"a": 0, "b": 1}, [("a.weight", "b.weight")])
    assert plan.torn == (("a.weight", "b.weight"),)


def test_what_has_no_place_is_named() -> None:
    with pytest.raises(ValueError, match=r"says nothing of 'a.weight', 'a.bias', 'a.count'\. Name these"):
        plan_dispatch(LEAVES, {"b": "cpu"})


def test_what_is_not_saved_needs_no_place() -> None:
    plan = plan_dispatch(LEAVES, {"a.weight": 1, "a.bias": 1, "b": "cpu"}, unsaved=["a.count"])
    assert plan.lies["a.count"] == Lies(1, 1)
    assert plan.at("cpu") == ("b.weight",)


def test_maps_are_read() -> None:
    assert read_map({"": "cpu", "a": "cpu:0", "b": "disk"}) == {"": "cpu", "a": "cpu:0", "b": "disk"}
    with pytest.raises(ValueError, match=r"device_map\['a'\]: there is no place 'gpu'"):
        read_map({"a": "gpu"})
    with pytest.raises(ValueError, match=r"device_map\['a'\]: this machine has no accelerator 99"):
        read_map({"a": 99})
