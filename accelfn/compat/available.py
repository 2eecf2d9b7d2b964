"""Whether packages and devices are there, as programs ask before they import or use them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from operator import eq, ge, gt, le, lt, ne
from types import MappingProxyType
from typing import Any

import torch
from torch.torch_version import TorchVersion

STR_OPERATION_TO_FUNC: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {"<": lt, "<=": le, "==": eq, "!=": ne, ">=": ge, ">": gt}
)
_Probe = Callable[..., bool]


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of a library, or a version, with a required one.

    Args:
        library_or_version: Name of an installed package, or its version.
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        requirement_version: Version to compare with.

    Raises:
        ValueError: The operation is unknown.

    >>> compare_versions("2.10.1+cpu", ">=", "2.9"), compare_versions("1.0.dev0", "<", "1.0")
    (True, True)
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation must be one of {', '.join(STR_OPERATION_TO_FUNC)}, got {operation!r}.")
    version = str(library_or_version)
    if not version[:1].isdigit():
        version = importlib.metadata.version(version)
    return STR_OPERATION_TO_FUNC[operation](TorchVersion(version), requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version with another one."""
    return compare_versions(str(torch.__version__), operation, version)


def is_package_available(name: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # part of a package that isn't there, or a stand-in in sys.modules
        return False


def _is_device_available(kind: str, check_device: bool = False) -> bool:
    """Return whether torch has a module of this kind of device, with a device."""
    del check_device
    module: Any = getattr(torch, kind, None)
    return module is not None and hasattr(module, "is_available") and bool(module.is_available())


def _never(*args: Any, **kwargs: Any) -> bool:
    """Return False: accelfn doesn't use this."""
    del args, kwargs
    return False


is_habana_gaudi1: _Probe = _never
is_pippy_available: _Probe = partial(is_torch_version, ">=", "2.4.0")
is_weights_only_available: _Probe = is_pippy_available
# What `is_..._available` asks for: a kind of device, or a package with another name.
_DEVICES = ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu", "neuron")
_PACKAGES = MappingProxyType(
    {
        "4bit_bnb": "bitsandbytes",
        "8bit_bnb": "bitsandbytes",
        "bitsandbytes_multi_backend": "bitsandbytes",
        "bnb": "bitsandbytes",
        "lomo": "lomo_optim",
        "megatron_lm": "megatron",
        "torchdata_stateful_dataloader": "torchdata.stateful_dataloader",
        "transformer_engine_mxfp8": "transformer_engine",
    }
)


def __getattr__(name: str) -> _Probe:
    """Return the function that asks for a device or a package: ``is_peft_available`` for peft.

    >>> from accelfn.compat.available import is_torch_available
    >>> is_torch_available()
    True
    """
    match = re.fullmatch(r"is_(\w+)_available", name)
    if match is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    asked = match[1]
    if asked in _DEVICES:
        return partial(_is_device_available, asked)
    return partial(is_package_available, _PACKAGES.get(asked, asked))


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether there is a GPU of Apple's."""
    del min_version
    return torch.backends.mps.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed."""
    del check_is_tpu
    return is_package_available("torch_xla") and not check_is_gpu


def is_xccl_available() -> bool:
    """Return whether torch has Intel's backend of collectives."""
    return _is_device_available("xpu") and bool(
        getattr(torch.distributed.distributed_c10d, "is_xccl_available", _never)()
    )


def is_rocm_available() -> bool:
    """Return whether torch was built for AMD's GPUs."""
    return bool(getattr(torch.version, "hip", None)) and torch.cuda.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device computes in bfloat16."""
    del ignore_tpu
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """Return True: every device trains in float16 with a loss scale."""
    return True


def is_fp8_available() -> bool:
    """Return whether a package for 8-bit training is installed."""
    return any(map(is_package_available, ("torchao", "transformer_engine", "msamp")))


def check_cuda_fp8_capability() -> bool:
    """Return whether the GPU computes in 8 bits."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def check_cuda_p2p_ib_support() -> bool:
    """Return whether GPUs reach each other without host memory: not those of NVIDIA's RTX 40 series."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return not any(re.search(r"RTX 40\d\d", name) for name in names)


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of the current device, and the name of its distributed type."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if current is None else current.type
    return kind, f"MULTI_{kind.upper()}".replace("CUDA", "GPU")
