"""Hooks that bring a module's tensors, arguments and outputs to the device where it computes."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.assign import TensorRef, assign_values, check_fit, put, refs_of
from accelfn.bigmodel.block_hooks import CallStack, input_device, moved
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.blocks import READ_BELOW, Block
from accelfn.bigmodel.devices import (
    Place,
    PlaceLike,
    check_device,
    current_place,
    is_on,
    is_simulated,
    listed,
    names_in,
    read_place,
)
from accelfn.bigmodel.hooks import ModelHook, add_hook_to_module, hook_of, members_of
from accelfn.bigmodel.weight_files import mapped_from

T = TypeVar("T")


def _values_of(
    refs: Mapping[str, TensorRef], weights_map: Mapping[str, Any] | None
) -> dict[int, torch.Tensor]:
    """Return what a mapping has for tensors, by their ``id``, on the host and in their dtypes.

    Raises:
        ValueError: A value doesn't fit, or a tensor without values would stay without.
    """
    values: dict[int, torch.Tensor] = {}
    for name, ref in refs.items():
        now = ref.read()
        value = None if weights_map is None or id(now) in values else cast("Any", weights_map).get(name)
        if isinstance(value, torch.Tensor) and not value.is_meta:
            values[id(now)] = check_fit(name, value, now).detach().to("cpu", now.dtype)
    bare = [name for name, ref in refs.items() if ref.read().is_meta and id(ref.read()) not in values]
    if bare:
        raise ValueError(
            f"AlignDevicesHook: {listed(map(repr, bare))} are on the meta device and have no values. Load "
            "them first (load_checkpoint_in_model), or pass weights_map and offload."
        )
    return values


def _settle(
    refs: Mapping[str, TensorRef],
    travels: Collection[str],
    weights_map: Mapping[str, Any] | None,
    device: torch.device | None,
) -> None:
    """Put tensors where they rest: those that travel on the host, in the memory of their values.

    The others come to the device, or stay where they are if that is None.
    """
    values = _values_of(refs, weights_map)
    rest = {id(refs[name].read()) for name in travels}

    def device_of(_: str, old: torch.Tensor) -> torch.device:
        return torch.device("cpu") if id(old) in rest else device or old.device

    own = {number: value if number in rest else value.clone() for number, value in values.items()}
    assign_values(refs, device_of, own)


class AlignDevicesHook(ModelHook):
    """Brings a module's tensors and arguments to the device where it computes.

    Without ``offload`` its tensors are moved there once. With ``offload`` they rest in the host's memory, as
    real parameters: ``state_dict()``, pickling, and training see them. During a forward the module holds
    copies on the device, and gradients arrive on the parameters at rest. On the CPU these are used.

    Args:
        execution_device: Where the module computes: a number, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which
            is simulated. None moves nothing; with ``offload`` it is the current accelerator, or the CPU.
        offload: Let the tensors rest in the host's memory.
        io_same_device: Give outputs back on the device of the first tensor among the arguments.
        weights_map: Values of offloaded tensors, by their names within the module; others keep what they
            have. They are read once, when the hook is added, and become the parameters' memory: without a
            copy if their dtype is the parameter's, so that training writes into them. Those of an
            ``OffloadedWeightsLoader`` stay in their files, mapped.
        offload_buffers: Let buffers travel too. Otherwise they are moved to the device once, with the values
            that ``weights_map`` has of them, as are those that aren't in the state_dict.
        place_submodules: All this for the tensors of the modules inside of it too.
        skip_keys: Keys of dicts in arguments and outputs, names of keyword arguments among them, below which
            nothing is moved.
        tied_params_map: Not needed here: tied parameters stay one object.

    Raises:
        ValueError: There is no such device here. When the hook is added: tensors have no values, or
            ``weights_map`` has some of another shape.
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
        if execution_device is not None or offload:
            self.place = (
                current_place()
                if execution_device is None
                else read_place(execution_device, "execution_device")
            )
        self.execution_device: torch.device | None = (
            None if self.place is None else check_device(self.place, "execution_device")
        )
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys: tuple[str, ...] = names_in(skip_keys)
        self.tied_params_map = tied_params_map
        self.stream: BlockPrefetcher | None = None
        self._origins: list[tuple[TensorRef, torch.device]] = []
        self._calls: CallStack[torch.device | None] = CallStack()  # of inputs

    def refs(self, module: nn.Module) -> dict[str, TensorRef]:
        """Return what the hook brings or moves, by names within the module."""
        found = dict(refs_of(module)) if self.offload or self.place is not None else {}
        return {name: ref for name, ref in found.items() if self.place_submodules or "." not in name}

    def travelling(self, module: nn.Module) -> dict[str, TensorRef]:
        """Return what rests on the host: parameters, and if asked to, buffers that state dicts have."""
        return {
            name: ref
            for name, ref in self.refs(module).items()
            if self.offload and (ref.is_parameter or (self.offload_buffers and ref.is_saved))
        }

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's tensors where they rest."""
        travels = self.travelling(module)
        self._origins = [(ref, ref.read().device) for ref in travels.values()]
        weights_map = self.weights_map if self.offload else None
        _settle(self.refs(module), travels, weights_map, self.execution_device)
        # On the CPU only the pages of mapped weights come and go.
        is_used = self.place != "cpu" or any(mapped_from(ref.read()) for ref in travels.values())
        if travels and self.place is not None and is_used:
            block = Block(name=type(module).__name__, module=module, refs=tuple(travels.values()))
            self.stream = BlockPrefetcher((block,), self.place, num_ahead=0)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move offloaded tensors where they were before; those that had no values keep what they have."""
        for ref, origin in self._origins:
            tensor = ref.read()
            if origin.type != "meta" and tensor.device != origin:
                put([ref], tensor, tensor.data.to(origin))
        self._origins, self.stream = [], None
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the module's tensors, and its arguments."""
        self._calls.values.append(input_device(args, kwargs) if self.io_same_device else None)
        if self.stream is not None:
            self.stream.enter(0, module)
        if self.execution_device is None:
            return args, kwargs
        return moved(args, self.execution_device, self.skip_keys), moved(
            kwargs, self.execution_device, self.skip_keys
        )

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the module's tensors rest again, and bring the output."""
        device = self._end(module)
        return output if device is None else moved(output, device, self.skip_keys)

    def after_error(self, module: nn.Module) -> None:
        """Let the module's tensors rest again."""
        self._end(module)

    def _end(self, module: nn.Module) -> torch.device | None:
        if self.stream is not None:
            self.stream.leave(0, module)
        return self._calls.pop()


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: PlaceLike,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: Mapping[int, Any] | None = None,
) -> None:
    """Bring the arguments of ``module``, and of all modules inside of it that hold tensors, to a device.

    Modules that have a hook already keep it, and get none beside it.

    Args:
        module: Changed: modules get hooks, and their own tensors are moved to the device.
        execution_device: A number, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is simulated.
        skip_keys: Keys of dicts in arguments below which nothing is moved.
        preload_module_classes: Names of classes below which no hooks are added.
        tied_params_map: Not needed here: tied parameters stay one object.

    Raises:
        ValueError: There is no such device here, or a tensor has no values.
    """
    plan = _Plan(skip_keys, preload_module_classes)
    plan.execute_on(module, execution_device)
    plan.apply(None)


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
    """Attach an :class:`AlignDevicesHook` to each module that holds tensors of its own.

    Each module's tensors come when it runs. ``dispatch_model`` and ``cpu_offload`` bring whole layers, and
    the next one while a layer computes, which is faster.

    Args:
        module: Changed. The hooks come beside those that modules have.
        execution_device: As for :class:`AlignDevicesHook`.
        offload: As for :class:`AlignDevicesHook`.
        weights_map: As for :class:`AlignDevicesHook`, with the names of the whole model.
        offload_buffers: As for :class:`AlignDevicesHook`.
        module_name: Name of ``module`` in the model, which ``weights_map`` knows.
        skip_keys: Keys of dicts in arguments below which nothing is moved.
        preload_module_classes: Names of classes whose tensors travel as a whole, with those of all modules
            inside: such that use these without calling the modules. Torch's own ones of the kind are known.
        tied_params_map: Not needed here: tied parameters stay one object.

    Raises:
        ValueError: There is no such device here, or values are missing.
    """
    plan = _Plan(skip_keys, preload_module_classes, offload_buffers)
    plan.align(module, module_name, execution_device, offload)
    plan.apply(weights_map)


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
    """Attach hooks to blocks of a model, each with a device of its own.

    Args:
        module: Changed.
        execution_device: Where the blocks compute, by their names; or one device for the whole model.
        offload: Whether the blocks' tensors rest in the host's memory, by their names; or one answer for all.
        weights_map: As for :class:`AlignDevicesHook`, with the names of the whole model.
        offload_buffers: As for :class:`AlignDevicesHook`.
        module_name: Name of ``module`` in the model.
        skip_keys: Keys of dicts in arguments and outputs below which nothing is moved.
        preload_module_classes: As for :func:`attach_align_device_hook`.
        tied_params_map: Not needed here: tied parameters stay one object.

    Raises:
        ValueError: There is no such device here, values are missing, or the mappings name different blocks.
    """
    plan = _Plan(skip_keys, preload_module_classes, offload_buffers)
    if isinstance(execution_device, Mapping) or isinstance(offload, Mapping):
        given = {"execution_device": execution_device, "offload": offload}
        by_name = {what: cast("Any", one) for what, one in given.items() if isinstance(one, Mapping)}
        names = dict.fromkeys(name for one in by_name.values() for name in one)
        for what, one in by_name.items():
            missing = [name for name in names if name not in one]
            if missing:
                raise ValueError(
                    f"attach_align_device_hook_on_blocks: {what} says nothing of the block {missing[0]!r}, "
                    "which the other mapping names. Name the same blocks in both."
                )
        devices, offloads = (
            cast("Any", by_name.get(what) or dict.fromkeys(names, one)) for what, one in given.items()
        )
        plan.on_blocks(module, module_name, devices, offloads)
    elif offload:
        plan.align(module, module_name, execution_device, True)
    else:
        plan.add(module, module_name, execution_device, True, io_same_device=True, place_submodules=True)
    plan.apply(weights_map)


class _Plan:
    """Hooks that one call adds to modules, each with the module's name; and which of these lose others."""

    def __init__(
        self,
        skip_keys: str | Sequence[str] | None,
        whole_classes: Iterable[str] | None,
        offload_buffers: bool = False,
    ) -> None:
        self.hooks: dict[nn.Module, list[tuple[str, AlignDevicesHook]]] = {}
        self.replacing: set[nn.Module] = set()
        self._options: dict[str, Any] = {"skip_keys": skip_keys, "offload_buffers": offload_buffers}
        self._whole = names_in(whole_classes)

    def add(
        self,
        module: nn.Module,
        name: str,
        device: PlaceLike | None,
        replaces: bool = False,
        **options: Any,
    ) -> None:
        """Plan a hook. Of two that offload the later one counts: the inner block's, or a second place's."""
        hook = AlignDevicesHook(device, **self._options, **options)
        if replaces:
            self.replacing.add(module)
        others = () if replaces else self.hooks.get(module, ())
        self.hooks[module] = [
            *(one for one in others if not (one[1].offload and hook.offload)),
            (name, hook),
        ]

    def apply(self, weights_map: Mapping[str, Any] | None) -> None:
        """Add the hooks, if all can be added."""
        refs: dict[str, TensorRef] = {}
        travels: set[str] = set()
        for module, hooks in self.hooks.items():
            for name, hook in hooks:
                dot = f"{name}." if name else ""
                if hook.offload:
                    refs.update((f"{dot}{key}", ref) for key, ref in hook.refs(module).items())
                    travels.update(f"{dot}{key}" for key in hook.travelling(module))
                else:
                    _values_of(hook.refs(module), None)
        _settle(refs, travels, weights_map, None)
        for module, hooks in self.hooks.items():
            for index, (_, hook) in enumerate(hooks):
                add_hook_to_module(module, hook, append=index > 0 or module not in self.replacing)

    def align(self, module: nn.Module, name: str, device: PlaceLike | None, offload: bool) -> None:
        """Plan a hook for each module that holds tensors of its own."""
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
        """Plan hooks for the blocks that are named."""
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
        """Plan hooks for the arguments of modules that have tensors and no hook."""
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
    """Return whether a hook brings the own tensors of ``module`` to a device for each forward.

    They are real in between all the same, so nothing has to be done before they are read or written. Of what
    ``dispatch_model`` does no module knows by itself; it needs no hooks of this kind.
    """
    return offload_hook_of(module) is not None


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: PlaceLike | None = None
) -> Generator[None, None, None]:
    """Have the own parameters of ``module`` on a device inside, to read or to change them there.

    Inside they are the same objects, with memory there; on simulated devices too. What is written into them,
    or hung in their place, stays afterwards.

    Args:
        module: Any; of modules inside of it nothing changes.
        execution_device: The device; None is the one where an offloaded module computes, and otherwise none.

    Raises:
        ValueError: There is no such device here.

    >>> module = nn.Linear(2, 2)
    >>> with align_module_device(module, "cpu:0"):
    ...     _ = nn.init.ones_(module.weight)
    >>> module.weight.sum().item()
    4.0
    """
    hook = offload_hook_of(module)
    place = None if hook is None else hook.place
    if execution_device is not None:
        place = read_place(execution_device, "execution_device")
    if place is None:
        yield
        return
    device = check_device(place, "execution_device")
    own = {name: ref for name, ref in refs_of(module) if "." not in name and ref.is_parameter}
    resting: list[tuple[TensorRef, torch.Tensor, torch.Tensor]] = []
    try:
        for ref in (own if hook is None else hook.travelling(module)).values():
            tensor = ref.read()
            if is_simulated(place) or not is_on(tensor, device):
                resting.append((ref, tensor, tensor.data))
                tensor.data = tensor.data.to(device, copy=True)
        yield
    finally:
        for ref, tensor, data in reversed(resting):
            now = ref.read()
            if now is not tensor:  # another was hung in its place
                put([ref], now, now.data.to(data.device))
            back = tensor.data.to(data.device)
            # Only what has changed: what is mapped from a file would otherwise get memory of its own.
            if not torch.equal(back, data):
                data.copy_(back)
            tensor.data = data


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, all of it with values on the CPU.

    Offloaded models have real values at rest, so ``model.state_dict()`` returns the same, but for tensors
    that are on an accelerator, which are copied here.

    Args:
        model: Any, offloaded or not.

    Raises:
        ValueError: Tensors have no values.
    """
    state: dict[str, Any] = model.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    empty = [name for name, value in tensors.items() if value.is_meta]
    if empty:
        raise ValueError(
            f"get_state_dict_offloaded_model: {listed(map(repr, empty))} have no values: they "
            "are on the meta device. Load the weights first (load_checkpoint_in_model)."
        )
    return {**state, **{name: value.to("cpu") for name, value in tensors.items()}}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: PlaceLike = "cpu",
) -> dict[str, Any]:
    """Put the real values of one module's tensors into a state dict that names them.

    Effect: on ``state_dict``.

    Args:
        module: Has the tensors itself, or in modules inside of it.
        module_name: Full name of one of its own tensors: what stands before the last dot is the module's.
        state_dict: By full names. Only entries that it has already are set.
        device_to_put_offload: Where the values go.

    Returns:
        ``state_dict`` itself.

    Raises:
        ValueError: There is no such device here.

    >>> state = get_state_dict_from_offload(nn.Linear(2, 1), "head.weight", {"head.bias": "", "b": ""})
    >>> state["head.bias"].shape, state["b"]
    (torch.Size([1]), '')
    """
    device = check_device(read_place(device_to_put_offload, "device_to_put_offload"), "device_to_put_offload")
    prefix = module_name.rpartition(".")[0]
    for name, value in module.state_dict().items():
        full = f"{prefix}.{name}" if prefix else name
        if full in state_dict and isinstance(value, torch.Tensor):
            state_dict[full] = value.to(device)
    return state_dict
