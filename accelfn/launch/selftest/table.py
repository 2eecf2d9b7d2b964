"""The results of a self-test, on paper: records of lines in a file, and a table of them."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

Verdict = Literal["pass", "FAIL", "cut off", "not run"]
_WIDTH = 100

#: Of all checks, in their order.
CHECK_NAMES = (
    "ranks and settings",
    "collectives",
    "objects across ranks",
    "process control",
    "trigger",
    "random states",
    "mesh",
    "loader, shuffled",
    "loader, even batches",
    "loader, split batches",
    "loader, dispatched",
    "loader, resumed",
    "training, fp32",
    "training, accumulation",
    "training, bf16",
    "training, as configured",
    "training, Accelerator",
    "checkpoint round trip",
)

#: Begins the name of the row of a rank that has not come so far as to be checked.
JOINING = "joining"

#: What can be made to go wrong on the last rank, to see that it is found.
FAULTS = ("settings", "value", "seed", "data", "model", "hang", "death")


class Result(NamedTuple):
    """What became of a check.

    Attributes:
        name: Of the check.
        verdict: ``"pass"``, ``"FAIL"``, or ``"cut off"``: it had begun when the ranks ended,
            or ``"not run"``: after a failure the ranks did not meet again.
        seconds: That it took.
        remark: What there is to say.
    """

    name: str
    verdict: Verdict
    seconds: float
    remark: str


def write_result(path: Path, result: Result) -> None:
    """Add a line to a file of results. It is read also when the ranks come to a sudden end."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def read_results(path: Path) -> tuple[Result, ...]:
    """Read a file of results; of several lines on one check the last counts.

    Args:
        path: That ranks have written; it may be missing.
    """
    if not path.exists():
        return ()
    rows = [Result(*json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    return tuple({row.name: row for row in rows}.values())


def add_missing(results: Sequence[Result], asked: Sequence[str]) -> tuple[Result, ...]:
    """Add a row for each check that the ranks have not come to. Pure.

    >>> found = add_missing([Result("trigger", "pass", 0.0, "")], ["trigger", "collectives"])
    >>> found[1].verdict, found[1].name
    ('not run', 'collectives')
    """
    why = "the ranks had ended before"
    there = {result.name for result in results}
    missing = (Result(name, "not run", 0.0, why) for name in asked if name not in there)
    return (*results, *missing)


def print_results(results: Sequence[Result], title: str, out: IO[str] | None = None) -> None:
    """Print a table.

    Args:
        results: In their order.
        title: Of the whole.
        out: Where to; standard output when None.
    """
    file = out or sys.stdout
    failed = [result for result in results if result.verdict != "pass"]
    total_s = sum(result.seconds for result in results)
    verdict = f"{len(results) - len(failed)} of {len(results)} checks passed in {total_s:.1f} s"
    width = max([len(result.name) for result in results], default=0)
    print(title, file=file)
    for result in results:
        # What failed is told below in full.
        remark = result.remark if result.verdict == "pass" else ""
        line = f"  {result.verdict:<7}  {result.name:<{width}}  {result.seconds:6.2f} s  {remark}"
        print(line.rstrip(), file=file)
    print(verdict, file=file)
    by_remark: dict[str, list[str]] = {}
    for result in failed:
        by_remark.setdefault(result.remark, []).append(result.name)
    for remark, names in by_remark.items():
        shown = names if len(names) < 5 else [*names[:3], f"and {len(names) - 3} more"]
        print(f"\n{', '.join(shown)}:", file=file)
        print(_wrapped(remark), file=file)


def _wrapped(message: str) -> str:
    lines = [textwrap.wrap(line, _WIDTH - 2) or [""] for line in message.splitlines()]
    return textwrap.indent("\n".join(part for line in lines for part in line), "  ")
