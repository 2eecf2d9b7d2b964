"""Which way a script is started, and what every way has in common."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.launch.config.options import OPTIONS
from accelfn.launch.config.record import LaunchConfig, changed_values, replace
from accelfn.launch.config.resolve import Resolved
from accelfn.launch.config.secrets import hide_in_text
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.platforms import plan_mpirun, plan_pod, plan_xla
from accelfn.launch.plan.record import LOOPBACK, LaunchPlan, Rendezvous, Script
from accelfn.launch.plan.torchrun import endpoint_of, plan_torchrun
from accelfn.launch.plan.variables import plan_variables

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
    *,
    worker: str = "worker.py",
) -> LaunchPlan:
    """Decide the command and the variables that start ``script`` on this machine. Pure.

    Args:
        resolved: The configuration, and where its values came from.
        script: What to run.
        environment: Variables that the command will inherit.
        machine: Facts about this machine.
        worker: Path of the program that runs a script and keeps what went wrong in it.

    Raises:
        ConfigurationError: The machine can't do what the configuration asks for.
        NotAvailableError: It asks for a job of SageMaker.

    >>> from accelfn.launch.config import Given, resolve
    >>> two = resolve({"num_processes": Given("2", "--num_processes")}, {})
    >>> plan = plan_launch(two, Script("train.py"), {}, Machine(cores=8))
    >>> plan.argv[-3:], plan.env_changes
    (('--', 'worker.py', 'train.py'), (('OMP_NUM_THREADS', '4'),))
    """
    config = resolved.config
    if config.compute_environment == "AMAZON_SAGEMAKER":
        raise NotAvailableError(
            "compute_environment AMAZON_SAGEMAKER: accelfn doesn't start SageMaker's jobs. Start one with "
            "the estimator of the sagemaker package, whose entry point runs accelfn launch."
        )
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
        plan = plan_mpirun(config, script, machine, worker, variables)
    elif total == 1 and not _wants_agent(config):
        plan = plan_single(config, script, machine)
    else:
        plan = plan_torchrun(config, script, machine, worker)
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


def plan_single(config: LaunchConfig, script: Script, machine: Machine) -> LaunchPlan:
    """Run a script by itself, as Python would. Pure.

    Its variables are those of a world of one, so that a script which joins a process group on its own can.
    """
    python = () if config.no_python else (machine.python, *(("-m",) if config.module else ()))
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": LOOPBACK}
    return LaunchPlan(
        way="single",
        argv=(*python, script.name, *script.args),
        env_changes=tuple((name, str(value)) for name, value in world.items()),
        fills_port="MASTER_PORT",
    )


def _wants_agent(config: LaunchConfig) -> bool:
    """Whether one process needs torchrun all the same."""
    return (
        config.num_machines > 1
        or config.main_process_port is not None
        or any((config.rdzv_backend, config.rdzv_endpoint, config.rdzv_id, config.rdzv_conf))
        or config.main_process_ip is not None
        or bool(_agent_options(config))
    )


def _agent_options(config: LaunchConfig) -> list[str]:
    """List what is asked of torchrun's agent."""
    return [
        name
        for name in changed_values(config)
        if OPTIONS[name].section.title == "Elastic" or name == "enable_cpu_affinity"
    ]


def _refuse_agent_flags(resolved: Resolved, way: str) -> None:
    """Refuse flags for torchrun's agent where something else starts the processes."""
    for name in _agent_options(resolved.config):
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


def _plan_rendezvous(config: LaunchConfig, script: Script) -> Rendezvous:
    host, port = endpoint_of(config)
    compare = [("num_machines", str(config.num_machines)), ("num_processes", str(config.num_processes))]
    for name, value in changed_values(config).items():
        if name not in (*_OWN, "num_machines") and not OPTIONS[name].secret:
            # It crosses the network, and is printed where machines differ.
            compare.append((name, "none" if value is None else hide_in_text(OPTIONS[name].kind.write(value))))
    compare.append(("the script", script.name.replace("\\", "/").rpartition("/")[2]))
    return Rendezvous(
        host=host,
        port=port,
        num_machines=config.num_machines,
        machine_rank=config.machine_rank,
        compare=tuple(compare),
        timeout_s=config.preflight_timeout,
        may_return=config.max_restarts > 0,
    )
