"""Megatron's optimizer, with the options of the user's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from accelfn.context.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.engines.megatron.build import Core
from accelfn.parallel.engines.megatron.model import MegatronModel
from accelfn.parallel.engines.megatron.plan import MegatronPlan

Condition = Callable[[str, torch.Tensor], bool]


def optimizer_options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig for a torch optimizer.

    Raises:
        ConfigurationError: It has stepped already, or its groups differ.
        NotAvailableError: It has an option that Megatron's doesn't.
    """
    if optimizer.state:
        raise ConfigurationError(
            f"Megatron-LM: the {type(optimizer).__name__} has stepped already, and its state can't be moved "
            "into Megatron's. Prepare it before its first step, and load the state afterwards."
        )
    groups = optimizer.param_groups
    for name in ("amsgrad", "nesterov", "maximize", "dampening"):
        if any(group.get(name) for group in groups):
            raise NotAvailableError(
                f"Megatron-LM: its optimizers have no {name}, which the {type(optimizer).__name__} has. "
                "Leave it out."
            )
    plain = [{key: value for key, value in group.items() if "param" not in key} for group in groups]
    if any(group != plain[0] for group in plain):
        raise ConfigurationError(
            f"Megatron-LM: the groups of the {type(optimizer).__name__} differ, and which of them the "
            "provider's parameters belong to isn't known. Pass one group; no_wd_decay_cond and "
            "scale_lr_cond of the MegatronLMPlugin choose parameters by name."
        )
    first = groups[0]
    options: dict[str, Any] = {"lr": float(first["lr"]), "weight_decay": first.get("weight_decay", 0.0)}
    if "betas" in first:
        options |= {
            "adam_beta1": first["betas"][0],
            "adam_beta2": first["betas"][1],
            "adam_eps": first["eps"],
        }
        is_decoupled = first.get("decoupled_weight_decay", type(optimizer).__name__ != "Adam")
        return {**options, "optimizer": "adam", "decoupled_weight_decay": bool(is_decoupled)}
    return {**options, "optimizer": "sgd", "sgd_momentum": first.get("momentum", 0.0)}


def build_optimizer(
    core: Core, plan: MegatronPlan, plugin: MegatronLMPlugin, model: MegatronModel, options: dict[str, Any]
) -> Any:
    """Build Megatron's optimizer for ``model``.

    Ranks: every rank of the context.

    Args:
        core: megatron-core.
        plan: The plan.
        plugin: Its ``no_wd_decay_cond``, ``scale_lr_cond`` and ``lr_mult``.
        model: The model.
        options: From :func:`optimizer_options`.
    """
    config = core.optimizer.OptimizerConfig(
        **options,
        min_lr=0.0,
        fp16=plan.precision == "fp16",
        bf16=plan.precision == "bf16",
        params_dtype={"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[plan.precision],
        use_distributed_optimizer=plan.shards_state,
        loss_scale=1.0 if plan.precision == "fp16" else None,  # replaced at each step
        clip_grad=plan.max_norm,
    )
    parts = core.optimizer.optimizer_config
    overrides: dict[Any, dict[str, float]] = {}
    for key, factor, condition in (
        ("user_decay_mult", 0.0, plugin.no_wd_decay_cond),
        ("user_lr_mult", plugin.lr_mult, plugin.scale_lr_cond),
    ):
        if condition is not None:
            predicate = parts.ParamWithNamePredicate(name=key, fn=_by_name(condition))
            overrides[parts.ParamKey(with_name_predicate=predicate)] = {key: factor}
    return core.optimizer.get_megatron_optimizer(
        config, list(model.chunks), config_overrides=overrides, use_gloo_process_groups=False
    )


def _by_name(condition: Condition) -> Callable[[torch.Tensor, str], bool]:
    """Return Megatron's kind of condition, whose names have its wrappers' prefixes."""
    return lambda parameter, name: condition(re.sub(r"^(module\.)+", "", name), parameter)
