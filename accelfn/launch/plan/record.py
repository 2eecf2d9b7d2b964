"""What starts the processes of one machine, as plain data."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from accelfn.launch.config.secrets import HIDDEN, hide_in_text, hide_in_words, is_secret

LOOPBACK = "127.0.0.1"
#: torch's own default, so firewalls that let torchrun through need no new rule.
PORT = 29500


@dataclass(frozen=True, slots=True)
class Script:
    """What the user wants to run: a path, a module's dotted name or a program, and its arguments."""

    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Rendezvous of several machines before anything is started, and what must be equal on them.

    Attributes:
        host: Address of machine 0.
        port: Its port.
        num_machines: How many take part.
        machine_rank: Which this one is; None if ranks are given out later.
        compare: Names and texts that must be the same on all of them.
        timeout_s: How long to wait for the others.
        may_return: Whether one that is stopped or lost can be replaced later, while the others wait.
    """

    host: str
    port: int
    num_machines: int
    machine_rank: int | None
    compare: tuple[tuple[str, str], ...]
    timeout_s: float
    may_return: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What starts the processes of one machine.

    Attributes:
        way: ``"single"``, ``"torchrun"``, ``"mpirun"``, ``"xla"`` or ``"tpu_pod"``.
        argv: The whole command, its program first.
        env_changes: Variables to set for the command, as pairs sorted by name. The rest is inherited.
        hosts_port: Port that this machine must have free, because processes will look for it here.
        fills_port: Variable that gets a free port when the plan is carried out.
        rendezvous: Where the machines compare themselves first.
        local_size: Processes on this machine.
        notes: What the user may want to know.
    """

    way: str
    argv: tuple[str, ...]
    env_changes: tuple[tuple[str, str], ...] = ()
    hosts_port: int | None = None
    fills_port: str | None = None
    rendezvous: Rendezvous | None = None
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
