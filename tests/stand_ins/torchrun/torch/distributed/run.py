import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

from .elastic.multiprocessing.api import SignalException
from .elastic.multiprocessing.errors import ChildFailedError


def parse_args(argv: Sequence[str]) -> SimpleNamespace:
    begin = argv.index("--")
    options: dict[str, Any] = {"log_dir": None, "shutdown_timeout": 30, "max_restarts": 0}
    for word in argv[:begin]:
        name, _, text = word.removeprefix("--").partition("=")
        options[name.replace("-", "_")] = int(text) if text.isdecimal() else text or True
    options |= {"nnodes": str(options["nnodes"]), "command": argv[begin + 1 :]}
    return SimpleNamespace(**options)


def run(options: SimpleNamespace) -> None:
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SignalException("", number)

    for name in options.signals_to_handle.split(","):
        signal.signal(getattr(signal, name), stop)
    workers: list[subprocess.Popen[bytes]] = []
    failed_s = 0.0
    for attempt in range(options.max_restarts + 1):
        size = int(options.nproc_per_node)
        folders = [f"{options.log_dir}/none_0/attempt_{attempt}/{rank}" for rank in range(size)]
        for folder in folders:
            os.makedirs(folder)
        workers = [
            subprocess.Popen(
                [sys.executable, "-u", *options.command],
                env={
                    **os.environ,
                    **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
                    "MASTER_ADDR": "127.0.0.1",
                    "GROUP_RANK": "0",
                    "TORCHELASTIC_RESTART_COUNT": str(attempt),
                    "TORCHELASTIC_ERROR_FILE": f"{folders[rank]}/error.json",
                },
                start_new_session=True,
            )
            for rank in range(size)
        ]
        number = signal.SIGTERM
        try:
            while None in (codes := [worker.poll() for worker in workers]) and not any(codes):
                time.sleep(0.02)
            failed_s = time.time()
        except SignalException as error:
            number = error.sigval
            raise
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.send_signal(number)
            for worker in workers:
                try:
                    worker.wait(options.shutdown_timeout)
                except subprocess.TimeoutExpired:  # noqa: PERF203
                    worker.kill()
                    worker.wait()
        if not any(codes):
            return
    failures = {
        rank: SimpleNamespace(exitcode=worker.returncode, timestamp=failed_s)
        for rank, worker in enumerate(workers)
        if worker.returncode
    }
    raise ChildFailedError("", failures)
