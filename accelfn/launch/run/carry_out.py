"""One function for every way: look before the leap, then become the command or stay beside it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from accelfn import __version__
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.plan.record import LOOPBACK, LaunchPlan
from accelfn.launch.run.preflight import hold_meeting, is_port_free
from accelfn.launch.run.supervise import supervise

__all__ = ("run_plan",)

_ALONE = (
    "accelfn launch: the launcher on the machine that hosts the meeting can't be reached at its second port. "
    "If a machine fails, this one will know it when its processes next wait for the others."
)


def run_plan(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    *,
    num_processes: int | None = None,
    log_dir: str | None = None,
    quiet: bool = False,
    script: str = "the script",
) -> int:
    """Start what a plan says. Effect: starts processes; a single one takes this process's place.

    Args:
        plan: From ``plan_launch``.
        environment: What is inherited; the plan's changes are laid over a copy.
        num_processes: Of the whole world, for the report after a failure.
        log_dir: Where torchrun keeps output, for that report.
        quiet: Whether to leave that report out, and what a terminal is told at the start.
        script: What is started, for the line that a terminal gets.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: A port is in use, a program is missing, or the machines can't meet or differ.
        MissingExtraError: A package is missing that the processes need.
    """
    for note in plan.notes:
        print(f"accelfn launch: {note}", file=sys.stderr)
    _refuse_missing_packages(plan.needs)
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
    if plan.meeting is None and plan.hosts_port is not None and not is_port_free(plan.hosts_port):
        raise ConfigurationError(
            f"port {plan.hosts_port} of this machine is taken by another program. Give a free one with "
            "--main_process_port; on one machine, leave the flag out and any free port is used."
        )
    if not quiet and sys.stderr.isatty():
        # Until torch has been loaded, which may take seconds, nothing else would be seen.
        several = f"{plan.local_size} processes of " if plan.local_size > 1 else ""
        print(f"accelfn launch: starting {several}{script}; loading torch may take a while.", file=sys.stderr)
    if plan.meeting is not None:
        with contextlib.closing(hold_meeting(plan.meeting, _versions())) as news:
            if news.is_alone:
                print(_ALONE, file=sys.stderr)
            return supervise(
                plan, environment, num_processes=num_processes, log_dir=log_dir, quiet=quiet, news=news
            )
    if plan.way == "single":
        changes = dict(plan.env_changes)
        if plan.fills_port is not None:
            changes[plan.fills_port] = str(_free_port())
        if plan.cpus and sys.platform == "linux":
            os.sched_setaffinity(0, plan.cpus[0])
        sys.stdout.flush()
        sys.stderr.flush()
        # Signals, the terminal and the exit status are then the script's own.
        os.execvpe(plan.argv[0], plan.argv, {**environment, **changes})
    return supervise(plan, environment, num_processes=num_processes, log_dir=log_dir, quiet=quiet)


# How each package that a plan may need is got, and what asks for it.
_SOURCES = MappingProxyType(
    {
        "torch_xla": ("--tpu", "pip install 'torch_xla[tpu]'"),
        "sagemaker": ("SageMaker", "pip install sagemaker"),
    }
)


def _refuse_missing_packages(needs: Iterable[str]) -> None:
    for name in needs:
        if importlib.util.find_spec(name) is None:
            asks, how = _SOURCES[name]
            raise MissingExtraError(
                f"{asks} needs the package {name}, which isn't installed for {sys.executable}. Get it: {how}"
            )


def _versions() -> dict[str, str]:
    """Look up versions without importing what they are of."""
    found = {"accelfn": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch").partition("+")[0]
    return {f"the version of {name}": version for name, version in found.items()}


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
