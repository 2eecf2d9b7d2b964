"""The command line: how soon it answers, beside Accelerate's, and what it adds to torchrun and to Python.

Each call is a process of its own. The script that is launched only prints.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench.timing import compare, compiled, show_beside

OURS = (sys.executable, "-m", "accelfn")
PEER = (sys.executable, "-m", "accelerate.commands.accelerate_cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def call(*command: str, status: int = 0) -> Callable[[], object]:
    """Return a function that runs a command, and checks how it ends."""

    def run() -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=compiled())
        assert done.returncode == status, done.stderr

    return run


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder, "say.py"))
        Path(script).write_text("import os\nprint(os.environ['RANK'])\n")
        os.environ["RANK"] = "0"  # of the script without a launcher
        launch = (*OURS, "launch", "--cpu")
        rows = {
            "`--help`": {"ours": call(*OURS, "--help"), "Accelerate": call(*PEER, "--help")},
            "a wrong argument": {
                "ours": call(*OURS, "launch", "--num_proceses=2", script, status=2),
                "Accelerate": call(*PEER, "launch", "--mixed_precision=fp17", script, status=2),
            },
            "`launch --dry_run`": {
                "ours": call(*launch, "--num_processes", "2", "--dry_run", script),
                "Python itself": call(sys.executable, "-c", "pass"),
            },
            "a script that prints, on two processes": {
                "ours": call(*launch, "--num_processes=2", script),
                "torchrun": call(*TORCHRUN, "--nproc-per-node=2", script),
            },
            "a script that prints, on one process": {
                "ours": call(*launch, script),
                "Python": call(sys.executable, script),
            },
        }
        show_beside("launch", {what: compare(ways, rounds=9, calls=1) for what, ways in rows.items()}, 0)


if __name__ == "__main__":
    main()
