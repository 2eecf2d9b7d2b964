"""Questions about what the processes share: FSDP, and the mesh with its axes of copies, shards and layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from accelfn.launch.config.question import (
    Answers,
    Question,
    is_multi,
    is_true,
    num_machines,
    of_table,
)

__all__ = ("MESH_QUESTIONS", "mesh_size")

# In the order in which they are asked for; the last one fills the mesh up.
_AXES = ("dp_replicate", "tp", "dp_shard")


def mesh_size(answers: Answers) -> int:
    """Count the places of the mesh; 1 where there is none.

    >>> mesh_size({"use_parallelism_config": True, "parallelism_config_tp_size": 4})
    4
    """
    if answers.get("use_parallelism_config") is not True:
        return 1
    return math.prod(cast("int", answers.get(f"parallelism_config_{axis}_size", 1)) for axis in _AXES)


def _usual_shards(answers: Answers) -> int:
    """As many as fill the accelerators there are; at least such that machines share the mesh evenly."""
    machines, others = num_machines(answers), mesh_size(answers)
    places = cast("int", answers.get("devices") or 0) * machines
    if places > others and places % others == 0:
        return places // others
    step = machines // math.gcd(machines, others)
    return step if step > 1 or (others > 1 and not answers.get("use_fsdp")) else 2


def _refuse_mesh(answers: Answers) -> str:
    machines, mesh = num_machines(answers), mesh_size(answers)
    if mesh == 1:
        return "All sizes are 1, which is no mesh. Give 2 or more here."
    if answers.get("use_fsdp") and answers["parallelism_config_dp_shard_size"] == 1:
        return "FSDP was chosen, and has nothing to shard over. Give 2 or more here."
    if mesh % machines == 0:
        return ""
    return f"The sizes multiply to {mesh} processes, which {machines} machines can't share evenly."


def _has_answer(name: str, value: object) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name) == value


#: In the order in which they are asked.
MESH_QUESTIONS: tuple[Question, ...] = (
    of_table("use_fsdp", is_multi, "Shard models over the processes, by FSDP?"),
    of_table(
        "fsdp_version",
        is_true("use_fsdp"),
        "Which version's options?",
        default=2,
        choices=("2", "1"),
        titles={"1": "1 (FullyShardedDataParallel)", "2": "2 (fully_shard)"},
    ),
    of_table(
        "fsdp_sharding_strategy",
        _has_answer("fsdp_version", 1),
        "Free parameters after the forward pass?",
        choices=("FULL_SHARD", "SHARD_GRAD_OP"),
        titles={"FULL_SHARD": "yes (FULL_SHARD)", "SHARD_GRAD_OP": "no (SHARD_GRAD_OP)"},
    ),
    of_table(
        "fsdp_reshard_after_forward",
        _has_answer("fsdp_version", 2),
        "Free parameters after the forward pass?",
    ),
    of_table("fsdp_offload_params", is_true("use_fsdp"), "Keep parameters in host memory?"),
    of_table(
        "fsdp_auto_wrap_policy",
        is_true("use_fsdp"),
        "Which modules are gathered one by one?",
        default="TRANSFORMER_BASED_WRAP",
        titles={
            "TRANSFORMER_BASED_WRAP": "the blocks of the model (TRANSFORMER_BASED_WRAP)",
            "SIZE_BASED_WRAP": "those with so many parameters (SIZE_BASED_WRAP)",
            "NO_WRAP": "none: the model is gathered at once (NO_WRAP)",
        },
    ),
    of_table(
        "fsdp_transformer_layer_cls_to_wrap",
        _has_answer("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        "Classes of the blocks, separated by commas (none: those in the model's _no_split_modules)",
        optional=True,
    ),
    of_table(
        "fsdp_min_num_params",
        _has_answer("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
        "Modules of at least how many parameters?",
    ),
    of_table("fsdp_forward_prefetch", _has_answer("fsdp_version", 1), "Ask for the next module in forward?"),
    of_table(
        "use_parallelism_config",
        is_multi,
        "Lay the processes out as a mesh (copies, shards, layers that processes share)?",
    ),
    of_table(
        "parallelism_config_dp_replicate_size",
        is_true("use_parallelism_config"),
        "Copies of the model (dp_replicate)",
    ),
    of_table(
        "parallelism_config_tp_size", is_true("use_parallelism_config"), "Processes that share a layer (tp)"
    ),
    of_table(
        "parallelism_config_dp_shard_size",
        is_true("use_parallelism_config"),
        "Processes that share a copy's parameters (dp_shard)",
        default=_usual_shards,
        refuse=_refuse_mesh,
    ),
)
