"""Models of every awkward kind, built from a description, so that hypothesis can draw and shrink them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from accelfn.bigmodel import Place, block_stream, cpu_offload
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.transfer import Arrival, Link, Packing, open_link, unpack
from accelfn.weights.assign import refs_of

WIDTH = 4
ModelT = TypeVar("ModelT", bound=nn.Module)


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
        "norm": lambda: nn.BatchNorm1d(WIDTH),
        "recurrent": Recurrent,
        "convolution": lambda: Convolution(1),
        "convolutions": lambda: Convolution(2),
        "parametrized": parametrized,
        "namespace": Namespace,
        "direct": Direct,
        "attention": Attention,
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


def streams_of(model: nn.Module) -> list[BlockPrefetcher]:
    return list(getattr(vars(model).get("_accelfn_dispatched"), "prefetchers", []))


def is_at_rest(model: nn.Module) -> bool:
    """Whether nothing is on a device, and the model holds its own parameters."""
    # Asking for what is resident ends passes that were interrupted.
    return all(stream.resident == () for stream in streams_of(model)) and all(
        one is None or isinstance(one, nn.Parameter)
        for module in model.modules()
        for one in vars(module)["_parameters"].values()
    )


def num_hooks(model: nn.Module) -> int:
    return sum(
        len(vars(module)["_forward_hooks"]) + len(vars(module)["_forward_pre_hooks"])
        for module in model.modules()
    )


Change: TypeAlias = Callable[[torch.Tensor], object]


def offloaded(model: ModelT, change: Change | None = None, **options: Any) -> ModelT:
    """Offload a model that runs on a simulated device, with a change to each copy that arrives there."""

    def open_changing(place: Place, num_ahead: int) -> Link:
        link = open_link(place, num_ahead)
        return link if change is None else dataclasses.replace(link, begin=functools.partial(begin, link))

    def begin(link: Link, hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        arrival = link.begin(hosts, packing)

        @functools.cache
        def arrive() -> torch.Tensor:
            memory = arrival()
            with torch.inference_mode(False), torch.no_grad():
                for one in unpack(memory, packing):
                    cast("Change", change)(one)
            return memory

        return arrive

    with mock.patch.object(block_stream, "open_link", open_changing):
        return cpu_offload(model, "cpu:0", **options)


def double(tensor: torch.Tensor) -> None:
    """Change copies on the device, so that using a stored weight by mistake is seen."""
    if tensor.is_floating_point():
        tensor.mul_(2)


def doubled(model: ModelT) -> ModelT:
    """Double the parameters of a model that isn't offloaded."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def assert_same_gradients(left: nn.Module, right: nn.Module, exact: bool = True) -> None:
    """Compare gradients; not bit for bit where a weight's is a sum of several, in another order."""
    for one, other in zip(gradients(left).values(), gradients(right).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0 if exact else None, atol=0 if exact else None)
