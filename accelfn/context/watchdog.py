"""Print where every rank is, before an operation is given up."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from accelfn.context.message_board import MessageBoard

__all__ = ("print_all_stacks", "start_watchdog")

_POLL_S = 0.5
_ANSWERS_S = 2.5


def start_watchdog(board: MessageBoard, rank: int, *, whole_process: bool) -> Callable[[], None]:
    """Start a thread that writes this rank's Python stacks on the board when another rank asks for them.

    Ranks: local; call it on the thread that is the rank.

    Args:
        board: Of the world.
        rank: This rank.
        whole_process: Show all threads of the process; otherwise, where ranks are threads, the calling one.

    Returns:
        Ends the thread.
    """
    done = threading.Event()
    shown = None if whole_process else threading.get_ident()
    board.post(f"watched/{rank}", "yes")
    thread = threading.Thread(
        target=_watch, args=(board, rank, shown, done), name="accelfn watchdog", daemon=True
    )
    thread.start()

    def stop() -> None:
        done.set()
        thread.join(_POLL_S)

    return stop


def print_all_stacks(board: MessageBoard, rank: int, size: int) -> None:
    """Ask every watched rank for its stacks and print them on stderr; nothing where no rank is watched.

    Of several ranks that ask, the first one prints.
    """
    watched = [one for one in range(size) if board.read(f"watched/{one}")]
    if not watched or board.post_once("stacks", str(rank)) != str(rank):
        return
    stacks: dict[int, str] = {}
    end = time.monotonic() + _ANSWERS_S
    while len(stacks) < len(watched) and time.monotonic() < end:
        for one in watched:
            text = board.read(f"stacks/{one}")
            if text:
                stacks[one] = text
        time.sleep(_POLL_S / 10)
    parts = [
        f"--- rank {one} ---\n{stacks.get(one, 'did not answer: it is stopped, or its process has ended')}"
        for one in watched
    ]
    title = "accelfn: an operation across ranks is given up. Where each rank is:"
    print("\n".join([title, *parts]), file=sys.stderr, flush=True)


def _watch(board: MessageBoard, rank: int, shown: int | None, done: threading.Event) -> None:
    while not done.wait(_POLL_S):
        if board.read("stacks"):
            board.post(f"stacks/{rank}", _stacks(shown))
            return


def _stacks(shown: int | None) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage] -- documented
        if ident != own and shown in (None, ident)
    )
