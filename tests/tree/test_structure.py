import importlib
import subprocess
import sys
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks
from accelfn.testing.strategies import tensors, trees
from accelfn.tree import flatten, is_dtensor, leaf_paths, local_of, map_tensors


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


def ones() -> torch.Tensor:
    return torch.ones(2)


CONTAINERS = (
    lambda: {"b": ones(), "a": ones()},
    lambda: [ones(), (ones(), None)],
    lambda: Point(ones(), [ones()]),
    lambda: OrderedDict[str, Any](b=ones(), a=ones()),
    lambda: defaultdict[str, Any](list, a=ones()),
    lambda: deque([ones(), ones()], maxlen=5),
    lambda: Listed([ones(), ones()]),
    lambda: Tupled((ones(), ones())),
    lambda: Mapped(b=ones(), a=ones()),
    lambda: Queued([ones()]),
    lambda: Queued([ones()], 3),
    lambda: Record(ones(), {"x": ones()}),
    lambda: FrozenRecord(ones(), [ones()]),
    lambda: SlottedRecord(ones(), (ones(),)),
    lambda: UserDict({"b": ones(), "a": ones()}),
    lambda: types.MappingProxyType({"b": ones(), "a": ones()}),
    lambda: Held({"b": ones(), "a": ones()}),
    lambda: Held({"inner": {"record": FrozenRecord(ones(), Record(ones()))}}),
    lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
    lambda: torch.ones(2, 2).max(dim=0),  # a structseq
    lambda: {1: ones(), "a": ones(), None: ones(), (2, "b"): ones()},
    lambda: None,
    list,
    dict,
)


def same(tree: Any, other: Any) -> bool:
    """Whether two trees have the same types, structure and the very same leaves."""
    (leaves, structure), (others, other_structure) = flatten(tree), flatten(other)
    return (
        type(tree) is type(other)
        and structure == other_structure
        and len(leaves) == len(others)
        and all(a is b for a, b in zip(leaves, others, strict=True))
    )


def reach(tree: Any, path: str) -> Any:
    return eval(path, {"tree": tree})


@given(trees(st.integers() | st.text(max_size=2) | tensors()))
def test_flatten_then_unflatten_gives_the_tree_back_and_each_path_leads_to_its_leaf(tree: Any) -> None:
    leaves, structure = flatten(tree)
    assert structure.num_leaves == len(leaves)
    assert same(structure.unflatten(leaves), tree)
    assert [id(reach(tree, path)) for path in leaf_paths(tree)] == [id(leaf) for leaf in leaves]


@given(trees(st.integers()))
def test_equal_structures_describe_themselves_equally(tree: Any) -> None:
    leaves, structure = flatten(tree)
    other = flatten(structure.unflatten([leaf + 1 for leaf in leaves]))[1]
    assert structure == other
    assert structure.describe() == other.describe()
    assert flatten([tree, None])[1].describe() != structure.describe()


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


@pytest.mark.slow
def test_containers_of_transformers_keep_their_type() -> None:
    transformers: Any = importlib.import_module("transformers")
    outputs: Any = importlib.import_module("transformers.modeling_outputs")
    encoding = transformers.BatchEncoding({"input_ids": ones(), "inner": {"record": Record(ones())}})
    output = outputs.SequenceClassifierOutput(loss=torch.tensor(1.0), logits=ones())
    for tree in (encoding, output):
        result = map_tensors(lambda leaf: leaf + 1, tree)
        assert type(result) is type(tree)
        assert flatten(result)[1] == flatten(tree)[1]
    unset = outputs.SequenceClassifierOutput(logits=ones())  # fields that are unset are no leaves
    assert leaf_paths(unset) == ["tree['logits']"]
    result = map_tensors(torch.clone, unset)
    assert result.loss is None
    assert result.logits is result["logits"]


@pytest.mark.slow
def test_the_tree_functions_import_no_framework() -> None:
    probe = """
import sys, torch, accelfn.tree
class Fake(dict): pass
accelfn.tree.flatten(Fake(a=1))
assert not accelfn.tree.is_dtensor(accelfn.tree.local_of(torch.ones(2)))
modules = ("transformers", "hypothesis", "pytest", "torch.distributed.tensor")
print([name for name in modules if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_a_container_has_beside_its_items_is_kept() -> None:
    tree = Mapped(b=ones(), a=ones())
    tree.label = "kept"
    result = map_tensors(torch.clone, tree)
    assert (list(result), result.label) == (["b", "a"], "kept")
    assert list(map_tensors(torch.clone, {"b": ones(), "a": ones()})) == ["b", "a"]
    assert map_tensors(torch.clone, Queued([ones()], 3)).maxlen == 3
    assert map_tensors(torch.clone, defaultdict[str, Any](list, a=ones())).default_factory is list


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


def test_is_leaf_stops_at_containers_that_are_opened_here() -> None:
    inner, packed = Record(1), pack_sequence([torch.ones(3), torch.ones(2)])
    assert flatten(Mapped(a=inner, b=2), lambda value: isinstance(value, Record))[0] == [inner, 2]
    assert flatten(packed, lambda value: isinstance(value, PackedSequence))[0] == [packed]


@given(trees(tensors() | st.text(max_size=2)))
def test_structure_then_initialize_keeps_shapes_and_dtypes_and_other_leaves(tree: Any) -> None:
    for device in ("cpu", "meta"):
        others, other_structure = flatten(af.tree.initialize_tensors(af.tree.tree_structure(tree), device))
        leaves, structure = flatten(tree)
        assert other_structure == structure
        for leaf, other in zip(leaves, others, strict=True):
            if isinstance(leaf, torch.Tensor):
                assert (other.shape, other.dtype, other.device.type) == (leaf.shape, leaf.dtype, device)
            else:
                assert other == leaf
    info = af.tree.TensorInformation((2,), torch.int8)
    assert af.tree.tree_structure({"x": torch.zeros(2, dtype=torch.int8)}) == {"x": info}


@pytest.mark.usefixtures("dtensors")
def test_a_plain_tensor_is_all_here_and_a_dtensor_is_not() -> None:
    plain = torch.ones(2, requires_grad=True)
    assert (is_dtensor(plain), is_dtensor(None), local_of(plain) is plain) == (False, False, True)

    def run(ctx: Context) -> list[float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (ctx.num_processes,))
        spread = torch.nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        local = local_of(spread)
        assert (is_dtensor(spread), is_dtensor(local), local.requires_grad) == (True, False, False)
        local.mul_(2)  # the very part
        return af.tree.listify(local_of(spread))

    assert run_ranks(run, 2, on="processes") == [[0, 2], [4, 6]]
