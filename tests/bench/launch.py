"""The command line: how soon it answers, beside Accelerate's, and what it adds to torchrun and to Python.

Run by ``python -m tests.bench``. Each call is a process of its own. The script that is launched only prints.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.timing import Row, compare, compiled, print_table

OURS = (sys.executable, "-m", "accelfn")
PEER = (sys.executable, "-m", "accelerate.commands.accelerate_cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def call(*command: str, status: int = 0) -> Callable[[], object]:
    """Return a function that runs a command, and checks how it ends."""

    def run() -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=compiled())
        assert done.returncode == status, done.stderr

    return run


def measure(what: str, ways: dict[str, Callable[[], object]], rounds: int) -> Row:
    """Compare commands that do the same."""
    times = compare(ways, rounds=rounds, calls=1)
    return Row(what, times.pop("ours"), times)


def answers(rounds: int, script: str) -> list[Row]:
    """Compare what doesn't start anything."""
    two: Sequence[str] = ("launch", "--num_processes", "2")
    help_of = {"ours": call(*OURS, "--help"), "Accelerate": call(*PEER, "--help")}
    wrong = {
        "ours": call(*OURS, "launch", "--num_proceses=2", script, status=2),
        "Accelerate": call(*PEER, "launch", "--mixed_precision=fp17", script, status=2),
    }
    planned = {
        "ours": call(*OURS, *two, "--cpu", "--dry_run", script),
        "Python itself": call(sys.executable, "-c", "pass"),
    }
    return [
        measure("`--help`", help_of, rounds),
        measure("an argument that is wrong", wrong, rounds),
        measure("`launch --dry_run`", planned, rounds),
    ]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder, "say.py"))
        Path(script).write_text("import os\nprint(os.environ['RANK'])\n")
        os.environ["RANK"] = "0"  # of the script without a launcher
        rows = answers(rounds, script)
        two = {
            "ours": call(*OURS, "launch", "--cpu", "--num_processes=2", script),
            "torchrun": call(*TORCHRUN, "--nproc-per-node=2", script),
        }
        one = {
            "ours": call(*OURS, "launch", "--cpu", script),
            "Python": call(sys.executable, script),
        }
        rows += [
            measure("a script on two processes", two, rounds),
            measure("a script on one process", one, rounds),
        ]
    print_table(rows)


if __name__ == "__main__":
    main()
