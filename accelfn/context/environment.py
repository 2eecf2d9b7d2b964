"""From a launcher's variables to a plan of the world: one pure function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from accelfn.errors import EnvironmentPlanError

__all__ = ("EnvironmentPlan", "detect_environment", "first_host", "tasks_on_node")

DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPlan:
    """Who this process is, as its launcher's variables say. Nothing has been started yet.

    Attributes:
        launcher: ``"none"``, ``"torchrun"``, ``"env"`` (``RANK`` and ``WORLD_SIZE`` set by hand or by
            Kubernetes), ``"openmpi"``, ``"mpich"`` (Intel MPI, MPICH), ``"mvapich"`` or ``"slurm"``.
        rank: Global rank, from 0.
        size: Number of processes in the world.
        local_rank: Rank among the processes of this node.
        local_size: Number of processes on this node.
        node_rank: Number of this node, from 0.
        num_nodes: Number of nodes.
        nodes_known: Whether the launcher says which node this is. If not, ``node_rank``, ``num_nodes`` and a
            missing ``local_size`` are the likely ones, and ``init_context`` asks every rank for its host.
        master_addr: Host of rank 0, or None for a process alone.
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
        """Refuse a rank outside its world."""
        _check_range("rank", self.rank, "world", self.size, self.launcher)
        _check_range("local rank", self.local_rank, "local world", self.local_size, self.launcher)
        _check_range("node rank", self.node_rank, "number of nodes", self.num_nodes, self.launcher)
        if self.local_size + self.num_nodes - 1 > self.size:
            raise EnvironmentPlanError(
                f"{self.local_size} processes on this node and at least one on every other of "
                f"{self.num_nodes} nodes do not fit a world of {self.size} ({self.launcher}). Correct the "
                "launcher's variables, or unset what is left over from another run."
            )


def detect_environment(env: Mapping[str, str]) -> EnvironmentPlan:
    """Return which rank of which world the variables ``env`` describe.

    Pure: nothing is read but ``env``. The innermost launcher wins: torchrun's variables, then Open MPI's,
    MVAPICH's, those of Intel MPI and MPICH, then SLURM's. Of SLURM only the variables of a job step count:
    a script that runs in an allocation without ``srun`` is one process.

    Args:
        env: Variables by name, such as ``os.environ``.

    Raises:
        EnvironmentPlanError: The variables contradict each other, or half of a pair is missing
            (``WORLD_SIZE`` without ``RANK``). A world that was asked for is never silently one process.

    >>> detect_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).rank
    1
    """
    for find in (_from_torch, _from_mpi, _from_slurm):
        plan = find(env)
        if plan is not None:
            return plan
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if env.get(name)]
    # LOCAL_RANK=-1 is the old launchers' word for "not distributed"; a world of 1 needs no rank.
    alone = env.get("LOCAL_RANK") == "-1" or given == ["WORLD_SIZE"]
    if given and not (alone and (_optional(env, "WORLD_SIZE") or 1) <= 1):
        if env.get("LOCAL_RANK") == "-1":
            raise EnvironmentPlanError(
                f"LOCAL_RANK=-1 says that this process is alone, WORLD_SIZE={env['WORLD_SIZE']} that it "
                "isn't. Unset what is left over from another run."
            )
        missing = [name for name in ("RANK", "WORLD_SIZE") if not env.get(name)]
        raise EnvironmentPlanError(
            f"the environment sets {' and '.join(given)} but not {' and '.join(missing)}. "
            "Start the script with a launcher (accelfn launch, torchrun, srun, mpirun), set both RANK and "
            "WORLD_SIZE, or unset what is left over from another run."
        )
    return EnvironmentPlan()


def _from_torch(env: Mapping[str, str]) -> EnvironmentPlan | None:
    if not env.get("RANK") or not env.get("WORLD_SIZE") or env.get("LOCAL_RANK") == "-1":
        return None
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    addr, port = _master(env)
    local_rank, local_size = _optional(env, "LOCAL_RANK"), _optional(env, "LOCAL_WORLD_SIZE")
    node_rank = _optional(env, "GROUP_RANK")
    if node_rank is None:
        node_rank = _optional(env, "NODE_RANK")
    nodes_known = local_size is not None and node_rank is not None
    if local_size is None:
        if addr is None or _is_loopback(addr):  # a world that can't be on several machines
            local_size, nodes_known = size, True
        else:
            # Kubernetes gives one process a pod. Others number the processes of a node and leave out how
            # many.
            local_size = (local_rank or 0) + 1
    if local_size < size and addr is None:
        raise EnvironmentPlanError(
            f"WORLD_SIZE={size} with LOCAL_WORLD_SIZE={local_size} means several nodes, and MASTER_ADDR "
            "does not say where rank 0 is. Export MASTER_ADDR (host of rank 0) and MASTER_PORT to every "
            "process."
        )
    return _plan(
        "torchrun" if env.get("TORCHELASTIC_RUN_ID") else "env",
        rank,
        size,
        local_rank,
        local_size,
        addr,
        port,
        node_rank=node_rank,
        num_nodes=_optional(env, "GROUP_WORLD_SIZE"),
        nodes_known=nodes_known,
    )


# Launcher; names of rank and size; pairs of names of local rank and local size.
_MPI = (
    (
        "openmpi",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),),
    ),
    (
        "mvapich",
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        (("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),),
    ),
    # Hydra, the mpiexec of MPICH and Intel MPI, sets the first pair; Cray's PALS the second.
    (
        "mpich",
        ("PMI_RANK", "PMI_SIZE"),
        (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
    ),
)


def _from_mpi(env: Mapping[str, str]) -> EnvironmentPlan | None:
    for launcher, (rank_name, size_name), locals_ in _MPI:
        if not env.get(rank_name) and not env.get(size_name):
            continue
        if not env.get(rank_name) or not env.get(size_name):
            raise EnvironmentPlanError(
                f"{rank_name} and {size_name} must be set together: got {rank_name}={env.get(rank_name)!r}, "
                f"{size_name}={env.get(size_name)!r}. Start with mpirun, or unset it."
            )
        rank, size = _integer(env, rank_name), _integer(env, size_name)
        addr, port = _master(env)
        place = next((pair for pair in locals_ if all(env.get(name) for name in pair)), None)
        if place is not None:
            local_rank, local_size = _integer(env, place[0]), _integer(env, place[1])
        elif env.get("SLURM_STEP_NUM_TASKS"):  # srun --mpi=pmi2 names the rank, SLURM the place in the node
            return _from_slurm(env)
        elif size == 1 or (addr is not None and _is_loopback(addr)):
            local_rank, local_size = rank, size
        else:
            names = " and ".join(locals_[0])
            raise EnvironmentPlanError(
                f"{launcher} started {size} processes, and {names} do not say how they lie on the nodes. "
                "Export both to every process, or MASTER_ADDR=127.0.0.1 if there is one node only."
            )
        if local_size < size and addr is None:
            raise EnvironmentPlanError(
                f"{launcher} started {size} processes on several nodes, and MASTER_ADDR does not say where "
                "rank 0 is. Export MASTER_ADDR (host of rank 0) and MASTER_PORT to every process."
            )
        # Ranks are dealt to nodes in blocks or in turn (--map-by node), and no variable says which.
        return _plan(launcher, rank, size, local_rank, local_size, addr, port, nodes_known=False)
    return None


def _from_slurm(env: Mapping[str, str]) -> EnvironmentPlan | None:
    # SLURM_NTASKS and SLURM_PROCID alone also exist in a batch script that srun did not start.
    if not env.get("SLURM_STEP_NUM_TASKS") or not env.get("SLURM_PROCID"):
        return None
    rank, size = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return None
    _check_range("rank", rank, "world", size, "slurm")
    node_rank = _optional(env, "SLURM_NODEID") or 0
    num_nodes = _optional(env, "SLURM_STEP_NUM_NODES") or 1
    _check_range("node rank", node_rank, "number of nodes", num_nodes, "slurm")
    spread = env.get("SLURM_STEP_TASKS_PER_NODE")
    local_size = tasks_on_node(spread, node_rank) if spread else max(1, size // num_nodes)
    local_rank = _optional(env, "SLURM_LOCALID")
    addr, port = _master(env)
    if addr is None and num_nodes > 1:
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if not hosts:
            raise EnvironmentPlanError(
                f"SLURM started {size} tasks on {num_nodes} nodes, and neither MASTER_ADDR nor "
                "SLURM_STEP_NODELIST says where rank 0 is. Export MASTER_ADDR to every task."
            )
        addr = first_host(hosts)
    if port is None:
        # The same on every task, and another one for another job or step on the same node.
        port = (
            20000
            + ((_optional(env, "SLURM_JOB_ID") or 0) * 7 + (_optional(env, "SLURM_STEP_ID") or 0)) % 10000
        )
    return EnvironmentPlan(
        launcher="slurm",
        rank=rank,
        size=size,
        local_rank=rank % local_size if local_rank is None else local_rank,
        local_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=addr or "127.0.0.1",
        master_port=port,
    )


def tasks_on_node(spread: str, node_rank: int) -> int:
    """Read SLURM's ``SLURM_STEP_TASKS_PER_NODE``: ``"2(x3),1"`` is 2, 2, 2 and 1 tasks.

    >>> [tasks_on_node("2(x3),1", node) for node in range(4)]
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in spread.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise EnvironmentPlanError(
                f"SLURM_STEP_TASKS_PER_NODE has an unknown form: {spread!r}, such as '2(x3),1'."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node_rank >= len(counts):
        raise EnvironmentPlanError(
            f"SLURM_NODEID={node_rank} lies outside SLURM_STEP_TASKS_PER_NODE={spread!r}, which has "
            f"{len(counts)} node(s)."
        )
    return counts[node_rank]


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM host list.

    >>> first_host("gpu[007-009,12],login"), first_host("a1,a2"), first_host("rack[1-2]n[3,5]")
    ('gpu007', 'a1', 'rack1n3')
    """
    # A comma inside brackets separates numbers; the first one outside them ends the first name.
    pattern = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts.strip())
    if pattern is None:
        raise EnvironmentPlanError(
            f"SLURM's list of nodes has an unknown form: {hosts!r}, such as 'gpu[01-03]'."
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", pattern[0])


def _plan(
    launcher: str,
    rank: int,
    size: int,
    local_rank: int | None,
    local_size: int,
    addr: str | None,
    port: int | None,
    *,
    node_rank: int | None = None,
    num_nodes: int | None = None,
    nodes_known: bool,
) -> EnvironmentPlan:
    _check_range("rank", rank, "world", size, launcher)
    if local_size < 1:
        raise EnvironmentPlanError(f"a node needs at least one process: got {local_size} ({launcher}).")
    # Where no variable says the node: as if equal nodes had been filled one after the other.
    node_rank = rank // local_size if node_rank is None else node_rank
    if num_nodes is None:
        num_nodes = min(size, max(-(-size // local_size), node_rank + 1))
    return EnvironmentPlan(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=rank % local_size if local_rank is None else local_rank,
        local_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        nodes_known=nodes_known or local_size == size,
        master_addr=addr or "127.0.0.1",
        master_port=port or DEFAULT_PORT,
    )


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise EnvironmentPlanError(f"{name} must be a whole number: got {env[name]!r}.") from None


def _optional(env: Mapping[str, str], name: str) -> int | None:
    return _integer(env, name) if env.get(name) else None


def _master(env: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = _optional(env, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise EnvironmentPlanError(f"MASTER_PORT must lie in 1..{(1 << 16) - 1}: got {port}.")
    return env.get("MASTER_ADDR") or None, port


def _is_loopback(addr: str) -> bool:
    return addr in ("localhost", "::1", "[::1]") or addr.startswith("127.")


def _check_range(what: str, value: int, of_what: str, size: int, launcher: str) -> None:
    if size < 1:
        raise EnvironmentPlanError(f"the {of_what} must hold at least one: got {size} ({launcher}).")
    if not 0 <= value < size:
        raise EnvironmentPlanError(
            f"the {what} must lie in 0..{size - 1}: got {value} in a {of_what} of {size} ({launcher}). "
            "Correct the launcher's variables, or unset what is left over from another run."
        )
