"""References to the tensors of modules, and how to assign other tensors to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.weights.places import PlaceLike, check_device, is_on, named_dtype, read_place


class TensorRef(NamedTuple):
    """A parameter or buffer of a module.

    Attributes:
        owner: The module.
        key: The tensor's name in it.
        is_parameter: Whether it is a parameter.
    """

    owner: nn.Module
    key: str
    is_parameter: bool

    @property
    def is_saved(self) -> bool:
        """Whether it is in the state dict: false for non-persistent buffers."""
        return self.key not in cast("set[str]", vars(self.owner)["_non_persistent_buffers_set"])

    def read(self) -> torch.Tensor:
        """Return the current tensor."""
        tensor = store_of(self.owner, self.is_parameter)[self.key]
        assert tensor is not None  # a ref is only made of a tensor
        return tensor

    def peek(self) -> torch.Tensor | None:
        """Return the current tensor; None if the module has deleted it."""
        # As store_of, but faster: this runs for each tensor at each use of a block.
        return self.owner.__dict__["_parameters" if self.is_parameter else "_buffers"].get(self.key)

    def write(self, tensor: torch.Tensor) -> None:
        """Assign a tensor of any class."""
        # Not through setattr, which refuses a plain tensor in place of a parameter.
        store_of(self.owner, self.is_parameter)[self.key] = tensor
        if isinstance(self.owner, nn.RNNBase):  # it also keeps a list of its weights
            names: list[str] = vars(self.owner)["_flat_weights_names"]
            vars(self.owner)["_flat_weights"] = [getattr(self.owner, name, None) for name in names]


def store_of(owner: nn.Module, is_parameter: bool) -> dict[str, torch.Tensor | None]:
    """Return a module's own dict of parameters, or of buffers."""
    return vars(owner)["_parameters" if is_parameter else "_buffers"]


def named_modules(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules and their names, the root first.

    Args:
        module: The root.
        every_name: Yield a module that is registered several times under each name.
    """
    return cast("Any", module).named_modules(remove_duplicate=not every_name)


def refs_of(module: nn.Module) -> Iterator[tuple[str, TensorRef]]:
    """Yield full names and refs of all tensors of a module, tied ones under each of their names."""
    for prefix, owner in named_modules(module):
        dot = f"{prefix}." if prefix else ""
        for is_parameter in (True, False):
            for key, tensor in store_of(owner, is_parameter).items():
                if tensor is not None:
                    yield f"{dot}{key}", TensorRef(owner, key, is_parameter)


def loads_in_its_own_way(module: nn.Module) -> bool:
    """Whether a module has hooks or methods for loading that aren't torch's."""
    kind, state = cast("Any", type(module)), vars(module)
    hooks = [*state["_load_state_dict_pre_hooks"].values(), *state["_load_state_dict_post_hooks"].values()]
    ways = [kind.load_state_dict, kind._load_from_state_dict, *(getattr(one, "hook", one) for one in hooks)]
    return not all(str(getattr(way, "__module__", "")).startswith("torch.") for way in ways)


def has_forward(module: nn.Module) -> bool:
    """Check whether a module can be called, unlike a mere list or dict of others."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


# Parameters of bitsandbytes, which quantise their data when they are moved to the device.
_QUANTISING = frozenset({"Int8Params", "FP4Params", "Params4bit"})


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a module, then its buffers, by name.

    Args:
        module: Any module.
        include_buffers: Whether to yield buffers.
        recurse: Whether to yield the tensors of modules below it too.
        remove_non_persistent: Whether to leave out non-persistent buffers.

    >>> [name for name, _ in named_module_tensors(nn.BatchNorm1d(2))]
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    non_persistent: set[str] = set()
    if remove_non_persistent:
        for prefix, inner in named_modules(module) if recurse else (("", module),):
            keys = cast("Any", inner)._non_persistent_buffers_set
            non_persistent.update(f"{prefix}.{key}" if prefix else key for key in keys)
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in non_persistent:
            yield name, buffer


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what identifies a tensor's memory: device, address and size of its storage.

    Args:
        tensor: Any tensor. One that consists of other tensors has no storage, and is identified by its id.

    >>> one = torch.zeros(4)
    >>> id_tensor_storage(one) == id_tensor_storage(one[2:])
    True
    """
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        return tensor.device, id(tensor), tensor.numel() * tensor.dtype.itemsize
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def replaced(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the object with the data of ``value`` that replaces ``old``.

    A parameter keeps its class, its attributes, and ``requires_grad`` if the new dtype allows it.
    """
    if not isinstance(old, nn.Parameter) or is_traceable_wrapper_subclass(value):
        is_wrapped = isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter)
        return nn.Parameter(value, requires_grad=False) if is_wrapped else value
    needs_grad = old.requires_grad and (value.is_floating_point() or value.is_complex())
    kind: Any = type(old)
    if kind.__name__ in _QUANTISING:
        return kind(value, requires_grad=needs_grad, **vars(old))
    # Not through the constructor of the class, which may require other arguments.
    new = nn.Parameter(value.detach(), requires_grad=needs_grad)
    if kind is not nn.Parameter and not is_lazy(old) and not is_traceable_wrapper_subclass(old):
        new = cast("nn.Parameter", torch.Tensor._make_subclass(kind, value.detach(), needs_grad))
    vars(new).update(vars(old))
    return new


def is_packable(tensor: torch.Tensor) -> bool:
    """Check whether a tensor is fully described by its bytes, dtype, shape and strides.

    Tensor subclasses, such as quantised tensors, have more state and are moved by their own ``to``.
    """
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def put(refs: Iterable[TensorRef], old: torch.Tensor, value: torch.Tensor, *, as_new: bool = False) -> None:
    """Assign ``value`` to refs, through the object ``old`` where possible, which optimizers may refer to.

    Its gradient is moved along, since the next backward couldn't add to one on another device.

    Args:
        refs: All refs of the tensor.
        old: Their current tensor.
        value: A tensor of the same shape, on any device. Shared, not copied.
        as_new: Leave ``old`` alone, since other refs keep it.
    """
    if value is not old and not old.is_meta and not as_new and is_packable(old) and is_packable(value):
        old.data = value
        if old.grad is not None:
            old.grad.data = old.grad.data.to(value.device)
        new = old
    else:
        # Quantised weights have been moved by their own method, which returns the new object.
        is_moved = value is old or (not is_packable(old) and type(value) is type(old))
        new = value if is_moved else replaced(old, value)
    for ref in refs:
        if ref.read() is not new:
            ref.write(new)


def tied_refs(refs: Mapping[str, TensorRef]) -> list[tuple[str, ...]]:
    """Return the names of each distinct tensor."""
    groups: dict[int, list[str]] = {}
    for name, ref in refs.items():
        groups.setdefault(id(ref.read()), []).append(name)
    return [tuple(group) for group in groups.values()]


def assign_values(
    refs: Mapping[str, TensorRef],
    device_of: Callable[[str, torch.Tensor], torch.device],
    values: Mapping[int, torch.Tensor],
) -> None:
    """Move every tensor to its device. Tied names on the same device stay one tensor.

    Args:
        refs: By name. Effect: on their modules.
        device_of: Returns the device for a name and its current tensor.
        values: New values by the ``id`` of the current tensor; others keep their value.
    """
    for names in tied_refs(refs):
        old = refs[names[0]].read()
        value = values.get(id(old), old)
        by_device: dict[torch.device, list[TensorRef]] = {}
        for name in names:
            by_device.setdefault(device_of(name, old), []).append(refs[name])
        # The first device keeps the object, for optimizers; its data is copied for the others before.
        moved = {device: _moved(old, value, device) for device in by_device}
        for index, (device, some) in enumerate(by_device.items()):
            put(some, old, moved[device], as_new=index > 0)


def _moved(old: torch.Tensor, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if value is old and is_on(old, device):
        return old
    return value.detach().to(device) if is_packable(old) else value.to(device)


def check_fit(name: str, value: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Return ``value`` if it can replace ``current``.

    Raises:
        ValueError: Its shape or its kind of dtype differs.
    """
    kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (value, current)]
    if value.shape != current.shape or kinds[0] != kinds[1]:
        raise ValueError(
            f"{name!r} is {current.dtype} of shape {tuple(current.shape)} in the model, but the given value "
            f"is {value.dtype} of shape {tuple(value.shape)}. Pass the weights of this model."
        )
    return value


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
    """Move a tensor of a module to a device, or assign another value on that device.

    A parameter keeps its class, ``requires_grad`` and attributes. A value that has the device and dtype
    already is shared, not copied.

    Effect: on ``module``. The device's memory cache isn't emptied, which would synchronise with the device
    at each tensor; :func:`accelfn.training.release_memory` empties it.

    Ranks: local.

    Args:
        module: A module that contains the tensor.
        tensor_name: The tensor's name in ``module``, with dots.
        device: An index, a name, ``"cpu:1"`` for a simulated device, or ``"meta"``.
        value: A value of the same shape. None moves the current one.
        dtype: What to cast floating tensors to. None: the dtype of the current tensor.
        fp16_statistics: The scales of a bitsandbytes int8 weight, assigned to its ``SCB``.
        tied_params_map: Moved tensors by address of the original and by device. Entries are used instead of
            moving again; missing devices of listed addresses are added.
        non_blocking: Don't wait for a copy from pinned memory.
        clear_cache: Accepted for compatibility; no effect.

    Raises:
        ValueError: There is no such tensor or device, ``value`` has another shape, or a meta tensor is to be
            moved to a device without a value.
    """
    path, _, key = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = None
    refs = [] if owner is None else [TensorRef(owner, key, is_parameter) for is_parameter in (True, False)]
    ref = next((ref for ref in refs if ref.peek() is not None), None)
    if ref is None:
        raise ValueError(
            f"{type(module).__name__} has no parameter or buffer {tensor_name!r}. Use a name of "
            "named_parameters() or named_buffers()."
        )
    old = ref.read()
    is_meta = str(device) == "meta"
    target = torch.device("meta") if is_meta else check_device(read_place(device))
    if old.is_meta and not is_meta and value is None:
        raise ValueError(
            f"set_module_tensor_to_device: {tensor_name} is on the meta device and has no data to move to "
            f"{device!r}. Pass value=."
        )
    new_dtype = read_dtype(dtype)
    is_quantising = type(old).__name__ in _QUANTISING
    source = old.detach() if value is None else value.detach()
    if value is not None:
        if value.shape != old.shape and type(old).__name__ != "Params4bit":
            raise ValueError(
                f"set_module_tensor_to_device: {tensor_name} has shape {tuple(old.shape)}, but the value has "
                f"shape {tuple(value.shape)}."
            )
        if new_dtype is None:
            new_dtype = None if is_quantising else old.dtype
        elif not value.is_floating_point():
            new_dtype = None
    elif not old.is_floating_point():
        new_dtype = None
    address = source.data_ptr() if _has_memory(source) else 0
    known = tied_params_map.get(address) if tied_params_map is not None and address else None
    for key_device in (target, device):
        if known is not None and key_device in known:
            ref.write(known[key_device])
            return
    if value is None and is_on(old, target) and new_dtype in (None, old.dtype):
        new = old
    elif is_quantising and not is_meta:
        # They quantise when they are moved from the host to the device.
        new = replaced(old, source.to("cpu", dtype=new_dtype)).to(target, non_blocking=non_blocking)
    else:
        new = replaced(old, source.to(target, dtype=new_dtype, non_blocking=non_blocking))
    if fp16_statistics is not None:
        cast("Any", new).SCB = fp16_statistics.to(target, non_blocking=non_blocking)
    ref.write(new)
    if known is not None:
        known[target] = new


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Convert ``"float16"``, ``"torch.float16"`` or ``"fp16"`` to a dtype.

    Raises:
        ValueError: torch has no such dtype.
        TypeError: ``dtype`` is neither a name nor a dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(cast("object", dtype), str):
        raise TypeError(f"dtype must be a torch dtype or its name, got {type(dtype).__name__}.")
    named = named_dtype(dtype)
    if named is None:
        raise ValueError(f"dtype: torch has no dtype {dtype!r}. Use 'float16', 'bfloat16' or another.")
    return named


def _has_memory(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not is_traceable_wrapper_subclass(tensor) and tensor.numel() > 0
