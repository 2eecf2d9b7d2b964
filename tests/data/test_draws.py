# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import draws, loader_state, prepare_data_loader, restore_loader
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


SOURCES: dict[str, Any] = {
    "map": lambda **options: DataLoader(Augmented(), batch_size=2, collate_fn=noisy, **options),
    "shuffled": lambda **options: DataLoader(
        Augmented(), batch_size=2, shuffle=True, collate_fn=noisy, **options
    ),
    "bulk": lambda **options: DataLoader(Bulk(), batch_size=2, collate_fn=noisy, **options),
    "batches": lambda **options: DataLoader(
        Augmented(), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7]], collate_fn=noisy, **options
    ),
    "items": lambda **options: DataLoader(Augmented(), batch_size=None, **options),
    "stream": lambda **options: DataLoader(Stream(), batch_size=2, collate_fn=noisy, **options),
}


def rows_of(batches: Any) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else list(batch) for batch in batches]


def draws_of(batches: list[Any]) -> list[float]:
    """List every number drawn, without the samples' own."""
    rows = [row for batch in batches for row in (batch if isinstance(batch[0], list) else [batch])]
    return [number for row in rows for number in row[1:]]


@pytest.mark.filterwarnings("ignore:each of 2 ranks reads the full stream")
@pytest.mark.parametrize("on", ["memory", "processes"])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", [*SOURCES])
def test_ranks_and_batches_and_epochs_share_no_augmentation(kind: str, dispatch: bool, on: Any) -> None:
    if dispatch and kind == "items":
        pytest.skip("rank 0 hands out tensors")

    def run(ctx: Context) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        loader = prepare_data_loader(ctx, SOURCES[kind]())
        return [rows_of(loader) for _ in range(2)]

    config = DataLoaderConfiguration(data_seed=3, dispatch_batches=dispatch, even_batches=False)
    epochs = [epoch for rank in run_ranks(run, 2, on, dataloader_config=config) for epoch in rank]
    drawn = [number for epoch in epochs for number in draws_of(epoch)]
    assert len(set(drawn)) == len(drawn) > 40


@pytest.mark.parametrize("kind", [*SOURCES])
def test_workers_draw_what_a_loader_without_workers_draws(kind: str) -> None:
    ctx = Context().replace(dataloader_config=SEEDED)
    alone, with_worker = (prepare_data_loader(ctx, SOURCES[kind](num_workers=number)) for number in (0, 1))
    for _ in range(2):
        assert rows_of(alone) == rows_of(with_worker)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine of few cores
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["map", "shuffled", "bulk", "batches", "items"])
def test_the_number_of_workers_changes_no_augmentation(kind: str, persistent: bool) -> None:
    ctx = Context().replace(dataloader_config=SEEDED)
    alone = prepare_data_loader(ctx, SOURCES[kind]())
    source = SOURCES[kind](num_workers=3 if persistent else 2, persistent_workers=persistent)
    with_workers = prepare_data_loader(ctx, source)
    for _ in range(2):
        assert rows_of(alone) == rows_of(with_workers)


@pytest.mark.parametrize("kind", [*SOURCES])
def test_a_resumption_changes_no_augmentation(kind: str) -> None:
    ctx = Context().replace(dataloader_config=SEEDED)
    whole = [rows_of(loader) for loader in [prepare_data_loader(ctx, SOURCES[kind]())] for _ in range(2)]
    stopped = prepare_data_loader(ctx, SOURCES[kind]())
    batches = iter(stopped)
    for _ in range(2):
        next(batches)
    again = prepare_data_loader(ctx, SOURCES[kind]())
    program_draws()
    restore_loader(again, loader_state(stopped))
    assert [rows_of(again), rows_of(again)] == [whole[0][2:], whole[1]]


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
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
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
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        return rows_of(loader)

    prepared = prepare_data_loader(Context(), SOURCES["shuffled"](), "already_sharded")
    assert run(prepared) == run(SOURCES["shuffled"]())


@pytest.mark.parametrize("knows_layout", [True, False])
def test_a_second_normal_number_is_still_the_next_after_a_batch(
    knows_layout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows_layout:  # as in a Python that keeps its generator in another way
        monkeypatch.setattr(draws, "_own_memory", lambda: None)
    random.seed(5)
    expected = [random.gauss(0, 1) for _ in range(4)]
    random.seed(5)
    loader = prepare_data_loader(Context(), SOURCES["map"]())
    first = random.gauss(0, 1)  # draws two, and keeps the second
    assert [first, *(random.gauss(0, 1) for _ in zip(loader, range(3), strict=False))] == expected
