"""Have torch_xla start the ranks: one for each core of a TPU. Written against torch_xla 2.8, not run."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelfn.errors import DistributedError, MissingExtraError
from accelfn.launch.launchers.job import attempts, learn_sources, read_call, read_outcome, write_report
from accelfn.testing.outcome import Outcome

__all__ = ("asks_for_tpu", "be_tpu_rank", "run_on_tpu")


def asks_for_tpu(env: Mapping[str, str]) -> bool:
    """Whether the variables are those of a machine with a TPU. Pure.

    >>> asks_for_tpu({"PJRT_DEVICE": "TPU"}), asks_for_tpu({"PJRT_DEVICE": "CPU", "TPU_NAME": "t"})
    (True, False)
    """
    device = env.get("PJRT_DEVICE")
    return device.upper() == "TPU" if device else bool(env.get("TPU_NAME"))


def run_on_tpu(folder: Path) -> list[Outcome]:
    """Run the job in ``folder`` on each core of this machine's TPU.

    A context has no device there yet: ``init_context`` in the function refuses, and nothing runs on the CPU
    in silence. The function itself finds its device as torch_xla's own programs do.

    Args:
        folder: Of the launch, filled by ``write_job``.

    Returns:
        What became of each rank, by rank.

    Raises:
        MissingExtraError: torch_xla isn't installed.
        DistributedError: torch_xla could not start the ranks, and they have said nothing.
    """
    try:
        torch_xla: Any = importlib.import_module("torch_xla")
    except ImportError as error:
        raise MissingExtraError(
            "notebook_launcher: PJRT_DEVICE or TPU_NAME says that this machine has a TPU, which takes "
            "torch_xla: pip install 'torch_xla[tpu]' of the same version as torch. Without a TPU, unset "
            "the variable."
        ) from error
    failure: Exception | None = None
    try:
        torch_xla.launch(be_tpu_rank, args=(str(folder),), start_method="spawn")
    except Exception as error:  # noqa: BLE001 -- what the ranks have reported tells more
        failure = error
    found = [read_outcome(folder, rank) for rank in sorted(attempts(folder))]
    outcomes = [one for one in found if one is not None]
    if failure is not None and not any(one.error is not None for one in outcomes):
        raise DistributedError(
            f"notebook_launcher: torch_xla could not run the ranks: {failure}. Try one of its own programs."
        ) from failure
    return outcomes


def be_tpu_rank(index: int, folder: str) -> None:
    """Be one rank: what torch_xla calls in each process.

    Args:
        index: Number of the rank.
        folder: Of the launch.
    """
    place = Path(folder)
    setup = json.loads((place / "setup.json").read_text("utf-8"))
    os.environ.update(setup["environment"])
    learn_sources(setup["sources"])
    os.environ["ACCELFN_TORCH_DEVICE"] = "xla"  # which init_context refuses, with what there is
    value: Any = None
    error: BaseException | None = None
    try:
        fn, args, _ = read_call(place)
        value = fn(*args)
    except BaseException as raised:  # noqa: BLE001 -- whatever ends a rank is reported
        error = raised
    error = write_report(place, index, 0, value, error)
    if error is not None:
        raise error
