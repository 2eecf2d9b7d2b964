"""Plan a launch: choose the command, and the environment variables of the processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from accelfn.errors import ConfigurationError
from accelfn.launch.config import LaunchConfig, changed_values, is_active
from accelfn.launch.machine import Machine
from accelfn.launch.options import OPTIONS
from accelfn.launch.plan_commands import (
    LaunchPlan,
    Script,
    elastic_options,
    endpoint_of,
    plan_pod,
    plan_single,
    plan_torchrun,
    plan_xla,
    under_compat,
)
from accelfn.launch.sources import Resolved

# Sections exported with their defaults, which differ from those of the records that read them.
_EXPORTED_SECTIONS = ("fsdp", "megatron_lm", "sagemaker")
# Make NCCL communicate through host memory.
_DISABLE_PEERS = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
# Options that may differ between machines.
_PER_MACHINE = frozenset(
    (
        *("machine_rank", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_endpoint", "rdzv_conf"),
        *("log_dir", "quiet", "num_cpu_threads_per_process", "enable_cpu_affinity", "preflight"),
        *("preflight_timeout", "same_network", "num_processes", "tee", "redirects"),
    )
)


def plan_launch(
    resolved: Resolved,
    script: Script,
    environment: Mapping[str, str],
    machine: Machine,
) -> LaunchPlan:
    """Plan the command and variables that start ``script`` on this machine. Pure.

    Args:
        resolved: The configuration and the sources of its values.
        script: The script.
        environment: Variables that the command inherits.
        machine: This machine.

    Raises:
        ConfigurationError: The machine lacks something that the configuration needs, or the script is to run
            on SageMaker: see :func:`accelfn.launch.sagemaker.plan_sagemaker`.

    >>> from accelfn.launch.sources import Given, resolve
    >>> two = resolve({"num_processes": Given("2", "--num_processes")}, {})
    >>> plan = plan_launch(two, Script("train.py"), {}, Machine(cores=8))
    >>> plan.argv[-1], plan.env_changes
    ('train.py', (('OMP_NUM_THREADS', '4'),))
    """
    config = resolved.config
    if config.compute_environment == "AMAZON_SAGEMAKER":
        raise ConfigurationError(
            "plan_launch plans processes of this machine, and compute_environment is AMAZON_SAGEMAKER. Call "
            "plan_sagemaker."
        )
    config, script = under_compat(config, script)
    resolved = dataclasses.replace(resolved, config=config)
    if config.tpu and config.tpu_cluster:
        return plan_pod(config, script)
    total = count_processes(config, machine)
    local_size = total // config.num_machines
    _check_accelerators(config, machine, environment, local_size)
    if config.redirects != "0" and config.log_dir is None:
        raise ConfigurationError(
            f"--redirects {config.redirects} writes output to files only. Pass --log_dir for them."
        )
    is_assumed = config.num_processes is None and total > config.num_machines
    assumed = (f"{local_size} processes on this machine, one per accelerator",) if is_assumed else ()
    config = dataclasses.replace(config, num_processes=total)
    resolved = dataclasses.replace(resolved, config=config)
    variables = machine_variables(resolved, machine, environment, local_size)
    if config.tpu:
        plan = plan_xla(config, script, machine)
    elif total == 1 and not _needs_agent(config):
        plan = plan_single(config, script, machine)
    else:
        plan = plan_torchrun(config, script, machine)
        if config.num_machines > 1 and config.preflight:
            plan = dataclasses.replace(plan, rendezvous=_plan_preflight(config, script))
    if plan.way not in ("single", "torchrun"):
        _refuse_agent_flags(resolved, plan.way)
    variables |= dict(plan.env_changes)
    return dataclasses.replace(
        plan,
        env_changes=tuple(sorted(variables.items())),
        local_size=local_size,
        notes=assumed,
    )


def count_processes(config: LaunchConfig, machine: Machine) -> int:
    """Return the number of processes on all machines. Pure.

    By default one per accelerator, or one if they can't be counted.

    >>> four = Machine(devices=4)
    >>> count_processes(LaunchConfig(), four), count_processes(LaunchConfig(cpu=True), four)
    (4, 1)
    """
    if config.num_processes is not None:
        return config.num_processes
    if config.cpu or config.tpu:
        local_size = 1
    elif config.gpu_ids != "all":
        local_size = len(config.gpu_ids.split(","))
    else:
        local_size = machine.devices or 1
    return local_size * config.num_machines


def _needs_agent(config: LaunchConfig) -> bool:
    """Return whether a single process needs torchrun too."""
    return (
        config.num_machines > 1
        or config.main_process_port is not None
        or any((config.rdzv_backend, config.rdzv_endpoint, config.rdzv_id, config.rdzv_conf))
        or config.elastic
        or bool(elastic_options(config))
        or config.enable_cpu_affinity
        or config.use_deepspeed  # which needs a process group
    )


def _refuse_agent_flags(resolved: Resolved, way: str) -> None:
    """Refuse torchrun's flags if something else starts the processes."""
    for name in (*elastic_options(resolved.config), "enable_cpu_affinity"):
        origin = resolved.origins[name]
        if origin.source == "flag" and getattr(resolved.config, name):
            raise ConfigurationError(
                f"{origin.name} is for torchrun, and has no effect with {way}. Leave it out."
            )


def _check_accelerators(
    config: LaunchConfig, machine: Machine, environment: Mapping[str, str], local_size: int
) -> None:
    """Refuse more processes than accelerators, if those can be counted without torch."""
    if config.cpu or config.tpu:
        return
    if config.multi_gpu and config.num_processes is None and local_size * config.num_machines < 2:
        count = "they can't be counted without torch" if machine.devices is None else f"got {machine.devices}"
        raise ConfigurationError(
            f"--multi_gpu needs at least two accelerators: {count}. Pass --num_processes, or leave "
            "--multi_gpu out."
        )
    if config.gpu_ids != "all" or machine.devices is None:
        return
    if machine.devices == 0 and not config.multi_gpu:
        return  # train on the CPU
    if local_size > machine.devices:
        # The value of a variable is printed nowhere.
        hides = f" ({machine.device_variable} is set)" if machine.device_variable in environment else ""
        fewer = f"--num_processes {machine.devices * config.num_machines}, or " if machine.devices else ""
        raise ConfigurationError(
            f"{local_size} processes on this machine need as many accelerators, but it has "
            f"{machine.devices}{hides}. Use {fewer}--cpu to run them on the CPU."
        )


def _plan_preflight(config: LaunchConfig, script: Script) -> Mapping[str, Any]:
    host, port = endpoint_of(config)
    compare = [("num_machines", str(config.num_machines)), ("num_processes", str(config.num_processes))]
    for name, value in changed_values(config).items():
        if name not in (*_PER_MACHINE, "num_machines"):
            compare.append((name, "none" if value is None else OPTIONS[name].kind.write(value)))
    compare.append(("the script", script.name.replace("\\", "/").rpartition("/")[2]))
    # With restarts, another machine can take the place of one that was stopped or lost.
    stops_on = ("failed",) if config.max_restarts else ("failed", "stopped", "lost")
    # When a silent machine of elastic agents is lost.
    elastic: dict[str, Any] = {"stops_on": (), "silent_s": config.heartbeat_timeout}
    return {
        "host": host,
        "port": port,
        "num_machines": config.num_machines,
        "machine_rank": config.machine_rank,
        "compare": tuple(compare),
        "timeout_s": config.preflight_timeout,
        **(elastic if config.elastic else {"stops_on": stops_on}),
    }


def machine_variables(
    resolved: Resolved, machine: Machine, environment: Mapping[str, str], local_size: int
) -> dict[str, str]:
    """Return the environment variables for the processes of one machine. Pure.

    A value is exported under accelfn's name and Accelerate's. Unset options aren't exported, so that the
    script's defaults apply.

    Args:
        resolved: The configuration and the sources of its values.
        machine: This machine.
        environment: Variables that the processes inherit.
        local_size: Number of processes on this machine.
    """
    config = resolved.config
    variables = exported_variables(resolved)
    if config.gpu_ids != "all" and not config.cpu:
        variables[machine.device_variable] = config.gpu_ids
    if machine.has_false_peers and not config.cpu:
        # Otherwise NCCL hangs.
        variables.update({name: "1" for name in _DISABLE_PEERS if name not in environment})
    threads = config.num_cpu_threads_per_process
    if threads is None and "OMP_NUM_THREADS" not in environment:
        threads = max(1, machine.cores // local_size)  # torchrun's default is 1
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def exported_variables(resolved: Resolved) -> dict[str, str]:
    """Return the variables by which processes receive the options, on any machine. Pure."""
    config = resolved.config
    variables: dict[str, str] = {}
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        is_set = value != option.default or resolved.origins[name].source != "default"
        is_exported = is_set or option.section.name in _EXPORTED_SECTIONS
        if value is not None and is_exported and is_active(config, option):
            text = option.kind.write(value)
            is_upper = name in ("dynamo_backend", "fp8_backend")
            variables |= dict.fromkeys(option.exports, text.upper() if is_upper else text)
    parts = ("FPROP", "DGRAD", "WGRAD") if config.mixed_precision == "fp8" else ()
    for part, value in zip(parts, config.fp8_override_linear_precision, strict=False):
        if value:  # Accelerate has a variable for each part
            variables[f"ACCELFN_FP8_OVERRIDE_{part}"] = variables[f"ACCELERATE_FP8_OVERRIDE_{part}"] = "true"
    return variables
