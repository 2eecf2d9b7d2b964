"""The variables that started processes get: what a context reads, and what a script of Accelerate reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accelfn.launch.config.options import OPTIONS
from accelfn.launch.config.record import is_active
from accelfn.launch.config.resolve import Resolved
from accelfn.launch.plan.machine import Machine

# Sections whose values are all handed on, because the launcher's defaults aren't the record's.
_WHOLE = ("fsdp", "megatron_lm")
# How NCCL is told to go through the host's memory.
_WITHOUT_PEERS = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")


def plan_variables(
    resolved: Resolved, machine: Machine, environment: Mapping[str, str], local_size: int
) -> dict[str, str]:
    """Decide the variables for the processes of one machine. Pure.

    A value goes out under accelfn's name and under that of Accelerate's launcher. Values that nobody gave
    stay out, so that the script's own defaults count.

    Args:
        resolved: The configuration, and where its values came from.
        machine: Facts about this machine.
        environment: What the processes inherit.
        local_size: Processes on this machine.
    """
    config = resolved.config
    found: dict[str, str] = {}
    for name in _exported(resolved):
        option = OPTIONS[name]
        text = option.kind.write(getattr(config, name))
        if name in ("dynamo_backend", "fp8_backend"):
            text = text.upper()
        for variable in option.exports:
            found[variable] = text
    if config.mixed_precision == "fp8" and any(config.fp8_override_linear_precision):
        for where, value in zip(
            ("FPROP", "DGRAD", "WGRAD"), config.fp8_override_linear_precision, strict=True
        ):
            for prefix in ("ACCELFN", "ACCELERATE"):
                found[f"{prefix}_FP8_OVERRIDE_{where}"] = "true" if value else "false"
    if config.use_deepspeed:
        theirs = ("mixed_precision", "gradient_accumulation_steps")
        from_file = [
            option.key
            for name, option in OPTIONS.items()
            if (option.section.name == "deepspeed" or name in theirs)
            and resolved.origins[name].source == "file"
        ]
        if from_file:
            found["ACCELFN_CONFIG_DS_FIELDS"] = found["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(from_file)
    if config.gpu_ids != "all" and not config.cpu:
        chosen = resolved.origins["gpu_ids"].source
        # What stands in a file is older than what the user has set for this shell.
        if chosen != "file" or machine.device_variable not in environment:
            found[machine.device_variable] = config.gpu_ids
    if machine.has_false_peers and not config.cpu:
        # NCCL would believe the cards, and hang.
        found.update({name: "1" for name in _WITHOUT_PEERS if name not in environment})
    threads = config.num_cpu_threads_per_process
    if threads is None and "OMP_NUM_THREADS" not in environment:
        threads = max(1, machine.cores // local_size)  # torchrun would set 1 and leave most cores idle
    if threads is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    return found


def _exported(resolved: Resolved) -> Iterator[str]:
    """Yield the names of the options whose values processes get."""
    config = resolved.config
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        if not option.exports or value is None or not is_active(config, option):
            continue
        if option.section.name == "parallelism":
            if _is_of_mesh(option.key, config.parallelism_config_cp_size, config.parallelism_config_sp_size):
                yield name
        elif (
            option.section.name in _WHOLE
            or value != option.default
            or resolved.origins[name].source != "default"
        ):
            yield name


def _is_of_mesh(key: str, cp_size: int, sp_size: int) -> bool:
    if key == "cp_comm_strategy":
        return cp_size > 1
    return sp_size > 1 if key.startswith(("sp_seq", "sp_attn")) else True
