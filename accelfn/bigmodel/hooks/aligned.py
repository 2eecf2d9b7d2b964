"""Whether a module's weights are offloaded, and what they are while one looks at them on a device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from accelfn.bigmodel.hooks.align import AlignDevicesHook
from accelfn.bigmodel.hooks.host_weights import move_in_place, travelling
from accelfn.bigmodel.hooks.model_hook import SequentialHook, hook_of
from accelfn.bigmodel.offload.blocks import Slot
from accelfn.bigmodel.places import Place, PlaceLike, check_device, is_simulated, read_place

__all__ = ("align_module_device", "has_offloaded_params", "offload_hook_of")


def offload_hook_of(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that offloads the tensors of ``module``, or None."""
    found = hook_of(module)
    members = found.hooks if isinstance(found, SequentialHook) else (found,)
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
    Only what a hook fetches anew for each forward has no place to stay: changes of that are lost.

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
    if execution_device is not None:
        place = read_place(execution_device, "execution_device")
        check_device(place, "execution_device")
    else:
        place = None if hook is None else hook.place
    if place is None:
        yield
        return
    travels, _ = travelling(
        module,
        offload_buffers=hook is not None and hook.offload_buffers,
        recurse=hook is not None and hook.place_submodules,
    )
    fetched = {} if hook is None else hook.fetch()
    with ExitStack() as stack:
        for slot in travels.values():
            stack.enter_context(_on(slot, place, fetched.get(slot)))
        yield


@contextmanager
def _on(slot: Slot, place: Place, value: torch.Tensor | None) -> Generator[None, None, None]:
    """Have one tensor on a device inside; ``value`` are its values if it has none itself."""
    device = check_device(place)
    tensor = slot.read()
    if value is not None:
        slot.write(value.to(device))
        try:
            yield
        finally:
            slot.write(tensor)
        return
    resting = tensor.data
    if resting.device == device and not is_simulated(place):
        yield
        return
    tensor.data = resting.to(device, copy=True)
    try:
        yield
    finally:
        now = slot.read()
        if now is not tensor:  # another was hung in its place
            move_in_place(now, resting.device)
        back = tensor.data.to(resting.device)
        # Written only if it has changed: what is mapped from a file would otherwise get memory of its own.
        if not torch.equal(back, resting):
            resting.copy_(back)
        tensor.data = resting
