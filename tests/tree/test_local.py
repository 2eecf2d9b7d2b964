import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import accelfn as af
from accelfn.testing.strategies import Pair, Sample, dtypes, rank_trees, shapes, tensors, trees
from accelfn.tree import flatten, map_tensors
from tests.trees import values


def mixed() -> st.SearchStrategy[Any]:
    """Trees of tensors and other leaves."""
    return trees(tensors() | st.integers() | st.text(max_size=2))


def pure(function: Callable[[Any], Any], tree: Any) -> Any:
    """Call ``function`` on ``tree`` and check that it keeps the structure, and the input as it was."""
    before = values(tree)
    result = function(tree)
    assert values(tree) == before
    assert flatten(result)[1] == flatten(tree)[1]
    assert type(result) is type(tree)
    return result


@given(mixed())
def test_map_tensors_meets_each_tensor_once_and_nothing_else(tree: Any) -> None:
    met: list[int] = []

    def note(leaf: torch.Tensor) -> torch.Tensor:
        met.append(id(leaf))
        return leaf

    result = pure(lambda tree: map_tensors(note, tree), tree)
    leaves = flatten(tree)[0]
    assert met == [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert all(a is b for a, b in zip(flatten(result)[0], leaves, strict=True))


@given(mixed())
def test_sending_to_the_same_device_copies_nothing(tree: Any) -> None:
    result = pure(lambda tree: af.send_to_device(tree, "cpu"), tree)
    assert all(a is b for a, b in zip(flatten(result)[0], flatten(tree)[0], strict=True))


@given(mixed())
def test_sending_moves_every_tensor(tree: Any) -> None:
    moved = flatten(af.send_to_device(tree, "meta"))[0]
    for leaf, old in zip(moved, flatten(tree)[0], strict=True):
        assert leaf.is_meta if isinstance(old, torch.Tensor) else leaf is old


def test_skipped_keys_are_skipped_at_every_depth() -> None:
    x = torch.zeros(1)
    tree = {"a": x, "b": {"skip": {"deep": [x]}, "c": x}, "skip": x, "skipped": x}

    def kinds(skip: Any) -> list[bool]:
        return [leaf.is_meta for leaf in flatten(af.send_to_device(tree, "meta", skip_keys=skip))[0]]

    # a, b.c, b.skip.deep, skip, skipped
    assert kinds("skip") == [True, True, False, False, True]
    assert kinds(["skip", "a"]) == [False, True, False, False, True]
    assert kinds(None) == kinds(()) == [True] * 5


def test_objects_with_a_to_method_are_moved_by_it() -> None:
    class Plain:
        device = "cpu"

        def to(self, device: str) -> "Plain":
            moved = Plain()
            moved.device = device
            return moved

    class Modern(Plain):
        def to(self, device: str, non_blocking: bool = False) -> "Plain":
            return super().to(f"{device} {non_blocking}")

    plain, modern, kind = af.send_to_device([Plain(), Modern(), Plain], "meta", non_blocking=True)
    assert (plain.device, modern.device, kind) == ("meta", "meta True", Plain)


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_cpu() -> None:
    moved = af.send_to_device({"x": pack_sequence([torch.ones(3), torch.ones(2)])}, "meta")["x"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta


@given(mixed(), st.slices(4))
def test_slices_are_torch_slices(tree: Any, s: slice) -> None:
    if s.step is not None and s.step < 1:
        s = slice(s.start, s.stop)
    result = pure(lambda tree: af.slice_tensors(tree, s), tree)
    for part, leaf in zip(flatten(result)[0], flatten(tree)[0], strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            assert values(part) == values(leaf[s])
        else:
            assert part is leaf


@given(st.integers(1, 5).flatmap(rank_trees))
def test_concatenate_is_torch_cat_leaf_by_leaf(ranked: list[Any]) -> None:
    before = values(ranked)
    joined = af.concatenate(ranked)
    assert values(ranked) == before
    leaves, structure = flatten(joined)
    assert structure == flatten(ranked[0])[1]
    columns = zip(*(flatten(tree)[0] for tree in ranked), strict=True)
    for leaf, column in zip(leaves, columns, strict=True):
        rows = [leaf if leaf.dim() else leaf.reshape(1) for leaf in column]
        assert values(leaf) == values(torch.cat(rows))


@given(trees(tensors(shape=shapes(min_dims=1))), st.integers(0, 3))
def test_slices_concatenate_to_the_whole(tree: Any, cut: int) -> None:
    assert values(
        af.concatenate([af.slice_tensors(tree, slice(cut)), af.slice_tensors(tree, slice(cut, None))])
    ) == (values(tree))


class Undecided:
    """Compares like an array of several elements."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("The truth value of an array with more than one element is ambiguous.")

    __hash__ = None  # pyright: ignore[reportAssignmentType] -- as numpy's arrays


@pytest.mark.parametrize(
    "pair",
    [("a", "b"), (1, torch.zeros(2)), (torch.zeros(2), 1), (Undecided(), Undecided())],
    ids=("differ", "mixed", "mixed again", "arrays"),
)
def test_concatenate_refuses_values_that_it_can_not_join(pair: Sequence[Any]) -> None:
    with pytest.raises(
        TypeError, match=r"concatenate: tree\['x'\] has values that are not tensors and differ"
    ):
        af.concatenate([{"x": value} for value in pair])


def test_concatenate_refuses_nothing_and_other_structures() -> None:
    with pytest.raises(ValueError, match="concatenate: got no tree"):
        af.concatenate([])
    with pytest.raises(ValueError, match="tree 1 has another structure than tree 0"):
        af.concatenate([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])


def as_it_reads(tree: Any) -> list[Any]:
    """List the leaves as they would be printed: a dict in the order in which it was filled."""
    if isinstance(tree, dict):
        return [leaf for value in cast("dict[Any, Any]", tree).values() for leaf in as_it_reads(value)]
    if type(tree) in (list, tuple, deque, Pair):
        return [leaf for value in cast("list[Any]", tree) for leaf in as_it_reads(value)]
    if isinstance(tree, Sample):
        return as_it_reads([tree.value, tree.label])
    return [tree]


@given(mixed())
def test_the_batch_size_is_that_of_the_first_tensor_with_rows(tree: Any) -> None:
    sizes = [len(leaf) for leaf in as_it_reads(tree) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if sizes:
        assert af.tree.find_batch_size(tree) == sizes[0]
    else:
        with pytest.raises(ValueError, match="no tensor with a first dimension"):
            af.tree.find_batch_size(tree)


@given(mixed())
def test_fp32_conversion_touches_halves_alone(tree: Any) -> None:
    result = pure(af.tree.convert_to_fp32, tree)
    for leaf, old in zip(flatten(result)[0], flatten(tree)[0], strict=True):
        if isinstance(old, torch.Tensor) and old.dtype in (torch.float16, torch.bfloat16):
            assert leaf.dtype == torch.float32
            assert torch.equal(leaf, old.float())
        else:
            assert leaf is old


@given(trees(tensors(shape=shapes(min_dims=1))), st.integers(1, 4), st.integers(1, 5))
def test_padding_repeats_the_last_row_and_can_be_undone(tree: Any, batch_size: int, ranks: int) -> None:
    result = pure(lambda tree: af.tree.pad_input_tensors(tree, batch_size, ranks), tree)
    for leaf, old in zip(flatten(result)[0], flatten(tree)[0], strict=True):
        if len(old) == batch_size:
            assert len(leaf) == math.ceil(batch_size / ranks) * ranks
            assert values(leaf[:batch_size]) == values(old)
            assert values(leaf[batch_size:]) == values(
                old[-1:].expand(len(leaf) - batch_size, *old.shape[1:])
            )
        else:
            assert leaf is old


@given(trees(tensors(dtypes(float8=True)) | st.text(max_size=2)))
def test_listify_gives_what_torch_gives(tree: Any) -> None:
    leaves, structure = flatten(tree)
    expected = [cast("Any", leaf).tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    assert flatten(af.tree.listify(tree)) == flatten(structure.unflatten(expected))


@given(mixed())
def test_the_device_is_that_of_the_first_tensor(tree: Any) -> None:
    has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in flatten(tree)[0])
    assert af.tree.find_device(tree) == (torch.device("cpu") if has_tensor else None)
    assert af.tree.find_device([torch.zeros(1, device="meta"), tree]) == torch.device("meta")
