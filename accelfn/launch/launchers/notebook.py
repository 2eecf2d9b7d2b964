"""``notebook_launcher`` and ``debug_launcher``: a function that makes its own context, on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from accelfn.context.config import PrecisionType
from accelfn.errors import ConfigurationError
from accelfn.launch.launchers.arguments import check_call, check_seconds, check_whole
from accelfn.launch.launchers.elastic import Meeting, run_elastic
from accelfn.launch.launchers.job import launch_folder, write_job
from accelfn.launch.launchers.local import run_locally
from accelfn.launch.launchers.processes import rank_threads
from accelfn.launch.launchers.tpu import asks_for_tpu, run_on_tpu
from accelfn.testing.outcome import conclude

__all__ = ("debug_launcher", "notebook_launcher")

T = TypeVar("T")
_DEFAULT_PORT = 29500


def notebook_launcher(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "0",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> list[T]:
    """Run ``function(*args)`` on several fresh processes, and return what each returned.

    The function makes its own context or ``Accelerator``, and must import or define what it needs, the model
    and the data above all. It runs in fresh processes, one process too: so it works though the notebook has
    touched an accelerator, and what it changes the notebook does not see. Nothing is changed here, no
    variable either.

    One node without restarts is started right from here; anything else by torch's elastic agent. Where the
    variables of a TPU machine are set (``PJRT_DEVICE=TPU``, ``TPU_NAME``), torch_xla starts one process per
    core, and ``num_processes`` and what follows has no meaning.

    Ranks: local; the calling process is none of the ranks. With several nodes, on each of them.

    Args:
        function: What every rank runs. One from the notebook itself takes cloudpickle
            (``accelfn[notebook]``).
        args: Its arguments, the same for all; they are copied.
        num_processes: Number of ranks on this node. None: as many as it has accelerators.
        mixed_precision: What contexts in the ranks use that are given none: ``"no"``, ``"fp16"``, ``"bf16"``
            or ``"fp8"``.
        use_port: Port at which the ranks meet. 0: any that is free; on several nodes 29500.
        master_addr: Address of node 0.
        node_rank: Number of this node, from 0.
        num_nodes: Number of nodes; the cell is run on each of them.
        rdzv_backend: How nodes meet: ``"static"``, by ``node_rank``, or ``"c10d"``, which deals out ranks.
        rdzv_endpoint: Where they meet; ``master_addr`` and ``use_port`` when empty.
        rdzv_conf: Further options of the meeting, such as ``{"timeout": 60}``.
        rdzv_id: Name of the run, the same on all nodes.
        max_restarts: How often all ranks are started again after one has failed.
        monitor_interval: Seconds between looks at the processes.
        log_line_prefix_template: What stands before each line of a rank's output, such as
            ``"[${role_name}${rank}]:"``.

    Returns:
        What ``function`` returned on the ranks of this node, in their order; tensors come back on the CPU.

    Raises:
        Exception: What a rank raised, with a note that names the rank; its cause is the rank's traceback.
        ConfigurationError: The port is taken.
        MissingRankError: A rank died.
        MissingExtraError: ``function`` needs cloudpickle, or the TPU torch_xla, which isn't installed.
        TypeError: ``function``, an argument or a result can't be sent to another process; what holds a
            context or an ``Accelerator`` is refused. Or an argument of this function is of the wrong kind.
        ValueError: An argument is not valid, or contradicts another.
    """
    caller = "notebook_launcher"
    check_call(caller, function, args)
    if num_processes is not None:
        num_processes = check_whole(caller, "num_processes", num_processes, 1)
    num_nodes = check_whole(caller, "num_nodes", num_nodes, 1)
    node_rank = check_whole(caller, "node_rank", node_rank, 0)
    max_restarts = check_whole(caller, "max_restarts", max_restarts, 0)
    check_seconds(caller, "monitor_interval", monitor_interval)
    known = tuple(kind.value for kind in PrecisionType)
    if mixed_precision not in known:
        raise ValueError(
            f"notebook_launcher: mixed_precision must be one of {', '.join(known)}, got {mixed_precision!r}."
        )
    if node_rank >= num_nodes:
        raise ValueError(
            f"notebook_launcher: node_rank must lie in 0..num_nodes - 1: got node_rank={node_rank} of "
            f"num_nodes={num_nodes}."
        )
    port = _port_of(use_port)
    precision = {"ACCELFN_MIXED_PRECISION": mixed_precision}
    with launch_folder() as place:
        if asks_for_tpu(os.environ):
            write_job(place, "notebook_launcher", function, args, None, precision)
            return conclude(run_on_tpu(place), "TPU")
        size = _size_of(num_processes)
        write_job(place, "notebook_launcher", function, args, None, {**rank_threads(size), **precision})
        plain = (num_nodes, max_restarts) == (1, 0)
        plain = plain and (rdzv_backend, rdzv_endpoint, rdzv_id) == ("static", "", "none")
        if not plain or rdzv_conf or log_line_prefix_template is not None:
            meeting = Meeting(
                local_size=size,
                num_nodes=num_nodes,
                node_rank=node_rank,
                backend=rdzv_backend,
                endpoint=rdzv_endpoint or f"{master_addr}:{port or (_DEFAULT_PORT if num_nodes > 1 else 0)}",
                options={name: str(value) for name, value in (rdzv_conf or {}).items()},
                run_id=rdzv_id,
                max_restarts=max_restarts,
                monitor_interval=monitor_interval,
                prefix=log_line_prefix_template,
            )
            outcomes = run_elastic("notebook_launcher", place, meeting)
        else:
            outcomes = run_locally(
                "notebook_launcher",
                place,
                size,
                address=master_addr,
                port=port,
                look_s=min(0.1, monitor_interval),
            )
        return conclude(outcomes, "fresh processes of this node")


def debug_launcher(function: Callable[..., T], args: Sequence[Any] = (), num_processes: int = 2) -> list[T]:
    """Run ``function(*args)`` on several fresh processes of the CPU, to try out distributed code.

    As :func:`notebook_launcher`, but on the CPU also where there is an accelerator, and in full precision
    unless the function asks for another.

    Ranks: local; the calling process is none of the ranks.

    Args:
        function: What every rank runs; it makes its own context or ``Accelerator``.
        args: Its arguments, the same for all.
        num_processes: Number of ranks.

    Returns:
        What ``function`` returned, by rank.

    Raises:
        Exception: What a rank raised, with a note that names the rank; its cause is the rank's traceback.
        MissingRankError: A rank died.
        MissingExtraError: ``function`` needs cloudpickle, which isn't installed.
        TypeError: ``function``, an argument or a result can't be sent to another process; what holds a
            context or an ``Accelerator`` is refused. Or an argument of this function is of the wrong kind.
        ValueError: ``num_processes`` is less than 1.
    """
    check_call("debug_launcher", function, args)
    num_processes = check_whole("debug_launcher", "num_processes", num_processes, 1)
    variables = {
        **rank_threads(num_processes),
        "ACCELFN_USE_CPU": "true",
        "ACCELFN_MIXED_PRECISION": "no",
        "ACCELFN_TORCH_DEVICE": "cpu",  # whatever this process was told to use
    }
    with launch_folder() as place:
        write_job(place, "debug_launcher", function, args, None, variables)
        return conclude(run_locally("debug_launcher", place, num_processes), "fresh processes")


def _port_of(given: str | int) -> int:
    try:
        port = int(given)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port < 1 << 16:
        raise ValueError(f"notebook_launcher: use_port must be 0..{(1 << 16) - 1}, got {given!r}.")
    return port


def _size_of(given: int | None) -> int:
    if given is not None:
        return given
    count = torch.accelerator.device_count()
    if count == 0:
        raise ConfigurationError(
            "notebook_launcher: there is no accelerator here to count, so num_processes must be given. Pass "
            "num_processes=2, for two processes on the CPU."
        )
    return count
