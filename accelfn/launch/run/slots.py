"""The slots of elastic training, and what is known of the processes in them: pure functions.

A slot is the place of one process in the world; the processes that fill it, one after another, are its
attempts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from accelfn.launch.run.report import describe_exit

#: Seconds between two looks at a heartbeat, which changes every half second.
LISTEN_S = 0.5
#: torchrun's without ``--rdzv_id``.
RUN_ID = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one process in the world.

    Attributes:
        rank: Of all processes.
        local_rank: Of the processes of its machine.
        machine_rank: Of its machine.
        size: Number of slots.
        local_size: Number of slots of each machine.
    """

    rank: int
    local_rank: int
    machine_rank: int
    size: int
    local_size: int


def plan_slots(num_machines: int, local_size: int, machine_rank: int) -> tuple[Slot, ...]:
    """Return the slots of one machine. Pure.

    >>> [slot.rank for slot in plan_slots(2, 3, 1)]
    [3, 4, 5]
    """
    return tuple(
        Slot(
            rank=machine_rank * local_size + local_rank,
            local_rank=local_rank,
            machine_rank=machine_rank,
            size=num_machines * local_size,
            local_size=local_size,
        )
        for local_rank in range(local_size)
    )


def plan_variables(slot: Slot, *, attempt: int, max_restarts: int, host: str, port: int) -> dict[str, str]:
    """Return the variables of a slot's process: torchrun's, and where the board is. Pure.

    Args:
        slot: The slot.
        attempt: Number of processes that were in the slot before.
        max_restarts: Of each slot.
        host: Of the store.
        port: Of the store.

    >>> (slot,) = plan_slots(1, 1, 0)
    >>> plan_variables(slot, attempt=0, max_restarts=0, host="fe80::1", port=7)["ACCELFN_ELASTIC_STORE"]
    '[fe80::1]:7'
    """
    values = {
        "RANK": slot.rank,
        "LOCAL_RANK": slot.local_rank,
        "WORLD_SIZE": slot.size,
        "LOCAL_WORLD_SIZE": slot.local_size,
        "GROUP_RANK": slot.machine_rank,
        "GROUP_WORLD_SIZE": slot.size // slot.local_size,
        "ROLE_RANK": slot.rank,
        "ROLE_WORLD_SIZE": slot.size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "ACCELFN_ELASTIC_STORE": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "ACCELFN_ELASTIC_SLOT": slot.rank,
        "ACCELFN_ELASTIC_SIZE": slot.size,
    }
    return {name: str(value) for name, value in values.items()}


class Silence(NamedTuple):
    """How long a process has sent no heartbeat, as far as its launcher was there to listen."""

    beat: str | None = None
    seconds: float = 0.0


def listen(silence: Silence, beat: str | None, elapsed_s: float) -> Silence:
    """Return the silence after another look at a heartbeat. Pure.

    A process that has never beaten isn't silent, nor is one whose launcher stood still as well.

    Args:
        silence: Before.
        beat: The heartbeat; None before the first, or if the store doesn't answer.
        elapsed_s: Time since the last look.

    >>> listen(Silence("7", 4.0), "7", 0.5), listen(Silence("7", 4.0), "7", 3600.0)
    (Silence(beat='7', seconds=4.5), Silence(beat='7', seconds=5.0))
    >>> listen(Silence("7", 4.0), "8", 0.5), listen(Silence(), None, 0.5)
    (Silence(beat='8', seconds=0.0), Silence(beat=None, seconds=0.0))
    """
    if beat is None or beat != silence.beat:
        return Silence(beat)
    return Silence(beat, silence.seconds + min(elapsed_s, 2 * LISTEN_S))


def describe_death(rank: int, exitcode: int, follows: str) -> str:
    """Describe the end of a process that failed, and what follows. Pure.

    >>> describe_death(1, -9, "the other ranks go on")
    'rank 1 was killed by SIGKILL; the other ranks go on'
    """
    return f"rank {rank} {describe_end(exitcode)}" + (f"; {follows}" if follows else "")


def describe_end(exitcode: int) -> str:
    """Describe how a process failed. Pure.

    >>> describe_end(-9)
    'was killed by SIGKILL'
    """
    return f"{'was' if exitcode < 0 else 'ended'} {describe_exit(exitcode)}"
