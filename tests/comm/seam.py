"""What tests of operations across ranks share: what a rank raised, what it called, small exchanges."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from accelfn.comm.agreement import HEADER_BYTES
from accelfn.context import Context
from accelfn.errors import MismatchError


def failure(work: Callable[[Context], Any]) -> Callable[[Context], Any]:
    """Return what a rank raises instead of raising it."""

    def caught(ctx: Context) -> Any:
        try:
            return work(ctx)
        except Exception as error:  # noqa: BLE001 -- it is the result
            return error

    return caught


def same_mismatch(errors: Sequence[Any]) -> Any:
    """Check that every rank raised the same MismatchError, and give it."""
    assert {type(error) for error in errors} == {MismatchError}, errors
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def counted(ctx: Context) -> tuple[Context, Counter[str]]:
    """Count the calls of the seam."""
    calls: Counter[str] = Counter()

    def count(name: str) -> Any:
        function = getattr(ctx.collectives, name)

        def wrapper(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return wrapper

    names = ("all_gather_bytes", "all_gather", "all_reduce", "broadcast", "scatter", "all_to_all", "barrier")
    seam = dataclasses.replace(ctx.collectives, **{name: count(name) for name in names})
    return dataclasses.replace(ctx, collectives=seam), calls


def split_up(ctx: Context) -> Context:
    """Let no tree with data fit into the opening exchange, only the length of a blob."""
    return dataclasses.replace(ctx, collectives=dataclasses.replace(ctx.collectives, chunk=HEADER_BYTES + 8))
