"""The types of devices: one row for each, with what differs between them.

torch isn't imported, since the launcher reads the table too. What only a device itself can tell, such as
whether it has bf16, is in :class:`accelfn.context.DeviceFacts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

__all__ = ("DEVICE_TYPES", "DeviceType", "device_type", "has_false_peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """What one type of device needs.

    Attributes:
        name: torch's name, as in ``torch.device("cuda")``.
        hardware: Whose devices they are.
        package: The module that makes torch know them; None if torch itself does.
        install: How to get that module.
        backend: The collective backend for their tensors; None if there is none.
        world: Accelerate's name for several ranks on them; None without one.
        precisions: The modes of mixed precision that a device of this type can have. Old devices may have
            fewer.
        numbering: Which device a rank takes: the one with its local rank, the first ("own": each process sees
            only its own), or the only one, which has no number.
        has_float64: Whether every device computes in float64.
        pins_memory: Whether copies from and to pinned host memory can overlap the computation.
        has_streams: Whether its module in torch has CUDA's streams, for copies beside the computation.
        joins_gloo: Whether one process group has their backend and gloo, for tensors of the host.
        visible: The variable that selects which of them a process sees.
        files: Patterns of their files in ``/dev``.
    """

    name: str
    hardware: str = "another accelerator"
    package: str | None = None
    install: str = ""
    backend: str | None = None
    world: str | None = None
    precisions: tuple[str, ...] = ("bf16", "fp16")
    numbering: Literal["local_rank", "own", "none"] = "local_rank"
    has_float64: bool = False
    pins_memory: bool = False
    has_streams: bool = False
    joins_gloo: bool = True
    visible: str | None = None
    files: tuple[str, ...] = ()


# Of several accelerators of one machine, the one whose row comes first is used, as in Accelerate.
_TABLE = (
    DeviceType(name="mps", hardware="Apple's GPUs", numbering="none"),
    DeviceType(
        name="mlu",
        hardware="Cambricon's MLUs",
        package="torch_mlu",
        install="Cambricon's wheel of torch_mlu",
        backend="cncl",
        world="MULTI_MLU",
        pins_memory=True,
        has_streams=True,
        visible="MLU_VISIBLE_DEVICES",
        files=("cambricon_dev[0-9]*",),
    ),
    DeviceType(
        name="sdaa",
        hardware="Tecorigin's SDAAs",
        package="torch_sdaa",
        install="Tecorigin's wheel of torch_sdaa",
        backend="tccl",
        world="MULTI_SDAA",
        pins_memory=True,
        visible="SDAA_VISIBLE_DEVICES",
        files=("tcaicard[0-9]*",),
    ),
    DeviceType(
        name="musa",
        hardware="Moore Threads' GPUs",
        package="torch_musa",
        install="Moore Threads' wheel of torch_musa",
        backend="mccl",
        world="MULTI_MUSA",
        pins_memory=True,
        has_streams=True,
        visible="MUSA_VISIBLE_DEVICES",
        files=("mtgpu*",),
    ),
    DeviceType(
        name="npu",
        hardware="Huawei's Ascend NPUs",
        package="torch_npu",
        install="pip install torch-npu",
        backend="hccl",
        world="MULTI_NPU",
        pins_memory=True,
        has_streams=True,
        visible="ASCEND_RT_VISIBLE_DEVICES",
        files=("davinci[0-9]*",),
    ),
    DeviceType(
        name="hpu",
        hardware="Intel's Gaudis",
        package="habana_frameworks.torch",
        install="pip install habana-torch-plugin",
        backend="hccl",
        world="MULTI_HPU",
        precisions=("bf16", "fp16", "fp8"),
        pins_memory=True,
        visible="HABANA_VISIBLE_MODULES",
        files=("accel/accel[0-9]*",),
    ),
    DeviceType(
        name="cuda",
        hardware="NVIDIA's GPUs, and AMD's through ROCm",
        backend="nccl",
        world="MULTI_GPU",
        precisions=("bf16", "fp16", "fp8"),
        has_float64=True,
        pins_memory=True,
        has_streams=True,
        visible="CUDA_VISIBLE_DEVICES",
    ),
    DeviceType(
        name="xpu",
        hardware="Intel's GPUs",
        backend="xccl",
        world="MULTI_XPU",
        precisions=("bf16", "fp16", "fp8"),
        pins_memory=True,
        has_streams=True,
        visible="ZE_AFFINITY_MASK",
    ),
    DeviceType(
        name="neuron",
        hardware="AWS's Trainium and Inferentia",
        package="torch_neuronx",
        install="pip install torch-neuronx --extra-index-url https://pip.repos.neuron.amazonaws.com",
        backend="neuron",
        world="MULTI_NEURON",
        precisions=("bf16",),
        visible="NEURON_RT_VISIBLE_CORES",
        files=("neuron[0-9]*",),
    ),
    DeviceType(
        name="xla",
        hardware="Google's TPUs, through torch_xla",
        package="torch_xla",
        install="pip install 'torch_xla[tpu]', in the version of torch",
        backend="xla",
        world="XLA",
        numbering="own",
        joins_gloo=False,
        visible="TPU_VISIBLE_CHIPS",
    ),
    DeviceType(
        name="cpu",
        hardware="the host's processor",
        backend="gloo",
        world="MULTI_CPU",
        precisions=("bf16", "fp16", "fp8"),
        numbering="none",
        has_float64=True,
        joins_gloo=False,
    ),
)

#: Every type that accelfn knows, by name.
DEVICE_TYPES: Mapping[str, DeviceType] = MappingProxyType({row.name: row for row in _TABLE})


def device_type(name: str) -> DeviceType:
    """Return the row of a type of device; for a type that the table lacks, one with cautious values. Pure.

    >>> device_type("npu").backend, device_type("npu").package
    ('hccl', 'torch_npu')
    >>> device_type("mtia").has_float64
    False
    """
    return DEVICE_TYPES.get(name) or DeviceType(name=name)


def has_false_peers(root: str = "/") -> bool:
    """Return whether GPUs of this machine wrongly report access to each other's memory. Reads ``/proc``.

    So do several GeForce RTX 40 cards with a driver before 550.40.07.
    """
    driver = Path(root, "proc/driver/nvidia")
    models = [_read_text(path) for path in driver.glob("gpus/*/information")]
    cards = sum(re.search(r"GeForce RTX 40\d\d", model) is not None for model in models)
    version = re.search(r"Module\D*?(\d+)\.(\d+)(?:\.(\d+))?", _read_text(driver / "version"))
    if cards < 2 or version is None:
        return False
    return tuple(int(part or 0) for part in version.groups()) < (550, 40, 7)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
