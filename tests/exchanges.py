"""Count what a rank exchanges with others: collectives, and texts on the message board."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from accelfn.context import Context, MessageBoard


class Exchanges:
    """What a rank has exchanged.

    Attributes:
        calls: Collectives that it has called.
        sent: Bytes that it has passed to them.
        received: Bytes of other ranks that it has got in gathers.
        posted: Characters that it has posted, by key.
        asked: Characters that it has read, by key; of keys that it has asked for, also in vain.
    """

    def __init__(self) -> None:
        self.calls = self.sent = self.received = 0
        self.posted: dict[str, int] = {}
        self.asked: dict[str, int] = {}

    def board(self, board: MessageBoard) -> MessageBoard:
        """Return a board on which what this rank does is counted."""

        def post(key: str, text: str) -> None:
            self.posted[key] = len(text)
            board.post(key, text)

        def post_once(key: str, text: str) -> str:
            self.posted[key] = len(text)
            return board.post_once(key, text)

        def read(key: str) -> str | None:
            text = board.read(key)
            self.asked[key] = len(text or "")
            return text

        return dataclasses.replace(board, post=post, post_once=post_once, read=read)

    def context(self, ctx: Context) -> Context:
        """Return a context in which what this rank exchanges is counted."""
        seam = ctx.collectives

        def gather(name: str) -> Callable[[torch.Tensor], Any]:
            def counted(message: torch.Tensor) -> Any:
                found = getattr(seam, name)(message)
                self._count(message)
                self.received += message.numel() * (ctx.num_processes - 1)
                return found

            return counted

        def other(name: str) -> Callable[..., Any]:
            def counted(*arguments: Any) -> Any:
                is_heard = name == "broadcast" and arguments[1] != ctx.rank
                self._count(arguments[0][:0] if is_heard else arguments[0])
                return getattr(seam, name)(*arguments)

            return counted

        gathers = {name: gather(name) for name in ("all_gather_bytes", "all_gather")}
        others = {name: other(name) for name in ("all_reduce", "broadcast", "permute", "all_to_all")}
        wrapped: Any = {**gathers, **others, "board": self.board(seam.board)}
        return dataclasses.replace(ctx, collectives=dataclasses.replace(seam, **wrapped))

    def _count(self, message: torch.Tensor) -> None:
        self.calls += 1
        self.sent += message.numel() * message.itemsize
