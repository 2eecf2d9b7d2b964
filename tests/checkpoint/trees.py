"""Trees of everything that a checkpoint can hold, and whether two are the same to the last bit."""

import datetime
import enum
import math
import pathlib
import struct
import uuid
import zoneinfo
from collections import OrderedDict, defaultdict, deque
from decimal import Decimal
from typing import Any, NamedTuple, cast

import numpy
import optree
import torch
from hypothesis import strategies as st

from accelfn.checkpoint.files.stored_dtype import contiguous_copy, copyable, is_storable
from accelfn.comm.wire import as_bytes

np = cast("Any", numpy)  # its stubs leave much open
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


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Pair:
    """Registered with optree, with children under names and metadata."""

    def __init__(self, left: Any, right: Any, label: Any = None) -> None:
        self.left, self.right, self.label = left, right, label


def _flatten_pair(pair: Pair) -> tuple[tuple[Any, Any], Any, tuple[str, str]]:
    return (pair.left, pair.right), pair.label, ("left", "right")


def _unflatten_pair(label: Any, children: Any) -> Pair:
    left, right = children
    return Pair(left, right, label)


cast("Any", optree).register_pytree_node(Pair, _flatten_pair, _unflatten_pair, namespace=NAMESPACE)


def raw(tensor: torch.Tensor) -> bytes:
    plain = contiguous_copy(tensor.detach()).reshape(-1)
    return as_bytes(plain.view(torch.uint8)) if plain.numel() else b""


def same(one: Any, other: Any) -> bool:
    """Whether two trees are the same: classes, structure, dtypes, shapes, strides and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return same_tensor(one, other)
    if type(one) is int:
        return one == other
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, Decimal):
        return one.as_tuple() == other.as_tuple()
    if isinstance(one, np.ndarray):
        return same_array(one, other)
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
    if isinstance(one, (datetime.datetime, datetime.time)):
        return one.isoformat() == other.isoformat() and same(
            [one.fold, repr(one.tzinfo)], [other.fold, repr(other.tzinfo)]
        )
    if isinstance(one, (set, frozenset)):
        members = cast("set[Any]", one)
        return members == other and sorted(map(repr, members)) == sorted(map(repr, other))
    return bool(one == other) and repr(one) == repr(other)


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    facts = [(item.dtype, item.shape, item.layout, item.requires_grad, item.device) for item in (one, other)]
    if facts[0] != facts[1]:
        return False
    if one.layout is torch.sparse_coo:
        return (
            one.is_coalesced() == other.is_coalesced()
            and raw(one._indices()) == raw(other._indices())
            and raw(one._values()) == raw(other._values())
        )
    if one.layout is not torch.strided:
        rows = one.layout in (torch.sparse_csr, torch.sparse_bsr)
        names = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
        return all(raw(getattr(one, name)()) == raw(getattr(other, name)()) for name in (*names, "values"))
    return raw(one) == raw(other) and steps(other) == steps(one, kept=True)


def steps(tensor: torch.Tensor, *, kept: bool = False) -> list[int]:
    """Strides of the dimensions that have any; with ``kept`` those that a tensor comes back with."""
    stride = tensor.stride()
    if kept and len({*offsets(tensor)}) == tensor.numel():  # no element lies over another
        stride = copyable(tensor.detach()).clone().stride()
    return [step for step, size in zip(stride, tensor.shape, strict=True) if size > 1 and tensor.numel()]


def offsets(tensor: torch.Tensor) -> list[int]:
    found = [0]
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = [start + index * step for start in found for index in range(size)]
    return found


def same_array(one: Any, other: Any) -> bool:
    facts = [(item.dtype, item.shape, item.flags.writeable) for item in (one, other)]
    order = [(item.flags.c_contiguous, item.flags.f_contiguous) for item in (one, other)]
    dense = any(order[0]) <= (order[0] == order[1])  # gaps are squeezed out, and what is dense stays so
    turned = any(step < 0 for step in one.strides)  # torch has no such strides, also where they lead nowhere
    return facts[0] == facts[1] and (dense or turned) and one.tobytes() == other.tobytes()


# --- strategies ----------------------------------------------------------------------------------

ZONES = st.one_of(
    st.none(),
    st.just(datetime.timezone.utc),
    st.builds(
        datetime.timezone,
        st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
    ),
    st.just(datetime.timezone(datetime.timedelta(hours=1), "winter")),
    st.sampled_from(("Europe/Berlin", "UTC", "America/New_York")).map(zoneinfo.ZoneInfo),
)


def _folded(moment: Any, fold: int) -> Any:
    return moment.replace(fold=fold)


def surrogates() -> st.SearchStrategy[str]:
    return st.text(st.characters(), max_size=4) | st.text("a\ud83d\ude00\udcff/~$é", max_size=4)


def hashables() -> st.SearchStrategy[Any]:
    """Plain values that can be keys, without nan, which is never equal to itself."""
    leaf = st.one_of(
        *(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False),
            surrogates(),
            st.binary(max_size=4),
        ),
        st.complex_numbers(allow_nan=False),
        st.sampled_from((*Color, *Number, *Word, *Rights, Rights.READ | Rights.WRITE)),
        *(st.fractions(), st.uuids(), st.dates(), st.timedeltas()),
        st.decimals(allow_nan=False),
        st.sampled_from((torch.float32, torch.device("cpu"), torch.device("cuda", 3), torch.Size((2, 3)))),
        st.sampled_from((pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("é"))),
    )
    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)


def plain_values() -> st.SearchStrategy[Any]:
    return st.one_of(
        hashables(),
        st.floats(),
        st.integers().map(lambda number: number << 20000),
        st.integers(0, (1 << 64) - 1).map(lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0]),
        st.complex_numbers(),
        st.decimals(),
        st.binary(max_size=5).map(bytearray),
        st.builds(_folded, st.datetimes(timezones=ZONES, allow_imaginary=True), st.integers(0, 1)),
        st.builds(_folded, st.times(timezones=ZONES), st.integers(0, 1)),
        st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
        st.slices(5),
        st.sampled_from((torch.strided, torch.sparse_csr, torch.channels_last, datetime.timezone.utc)),
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
    dtypes = ("f4", ">f4", "?", "i1", "u8", "c16", "f2", "M8[ns]", "m8[s]", "U3", "S2", "V3", "g", "a0")
    described: Any = draw(st.sampled_from((*dtypes, [("a", "<i4"), ("b", ">f8", (2,))])))
    dtype = np.dtype("S0") if described == "a0" else np.dtype(described)
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    if dtype.kind in "?bU":  # not every bit pattern is a value
        array = np.ones(shape, dtype)
    else:
        content = bytearray(draw(st.binary(min_size=size, max_size=size)))
        array = np.ndarray(shape, dtype, content) if size else np.empty(shape, dtype)
    array = np.asfortranarray(array) if draw(st.booleans()) and shape else array
    array = array[..., ::-1] if draw(st.booleans()) and shape else array
    if draw(st.booleans()):
        array = array.copy(order="K")
        array.flags.writeable = False
    return array


def leaves() -> st.SearchStrategy[Any]:
    scalars = (
        arrays()
        .filter(lambda array: array.size > 0 and array.dtype.kind != "V")
        .map(lambda array: array.reshape(-1)[0])
    )
    generators = st.integers(0, 99).map(lambda seed: torch.Generator().manual_seed(seed))
    return st.one_of(plain_values(), tensors(), tensors(), arrays(), scalars, generators)


def _bounded(items: list[Any], extra: int) -> deque[Any]:
    return deque(items, len(items) + extra)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    texts = st.dictionaries(surrogates(), inner, max_size=3)
    items = st.lists(inner, max_size=3)
    return st.one_of(
        *(texts, items, items.map(tuple), st.dictionaries(hashables(), inner, max_size=3)),
        texts.map(lambda found: OrderedDict(found)),
        texts.map(lambda found: defaultdict(list, found)),
        st.builds(Point, inner, inner),
        st.builds(_bounded, items, st.integers(0, 2)),
        items.map(deque),
        st.builds(Pair, inner, inner, plain_values()),
        st.just(uuid.UUID(int=3)),
    )


def trees() -> st.SearchStrategy[Any]:
    return st.recursive(leaves(), _containers, max_leaves=6)
