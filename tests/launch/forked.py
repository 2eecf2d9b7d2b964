"""Run programs on ranks that are forked from one process.

That process has loaded their libraries, of which the import takes longer than a tiny model's training.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from tests.launch.plan.plans import plan_of
from tests.launch.processes import environment, free_port

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
LIBRARIES = ("torch._dynamo", "sklearn.metrics", "datasets", "torchao", "transformers")


class Job(NamedTuple):
    """A program to run.

    Attributes:
        program: Path of the script.
        argv: Its arguments.
        processes: Number of ranks.
        variables: Environment variables.
        aliased: Whether ``import accelerate`` gives accelfn.
        by_torchrun: Whether torchrun starts it, from which a single rank gets the variables of a world too.
    """

    program: str
    argv: Sequence[str] = ()
    processes: int = 1
    variables: Mapping[str, str] = {}
    aliased: bool = False
    by_torchrun: bool = False


def launched(flags: str, program: Path, *argv: str, file: str = "") -> Job:
    """Return what ``accelfn launch --cpu`` starts, by its flags and the text of its configuration file."""
    plan = plan_of(f"--cpu {flags}", str(program), file=file)
    return Job(str(program), argv, plan.local_size, dict(plan.env_changes))


def run_jobs(
    jobs: Sequence[Job], folder: Path, timeout_s: float, shared: Sequence[str] = LIBRARIES
) -> list[str]:
    """Run jobs one after the other, with ``folder`` as working directory, and return what they printed."""
    cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "cache")}
    command = [sys.executable, "-u", "-m", "tests.launch.forked", json.dumps(shared), json.dumps(jobs)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment(), **cpu, **OFFLINE},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the ranks too, where one hangs
    assert status == 0, f"status {status}: {(folder / 'log').read_text()[-4000:]}"
    return [(folder / f"{number}.out").read_text() for number in range(len(jobs))]


def run_rank(job: Job, rank: int, port: str, output: str) -> None:
    os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    os.environ.update(job.variables)
    if job.processes > 1 or job.by_torchrun:
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.processes))
        os.environ.update(ranks | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    if job.by_torchrun:
        roles = {"ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(job.processes), "ROLE_NAME": "default"}
        groups = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        restarts = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
        # There is no agent whose store rank 0 could use.
        agent = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"}
        os.environ.update(roles | groups | restarts | agent)
    if job.aliased:
        importlib.import_module("accelfn.compat").install()
    sys.argv = [job.program, *job.argv]
    sys.path[0] = str(Path(job.program).parent)
    runpy.run_path(job.program, run_name="__main__")
    sys.stdout.flush()


def main() -> int:
    shared = json.loads(sys.argv[1])
    jobs = [Job(*fields) for fields in json.loads(sys.argv[2])]
    for name in shared:
        with suppress(ImportError):
            importlib.import_module(name)
    # The alias is refused where the package itself is loaded.
    assert "accelerate" not in sys.modules or not any(job.aliased for job in jobs)
    fork = get_context("fork")
    for number, job in enumerate(jobs):
        given = (free_port(), f"{number}.out")
        ranks = [fork.Process(target=run_rank, args=(job, rank, *given)) for rank in range(job.processes)]
        for one in ranks:
            one.start()
        while running := [one.sentinel for one in ranks if one.exitcode is None]:
            wait(running)
            if any(one.exitcode for one in ranks):
                ends = [one.exitcode for one in ranks]  # None: it still runs
                for one in ranks:
                    one.kill()
                    one.join()
                print(f"failed with {ends} as exit codes of its ranks: {job}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # without waiting for ranks that hang
