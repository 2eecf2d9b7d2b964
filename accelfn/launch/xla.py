"""Run a function on every core of a TPU with torch_xla. Written for torch_xla 2.9, not run yet.

The function is one of a script, for ``accelfn launch --tpu``, or the job of a notebook:
``python -m accelfn.launch.xla FUNCTION N script|module NAME arguments``
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelfn.errors import MissingExtraError
from accelfn.launch.rank import call, read_outcome, reported_ranks
from accelfn.testing.part import Outcome


def main() -> None:
    """Start the processes of a TPU, and wait for them.

    Raises:
        SystemExit: The function doesn't exist.
    """
    name, num_processes, kind, script, *arguments = sys.argv[1:]
    spawn = importlib.import_module("torch_xla.distributed.xla_multiprocessing").spawn
    sys.argv = [script, *arguments]
    function = find_function(name, script, is_module=kind == "module")
    # torch_xla starts either one process or all.
    spawn(function, args=(), nprocs=1 if num_processes == "1" else None)


def find_function(name: str, script: str, *, is_module: bool) -> Callable[[int], object]:
    """Import a script as a module, and return one of its functions.

    Raises:
        SystemExit: The function doesn't exist.
    """
    if is_module:
        module = importlib.import_module(script)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        # Under its own name, so that spawned processes can import it.
        module = importlib.import_module(os.path.splitext(os.path.basename(script))[0])
    function = getattr(module, name, None)
    if not callable(function):
        sys.exit(
            f"accelfn launch: error: {script} has no function {name!r}. Pass the right one as "
            "--main_training_function."
        )
    return function


def run_on_tpu(folder: Path) -> list[Outcome]:
    """Run the job in ``folder`` on all TPU cores, and return the outcomes of the ranks.

    Raises:
        MissingExtraError: torch_xla isn't installed.
    """
    try:
        torch_xla: Any = importlib.import_module("torch_xla")
    except ImportError as error:
        raise MissingExtraError(
            "notebook_launcher: PJRT_DEVICE or TPU_NAME is set, and a TPU needs torch_xla. Run: pip install "
            "'torch_xla[tpu]', in the version of torch. Without a TPU, unset the variable."
        ) from error
    failure: Exception | None = None
    try:
        torch_xla.launch(_run_rank, args=(str(folder),), start_method="spawn")
    except Exception as error:  # noqa: BLE001 -- the reports of the ranks have more details
        failure = error
    ranks = sorted(reported_ranks(folder))
    outcomes = [outcome for rank in ranks if (outcome := read_outcome(folder, rank)) is not None]
    if failure is not None and all(outcome.error is None for outcome in outcomes):
        raise failure
    return outcomes


def _run_rank(index: int, path: str) -> None:
    """Run the job in a folder as one rank; torch_xla calls this in each process."""
    folder = Path(path)
    setup = json.loads((folder / "setup.json").read_text("utf-8"))
    os.environ.update(setup["environment"])
    os.environ["ACCELFN_TORCH_DEVICE"] = "xla"
    error = call(folder, setup, index, 0)
    if error is not None:
        raise error


if __name__ == "__main__":
    main()
