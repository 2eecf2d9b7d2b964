"""From launch options to the torchrun command: a pure plan, and one function that carries it out."""

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

__all__ = ("LaunchOptions", "LaunchPlan", "find_busy_port", "format_plan", "plan_launch", "run_plan")

_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29500  # torch's own default, so firewalls that let torchrun through need no new rule


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the user asked ``accelfn launch`` for. ``None`` means: not given.

    Args:
        script: Path of the training script; with ``module`` a dotted name, with ``no_python`` a program.
        script_args: Passed to the script, unchanged.
        num_processes: Processes on all machines together.
        num_machines: Machines that take part; each runs the same command.
        machine_rank: This machine's index, from 0.
        main_process_ip: Address at which the machines find machine 0.
        main_process_port: Port on machine 0. ``None`` or 0 on one machine: any free port.
        mixed_precision: Default precision of the contexts in the script.
        gradient_accumulation_steps: Default accumulation of the contexts in the script.
        cpu: Use the CPU even where there is an accelerator.
        debug: Compare calls in full, not by fingerprint, before each operation across ranks.
        module: ``script`` is a module, as in ``python -m``.
        no_python: ``script`` is a program of its own; start it without Python.
        max_restarts: How often torchrun starts all processes again after one has failed.
        monitor_interval: Seconds between torchrun's looks at its processes.
        rdzv_backend: How machines find each other; ``None`` lets the plan choose.
        rdzv_conf: Further rendezvous options, ``key=value`` with commas between.
        log_dir: Directory for the processes' output.
        tee: torchrun's ``--tee``: which streams go to the console and to ``log_dir``.
        role: Name of the processes in torchrun's messages.
        num_cpu_threads_per_process: ``OMP_NUM_THREADS``. ``None``: keep the user's, else share the cores.

    Raises:
        ValueError: The options contradict each other or a number is out of range.

    >>> LaunchOptions(script="train.py", num_processes=3, num_machines=2, main_process_ip="10.0.0.1")
    Traceback (most recent call last):
        ...
    ValueError: --num_processes counts all machines, so --num_machines must divide it: got 3 processes on \
2 machines. Use 2 or 4 processes.
    """

    script: str
    script_args: tuple[str, ...] = ()
    num_processes: int = 1
    num_machines: int = 1
    machine_rank: int | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = None
    gradient_accumulation_steps: int | None = None
    cpu: bool = False
    debug: bool = False
    module: bool = False
    no_python: bool = False
    max_restarts: int | None = None
    monitor_interval: float | None = None
    rdzv_backend: Literal["static", "c10d"] | None = None
    rdzv_conf: str | None = None
    log_dir: str | None = None
    tee: str | None = None
    role: str | None = None
    num_cpu_threads_per_process: int | None = None

    def __post_init__(self) -> None:
        _check_at_least(1, "--num_processes", self.num_processes)
        _check_at_least(1, "--num_machines", self.num_machines)
        _check_at_least(1, "--gradient_accumulation_steps", self.gradient_accumulation_steps)
        _check_at_least(1, "--num_cpu_threads_per_process", self.num_cpu_threads_per_process)
        _check_at_least(0, "--max_restarts", self.max_restarts)
        if self.monitor_interval is not None and not self.monitor_interval > 0:
            raise ValueError(f"--monitor_interval must be more than 0 seconds, got {self.monitor_interval}.")
        if self.main_process_port is not None and not 0 <= self.main_process_port <= 65535:
            raise ValueError(f"--main_process_port must be 0 to 65535, got {self.main_process_port}.")
        if self.module and self.no_python:
            raise ValueError(
                "--module runs a Python module and --no_python runs without Python. Give one of the two."
            )
        if self.machine_rank is not None and not 0 <= self.machine_rank < self.num_machines:
            raise ValueError(
                f"--machine_rank must be 0 to {self.num_machines - 1} with "
                f"--num_machines {self.num_machines}, got {self.machine_rank}."
            )
        if self.num_processes % self.num_machines:
            fewer = self.num_processes // self.num_machines * self.num_machines
            choices = " or ".join(str(n) for n in (fewer, fewer + self.num_machines) if n)
            raise ValueError(
                "--num_processes counts all machines, so --num_machines must divide it: "
                f"got {self.num_processes} processes on {self.num_machines} machines. "
                f"Use {choices} processes."
            )
        if self.num_machines > 1:
            self._check_several_machines()

    def _check_several_machines(self) -> None:
        if self.main_process_ip is None:
            raise ValueError(
                f"--num_machines {self.num_machines} needs --main_process_ip: the address of machine 0, "
                "the same on every machine."
            )
        if self.main_process_port == 0:
            raise ValueError(
                "--main_process_port 0 means any free port, and the other machines could not know which. "
                f"Give one number on every machine, or leave it out for {_DEFAULT_PORT}."
            )
        if self.machine_rank is None and self.rdzv_backend != "c10d":
            raise ValueError(
                f"--num_machines {self.num_machines} needs --machine_rank (0 to {self.num_machines - 1}, "
                "different on every machine). To have ranks given out, use --rdzv_backend c10d."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What starts the processes of one machine.

    Args:
        argv: The whole command, its program first.
        env_changes: Variables to set for the command, as pairs sorted by name. The rest is inherited.
        hosts_port: Port that this machine must have free, because the others will look for it here.
    """

    argv: tuple[str, ...]
    env_changes: tuple[tuple[str, str], ...] = ()
    hosts_port: int | None = None


def _check_at_least(least: int, flag: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ValueError(f"{flag} must be at least {least}, got {value}.")


def plan_launch(
    options: LaunchOptions, env: Mapping[str, str], cpu_count: int, *, python: str = "python"
) -> LaunchPlan:
    """Decide the torchrun command and the variables for it. Pure: starts nothing, reads no environment.

    Args:
        options: What the user asked for.
        env: The environment that the command will inherit.
        cpu_count: Cores that this machine's processes share.
        python: The interpreter that runs torchrun.

    Returns:
        The plan for this machine.

    >>> plan = plan_launch(LaunchOptions(script="train.py", num_processes=2), env={}, cpu_count=8)
    >>> plan.argv[-4:], plan.env_changes
    (('--rdzv-endpoint=127.0.0.1:0', '--local-addr=127.0.0.1', '--', 'train.py'), (('OMP_NUM_THREADS', '4'),))
    """
    local_size = options.num_processes // options.num_machines
    rendezvous, hosts_port = _plan_rendezvous(options)
    argv = (
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={options.num_machines}",
        f"--nproc-per-node={local_size}",
        *rendezvous,
        *_optional("--max-restarts", options.max_restarts),
        *_optional("--monitor-interval", options.monitor_interval),
        *_optional("--log-dir", options.log_dir),
        *_optional("--tee", options.tee),
        *_optional("--role", options.role),
        *(("--module",) if options.module else ()),
        *(("--no-python",) if options.no_python else ()),
        # Without `--` torchrun's parser looks into the script's arguments: it refuses `train.py --m 3` as
        # an ambiguous abbreviation, and drops a `--` that stands first.
        "--",
        options.script,
        *options.script_args,
    )
    return LaunchPlan(
        argv=argv, env_changes=_plan_environment(options, env, cpu_count // local_size), hosts_port=hosts_port
    )


def _plan_rendezvous(options: LaunchOptions) -> tuple[tuple[str, ...], int | None]:
    """Return torchrun's rendezvous arguments and the port this machine must host."""
    pinned = options.main_process_ip is not None or bool(options.main_process_port)
    several = options.num_machines > 1
    backend = options.rdzv_backend or ("static" if several or pinned else "c10d")
    ip = options.main_process_ip or _LOOPBACK
    if several or pinned or backend == "static":
        port = options.main_process_port or _DEFAULT_PORT
    else:
        port = 0  # torchrun binds a free port itself, so two launches at once never collide
    machine_rank = options.machine_rank if several else 0
    conf = options.rdzv_conf
    if several and backend == "c10d" and machine_rank is not None and "is_host=" not in (conf or ""):
        # c10d gives out ranks itself; a rank from the user still says who hosts the store, which torch
        # would otherwise guess from host names.
        conf = ",".join(part for part in (conf, f"is_host={int(machine_rank == 0)}") if part)
    arguments = (
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={ip}:{port}",
        *((f"--node-rank={machine_rank}",) if backend == "static" else ()),
        *_optional("--rdzv-conf", conf),
        # Otherwise processes look for each other under the host's name, which need not resolve.
        *(() if several or pinned else (f"--local-addr={_LOOPBACK}",)),
    )
    return arguments, port if port and machine_rank == 0 else None


def _plan_environment(
    options: LaunchOptions, env: Mapping[str, str], cores_per_process: int
) -> tuple[tuple[str, str], ...]:
    wanted = (
        ("ACCELFN_DEBUG_MODE", "true" if options.debug else None),
        ("ACCELFN_GRADIENT_ACCUMULATION_STEPS", options.gradient_accumulation_steps),
        ("ACCELFN_MIXED_PRECISION", options.mixed_precision),
        ("ACCELFN_USE_CPU", "true" if options.cpu else None),
        ("OMP_NUM_THREADS", _plan_threads(options, env, cores_per_process)),
    )
    return tuple((name, str(value)) for name, value in wanted if value is not None)


def _plan_threads(options: LaunchOptions, env: Mapping[str, str], cores_per_process: int) -> int | None:
    if options.num_cpu_threads_per_process is not None:
        return options.num_cpu_threads_per_process
    # torchrun would set 1 and leave most cores idle.
    return None if "OMP_NUM_THREADS" in env else max(1, cores_per_process)


def _optional(flag: str, value: object) -> tuple[str, ...]:
    return () if value is None else (f"{flag}={value}",)


def format_plan(plan: LaunchPlan) -> str:
    r"""Write a plan as one shell command that does the same.

    Args:
        plan: From :func:`plan_launch`.

    Returns:
        One line for each variable and one for the command; a shell takes them as one command.

    >>> print(format_plan(LaunchPlan(argv=("python", "a b.py"), env_changes=(("OMP_NUM_THREADS", "2"),))))
    OMP_NUM_THREADS=2 \
    python 'a b.py'
    """
    variables = (f"{name}={shlex.quote(value)}" for name, value in plan.env_changes)
    return " \\\n".join((*variables, shlex.join(plan.argv)))


def find_busy_port(plan: LaunchPlan) -> int | None:
    """Look whether the port that this machine has to host is taken. Effect: binds it for an instant.

    Args:
        plan: From :func:`plan_launch`.

    Returns:
        The port if another program listens on it, ``None`` if it is free or none is needed.
    """
    if plan.hosts_port is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: a port in TIME_WAIT after the last run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", plan.hosts_port))
        except OSError:
            return plan.hosts_port
    return None


def run_plan(plan: LaunchPlan, env: Mapping[str, str]) -> NoReturn:
    """Become the planned command. Effect: replaces this process and never returns.

    Signals then reach torchrun directly, and no wrapper is left to outlive it.

    Args:
        plan: From :func:`plan_launch`.
        env: The environment to inherit; the plan's changes are laid over a copy.

    Raises:
        OSError: The plan's program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(plan.argv[0], plan.argv, {**env, **dict(plan.env_changes)})
