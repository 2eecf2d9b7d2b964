"""Run a training function that survives the loss of ranks."""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's are untyped
from typing_extensions import Unpack

from accelfn.checkpoint import load_latest
from accelfn.config import read_settings
from accelfn.context import (
    Context,
    EnvironmentPlan,
    Meeting,
    MessageBoard,
    close_context,
    close_gloo_connections,
    init_context,
    join_meeting,
    news,
    plan_context,
    publish,
    store_board,
    text_of,
)
from accelfn.context.failure import (
    Loss,
    announce_loss,
    losses_from,
    post_failure,
)
from accelfn.context.options import ContextOptions, merge_settings
from accelfn.elastic.assemble import restore_snapshot
from accelfn.elastic.membership import (
    Member,
    Roster,
    Waiting,
    can_grow,
    finish,
    first_to_go_on,
    has_begun,
    join_generation,
    meet,
    place_in,
)
from accelfn.elastic.memory import CONNECT, Memory, Regroup
from accelfn.errors import (
    CollectiveTimeoutError,
    ConfigurationError,
    DistributedError,
    MissingRankError,
    NotAvailableError,
    RemoteRankError,
)

S = TypeVar("S")
T = TypeVar("T")

_BEAT_S = 0.5
_LOOK_S = 0.1
# An error may be the first sign of a loss, which the launcher of a busy machine notices within this time.
_BLAME_S = 5.0


class Seat(NamedTuple):
    """What the launcher tells a process.

    Attributes:
        store: Address of the store of the launch.
        size: Number of slots.
        device_index: Of its accelerator.
        me: The process.
    """

    store: tuple[str, int]
    size: int
    device_index: int
    me: Member


def read_seat(environment: Mapping[str, str]) -> Seat | None:
    """Return what ``accelfn launch --elastic`` tells a process; None without it. Pure.

    Raises:
        ConfigurationError: Another launcher started several processes.
    """
    store = environment.get("ACCELFN_ELASTIC_STORE")
    if not store:
        size = environment.get("WORLD_SIZE", "1")
        if size != "1":
            raise ConfigurationError(
                f"run_elastic: {size} processes were started by a launcher that doesn't keep the others when "
                "one is lost. Start the program with accelfn launch --elastic."
            )
        return None
    host, _, port = store.rpartition(":")
    return Seat(
        store=(host.strip("[]"), int(port)),
        size=int(environment["ACCELFN_ELASTIC_SIZE"]),
        device_index=int(environment["LOCAL_RANK"]),
        me=Member(
            machine=int(environment["GROUP_RANK"]),
            slot=int(environment["ACCELFN_ELASTIC_SLOT"]),
            attempt=int(environment["TORCHELASTIC_RESTART_COUNT"]),
        ),
    )


def run_elastic(
    train: Callable[[Context, S], T],
    make_state: Callable[[Context], S],
    min_processes: int = 1,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    settle_timeout: float = 2.0,
    join_timeout: float = 300.0,
    **options: Unpack[ContextOptions],
) -> T | None:
    """Run ``train(ctx, state)`` on all ranks; if some are lost, the others go on with what they remember.

    A rank is lost if its process dies, stops answering, or raises. The operations of the other ranks end with
    an error by name, which leaves ``train``. Their processes aren't restarted: they form a new world, take
    the newest snapshot (:func:`accelfn.snapshot`) that they hold whole, and call ``train`` again with it.
    Processes that the launcher starts instead (``--max_restarts``) join at a later snapshot. Samples come in
    the same global order, so with ``reduction="canonical"`` (exact mode) the final weights have the same bits
    as those of a run without losses.

    If no snapshot is whole, because too many ranks were lost at once or the program has just been started,
    the newest of ``checkpoints`` is loaded; without one, the run starts from the state of ``make_state``. One
    rank reports this on stderr.

    Ranks: every process of ``accelfn launch --elastic``. In a program without a launcher, ``train`` runs once
    in a world of one.

    Args:
        train: The training loop, from the state on; it may be called several times. It should let exceptions
            about other ranks pass.
        make_state: Makes the state for a context: a tree of prepared models, optimizers and loaders, and
            records such as the scaler's, as for :func:`accelfn.save_state`. A snapshot is loaded into it. A
            process that joins later first calls it in a world of one, so that the others don't wait for what
            takes long the first time.
        min_processes: With fewer processes the run waits for replacements, or ends if none come.
        checkpoints: A checkpoint, or a directory of checkpoints, that ``train`` writes.
        settle_timeout: How long a new world waits for members of the one before that are busy, in seconds;
            they join later.
        join_timeout: How long processes wait until ``min_processes`` are there, in seconds.
        **options: Keyword arguments of :func:`accelfn.init_context`.

    Returns:
        The result of ``train``, when it has returned on all ranks; None for a process that was started when
        the training was over.

    Raises:
        ConfigurationError: Another launcher started several processes, or torch.distributed is initialised;
            ``min_processes`` is above 1 without the launcher; a timeout isn't positive; this program has
            called it before; or as of ``init_context``, for the number of processes that was started.
        NotAvailableError: An engine such as DeepSpeed trains.
        MissingRankError: Fewer than ``min_processes`` are left.
        DistributedError: An operation fails again for the same members at the same step, so none is lost.
        Exception: What ``train`` or ``make_state`` raised on this rank. The process should end with it.

    >>> import accelfn as af
    >>> def train(ctx, state):
    ...     while state["step"] < 3:
    ...         state["step"] += 1
    ...         af.snapshot(ctx, state)
    ...     return state["step"]
    >>> run_elastic(train, lambda ctx: {"step": 0}, cpu=True)
    3
    """
    if min_processes < 1:
        raise ConfigurationError(f"run_elastic: min_processes must be at least 1, got {min_processes}.")
    for name, seconds in (("settle_timeout", settle_timeout), ("join_timeout", join_timeout)):
        if not 0 < seconds < math.inf:
            raise ConfigurationError(
                f"run_elastic: {name} must be a positive number of seconds, got {seconds}."
            )
    seat = read_seat(os.environ)
    if seat is None:
        if min_processes > 1:
            raise ConfigurationError(
                f"run_elastic: min_processes is {min_processes}, but this program is one process. Start it "
                "with accelfn launch --elastic."
            )
        with init_context(**options) as ctx:
            return train(ctx, _start(ctx, make_state, checkpoints))
    planned = plan_context(seat.size, **_with_settings(options))
    if planned.strategy.engine is not None:
        raise NotAvailableError(
            f"run_elastic: {planned.strategy.engine} keeps state outside of torch's objects, which can't be "
            "remembered. Use replicas or FSDP2, or checkpoints and accelfn launch --max_restarts."
        )
    usable = _usable_by(options)
    waiting = Waiting(min_processes, settle_timeout, join_timeout, usable)
    process = _Process(seat, train, make_state, checkpoints, waiting, options)
    with process.watching(), without_older_objects():
        return process.run()


def _start(ctx: Context, make_state: Callable[[Context], S], checkpoints: str | os.PathLike[str] | None) -> S:
    """Return the state of the newest checkpoint, or a new one."""
    state = make_state(ctx)
    loaded = None if checkpoints is None else load_latest(ctx, checkpoints, state)
    return state if loaded is None else loaded


def _with_settings(options: ContextOptions) -> ContextOptions:
    return merge_settings(options, read_settings(dict(os.environ)))


def _usable_by(options: ContextOptions) -> Callable[[int], int]:
    """Return a function for how many of so many processes the options allow, by the mesh or exact mode."""
    merged = _with_settings(options)

    def fits(size: int) -> bool:
        try:
            plan_context(size, **merged)
        except ConfigurationError:
            return False
        return True

    return lambda count: next((size for size in range(count, 0, -1) if fits(size)), 0)


class _Process(Generic[S, T]):
    """A process of an elastic run, with the arguments of :func:`run_elastic`.

    Attributes:
        roster: Of the present generation; None before the first.
        world: The board of the present world, and this process's rank.
    """

    def __init__(
        self,
        seat: Seat,
        train: Callable[[Context, S], T],
        make_state: Callable[[Context], S],
        checkpoints: str | os.PathLike[str] | None,
        waiting: Waiting,
        options: ContextOptions,
    ) -> None:
        self.seat, self._waiting, self._options = seat, waiting, options
        self._train, self._make_state, self._checkpoints = train, make_state, checkpoints
        # A connection of its own for worlds: while one waits in it, heartbeats go on in the other.
        self.store: Store = self._connect()
        self.board = store_board(PrefixStore("accelfn/elastic", self._connect()))
        self._threads = Context().collectives.threads
        self.roster: Roster | None = None
        self.world: MessageBoard | None = None
        self.memory = Memory(self._has_newcomers)
        self._num_losses = 0  # that have led to the worlds so far
        self._cause = "the program has started"  # or what has ended the last world
        self._results: list[T] = []  # of the training function, once it has returned

    def _connect(self) -> Store:
        patience = timedelta(seconds=self._waiting.join_s)
        return TCPStore(*self.seat.store, None, False, patience, wait_for_workers=False)

    def run(self) -> T | None:
        """Run generation after generation until one completes the training."""
        if self.board.read(f"ran/{self.seat.me.name}") is not None:
            raise ConfigurationError(
                "run_elastic: this program has called it before, and a launch is one elastic run. Put what "
                "follows into the same training function, or start another launch."
            )
        self.board.post(f"ran/{self.seat.me.name}", "yes")
        since = time.monotonic()
        failed: tuple[object, int] | None = None
        if has_begun(self.board) and self._waiting.usable(1):
            self._rehearse()
        while True:
            self.roster = join_generation(
                self.board, self._threads, self.seat.me, self.roster, self.seat.size, self._waiting
            )
            if self.roster is None:
                return self._results[0] if self._results else None
            try:
                return self._run_generation(since)
            except (Exception, Regroup) as error:
                since = time.monotonic()
                before, failed = failed, (self.roster.members, self.memory.step)
                # The same members at the same step: no one is lost, and it would go on for ever.
                is_repeated = failed == before and not isinstance(error, Regroup)
                if is_repeated or not self._is_loss(error):
                    announce_loss(self.board, Loss(self.seat.me.name, f"raised {_describe(error)}"))
                    raise
                self._cause = "processes have joined" if isinstance(error, Regroup) else _describe(error)
                # Frames hold the models of the world that is over.
                traceback.clear_frames(error.__traceback__)
            gc.collect()

    def _run_generation(self, since: float) -> T:
        """Open the world of the present generation, train in it, and wait for its other members."""
        assert self.roster is not None
        with self._opened() as ctx:
            result = self._train(ctx, self._state(ctx, since))
            ctx.world.background.settle()  # its last save belongs to the training
            self._results = [result]
            seam = ctx.collectives
            find_error = partial(news, seam.board, seam.call_log, ctx.rank)
            finish(self.board, self._threads, self.seat.me, self.roster, find_error)
            return result

    def _rehearse(self) -> None:
        """Make a state in a world of one, and drop it.

        The first one of a process takes seconds, for imports and devices, in which the others would wait.
        """
        store = PrefixStore(f"accelfn/elastic/rehearsal/{self.seat.me.name}", self.store)
        place = EnvironmentPlan(launcher="elastic")
        with join_meeting(Meeting(place, store, self.seat.device_index, CONNECT), self._options) as ctx:
            self._make_state(ctx)
        gc.collect()

    @contextmanager
    def _opened(self) -> Generator[Context]:
        """Open the world of the present generation, and close it; tell its other ranks if this one fails."""
        roster = self.roster
        assert roster is not None
        meet(self.board, self._threads, self.seat.me, roster)
        store = PrefixStore(f"accelfn/elastic/world/{roster.generation}", self.store)
        place = place_in(roster, self.seat.me)
        try:
            ctx = join_meeting(Meeting(place, store, self.seat.device_index, CONNECT), self._options)
        except DistributedError as error:
            if not roster.generation:
                raise
            raise MissingRankError(
                f"run_elastic: a member of the new world could not be reached: {error}"
            ) from error
        self.world = ctx.collectives.board
        hidden: tuple[type[Exception], ...] = ()
        try:
            self.memory.enter(ctx, roster.generation)
            yield ctx
        except Exception as error:
            publish(ctx.collectives.board, ctx.collectives.call_log, ctx.rank, error)
            close_gloo_connections([ctx.world.group, *(() if ctx.mesh is None else ctx.mesh.groups())])
            hidden = (Exception,)  # of a background save that could not be completed
            raise
        finally:
            self.world = None
            self.memory.leave()
            with contextlib.suppress(*hidden):
                close_context(ctx)

    def _state(self, ctx: Context, since: float) -> S:
        """Return the state to go on from, and keep it in memory."""
        assert self.roster is not None
        state = self._make_state(ctx)
        found = restore_snapshot(ctx, self.memory, state)
        origin = f"step {self.memory.step} in memory"
        if found is None:
            self.memory.step = 0
            where = self._checkpoints
            found = None if where is None else load_latest(ctx, where, state)
            origin = "the first state" if found is None else f"the newest checkpoint of {where}"
        why = self._why()
        # Not a process that has just started: its own start isn't a pause of the others.
        is_news = self.roster.generation > 0 or found is not None
        if is_news and self.seat.me == first_to_go_on(self.board, self.roster):
            count = "1 rank goes" if ctx.num_processes == 1 else f"{ctx.num_processes} ranks go"
            _print(f"{count} on from {origin} after {time.monotonic() - since:.1f} s; {why}")
        state = state if found is None else found
        self.memory.take(ctx, state)
        return state

    def _why(self) -> str:
        """Describe the losses since the last call, or else what has ended the last world."""
        losses = losses_from(self.board, self._num_losses)
        self._num_losses += len(losses)
        return "; ".join(f"process {loss.name} {loss.why}" for loss in losses) or self._cause

    # --- losses --------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Generator[None]:
        """Show that this process lives, and end the operations of a world that has lost a member.

        The heartbeats go on until the program ends: the launcher waits for what follows the training, such as
        a last save, but not for a process that is stuck.
        """
        beating, watching = threading.Event(), threading.Event()
        heart = threading.Thread(
            target=_beat, args=(self.board, self.seat.me.name, beating), name="accelfn heartbeat", daemon=True
        )
        watcher = threading.Thread(target=self._watch, args=(watching,), name="accelfn elastic", daemon=True)
        heart.start()
        watcher.start()

        def end() -> None:
            beating.set()
            heart.join()  # a thread in the store's C++ code must not outlive the interpreter

        atexit.register(end)
        try:
            yield
        finally:
            watching.set()
            watcher.join()
        self.board.post(f"left/{self.seat.me.name}", "yes")

    def _watch(self, done: threading.Event) -> None:
        seen = 0
        lost: dict[str, Loss] = {}
        while not done.wait(_LOOK_S):
            new = losses_from(self.board, seen)
            seen += len(new)
            lost.update({loss.name: loss for loss in new})
            roster, world = self.roster, self.world
            for rank, member in enumerate(roster.members if roster is not None and world is not None else ()):
                if member.name in lost and world is not None:
                    text = f"rank {rank} was lost: process {member.name} {lost[member.name].why}."
                    post_failure(world, rank, MissingRankError(text))

    def _has_newcomers(self) -> bool:
        # A snapshot tells all ranks what the first of them finds.
        if self.roster is None or self.seat.me != self.roster.members[0]:
            return False
        return can_grow(self.board, self.roster, self.seat.size, self._waiting.usable)

    def _is_loss(self, error: BaseException) -> bool:
        """Return whether an error comes from the loss of another member, rather than from this process."""
        if isinstance(error, Regroup | MissingRankError | RemoteRankError | CollectiveTimeoutError):
            return True
        members = {member.name for member in self.roster.members} if self.roster is not None else set[str]()
        end = time.monotonic() + _BLAME_S
        while time.monotonic() < end:
            if any(loss.name in members for loss in losses_from(self.board, 0)):
                return True
            time.sleep(_LOOK_S)
        return False


def _beat(board: MessageBoard, name: str, done: threading.Event) -> None:
    number = 0
    while True:
        number += 1
        board.post(f"beat/{name}", str(number))
        if done.wait(_BEAT_S):
            return


@contextmanager
def without_older_objects() -> Generator[None]:
    """Leave what exists already out of garbage collections in the block: they would make pauses longer."""
    freezes = not gc.get_freeze_count()  # otherwise the program does so itself
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error).partition(chr(10))[0]}"


def _print(text: str) -> None:
    print(f"accelfn: {text}", file=sys.stderr, flush=True)
