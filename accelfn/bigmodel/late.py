"""Tensors of the host that are filled late: when something looks at their values, if anything does."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

import optree
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ("LateFills", "tensors_in")

_aten = torch.ops.aten
_Fill: TypeAlias = Callable[[torch.Tensor], object]

# Smaller tensors are filled at once: they cost nothing, and there is nothing to wait for.
_LEAST_BYTES = 1 << 20

# Linux refuses to promise more than the machine has, unless it is told that nothing has to be kept for it.
_HUGE_BYTES = 1 << 28
_MAP_NORESERVE = 0x4000

_MADE = frozenset(
    (
        "aten.empty.memory_format",
        "aten.empty_strided.default",
        "aten.empty_like.default",
        "aten.new_empty.default",
    )
)
# What makes a tensor and fills it; the random ones draw the numbers that their operations in place draw.
_ZERO: Callable[..., _Fill] = lambda *_: torch.Tensor.zero_  # noqa: E731
_ONE: Callable[..., _Fill] = lambda *_: lambda part: part.fill_(1)  # noqa: E731
_VALUE: Callable[..., _Fill] = lambda *given: lambda part: part.fill_(given[-1])  # noqa: E731
_UNIFORM: Callable[..., _Fill] = lambda *_: lambda part: part.uniform_(0, 1)  # noqa: E731
_NORMAL: Callable[..., _Fill] = lambda *_: lambda part: part.normal_(0, 1)  # noqa: E731
_MADE_AND_FILLED: Mapping[str, Callable[..., _Fill]] = MappingProxyType(
    {
        **dict.fromkeys(("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"), _ZERO),
        **dict.fromkeys(("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default"), _ONE),
        **dict.fromkeys(("aten.full.default", "aten.full_like.default", "aten.new_full.default"), _VALUE),
        **dict.fromkeys(("aten.rand.default", "aten.rand_like.default"), _UNIFORM),
        **dict.fromkeys(("aten.randn.default", "aten.randn_like.default"), _NORMAL),
    }
)
_FILLED_IN_PLACE = frozenset(
    (
        *("aten.zero_.default", "aten.fill_.Scalar", "aten.uniform_.default", "aten.normal_.default"),
        *("aten.random_.default", "aten.random_.to", "aten.random_.from", "aten.bernoulli_.float"),
        *("aten.exponential_.default", "aten.log_normal_.default", "aten.cauchy_.default"),
    )
)


class _Late(NamedTuple):
    """A filling that is still to be done, and the part of a storage that it is for.

    A random one has its generator, and the state that the generator was in.
    """

    fill: _Fill
    generator: torch.Generator | None
    state: torch.Tensor | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def run(self, part: torch.Tensor) -> None:
        """Fill the part with the numbers that it would have got at the time."""
        if self.generator is None or self.state is None:
            self.fill(part)
            return
        now = self.generator.get_state()
        if torch.equal(now, self.state):
            self.fill(part)
        else:  # it was seeded since
            self.generator.set_state(self.state)
            self.fill(part)
            self.generator.set_state(now)


class LateFills(TorchDispatchMode):
    """While entered, puts off the filling of large new tensors of the host, and knows which tensors are new.

    Memory that nobody has written to isn't there yet, so a tensor that is thrown away before anything looks
    at it has cost none. Whatever reads or writes such a tensor in any other way than by filling it finds its
    values there: every operation of torch comes by here first. What hands out the memory itself, as
    ``data_ptr`` does, doesn't; whoever sees such a call has to :meth:`fill` before.

    Random numbers are drawn in the program's order, less those for tensors that nobody looks at: what waits
    for numbers gets them before anything else draws.

    Args:
        delays: Put fillings off. Otherwise it only knows which tensors are new.
    """

    def __init__(self, delays: bool) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._delays = delays
        self._waiting: WeakKeyDictionary[torch.UntypedStorage, list[_Late]] = WeakKeyDictionary()
        self._drawing: ReferenceType[torch.UntypedStorage] | None = None  # the one that waits for numbers
        self._filling = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would load its compiler, in more than a second, only to tell it that this isn't compiled.
        return False

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor was made while this was entered."""
        storage = _storage(tensor)
        return storage is not None and storage in self._waiting

    def disown(self, tensor: torch.Tensor) -> None:
        """Take a tensor's memory for what was there before. Effect: it is filled, and never put off again."""
        self.fill((tensor,))
        storage = _storage(tensor)
        if storage is not None:
            self._waiting.pop(storage, None)

    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write the values that tensors shall have. Effect: on their memory."""
        if self._filling:  # what is filled now is looked at by nobody, and in its order
            return
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None and self._waiting.get(storage):
                self._fill(storage)

    def fill_all(self) -> None:
        """Write the values of all tensors that still are there. Effect: on their memory."""
        for storage in list(self._waiting):
            self._fill(storage)

    def _fill(self, storage: torch.UntypedStorage) -> None:
        waiting = self._waiting[storage]
        before, self._filling = self._filling, True
        try:
            with torch.no_grad():
                while waiting:
                    late = waiting.pop(0)
                    late.run(_part(storage, late))
        finally:
            self._filling = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        name = str(func)
        if self._filling:
            return func(*args, **keywords)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        generator = keywords.get("generator") or torch.default_generator if is_random else None
        if self._delays and (name in _MADE_AND_FILLED or name in _MADE):
            made = self._make(func, name, args, keywords, generator)
            if made is not None:
                return made
        if self._delays and name in _FILLED_IN_PLACE:
            tensor, rest = args[0], args[1:]
            # There is nothing to fill on meta; torch would load its compiler to find that out, in a second.
            if tensor.is_meta or self._put_off(tensor, lambda part: func(part, *rest, **keywords), generator):
                return tensor
        given = list(tensors_in(args, keywords))
        self.fill(given)
        if is_random:
            self._draw()
        out = func(*args, **keywords)
        known = [_storage(tensor) for tensor in given]
        for tensor in tensors_in(out):
            storage = _storage(tensor)
            if storage is not None and not any(storage is one for one in known):
                self._waiting.setdefault(storage, [])
        return out

    def _draw(self) -> None:
        """Fill what waits for random numbers."""
        storage = None if self._drawing is None else self._drawing()
        self._drawing = None
        if storage is not None and self._waiting.get(storage):
            self._fill(storage)

    def _make(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        generator: torch.Generator | None,
    ) -> Any:
        """Make a tensor that is filled later; None for one that is better made at once."""
        like: Any = args[0] if isinstance(args[0], torch.Tensor) else None
        device = keywords.get("device") or (torch.device("cpu") if like is None else like.device)
        plain = like is None or type(like) in (torch.Tensor, torch.nn.Parameter)
        kind = torch.device(device).type
        if kind not in ("cpu", "meta") or keywords.get("pin_memory") or not plain:
            return None
        # Normal numbers on meta would load torch's compiler, as above.
        func = {"aten.randn.default": _aten.rand, "aten.randn_like.default": _aten.rand_like}.get(name, func)
        layout = func(*args, **{**keywords, "device": torch.device("meta")})
        if kind == "meta":
            return layout
        least = _HUGE_BYTES if name in _MADE else _LEAST_BYTES
        if layout.layout is not torch.strided or layout.numel() * layout.itemsize < least:
            return None
        made = _empty(layout)
        if type(made) is not torch.Tensor:  # a mode below makes tensors of another kind
            return None
        self._waiting.setdefault(made.untyped_storage(), [])
        if name in _MADE:
            return made
        fill = _MADE_AND_FILLED[name](*args)
        if not self._put_off(made, fill, generator):
            fill(made)
        return made

    def _put_off(self, tensor: torch.Tensor, fill: _Fill, generator: torch.Generator | None) -> bool:
        storage = _storage(tensor)
        waiting = None if storage is None else self._waiting.get(storage)
        if storage is None or waiting is None or storage.device.type != "cpu":
            return False
        if storage.nbytes() < _LEAST_BYTES or tensor.is_conj() or tensor.is_neg():
            return False
        where = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        state = None
        if generator is not None:
            self._draw()
            self._drawing, state = ref(storage), generator.get_state()
        waiting.append(_Late(fill, generator, state, tensor.dtype, *where))
        return True


def tensors_in(*trees: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, also those in lists and dicts."""
    for leaf in optree.tree_leaves(cast("Any", trees)):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _empty(layout: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the host as a meta tensor is laid out. Its memory is there once it is written to."""
    shape, strides = layout.shape, layout.stride()
    num_bytes = (
        torch.empty_strided(shape, strides, dtype=layout.dtype, device="meta").untyped_storage().nbytes()
    )
    if sys.platform != "linux" or num_bytes < _HUGE_BYTES:
        return torch.empty_strided(shape, strides, dtype=layout.dtype, device="cpu")
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if type(memory) is not torch.Tensor:
        return memory
    empty: Any = torch.empty(0, dtype=layout.dtype)
    return empty.set_(memory.untyped_storage(), 0, shape, strides)


def _part(storage: torch.UntypedStorage, late: _Late) -> torch.Tensor:
    empty: Any = torch.empty(0, dtype=late.dtype, device=storage.device)
    return empty.set_(storage, late.offset, late.shape, late.strides)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor; None of one that has none of its own, such as a sparse one."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] -- it is no look at the values
        try:
            return tensor.untyped_storage() if tensor.layout is torch.strided else None
        except (NotImplementedError, RuntimeError):
            return None
