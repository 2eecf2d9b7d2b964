"""Plan a launch with DeepSpeed's own launcher, which starts the processes of all hosts from one machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import MappingProxyType

from accelfn.errors import ConfigurationError
from accelfn.launch.config.record import LaunchConfig, deepspeed_launcher
from accelfn.launch.plan.commands import PORT, WORKER, LaunchPlan, Script
from accelfn.launch.plan.machine import Machine

# Launchers that know neither filters nor limits, and whose processes need the address of rank 0.
_MPI = ("openmpi", "mvapich", "mpich")
_LOCAL = ("localhost", "127.0.0.1")


def read_hosts(text: str, path: str) -> Mapping[str, int]:
    r"""Parse a hostfile of DeepSpeed: the number of slots by host, in order. Pure.

    Args:
        text: Lines such as ``node1 slots=8``; those that begin with ``#`` are comments.
        path: Its path, for messages.

    Raises:
        ConfigurationError: A line has another form, or names a host again.

    >>> dict(read_hosts("# two machines\nnode1 slots=8\nnode2 slots=4\n", "hosts"))
    {'node1': 8, 'node2': 4}
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.match(r"\s*(\S+)\s+slots=([1-9][0-9]*)\s*(#.*)?$", line)
        if match is None:
            raise ConfigurationError(
                f"--deepspeed_hostfile: {path}, line {number} must be a host and its number of slots, such "
                f"as node1 slots=8; got {line.strip()!r}."
            )
        if match[1] in hosts:
            raise ConfigurationError(
                f"--deepspeed_hostfile: {path}, line {number} names the host {match[1]!r} again. Remove one "
                "of the lines."
            )
        hosts[match[1]] = int(match[2])
    return MappingProxyType(hosts)


def choose_hosts(hosts: Mapping[str, int], config: LaunchConfig) -> dict[str, int]:
    """Return the number of processes by host, after the filter. Pure.

    Raises:
        ConfigurationError: The filter isn't understood, names an unknown host or slot, or leaves none.

    >>> only = LaunchConfig(deepspeed_inclusion_filter="b@a:0,2")
    >>> choose_hosts({"a": 4, "b": 2, "c": 8}, only)
    {'a': 2, 'b': 2}
    """
    includes = config.deepspeed_inclusion_filter is not None
    text = config.deepspeed_inclusion_filter or config.deepspeed_exclusion_filter
    flag = f"--deepspeed_{'in' if includes else 'ex'}clusion_filter"
    named: dict[str, set[int]] = {}
    for part in () if text is None else text.split("@"):
        match = re.fullmatch(r"([^:\s]+)(?::([0-9]+(?:,[0-9]+)*))?", part.strip())
        if match is None:
            raise ConfigurationError(
                f"{flag} must be hosts joined by @, each with slots or without, such as node1@node2:0,1; got "
                f"{text!r}."
            )
        if match[1] not in hosts:
            raise ConfigurationError(
                f"{flag} names {match[1]!r}, which the hostfile doesn't list. It lists {', '.join(hosts)}."
            )
        slots = range(hosts[match[1]])
        chosen = {int(slot) for slot in match[2].split(",")} if match[2] else set(slots)
        if not chosen <= set(slots):
            raise ConfigurationError(
                f"{flag} names slot {max(chosen)} of {match[1]}, whose slots are 0 to {len(slots) - 1}."
            )
        named.setdefault(match[1], set()).update(chosen)
    if includes:
        return {host: len(named[host]) for host in hosts if host in named}
    left = {host: slots - len(named.get(host, ())) for host, slots in hosts.items()}
    if not any(left.values()):
        raise ConfigurationError(f"{flag} {text} leaves no slot. Exclude fewer.")
    return {host: slots for host, slots in left.items() if slots}


def check_launcher(config: LaunchConfig) -> None:
    """Check that the options of DeepSpeed's launcher have an effect. Pure.

    Raises:
        ConfigurationError: One lacks another that it needs, or they exclude each other.
    """
    launcher, starts = config.deepspeed_multinode_launcher, deepspeed_launcher(config) is not None
    names = ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter")
    filters = [f"--{name}" for name in names if getattr(config, name) is not None]
    if len(filters) > 1:
        raise ConfigurationError(f"{' and '.join(filters)} exclude each other. Pass one of them.")
    if launcher not in (None, "standard") and not starts:
        raise ConfigurationError(
            f"--deepspeed_multinode_launcher {launcher} needs --deepspeed_hostfile, which lists the hosts. "
            "Pass both; or start accelfn launch on every machine, with the launcher standard."
        )
    if filters and not starts:
        raise ConfigurationError(
            f"{filters[0]} chooses among the hosts of --deepspeed_hostfile, but torchrun starts this machine "
            "alone. Pass a hostfile and another launcher than standard, or leave the filter out."
        )
    if launcher == "nossh" and config.machine_rank is None:
        raise ConfigurationError(
            "--deepspeed_multinode_launcher nossh starts this machine alone, and needs --num_machines and "
            "--machine_rank, its position in the hostfile from 0."
        )


def plan_hosts(config: LaunchConfig, machine: Machine) -> dict[str, int]:
    """Return the number of processes by host, after the filter and the flags. Pure.

    Args:
        config: The configuration, with a hostfile.
        machine: With the hosts of the hostfile.

    Raises:
        ConfigurationError: The flags contradict the hostfile, or the launcher can't do what they ask for.
    """
    launcher, hosts = deepspeed_launcher(config), choose_hosts(machine.hosts, config)
    total: int | None = config.num_processes
    is_filtered = (config.deepspeed_inclusion_filter or config.deepspeed_exclusion_filter) is not None
    slots = sum(hosts.values())
    if config.num_machines not in ((len(hosts),) if launcher == "nossh" else (1, len(hosts))):
        raise ConfigurationError(
            f"--num_machines {config.num_machines} contradicts the hostfile, of which {len(hosts)} hosts are "
            f"used. Use --num_machines {len(hosts)}."
        )
    if is_filtered and launcher in _MPI:
        raise ConfigurationError(
            f"the launcher {launcher} starts every slot of every host, so a filter has no effect. List the "
            "hosts and slots to use in the hostfile, or use --deepspeed_multinode_launcher pdsh."
        )
    if config.gpu_ids != "all":
        raise ConfigurationError(
            f"--gpu_ids {config.gpu_ids} is for one machine. With a hostfile, choose slots with "
            "--deepspeed_inclusion_filter, such as node1:0,1@node2:0,1."
        )
    if total is None or total == slots:
        return hosts
    each = total // len(hosts)
    if is_filtered or launcher in _MPI or total % len(hosts) or not 0 < each <= min(hosts.values()):
        raise ConfigurationError(
            f"--num_processes {total} contradicts the hostfile: {len(hosts)} hosts with {slots} slots are "
            "used. Leave the flag out, or change the hostfile."
        )
    return dict.fromkeys(hosts, each)


def plan_deepspeed(
    config: LaunchConfig,
    script: Script,
    machine: Machine,
    hosts: Mapping[str, int],
    variables: Mapping[str, str],
) -> LaunchPlan:
    """Build the command of DeepSpeed's launcher. Pure.

    DeepSpeed hands few variables on to other hosts, so that the command of each process sets them.

    Args:
        config: The configuration, with a hostfile.
        script: The script.
        machine: This machine.
        hosts: From :func:`plan_hosts`.
        variables: Variables for the processes.

    Raises:
        ConfigurationError: The launcher can't do what the configuration asks for.
    """
    launcher = deepspeed_launcher(config) or "pdsh"
    first, one_machine = next(iter(hosts)), launcher == "nossh"
    if launcher == "slurm" and config.no_python:
        raise ConfigurationError(
            "--deepspeed_multinode_launcher slurm runs Python. Leave --no_python out, or use another "
            "launcher."
        )
    # pdsh asks the first host for its address; processes of the others look for it in MASTER_ADDR.
    address = config.main_process_ip or (None if launcher == "pdsh" else first)
    port = config.main_process_port or PORT
    is_mpi = launcher in (*_MPI, "slurm")
    rank_0 = {"MASTER_ADDR": str(address), "MASTER_PORT": str(port)} if is_mpi else {}
    exported = {**variables, **rank_0}
    is_limited = dict(hosts) != choose_hosts(machine.hosts, config)
    flags = (
        ("--hostfile", os.path.expanduser(str(config.deepspeed_hostfile))),
        ("--launcher", None if one_machine else launcher),
        ("--node_rank", config.machine_rank if one_machine else None),
        ("--include", config.deepspeed_inclusion_filter),
        ("--exclude", config.deepspeed_exclusion_filter),
        ("--num_gpus", next(iter(hosts.values())) if is_limited else None),
        ("--master_addr", address),
        ("--master_port", port),
    )
    # It would start the processes of a single other host here.
    is_remote = len(hosts) == 1 and first not in _LOCAL and not one_machine
    python = () if config.no_python else (machine.python, WORKER, *(("-m",) if config.module else ()))
    program: tuple[str, ...] = (*python, script.name, *script.args)
    if launcher == "slurm":  # srun hands all variables on, and it runs Python in any case
        start = program[1:]
    else:
        settings = (f"{name}={value}" for name, value in sorted(exported.items()))
        start = ("--no_python", "env", *settings, *program)
    return LaunchPlan(
        way="deepspeed",
        argv=(
            *(machine.python, "-m", "deepspeed.launcher.runner", "--no_local_rank"),
            *(f"{flag}={value}" for flag, value in flags if value is not None),
            *(("--no_ssh",) if one_machine else ()),
            *(("--force_multi",) if is_remote else ()),
            *start,
        ),
        env_changes=tuple(sorted(exported.items())),
        local_size=list(hosts.values())[config.machine_rank or 0],
    )
