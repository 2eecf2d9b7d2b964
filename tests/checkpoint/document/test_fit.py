"""What of a stored tree fits the one to load into."""

import json
from collections import OrderedDict
from typing import Any, cast

import numpy
import pytest
import torch
from hypothesis import given, settings

from accelfn.checkpoint.document.document import encode
from accelfn.checkpoint.document.fit import compare, describe_like, targets
from accelfn.errors import DamagedCheckpointError, Misfit
from accelfn.testing import run_ranks
from accelfn.testing.strategies import trees as trees_of_tensors
from tests.checkpoint.trees import NAMESPACE, Pair, Point, trees

np = cast("Any", numpy)


def misfits(stored: Any, like: Any, **options: Any) -> list[Misfit]:
    document = json.loads(json.dumps(encode(stored, namespace=NAMESPACE).document))
    return list(compare(document, describe_like(like, namespace=NAMESPACE, **options)))


class Stateful:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


@given(trees())
def test_a_tree_fits_itself(tree: Any) -> None:
    assert misfits(tree, tree) == []


def test_tensors_fit_by_shape_and_dtype_alone() -> None:
    stored = {"w": torch.nn.Parameter(torch.zeros(2, 3)), "n": np.zeros(2)}
    assert misfits(stored, {"w": torch.ones(3, 2, device="meta").t(), "n": np.ones(2)}) == []


def test_plain_subtrees_are_free() -> None:
    stored = {"w": torch.zeros(1), "log": {"a": [1, 2], "b": "x"}, "step": 3}
    assert misfits(stored, {"w": torch.zeros(1), "log": (), "step": None}) == []


def test_every_misfit_is_listed_by_path() -> None:
    stored = {
        "same": torch.zeros(1),
        "shape": torch.zeros(2),
        "dtype": torch.zeros(3),
        "extra": [torch.zeros(4)],
        "none": None,
        "kind": [torch.zeros(5)],
        "short": (torch.zeros(1),),
        "a/b": np.zeros(1),
        "step": 1,
    }
    like = {
        "same": torch.zeros(1),
        "shape": torch.zeros(2, 2),
        "dtype": torch.zeros(3).int(),
        "none": torch.zeros(1),
        "kind": (torch.zeros(5),),
        "short": (torch.zeros(1), {"x": torch.zeros(2), "y": 1}),
        "a/b": torch.zeros(1),
        "missing": Stateful(1),
    }
    assert misfits(stored, like) == [
        Misfit("shape", "float32 [2]", "float32 [2, 2]"),
        Misfit("dtype", "float32 [3]", "int32 [3]"),
        Misfit("extra/0", "float32 [4]", "nothing"),
        Misfit("none", "None", "float32 [1]"),
        Misfit("kind", "a list of 1", "a tuple"),
        Misfit("short/1/x", "nothing", "float32 [2]"),
        Misfit("short/1/y", "nothing", "int"),
        Misfit("a~1b", "array float64 [1]", "float32 [1]"),
        Misfit("step", "int", "nothing"),
        Misfit("missing", "nothing", "an object Stateful"),
    ]
    assert misfits(torch.zeros(1), torch.zeros(2)) == [Misfit("tree", "float32 [1]", "float32 [2]")]


def test_containers_have_to_be_the_same() -> None:
    one = torch.zeros(1)
    pairs: list[tuple[Any, Any]] = [
        ({"a": one}, OrderedDict(a=one)),
        ((one, 0), Point(one)),
        ([one], one),
        (Pair(one, 1), (one, 1)),
        (one.to_sparse(), one),
        ({"a": one}, Stateful({"a": one})),
    ]
    for stored, like in pairs:
        assert [row.path for row in misfits(stored, like)] == ["tree"]
        assert [row.path for row in misfits([stored], [like])] == ["0"]


def test_objects_are_closed_unless_they_are_asked_for() -> None:
    stored, like = {"o": Stateful({"a": torch.zeros(1)})}, {"o": Stateful({"a": torch.zeros(2), "b": 1})}
    assert misfits(stored, like) == []
    assert misfits({"o": 1}, like) == [Misfit("o", "int", "an object Stateful")]
    asked: list[str] = []

    def inside(path: str, value: Any) -> bool:
        asked.append(path)
        return value is like["o"]

    assert [row.path for row in misfits(stored, like, inside=inside)] == ["o/a", "o/b"]
    assert asked == ["o"]
    # A state may be loaded into a tree that looks like it.
    assert misfits(stored, {"o": {"a": torch.zeros(1)}}) == []
    assert [row.path for row in misfits(stored, {"o": {"a": torch.zeros(2)}})] == ["o/a"]


def test_shared_tensors_are_compared_where_they_are_referred_to() -> None:
    tied, other = torch.zeros(2), torch.zeros(3)
    assert misfits([tied, tied], [torch.zeros(2), torch.zeros(2)]) == []
    assert misfits([torch.zeros(2), torch.zeros(2)], [tied, tied]) == []
    assert [row.path for row in misfits([tied, tied], [tied, other])] == ["1"]


@settings(max_examples=10)
@given(trees_of_tensors())
def test_every_stored_tensor_has_its_target(tree: Any) -> None:
    namespace = "accelfn.tests.unused"
    try:
        document, tensors = encode(tree, namespace=namespace)
    except TypeError:  # a dataclass, which isn't registered
        return
    found = targets(document, describe_like(tree, namespace=namespace))
    assert {target.name for target in found} == set(tensors)
    assert all(target.leaf is not None for target in found)
    for target in found:
        if target.whole:
            assert tensors[target.name].shape == target.leaf.shape


def test_targets_say_where_tensors_go() -> None:
    base, generator = torch.zeros(4), torch.Generator()
    document, _ = encode(
        {"a": base[:3], "b": base[1:], "g": generator, "n": np.zeros(2), "o": Stateful([base])}
    )
    like = {"a": torch.ones(3), "b": torch.ones(3), "g": generator}
    assert [target[:2] for target in targets(document)] == [
        *(("a", "o/0"), ("b", "o/0"), ("g", "g"), ("n", "n"), ("o/0", "o/0"))
    ]
    found = targets(document, describe_like(like))
    assert [target.leaf is like.get(target.path) for target in found] == [True] * 5
    assert [target.whole for target in found] == [False, False, True, True, False]


def test_malformed_documents_are_damaged() -> None:
    wanted = describe_like([torch.zeros(1)])
    for document in ([{"$": "tensor"}], {"$": "what"}, {"$": "again", "id": 4}, {"$": "dict", "keys": 3}):
        with pytest.raises(DamagedCheckpointError):
            (targets if "$" not in document else compare)(document, wanted)


def _distributed(ctx: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from accelfn.checkpoint.document.document import decode

    mesh = init_device_mesh("cpu", (ctx.world.size,))
    weight = torch.nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    tree = {"w": weight, "tied": weight, "alias": weight.detach(), "plain": torch.zeros(1)}
    document, tensors = encode(tree)
    assert list(tensors) == ["w", "plain"]
    assert isinstance(tensors["w"], DTensor)
    back = decode(json.loads(json.dumps(document)), tensors)
    assert back["w"] is back["tied"]
    assert isinstance(back["w"], DTensor)
    assert isinstance(back["w"], torch.nn.Parameter)
    assert back["alias"].to_local().data_ptr() == back["w"].to_local().data_ptr()
    # A checkpoint of distributed tensors loads as whole ones, and the other way.
    assert decode(document, {"w": torch.arange(4.0), "plain": torch.zeros(1)})["w"].tolist() == [0, 1, 2, 3]
    whole = encode({name: torch.zeros(leaf.shape) for name, leaf in tree.items()}).document
    assert compare(whole, describe_like(tree)) == ()
    assert targets(whole, describe_like(tree))[0].leaf is weight


def test_distributed_tensors_stay_leaves() -> None:
    run_ranks(_distributed, 2, on="processes")
