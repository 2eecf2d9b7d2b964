from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accelfn as af
from accelfn import Context
from accelfn.context import World
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.LayerNorm(2))


def test_where_torch_has_none_it_is_refused_before_anything_changes() -> None:
    def run(ctx: Context, reason: str) -> None:
        model = net()
        with pytest.raises(NotAvailableError, match=reason):
            af.parallel.convert_sync_batchnorm(ctx, model)
        assert isinstance(cast("nn.Sequential", model[1])[0], nn.BatchNorm1d)

    run_ranks(lambda ctx: run(ctx, "threads have no process group"), 2)
    run_ranks(lambda ctx: run(ctx, "does not support the CPU"), 2, "processes")


def test_on_an_accelerator_layers_are_converted_with_the_group_of_the_context() -> None:
    def run(ctx: Context) -> list[str]:
        # Converting needs no accelerator, and computing isn't tried.
        world = World(
            rank=ctx.rank, size=2, local_size=2, device=torch.device("cuda", 0), group_ref=ctx.world.group_ref
        )
        there = Context(world=world, collectives=ctx.collectives)
        model = net()
        keys = list(model.state_dict())
        converted = af.parallel.convert_sync_batchnorm(there, model)
        layer: Any = cast("nn.Sequential", converted[1])[0]
        assert isinstance(layer, nn.SyncBatchNorm)
        assert cast("Any", layer).process_group is ctx.world.group
        assert list(converted.state_dict()) == keys
        with pytest.raises(ConfigurationError, match="prepared already"):
            af.parallel.convert_sync_batchnorm(there, DistributedDataParallel(net()))
        return keys

    run_ranks(run, 2, "processes")
