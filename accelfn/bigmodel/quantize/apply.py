"""Put quantised layers into a model, one at a time, so that it is never there twice."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from accelfn.bigmodel.load.placing import named_module_tensors
from accelfn.bigmodel.quantize.bnb import bnb_quantizer
from accelfn.bigmodel.quantize.choose import QuantizationPlan, kept_dtype
from accelfn.bigmodel.quantize.config import BnbQuantizationConfig, QuantizationConfig
from accelfn.bigmodel.quantize.quantizer import Quantizer
from accelfn.bigmodel.quantize.torchao import torchao_quantizer

__all__ = (
    "check_layers",
    "give_back_freed_memory",
    "kept_tensors",
    "make_quantizer",
    "mark",
    "quantize_in_place",
    "replace_layers",
)

_SHOWN = 5


def make_quantizer(config: QuantizationConfig) -> Quantizer:
    """Return what quantises layers as a configuration says.

    Raises:
        MissingExtraError: The package that it asks for isn't installed.
    """
    return bnb_quantizer(config) if isinstance(config, BnbQuantizationConfig) else torchao_quantizer(config)


def check_layers(
    model: nn.Module,
    plan: QuantizationPlan,
    quantizer: Quantizer,
    device_of: Callable[[str], torch.device],
) -> None:
    """Refuse layers that can't be quantised, all at once.

    Raises:
        ValueError: With the name of each, and why.
    """
    objections = {
        name: quantizer.objection(cast("nn.Linear", model.get_submodule(name)), device_of(name))
        for name in plan.layers
    }
    refused = [f"  {name}: {why}" for name, why in objections.items() if why is not None]
    if refused:
        more = [f"  and {len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else []
        raise ValueError(
            "load_and_quantize_model: these layers can't be quantised so:\n"
            + "\n".join((*refused[:_SHOWN], *more))
            + "\nName them in skip_modules, together with those that are skipped by default "
            f"({', '.join(plan.skipped) or 'none'}), or choose other sizes."
        )


def replace_layers(
    model: nn.Module, plan: QuantizationPlan, quantizer: Quantizer
) -> Iterator[tuple[str, nn.Linear, nn.Linear]]:
    """Return each layer of the plan and an empty one that takes its place when the next one is asked for.

    So the caller fills it first, and the memory of the old one is free before that of the next is needed.

    Yields:
        Its name, the old layer, and the new one, whose weight is on the meta device.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        children = cast("dict[str, nn.Module | None]", vars(parent)["_modules"])
        for key, child in children.items():
            if child is not None:
                places.setdefault(child, []).append((parent, key))
    for name in plan.layers:
        old = cast("nn.Linear", model.get_submodule(name))
        new = quantizer.make(old)
        yield name, old, new
        for parent, key in places.pop(old):
            setattr(parent, key, new)


def quantize_in_place(
    model: nn.Module,
    config: QuantizationConfig,
    plan: QuantizationPlan,
    quantizer: Quantizer,
    device_of: Callable[[str], torch.device],
) -> None:
    """Quantise the layers of a model that has its values, and cast what isn't quantised. Writes into it.

    Parameters stay the objects that they are, but for the weights that are quantised.
    """
    weights: set[int] = set()
    for name, old, new in replace_layers(model, plan, quantizer):
        quantizer.fill(new, old.weight, device_of(name))
        weights.add(id(new.weight))
    give_back_freed_memory()
    with torch.no_grad():
        for name, tensor in kept_tensors(model):
            if id(tensor) not in weights:
                tensor.data = tensor.data.to(kept_dtype(name, tensor.dtype, config))


def give_back_freed_memory() -> None:
    """Let the C library give memory that was freed back to the system, where it can be asked for that.

    Between a weight and the next one a small tensor comes to stay, so what was freed lies in pieces. glibc
    keeps them: without this, as much memory is held after loading as if nothing had been quantised.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl hasn't
        if trim is not None:
            trim(0)


def mark(model: nn.Module, config: QuantizationConfig) -> None:
    """Mark the model as quantised, as others look for it."""
    said = cast("Any", model)
    said.is_loaded_in_8bit = config.bits == 8
    said.is_loaded_in_4bit = config.bits == 4


def kept_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers that a state dict holds, each once."""
    yield from named_module_tensors(model, recurse=True, remove_non_persistent=True)
