"""Start ranks from a notebook, a script or a test. Each rank is a fresh process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, TypeVar

import torch
from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions
from accelfn.context.rendezvous import serve_store
from accelfn.errors import CollectiveTimeoutError, ConfigurationError, DistributedError
from accelfn.launch.config import LaunchConfig
from accelfn.launch.machine import Machine, count_cores
from accelfn.launch.plan_commands import Script, plan_torchrun
from accelfn.launch.rank import (
    RANK_COMMAND,
    name_of,
    read_outcome,
    reported_ranks,
    world_variables,
    write_job,
)
from accelfn.launch.xla import run_on_tpu
from accelfn.testing.part import Outcome, collect, conclude, died, read_stacks

__all__ = ("debug_launcher", "launch_processes", "notebook_launcher")

T = TypeVar("T")
# Time for processes to exit after SIGTERM. torch's agent uses half of it for its ranks.
_STOP_S = 10.0
_POLL_S = 0.02


def launch_processes(
    fn: Callable[Concatenate[Context, ...], T],
    num_processes: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Unpack[ContextOptions],
) -> list[T]:
    """Run ``fn(ctx, *args)`` on ``num_processes`` fresh processes, and return the results.

    Each rank is a new Python process with its own context. The calling process may have initialized CUDA, run
    threads or be a notebook. It doesn't change: no variable is set, and no process group is created. The
    ranks end with this call, or with the calling process.

    A function that is defined in a notebook, in the script itself or in another function needs cloudpickle
    (``accelfn[notebook]``). The ranks have the module search path of this process.

    Ranks: local; the calling process is not a rank.

    Args:
        fn: Function to run on every rank. Its first argument is the context.
        num_processes: Number of ranks, at least 1.
        args: Further arguments, copied to all ranks.
        timeout_s: Maximum time in seconds, including the start; None for no limit.
        environment: Variables to set in the ranks.
        **options: Keyword arguments of :func:`accelfn.init_context` for the contexts of the ranks.

    Returns:
        The results by rank; tensors are moved to the CPU.

    Raises:
        Exception: The exception of a rank, with a note that names the rank, and its traceback as the cause.
            Of several, the one that caused the others.
        MissingRankError: A rank died.
        CollectiveTimeoutError: The ranks did not finish in time.
        MissingExtraError: ``fn`` needs cloudpickle, which isn't installed.
        TypeError: ``fn``, an argument or a result can't be sent to another process, for example because it
            holds a context or an ``Accelerator``; or an argument of this function has the wrong type.
        ValueError: ``num_processes`` is less than 1, or ``timeout_s`` is not positive.
    """
    caller = "launch_processes"
    _check_call(caller, fn, args, num_processes)
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"{caller}: timeout_s must be a positive number of seconds, got {timeout_s!r}.")
    variables = dict(environment or {})
    if not all(isinstance(text, str) for text in (*variables, *variables.values())):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{caller}: environment must map strings to strings, got {variables!r}.")

    def run(folder: Path) -> list[Outcome]:
        return _run_local(caller, folder, num_processes, timeout_s=timeout_s)

    return _run(caller, fn, args, options, {**_threads(num_processes), **variables}, run)


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
    """Run ``function(*args)`` on several fresh processes, and return the results.

    The function creates its own context or ``Accelerator``, model and data. The ranks are fresh processes,
    even if there is only one, so the notebook may have initialized CUDA. The calling process doesn't change.

    This process starts the ranks of one node without restarts; otherwise torch's elastic agent does. On a TPU
    machine (``PJRT_DEVICE=TPU`` or ``TPU_NAME``), torch_xla starts one process per core, and
    ``num_processes`` and the arguments after ``mixed_precision`` are ignored.

    Ranks: local; the calling process is not a rank. With several nodes, call it on each of them.

    Args:
        function: Function to run on every rank. If the notebook defines it, it needs cloudpickle
            (``accelfn[notebook]``).
        args: Its arguments, copied to all ranks.
        num_processes: Number of ranks on this node; None for one per accelerator.
        mixed_precision: Default precision of contexts in the ranks: ``"no"``, ``"fp16"``, ``"bf16"`` or
            ``"fp8"``.
        use_port: Port of the rendezvous; 0 for a free port, or 29500 with several nodes.
        master_addr: Address of node 0.
        node_rank: Rank of this node.
        num_nodes: Number of nodes.
        rdzv_backend: Rendezvous backend: ``"static"`` uses ``node_rank``, ``"c10d"`` assigns ranks.
        rdzv_endpoint: Rendezvous endpoint; empty for ``master_addr`` and ``use_port``.
        rdzv_conf: Further rendezvous options, such as ``{"timeout": 60}``.
        rdzv_id: Rendezvous ID, the same on all nodes.
        max_restarts: Number of times to restart all ranks after a failure.
        monitor_interval: Seconds between checks of the processes.
        log_line_prefix_template: Prefix of each output line of a rank, such as
            ``"[${role_name}${rank}]:"``.

    Returns:
        The results of the ranks of this node, in order; tensors are moved to the CPU.

    Raises:
        Exception: The exception of a rank, with a note that names the rank, and its traceback as the cause.
        ConfigurationError: The port is in use.
        MissingRankError: A rank died.
        MissingExtraError: cloudpickle or torch_xla is needed and isn't installed.
        TypeError: ``function``, an argument or a result can't be sent to another process, for example because
            it holds a context or an ``Accelerator``; or an argument of this function has the wrong type.
        ValueError: An argument is invalid or conflicts with another.
    """
    caller = "notebook_launcher"
    _check_call(caller, function, args, 1 if num_processes is None else num_processes)
    port = int(use_port)
    precision = {"ACCELFN_MIXED_PRECISION": mixed_precision}
    if _is_tpu(os.environ):
        return _run(caller, function, args, None, precision, run_on_tpu, "TPU")
    if num_processes is None and torch.accelerator.device_count() == 0:
        raise ConfigurationError(
            "notebook_launcher: this machine has no accelerator, so num_processes is required. Pass "
            "num_processes=2 for two processes on the CPU."
        )
    size = torch.accelerator.device_count() if num_processes is None else num_processes
    is_plain = (rdzv_backend, rdzv_endpoint, rdzv_id) == ("static", "", "none") and not rdzv_conf
    is_pinned = num_nodes > 1 or port
    config = LaunchConfig(
        mixed_precision=mixed_precision,
        num_processes=size * num_nodes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=master_addr if is_pinned else None,
        main_process_port=port or None,
        # None, because after a static rendezvous only the failed node would restart.
        rdzv_backend=None if rdzv_backend == "static" else rdzv_backend,
        rdzv_endpoint=rdzv_endpoint or None,
        rdzv_id=rdzv_id,
        rdzv_conf=",".join(f"{name}={value}" for name, value in (rdzv_conf or {}).items()) or None,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        shutdown_timeout=int(_STOP_S / 2),
        tee="0" if log_line_prefix_template is None else "3",
        no_python=True,
    )

    def run(folder: Path) -> list[Outcome]:
        if num_nodes == 1 and not max_restarts and is_plain and log_line_prefix_template is None:
            return _run_local(caller, folder, size, address=master_addr, port=port)
        return _run_agent(caller, folder, config, log_line_prefix_template)

    where = "fresh processes of this node"
    return _run(caller, function, args, None, {**_threads(size), **precision}, run, where)


def debug_launcher(function: Callable[..., T], args: Sequence[Any] = (), num_processes: int = 2) -> list[T]:
    """Run ``function(*args)`` on several fresh CPU processes, to debug distributed code.

    As :func:`notebook_launcher`, but always on the CPU, and in full precision by default.

    Ranks: local; the calling process is not a rank.

    Args:
        function: Function to run on every rank. It creates its own context or ``Accelerator``.
        args: Its arguments, copied to all ranks.
        num_processes: Number of ranks.

    Returns:
        The results by rank.

    Raises:
        Exception: The exception of a rank, with a note that names the rank, and its traceback as the cause.
        MissingRankError: A rank died.
        MissingExtraError: ``function`` needs cloudpickle, which isn't installed.
        TypeError: ``function``, an argument or a result can't be sent to another process, for example because
            it holds a context or an ``Accelerator``; or an argument of this function has the wrong type.
        ValueError: ``num_processes`` is less than 1.
    """
    caller = "debug_launcher"
    _check_call(caller, function, args, num_processes)
    variables = {
        **_threads(num_processes),
        "ACCELFN_USE_CPU": "true",
        "ACCELFN_MIXED_PRECISION": "no",
        "ACCELFN_TORCH_DEVICE": "cpu",  # instead of the calling process's setting
    }

    def run(folder: Path) -> list[Outcome]:
        return _run_local(caller, folder, num_processes)

    return _run(caller, function, args, None, variables, run)


def _check_call(caller: str, fn: object, args: object, num_processes: object) -> None:
    """Check what every launcher takes. A string or a tensor as ``args`` would be unpacked into items."""
    if not callable(fn):
        raise TypeError(f"{caller}: the first argument must be a function, got {fn!r}.")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(
            f"{caller}: args must be a tuple or list of the arguments of {name_of(fn)}, got "
            f"{type(args).__name__}. For a single argument use args=(x,)."
        )
    if not isinstance(num_processes, int) or isinstance(num_processes, bool) or num_processes < 1:
        raise ConfigurationError(
            f"{caller}: num_processes must be an integer, 1 or more, got {num_processes!r}."
        )


def _is_tpu(env: Mapping[str, str]) -> bool:
    """Return whether the variables are those of a TPU machine. Pure.

    >>> _is_tpu({"PJRT_DEVICE": "TPU"}), _is_tpu({"PJRT_DEVICE": "CPU", "TPU_NAME": "t"})
    (True, False)
    """
    device = env.get("PJRT_DEVICE")
    return device.upper() == "TPU" if device else bool(env.get("TPU_NAME"))


def _threads(num_processes: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each rank, so that they share the cores, unless it is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, count_cores() // num_processes))}


def _run(
    caller: str,
    fn: Callable[..., T],
    args: Sequence[Any],
    options: Mapping[str, Any] | None,
    environment: Mapping[str, str],
    run: Callable[[Path], list[Outcome]],
    where: str = "fresh processes",
) -> list[T]:
    """Write the job of the ranks into a folder, run it, and return the results or raise."""
    # If this process is killed, the ranks remove it.
    with tempfile.TemporaryDirectory(prefix="accelfn-launch-", ignore_cleanup_errors=True) as folder:
        write_job(Path(folder), caller, fn, args, options, environment)
        return conclude(run(Path(folder)), where)


def _run_local(
    caller: str,
    folder: Path,
    size: int,
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    timeout_s: float | None = None,
) -> list[Outcome]:
    """Run the job in ``folder`` on fresh processes of this machine, and stop all of them."""
    try:
        # This process serves the store, so that port 0 works.
        store = serve_store(address, port)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{caller}: can't use port {port} of {address}: {error}. Leave the port out to use any free port."
        ) from error
    processes: list[subprocess.Popen[bytes]] = []

    def poll(rank: int) -> Outcome | None:
        code = processes[rank].poll()  # before reading the report, which a rank may write at its end
        return read_outcome(folder, rank) or (None if code is None else died(rank, code))

    def pause(waiting: Sequence[int], seconds: float) -> None:
        time.sleep(min(seconds, _POLL_S))

    with _stopping(processes):
        for rank in range(size):
            run_id = f"accelfn-{os.getpid()}"
            variables = world_variables(rank, size, 1, (address, store.port), run_id=run_id)
            processes.append(_start([sys.executable, *RANK_COMMAND, str(folder)], variables))
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        outcomes = collect(size, poll, pause, deadline)
        late = [rank for rank in range(size) if rank not in outcomes]
        who = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        advice = "" if timeout_s is None else f" Increase timeout_s={timeout_s:g} of {caller} if needed."
        for rank in late:
            stack = ""
            # A rank that has just been started has no file, nor a handler of the signal.
            with contextlib.suppress(FileNotFoundError), open(folder / f"stack-{rank}", "rb") as file:
                stack = read_stacks(processes[rank].pid, file)
            shown = f" Stack of rank {rank}:\n{stack}" if stack else ""
            error = CollectiveTimeoutError(f"{who} did not finish in time.{advice}{shown}")
            outcomes[rank] = Outcome(error=error, ended=False, stack=stack)
        return [outcomes[rank] for rank in range(size)]


def _start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process with the output of this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    return subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def _stopping(processes: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    """Stop ``processes`` at the end of the block."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        until = time.monotonic() + _STOP_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()


def _run_agent(caller: str, folder: Path, config: LaunchConfig, prefix: str | None) -> list[Outcome]:
    """Run the job in ``folder`` with torch's elastic agent: for several nodes, restarts and output prefixes.

    The agent is a separate process, because it sets variables and signal handlers.
    """
    python = sys.executable
    plan = plan_torchrun(config, Script(python, (*RANK_COMMAND, str(folder))), Machine(python=python))
    variables = {**dict(plan.env_changes), "ACCELFN_AGENT_OUTCOME": str(folder / "agent.json")}
    if prefix is not None:
        variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = prefix
    # For the agent itself; ranks read their number of threads from the job.
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    agent = _start(plan.argv, variables)
    with _stopping([agent]):
        code = agent.wait()
    report: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        report = json.loads((folder / "agent.json").read_text("utf-8"))
    if report.get("error") or (code and not report):
        reason = report.get("error", f"the agent ended with status {code}")
        where = config.rdzv_endpoint or f"{config.main_process_ip}:{config.main_process_port}"
        raise DistributedError(
            f"{caller}: node {config.machine_rank} of {config.num_machines} could not start its ranks "
            f"(rendezvous at {where}): {reason}. Run the same cell on every node, with an address and port "
            "that all of them can reach."
        )
    exitcodes = {int(rank): exitcode for rank, exitcode in report.get("exitcodes", {}).items()}
    attempts = reported_ranks(folder)
    last = max(attempts.values(), default=0)
    # Without the ranks that the agent has stopped because of another one.
    ranks = sorted({*exitcodes, *(rank for rank, attempt in attempts.items() if attempt == last)})
    return [read_outcome(folder, rank, last) or died(rank, exitcodes.get(rank, 0)) for rank in ranks]
