"""Start ranks from code: a notebook, a script, a test. Each rank is a fresh process."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions
from accelfn.context.config import PrecisionType
from accelfn.errors import CollectiveTimeoutError, ConfigurationError, DistributedError, MissingExtraError
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.function_ranks import (
    RANK_COMMAND,
    WHERE_ARE_YOU,
    be_xla_rank,
    died,
    name_of,
    read_outcome,
    reported,
    write_job,
)
from accelfn.launch.plan.commands import Script, plan_torchrun
from accelfn.launch.plan.machine import Machine
from accelfn.testing.part import Outcome, conclude

__all__ = ("debug_launcher", "launch_processes", "notebook_launcher")

T = TypeVar("T")
# After one rank has failed, the others get this long to fail in their own words before they are ended.
_GRACE_S = 3.0
# And this long to end once they were told to; torch's agent takes half of it for its ranks.
_LAST_S = 10.0
_LOOK_S = 0.02
_ANSWER_S = 1.0


def launch_processes(
    fn: Callable[Concatenate[Context, ...], T],
    num_processes: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Unpack[ContextOptions],
) -> list[T]:
    """Run ``fn(ctx, *args)`` on each of ``num_processes`` fresh processes, and return what each returned.

    Each process starts anew, as ``python`` would, and makes its own context. So it does not matter whether
    this process has touched an accelerator, has threads, or runs a notebook; and what ``fn`` changes in its
    process, this one does not see. The ranks end with this call, or when this process ends, however it ends.
    Nothing changes here: no variable is set, no process group made.

    A function that a notebook or a script defines itself, or that stands inside of another one, takes
    cloudpickle (``accelfn[notebook]``). Modules must be importable; the ranks search where this process does.

    Ranks: local; the calling process is none of the ranks.

    Args:
        fn: What every rank runs, with its context before the arguments.
        num_processes: Number of ranks, at least 1.
        args: Further arguments, the same for all; they are copied.
        timeout_s: How long the ranks may take in all, their start included; None: for ever.
        environment: Variables to set in the ranks.
        **options: Keyword arguments of :func:`accelfn.init_context`, for every rank's context.

    Returns:
        What ``fn`` returned, by rank; tensors come back on the CPU.

    Raises:
        Exception: What a rank raised: of several, the one that was the cause of the others, with a note that
            names its rank. Its cause is the traceback of the rank.
        MissingRankError: A rank died.
        CollectiveTimeoutError: The ranks did not end in time.
        MissingExtraError: ``fn`` can be sent by cloudpickle only, which isn't installed.
        TypeError: ``fn``, an argument or a result can't be sent to another process; what holds a
            context or an ``Accelerator`` is refused. Or an argument of this function is of the wrong kind.
        ValueError: ``num_processes`` is less than 1, or ``timeout_s`` not more than 0.
    """
    caller = "launch_processes"
    _check_call(caller, fn, args)
    size = _check_whole(caller, "num_processes", num_processes, 1)
    if timeout_s is not None:
        _check_seconds(caller, "timeout_s", timeout_s)
    for name in options:
        if name not in ContextOptions.__annotations__:
            hint = difflib.get_close_matches(name, ContextOptions.__annotations__, 1)
            raise TypeError(
                f"{caller}: unknown argument {name!r}. "
                + (f"Did you mean {hint[0]}?" if hint else "It takes those of init_context.")
            )
    given = dict(environment or {})
    if not all(isinstance(one, str) for one in (*given, *given.values())):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{caller}: environment must hold texts as names and values, got {given!r}.")
    with _launch_folder() as place:
        write_job(place, caller, fn, args, options, {**_threads(size), **given})
        return conclude(_run_here(caller, place, size, timeout_s=timeout_s), "fresh processes")


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
    _check_call(caller, function, args)
    num_nodes = _check_whole(caller, "num_nodes", num_nodes, 1)
    node_rank = _check_whole(caller, "node_rank", node_rank, 0)
    max_restarts = _check_whole(caller, "max_restarts", max_restarts, 0)
    _check_seconds(caller, "monitor_interval", monitor_interval)
    port = _check_whole(caller, "use_port", int(use_port), 0)
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
    precision = {"ACCELFN_MIXED_PRECISION": mixed_precision}
    if _asks_for_tpu(os.environ):
        with _launch_folder() as place:
            write_job(place, caller, function, args, None, precision)
            return conclude(_run_on_tpu(place), "TPU")
    if num_processes is None and torch.accelerator.device_count() == 0:
        raise ConfigurationError(
            "notebook_launcher: there is no accelerator here to count, so num_processes must be given. Pass "
            "num_processes=2, for two processes on the CPU."
        )
    size = torch.accelerator.device_count() if num_processes is None else num_processes
    size = _check_whole(caller, "num_processes", size, 1)
    where = "fresh processes of this node"
    with _launch_folder() as place:
        write_job(place, caller, function, args, None, {**_threads(size), **precision})
        named = (rdzv_backend, rdzv_endpoint, rdzv_id) != ("static", "", "none") or bool(rdzv_conf)
        if num_nodes == 1 and not max_restarts and not named and log_line_prefix_template is None:
            return conclude(_run_here(caller, place, size, address=master_addr, port=port), where)
        is_pinned = num_nodes > 1 or port
        config = LaunchConfig(
            num_processes=size * num_nodes,
            num_machines=num_nodes,
            machine_rank=node_rank,
            main_process_ip=master_addr if is_pinned else None,
            main_process_port=port or None,
            # After a static meeting only the node that failed would start again.
            rdzv_backend=None if rdzv_backend == "static" else rdzv_backend,
            rdzv_endpoint=rdzv_endpoint or None,
            rdzv_id=rdzv_id,
            rdzv_conf=",".join(f"{name}={value}" for name, value in (rdzv_conf or {}).items()) or None,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            shutdown_timeout=int(_LAST_S / 2),
            tee="0" if log_line_prefix_template is None else "3",
            no_python=True,
        )
        return conclude(_run_agent(caller, place, config, log_line_prefix_template), where)


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
    _check_call("debug_launcher", function, args)
    size = _check_whole("debug_launcher", "num_processes", num_processes, 1)
    variables = {
        **_threads(size),
        "ACCELFN_USE_CPU": "true",
        "ACCELFN_MIXED_PRECISION": "no",
        "ACCELFN_TORCH_DEVICE": "cpu",  # whatever this process was told to use
    }
    with _launch_folder() as place:
        write_job(place, "debug_launcher", function, args, None, variables)
        return conclude(_run_here("debug_launcher", place, size), "fresh processes")


def _check_call(caller: str, fn: object, args: object) -> None:
    """Check that there is a function and a tuple: a text would be spread into letters, a tensor into rows."""
    if not callable(fn):
        raise TypeError(f"{caller}: the first argument must be a function, got {fn!r}.")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(
            f"{caller}: args must be a tuple or list with one item for each argument of {name_of(fn)}, got "
            f"{type(args).__name__}. For a single one write args=(x,)."
        )


def _check_whole(caller: str, name: str, given: object, least: int) -> int:
    """Return ``given`` as a whole number, at least ``least``."""
    try:
        number = None if isinstance(given, bool) else operator.index(given)  # pyright: ignore[reportArgumentType] -- asked
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{caller}: {name} must be a whole number, {least} or more, got {given!r}.")
    if number < least:
        raise ValueError(f"{caller}: {name} must be at least {least}, got {number}.")
    return number


def _check_seconds(caller: str, name: str, given: float) -> None:
    if not given > 0:
        raise ValueError(f"{caller}: {name} must be more than 0 seconds, got {given!r}.")


def _asks_for_tpu(env: Mapping[str, str]) -> bool:
    """Return whether the variables are those of a machine with a TPU. Pure.

    >>> _asks_for_tpu({"PJRT_DEVICE": "TPU"}), _asks_for_tpu({"PJRT_DEVICE": "CPU", "TPU_NAME": "t"})
    (True, False)
    """
    device = env.get("PJRT_DEVICE")
    return device.upper() == "TPU" if device else bool(env.get("TPU_NAME"))


def _threads(num_processes: int) -> dict[str, str]:
    """Share the cores of this machine, where nobody has said how many threads a rank shall have."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // num_processes))}


@contextlib.contextmanager
def _launch_folder() -> Generator[Path]:
    # Where this process is killed, the ranks take it away when they end.
    with tempfile.TemporaryDirectory(prefix="accelfn-launch-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _run_here(
    caller: str,
    folder: Path,
    size: int,
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    timeout_s: float | None = None,
) -> list[Outcome]:
    """Run the job in ``folder`` on fresh processes, and host their store. None of them runs afterwards."""
    try:
        # The launcher hosts the store, so that no port is guessed.
        store = dist.TCPStore(address, port, None, True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage] -- documented, but not exported
    except RuntimeError as error:
        raise ConfigurationError(
            f"{caller}: port {port} of {address} can't be had: {error}. Leave the port out to take any that "
            "is free."
        ) from error
    world = {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": f"accelfn-{os.getpid()}",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    processes: list[subprocess.Popen[bytes]] = []
    with _ending(processes):
        for rank in range(size):
            own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
            processes.append(_start([sys.executable, *RANK_COMMAND, str(folder)], {**world, **own}))
        outcomes: dict[int, Outcome] = {}
        until = None if timeout_s is None else time.monotonic() + timeout_s
        # Wait until each has reported or died; after a failure not much longer.
        while len(outcomes) < size and (until is None or time.monotonic() < until):
            for rank, process in enumerate(processes):
                code = process.poll()  # before the look for a report, which it may write last of all
                found = None if rank in outcomes else read_outcome(folder, rank)
                if rank in outcomes or (found is None and code is None):
                    continue
                outcomes[rank] = died(rank, code or 0) if found is None else found
                if outcomes[rank].error is not None:
                    soon = time.monotonic() + _GRACE_S
                    until = soon if until is None else min(until, soon)
            time.sleep(_LOOK_S)
        advice = (
            "Look" if timeout_s is None else f"Give {caller} a longer timeout_s than {timeout_s:g}, or look"
        )
        late = [rank for rank in range(size) if rank not in outcomes]
        who = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        for rank in late:
            stack = _ask_where(folder, rank, processes[rank])
            error = CollectiveTimeoutError(
                f"{who} did not end in time. {advice} at what keeps {'them' if len(late) > 1 else 'it'}."
                + (f" Rank {rank} was here:\n{stack}" if stack else "")
            )
            outcomes[rank] = Outcome(error=error, ended=False, stack=stack)
        return [outcomes[rank] for rank in range(size)]


def _start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process. Its output goes where that of this process goes."""
    sys.stdout.flush()
    sys.stderr.flush()
    return subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def _ending(processes: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    """Leave none of ``processes`` behind, also when the user interrupts."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        until = time.monotonic() + _LAST_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()


def _ask_where(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> str:
    """Have a rank that does not end write where each of its threads is."""
    where = folder / f"where-{rank}"
    if not where.exists():  # it has not come so far that it could answer
        return ""
    process.send_signal(WHERE_ARE_YOU)
    until, size = time.monotonic() + _ANSWER_S, -1
    while size != (size := where.stat().st_size) or not size:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return where.read_text("utf-8", errors="replace")


def _run_agent(caller: str, folder: Path, config: LaunchConfig, prefix: str | None) -> list[Outcome]:
    """Have torch's elastic agent start the ranks: for several nodes, restarts, and output with prefixes.

    The agent is a process of its own: in this one it would set variables and signal handlers.
    """
    python = sys.executable
    plan = plan_torchrun(config, Script(python, (*RANK_COMMAND, str(folder))), Machine(python=python))
    variables = {**dict(plan.env_changes), "ACCELFN_AGENT_DIR": str(folder)}
    if prefix is not None:
        variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = prefix
    # Before the agent loads torch. A rank has its own number of threads in the job.
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    agent = _start(plan.argv, variables)
    with _ending([agent]):
        code = agent.wait()
    found: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        found = json.loads((folder / "agent.json").read_text("utf-8"))
    if "error" in found or (code and not found):
        why = found.get("error", f"the agent ended with status {code}")
        where = config.rdzv_endpoint or f"{config.main_process_ip}:{config.main_process_port}"
        raise DistributedError(
            f"{caller}: node {config.machine_rank} of {config.num_machines} could not start its ranks "
            f"(rendezvous at {where}): {why}. Run the same cell on every node, with one address and port "
            "that each of them reaches."
        )
    ended: dict[int, int] = {one["rank"]: one["exitcode"] for one in found.get("failures", ())}
    attempts = reported(folder)
    last = max(attempts.values(), default=0)
    ranks = sorted({*ended, *(rank for rank, attempt in attempts.items() if attempt == last)})
    # A rank without a report that the agent has ended on account of another one isn't reported.
    outcomes = [(rank, read_outcome(folder, rank, last)) for rank in ranks]
    return [one or died(rank, ended.get(rank, 0)) for rank, one in outcomes]


def _run_on_tpu(folder: Path) -> list[Outcome]:
    """Have torch_xla start a rank on each core. Written against torch_xla 2.8, not run."""
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
        torch_xla.launch(be_xla_rank, args=(str(folder),), start_method="spawn")
    except Exception as error:  # noqa: BLE001 -- what the ranks have reported tells more
        failure = error
    outcomes = [one for rank in sorted(reported(folder)) if (one := read_outcome(folder, rank)) is not None]
    if failure is not None and not any(one.error is not None for one in outcomes):
        raise DistributedError(
            f"notebook_launcher: torch_xla could not run the ranks: {failure}. Try one of its own programs."
        ) from failure
    return outcomes
