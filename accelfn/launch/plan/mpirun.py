"""The command of mpirun: Open MPI's, and those of MPICH, Intel MPI and MVAPICH."""

from __future__ import annotations

import os
from collections.abc import Mapping

from accelfn.errors import ConfigurationError
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.record import LaunchPlan, Script

__all__ = ("plan_mpirun", "read_mpi")

# Names of rank, size and size on this node, of Open MPI and of Intel MPI and MPICH.
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


def read_mpi(environment: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """Read which machine of how many this is, where mpirun starts one launch on each. Pure.

    Args:
        environment: Variables.

    Returns:
        Values by the fields' names with the variable that says so; empty if mpirun didn't start this, or
        started a script that now starts this.

    Raises:
        ConfigurationError: mpirun starts several launches on a node, and none would know of the others.

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
                f"mpirun starts accelfn launch {texts[1]} times ({size}), several on a node, and each would "
                "start processes of its own. Use mpirun python train.py without accelfn launch, one launch a "
                "node, or accelfn launch --mpirun_hostfile."
            )
        return {"num_machines": (int(texts[1]), size), "machine_rank": (int(texts[0]), rank)}
    return {}


def plan_mpirun(
    config: LaunchConfig, script: Script, machine: Machine, worker: str, variables: Mapping[str, str]
) -> LaunchPlan:
    """Decide mpirun's arguments. Pure.

    Args:
        config: With ``num_processes`` decided and a hostfile.
        script: What to run.
        machine: Facts about this machine, mpirun among them.
        worker: Path of the program that runs a Python script and keeps what went wrong in it.
        variables: What the processes get on all machines; mpirun hands on only what it is told to.

    Raises:
        ConfigurationError: There is no mpirun.
    """
    assert config.num_processes is not None
    assert config.mpirun.hostfile is not None
    if machine.mpirun is None:
        raise ConfigurationError(
            "--mpirun_hostfile needs mpirun or mpiexec, and neither is on the PATH. Install an MPI, or leave "
            "the flag out to start through torchrun."
        )
    total, local_size = config.num_processes, config.num_processes // config.num_machines
    hostfile = os.path.expanduser(config.mpirun.hostfile)
    address = {"MASTER_ADDR": config.main_process_ip} if config.main_process_ip else {}
    if config.main_process_port:
        address["MASTER_PORT"] = str(config.main_process_port)
    handed = {**variables, **address}
    if machine.is_open_mpi:
        start = (
            "--hostfile",
            hostfile,
            "--npernode",
            str(local_size),
            "-n",
            str(total),
            "--bind-to",
            "socket",
        )
        hand = tuple(part for name in sorted(handed) for part in ("-x", name))
    else:
        start = ("-f", hostfile, "-ppn", str(local_size), "-n", str(total))
        hand = tuple(part for name in sorted(handed) for part in ("-genv", name, handed[name]))
    python = () if config.no_python else (machine.python, worker, *(("-m",) if config.module else ()))
    return LaunchPlan(
        way="mpirun",
        argv=(machine.mpirun, *start, *hand, *python, script.name, *script.args),
        env_changes=tuple(address.items()),
    )
