"""Have torch's elastic agent start the ranks: for several nodes, restarts, and output with prefixes.

The agent is a process of its own: in this one it would set variables and signal handlers.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accelfn.errors import DistributedError
from accelfn.launch.launchers.job import END_WITH_PARENT, RANK_COMMAND, attempts, read_outcome, told_to_end
from accelfn.launch.launchers.local import ending
from accelfn.testing.outcome import Outcome

__all__ = ("Meeting", "be_agent", "launch_config", "run_elastic")

# How long the agent waits for its ranks to end before it kills them, and how long we wait for the agent.
_SHUTDOWN_S = 5
_LAST_S = 10.0
_BOOT = f"""{END_WITH_PARENT}
import json, pathlib
setup = json.loads(pathlib.Path(sys.argv[1], "setup.json").read_text("utf-8"))
sys.path[:] = setup["path"]
from accelfn.launch.launchers.elastic import be_agent
sys.exit(be_agent(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How the nodes of a launch find each other, and what happens to their ranks.

    Attributes:
        local_size: Number of ranks on this node.
        num_nodes: Number of nodes.
        node_rank: Number of this one.
        backend: ``"static"`` or ``"c10d"``, or another one that torch knows.
        endpoint: Host and port.
        options: Further ones of the backend.
        run_id: Name of the run.
        max_restarts: How often all ranks are started again after one has failed.
        monitor_interval: Seconds between looks at them.
        prefix: Template of what stands before each line of output, or None.
    """

    local_size: int
    num_nodes: int = 1
    node_rank: int = 0
    backend: str = "static"
    endpoint: str = "127.0.0.1:0"
    options: Mapping[str, Any]
    run_id: str = "none"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    prefix: str | None = None


def launch_config(meeting: Meeting, logs: str) -> LaunchConfig:
    """Return the same for torch. Pure.

    Args:
        meeting: What was asked for.
        logs: Folder for copies of the output, where lines get a prefix.
    """
    # On one node and without a port of its own: c10d takes any that is free, and static can't.
    alone = meeting.num_nodes == 1 and meeting.endpoint.endswith(":0")
    # After a static meeting only the node that failed would start again.
    again = meeting.backend == "static" and meeting.max_restarts > 0
    backend = "c10d" if alone or again else meeting.backend
    options = dict(meeting.options)
    if backend == "static":
        options["rank"] = meeting.node_rank
    elif backend == "c10d" and meeting.num_nodes > 1:
        # It deals out ranks itself; ours still says who hosts, which torch would guess from host names.
        options.setdefault("is_host", str(meeting.node_rank == 0).lower())
    return LaunchConfig(
        min_nodes=meeting.num_nodes,
        max_nodes=meeting.num_nodes,
        nproc_per_node=meeting.local_size,
        run_id=meeting.run_id,
        rdzv_backend=backend,
        rdzv_endpoint=meeting.endpoint,
        rdzv_configs=options,
        max_restarts=meeting.max_restarts,
        monitor_interval=meeting.monitor_interval,
        # Otherwise ranks look for each other under the host's name, which need not resolve.
        local_addr="127.0.0.1" if alone else None,
        # Without a folder it makes one elsewhere, and leaves it there.
        logs_specs=DefaultLogsSpecs(log_dir=logs, tee=Std.NONE if meeting.prefix is None else Std.ALL),
        log_line_prefix_template=meeting.prefix,
        shutdown_timeout=_SHUTDOWN_S,
    )


def be_agent(folder: str) -> int:
    """Be the process that starts and watches the ranks of this node.

    Args:
        folder: Of the launch.

    Returns:
        The exit status: 0; 1 where a rank has failed; 2 where the ranks could not be started.
    """
    place = Path(folder)
    meeting = Meeting(**json.loads((place / "meeting.json").read_text("utf-8")))
    # What ranks fail of, they report; the agent's own words about it would only hide that.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    (place / "logs").mkdir()
    if meeting.max_restarts:  # for the reason that plan_torchrun gives
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    code, ended = 0, dict[int, int]()
    try:
        run = elastic_launch(launch_config(meeting, str(place / "logs")), sys.executable)
        ended = dict.fromkeys(run(*RANK_COMMAND, folder), 0)
    except ChildFailedError as error:
        code = 1
        ended = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except Exception as error:  # noqa: BLE001 -- it is told where the user sees it
        code = 2
        (place / "agent").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    (place / "ended.json").write_text(json.dumps(ended), encoding="utf-8")
    return code


def run_elastic(caller: str, folder: Path, meeting: Meeting) -> list[Outcome]:
    """Run the job in ``folder`` on this node's ranks. Effect: starts an agent, which starts them.

    Args:
        caller: Name of the launcher, for messages.
        folder: Of the launch, filled by ``write_job``.
        meeting: What to run, and with whom.

    Returns:
        What became of each rank of this node, in their order. None of them runs any more.

    Raises:
        DistributedError: The nodes could not meet.
    """
    (folder / "meeting.json").write_text(json.dumps(asdict(meeting)), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    agent = subprocess.Popen(
        [sys.executable, "-u", "-c", _BOOT, str(folder)],
        # Before it loads torch. A rank has its own number of threads in the job.
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        stdin=subprocess.DEVNULL,
    )
    with ending([agent], _LAST_S):
        code = agent.wait()
    if code == 2 or not (folder / "ended.json").exists():
        told = folder / "agent"
        why = told.read_text("utf-8") if told.exists() else f"the agent ended with status {code}"
        raise DistributedError(
            f"{caller}: node {meeting.node_rank} of {meeting.num_nodes} could not start its ranks (meeting "
            f"by {meeting.backend} at {meeting.endpoint}): {why}. Run the same cell on every node, with one "
            "address and port that each of them reaches."
        )
    ended = {int(rank): code for rank, code in json.loads((folder / "ended.json").read_text("utf-8")).items()}
    reported = attempts(folder)
    last = max(reported.values(), default=0)
    ranks = sorted({*ended, *(rank for rank, attempt in reported.items() if attempt == last)})
    # A rank without a report that the agent has ended on account of another one isn't told of.
    found = [(rank, read_outcome(folder, rank, last)) for rank in ranks]
    return [one or told_to_end(rank, ended.get(rank, 0)) for rank, one in found]
