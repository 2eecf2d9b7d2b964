"""TPUs: torch_xla on this machine, or gcloud for all machines of a pod."""

from __future__ import annotations

import shlex

from accelfn.errors import ConfigurationError
from accelfn.launch.config.fields import FIELDS, value_of
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.record import LaunchPlan, Script

__all__ = ("plan_pod", "plan_xla")


def plan_xla(config: LaunchConfig, script: Script, machine: Machine) -> LaunchPlan:
    """Start a function of the script on every core of this machine's TPU, through torch_xla. Pure."""
    assert config.num_processes is not None
    bf16 = "XLA_DOWNCAST_BF16" if config.downcast_bf16 else "XLA_USE_BF16"
    return LaunchPlan(
        way="xla",
        argv=(
            *(machine.python, "-m", "accelfn.launch.run.xla", config.main_training_function),
            *(str(config.num_processes), "module" if config.module else "script", script.name, *script.args),
        ),
        env_changes=((bf16, "1"),) if config.mixed_precision == "bf16" else (),
    )


def plan_pod(config: LaunchConfig, script: Script) -> LaunchPlan:
    """Run ``accelfn launch`` on every machine of a TPU pod, through gcloud. Pure.

    Raises:
        ConfigurationError: The TPU's name or zone is missing.
    """
    options = config.tpu_options
    if options.name is None or options.zone is None:
        raise ConfigurationError(
            "--tpu_cluster needs --tpu_name and --tpu_zone: gcloud finds the TPU by them."
        )
    flags: list[str] = []
    for field in FIELDS:
        value = value_of(config, field)
        own = field.section in ("tpu_options", "slurm", "sagemaker") or field.name == "num_machines"
        if own or value == field.default or value is None:
            continue
        flags.append(f"--{field.name}={field.kind.write(value)}")
    inner = shlex.join(("accelfn", "launch", *flags, script.name, *script.args))
    prefix = " ".join(
        (*(("sudo",) if options.use_sudo else ()), "env", *(shlex.quote(one) for one in options.env or ()))
    )
    command = f"{prefix} ACCELFN_IN_TPU_POD=1 ACCELERATE_IN_TPU_POD=1 {inner}"
    workers = ",".join(options.vm) if options.vm else "all"
    return LaunchPlan(
        way="tpu_pod",
        argv=(
            *("gcloud", "compute", "tpus", "tpu-vm", "ssh", options.name, "--zone", options.zone),
            *("--command", command, "--worker", workers),
        ),
    )
