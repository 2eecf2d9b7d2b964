"""The table of device types: what each row must say, and what plans make of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context
from accelfn.context import DeviceFacts, Hardware, check_precision, plan_device
from accelfn.devices import DEVICE_TYPES, DeviceType, device_type
from accelfn.errors import ConfigurationError, NotAvailableError

ROWS = list(DEVICE_TYPES.values())
CPU = DeviceFacts(type="cpu")


def machine_of(row: DeviceType, count: int) -> Hardware:
    """Return a machine with devices of a type, as ``read_hardware`` would find it."""
    precisions = frozenset(row.precisions)
    facts = DeviceFacts(type=row.name, count=count, backend=row.backend, precisions=precisions)
    devices = (CPU,) if row.name == "cpu" else (facts, CPU)
    return Hardware(devices=devices, backends=frozenset(("gloo", row.backend or "gloo")))


class Named:
    """Stands in for a device whose type torch doesn't know without its vendor's package."""

    def __init__(self, name: str) -> None:
        self.type, _, index = name.partition(":")
        self.index = int(index) if index else None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch parse the names of vendors' devices without their packages."""
    known = torch.device

    def parse(name: str) -> "torch.device | Named":
        try:
            return known(name)
        except RuntimeError:
            if name.partition(":")[0] not in DEVICE_TYPES:
                raise
            return Named(name)

    monkeypatch.setattr("accelfn.context.device.torch.device", parse)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_are_complete(row: DeviceType) -> None:
    assert (row.package is None) == (not row.install)
    assert (row.backend is None) == (row.world is None)
    assert row.world is None or row.world in af.config.DistributedType.values()
    assert set(row.precisions) <= {"bf16", "fp16", "fp8"}
    assert row.pins_memory or not row.has_streams
    assert row.name in ("mps", "cpu") or row.name in af.config.RNGType.values()
    if row.world is not None and row.name not in ("cpu", "cuda", "xla"):
        assert row.world == f"MULTI_{row.name.upper()}"


def test_what_the_table_lacks_is_treated_with_caution() -> None:
    row = device_type("mtia")
    assert (row.backend, row.has_float64, row.pins_memory, row.has_streams) == (None, False, False, False)


@given(row=st.sampled_from(ROWS), size=st.integers(2, 8), rank=st.integers(0, 7))
def test_each_rank_takes_its_device_and_the_backend_of_its_type(
    row: DeviceType, size: int, rank: int
) -> None:
    rank %= size
    place = af.context.EnvironmentPlan(launcher="env", rank=rank, size=size, local_rank=rank, local_size=size)
    machine = machine_of(row, 1 if row.numbering == "own" else size)
    if row.backend is None:
        with pytest.raises(ConfigurationError, match=f"no collective backend for '{row.name}' tensors"):
            plan_device(place, machine)
        return
    plan = plan_device(place, machine)
    expected = {"local_rank": f"{row.name}:{rank}", "own": f"{row.name}:0", "none": row.name}
    assert str(plan.device) == expected[row.numbering]
    assert plan.backend == (f"cpu:gloo,{row.name}:{row.backend}" if row.joins_gloo else row.backend)
    alone = plan_device(af.context.EnvironmentPlan(), machine)
    assert (str(alone.device).partition(":")[0], alone.backend) == (row.name, None)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("mode", ["no", "fp16", "bf16", "fp8"])
def test_a_type_has_the_precisions_of_its_row(
    row: DeviceType, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelfn.context.device.list_fp8_packages", lambda: {"torchao"})
    facts = machine_of(row, 1).devices[0]
    if mode in ("no", *row.precisions):
        check_precision(af.context.Precision(mode=mode), facts)
    else:
        with pytest.raises(ConfigurationError, match=f"'{mode}' isn't supported on device '{row.name}'"):
            check_precision(af.context.Precision(mode=mode), facts)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_several_ranks_have_accelerates_name(row: DeviceType) -> None:
    ctx = Context(world=af.context.World(size=2, local_size=2, device=Named(row.name)))  # pyright: ignore[reportArgumentType]
    if row.world is None:
        with pytest.raises(NotAvailableError, match=f"no name for several ranks on '{row.name}'"):
            _ = ctx.distributed_type
    else:
        assert ctx.distributed_type == row.world
