"""Barriers, main-process-first blocks, and functions that run on some ranks only."""

from __future__ import annotations

import builtins
import functools
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import torch

from accelfn.comm.agreement import Call, agree, catch
from accelfn.comm.objects import gather_bytes
from accelfn.context import Context, publish, takes_context

P = ParamSpec("P")
T = TypeVar("T")


@takes_context
def wait_for_everyone(ctx: Context) -> None:
    """Return when every rank has called this.

    Ranks: every rank of ``ctx``.

    Raises:
        MismatchError: Another rank called another operation instead.
    """
    if ctx.world.size > 1:
        agree(ctx, Call("wait_for_everyone"))


@takes_context
@contextmanager
def main_process_first(ctx: Context) -> Generator[None, None, None]:
    """Run a ``with`` block on the main process before the other ranks enter it.

    Ranks: every rank of ``ctx``. The other ranks wait at most ``Guard.long_timeout``.

    Raises:
        RemoteRankError: On the other ranks, which don't enter the block, if it failed on the main process.
    """
    with _first(ctx, ctx.is_main_process, "main_process_first"):
        yield


@takes_context
@contextmanager
def local_main_process_first(ctx: Context) -> Generator[None, None, None]:
    """Run a ``with`` block on the first process of each node before the other ranks enter it.

    Ranks: every rank of ``ctx``; the other ranks wait for the first processes of all nodes, at most
    ``Guard.long_timeout``.

    Raises:
        RemoteRankError: On the other ranks, if the block failed on the first process of a node.
    """
    with _first(ctx, ctx.is_local_main_process, "local_main_process_first"):
        yield


@contextmanager
def _first(ctx: Context, goes_first: bool, operation: str) -> Generator[None, None, None]:
    if ctx.world.size == 1:
        yield
        return
    # One name for both: where they are nested, a rank ends the inner block as another begins the outer one.
    call = Call("main_process_first", takes_long=True)
    if not goes_first:
        agree(ctx, call)
    with failing_together(ctx, operation):
        yield
    if goes_first:
        agree(ctx, call)


@takes_context
@contextmanager
def failing_together(ctx: Context, doing: str) -> Generator[None, None, None]:
    """Propagate an exception in the block to every rank, before it is raised on this one.

    Ranks that wait in an operation raise :class:`~accelfn.errors.RemoteRankError` there within a second, the
    other ranks at their next operation. Catching the exception outside of the block doesn't undo this, so
    handle inside the block what this rank can handle alone.

    Ranks: any; doesn't communicate unless the block fails.

    Args:
        ctx: The world.
        doing: What the block does, for the message on the other ranks.
    """
    try:
        yield
    except Exception as error:
        if ctx.world.size > 1:
            publish(ctx.collectives.board, ctx.collectives.call_log, ctx.rank, error, doing)
        raise


@overload
def on_main_process(ctx: Context, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_main_process(ctx: Context, *, share: bool = False) -> Decorator: ...
@takes_context
def on_main_process(ctx: Context, *, share: bool = False) -> Any:
    """Return a decorator that runs a function on the main process only; elsewhere the function returns None.

    An exception in it is propagated to every rank, as by :func:`accelfn.comm.failing_together`. Handle inside
    the function what the main process can handle alone.

    Ranks: any, and the decorated function doesn't communicate; with ``share`` every rank of ``ctx`` calls it.

    Args:
        ctx: The world.
        share: Return the function's result, which must be picklable, on every rank.

    >>> @on_main_process(Context())
    ... def report() -> str:
    ...     return "done"
    >>> report()
    'done'
    """
    return _only(ctx, "on_main_process", ctx.is_main_process, share)


@overload
def on_local_main_process(ctx: Context, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_local_main_process(ctx: Context, *, share: bool = False) -> Decorator: ...
@takes_context
def on_local_main_process(ctx: Context, *, share: bool = False) -> Any:
    """Return a decorator that runs a function on the first process of each node; elsewhere it returns None.

    Ranks: as :func:`on_main_process`; with ``share`` all ranks of a node return its first process's result.
    """
    return _only(ctx, "on_local_main_process", ctx.is_local_main_process, share)


@overload
def on_last_process(ctx: Context, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_last_process(ctx: Context, *, share: bool = False) -> Decorator: ...
@takes_context
def on_last_process(ctx: Context, *, share: bool = False) -> Any:
    """Return a decorator that runs a function on the last rank; see :func:`on_main_process`."""
    return _only(ctx, "on_last_process", ctx.is_last_process, share)


@overload
def on_process(ctx: Context, index: int, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_process(ctx: Context, index: int, *, share: bool = False) -> Decorator: ...
@takes_context
def on_process(ctx: Context, index: int, *, share: bool = False) -> Any:
    """Return a decorator that runs a function on rank ``index``; see :func:`on_main_process`.

    Raises:
        ValueError: ``index`` isn't a rank, so the function would never run.
    """
    if not 0 <= index < ctx.world.size:
        raise ValueError(f"on_process: index must be a rank in 0..{ctx.world.size - 1}, got {index}.")
    return _only(ctx, "on_process", ctx.rank == index, share, f" on rank {index}")


@overload
def on_local_process(ctx: Context, index: int, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_local_process(ctx: Context, index: int, *, share: bool = False) -> Decorator: ...
@takes_context
def on_local_process(ctx: Context, index: int, *, share: bool = False) -> Any:
    """Return a decorator that runs a function on local rank ``index`` of each node.

    Ranks: as :func:`on_main_process`; with ``share`` all ranks of a node return that rank's result.

    Raises:
        ValueError: This node has no such local rank.
    """
    if not 0 <= index < ctx.world.local_size:
        raise ValueError(
            f"on_local_process: index must be a local rank in 0..{ctx.world.local_size - 1}, got {index}."
        )
    return _only(ctx, "on_local_process", ctx.local_rank == index, share, f" on local rank {index}")


class Decorator(Protocol):
    """Makes a function run on some ranks, and return None on the others."""

    def __call__(self, function: Callable[P, T], /) -> Callable[P, T | None]:
        """Wrap ``function``."""
        ...


class SharingDecorator(Protocol):
    """Makes a function run on some ranks, and return what it returned there on the others too."""

    def __call__(self, function: Callable[P, T], /) -> Callable[P, T]:
        """Wrap ``function``."""
        ...


def _only(ctx: Context, operation: str, runs: bool, share: bool, where: str = "") -> Any:
    def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
            value = None
            if runs:
                with failing_together(ctx, f"{operation} ({function.__name__})"):
                    value = function(*args, **kwargs)
            if not share or ctx.world.size == 1:
                return value
            blob, error = catch(lambda: pickle.dumps((ctx.world.node_rank, value)) if runs else b"")
            call = Call(operation, function.__name__ + where, takes_long=True)
            messages = gather_bytes(ctx, call, blob or b"", error)
            by_node: dict[int, T] = dict(pickle.loads(message) for message in messages if message)
            # The result of this node, or the only one.
            return value if runs else by_node.get(ctx.world.node_rank, next(iter(by_node.values())))

        return wrapper

    return decorate


@takes_context
def print_once(ctx: Context, *values: Any, **options: Any) -> None:
    """Print on the first process of each node, with the arguments of the builtin ``print``.

    Ranks: any; doesn't communicate.
    """
    if ctx.is_local_main_process:
        builtins.print(*values, **options)


class TriggerState(NamedTuple):
    """Whether this rank has set the flag since the last check."""

    is_set: bool = False


def set_trigger(state: TriggerState) -> TriggerState:
    """Set the flag on this rank. Ranks: any; other ranks see it at the next :func:`check_trigger`."""
    del state
    return TriggerState(is_set=True)


@takes_context
def check_trigger(ctx: Context, state: TriggerState) -> tuple[TriggerState, bool]:
    """Return whether any rank has set the flag, and clear it if so.

    Ranks: every rank of ``ctx``.

    Returns:
        The next state, and whether the flag was set, the same on every rank.

    >>> state, stop = check_trigger(Context(), set_trigger(TriggerState()))
    >>> state.is_set, stop
    (False, True)
    """
    rows = [torch.tensor([state.is_set], dtype=torch.uint8, device="cpu")]
    if ctx.world.size > 1:
        rows = agree(ctx, Call("check_trigger"), rows[0])
    fired = any(bool(row[0]) for row in rows)
    return (TriggerState() if fired else state), fired
