"""Random numbers that are drawn while a batch is made: keyed by its place, apart from the program's own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from accelfn.data.signals import begin_reading

__all__ = (
    "RandomStates",
    "drawing_apart",
    "random_states",
    "read_apart",
    "restore_random_states",
    "seed_from",
)

T = TypeVar("T")


class RandomStates(NamedTuple):
    """States of the generators of a process: Python's, torch's on the CPU, and numpy's where it is in use."""

    python: Any
    torch: torch.Tensor
    numpy: Any


def random_states() -> RandomStates:
    """Return where the generators of this process are."""
    # numpy imports this module when it is first asked for. Until then there is nothing that could be lost.
    numpy = sys.modules.get("numpy.random")
    return RandomStates(
        random.getstate(), torch.default_generator.get_state(), None if numpy is None else numpy.get_state()
    )


def restore_random_states(states: RandomStates) -> None:
    """Bring the generators of this process to where they were."""
    random.setstate(states.python)
    torch.default_generator.set_state(states.torch)
    if states.numpy is not None:
        sys.modules["numpy.random"].set_state(states.numpy)


def seed_from(key: tuple[int, ...]) -> None:
    """Seed the generators of this process from ``key``.

    The same key gives the same numbers in any process: a worker's, or the rank's own.
    """
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    random.seed(seed)
    # Not torch.manual_seed, which leaves a note for each device that is not initialised yet, at each call.
    torch.default_generator.manual_seed(seed >> 1)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed >> 32)


def drawing_apart(batches: Iterator[T], *, goes_on: bool) -> Iterator[T]:
    """Make batches without moving the program's generators.

    Args:
        batches: Seeds the generators as a batch is made.
        goes_on: Each batch goes on drawing where the one before has ended.
    """
    own: RandomStates | None = None
    while True:
        before = random_states()
        try:
            if own is not None:
                restore_random_states(own)
            batch = next(batches)
            if goes_on:
                own = random_states()
        except StopIteration:
            return
        finally:
            restore_random_states(before)
        yield batch


def read_apart(loader: Any, *, is_resumed: bool, goes_on: bool = False) -> Any:
    """Begin a pass over a loader that seeds what it draws, in workers or in this process.

    Args:
        loader: A DataLoader; see :func:`begin_reading`.
        is_resumed: Whether samples of the epoch have been read before.
        goes_on: As :func:`drawing_apart`.
    """
    batches = begin_reading(loader, goes_on=is_resumed)
    return batches if loader.num_workers else drawing_apart(batches, goes_on=goes_on)
