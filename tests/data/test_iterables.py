# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import pytest
import torch

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream")


class Own:
    """An iterable of batches, trees of any kind."""

    batch_size = 2
    keys: tuple[str, ...] = ("x", "text")

    def __init__(self, num: int) -> None:
        self.num = num
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.num):
            batch = {"x": torch.tensor([2 * number, 2 * number + 1]), "text": f"{self.epoch}.{number}"}
            yield {key: batch[key] for key in self.keys}


class Sized(Own):
    def __len__(self) -> int:
        return self.num


class Sharded(Own):
    num_shards = 4

    def shard(self, num_shards: int, index: int) -> "Sharded":
        part = Sharded(self.num)
        part.first, part.step = index, num_shards
        return part

    first = 0
    step = 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return islice(super().__iter__(), self.first, None, self.step)


class Again:
    """Its own iterator, which begins anew each time."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.place = 0

    def __iter__(self) -> "Again":
        self.place = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.place == self.num:
            raise StopIteration
        self.place += 1
        return torch.tensor([self.place - 1])


def texts(loader: Any) -> list[str]:
    return [batch["text"] for batch in loader]


CONFIG = af.DataLoaderConfiguration(custom_classes=(Own, Again))


def test_prepare_takes_custom_classes_for_loaders_and_gives_back_what_they_are_not() -> None:
    ctx = Context().replace(dataloader_config=CONFIG)
    own = Sized(3)
    loader = af.prepare(ctx, cast("Any", own))
    assert isinstance(loader, af.data.PreparedDataLoader)
    assert texts(loader) == ["0.0", "0.1", "0.2"]
    assert texts(loader) == ["1.0", "1.1", "1.2"]  # it was told the epoch
    assert (len(loader), loader.batch_size, loader.total_dataset_length) == (3, 2, 3)
    assert af.prepare(ctx, loader) is loader
    plain = [torch.zeros(1)]
    assert af.prepare(ctx, plain) is plain
    assert af.prepare(Context(), own) is own


@pytest.mark.parametrize("kind", [Own, Sized])
@pytest.mark.parametrize(
    ("even", "dispatch", "world"), [(True, True, 2), (False, False, 3), (False, True, 2)]
)
def test_batches_are_dealt_in_turn_and_come_as_they_are(
    kind: type[Own], even: bool, dispatch: bool, world: int
) -> None:
    def run(ctx: Context) -> tuple[list[Any], list[int]]:
        source = kind(7)
        source.keys = ("x",) if dispatch else ("x", "text")  # texts that differ can't be sent
        pairs = list(af.microbatches(ctx, af.prepare_data_loader(ctx, source), "pad"))
        rows = [af.tree.listify(af.gather_for_metrics(ctx, batch["x"], micro)) for batch, micro in pairs]
        return [(tuple(batch), int(batch["x"][0]) // 2) for batch, _ in pairs], [
            row for found in rows for row in found
        ]

    config = af.DataLoaderConfiguration(even_batches=even, dispatch_batches=dispatch)
    for rank, (own, rows) in enumerate(run_ranks(run, world, dataloader_config=config)):
        mine = [(("x",) if dispatch else ("x", "text"), number) for number in range(rank, 7, world)]
        assert (own[: len(mine)], rows) == (mine, list(range(14)))


def test_each_rank_may_have_its_own_or_its_shards() -> None:
    def run(ctx: Context) -> list[list[str]]:
        mine = af.prepare_data_loader(ctx, Sized(2 + ctx.rank), "already_sharded")
        shards = af.prepare_data_loader(ctx, Sharded(5), "by_source")
        return [texts(mine), texts(shards)]

    assert run_ranks(run, 2) == [
        [["0.0", "0.1"], ["0.0", "0.2", "0.4"]],
        [["0.0", "0.1", "0.2"], ["0.1", "0.3"]],
    ]


def test_a_place_in_it_can_be_gone_on_from() -> None:
    stopped = af.prepare_data_loader(Context(), Own(5))
    list(islice(stopped, 2))
    again = af.prepare_data_loader(Context(), Own(5))
    af.restore_loader(again, af.loader_state(stopped))
    assert texts(af.skip_first_batches(again, 3)) == ["0.3", "0.4"]


@pytest.mark.parametrize("source", [[torch.zeros(1)] * 2, (1, 2), range(2), {3, 4}], ids=repr)
def test_any_iterable_that_is_named_is_a_loader(source: Any) -> None:
    loader = af.prepare_data_loader(Context(), source)
    for _ in range(2):
        assert all(batch is own for batch, own in zip(loader, source, strict=True))


@pytest.mark.parametrize("source", [3, None, "text", b"bytes", {"a": [1]}, torch.nn.Linear(1, 1)], ids=repr)
def test_what_is_no_collection_of_batches_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match=f"another iterable of batches, got {type(source).__name__}"):
        af.prepare_data_loader(Context(), source)


@pytest.mark.parametrize("source", [iter([1]), (number for number in [1]), map(int, "12"), Again(2)])
def test_what_can_be_gone_through_only_once_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match="is an iterator, which can be iterated over only once"):
        af.prepare_data_loader(Context(), source)


@pytest.mark.parametrize("world", [1, 2])
def test_an_iterator_that_begins_anew_is_taken_when_its_class_is_named(world: int) -> None:
    def run(ctx: Context) -> list[list[int]]:
        loader = af.prepare_data_loader(ctx, Again(4))
        return [[int(batch) for batch in loader] for _ in range(2)]

    for rank, passes in enumerate(run_ranks(run, world, dataloader_config=CONFIG)):
        assert passes == [list(range(rank, 4, world))] * 2


def test_attributes_go_to_the_users_object() -> None:
    loader = af.prepare_data_loader(Context(), Own(3))
    assert (loader.num, loader.batch_size) == (3, 2)
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'missing'"):
        _ = loader.missing
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    assert af.DataLoaderConfiguration(custom_classes=cast("Any", [Own])).custom_classes == (Own,)


def test_the_accelerator_takes_them_too() -> None:
    accelerator = af.Accelerator(dataloader_config=CONFIG)
    loader = accelerator.prepare(Sized(3))
    assert texts(loader) == ["0.0", "0.1", "0.2"]
    assert accelerator.prepare(loader) is af.prepare_data_loader(accelerator.context, loader) is loader
    again = af.Accelerator(dataloader_config=CONFIG).prepare(Sized(3))
    again.load_state_dict(loader.state_dict())
    assert texts(again) == ["1.0", "1.1", "1.2"]


@pytest.mark.parametrize("classes", [Own, "Own", (Own, 3), 3, {"map": object}])
def test_custom_classes_are_classes(classes: Any) -> None:
    with pytest.raises(TypeError, match=r"custom_classes must be a tuple of classes, such as \(MyLoader,\)"):
        af.DataLoaderConfiguration(custom_classes=classes)
