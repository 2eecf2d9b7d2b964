"""The commands that start the processes of one machine, as plain data: Python, torchrun and others."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelfn.errors import ConfigurationError
from accelfn.launch.config.options import OPTIONS
from accelfn.launch.config.record import LaunchConfig, changed_values
from accelfn.launch.config.secrets import HIDDEN, hide_in_text, hide_in_words, is_secret
from accelfn.launch.plan.machine import Machine

LOOPBACK = "127.0.0.1"
#: torch's own default, so firewalls that let torchrun through need no new rule.
PORT = 29500
#: torchrun itself, but for what it says at the end. Started by its path: as a module it would first load what
#: this package's planning needs, a tenth of a second of every launch.
AGENT = str(Path(__file__).parents[1] / "run" / "agent.py")
#: Runs a Python script, and keeps what went wrong in it.
WORKER = str(Path(__file__).parents[1] / "run" / "worker.py")


@dataclass(frozen=True, slots=True)
class Script:
    """What the user wants to run: a path, a module's dotted name or a program, and its arguments."""

    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What starts the processes of one machine.

    Attributes:
        way: ``"single"``, ``"torchrun"``, ``"mpirun"``, ``"xla"`` or ``"tpu_pod"``.
        argv: The whole command, its program first.
        env_changes: Variables to set for the command, as pairs sorted by name. The rest is inherited.
        hosts_port: Port that this machine must have free, because processes will look for it here.
        fills_port: Variable that gets a free port when the plan is carried out.
        rendezvous: Of several machines that compare themselves first: the arguments of ``join_machines``.
        local_size: Processes on this machine.
        notes: What the user may want to know.
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
    r"""Write a plan as one shell command that starts the same.

    Args:
        plan: From ``plan_launch``.

    Returns:
        One line for each variable and one for the command; a shell takes them as one command. What looks
        secret is hidden.

    >>> plan = LaunchPlan(way="single", argv=("python", "a b.py"), env_changes=(("OMP_NUM_THREADS", "2"),))
    >>> print(format_plan(plan))
    OMP_NUM_THREADS=2 \
    python 'a b.py'
    """
    variables = (
        f"{name}={HIDDEN if is_secret(name) else shlex.quote(hide_in_text(value))}"
        for name, value in plan.env_changes
    )
    return " \\\n".join((*variables, shlex.join(hide_in_words(plan.argv))))


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


def elastic_options(config: LaunchConfig) -> list[str]:
    """List the options for torchrun's agent that are given. Pure."""
    return [name for name in changed_values(config) if OPTIONS[name].section.title == "Elastic"]


def plan_torchrun(config: LaunchConfig, script: Script, machine: Machine) -> LaunchPlan:
    """Decide torchrun's arguments. Pure.

    Args:
        config: With ``num_processes`` decided.
        script: What to run.
        machine: Facts about this machine.
    """
    assert config.num_processes is not None
    rendezvous, hosts_port = _plan_rendezvous(config)
    flags = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in elastic_options(config)]
    run = () if config.no_python else (WORKER, *(("-m",) if config.module else ()))
    argv = (
        machine.python,
        AGENT,
        f"--nnodes={config.num_machines}",
        f"--nproc-per-node={config.num_processes // config.num_machines}",
        *rendezvous,
        *flags,
        *(("--numa-binding=node",) if config.enable_cpu_affinity else ()),
        *(("--no-python",) if config.no_python else ()),
        # Without `--` torchrun's parser looks into the script's arguments: it refuses `train.py --m 3` as
        # an ambiguous abbreviation, and drops a `--` that stands first.
        "--",
        *run,
        script.name,
        *script.args,
    )
    # A store that is kept for the next attempt has the addresses of the last one in it, and ranks that find
    # them before they are replaced wait for each other for ever: torch 2.13 does so in one of three restarts.
    variables = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),) if config.max_restarts else ()
    return LaunchPlan(way="torchrun", argv=argv, env_changes=variables, hosts_port=hosts_port)


def endpoint_of(config: LaunchConfig) -> tuple[str, int]:
    """Return where the machines meet.

    Raises:
        ConfigurationError: ``rdzv_endpoint`` is not a host, or a host with a port.

    >>> endpoint_of(LaunchConfig(rdzv_endpoint="[::1]:1234")), endpoint_of(LaunchConfig(main_process_ip="h"))
    (('::1', 1234), ('h', 29500))
    """
    if config.rdzv_endpoint is None:
        return config.main_process_ip or LOOPBACK, config.main_process_port or PORT
    host, colon, port = config.rdzv_endpoint.rpartition(":")
    if not colon or host.endswith(":"):
        host, port = config.rdzv_endpoint, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigurationError(f"--rdzv_endpoint must be HOST:PORT, got {config.rdzv_endpoint!r}.")
    return host, int(port)


def _plan_rendezvous(config: LaunchConfig) -> tuple[tuple[str, ...], int | None]:
    """Return torchrun's rendezvous arguments and the port that this machine must host."""
    host, port = endpoint_of(config)
    chosen = config.rdzv_endpoint is not None
    pinned = chosen or config.main_process_ip is not None or bool(config.main_process_port)
    several = config.num_machines > 1
    # A static meeting is held once: machines can't come together again for another attempt.
    once = (several or pinned) and not config.max_restarts
    backend = config.rdzv_backend or ("static" if once else "c10d")
    if not (several or pinned or backend == "static"):
        port = 0  # torchrun binds a free port itself, so two launches at once never collide
    machine_rank = config.machine_rank if several else 0
    conf = config.rdzv_conf
    if several and backend == "c10d" and machine_rank is not None and "is_host=" not in (conf or ""):
        # c10d gives out ranks itself; a rank from the user still says who hosts the store, which torch
        # would otherwise guess from host names.
        conf = ",".join(part for part in (conf, f"is_host={int(machine_rank == 0)}") if part)
    shown = f"[{host}]" if ":" in host else host
    arguments = (
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={shown}:{port}",
        *((f"--node-rank={machine_rank}",) if backend == "static" else ()),
        *((f"--rdzv-id={config.rdzv_id}",) if config.rdzv_id is not None else ()),
        *((f"--rdzv-conf={conf}",) if conf is not None else ()),
        # Otherwise processes look for each other under the host's name, which need not resolve.
        *(() if several or backend == "static" else (f"--local-addr={LOOPBACK}",)),
    )
    return arguments, port if port and machine_rank == 0 else None


def plan_mpirun(
    config: LaunchConfig, script: Script, machine: Machine, variables: Mapping[str, str]
) -> LaunchPlan:
    """Decide mpirun's arguments. Pure.

    Args:
        config: With ``num_processes`` decided and a hostfile.
        script: What to run.
        machine: Facts about this machine, mpirun among them.
        variables: What the processes get on all machines; mpirun hands on only what it is told to.

    Raises:
        ConfigurationError: There is no mpirun.
    """
    assert config.num_processes is not None
    assert config.mpirun_hostfile is not None
    if machine.mpirun is None:
        raise ConfigurationError(
            "--mpirun_hostfile needs mpirun or mpiexec, and neither is on the PATH. Install an MPI, or leave "
            "the flag out to start through torchrun."
        )
    total, local_size = config.num_processes, config.num_processes // config.num_machines
    hostfile = os.path.expanduser(config.mpirun_hostfile)
    address = {"MASTER_ADDR": config.main_process_ip} if config.main_process_ip else {}
    if config.main_process_port:
        address["MASTER_PORT"] = str(config.main_process_port)
    handed = {**variables, **address}
    if machine.is_open_mpi:
        counts = ("--npernode", str(local_size), "-n", str(total))
        start = ("--hostfile", hostfile, *counts, "--bind-to", "socket")
        hand = tuple(part for name in sorted(handed) for part in ("-x", name))
    else:
        start = ("-f", hostfile, "-ppn", str(local_size), "-n", str(total))
        hand = tuple(part for name in sorted(handed) for part in ("-genv", name, handed[name]))
    python = () if config.no_python else (machine.python, WORKER, *(("-m",) if config.module else ()))
    return LaunchPlan(
        way="mpirun",
        argv=(machine.mpirun, *start, *hand, *python, script.name, *script.args),
        env_changes=tuple(address.items()),
    )


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
    if config.tpu_name is None or config.tpu_zone is None:
        raise ConfigurationError(
            "--tpu_cluster needs --tpu_name and --tpu_zone: gcloud finds the TPU by them."
        )
    own = ("tpu_options", "slurm")
    flags = [
        f"--{name}={OPTIONS[name].kind.write(value)}"
        for name, value in changed_values(config).items()
        if OPTIONS[name].section.name not in own and name != "num_machines" and value is not None
    ]
    inner = shlex.join(("accelfn", "launch", *flags, script.name, *script.args))
    prefix = " ".join(
        (*(("sudo",) if config.tpu_use_sudo else ()), "env", *(shlex.quote(one) for one in config.env or ()))
    )
    command = f"{prefix} ACCELFN_IN_TPU_POD=1 ACCELERATE_IN_TPU_POD=1 {inner}"
    workers = ",".join(config.vm) if config.vm else "all"
    return LaunchPlan(
        way="tpu_pod",
        argv=(
            *("gcloud", "compute", "tpus", "tpu-vm", "ssh", config.tpu_name, "--zone", config.tpu_zone),
            *("--command", command, "--worker", workers),
        ),
    )
