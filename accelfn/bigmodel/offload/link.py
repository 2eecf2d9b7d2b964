"""The way of a block's tensors to where they are used: a record of callables."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from accelfn.bigmodel.load.mapped import drop_pages, mapped_from
from accelfn.bigmodel.offload.packing import Packing

__all__ = ("Arrival", "Link", "Worker", "let_pages_go")

T = TypeVar("T")

Arrival: TypeAlias = Callable[[], torch.Tensor]
"""Waits for a transfer, and gives the packed memory on the device: uint8, shape ``(num_bytes,)``.

Each thread that uses the block calls it, one at a time; all get the same memory.
"""


def let_pages_go(tensors: Sequence[torch.Tensor]) -> None:
    """Release the memory of those that are mapped from files.

    Not in a thread of its own: what a program writes to its weights once a pass is over could be lost.
    """
    # Of less than a page nothing can be given back.
    mapped = [one for one in tensors if one.nbytes >= mmap.PAGESIZE and mapped_from(one) is not None]
    if mapped:
        drop_pages(mapped)


def _nothing(tensors: Sequence[torch.Tensor]) -> None:
    """Let a block go: its memory is freed with the last reference to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How tensors come from where they lie at rest to where they are used.

    Attributes:
        device: Where they are used.
        begin: Starts a transfer of a block's tensors, laid out as the packing says, and returns at once; what
            it gives waits for the end. Called by one thread at a time.
        release: Told once the tensors of a block aren't needed any more, with those at rest.
        in_place: The tensors are used where they lie. Then ``begin`` only makes them ready, and nothing waits
            for it.
        needs_pinned: Transfers are faster from pinned memory.
    """

    device: torch.device
    begin: Callable[[Sequence[torch.Tensor], Packing], Arrival]
    release: Callable[[Sequence[torch.Tensor]], None] = _nothing
    in_place: bool = False
    needs_pinned: bool = False


class Worker:
    """A thread of one's own that is started when there is work, also in a process that was forked."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = 0
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run something after what was submitted before."""
        if self._threads is None or self._process != os.getpid():  # a fork leaves the thread behind
            self._threads = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            self._process = os.getpid()
        return self._threads.submit(work)
