"""The command of mpirun: Open MPI's, and those of MPICH, Intel MPI and MVAPICH."""

from __future__ import annotations

import os
from collections.abc import Mapping

from accelfn.errors import ConfigurationError
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.record import LaunchPlan, Script

__all__ = ("plan_mpirun",)


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
