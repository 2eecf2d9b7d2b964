"""The variables that started processes get: what a context reads, and what a script of Accelerate reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accelfn.launch.config.fields import FIELD_OF, FIELDS, Field, is_active, value_of
from accelfn.launch.config.sources import Resolved
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
        field = FIELD_OF[name]
        value = value_of(config, field)
        text = field.kind.write(value)
        if name in ("dynamo_backend", "fp8_backend"):
            text = text.upper()
        for variable in field.exports:
            found[variable] = text
    if config.mixed_precision == "fp8" and any(config.fp8.override_linear_precision):
        for where, value in zip(
            ("FPROP", "DGRAD", "WGRAD"), config.fp8.override_linear_precision, strict=True
        ):
            for prefix in ("ACCELFN", "ACCELERATE"):
                found[f"{prefix}_FP8_OVERRIDE_{where}"] = "true" if value else "false"
    if config.use_deepspeed:
        from_file = [
            field.key
            for field in FIELDS
            if (
                field.section == "deepspeed"
                or field.name in ("mixed_precision", "gradient_accumulation_steps")
            )
            and resolved.origins[field.name].source == "file"
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
    """Name the fields whose values processes get."""
    config = resolved.config
    for field in FIELDS:
        if not field.exports or not is_active(config, field) or value_of(config, field) is None:
            continue
        given = resolved.origins[field.name].source != "default" or value_of(config, field) != field.default
        if field.section == "parallelism":
            given = _is_of_mesh(field, config.parallelism.cp_size, config.parallelism.sp_size)
        if given or field.section in _WHOLE:
            yield field.name


def _is_of_mesh(field: Field, cp_size: int, sp_size: int) -> bool:
    if field.key == "cp_comm_strategy":
        return cp_size > 1
    return sp_size > 1 if field.key.startswith(("sp_seq", "sp_attn")) else True
