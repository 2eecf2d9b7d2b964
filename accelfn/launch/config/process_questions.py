"""Questions about processes: how many, on which devices, in which precision; and those about TPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from accelfn.launch.config.engine_questions import group_size
from accelfn.launch.config.question import (
    ACCELERATORS,
    CPUS,
    ONE,
    TPU,
    Answers,
    Question,
    about,
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


def _has_engine(answers: Answers) -> bool:
    return any(answers.get(name) for name in ("use_deepspeed", "use_fsdp", "use_megatron_lm"))


def _usual_processes(answers: Answers) -> int:
    machines, unit = num_machines(answers), group_size(answers)
    if answers.get("use_parallelism_config"):
        return unit
    has_devices = answers.get("machine_type") == ACCELERATORS
    places = cast("int", answers.get("devices", 0)) * machines if has_devices else 0
    if places > 1 and places % unit == 0:
        return places
    fewest = math.lcm(machines, unit)
    return 2 if is_multi(answers) and fewest == 1 else fewest


def _refuse_processes(answers: Answers) -> str:
    processes, unit = cast("int", answers["num_processes"]), group_size(answers)
    if is_multi(answers) and processes == 1:
        return f"Several processes were chosen ({answers['machine_type']}): give 2 or more, got 1."
    if answers.get("use_parallelism_config") and processes != unit:
        return f"The sizes of the mesh multiply to {unit}, so it needs {unit} processes, got {processes}."
    if processes % unit:
        return (
            f"One copy of the model takes {unit} processes (the product of its degrees), which must divide "
            f"the number of all, got {processes}."
        )
    return ""


def _refuse_devices(answers: Answers) -> str:
    ids = cast("str", answers["gpu_ids"])
    here = cast("int", answers.get("num_processes", 1)) // num_machines(answers)
    if ids == "all" or len(ids.split(",")) >= here:
        return ""
    return f"{here} processes on this machine need as many accelerators, and {ids} names fewer. Name more."


def _has_file(answers: Answers) -> bool:
    return answers.get("deepspeed_config_file") is not None


def _precisions(answers: Answers) -> tuple[str, ...]:
    if _is_tpu(answers):
        return ("no", "bf16")
    on_cpu = answers.get("machine_type") == CPUS or answers.get("cpu") is True
    return ("no", "fp16", "bf16") if on_cpu else ("no", "fp16", "bf16", "fp8")


def _fp8(backend: str, *, also: str = "") -> Callable[[Answers], bool]:
    def when(answers: Answers) -> bool:
        return answers.get("fp8_backend") == backend and (not also or answers.get(also) is True)

    return when


def _override(position: int) -> Callable[[Answers], object]:
    def found(values: Answers) -> object:
        three = cast("tuple[bool, ...] | None", values.get("fp8_override_linear_precision"))
        return None if three is None else three[position]

    return found


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
        lambda answers: _has_accelerator(answers) and not _has_engine(answers),
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
        lambda answers: not _has_file(answers),
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
        lambda answers: not _has_file(answers),
        "Batches in one step of the optimizer (none: the script says)",
        optional=True,
    ),
    of_table(
        "fp8_backend",
        lambda answers: answers.get("mixed_precision") == "fp8",
        "Which engine computes fp8?",
        default="ao",
        titles={"ao": "ao (torchao)", "te": "te (Transformer Engine)", "msamp": "msamp (MS-AMP)"},
    ),
    of_table("fp8_use_autocast_during_eval", _fp8("te"), "Fp8 in evaluation too?"),
    of_table("fp8_margin", _fp8("te"), "Margin of the scaling factor"),
    of_table("fp8_interval", _fp8("te"), "Steps between new scaling factors"),
    of_table("fp8_format", _fp8("te"), "Format of the numbers"),
    of_table("fp8_amax_history_len", _fp8("te"), "Steps that the scaling factor looks back"),
    of_table("fp8_amax_compute_algo", _fp8("te"), "How it uses them"),
    about(
        "override_precision",
        _fp8("te"),
        "Compute some products in higher precision?",
        found=lambda values: values.get("fp8_override_linear_precision") not in (None, (False, False, False)),
    ),
    about("override_fprop", _fp8("te", also="override_precision"), "The forward pass?", found=_override(0)),
    about(
        "override_dgrad", _fp8("te", also="override_precision"), "Gradients of inputs?", found=_override(1)
    ),
    about(
        "override_wgrad", _fp8("te", also="override_precision"), "Gradients of weights?", found=_override(2)
    ),
    of_table("fp8_opt_level", _fp8("msamp"), "What is in fp8? (MS-AMP's levels)"),
    of_table("fp8_enable_fsdp_float8_all_gather", _fp8("ao", also="use_fsdp"), "Should FSDP gather in fp8?"),
    of_table("fp8_pad_inner_dim", _fp8("ao"), "Pad matrices to what the kernels want?"),
)
