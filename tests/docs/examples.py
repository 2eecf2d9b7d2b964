"""``python -m tests.docs.examples`` runs the programs of docs/examples once, from one warm interpreter.

Each runs as its own script on two processes, which are forked with the variables of a launcher; those without
a context of their own run on one, and those that count epochs train a single one. Prints the seconds of each,
and the output of those that fail.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
_WARM = ("accelfn", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers")
_LIMIT_S = 300.0
# Which a test runs whole.
_ELSEWHERE = ("programs.py", "same_loop.py")


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _WARM:
        importlib.import_module(name)
    paths = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name not in _ELSEWHERE]
    failed = [path.name for path in paths if not runs(path)]
    print(f"failed: {', '.join(failed)}" if failed else "all examples ran")
    return int(bool(failed))


def runs(path: Path) -> bool:
    """Run an example; return whether all its processes ended with status 0."""
    text, begun = path.read_text(), time.monotonic()
    size = 2 if re.search(r"init_context|Accelerator\(|init_process_group", text) else 1
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        forking = multiprocessing.get_context("fork")
        processes = [
            forking.Process(target=run_rank, args=(path, folder, rank, size, port)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, begun + _LIMIT_S - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        ended = all(process.exitcode == 0 for process in processes)
        print(f"{time.monotonic() - begun:5.1f} s  {path.name}  {'' if ended else 'failed'}", flush=True)
        if not ended:
            print(*(Path(folder, f"{rank}.log").read_text() for rank in range(size)), sep="\n", flush=True)
    return ended


def run_rank(path: Path, folder: str, rank: int, size: int, port: int) -> None:
    """Run an example as rank ``rank`` of ``size`` in a forked process."""
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"ACCELFN_CPU": "1"}
    os.chdir(folder)
    sys.argv = [str(path), *(("--epochs", "1") if '"--epochs"' in path.read_text() else ())]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
