"""Steps of a small GPT on sequences that four ranks share: their time, and what they allocate at most.

Run by ``python -m tests.bench``: it starts a world of four processes for each axis, and compares with a
world of one. A sequence four times as long on four ranks should fit the memory of one on one rank.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn.testing import run_ranks
from tests.bench.sharding import GPT, allocated_by
from tests.bench.timing import compare

_LENGTH, _ROWS = 512, 2
_SIZE = (128, 2)  # width and blocks


class Seen(NamedTuple):
    """What a way came to on its slowest rank."""

    tokens: int  # of a whole sequence
    milliseconds: float
    megabytes: float


def work(ctx: af.Context, length: int, rounds: int) -> Seen:
    """Measure steps of this rank; every rank must call it."""
    model: nn.Module = GPT(*_SIZE)
    model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), 1e-3))
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (_ROWS, length), generator=random)
    ((batch, micro),) = af.microbatches(ctx, [(ids, ids.roll(-1, 1))])
    states = [af.init_scaler(ctx)]

    def step() -> None:
        with af.accumulate(ctx, micro, model):
            loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
            states[0] = af.backward(ctx, loss, states[0], micro, batch[1].numel())
        states[0] = af.optimizer_step(ctx, optimizer, states[0])

    def meet() -> None:
        af.wait_for_everyone(ctx)

    timing = compare({"step": step}, rounds=rounds, calls=1, before=meet)["step"]
    own = torch.tensor([timing.median * 1e3, allocated_by(step, meet)])
    slowest, largest = af.gather(ctx, own[None]).amax(0)
    return Seen(length, float(slowest), float(largest))


def ways() -> dict[str, tuple[int, int, af.ContextOptions]]:
    """Give tokens, ranks and options by name."""
    loading = af.DataLoaderConfiguration(sequence={0: 1, 1: 1})

    def ring(rotation: str) -> Any:
        handler = af.config.TorchContextParallelConfig(cp_comm_strategy=rotation)
        return af.ParallelismConfig(cp_size=4, cp_handler=handler)

    four = 4 * _LENGTH
    return {
        "one rank": (_LENGTH, 1, {}),
        "one rank, four times as long": (four, 1, {}),
        "cp4, allgather": (four, 4, {"parallelism_config": ring("allgather"), "dataloader_config": loading}),
        "cp4, alltoall": (four, 4, {"parallelism_config": ring("alltoall"), "dataloader_config": loading}),
        "sp4": (
            four,
            4,
            {"parallelism_config": af.ParallelismConfig(sp_size=4), "dataloader_config": loading},
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print("| sequences | tokens | a step, ms | allocated at most, MB |\n| --- | --: | --: | --: |")
    for name, (length, size, options) in ways().items():
        seen: Seen = run_ranks(
            lambda ctx, length=length: work(ctx, length, rounds),
            size,
            on="processes",
            timeout_s=300.0,
            **options,
        )[0]
        print(f"| {name} | {seen.tokens:,} | {seen.milliseconds:.1f} | {seen.megabytes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
