"""Laws of trees as documents: what goes out comes back, to the last bit, and nothing in a file does harm."""

import copy
import json
import sys
import time
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelfn.checkpoint.document.document import Encoded, decode, encode
from accelfn.checkpoint.document.fit import compare, describe_like, targets
from accelfn.checkpoint.document.nodes import LEAVES
from accelfn.checkpoint.document.plain import PLAIN_KINDS
from accelfn.checkpoint.files.stored_dtype import contiguous_copy
from accelfn.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedCheckpointError,
)
from tests.checkpoint.trees import (
    NAMESPACE,
    Color,
    Pair,
    Point,
    arrays,
    plain_values,
    raw,
    same,
    tensors,
    trees,
)

np = cast("Any", numpy)  # its stubs leave much open
constructors = cast("Any", torch)  # as do torch's of some tensors
MANY = settings(suppress_health_check=[HealthCheck.too_slow])


def written(encoded: Encoded) -> tuple[Any, dict[str, torch.Tensor]]:
    """Bring a document through JSON and its tensors into fresh memory."""
    document = json.loads(json.dumps(encoded.document, allow_nan=False))
    return document, {name: contiguous_copy(tensor) for name, tensor in encoded.tensors.items()}


def through(tree: Any, like: Any = None) -> Any:
    return decode(*written(encode(tree, namespace=NAMESPACE)), like=like, namespace=NAMESPACE)


# --- round trips ---------------------------------------------------------------------------------


@MANY
@given(trees())
def test_what_goes_out_comes_back(tree: Any) -> None:
    assert same(tree, through(tree))


@given(plain_values())
def test_plain_values_come_back(value: Any) -> None:
    assert same(value, through(value))


@given(tensors())
def test_tensors_come_back_with_their_strides(tensor: torch.Tensor) -> None:
    assert same(tensor, through(tensor))
    # Without a file between, too.
    assert same(tensor, decode(*encode(tensor)))


@given(arrays())
def test_arrays_come_back(array: Any) -> None:
    assert same(array, through(array))


@MANY
@given(trees())
def test_a_document_is_the_same_each_time(tree: Any) -> None:
    texts = [json.dumps(encode(tree, namespace=NAMESPACE).document) for _ in range(2)]
    assert texts[0] == texts[1]
    back = encode(through(tree), namespace=NAMESPACE)
    assert list(back.tensors) == list(encode(tree, namespace=NAMESPACE).tensors)


def test_ordinary_trees_are_ordinary_json() -> None:
    tree: dict[str, Any] = {
        "step": 3,
        "rate": 0.5,
        "names": ["a", None, True],
        "inner": {"w": torch.zeros(2, 1)},
    }
    assert encode(tree) == (
        {
            "step": 3,
            "rate": 0.5,
            "names": ["a", None, True],
            "inner": {"w": {"$": "tensor", "name": "inner/w", "dtype": "float32", "shape": [2, 1]}},
        },
        {"inner/w": tree["inner"]["w"]},
    )


def test_sets_are_stored_in_one_order() -> None:
    assert list({0, 8}) != list({8, 0})
    assert encode({0, 8}) == encode({8, 0})


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_come_back(layout: str) -> None:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    sparse = {
        "coo": lambda: constructors.sparse_coo_tensor(
            torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 4)
        ),
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((1, 2)),
        "bsc": lambda: dense.to_sparse_bsc((2, 2)),
    }[layout]()
    first, second = through([sparse, sparse])
    assert same(sparse, first)
    assert first is second
    assert all(name.startswith("a~1b/") for name in encode({"a/b": sparse}).tensors)
    assert same(dense.to_sparse().requires_grad_(), through(dense.to_sparse().requires_grad_()))


def test_sequences_of_structs_come_back() -> None:
    largest = torch.tensor([[1.0, 3.0]]).max(dim=1)
    now = time.localtime(0)
    back = through({"now": now, "largest": largest})
    assert back["now"] == now
    assert (back["now"].tm_zone, back["now"].tm_gmtoff) == (now.tm_zone, now.tm_gmtoff)
    assert type(back["largest"]) is type(largest)
    assert back["largest"].values.equal(largest.values)


def test_keys_of_thousands_of_digits_come_back() -> None:
    tree = {1 << 20000: torch.zeros(1), (1 << 20000,): torch.ones(1)}
    assert list(encode(tree).tensors) == ["int", "tuple"]
    assert same(list(tree.values()), list(through(tree).values()))
    assert list(through(tree)) == list(tree)


def test_names_are_pointers_and_unique() -> None:
    tree = {"a/b": {"~": torch.zeros(1)}, 1: torch.zeros(1), "1": torch.zeros(1), "": [torch.zeros(1)]}
    assert list(encode(tree).tensors) == ["a~1b/~0", "1", "1~2", "/0"]
    assert same(tree, through(tree))
    assert list(encode({"__metadata__": torch.zeros(1)}).tensors) == ["__metadata__~2"]
    assert list(encode(torch.zeros(1)).tensors) == ["tree"]
    assert list(encode({"\udcff": torch.zeros(1)}).tensors) == ["\\udcff"]


# --- sharing -------------------------------------------------------------------------------------


def test_the_same_object_comes_back_as_one() -> None:
    weight, array = torch.nn.Parameter(torch.zeros(2)), np.zeros(2)
    dates, generator = np.zeros(2, "M8[s]"), torch.Generator()
    tree = [(weight, array, dates, generator), {"again": [weight, array, dates, generator]}]
    encoded = encode(tree)
    assert len(encoded.tensors) == 4
    first, second = decode(*written(encoded))
    assert all(one is other for one, other in zip(first, second["again"], strict=True))


def test_tied_weights_are_stored_once_and_tied_again() -> None:
    embed, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    head.weight = embed.weight
    model = torch.nn.Sequential(embed, head)
    encoded = encode({"model": model, "ema": torch.zeros(1)})
    assert list(encoded.tensors) == ["model/0.weight", "ema"]
    state = decode(*written(encoded))["model"]
    state["0.weight"].zero_()[0] = 7
    assert state["1.weight"][0].tolist() == [7, 7]


SHARING: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "a whole and its parts": lambda base: [base[1:, 0], base, base.t(), base[:, ::2]],
    "parts without the whole": lambda base: [base[:2], base[1:3, 1:], base[0]],
    "turned alike": lambda base: [base.t(), base.t()],
    "with gaps alike": lambda base: [base[:, :2], base[:, :2]],
    "other dtypes": lambda base: [base, base.view(torch.int32), base.view(torch.uint8)[:, 3:7]],
    "other dtypes without the whole": lambda base: [
        base.view(torch.uint8)[0, 5:9],
        base.view(-1)[1:5].view(torch.int32),
        base.view(-1)[2:4].view(torch.float64),
    ],
    "bytes beyond whole elements": lambda base: [
        base.view(torch.uint8).view(-1)[:62].view(31, 2)[:30],
        base.view(torch.uint8).view(-1)[59:62],
        base[:2],
    ],
    "repeated": lambda base: [base[0].expand(3, 4), base[0, :2]],
    "windows": lambda base: [base.view(-1).unfold(0, 3, 1)],
    "one repeated element": lambda base: [base[0, 0].expand(5)],
    "complex and its parts": lambda base: [torch.view_as_complex(base.view(8, 2)), base[0]],
}


@pytest.mark.parametrize("name", SHARING)
def test_tensors_that_share_memory_share_it_again(name: str) -> None:
    members = SHARING[name](torch.arange(16.0).view(4, 4))
    encoded = encode(members)
    assert len(encoded.tensors) == 1
    back = decode(*written(encoded))
    for value, index in enumerate(range(len(members))):
        assert all(raw(one) == raw(other) for one, other in zip(members, back, strict=True))
        for side in (members, back):  # what is written into one is seen in the others
            side[index][(0,) * side[index].dim()] = value + 1
    assert all(raw(one) == raw(other) for one, other in zip(members, back, strict=True))
    alike = [(one.dtype, one.shape) for one in members] == [(one.dtype, one.shape) for one in back]
    assert alike
    if name != "with gaps alike":
        assert [one.stride() for one in members] == [one.stride() for one in back]


def test_parts_that_do_not_meet_are_stored_by_themselves() -> None:
    base = torch.arange(16.0).view(4, 4)
    assert list(encode({"a": base[:2], "b": base[2:]}).tensors) == ["a", "b"]


def test_memory_is_shared_wherever_a_loader_puts_it() -> None:
    base = torch.arange(4, dtype=torch.int64)
    document, tensors = written(encode([base, base.view(torch.uint8)]))
    for start in range(0, 24, 8):  # a view of a file that was read as a whole
        buffer = torch.zeros(64, dtype=torch.uint8)
        place = buffer[start : start + 32].view(torch.int64)
        place.copy_(tensors["0"])
        first, second = decode(document, {"0": place})
        first[3] = 255
        assert second.tolist()[-8:] == [255, 0, 0, 0, 0, 0, 0, 0]


def test_bytes_at_the_end_of_a_storage_are_kept() -> None:
    content = torch.arange(10, dtype=torch.uint8)
    floats, tail = through([content[:8].view(torch.float32), content[2:]])
    assert raw(floats) == bytes(range(8))
    assert raw(tail) == bytes(range(2, 10))


def test_stored_tensors_are_in_the_order_of_the_tree() -> None:
    base = torch.zeros(8)
    tree = [base[4:6].expand(2, 2), base[:2].expand(2, 2)]
    assert list(encode(tree).tensors) == ["0~memory", "1~memory"]


def test_a_view_may_not_leave_its_tensor_nor_start_between_elements() -> None:
    content = torch.arange(8, dtype=torch.uint8)
    document, tensors = written(encode([content, content.view(torch.int32)]))
    buffer = torch.zeros(64, dtype=torch.uint8)
    buffer[3:11] = tensors["0"]  # where another size of element can't begin
    assert raw(decode(document, {"0": buffer[3:11]})[1]) == bytes(range(8))
    document[1]["shape"] = [3]
    with pytest.raises(DamagedCheckpointError, match="beyond the end"):
        decode(document, {"0": buffer[:8]})


def test_arrays_share_with_their_tensors_and_parts() -> None:
    array = np.arange(6.0)
    tensor, back, part = through([torch.from_numpy(array), array, array[2:4]])  # pyright: ignore[reportUnknownMemberType]
    back[3] = 9
    assert tensor[3] == 9
    assert part[1] == 9


def test_marks_of_parameters_come_back() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    loss = torch.ones(2, requires_grad=True) * 2
    back = through([frozen, loss, frozen[0]])
    assert type(back[0]) is torch.nn.Parameter
    assert [one.requires_grad for one in back] == [False, True, False]
    assert all(one.is_leaf for one in back)


def test_marks_of_conjugation_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j])
    back = through([tensor, tensor.conj(), tensor.conj().imag])
    assert [one.tolist() for one in back] == [[1 + 2j], [1 - 2j], [-2.0]]
    assert not back[1].is_conj()


# --- objects -------------------------------------------------------------------------------------


class Stateful:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_an_object_is_stored_by_its_state_and_takes_it_up_again() -> None:
    tree = {"counter": Stateful(3), "weights": (torch.ones(2), Stateful([torch.ones(1)]))}
    document, tensors = written(encode(tree))
    assert list(tensors) == ["weights/0", "weights/1/value/0"]
    assert decode(document, tensors)["counter"] == {"value": 3}
    like: dict[str, Any] = {"counter": Stateful(0), "weights": (torch.zeros(2), Stateful(None))}
    back = decode(document, tensors, like=like)
    assert back["counter"] is like["counter"]
    assert back["counter"].value == 3
    assert back["weights"][1] is like["weights"][1]
    assert back["weights"][1].value[0].equal(torch.ones(1))
    assert back["weights"][0].equal(torch.ones(2))


def test_a_model_and_its_optimizer_come_back() -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    back = through([model, optimizer], like=list(make()))
    assert same(dict(model.state_dict()), dict(back[0].state_dict()))
    assert same(optimizer.state_dict(), back[1].state_dict())


def test_convert_comes_first_and_restore_last() -> None:
    asked: list[tuple[str, Any]] = []

    def convert(path: str, value: Any) -> Any:
        asked.append((path, value))
        return (value.value, torch.ones(1)) if isinstance(value, Stateful) else NotImplemented

    pair, inner = Pair(1, torch.zeros(1)), Stateful(5)
    tree = {"a": inner, "b": [pair, Point(1, 2), {1: "x"}], "c": Color.RED}
    encoded = encode(tree, convert=convert, namespace=NAMESPACE)
    assert asked == [("a", inner), ("b/0", pair)]

    def restore(path: str, value: Any, state: Any) -> Any:
        assert value is inner
        return path, state

    back = decode(*written(encoded), like=tree, namespace=NAMESPACE, restore=restore)
    assert back["a"] == ("a", (5, torch.ones(1)))
    assert list(back) == ["a", "b", "c"]


def test_tensors_are_one_inside_and_outside_of_objects() -> None:
    weight = torch.ones(2)
    tree = [weight, Stateful(weight), weight, np.zeros(1)]
    back = through(tree, like=[None, Stateful(None), None, None])
    assert back[0] is back[1].value
    assert back[0] is back[2]


def test_nothing_is_given_its_state_before_all_was_read() -> None:
    document, tensors = written(encode([Stateful(1), torch.zeros(2)]))
    like: list[Any] = [Stateful(0), torch.zeros(2)]
    with pytest.raises(DamagedCheckpointError):
        decode(document, {"1": torch.zeros(3)}, like=like)
    assert like[0].value == 0
    with pytest.raises(CheckpointMismatchError, match="no load_state_dict") as caught:
        decode(document, tensors, like=[object(), None])
    assert [row.path for row in caught.value.rows] == ["0"]


# --- classes -------------------------------------------------------------------------------------


def test_local_classes_come_from_like() -> None:
    class Local(NamedTuple):
        x: Any

    document, tensors = written(encode({"a": [Local(1)]}))
    with pytest.raises(CheckpointError, match="Import the module before loading, or load into a tree"):
        decode(document, tensors)
    assert type(decode(document, tensors, like={"a": [Local(2)]})["a"][0]) is Local


def test_a_field_that_a_namedtuple_has_got_since_has_its_default() -> None:
    document, tensors = written(encode(Point(1, 2)))
    del document["fields"]["y"]
    assert decode(document, tensors, like=Point(0)) == Point(1, 0)
    assert compare(document, describe_like(Point(1, None))) == ()
    assert [row.path for row in compare(document, describe_like(Point(1, torch.ones(1))))] == ["y"]
    document["fields"] = {"y": 2}  # x has none
    with pytest.raises(CheckpointError, match="has the fields"):
        decode(document, tensors, like=Point(0))


def test_no_module_is_imported_for_a_file() -> None:
    name = "this"  # prints a poem when it is imported
    assert name not in sys.modules
    spelled = (
        f"{name}:Zen",
        "accelfn:init_context",
        "os:system",
        "builtins:eval",
        "builtins:dict",
        "x",
        "",
        ":",
    )
    rest: dict[str, Any] = {"name": "a", "fields": {}, "items": [], "children": [], "metadata": 0}
    for of in spelled:
        for kind in ("namedtuple", "enum", "node", "structseq"):
            with pytest.raises(CheckpointError):
                decode({"$": kind, "of": of, **rest}, {})
    assert name not in sys.modules


def test_looking_for_a_class_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    lazy = types.ModuleType("accelfn_lazy")
    vars(lazy)["__getattr__"] = asked.append
    monkeypatch.setitem(sys.modules, "accelfn_lazy", lazy)
    with pytest.raises(CheckpointError, match="doesn't have"):
        decode({"$": "enum", "of": "accelfn_lazy:Color", "name": "RED"}, {})
    assert asked == []


# --- refusals ------------------------------------------------------------------------------------


class Small(int):
    pass


class Words(dict[str, Any]):
    pass


class Tagged(torch.Tensor):
    pass


def circle() -> list[Any]:
    found: list[Any] = []
    found.append({"again": found})
    return found


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = OrderedDict({1: found})
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: lambda: 0, "a function is code"),
        (lambda: json, "a module is code"),
        (lambda: Stateful, "a type is code"),
        (lambda: print, "code"),
        (lambda: object(), "builtins.object, which isn't known"),
        (lambda: Small(3), "Small, which isn't known"),
        (lambda: Words(), "Words, which isn't known"),
        (lambda: iter([1]), "which isn't known"),
        (lambda: torch.zeros(2, device="meta"), "has no data"),
        (lambda: torch.zeros(2).as_subclass(Tagged), "as_subclass"),
        (lambda: torch.nn.UninitializedParameter(), "more than its elements"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize"),
        (lambda: constructors.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
        (
            lambda: constructors.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "elements|unbind",
        ),
        (lambda: np.array([object()]), "Python objects"),
        (lambda: np.ma.masked_array([1]), "which isn't known"),
        (lambda: {Small(3): 1}, "as a key"),
        (lambda: {1: 2, Point(1): 2}, "as a key"),
        (lambda: {torch.zeros(1)}, "as a key or a member"),
        (lambda: defaultdict[int, int](lambda: 0), "factory can be one of list, dict"),
        (lambda: circle(), "contains itself"),
        (lambda: deep(65), "in more than 64 others"),
        (lambda: slice(None, torch.zeros(1)), "ends aren't plain"),
        (lambda: Pair(0, 0, lambda: 0), "a function is code"),
        (lambda: Pair(0, 0, torch.zeros(1)), "make them children"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_path(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(TypeError, match=why) as caught:
        encode({"fine": 1, "model/x": [make()], "last": object()}, namespace=NAMESPACE)
    text = str(caught.value)
    assert text.startswith("2 values of the tree can't be stored")
    assert "\n  model~1x/0" in text
    assert "\n  last: a builtins.object" in text
    assert "state_dict() and load_state_dict()" in text
    assert "optree.register_pytree_node" in text


def test_the_deepest_tree_that_is_taken_comes_back() -> None:
    assert same(deep(64), through(deep(64)))


# --- hostile documents ---------------------------------------------------------------------------

JUNK: st.SearchStrategy[Any] = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=3)),
    st.sampled_from((10**30, "float32", "tree", "0", "torch:Tensor", "builtins:eval", "0x1p", "F" * 9)),
    st.sampled_from(([], {}, [[]], {"$": 3}, {"$": "tensor"}, {"$": "again", "id": 0}, {"$": "nothing"})),
)


KINDS = (
    *sorted(LEAVES | PLAIN_KINDS),
    *("tuple", "dict", "deque", "ordereddict", "defaultdict", "namedtuple", "structseq", "node", "object"),
    *("set", "frozenset", "numpy", "again", "sparse"),
)


def is_harmless(read: Callable[[], Any]) -> bool:
    """Whether reading goes well, or ends with one of the two errors that it may end with."""
    try:
        read()
    except CheckpointError as error:
        return isinstance(error, DamagedCheckpointError) or "doesn't have" in str(error)
    return True


def places(node: Any) -> list[tuple[Any, Any]]:
    """List all containers of a document, each with each of its keys."""
    items: Any = ()
    if isinstance(node, (dict, list)):
        items = cast("Any", node.items() if isinstance(node, dict) else enumerate(cast("list[Any]", node)))
    found: list[tuple[Any, Any]] = []
    for key, child in list(items):
        found += [(node, key), *places(child)]
    return found


@settings(max_examples=4 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), st.data())
def test_a_malformed_document_is_damaged_and_nothing_else(tree: Any, data: st.DataObject) -> None:
    document, tensors = written(encode(tree, namespace=NAMESPACE))
    document = [document]
    for _ in range(data.draw(st.integers(1, 3))):
        found = places(document)
        owner, key = found[data.draw(st.integers(0, len(found) - 1))]
        change = data.draw(st.sampled_from(("junk", "gone", "again", "kind")))
        if change == "gone" and isinstance(owner, dict):
            del owner[key]
        elif change == "again":
            owner[key] = {"$": "again", "id": data.draw(st.integers(0, 2))}
        elif change == "kind" and isinstance(owner, dict):
            owner["$"] = data.draw(st.sampled_from(KINDS))
        else:
            owner[key] = copy.deepcopy(data.draw(JUNK))
    modules = set(sys.modules)
    wanted = describe_like(tree, namespace=NAMESPACE)
    for read in (
        lambda: decode(document, tensors, namespace=NAMESPACE),
        lambda: decode(document, tensors, like=[tree], namespace=NAMESPACE),
        lambda: compare(document, wanted),
        lambda: targets(document, wanted),
    ):
        assert is_harmless(read)
    assert set(sys.modules) == modules


MALFORMED: list[Any] = [
    float("inf"),
    object(),
    {"$x": 1},
    {"$": "tensor", "name": "no", "dtype": "float32", "shape": [2]},
    {"$": "tensor", "name": "t", "dtype": "float64", "shape": [4]},
    {"$": "tensor", "name": "t", "dtype": "float32", "shape": [2, 2]},
    {"$": "tensor", "name": "t", "dtype": "float32", "shape": [4], "stride": [2]},
    {"$": "tensor", "name": "t", "dtype": "float32", "shape": [4], "stride": [10**30]},
    {"$": "tensor", "name": "t", "dtype": "float32", "shape": [4], "offset": 4},
    {"$": "tensor", "name": "t", "dtype": "float32", "shape": [2], "offset": 2},
    {"$": "tensor", "name": "t", "dtype": "float32", "shape": [1], "offset": -4},
    {"$": "tensor", "name": "t", "dtype": "float32", "shape": [1], "stride": [10**30], "offset": 0},
    {"$": "tensor", "name": "t", "dtype": "int32", "shape": [4], "offset": 0, "requires_grad": True},
    {"$": "array", "name": "t", "dtype": "float32", "shape": [4], "requires_grad": 3},
    {"$": "raw", "name": "t", "dtype": "float32", "shape": [4], "numpy": "O", "sides": [2]},
    {"$": "numpy", "dtype": "O", "base64": "AAAAAAAAAAA="},
    {"$": "generator", "name": "t", "dtype": "float32", "shape": [4], "device": "cpu"},
    {"$": "dict", "keys": [[]], "values": [1]},
    {"$": "dict", "keys": [1], "values": []},
    {"$": "deque", "items": [1, 2], "maxlen": 1},
    {"$": "defaultdict", "factory": "eval", "items": {}},
    {"$": "again", "id": 0},
    {"$": "object", "of": "a:b"},
    {"$": "fraction", "parts": [1, 0]},
    {"$": "zoneinfo", "key": "../../../etc/passwd"},
    {"$": "device", "text": "cpu; rm"},
    {"$": "dtype", "text": "__name__"},
    {"$": "sparse", "layout": "torch.sparse_coo", "shape": [2], "fields": {"indices": 1, "values": 2}},
]


@pytest.mark.parametrize("document", MALFORMED)
def test_malformed_nodes_are_damaged(document: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="'tree'"):
        decode(document, {"t": torch.zeros(4)})


def test_bottomless_documents_are_damaged() -> None:
    document: Any = 1
    for _ in range(100_000):
        document = [document]
    for read in (
        lambda: decode(document, {}),
        lambda: targets(document),
        lambda: compare(document, describe_like(1)),
    ):
        with pytest.raises(DamagedCheckpointError, match="too deep"):
            read()
    while isinstance(document, list):  # taken apart by hand: Python would recurse
        document = cast("list[Any]", document)[0]
