"""The command of torchrun."""

from __future__ import annotations

from pathlib import Path

from accelfn.errors import ConfigurationError
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.record import LOOPBACK, PORT, LaunchPlan, Script

#: torchrun itself, but for what it says at the end. Started by its path: as a module it would first load what
#: this package's planning needs, a tenth of a second of every launch.
AGENT = str(Path(__file__).parents[1] / "run" / "agent.py")


def plan_torchrun(config: LaunchConfig, script: Script, machine: Machine, worker: str) -> LaunchPlan:
    """Decide torchrun's arguments. Pure.

    Args:
        config: With ``num_processes`` decided.
        script: What to run.
        machine: Facts about this machine.
        worker: Path of the program that runs a Python script and keeps what went wrong in it.
    """
    assert config.num_processes is not None
    rendezvous, hosts_port = _plan_rendezvous(config)
    run = () if config.no_python else (worker, *(("-m",) if config.module else ()))
    argv = (
        machine.python,
        AGENT,
        f"--nnodes={config.num_machines}",
        f"--nproc-per-node={config.num_processes // config.num_machines}",
        *rendezvous,
        *_changed("--max-restarts", config.max_restarts, 0),
        *_changed("--monitor-interval", config.monitor_interval, 0.1),
        *_changed("--shutdown-timeout", config.shutdown_timeout, None),
        *_changed("--log-dir", config.log_dir, None),
        *_changed("--tee", config.tee, "0"),
        *_changed("--redirects", config.redirects, "0"),
        *_changed("--role", config.role, "default"),
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
        *_changed("--rdzv-id", config.rdzv_id, None),
        *_changed("--rdzv-conf", conf, None),
        # Otherwise processes look for each other under the host's name, which need not resolve.
        *(() if several or backend == "static" else (f"--local-addr={LOOPBACK}",)),
    )
    return arguments, port if port and machine_rank == 0 else None


def _changed(flag: str, value: object, default: object) -> tuple[str, ...]:
    return () if value == default else (f"{flag}={value}",)
