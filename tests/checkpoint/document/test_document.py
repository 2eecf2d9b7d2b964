"""Trees survive the conversion to documents bit for bit, and malformed documents do no harm."""

import copy
import json
import math
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelfn.checkpoint.document.compare import match
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.document.encode import Encoded, encode
from accelfn.checkpoint.document.nodes import KINDS, LEAVES, PLAIN_KINDS, stored_names
from accelfn.checkpoint.header import contiguous_copy
from accelfn.errors import CheckpointError, CheckpointMismatchError, DamagedCheckpointError
from accelfn.testing import run_ranks
from tests.checkpoint.trees import NAMESPACE, Color, Point, arrays, plain_values, same, tensors, trees

np = cast("Any", numpy)  # partly untyped
constructors = cast("Any", torch)  # partly untyped
MANY = settings(suppress_health_check=[HealthCheck.too_slow])


def written(encoded: Encoded) -> tuple[Any, dict[str, torch.Tensor]]:
    """Convert a document to JSON and back, and copy its tensors."""
    document = json.loads(json.dumps(encoded.document, allow_nan=False))
    return document, {name: contiguous_copy(tensor) for name, tensor in encoded.tensors.items()}


def through(tree: Any, like: Any = None) -> Any:
    return decode(*written(encode(tree, namespace=NAMESPACE)), like=like, namespace=NAMESPACE)


# --- round trips ---------------------------------------------------------------------------------


@MANY
@given(st.one_of(trees(), plain_values(), tensors(), arrays()))
def test_any_tree_survives_a_round_trip_and_matches_itself(tree: Any) -> None:
    encoded = encode(tree, namespace=NAMESPACE)
    document, stored = written(encoded)
    assert same(tree, decode(document, stored, namespace=NAMESPACE))
    assert same(tree, decode(document, stored, like=tree, namespace=NAMESPACE))
    assert json.dumps(document) == json.dumps(encode(tree, namespace=NAMESPACE).document)
    assert set(stored_names(document)) == set(stored)
    assert match(document, stored, tree, namespace=NAMESPACE).rows == []


@given(tensors())
def test_tensors_survive_a_round_trip_in_memory(tensor: torch.Tensor) -> None:
    assert same(tensor, decode(*encode(tensor)))


def test_ordinary_trees_are_ordinary_json() -> None:
    tree: dict[str, Any] = {"step": 3, "rates": [0.5, None, True], "é": {"w": torch.zeros(2, 1)}}
    assert encode(tree) == (
        {"step": 3, "rates": [0.5, None, True], "é": {"w": {"$": "tensor", "name": "é/w"}}},
        {"é/w": tree["é"]["w"]},
    )


def test_sets_are_stored_sorted() -> None:
    assert list({0, 8}) != list({8, 0})
    assert encode({0, 8}) == encode({8, 0})


def test_names_of_tensors_are_unique_json_pointers() -> None:
    tree = {"a/b": {"~": torch.zeros(1)}, 1: torch.zeros(1), "1": torch.zeros(1), "": [torch.zeros(1)]}
    assert list(encode(tree).tensors) == ["a~1b/~0", "1", "1~2", "/0"]
    assert same(tree, through(tree))
    assert list(encode({"__metadata__": torch.zeros(1)}).tensors) == ["__metadata__~2"]
    assert list(encode(torch.zeros(1)).tensors) == ["tree"]


# --- sharing -------------------------------------------------------------------------------------


def test_a_repeated_tensor_is_restored_as_one_and_views_by_value() -> None:
    weight, array, generator = torch.nn.Parameter(torch.ones(2, 2)), np.zeros(2), torch.Generator()
    tree = [(weight, array, generator), {"again": [weight, array, generator]}, weight[0], weight.detach().t()]
    encoded = encode(tree)
    assert list(encoded.tensors) == ["0/0", "0/1", "0/2", "2", "3"]
    first, second, part, turned = decode(*written(encoded))
    assert all(one is other for one, other in zip(first, second["again"], strict=True))
    assert part.equal(torch.ones(2))
    turned.zero_()
    assert first[0].sum() == 4


def test_tied_weights_are_stored_once_and_tied_again() -> None:
    embed, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    head.weight = embed.weight
    model = torch.nn.Sequential(embed, head)
    encoded = encode({"model": model, "ema": torch.zeros(1)})
    assert list(encoded.tensors) == ["model/0.weight", "ema"]
    state = decode(*written(encoded))["model"]
    state["0.weight"].zero_()[0] = 7
    assert state["1.weight"][0].tolist() == [7, 7]


def test_parameters_and_requires_grad_are_restored() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    back = through([frozen, torch.ones(2, requires_grad=True) * 2, frozen.detach()])
    assert [type(item) for item in back] == [torch.nn.Parameter, torch.Tensor, torch.Tensor]
    assert [item.requires_grad for item in back] == [False, True, False]
    assert all(item.is_leaf for item in back)
    assert back[0].data_ptr() == back[2].data_ptr()


def test_lazy_conjugation_is_resolved() -> None:
    tensor = torch.tensor([1 + 2j])
    back = through([tensor, tensor.conj(), tensor.conj().imag])
    assert [item.tolist() for item in back] == [[1 + 2j], [1 - 2j], [-2.0]]
    assert not back[1].is_conj()


def _distributed(ctx: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ctx.world.size,))
    weight = torch.nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    tree = {"w": weight, "tied": weight, "alias": weight.detach(), "plain": torch.zeros(1)}
    document, stored = encode(tree)
    assert list(stored) == ["w", "plain"]
    assert isinstance(stored["w"], DTensor)
    back = decode(json.loads(json.dumps(document)), stored)
    assert back["w"] is back["tied"]
    assert isinstance(back["w"], DTensor)
    assert isinstance(back["w"], torch.nn.Parameter)
    assert back["alias"].to_local().data_ptr() == back["w"].to_local().data_ptr()
    # Distributed tensors load as complete ones, and the other way round.
    assert decode(document, {"w": torch.arange(4.0), "plain": torch.zeros(1)})["w"].tolist() == [0, 1, 2, 3]
    plain = encode({name: torch.zeros(leaf.shape) for name, leaf in tree.items()})
    matched = match(plain.document, plain.tensors, tree)
    assert matched.rows == []
    assert matched.leaves["w"] is weight


def test_distributed_tensors_stay_leaves() -> None:
    run_ranks(_distributed, 2, on="processes")


# --- objects -------------------------------------------------------------------------------------


class Stateful:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_an_object_is_stored_by_its_state_and_restored() -> None:
    tree = {"counter": Stateful(3), "weights": (torch.ones(2), Stateful([torch.ones(1)]))}
    document, stored = written(encode(tree))
    assert list(stored) == ["weights/0", "weights/1/value/0"]
    assert decode(document, stored)["counter"] == {"value": 3}
    like: dict[str, Any] = {"counter": Stateful(0), "weights": (torch.zeros(2), Stateful(None))}
    back = decode(document, stored, like=like)
    assert back["counter"] is like["counter"]
    assert back["counter"].value == 3
    assert back["weights"][1] is like["weights"][1]
    assert back["weights"][1].value[0].equal(torch.ones(1))
    assert back["weights"][0].equal(torch.ones(2))


def test_a_model_its_optimizer_and_its_schedule_are_restored() -> None:
    def make() -> list[Any]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters())
        return [model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])]

    model, optimizer, schedule = objects = make()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    schedule.step()
    back = through(objects, like=make())
    assert all(same(one.state_dict(), other.state_dict()) for one, other in zip(objects, back, strict=True))
    assert type(back[2].state_dict()["milestones"]) is Counter


def test_convert_restore_and_adopt_override_the_defaults() -> None:
    calls: list[tuple[str, Any]] = []

    def convert(path: str, value: Any) -> Any:
        calls.append((path, value))
        return (value.value, torch.ones(1)) if path == "a" else NotImplemented

    inner, other = Stateful(5), Stateful(6)
    tree = {"a": inner, "b": [other, Point(1, 2), {1: "x"}], "c": Color.RED, "d": torch.zeros(1)}
    encoded = encode(tree, convert=convert)
    assert calls == [("a", inner), ("b/0", other)]
    back = decode(
        *written(encoded),
        like=tree,
        restore=lambda path, value, state: (path, value, state),
        adopt=lambda leaf, value: (leaf, value),
    )
    assert back["a"] == ("a", inner, (5, torch.ones(1)))
    assert back["b"][0] == ("b/0", other, {"value": 6})
    assert back["d"][0] is tree["d"]


def test_a_tensor_inside_and_outside_of_an_object_is_restored_as_one() -> None:
    weight = torch.ones(2)
    back = through([weight, Stateful(weight), weight], like=[None, Stateful(None), None])
    assert back[0] is back[1].value
    assert back[0] is back[2]


def test_no_object_is_changed_before_the_whole_document_was_read() -> None:
    document, stored = written(encode([Stateful(1), torch.zeros(2)]))
    like: list[Any] = [Stateful(0), torch.zeros(2)]
    with pytest.raises(DamagedCheckpointError):
        decode(document, {}, like=like)
    assert like[0].value == 0
    with pytest.raises(CheckpointMismatchError, match="no load_state_dict") as caught:
        decode(document, stored, like=[object(), None])
    assert [row.path for row in caught.value.rows] == ["0"]


# --- classes -------------------------------------------------------------------------------------


def test_local_classes_come_from_like() -> None:
    class Local(NamedTuple):
        x: Any

    document, stored = written(encode({"a": [Local(1)]}))
    with pytest.raises(CheckpointError, match="Import the module before loading, or load into a tree"):
        decode(document, stored)
    assert type(decode(document, stored, like={"a": [Local(2)]})["a"][0]) is Local


def test_a_field_added_to_a_namedtuple_gets_its_default() -> None:
    document, stored = written(encode(Point(torch.ones(1), 2)))
    del document["keys"][1], document["items"][1]
    assert decode(document, stored, like=Point(0))[1] == 0
    assert match(document, stored, Point(torch.ones(1), None)).rows == []
    result = match(document, stored, Point(torch.ones(1), torch.ones(1))).rows
    assert [row.path for row in result] == ["y"]
    document["keys"] = ["y"]  # x has none
    with pytest.raises(CheckpointError, match="has the fields"):
        decode(document, stored, like=Point(0))


def test_no_module_is_imported_for_a_file() -> None:
    name = "this"  # prints a poem when it is imported
    assert name not in sys.modules
    wrong = ("accelfn:init_context", "os:system", "builtins:eval", "builtins:dict", "x", "", ":")
    rest: dict[str, Any] = {"value": "a", "items": [], "metadata": 0}
    for of in (f"{name}:Zen", *wrong):
        for kind in ("namedtuple", "enum", "node"):
            with pytest.raises(CheckpointError):
                decode({"$": kind, "of": of, **rest}, {})
    assert name not in sys.modules


def test_finding_a_class_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    lazy = types.ModuleType("accelfn_lazy")
    vars(lazy)["__getattr__"] = calls.append
    monkeypatch.setitem(sys.modules, "accelfn_lazy", lazy)
    with pytest.raises(CheckpointError, match="doesn't have"):
        decode({"$": "enum", "of": "accelfn_lazy:Color", "value": "RED"}, {})
    assert calls == []


# --- refusals ------------------------------------------------------------------------------------


class Small(int):
    pass


class Tagged(torch.Tensor):
    pass


def circle() -> list[Any]:
    result: list[Any] = []
    result.append({"again": result})
    return result


def deep(levels: int) -> Any:
    result: Any = 1
    for _ in range(levels):
        result = OrderedDict({1: result})
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: lambda: 0, "builtins.function, which isn't known"),
        (lambda: Stateful, "builtins.type, which isn't known"),
        (lambda: object(), "builtins.object, which isn't known"),
        (lambda: Small(3), "Small, which isn't known"),
        (lambda: slice(3), "slice, which isn't known"),
        (lambda: 1 << 2000, "more than 1024 bits"),
        (lambda: "\ud800", "lone surrogate"),
        (lambda: torch.zeros(2, device="meta"), "has no data"),
        (lambda: torch.zeros(2).as_subclass(Tagged), "as_subclass"),
        (lambda: torch.nn.UninitializedParameter(), "more than its elements"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize"),
        (lambda: torch.zeros(2).to_sparse(), "to_dense"),
        (lambda: constructors.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind"),
        (lambda: np.array(["text"]), "torch lacks"),
        (lambda: np.zeros(1, ">f4"), "torch lacks"),
        (lambda: np.str_("text"), "value.item"),
        (lambda: np.ma.masked_array([1]), "which isn't known"),
        (lambda: {1: 2, Point(1): 2}, "as a key"),
        (lambda: {torch.zeros(1)}, "as a key or a member"),
        (lambda: defaultdict[int, int](lambda: 0), "factory can be one of list, dict"),
        (lambda: circle(), "contains itself"),
        (lambda: deep(65), "in more than 64 others"),
    ],
)
def test_values_that_cannot_be_stored_are_refused_by_path(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(TypeError, match=why) as caught:
        encode({"fine": 1, "model/x": [make()], "last": object()}, namespace=NAMESPACE)
    text = str(caught.value)
    assert text.startswith("2 values of the tree can't be stored")
    assert "\n  model~1x/0" in text
    assert "\n  last: a builtins.object" in text
    assert "state_dict() and load_state_dict()" in text
    assert "optree.register_pytree_node" in text


def test_a_tree_of_the_maximal_depth_survives_a_round_trip() -> None:
    assert same(deep(64), through(deep(64)))


# --- hostile documents ---------------------------------------------------------------------------

JUNK: st.SearchStrategy[Any] = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=3)),
    st.sampled_from((10**30, "float32", "tree", "0", "torch:Tensor", "builtins:eval", "0x1p", "F" * 9)),
    st.sampled_from(([], {}, [[]], {"$": 3}, {"$": "tensor"}, {"$": [1]}, {"$": "nothing"})),
)
ALL_KINDS = sorted({*LEAVES, *PLAIN_KINDS, *KINDS.values(), "namedtuple", "node", "object"})


def is_harmless(read: Callable[[], Any]) -> bool:
    """Whether reading succeeds, or raises one of the two expected errors."""
    try:
        read()
    except CheckpointError as error:
        return isinstance(error, DamagedCheckpointError) or "doesn't have" in str(error)
    return True


def places(node: Any) -> list[tuple[Any, Any]]:
    """List all pairs of a container in a document and one of its keys."""
    items: Any = ()
    if isinstance(node, (dict, list)):
        items = cast("Any", node.items() if isinstance(node, dict) else enumerate(cast("list[Any]", node)))
    result: list[tuple[Any, Any]] = []
    for key, child in list(items):
        result += [(node, key), *places(child)]
    return result


@settings(max_examples=4 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), st.data())
def test_a_malformed_document_raises_only_checkpoint_errors(tree: Any, data: st.DataObject) -> None:
    document, stored = written(encode(tree, namespace=NAMESPACE))
    document = [document]
    for _ in range(data.draw(st.integers(1, 3))):
        result = places(document)
        owner, key = result[data.draw(st.integers(0, len(result) - 1))]
        change = data.draw(st.sampled_from(("junk", "deleted", "kind")))
        if change == "deleted" and isinstance(owner, dict):
            del owner[key]
        elif change == "kind" and isinstance(owner, dict):
            owner["$"] = data.draw(st.sampled_from(ALL_KINDS))
        else:
            owner[key] = copy.deepcopy(data.draw(JUNK))
    modules = set(sys.modules)
    for read in (
        lambda: decode(document, stored, namespace=NAMESPACE),
        lambda: decode(document, stored, like=[tree], namespace=NAMESPACE),
        lambda: match(document, stored, [tree], namespace=NAMESPACE),
    ):
        assert is_harmless(read)
    assert set(sys.modules) == modules


MALFORMED: list[Any] = [
    math.inf,
    object(),
    {"$": "tensor", "name": "no"},
    {"$": "tensor", "name": "t", "stride": [2]},
    {"$": "tensor", "name": "t", "stride": [0]},
    {"$": "tensor", "name": "t", "stride": [10**30]},
    {"$": "tensor", "name": "i", "requires_grad": True},
    {"$": "numpy", "dtype": "O", "value": "AAAAAAAAAAA="},
    {"$": "generator", "name": "t", "device": "cpu"},
    {"$": "dict", "keys": [{"$": "set", "items": []}], "items": [1]},
    {"$": "dict", "keys": [1], "items": []},
    {"$": "dict", "keys": [1, 1], "items": [1, 2]},
    {"$": "deque", "items": [1, 2], "maxlen": 1},
    {"$": "defaultdict", "factory": "eval", "keys": [], "items": []},
    {"$": "object", "of": "a:b"},
    {"$": "device", "value": "cpu; rm"},
    {"$": "dtype", "value": "__name__"},
]


@pytest.mark.parametrize("document", MALFORMED)
def test_malformed_nodes_are_damaged(document: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="'tree'"):
        decode(document, {"t": torch.zeros(4), "i": torch.zeros(4, dtype=torch.int32)})


def test_documents_that_nest_too_deep_are_damaged() -> None:
    document: Any = 1
    for _ in range(100_000):
        document = [document]
    for read in (lambda: decode(document, {}), lambda: match(document, {}, 1)):
        with pytest.raises(DamagedCheckpointError, match="too deep"):
            read()
    while isinstance(document, list):  # a destructor would recurse
        document = cast("list[Any]", document)[0]
