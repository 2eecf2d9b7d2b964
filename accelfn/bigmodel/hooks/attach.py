"""Hooks for all modules of a model, by its map of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from torch import nn

from accelfn.bigmodel.hooks.align import AlignDevicesHook, SharedStream
from accelfn.bigmodel.hooks.model_hook import SequentialHook, add_hook_to_module, hook_of
from accelfn.bigmodel.hooks.moves import module_tensors
from accelfn.bigmodel.load.offload_files import PrefixedDataset
from accelfn.bigmodel.offload.stream import Stream
from accelfn.bigmodel.places import PlaceLike

__all__ = ("attach_align_device_hook", "attach_align_device_hook_on_blocks", "attach_execution_device_hook")

T = TypeVar("T")

# They use the weights of modules inside of them without calling those.
_WHOLE = ("MultiheadAttention", "TransformerEncoderLayer")


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
    plan = _Plan(skip_keys=skip_keys, whole=tuple(preload_module_classes or ()))
    _execute_on(module, execution_device, plan)
    plan.apply(module)


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
    """Return an :class:`AlignDevicesHook` to each module that holds tensors of its own.

    The offloaded ones travel in one stream: while a module computes, the next one's tensors are underway.
    ``dispatch_model`` and ``cpu_offload`` do the same with whole layers, which is faster.

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
    plan = _Plan(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        whole=(*_WHOLE, *(preload_module_classes or ())),
    )
    _align(module, module_name, execution_device, offload, plan)
    plan.apply(module)


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
    plan = _Plan(
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        whole=(*_WHOLE, *(preload_module_classes or ())),
    )
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            _align(module, module_name, execution_device, True, plan)
        else:
            hook = AlignDevicesHook(
                execution_device, io_same_device=True, place_submodules=True, skip_keys=skip_keys
            )
            plan.add(module, hook, replaces=True)
    else:
        names = dict.fromkeys(
            (
                *(execution_device if isinstance(execution_device, Mapping) else ()),
                *(offload if isinstance(offload, Mapping) else ()),
            )
        )
        blocks = _Blocks(
            devices=_by_name(execution_device, names, "execution_device"),
            offload=_by_name(offload, names, "offload"),
        )
        _on_blocks(module, module_name, blocks, plan)
    plan.apply(module)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Hooks that one call adds, and what they have in common."""

    weights_map: Mapping[str, Any] | None = None
    offload_buffers: bool = False
    skip_keys: str | Sequence[str] | None = None
    whole: tuple[str, ...] = ()
    shared: SharedStream = field(default_factory=SharedStream)
    hooks: dict[nn.Module, list[AlignDevicesHook]] = field(
        default_factory=dict[nn.Module, list[AlignDevicesHook]]
    )
    replacing: set[nn.Module] = field(default_factory=set[nn.Module])

    def add(self, module: nn.Module, hook: AlignDevicesHook, *, replaces: bool = False) -> None:
        """Plan a hook: beside those that ``module`` has, or in their place.

        Of two that offload the later one counts: the inner block's, or that of a module's second place.
        """
        if replaces:
            self.replacing.add(module)
        others = () if replaces else self.hooks.get(module, ())
        self.hooks[module] = [*(one for one in others if not (one.offload and hook.offload)), hook]

    def has_hook(self, module: nn.Module) -> bool:
        """Whether ``module`` has a hook, or is to get one."""
        return module in self.hooks or hook_of(module) is not None

    def apply(self, top: nn.Module) -> None:
        """Add the hooks, if all can be added."""
        for module, hooks in self.hooks.items():
            for hook in hooks:
                hook.check(module)
        for module, hooks in self.hooks.items():
            for index, hook in enumerate(hooks):
                add_hook_to_module(module, hook, append=index > 0 or module not in self.replacing)
        _begin_at(top, self.shared.open())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    devices: Mapping[str, PlaceLike | None]
    offload: Mapping[str, bool]


def _align(module: nn.Module, name: str, device: PlaceLike | None, offload: bool, plan: _Plan) -> None:
    is_whole = offload and type(module).__name__ in plan.whole
    has_own = any(True for _ in module_tensors(module, recurse=False))
    if offload and (has_own or is_whole):
        hook = AlignDevicesHook(
            device,
            offload=True,
            weights_map=None if plan.weights_map is None else _part(plan.weights_map, name),
            offload_buffers=plan.offload_buffers,
            place_submodules=is_whole,
            skip_keys=plan.skip_keys,
        )
        hook.share(plan.shared, name, module)
        plan.add(module, hook)
    elif has_own:
        plan.add(module, AlignDevicesHook(device, skip_keys=plan.skip_keys))
    if is_whole:
        return
    for key, child in module.named_children():
        _align(child, f"{name}.{key}" if name else key, device, offload, plan)


def _on_blocks(module: nn.Module, name: str, blocks: _Blocks, plan: _Plan) -> None:
    is_root = not name
    if name in blocks.devices:
        device = blocks.devices[name]
        if blocks.offload[name]:
            _align(module, name, device, True, plan)
            if is_root or not plan.has_hook(module):
                plan.add(module, AlignDevicesHook(device, io_same_device=is_root, skip_keys=plan.skip_keys))
        else:
            hook = AlignDevicesHook(
                device,
                offload_buffers=plan.offload_buffers,
                io_same_device=is_root,
                place_submodules=True,
                skip_keys=plan.skip_keys,
            )
            plan.add(module, hook, replaces=True)
        if device is not None:
            _execute_on(module, device, plan)
    elif is_root:
        hook = AlignDevicesHook(io_same_device=True, skip_keys=plan.skip_keys)
        plan.add(module, hook, replaces=True)
    for key, child in module.named_children():
        _on_blocks(child, f"{name}.{key}" if name else key, blocks, plan)


def _execute_on(module: nn.Module, device: PlaceLike, plan: _Plan) -> None:
    if not plan.has_hook(module) and len(module.state_dict()) > 0:
        plan.add(module, AlignDevicesHook(device, skip_keys=plan.skip_keys))
    if type(module).__name__ not in plan.whole:
        for child in module.children():
            _execute_on(child, device, plan)


def _begin_at(module: nn.Module, streams: Sequence[Stream]) -> None:
    """Let the module at the top say how long blocks are fetched ahead."""
    if not streams:
        return
    found = hook_of(module)
    members = found.hooks if isinstance(found, SequentialHook) else (found,)
    top = next((hook for hook in members if isinstance(hook, AlignDevicesHook)), None)
    if top is None:
        top = AlignDevicesHook()
        add_hook_to_module(module, top, append=True)
    top.begin_scopes(streams)


def _part(weights_map: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return PrefixedDataset(weights_map, f"{name}.") if name else weights_map


def _by_name(said: T | Mapping[str, T], names: Iterable[str], what: str) -> Mapping[str, T]:
    if not isinstance(said, Mapping):
        return dict.fromkeys(names, said)
    said = cast("Mapping[str, T]", said)
    missing = [name for name in names if name not in said]
    if missing:
        raise ValueError(
            f"attach_align_device_hook_on_blocks: {what} says nothing of the block {missing[0]!r}, which the "
            "other mapping names. Name the same blocks in both."
        )
    return said
