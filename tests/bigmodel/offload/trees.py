"""Models of every awkward kind, built from a description, so that hypothesis can draw and shrink them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from accelfn.bigmodel.assign import refs_of
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.blocks import plan_blocks
from accelfn.bigmodel.transfer import Arrival, Link, Packing, open_link, unpack

WIDTH = 4


class Bare(nn.Module):
    """A parameter and buffers of its own, one of which isn't saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("mask", torch.randint(0, 2, (WIDTH,)).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + cast("torch.Tensor", self.shift) * cast("torch.Tensor", self.mask)


class Counting(nn.Module):
    """Writes into its buffers in forward, in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.mean: torch.Tensor
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.inner(x) * self.mean + self.count


class Replacing(nn.Module):
    """Hangs another buffer where one was."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x) + self.last
        self.last = x.detach().mean(0)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[None])[0][0]


class Convolution(nn.Module):
    """Weights that aren't contiguous. With one channel their strides could be taken for others."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.num_channels = num_channels
        conv = nn.Conv2d(num_channels, 3, 3, padding=1)
        self.conv = cast("Any", conv).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.expand(1, self.num_channels, *x.shape)).mean(1)[0]


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def parametrized() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


class Namespace(nn.Module):
    """Tensors in modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Module()
        self.space.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.space.inner = nn.Linear(WIDTH, WIDTH)
        self.some = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        space = cast("Any", self.space)
        return space.inner(x @ space.weight) * self.some[0] + self.some[1] * self.named["a"]


class Direct(nn.Module):
    """Calls what is inside of its child, and never the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child[2](x) + self.child[0](x)


class Attention(nn.Module):
    """A module of torch that reads its child's weights and doesn't call it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Falsy(nn.Linear):
    """A module that reports to be empty."""

    def __len__(self) -> int:
        return 0


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.to(torch.complex64) @ self.weight.conj() * (self.weight.imag + self.weight.mH.real)[0]
        return turned.real + turned.imag


class Run(nn.Module):
    """Runs its children one after the other, and needs a parameter of its own before and after."""

    def __init__(self, children: Sequence[nn.Module], kind: str) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH))
        self.layers: Any
        if kind == "list":
            self.layers = nn.ModuleList(children)
        else:
            self.layers = nn.ModuleDict({f"key{number}": one for number, one in enumerate(children)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.own
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            y = layer(y)
        return x + y * self.own


class Twice(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(torch.tanh(self.child(x)))


LEAVES: MappingProxyType[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "bare": Bare,
        "counting": Counting,
        "replacing": Replacing,
        "norm": lambda: nn.BatchNorm1d(WIDTH),
        "recurrent": Recurrent,
        "convolution": lambda: Convolution(1),
        "convolutions": lambda: Convolution(2),
        "parametrized": parametrized,
        "namespace": Namespace,
        "direct": Direct,
        "attention": Attention,
        "complex": Complex,
        "falsy": lambda: Falsy(WIDTH, WIDTH),
        "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    }
)
# Both halves of a tie are used once at most, so that sums of gradients don't depend on their order.
_TIED = ("linear", "linear")


@dataclass(frozen=True)
class Tree:
    """What a model is built from.

    Attributes:
        kind: A name of LEAVES, or of a container.
        children: Of a container.
    """

    kind: str
    children: tuple[Tree, ...] = ()

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(map(repr, self.children))})" if self.children else self.kind


def trees(max_leaves: int = 6) -> st.SearchStrategy[Tree]:
    leaves = st.sampled_from([Tree(kind) for kind in LEAVES])

    def around(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        some = st.lists(inner, min_size=1, max_size=4).map(tuple)
        return st.one_of(
            st.builds(Tree, st.sampled_from(["sequential", "list", "dict", "tied", "shared"]), some),
            # Autograd minds if a buffer that it keeps is written again, in the plain model, too.
            st.builds(
                Tree,
                st.just("twice"),
                inner.filter(lambda one: "counting" not in kinds(one)).map(lambda one: (one,)),
            ),
        )

    return st.recursive(leaves, around, max_leaves=max_leaves)


def _built(tree: Tree) -> nn.Module:
    if tree.kind in LEAVES:
        return LEAVES[tree.kind]()
    children = [_built(child) for child in tree.children]
    if tree.kind == "tied":  # a weight that two blocks have
        first, last = (LEAVES[kind]() for kind in _TIED)
        cast("Any", last).weight = first.weight
        return nn.Sequential(first, nn.Tanh(), *children, last)
    if tree.kind == "shared":  # a module that two blocks have
        inner = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(
            nn.Sequential(inner, nn.Tanh()), *children, nn.Sequential(inner, nn.Linear(WIDTH, WIDTH))
        )
    if tree.kind == "twice":
        return Twice(children[0])
    if tree.kind == "sequential":
        return nn.Sequential(*children)
    return Run(children, tree.kind)


def build(tree: Tree, seed: int = 0) -> nn.Module:
    """Build the model of a description: the same one each time, bit for bit. It maps (n, 4) to (n, 4)."""
    torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    return _built(tree)


def kinds(tree: Tree) -> Iterator[str]:
    yield tree.kind
    for child in tree.children:
        yield from kinds(child)


def inputs(seed: int = 0, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of a model, also of non-persistent buffers."""
    return {name: ref.read().detach().clone() for name, ref in refs_of(model)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}


def same(left: Any, right: Any) -> bool:
    """Whether two dicts of tensors are equal bit for bit, nan included."""
    if left.keys() != right.keys():
        return False
    return all(
        (left[name] is None and right[name] is None)
        or (
            left[name] is not None
            and right[name] is not None
            and torch.allclose(left[name], right[name], rtol=0, atol=0, equal_nan=True)
        )
        for name in left
    )


def copies_of(link: Link, change: Callable[[torch.Tensor], object]) -> Link:
    """A link that doubles values, so that using a stored weight by mistake is detected."""

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        arrival = link.begin(hosts, packing)

        @functools.cache
        def arrive() -> torch.Tensor:
            memory = arrival()
            with torch.inference_mode(False), torch.no_grad():
                for one in unpack(memory, packing):
                    if one.is_floating_point() or one.is_complex():
                        change(one)
            return memory

        return arrive

    return Link(device=link.device, begin=begin, release=link.release)


def doubling() -> Link:
    return copies_of(open_link("cpu:0", 1), lambda one: one.mul_(2))


def stream_of(
    model: nn.Module, link: Link | None = None, *, buffers: bool = True, **options: Any
) -> BlockPrefetcher:
    """A stream of all tensors of a model, in the blocks that a dispatch would make."""
    leaves = [name for name, ref in refs_of(model) if buffers or ref.is_parameter]
    blocks = plan_blocks(model, leaves)
    return BlockPrefetcher(blocks, "cpu:0", link=link, **options)
