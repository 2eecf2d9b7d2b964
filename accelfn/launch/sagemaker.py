"""Plan a job on Amazon SageMaker: the arguments of the estimator that starts it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from accelfn.errors import ConfigurationError
from accelfn.launch.config import changed_values
from accelfn.launch.options import OPTIONS
from accelfn.launch.plan import exported_variables
from accelfn.launch.plan_commands import Script
from accelfn.launch.sources import Resolved

# Options that decide how this machine starts processes, which SageMaker does itself.
_OF_MACHINES = ("Machines", "Elastic")
_UNUSED = (
    *("module", "compat", "no_python", "tpu", "num_processes", "num_cpu_threads_per_process"),
    "enable_cpu_affinity",
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class SagemakerPlan(NamedTuple):
    """A job on Amazon SageMaker. A value; ``print(plan)`` shows it as JSON.

    Attributes:
        estimator: Keyword arguments of ``sagemaker.huggingface.HuggingFace``.
        inputs: Location of each input channel; empty without inputs.
        region: AWS region.
        profile: AWS profile with the credentials; None for those that boto3 finds.
    """

    estimator: Mapping[str, Any]
    inputs: Mapping[str, str]
    region: str
    profile: str | None

    def __str__(self) -> str:
        """Return the arguments as JSON."""
        return json.dumps(self._asdict(), indent=2)


def plan_sagemaker(
    resolved: Resolved, script: Script, *, inputs: str | None = None, metrics: str | None = None
) -> SagemakerPlan:
    """Plan the job that runs ``script`` on Amazon SageMaker. Pure.

    The script's arguments become hyperparameters, which SageMaker passes to it as ``--name value``. It gets
    the same variables as on another machine, and is uploaded with the other files of its folder.

    Args:
        resolved: The configuration, with ``compute_environment`` AMAZON_SAGEMAKER.
        script: A Python file.
        inputs: Text of ``sagemaker_inputs_file``: lines of a channel's name and its location, separated by a
            tab, after a header.
        metrics: Text of ``sagemaker_metrics_file``: lines of a metric's name and its regular expression.

    Raises:
        ConfigurationError: An option is missing or has no effect on SageMaker; the script isn't a Python
            file; its arguments can't be hyperparameters.
    """
    config = resolved.config
    for fault in _find_faults(resolved, script):
        raise ConfigurationError(fault)
    values: dict[str, Any] = {
        "image_uri": config.image_uri,
        "entry_point": os.path.basename(script.name),
        "source_dir": os.path.dirname(script.name) or ".",
        "role": config.iam_role_name,
        "transformers_version": config.transformers_version,
        "pytorch_version": config.pytorch_version,
        "py_version": config.py_version,
        "base_job_name": config.base_job_name,
        "instance_count": config.num_machines,
        "instance_type": config.ec2_instance_type,
        "debugger_hook_config": False,
        "hyperparameters": read_hyperparameters(script.args),
        "environment": {
            **exported_variables(resolved),
            **{f"{prefix}USE_SAGEMAKER": "true" for prefix in ("ACCELFN_", "ACCELERATE_")},
        },
    }
    if config.sagemaker_distributed_type == "DATA_PARALLEL":
        values["distribution"] = {"smdistributed": {"dataparallel": {"enabled": True}}}
    if metrics is not None:
        rows = _read_rows(metrics, "--sagemaker_metrics_file")
        values["metric_definitions"] = [{"Name": name, "Regex": pattern} for name, pattern in rows]
    computed = {name: value for name, value in values.items() if value is not None}
    channels = [] if inputs is None else _read_rows(inputs, "--sagemaker_inputs_file")
    estimator = {**_additional(config.additional_args or ()), **computed}
    return SagemakerPlan(estimator, dict(channels), config.region, config.profile)


def _find_faults(resolved: Resolved, script: Script) -> Iterator[str]:
    config = resolved.config
    if not script.name.endswith(".py"):
        yield f"SageMaker runs a Python file: got the script {script.name!r}."
    needed = ["ec2_instance_type", "iam_role_name"]
    if config.image_uri is None:
        needed += ["py_version", "pytorch_version", "transformers_version"]
    missing = [f"--{name}" for name in needed if getattr(config, name) is None]
    if missing:
        image = "" if config.image_uri is not None else " Instead of versions, --image_uri names an image."
        yield f"a job on SageMaker needs {', '.join(missing)}.{image}"
    if config.num_machines > 1 and config.sagemaker_distributed_type == "NO":
        yield (
            f"--num_machines {config.num_machines} needs --sagemaker_distributed_type DATA_PARALLEL: "
            "otherwise each machine would run the script alone."
        )
    for name in changed_values(config):
        is_of_machines = OPTIONS[name].section.title in _OF_MACHINES
        if name in _UNUSED or (is_of_machines and name not in ("gpu_ids", "same_network")):
            yield (
                f"--{name} ({resolved.origins[name]}) has no effect on SageMaker, which starts the processes "
                "itself. Leave it out."
            )


def read_hyperparameters(arguments: Sequence[str]) -> dict[str, int | float | bool | str]:
    """Convert a script's arguments to hyperparameters. Pure.

    Raises:
        ConfigurationError: An argument isn't a flag with one value, or is repeated.

    >>> read_hyperparameters(["--lr", "1e-3", "--epochs=3", "--shuffle", "True", "--name", "a"])
    {'lr': 0.001, 'epochs': 3, 'shuffle': True, 'name': 'a'}
    """
    found: dict[str, int | float | bool | str] = {}
    rest = list(arguments)
    while rest:
        name, has_value, text = rest.pop(0).partition("=")
        if not has_value and rest and (not rest[0].startswith("-") or _NUMBER.fullmatch(rest[0])):
            has_value, text = "=", rest.pop(0)
        if not name.startswith("--") or not has_value or name[2:] in found:
            raise ConfigurationError(
                f"SageMaker passes each argument of a script once, as --name value; {name!r} isn't so. Write "
                "--name before each value, and a value behind each name, such as True."
            )
        found[name[2:]] = _typed(text)
    return found


def _typed(text: str) -> int | float | bool | str:
    if text in ("True", "False"):
        return text == "True"
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)


def _read_rows(text: str, what: str) -> list[tuple[str, str]]:
    """Read a table of two columns that are separated by a tab, without its header."""
    rows = [tuple(line.split("\t")) for line in text.splitlines() if line.strip()]
    if len(rows) < 2 or any(len(row) != 2 for row in rows):
        raise ConfigurationError(f"{what} must have a header and lines of two columns, separated by a tab.")
    return [(first, second) for first, second in rows[1:]]


def _additional(pairs: Sequence[str]) -> dict[str, Any]:
    """Read further arguments of the estimator: NAME=VALUE, where VALUE may be JSON."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigurationError(f"--additional_args takes NAME=VALUE, got {pair!r}.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found
