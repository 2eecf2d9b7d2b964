"""How a script is started: the choice of the command, and the variables that its processes get."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.launch.config.options import NO_SAGEMAKER, OPTIONS
from accelfn.launch.config.record import LaunchConfig, changed_values, is_active, replace
from accelfn.launch.config.resolve import Resolved
from accelfn.launch.config.secrets import hide_in_text
from accelfn.launch.plan.commands import (
    LaunchPlan,
    Script,
    elastic_options,
    endpoint_of,
    plan_mpirun,
    plan_pod,
    plan_single,
    plan_torchrun,
    plan_xla,
)
from accelfn.launch.plan.machine import Machine

# Sections whose values are all handed on, because the launcher's defaults aren't the record's.
_WHOLE = ("fsdp", "megatron_lm")
# How NCCL is told to go through the host's memory.
_WITHOUT_PEERS = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
# What may differ between machines without harm.
_OWN = frozenset(
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
    """Decide the command and the variables that start ``script`` on this machine. Pure.

    Args:
        resolved: The configuration, and where its values came from.
        script: What to run.
        environment: Variables that the command will inherit.
        machine: Facts about this machine.

    Raises:
        ConfigurationError: The machine can't do what the configuration asks for.
        NotAvailableError: It asks for a job of SageMaker.

    >>> from accelfn.launch.config import Given, resolve
    >>> two = resolve({"num_processes": Given("2", "--num_processes")}, {})
    >>> plan = plan_launch(two, Script("train.py"), {}, Machine(cores=8))
    >>> plan.argv[-1], plan.env_changes
    ('train.py', (('OMP_NUM_THREADS', '4'),))
    """
    config = resolved.config
    if config.compute_environment == "AMAZON_SAGEMAKER":
        raise NotAvailableError(f"compute_environment AMAZON_SAGEMAKER: {NO_SAGEMAKER}")
    if config.tpu and config.tpu_cluster:
        return plan_pod(config, script)
    total = count_processes(config, machine)
    local_size = total // config.num_machines
    _check_devices(config, machine, environment, local_size)
    _check_streams(config, local_size)
    _check_rendezvous(config.rdzv_conf)
    assumed = config.num_processes is None and total > config.num_machines
    config = replace(config, num_processes=total)
    resolved = dataclasses.replace(resolved, config=config)
    variables = plan_variables(resolved, machine, environment, local_size)
    if config.tpu:
        plan = plan_xla(config, script, machine)
    elif config.mpirun_hostfile is not None:
        plan = plan_mpirun(config, script, machine, variables)
    elif total == 1 and not _wants_agent(config):
        plan = plan_single(config, script, machine)
    else:
        plan = plan_torchrun(config, script, machine)
        if config.num_machines > 1 and config.preflight:
            plan = dataclasses.replace(plan, rendezvous=_plan_rendezvous(config, script))
    if plan.way not in ("single", "torchrun"):
        _refuse_agent_flags(resolved, plan.way)
    variables |= dict(plan.env_changes)
    return dataclasses.replace(
        plan,
        env_changes=tuple(sorted(variables.items())),
        local_size=local_size,
        notes=(f"{local_size} processes on this machine, one for each accelerator",) if assumed else (),
    )


def count_processes(config: LaunchConfig, machine: Machine) -> int:
    """Return how many processes all machines start together. Pure.

    If nobody says: one for each accelerator, or one where they can't be counted.

    >>> four = Machine(devices=4)
    >>> count_processes(LaunchConfig(), four), count_processes(LaunchConfig(cpu=True), four)
    (4, 1)
    """
    if config.num_processes is not None:
        return config.num_processes
    if config.cpu or config.tpu:
        here = 1
    elif config.gpu_ids != "all":
        here = len(config.gpu_ids.split(","))
    else:
        here = machine.devices or 1
    return here * config.num_machines


def _wants_agent(config: LaunchConfig) -> bool:
    """Whether one process needs torchrun all the same."""
    return (
        config.num_machines > 1
        or config.main_process_port is not None
        or any((config.rdzv_backend, config.rdzv_endpoint, config.rdzv_id, config.rdzv_conf))
        or config.main_process_ip is not None
        or bool(elastic_options(config))
        or config.enable_cpu_affinity
    )


def _refuse_agent_flags(resolved: Resolved, way: str) -> None:
    """Refuse flags for torchrun's agent where something else starts the processes."""
    affinity = ["enable_cpu_affinity"] if resolved.config.enable_cpu_affinity else []
    for name in (*elastic_options(resolved.config), *affinity):
        origin = resolved.origins[name]
        if origin.source == "flag":
            raise ConfigurationError(
                f"{origin.name} is for torchrun, and has no effect where {way} starts the processes. Leave "
                "it out."
            )


def _check_devices(
    config: LaunchConfig, machine: Machine, environment: Mapping[str, str], local_size: int
) -> None:
    """Refuse more processes than accelerators, where they can be counted without torch."""
    if config.cpu or config.tpu or config.mpirun_hostfile is not None:
        return
    if config.multi_gpu and config.num_processes is None and local_size * config.num_machines < 2:
        counted = "can't be counted without torch" if machine.devices is None else f"are {machine.devices}"
        raise ConfigurationError(
            f"--multi_gpu needs at least two accelerators, and those of this machine {counted}. Say how many "
            "processes with --num_processes, or leave --multi_gpu out."
        )
    if config.gpu_ids != "all" or machine.devices is None:
        return
    shown = environment.get(machine.device_variable)
    if machine.devices == 0 and not config.multi_gpu:
        return  # who hides every accelerator wants the CPU
    if machine.devices == 0 and shown is not None:
        named = f"{machine.device_variable}={shown} leaves"
    else:
        named = "this machine has" if machine.devices else "there are"
    if local_size > machine.devices:
        raise ConfigurationError(
            f"{local_size} processes on this machine need as many accelerators, and {named} "
            f"{machine.devices}. Use --num_processes {max(1, machine.devices) * config.num_machines}, or "
            "--cpu to run them on the CPU."
        )


def _check_streams(config: LaunchConfig, local_size: int) -> None:
    """Refuse what torchrun couldn't read, or would pass over: a process that there isn't."""
    for name, given in (("tee", config.tee), ("redirects", config.redirects)):
        if re.fullmatch(r"[0-3]|[0-9]:[0-3](,[0-9]:[0-3])*", given) is None:
            raise ConfigurationError(
                f"--{name} must be 0 (nothing), 1 (output), 2 (errors) or 3 (both), or one of these for each "
                f"process of this machine, such as 0:3,1:2; got {given!r}."
            )
        beyond = [one for one in given.split(",") if ":" in one and int(one[0]) >= local_size]
        if beyond:
            raise ConfigurationError(
                f"--{name} {given} names process {beyond[0][0]} of this machine, and there are {local_size}: "
                f"0 to {local_size - 1}. Leave {beyond[0]} out."
            )
    if config.redirects != "0" and config.log_dir is None:
        raise ConfigurationError(
            f"--redirects {config.redirects} keeps output in files instead of showing it. Say where with "
            "--log_dir."
        )


def _check_rendezvous(conf: str | None) -> None:
    parts = conf.split(",") if conf else ()
    wrong = [one for one in parts if not re.fullmatch(r"\s*[^=\s][^=]*=\s*\S.*", one)]
    if wrong:
        raise ConfigurationError(
            "--rdzv_conf must be name=value pairs with commas between, such as timeout=60,read_timeout=60; "
            f"got {wrong[0]!r}."
        )


def _plan_rendezvous(config: LaunchConfig, script: Script) -> Mapping[str, Any]:
    host, port = endpoint_of(config)
    compare = [("num_machines", str(config.num_machines)), ("num_processes", str(config.num_processes))]
    for name, value in changed_values(config).items():
        if name not in (*_OWN, "num_machines"):
            # It crosses the network, and is printed where machines differ.
            compare.append((name, "none" if value is None else hide_in_text(OPTIONS[name].kind.write(value))))
    compare.append(("the script", script.name.replace("\\", "/").rpartition("/")[2]))
    return {
        "host": host,
        "port": port,
        "num_machines": config.num_machines,
        "machine_rank": config.machine_rank,
        "compare": tuple(compare),
        "timeout_s": config.preflight_timeout,
        "may_return": config.max_restarts > 0,
    }


def plan_variables(
    resolved: Resolved, machine: Machine, environment: Mapping[str, str], local_size: int
) -> dict[str, str]:
    """Decide the variables for the processes of one machine. Pure.

    A value goes out under accelfn's name and under that of Accelerate's launcher. Values that nobody gave
    stay out, so that the script's own defaults count.

    Args:
        resolved: The configuration, and where its values came from.
        machine: Facts about this machine.
        environment: What the processes inherit.
        local_size: Processes on this machine.
    """
    config = resolved.config
    found: dict[str, str] = {}
    for name in _exported(resolved):
        option = OPTIONS[name]
        text = option.kind.write(getattr(config, name))
        if name in ("dynamo_backend", "fp8_backend"):
            text = text.upper()
        for variable in option.exports:
            found[variable] = text
    if config.gpu_ids != "all" and not config.cpu:
        chosen = resolved.origins["gpu_ids"].source
        # What stands in a file is older than what the user has set for this shell.
        if chosen != "file" or machine.device_variable not in environment:
            found[machine.device_variable] = config.gpu_ids
    if machine.has_false_peers and not config.cpu:
        # NCCL would believe the cards, and hang.
        found.update({name: "1" for name in _WITHOUT_PEERS if name not in environment})
    threads = config.num_cpu_threads_per_process
    if threads is None and "OMP_NUM_THREADS" not in environment:
        threads = max(1, machine.cores // local_size)  # torchrun would set 1 and leave most cores idle
    if threads is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    return found


def _exported(resolved: Resolved) -> Iterator[str]:
    """Yield the names of the options whose values processes get."""
    config = resolved.config
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        if not option.exports or value is None or not is_active(config, option):
            continue
        if option.section.name == "parallelism":
            if _is_of_mesh(option.key, config.parallelism_config_cp_size, config.parallelism_config_sp_size):
                yield name
        elif (
            option.section.name in _WHOLE
            or value != option.default
            or resolved.origins[name].source != "default"
        ):
            yield name


def _is_of_mesh(key: str, cp_size: int, sp_size: int) -> bool:
    if key == "cp_comm_strategy":
        return cp_size > 1
    return sp_size > 1 if key.startswith(("sp_seq", "sp_attn")) else True
