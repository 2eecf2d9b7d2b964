"""One function for every way: look before the leap, then become the command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec

from accelfn import __version__
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.plan.record import LOOPBACK, LaunchPlan
from accelfn.launch.plan.torchrun import AGENT


def run_plan(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    *,
    log_dir: str | None = None,
    quiet: bool = False,
    script: str = "the script",
) -> int:
    """Start what a plan says. Effect: the command takes this process's place, so nothing returns.

    Args:
        plan: From ``plan_launch``.
        environment: What is inherited; the plan's changes are laid over a copy.
        log_dir: Where torchrun keeps output.
        quiet: Whether to leave the report of a failure out, and the line that a terminal gets at the start.
        script: What is started, for the line that a terminal gets.

    Raises:
        ConfigurationError: A port is in use, or a program is missing.
        MissingExtraError: A package is missing that the processes need.
    """
    for note in plan.notes:
        print(f"accelfn launch: {note}", file=sys.stderr)
    if plan.way == "xla" and find_spec("torch_xla") is None:
        raise MissingExtraError(
            f"--tpu needs the package torch_xla, which isn't installed for {sys.executable}. Get it: pip "
            "install 'torch_xla[tpu]'"
        )
    if shutil.which(plan.argv[0]) is None:
        raise ConfigurationError(f"there is no program {plan.argv[0]!r} to start. Check the PATH.")
    if log_dir is not None:
        try:
            os.makedirs(log_dir, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--log_dir {log_dir} can't be made: {error.strerror}. Name another."
            ) from None
    # Where machines meet, who holds the port may be one of them, and is asked.
    if plan.rendezvous is None and plan.hosts_port is not None and not is_port_free(plan.hosts_port):
        raise ConfigurationError(
            f"port {plan.hosts_port} of this machine is taken by another program. Give a free one with "
            "--main_process_port; on one machine, leave the flag out and any free port is used."
        )
    if not quiet and sys.stderr.isatty():
        # Until torch has been loaded, which may take seconds, nothing else would be seen.
        several = f"{plan.local_size} processes of " if plan.local_size > 1 else ""
        print(f"accelfn launch: starting {several}{script}; loading torch may take a while.", file=sys.stderr)
    changes = dict(plan.env_changes)
    argv = plan.argv
    if plan.rendezvous is not None:
        compare = (*plan.rendezvous.compare, *_versions())
        changes["ACCELFN_AGENT_RENDEZVOUS"] = json.dumps({**asdict(plan.rendezvous), "compare": compare})
    if quiet:
        changes["ACCELFN_AGENT_QUIET"] = "1"
    if plan.fills_port is not None:
        changes[plan.fills_port] = str(_free_port())
    if plan.way == "mpirun":
        argv = (sys.executable, AGENT, "--command", *argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals, the terminal and the exit status are then the command's own.
    os.execvpe(argv[0], argv, {**environment, **changes})


def is_port_free(port: int) -> bool:
    """Return whether this machine can listen on a port. Effect: binds it for an instant."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: a port in TIME_WAIT after the last run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _versions() -> list[tuple[str, str]]:
    """Look up versions without importing what they are of."""
    found = {"accelfn": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    found["torch"] = importlib.metadata.version("torch").partition("+")[0]
    return [(f"the version of {name}", version) for name, version in found.items()]


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
