"""Data on a mesh of ranks: each sample once along "dp", and the same for those that share a batch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accelfn import Context, DataLoaderConfiguration, ParallelismConfig, gather_for_metrics, microbatches
from accelfn.data import data_rank, prepare_data_loader
from accelfn.testing import run_ranks
from accelfn.tree import listify

MESHES = st.builds(
    ParallelismConfig,
    dp_replicate_size=st.integers(1, 2),
    dp_shard_size=st.integers(1, 2),
    tp_size=st.integers(1, 2),
).filter(lambda mesh: mesh.total_size > 1)


class Counting(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


@pytest.mark.filterwarnings("ignore:each of .* ranks reads the whole stream")
@pytest.mark.parametrize("kind", ["map", "shuffled", "stream", "dispatched"])
@settings(max_examples=8)
@given(MESHES, st.integers(1, 9), st.integers(1, 3))
def test_each_sample_once_and_the_same_for_those_that_share_it(
    kind: str, mesh: ParallelismConfig, length: int, batch_size: int
) -> None:
    def work(ctx: Context) -> tuple[int, list[Any], list[Any]]:
        torch.default_generator.manual_seed(ctx.rank)  # the first rank's is everybody's
        data: Any = Counting(length) if kind == "stream" else list(range(length))
        loader = DataLoader(data, batch_size=batch_size, shuffle=kind == "shuffled")
        prepared = prepare_data_loader(ctx, loader)
        assert prepare_data_loader(ctx, prepared) is prepared
        own: list[Any] = []
        gathered: list[Any] = []
        for batch, micro in microbatches(ctx, prepared):
            own += listify(batch)
            gathered += listify(gather_for_metrics(ctx, batch, micro))
        return ctx.coordinate("dp"), own, gathered

    loading = DataLoaderConfiguration(dispatch_batches=kind == "dispatched")
    found = run_ranks(work, mesh.total_size, parallelism_config=mesh, dataloader_config=loading)
    for place, own, gathered in found:
        assert sorted(gathered) == list(range(length))
        assert own == next(other for where, other, _ in found if where == place)


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
