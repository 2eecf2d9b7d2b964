# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import loader_state, prepare_data_loader, restore_loader
from accelfn.testing import run_ranks

SEEDED = DataLoaderConfiguration(data_seed=3)


class Augmented(Dataset[list[float]]):
    """An augmentation that draws from each of the three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), float(torch.rand(())), random.random(), float(np.random.rand())]


class Bulk(Augmented):
    """The same, asked for a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [self[index] for index in indices]


class Stream(IterableDataset[list[float]]):
    """Shuffled by what it draws, with an augmentation."""

    def __iter__(self) -> Iterator[list[float]]:
        order = list(range(12))
        random.shuffle(order)
        for index in order:
            yield Augmented()[index]


def noisy(samples: list[list[float]]) -> torch.Tensor:
    """Draw while a batch is collated too."""
    rows = torch.tensor(samples, dtype=torch.float64)
    return torch.cat([rows, torch.rand(len(rows), 1)], 1)


def source(data: Any, **options: Any) -> Any:
    return lambda **more: DataLoader(data(), **{"collate_fn": noisy, **options, **more})  # pyright: ignore[reportArgumentType]


SOURCES: dict[str, Any] = {
    "map": source(Augmented, batch_size=2),
    "shuffled": source(Augmented, batch_size=2, shuffle=True),
    "bulk": source(Bulk, batch_size=2),
    "batches": source(Augmented, batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7]]),
    "items": source(Augmented, batch_size=None, collate_fn=None),
    "stream": source(Stream, batch_size=2),
}


def rows_of(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else list(batch) for batch in batches]


def draws_of(batches: list[Any]) -> list[float]:
    """List every number drawn, without the samples' own."""
    rows = [row for batch in batches for row in (batch if isinstance(batch[0], list) else [batch])]
    return [number for row in rows for number in row[1:]]


@pytest.mark.filterwarnings("ignore:each of 2 ranks reads the full stream")
@pytest.mark.parametrize(("on", "dispatch"), [("processes", False), ("memory", False), ("memory", True)])
@pytest.mark.parametrize("kind", [*SOURCES])
def test_ranks_and_batches_and_epochs_share_no_augmentation(kind: str, dispatch: bool, on: Any) -> None:
    dispatch = dispatch and kind != "items"  # rank 0 hands out tensors

    def run(ctx: Context) -> list[Any]:
        seed_all(0)
        loader = prepare_data_loader(ctx, SOURCES[kind]())
        return [rows_of(loader) for _ in range(2)]

    config = DataLoaderConfiguration(data_seed=3, dispatch_batches=dispatch, even_batches=False)
    epochs = [epoch for rank in run_ranks(run, 2, on, dataloader_config=config) for epoch in rank]
    drawn = [number for epoch in epochs for number in draws_of(epoch)]
    assert len(set(drawn)) == len(drawn) > 40


@pytest.mark.filterwarnings("ignore:each of 2 ranks reads the full stream")
@pytest.mark.parametrize("kind", ["batches", "stream"])
def test_who_reads_for_whom_changes_no_augmentation(kind: str) -> None:
    def run(ctx: Context) -> list[Any]:
        return rows_of(prepare_data_loader(ctx, SOURCES[kind](num_workers=1, collate_fn=torch.tensor)))

    configs = [DataLoaderConfiguration(data_seed=3, dispatch_batches=dispatch) for dispatch in (False, True)]
    local, dispatched = (run_ranks(run, 2, "processes", dataloader_config=config) for config in configs)
    assert local == dispatched


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine of few cores
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("map", 1), ("shuffled", 3), ("bulk", 2), ("batches", 1), ("items", 2), ("stream", 1)],
)
def test_the_number_of_workers_changes_no_augmentation(kind: str, workers: int) -> None:
    source = SOURCES[kind](num_workers=workers, persistent_workers=workers == 3)
    alone, with_workers = (  # in one context each would have its own seed
        prepare_data_loader(Context().replace(dataloader_config=SEEDED), loader)
        for loader in (SOURCES[kind](), source)
    )
    for _ in range(2):
        assert rows_of(alone) == rows_of(with_workers)


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, (0, 0)) for kind in SOURCES), ("shuffled", (1, 2)), ("items", (2, 1))]
)
def test_a_resumption_changes_no_augmentation(kind: str, workers: tuple[int, int]) -> None:
    def make(num_workers: int = 0) -> Any:
        ctx = Context().replace(dataloader_config=SEEDED)
        return prepare_data_loader(ctx, SOURCES[kind](num_workers=num_workers))

    whole = [rows_of(loader) for loader in [make()] for _ in range(2)]
    stopped, again = map(make, workers)
    begun = rows_of(islice(stopped, 2))
    program_draws()
    restore_loader(again, loader_state(stopped))
    assert [begun + rows_of(again), rows_of(again)] == whole


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def program_draws() -> tuple[float, float, float, float, int]:
    return (
        float(torch.rand(())),
        random.random(),
        random.gauss(0, 1),
        float(np.random.randn()),
        torch.initial_seed(),
    )


@pytest.mark.parametrize("kind", [*SOURCES])
@pytest.mark.parametrize("how", ["whole", "quiet", "odd", "break", "error"])
def test_the_programs_own_generators_go_on_as_if_nothing_had_been_read(kind: str, how: str) -> None:
    def run(loader: Any) -> list[Any]:
        seed_all(5)
        found: list[Any] = [
            program_draws()
        ]  # one of a pair of normal numbers: numpy and random keep the other
        in_loop = {"quiet": list[float], "odd": lambda: np.random.randn(3).tolist()}.get(how, program_draws)
        try:
            for step, _ in enumerate(loader):
                found.append(in_loop())
                if step == 1 and how == "break":
                    break
                if step == 1 and how == "error":
                    raise KeyError(step)
        except KeyError:
            pass
        return [*found, program_draws()]

    loader = prepare_data_loader(Context().replace(dataloader_config=SEEDED), SOURCES[kind]())
    count = len([*loader])
    loader = prepare_data_loader(Context().replace(dataloader_config=SEEDED), SOURCES[kind]())
    # A pass over a loader of torch's draws one seed.
    assert run(loader) == run(DataLoader[Any](cast("Any", [0] * count)))


def test_a_failing_dataset_leaves_the_programs_generators_alone() -> None:
    class Fails(Augmented):
        def __getitem__(self, index: int) -> list[float]:
            raise OSError(super().__getitem__(index))

    torch.manual_seed(5)
    random.seed(5)
    expected: list[Any] = [torch.get_rng_state(), random.getstate()]
    batches = iter(prepare_data_loader(Context(), DataLoader(Fails(), generator=torch.Generator())))
    with pytest.raises(OSError, match=r"0\.0"):
        next(batches)
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]


def test_data_that_was_sharded_already_draws_from_the_programs_own_generators() -> None:
    def run(loader: Any) -> list[Any]:
        seed_all(7)
        return rows_of(loader)

    prepared = prepare_data_loader(Context(), SOURCES["shuffled"](), "already_sharded")
    assert run(prepared) == run(SOURCES["shuffled"]())


def test_a_second_normal_number_is_still_the_next_after_a_batch() -> None:
    random.seed(5)
    expected = [random.gauss(0, 1) for _ in range(4)]
    random.seed(5)
    loader = prepare_data_loader(Context(), SOURCES["map"]())
    first = random.gauss(0, 1)  # draws two, and keeps the second
    assert [first, *(random.gauss(0, 1) for _ in zip(loader, range(3), strict=False))] == expected
