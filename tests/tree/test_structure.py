import subprocess
import sys
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from accelfn import Context
from accelfn.testing import run_ranks
from accelfn.testing.strategies import trees
from accelfn.tree import (
    TensorInformation,
    flatten,
    initialize_tensors,
    is_dtensor,
    leaf_paths,
    local_of,
    map_tensors,
    tree_structure,
)


class Listed(list[Any]):
    pass


class Tupled(tuple[Any, ...]):
    __slots__ = ()


class Mapped(dict[str, Any]):
    label = ""


class Queued(deque[Any]):
    pass


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    a: Any
    b: Any = None


@dataclass(frozen=True)
class FrozenRecord:
    a: Any
    b: Any = None


@dataclass(frozen=True, slots=True)
class SlottedRecord:
    a: Any
    b: Any = None


@dataclass
class Checked:
    a: Any
    calls: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.calls.append("made")


class Held(MutableMapping[str, Any]):
    """A mapping that holds its items in an attribute and doesn't say how it is copied."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_inside = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_inside[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_inside[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_inside[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_inside)

    def __len__(self) -> int:
        return len(self.items_inside)


def one() -> torch.Tensor:
    return torch.ones(2)


CONTAINERS = (
    lambda: {"b": one(), "a": one()},
    lambda: [one(), (one(), None)],
    lambda: Point(one(), [one()]),
    lambda: OrderedDict[str, Any](b=one(), a=one()),
    lambda: defaultdict[str, Any](list, a=one()),
    lambda: deque([one(), one()], maxlen=5),
    lambda: Listed([one(), one()]),
    lambda: Tupled((one(), one())),
    lambda: Mapped(b=one(), a=one()),
    lambda: Queued([one()]),
    lambda: Queued([one()], 3),
    lambda: Record(one(), {"x": one()}),
    lambda: FrozenRecord(one(), [one()]),
    lambda: SlottedRecord(one(), (one(),)),
    lambda: UserDict({"b": one(), "a": one()}),
    lambda: types.MappingProxyType({"b": one(), "a": one()}),
    lambda: Held({"b": one(), "a": one()}),
    lambda: BatchEncoding({"input_ids": one(), "attention_mask": one()}),
    lambda: SequenceClassifierOutput(loss=cast("Any", torch.tensor(1.0)), logits=cast("Any", one())),
    lambda: BatchEncoding({"inner": {"record": FrozenRecord(one(), Record(one()))}}),
    lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
    lambda: torch.ones(2, 2).max(dim=0),  # a structseq
    lambda: {1: one(), "a": one(), None: one(), (2, "b"): one()},
    lambda: None,
    list,
    dict,
)


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same types, structure and the very same leaves."""
    (leaves, structure), (others, other_structure) = flatten(one), flatten(other)
    return (
        type(one) is type(other)
        and structure == other_structure
        and len(leaves) == len(others)
        and all(a is b for a, b in zip(leaves, others, strict=True))
    )


def reach(tree: Any, path: str) -> Any:
    return eval(path, {"tree": tree})


def nested_lists() -> st.SearchStrategy[Any]:
    return trees(st.integers() | st.text(max_size=2))


@given(trees())
def test_flatten_then_unflatten_gives_the_tree_back(tree: Any) -> None:
    leaves, structure = flatten(tree)
    assert structure.num_leaves == len(leaves)
    assert same(structure.unflatten(leaves), tree)


@given(trees())
def test_each_path_leads_to_its_leaf(tree: Any) -> None:
    leaves, _ = flatten(tree)
    assert [id(reach(tree, path)) for path in leaf_paths(tree)] == [id(leaf) for leaf in leaves]


@given(nested_lists())
def test_leaves_may_be_anything(tree: Any) -> None:
    leaves, structure = flatten(tree)
    assert structure.unflatten(leaves) == tree


@given(trees(st.integers()))
def test_equal_structures_describe_themselves_equally(tree: Any) -> None:
    structure = flatten(tree)[1]
    other = flatten(map_leaves(tree))[1]
    assert structure == other
    assert structure.describe() == other.describe()
    assert flatten([tree, None])[1].describe() != structure.describe()


def map_leaves(tree: Any) -> Any:
    leaves, structure = flatten(tree)
    return structure.unflatten([leaf + 1 for leaf in leaves])


@pytest.mark.parametrize("make", CONTAINERS, ids=lambda make: type(make()).__name__)
def test_every_container_keeps_its_type_and_is_not_written_to(make: Any) -> None:
    tree = make()
    before, structure = flatten(tree)
    result = map_tensors(lambda leaf: leaf + 1, tree)
    assert type(result) is type(tree)
    assert flatten(result)[1] == structure
    assert all(a is b for a, b in zip(flatten(tree)[0], before, strict=True))
    for old, new in zip(before, flatten(result)[0], strict=True):
        assert torch.equal(new, old + 1)
    assert [id(reach(tree, path)) for path in leaf_paths(tree)] == [id(leaf) for leaf in before]


def test_a_mapping_keeps_the_order_and_the_attributes_it_had() -> None:
    tree = Mapped(b=one(), a=one())
    tree.label = "kept"
    result = map_tensors(torch.clone, tree)
    assert list(result) == ["b", "a"]
    assert result.label == "kept"
    assert list(map_tensors(torch.clone, {"b": one(), "a": one()})) == ["b", "a"]


def test_bounds_of_a_deque_and_factory_of_a_defaultdict_are_kept() -> None:
    assert map_tensors(torch.clone, Queued([one()], 3)).maxlen == 3
    assert map_tensors(torch.clone, defaultdict[str, Any](list, a=one())).default_factory is list


def test_unset_fields_of_a_model_output_are_no_leaves() -> None:
    tree = SequenceClassifierOutput(logits=cast("Any", one()))
    assert leaf_paths(tree) == ["tree['logits']"]
    result = map_tensors(torch.clone, tree)
    assert type(result) is SequenceClassifierOutput
    assert result.loss is None
    assert result.logits is result["logits"]


def test_dict_order_does_not_matter() -> None:
    here, there = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert flatten(here)[0] == flatten(there)[0]
    assert flatten(here)[1].describe() == flatten(there)[1].describe()
    assert flatten(Mapped(here))[0] == flatten(Mapped(there))[0]
    assert flatten(Mapped(here))[1].describe() == flatten(Mapped(there))[1].describe()


@pytest.mark.parametrize(
    ("tree", "other"),
    [
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, OrderedDict[str, int](a=1)),
        ({"0xaa": 1}, {"0xbb": 1}),
        (Mapped(a=1), {"a": 1}),
        (Mapped(a=1), Mapped(b=1)),
        (Record(1), FrozenRecord(1)),
        (Record(1, None), Record(1, 2)),
        (Record([1]), Record((1,))),
        (1, [1]),
        (None, []),
    ],
    ids=str,
)
def test_unequal_structures_are_told_apart(tree: Any, other: Any) -> None:
    assert flatten(tree)[1] != flatten(other)[1]
    assert flatten(tree)[1].describe() != flatten(other)[1].describe()


def test_an_address_in_a_description_is_left_out() -> None:
    def make() -> Any:
        return defaultdict(lambda: 0, a=1)

    assert flatten(make())[1].describe() == flatten(make())[1].describe()


def test_none_is_structure_and_a_size_is_a_leaf() -> None:
    assert flatten([None, torch.Size([2])])[0] == [torch.Size([2])]
    assert type(flatten([torch.Size([2])])[0][0]) is torch.Size


def test_a_packed_sequence_keeps_its_type() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    leaves, structure = flatten({"x": packed})
    assert type(structure.unflatten(leaves)["x"]) is PackedSequence
    assert flatten(packed, lambda value: isinstance(value, PackedSequence))[0] == [packed]


def test_is_leaf_also_stops_at_containers_that_are_opened_here() -> None:
    inner = Record(1)
    assert flatten(Mapped(a=inner, b=2), lambda value: isinstance(value, Record))[0] == [inner, 2]


def test_the_tree_functions_import_no_framework() -> None:
    probe = (
        "import sys, accelfn.tree\n"
        "class Fake(dict): pass\n"
        "accelfn.tree.flatten(Fake(a=1))\n"
        "print(sorted(name for name in ('transformers', 'hypothesis', 'pytest') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@given(trees())
def test_structure_then_initialize_keeps_shapes_and_dtypes(tree: Any) -> None:
    again = initialize_tensors(tree_structure(tree))
    leaves, structure = flatten(tree)
    others, other_structure = flatten(again)
    assert other_structure == structure
    assert [(leaf.shape, leaf.dtype) for leaf in others] == [(leaf.shape, leaf.dtype) for leaf in leaves]


def test_other_leaves_stay() -> None:
    tree = {"x": torch.zeros(2, dtype=torch.int8), "name": "a", "none": None}
    assert tree_structure(tree) == {"x": TensorInformation((2,), torch.int8), "name": "a", "none": None}
    assert initialize_tensors({"name": "a", "n": 1}) == {"name": "a", "n": 1}


def test_the_device_can_be_chosen() -> None:
    info = [TensorInformation((), torch.float32), TensorInformation((0, 2), torch.bool)]
    assert [leaf.is_meta for leaf in initialize_tensors(info, "meta")] == [True, True]


def test_a_plain_tensor_is_all_here_and_a_dtensor_is_not() -> None:
    plain = torch.ones(2, requires_grad=True)
    assert not is_dtensor(plain)
    assert not is_dtensor(None)
    assert local_of(plain) is plain

    def run(ctx: Context) -> list[float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (ctx.num_processes,))
        spread = torch.nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        assert is_dtensor(spread)
        local = local_of(spread)
        assert not is_dtensor(local)
        assert not local.requires_grad
        writes = local_of(spread)._version
        local.mul_(2)  # the very part
        assert local_of(spread)._version == writes + 1
        return cast("Any", local_of(spread)).tolist()

    assert run_ranks(run, 2, on="processes") == [[0, 2], [4, 6]]


def test_to_ask_does_not_load_the_module() -> None:
    code = (
        "import sys, torch; from accelfn.tree import is_dtensor, local_of; "
        "assert not is_dtensor(local_of(torch.ones(2))); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
