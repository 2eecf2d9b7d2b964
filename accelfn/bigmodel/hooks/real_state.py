"""The real values of models whose hooks fetch some of them for each forward alone."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from accelfn.bigmodel.hooks.aligned import offload_hook_of
from accelfn.bigmodel.offload.blocks import slots_of
from accelfn.bigmodel.places import PlaceLike, check_device, read_place

__all__ = ("get_state_dict_from_offload", "get_state_dict_offloaded_model")


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, all of it with values on the CPU.

    Offloaded models have real values at rest, so ``model.state_dict()`` gives the same: but for tensors that
    are on an accelerator, which are copied here, and for those that a hook fetches anew for each forward.
    What lies on the CPU, or is mapped from a file, is given as it is.

    Args:
        model: Any, offloaded or not.

    Raises:
        ValueError: Tensors have no values.
    """
    state = cast("dict[str, Any]", {**model.state_dict(), **_fetched(model)})
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    empty = [name for name, value in tensors.items() if value.is_meta]
    if empty:
        more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
        raise ValueError(
            f"get_state_dict_offloaded_model: {', '.join(map(repr, empty[:5]))}{more} have no values: they "
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
    fetched = _fetched(module)
    for name, value in module.state_dict().items():
        full = f"{prefix}.{name}" if prefix else name
        if full in state_dict and isinstance(value, torch.Tensor):
            state_dict[full] = fetched.get(name, value).to(device)
    return state_dict


def _fetched(model: nn.Module) -> dict[str, torch.Tensor]:
    """Fetch what the hooks of a model fetch for each forward, by full names."""
    values = {
        slot: value
        for module in model.modules()
        if (hook := offload_hook_of(module)) is not None
        for slot, value in hook.fetch().items()
    }
    return {name: values[slot] for name, slot in slots_of(model) if slot in values} if values else {}
