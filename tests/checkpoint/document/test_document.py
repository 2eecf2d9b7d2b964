"""Any tree comes back bit for bit, what doesn't fit is listed by path, and malformed documents do no harm."""

import copy
import sys
import tempfile
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.checkpoint.document.nodes import KINDS, LEAVES, PLAIN_KINDS
from accelfn.errors import CheckpointError, CheckpointMismatchError, DamagedCheckpointError, Misfit
from tests.checkpoint import reader
from tests.checkpoint.small import Stateful, rewrite, said
from tests.checkpoint.trees import (
    CLASSES,
    DTYPES,
    NAMESPACE,
    Pair,
    Point,
    arrays,
    plain_values,
    same,
    tensors,
    trees,
)

np = cast("Any", numpy)  # partly untyped
constructors = cast("Any", torch)  # partly untyped


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "at"


def save(path: Path, tree: Any) -> Path:
    return af.save_tree(path, tree, namespace=NAMESPACE)


def load(path: Path, like: Any = None) -> Any:
    return af.load_tree(path, like, namespace=NAMESPACE)


def put(path: Path, document: Any) -> None:
    """Put another tree into a checkpoint."""
    rewrite(path, lambda manifest: manifest.update(tree=document))


# --- round trips ---------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(trees(), plain_values(), tensors(), arrays()))
def test_any_tree_comes_back_also_by_the_reader_that_knows_only_the_page(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "at", tree)
        found = load(path)
        assert same(tree, found)
        assert same(tree, load(path, tree))
        assert same(found, reader.read(path, classes=CLASSES))


def test_every_dtype_comes_back(at: Path) -> None:
    assert len(DTYPES) > 30
    content = {dtype: torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2 for dtype in DTYPES}
    tree = {
        str(dtype): (bits.view(dtype).view(2, 3), bits.view(dtype).view(2, 3).T)
        for dtype, bits in content.items()
    }
    assert same(tree, load(save(at, tree)))


def test_documents_are_plain_json_with_tensors_by_path(at: Path) -> None:
    assert list({0, 8}) != list({8, 0})
    zero = [torch.zeros(1) for _ in range(5)]
    plain = {"step": 3, "rates": [0.5, None, True], "set": {8, 0}}
    tree = {**plain, "a/b": {"~": zero[0]}, 1: zero[1], "1": zero[2], "": [zero[3]], "__metadata__": zero[4]}
    manifest = said(save(at, tree))
    assert set(manifest["tensors"]) == {"a~1b/~0", "1", "1~2", "/0", "__metadata__~2"}
    values: list[Any] = manifest["tree"]["items"]
    assert values[:2] == [3, [0.5, None, True]]
    assert values[2]["items"] == [0, 8]
    assert values[3] == {"~": {"$": "tensor", "name": "a~1b/~0"}}
    assert set(said(save(at, torch.zeros(1)))["tensors"]) == {"tree"}


def deep(levels: int) -> Any:
    result: Any = 1
    for _ in range(levels):
        result = OrderedDict({1: result})
    return result


# --- sharing -------------------------------------------------------------------------------------


def test_a_repeated_tensor_comes_back_as_one_and_views_by_value(at: Path) -> None:
    weight, array, generator = torch.nn.Parameter(torch.ones(2, 2)), np.zeros(2), torch.Generator()
    tree = [(weight, array, generator), {"again": [weight, array, generator]}, weight[0], weight.detach().t()]
    assert set(said(save(at, tree))["tensors"]) == {"0/0", "0/1", "0/2", "2", "3"}
    first, second, part, turned = load(at)
    assert all(one is other for one, other in zip(first, second["again"], strict=True))
    assert part.equal(torch.ones(2))
    assert turned.is_leaf
    turned.zero_()
    assert first[0].sum() == 4


def test_tied_weights_are_stored_once_and_tied_again(at: Path) -> None:
    embed, head = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False)
    head.weight = embed.weight
    save(at, {"model": torch.nn.Sequential(embed, head), "ema": torch.zeros(1)})
    assert set(said(at)["tensors"]) == {"model/0.weight", "ema"}
    state = load(at)["model"]
    state["0.weight"].zero_()[0] = 7
    assert state["1.weight"][0].tolist() == [7, 7]


# --- objects and classes -------------------------------------------------------------------------


def test_an_object_is_stored_by_its_state_and_loaded_in_place(at: Path) -> None:
    weight = torch.ones(2)
    save(at, {"counter": Stateful(3), "weights": (weight, Stateful([weight]))})
    assert load(at)["counter"] == {"value": 3}
    like: dict[str, Any] = {"counter": Stateful(0), "weights": (torch.zeros(2), Stateful(None))}
    back = load(at, like)
    assert back["counter"] is like["counter"]
    assert back["counter"].value == 3
    assert back["weights"][1] is like["weights"][1]
    assert back["weights"][1].value[0] is back["weights"][0]
    assert back["weights"][0].equal(weight)


def test_local_classes_come_from_like(at: Path) -> None:
    class Local(NamedTuple):
        x: Any

    save(at, {"a": [Local(1)]})
    with pytest.raises(CheckpointError, match="Import the module before loading, or load into a tree"):
        load(at)
    assert type(load(at, {"a": [Local(2)]})["a"][0]) is Local


def test_a_field_added_to_a_namedtuple_gets_its_default(at: Path) -> None:
    def shorten(manifest: dict[str, Any]) -> None:
        del manifest["tree"]["keys"][1], manifest["tree"]["items"][1]

    rewrite(save(at, Point(torch.ones(1), 2)), shorten)
    assert load(at, Point(torch.zeros(1), None))[1] == 0
    assert [row.path for row in misfits(at, Point(torch.ones(1), torch.ones(1)))] == ["y"]
    rewrite(at, lambda manifest: manifest["tree"].update(keys=["y"]))  # x has no default
    assert "x" in [row.path for row in misfits(at, Point(0))]


def test_no_module_is_imported_for_a_file_and_no_code_runs(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    lazy = types.ModuleType("accelfn_lazy")
    vars(lazy)["__getattr__"] = calls.append
    monkeypatch.setitem(sys.modules, "accelfn_lazy", lazy)
    assert "this" not in sys.modules  # it prints a poem when it is imported
    wrong = ("this:Zen", "accelfn:init_context", "os:system", "builtins:eval", "builtins:dict", "x", "", ":")
    save(at, 0)
    for of in (*wrong, "accelfn_lazy:Color"):
        for kind in ("namedtuple", "enum", "node"):
            put(at, {"$": kind, "of": of, "value": "a", "items": [], "metadata": 0})
            with pytest.raises(CheckpointError):
                load(at)
    assert "this" not in sys.modules
    assert calls == []


# --- what doesn't fit ----------------------------------------------------------------------------


def misfits(path: Path, like: Any) -> tuple[Misfit, ...]:
    try:
        load(path, like)
    except CheckpointMismatchError as error:
        return error.rows
    return ()


def test_tensors_fit_by_shape_and_dtype_and_plain_subtrees_may_differ(at: Path) -> None:
    save(at, {"w": torch.zeros(2, 3), "n": np.zeros(2), "tied": [torch.zeros(1)] * 2, "log": {"a": [1]}})
    tied = [torch.ones(1), torch.ones(1)]
    like = {"w": torch.ones(3, 2, device="meta").t(), "n": np.ones(2), "tied": tied, "log": ()}
    assert load(at, like)["log"] == {"a": [1]}


def test_all_that_does_not_fit_is_listed_by_path_and_nothing_is_changed(at: Path) -> None:
    zeros, untouched = torch.zeros(1), Stateful(0)
    stored = {
        "same": zeros,
        "shape": torch.zeros(2),
        "dtype": zeros,
        "extra": [zeros],
        "none": None,
        "kind": [zeros],
        "short": (zeros,),
        "a/b": np.zeros(1),
        "step": 1,
        "random": torch.Generator(),
        "object": Stateful(1),
        "state": Stateful(zeros),
    }
    like = {
        "same": zeros,
        "shape": torch.zeros(2, 2),
        "dtype": zeros.int(),
        "none": zeros,
        "kind": (zeros,),
        "short": (zeros, {"x": torch.zeros(2), "y": 1}),
        "a/b": zeros,
        "missing": Stateful(1),
        # The state of an object may be taken up as a plain tree.
        "random": 3,
        "object": untouched,
        "state": {"value": torch.zeros(2)},
    }
    assert misfits(save(at, stored), like) == (
        Misfit("shape", "float32 [2]", "float32 [2, 2]"),
        Misfit("dtype", "float32 [1]", "int32 [1]"),
        Misfit("extra/0", "float32 [1]", "nothing"),
        Misfit("none", "None", "float32 [1]"),
        Misfit("kind", "a list of 1", "a tuple"),
        Misfit("short/1/x", "nothing", "float32 [2]"),
        Misfit("short/1/y", "nothing", "int"),
        Misfit("a~1b", "array float64 [1]", "float32 [1]"),
        Misfit("step", "int", "nothing"),
        Misfit("random", "a generator", "int"),
        Misfit("state/value", "float32 [1]", "float32 [2]"),
        Misfit("missing", "nothing", "an object Stateful"),
    )
    assert untouched.value == 0


LEAF = torch.zeros(1)
PAIRS: list[tuple[Any, Any]] = [
    ({"a": LEAF}, OrderedDict(a=LEAF)),
    ((LEAF, 0), Point(LEAF)),
    ([LEAF], LEAF),
    (Pair(LEAF, 1), (LEAF, 1)),
    ({"a": LEAF}, Stateful({"a": LEAF})),
    (1, Stateful(None)),
    (Stateful(1), 1),
    (Stateful(1), object()),
    (LEAF, torch.zeros(2)),
]


@pytest.mark.parametrize(("stored", "like"), PAIRS)
def test_containers_and_objects_must_have_the_same_class(at: Path, stored: Any, like: Any) -> None:
    assert [row.path for row in misfits(save(at, stored), like)] == ["tree"]
    assert [row.path for row in misfits(save(at, [stored]), [like])] == ["0"]


# --- what can't be stored ------------------------------------------------------------------------


class Small(int):
    pass


class Tagged(torch.Tensor):
    pass


def circle() -> list[Any]:
    result: list[Any] = []
    result.append({"again": result})
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: lambda: 0, "builtins.function, which isn't known"),
        (lambda: Stateful, "builtins.type, which isn't known"),
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
        (lambda: np.datetime64("2020-01-01"), r"datetime64; store str\(value\)"),
        (lambda: np.ma.masked_array([1]), "which isn't known"),
        (lambda: {1: 2, Point(1): 2}, "as a key"),
        (lambda: {torch.zeros(1)}, "as a key or a member"),
        (lambda: defaultdict[int, int](lambda: 0), "factory can be one of list, dict"),
        (lambda: circle(), "contains itself"),
        (lambda: deep(65), "in more than 64 others"),
    ],
)
def test_values_that_cannot_be_stored_are_refused_by_path(
    at: Path, make: Callable[[], Any], why: str
) -> None:
    with pytest.raises(TypeError, match=why) as caught:
        save(at, {"fine": 1, "model/x": [make()], "last": object()})
    text = str(caught.value)
    assert text.startswith("2 values of the tree can't be stored")
    assert "\n  model~1x/0" in text
    assert "\n  last: a builtins.object" in text
    assert "state_dict() and load_state_dict()" in text
    assert "optree.register_pytree_node" in text
    assert not at.exists()


# --- hostile documents ---------------------------------------------------------------------------

JUNK: st.SearchStrategy[Any] = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 9), st.floats(allow_nan=False), st.text(max_size=3)),
    st.sampled_from((10**30, "float32", "tree", "0", "torch:Tensor", "builtins:eval", "0x1p", "F" * 9)),
    st.sampled_from(([], {}, [[]], {"$": 3}, {"$": "tensor"}, {"$": [1]}, {"$": "nothing"})),
)
ALL_KINDS = sorted({*LEAVES, *PLAIN_KINDS, *KINDS.values(), "namedtuple", "node", "object"})


def is_harmless(read: Callable[[], Any]) -> bool:
    """Whether reading succeeds, or raises one of the expected errors."""
    try:
        read()
    except CheckpointMismatchError:
        return True
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


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(trees(), st.data())
def test_a_malformed_document_raises_only_checkpoint_errors(tree: Any, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "at", [tree])
        document = said(path)["tree"]
        for _ in range(data.draw(st.integers(1, 3))):
            owner, key = data.draw(st.sampled_from(places(document)))
            change = data.draw(st.sampled_from(("junk", "deleted", "kind")))
            if change == "deleted" and isinstance(owner, dict):
                del owner[key]
            elif change == "kind" and isinstance(owner, dict):
                owner["$"] = data.draw(st.sampled_from(ALL_KINDS))
            else:
                owner[key] = copy.deepcopy(data.draw(JUNK))
        put(path, document)
        modules = set(sys.modules)
        assert is_harmless(lambda: load(path))
        assert is_harmless(lambda: load(path, [tree]))
        assert set(sys.modules) == modules


MALFORMED: list[Any] = [
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


@pytest.mark.parametrize("document", MALFORMED, ids=str)
def test_malformed_nodes_are_damaged(at: Path, document: Any) -> None:
    like = {"t": torch.zeros(4), "i": torch.zeros(4, dtype=torch.int32)}
    rewrite(save(at, like), lambda manifest: manifest["tree"].update(t=document))
    for target in (None, like):
        with pytest.raises(CheckpointError):
            load(at, target)
