"""The configuration of a launch: the record of all options, and which values fit together."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from accelfn.errors import ConfigurationError
from accelfn.launch.options import EXCLUSIVE, OPTIONS, LaunchOptions, Option


class LaunchConfig(LaunchOptions):
    """Options of ``accelfn launch``, one attribute per flag. ``None`` means unset.

    [The command line](../reference/cli.md) lists the options. The constructor validates them. A value:
    equal options make equal configurations, and ``dataclasses.replace`` makes one with changes.

    Raises:
        ConfigurationError: Values conflict, or a value is invalid for its option.
        TypeError: An option is unknown.

    >>> LaunchConfig(num_processes=3, num_machines=2, main_process_ip="10.0.0.1", machine_rank=0)
    Traceback (most recent call last):
        ...
    accelfn.errors.ConfigurationError: --num_processes is the number on all machines, which --num_machines \
must divide: got 3 processes on 2 machines. Use 2 or 4 processes.
    """

    def __post_init__(self) -> None:
        """Check each value, and that all fit together."""
        super().__post_init__()
        for check in (_check_choices, _check_elastic, _check_ids, _check_machines, _check_mesh):
            for fault in check(self):
                raise ConfigurationError(fault)

    def __repr__(self) -> str:
        changed = (f"{name}={value!r}" for name, value in changed_values(self).items())
        return f"LaunchConfig({', '.join(changed)})"


def changed_values(config: LaunchConfig) -> dict[str, object]:
    """Return the values that differ from their defaults, by option name."""
    return {
        name: value for name, option in OPTIONS.items() if (value := getattr(config, name)) != option.default
    }


def is_active(config: LaunchConfig, option: Option) -> bool:
    """Return whether the section of an option is switched on. Pure.

    >>> is_active(LaunchConfig(), OPTIONS["zero_stage"])
    False
    >>> is_active(LaunchConfig(use_deepspeed=True), OPTIONS["zero_stage"])
    True
    """
    section = option.section
    if not section.switch or option.name == section.switch:
        return True
    value: object = getattr(config, section.switch)
    return value not in (None, "no") if section.on is None else value == section.on


def _check_choices(config: LaunchConfig) -> Iterator[str]:
    """Yield what is wrong with options that exclude or require each other."""
    for group in EXCLUSIVE:
        chosen = [f"--{name}" for name in group if getattr(config, name)]
        if len(chosen) > 1:
            yield f"{' and '.join(chosen)} exclude each other. Pass one of them."
    if config.enable_cpu_affinity and (config.cpu or config.tpu):
        yield "--enable_cpu_affinity binds processes to NUMA nodes of GPUs. Leave it out on CPUs and TPUs."
    if config.no_python and config.tpu:
        yield "--tpu runs a function of a Python script. Leave --no_python out."
    if not config.use_fsdp:
        return
    version, loads_on_one = config.fsdp_version, config.fsdp_cpu_ram_efficient_loading
    if version == 1 and loads_on_one and not config.fsdp_sync_module_states:
        yield (
            "--fsdp_cpu_ram_efficient_loading needs --fsdp_sync_module_states: otherwise only the main "
            "process has the weights. Switch the first off or the second on."
        )
    is_possible = version == 2 and config.fsdp_activation_checkpointing
    if config.fsdp_activation_checkpointing_offload and not is_possible:
        yield (
            "--fsdp_activation_checkpointing_offload needs --fsdp_version 2 and "
            "--fsdp_activation_checkpointing. Pass both, or leave it out."
        )


# Options of other ways to start processes, and what needs one agent for all processes of a machine.
_NOT_ELASTIC = (
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "preflight", "enable_cpu_affinity"),
    *("tpu", "compute_environment"),
)


def _check_elastic(config: LaunchConfig) -> Iterator[str]:
    """Yield, with ``elastic``, whatever else would start or connect the processes."""
    changed = changed_values(config) if config.elastic else {}
    conflicts = [
        f"--{'no_' if changed[name] is False else ''}{name}" for name in _NOT_ELASTIC if name in changed
    ]
    if conflicts:
        yield (
            f"--elastic starts and connects each process by itself, which {' and '.join(conflicts)} would "
            "change. Leave one or the other out."
        )


def _check_ids(config: LaunchConfig) -> Iterator[str]:
    ids = () if config.gpu_ids == "all" else tuple(config.gpu_ids.split(","))
    if len(set(ids)) < len(ids):
        yield f"--gpu_ids lists an accelerator twice: got {config.gpu_ids}."
    if config.multi_gpu and config.num_processes == 1:
        yield "--multi_gpu needs at least two processes: got --num_processes 1. Leave --multi_gpu out."
    if config.multi_gpu and len(ids) == 1 and config.num_machines == 1:
        yield (
            f"--multi_gpu needs several accelerators: got --gpu_ids {config.gpu_ids}. List several, or leave "
            "--multi_gpu out."
        )
    local_size = (config.num_processes or 1) // config.num_machines
    if ids and local_size > len(ids) and not (config.cpu or config.tpu):
        yield (
            f"{local_size} processes on this machine need as many accelerators, but --gpu_ids "
            f"{config.gpu_ids} lists {len(ids)}. Use --num_processes {len(ids) * config.num_machines}, or "
            "--cpu to run them on the CPU."
        )


def _check_machines(config: LaunchConfig) -> Iterator[str]:
    machines, rank, processes = config.num_machines, config.machine_rank, config.num_processes
    if rank is not None and rank >= machines:
        yield f"--machine_rank must be 0 to {machines - 1} with --num_machines {machines}, got {rank}."
    if processes is not None and processes % machines:
        fewer = processes // machines * machines
        choices = " or ".join(str(number) for number in (fewer, fewer + machines) if number)
        yield (
            f"--num_processes is the number on all machines, which --num_machines must divide: got "
            f"{processes} processes on {machines} machines. Use {choices} processes."
        )
    if config.rdzv_endpoint is not None and (config.main_process_ip or config.main_process_port) is not None:
        yield "--rdzv_endpoint replaces --main_process_ip and --main_process_port. Pass one or the other."
    if config.rdzv_backend == "static" and config.max_restarts:
        yield (
            f"--max_restarts {config.max_restarts} needs --rdzv_backend c10d: a static rendezvous can't be "
            "repeated for another attempt."
        )
    # SageMaker and TPU pods start the processes on every machine themselves.
    if machines == 1 or config.tpu or config.compute_environment != "LOCAL_MACHINE":
        return
    if config.main_process_ip is None and config.rdzv_endpoint is None:
        yield f"--num_machines {machines} needs --main_process_ip, the address of machine 0, on each of them."
    if config.main_process_port == 0:
        yield (
            "--main_process_port 0 picks a free port that the other machines can't know. Pass the same port "
            "on every machine, or leave it out for 29500."
        )
    if rank is None and config.rdzv_backend != "c10d":
        yield (
            f"--num_machines {machines} needs --machine_rank (0 to {machines - 1}, different on every "
            "machine). Use --rdzv_backend c10d to have ranks assigned."
        )


def _check_mesh(config: LaunchConfig) -> Iterator[str]:
    """Check that the mesh has as many ranks as processes. FSDP shards over ranks without another axis."""
    axes = ("dp_replicate", "dp_shard", "cp", "sp", "tp") if config.use_parallelism_config else ()
    sizes: dict[str, int] = {axis: getattr(config, f"parallelism_config_{axis}_size") for axis in axes}
    total = config.num_processes
    size = prod(sizes.values())
    if total is None or size == 1:
        return
    is_filled = config.use_fsdp and sizes["dp_replicate"] == sizes["dp_shard"] == 1
    free, rest = divmod(total, size)
    if rest or (free > 1 and not is_filled):
        shown = " x ".join(f"{axis} {length}" for axis, length in sizes.items() if length > 1)
        others = size // sizes["dp_replicate"]
        more = "" if total % others else f", or --parallelism_config_dp_replicate_size {total // others}"
        yield f"the mesh needs {size} processes ({shown}), got {total}. Use --num_processes {size}{more}."
    shards = (free if is_filled else sizes["dp_shard"]) * sizes["cp"] * sizes["sp"]
    if config.use_fsdp and shards == 1:
        yield (
            f"--use_fsdp has nothing to shard over: the other mesh axes use all {total} processes. "
            "Use --parallelism_config_dp_shard_size, or leave --use_fsdp out."
        )
