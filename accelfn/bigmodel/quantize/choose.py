"""Which layers of a model are quantised, and in which dtype the others are kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from accelfn.bigmodel.load.plan import has_part
from accelfn.bigmodel.offload.blocks import named_modules
from accelfn.bigmodel.quantize.config import QuantizationConfig

__all__ = ("QuantizationPlan", "default_skip_modules", "kept_dtype", "plan_quantization")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationPlan:
    """Which layers are quantised.

    Attributes:
        layers: Names of the layers whose weights are, in the order of the model. A layer that stands at
            several places has its first name.
        skipped: What the names of all others were compared with.
    """

    layers: tuple[str, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        """Name the layers, one a line."""
        return "\n".join(
            [
                f"{len(self.layers)} layers are quantised:",
                *(f"  {name}" for name in self.layers),
                f"skipped: {', '.join(self.skipped) or 'nothing'}",
            ]
        )


def default_skip_modules(model: nn.Module) -> tuple[str, ...]:
    """Return what isn't quantised unless the caller says it: the output layer, and what shares its weights.

    That is the last child of the model and every module with a weight that stands in another one too. A base
    model of transformers, which has no output layer of its own, is quantised whole if it shares nothing.

    Args:
        model: On any device.

    >>> default_skip_modules(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    ('1',)
    """
    # A module that stands at two places shares its weights with none.
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for name, module in named_modules(model):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, {})[module] = name
    tied = [name for sharing in owners.values() if len(sharing) > 1 for name in sharing.values()]
    prefix = cast("object", getattr(model, "base_model_prefix", None))
    is_base = isinstance(prefix, str) and not hasattr(model, prefix)
    last = [] if is_base and not tied else [name for name, _ in model.named_children()][-1:]
    # A weight of the root itself has no module that could be skipped.
    return tuple(dict.fromkeys(name for name in (*tied, *last) if name))


def plan_quantization(
    model: nn.Module, config: QuantizationConfig, unquantized: Iterable[str] = ()
) -> QuantizationPlan:
    """Decide which layers of a model are quantised: every ``nn.Linear`` that isn't skipped. Pure.

    A layer of a class that is derived from ``nn.Linear`` stays as it is: it may compute in its own way.

    Args:
        model: On any device, such as meta.
        config: Says what is skipped.
        unquantized: Further modules to skip, by their whole names.

    Raises:
        ValueError: ``skip_modules`` names nothing in the model, or no layer is left.
    """
    given = cast("tuple[str, ...] | None", config.skip_modules)
    skipped = default_skip_modules(model) if given is None else given
    names = [name for name, _ in _modules(model)]
    unknown = [entry for entry in given or () if not any(has_part(name, (entry,)) for name in names)]
    if unknown:
        raise ValueError(
            f"load_and_quantize_model: skip_modules names {', '.join(unknown)}, and no module is called so. "
            f"Its children are {', '.join(name for name, _ in model.named_children()) or 'none'}."
        )
    whole = tuple(unquantized)

    def is_skipped(name: str) -> bool:
        return has_part(name, skipped) or any(not one or f"{name}.".startswith(f"{one}.") for one in whole)

    found: dict[nn.Module, list[str]] = {}
    for name, module in _modules(model):
        if type(module) is nn.Linear and name:
            found.setdefault(module, []).append(name)
    # Skipped under one of its names, it is skipped: there is only one of it.
    layers = [names[0] for names in found.values() if not any(is_skipped(name) for name in names)]
    if not layers:
        placed = f", and {_few(whole)} would lie where layers can't be quantised" if whole else ""
        place = "a device_map that leaves room for some" if whole else "other skip_modules"
        raise ValueError(
            f"load_and_quantize_model: nothing is left to quantise. The model has {len(found)} layers of "
            f"nn.Linear; {_few(skipped) or 'nothing'} is skipped{placed}. Pass {place}, or load the model "
            "without quantising it."
        )
    return QuantizationPlan(layers=tuple(layers), skipped=tuple(dict.fromkeys((*skipped, *whole))))


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def kept_dtype(name: str, dtype: torch.dtype, config: QuantizationConfig) -> torch.dtype:
    """Return in which dtype a tensor that isn't quantised is kept.

    Args:
        name: Of the tensor.
        dtype: That it has.
        config: Says which.
    """
    if not dtype.is_floating_point:
        return dtype
    if has_part(name, cast("tuple[str, ...] | None", config.keep_in_fp32_modules) or ()):
        return torch.float32
    return cast("torch.dtype | None", config.torch_dtype) or dtype


def _modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))
