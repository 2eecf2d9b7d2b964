"""Train a pure program with its state shared out over the ranks: ZeRO-1 and ZeRO-3, in a few lines each.

    accelfn launch --num_processes 2 docs/examples/shard_a_pytree.py

The parameters are a tree, the optimizer is torchopt's, and nothing but `shard`, `all_gather` and
`reduce_scatter` makes the difference to plain training, with which the result is compared.
"""

# pyright: basic
# torchopt leaves its updates untyped.

from collections.abc import Callable
from typing import Any

import torch
import torchopt
from torch.nn import functional

import accelfn as af

Params = dict[str, torch.Tensor]
NUM_STEPS = 20
ROWS = 24


def init_params() -> Params:
    """Give a small network whose sizes don't divide by the number of ranks: nothing has to."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (7, 13), "b1": (13,), "w2": (13, 3), "b2": (3,)}
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Give batches of 24 rows, inputs (24, 7) and targets (24, 3)."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_STEPS, ROWS, 7, generator=generator)
    targets = torch.stack([inputs.sum(2), inputs.amax(2), inputs.amin(2)], dim=2)
    return list(zip(inputs, targets, strict=True))


def loss_of(params: Params, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(inputs @ params["w1"] + params["b1"])
    return functional.mse_loss(hidden @ params["w2"] + params["b2"], targets)


def own_rows(ctx: af.Context, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0].chunk(ctx.num_processes)[ctx.rank], batch[1].chunk(ctx.num_processes)[ctx.rank]


def train_plain(ctx: af.Context) -> Params:
    """Every rank holds everything and sees every row."""
    optimizer = torchopt.adam(lr=0.01)
    params = init_params()
    state = optimizer.init(params)
    for inputs, targets in load():
        grads = torch.func.grad(loss_of)(params, inputs, targets)
        updates, state = optimizer.update(grads, state, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return params


def train_zero1(ctx: af.Context) -> Params:
    """ZeRO-1: whole parameters on each rank, and a piece of the optimizer's state."""
    optimizer = torchopt.adam(lr=0.01)
    params = init_params()
    pieces = af.shard(ctx, params)
    state = optimizer.init(pieces)
    for batch in load():
        grads = torch.func.grad(loss_of)(params, *own_rows(ctx, batch))
        grads = af.reduce_scatter(ctx, grads, reduction="mean")
        updates, state = optimizer.update(grads, state, inplace=False)
        pieces = torchopt.apply_updates(pieces, updates, inplace=False)
        params = af.unshard(ctx, pieces)
    return params


def train_zero3(ctx: af.Context) -> Params:
    """ZeRO-3: a piece of everything; whole parameters exist while the loss is computed."""
    optimizer = torchopt.adam(lr=0.01)
    pieces = af.shard(ctx, init_params())
    state = optimizer.init(pieces)

    def loss_of_pieces(pieces: Params, *rows: torch.Tensor) -> torch.Tensor:
        # Backward sums over the ranks, each of which has a part of the mean.
        return loss_of(af.all_gather(ctx, pieces), *rows) / ctx.num_processes

    for batch in load():
        grads = torch.func.grad(loss_of_pieces)(pieces, *own_rows(ctx, batch))
        updates, state = optimizer.update(grads, state, inplace=False)
        pieces = torchopt.apply_updates(pieces, updates, inplace=False)
    return af.unshard(ctx, pieces)


def main() -> None:
    with af.init_context() as ctx:
        plain = train_plain(ctx)
        ways: dict[str, Callable[[af.Context], Any]] = {"ZeRO-1": train_zero1, "ZeRO-3": train_zero3}
        for name, train in ways.items():
            params = train(ctx)
            far = max(float((params[key] - plain[key]).abs().max()) for key in plain)
            af.print_once(ctx, f"{name}: largest difference to plain training {far:.1e}")
            if far > 1e-4:
                raise RuntimeError(f"{name} has trained something else")
        loss = sum(float(loss_of(plain, *batch)) for batch in load()) / NUM_STEPS
        af.print_once(ctx, f"loss {loss:.3f} after {NUM_STEPS} steps on {ctx.num_processes} processes")


if __name__ == "__main__":
    main()
