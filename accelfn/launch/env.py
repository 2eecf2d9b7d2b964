"""``accelfn env``: print system information for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from accelfn import __version__
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.config_file import find_config_file, read_config
from accelfn.launch.kinds import TEXTS
from accelfn.launch.options import OPTIONS

# Installed packages to list.
_PACKAGES = re.compile(
    r"torch[\w-]*|optree|safetensors|typing[-_]extensions|accelerate|bitsandbytes|cloudpickle|datasets|deepspeed"
    r"|diffusers|lomo-optim|megatron-core|numpy|peft|psutil|PyYAML|questionary|schedulefree|sentence-transformers"
    r"|tqdm|transformer-engine|transformers|triton|trl|habana-torch-plugin|aim|clearml|comet-ml|dvclive|mlflow"
    r"|swanlab|tensorboardX?|trackio|wandb",
    re.IGNORECASE,
)
_RELEVANT = re.compile(
    r"(ACCELFN|ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|NCCL|GLOO|TORCH|TORCHELASTIC|TORCHINDUCTOR|PYTORCH"
    r"|CUDA|ROCR|HIP|ZE|ASCEND|HABANA|MLU|MUSA|NEURON|PT_HPU|SDAA|SM|XLA|PJRT|TPU|OMP|MKL|KMP|OMPI|PMI|MV2|SLURM|MASTER)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|VIRTUAL_ENV|CONDA_PREFIX|LD_PRELOAD"
)


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    path, _ = find_config_file(options.config_file, os.environ, sys.platform, os.path.expanduser("~"))
    if options.config_file is not None and not os.path.exists(path):
        raise ConfigurationError(f"no config file {path!r}. Check the path.")
    report = describe_environment(os.environ, path)
    print(json.dumps(report, indent=2) if options.json else "\n".join(format_report(report)))
    return 0


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn env",
        description="Print system information for a bug report: versions, devices, names of variables, "
        "configuration.",
    )
    parser.add_argument("--config_file", metavar="FILE", help="config file to use instead of the default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def describe_environment(env: Mapping[str, str], config_file: str) -> dict[str, Any]:
    """Collect system information. Effect: imports torch.

    Args:
        env: Environment variables. Their values, which may be secrets, aren't part of the report.
        config_file: Path of the config file in effect; it needn't exist.

    Returns:
        JSON values by name. A value that can't be determined is replaced by the error.
    """
    return {
        "accelfn": __version__,
        "command": shutil.which("accelfn") or "not on the PATH",
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "packages": _versions(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory": _try(_describe_memory),
        "torch": _try(describe_torch),
        "launcher": _try(lambda: _describe_launcher(env)),
        "variables": sorted(name for name in env if _RELEVANT.fullmatch(name)),
        "configuration": _describe_configuration(config_file),
    }


def format_report(report: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    r"""Yield the lines of a report as a nested list.

    >>> print(*format_report({"accelfn": "0.1.0", "packages": {"torch": "2.13.0"}, "devices": []}), sep="\n")
    - accelfn: 0.1.0
    - packages:
      - torch: 2.13.0
    - devices: none
    """
    for name, value in report.items():
        start = f"{'  ' * depth}- {name}:"
        if isinstance(value, dict) and value:
            yield start
            yield from format_report(cast("dict[str, Any]", value), depth + 1)
        elif isinstance(value, (dict, list)):
            yield f"{start} {', '.join(map(str, cast('list[object]', value))) or 'none'}"
        else:
            yield f"{start} {value}"


def _versions() -> dict[str, str]:
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {name: found[name] for name in sorted(found, key=str.lower) if _PACKAGES.fullmatch(name)}


def _describe_memory() -> str:
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    total, free = (int(fields[name]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    return f"{total:.1f} GiB, {free:.1f} GiB free"


def describe_torch() -> dict[str, Any]:
    """Describe torch's build and devices. Effect: may initialize the accelerator's driver."""
    import torch

    from accelfn.context import device_module, read_hardware
    from accelfn.context.xla import is_xla_requested

    hardware = read_hardware("xla") if is_xla_requested(os.environ) else read_hardware()
    kind = hardware.devices[0]
    facts: dict[str, Any] = {"version": torch.__version__, "backends": sorted(hardware.backends)}
    for name in ("cuda", "hip", "xpu"):
        if getattr(torch.version, name, None):
            facts[f"built for {name}"] = getattr(torch.version, name)
    if torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, cast("Any", torch.cuda).nccl.version()))
    if kind.type != "cpu":
        read: Any = getattr(device_module(kind.type), "get_device_properties", str)
        facts["precisions"] = sorted(kind.precisions)
        facts["collective backend"] = kind.backend or "none: one process"
        facts["accelerators"] = {f"{kind.type}:{index}": str(read(index)) for index in range(kind.count)}
    return facts


def _try(describe: Callable[[], Any]) -> Any:
    try:
        return describe()
    except Exception as error:  # noqa: BLE001 -- torch may be broken, and files of the system absent
        return {"error": f"{type(error).__name__}: {error}"}


def _describe_launcher(env: Mapping[str, str]) -> str:
    from accelfn.context.environment import detect_environment

    plan = detect_environment(env)
    if plan.launcher == "none":
        return "none: a single process"
    return f"{plan.launcher}: rank {plan.rank} of {plan.size}, node {plan.node_rank} of {plan.num_nodes}"


def _describe_configuration(path: str) -> dict[str, Any] | str:
    """Describe a config file as it was understood, without the texts in it, such as commands."""
    if not os.path.exists(path):
        return f"none ({path} doesn't exist)"
    try:
        values = read_config(path).values
    except (ConfigurationError, MissingExtraError) as error:
        return f"error: {error}"
    return {"file": path} | {
        name: OPTIONS[name].kind.write(value)
        for name, value in values.items()
        if OPTIONS[name].kind is not TEXTS
    }
