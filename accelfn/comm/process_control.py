"""Who runs what, and when: barriers, turns, and functions for chosen ranks."""

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
from accelfn.context import Context, check_context, publish

P = ParamSpec("P")
T = TypeVar("T")


def wait_for_everyone(ctx: Context) -> None:
    """Return when every rank has called this.

    Ranks: every rank of ``ctx``.

    Raises:
        MismatchError: Another rank called another operation instead.
    """
    check_context("wait_for_everyone", ctx)
    if ctx.world.size > 1:
        agree(ctx, Call("wait_for_everyone"))


@contextmanager
def main_process_first(ctx: Context) -> Generator[None, None, None]:
    """Let the main process go through a ``with`` block before the others enter it.

    Ranks: every rank of ``ctx``. The others wait for it as long as ``Guard.long_timeout``.

    Raises:
        RemoteRankError: On the others, when the block failed on the main process: they don't enter.
    """
    check_context("main_process_first", ctx)
    with _first(ctx, ctx.is_main_process, "main_process_first"):
        yield


@contextmanager
def local_main_process_first(ctx: Context) -> Generator[None, None, None]:
    """Let the first process of each node go through a ``with`` block before the others of the node.

    Ranks: every rank of ``ctx``; the others of any node wait for the first ones of all nodes, as long as
    ``Guard.long_timeout``.

    Raises:
        RemoteRankError: On the others, when the block failed on a first process.
    """
    check_context("local_main_process_first", ctx)
    with _first(ctx, ctx.is_local_main_process, "local_main_process_first"):
        yield


@contextmanager
def _first(ctx: Context, goes_first: bool, operation: str) -> Generator[None, None, None]:
    if ctx.world.size == 1:
        yield
        return
    call = Call(operation, takes_long=True)
    if not goes_first:
        agree(ctx, call)
    with failing_together(ctx, operation):
        yield
    if goes_first:
        agree(ctx, call)


@contextmanager
def failing_together(ctx: Context, doing: str) -> Generator[None, None, None]:
    """Raise an exception inside on every rank: the others are notified before it propagates on this one.

    Ranks that wait in an operation raise :class:`~accelfn.errors.RemoteRankError` there within a second, the
    others at their next operation. So what is caught outside of the block can't be gone on from: catch inside
    what this rank alone can deal with.

    Ranks: any; doesn't communicate where all is well.

    Args:
        ctx: The world.
        doing: What the block does, for the message on the other ranks.
    """
    check_context("failing_together", ctx)
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
def on_main_process(ctx: Context, *, share: bool = False) -> Any:
    """Make a function run on the main process alone; elsewhere it returns None at once, or the shared value.

    An exception in it is every rank's: those that wait in an operation raise ``RemoteRankError`` there. Catch
    inside the function what the main process can deal with by itself.

    Ranks: any, and the decorated function doesn't communicate; with ``share`` every rank of ``ctx`` calls it.

    Args:
        ctx: The world.
        share: Give every rank what the function returned, which must be picklable.

    >>> @on_main_process(Context())
    ... def report() -> str:
    ...     return "done"
    >>> report()
    'done'
    """
    check_context("on_main_process", ctx)
    return _only(ctx, "on_main_process", ctx.is_main_process, share)


@overload
def on_local_main_process(ctx: Context, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_local_main_process(ctx: Context, *, share: bool = False) -> Decorator: ...
def on_local_main_process(ctx: Context, *, share: bool = False) -> Any:
    """Make a function run on the first process of each node; elsewhere it returns None.

    Ranks: as :func:`on_main_process`; with ``share`` the ranks of a node get what its first process returned.
    """
    check_context("on_local_main_process", ctx)
    return _only(ctx, "on_local_main_process", ctx.is_local_main_process, share)


@overload
def on_last_process(ctx: Context, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_last_process(ctx: Context, *, share: bool = False) -> Decorator: ...
def on_last_process(ctx: Context, *, share: bool = False) -> Any:
    """Make a function run on the last rank; elsewhere it returns None. See :func:`on_main_process`."""
    check_context("on_last_process", ctx)
    return _only(ctx, "on_last_process", ctx.is_last_process, share)


@overload
def on_process(ctx: Context, index: int, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_process(ctx: Context, index: int, *, share: bool = False) -> Decorator: ...
def on_process(ctx: Context, index: int, *, share: bool = False) -> Any:
    """Make a function run on rank ``index``; elsewhere it returns None. See :func:`on_main_process`.

    Raises:
        ValueError: There is no such rank, so the function would never run.
    """
    check_context("on_process", ctx)
    if not 0 <= index < ctx.world.size:
        raise ValueError(f"on_process: index must be a rank in 0..{ctx.world.size - 1}, got {index}.")
    return _only(ctx, "on_process", ctx.rank == index, share, f" on rank {index}")


@overload
def on_local_process(ctx: Context, index: int, *, share: Literal[True]) -> SharingDecorator: ...
@overload
def on_local_process(ctx: Context, index: int, *, share: bool = False) -> Decorator: ...
def on_local_process(ctx: Context, index: int, *, share: bool = False) -> Any:
    """Make a function run on local rank ``index`` of each node; elsewhere it returns None.

    Ranks: as :func:`on_main_process`; with ``share`` the ranks of a node get what that one returned.

    Raises:
        ValueError: This node has no such local rank.
    """
    check_context("on_local_process", ctx)
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
            blobs = [one for one in gather_bytes(ctx, call, blob or b"", error) if one]
            values: dict[int, T] = {}
            for one in blobs:
                node, returned = pickle.loads(one)
                values[node] = returned
            # Of the ranks that ran it, the one on this node; where only one ran at all, that one.
            return value if runs else values.get(ctx.world.node_rank, next(iter(values.values())))

        return wrapper

    return decorate


def print_once(ctx: Context, *values: Any, **options: Any) -> None:
    """Print on the first process of each node, with the arguments of the builtin ``print``.

    Ranks: any; doesn't communicate.
    """
    check_context("print_once", ctx)
    if ctx.is_local_main_process:
        builtins.print(*values, **options)


class TriggerState(NamedTuple):
    """Whether this rank has set the flag since the last check."""

    is_set: bool = False


def set_trigger(state: TriggerState) -> TriggerState:
    """Set the flag on this rank. Ranks: any; the others learn of it at the next :func:`check_trigger`."""
    del state
    return TriggerState(is_set=True)


def check_trigger(ctx: Context, state: TriggerState) -> tuple[TriggerState, bool]:
    """Ask whether any rank has set the flag, and clear it if so.

    Ranks: every rank of ``ctx``.

    Returns:
        The next state, and the answer, which is the same on every rank.

    >>> state, stop = check_trigger(Context(), set_trigger(TriggerState()))
    >>> state.is_set, stop
    (False, True)
    """
    check_context("check_trigger", ctx)
    rows = [torch.tensor([state.is_set], dtype=torch.uint8)]
    if ctx.world.size > 1:
        rows = agree(ctx, Call("check_trigger"), rows[0])
    fired = any(bool(row[0]) for row in rows)
    return (TriggerState() if fired else state), fired
