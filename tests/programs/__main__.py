"""The campaign: ``python -m tests.programs --minutes 10 --seed 1``.

Draws programs, runs them, and shrinks what fails. What is in ``failed.txt`` isn't drawn again. ``--check``
runs that file and writes the verdicts of today, ``--sample`` draws what ``sample.txt`` lacks and looks for
fewer programs that cover the same (for minutes), and ``--show`` prints a program as a script:
``--show "dp=2 hook"``.
"""

from __future__ import annotations

import argparse
import random
import time

from accelfn.testing.programs import Shrunk, campaign, check_programs, cover, needs, script
from tests.programs import records
from tests.programs.grammar import GRAMMAR


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--check", action="store_true", help="write the verdicts of all programs that ever failed"
    )
    parser.add_argument("--sample", action="store_true", help="complete the fixed sample, in fewer programs")
    parser.add_argument("--show", metavar="PROGRAM", help="print a program as a script")
    options = parser.parse_args()
    if options.show is not None:
        print(script(GRAMMAR.program(options.show)))
    elif options.check:
        programs = [program for _, program in records.read_failed()]
        records.write_failed(programs, check_programs(programs))
    elif options.sample:
        rng = random.Random(options.seed)
        chosen = cover(GRAMMAR, rng, avoid=records.findings(mended=True), first=records.read_sample())
        records.SAMPLE.write_text("".join(f"{program}\n" for program in chosen))
        covered = needs(*chosen)
        print(f"{len(chosen)} programs with {sum(len(one) == 2 for one in covered)} pairs of features")
    else:
        run(options.minutes, options.seed)


def run(minutes: float, seed: int) -> None:
    """Run the campaign, and print each finding when it is shrunk."""
    begun = time.monotonic()

    def show(found: Shrunk) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {found.verdict.kind:9} {found.program}", flush=True)

    report = campaign(GRAMMAR, minutes=minutes, seed=seed, avoid=records.findings(), found=show)
    print(report)
    wanted = needs(*records.read_sample())
    covered = len(report.covered & wanted)
    print(f"pairs of features and features in layouts: {covered} of {len(wanted)} seen to be equal")


if __name__ == "__main__":
    main()
