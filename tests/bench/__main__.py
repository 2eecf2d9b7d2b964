"""``python -m tests.bench`` prints the tables of the page on speed. Needs ``accelfn[bench]``."""

import os
import subprocess
import sys


def main() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m"]
    two = [*run, "accelfn", "launch", "--num_processes", "2", "--cpu", "-m", "tests.bench.collectives"]
    guard = [*two[:-1], "tests.bench.guard"]
    exact = [*two[:-1], "tests.bench.exact"]
    data = [*two[:-1], "tests.bench.data"]
    sharding = [*two[:-1], "tests.bench.sharding"]
    training = [*two[:-1], "tests.bench.training"]
    pipeline = [*two[:-1], "tests.bench.pipeline"]
    experts = [*two[:-1], "tests.bench.experts"]
    four = [*run, "accelfn", "launch", "--num_processes", "4", "--cpu", "-m", "tests.bench.pipeline"]
    names = (
        "training",
        "local",
        "checkpoint",
        "campaign",
        "plan",
        "load",
        "offload",
        "launch",
        "sequence",
        "trainer",
    )
    alone = ([*run, f"tests.bench.{name}"] for name in names)
    for command in (two, guard, exact, data, sharding, training, pipeline, four, experts, *alone):
        subprocess.run(command, env=environment, check=True)
        print(flush=True)


if __name__ == "__main__":
    main()
