"""SLURM and MPI: read rank and number of machines from variables. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from accelfn.errors import ConfigurationError

# Rank, size and local size: of Open MPI, and of Intel MPI and MPICH.
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


def read_mpi(environment: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Read rank and number of machines if mpirun has started one launch per machine. Pure.

    Returns:
        Values by option name, each with its variable; empty if mpirun didn't start this launch directly.

    Raises:
        ConfigurationError: mpirun starts several launches on a node.

    >>> one = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    >>> {name: value for name, (value, _) in read_mpi(one).items()}
    {'num_machines': 2, 'machine_rank': 1}
    """
    if "ACCELFN_RUN_DIR" in environment:
        return {}
    for rank, size, local_size in _RANKS:
        texts = [environment.get(name, "") for name in (rank, size)]
        if not all(text.isdecimal() for text in texts) or int(texts[1]) < 2:
            continue
        if environment.get(local_size) != "1":
            raise ConfigurationError(
                f"mpirun starts accelfn launch {texts[1]} times ({size}), several times per node. Use mpirun "
                "python train.py without accelfn launch, or one launch per node."
            )
        return {"num_machines": (int(texts[1]), size), "machine_rank": (int(texts[0]), rank)}
    return {}


def read_step(environment: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Read rank and number of machines from the variables of a SLURM step. Pure.

    Reads only variables that ``srun`` sets for a step. A batch script is a single process, but has the
    variables of the whole allocation.

    Returns:
        Values by option name, each with its variable; empty outside of a step of several nodes.

    Raises:
        ConfigurationError: The step has several tasks per node, or its variables are invalid.

    >>> step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
    >>> {name: value for name, (value, _) in read_step({**step, "SLURM_STEP_NODELIST": "gpu[07-08]"}).items()}
    {'num_machines': 2, 'machine_rank': 1, 'main_process_ip': 'gpu07', 'main_process_port': 20000}
    """
    nodes, tasks = environment.get("SLURM_STEP_NUM_NODES"), environment.get("SLURM_STEP_NUM_TASKS")
    if not nodes or not tasks or not environment.get("SLURM_NODEID"):
        return {}
    num_nodes = _number(environment, "SLURM_STEP_NUM_NODES")
    num_tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if num_tasks > num_nodes:
        raise ConfigurationError(
            f"srun starts accelfn launch {num_tasks} times on {num_nodes} node(s). Use srun "
            "--ntasks-per-node=1 accelfn launch ..., or srun python train.py without accelfn launch."
        )
    if num_nodes < 2:
        return {}
    step: dict[str, tuple[object, str]] = {
        "num_machines": (num_nodes, "SLURM_STEP_NUM_NODES"),
        "machine_rank": (_number(environment, "SLURM_NODEID"), "SLURM_NODEID"),
    }
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environment.get(name):
            step["main_process_ip"] = (expand_hosts(environment[name])[0], name)
            break
    # The same port on every node, and different ports for different jobs and steps.
    job = _number(environment, "SLURM_JOB_ID") * 7 + _number(environment, "SLURM_STEP_ID")
    step["main_process_port"] = (20000 + job % 10000, "SLURM_JOB_ID")
    return step


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name) or "0"
    if not text.isdecimal():
        raise ConfigurationError(f"the variable {name} must be an integer.")
    return int(text)


def expand_hosts(hosts: str) -> tuple[str, ...]:
    """Expand a SLURM host list. Pure.

    Raises:
        ConfigurationError: The format is unknown.

    >>> expand_hosts("gpu[007-009,12],login"), expand_hosts("rack[1-2]n[3,5]")
    (('gpu007', 'gpu008', 'gpu009', 'gpu12', 'login'), ('rack1n3', 'rack1n5', 'rack2n3', 'rack2n5'))
    """
    # Commas inside brackets separate numbers, others separate host names.
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts.strip())
    if not parts or ",".join(parts) != hosts.strip():
        raise ConfigurationError(
            "unknown format of a SLURM host list (SLURM_STEP_NODELIST). Expected a list such as 'gpu[01-03]'."
        )
    return tuple(host for part in parts for host in _expand(part))


def _expand(pattern: str) -> list[str]:
    bracket = re.search(r"\[([^\]]*)\]", pattern)
    if bracket is None:
        return [pattern]
    tails = _expand(pattern[bracket.end() :])
    middles: list[str] = []
    for item in bracket[1].split(","):
        first, dash, last = item.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            middles += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        else:
            middles.append(item)
    return [pattern[: bracket.start()] + middle + tail for middle in middles for tail in tails]
