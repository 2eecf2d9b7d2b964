"""Derive the plan of the world from a launcher's variables: one pure function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelfn.errors import EnvironmentPlanError

DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPlan:
    """The place of this process in the world according to its launcher's variables.

    Attributes:
        launcher: ``"none"``, ``"torchrun"``, ``"env"`` (``RANK`` and ``WORLD_SIZE`` set by hand or by
            Kubernetes), ``"openmpi"``, ``"mpich"`` (Intel MPI, MPICH), ``"mvapich"``, ``"slurm"``, or
            ``"elastic"`` (processes that :func:`accelfn.run_elastic` has brought together).
        rank: Global rank, from 0.
        size: Number of processes in the world.
        local_rank: Rank among the processes of this node.
        local_size: Number of processes on this node.
        node_rank: Number of this node, from 0.
        num_nodes: Number of nodes.
        nodes_known: Whether the launcher identifies the node. If not, ``node_rank``, ``num_nodes`` and a
            missing ``local_size`` are guesses, and ``init_context`` gathers the hosts of all ranks.
        master_addr: Host of rank 0, or None for a single process.
        master_port: Port on which rank 0 listens, or None.
    """

    launcher: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    nodes_known: bool = True
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        """Check that the ranks and nodes are consistent."""
        check_place(self, f" ({self.launcher})")


def check_place(place: Any, source: str = "") -> None:
    """Check that ranks are within their worlds, and that the nodes have enough ranks.

    Args:
        place: Has rank, size, local_rank, local_size, node_rank and num_nodes.
        source: The source of the numbers, for the message.

    Raises:
        EnvironmentPlanError: With the numbers.
    """
    for name, value, size in (
        ("rank", place.rank, place.size),
        ("local_rank", place.local_rank, place.local_size),
        ("node_rank", place.node_rank, place.num_nodes),
    ):
        if size < 1:
            raise EnvironmentPlanError(f"a {name} needs at least one process, got {size}{source}")
        if not 0 <= value < size:
            raise EnvironmentPlanError(
                f"the {name} must be in 0..{size - 1}, got {value}{source}. Correct the launcher's "
                "variables, or unset stale ones."
            )
    if place.local_size + place.num_nodes - 1 > place.size:
        raise EnvironmentPlanError(
            f"{place.local_size} processes on this node and at least one on each other of {place.num_nodes} "
            f"nodes are more than the world size {place.size}{source}. Correct the launcher's variables, or "
            "unset stale ones."
        )


def detect_environment(env: Mapping[str, str]) -> EnvironmentPlan:
    """Return the place of this process in the world that the variables ``env`` describe. Pure.

    The innermost launcher takes precedence: torchrun's variables, then Open MPI's, MVAPICH's, those of Intel
    MPI and MPICH, then SLURM's. Only SLURM's variables of a job step count: a script that runs in an
    allocation without ``srun`` is one process.

    Args:
        env: Variables by name, such as ``os.environ``.

    Raises:
        EnvironmentPlanError: The variables contradict each other, or half of a pair is missing
            (``WORLD_SIZE`` without ``RANK``). A requested world is never silently a single process.

    >>> detect_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).rank
    1
    """
    for find in (_from_torch, _from_mpi, _from_slurm):
        plan = find(env)
        if plan is not None:
            return plan
    names = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if env.get(name)]
    # Old launchers set LOCAL_RANK=-1 for a single process; a world of 1 needs no rank.
    alone = env.get("LOCAL_RANK") == "-1" or names == ["WORLD_SIZE"]
    if names and not (alone and (_number(env, "WORLD_SIZE") or 1) <= 1):
        if env.get("LOCAL_RANK") == "-1":
            raise EnvironmentPlanError(
                "LOCAL_RANK=-1 means a single process, which contradicts "
                f"WORLD_SIZE={env['WORLD_SIZE']}. Unset the stale variable."
            )
        missing = [name for name in ("RANK", "WORLD_SIZE") if not env.get(name)]
        raise EnvironmentPlanError(
            f"the environment sets {' and '.join(names)} but not {' and '.join(missing)}. Start the script "
            "with a launcher (accelfn launch, torchrun, srun, mpirun), set both RANK and WORLD_SIZE, or "
            "unset stale variables."
        )
    return EnvironmentPlan()


def _from_torch(env: Mapping[str, str]) -> EnvironmentPlan | None:
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if rank is None or size is None or env.get("LOCAL_RANK") == "-1":
        return None
    local_rank, local_size = _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE")
    node_rank = _number(env, "GROUP_RANK")
    node_rank = _number(env, "NODE_RANK") if node_rank is None else node_rank
    nodes_known = local_size is not None and node_rank is not None
    if local_size is None:
        # On Kubernetes each pod has one process. Others set the local rank but not the local size.
        local_size = size if _is_one_machine(env) else (local_rank or 0) + 1
    return _plan(
        env,
        "torchrun" if env.get("TORCHELASTIC_RUN_ID") else "env",
        rank,
        size,
        local_rank,
        local_size,
        node_rank=node_rank,
        num_nodes=_number(env, "GROUP_WORLD_SIZE"),
        nodes_known=nodes_known,
    )


# Launcher; names of rank, size, local rank and local size. Hydra, the mpiexec of MPICH and Intel MPI, uses
# the third set, Cray's PALS the last.
_MPI = (
    ("openmpi", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("mvapich", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


def _from_mpi(env: Mapping[str, str]) -> EnvironmentPlan | None:
    started = [names for names in _MPI if env.get(names[1]) or env.get(names[2])]
    if not started:
        return None
    placed = [names for names in started if env.get(names[3]) and env.get(names[4])]
    launcher, *names = (placed or started)[0]
    rank, size, local_rank, local_size = (_number(env, name) for name in names)
    if rank is None or size is None:
        raise EnvironmentPlanError(
            f"{names[0]} and {names[1]} must be set together: got {names[0]}={env.get(names[0])!r}, "
            f"{names[1]}={env.get(names[1])!r}. Start with mpirun, or unset it."
        )
    if not placed:
        if env.get("SLURM_STEP_NUM_TASKS"):  # srun --mpi=pmi2 sets only the rank; SLURM sets the local rank
            return _from_slurm(env)
        if size > 1 and not (env.get("MASTER_ADDR") and _is_one_machine(env)):
            raise EnvironmentPlanError(
                f"{launcher} started {size} processes, but {names[2]} and {names[3]}, their places on the "
                "nodes, are not set. Export both to every process, or MASTER_ADDR=127.0.0.1 on one node."
            )
        local_rank, local_size = rank, size
    # Nodes get consecutive ranks or every n-th (--map-by node), which no variable tells.
    return _plan(env, launcher, rank, size, local_rank, local_size or 0, nodes_known=False)


def _from_slurm(env: Mapping[str, str]) -> EnvironmentPlan | None:
    # SLURM_NTASKS and SLURM_PROCID are also set in a batch script that srun did not start.
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    if rank is None or size is None or size == 1:
        return None
    node_rank, num_nodes = _number(env, "SLURM_NODEID") or 0, _number(env, "SLURM_STEP_NUM_NODES") or 1
    spread = env.get("SLURM_STEP_TASKS_PER_NODE")
    local_size = tasks_on_node(spread, node_rank) if spread else max(1, size // max(1, num_nodes))
    addr, port = env.get("MASTER_ADDR"), None
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not addr and num_nodes > 1 and hosts:
        addr = first_host(hosts)
    if not env.get("MASTER_PORT"):
        # The same for all tasks, and different for other jobs and steps on the node.
        step = (_number(env, "SLURM_JOB_ID") or 0) * 7 + (_number(env, "SLURM_STEP_ID") or 0)
        port = str(20000 + step % 10000)
    return _plan(
        {**env, "MASTER_ADDR": addr or "", "MASTER_PORT": port or env["MASTER_PORT"]},
        "slurm",
        rank,
        size,
        _number(env, "SLURM_LOCALID"),
        local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        nodes_known=True,
    )


def tasks_on_node(spread: str, node_rank: int) -> int:
    """Parse SLURM's ``SLURM_STEP_TASKS_PER_NODE``: ``"2(x3),1"`` means 2, 2, 2 and 1 tasks.

    >>> [tasks_on_node("2(x3),1", node) for node in range(4)]
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in spread.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise EnvironmentPlanError(
                f"SLURM_STEP_TASKS_PER_NODE={spread!r} has an unknown format; expected such as '2(x3),1'."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node_rank >= len(counts):
        raise EnvironmentPlanError(
            f"SLURM_NODEID={node_rank} is out of range for SLURM_STEP_TASKS_PER_NODE={spread!r}, which has "
            f"{len(counts)} node(s)."
        )
    return counts[node_rank]


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM host list.

    >>> first_host("gpu[007-009,12],login"), first_host("a1,a2"), first_host("rack[1-2]n[3,5]")
    ('gpu007', 'a1', 'rack1n3')
    """
    # The first comma outside of brackets ends the first name.
    pattern = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts.strip())
    if pattern is None:
        raise EnvironmentPlanError(
            f"SLURM's list of nodes {hosts!r} has an unknown format; expected such as 'gpu[01-03]'."
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", pattern[0])


def _plan(
    env: Mapping[str, str],
    launcher: str,
    rank: int,
    size: int,
    local_rank: int | None,
    local_size: int,
    *,
    node_rank: int | None = None,
    num_nodes: int | None = None,
    nodes_known: bool,
) -> EnvironmentPlan:
    addr, port = env.get("MASTER_ADDR"), _number(env, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise EnvironmentPlanError(f"MASTER_PORT must be in 1..{(1 << 16) - 1}, got {port}.")
    if 0 < local_size < size and not addr:
        raise EnvironmentPlanError(
            f"{size} processes with {local_size} on this node need several nodes ({launcher}), but "
            "MASTER_ADDR is not set. Export MASTER_ADDR (host of rank 0) and MASTER_PORT to every process."
        )
    # Without variables for the node, assume equal nodes with consecutive ranks.
    per_node = max(1, local_size)
    node_rank = rank // per_node if node_rank is None else node_rank
    if num_nodes is None:
        num_nodes = min(size, max(-(-size // per_node), node_rank + 1))
    return EnvironmentPlan(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=rank % per_node if local_rank is None else local_rank,
        local_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        nodes_known=nodes_known or local_size == size,
        master_addr=addr or "127.0.0.1",
        master_port=port or DEFAULT_PORT,
    )


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return the integer value of a variable; None if it is unset or empty."""
    try:
        return int(env[name]) if env.get(name) else None
    except ValueError:
        raise EnvironmentPlanError(f"{name} must be an integer, got {env[name]!r}.") from None


def _is_one_machine(env: Mapping[str, str]) -> bool:
    """Return whether rank 0's address is local or unset, so that all ranks are on this machine."""
    addr = env.get("MASTER_ADDR") or "localhost"
    return addr in ("localhost", "::1", "[::1]") or addr.startswith("127.")
