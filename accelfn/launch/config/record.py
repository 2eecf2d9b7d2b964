"""The configuration of a launch as a frozen record. It holds what the table of options names."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from math import prod
from types import SimpleNamespace
from typing import Any, NoReturn

from accelfn.errors import ConfigurationError
from accelfn.launch.config.options import EXCLUSIVE, NOT_YET, OPTIONS, Option


class LaunchConfig(SimpleNamespace):
    """All that ``accelfn launch`` takes but the script: an attribute for each option. ``None``: not given.

    [The command line](../reference/cli.md) lists the options; an attribute is called as the flag is. An
    impossible configuration can't be built.

    Raises:
        ConfigurationError: The values contradict each other, or one isn't of its option's kind.
        TypeError: There is no option of a name.

    >>> LaunchConfig(num_processes=3, num_machines=2, main_process_ip="10.0.0.1", machine_rank=0)
    Traceback (most recent call last):
        ...
    accelfn.errors.ConfigurationError: --num_processes counts all machines, so --num_machines must divide \
it: got 3 processes on 2 machines. Use 2 or 4 processes.
    """

    def __init__(self, **values: Any) -> None:
        """Take values by the options' names; the others have their defaults."""
        super().__init__(**({name: option.default for name, option in OPTIONS.items()} | values))
        for name, value in values.items():
            if name not in OPTIONS:
                raise TypeError(f"LaunchConfig has no option {name!r}.")
            option = OPTIONS[name]
            if not (value is None and option.default is None) and not option.kind.holds(value):
                raise ConfigurationError(f"LaunchConfig.{name} must be {option.kind.accepts}, got {value!r}.")
        _check_choices(self)
        _check_devices(self)
        _check_machines(self)
        _check_mesh(self)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(
            f"LaunchConfig can't be changed; replace(config, {name}=...) makes another."
        )

    def __repr__(self) -> str:
        changed = (f"{name}={value!r}" for name, value in changed_values(self).items())
        return f"LaunchConfig({', '.join(changed)})"


def changed_values(config: LaunchConfig) -> dict[str, object]:
    """Return the values that differ from their defaults, by name."""
    return {name: value for name, value in vars(config).items() if value != OPTIONS[name].default}


def replace(config: LaunchConfig, **changes: object) -> LaunchConfig:
    """Return a configuration with other values of some options."""
    return LaunchConfig(**{**vars(config), **changes})


def is_active(config: LaunchConfig, option: Option, *, writes_sbatch: bool = False) -> bool:
    """Return whether an option is read, and its section isn't switched off. Pure.

    Args:
        config: The whole configuration.
        option: Which option.
        writes_sbatch: Whether ``--sbatch`` is given, which reads the options of SLURM.

    >>> is_active(LaunchConfig(), OPTIONS["zero_stage"])
    False
    >>> is_active(LaunchConfig(use_deepspeed=True), OPTIONS["zero_stage"])
    True
    """
    section = option.section
    if not section.switch or option.name == section.switch:
        return True
    if section.switch == "sbatch":
        return writes_sbatch
    value: object = getattr(config, section.switch)
    return value not in (None, "no") if section.on is None else value == section.on


def list_not_yet(config: LaunchConfig) -> tuple[tuple[Option, str], ...]:
    """List what a configuration asks for that accelfn doesn't have yet: the option, and its name. Pure.

    >>> list_not_yet(LaunchConfig(use_deepspeed=True))[0][1]
    'DeepSpeed'
    """
    return tuple((OPTIONS[name], what) for name, (on, what) in NOT_YET.items() if getattr(config, name) == on)


def _check_choices(config: LaunchConfig) -> None:
    """Refuse options that exclude or need each other."""
    for group in EXCLUSIVE:
        chosen = [f"--{name}" for name in group if getattr(config, name)]
        if len(chosen) > 1:
            raise ConfigurationError(f"{' and '.join(chosen)} exclude each other. Give one of them.")
    if config.module and config.no_python:
        raise ConfigurationError(
            "--module runs a Python module and --no_python runs without Python. Give one of the two."
        )
    if config.enable_cpu_affinity and (config.cpu or config.tpu):
        raise ConfigurationError(
            "--enable_cpu_affinity binds each process to the NUMA node of its GPU. Leave it out on CPUs and "
            "TPUs."
        )
    if config.no_python and config.tpu:
        raise ConfigurationError("--tpu starts a function of a Python script. Leave --no_python out.")
    if not config.use_fsdp:
        return
    if (
        config.fsdp_version == 1
        and config.fsdp_cpu_ram_efficient_loading
        and not config.fsdp_sync_module_states
    ):
        raise ConfigurationError(
            "--fsdp_cpu_ram_efficient_loading needs --fsdp_sync_module_states: otherwise all processes but "
            "one train without the weights. Switch the first off or the second on."
        )
    offloads_checkpoints = config.fsdp_activation_checkpointing_offload
    if offloads_checkpoints and not (config.fsdp_version == 2 and config.fsdp_activation_checkpointing):
        raise ConfigurationError(
            "--fsdp_activation_checkpointing_offload needs --fsdp_version 2 and "
            "--fsdp_activation_checkpointing. Give both, or leave it out."
        )


def _check_devices(config: LaunchConfig) -> None:
    ids = () if config.gpu_ids == "all" else tuple(config.gpu_ids.split(","))
    if len(set(ids)) < len(ids):
        raise ConfigurationError(f"--gpu_ids names an accelerator twice: got {config.gpu_ids}.")
    if config.multi_gpu and config.num_processes == 1:
        raise ConfigurationError(
            "--multi_gpu needs at least two processes: got --num_processes 1. Leave --multi_gpu out."
        )
    if config.multi_gpu and len(ids) == 1 and config.num_machines == 1:
        raise ConfigurationError(
            f"--multi_gpu with --gpu_ids {config.gpu_ids} has one accelerator. Name several, or leave "
            "--multi_gpu out."
        )
    here = (config.num_processes or 1) // config.num_machines
    if ids and here > len(ids) and not (config.cpu or config.tpu or config.mpirun_hostfile):
        raise ConfigurationError(
            f"{here} processes on this machine need as many accelerators, and --gpu_ids {config.gpu_ids} "
            f"names {len(ids)}. Use --num_processes {len(ids) * config.num_machines}, or --cpu to run them "
            "on the CPU."
        )


def _check_machines(config: LaunchConfig) -> None:
    machines, rank, processes = config.num_machines, config.machine_rank, config.num_processes
    if rank is not None and rank >= machines:
        raise ConfigurationError(
            f"--machine_rank must be 0 to {machines - 1} with --num_machines {machines}, got {rank}."
        )
    if processes is not None and processes % machines:
        fewer = processes // machines * machines
        choices = " or ".join(str(number) for number in (fewer, fewer + machines) if number)
        raise ConfigurationError(
            f"--num_processes counts all machines, so --num_machines must divide it: got {processes} "
            f"processes on {machines} machines. Use {choices} processes."
        )
    if config.rdzv_endpoint is not None and (config.main_process_ip or config.main_process_port) is not None:
        raise ConfigurationError(
            "--rdzv_endpoint says the same as --main_process_ip with --main_process_port. Give one of them."
        )
    if config.rdzv_backend == "static" and config.max_restarts:
        raise ConfigurationError(
            f"--max_restarts {config.max_restarts} needs --rdzv_backend c10d: a static rendezvous is held "
            "once, and processes can't come together again for another attempt."
        )
    # mpirun, SageMaker and TPU pods start the processes of every machine themselves.
    starts_itself = config.tpu or config.mpirun_hostfile or config.compute_environment != "LOCAL_MACHINE"
    if machines == 1 or starts_itself:
        return
    if config.main_process_ip is None and config.rdzv_endpoint is None:
        raise ConfigurationError(
            f"--num_machines {machines} needs --main_process_ip: the address of machine 0, the same on every "
            "machine."
        )
    if config.main_process_port == 0:
        raise ConfigurationError(
            "--main_process_port 0 means any free port, and the other machines could not know which. Give "
            "one number on every machine, or leave it out for 29500."
        )
    if rank is None and config.rdzv_backend != "c10d":
        raise ConfigurationError(
            f"--num_machines {machines} needs --machine_rank (0 to {machines - 1}, different on every "
            "machine). To have ranks assigned, use --rdzv_backend c10d."
        )


def mesh_size(config: LaunchConfig) -> int:
    """Return the product of the sizes of the mesh's axes; 1 where there is no mesh."""
    return prod(_mesh_sizes(config).values())


def _mesh_sizes(config: LaunchConfig) -> dict[str, int]:
    axes = ("dp_replicate", "dp_shard", "cp", "sp", "tp") if config.use_parallelism_config else ()
    return {axis: getattr(config, f"parallelism_config_{axis}_size") for axis in axes}


def _check_mesh(config: LaunchConfig) -> None:
    """Refuse a mesh that isn't one of the processes to start. FSDP takes those that no other axis takes."""
    total, places, sizes = config.num_processes, mesh_size(config), _mesh_sizes(config)
    if total is None or places == 1:
        return
    is_filled = config.use_fsdp and sizes["dp_replicate"] == sizes["dp_shard"] == 1
    free, rest = divmod(total, places)
    if rest or (free > 1 and not is_filled):
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        others = places // sizes["dp_replicate"]
        more = "" if total % others else f", or --parallelism_config_dp_replicate_size {total // others}"
        raise ConfigurationError(
            f"the mesh has {places} places ({shown}), and {total} processes are started. Use "
            f"--num_processes {places}{more}."
        )
    shards = free if is_filled else sizes["dp_shard"] * sizes["cp"] * sizes["sp"]
    if config.use_fsdp and shards == 1:
        raise ConfigurationError(
            f"--use_fsdp has nothing to shard over: the other axes of the mesh take all {total} processes. "
            "Use --parallelism_config_dp_shard_size, or leave --use_fsdp out."
        )
