"""Build the command that starts the processes of one machine: Python, torchrun and others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelfn.errors import ConfigurationError
from accelfn.launch.config import LaunchConfig, changed_values, is_active
from accelfn.launch.machine import Machine
from accelfn.launch.options import OPTIONS

LOOPBACK = "127.0.0.1"
#: torch's default, so that firewalls need no new rule.
PORT = 29500
#: Runs torchrun, and reports failures. Started by its path, because importing this package would add 0.1 s.
AGENT = str(Path(__file__).with_name("agent.py"))
#: Runs a Python script, and records its exception.
WORKER = str(Path(__file__).with_name("worker.py"))


@dataclass(frozen=True, slots=True)
class Script:
    """A path, a module's dotted name or a program, and its arguments."""

    name: str
    args: tuple[str, ...] = ()


def under_compat(config: LaunchConfig, script: Script) -> tuple[LaunchConfig, Script]:
    """Return the configuration and the script that run ``script`` under ``accelfn.compat``, if asked. Pure.

    >>> config, script = under_compat(LaunchConfig(compat=True), Script("train.py", ("--lr", "1")))
    >>> config.module, script
    (True, Script(name='accelfn.compat', args=('train.py', '--lr', '1')))
    """
    if not config.compat:
        return config, script
    args = (*(("-m",) if config.module else ()), script.name, *script.args)
    return replace(config, module=True, compat=False), Script("accelfn.compat", args)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The command that starts the processes of one machine.

    Attributes:
        way: ``"single"``, ``"torchrun"``, ``"xla"`` or ``"tpu_pod"``.
        argv: The command.
        env_changes: Variables to set, as pairs sorted by name. Others are inherited.
        hosts_port: Port that this machine serves, and which must be free.
        fills_port: Variable to set to a free port when the plan is executed.
        rendezvous: Arguments of ``join_machines``, if several machines compare themselves first.
        local_size: Number of processes on this machine.
        notes: Notes to print.
    """

    way: str
    argv: tuple[str, ...]
    env_changes: tuple[tuple[str, str], ...] = ()
    hosts_port: int | None = None
    fills_port: str | None = None
    rendezvous: Mapping[str, Any] | None = None
    local_size: int = 1
    notes: tuple[str, ...] = ()


def format_plan(plan: LaunchPlan) -> str:
    r"""Format a plan as one shell command. Pure.

    >>> plan = LaunchPlan(way="single", argv=("python", "a b.py"), env_changes=(("OMP_NUM_THREADS", "2"),))
    >>> print(format_plan(plan))
    OMP_NUM_THREADS=2 \
    python 'a b.py'
    """
    variables = (f"{name}={shlex.quote(value)}" for name, value in plan.env_changes)
    return " \\\n".join((*variables, shlex.join(plan.argv)))


def flags_of(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of ``accelfn launch`` for the options that have a value. Pure.

    >>> list(flags_of({"num_processes": 2, "vm": ("a", "b"), "tpu_name": None}))
    ['--num_processes=2', '--vm=a', '--vm=b']
    """
    for name, option in OPTIONS.items():
        value = values.get(name)
        if value is not None:
            text = option.kind.write(value)
            yield from (f"--{name}={one}" for one in (text.split("\n") if option.kind.repeats else [text]))


def plan_single(config: LaunchConfig, script: Script, machine: Machine) -> LaunchPlan:
    """Run a script as a single process. Pure.

    The variables describe a world of one rank, so that the script can initialize a process group.
    """
    python = () if config.no_python else (machine.python, *(("-m",) if config.module else ()))
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": LOOPBACK}
    return LaunchPlan(
        way="single",
        argv=(*python, script.name, *script.args),
        env_changes=tuple((name, str(value)) for name, value in world.items()),
        fills_port="MASTER_PORT",
    )


def elastic_options(config: LaunchConfig) -> list[str]:
    """List the options for torchrun's agent that are set. Pure."""
    return [name for name in changed_values(config) if OPTIONS[name].section.title == "Elastic"]


def plan_torchrun(config: LaunchConfig, script: Script, machine: Machine) -> LaunchPlan:
    """Build the command of torchrun, or of an agent for each process if ``config.elastic``. Pure.

    ``config.num_processes`` must be set.
    """
    assert config.num_processes is not None
    rendezvous, hosts_port = _plan_rendezvous(config)
    flags = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in elastic_options(config)]
    # Torch's --no-python would start a program that nobody can hand signals to.
    run = (WORKER, "--exec") if config.no_python else (WORKER, *(("-m",) if config.module else ()))
    argv = (
        machine.python,
        AGENT,
        *(("--elastic", f"{config.heartbeat_timeout:g}") if config.elastic else ()),
        f"--nnodes={config.num_machines}",
        f"--nproc-per-node={config.num_processes // config.num_machines}",
        *rendezvous,
        *flags,
        *(("--numa-binding=node",) if config.enable_cpu_affinity else ()),
        # Without `--`, torchrun parses the script's arguments: it rejects `train.py --m 3` as an ambiguous
        # abbreviation, and drops a leading `--`.
        "--",
        *run,
        script.name,
        *script.args,
    )
    # A store that is shared between attempts contains the addresses of the previous attempt. Ranks that read
    # those hang: torch 2.13 does so in one of three restarts.
    has_attempts = config.max_restarts and not config.elastic
    variables = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),) if has_attempts else ()
    return LaunchPlan(way="torchrun", argv=argv, env_changes=variables, hosts_port=hosts_port)


def endpoint_of(config: LaunchConfig) -> tuple[str, int]:
    """Return host and port of the rendezvous. Pure.

    >>> endpoint_of(LaunchConfig(rdzv_endpoint="[::1]:1234")), endpoint_of(LaunchConfig(main_process_port=5))
    (('::1', 1234), ('127.0.0.1', 5))
    """
    if config.rdzv_endpoint is None:
        is_alone = config.num_machines == 1  # then an address has no effect
        return (not is_alone and config.main_process_ip) or LOOPBACK, config.main_process_port or PORT
    host, port = re.findall(r"^\[?(.*?)\]?(?::(\d+))?$", config.rdzv_endpoint)[0]
    return host, int(port or PORT)


def _plan_rendezvous(config: LaunchConfig) -> tuple[tuple[str, ...], int | None]:
    """Return torchrun's rendezvous arguments, and the port that this machine serves."""
    host, port = endpoint_of(config)
    several = config.num_machines > 1
    pinned = config.rdzv_endpoint is not None or bool(config.main_process_port)
    # A static rendezvous can't be repeated for another attempt. Elastic agents have no rendezvous.
    is_static = config.elastic or ((several or pinned) and not config.max_restarts)
    backend = config.rdzv_backend or ("static" if is_static else "c10d")
    if not (several or pinned or config.rdzv_backend == "static"):
        port = 0  # torchrun picks a free port, so that concurrent launches don't collide
    machine_rank = config.machine_rank if several else 0
    conf = config.rdzv_conf
    if several and backend == "c10d" and machine_rank is not None and "is_host=" not in (conf or ""):
        # c10d assigns ranks itself, but a given rank decides who hosts the store. torch would guess it from
        # host names.
        conf = ",".join(part for part in (conf, f"is_host={int(machine_rank == 0)}") if part)
    shown = f"[{host}]" if ":" in host else host
    arguments = (
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={shown}:{port}",
        *((f"--node-rank={machine_rank}",) if backend == "static" else ()),
        *((f"--rdzv-id={config.rdzv_id}",) if config.rdzv_id is not None else ()),
        *((f"--rdzv-conf={conf}",) if conf is not None else ()),
        # Otherwise processes connect by host name, which need not resolve.
        *(() if several or backend == "static" else (f"--local-addr={LOOPBACK}",)),
    )
    return arguments, port if port and machine_rank == 0 else None


def plan_xla(config: LaunchConfig, script: Script, machine: Machine) -> LaunchPlan:
    """Run a function of the script on every TPU core of this machine with torch_xla. Pure."""
    assert config.num_processes is not None
    # Otherwise autocast computes in bf16. XLA_USE_BF16 would also keep the parameters in it.
    downcasts = config.mixed_precision == "bf16" and config.downcast_bf16
    return LaunchPlan(
        way="xla",
        argv=(
            *(machine.python, "-m", "accelfn.launch.xla", config.main_training_function),
            *(str(config.num_processes), "module" if config.module else "script", script.name, *script.args),
        ),
        env_changes=(("ACCELFN_TORCH_DEVICE", "xla"), *((("XLA_DOWNCAST_BF16", "1"),) if downcasts else ())),
    )


def plan_pod(config: LaunchConfig, script: Script) -> LaunchPlan:
    """Run ``accelfn launch`` on every machine of a TPU pod with gcloud. Pure.

    Raises:
        ConfigurationError: The name or zone of the TPU is missing.
    """
    if config.tpu_name is None or config.tpu_zone is None:
        raise ConfigurationError("--tpu_cluster needs --tpu_name and --tpu_zone.")
    changed = {
        name: value
        for name, value in changed_values(config).items()
        if OPTIONS[name].section.name != "tpu_options"
        and name != "num_machines"
        and is_active(config, OPTIONS[name])
    }
    inner = shlex.join(("accelfn", "launch", *flags_of(changed), script.name, *script.args))
    variables = "".join(f"{shlex.quote(variable)} " for variable in config.env or ())
    sudo = "sudo " if config.tpu_use_sudo else ""
    command = f"{sudo}env {variables}ACCELFN_IN_TPU_POD=1 ACCELERATE_IN_TPU_POD=1 {inner}"
    workers = ",".join(config.vm) if config.vm else "all"
    return LaunchPlan(
        way="tpu_pod",
        argv=(
            *("gcloud", "compute", "tpus", "tpu-vm", "ssh", config.tpu_name, "--zone", config.tpu_zone),
            *("--command", command, "--worker", workers),
        ),
    )
