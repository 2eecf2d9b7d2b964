# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import contextlib
import copy
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accelfn import Accelerator, Context, DataLoaderConfiguration, gather
from accelfn.context.world import World
from accelfn.data import (
    LoaderState,
    loader_state,
    microbatches,
    next_plan,
    plan_epoch,
    prepare_data_loader,
    restore_loader,
    skip_first_batches,
)
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from accelfn.tree import flatten
from tests.data.sources import numbers


def test_attributes_pass_through_and_totals_count_all_ranks() -> None:
    def run(ctx: Context) -> tuple[int, ...]:
        loader = prepare_data_loader(ctx, numbers(9, 2))
        return loader.batch_size, loader.total_batch_size, loader.total_dataset_length, len(loader)

    assert run_ranks(run, 3) == [(2, 6, 9, 2)] * 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = prepare_data_loader(Context(), numbers(2)).no_such_thing


def test_preparing_twice_gives_the_same_loader_and_never_shards_twice() -> None:
    def run(ctx: Context) -> int:
        loader = prepare_data_loader(ctx, numbers(8))
        assert prepare_data_loader(ctx, loader) is loader
        with pytest.raises(ConfigurationError, match="sharded twice"):
            prepare_data_loader(ctx.replace(mixed_precision="bf16"), loader)
        return len(loader)

    assert run_ranks(run, 2) == [2, 2]


def test_the_seed_of_the_second_loader_is_kept_in_its_state() -> None:
    def make(number: int) -> Any:
        ctx = Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=5))
        return [prepare_data_loader(ctx, numbers(8, 2, shuffle=True)) for _ in range(number)][-1]

    loader, alone = make(2), make(1)
    batches = iter(loader)
    next(batches)
    restore_loader(alone, loader_state(loader))
    rest = [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in alone] == rest
    assert [batch.tolist() for batch in alone] == [batch.tolist() for batch in loader]


def test_data_that_is_sharded_already_is_left_as_it_is() -> None:
    def run(ctx: Context) -> tuple[list[int], list[int], int]:
        data = torch.arange(8)
        sampler = DistributedSampler(data, num_replicas=2, rank=ctx.rank, shuffle=True)  # pyright: ignore[reportArgumentType]
        source = DataLoader(data, batch_size=2, sampler=sampler)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigurationError, match="DistributedSampler"):
            prepare_data_loader(ctx, source)
        loader = prepare_data_loader(ctx, source, "already_sharded")
        passes = [torch.cat(list(loader)).tolist() for _ in range(2)]
        return passes[0], passes[1], loader.total_batch_size

    (first, second, total), (other, _, _) = run_ranks(run, 2)
    assert sorted(first + other) == list(range(8))
    assert first != second  # the sampler was told the epoch
    assert total == 4


def test_each_pass_is_the_next_epoch() -> None:
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=5))
    loader = prepare_data_loader(ctx, numbers(8, 8, shuffle=True))
    first = next(iter(loader)).tolist()
    assert first == [1, 0, 4, 3, 7, 5, 2, 6]
    assert loader.epoch == 0  # a state that is taken now resumes in it
    assert [batch.tolist() for batch in loader] != [first]
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == [first]
    assert loader.epoch == 1


class Augmented(Dataset[Any]):
    """Draws a number for each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(())


def read_two(ctx: Context, seeded: str, by: str) -> list[list[list[float]]]:
    """Return the samples and the augmentations of one epoch of two loaders, read side by side."""
    shared = torch.Generator().manual_seed(1)
    generators = {"own": [torch.Generator().manual_seed(1) for _ in "ab"], "shared": [shared] * 2}
    prepare: Any = prepare_data_loader if by == "functions" else prepare_by_accelerator
    torch.manual_seed(2)
    loaders = [
        prepare(ctx, DataLoader(Augmented(), batch_size=2, shuffle=True, generator=generator))
        for generator in generators.get(seeded, [None, None])
    ]
    read = [gather(ctx, pair) for pair in zip(*loaders, strict=True)]
    return [[torch.cat([pair[side][part] for pair in read]).tolist() for part in (0, 1)] for side in (0, 1)]


@pytest.mark.parametrize("by", ["functions", "accelerator"])
@pytest.mark.parametrize("seeded", ["program", "configuration", "shared"])
def test_loaders_that_are_read_side_by_side_are_independent(seeded: str, by: str) -> None:
    config = DataLoaderConfiguration(data_seed=3 if seeded == "configuration" else None)
    results = [
        run_ranks(partial(read_two, seeded=seeded, by=by), 2, dataloader_config=config) for _ in range(2)
    ]
    assert results[0] == results[1] == [results[0][0]] * 2
    (first, first_drawn), (second, second_drawn) = results[0][0]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert not set(first_drawn) & set(second_drawn)


def test_a_loader_is_seeded_alike_in_each_run_and_by_its_own_generator() -> None:
    ctx = Context()
    assert read_two(ctx, "program", "functions") == read_two(ctx, "program", "functions")
    first, second = read_two(ctx, "own", "functions")
    assert first == second


def test_a_loader_that_is_made_for_each_evaluation_is_read_alike_after_a_resumption() -> None:
    def read(first: int, state: LoaderState | None = None) -> list[tuple[LoaderState, str, str]]:
        ctx, found = Context(), []
        torch.manual_seed(3)
        training = prepare_data_loader(ctx, numbers(12, 4, shuffle=True))
        if state is not None:
            restore_loader(training, state)
        for _ in range(first, 3):
            trained = str(list(training))
            held_out = prepare_data_loader(ctx, DataLoader(Augmented(), shuffle=True))
            found.append((loader_state(training), trained, str(list(held_out))))
            del held_out
        return found

    whole = read(0)
    assert read(1, whole[0][0]) == whole[1:]


NAMES = (
    *("note", "begin", "finish", "reader", "plan", "loader", "context", "place", "start", "consumed"),
    *("move_to", "go_to", "read_by", "shares_place", "can_choose_even", "even_batches", "belongs_to"),
    *("passes", "skip_first_batches", "source", "original", "accelerator"),
)


class Named(DataLoader[Any]):
    """A loader of the user's own, which has attributes of all names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        vars(self).update({name: f"my {name}" for name in NAMES}, _private="my own")


@pytest.mark.parametrize("by", ["functions", "accelerator"])
def test_a_loaders_attributes_are_the_users(by: str) -> None:
    source = Named(torch.arange(6), batch_size=2)
    ctx = Context()
    loader: Any = (prepare_data_loader if by == "functions" else prepare_by_accelerator)(ctx, source)
    assert [getattr(loader, name) for name in NAMES] == [f"my {name}" for name in NAMES]
    assert loader._private == "my own"
    assert loader.dataset is source.dataset
    loader.dataset_name = loader.reader = "new"
    assert (source.dataset_name, vars(source)["reader"], loader.dataset_name) == ("new", "new", "new")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 3
    with pytest.raises(AttributeError, match="epoch"):
        loader.epoch = 3
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    rest = skip_first_batches(loader, 1)
    assert (rest.plan, [batch.tolist() for batch in rest]) == ("my plan", [[2, 3], [4, 5]])
    twin = copy.copy(loader)
    assert (twin.epoch, twin.plan) == (2, "my plan")


def prepare_by_accelerator(ctx: Context, source: Any) -> Any:
    return Accelerator(context=ctx).prepare(source)


@pytest.mark.parametrize("by", ["functions", "accelerator"])
def test_what_a_loader_has_beside_the_users_attributes_is_little(by: str) -> None:
    prepare: Any = prepare_data_loader if by == "functions" else prepare_by_accelerator
    public = {name for name in dir(type(prepare(Context(), numbers(2)))) if not name.startswith("_")}
    states = {"epoch", "set_epoch", "state_dict", "load_state_dict"}
    assert public == {*states, "total_batch_size", "total_dataset_length"}


META = torch.device("meta")


@pytest.mark.parametrize(
    "make",
    [
        lambda here, there: here,
        lambda here, there: (there, here),
        lambda here, there: [there, here],
        lambda here, there: {"a": there, "b": here},
        lambda here, there: [there, [here]],
        lambda here, there: {"a": there, "b": {"c": (here, 5)}},
    ],
)
def test_a_batch_that_is_partly_in_place_is_moved_as_a_whole(make: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return make(torch.zeros(2), torch.zeros(2, device=META))

    loader = prepare_data_loader(Context(world=World(device=META)), numbers(4, collate_fn=collate))
    batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        leaves, structure = flatten(batch)
        assert structure == flatten(collate([]))[1]
        assert {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)} == {META}


def test_what_a_loop_over_batches_raises_is_no_failure_of_the_loader() -> None:
    def run(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, numbers(8))
        with contextlib.suppress(ZeroDivisionError):
            for batch in loader:
                print(int(batch[0]) // (ctx.rank - 1))
        with contextlib.suppress(ZeroDivisionError):
            for batch, _ in microbatches(ctx, loader):
                print(int(batch[0]) // (ctx.rank - 1))
                break
        return gather(ctx, torch.tensor([ctx.rank])).tolist()  # raises where another rank has failed

    assert run_ranks(run, 2) == [[0, 1]] * 2


def test_a_pass_begins_with_the_random_states_that_the_context_names() -> None:
    def draw(ctx: Context) -> tuple[int, int]:
        generator = torch.Generator().manual_seed(ctx.rank)
        torch.manual_seed(10 + ctx.rank)
        list(prepare_data_loader(ctx, numbers(4, generator=generator)))
        return int(torch.randint(1 << 30, (), generator=generator)), int(torch.randint(1 << 30, ()))

    # The loader's own generator by default, torch's only where it is asked for. On processes, since threads
    # share torch's generator.
    (own, shared), (own_there, shared_there) = run_ranks(draw, 2, "processes")
    assert own == own_there
    assert shared != shared_there
    (own, shared), (own_there, shared_there) = run_ranks(draw, 2, "processes", rng_types=["torch"])
    assert own != own_there
    assert shared == shared_there


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (-1, ValueError, "must not be negative, got -1"),
        *((epoch, TypeError, "an int") for epoch in (1.5, True)),
    ],
)
def test_an_epoch_is_a_whole_number_from_0(wrong: Any, error: type[Exception], said: str) -> None:
    loader = prepare_data_loader(Context(), numbers(4, shuffle=True))
    loader.set_epoch(2)
    with pytest.raises(error, match=f"epoch must.*{said}|{said}"):
        loader.set_epoch(wrong)
    assert loader.epoch == 2
    with pytest.raises(ValueError, match="'local'"):
        prepare_data_loader(Context(), numbers(1), cast("Any", "local"))


def test_the_plan_of_the_next_pass_can_be_looked_at() -> None:
    loader = prepare_data_loader(Context(), numbers(9, 2))
    assert next_plan(loader) == plan_epoch(9, 2)
    rest = skip_first_batches(loader, 2)
    assert next_plan(rest) == plan_epoch(9, 2, start=4)
    assert [batch.tolist() for batch in rest] == [[4, 5], [6, 7], [8]]
    with pytest.raises(TypeError, match="next_plan takes a loader from prepare_data_loader"):
        next_plan(numbers(9))


@pytest.mark.parametrize("dispatch", [False, True])
def test_batches_that_come_in_any_order_are_refused(dispatch: bool) -> None:
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    data = cast("Any", torch.arange(8))
    with pytest.raises(ConfigurationError, match="padding and the position"):
        prepare_data_loader(ctx, DataLoader(data, batch_size=2, num_workers=2, in_order=False))
    with_one = DataLoader(data, batch_size=2, num_workers=1, in_order=False)
    assert len(prepare_data_loader(ctx, with_one)) == 4


def test_what_is_no_state_says_what_is_wrong_with_it() -> None:
    loader = prepare_data_loader(Context(), numbers(8))
    with pytest.raises(TypeError, match="got NoneType"):
        loader.load_state_dict(cast("Any", None))
    with pytest.raises(ValueError, match="it lacks seed and it has foo"):
        loader.load_state_dict({"epoch": 0, "consumed": 0, "foo": 1})
