"""Random numbers that are drawn while a batch is made: keyed by its place, apart from the program's own."""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch

from accelfn.data.workers import begin_reading

__all__ = ("Generators", "drawing_apart", "read_apart", "seed_from")

T = TypeVar("T")

# numpy's mt19937_state: 624 words of 32 bits and a position.
_MT19937_BYTES = 4 * 624 + 4


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


class _NumpyGenerator:
    """numpy's global generator, saved and restored around each batch.

    numpy's own ``get_state`` and ``set_state`` take 30 microseconds each, more than a small batch. So the
    bytes of its generator are copied instead, at the address that numpy publishes. They lack one thing, the
    second of a pair of normal numbers that is kept for the next call: whether there is one can only have
    changed where the bytes have, and then ``get_state`` tells.
    """

    def __init__(self) -> None:
        self._restored: bytes | None = None  # with no normal number kept

    def save(self) -> Any:
        # numpy imports this module when it is first asked for: until then nothing could be lost.
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return None
        address = _address_of(numpy)
        now = None if address is None else ctypes.string_at(address, _MT19937_BYTES)
        if now is not None and now == self._restored:
            return now
        state = numpy.get_state(legacy=False)
        return state if now is None or state["has_gauss"] else now

    def restore(self, state: Any) -> None:
        self._restored = None
        if isinstance(state, bytes):
            numpy = sys.modules["numpy.random"]
            numpy.seed(0)  # forgets a normal number that was kept meanwhile
            ctypes.memmove(cast("int", _address_of(numpy)), state, _MT19937_BYTES)
            self._restored = state
        elif state is not None:
            sys.modules["numpy.random"].set_state(state)


def _address_of(numpy: Any) -> int | None:
    generator = numpy.get_bit_generator()
    return generator.ctypes.state_address if type(generator) is numpy.MT19937 else None


class Generators:
    """The generators of this process: Python's, torch's on the CPU, and numpy's where it is in use."""

    def __init__(self) -> None:
        """Save nothing yet."""
        self._numpy = _NumpyGenerator()

    def save(self) -> tuple[Any, ...]:
        """Return where the generators are."""
        return random.getstate(), torch.default_generator.get_state(), self._numpy.save()

    def restore(self, states: tuple[Any, ...]) -> None:
        """Bring the generators to where they were."""
        python, of_torch, numpy = states
        random.setstate(python)
        torch.default_generator.set_state(of_torch)
        self._numpy.restore(numpy)


def drawing_apart(batches: Iterator[T], *, goes_on: bool) -> Iterator[T]:
    """Make batches without moving the program's generators.

    Args:
        batches: Seeds the generators as a batch is made.
        goes_on: Each batch goes on drawing where the one before has ended.
    """
    programs, own = Generators(), Generators()
    state: tuple[Any, ...] | None = None
    while True:
        before = programs.save()
        try:
            if state is not None:
                own.restore(state)
            batch = next(batches)
            if goes_on:
                state = own.save()
        except StopIteration:
            return
        finally:
            programs.restore(before)
        yield batch


def read_apart(loader: Any, *, is_resumed: bool, goes_on: bool = False) -> Any:
    """Begin a pass over a loader that seeds what it draws, in workers or in this process.

    Args:
        loader: A DataLoader; see :func:`begin_reading`.
        is_resumed: Whether samples of the epoch have been read before.
        goes_on: As :func:`drawing_apart`.
    """
    generator: torch.Generator | None = loader.generator
    before = None if generator is None else generator.get_state()
    batches = begin_reading(loader, goes_on=is_resumed)
    if generator is not None and before is not None:
        generator.set_state(before)  # nothing is drawn by the number that torch takes from it
    return batches if loader.num_workers else drawing_apart(batches, goes_on=goes_on)
