"""Shard a model over XLA's devices of one host: FSDP v2 of torch_xla, in SPMD mode.

One process drives all devices, and XLA's compiler inserts the communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from accelfn.context import Context
from accelfn.context.config import FullyShardedDataParallelPlugin
from accelfn.context.xla import import_xla
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.facts import ModelFacts
from accelfn.parallel.strategies.fsdp_plan import choose_units, wrapped_at
from accelfn.parallel.strategies.strategy import Application, Planning
from accelfn.tree import flatten

_FSDP = "torch_xla.experimental.spmd_fully_sharded_data_parallel"


class XlaShardPlan(NamedTuple):
    """How a model is sharded over XLA's devices.

    Attributes:
        units: Names of the modules whose outputs are sharded too, inner ones first; "" for the model.
    """

    units: tuple[str, ...]

    def __str__(self) -> str:
        """Return the plan in words."""
        inner = len(self.units) - 1
        return (
            "parameters, gradients and batches sharded along their first dimension over all devices of the "
            f"host by XLA's compiler; outputs of {f'{inner} units and of ' if inner else ''}the model too"
        )


def plan_xla(ctx: Context, facts: ModelFacts, wrapped: Iterable[str] | None = None) -> XlaShardPlan | None:
    """Return how a model is sharded over XLA's devices; None if the context doesn't shard on XLA. Pure.

    Args:
        ctx: The device, and the ``fsdp_plugin``.
        facts: Of the model.
        wrapped: The choice of an ``auto_wrap_policy`` that is a callable.

    Raises:
        ConfigurationError: The model has no parameters.
        NotAvailableError: An option of the plugin has no counterpart in torch_xla.
    """
    plugin = ctx.strategy.fsdp
    if ctx.device.type != "xla" or plugin is None:
        return None
    check_plugin(plugin)
    if not facts.own_names:
        raise ConfigurationError(
            f"fsdp_plugin: {facts.kinds['']} has no parameters to shard. Leave the plugin out."
        )
    return XlaShardPlan(choose_units(plugin, facts, wrapped))


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse options of FSDP that torch_xla's doesn't have.

    Raises:
        NotAvailableError: With the name of the option.
    """
    for name, is_set in (
        ("cpu_offload", plugin.offloads_params),
        ("mixed_precision_policy", plugin.mixed_precision_policy is not None),
        ("ignored_modules", plugin.ignored_modules is not None),
    ):
        if is_set:
            raise NotAvailableError(
                f"fsdp_plugin: {name} isn't an option of torch_xla's FSDP. Leave it out; mixed_precision "
                "sets the dtype."
            )


def apply_xla(ctx: Context, model: nn.Module, plan: XlaShardPlan) -> None:
    """Shard a model in place, which keeps its class and the names of its parameters.

    Ranks: the only one.

    Args:
        ctx: In SPMD mode, on XLA's device.
        model: On the device.
        plan: From :func:`plan_xla`.

    Raises:
        MissingExtraError: torch_xla isn't installed, or has no FSDP v2.
    """
    spmd: Any = import_xla("torch_xla.distributed.spmd")
    shard: Any = import_xla(_FSDP).SpmdFullyShardedDataParallel
    mesh = spmd.get_global_mesh()

    def shard_output(output: Any, mesh: Any) -> None:
        for leaf in flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                spmd.mark_sharding(leaf, mesh, ("fsdp", *[None] * (leaf.dim() - 1)))

    def after_forward(module: nn.Module, arguments: Any, output: Any) -> None:
        shard_output(output, mesh)

    for name in plan.units:
        module = model.get_submodule(name)
        # Its constructor marks the parameters and the backward pass of the module inside. The wrapper itself
        # only shards the output, which the hook does: so names and class of the module stay.
        shard(module, mesh, shard_output)
        module.register_forward_hook(after_forward)


def of_rank(whole: None, at: Planning) -> XlaShardPlan | None:
    """Return how XLA's compiler shards a model; None elsewhere."""
    del whole
    plugin = at.ctx.strategy.fsdp
    if at.ctx.device.type != "xla" or plugin is None:
        return None
    return plan_xla(at.ctx, at.facts, wrapped_at(at, plugin))


def apply(at: Application) -> None:
    """Shard the model over the devices of the host, if XLA does."""
    plan: XlaShardPlan | None = at.plans["xla"]
    if plan is not None:
        apply_xla(at.ctx, at.model, plan)
