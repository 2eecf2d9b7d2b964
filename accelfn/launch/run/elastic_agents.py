"""Run elastic training: one of torch's agents for each process of this machine, and messages about them all.

torch's agent restarts all of its processes when one fails. So each process has an agent of its own, in a
thread, that restarts only this process. The others go on, and learn of it from the board of all machines:

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
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed's are untyped
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    PContext,
    Std,
    start_processes,  # pyright: ignore[reportUnknownVariableType] -- of functions without types
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from accelfn.context.failure import Loss, announce_loss, store_board
from accelfn.context.rendezvous import serve_store
from accelfn.launch.run.machines import Machines
from accelfn.launch.run.slots import (
    LISTEN_S,
    RUN_ID,
    Silence,
    Slot,
    describe_death,
    describe_end,
    listen,
    plan_slots,
    plan_variables,
)

_POLL_S = 0.1
# When the training is over, time for processes that haven't returned from it, before they get a signal.
_GRACE_S = 5.0
_ENDED = ("done", "failed")


class Death(NamedTuple):
    """How the last process of a slot failed.

    Attributes:
        rank: Of the slot.
        attempt: Number of processes that the slot had before.
        exitcode: As in ``subprocess``: negative for a signal.
        time_s: Time of the death.
        text: Why the launcher killed it; empty if it didn't.
    """

    rank: int
    attempt: int
    exitcode: int
    time_s: float
    text: str


class Outcome(NamedTuple):
    """How elastic training ended.

    Attributes:
        succeeded: Whether all processes of all machines have ended with status 0, or the training is over and
            no process of this machine has failed after it had returned from it.
        deaths: The last one of each slot of this machine whose last process failed; only those after the
            return from the training, if there are any.
    """

    succeeded: bool
    deaths: tuple[Death, ...]


def run_agents(
    options: Any,
    command: Sequence[str],
    *,
    heartbeat_timeout_s: float,
    machines: Machines | None,
    stop_signal: Callable[[], int],
    report: Callable[[str], None],
) -> Outcome:
    """Start the processes of this machine, and replace those that fail until the training is over.

    Effect: starts processes and threads, and on the only machine a store.

    Args:
        options: torchrun's, parsed. The endpoint of the rendezvous is the address of the store.
        command: A program and its arguments.
        heartbeat_timeout_s: A process that sent heartbeats, and then none for this time, is killed.
        machines: The other machines; None if there are none.
        stop_signal: Returns the signal with which to stop the processes; 0 to go on.
        report: Prints a message.

    Raises:
        Exception: A process could not be started, and no other has ended the training.
    """
    slots = plan_slots(int(options.nnodes), int(options.nproc_per_node), options.node_rank)
    host, _, port = str(options.rdzv_endpoint).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    store = machines.store if machines else serve_store(host, int(port))
    training = _Training(store, slots, heartbeat_timeout_s, machines, stop_signal, report)
    os.makedirs(options.log_dir, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f"{RUN_ID}_", dir=options.log_dir)
    agents = [
        _SlotAgent(
            training,
            slot,
            WorkerSpec(
                role=options.role,
                local_world_size=1,
                rdzv_handler=_SlotRendezvous(training, slot, host, store.port),
                entrypoint=command[0],
                max_restarts=options.max_restarts,
                monitor_interval=options.monitor_interval,
            ),
            command,
            _SlotLogs(folder, slot, Std.from_str(options.redirects), Std.from_str(options.tee)),
            getattr(options, "shutdown_timeout", None) or 30,
        )
        for slot in slots
    ]
    threads = [threading.Thread(target=agent.attend, daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        training.poll()
        time.sleep(_POLL_S)
    succeeded = training.wait_for_the_others()
    errors = [agent.error for agent in agents if agent.error is not None]
    if errors and not succeeded and not stop_signal():
        raise errors[0]
    late = tuple(agent.death for agent in agents if agent.death is not None and agent.failed_late)
    deaths = late or tuple(agent.death for agent in agents if agent.death is not None)
    return Outcome(succeeded and not late, deaths)


class _Training:
    """What the agents of this machine share: the board, and when to stop.

    Attributes:
        board: Of all machines.
        over_s: When the end of the training was read; 0.0 before.
    """

    def __init__(
        self,
        store: Store,
        slots: Sequence[Slot],
        heartbeat_timeout_s: float,
        machines: Machines | None,
        stop_signal: Callable[[], int],
        report: Callable[[str], None],
    ) -> None:
        self.store = store
        self.board = store_board(PrefixStore("accelfn/elastic", store))
        self.heartbeat_timeout_s, self.stop_signal, self.report = heartbeat_timeout_s, stop_signal, report
        self.over_s = 0.0
        self._machines = machines
        self._machine_rank, self._size, self._local_size = slots[0].machine_rank, slots[0].size, len(slots)
        self._lost: set[int] = set()
        self._lock = threading.Lock()  # the agent of each slot polls

    def poll(self) -> bool:
        """Read whether the training is over, and declare the processes of lost machines dead."""
        if not self.over_s and self.board.read("over") is not None:
            self.over_s = time.monotonic()
        lost = self._machines.lost() if self._machines and self._machine_rank == 0 else {}
        with self._lock:
            new = lost.keys() - self._lost
            self._lost |= new
        for machine_rank in new:
            first = machine_rank * self._local_size
            for rank in range(first, first + self._local_size):
                record = self.read(rank)
                if record["state"] not in _ENDED:
                    self.post(rank, {**record, "state": "failed"})
                    loss = Loss(f"{rank}.{record['attempt']}", "was on a machine that is down")
                    announce_loss(self.board, loss)
            self.report(f"the launcher on {lost[machine_rank]} was killed, or the machine is down")
        return bool(self.over_s)

    def post(self, rank: int, record: Mapping[str, Any]) -> None:
        """Write the record of a slot."""
        self.board.post(f"slot/{rank}", json.dumps(record))

    def read(self, rank: int) -> dict[str, Any]:
        """Return the record of a slot."""
        text = self.board.read(f"slot/{rank}")
        return json.loads(text) if text else {"attempt": 0, "state": "", "pid": 0, "host": ""}

    def is_any_alive(self, *, but: int) -> bool:
        """Return whether a process other than that of a rank runs, or will be restarted."""
        return any(
            self.read(rank)["state"] in ("running", "restarting") for rank in {*range(self._size)} - {but}
        )

    def wait_for_the_others(self) -> bool:
        """Wait until all slots of all machines have ended, or the training. Return whether it succeeded.

        The first machine, whose store the others use, then waits until they have read the same.
        """
        while True:
            is_over = self.poll()
            states = [self.read(rank)["state"] for rank in range(self._size)]
            if is_over or self.stop_signal() or all(state in _ENDED for state in states):
                break
            time.sleep(LISTEN_S)
        self.board.post(f"launcher/{self._machine_rank}", "ended")
        others = {*range(1, self._size // self._local_size)} if self._machine_rank == 0 else set[int]()
        while others and not self.stop_signal():
            self.poll()
            others = {rank for rank in others - self._lost if self.board.read(f"launcher/{rank}") is None}
            time.sleep(_POLL_S)
        return is_over or all(state == "done" for state in states)


class _SlotAgent(SimpleElasticAgent):
    """torch's agent for the process of one slot.

    Attributes:
        death: Of the last process, if it failed.
        failed_late: Whether that was after it had returned from the training.
        error: Why a process could not be started.
    """

    def __init__(
        self,
        training: _Training,
        slot: Slot,
        spec: WorkerSpec,
        command: Sequence[str],
        logs: LogsSpecs,
        stop_timeout_s: int,
    ) -> None:
        super().__init__(spec)
        self._training, self._slot, self._command, self._logs = training, slot, command, logs
        self._stop_timeout_s, self._max_restarts = stop_timeout_s, spec.max_restarts
        self._processes: PContext | None = None
        self._state = ""
        self._silence, self._listened_s = Silence(), 0.0
        self.death: Death | None = None
        self.failed_late = False
        self._left, self._killed_for = False, ""
        self.error: Exception | None = None

    def attend(self) -> None:
        """Run the processes of the slot until none is left to start."""
        try:
            self.run()  # pyright: ignore[reportUnknownMemberType] -- decorated without types
        except SignalException:
            pass  # by _monitor_workers
        except Exception as error:  # noqa: BLE001 -- raised by run_agents
            self.error = error
        if self._state not in _ENDED:
            self._post("failed")

    @property
    def _attempt(self) -> int:
        return self._max_restarts - self._remaining_restarts

    @property
    def _name(self) -> str:
        return f"{self._slot.rank}.{self._attempt}"

    @property
    def _pid(self) -> int:
        return self._processes.pids()[0] if self._processes else 0

    def _post(self, state: str) -> None:
        self._state = state
        host = socket.gethostname()
        self._training.post(
            self._slot.rank, {"attempt": self._attempt, "state": state, "pid": self._pid, "host": host}
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        role, slot = worker_group.spec.role, self._slot
        variables = plan_variables(
            slot,
            attempt=self._attempt,
            max_restarts=self._max_restarts,
            host=str(worker_group.master_addr),
            port=int(worker_group.master_port or 0),
        )
        variables["ROLE_NAME"] = role
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        self.death, self._left, self._killed_for = None, False, ""
        self._silence, self._listened_s = Silence(), time.monotonic()
        program, *arguments = self._command
        self._processes = start_processes(
            name=role,
            entrypoint=program,
            args={0: tuple(arguments)},
            envs={0: variables},
            logs_specs=self._logs,
            log_line_prefixes={0: f"[{role}{slot.local_rank}]:"},
        )
        self._post("running")
        return {0: self._pid}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        training = self._training
        number = training.stop_signal()
        if number:
            raise SignalException("the launch was stopped", signal.Signals(number))
        has_left = self._has_left()
        if training.over_s and time.monotonic() > training.over_s + _GRACE_S and not has_left:
            raise RendezvousGracefulExitError("the training is over")
        result = self._processes.wait(0) if self._processes else None
        if result is None:
            self._listen()
            return RunResult(state=WorkerState.HEALTHY)
        if result.is_failed():
            self._record_death(result.failures[0].exitcode)
            return RunResult(state=WorkerState.FAILED, failures=result.failures)
        if not (training.poll() and self._has_left()):
            # The others may wait for it; in a program without elastic training nobody reads this.
            announce_loss(training.board, Loss(self._name, "ended before the training did"))
        self._post("done")
        return RunResult(state=WorkerState.SUCCEEDED, return_values=result.return_values)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._processes:
            self._processes.close(death_sig, self._stop_timeout_s)

    def _listen(self) -> None:
        """Kill the process if it has sent no heartbeat for too long: it may be stopped, and never end."""
        now_s, training, rank = time.monotonic(), self._training, self._slot.rank
        if now_s < self._listened_s + LISTEN_S:
            return
        beat = training.board.read(f"beat/{self._name}")
        self._silence = listen(self._silence, beat, now_s - self._listened_s)
        self._listened_s = now_s
        if self._silence.seconds >= training.heartbeat_timeout_s:
            self._killed_for = f"sent no heartbeat for {self._silence.seconds:.0f} s"
            training.report(f"rank {rank} has {self._killed_for}; killing it")
            self._kill()

    def _record_death(self, exitcode: int) -> None:
        training, rank = self._training, self._slot.rank
        self.death = Death(rank, self._attempt, exitcode, time.time(), self._killed_for)
        self._kill()
        is_over, follows = training.poll(), ""
        self.failed_late = self._has_left()
        announce_loss(training.board, Loss(self._name, describe_end(exitcode)))
        if self._remaining_restarts and not is_over:
            self._post("restarting")
            follows = f"a replacement starts ({self._attempt + 1} of {self._max_restarts})"
        else:
            self._post("failed")
            if not is_over and training.is_any_alive(but=rank):
                follows = "the other ranks go on"
        training.report(describe_death(rank, exitcode, follows))

    def _has_left(self) -> bool:
        """Return whether the process has returned from the training, as far as the store has ever said."""
        if self._training.over_s and not self._left:
            self._left = self._training.board.read(f"left/{self._name}") is not None
        return self._left

    def _kill(self) -> None:
        """Kill the process and its children, which may hold the device that its replacement needs."""
        assert self._processes is not None
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)


class _SlotRendezvous(RendezvousHandler):
    """The rendezvous of an agent with itself, which is closed when the training is over."""

    def __init__(self, training: _Training, slot: Slot, host: str, port: int) -> None:
        self._training = training
        self._store = PrefixStore(f"accelfn/agent/{slot.rank}", training.store)
        self._address = RendezvousStoreInfo(host, port)

    def get_backend(self) -> str:
        return "accelfn"

    def get_run_id(self) -> str:
        return RUN_ID

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self.is_closed():
            raise RendezvousGracefulExitError("the training is over")
        return RendezvousInfo(self._store, 0, 1, self._address)

    def is_closed(self) -> bool:
        return self._training.poll()

    def set_closed(self) -> None:
        self._training.board.post("over", "")

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class _SlotLogs(LogsSpecs):
    """The files of a slot, in the folders that torchrun uses: ``attempt_<number>/<local rank>``."""

    def __init__(
        self, folder: str, slot: Slot, redirects: Std | dict[int, Std], tee: Std | dict[int, Std]
    ) -> None:
        super().__init__(folder, redirects, tee)
        self._folder, self._slot = folder, slot
        chosen = (
            each if isinstance(each, Std) else each.get(slot.local_rank, Std.NONE)
            for each in (redirects, tee)
        )
        self._written, self._shown = chosen

    @property
    def root_log_dir(self) -> str:
        return self._folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
        folder = os.path.join(self._folder, f"attempt_{attempt}", str(self._slot.local_rank))
        os.makedirs(folder)
        envs[0]["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")
        files = {
            std: os.path.join(folder, f"{name}.log")
            for std, name in ((Std.OUT, "stdout"), (Std.ERR, "stderr"))
        }
        written = {
            std: {0: file if std & (self._written | self._shown) else ""} for std, file in files.items()
        }
        shown = {std: {0: file} if std & self._shown else {} for std, file in files.items()}
        return LogsDest(
            stdouts=written[Std.OUT],
            stderrs=written[Std.ERR],
            tee_stdouts=shown[Std.OUT],
            tee_stderrs=shown[Std.ERR],
            error_files={0: envs[0]["TORCHELASTIC_ERROR_FILE"]},
        )
