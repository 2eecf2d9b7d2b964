"""Random numbers drawn while a batch is made: seeded by its position, isolated from the program's own."""

from __future__ import annotations

import _random
import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from accelfn.data.workers import begin_reading

__all__ = ("Generators", "isolate_generators", "read_isolated", "seed_from")

T = TypeVar("T")

# The Mersenne twister of Python and of numpy: 624 words of 32 bits and a position.
_MT19937_BYTES = 4 * 624 + 4
_Words = ctypes.c_char * _MT19937_BYTES


def seed_from(key: tuple[int, ...]) -> None:
    """Seed the generators of this process from ``key``: the same in a worker as in the rank's process."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    python: Any = random.random.__self__
    # As random.seed does with a number.
    _random.Random.seed(python, seed)
    python.gauss_next = None
    # Not torch.manual_seed, which queues a call for every device that isn't initialised yet.
    torch.default_generator.manual_seed(seed >> 1)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed >> 32)


def _own_memory() -> ctypes.Array[ctypes.c_char] | None:
    """Return the memory of Python's global generator; None if this Python keeps it in another way."""
    generator: Any = random.random.__self__
    layout = f"i{_MT19937_BYTES // 4 - 1}I"  # position and words, after the object's header
    start = object.__basicsize__
    if _random.Random.__basicsize__ < start + _MT19937_BYTES:
        return None
    memory = _Words.from_address(id(generator) + start)
    position, *words = struct.unpack(layout, memory)
    return memory if random.getstate()[1] == (*words, position) else None


class Generators:
    """Saves and restores the generators of this process around each batch.

    They are Python's, torch's on the CPU, and numpy's if a program has imported it. The states of Python's
    and numpy's are copied as bytes: asking for them takes 10 and 30 microseconds, longer than reading a small
    batch. The second of a pair of normal numbers isn't among the bytes. Python's is an attribute; whether
    numpy has one can only have changed if the bytes have.
    """

    def __init__(self) -> None:
        """Save nothing yet."""
        self._python: Any = random.random.__self__
        self._memory = _own_memory()
        self._restored: bytes | None = None  # numpy's bytes, without a cached normal number

    def __reduce__(self) -> tuple[type[Generators], tuple[()]]:
        """Pickle without addresses: in a worker process, the memory is another."""
        return Generators, ()

    def save(self) -> tuple[Any, ...]:
        """Return the states of the generators."""
        memory = self._memory
        python_state = random.getstate() if memory is None else (memory.raw, self._python.gauss_next)
        numpy = sys.modules.get("numpy.random")
        numpy_state = None
        if numpy is not None:
            generator = numpy.get_bit_generator()
            if type(generator) is numpy.MT19937:
                words = _Words.from_address(generator.ctypes.state_address)
                state = words.raw
                if state == self._restored or not numpy.get_state(legacy=False)["has_gauss"]:
                    numpy_state = words, state
            if numpy_state is None:
                numpy_state = None, numpy.get_state(legacy=False)
        return python_state, torch.default_generator.get_state(), numpy_state

    def restore(self, states: tuple[Any, ...]) -> None:
        """Set the generators to ``states``."""
        python_state, torch_state, numpy_state = states
        if self._memory is None:
            random.setstate(python_state)
        else:
            self._memory.raw, self._python.gauss_next = python_state
        torch.default_generator.set_state(torch_state)
        self._restored = None
        if numpy_state is not None:
            words, state = numpy_state
            if words is None:
                sys.modules["numpy.random"].set_state(state)
            else:
                sys.modules["numpy.random"].seed(0)  # drops a normal number that was cached meanwhile
                words.raw = self._restored = state


def isolate_generators(batches: Iterator[T], *, continues: bool) -> Iterator[T]:
    """Yield batches without advancing the program's generators.

    Args:
        batches: Seeds the generators as it makes a batch.
        continues: Each batch starts from the generators' state after the previous one.
    """
    outer, inner = Generators(), Generators()
    inner_state: tuple[Any, ...] | None = None
    while True:
        outer_state = outer.save()
        try:
            if inner_state is not None:
                inner.restore(inner_state)
            batch = next(batches)
            if continues:
                inner_state = inner.save()
        except StopIteration:
            return
        finally:
            outer.restore(outer_state)
        yield batch


def read_isolated(loader: Any, *, is_resumed: bool, continues: bool = False, draws: bool = True) -> Any:
    """Begin a pass over a loader that seeds its random numbers, in workers or in this process.

    Args:
        loader: A DataLoader; see :func:`begin_reading`.
        is_resumed: Whether samples of the epoch have been read before.
        continues: As for :func:`isolate_generators`.
        draws: Whether random numbers may be drawn while a batch is made.
    """
    generator: torch.Generator | None = loader.generator
    before = None if generator is None else generator.get_state()
    batches = begin_reading(loader, is_resumed=is_resumed)
    if generator is not None and before is not None:
        generator.set_state(before)  # torch draws a base seed from it, which nothing here uses
    if loader.num_workers or not draws:
        return batches
    return isolate_generators(batches, continues=continues)
