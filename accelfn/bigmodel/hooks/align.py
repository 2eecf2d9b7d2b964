"""Tensors that are where a module computes while it computes: its own, its arguments, and its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from accelfn.bigmodel.hooks.calls import CallStack
from accelfn.bigmodel.hooks.host_weights import (
    AtRest,
    Replaced,
    check_values,
    given_by,
    install,
    lay_to_rest,
    move_in_place,
    travelling,
    values_for,
)
from accelfn.bigmodel.hooks.model_hook import ModelHook
from accelfn.bigmodel.load.mapped import mapped_from
from accelfn.bigmodel.offload.blocks import Block, Slot
from accelfn.bigmodel.offload.move import input_device, moved
from accelfn.bigmodel.offload.stream import Stream
from accelfn.bigmodel.places import Place, PlaceLike, check_device, current_place, read_place

__all__ = ("AlignDevicesHook", "SharedStream")


class _Call(NamedTuple):
    input_device: torch.device | None
    marks: list[tuple[Stream, object]]  # what the call has entered


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
        weights_map: Values of offloaded tensors, by their names within the module; None keeps those that the
            module has. The tensors of a dict become the parameters' memory: without a copy if their dtype is
            the parameter's, so that training writes into them. Those of an ``OffloadedWeightsLoader`` stay
            in their files, mapped. Any other mapping is asked for parameters anew at each forward; the
            module holds meta tensors meanwhile, and a forward that would have to keep gradients of them is
            refused.
        offload_buffers: Let buffers travel too. Otherwise they are moved to the device once, with the values
            that ``weights_map`` has of them, as are those that aren't in the state_dict.
        place_submodules: All this for the tensors of the modules inside of it too.
        skip_keys: Keys of dicts in arguments and outputs, names of keyword arguments among them, below which
            nothing is moved.
        tied_params_map: Not needed here: tied parameters stay one object.

    Raises:
        ValueError: There is no such device here. When the hook is added: tensors have no values, or
            ``weights_map`` lacks some, or has some of another shape.
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
        self.skip_keys: tuple[str, ...] = (
            (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
        )
        self.tied_params_map = tied_params_map
        self.at_rest: AtRest | None = None
        self._name = ""
        self._shared: SharedStream | None = None
        self._stream: Stream | None = None
        self._position = 0
        self._scopes: tuple[Stream, ...] = ()
        self._calls: CallStack[_Call] = CallStack()

    # --- how it comes to a module, and goes ---

    def check(self, module: nn.Module) -> None:
        """Raise what :meth:`init_hook` would raise, and change nothing."""
        travels, stays = self._travelling(module)
        if self.offload:
            given = set[int]() if self._shared is None else self._shared.given
            check_values(module, travels, stays, self.weights_map, given)
        elif self.place is not None:
            check_values(module, {**travels, **stays}, {}, None, set())

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's tensors where they rest."""
        self.check(module)
        travels, stays = self._travelling(module)
        if not self.offload:
            self._place({**travels, **stays})
            return module
        installed: dict[int, Replaced] = {} if self._shared is None else self._shared.installed
        name = self._name or type(module).__name__
        self.at_rest = lay_to_rest(name, module, travels, self.weights_map, installed)
        for key, value in values_for(stays, self.weights_map).items():
            install(stays[key], value, installed)
        self._place(stays)
        if self._shared is None and self.travels:
            self.use(Stream((self.at_rest.block,), self.stream_place, num_ahead=0), 0)
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Move offloaded tensors where they were before; those that had no values keep what they have."""
        if self.at_rest is not None:
            self.at_rest.bring_back()
        self.at_rest = self._stream = None
        self._scopes = ()
        return module

    # --- around a forward ---

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring the module's tensors, and its arguments."""
        marks: list[tuple[Stream, object]] = []
        self._calls.values.append(_Call(input_device(args, kwargs) if self.io_same_device else None, marks))
        for stream in self._scopes:
            stream.enter_scope(module)
            marks.append((stream, stream.mark))
        if self._stream is not None:
            before = self._stream.mark
            try:
                self._stream.enter(self._position)
            finally:
                if self._stream.mark is not before:
                    marks.append((self._stream, self._stream.mark))
        if self.execution_device is None:
            return args, kwargs
        return moved(args, self.execution_device, self.skip_keys), moved(
            kwargs, self.execution_device, self.skip_keys
        )

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the module's tensors rest again, and bring the output."""
        device = self._end()
        return output if device is None else moved(output, device, self.skip_keys)

    def after_error(self, module: nn.Module) -> None:
        """Let the module's tensors rest again."""
        self._end()

    def _end(self) -> torch.device | None:
        call = self._calls.pop()
        if call is None:
            return None
        for stream, mark in reversed(call.marks):
            stream.abandon_since(mark)
        return call.input_device

    # --- the stream of its block ---

    @property
    def stream_place(self) -> Place:
        """Where the stream of its block leads."""
        assert self.place is not None
        assert self.at_rest is not None
        # Values that are fetched anew must be hung into the module on the CPU too, as for a simulated device.
        return "cpu:0" if self.at_rest.block.sources and self.place == "cpu" else self.place

    @property
    def travels(self) -> bool:
        """Whether a stream has anything to do. On the CPU it lets pages of mapped weights go after use."""
        if self.at_rest is None:
            return False
        block = self.at_rest.block
        return self.place != "cpu" or any(
            position in block.sources or mapped_from(slot.read()) is not None
            for position, slot in enumerate(block.slots)
        )

    @property
    def stream(self) -> Stream | None:
        """What brings its block; None if nothing travels, as in memory on the CPU."""
        return self._stream

    def fetch(self) -> dict[Slot, torch.Tensor]:
        """Return the values of those tensors that the module doesn't hold between its forwards."""
        if self.at_rest is None:
            return {}
        block = self.at_rest.block
        return {block.slots[position]: source() for position, source in block.sources.items()}

    def share(self, shared: SharedStream, name: str, module: nn.Module) -> None:
        """Have the block of ``module``, named ``name``, travel with others. Before the hook is added."""
        self._name = name
        self._shared = shared
        shared.hooks.append(self)
        shared.given |= given_by(self._travelling(module)[0], self.weights_map)

    def use(self, stream: Stream, position: int) -> None:
        """Let ``stream`` bring the block, which is its number ``position``."""
        self._stream = stream
        self._position = position

    def begin_scopes(self, streams: Sequence[Stream]) -> None:
        """Let blocks of these streams be fetched ahead while the module runs."""
        self._scopes = (*self._scopes, *streams)

    def _travelling(self, module: nn.Module) -> tuple[dict[str, Slot], dict[str, Slot]]:
        return travelling(module, offload_buffers=self.offload_buffers, recurse=self.place_submodules)

    def _place(self, slots: Mapping[str, Slot]) -> None:
        if self.execution_device is not None:
            for slot in slots.values():
                move_in_place(slot.read(), self.execution_device)


class SharedStream:
    """Blocks of several hooks that travel in one stream: the next ones are fetched while one is used."""

    def __init__(self) -> None:
        self.hooks: list[AlignDevicesHook] = []
        self.installed: dict[int, Replaced] = {}
        self.given: set[int] = set()  # tensors that have values, by their id

    def open(self) -> tuple[Stream, ...]:
        """Return the hooks their stream, or one for each place where they compute."""
        by_place: dict[Place, list[tuple[AlignDevicesHook, Block]]] = {}
        for hook in self.hooks:
            # It isn't at rest if another hook has taken its place meanwhile.
            if hook.at_rest is not None and hook.travels:
                by_place.setdefault(hook.stream_place, []).append((hook, hook.at_rest.block))
        streams: list[Stream] = []
        for place, hooks in by_place.items():
            streams.append(Stream([block for _, block in hooks], place))
            for position, (hook, _) in enumerate(hooks):
                hook.use(streams[-1], position)
        self.hooks.clear()
        self.installed.clear()
        self.given.clear()
        return tuple(streams)
