"""Records of the project's programs: every one that ever failed, texts of refusals, and a fixed sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accelfn.testing.programs import Finding, Program, Verdict, finding_of
from tests.programs.grammar import GRAMMAR

HERE = Path(__file__).parent
FAILED, REFUSALS, SAMPLE = HERE / "failed.txt", HERE / "refusals.txt", HERE / "sample.txt"


def read_failed() -> list[tuple[str, Program]]:
    """Return every program that ever failed, shrunk, with the kind of its verdict now."""
    lines = (line.split(" ", 1) for line in FAILED.read_text().splitlines() if not line.startswith("#"))
    return [(kind, GRAMMAR.program(text.strip())) for kind, text in lines]


def read_refusals() -> dict[str, str]:
    """Return the text of each refusal by its program."""
    lines = REFUSALS.read_text().splitlines()
    return dict(zip(lines[0::2], (line.strip() for line in lines[1::2]), strict=True))


def read_sample() -> list[Program]:
    """Return the programs that have every pair of features, and every feature in every layout."""
    return [GRAMMAR.program(line) for line in SAMPLE.read_text().splitlines()]


def findings(*, mended: bool = False) -> list[Finding]:
    """Return the features that together aren't equal to one process, by design or not yet.

    With ``mended`` those too that were mended, which the sample leaves to the list of what failed.
    """
    return [finding_of(program) for kind, program in read_failed() if mended or kind != "equal"]


def write_failed(programs: Sequence[Program], verdicts: Sequence[Verdict]) -> None:
    """Write programs that failed, with their verdicts, and the texts of refusals."""
    pairs = sorted(zip(programs, verdicts, strict=True), key=lambda pair: (pair[1].kind, str(pair[0])))
    heading = "# Every program that ever failed, shrunk, with its verdict now: equal once it was mended.\n"
    lines = (f"{verdict.kind:9} {program}\n" for program, verdict in pairs)
    FAILED.write_text(heading + "".join(lines))
    refused = (f"{one}\n    {one_line(verdict)}\n" for one, verdict in pairs if verdict.kind == "refused")
    REFUSALS.write_text("".join(refused))


def one_line(verdict: Verdict) -> str:
    """Return the text of a verdict on one line."""
    return " ".join(verdict.what.split())
