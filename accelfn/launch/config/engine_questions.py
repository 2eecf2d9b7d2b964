"""Questions about the engines that cut a model: DeepSpeed, FSDP with its mesh, and Megatron-LM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from accelfn.launch.config.question import (
    ACCELERATORS,
    ONE,
    Answers,
    Question,
    is_true,
    num_machines,
    of_table,
)

__all__ = ("ENGINE_QUESTIONS", "group_size")

# In the order in which they are asked for; the last one fills the mesh up.
_AXES = ("dp_replicate", "tp", "cp", "dp_shard")


def group_size(answers: Answers) -> int:
    """Count the processes of the mesh, or those that one copy of a model of Megatron-LM takes; else 1.

    >>> group_size({"use_parallelism_config": True, "parallelism_config_tp_size": 4})
    4
    """
    if answers.get("use_megatron_lm"):
        return _product(answers, "megatron_lm_tp_degree", "megatron_lm_pp_degree")
    return _mesh_size(answers) if answers.get("use_parallelism_config") else 1


def _mesh_size(answers: Answers) -> int:
    return _product(answers, *(f"parallelism_config_{axis}_size" for axis in _AXES))


def _product(answers: Answers, *names: str) -> int:
    return math.prod(cast("int", answers.get(name, 1)) for name in names)


def _usual_shards(answers: Answers) -> int:
    """As many as fill the accelerators there are; at least such that machines share the mesh evenly."""
    machines, others = num_machines(answers), _mesh_size(answers)
    places = cast("int", answers.get("devices", 0)) * machines
    if places > 1 and places % others == 0:
        return places // others
    fewest = machines // math.gcd(machines, others)
    return fewest if fewest * others > 1 else 2


def _refuse_mesh(answers: Answers) -> str:
    machines, mesh = num_machines(answers), _mesh_size(answers)
    if mesh == 1:
        return "All sizes are 1, which is no mesh. Give 2 or more here."
    if mesh % machines == 0:
        return ""
    return f"The sizes multiply to {mesh} processes, which {machines} machines can't share evenly."


def _may_use_deepspeed(answers: Answers) -> bool:
    kind = answers.get("machine_type")
    return kind == ACCELERATORS or (kind == ONE and answers.get("cpu") is False)


def _may_use_fsdp(answers: Answers) -> bool:
    return answers.get("machine_type") == ACCELERATORS and answers.get("use_deepspeed") is False


def _zero(stage: int) -> Callable[[Answers], bool]:
    """Give the condition that DeepSpeed has no file of its own, and that ZeRO cuts at least so much."""
    return lambda answers: cast("int", answers.get("zero_stage", -1)) >= stage


def _has_answer(name: str, value: object) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name) == value


def _starts_with_hostfile(answers: Answers) -> bool:
    return answers.get("deepspeed_multinode_launcher") not in (None, "standard")


def _fsdp(version: int) -> Callable[[Answers], bool]:
    return lambda answers: answers.get("fsdp_version") == version


def _is_above_1(name: str) -> Callable[[Answers], bool]:
    return lambda answers: cast("int", answers.get(name, 1)) > 1


_DEEPSPEED: tuple[Question, ...] = (
    of_table("use_deepspeed", _may_use_deepspeed, "Train with DeepSpeed?"),
    of_table(
        "deepspeed_config_file",
        is_true("use_deepspeed"),
        "DeepSpeed's own JSON file (none: answer questions instead)",
        optional=True,
        is_path=True,
    ),
    of_table(
        "zero_stage",
        lambda answers: answers.get("use_deepspeed") is True and answers["deepspeed_config_file"] is None,
        "Which stage of ZeRO?",
        default=2,
        choices=("0", "1", "2", "3"),
        titles={
            "0": "0 (cuts nothing)",
            "1": "1 (optimizer states)",
            "2": "2 (and gradients)",
            "3": "3 (and parameters)",
        },
    ),
    of_table("offload_optimizer_device", _zero(2), "Where do optimizer states lie?", default="none"),
    of_table(
        "offload_optimizer_nvme_path",
        _has_answer("offload_optimizer_device", "nvme"),
        default="/nvme",
    ),
    of_table("offload_param_device", _zero(2), "Where do parameters lie?", default="none"),
    of_table("offload_param_nvme_path", _has_answer("offload_param_device", "nvme"), default="/nvme"),
    of_table(
        "gradient_clipping", _zero(0), "Bound of the norm of gradients (none: no clipping)", optional=True
    ),
    of_table("zero3_save_16bit_model", _zero(3), "Save whole 16-bit weights?", default=False),
    of_table(
        "zero3_init_flag",
        is_true("use_deepspeed"),
        "Build models cut, with zero.Init? (stage 3)",
        default=False,
    ),
    of_table("deepspeed_moe_layer_cls_names", is_true("use_deepspeed"), optional=True),
    of_table(
        "deepspeed_multinode_launcher",
        lambda answers: answers.get("use_deepspeed") is True and num_machines(answers) > 1,
        "How are the machines started?",
        default="pdsh",
    ),
    of_table(
        "deepspeed_hostfile",
        _starts_with_hostfile,
        "Host file (none: the one of DeepSpeed)",
        optional=True,
        is_path=True,
    ),
    of_table("deepspeed_exclusion_filter", _starts_with_hostfile, optional=True),
    of_table(
        "deepspeed_inclusion_filter",
        lambda answers: _starts_with_hostfile(answers) and answers.get("deepspeed_exclusion_filter") is None,
        optional=True,
    ),
)

_FSDP: tuple[Question, ...] = (
    of_table("use_fsdp", _may_use_fsdp, "Train with FSDP?"),
    of_table(
        "fsdp_version",
        is_true("use_fsdp"),
        "Which version?",
        default=2,
        choices=("2", "1"),
        titles={"1": "1 (FullyShardedDataParallel)", "2": "2 (fully_shard)"},
    ),
    of_table("fsdp_sharding_strategy", _fsdp(1), "What is cut?"),
    of_table("fsdp_reshard_after_forward", _fsdp(2), "Cut parameters again after the forward pass?"),
    of_table("fsdp_offload_params", is_true("use_fsdp"), "Keep parameters in host memory?"),
    of_table(
        "fsdp_auto_wrap_policy",
        is_true("use_fsdp"),
        "Which modules are wrapped?",
        default="TRANSFORMER_BASED_WRAP",
    ),
    of_table(
        "fsdp_transformer_layer_cls_to_wrap",
        _has_answer("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        "Classes to wrap, separated by commas (none: those in the model's _no_split_modules)",
        optional=True,
    ),
    of_table(
        "fsdp_min_num_params",
        _has_answer("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
        "Wrap modules of at least how many parameters?",
    ),
    of_table(
        "fsdp_backward_prefetch", _fsdp(1), "When is fetched ahead in backward?", default="BACKWARD_PRE"
    ),
    of_table(
        "fsdp_state_dict_type",
        is_true("use_fsdp"),
        "Form of saved weights",
        default=lambda answers: "FULL_STATE_DICT" if _fsdp(1)(answers) else "SHARDED_STATE_DICT",
        choices=lambda answers: (
            ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
            if _fsdp(1)(answers)
            else ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
        ),
    ),
    of_table("fsdp_forward_prefetch", _fsdp(1), "Fetch ahead in forward?"),
    of_table("fsdp_use_orig_params", _fsdp(1), "Keep the original parameters?"),
    of_table(
        "fsdp_cpu_ram_efficient_loading", is_true("use_fsdp"), "Load the weights on the main process only?"
    ),
    of_table(
        "fsdp_sync_module_states",
        # Loading on one process only needs it; then it stays at its default, which is yes.
        lambda answers: _fsdp(1)(answers) and answers.get("fsdp_cpu_ram_efficient_loading") is False,
        "Hand out the weights of process 0?",
    ),
    of_table("fsdp_activation_checkpointing", is_true("use_fsdp"), "Compute activations again in backward?"),
    of_table(
        "fsdp_activation_checkpointing_offload",
        lambda answers: _fsdp(2)(answers) and answers.get("fsdp_activation_checkpointing") is True,
        "Keep what that starts from in host memory? (scripts of Accelerate do)",
    ),
    of_table("use_parallelism_config", _fsdp(2), "Lay the processes out as a mesh?"),
    of_table("parallelism_config_dp_replicate_size", is_true("use_parallelism_config")),
    of_table(
        "parallelism_config_tp_size", is_true("use_parallelism_config"), "Processes that share a layer (tp)"
    ),
    of_table(
        "parallelism_config_cp_size",
        is_true("use_parallelism_config"),
        "Processes that share a sequence (cp)",
    ),
    of_table(
        "parallelism_config_cp_comm_strategy",
        _is_above_1("parallelism_config_cp_size"),
        "How are keys and values exchanged?",
    ),
    of_table(
        "parallelism_config_dp_shard_size",
        is_true("use_parallelism_config"),
        "Processes that share a copy's parameters (dp_shard)",
        default=_usual_shards,
        refuse=_refuse_mesh,
    ),
)

_MEGATRON: tuple[Question, ...] = (
    of_table(
        "use_megatron_lm",
        lambda answers: answers.get("use_fsdp") is False,
        "Train with Megatron-LM?",
    ),
    of_table("megatron_lm_tp_degree", is_true("use_megatron_lm"), "Processes that share a layer (tp)"),
    of_table(
        "megatron_lm_sequence_parallelism",
        _is_above_1("megatron_lm_tp_degree"),
        "Cut activations along the sequence?",
        default=True,
    ),
    of_table("megatron_lm_pp_degree", is_true("use_megatron_lm"), "Stages of the pipeline (pp)"),
    of_table("megatron_lm_num_micro_batches", _is_above_1("megatron_lm_pp_degree"), default=1),
    of_table(
        "megatron_lm_recompute_activations",
        is_true("use_megatron_lm"),
        "Compute activations again in backward?",
        default=True,
    ),
    of_table(
        "megatron_lm_use_distributed_optimizer",
        is_true("use_megatron_lm"),
        "Cut optimizer states?",
        default=True,
    ),
    of_table("megatron_lm_gradient_clipping", is_true("use_megatron_lm")),
)

#: In the order in which they are asked.
ENGINE_QUESTIONS: tuple[Question, ...] = (*_DEEPSPEED, *_FSDP, *_MEGATRON)
