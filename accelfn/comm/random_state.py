"""Seed random number generators, and synchronise their states across ranks."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch

from accelfn.comm.agreement import Call, as_bytes, as_tensor, catch
from accelfn.comm.objects import broadcast_bytes
from accelfn.comm.transfer import unwrap
from accelfn.config import RNGType
from accelfn.context import (
    Context,
    device_random_state,
    seed_torch,
    set_device_random_state,
    takes_context,
)
from accelfn.errors import ConfigurationError


def set_seed(
    seed: int, ctx: Context | None = None, *, device_specific: bool = False, deterministic: bool = False
) -> None:
    """Seed Python's, NumPy's (if installed) and torch's generators, including those of all devices.

    Ranks: local; with the same arguments every rank has the same state.

    Args:
        seed: Non-negative and below 2**32 (NumPy's limit), including the rank.
        ctx: Required with ``device_specific``.
        device_specific: Add the rank, so that ranks draw different numbers; on a mesh the coordinate along
            "loss", so that ranks that share each layer draw the same.
        deterministic: Also enable torch's deterministic algorithms, for the process.

    Raises:
        TypeError: ``seed`` is a context or no int, or ``ctx`` is no context.
        ValueError: ``seed`` is out of range, or ``device_specific`` without ``ctx``.
    """
    if isinstance(seed, Context) or not isinstance(cast("object", ctx), (Context, type(None))):
        raise TypeError(
            f"set_seed: the seed comes first, then the context: got {type(seed).__name__} and "
            f"{type(ctx).__name__}. Write set_seed(seed), or set_seed(seed, ctx=ctx, device_specific=True)."
        )
    if not isinstance(cast("object", seed), int):
        raise TypeError(f"set_seed: seed must be an int, got {seed!r} of type {type(seed).__name__}.")
    if device_specific:
        if ctx is None:
            raise ValueError(
                "set_seed: device_specific needs the context: set_seed(seed, ctx=ctx, device_specific=True)."
            )
        seed += ctx.coordinate("loss")
    if not 0 <= seed < 2**32:
        raise ValueError(f"set_seed: seed must be in 0..2**32 - 1, got {seed}.")
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy.random").seed(seed)
    seed_torch(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


@takes_context
def synchronize_rng_states(
    ctx: Context, types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Set random number generators to their states on rank 0.

    Ranks: every rank of ``ctx``, with the same types.

    Args:
        ctx: The world.
        types: ``"torch"`` (the CPU's), ``"generator"``, or a device type such as ``"cuda"`` (this rank's
            device).
        generator: The generator of the type ``"generator"``.

    Raises:
        ValueError: ``"generator"`` is used without ``generator``.
        ConfigurationError: A type is unknown, or of another device than this rank's.
    """
    names = [item.value if isinstance(item, RNGType) else item for item in types]

    def read() -> list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
        return [_state(ctx, name, generator) for name in names]

    own, error = catch(read)
    if ctx.world.size == 1:
        unwrap(own, error)
        return
    blob = b"".join(as_bytes(state) for state, _ in own or ())
    received = broadcast_bytes(ctx, Call("synchronize_rng_states", ",".join(names)), blob, 0, error)
    start = 0
    for state, restore in unwrap(own, error):
        end = start + state.numel()
        restore(as_tensor(received[start:end]))
        start = end


def _state(
    ctx: Context, name: str, generator: torch.Generator | None
) -> tuple[torch.Tensor, Callable[[torch.Tensor], None]]:
    """Return the state of a generator of this rank, and what sets it."""
    if name == "generator":
        if generator is None:
            raise ValueError('synchronize_rng_states: the type "generator" needs generator=.')
        return generator.get_state(), lambda state: cast("None", generator.set_state(state))
    if name == "torch":
        return torch.get_rng_state(), torch.set_rng_state
    known = tuple(item.value for item in RNGType)
    if name not in known:
        raise ConfigurationError(f"synchronize_rng_states: types are {', '.join(known)}; got {name!r}.")
    if ctx.device.type != name:
        raise ConfigurationError(
            f"synchronize_rng_states: the type {name!r} is of another device than this rank's, which is "
            f"{ctx.device}. Leave it out."
        )
    return device_random_state(ctx.device), partial(set_device_random_state, ctx.device)
