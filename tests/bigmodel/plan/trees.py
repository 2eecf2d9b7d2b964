"""Random models, of bytes on the meta device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import nn

__all__ = ("M3", "Tree", "build", "three_blocks", "trees")


class M3(nn.Module):
    """64, 72 and 100 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


def three_blocks() -> nn.Module:
    model = nn.Module()
    for number in (1, 2, 3):
        model.add_module(f"layer{number}", M3())
    return model


class A(nn.Module):
    """A class that may not be split."""


class B(nn.Module):
    """Another."""


@dataclass(frozen=True)
class Tree:
    """A module to be built.

    Attributes:
        kind: Its class.
        parameters: Bytes of each.
        buffers: Bytes of each, and whether it is persistent.
        children: Modules in it.
        ties: Pairs of parameters that are one, by their numbers among all of the model.
    """

    kind: str
    parameters: tuple[int, ...] = ()
    buffers: tuple[tuple[int, bool], ...] = ()
    children: tuple[Tree, ...] = ()
    ties: tuple[tuple[int, int], ...] = ()


_SIZES = st.integers(1, 12)
# Of a module: which of those before it holds it, its class, its parameters and its buffers.
_MODULE = st.tuples(
    st.integers(0, 99),
    st.sampled_from(["A", "B"]),
    st.lists(_SIZES, max_size=2).map(tuple),
    st.lists(st.tuples(_SIZES, st.booleans()), max_size=1).map(tuple),
)
_MODULES = st.lists(_MODULE, min_size=2, max_size=14)
_LARGE = st.none() | st.integers(0, 99)
_TIES = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3)


@st.composite
def trees(draw: st.DrawFn, *, ties: bool = True, bare: bool = True) -> Tree:
    """Draw a model.

    Args:
        draw: Of hypothesis.
        ties: With parameters of several names.
        bare: With parameters and buffers beside modules.
    """
    drawn = draw(_MODULES)
    holds: list[list[int]] = [[] for _ in drawn]
    for number, (pick, _, _, _) in enumerate(drawn[1:], 1):
        holds[pick % number].append(number)

    def make(number: int) -> Tree:
        _, kind, parameters, buffers = drawn[number]
        own = bare or not holds[number]
        inside = tuple(make(one) for one in holds[number])
        return Tree(kind, parameters if own else (), buffers if own else (), inside)

    tree = make(0)
    count = _count(tree)
    large = draw(_LARGE)
    if large is not None and count:  # one tensor of nine tenths of all bytes
        tree, _ = _enlarge(tree, large % count, 9 * _bytes(tree))
    if ties and count > 1:
        tree = replace(tree, ties=tuple((one % count, other % count) for one, other in draw(_TIES)))
    return tree


def _count(tree: Tree) -> int:
    return len(tree.parameters) + sum(map(_count, tree.children))


def _bytes(tree: Tree) -> int:
    return sum(tree.parameters) + sum(size for size, _ in tree.buffers) + sum(map(_bytes, tree.children))


def _enlarge(tree: Tree, number: int, size: int) -> tuple[Tree, int]:
    """Give one parameter another size; also how many numbers are left."""
    own = tuple(size if place == number else one for place, one in enumerate(tree.parameters))
    number -= len(own)
    children: list[Tree] = []
    for child in tree.children:
        child, number = _enlarge(child, number, size) if number >= 0 else (child, number - _count(child))
        children.append(child)
    return Tree(tree.kind, own, tree.buffers, tuple(children)), number


def build(tree: Tree) -> nn.Module:
    """Build a model on the meta device. No name of a module is a part of another one's."""
    names = iter(range(10**6))
    parameters: list[tuple[nn.Module, str]] = []

    def make(tree: Tree) -> nn.Module:
        module = A() if tree.kind == "A" else B()
        for size in tree.parameters:
            name = f"p{next(names)}x"
            module.register_parameter(name, nn.Parameter(_bytes_of(size), requires_grad=False))
            parameters.append((module, name))
        for size, persistent in tree.buffers:
            module.register_buffer(f"b{next(names)}x", _bytes_of(size), persistent=persistent)
        for child in tree.children:
            module.add_module(f"m{next(names)}x", make(child))
        return module

    model = make(tree)
    for one, other in tree.ties:
        (kept, key), (module, name) = parameters[one], parameters[other]
        setattr(module, name, getattr(kept, key))
    return model


def _bytes_of(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")
