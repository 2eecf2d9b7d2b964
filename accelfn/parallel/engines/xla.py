"""Shard a model over XLA's devices of one host: FSDP v2 of torch_xla, in SPMD mode.

One process drives all devices, and XLA's compiler inserts the communication.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from accelfn.context.xla import import_xla
from accelfn.errors import ConfigurationError, NotAvailableError
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


def of_rank(whole: None, at: Planning) -> XlaShardPlan | None:
    """Return how a model is sharded over XLA's devices; None if the context doesn't shard on XLA. Pure.

    Raises:
        ConfigurationError: The model has no parameters.
        NotAvailableError: An option of the ``fsdp_plugin`` has no counterpart in torch_xla.
    """
    del whole
    plugin = at.ctx.strategy.fsdp
    if at.ctx.device.type != "xla" or plugin is None:
        return None
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
    if not at.facts.own_names:
        raise ConfigurationError(
            f"fsdp_plugin: {at.facts.kinds['']} has no parameters to shard. Leave the plugin out."
        )
    return XlaShardPlan(choose_units(plugin, at.facts, wrapped_at(at, plugin)))


def apply(plan: XlaShardPlan, at: Application) -> None:
    """Shard the model over the devices of the host in place; names and classes stay.

    Ranks: the only one.

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
        module = at.model.get_submodule(name)
        # Its constructor marks the parameters and the backward pass of the module inside. The wrapper itself
        # only shards the output, which the hook does: so names and class of the module stay.
        shard(module, mesh, shard_output)
        module.register_forward_hook(after_forward)
