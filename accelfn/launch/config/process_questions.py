"""Questions about processes: how many, on which devices, in which precision; and those about TPUs."""

from __future__ import annotations

from typing import cast

from accelfn.launch.config.mesh_questions import mesh_size
from accelfn.launch.config.question import (
    ACCELERATORS,
    ONE,
    TPU,
    Answers,
    Question,
    is_multi,
    num_machines,
    of_table,
)

__all__ = ("PROCESS_QUESTIONS",)


def _is_tpu(answers: Answers) -> bool:
    return answers.get("machine_type") == TPU


def _is_cluster(answers: Answers) -> bool:
    return answers.get("tpu_cluster") is True


def _has_accelerator(answers: Answers) -> bool:
    kind = answers.get("machine_type")
    return kind == ACCELERATORS or (kind == ONE and answers.get("cpu") is False)


def _usual_processes(answers: Answers) -> int:
    machines, mesh = num_machines(answers), mesh_size(answers)
    if mesh > 1:
        return mesh
    has_devices = answers.get("machine_type") == ACCELERATORS
    places = cast("int", answers.get("devices") or 0) * machines if has_devices else 0
    if places > 1:
        return places
    return 2 if is_multi(answers) and machines == 1 else machines


def _refuse_processes(answers: Answers) -> str:
    if is_multi(answers) and answers["num_processes"] == 1:
        return f"Several processes were chosen ({answers['machine_type']}): give 2 or more, got 1."
    mesh = mesh_size(answers)
    if mesh not in (1, answers["num_processes"]):
        return f"The sizes of the mesh multiply to {mesh}: it needs as many processes."
    return ""


def _refuse_devices(answers: Answers) -> str:
    ids = cast("str", answers["gpu_ids"])
    here = cast("int", answers.get("num_processes", 1)) // num_machines(answers)
    if ids == "all" or len(ids.split(",")) >= here:
        return ""
    return f"{here} processes on this machine need as many accelerators, and {ids} names fewer. Name more."


def _precisions(answers: Answers) -> tuple[str, ...]:
    return ("no", "bf16") if _is_tpu(answers) else ("no", "fp16", "bf16")


#: In the order in which they are asked.
PROCESS_QUESTIONS: tuple[Question, ...] = (
    of_table(
        "num_processes",
        lambda answers: is_multi(answers) or _is_tpu(answers),
        "How many processes, on all machines together?",
        default=_usual_processes,
        refuse=_refuse_processes,
    ),
    of_table(
        "gpu_ids",
        _has_accelerator,
        "Which accelerators of this machine?",
        refuse=_refuse_devices,
    ),
    of_table("enable_cpu_affinity", _has_accelerator, "Bind each process to cores near its accelerator?"),
    of_table("main_training_function", _is_tpu, "Function of the script that each process runs"),
    of_table("tpu_cluster", _is_tpu, "Start on every machine of a TPU cluster, through gcloud?"),
    of_table("tpu_name", _is_cluster, "Name of the TPU", example="my-tpu"),
    of_table("tpu_zone", _is_cluster, "Zone of the TPU", example="us-central1-a"),
    of_table("tpu_use_sudo", _is_cluster, "Start there with sudo?"),
    of_table(
        "command_file",
        _is_cluster,
        "File of shell commands to prepare the machines with (accelfn tpu-config runs it)",
        optional=True,
        is_path=True,
    ),
    of_table(
        "commands",
        lambda answers: _is_cluster(answers) and answers.get("command_file") is None,
        "Shell command to prepare the machines with",
        optional=True,
    ),
    of_table("vm", _is_cluster, "Machine of the TPU to start on (none: all)", optional=True),
    of_table("env", _is_cluster, "NAME=VALUE to set there", optional=True),
    of_table(
        "mixed_precision",
        lambda _: True,
        "Which precision?",
        default="no",
        choices=_precisions,
    ),
    of_table(
        "downcast_bf16",
        lambda answers: _is_tpu(answers) and answers.get("mixed_precision") == "bf16",
        "Should double mean fp32? (otherwise bf16 too)",
    ),
    of_table(
        "gradient_accumulation_steps",
        lambda _: True,
        "Batches in one step of the optimizer (none: the script says)",
        optional=True,
    ),
)
