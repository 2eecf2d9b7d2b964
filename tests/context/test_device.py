"""Choosing a device and a backend: over made-up machines, and the one at hand."""

import importlib
import sys
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import accelfn as af
from accelfn.config import read_settings
from accelfn.context import DeviceFacts, DevicePlan, Hardware, plan_device, read_hardware
from accelfn.context.device import check_peers, load_sagemaker_backend
from accelfn.devices import DEVICE_TYPES
from accelfn.errors import ConfigurationError, MissingExtraError

CPU = DeviceFacts(type="cpu")
PLAIN = Hardware()
GPUS = Hardware(
    devices=(DeviceFacts(type="cuda", count=8, backend="nccl"), CPU),
    backends=frozenset(("gloo", "nccl", "mpi")),
    cpu_backends=frozenset(("gloo", "mpi")),
)
MAC = Hardware(devices=(DeviceFacts(type="mps", backend=None), CPU))
HPUS = Hardware(
    devices=(DeviceFacts(type="hpu", count=2, backend="hccl"), CPU), backends=frozenset(("gloo", "hccl"))
)


def place(local_rank: int = 0, local_size: int = 1, launcher: str = "torchrun") -> af.context.EnvironmentPlan:
    return af.context.EnvironmentPlan(
        launcher=launcher, rank=local_rank, size=local_size, local_rank=local_rank, local_size=local_size
    )


ALONE = af.context.EnvironmentPlan()


def chosen(plan: DevicePlan) -> tuple[str, str | None]:
    return str(plan.device), plan.backend


@pytest.mark.parametrize(
    ("world", "hardware", "device", "expected"),
    [
        (ALONE, PLAIN, None, ("cpu", None)),
        (ALONE, GPUS, None, ("cuda:0", None)),
        (ALONE, GPUS, "cuda:3", ("cuda:3", None)),
        (ALONE, GPUS, "cuda", ("cuda:0", None)),
        (ALONE, GPUS, "cpu:0", ("cpu", None)),
        (ALONE, MAC, "mps:0", ("mps", None)),
        (ALONE, HPUS, None, ("hpu:0", None)),
        (place(0, 1, "openmpi"), MAC, None, ("mps", None)),
        (place(0, 1, "openmpi"), GPUS, None, ("cuda:0", None)),
        (place(0, 1), PLAIN, None, ("cpu", "gloo")),
        (place(1, 2), HPUS, None, ("hpu:1", "cpu:gloo,hpu:hccl")),
        (place(1, 2), GPUS, "cuda:7", ("cuda:7", "cpu:gloo,cuda:nccl")),
        (place(1, 2), GPUS, "cpu", ("cpu", "gloo")),
        (place(1, 2, "adopted"), MAC, None, ("mps", None)),
    ],
)
def test_the_choice_of_device_and_backend(
    world: af.context.EnvironmentPlan,
    hardware: Hardware,
    device: str | None,
    expected: tuple[str, str | None],
) -> None:
    assert chosen(plan_device(world, hardware, device=device)) == expected
    assert str(plan_device(world, hardware, cpu=True).device) == "cpu"


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("nccl", None, "cpu:gloo,cuda:nccl"),
        ("NCCL", None, "cpu:gloo,cuda:nccl"),
        ("gloo", None, "gloo"),
        ("mpi", None, "cpu:gloo,cuda:mpi"),
        ("cuda:nccl", None, "cpu:gloo,cuda:nccl"),
        ("cuda:nccl,cpu:mpi", None, "cpu:mpi,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", None, "cpu:gloo,cuda:nccl"),
        ("gloo", "cpu", "gloo"),
        ("mpi", "cpu", "mpi"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu:gloo,cuda:nccl"),
    ],
)
def test_a_backend_that_is_asked_for_is_the_one_and_cpu_tensors_have_theirs(
    asked: str, device: str | None, expected: str
) -> None:
    assert plan_device(place(1, 2), GPUS, device=device, backend=asked).backend == expected


@pytest.mark.parametrize(
    ("hardware", "device", "cpu", "backend", "message"),
    [
        (GPUS, "banana", False, None, "unknown device 'banana'; this machine has: cuda, cpu"),
        (PLAIN, "cuda:0", False, None, "'cuda:0' is not on this machine, which has: cpu"),
        (GPUS, "cuda:8", False, None, r"needs cuda:8, but this process sees 8 such device\(s\)"),
        (GPUS, "cpu:1", False, None, r"needs cpu:1, but this process sees 1 such device\(s\)"),
        (MAC, "mps:1", False, None, "needs mps:1"),
        (GPUS, "cuda:1", True, None, "cpu=True contradicts the device 'cuda:1'"),
        (GPUS, None, False, "banana", "unknown backend 'banana': this build of torch has gloo, mpi, nccl"),
        (PLAIN, None, False, "nccl", "unknown backend 'nccl': this build of torch has gloo"),
        (GPUS, None, False, "cpu:gloo,cuda:xccl", "unknown backend 'xccl'"),
        (GPUS, None, False, "cpu:gloo", "has none for 'cuda' tensors"),
        (GPUS, None, True, "nccl", "'nccl' doesn't support CPU tensors; .* these do: gloo, mpi"),
        (GPUS, None, True, "cuda:nccl", "has none for 'cpu' tensors"),
        (GPUS, None, False, "cpu:nccl,cuda:nccl", "'nccl' doesn't support CPU tensors"),
        (MAC, None, False, None, "torch has no collective backend for 'mps' tensors"),
    ],
)
def test_what_is_not_there_is_refused(
    hardware: Hardware, device: str | None, cpu: bool, backend: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_device(place(0, 2), hardware, device=device, cpu=cpu, backend=backend)


def test_more_ranks_than_devices_is_an_error_and_not_a_shared_device() -> None:
    few = Hardware(devices=(DeviceFacts(type="cuda", count=7, backend="nccl"), CPU))
    with pytest.raises(ConfigurationError, match=r"Start at most 7 rank.* ACCELFN_TORCH_DEVICE=cuda:0"):
        plan_device(place(7, 8), few)
    # The way out that the message names, for processes that are each shown a device of their own.
    assert str(plan_device(place(7, 8), few, device="cuda:0").device) == "cuda:0"


def test_this_machine_has_a_cpu_and_gloo_and_no_backend_that_moves_nothing() -> None:
    hardware = read_hardware()
    assert hardware.devices[-1] == CPU
    assert "gloo" in hardware.cpu_backends
    assert hardware.cpu_backends <= hardware.backends
    assert not hardware.backends & {"undefined", "fake"}
    assert "nccl" not in hardware.cpu_backends


@pytest.mark.parametrize(
    ("mode", "dtype", "scales"),
    [("no", None, False), ("fp16", torch.float16, True), ("bf16", torch.bfloat16, False)],
)
def test_modes_have_their_dtype_and_only_fp16_scales(
    mode: str, dtype: torch.dtype | None, scales: bool
) -> None:
    precision = af.context.Precision(mode=af.config.PrecisionType(mode))
    assert (precision.compute_dtype, precision.scales_loss) == (dtype, scales)
    assert (type(precision.mode), precision) == (str, af.context.Precision(mode=mode))


@pytest.mark.parametrize("mode", ["fp32", "BF16", "", None, 16])
def test_an_unknown_mode_is_refused(mode: str) -> None:
    with pytest.raises(ConfigurationError, match=r"mixed_precision must be one of no, fp8, fp16, bf16: got"):
        af.context.Precision(mode=mode)


def test_an_fp8_recipe_without_fp8_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="AORecipeKwargs has an effect only with mixed_precision='f"):
        af.context.Precision(mode="bf16", fp8_recipe=af.config.AORecipeKwargs())


# --- vendors' packages ----------------------------------------------------------------------------


class Gaudi:
    """A stand-in for ``torch.hpu``."""

    name = "GAUDI"

    @classmethod
    def get_device_name(cls) -> str:
        return cls.name


@pytest.fixture
def gaudi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[None, None, None]:
    """Install a stand-in for Intel's package; torch knows eight Gaudis once it is imported."""
    package = "habana_frameworks.torch"
    (tmp_path / "habana_frameworks").mkdir()
    (tmp_path / "habana_frameworks/__init__.py").touch()
    (tmp_path / "habana_frameworks/torch.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    class Device:
        type = "hpu"

    def module_of(kind: str) -> type[Gaudi]:
        return Gaudi

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: package in sys.modules)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", Device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr("accelfn.context.device.device_module", module_of)
    yield
    for name in (package, "habana_frameworks"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("wanted", [None, "hpu"])
@pytest.mark.parametrize(("name", "precisions"), [("GAUDI", {"bf16"}), ("GAUDI2", {"bf16", "fp16", "fp8"})])
def test_a_vendors_package_is_imported_for_its_device(
    wanted: str | None, name: str, precisions: set[str], gaudi: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gaudi, "name", name)
    facts = read_hardware(wanted).devices[0]
    assert (facts.type, facts.count, facts.backend, facts.precisions) == ("hpu", 8, "hccl", precisions)


def test_no_package_is_imported_for_the_cpu(gaudi: None) -> None:
    assert read_hardware("cpu").devices == (CPU,)
    assert "habana_frameworks" not in sys.modules


@pytest.mark.parametrize("kind", [name for name, row in DEVICE_TYPES.items() if row.package])
def test_a_package_that_is_missing_is_named(kind: str) -> None:
    row = DEVICE_TYPES[kind]
    with pytest.raises(MissingExtraError, match=f"{row.package}.* can't be imported") as caught:
        read_hardware(kind)
    assert row.install in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "variables", "would_hang", "refused"),
    [
        ("cpu:gloo,cuda:nccl", {}, True, True),
        ("cpu:gloo,cuda:nccl", {"NCCL_P2P_DISABLE": "1"}, True, False),
        ("cpu:gloo,cuda:nccl", {}, False, False),
        ("gloo", {}, True, False),
        (None, {}, True, False),
    ],
)
def test_gpus_on_which_nccl_would_hang_are_refused(
    backend: str | None, variables: dict[str, str], would_hang: bool, refused: bool
) -> None:
    plan = DevicePlan(device=torch.device("cuda:0"), backend=backend, facts=GPUS.devices[0])
    expected = pytest.raises(ConfigurationError, match="Set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1")
    with expected if refused else nullcontext():
        check_peers(plan, variables, find=lambda: would_hang)


def test_jobs_of_sagemaker_communicate_by_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "NO"}
    assert load_sagemaker_backend(read_settings({})) is None
    assert load_sagemaker_backend(read_settings(job)) is None
    job["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] = "DATA_PARALLEL"
    with pytest.raises(MissingExtraError, match=r"needs SageMaker's library smdistributed\.dataparallel"):
        load_sagemaker_backend(read_settings(job))
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    assert load_sagemaker_backend(read_settings(job)) == "smddp"
    assert imported == ["smdistributed.dataparallel.torch.torch_smddp"]
