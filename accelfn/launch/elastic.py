"""Run elastic training: start the processes of this machine, replace those that fail, and tell the others.

A slot is the place of one process in the world; the processes that fill it, one after another, are its
attempts. The processes learn of each other from the board of all machines:

- ``slot/{rank}``, from the launcher: JSON with the ``attempt`` (from 0), the ``state`` (running, restarting,
  failed or done), and the ``pid`` and ``host`` of the process.
- ``lost/{number}``, from the launcher: JSON with the name, ``{rank}.{attempt}``, of a process that failed or
  ended within the training, and why; in this order (:func:`accelfn.context.failure.announce_loss`).
- ``beat/{rank}.{attempt}``, from the process: a text that it changes every half second.
- ``over``, from a process: the training has ended.
- ``left/{rank}.{attempt}``, from the process: it has returned from the training. The launcher waits for it
  from then on, and its failure is that of the launch.
- ``launcher/{machine}``, from the launcher: it has no process left, and knows how all others ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore  # torch.distributed's is untyped
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
    Std,
    start_processes,  # pyright: ignore[reportUnknownVariableType] -- of functions without types
    to_map,
)

from accelfn.context.failure import Loss, announce_loss, store_board
from accelfn.context.rendezvous import serve_store
from accelfn.launch.machines import Machines
from accelfn.launch.rank import world_variables
from accelfn.launch.report import Failure, describe_exit

# Seconds between two looks at a heartbeat, which changes every half second.
_LISTEN_S = 0.5
# When the training is over, time for processes that haven't returned from it, before they get a signal.
_GRACE_S = 5.0
# torchrun's without --rdzv_id.
_RUN_ID = "none"
_ENDED = ("done", "failed")


class Silence(NamedTuple):
    """For how long a process has sent no heartbeat while its launcher listened."""

    beat: str | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class _Slot:
    """A place in the world, and its last process.

    Attributes:
        rank: Of all processes.
        logs: Where its processes write.
        attempt: Number of processes before.
        state: As on the board.
        process: The process.
        silence: Of the process.
        listened_s: Time of the last look at its heartbeat.
        killed_for: Why the launcher killed it.
        has_left: Whether it has said that it returned from the training.
        death: How it failed.
    """

    rank: int
    logs: DefaultLogsSpecs
    attempt: int = -1
    state: str = ""
    process: PContext | None = None
    silence: Silence = field(default_factory=Silence)
    listened_s: float = 0.0
    killed_for: str = ""
    has_left: bool = False
    death: Failure | None = None

    @property
    def name(self) -> str:
        return f"{self.rank}.{self.attempt}"

    @property
    def pid(self) -> int:
        return self.process.pids()[0] if self.process else 0

    def failure(self, exitcode: int, text: str) -> Failure:
        return Failure(rank=self.rank, attempt=self.attempt, exitcode=exitcode, text=text, time_s=time.time())

    def kill(self) -> None:
        """Kill the process and its children, which may hold the device that its replacement needs."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)


def run_slots(
    options: Any,
    command: Sequence[str],
    *,
    heartbeat_timeout_s: float,
    machines: Machines | None,
    report: Callable[[str], None],
) -> tuple[Failure, ...] | None:
    """Start the processes of this machine, and replace those that fail until the training is over.

    Effect: starts processes, and on the only machine a store.

    Args:
        options: torchrun's, parsed. The endpoint of the rendezvous is the address of the store.
        command: A program and its arguments.
        heartbeat_timeout_s: A process that sent heartbeats, and then none for this time, is killed.
        machines: The other machines; None if there are none.
        report: Prints a message.

    Returns:
        None if all processes of all machines have ended with status 0, or the training is over and no process
        of this machine has failed after its return from it. Otherwise the last failure of each slot of this
        machine; only those after the return from the training, if there are any.

    Raises:
        SignalException: By torch's handler of a signal, which was passed on to the processes.
    """
    training = _Training(options, command, heartbeat_timeout_s, machines, report)
    try:
        return training.run()
    except SignalException as stop:
        training.end(training.running(), stop.sigval)
        training.say_ended()
        raise


class _Training:
    """The slots of this machine, and what the board says of all."""

    def __init__(
        self,
        options: Any,
        command: Sequence[str],
        heartbeat_timeout_s: float,
        machines: Machines | None,
        report: Callable[[str], None],
    ) -> None:
        host, _, port = str(options.rdzv_endpoint).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        store = machines.store if machines else serve_store(host, int(port))
        self._board = store_board(PrefixStore("accelfn/elastic", store))
        self._machine_rank = int(options.node_rank)
        self._options, self._command = options, command
        self._heartbeat_timeout_s, self._machines, self._report = heartbeat_timeout_s, machines, report
        self._address = host, store.port
        self._local_size, self._num_machines = int(options.nproc_per_node), int(options.nnodes)
        self._size = self._local_size * self._num_machines
        redirected, shown = (
            to_map(Std.from_str(text), self._local_size) for text in (options.redirects, options.tee)
        )
        self._slots = [
            _Slot(rank, DefaultLogsSpecs(f"{options.log_dir}/rank_{rank}", redirected[index], shown[index]))
            for index, rank in enumerate(self._ranks(self._machine_rank))
        ]
        self._over_s = 0.0  # when the end of the training was read
        self._lost: set[int] = set()  # machines

    def run(self) -> tuple[Failure, ...] | None:
        for slot in self._slots:
            self._start(slot)
        while running := self.running():
            self._poll()
            for slot in running:
                self._attend(slot)
            # Asked each time, since the store may be gone when it matters.
            late = [slot for slot in self.running() if not self._has_left(slot)]
            if self._over_s and time.monotonic() > self._over_s + _GRACE_S:
                self.end(late, signal.SIGTERM)
            time.sleep(self._options.monitor_interval)
        succeeded = self._wait_for_the_others()
        late = tuple(slot.death for slot in self._slots if slot.death and slot.has_left)
        if succeeded and not late:
            return None
        return late or tuple(slot.death for slot in self._slots if slot.death)

    def running(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.state == "running"]

    def end(self, slots: Sequence[_Slot], number: signal.Signals) -> None:
        """Send a signal to processes, and kill those that don't end in time."""
        timeout_s = getattr(self._options, "shutdown_timeout", None) or 30
        with ThreadPoolExecutor(max(1, len(slots))) as pool:  # each waits
            for slot in slots:
                if slot.process:
                    pool.submit(slot.process.close, number, timeout_s)
        for slot in slots:
            self._post(slot, "failed")

    def say_ended(self) -> None:
        """Report to the first machine that this one has no process left."""
        self._board.post(f"launcher/{self._machine_rank}", "ended")

    def _start(self, slot: _Slot) -> None:
        """Start the next process of a slot."""
        slot.attempt += 1
        slot.process, slot.death, slot.killed_for, slot.has_left = None, None, "", False
        slot.silence, slot.listened_s = Silence(), time.monotonic()
        role = self._options.role
        host, port = self._address
        variables = {
            **world_variables(slot.rank, self._local_size, self._num_machines, self._address, run_id=_RUN_ID),
            "TORCHELASTIC_RESTART_COUNT": str(slot.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._options.max_restarts),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "ROLE_NAME": role,
            "ACCELFN_ELASTIC_STORE": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            "ACCELFN_ELASTIC_SLOT": str(slot.rank),
            "ACCELFN_ELASTIC_SIZE": str(self._size),
        }
        program, *arguments = self._command
        try:
            slot.process = start_processes(
                name=role,
                entrypoint=program,
                args={0: tuple(arguments)},
                envs={0: variables},
                logs_specs=slot.logs,
                log_line_prefixes={0: f"[{role}{variables['LOCAL_RANK']}]:"},
            )
        except OSError as error:
            slot.death = slot.failure(1, f"could not be started: {error}")
        self._post(slot, "running" if slot.process else "failed")

    def _attend(self, slot: _Slot) -> None:
        """Look whether the process of a slot has ended or fallen silent."""
        assert slot.process is not None
        result = slot.process.wait(0)
        if result is None:
            self._listen(slot)
        elif result.is_failed():
            self._replace(slot, result.failures[0].exitcode)
        else:
            if not (self._poll() and self._has_left(slot)):
                # The others may wait for it; in a program without elastic training nobody reads this.
                announce_loss(self._board, Loss(slot.name, "ended before the training did"))
            self._post(slot, "done")

    def _listen(self, slot: _Slot) -> None:
        """Kill the process if it has sent no heartbeat for too long: it may be stopped, and never end."""
        now_s = time.monotonic()
        if now_s < slot.listened_s + _LISTEN_S:
            return
        beat = self._board.read(f"beat/{slot.name}")
        slot.silence = listen(slot.silence, beat, now_s - slot.listened_s)
        slot.listened_s = now_s
        if slot.silence.seconds >= self._heartbeat_timeout_s:
            slot.killed_for = f"sent no heartbeat for {slot.silence.seconds:.0f} s"
            self._report(f"rank {slot.rank} has {slot.killed_for}; killing it")
            slot.kill()

    def _replace(self, slot: _Slot, exitcode: int) -> None:
        """Announce the death of a slot's process, and start the next one if there may be one."""
        slot.kill()
        is_over, max_restarts = self._poll(), self._options.max_restarts
        self._has_left(slot)
        slot.death = slot.failure(exitcode, slot.killed_for)
        end = f"{'was' if exitcode < 0 else 'ended'} {describe_exit(exitcode)}"
        announce_loss(self._board, Loss(slot.name, end))
        is_replaced = slot.attempt < max_restarts and not is_over
        self._post(slot, "restarting" if is_replaced else "failed")
        follows = ""
        if is_replaced:
            follows = f"; a replacement starts ({slot.attempt + 1} of {max_restarts})"
        elif not is_over and any(state in ("running", "restarting") for state in self._states()):
            follows = "; the other ranks go on"
        self._report(f"rank {slot.rank} {end}{follows}")
        if is_replaced:
            self._start(slot)

    def _has_left(self, slot: _Slot) -> bool:
        """Return whether the process has returned from the training, if the store has ever said so."""
        if self._over_s and not slot.has_left:
            slot.has_left = self._board.read(f"left/{slot.name}") is not None
        return slot.has_left

    def _poll(self) -> bool:
        """Return whether the training is over, and declare the processes of lost machines dead."""
        if not self._over_s and self._board.read("over") is not None:
            self._over_s = time.monotonic()
        lost = self._machines.lost() if self._machines and self._machine_rank == 0 else {}
        for machine_rank in lost.keys() - self._lost:
            self._lost.add(machine_rank)
            for rank in self._ranks(machine_rank):
                record = self._read(rank)
                if record["state"] not in _ENDED:
                    self._board.post(f"slot/{rank}", json.dumps({**record, "state": "failed"}))
                    loss = Loss(f"{rank}.{record['attempt']}", "was on a machine that is down")
                    announce_loss(self._board, loss)
            self._report(f"the launcher on {lost[machine_rank]} was killed, or the machine is down")
        return bool(self._over_s)

    def _wait_for_the_others(self) -> bool:
        """Wait until all slots of all machines have ended, or the training. Return whether it succeeded.

        The first machine, whose store the others use, then waits until they have read the same.
        """
        while not self._poll() and any(state not in _ENDED for state in self._states()):
            time.sleep(_LISTEN_S)
        succeeded = bool(self._over_s) or all(state == "done" for state in self._states())
        self.say_ended()
        others = {*range(1, self._num_machines)} if self._machine_rank == 0 else set[int]()
        while others:
            self._poll()
            others = {rank for rank in others - self._lost if self._board.read(f"launcher/{rank}") is None}
            time.sleep(self._options.monitor_interval)
        return succeeded

    def _ranks(self, machine_rank: int) -> range:
        return range(machine_rank * self._local_size, (machine_rank + 1) * self._local_size)

    def _post(self, slot: _Slot, state: str) -> None:
        slot.state = state
        record = {"attempt": slot.attempt, "state": state, "pid": slot.pid, "host": socket.gethostname()}
        self._board.post(f"slot/{slot.rank}", json.dumps(record))

    def _read(self, rank: int) -> dict[str, Any]:
        """Read the record of a slot."""
        text = self._board.read(f"slot/{rank}")
        return json.loads(text) if text else {"attempt": 0, "state": "", "pid": 0, "host": ""}

    def _states(self) -> list[str]:
        return [self._read(rank)["state"] for rank in range(self._size)]


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
    return Silence(beat, silence.seconds + min(elapsed_s, 2 * _LISTEN_S))
