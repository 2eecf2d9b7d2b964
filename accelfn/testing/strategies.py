"""Hypothesis strategies: tensors, trees of them, worlds, one tree per rank, and schedules.

Values are small integers, so that a sum over the ranks of a world is exact in every dtype. Needs hypothesis,
so ``accelfn.testing`` loads it when a strategy is asked for: ``from accelfn.testing import rank_trees``.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, cast

import torch

from accelfn.errors import MissingExtraError
from accelfn.keys import key
from accelfn.testing.faults import Fault
from accelfn.testing.schedule import Schedule, Switch
from accelfn.tree import flatten, map_tensors

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import DrawFn, SearchStrategy
except ImportError as _error:
    raise MissingExtraError(
        "accelfn.testing.strategies needs hypothesis. Install it: pip install 'accelfn[testing]'"
    ) from _error

DTYPES = (
    *(torch.float32, torch.int64, torch.bool, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.complex64),
)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# From simple to odd: hypothesis shrinks towards the first.
_FORMS = ("contiguous", "offset", "transposed", "strided", "expanded")


class Pair(NamedTuple):
    """The namedtuple among the containers of :func:`trees`."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Sample:
    """The dataclass among the containers of :func:`trees`."""

    value: Any
    label: Any = None


class Mismatched(NamedTuple):
    """One tree per rank, of which one differs. See :func:`mismatched_trees`."""

    trees: list[Any]
    rank: int  # whose tree is the odd one
    paths: tuple[str, ...]  # where it differs; an empty path when it differs in a container, and in no leaf


def worlds(max_size: int = 5) -> SearchStrategy[int]:
    """Draw the number of ranks of a world, at least 1."""
    return st.integers(1, max_size)


def schedules(
    world_size: int,
    *,
    max_choices: int = 100,
    max_switches: int = 6,
    max_faults: int = 0,
    max_operations: int = 50,
) -> SearchStrategy[Schedule]:
    """Draw a schedule for :func:`~accelfn.testing.run_ranks`.

    The simplest one is empty: each rank runs as long as it can. Each switch and each fault is one element of
    a list, so that a failure shrinks to a schedule with as few of them as it needs, as early as possible.

    Args:
        world_size: Number of ranks.
        max_choices: Switches are drawn among so many choices from the start of a run. What a run has is
            ``Trace.num_choices``.
        max_switches: Largest number of switches.
        max_faults: Largest number of faults: an exception, a death or a delay.
        max_operations: Faults are drawn among so many operations of each rank.
    """
    # Early choices more often: a small program has no others.
    choice = st.integers(0, min(10, max_choices) - 1) | st.integers(0, max_choices - 1)
    switch = st.builds(Switch, choice, st.integers(1, max(1, 2 * world_size - 1)))
    fault = st.builds(
        Fault,
        kind=st.sampled_from(("delay", "raise", "die")),
        rank=st.integers(0, world_size - 1),
        at=st.integers(0, max_operations - 1),
        seconds=st.just(1.0),
    )
    return st.builds(
        Schedule,
        switches=st.lists(switch, max_size=max_switches, unique_by=_choice_of).map(_in_order),
        faults=st.lists(fault, max_size=max_faults).map(tuple),
    )


def _choice_of(switch: Switch) -> int:
    return switch.choice


def _in_order(switches: list[Switch]) -> tuple[Switch, ...]:
    return tuple(sorted(switches))


def dtypes(*, float8: bool = False) -> SearchStrategy[torch.dtype]:
    """Draw one of :data:`DTYPES`, with ``float8`` also of :data:`FLOAT8`."""
    return st.sampled_from((*DTYPES, *FLOAT8) if float8 else DTYPES)


def shapes(min_dims: int = 0, max_dims: int = 3, max_side: int = 3) -> SearchStrategy[tuple[int, ...]]:
    """Draw a shape; sides can be 0."""
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def tensors(
    dtype: torch.dtype | SearchStrategy[torch.dtype] | None = None,
    shape: tuple[int, ...] | SearchStrategy[tuple[int, ...]] | None = None,
    *,
    contiguous: bool = False,
) -> SearchStrategy[torch.Tensor]:
    """Draw a tensor on the CPU, 0-d, empty and non-contiguous ones among them.

    Args:
        dtype: Its dtype, or a strategy for it; None: :func:`dtypes`.
        shape: Its shape, or a strategy for it; None: :func:`shapes`.
        contiguous: Draw no views with gaps, turned or repeated dimensions.
    """
    kinds = dtypes() if dtype is None else st.just(dtype) if isinstance(dtype, torch.dtype) else dtype
    sizes = shapes() if shape is None else st.just(shape) if isinstance(shape, tuple) else shape
    forms = st.sampled_from(_FORMS[:1] if contiguous else _FORMS)

    @st.composite
    def build(draw: DrawFn) -> torch.Tensor:
        return _lay_out(_fill(draw, draw(kinds), draw(sizes)), draw(forms))

    return build()


def trees(leaves: SearchStrategy[Any] | None = None, *, max_leaves: int = 5) -> SearchStrategy[Any]:
    """Draw a tree of any containers.

    They are dict, list, tuple, namedtuple, OrderedDict, defaultdict, deque and dataclass.

    Args:
        leaves: Strategy for the leaves; None: :func:`tensors`.
        max_leaves: About how many leaves at most. There may be none: ``None`` and empty containers are
            trees too.
    """
    leaf = st.one_of(tensors() if leaves is None else leaves, st.none())
    return st.recursive(leaf, _containers, max_leaves=max_leaves)


def parameters(
    dtype: torch.dtype = torch.float32, *, max_leaves: int = 4, max_side: int = 5
) -> SearchStrategy[Any]:
    """Draw parameters as functions take them: dicts and lists of floating-point tensors, at least one.

    0-d and empty ones are among them, and sides that no number of ranks divides. Values are halves from
    -2 to 2, so that sums are exact.

    Args:
        dtype: Of all leaves.
        max_leaves: About how many leaves at most.
        max_side: Longest dimension.
    """
    leaf = tensors(dtype, shapes(0, 2, max_side), contiguous=True).map(_halves)
    names = st.sampled_from("wbkvq")

    def below(children: SearchStrategy[Any]) -> SearchStrategy[Any]:
        as_dict = st.dictionaries(names, children, min_size=1, max_size=3)
        return as_dict | st.lists(children, min_size=1, max_size=2)

    return st.dictionaries(
        names, st.recursive(leaf, below, max_leaves=max_leaves), min_size=1, max_size=max_leaves
    )


def gradients(params: Any) -> SearchStrategy[Any]:
    """Draw a tree like parameters, with values as of :func:`parameters`.

    Args:
        params: A tree of tensors.
    """

    @st.composite
    def build(draw: DrawFn) -> Any:
        return map_tensors(
            lambda one: draw(tensors(one.dtype, tuple(one.shape), contiguous=True).map(_halves)), params
        )

    return build()


def _halves(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2 if tensor.is_floating_point() else tensor


def masks(params: Any) -> SearchStrategy[Any]:
    """Draw a bool for each leaf of a tree, as :func:`accelfn.masked` takes them."""

    @st.composite
    def build(draw: DrawFn) -> Any:
        return map_tensors(lambda one: draw(st.booleans()), params)

    return build()


def random_keys() -> SearchStrategy[torch.Tensor]:
    """Draw a key of :func:`accelfn.key`."""
    return st.integers(0, 2**64 - 1).map(key)


def rank_trees(
    world_size: int, template: SearchStrategy[Any] | None = None, *, float8: bool = False
) -> SearchStrategy[list[Any]]:
    """Draw one tree of tensors per rank: equal structures, shapes and dtypes, different values.

    Dicts are filled in another order on some ranks, and some leaves are views: neither may matter.

    Args:
        world_size: Number of trees.
        template: Strategy for a tree of tensors whose form all ranks take; None: :func:`trees`.
        float8: Let leaves be of float8 dtypes too, where no ``template`` is given.
    """
    form = trees(tensors(dtypes(float8=float8), contiguous=True)) if template is None else template

    @st.composite
    def build(draw: DrawFn) -> list[Any]:
        return _for_ranks(draw, draw(form), world_size)

    return build()


def mismatched_trees(world_size: int) -> SearchStrategy[Mismatched]:
    """Draw one tree of tensors per rank, of which one differs from all others in structure, shape or dtype.

    Args:
        world_size: Number of trees, at least 2. Of two, the second is the odd one.

    Raises:
        ValueError: ``world_size`` is below 2.
    """
    if world_size < 2:
        raise ValueError(f"mismatched_trees: world_size must be at least 2, got {world_size}.")

    @st.composite
    def build(draw: DrawFn) -> Mismatched:
        template = draw(trees(tensors(contiguous=True)))
        if not flatten(template)[0]:
            template = [template, torch.zeros(2)]
        ranked = _for_ranks(draw, template, world_size)
        odd = draw(st.integers(0, world_size - 1)) if world_size > 2 else 1
        change = draw(st.sampled_from(("shape", "dtype", "split", "absent", "container")))
        if change == "container":
            ranked = [(tree,) if rank == odd else [tree] for rank, tree in enumerate(ranked)]
            return Mismatched(ranked, odd, ("",))
        leaves, structure = flatten(ranked[odd])
        index = draw(st.integers(0, len(leaves) - 1))
        path = structure.paths()[index]
        leaves[index] = _change(leaves[index], change)
        ranked[odd] = structure.unflatten(leaves)
        return Mismatched(ranked, odd, (path, f"{path}[0]", f"{path}[1]") if change == "split" else (path,))

    return build()


def _change(leaf: torch.Tensor, change: str) -> Any:
    match change:
        case "shape":
            return torch.zeros((*leaf.shape, 2), dtype=leaf.dtype)
        case "dtype":
            return torch.zeros(leaf.shape, dtype=torch.float32 if leaf.dtype == torch.int64 else torch.int64)
        case "split":
            return [leaf, leaf]
        case _:
            return None


def _for_ranks(draw: DrawFn, template: Any, world_size: int) -> list[Any]:
    def other_values(leaf: torch.Tensor) -> torch.Tensor:
        return draw(tensors(leaf.dtype, tuple(leaf.shape)))

    ranked = [map_tensors(other_values, template) for _ in range(world_size)]
    return [_refill(tree) if draw(st.booleans()) else tree for tree in ranked]


def _refill(tree: Any) -> Any:
    """Fill each dict in the opposite order."""
    if type(tree) is dict:
        items = cast("dict[Any, Any]", tree)
        return {key: _refill(items[key]) for key in reversed(items)}
    if isinstance(tree, Pair):
        return Pair(_refill(tree.first), _refill(tree.second))
    if isinstance(tree, (list, tuple, deque)):
        sequence = cast("Sequence[Any]", tree)
        kind = cast("Callable[[list[Any]], Any]", type(sequence))
        return kind([_refill(child) for child in sequence])
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{item.name: _refill(getattr(tree, item.name)) for item in fields(tree)})
    return tree


def _containers(children: SearchStrategy[Any]) -> SearchStrategy[Any]:
    # Keys of one type, so that they have an order.
    keys: tuple[SearchStrategy[Hashable], ...] = (st.sampled_from("zxyab'"), st.integers(0, 3))
    mappings = st.one_of([st.dictionaries(key, children, max_size=3) for key in keys])
    sequences = st.lists(children, max_size=3)

    def as_ordered(items: dict[Any, Any]) -> Any:
        return OrderedDict(items)

    def as_default(items: dict[Any, Any]) -> Any:
        return defaultdict(list, items)

    return st.one_of(
        mappings,
        sequences,
        sequences.map(tuple),
        st.builds(Pair, children, children),
        mappings.map(as_ordered),
        mappings.map(as_default),
        sequences.map(deque),
        st.builds(Sample, children, children),
    )


def _fill(draw: DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw the values; one draw for all of them, since many small ones are slow."""
    count = torch.Size(shape).numel() * (2 if dtype.is_complex else 1)
    codes = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.int64)
    if dtype == torch.bool or not dtype.is_signed:
        values = codes % (2 if dtype == torch.bool else 5)
    else:
        limit = 1 if dtype.itemsize == 1 and dtype.is_floating_point else 4
        codes = codes % (2 * limit + 1)
        values = torch.where(codes > limit, limit - codes, codes)  # 0 for code 0, so that it shrinks to 0
    if dtype.is_complex:
        return torch.view_as_complex(values.double().view(*shape, 2)).to(dtype)
    return values.to(dtype).view(shape)


def _lay_out(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """Return the same values in another layout of memory; ``"expanded"`` repeats the first row."""
    if form == "contiguous" or not tensor.dim():
        return tensor
    if form == "offset":
        return torch.cat([tensor[:1], tensor])[min(1, tensor.shape[0]) :]
    if form == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "strided":
        return torch.stack([tensor, tensor], dim=1)[:, 0]
    return tensor[:1].expand(tensor.shape) if tensor.shape[0] else tensor
