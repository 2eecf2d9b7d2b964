"""Random numbers drawn while a batch is made: seeded by its position, isolated from the program's own."""

from __future__ import annotations

import _random
import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch

from accelfn.data.workers import begin_reading

__all__ = ("Generators", "isolate_generators", "read_isolated", "seed_from")

T = TypeVar("T")

# The Mersenne twister of Python and of numpy: 624 words of 32 bits and a position.
_MT19937_BYTES = 4 * 624 + 4


def seed_from(key: tuple[int, ...]) -> None:
    """Seed the generators of this process from ``key``: the same in a worker as in the rank's process."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    random.seed(seed)
    # Not torch.manual_seed, which queues a call for every device that isn't initialised yet.
    torch.default_generator.manual_seed(seed >> 1)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed >> 32)


def _own_memory() -> ctypes.Array[ctypes.c_char] | None:
    """Return the memory of Python's global generator; None if this Python keeps it in another way."""
    generator: Any = cast("Any", random.random).__self__
    layout = f"i{_MT19937_BYTES // 4 - 1}I"  # position and words, after the object's header
    start = object.__basicsize__
    if _random.Random.__basicsize__ < start + _MT19937_BYTES:
        return None
    memory = (ctypes.c_char * _MT19937_BYTES).from_address(id(generator) + start)
    position, *words = struct.unpack(layout, memory)
    return memory if random.getstate()[1] == (*words, position) else None


class _PythonGenerator:
    """Saves and restores Python's global generator around each batch.

    ``getstate`` builds 625 integers, which takes longer than reading a small batch, so the generator's memory
    is copied. The second of a pair of normal numbers is an attribute.
    """

    def __init__(self) -> None:
        self._generator: Any = cast("Any", random.random).__self__
        self._memory = _own_memory()

    def __reduce__(self) -> tuple[type[_PythonGenerator], tuple[()]]:
        return _PythonGenerator, ()  # in a worker process, the memory is another

    def save(self) -> Any:
        return random.getstate() if self._memory is None else (self._memory.raw, self._generator.gauss_next)

    def restore(self, state: Any) -> None:
        if self._memory is None:
            random.setstate(state)
        else:
            self._memory.raw, self._generator.gauss_next = state


class _NumpyGenerator:
    """Saves and restores numpy's global generator around each batch.

    numpy's ``get_state`` and ``set_state`` take 30 microseconds each, longer than a small batch. So the bytes
    of the generator are copied at the address that numpy publishes. They lack the cached second number of a
    pair of normal numbers; whether one is cached can only have changed if the bytes have, and then
    ``get_state`` is called.
    """

    def __init__(self) -> None:
        self._restored: bytes | None = None  # a state without a cached normal number

    def save(self) -> Any:
        # numpy imports this module on first use; before that, it has no state to save.
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return None
        memory = _memory_of(numpy)
        current = None if memory is None else memory.raw
        if current is not None and current == self._restored:
            return current
        state = numpy.get_state(legacy=False)
        return state if current is None or state["has_gauss"] else current

    def restore(self, state: Any) -> None:
        self._restored = None
        if isinstance(state, bytes):
            numpy = sys.modules["numpy.random"]
            numpy.seed(0)  # drops a normal number that was cached meanwhile
            cast("ctypes.Array[ctypes.c_char]", _memory_of(numpy)).raw = state
            self._restored = state
        elif state is not None:
            sys.modules["numpy.random"].set_state(state)


def _memory_of(numpy: Any) -> ctypes.Array[ctypes.c_char] | None:
    generator = numpy.get_bit_generator()
    if type(generator) is not numpy.MT19937:
        return None
    return (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address)


class Generators:
    """The generators of this process: Python's, torch's on the CPU, and numpy's if it is imported."""

    def __init__(self) -> None:
        """Save nothing yet."""
        self._python = _PythonGenerator()
        self._numpy = _NumpyGenerator()

    def save(self) -> tuple[Any, ...]:
        """Return the states of the generators."""
        return self._python.save(), torch.default_generator.get_state(), self._numpy.save()

    def restore(self, states: tuple[Any, ...]) -> None:
        """Set the generators to ``states``."""
        python_state, torch_state, numpy_state = states
        self._python.restore(python_state)
        torch.default_generator.set_state(torch_state)
        self._numpy.restore(numpy_state)


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


def read_isolated(loader: Any, *, is_resumed: bool, continues: bool = False) -> Any:
    """Begin a pass over a loader that seeds its random numbers, in workers or in this process.

    Args:
        loader: A DataLoader; see :func:`begin_reading`.
        is_resumed: Whether samples of the epoch have been read before.
        continues: As for :func:`isolate_generators`.
    """
    generator: torch.Generator | None = loader.generator
    before = None if generator is None else generator.get_state()
    batches = begin_reading(loader, is_resumed=is_resumed)
    if generator is not None and before is not None:
        generator.set_state(before)  # torch draws a base seed from it, which nothing here uses
    return batches if loader.num_workers else isolate_generators(batches, continues=continues)
