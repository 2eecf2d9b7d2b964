"""Hooks that move a module's tensors, arguments and outputs to the device where it runs."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.block_hooks import Moves, read_device
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.blocks import READ_BELOW, Block
from accelfn.bigmodel.dispatch import bare_names, find_values
from accelfn.bigmodel.hooks import ModelHook, add_hook_to_module, hook_of, members_of
from accelfn.bigmodel.model_info import require_values
from accelfn.weights.assign import TensorRef, assign_values, put, refs_of
from accelfn.weights.places import Place, PlaceLike, as_names, is_on, is_simulated
from accelfn.weights.stored import mapped_from

T = TypeVar("T")


def _values_of(
    refs: Mapping[str, TensorRef], weights_map: Mapping[str, Any] | None
) -> dict[int, torch.Tensor]:
    """Return the values of tensors in a mapping, by ``id`` of the tensor, on the host and in their dtypes.

    Raises:
        ValueError: A value doesn't fit, or a meta tensor has no value.
    """
    tensors = {name: ref.read() for name, ref in refs.items()}
    values = {
        id(tensors[name]): value.detach().to("cpu", tensors[name].dtype)
        for name, value in find_values(tensors, weights_map, tensors)
    }
    todo = "Load them first (load_checkpoint_in_model), or pass weights_map and offload."
    require_values("AlignDevicesHook", map(repr, bare_names(tensors, values)), todo)
    return values


def _store_tensors(
    refs: Mapping[str, TensorRef],
    offloaded: Collection[str],
    weights_map: Mapping[str, Any] | None,
    device: torch.device | None,
) -> None:
    """Move offloaded tensors to the host, where they share the memory of their values.

    Other tensors are moved to ``device``, unless it is None.
    """
    values = _values_of(refs, weights_map)
    on_host = {id(refs[name].read()) for name in offloaded}

    def device_of(_: str, old: torch.Tensor) -> torch.device:
        return torch.device("cpu") if id(old) in on_host else device or old.device

    owned = {identity: value if identity in on_host else value.clone() for identity, value in values.items()}
    assign_values(refs, device_of, owned)


class AlignDevicesHook(ModelHook):
    """Moves a module's tensors and arguments to the device where it runs.

    Without ``offload`` its tensors are moved once. With ``offload`` they are stored in host memory, as real
    parameters that ``state_dict()``, pickling and training see. During a forward the module holds copies on
    the device, and gradients arrive on the stored parameters. The CPU uses these in place.

    Args:
        execution_device: Where the module runs: an index, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is
            simulated. None moves nothing; with ``offload`` it is the current accelerator, or the CPU.
        offload: Store the tensors in host memory.
        io_same_device: Move outputs to the device of the first tensor in the arguments.
        weights_map: Values of offloaded tensors by name within the module; other tensors keep their values.
            They are read once, when the hook is added, and shared with the parameters if the dtypes are
            equal, so training modifies them. Those of an ``OffloadedWeightsLoader`` stay mapped.
        offload_buffers: Offload buffers too. Otherwise, and if they are non-persistent, they are moved to the
            device once, with their values in ``weights_map``.
        place_submodules: Include the tensors of modules below it.
        skip_keys: Names of keyword arguments, and keys of dicts in arguments and outputs, that aren't moved.
        tied_params_map: Accepted for compatibility; tied parameters stay one object.

    Raises:
        ValueError: This machine has no such device; or, when the hook is added, tensors have no values, or
            values in ``weights_map`` have other shapes.
    """

    def __init__(
        self,
        execution_device: PlaceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: Mapping[int, Any] | None = None,
    ) -> None:
        self.place: Place | None = None
        self.execution_device: torch.device | None = None
        if execution_device is not None or offload:
            self.place, self.execution_device = read_device(execution_device)
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys: tuple[str, ...] = as_names(skip_keys)
        self.tied_params_map = tied_params_map
        self.stream: BlockPrefetcher | None = None
        self._origins: list[tuple[TensorRef, torch.device]] = []
        self._moves = Moves(self.execution_device, io_same_device, self.skip_keys)

    def refs(self, module: nn.Module) -> dict[str, TensorRef]:
        """Return the tensors that the hook moves, by name within the module."""
        if not self.offload and self.place is None:
            return {}
        return {name: ref for name, ref in refs_of(module) if self.place_submodules or "." not in name}

    def offloaded(self, module: nn.Module) -> dict[str, TensorRef]:
        """Return the offloaded tensors: parameters, and with ``offload_buffers`` persistent buffers."""
        return {
            name: ref
            for name, ref in self.refs(module).items()
            if self.offload and (ref.is_parameter or (self.offload_buffers and ref.is_saved))
        }

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's tensors to where they are stored."""
        offloaded = self.offloaded(module)
        self._origins = [(ref, ref.read().device) for ref in offloaded.values()]
        weights_map = self.weights_map if self.offload else None
        _store_tensors(self.refs(module), offloaded, weights_map, self.execution_device)
        # On the CPU only pages of mapped weights are read and released.
        needs_transfer = self.place != "cpu" or any(mapped_from(ref.read()) for ref in offloaded.values())
        if offloaded and self.place is not None and needs_transfer:
            block = Block(name=type(module).__name__, module=module, refs=tuple(offloaded.values()))
            self.stream = BlockPrefetcher((block,), self.place, num_ahead=0)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move offloaded tensors back; those that were on the meta device stay on the host."""
        for ref, origin in self._origins:
            tensor = ref.read()
            if origin.type != "meta" and tensor.device != origin:
                put([ref], tensor, tensor.data.to(origin))
        self._origins, self.stream = [], None
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Transfer the module's tensors, and move its arguments."""
        changed = self._moves.before(module, args, kwargs)
        if self.stream is not None:
            self.stream.enter(0, module)
        return changed

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Restore the module's tensors, and move the output."""
        if self.stream is not None:
            self.stream.leave(0, module)
        return self._moves.after(module, (), output)

    def after_error(self, module: nn.Module) -> None:
        """Restore the module's tensors."""
        self.post_forward(module, None)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: PlaceLike,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
) -> None:
    """Attach an :class:`AlignDevicesHook` to ``module`` and all modules below it that contain tensors.

    It moves their own tensors to the device once, and their arguments in each forward. Modules that have a
    hook already are skipped.

    Args:
        module: The root, which is modified.
        execution_device: An index, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is simulated.
        skip_keys: Keys of dicts in arguments that aren't moved.
        preload_module_classes: Names of classes below which no hooks are attached.
        tied_params_map: Accepted for compatibility; tied parameters stay one object.

    Raises:
        ValueError: This machine has no such device, or a tensor has no values.
    """
    plan = _HookPlan(skip_keys, preload_module_classes)
    plan.execute_on(module, execution_device)
    plan.attach(None)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: PlaceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
) -> None:
    """Attach an :class:`AlignDevicesHook` to each module with its own tensors.

    Each module's tensors are transferred when it runs. ``dispatch_model`` and ``cpu_offload`` are faster,
    since they transfer whole layers and prefetch the next one.

    Args:
        module: The root, which is modified. Modules keep their other hooks.
        execution_device: As for :class:`AlignDevicesHook`.
        offload: As for :class:`AlignDevicesHook`.
        weights_map: As for :class:`AlignDevicesHook`, with full names.
        offload_buffers: As for :class:`AlignDevicesHook`.
        module_name: Name of ``module`` in the model, for ``weights_map``.
        skip_keys: Keys of dicts in arguments that aren't moved.
        preload_module_classes: Names of classes whose tensors are transferred with those of all modules
            below, since they use these without calling the modules. Those of torch are known.
        tied_params_map: Accepted for compatibility; tied parameters stay one object.

    Raises:
        ValueError: This machine has no such device, or values are missing.
    """
    plan = _HookPlan(skip_keys, preload_module_classes, offload_buffers)
    plan.align(module, module_name, execution_device, offload)
    plan.attach(weights_map)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: PlaceLike | Mapping[str, PlaceLike] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
) -> None:
    """Attach hooks to blocks of a model, each with its own device.

    Args:
        module: The root, which is modified.
        execution_device: Where the blocks run, by name; or one device for the whole model.
        offload: Whether the blocks' tensors are stored in host memory, by name; or one value for all.
        weights_map: As for :class:`AlignDevicesHook`, with full names.
        offload_buffers: As for :class:`AlignDevicesHook`.
        module_name: Name of ``module`` in the model.
        skip_keys: Keys of dicts in arguments and outputs that aren't moved.
        preload_module_classes: As for :func:`attach_align_device_hook`.
        tied_params_map: Accepted for compatibility; tied parameters stay one object.

    Raises:
        ValueError: This machine has no such device, values are missing, or the mappings name different
            blocks.
    """
    plan = _HookPlan(skip_keys, preload_module_classes, offload_buffers)
    if isinstance(execution_device, Mapping) or isinstance(offload, Mapping):
        given = (execution_device, offload)
        mappings = [cast("Mapping[str, Any]", value) for value in given if isinstance(value, Mapping)]
        names = {name for mapping in mappings for name in mapping}
        devices: Mapping[str, PlaceLike | None] = _by_block("execution_device", execution_device, names)
        plan.on_blocks(module, module_name, devices, _by_block("offload", offload, names))
    elif offload:
        plan.align(module, module_name, execution_device, True)
    else:
        plan.add(module, module_name, execution_device, True, io_same_device=True, place_submodules=True)
    plan.attach(weights_map)


def _by_block(what: str, value: T | Mapping[str, T], names: Collection[str]) -> Mapping[str, T]:
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    by_name = cast("Mapping[str, T]", value)
    missing = sorted(name for name in names if name not in by_name)
    if missing:
        raise ValueError(
            f"attach_align_device_hook_on_blocks: {what} lacks the block {missing[0]!r} of the other "
            "mapping. Both must name the same blocks."
        )
    return by_name


class _HookPlan:
    """The hooks that one call attaches, with their modules' names, and the modules that lose other hooks."""

    def __init__(
        self,
        skip_keys: str | Sequence[str] | None,
        whole_classes: Iterable[str] | None,
        offload_buffers: bool = False,
    ) -> None:
        self.hooks: dict[nn.Module, list[tuple[str, AlignDevicesHook]]] = {}
        self.replacing: set[nn.Module] = set()
        self._options: dict[str, Any] = {"skip_keys": skip_keys, "offload_buffers": offload_buffers}
        self._whole = as_names(whole_classes)

    def add(
        self,
        module: nn.Module,
        name: str,
        device: PlaceLike | None,
        replaces: bool = False,
        **options: Any,
    ) -> None:
        """Plan a hook. Of several hooks that offload, the last one replaces the others."""
        hook = AlignDevicesHook(device, **self._options, **options)
        if replaces:
            self.replacing.add(module)
        others = () if replaces else self.hooks.get(module, ())
        kept = [other for other in others if not (other[1].offload and hook.offload)]
        self.hooks[module] = [*kept, (name, hook)]

    def attach(self, weights_map: Mapping[str, Any] | None) -> None:
        """Attach the hooks, after checking that all can be attached."""
        refs: dict[str, TensorRef] = {}
        offloaded: set[str] = set()
        for module, hooks in self.hooks.items():
            for name, hook in hooks:
                dot = f"{name}." if name else ""
                if hook.offload:
                    refs.update((f"{dot}{key}", ref) for key, ref in hook.refs(module).items())
                    offloaded.update(f"{dot}{key}" for key in hook.offloaded(module))
                else:
                    _values_of(hook.refs(module), None)
        _store_tensors(refs, offloaded, weights_map, None)
        for module, hooks in self.hooks.items():
            for index, (_, hook) in enumerate(hooks):
                add_hook_to_module(module, hook, append=index > 0 or module not in self.replacing)

    def align(self, module: nn.Module, name: str, device: PlaceLike | None, offload: bool) -> None:
        """Plan a hook for each module with its own tensors."""
        is_whole = offload and (isinstance(module, READ_BELOW) or type(module).__name__ in self._whole)
        if is_whole or any(True for key, _ in refs_of(module) if "." not in key):
            self.add(module, name, device, offload=offload, place_submodules=is_whole)
        if not is_whole:
            for key, child in module.named_children():
                self.align(child, f"{name}.{key}" if name else key, device, offload)

    def on_blocks(
        self,
        module: nn.Module,
        name: str,
        devices: Mapping[str, PlaceLike | None],
        offload: Mapping[str, bool],
    ) -> None:
        """Plan hooks for the named blocks."""
        is_root, is_named = not name, name in devices
        if is_named and offload[name]:
            self.align(module, name, devices[name], True)
            if is_root or not self._has_hook(module):
                self.add(module, name, devices[name], io_same_device=is_root)
        elif is_named or is_root:
            options = {"io_same_device": is_root, "place_submodules": is_named}
            self.add(module, name, devices.get(name), True, **options)
        device = devices.get(name)
        if device is not None:
            self.execute_on(module, device)
        for key, child in module.named_children():
            self.on_blocks(child, f"{name}.{key}" if name else key, devices, offload)

    def execute_on(self, module: nn.Module, device: PlaceLike) -> None:
        """Plan hooks for modules that contain tensors and have no hook."""
        if not self._has_hook(module) and len(module.state_dict()) > 0:
            self.add(module, "", device)
        if type(module).__name__ not in self._whole:
            for child in module.children():
                self.execute_on(child, device)

    def _has_hook(self, module: nn.Module) -> bool:
        return module in self.hooks or hook_of(module) is not None


def offload_hook_of(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that offloads the tensors of ``module``, or None."""
    members = members_of(hook_of(module))
    return next((hook for hook in members if isinstance(hook, AlignDevicesHook) and hook.offload), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Check whether ``module`` has an :class:`AlignDevicesHook` that offloads its tensors.

    Offloaded tensors are real, so they can be read and written as usual. False for the modules of
    ``dispatch_model``, which doesn't use these hooks.
    """
    return offload_hook_of(module) is not None


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: PlaceLike | None = None
) -> Generator[None, None, None]:
    """Move the own parameters of ``module`` to a device within the context, to read or modify them there.

    They stay the same objects. Values written to them, and parameters assigned in their place, are kept.

    Args:
        module: Any module; modules below it aren't affected.
        execution_device: The device; None is that of an offloaded module, and moves nothing of others.

    Raises:
        ValueError: This machine has no such device.

    >>> module = nn.Linear(2, 2)
    >>> with align_module_device(module, "cpu:0"):
    ...     _ = nn.init.ones_(module.weight)
    >>> module.weight.sum().item()
    4.0
    """
    hook = offload_hook_of(module)
    if execution_device is None and hook is None:
        yield
        return
    place, device = read_device(hook.place if hook and execution_device is None else execution_device)
    own = {name: ref for name, ref in refs_of(module) if "." not in name and ref.is_parameter}
    stored: list[tuple[TensorRef, torch.Tensor, torch.Tensor]] = []
    try:
        for ref in (own if hook is None else hook.offloaded(module)).values():
            tensor = ref.read()
            if is_simulated(place) or not is_on(tensor, device):
                stored.append((ref, tensor, tensor.data))
                tensor.data = tensor.data.to(device, copy=True)
        yield
    finally:
        for ref, tensor, data in reversed(stored):
            current = ref.read()
            if current is not tensor:
                put([ref], current, current.data.to(data.device))
            value = tensor.data.to(data.device)
            # Only modified tensors, since writing to a mapped one allocates memory.
            if not torch.equal(value, data):
                data.copy_(value)
            tensor.data = data


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model with all tensors on the CPU.

    Offloaded tensors are real, so this is ``model.state_dict()`` with copies of the tensors on accelerators.

    Args:
        model: Any module, offloaded or not.

    Raises:
        ValueError: Tensors have no values.
    """
    state: dict[str, Any] = model.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    bare = [repr(name) for name, value in tensors.items() if value.is_meta]
    todo = "Load the weights first (load_checkpoint_in_model)."
    require_values("get_state_dict_offloaded_model", bare, todo)
    return {**state, **{name: value.to("cpu") for name, value in tensors.items()}}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: PlaceLike = "cpu",
) -> dict[str, Any]:
    """Set the entries of a module's tensors in a state dict.

    Effect: on ``state_dict``.

    Args:
        module: The module.
        module_name: Full name of one of its own tensors, from which the module's name is derived.
        state_dict: By full name. Only existing entries are set.
        device_to_put_offload: The device of the values.

    Returns:
        ``state_dict`` itself.

    Raises:
        ValueError: This machine has no such device.

    >>> state = get_state_dict_from_offload(nn.Linear(2, 1), "head.weight", {"head.bias": "", "b": ""})
    >>> state["head.bias"].shape, state["b"]
    (torch.Size([1]), '')
    """
    _, device = read_device(device_to_put_offload, "device_to_put_offload")
    prefix = module_name.rpartition(".")[0]
    for name, value in module.state_dict().items():
        full = f"{prefix}.{name}" if prefix else name
        if full in state_dict and isinstance(value, torch.Tensor):
            state_dict[full] = value.to(device)
    return state_dict
