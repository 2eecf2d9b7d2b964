"""The groups of the user's optimizer, in Megatron's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.context.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.engines.megatron.build import Core, rules_of_rank
from accelfn.parallel.engines.megatron.model import MegatronModel
from accelfn.parallel.engines.megatron.plan import MegatronPlan

# Attribute of a parameter of Megatron: the number of the user's group that it is trained in, and its factors.
_GROUP = "_accelfn_group"


class Group(NamedTuple):
    """The group of the user's optimizer that a parameter belongs to."""

    number: int
    has_decay: bool = True
    is_scaled: bool = False


def group_of(parameter: torch.Tensor) -> Group | None:
    """Return the group of a parameter of Megatron; None if it isn't trained."""
    return getattr(parameter, _GROUP, None)


def optimizer_options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the fields of Megatron's OptimizerConfig for a torch optimizer.

    Raises:
        ConfigurationError: It has stepped already.
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
    for name in ("betas", "eps", "momentum"):
        if len({group.get(name) for group in groups}) > 1:
            raise NotAvailableError(
                f"Megatron-LM: its optimizer has one {name} for all parameters, and the groups of the "
                f"{type(optimizer).__name__} differ in it."
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


def tag_groups(
    core: Core,
    plan: MegatronPlan,
    plugin: MegatronLMPlugin,
    chunks: Sequence[nn.Module],
    model: nn.Module,
    optimizer: Optimizer,
) -> None:
    """Note on each parameter of Megatron the group of the user's parameters that it consists of.

    Raises:
        ConfigurationError: They are in different groups, or only some are trained.
    """
    numbers = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    named = {
        name: numbers.get(id(parameter)) if parameter.requires_grad else None
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    if plan.shape.family == "custom":
        rules: Sequence[Any] = [()] * len(chunks)
    else:
        rules = rules_of_rank(core, plan)
    for chunk, chunk_rules in zip(chunks, rules, strict=True):
        sources = {rule.name: [piece.name for piece in rule.pieces] for rule in chunk_rules}
        for name, parameter in chunk.named_parameters():
            found = {named[source] for source in sources.get(name, ())} or {0}
            if len(found) > 1:
                raise ConfigurationError(
                    f"Megatron-LM: {', '.join(sources[name])} are one parameter in Megatron, so they must be "
                    "in one group of the optimizer, and all be trained or none."
                )
            number = found.pop()
            if number is None:
                parameter.requires_grad = False
                continue
            names = sources.get(name, [name])
            no_decay, scaled = plugin.no_wd_decay_cond, plugin.scale_lr_cond
            group = Group(
                number,
                has_decay=no_decay is None or not any(no_decay(one, parameter) for one in names),
                is_scaled=scaled is not None and any(scaled(one, parameter) for one in names),
            )
            setattr(parameter, _GROUP, group)


def build_optimizer(
    core: Core,
    plan: MegatronPlan,
    plugin: MegatronLMPlugin,
    model: MegatronModel,
    optimizer: Optimizer,
    options: Mapping[str, Any],
) -> Any:
    """Build Megatron's optimizer for the tagged parameters of ``model``.

    Ranks: every rank of the context.

    Args:
        core: megatron-core.
        plan: The plan.
        plugin: Its ``lr_mult``.
        model: The model.
        optimizer: The user's, with the groups.
        options: From :func:`optimizer_options`.
    """
    parts = core.optimizer.optimizer_config
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
    overrides: dict[Any, dict[str, Any]] = {}
    kinds = [
        Group(number, has_decay, is_scaled)
        for number in range(len(optimizer.param_groups))
        for has_decay in (True, False)
        for is_scaled in (False, True)
    ]
    for kind in kinds:
        predicate = parts.ParamPredicate(name=str(kind), fn=_is_tagged(kind))
        overrides[parts.ParamKey(predicate=predicate)] = {
            "user_group": kind.number,
            "user_decay_mult": 1.0 if kind.has_decay else 0.0,
            "user_lr_mult": plugin.lr_mult if kind.is_scaled else 1.0,
        }
    return core.optimizer.get_megatron_optimizer(
        config, list(model.chunks), config_overrides=overrides, use_gloo_process_groups=False
    )


def _is_tagged(kind: Group) -> Callable[[torch.Tensor], bool]:
    def is_tagged(parameter: torch.Tensor) -> bool:
        return group_of(parameter) == kind

    return is_tagged
