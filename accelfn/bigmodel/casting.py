"""Layers that keep their weights in a small dtype and compute in another one."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from accelfn.bigmodel.assign import TensorRef, refs_of
from accelfn.bigmodel.hooks import ModelHook, add_hook_to_module, hook_of, members_of

# What gains by it: nearly all weights are theirs, and they don't change in a forward.
_CAST_CLASSES = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class _Cast(NamedTuple):
    """What a module holds otherwise, and the copy that it holds in forward."""

    ref: TensorRef
    stored: torch.Tensor
    copy: torch.Tensor
    version: int

    def is_written(self) -> bool:
        """Whether a forward wrote into the copy."""
        if self.ref.is_parameter:
            return self.copy._version != self.version
        # A batch norm doesn't tell of what it writes into its statistics.
        return not torch.equal(self.copy, self.stored.to(self.copy.dtype))


class LayerwiseCastingHook(ModelHook):
    """Keeps the floating tensors of a module in one dtype, and gives its forward copies in another.

    The stored tensors aren't touched by a forward, so nothing is lost by casting forth and back, and the
    parameters stay the same objects. After an exception they are back too. What a forward writes into a
    copy, as a batch norm does, is stored.

    Args:
        storage_dtype: Of the module at rest. It is cast when the hook is added.
        compute_dtype: Of the copies in forward.
        non_blocking: Passed to the casts.

    Raises:
        TypeError: A dtype is none.
        ValueError: A dtype isn't of floating numbers.
    """

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False
    ) -> None:
        self.storage_dtype: torch.dtype = _checked_dtype(storage_dtype, "storage_dtype")
        self.compute_dtype: torch.dtype = _checked_dtype(compute_dtype, "compute_dtype")
        self.non_blocking = non_blocking
        self._running = _Running()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the module's tensors to the storage dtype, in place of what they were."""
        return self._cast_at_rest(module, self.storage_dtype)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put copies in the compute dtype where the module looks for its tensors.

        Raises:
            RuntimeError: Gradients are on, and one could not be kept: it would be of a dtype that can't be
                added up, or another thread runs the module without gradients at this moment.
        """
        with self._running.lock:
            casts = self._running.begin(module)
            if not casts:
                casts += self._assign_copies(module)
            elif torch.is_grad_enabled() and any(
                one.stored.requires_grad and not one.copy.requires_grad for one in casts
            ):
                raise RuntimeError(
                    "another thread runs this module without gradients, and it can be cast for one of the "
                    "two at a time. Let both run with gradients or both without, or use a copy of the model."
                )
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Put the stored tensors back."""
        self.after_error(module)
        return output

    def after_error(self, module: nn.Module) -> None:
        """Put the stored tensors back."""
        with self._running.lock:
            for one in self._running.end(module):
                if one.is_written():
                    with torch.no_grad():
                        one.stored.copy_(one.copy)
                # What somebody else assigned meanwhile is theirs.
                if one.ref.peek() is one.copy:
                    one.ref.write(one.stored)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Cast the module's tensors to the compute dtype, so that it still computes."""
        return self._cast_at_rest(module, self.compute_dtype)

    def _cast_at_rest(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        for ref in _floating(module):
            tensor = ref.read()
            if tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype, non_blocking=self.non_blocking)
                if tensor.grad is not None:
                    tensor.grad = None if dtype.itemsize == 1 else tensor.grad.to(dtype)
        return module

    def _assign_copies(self, module: nn.Module) -> list[_Cast]:
        copies: dict[int, torch.Tensor] = {}
        casts: list[_Cast] = []
        for ref in _floating(module):
            stored = ref.read()
            if stored.dtype != self.compute_dtype:
                if id(stored) not in copies:
                    copies[id(stored)] = self._cast(stored, ref.key)
                copy = copies[id(stored)]
                casts.append(_Cast(ref, stored, copy, copy._version))
        for one in casts:
            one.ref.write(one.copy)
        return casts

    def _cast(self, stored: torch.Tensor, name: str) -> torch.Tensor:
        if stored.requires_grad and torch.is_grad_enabled():
            if stored.dtype.itemsize == 1:
                raise RuntimeError(
                    f"the weight {name!r} is stored as {stored.dtype}, in which torch can't add gradients. "
                    "Run this model under torch.no_grad(), call requires_grad_(False) on what isn't trained, "
                    "or store it as torch.bfloat16."
                )
            return stored.to(self.compute_dtype, non_blocking=self.non_blocking)
        # Tensors of the inference mode don't know whether they were written to.
        with torch.inference_mode(False), torch.no_grad():
            copy = stored.detach().to(self.compute_dtype, non_blocking=self.non_blocking)
            return nn.Parameter(copy, requires_grad=False) if isinstance(stored, nn.Parameter) else copy


class _Running:
    """Copies that are in their modules' places now, and by how many calls. Copies of it are empty."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._calls: dict[int, tuple[int, list[_Cast]]] = {}

    def begin(self, module: nn.Module) -> list[_Cast]:
        """Count a call; give what other threads, or calls further out, have exchanged, to be added to."""
        number, casts = self._calls.get(id(module), (0, []))
        self._calls[id(module)] = (number + 1, casts)
        return casts

    def end(self, module: nn.Module) -> list[_Cast]:
        """Count a call as over; give what is to be undone if it was the last."""
        number, casts = self._calls.pop(id(module), (1, []))
        if number > 1:
            self._calls[id(module)] = (number - 1, casts)
            return []
        return casts

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Running, ())


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear and convolution layers in a small dtype, and compute in another one.

    Each such layer casts its weights for the time of its forward, so at any time one layer has them in the
    larger dtype. With ``torch.float8_e4m3fn`` a model takes a quarter of its memory in float32.

    This is for inference. In training, a weight that needs a gradient gets it in the storage dtype, rounded;
    one stored as float8 can't have any, and its forward says so. Layers whose weights need none, as those
    below adapters, pass gradients on to their inputs; copies of their weights then live until backward.

    Quantised weights stay what they are, and so does a layer that shares a weight with one that isn't cast.
    A model that is also to be offloaded gets these hooks first, and is dispatched then.
    ``remove_hook_from_submodules`` takes the hooks off; the weights then are of the compute dtype.

    Args:
        module: Changed: its layers get hooks, and their tensors the storage dtype.
        storage_dtype: Of the weights at rest, such as ``torch.float8_e4m3fn``.
        compute_dtype: Of the weights in forward; inputs must have it too.
        skip_modules_pattern: Regular expressions, one or several. A module whose dotted name one of them is
            found in is left alone, with all inside of it.
        skip_modules_classes: Classes, one or several, whose modules are left alone, with all inside of them.
        non_blocking: Passed to the casts.

    Raises:
        TypeError: A dtype is none; or a pattern or class, as ``re`` and ``isinstance`` say it.
        ValueError: A dtype isn't of floating numbers, or the layers have such hooks.
        re.error: A pattern can't be read.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern="2")
    >>> [module.weight.dtype for module in model]
    [torch.float8_e4m3fn, torch.float32, torch.float32]
    >>> with torch.no_grad():
    ...     model(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    patterns = _patterns(skip_modules_pattern)
    given = skip_modules_classes
    classes = (given,) if isinstance(given, type) else tuple(given or ())
    hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)  # checks the dtypes
    layers = dict(_layers(module, "", patterns, classes))
    for layer, name in layers.items():
        if any(isinstance(one, LayerwiseCastingHook) for one in members_of(hook_of(layer))):
            raise ValueError(
                f"{name or 'the module'} casts its weights already. Take the hooks off first, with "
                "remove_hook_from_submodules(model)."
            )
    shared = {id(ref.read()) for ref in _floating(module) if ref.owner not in layers}
    for layer in layers:
        if not any(id(ref.read()) in shared for ref in _floating(layer)):
            add_hook_to_module(
                layer, LayerwiseCastingHook(hook.storage_dtype, hook.compute_dtype, non_blocking), append=True
            )


def _layers(
    module: nn.Module,
    name: str,
    patterns: tuple[re.Pattern[str], ...],
    classes: tuple[type[nn.Module], ...],
) -> Iterator[tuple[nn.Module, str]]:
    """Return the layers that are to be cast, with their names."""
    if isinstance(module, classes) or any(one.search(name) for one in patterns):
        return
    if isinstance(module, _CAST_CLASSES):
        yield module, name
    for key, child in module.named_children():
        yield from _layers(child, f"{name}.{key}" if name else key, patterns, classes)


def _floating(module: nn.Module) -> Iterator[TensorRef]:
    """Return where a module, and all inside of it, hold floating tensors; not quantised ones."""
    for _, ref in refs_of(module):
        if type(ref.read()) in (nn.Parameter, torch.Tensor) and ref.read().is_floating_point():
            yield ref


def _checked_dtype(dtype: object, what: str) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{what} must be a dtype of torch, such as torch.bfloat16: got {dtype!r}.")
    if not dtype.is_floating_point:
        raise ValueError(f"{what} must be a dtype of floating numbers, such as torch.bfloat16: got {dtype}.")
    return dtype


def _patterns(given: str | Iterable[str] | None) -> tuple[re.Pattern[str], ...]:
    several = (given,) if isinstance(given, (str, re.Pattern)) else tuple(given or ())
    return tuple(re.compile(one) for one in several)
