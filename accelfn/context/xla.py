"""XLA's devices, such as TPUs, through torch_xla: a process's place, its device, and what ends a step.

Written against the documented interface of torch_xla 2.9. It is imported when an XLA device is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch

from accelfn.context.environment import EnvironmentPlan
from accelfn.devices import device_type
from accelfn.errors import MissingExtraError, NotAvailableError

_FALSE = ("0", "false", "no", "off")


def is_xla_requested(environment: Mapping[str, str]) -> bool:
    """Return whether variables select XLA: ``PJRT_DEVICE`` is set, and ``USE_TORCH_XLA`` isn't false. Pure.

    >>> is_xla_requested({"PJRT_DEVICE": "TPU"}), is_xla_requested({})
    (True, False)
    """
    is_off = environment.get("USE_TORCH_XLA", "").strip().lower() in _FALSE
    return bool(environment.get("PJRT_DEVICE", "").strip()) and not is_off


def import_xla(module: str = "torch_xla") -> Any:
    """Import torch_xla, or a module of it.

    Raises:
        MissingExtraError: It isn't installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"an XLA device was requested (PJRT_DEVICE, or the device 'xla'), and {module} can't be "
            f"imported: {error}. Run: {device_type('xla').install}. Without an XLA device, unset PJRT_DEVICE."
        ) from error


def read_xla() -> frozenset[str]:
    """Return the modes of mixed precision of the XLA device, after registering torch_xla's backend.

    Raises:
        MissingExtraError: torch_xla isn't installed.
    """
    import_xla()
    import_xla("torch_xla.distributed.xla_backend")
    # float16 overflows on a TPU, which has no kernels for it.
    is_tpu = str(import_xla("torch_xla.runtime").device_type()) == "TPU"
    return frozenset(("bf16",) if is_tpu else ("bf16", "fp16"))


def read_xla_place() -> EnvironmentPlan:
    """Return the place of this process among those of XLA. The nodes are unknown.

    Raises:
        NotAvailableError: The process has several devices, as on TPU v2 and v3, or it is in SPMD mode and one
            of several hosts.
    """
    runtime = import_xla("torch_xla.runtime")
    if runtime.is_spmd():
        if runtime.process_count() > 1:
            raise NotAvailableError(
                f"FSDP on XLA runs on one host, and this is one of {runtime.process_count()}. Use one host, "
                "or leave fsdp_plugin out to replicate the model."
            )
        return EnvironmentPlan()
    size, devices = int(runtime.world_size()), int(runtime.addressable_device_count())
    if size > 1 and devices > 1:
        raise NotAvailableError(
            f"torch_xla runs {devices} ranks as threads of this process, as on TPU v2 and v3. accelfn needs "
            "a process per rank: use a newer TPU, or --num_processes 1."
        )
    if size == 1:
        return EnvironmentPlan()
    rank = int(runtime.global_ordinal())
    return EnvironmentPlan(
        launcher="xla", rank=rank, size=size, local_rank=rank, local_size=size, nodes_known=False
    )


def use_spmd() -> None:
    """Turn on SPMD mode, with a mesh of all devices along "fsdp". Effect: on this process, for good."""
    runtime, spmd = import_xla("torch_xla.runtime"), import_xla("torch_xla.distributed.spmd")
    if not runtime.is_spmd():
        runtime.use_spmd()
    count = int(runtime.global_runtime_device_count())
    spmd.set_global_mesh(spmd.Mesh(list(range(count)), (count, 1), ("fsdp", "model")))


def end_step() -> None:
    """Let XLA compile and start what was recorded since the last step."""
    import_xla().sync()


class XlaModule:
    """What torch's module of a device type offers, for XLA's devices."""

    def __init__(self) -> None:
        """Import torch_xla."""
        self._xla: Any = import_xla()
        self._model: Any = import_xla("torch_xla.core.xla_model")

    def device_count(self) -> int:
        """Return the number of devices of this process."""
        return int(import_xla("torch_xla.runtime").addressable_device_count())

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        self._xla.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """Return the generator's state: one number, as bytes."""
        del device  # a process has one
        return torch.tensor([int(self._model.get_rng_state())], dtype=torch.int64, device="cpu").view(
            torch.uint8
        )

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Restore a state from :meth:`get_rng_state`."""
        del device
        self._model.set_rng_state(int(state.cpu().contiguous().view(torch.int64)))

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Return the free and the total bytes of the device."""
        del device
        info = self._model.get_memory_info(self._xla.device())
        return int(info["bytes_limit"]) - int(info["bytes_used"]), int(info["bytes_limit"])

    def synchronize(self, device: object = None) -> None:
        """Run what was recorded, and wait for it."""
        del device
        self._xla.sync(wait=True)
        self._model.wait_device_ops()


def loaded_xla() -> XlaModule | None:
    """Return the module of XLA's devices if the program uses torch_xla, else None."""
    return XlaModule() if "torch_xla" in sys.modules else None
