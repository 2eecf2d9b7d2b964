"""Random numbers drawn while a batch is made: seeded by its position, isolated from the program's own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from accelfn.data.workers import begin_reading

__all__ = ("read_isolated", "restore_generators", "save_generators", "seed_from", "seeded")

T = TypeVar("T")

# The class in C of Python's generator, whose methods take no Python call each: four calls of a batch.
_Twister: Any = random.Random.__base__


def seed_from(key: tuple[int, ...]) -> None:
    """Seed the generators of this process from ``key``: the same in a worker as in the rank's process."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    python: Any = random.random.__self__
    _Twister.seed(python, seed)
    python.gauss_next = None  # as random.seed does with a number
    # Not torch.manual_seed, which queues a call for every device that isn't initialised yet.
    torch.default_generator.manual_seed(seed >> 1)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed >> 32)


def save_generators() -> tuple[Any, ...]:
    """Return the states of Python's generator, torch's on the CPU, and numpy's if it is imported."""
    numpy = sys.modules.get("numpy.random")  # numpy imports this module on first use
    state = None if numpy is None else numpy.get_state(legacy=False)
    python: Any = random.random.__self__
    return (_Twister.getstate(python), python.gauss_next), torch.default_generator.get_state(), state


def restore_generators(states: tuple[Any, ...]) -> None:
    """Set the generators to states that :func:`save_generators` returned."""
    (python_state, gauss_next), torch_state, numpy_state = states
    python: Any = random.random.__self__
    _Twister.setstate(python, python_state)
    python.gauss_next = gauss_next
    torch.default_generator.set_state(torch_state)
    if numpy_state is not None:
        sys.modules["numpy.random"].set_state(numpy_state)


@contextmanager
def seeded(key: tuple[int, ...]) -> Generator[None, None, None]:
    """Draw from generators seeded by ``key`` inside, without advancing the program's."""
    outer = save_generators()
    try:
        seed_from(key)
        yield
    finally:
        restore_generators(outer)


def _isolate_generators(batches: Iterator[T], *, continues: bool) -> Iterator[T]:
    """Yield batches without advancing the program's generators.

    Args:
        batches: Seeds the generators as it makes a batch.
        continues: Each batch starts from the generators' state after the previous one.
    """
    inner: tuple[Any, ...] | None = None
    while True:
        outer = save_generators()
        try:
            if inner is not None:
                restore_generators(inner)
            batch = next(batches)
            if continues:
                inner = save_generators()
        except StopIteration:
            return
        finally:
            restore_generators(outer)
        yield batch


def read_isolated(loader: Any, *, is_resumed: bool, continues: bool = False, draws: bool = True) -> Any:
    """Begin a pass over a loader that seeds its random numbers, in workers or in this process.

    Args:
        loader: A DataLoader; see :func:`begin_reading`.
        is_resumed: Whether samples of the epoch have been read before.
        continues: Each batch starts from the generators' state after the previous one.
        draws: Whether random numbers may be drawn while a batch is made.
    """
    batches = begin_reading(loader, is_resumed=is_resumed, is_seeded=True)
    if loader.num_workers or not draws:
        return batches
    return _isolate_generators(batches, continues=continues)
