"""What Amazon SageMaker is told: the arguments of its estimator."""

from __future__ import annotations

import json
from pathlib import PurePath

from accelfn.errors import ConfigurationError
from accelfn.launch.config.sources import Resolved
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.record import LaunchPlan, Script
from accelfn.launch.plan.variables import plan_variables

__all__ = ("plan_sagemaker", "read_hyperparameters")


def plan_sagemaker(resolved: Resolved, script: Script, machine: Machine) -> LaunchPlan:
    """Decide the estimator that runs a script on rented machines. Pure.

    Raises:
        ConfigurationError: The configuration lacks what SageMaker must know, or the script isn't a file of
            Python.
    """
    config, rented = resolved.config, resolved.config.sagemaker
    if config.module or config.no_python:
        raise ConfigurationError("SageMaker runs a Python file. Leave --module and --no_python out.")
    if not script.name.endswith(".py"):
        raise ConfigurationError(f"SageMaker runs a Python file that ends in .py, got {script.name!r}.")
    for name in ("ec2_instance_type", "iam_role_name"):
        if getattr(rented, name) is None:
            raise ConfigurationError(f"SageMaker needs --sagemaker_{name}. Give it, or run accelfn config.")
    if rented.profile is None and (rented.aws_access_key_id is None or rented.aws_secret_access_key is None):
        raise ConfigurationError(
            "SageMaker needs credentials. Give --sagemaker_profile, or both --aws_access_key_id and "
            "--aws_secret_access_key."
        )
    path = PurePath(script.name)
    variables = plan_variables(resolved, Machine(), {"OMP_NUM_THREADS": ""}, 1)
    variables |= {
        f"{prefix}_{name}": value
        for prefix in ("ACCELFN", "ACCELERATE")
        for name, value in (
            ("USE_SAGEMAKER", "true"),
            ("SAGEMAKER_DISTRIBUTED_TYPE", rented.distributed_type),
        )
    }
    estimator: dict[str, object] = {
        "image_uri": rented.image_uri,
        "entry_point": path.name,
        "source_dir": str(path.parent),
        "role": rented.iam_role_name,
        "transformers_version": rented.transformers_version,
        "pytorch_version": rented.pytorch_version,
        "py_version": rented.py_version,
        "base_job_name": rented.base_job_name,
        "instance_count": config.num_machines,
        "instance_type": rented.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}
        if rented.distributed_type == "DATA_PARALLEL"
        else None,
        "hyperparameters": read_hyperparameters(script.args),
        "environment": variables,
    }
    told = {
        "estimator": estimator,
        "region": rented.region,
        "inputs_file": rented.inputs_file,
        "metrics_file": rented.metrics_file,
    }
    keys = {
        "AWS_PROFILE": rented.profile,
        "AWS_ACCESS_KEY_ID": None if rented.profile else rented.aws_access_key_id,
        "AWS_SECRET_ACCESS_KEY": None if rented.profile else rented.aws_secret_access_key,
        "AWS_DEFAULT_REGION": rented.region,
    }
    return LaunchPlan(
        way="sagemaker",
        argv=(machine.python, "-m", "accelfn.launch.run.sagemaker", json.dumps(told, sort_keys=True)),
        env_changes=tuple(sorted((name, value) for name, value in keys.items() if value is not None)),
    )


def read_hyperparameters(args: tuple[str, ...]) -> dict[str, object]:
    """Read a script's arguments as SageMaker's hyperparameters, numbers as numbers. Pure.

    Raises:
        ConfigurationError: Something stands there that is not a flag with a value.

    >>> read_hyperparameters(("--lr", "1e-3", "--epochs=3", "--amp", "True"))
    {'lr': 0.001, 'epochs': 3, 'amp': True}
    """
    found: dict[str, object] = {}
    position = 0
    while position < len(args):
        name, equals, value = args[position].partition("=")
        position += 1
        if not name.startswith("--"):
            raise ConfigurationError(f"SageMaker takes arguments as --name value, got {name!r}.")
        if not equals:
            if position == len(args) or args[position].startswith("--"):
                raise ConfigurationError(f"SageMaker takes no flag without a value: give {name} True.")
            value = args[position]
            position += 1
        found[name[2:]] = _guess(value)
    return found


def _guess(text: str) -> object:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return text
