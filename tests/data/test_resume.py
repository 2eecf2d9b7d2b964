# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, WeightedRandomSampler

import accelfn as af
from accelfn import Context
from accelfn.data import next_plan, skip_first_batches
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks
from tests.data.sources import Counting, Numbers, Shards, numbers

SEEDED = af.DataLoaderConfiguration(data_seed=5)


def epoch_of(num: int, shuffle: bool, seed: int = 7, epoch: int = 0) -> list[int]:
    ctx = Context().replace(dataloader_config=af.DataLoaderConfiguration(data_seed=seed))
    loader = af.prepare_data_loader(ctx, numbers(num, 1, shuffle=shuffle))
    loader.set_epoch(epoch)
    return [int(batch) for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_pass_that_goes_on_leaves_random_numbers_to_the_program(workers: int, stream: bool) -> None:
    def new() -> Any:
        data: Any = Numbers(8) if stream else torch.arange(8)
        return af.prepare_data_loader(Context(), DataLoader(data, batch_size=2, num_workers=workers))

    loader = new()
    drawn: list[float] = []
    state, place = torch.get_rng_state(), af.loader_state(loader)
    for epoch in range(2):
        for step, _ in enumerate(loader):
            drawn.append(float(torch.rand(())))
            if (epoch, step) == (0, 1):
                state, place = torch.get_rng_state(), af.loader_state(loader)
    again = new()
    torch.set_rng_state(state)
    af.restore_loader(again, place)
    assert [float(torch.rand(())) for _ in range(2) for _ in again] == drawn[2:]


@pytest.mark.parametrize("way", ["loop", "microbatches", "accelerator"])
def test_loaders_that_are_read_side_by_side_end_together(way: str) -> None:
    def make(ctx: Context) -> list[Any]:
        prepare: Any = (
            af.Accelerator(context=ctx).prepare if way == "accelerator" else partial(af.prepare, ctx)
        )
        return list(prepare(numbers(8), numbers(8)))

    def read(ctx: Context, loaders: list[Any]) -> int:
        read = partial(af.microbatches, ctx) if way == "microbatches" else iter
        return sum(1 for _ in zip(*map(read, loaders), strict=False))

    def run(ctx: Context) -> tuple[int, int]:
        loaders, restored = make(ctx), make(ctx)
        before = read(ctx, loaders)
        assert [loader.epoch for loader in loaders] == [1, 1]
        for old, new in zip(loaders, restored, strict=True):
            af.restore_loader(new, af.loader_state(old))
        return before, read(ctx, restored)

    assert run_ranks(run, 2) == [(2, 2)] * 2


@pytest.mark.parametrize("sharding", ["global", "already_sharded"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", ["loop", "microbatches", "one", "around", "accelerator"])
def test_loaders_that_are_read_side_by_side_resume_together(way: str, world: int, sharding: Any) -> None:
    def make(ctx: Context) -> list[Any]:
        generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        samplers: list[Any] = [WeightedRandomSampler([1.0] * 8, 8, generator=own) for own in generators]
        batching: Any = type("Own", (BatchSampler,), {})(samplers[1], 2, False)
        sources: list[Any] = [
            numbers(8, shuffle=True),
            DataLoader(Counting(8), batch_size=2, sampler=samplers[0]),
            DataLoader(Counting(8), batch_sampler=batching),
        ]
        if sharding != "global":  # whose order is the program's
            sources = [numbers(8) for _ in sources]
        loaders: list[Any] = [af.prepare_data_loader(ctx, source, sharding) for source in sources]
        return list(af.Accelerator(context=ctx).prepare(*loaders)) if way == "accelerator" else loaders

    def read(ctx: Context, loaders: list[Any], first: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield the epoch, the batches and the states after each step, and after each epoch."""
        num_micro = {"microbatches": 3, "one": 1}.get(way, 0)
        for epoch in range(first, 3):
            parts: list[Any] = [
                (batch for batch, _ in af.microbatches(ctx, loader)) if place < num_micro else loader
                for place, loader in enumerate(loaders)
            ]
            together: Any = zip(*parts, strict=False)  # the name outlives the loop, as that of a bar may
            if way == "around":
                together = (batches for batches, _ in af.microbatches(ctx, together))
            for batches in together:
                values = [batch.tolist() for batch in batches]
                yield epoch, values, [af.loader_state(loader) for loader in loaders]
            yield epoch + 1, None, [af.loader_state(loader) for loader in loaders]

    def run(ctx: Context) -> None:
        whole = list(read(ctx, make(ctx), 0))
        assert [epoch for epoch, batches, _ in whole if batches is None] == [1, 2, 3]
        for place, (epoch, _, states) in enumerate(whole):
            loaders = make(ctx)
            for loader, state in zip(loaders, states, strict=True):
                af.restore_loader(loader, state)
            assert list(read(ctx, loaders, epoch)) == whole[place + 1 :]

    run_ranks(run, world, gradient_accumulation_steps=1 if way == "around" else 2, dataloader_config=SEEDED)


def test_a_loader_with_batches_left_reads_them_though_another_one_has_none() -> None:
    def make() -> list[Any]:
        sampler = WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator().manual_seed(1))
        drawn = DataLoader(Counting(8), batch_size=2, sampler=sampler)
        return [af.prepare_data_loader(Context(), source) for source in (numbers(4), drawn)]

    drawn = [batch.tolist() for batch in make()[1]]
    loaders = make()
    states = [[af.loader_state(loader) for loader in loaders] for _ in zip(*loaders, strict=False)][-1]
    for num_skipped in (None, 3):
        short, long = make()
        for loader, state in zip((short, long), states, strict=True):
            af.restore_loader(loader, state)
        rest = long if num_skipped is None else skip_first_batches(long, num_skipped)
        assert list(short) == []
        assert af.loader_state(long) == states[1]
        assert [batch.tolist() for batch in rest] == drawn[num_skipped or 2 :]


def test_a_loop_that_is_left_after_its_last_batch_has_not_ended() -> None:
    inner, outer = (af.prepare_data_loader(Context(), numbers(4)) for _ in "ab")
    for _ in outer:
        for _ in inner:  # within the last batch of the loop outside
            pass
        if outer.epoch == 0 and af.loader_state(outer).consumed == 4:
            break
    assert (outer.epoch, inner.epoch) == (0, 2)


# --- states that don't fit -----------------------------------------------------------------------


FITTING = af.data.LoaderState(epoch=1, consumed=2, seed=3, length=10)


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (dataclasses.replace(FITTING, length=11), ValueError, "11 samples, but the loader has 10"),
        (
            af.data.LoaderState(epoch=1, consumed=11, seed=3),
            ValueError,
            "consumed 11 samples of an epoch of 10",
        ),
        (dataclasses.replace(FITTING, version=3), NotAvailableError, "version 3, but .* versions up to 2"),
        ({"epoch": 1}, TypeError, "must be a LoaderState, got dict"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    state: Any, error: type[Exception], text: str
) -> None:
    loader = af.prepare_data_loader(Context(), numbers(10))
    loader.set_epoch(5)
    before = af.loader_state(loader), next_plan(loader)
    with pytest.raises(error, match=text):
        af.restore_loader(loader, state)
    assert (af.loader_state(loader), next_plan(loader)) == before


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"consumed": -1}, ValueError, "consumed must not be negative, got -1"),
        ({"epoch": -1}, ValueError, "epoch must not be negative"),
        ({"consumed": 11}, ValueError, "consumed 11 samples of an epoch of 10"),
        ({"consumed": 1.0}, TypeError, "consumed must be an int, got 1.0"),
        ({"epoch": True}, TypeError, "epoch must be an int"),
        ({"seed": None}, TypeError, "seed must be an int"),
    ],
)
def test_a_state_that_can_be_no_place_can_not_be_made(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    state = af.data.LoaderState(epoch=0, consumed=10, seed=0, length=10)
    with pytest.raises(error, match=text):
        dataclasses.replace(state, **change)


def test_a_state_is_plain_numbers() -> None:
    state = af.loader_state(af.prepare_data_loader(Context(), numbers(4)))
    as_numbers = dataclasses.asdict(state)
    assert af.data.LoaderState(**as_numbers) == state
    known = {name: value for name, value in as_numbers.items() if value is not None}
    assert set(known) == {"version", "epoch", "consumed", "seed", "length", "order"}


@pytest.mark.parametrize("thing", [[1, 2], numbers(4)], ids=["list", "torch"])
def test_only_prepared_loaders_have_a_state(thing: Any) -> None:
    with pytest.raises(TypeError, match="loader_state takes a loader from prepare_data_loader"):
        af.loader_state(thing)
    with pytest.raises(TypeError, match="restore_loader takes a loader"):
        af.restore_loader(thing, af.data.LoaderState(epoch=0, consumed=0, seed=0))


# --- skip_first_batches ----------------------------------------------------------------------------


def test_a_skipped_pass_moves_the_original_on_and_its_states_are_the_originals() -> None:
    ctx = Context().replace(dataloader_config=af.DataLoaderConfiguration(data_seed=5))
    loader = af.prepare_data_loader(ctx, numbers(12, 3, shuffle=True))
    rest = skip_first_batches(loader, 2)
    assert isinstance(rest, af.data.PreparedDataLoader)
    assert (len(loader), len(rest)) == (4, 2)
    batches = iter(rest)
    first = next(batches).tolist()
    state = af.data.LoaderState(epoch=0, consumed=9, seed=5, length=12, order="shuffled")
    assert af.loader_state(rest) == af.loader_state(loader) == state
    (second,) = (batch.tolist() for batch in batches)
    assert (loader.epoch, rest.epoch) == (1, 1)
    assert first + second == epoch_of(12, True, seed=5)[6:]
    assert [sample for batch in loader for sample in batch.tolist()] == epoch_of(12, True, seed=5, epoch=1)
    for restored in (rest, loader):  # a state says where to go on, so nothing is skipped again
        af.restore_loader(restored, state)
        assert [batch.tolist() for batch in restored] == [second]


def test_microbatches_of_a_skipped_loader_know_their_place() -> None:
    def run(ctx: Context) -> list[Any]:
        rest = skip_first_batches(af.prepare_data_loader(ctx, numbers(11)), 1)
        micros = af.microbatches(ctx, rest)
        return [(batch.tolist(), micro.own_valid, micro.is_last, micro.window) for batch, micro in micros]

    assert run_ranks(run, 2, gradient_accumulation_steps=3) == [
        [([4, 5], 2, False, 2), ([8, 9], 2, True, 2)],
        [([6, 7], 2, False, 2), ([10, 0], 1, True, 2)],
    ]


def test_shards_and_data_that_was_sharded_already_are_skipped_too() -> None:
    def run(ctx: Context) -> list[Any]:
        shards = af.prepare_data_loader(ctx, DataLoader(Shards([0, 1, 2]), batch_size=3))
        own = af.prepare_data_loader(ctx, numbers(5 + 2 * ctx.rank), "already_sharded")
        micros = [
            (batch.tolist(), micro.own_valid)
            for loader in (skip_first_batches(shards, 1), skip_first_batches(own, 2))
            for batch, micro in af.microbatches(ctx, loader, "pad")
        ]
        return [len(skip_first_batches(own, 2)), *micros]

    assert run_ranks(run, 2) == [
        [1, ([3, 20, 21], None), ([22, 23], None), ([4], None), ([4], 0)],
        [2, ([13], None), ([13], 0), ([4, 5], None), ([6], None)],
    ]


class Sub(DataLoader[Any]):
    """A loader of a class of the user's own."""


OPTIONS = ("dataset", "batch_size", "num_workers", "collate_fn", "generator", "drop_last", "pin_memory")


@pytest.mark.parametrize(("skipped", "num_workers"), [(1, 0), (4, 1), (9, 0)])
def test_a_torch_loader_keeps_its_options_and_loads_nothing_of_what_is_skipped(
    skipped: int, num_workers: int
) -> None:
    data = Counting(9)
    generator = torch.Generator().manual_seed(1)
    source = Sub(data, 2, shuffle=True, generator=generator, num_workers=num_workers)
    whole = [batch.tolist() for batch in source]
    data.read.clear()
    generator.manual_seed(1)
    rest = cast("DataLoader[Any]", skip_first_batches(source, skipped))
    assert type(rest) is Sub
    assert (len(rest), len(source)) == (max(0, 5 - skipped), 5)
    assert [batch.tolist() for batch in rest] == whole[skipped:]
    if not num_workers:
        assert data.read == [index for batch in whole[skipped:] for index in batch]
    assert all(getattr(rest, name) is getattr(source, name) for name in OPTIONS)


def test_a_torch_loader_with_living_workers_keeps_them_for_itself() -> None:
    source = numbers(8, num_workers=1, persistent_workers=True)
    whole = [batch.tolist() for batch in source]
    rest = skip_first_batches(source, 3)
    assert [batch.tolist() for batch in rest] == whole[3:]
    assert [batch.tolist() for batch in source] == whole
    for loader in (source, rest):
        cast("Any", loader)._iterator._shutdown_workers()


def test_a_loader_that_iterates_in_its_own_way_is_read_and_thrown_away() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(["a", "b", "c"])

        def __len__(self) -> int:
            return 3

    rest = cast("Any", skip_first_batches(Own(Counting(8)), 1))
    assert (list(rest), len(rest), rest.batch_size) == (["b", "c"], 2, 1)


def test_a_skipped_torch_loader_can_be_prepared() -> None:
    def run(ctx: Context) -> list[Any]:
        return [batch.tolist() for batch in af.prepare_data_loader(ctx, cast("Any", rest))]

    rest = skip_first_batches(numbers(11), 1)
    assert run_ranks(run, 2) == [[[2, 3], [6, 7], [10, 2]], [[4, 5], [8, 9], [3, 4]]]
    sampler = DistributedSampler(cast("Any", range(8)), num_replicas=2, rank=0)
    sharded = skip_first_batches(numbers(8, sampler=sampler), 1)
    with pytest.raises(ConfigurationError, match="DistributedSampler"):
        af.prepare_data_loader(Context(), cast("Any", sharded))


def test_any_iterable_is_skipped_when_it_is_read() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for number in range(4):
            taken.append(number)
            yield number

    rest = skip_first_batches(source(), 2)
    assert taken == []
    assert next(iter(rest)) == 2
    assert taken == [0, 1, 2]
    for skipped, left in ((1, [2, 3]), (4, [])):
        sized = skip_first_batches([1, 2, 3], skipped)
        assert (len(cast("Any", sized)), list(sized)) == (len(left), left)
    stream: Any = skip_first_batches(DataLoader(Numbers(7), batch_size=2), 2)
    assert [batch.tolist() for _ in range(2) for batch in stream] == [[4, 5], [6]] * 2
    assert stream.batch_size == 2
    with pytest.raises(TypeError, match="has no len"):
        len(stream)
    assert list(skip_first_batches(DataLoader(Counting(5), batch_size=None), 3)) == [3, 4]
    with pytest.raises(TypeError, match="another iterable, got int"):
        skip_first_batches(cast("Any", 3), 1)


@pytest.mark.parametrize("source", [[1], numbers(2), af.prepare_data_loader(Context(), numbers(2))])
def test_numbers_of_batches_are_checked_at_the_call(source: Any) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        skip_first_batches(source, -1)
    for number in (1.0, True, None):
        with pytest.raises(TypeError, match="must be an int"):
            skip_first_batches(source, cast("Any", number))


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_place_in_another_order_is_refused_and_nothing_changes(dispatch: bool) -> None:
    ctx = Context().replace(dataloader_config=af.DataLoaderConfiguration(dispatch_batches=dispatch))
    data = cast("Any", torch.arange(8))
    shuffled = af.prepare_data_loader(ctx, DataLoader(data, batch_size=2, shuffle=True))
    ordered = af.prepare_data_loader(ctx, DataLoader(data, batch_size=2))
    fresh = af.loader_state(shuffled)
    next(iter(shuffled))
    with pytest.raises(ConfigurationError, match="order 'shuffled', but the loader reads"):
        af.restore_loader(ordered, af.loader_state(shuffled))
    assert [batch.tolist() for batch in ordered] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    af.restore_loader(ordered, fresh)  # at the start of an epoch nothing is left out
