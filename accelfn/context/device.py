"""The device of a rank, its capabilities, and mixed precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist

from accelfn.context.config import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8Backend,
    Fp8Choice,
    FP8RecipeKwargs,
    GradScalerKwargs,
    MSAMPRecipeKwargs,
    PrecisionType,
    TERecipeKwargs,
    choose_fp8,
    list_fp8_packages,
)
from accelfn.context.environment import EnvironmentPlan
from accelfn.errors import ConfigurationError


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


def read_hardware() -> Hardware:
    """Return the devices and collective backends of this process."""
    cpu = DeviceFacts(type="cpu")
    # UNDEFINED and FAKE aren't usable backends.
    backends = frozenset(
        name
        for name in dist.Backend.backend_list
        if name not in (dist.Backend.UNDEFINED, dist.Backend.FAKE) and dist.is_backend_available(name)
    )
    # A backend without declared capabilities may support CPU tensors.
    capabilities = dist.Backend.backend_capability
    cpu_backends = frozenset(name for name in backends if "cpu" in capabilities.get(name, ["cpu"]))
    # The accelerator of this build: cuda (ROCm too), xpu, mps, mtia, or a vendor's.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return Hardware(devices=(cpu,), backends=backends, cpu_backends=cpu_backends)
    kind = accelerator.type
    facts = DeviceFacts(
        type=kind,
        count=torch.accelerator.device_count(),
        backend=dist.Backend.default_device_backend_map.get(kind),
        precisions=_precisions(kind),
    )
    return Hardware(devices=(facts, cpu), backends=backends, cpu_backends=cpu_backends)


def _precisions(kind: str) -> frozenset[str]:
    module = torch.get_device_module(kind)
    # Emulated bf16 on old GPUs is slower than fp32, so it counts as unsupported.
    check = getattr(module, "is_bf16_supported", None)
    has_fp8 = False
    if kind == "cuda":
        has_bf16 = bool(torch.cuda.is_bf16_supported(including_emulation=False))
        # From Ada and Hopper, and from MI300, on.
        has_fp8 = torch.cuda.get_device_capability() >= ((9, 4) if torch.version.hip else (8, 9))
    elif kind == "mps":
        has_bf16 = bool(torch.backends.mps.is_macos_or_newer(14, 0))
    else:
        has_bf16 = bool(check()) if callable(check) else True
    names = (("fp16", True), ("bf16", has_bf16), ("fp8", has_fp8))
    return frozenset(name for name, has_it in names if has_it)


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
    if index is None and chosen.type not in ("cpu", "mps"):  # these have no index
        index = world.local_rank
    if index is not None and index >= facts.count:
        raise ConfigurationError(
            f"rank {world.rank} needs {chosen.type}:{index}, but this process sees {facts.count} such "
            f"device(s) for {world.local_size} rank(s) on the node. Start at most {facts.count} rank(s) per "
            "node, make more devices visible, or pass cpu=True. If each process sees only its own device, as "
            f"with --gpus-per-task, set ACCELFN_TORCH_DEVICE={chosen.type}:0."
        )
    numbered = index is not None and chosen.type not in ("cpu", "mps")
    chosen = torch.device(f"{chosen.type}:{index}" if numbered else chosen.type)
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
    if facts.type == "cpu" or name.strip().lower() == "gloo":
        return name
    # Control messages are CPU tensors, which must not wait for the device's queue.
    parts = {"cpu": "gloo", **_backend_parts(name)}
    return ",".join(f"{kind or facts.type}:{backend}" for kind, backend in parts.items())


def _backend_parts(name: str) -> dict[str, str]:
    """Split ``"cpu:gloo,cuda:nccl"`` by device type; a backend without a device type has the key ``""``."""
    parts = (part.strip().lower().rpartition(":") for part in name.split(","))
    return {kind: backend for kind, _, backend in parts}


Fp8Recipe = FP8RecipeKwargs | TERecipeKwargs | AORecipeKwargs | MSAMPRecipeKwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of one training step.

    Attributes:
        mode: ``"no"`` (the model's own dtypes), ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        autocast: Options of ``torch.autocast``.
        scaler: Options of the loss scaler, used with ``"fp16"``.
        fp8_recipe: How matrix products are cast, used with ``"fp8"``.
    """

    mode: str = "no"
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    fp8_recipe: Fp8Recipe | None = None

    def __post_init__(self) -> None:
        """Check the mode, and that an fp8 recipe has an effect."""
        modes = tuple(item.value for item in PrecisionType)
        mode = self.mode.value if isinstance(self.mode, PrecisionType) else self.mode
        if mode not in modes:
            raise ConfigurationError(f"mixed_precision must be one of {', '.join(modes)}: got {mode!r}.")
        object.__setattr__(self, "mode", mode)
        if self.fp8_recipe is not None and mode != "fp8":
            raise ConfigurationError(
                f"{type(self.fp8_recipe).__name__} has an effect only with mixed_precision='fp8', got "
                f"{mode!r}. Use fp8, or leave the recipe out."
            )

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None if it is off."""
        if self.mode == "no" or not self.autocast.enabled:
            return None
        return torch.float16 if self.mode == "fp16" else torch.bfloat16

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, so that small gradients don't underflow."""
        return self.mode == "fp16" and self.scaler.enabled


def check_precision(precision: Precision, device: DeviceFacts) -> None:
    """Check that the device supports a precision. There is no fallback to another dtype.

    Raises:
        ConfigurationError: The device doesn't; lists what it supports.
        MissingExtraError: No engine of 8-bit matrix products is installed, or the chosen one isn't.
    """
    if precision.mode == "fp8":
        check_fp8(choose_fp8(precision.fp8_recipe, list_fp8_packages()), device)
    if precision.mode in ("fp16", "bf16") and precision.mode not in device.precisions:
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
