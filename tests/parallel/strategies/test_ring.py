"""Ring attention uses parts of torch, some private; they exist as it calls them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor.experimental import _context_parallel

import accelfn.parallel.strategies.attention as ring
from accelfn.testing import run_ranks

torchs: Any = cast("Any", _context_parallel)._attention
kernels: Any = ring


@pytest.mark.parametrize("kernel", ["_ON_CPU", "_FLASH", "_EFFICIENT"])
def test_kernels_of_torch_have_the_arguments_and_results_that_they_are_called_with(kernel: str) -> None:
    """Also those of devices that aren't here: what one gives must be what its backward takes."""
    own = getattr(kernels, kernel)
    forward, backward = (own.operator(backward=back)._schema for back in (False, True))
    taken = {one.name for one in forward.arguments}
    assert {"query", "key", "value", "is_causal", "dropout_p", "scale", *own.forward_options} <= taken
    assert len(forward.returns) >= 2 + len(own.rest)
    passed = {own.grad_name, "query", "key", "value", "out", "logsumexp", *own.rest, *own.backward_options}
    assert passed | {"dropout_p", "is_causal", "scale"} <= {one.name for one in backward.arguments}
    assert {one.name for one in backward.arguments if not one.has_default_value()} <= passed | {
        "dropout_p",
        "is_causal",
    }


def test_options_of_the_process_are_as_before() -> None:
    """Which a program's own ``context_parallel`` has set."""

    def work(ctx: Any) -> None:
        options = torchs._cp_options
        options.enable_load_balance, options.rotate_method = False, torchs._RotateMethod.ALL_GATHER
        x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(ctx.rank), requires_grad=True)
        y = ring.ring_attention(x, x, x, ctx.world.group, rotation="alltoall")
        y.sum().backward()  # pyright: ignore[reportUnknownMemberType]
        assert not options.enable_load_balance
        assert options.rotate_method == torchs._RotateMethod.ALL_GATHER
        (first,) = torch.autograd.grad(
            ring.ring_attention(x, x, x, ctx.world.group).sum(), x, create_graph=True
        )
        with pytest.raises(RuntimeError):  # rather than a second derivative without what other ranks have
            first.sum().backward()  # pyright: ignore[reportUnknownMemberType]

    run_ranks(work, 2, on="processes", timeout_s=60.0)
