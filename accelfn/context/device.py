"""The device of a rank, its capabilities, and mixed precision."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from accelfn.config import (
    AORecipeKwargs,
    FP8Backend,
    Fp8Choice,
    Precision,
    Settings,
    choose_fp8,
    list_fp8_packages,
)
from accelfn.context.device_modules import device_module
from accelfn.context.environment import EnvironmentPlan
from accelfn.context.xla import read_xla
from accelfn.devices import DEVICE_TYPES, DeviceType, device_type, has_false_peers
from accelfn.errors import ConfigurationError, MissingExtraError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The capabilities of one type of device on this machine.

    Attributes:
        type: torch's name: ``"cpu"``, ``"cuda"``, ``"xpu"``, ``"mps"``, ``"npu"``, ...
        count: Number of devices visible to this process; 1 for the CPU.
        backend: Name of the collective backend for its tensors; None if torch has none.
        precisions: Which of ``"fp16"`` and ``"bf16"`` autocast supports on it, and ``"fp8"`` if it has 8-bit
            matrix products.
    """

    type: str
    count: int = 1
    backend: str | None = "gloo"
    precisions: frozenset[str] = frozenset(("fp16", "bf16"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices and backends of a machine, from :func:`read_hardware`.

    Attributes:
        devices: Preferred device first, the CPU last.
        backends: Collective backends of this build of torch.
        cpu_backends: Those that support CPU tensors.
    """

    devices: tuple[DeviceFacts, ...] = (DeviceFacts(type="cpu"),)
    backends: frozenset[str] = frozenset(("gloo",))
    cpu_backends: frozenset[str] = frozenset(("gloo",))


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """This rank's device, and the backend for its world."""

    device: torch.device
    backend: str | None  # for init_process_group, such as "cpu:gloo,cuda:nccl"; None for a world of one
    facts: DeviceFacts


def read_hardware(wanted: str | None = None) -> Hardware:
    """Return the devices and collective backends of this process.

    torch may need a vendor's package to know an accelerator: :data:`accelfn.devices.DEVICE_TYPES` lists them.
    The package of ``wanted`` is imported; without ``wanted``, and if torch knows no accelerator, those that
    are installed.

    Args:
        wanted: Type of the device that was asked for, such as ``"npu"``; ``"xla"`` only by name.

    Raises:
        MissingExtraError: The package of ``wanted`` isn't installed, or can't be loaded.
    """
    if wanted == "xla":
        return _hardware(DeviceFacts(type="xla", backend="xla", precisions=read_xla()))
    if wanted is not None or not torch.accelerator.is_available():
        _import_vendors(wanted)
    # The accelerator of this build: cuda (ROCm too), xpu, mps, mtia, or a vendor's.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return _hardware()
    kind = accelerator.type
    # Not torch's default first: its testing package registers a backend that communicates nothing.
    known = kind in DEVICE_TYPES
    backend = device_type(kind).backend if known else dist.Backend.default_device_backend_map.get(kind)
    return _hardware(
        DeviceFacts(
            type=kind,
            count=torch.accelerator.device_count(),
            backend=backend,
            precisions=_precisions(device_type(kind)),
        )
    )


def _hardware(*accelerators: DeviceFacts) -> Hardware:
    # UNDEFINED and FAKE aren't usable backends.
    backends = frozenset(
        name
        for name in dist.Backend.backend_list
        if name not in (dist.Backend.UNDEFINED, dist.Backend.FAKE) and dist.is_backend_available(name)
    )
    # A backend without declared capabilities may support CPU tensors.
    capabilities = dist.Backend.backend_capability
    cpu_backends = frozenset(name for name in backends if "cpu" in capabilities.get(name, ["cpu"]))
    return Hardware(
        devices=(*accelerators, DeviceFacts(type="cpu")), backends=backends, cpu_backends=cpu_backends
    )


def _import_vendors(wanted: str | None) -> None:
    """Import the package of a type of device, or without one the first installed package that brings any."""
    for row in DEVICE_TYPES.values():
        if row.package is None or row.name == "xla" or wanted not in (None, row.name):
            continue
        if wanted is None and importlib.util.find_spec(row.package.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(row.package)
        except Exception as error:  # without their driver they raise exceptions of any class
            if wanted is None:  # as for CUDA, a machine without the driver has no such device
                continue
            raise MissingExtraError(
                f"the device {wanted!r} ({row.hardware}) needs {row.package}, which can't be imported: "
                f"{error}. Install it for this torch: {row.install}."
            ) from error
        if torch.accelerator.is_available():
            return


def _precisions(row: DeviceType) -> frozenset[str]:
    """Return which of fp16 and bf16 the devices of this machine have."""
    module = device_module(row.name)
    check = getattr(module, "is_bf16_supported", None)
    missing: set[str] = set()
    if row.name == "cuda":
        # Emulated bf16 on old GPUs is slower than fp32, so it counts as unsupported.
        has_bf16 = bool(torch.cuda.is_bf16_supported(including_emulation=False))
        # From Ada and Hopper, and from MI300, on.
        if torch.cuda.get_device_capability() < ((9, 4) if torch.version.hip else (8, 9)):
            missing.add("fp8")
    elif row.name == "mps":
        has_bf16 = bool(torch.backends.mps.is_macos_or_newer(14, 0))
    else:
        has_bf16 = bool(check()) if callable(check) else True
    if not has_bf16:
        missing.add("bf16")
    if row.name == "hpu" and str(module.get_device_name()).upper() == "GAUDI":
        missing.update(("fp16", "fp8"))  # the first generation has none
    return frozenset(row.precisions) - missing


def plan_device(
    world: EnvironmentPlan,
    hardware: Hardware,
    *,
    cpu: bool = False,
    device: str | None = None,
    backend: str | None = None,
) -> DevicePlan:
    """Choose the device of this rank and the backend of its world. Pure.

    The default is the machine's accelerator with index ``local_rank``; without an accelerator, or with
    ``cpu``, the CPU. A world of one has no backend, unless torchrun started it.

    Args:
        world: The rank and its local rank.
        hardware: Of the machine.
        cpu: Use the CPU even if there is an accelerator.
        device: A device by name, such as ``"cuda:1"``, instead of the default.
        backend: A backend by name; by default that of the device.

    Raises:
        ConfigurationError: The device or the backend doesn't exist, or a node has fewer devices than ranks.
    """
    known = tuple(facts.type for facts in hardware.devices)
    if device is not None:
        chosen = _parse_device(device, known)
        if cpu and chosen.type != "cpu":
            raise ConfigurationError(f"cpu=True contradicts the device {device!r}. Pass one of the two.")
    else:
        chosen = torch.device("cpu" if cpu else known[0])
    facts = next(item for item in hardware.devices if item.type == chosen.type)
    index = cast("int | None", chosen.index)  # torch's stubs omit None
    numbering = device_type(chosen.type).numbering
    if index is None and numbering != "none":
        index = world.local_rank if numbering == "local_rank" else 0
    if index is not None and index >= facts.count:
        raise ConfigurationError(
            f"rank {world.rank} needs {chosen.type}:{index}, but this process sees {facts.count} such "
            f"device(s) for {world.local_size} rank(s) on the node. Start at most {facts.count} rank(s) per "
            "node, make more devices visible, or pass cpu=True. If each process sees only its own device, as "
            f"with --gpus-per-task, set ACCELFN_TORCH_DEVICE={chosen.type}:0."
        )
    chosen = torch.device(chosen.type if numbering == "none" else f"{chosen.type}:{index}")
    if backend is not None:
        _check_backend(backend, facts, hardware)
    joins = world.launcher == "torchrun" or (world.size > 1 and world.launcher != "adopted")
    return DevicePlan(device=chosen, backend=_world_backend(facts, backend) if joins else None, facts=facts)


def _parse_device(name: str, known: tuple[str, ...]) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"unknown device {name!r}; this machine has: {', '.join(known)}.") from error
    if device.type not in known:
        raise ConfigurationError(
            f"the device {name!r} is not on this machine, which has: {', '.join(known)}."
        )
    return device


def _check_backend(name: str, facts: DeviceFacts, hardware: Hardware) -> None:
    parts = _backend_parts(name)
    for plain in parts.values():
        if plain not in hardware.backends:
            raise ConfigurationError(
                f"unknown backend {plain!r}: this build of torch has {', '.join(sorted(hardware.backends))}. "
                "Use one of these, or leave the backend out to use the device's default."
            )
    on_device, on_cpu = parts.get(facts.type, parts.get("")), parts.get("cpu")
    if on_device is None:
        raise ConfigurationError(
            f"the backend {name!r} has none for {facts.type!r} tensors, the device of this rank. Add "
            f"'{facts.type}:...' to it, or leave the backend out to use the device's default."
        )
    if facts.type == "cpu":
        on_cpu = on_device
    if on_cpu is not None and on_cpu not in hardware.cpu_backends:
        raise ConfigurationError(
            f"the backend {on_cpu!r} doesn't support CPU tensors; in this build of torch these do: "
            f"{', '.join(sorted(hardware.cpu_backends))}. Use one of these, or leave the backend out."
        )


def _world_backend(facts: DeviceFacts, requested: str | None) -> str:
    name = requested or facts.backend
    if name is None:
        raise ConfigurationError(
            f"torch has no collective backend for {facts.type!r} tensors, so several ranks can't communicate "
            "on it. Pass cpu=True, or start one process."
        )
    if not device_type(facts.type).joins_gloo or name.strip().lower() == "gloo":
        return name
    # Control messages are CPU tensors, which must not wait for the device's queue.
    parts = {"cpu": "gloo", **_backend_parts(name)}
    return ",".join(f"{kind or facts.type}:{backend}" for kind, backend in parts.items())


def _backend_parts(name: str) -> dict[str, str]:
    """Split ``"cpu:gloo,cuda:nccl"`` by device type; a backend without a device type has the key ``""``."""
    parts = (part.strip().lower().rpartition(":") for part in name.split(","))
    return {kind: backend for kind, _, backend in parts}


def load_sagemaker_backend(settings: Settings) -> str | None:
    """Return the backend of a distributed job of SageMaker, after registering it; None outside of one.

    Raises:
        MissingExtraError: The image of the job has no such backend.
    """
    if not settings.use_sagemaker or settings.sagemaker_distributed_type in (None, "NO"):
        return None
    try:
        importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
    except ImportError as error:
        raise MissingExtraError(
            "ACCELFN_SAGEMAKER_DISTRIBUTED_TYPE or ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE is "
            f"{settings.sagemaker_distributed_type}, which needs SageMaker's library "
            f"smdistributed.dataparallel: {error}. Use one of AWS's images that has it, or set the type to "
            "NO."
        ) from error
    return "smddp"


def check_peers(
    plan: DevicePlan, environment: Mapping[str, str], *, find: Callable[[], bool] = has_false_peers
) -> None:
    """Refuse GPUs that wrongly report access to each other's memory, on which NCCL hangs.

    ``accelfn launch`` sets the variables itself.

    Args:
        plan: Of a rank that isn't alone on its machine.
        environment: Its variables.
        find: Returns whether this machine has such GPUs.

    Raises:
        ConfigurationError: It has, and NCCL isn't told.
    """
    if "nccl" in (plan.backend or "") and not environment.get("NCCL_P2P_DISABLE") and find():
        raise ConfigurationError(
            "the GeForce RTX 40 cards of this machine have a driver before 550.40.07, which wrongly reports "
            "that they reach each other's memory, so NCCL would hang. Set NCCL_P2P_DISABLE=1 and "
            "NCCL_IB_DISABLE=1, update the driver, or start with accelfn launch, which sets them."
        )


def check_precision(precision: Precision, device: DeviceFacts) -> None:
    """Check that the device supports a precision. There is no fallback to another dtype.

    Whether this very device has fp8 depends on the package that computes in it.

    Raises:
        ConfigurationError: The device doesn't; lists what it supports.
        MissingExtraError: No engine of 8-bit matrix products is installed, or the chosen one isn't.
    """
    has_fp8 = "fp8" in device_type(device.type).precisions
    if precision.mode == "fp8" and has_fp8:
        check_fp8(choose_fp8(precision.fp8_recipe, list_fp8_packages()), device)
    elif precision.mode not in ("no", *device.precisions):
        supported = ", ".join(("no", *sorted(device.precisions)))
        raise ConfigurationError(
            f"mixed_precision={precision.mode!r} isn't supported on device {device.type!r}, which supports: "
            f"{supported}. Use one of these."
        )


def check_fp8(choice: Fp8Choice, device: DeviceFacts) -> bool:
    """Return whether 8-bit matrix products are emulated: rounded to 8 bits, and computed in float32. Pure.

    They are on the CPU, or if a ``Float8LinearConfig`` says so.

    Raises:
        ConfigurationError: The device has none, and they aren't emulated.
    """
    config = choice.recipe.config if isinstance(choice.recipe, AORecipeKwargs) else None
    if config is not None and config.emulate:
        return True
    if device.type == "cpu":  # without an emulated path, the other engines refuse the CPU themselves
        return config is None and choice.backend == FP8Backend.AO
    if "fp8" not in device.precisions:
        supported = ", ".join(("no", *sorted(device.precisions)))
        raise ConfigurationError(
            f"mixed_precision='fp8' needs 8-bit matrix products, which the device {device.type!r} doesn't "
            f"have; it supports: {supported}. NVIDIA GPUs have them from compute capability 8.9 on, and "
            "AMD's from MI300 on. Use bf16; or emulate them, slowly, with AORecipeKwargs(config="
            "Float8LinearConfig(emulate=True)) of torchao.float8."
        )
    return False
