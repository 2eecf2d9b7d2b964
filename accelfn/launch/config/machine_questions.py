"""Questions about machines: which there are, and how they meet."""

from __future__ import annotations

from typing import cast

from accelfn.launch.config.fields import FIELD_OF
from accelfn.launch.config.question import (
    ACCELERATORS,
    CPUS,
    ONE,
    TPU,
    Answers,
    Question,
    about,
    is_multi,
    is_sagemaker,
    is_true,
    num_machines,
    of_table,
)

__all__ = ("MACHINE_QUESTIONS",)


def _is_local(answers: Answers) -> bool:
    return answers.get("compute_environment") == "LOCAL_MACHINE"


def _is_one(answers: Answers) -> bool:
    return answers.get("machine_type") == ONE


def _rents_several(answers: Answers) -> bool:
    return is_sagemaker(answers) and answers.get("sagemaker_distributed_type") != "NO"


def _machines_meet(answers: Answers) -> bool:
    """Whether machines have to find each other; mpirun starts all of them itself."""
    return is_multi(answers) and num_machines(answers) > 1 and answers.get("mpirun_hostfile") is None


def _type_in_file(values: Answers) -> object:
    if values.get("tpu"):
        return TPU
    if values.get("multi_gpu"):
        return ACCELERATORS
    several = values.get("num_processes") not in (None, 1) or values.get("num_machines") not in (None, 1)
    if several:
        return CPUS if values.get("cpu") else ACCELERATORS
    return ONE if values.get("num_processes") == 1 or values.get("cpu") else None


def _usual_type(answers: Answers) -> str:
    return ACCELERATORS if cast("int", answers.get("devices") or 0) > 1 else ONE


def _types(answers: Answers) -> tuple[str, ...]:
    accelerators = () if answers.get("devices") == 0 else (ACCELERATORS,)
    return (ONE, CPUS, *accelerators, *((TPU,) if answers.get("has_tpu") else ()))


_KEYS = " and ".join(FIELD_OF[name].variables[0] for name in ("aws_access_key_id", "aws_secret_access_key"))
_INSTANCES = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge")

#: In the order in which they are asked.
MACHINE_QUESTIONS: tuple[Question, ...] = (
    of_table(
        "compute_environment",
        lambda _: True,
        "Where does the script run?",
        titles={"LOCAL_MACHINE": "this machine, or several like it", "AMAZON_SAGEMAKER": "Amazon SageMaker"},
    ),
    about(
        "has_profile",
        is_sagemaker,
        f"Do the credentials come from a profile of AWS? (otherwise set {_KEYS} at launch)",
        found=lambda values: values.get("sagemaker_profile") is not None if is_sagemaker(values) else None,
        default=lambda _: True,
    ),
    of_table("sagemaker_profile", is_true("has_profile"), "Which profile?", default="default"),
    of_table("sagemaker_region", is_sagemaker, "AWS region"),
    of_table(
        "sagemaker_iam_role_name",
        is_sagemaker,
        "IAM role to run as",
        example="accelfn_sagemaker_execution_role",
    ),
    of_table("sagemaker_image_uri", is_sagemaker, "Container image of your own", optional=True),
    of_table(
        "sagemaker_inputs_file",
        is_sagemaker,
        "TSV file of names and places of inputs",
        optional=True,
        is_path=True,
    ),
    of_table(
        "sagemaker_metrics_file",
        is_sagemaker,
        "TSV file of names and patterns of metrics",
        optional=True,
        is_path=True,
    ),
    of_table(
        "sagemaker_distributed_type",
        is_sagemaker,
        "How do its processes share the work?",
        choices=("NO", "DATA_PARALLEL"),
        titles={"NO": "there is one", "DATA_PARALLEL": "data parallel"},
    ),
    of_table(
        "sagemaker_ec2_instance_type",
        is_sagemaker,
        "Kind of machine to rent",
        default=lambda answers: _INSTANCES[0] if _rents_several(answers) else "ml.p3.2xlarge",
        choices=lambda answers: _INSTANCES if _rents_several(answers) else (),
    ),
    about(
        "machine_type",
        _is_local,
        "What does it run on?",
        choices=_types,
        titles={
            **{one: one for one in (ONE, CPUS, TPU)},
            ACCELERATORS: f"{ACCELERATORS} (GPU, XPU, HPU, NPU, MLU, SDAA, MUSA, Neuron)",
        },
        default=_usual_type,
        found=_type_in_file,
    ),
    of_table(
        "num_machines", lambda answers: is_multi(answers) or _rents_several(answers), "How many machines?"
    ),
    of_table(
        "mpirun_hostfile",
        lambda answers: answers.get("machine_type") == CPUS,
        "Host file of mpirun (none: start the processes without mpirun)",
        optional=True,
        is_path=True,
    ),
    of_table(
        "rdzv_backend",
        _machines_meet,
        "How do the machines meet?",
        default="static",
        titles={"static": "each is told its number (static)", "c10d": "numbers are given out (c10d)"},
    ),
    of_table(
        "machine_rank",
        lambda answers: _machines_meet(answers) and answers.get("rdzv_backend") == "static",
        "Number of this machine (on the others, --machine_rank says theirs)",
        default=0,
        choices=lambda answers: tuple(str(rank) for rank in range(num_machines(answers))),
    ),
    of_table(
        "main_process_ip",
        lambda answers: _machines_meet(answers) and answers.get("rdzv_endpoint") is None,
        "Address of machine 0, as the others reach it",
        example="10.0.0.1",
    ),
    of_table(
        "main_process_port",
        lambda answers: _machines_meet(answers) and answers.get("rdzv_endpoint") is None,
        "Port on machine 0 (none: 29500)",
        optional=True,
    ),
    of_table(
        "debug",
        lambda answers: is_multi(answers) or _rents_several(answers),
        "Check operations across ranks while the script runs? (slower)",
    ),
    of_table(
        "cpu",
        lambda answers: _is_one(answers) and answers.get("devices") != 0,
        "Use the CPU even where there is an accelerator?",
    ),
    about(
        "use_dynamo",
        lambda _: True,
        "Compile models with torch.compile?",
        found=lambda values: values.get("dynamo_backend") not in (None, "no"),
    ),
    of_table(
        "dynamo_backend",
        is_true("use_dynamo"),
        "With which backend?",
        default="inductor",
        choices=tuple(one for one in FIELD_OF["dynamo_backend"].kind.choices if one != "no"),
    ),
    about(
        "customize_dynamo",
        is_true("use_dynamo"),
        "Set its options?",
        found=lambda values: any(name.startswith("dynamo_") and name != "dynamo_backend" for name in values),
    ),
    of_table("dynamo_mode", is_true("customize_dynamo"), "What should it optimise for?"),
    of_table("dynamo_use_fullgraph", is_true("customize_dynamo"), "Must a model be one graph?"),
    of_table(
        "dynamo_use_dynamic",
        is_true("customize_dynamo"),
        "Compile for all shapes at once?",
        default=False,
    ),
    of_table("dynamo_use_regional_compilation", is_true("customize_dynamo"), "Compile repeated blocks once?"),
)
