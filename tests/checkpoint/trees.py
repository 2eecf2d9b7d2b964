"""Random trees of everything that a checkpoint can hold, and their comparison bit for bit."""

import enum
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy
import optree
import torch
from hypothesis import strategies as st

from accelfn.comm.agreement import as_bytes
from accelfn.weights.dtypes import contiguous_copy, copyable, is_storable

np = cast("Any", numpy)  # partly untyped
NAMESPACE = "accelfn.tests.checkpoint"
DTYPES = tuple(
    dtype
    for dtype in dict.fromkeys(value for value in vars(torch).values() if type(value) is torch.dtype)
    if is_storable(dtype)
)


class Color(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Number(enum.IntEnum):
    ONE = 1


class Word(str, enum.Enum):
    WORD = "word"


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Pair:
    """A class registered with optree, with named children and metadata."""

    def __init__(self, left: Any, right: Any, label: Any = None) -> None:
        self.left, self.right, self.label = left, right, label


def _flatten_pair(pair: Pair) -> tuple[tuple[Any, Any], Any, tuple[str, str]]:
    return (pair.left, pair.right), pair.label, ("left", "right")


def _unflatten_pair(label: Any, children: Any) -> Pair:
    left, right = children
    return Pair(left, right, label)


cast("Any", optree).register_pytree_node(Pair, _flatten_pair, _unflatten_pair, namespace=NAMESPACE)


# What the independent reader makes of the classes here, by their names in files.
CLASSES: dict[str, Callable[..., Any]] = {
    f"{__name__}:Point": Point,
    f"{__name__}:Pair": _unflatten_pair,
    **{f"{__name__}:{kind.__name__}": kind.__members__.__getitem__ for kind in (Color, Number, Word)},
}


def raw(tensor: torch.Tensor) -> bytes:
    plain = contiguous_copy(tensor.detach()).reshape(-1)
    return as_bytes(plain.view(torch.uint8)) if plain.numel() else b""


def same(one: Any, other: Any) -> bool:
    """Whether two trees have equal classes, structure, dtypes, shapes, strides and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return same_tensor(one, other)
    if type(one) is int:
        return one == other
    if isinstance(one, float):  # NaN equals NaN
        return repr(one) == repr(other)
    if isinstance(one, complex):
        return same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, np.ndarray):
        # Restored arrays are dense and writable.
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, Pair):
        return same([one.left, one.right, one.label], [other.left, other.right, other.label])
    if isinstance(one, torch.Generator):
        return one.get_state().equal(other.get_state()) and one.device == other.device
    if isinstance(one, dict):
        ours, theirs = cast("dict[Any, Any]", one), cast("dict[Any, Any]", other)
        factory = getattr(ours, "default_factory", None) is getattr(theirs, "default_factory", None)
        return factory and same(list(ours), list(theirs)) and same(list(ours.values()), list(theirs.values()))
    if isinstance(one, (list, tuple, deque)):
        first, second = list(cast("list[Any]", one)), list(cast("list[Any]", other))
        bound = getattr(cast("Any", one), "maxlen", None) == getattr(other, "maxlen", None)
        return bound and len(first) == len(second) and all(map(same, first, second))
    if isinstance(one, (set, frozenset)):
        members = cast("set[Any]", one)
        return members == other and sorted(map(repr, members)) == sorted(map(repr, other))
    return bool(one == other) and repr(one) == repr(other)


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    facts = [(item.dtype, item.shape, item.layout, item.requires_grad, item.device) for item in (one, other)]
    if facts[0] != facts[1]:
        return False
    return raw(one) == raw(other) and steps(other) == steps(one, kept=True)


def steps(tensor: torch.Tensor, *, kept: bool = False) -> list[int]:
    """Return the strides of dimensions of size 2 or more; with ``kept``, those of the restored tensor."""
    stride = copyable(tensor.detach()).clone().stride() if kept else tensor.stride()
    return [step for step, size in zip(stride, tensor.shape, strict=True) if size > 1 and tensor.numel()]


# --- strategies ----------------------------------------------------------------------------------


def texts() -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), max_size=4) | st.text("a/~$é", max_size=4)


def hashables() -> st.SearchStrategy[Any]:
    """Plain values that can be keys; without NaN, which isn't equal to itself."""
    leaf = st.one_of(
        *(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False),
            texts(),
            st.binary(max_size=4),
        ),
        st.complex_numbers(allow_nan=False),
        st.sampled_from((*Color, *Number, *Word)),
        st.sampled_from((torch.float32, torch.device("cpu"), torch.device("cuda", 3), torch.Size((2, 3)))),
        st.sampled_from((pathlib.Path("/a/b"), pathlib.Path("é"))),
    )
    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)


def plain_values() -> st.SearchStrategy[Any]:
    return st.one_of(
        hashables(),
        st.floats(),
        st.integers(-(1 << 1023), 1 << 1023),
        st.complex_numbers(),
        st.binary(max_size=5).map(bytearray),
        st.sets(hashables(), max_size=3),
        st.frozensets(hashables(), max_size=3),
    )


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any dtype, shape, layout of memory, and marks."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    tensor = torch.tensor(list(content), dtype=torch.uint8).view(dtype).reshape(shape)
    form = draw(st.sampled_from(("plain", "turned", "sliced", "expanded", "offset")))
    if form == "turned":
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    elif form == "sliced" and shape:
        tensor = tensor[..., :: draw(st.integers(1, 2))]
    elif form == "offset" and shape:
        tensor = tensor[1:]
    elif form == "expanded":
        tensor = tensor.expand(2, *shape)
    if dtype.is_floating_point and dtype.itemsize >= 2 and draw(st.booleans()):
        tensor.requires_grad_()
    if dtype in (torch.float32, torch.int64, torch.bfloat16) and draw(st.booleans()):
        tensor = torch.nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(("f4", "?", "i1", "u8", "c16", "f2"))))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype.kind == "b":  # not every bit pattern is a value
        array = np.ones(shape, dtype)
    else:
        array = np.ndarray(shape, dtype, content) if size else np.empty(shape, dtype)
    array = np.asfortranarray(array) if draw(st.booleans()) and shape else array
    array = array[..., ::-1] if draw(st.booleans()) and shape else array
    if draw(st.booleans()):
        array = array.copy(order="K")
        array.flags.writeable = False
    return array


def leaves() -> st.SearchStrategy[Any]:
    scalars = arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
    generators = st.integers(0, 99).map(lambda seed: torch.Generator().manual_seed(seed))
    return st.one_of(plain_values(), tensors(), tensors(), arrays(), scalars, generators)


def _bounded(items: list[Any], extra: int) -> deque[Any]:
    return deque(items, len(items) + extra)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    by_text = st.dictionaries(texts(), inner, max_size=3)
    items = st.lists(inner, max_size=3)
    return st.one_of(
        *(by_text, items, items.map(tuple), st.dictionaries(hashables(), inner, max_size=3)),
        by_text.map(lambda items: OrderedDict(items)),
        by_text.map(lambda items: defaultdict(list, items)),
        st.dictionaries(hashables(), st.integers(), max_size=3).map(Counter),
        st.builds(Point, inner, inner),
        st.builds(_bounded, items, st.integers(0, 2)),
        items.map(deque),
        st.builds(Pair, inner, inner, plain_values()),
    )


def trees() -> st.SearchStrategy[Any]:
    return st.recursive(leaves(), _containers, max_leaves=6)
