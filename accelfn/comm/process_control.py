"""Who runs what, and when: barriers, turns, and functions for chosen ranks."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from accelfn.comm.agreement import Call, agree
from accelfn.context import Context

__all__ = (
    "local_main_process_first",
    "main_process_first",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "print_once",
    "wait_for_everyone",
)

P = ParamSpec("P")
T = TypeVar("T")
Decorator = Callable[[Callable[P, T]], Callable[P, T | None]]


def wait_for_everyone(ctx: Context) -> None:
    """Return when every rank has called this.

    Ranks: every rank of ``ctx``.

    Raises:
        MismatchError: Another rank called another operation instead.
    """
    if ctx.world.size > 1:
        agree(ctx, Call("wait_for_everyone"))


@contextmanager
def main_process_first(ctx: Context) -> Generator[None, None, None]:
    """Let the main process go through a ``with`` block before the others enter it.

    Ranks: every rank of ``ctx``.

    Raises:
        RemoteRankError: On the others, when the block failed on the main process: they don't wait, and don't
            enter.
    """
    with _first(ctx, ctx.is_main_process, "main_process_first"):
        yield


@contextmanager
def local_main_process_first(ctx: Context) -> Generator[None, None, None]:
    """Let the first process of each node go through a ``with`` block before the others of the node.

    Ranks: every rank of ``ctx``; the others of any node wait for the first ones of all nodes.

    Raises:
        RemoteRankError: On the others, when the block failed on a first process.
    """
    with _first(ctx, ctx.is_local_main_process, "local_main_process_first"):
        yield


@contextmanager
def _first(ctx: Context, goes_first: bool, operation: str) -> Generator[None, None, None]:
    if ctx.world.size == 1:
        yield
        return
    call = Call(operation)
    if not goes_first:
        agree(ctx, call)
        yield
        return
    try:
        yield
    except Exception as error:
        agree(ctx, call, error=error)  # tells the others why, then raises it here
        raise
    agree(ctx, call)


def on_main_process(ctx: Context) -> Decorator[P, T]:
    """Make a function run on the main process alone; elsewhere it returns None at once.

    Ranks: any; the decorated function doesn't communicate.

    >>> @on_main_process(Context())
    ... def report() -> str:
    ...     return "done"
    >>> report()
    'done'
    """
    return _only(ctx.is_main_process)


def on_local_main_process(ctx: Context) -> Decorator[P, T]:
    """Make a function run on the first process of each node; elsewhere it returns None."""
    return _only(ctx.is_local_main_process)


def on_last_process(ctx: Context) -> Decorator[P, T]:
    """Make a function run on the last rank; elsewhere it returns None."""
    return _only(ctx.is_last_process)


def on_process(ctx: Context, index: int) -> Decorator[P, T]:
    """Make a function run on rank ``index``; elsewhere it returns None.

    Raises:
        ValueError: There is no such rank, so the function would never run.
    """
    if not 0 <= index < ctx.world.size:
        raise ValueError(f"on_process: index must be a rank in 0..{ctx.world.size - 1}, got {index}.")
    return _only(ctx.rank == index)


def on_local_process(ctx: Context, index: int) -> Decorator[P, T]:
    """Make a function run on local rank ``index`` of each node; elsewhere it returns None.

    Raises:
        ValueError: This node has no such local rank.
    """
    if not 0 <= index < ctx.world.local_size:
        raise ValueError(
            f"on_local_process: index must be a local rank in 0..{ctx.world.local_size - 1}, got {index}."
        )
    return _only(ctx.local_rank == index)


def _only(runs: bool) -> Decorator[P, T]:
    def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if runs else None

        return wrapper

    return decorate


def print_once(ctx: Context, *values: Any, **options: Any) -> None:
    """Print on the first process of each node, with the arguments of the builtin ``print``.

    Ranks: any; doesn't communicate.
    """
    if ctx.is_local_main_process:
        builtins.print(*values, **options)
