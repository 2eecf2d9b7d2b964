"""Messages between ranks outside the collectives.

A rank that has failed can't take part in a collective any more, and a rank that waits in one can't be told by
one. Both have the board: what is written there can be read by every rank at any time, and nobody waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed re-exports them untyped

__all__ = ("MessageBoard", "board_within", "store_board")


def _post_nowhere(key: str, text: str) -> None:
    del key, text


def _post_once_nowhere(key: str, text: str) -> str:
    del key
    return text


def _read_nothing(key: str) -> str | None:
    del key


def _close_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBoard:
    """A board that the ranks of one world share. The default is that of a world of one: it keeps nothing.

    What can't be written or read (the board's host has ended) is as if it were not there.

    Attributes:
        post: ``(key, text)``: writes over what stands there.
        post_once: ``(key, text)``: writes unless another rank was first; returns what stands there.
        read: ``(key)``: what stands there, or None.
        close: Lets go of the connection; afterwards the board is empty.
    """

    post: Callable[[str, str], None] = _post_nowhere
    post_once: Callable[[str, str], str] = _post_once_nowhere
    read: Callable[[str], str | None] = _read_nothing
    close: Callable[[], None] = _close_nothing


def store_board(store: Store) -> MessageBoard:
    """Use one of torch's key-value stores, which every world that torch starts has anyway."""
    held = [PrefixStore("accelfn/board", store)]  # emptied by close: the store may own a port

    def post(key: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):
            for part in held:
                part.set(key, text)

    def post_once(key: str, text: str) -> str:
        with contextlib.suppress(RuntimeError):
            for part in held:
                return part.compare_set(key, "", text).decode()
        return text

    def read(key: str) -> str | None:
        with contextlib.suppress(RuntimeError):
            for part in held:
                return part.get(key).decode() if part.check([key]) else None
        return None

    return MessageBoard(post=post, post_once=post_once, read=read, close=held.clear)


def board_within(board: MessageBoard, world: MessageBoard, key: str) -> MessageBoard:
    """Return a board of some ranks of a world, where what the world says under ``key`` can be read too."""

    def read(name: str) -> str | None:
        said = board.read(name)
        return world.read(name) if not said and name == key else said

    return MessageBoard(post=board.post, post_once=board.post_once, read=read, close=board.close)
