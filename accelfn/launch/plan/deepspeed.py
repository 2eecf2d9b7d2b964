"""The command of DeepSpeed's launcher, which starts the processes of all machines from one."""

from __future__ import annotations

from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.record import PORT, LaunchPlan, Script

__all__ = ("plan_deepspeed",)


def plan_deepspeed(config: LaunchConfig, script: Script, machine: Machine) -> LaunchPlan:
    """Decide the arguments of the ``deepspeed`` command. Pure.

    The variables reach the other machines through DeepSpeed's file of variables: who carries the plan out
    writes one, and names it in ``DS_ENV_FILE``.
    """
    assert config.num_processes is not None
    options = config.deepspeed
    launcher = options.multinode_launcher or "pdsh"
    argv: list[str] = ["deepspeed"]
    if options.hostfile is not None:
        argv += ["--hostfile", options.hostfile]
    if launcher == "nossh":
        argv += ["--node_rank", str(config.machine_rank or 0), "--no_ssh"]
    else:
        argv += ["--no_local_rank", "--launcher", launcher]
    if options.exclusion_filter is not None:
        argv += ["--exclude", options.exclusion_filter]
    elif options.inclusion_filter is not None:
        argv += ["--include", options.inclusion_filter]
    else:
        argv += ["--num_gpus", str(config.num_processes // config.num_machines)]
    if config.main_process_ip is not None:
        argv += ["--master_addr", config.main_process_ip]
    argv += ["--master_port", str(config.main_process_port or PORT)]
    argv += ["--module"] if config.module else ["--no_python"] if config.no_python else []
    return LaunchPlan(way="deepspeed", argv=(*argv, script.name, *script.args))
