"""Who is in the world: the processes agree on the members of each generation, through a message board.

A generation is a world with fixed members. When one of them is lost, the others join the next generation;
its roster is posted once, so all of them read the same one. The first to join finds out who else does, and
the next one if that one is lost: so any of them may be lost at any time, and what each of the others asks the
board for doesn't grow with their number.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from accelfn.context import EnvironmentPlan, MessageBoard, Threads
from accelfn.context.failure import Loss, append_text, list_texts, losses_from
from accelfn.errors import MissingRankError

_LOOK_S = 0.02
OVER = "over"  # posted when the training has ended


class Member(NamedTuple):
    """A process of the launch.

    Attributes:
        machine: Number of its machine.
        slot: Its number in the launch, which its replacement has too.
        attempt: How often the slot's process was replaced before.
    """

    machine: int
    slot: int
    attempt: int

    @property
    def name(self) -> str:
        """Its name, which no other process of the launch has."""
        return f"{self.slot}.{self.attempt}"


class Roster(NamedTuple):
    """The members of a generation; the rank of each is its position.

    Attributes:
        generation: Its number, from 0.
        members: In the order of their machines and slots.
    """

    generation: int
    members: tuple[Member, ...]


class Waiting(NamedTuple):
    """How long a new generation waits for processes.

    Attributes:
        min_processes: Fewer don't go on.
        settle_s: For members of the generation before that may be busy; they join a later one.
        join_s: For processes to start, until there are ``min_processes``.
        usable: Returns how many of so many processes can work together; the others wait.
    """

    min_processes: int = 1
    settle_s: float = 2.0
    join_s: float = 300.0
    usable: Callable[[int], int] = lambda count: count


def place_in(roster: Roster, me: Member) -> EnvironmentPlan:
    """Return the place of a member in the world of its generation. Pure.

    >>> a, b, d = Member(0, 0, 0), Member(0, 1, 0), Member(1, 3, 0)
    >>> place = place_in(Roster(2, (a, b, d)), d)
    >>> place.rank, place.local_rank, place.local_size, place.node_rank
    (2, 0, 1, 1)
    """
    machines = sorted({member.machine for member in roster.members})
    local = [member for member in roster.members if member.machine == me.machine]
    return EnvironmentPlan(
        launcher="elastic",
        rank=roster.members.index(me),
        size=len(roster.members),
        local_rank=local.index(me),
        local_size=len(local),
        node_rank=machines.index(me.machine),
        num_nodes=len(machines),
    )


def has_begun(board: MessageBoard) -> bool:
    """Return whether there is a world already."""
    return _roster_of(board, 0) is not None


def first_to_go_on(board: MessageBoard, roster: Roster) -> Member:
    """Return the first member that was in the generation before too; the first of all if none was."""
    before = _roster_of(board, roster.generation - 1)
    known = before.members if before is not None else ()
    return next((member for member in roster.members if member in known), roster.members[0])


def can_grow(board: MessageBoard, roster: Roster, size: int, usable: Callable[[int], int]) -> bool:
    """Return whether processes wait with which the generation after ``roster`` would be larger.

    Args:
        board: Of the launch.
        roster: The present generation.
        size: Number of slots of the launch.
        usable: As of :class:`Waiting`.
    """
    if board.read(f"joining/{roster.generation + 1}") is None:
        return False
    lost = {loss.name for loss in losses_from(board, 0)}
    others = set(range(size)) - {member.slot for member in roster.members}
    joined = [one for slot in sorted(others) for one in _joined(board, roster.generation + 1, slot)]
    waiting = [member for member in joined if member.name not in lost]
    return usable(len(roster.members) + len(waiting)) > len(roster.members)


def join_generation(
    board: MessageBoard, threads: Threads, me: Member, last: Roster | None, size: int, waiting: Waiting
) -> Roster | None:
    """Join the next generation, and return its roster when it is complete.

    Args:
        board: Of the launch.
        threads: Of this process.
        me: This process.
        last: The generation that this process was in; None if it has just started.
        size: Number of slots of the launch.
        waiting: For whom to wait.

    Returns:
        The roster; None if the training is over.

    Raises:
        MissingRankError: Too few processes are left, or arrived in time.
    """
    generation = 0 if last is None else last.generation + 1
    while True:
        while board.read(_key(generation)) is not None:  # it was formed without this process
            generation += 1
        append_text(board, f"joining/{generation}/{me.slot}", json.dumps(me))
        board.post(f"joining/{generation}", "yes")
        before = _roster_of(board, generation - 1)
        roster = _form(board, threads, me, generation, before, size, waiting)
        if roster is None or me in roster.members:
            return roster


class Arrivals(NamedTuple):
    """Who has joined a generation that has no roster yet, and for whom it waits.

    Attributes:
        joined: Processes that live; those of the generation before first.
        goes_on: Whether a member of the generation before lives. Then only those are waited for.
        may_form: Whether those who joined may go on without others. Processes that have just started may not,
            while members of the generation before still go on.
        is_complete: Whether all who should come have joined.
        can_grow: Whether further processes may come.
    """

    joined: tuple[Member, ...]
    goes_on: bool
    may_form: bool
    is_complete: bool
    can_grow: bool


def plan_arrivals(
    joined: Iterable[Member], lost: Collection[str], before: Roster | None, slots: Iterable[int]
) -> Arrivals:
    """Find out whether a generation is complete. Pure.

    Args:
        joined: Who has joined it.
        lost: Names of processes that have ended.
        before: The generation before; None for the first.
        slots: Of the launch, in which a process runs or will be started.

    >>> a, b, late = Member(0, 0, 0), Member(0, 1, 0), Member(0, 2, 1)
    >>> plan_arrivals([a], {"1.0"}, Roster(0, (a, b)), {0, 2}).is_complete
    True
    >>> plan_arrivals([late], {"1.0"}, Roster(0, (a, b)), {0, 2}).may_form
    False
    """
    known = before.members if before is not None else ()
    here = {member for member in joined if member.name not in lost}
    ordered = tuple(sorted(here, key=lambda member: (member not in known, member)))
    missing = set(slots) - {member.slot for member in here}
    living = [member for member in known if member.name not in lost]
    return Arrivals(
        joined=ordered,
        goes_on=bool(living),
        may_form=not living or any(member in here for member in living),
        is_complete=all(member in here for member in living) if living else not missing,
        can_grow=bool(missing),
    )


def _form(
    board: MessageBoard,
    threads: Threads,
    me: Member,
    generation: int,
    before: Roster | None,
    size: int,
    waiting: Waiting,
) -> Roster | None:
    """Wait until a generation has a roster, which its leader posts if all who should come are there or late.

    Raises:
        MissingRankError: The leader has given up: too few processes are left, or arrived in time.
    """
    lead = _Lead(board, me, generation)
    joined: dict[int, list[Member]] = {}
    roster: Roster | None = None

    def is_over() -> bool:
        nonlocal roster
        roster = roster or _roster_of(board, generation)
        return roster is not None or board.read(OVER) is not None

    def arrivals() -> Arrivals:
        lost = lead.lost()
        empty = {slot for slot in range(size) if all(one.name in lost for one in joined.get(slot, ()))}
        joined.update({slot: _joined(board, generation, slot) for slot in empty})
        slots = {slot for slot in range(size) if slot not in empty or not _has_ended(board, slot)}
        return plan_arrivals((one for some in joined.values() for one in some), lost, before, slots)

    def is_enough(found: Arrivals) -> bool:
        return waiting.usable(len(found.joined)) >= waiting.min_processes

    def may_settle(found: Arrivals) -> bool:
        return found.goes_on and found.may_form and is_enough(found)

    def is_ready(found: Arrivals) -> bool:
        return found.is_complete and (is_enough(found) or not found.can_grow)

    def look(seconds: float, settles: bool) -> bool:
        if is_over():
            return True
        found = arrivals()
        if is_ready(found) or (may_settle(found) and not settles):
            return True
        time.sleep(min(seconds, _LOOK_S))
        return False

    def follow(seconds: float) -> bool:
        if is_over() or lead.is_open():
            return True
        time.sleep(min(seconds, _LOOK_S))
        return False

    what = f"generation {generation}"
    while not is_over():
        if not lead.claim():
            threads.wait(follow, None, what)
            continue
        settles = may_settle(arrivals())
        patience_s = waiting.settle_s if settles else waiting.join_s
        came = threads.wait(partial(look, settles=settles), patience_s, what)
        found = arrivals()
        if is_over() or (may_settle(found) and not settles and not is_ready(found)):
            continue  # in the second case from now on those who are busy have the time to settle
        if found.may_form and is_enough(found):
            members = sorted(found.joined[: waiting.usable(len(found.joined))])
            board.post_once(_key(generation), json.dumps(members))
        elif found.may_form and (not found.can_grow or not (came or settles)):
            lead.give_up(
                f"run_elastic: {len(found.joined)} processes are left, and min_processes is "
                f"{waiting.min_processes}. Start the program again, allow more replacements with "
                "--max_restarts, or lower min_processes."
            )
    return roster


class _Lead:
    """Who leads those who join a generation: the first of them that lives."""

    def __init__(self, board: MessageBoard, me: Member, generation: int) -> None:
        self._board, self._me, self._generation = board, me, generation
        self._losses: list[Loss] = []
        self._number = 0  # of the leader, among those that were lost before it
        while self._given_up() is not None:  # before this process came
            self._number += 1
        self._leader = self._choose()

    def lost(self) -> set[str]:
        """Return the names of processes that have ended."""
        self._losses += losses_from(self._board, len(self._losses))
        return {loss.name for loss in self._losses}

    def claim(self) -> bool:
        """Return whether this process leads, in place of one that was lost.

        Raises:
            MissingRankError: The leader has given up.
        """
        while self._leader != self._me:
            is_lost = self._leader.name in self.lost()  # read first: it posts why it gives up, and then ends
            why = self._given_up()
            if why is not None:
                raise MissingRankError(why)
            if not is_lost:
                return False
            self._number += 1
            self._leader = self._choose()
        return True

    def is_open(self) -> bool:
        """Return whether the leader was lost, or has given up."""
        return self._leader.name in self.lost() or self._given_up() is not None

    def give_up(self, why: str) -> None:
        """Raise an error, on all processes that have joined."""
        self._board.post(self._key("gave up"), why)
        raise MissingRankError(why)

    def _choose(self) -> Member:
        return Member(*json.loads(self._board.post_once(self._key("leader"), json.dumps(self._me))))

    def _given_up(self) -> str | None:
        return self._board.read(self._key("gave up"))

    def _key(self, what: str) -> str:
        return f"{what}/{self._generation}/{self._number}"


# --- the members of a generation -------------------------------------------------------------------


def meet(board: MessageBoard, threads: Threads, me: Member, roster: Roster) -> None:
    """Wait until all members are about to connect, since nothing ends that when one of them is lost.

    Raises:
        MissingRankError: A member was lost.
    """
    losses: list[Loss] = []

    def find_error() -> MissingRankError | None:
        losses.extend(losses_from(board, len(losses)))
        names = {member.name for member in roster.members}
        lost = next((loss for loss in losses if loss.name in names), None)
        return None if lost is None else MissingRankError(f"process {lost.name} {lost.why}")

    each, together = f"here/{roster.generation}", f"all here/{roster.generation}"
    _wait_for_all(board, threads, me, roster, each, together, find_error)


def finish(
    board: MessageBoard,
    threads: Threads,
    me: Member,
    roster: Roster,
    find_error: Callable[[], Exception | None],
) -> None:
    """Wait until the training has returned on all members, and end the run.

    Args:
        board: Of the launch.
        threads: Of this process.
        me: This process.
        roster: The present generation.
        find_error: Returns the error that a member has failed with, or that it was lost, if any.
    """
    _wait_for_all(board, threads, me, roster, f"done/{roster.generation}", OVER, find_error)


def _wait_for_all(
    board: MessageBoard,
    threads: Threads,
    me: Member,
    roster: Roster,
    each: str,
    together: str,
    find_error: Callable[[], Exception | None],
) -> None:
    """Post under ``each``, and wait until all members have, which only the first one looks for."""
    error: Exception | None = None

    def look(seconds: float, key: str) -> bool:
        nonlocal error
        if board.read(key) is not None:
            return True
        error = find_error()
        if error is None:
            time.sleep(min(seconds, _LOOK_S))
        return error is not None

    board.post(f"{each}/{me.slot}", "yes")
    is_first = me == roster.members[0]
    for key in [f"{each}/{member.slot}" for member in roster.members] if is_first else [together]:
        threads.wait(partial(look, key=key), None, key)
        if error is not None:
            raise error
    if is_first:
        board.post(together, "yes")


def _has_ended(board: MessageBoard, slot: int) -> bool:
    """Return whether no process of a slot runs, nor will."""
    text = board.read(f"slot/{slot}")
    state: Mapping[str, object] = json.loads(text) if text else {}
    return state.get("state") in ("failed", "done")


def _joined(board: MessageBoard, generation: int, slot: int) -> list[Member]:
    """Return the processes of a slot that have joined a generation: usually one, or none yet."""
    return [Member(*json.loads(text)) for text in list_texts(board, f"joining/{generation}/{slot}", 0)]


def _key(generation: int) -> str:
    return f"roster/{generation}"


def _roster_of(board: MessageBoard, generation: int) -> Roster | None:
    text = board.read(_key(generation)) if generation >= 0 else None
    return None if text is None else Roster(generation, tuple(Member(*one) for one in json.loads(text)))
