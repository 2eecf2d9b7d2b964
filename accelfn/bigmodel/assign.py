"""Where a tensor stands in a module, and how another one is put there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.bigmodel.devices import PlaceLike, check_device, is_on, named_dtype, read_place


class TensorRef(NamedTuple):
    """Where a module holds a tensor.

    Attributes:
        owner: The module.
        key: The tensor's own name in it.
        is_parameter: Or a buffer.
    """

    owner: nn.Module
    key: str
    is_parameter: bool

    @property
    def is_saved(self) -> bool:
        """Whether state dicts have it: all tensors but buffers that aren't persistent."""
        return self.key not in cast("set[str]", vars(self.owner)["_non_persistent_buffers_set"])

    def read(self) -> torch.Tensor:
        """Return the tensor that hangs there now."""
        found = store_of(self.owner, self.is_parameter)[self.key]
        assert found is not None  # a ref is only made of a tensor
        return found

    def peek(self) -> torch.Tensor | None:
        """Return the tensor that hangs there now; None if the module has let go of it."""
        # As store_of does; this is asked for each tensor at each use of a block.
        return self.owner.__dict__["_parameters" if self.is_parameter else "_buffers"].get(self.key)

    def write(self, tensor: torch.Tensor) -> None:
        """Set another tensor there, of whatever class."""
        # Not through setattr: a module refuses to hang a plain tensor where a parameter was.
        store_of(self.owner, self.is_parameter)[self.key] = tensor
        if isinstance(self.owner, nn.RNNBase):  # it keeps a list of its weights beside them
            names: list[str] = vars(self.owner)["_flat_weights_names"]
            vars(self.owner)["_flat_weights"] = [getattr(self.owner, name, None) for name in names]


def store_of(owner: nn.Module, is_parameter: bool) -> dict[str, torch.Tensor | None]:
    """Return a module's own table of parameters, or of buffers."""
    return vars(owner)["_parameters" if is_parameter else "_buffers"]


def named_modules(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Return all modules of a module and their names, itself as ``""`` first, each under its first name.

    Args:
        module: Any.
        every_name: Return a module that is registered several times under each name.
    """
    return cast("Any", module).named_modules(remove_duplicate=not every_name)


def refs_of(module: nn.Module) -> Iterator[tuple[str, TensorRef]]:
    """Return the full names and refs of all tensors below a module, tied ones under each of their names."""
    for prefix, owner in named_modules(module):
        dot = f"{prefix}." if prefix else ""
        for is_parameter in (True, False):
            for key, tensor in store_of(owner, is_parameter).items():
                if tensor is not None:
                    yield f"{dot}{key}", TensorRef(owner, key, is_parameter)


def has_forward(module: nn.Module) -> bool:
    """Whether calling the module computes something, and it is no mere list or namespace of others."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


# Parameters of bitsandbytes, which quantise their data when it gets to the device.
_QUANTISING = frozenset({"Int8Params", "FP4Params", "Params4bit"})


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters of a module, then its buffers, by name.

    Args:
        module: Whose tensors.
        include_buffers: Give buffers, too.
        recurse: Give those of the modules inside as well.
        remove_non_persistent: Leave out buffers that a state dict doesn't hold.

    >>> [name for name, _ in named_module_tensors(nn.BatchNorm1d(2))]
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out: set[str] = set()
    if remove_non_persistent:
        for prefix, inner in named_modules(module) if recurse else (("", module),):
            own = cast("Any", inner)._non_persistent_buffers_set
            left_out.update(f"{prefix}.{key}" if prefix else key for key in own)
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return by what two tensors of the same memory are known: device, address and bytes of their storage.

    Args:
        tensor: Of any kind. One that is made of others has no storage of its own, and gets its Python id.

    >>> one = torch.zeros(4)
    >>> id_tensor_storage(one) == id_tensor_storage(one[2:])
    True
    """
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        return tensor.device, id(tensor), tensor.numel() * tensor.dtype.itemsize
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _find_tensor(module: nn.Module, name: str) -> tuple[nn.Module, str, torch.Tensor]:
    """Find a parameter or buffer by its name.

    Returns:
        The module that has it, its name there, and it.

    Raises:
        ValueError: There is none.
    """
    path, _, key = name.rpartition(".")
    try:
        owner: Any = module.get_submodule(path)
    except AttributeError:
        owner = None
    found = None
    if owner is not None:
        found = owner._parameters.get(key)
        found = owner._buffers.get(key) if found is None else found
    if owner is None or found is None:
        raise ValueError(
            f"{type(module).__name__} has no parameter or buffer {name!r}. Names are those of "
            "named_parameters() and named_buffers()."
        )
    return owner, key, found


def replaced(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return what stands for ``value`` where ``old`` stood: a parameter of its class, or the plain tensor.

    A parameter keeps its ``requires_grad``, where the new dtype allows it, and the attributes that others
    have set on it.
    """
    if not isinstance(old, nn.Parameter) or is_traceable_wrapper_subclass(value):
        is_wrapped = isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter)
        return nn.Parameter(value, requires_grad=False) if is_wrapped else value
    needs_grad = old.requires_grad and (value.is_floating_point() or value.is_complex())
    kind: Any = type(old)
    if kind.__name__ in _QUANTISING:
        return kind(value, requires_grad=needs_grad, **vars(old))
    # Not by its constructor, which may want arguments of its own.
    new = nn.Parameter(value.detach(), requires_grad=needs_grad)
    if kind is not nn.Parameter and not is_lazy(old) and not is_traceable_wrapper_subclass(old):
        new = cast("nn.Parameter", torch.Tensor._make_subclass(kind, value.detach(), needs_grad))
    vars(new).update(vars(old))
    return new


def is_packable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is bytes in memory and nothing more.

    Tensors of classes of their own (quantised ones) know more than their bytes, and move by their own ``to``.
    """
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def put(refs: Iterable[TensorRef], old: torch.Tensor, value: torch.Tensor, *, as_new: bool = False) -> None:
    """Let ``value`` be what the modules hold, by the same object where it can be: optimizers know that still.

    Its gradient moves along: one on another device would be an error in the next backward.

    Args:
        refs: All those of the tensor.
        old: The tensor that hangs there.
        value: Of the same shape, on any device. Shared, not copied.
        as_new: The tensor lies elsewhere, too, and stays what it is.
    """
    if value is not old and not old.is_meta and not as_new and is_packable(old) and is_packable(value):
        old.data = value
        if old.grad is not None:
            old.grad.data = old.grad.data.to(value.device)
        new = old
    else:
        # Quantised weights know how to move themselves, and have done so.
        is_moved = value is old or (not is_packable(old) and type(value) is type(old))
        new = value if is_moved else replaced(old, value)
    for ref in refs:
        if ref.read() is not new:
            ref.write(new)


def tied_refs(refs: Mapping[str, TensorRef]) -> list[tuple[str, ...]]:
    """Return the names of each tensor; tied ones have several."""
    groups: dict[int, list[str]] = {}
    for name, ref in refs.items():
        groups.setdefault(id(ref.read()), []).append(name)
    return [tuple(group) for group in groups.values()]


def assign_values(
    refs: Mapping[str, TensorRef],
    device_of: Callable[[str, torch.Tensor], torch.device],
    values: Mapping[int, torch.Tensor],
) -> None:
    """Put every tensor on its device. Tied names stay one tensor wherever they are together.

    Args:
        refs: By name. Effect: on their modules.
        device_of: Returns the device for a name and the tensor that is there.
        values: By the ``id`` of a tensor that is there: what becomes its value, where that isn't its own.
    """
    for names in tied_refs(refs):
        old = refs[names[0]].read()
        value = values.get(id(old), old)
        by_device: dict[torch.device, list[TensorRef]] = {}
        for name in names:
            by_device.setdefault(device_of(name, old), []).append(refs[name])
        # The first place keeps the object, so that optimizers know it; what it had is copied before.
        moved = {device: _moved(old, value, device) for device in by_device}
        for number, (device, some) in enumerate(by_device.items()):
            put(some, old, moved[device], as_new=number > 0)


def _moved(old: torch.Tensor, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if value is old and is_on(old, device):
        return old
    return value.detach().to(device) if is_packable(old) else value.to(device)


def check_fit(name: str, value: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return ``value`` if it may take the place of ``now``.

    Raises:
        ValueError: It has another shape, or isn't of the same kind of numbers.
    """
    kinds = [(one.is_floating_point(), one.is_complex()) for one in (value, now)]
    if value.shape != now.shape or kinds[0] != kinds[1]:
        raise ValueError(
            f"{name!r} is {now.dtype} of shape {tuple(now.shape)} in the model, and {value.dtype} of shape "
            f"{tuple(value.shape)} in what was given. Pass the weights of this model."
        )
    return value


def _set_tensor(owner: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Put a tensor where a module has one of that name already."""
    is_parameter = vars(owner)["_parameters"].get(key) is not None
    TensorRef(owner, key, is_parameter).write(tensor)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: PlaceLike,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[Any, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a tensor of a module to a device, or put another value there.

    A parameter stays of its class, and keeps ``requires_grad`` and its attributes. A value that is on the
    device and of the dtype already is taken as it is, and shares its memory.

    Effect: on ``module``. The memory cache of the device isn't emptied, which would make it wait for all work
    and ask the driver for memory again at each tensor; :func:`accelfn.release_memory` empties it.

    Ranks: local.

    Args:
        module: That has the tensor, or holds the module that has it.
        tensor_name: With dots, from ``module``.
        device: Where to: a number, a name, ``"cpu:1"`` for a simulated one, or ``"meta"``.
        value: Of the same shape. None moves what is there.
        dtype: To cast floating-point numbers to. None: that of the tensor that is there.
        fp16_statistics: The scales of an int8 weight of bitsandbytes: becomes its ``SCB``.
        tied_params_map: By the address of a tensor, and then by device, what was put there for it. What it
            has isn't moved again, and what it lacks of an address in it is added.
        non_blocking: Don't wait for a copy from pinned memory.
        clear_cache: Accepted, and without effect.

    Raises:
        ValueError: There is no such tensor or device, the shape of ``value`` differs, or a tensor without
            data (meta) shall get to a device without a value.
    """
    owner, key, old = _find_tensor(module, tensor_name)
    is_meta = str(device) == "meta"
    target = torch.device("meta") if is_meta else check_device(read_place(device))
    if old.is_meta and not is_meta and value is None:
        raise ValueError(
            f"set_module_tensor_to_device: {tensor_name} has no data (meta device), so it can't be moved to "
            f"{device!r}. Pass its value."
        )
    wanted = read_dtype(dtype)
    source = old.detach() if value is None else value.detach()
    if value is not None:
        if value.shape != old.shape and type(old).__name__ != "Params4bit":
            raise ValueError(
                f"set_module_tensor_to_device: {tensor_name} has the shape {tuple(old.shape)}, and the value "
                f"has {tuple(value.shape)}."
            )
        if wanted is None:
            wanted = old.dtype if type(old).__name__ not in _QUANTISING else None
        elif not value.is_floating_point():
            wanted = None
    elif not old.is_floating_point():
        wanted = None
    address = source.data_ptr() if _has_memory(source) else 0
    known = tied_params_map.get(address) if tied_params_map is not None and address else None
    for there in (target, device):
        if known is not None and there in known:
            _set_tensor(owner, key, known[there])
            return
    if value is None and is_on(old, target) and wanted in (None, old.dtype):
        new = old
    elif type(old).__name__ in _QUANTISING and target.type != "meta":
        # They quantise on the way from the host to the device.
        new = replaced(old, source.to("cpu", dtype=wanted)).to(target, non_blocking=non_blocking)
    else:
        moved = source.to(target, dtype=wanted, non_blocking=non_blocking)
        new = replaced(old, moved)
    if fp16_statistics is not None:
        cast("Any", new).SCB = fp16_statistics.to(target, non_blocking=non_blocking)
    if new is not old:
        _set_tensor(owner, key, new)
    if known is not None:
        known[target] = new


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Turn ``"float16"``, ``"torch.float16"`` or ``"fp16"`` into a dtype.

    Raises:
        ValueError: torch has no such dtype.
        TypeError: It is neither a name nor a dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(cast("object", dtype), str):
        raise TypeError(f"dtype: takes a dtype of torch or its name, got {type(dtype).__name__}.")
    found = named_dtype(dtype)
    if found is None:
        raise ValueError(f"dtype: torch has none called {dtype!r}. Use 'float16', 'bfloat16' or another.")
    return found


def _has_memory(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not is_traceable_wrapper_subclass(tensor) and tensor.numel() > 0
