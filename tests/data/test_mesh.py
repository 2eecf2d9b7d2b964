"""Data on a mesh of ranks: each sample once along "dp", and the same for those that share a batch."""

import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accelfn import (
    Context,
    DataLoaderConfiguration,
    LoaderState,
    ParallelismConfig,
    gather_for_metrics,
    loader_state,
    microbatches,
    restore_loader,
)
from accelfn.data import data_rank, prepare_data_loader
from accelfn.testing import run_ranks
from accelfn.tree import listify

MESHES = st.builds(
    ParallelismConfig,
    dp_replicate_size=st.integers(1, 2),
    dp_shard_size=st.integers(1, 2),
    tp_size=st.integers(1, 2),
).filter(lambda mesh: mesh.total_size > 1)


KINDS = ["map", "shuffled", "stream", "dispatched", "dispatched stream"]
OWN = ["sampler", "dispatched sampler", "batch sampler", "dispatched batch sampler"]


class Counting(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.num_passes = 0

    def __iter__(self) -> Any:
        self.num_passes += 1
        return iter(range(self.length))


class Drawing(Sampler[int]):
    """Draws an order from a generator of its own, which differs between ranks."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.generator = length, random.Random()
        self.seed, self.num_passes = seed, 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "num_passes": self.num_passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.num_passes = state["seed"], state["num_passes"]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.generator.seed(10 * self.seed + self.num_passes)
        self.num_passes += 1
        return iter(self.generator.sample(range(self.length), self.length))


class DrawingBatches(Drawing):
    """Draws batches, of lengths that it draws too."""

    def __iter__(self) -> Any:
        order = list(super().__iter__())
        while order:
            size = self.generator.randint(1, 3)
            yield order[:size]
            order = order[size:]


def loader_of(kind: str, ctx: Context, length: int, batch_size: int) -> DataLoader[Any]:
    if kind.endswith("stream"):
        return DataLoader(Counting(length), batch_size=batch_size)
    data: Any = list(range(length))
    if kind.endswith("batch sampler"):
        batches: Any = DrawingBatches(length, ctx.rank)
        return DataLoader(data, batch_sampler=batches)
    if kind.endswith("sampler"):
        return DataLoader(data, batch_size=batch_size, sampler=Drawing(length, ctx.rank))
    generator = torch.Generator().manual_seed(ctx.rank)
    return DataLoader(data, batch_size=batch_size, shuffle=kind == "shuffled", generator=generator)


def seed_of(loader: Any) -> int | None:
    """Say whose state the loader's own generator has, where it has one."""
    return None if loader.generator is None else loader.generator.initial_seed()


@pytest.mark.filterwarnings("ignore:each of .* ranks reads the full stream")
@pytest.mark.parametrize("kind", KINDS + OWN)
@settings(max_examples=8)
@given(MESHES, st.integers(1, 9), st.integers(1, 3))
def test_each_sample_once_and_the_same_for_those_that_share_it(
    kind: str, mesh: ParallelismConfig, length: int, batch_size: int
) -> None:
    def work(ctx: Context) -> tuple[int, list[Any], list[Any]]:
        torch.default_generator.manual_seed(ctx.rank)  # the first rank's is everybody's
        loader = loader_of(kind, ctx, length, batch_size)
        prepared = prepare_data_loader(ctx, loader)
        assert prepare_data_loader(ctx, prepared) is prepared
        own: list[Any] = []
        gathered: list[Any] = []
        for batch, micro in microbatches(ctx, prepared):
            own += [*listify(batch), micro.window, micro.sync]
            gathered += listify(gather_for_metrics(ctx, batch, micro))
        if kind == "dispatched stream":
            assert cast("Any", loader).dataset.num_passes == int(ctx.is_main_process)
        own.append(seed_of(loader))
        return ctx.coordinate("dp"), own, gathered

    loading = DataLoaderConfiguration(dispatch_batches=kind.startswith("dispatched"))
    found = run_ranks(
        work,
        mesh.total_size,
        parallelism_config=mesh,
        dataloader_config=loading,
        gradient_accumulation_steps=2,
    )
    for place, own, gathered in found:
        assert sorted(gathered) == list(range(length))
        assert own == next(other for where, other, _ in found if where == place)


@pytest.mark.parametrize("kind", ["sampler", "dispatched batch sampler", "dispatched stream"])
@settings(max_examples=6)
@given(MESHES, MESHES, st.integers(1, 3))
def test_an_epoch_goes_on_in_another_mesh(
    kind: str, before: ParallelismConfig, after: ParallelismConfig, num_batches: int
) -> None:
    length = 40  # enough for three batches of three on each of four ranks, and some that are left

    def read(ctx: Context, state: LoaderState | None = None) -> tuple[list[Any], LoaderState]:
        loader = prepare_data_loader(ctx, loader_of(kind, ctx, length, 1))
        if state is not None:
            restore_loader(loader, state)
        gathered: list[Any] = []
        for index, (batch, micro) in enumerate(microbatches(ctx, loader), 1):
            gathered += listify(gather_for_metrics(ctx, batch, micro))
            if state is None and index == num_batches:
                break
        return gathered, loader_state(loader)

    loading = DataLoaderConfiguration(dispatch_batches=kind.startswith("dispatched"))
    first = run_ranks(read, before.total_size, parallelism_config=before, dataloader_config=loading)
    begun, state = first[0]
    rest = run_ranks(
        lambda ctx: read(ctx, state), after.total_size, parallelism_config=after, dataloader_config=loading
    )
    assert all(gathered == begun for gathered, _ in first)
    for gathered, _ in rest:
        assert sorted(begun + gathered) == list(range(length))


@given(MESHES, st.integers(1, 2))
def test_the_plan_of_a_mesh_tells_the_same(mesh: ParallelismConfig, stages: int) -> None:
    mesh = ParallelismConfig(
        dp_replicate_size=mesh.dp_replicate_size,
        dp_shard_size=mesh.dp_shard_size,
        tp_size=mesh.tp_size,
        pp_size=stages,
    )
    places = [data_rank(mesh, rank) for rank in range(mesh.total_size)]
    size = mesh.dp_replicate_size * mesh.dp_shard_size
    assert {place.rank for place in places} == set(range(size))
    # A stage is outermost: the same places come again in each.
    assert places == places[: mesh.total_size // stages] * stages
    assert {place[1] for place in places} == {size}
