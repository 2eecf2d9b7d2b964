"""Checks of loaders: every sample once, in one order, however it reaches the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelfn.comm import gather_object
from accelfn.context import Context
from accelfn.context.config import DataLoaderConfiguration
from accelfn.data import gather_for_metrics, loader_state, microbatches, prepare_data_loader, restore_loader
from accelfn.launch.selftest.trial import Trial, demand

__all__ = ("check_dispatched", "check_resumed", "check_shuffled", "check_split", "check_uneven")

_SAMPLES = 41  # a prime: no number of ranks and no batch size divides it


def _loader(ctx: Context, batch_size: int, *, shuffle: bool = True, **options: Any) -> Any:
    configured = ctx.replace(dataloader_config=DataLoaderConfiguration(data_seed=5, **options))
    # Twice the same numbers, so that a batch is a tree.
    numbers = torch.arange(_SAMPLES)
    loader: DataLoader[Any] = DataLoader(TensorDataset(numbers, 2 * numbers), batch_size, shuffle=shuffle)
    return configured, prepare_data_loader(configured, loader)


def _read(trial: Trial, ctx: Context, loader: Any) -> list[int]:
    """Return the samples of a pass over all ranks, in the order of the epoch."""
    found: list[int] = []
    for (numbers, doubled), micro in microbatches(ctx, loader):
        if trial.spoils("data"):
            numbers = numbers.roll(1) + 1
        told = gather_for_metrics(ctx, (numbers, doubled), micro)
        demand(numbers.device == ctx.device, f"a batch lies on {numbers.device}, and not on {ctx.device}")
        found += told[0].tolist()
        demand(
            torch.equal(2 * told[0], told[1]), f"the leaves of a batch don't belong together: {found[-8:]}"
        )
    return found


def _alone(batch_size: int, epoch: int = 0) -> list[int]:
    """Return the order in which one process reads."""
    ctx, loader = _loader(Context(), batch_size)
    trial = Trial(ctx=ctx)
    for _ in range(epoch):
        _read(trial, ctx, loader)
    return _read(trial, ctx, loader)


def check_shuffled(trial: Trial) -> str:
    """Two shuffled epochs have each sample once, in the order of one process."""
    ctx, loader = _loader(trial.ctx, 4)
    first, second = _read(trial, ctx, loader), _read(trial, ctx, loader)
    for found in (first, second):
        demand(sorted(found) == list(range(_SAMPLES)), f"an epoch of {_SAMPLES} samples had {sorted(found)}")
    demand(first != second, "two shuffled epochs have the same order")
    demand(first == _alone(4), "the order is another than that of one process")
    demand(second == _alone(4, 1), "the order of the second epoch is another than that of one process")
    return f"{_SAMPLES} samples, twice"


def check_uneven(trial: Trial) -> str:
    """With even batches ranks take equally many steps; without, the last ranks may have less."""
    ctx, loader = _loader(trial.ctx, 3, shuffle=False)
    steps = gather_object(ctx, [sum(1 for _ in loader)])
    demand(len(set(steps)) == 1, f"with even batches, the ranks have {steps} batches")
    ctx, loader = _loader(trial.ctx, 3, shuffle=False, even_batches=False)
    mine = [number for numbers, _ in loader for number in numbers.tolist()]
    everything = gather_object(ctx.along("dp"), mine)  # ranks beside each other on other axes read alike
    demand(sorted(everything) == list(range(_SAMPLES)), f"without even batches, the ranks read {everything}")
    return f"{steps[0]} steps each"


def check_split(trial: Trial) -> str:
    """A batch of the loader, cut into one part per rank."""
    batch_size = 2 * trial.ctx.axis_size("dp")
    ctx, loader = _loader(trial.ctx, batch_size, split_batches=True)
    found = _read(trial, ctx, loader)
    demand(found == _alone(batch_size), f"the ranks together read {found}")
    return ""


def check_dispatched(trial: Trial) -> str:
    """Batches that rank 0 reads and sends to the others."""
    ctx, loader = _loader(trial.ctx, 4, dispatch_batches=True)
    found = _read(trial, ctx, loader)
    demand(sorted(found) == list(range(_SAMPLES)), f"the ranks together read {sorted(found)}")
    return ""


def check_resumed(trial: Trial) -> str:
    """A pass that is broken off goes on with the rest, in another loader."""
    ctx, loader = _loader(trial.ctx, 3)
    state, head = None, list[int]()
    for count, ((numbers, _), micro) in enumerate(microbatches(ctx, loader)):
        head += gather_for_metrics(ctx, numbers, micro).tolist()
        if count == 1:
            state = loader_state(loader)
            break
    if state is None:  # so many ranks that two steps are the epoch
        return "the epoch was too short"
    _, again = _loader(trial.ctx, 3)
    restore_loader(again, state)
    rest = _read(trial, ctx, again)
    demand(head + rest == _alone(3), f"{head} was read, then {rest}")
    return ""
