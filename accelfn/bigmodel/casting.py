"""Layers that store their weights in a small dtype and compute in another one."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from accelfn.bigmodel.hooks import ModelHook, add_hook_to_module, hook_of, members_of
from accelfn.weights.assign import TensorRef, refs_of

# They have nearly all weights, and don't modify them in forward.
_CAST_CLASSES = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class _Cast(NamedTuple):
    """A stored tensor, and its copy during a forward."""

    ref: TensorRef
    stored: torch.Tensor
    copy: torch.Tensor
    version: int

    def is_written(self) -> bool:
        """Check whether a forward modified the copy."""
        if self.ref.is_parameter:
            return self.copy._version != self.version
        # Batch normalisation writes to its buffers without a change of their version.
        return not torch.equal(self.copy, self.stored.to(self.copy.dtype))


class LayerwiseCastingHook(ModelHook):
    """Stores the floating tensors of a module in one dtype, and runs its forward with copies in another.

    The stored parameters stay the same objects and aren't modified by a forward, so repeated casts lose
    nothing. They are restored after an exception too. What a forward writes to a copy, as batch normalisation
    does, is written to the stored tensor.

    Args:
        storage_dtype: The stored dtype. The module is cast when the hook is added.
        compute_dtype: The dtype of the copies in forward.
        non_blocking: Passed to the casts.

    Raises:
        TypeError: An argument isn't a dtype.
        ValueError: A dtype isn't floating.
    """

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False
    ) -> None:
        self.storage_dtype: torch.dtype = _checked_dtype(storage_dtype, "storage_dtype")
        self.compute_dtype: torch.dtype = _checked_dtype(compute_dtype, "compute_dtype")
        self.non_blocking = non_blocking
        self._running = _Running()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the module's tensors to the storage dtype."""
        return self._cast_stored(module, self.storage_dtype)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Assign copies in the compute dtype to the module.

        Raises:
            RuntimeError: Gradients are enabled, but the storage dtype can't accumulate them, or another
                thread is running the module without gradients.
        """
        with self._running.lock:
            casts = self._running.begin(module)
            if not casts:
                casts += self._assign_copies(module)
            elif torch.is_grad_enabled() and any(
                cast.stored.requires_grad and not cast.copy.requires_grad for cast in casts
            ):
                raise RuntimeError(
                    "another thread is running this module without gradients, and all threads share its "
                    "copies. Run both with or both without gradients, or use a copy of the model."
                )
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Restore the stored tensors."""
        self.after_error(module)
        return output

    def after_error(self, module: nn.Module) -> None:
        """Restore the stored tensors."""
        with self._running.lock:
            for cast in self._running.end(module):
                if cast.is_written():
                    with torch.no_grad():
                        cast.stored.copy_(cast.copy)
                # Otherwise forward has assigned another tensor, which is kept.
                if cast.ref.peek() is cast.copy:
                    cast.ref.write(cast.stored)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Cast the module's tensors to the compute dtype, in which it runs without the hook."""
        return self._cast_stored(module, self.compute_dtype)

    def _cast_stored(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
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
        for cast in casts:
            cast.ref.write(cast.copy)
        return casts

    def _cast(self, stored: torch.Tensor, name: str) -> torch.Tensor:
        if stored.requires_grad and torch.is_grad_enabled():
            if stored.dtype.itemsize == 1:
                raise RuntimeError(
                    f"the weight {name!r} is stored as {stored.dtype}, in which torch can't accumulate "
                    "gradients. Run the model under torch.no_grad(), call requires_grad_(False) on frozen "
                    "weights, or store them as torch.bfloat16."
                )
            return stored.to(self.compute_dtype, non_blocking=self.non_blocking)
        # Inference tensors have no version.
        with torch.inference_mode(False), torch.no_grad():
            copy = stored.detach().to(self.compute_dtype, non_blocking=self.non_blocking)
            return nn.Parameter(copy, requires_grad=False) if isinstance(stored, nn.Parameter) else copy


class _Running:
    """The current copies of each module, and the number of calls that use them. Copies of it are empty."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._calls: dict[int, tuple[int, list[_Cast]]] = {}

    def begin(self, module: nn.Module) -> list[_Cast]:
        """Count a call, and return the casts of running calls, a list that the first call extends."""
        number, casts = self._calls.get(id(module), (0, []))
        self._calls[id(module)] = (number + 1, casts)
        return casts

    def end(self, module: nn.Module) -> list[_Cast]:
        """Count the end of a call, and return the casts to undo if it was the last one."""
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
    """Store the weights of linear and convolution layers in a small dtype, and compute in another one.

    Each layer casts its weights for its own forward, so one layer at a time has them in the larger dtype.
    With ``torch.float8_e4m3fn`` a model takes a quarter of its memory in float32.

    This is for inference. In training, gradients of weights are rounded to the storage dtype; weights stored
    as float8 can't have any, which is an error. Layers with frozen weights, such as those below adapters,
    propagate gradients to their inputs; copies of their weights are kept until backward.

    Quantised weights aren't cast, nor is a layer that shares a weight with one that isn't cast. To offload
    the model too, attach these hooks first, and dispatch it then. ``remove_hook_from_submodules`` removes the
    hooks, and leaves the weights in the compute dtype.

    Args:
        module: The root. Hooks are attached to its layers, and their tensors are cast.
        storage_dtype: The dtype of stored weights, such as ``torch.float8_e4m3fn``.
        compute_dtype: The dtype of weights in forward, which inputs must have too.
        skip_modules_pattern: One or several regular expressions. Modules whose full name matches one, and all
            modules below them, are skipped.
        skip_modules_classes: One or several classes whose modules, and all modules below them, are skipped.
        non_blocking: Passed to the casts.

    Raises:
        TypeError: A dtype isn't a dtype, or a pattern or class is invalid.
        ValueError: A dtype isn't floating, or the layers have such hooks already.
        re.error: A pattern is invalid.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern="2")
    >>> [module.weight.dtype for module in model]
    [torch.float8_e4m3fn, torch.float32, torch.float32]
    >>> with torch.no_grad():
    ...     model(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    skipped = skip_modules_pattern
    several = (skipped,) if isinstance(skipped, (str, re.Pattern)) else skipped or ()
    patterns = tuple(re.compile(pattern) for pattern in several)
    kinds = skip_modules_classes or ()
    classes = (kinds,) if isinstance(kinds, type) else tuple(kinds)
    LayerwiseCastingHook(storage_dtype, compute_dtype)  # checks the dtypes
    layers = dict(_layers(module, "", patterns, classes))
    for layer, name in layers.items():
        if any(isinstance(hook, LayerwiseCastingHook) for hook in members_of(hook_of(layer))):
            raise ValueError(
                f"{name or 'the module'} casts its weights already. Remove the hooks first, with "
                "remove_hook_from_submodules(model)."
            )
    shared = {id(ref.read()) for ref in _floating(module) if ref.owner not in layers}
    for layer in layers:
        if not any(id(ref.read()) in shared for ref in _floating(layer)):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(layer, hook, append=True)


def _layers(
    module: nn.Module,
    name: str,
    patterns: tuple[re.Pattern[str], ...],
    classes: tuple[type[nn.Module], ...],
) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers to cast, and their names."""
    if isinstance(module, classes) or any(pattern.search(name) for pattern in patterns):
        return
    if isinstance(module, _CAST_CLASSES):
        yield module, name
    for key, child in module.named_children():
        yield from _layers(child, f"{name}.{key}" if name else key, patterns, classes)


def _floating(module: nn.Module) -> Iterator[TensorRef]:
    """Yield the floating tensors of a module and all modules below it, except quantised ones."""
    for _, ref in refs_of(module):
        if type(ref.read()) in (nn.Parameter, torch.Tensor) and ref.read().is_floating_point():
            yield ref


def _checked_dtype(dtype: object, what: str) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{what} must be a torch dtype, such as torch.bfloat16, got {dtype!r}.")
    if not dtype.is_floating_point:
        raise ValueError(f"{what} must be a floating dtype, such as torch.bfloat16, got {dtype}.")
    return dtype
