"""``accelfn env``: print system information for a bug report."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from accelfn import __version__
from accelfn.devices import device_type
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.command_line import FLAG_NOTE, CommandParser
from accelfn.launch.config_file import find_config_file, parse_config, read_text
from accelfn.launch.documents import read_tree
from accelfn.launch.kinds import TEXTS
from accelfn.launch.options import OPTIONS

# Required packages, and optional ones to list if they are installed.
_PACKAGES = ("torch", "optree", "safetensors", "typing-extensions")
_OPTIONAL = (
    *("accelerate", "bitsandbytes", "cloudpickle", "datasets", "deepspeed", "lomo-optim", "megatron-core"),
    *(
        "numpy",
        "psutil",
        "pyyaml",
        "questionary",
        "sagemaker",
        "schedulefree",
        "torchao",
        "torchdata",
        "torchopt",
    ),
    *("tqdm", "transformer-engine", "transformers", "triton"),
    *(
        "habana-torch-plugin",
        "torch-mlu",
        "torch-musa",
        "torch-neuronx",
        "torch-npu",
        "torch-sdaa",
        "torch-xla",
    ),
    *("aim", "clearml", "comet-ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"),
)
_RELEVANT = re.compile(
    r"(ACCELFN|ACCELERATE|FSDP|MEGATRON_LM|PARALLELISM_CONFIG|NCCL|GLOO|TORCH|TORCHELASTIC|TORCHINDUCTOR|PYTORCH"
    r"|CUDA|ROCR|HIP|ZE|ASCEND|HABANA|MLU|MUSA|NEURON|PT_HPU|SDAA|SM|XLA|PJRT|TPU|OMP|MKL|KMP|OMPI|PMI|MV2|SLURM|MASTER)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|VIRTUAL_ENV|CONDA_PREFIX|LD_PRELOAD"
)
# What a report that is pasted into an issue must not show, by the names of variables and keys; and the texts
# that users write themselves, such as commands.
_SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_TEXTS = frozenset(
    name
    for option in OPTIONS.values()
    if option.kind is TEXTS
    for name in (option.key, option.name, *option.variables)
)
_HIDDEN = "(hidden)"


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    path, _ = find_config_file(options.config_file, os.environ, sys.platform, os.path.expanduser("~"))
    if options.config_file is not None and not os.path.exists(path):
        raise ConfigurationError(f"no config file {path!r}. Check the path.")
    report = describe_environment(os.environ, options.config_file)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        print(format_report(report))
    return 0


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn env",
        description="Print system information for a bug report: versions, devices, variables, configuration.",
        epilog=f"{FLAG_NOTE} Values of secrets are hidden.",
    )
    parser.add_argument("--config_file", metavar="FILE", help="config file to use instead of the default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def describe_environment(env: Mapping[str, str], config_file: str | None = None) -> dict[str, Any]:
    """Collect system information. Effect: imports torch.

    Args:
        env: Environment variables.
        config_file: Config file; None for the one in effect.

    Returns:
        JSON values by name. A value that can't be determined is replaced by the error.
    """
    return {
        "accelfn": __version__,
        "command": shutil.which("accelfn") or "not on the PATH",
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "packages": _versions(),
        "cpu": _describe_cpu(),
        "memory": _describe_memory(),
        "torch": _try(lambda: describe_torch(env)),
        "launcher": _try(lambda: _describe_launcher(env)),
        "variables": relevant_variables(env),
        "configuration": _describe_configuration(env, config_file),
    }


def relevant_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect a run, with secrets hidden. Pure.

    >>> relevant_variables({"RANK": "0", "HOME": "/h", "NCCL_DEBUG": "INFO", "ACCELFN_API_KEY": "x"})
    {'ACCELFN_API_KEY': '(hidden)', 'NCCL_DEBUG': 'INFO', 'RANK': '0'}
    """
    return {
        name: _HIDDEN if _is_hidden(name) else env[name] for name in sorted(env) if _RELEVANT.fullmatch(name)
    }


def _is_hidden(name: str) -> bool:
    return name in _TEXTS or _SECRET.search(name) is not None


def format_report(report: Mapping[str, Any]) -> str:
    """Format a report as a nested list. Pure.

    >>> print(format_report({"accelfn": "0.1.0", "packages": {"torch": "2.13.0"}, "devices": []}))
    - accelfn: 0.1.0
    - packages:
      - torch: 2.13.0
    - devices: none
    """
    lines: list[str] = []

    def add(name: str, value: Any, depth: int) -> None:
        start = f"{'  ' * depth}- {name}:"
        if isinstance(value, (Mapping, list)) and not value:
            lines.append(f"{start} none")
        elif isinstance(value, Mapping):
            lines.append(start)
            for key, part in value.items():  # pyright: ignore[reportUnknownVariableType]
                add(str(key), part, depth + 1)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, list):
            lines.append(start)
            lines.extend(f"{'  ' * (depth + 1)}- {part}" for part in value)  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(value, str) and "\n" in value:
            lines.append(start)
            lines.extend(f"{'  ' * (depth + 2)}{line}" for line in value.rstrip().splitlines())
        else:
            lines.append(f"{start} {value}")

    for name, value in report.items():
        add(name, value, 0)
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in (*_PACKAGES, *_OPTIONAL):
        version = _version(name)
        if version is not None or name in _PACKAGES:
            versions[name] = version or "not installed"
    return versions


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _describe_cpu() -> dict[str, Any]:
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    facts: dict[str, Any] = {
        "model": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores of this process": allowed,
    }
    if sys.platform == "linux":
        try:
            model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
            facts["model"] = model[1] if model else facts["model"]
            nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
            facts["NUMA nodes"] = {
                node.name: (node / "cpulist").read_text().strip() for node in sorted(nodes)
            }
        except OSError:
            pass  # a container may hide them
    return facts


def _describe_memory() -> str:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
        total, free = (int(fields[name]) / 2**20 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError):  # not on Linux
        return "unknown"
    return f"{total:.1f} GiB, {free:.1f} GiB free"


def describe_torch(env: Mapping[str, str]) -> dict[str, Any]:
    """Describe torch's build and devices. Effect: may initialize the accelerator's driver."""
    import torch
    import torch.distributed as dist

    from accelfn.context import read_hardware
    from accelfn.context.xla import is_xla_requested

    hardware = read_hardware("xla") if is_xla_requested(env) else read_hardware()
    kind = hardware.devices[0]
    row = device_type(kind.type)
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "backends": sorted(hardware.backends),
        "distributed": "available" if dist.is_available() else "not in this build",
    }
    for name in ("cuda", "hip", "xpu"):
        if getattr(torch.version, name, None):
            facts[f"built for {name}"] = getattr(torch.version, name)
    if torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))
        facts["cuDNN"] = torch.backends.cudnn.version()
    count = 0 if kind.type == "cpu" else kind.count
    facts["accelerators"] = [_describe_device(kind.type, index) for index in range(count)]
    if count:
        facts["autocast"] = sorted(kind.precisions)
        facts["device type"] = {
            "hardware": row.hardware,
            "package": row.package or "torch itself",
            "collective backend": kind.backend or "none: one process",
            "copies beside the computation": row.pins_memory,
            "float64": row.has_float64,
            "visible devices": row.visible or "no variable",
        }
    if kind.type == "cuda" and count > 1:
        can_access = torch.cuda.can_device_access_peer
        facts["peer-to-peer access"] = [
            f"cuda:{one} to "
            + (", ".join(str(two) for two in range(count) if two != one and can_access(one, two)) or "none")
            for one in range(count)
        ]
    return facts


def _describe_device(kind: str, index: int) -> str:
    from accelfn.context import device_module

    read: Any = getattr(device_module(kind), "get_device_properties", None)
    properties: Any = None if read is None else read(index)
    parts = [f"{kind}:{index} {getattr(properties, 'name', '')}".strip()]
    if getattr(properties, "total_memory", None):
        parts.append(f"{properties.total_memory / 2**30:.1f} GiB")
    if getattr(properties, "major", None) is not None:
        parts.append(f"capability {properties.major}.{properties.minor}")
    return ", ".join(parts)


def _try(describe: Callable[[], Any]) -> Any:
    try:
        return describe()
    except Exception as error:  # noqa: BLE001 -- torch may be broken
        return {"error": f"{type(error).__name__}: {error}"}


def _describe_launcher(env: Mapping[str, str]) -> str:
    from accelfn.context.environment import detect_environment

    plan = detect_environment(env)
    if plan.launcher == "none":
        return "none: a single process"
    return f"{plan.launcher}: rank {plan.rank} of {plan.size}, node {plan.node_rank} of {plan.num_nodes}"


def _describe_configuration(env: Mapping[str, str], given: str | None) -> dict[str, Any] | str:
    path, _ = find_config_file(given, env, sys.platform, os.path.expanduser("~"))
    if not os.path.exists(path):
        return f"none ({path} doesn't exist)"
    try:
        text = read_text(path)
        tree = read_tree(text, path)
    except (ConfigurationError, MissingExtraError) as error:
        return str(error)
    # Not the text of the file, in which secrets can't be recognized.
    facts: dict[str, Any] = {"file": path}
    try:
        parse_config(text, path)
    except ConfigurationError as error:
        facts["error"] = str(error)
    return {**facts, "contents": _hide_secrets(tree)}


def _hide_secrets(value: Any) -> Any:
    """Return a value with secrets hidden."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: _HIDDEN if _is_hidden(name) else _hide_secrets(item) for name, item in items}
    if isinstance(value, list):
        return [_hide_secrets(item) for item in cast("list[Any]", value)]
    return value
