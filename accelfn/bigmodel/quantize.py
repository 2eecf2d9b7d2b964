"""Load a model with quantised layers: a layer is quantised as soon as its weight has been read."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.assign import named_module_tensors, named_modules
from accelfn.bigmodel.device_map import DeviceMap, PlanOptions, read_places, resolve_device_map
from accelfn.bigmodel.devices import (
    MaxMemory,
    Place,
    PlaceLike,
    check_device,
    current_place,
    is_accelerator,
    listed,
    place_of,
)
from accelfn.bigmodel.dispatch import dispatch_model
from accelfn.bigmodel.load import apply_plan
from accelfn.bigmodel.load_plan import LoadOptions, LoadStep, has_part, plan_load
from accelfn.bigmodel.model_info import AnyDtype, CustomDtype
from accelfn.bigmodel.quantize_config import (
    BnbQuantizationConfig,
    QuantizationConfig,
    TorchaoQuantizationConfig,
)
from accelfn.bigmodel.quantize_layers import Quantizer, make_quantizer
from accelfn.bigmodel.weight_files import Checkpoint, Reading, Stored, open_checkpoint, read_tensors, showing
from accelfn.checkpoint.weights_state import require_module
from accelfn.errors import CheckpointMismatchError, Misfit


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
    names = [name for name, _ in named_modules(model, every_name=True)]
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
    for name, module in named_modules(model, every_name=True):
        if type(module) is nn.Linear and name:
            found.setdefault(module, []).append(name)
    # Skipped under one of its names, it is skipped: there is only one of it.
    layers = [names[0] for names in found.values() if not any(is_skipped(name) for name in names)]
    if not layers:
        placed = f", and {listed(whole)} would lie where layers can't be quantised" if whole else ""
        place = "a device_map that leaves room for some" if whole else "other skip_modules"
        raise ValueError(
            f"load_and_quantize_model: nothing is left to quantise. The model has {len(found)} layers of "
            f"nn.Linear; {listed(skipped) or 'nothing'} is skipped{placed}. Pass {place}, or load the model "
            "without quantising it."
        )
    return QuantizationPlan(layers=tuple(layers), skipped=tuple(dict.fromkeys((*skipped, *whole))))


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


_SHOWN = 5


def _check_layers(
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


def _replace_layers(
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


def _quantize_in_place(
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
    for name, old, new in _replace_layers(model, plan, quantizer):
        quantizer.fill(new, old.weight, device_of(name))
        weights.add(id(new.weight))
    _give_back_freed_memory()
    with torch.no_grad():
        for name, tensor in _kept_tensors(model):
            if id(tensor) not in weights:
                tensor.data = tensor.data.to(kept_dtype(name, tensor.dtype, config))


def _give_back_freed_memory() -> None:
    """Let the C library give memory that was freed back to the system, where it can be asked for that.

    Between a weight and the next one a small tensor comes to stay, so what was freed lies in pieces. glibc
    keeps them: without this, as much memory is held after loading as if nothing had been quantised.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl hasn't
        if trim is not None:
            trim(0)


def _kept_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers that a state dict holds, each once."""
    yield from named_module_tensors(model, recurse=True, remove_non_persistent=True)


ModelT = TypeVar("ModelT", bound=nn.Module)

_LOAD = "load_and_quantize_model"


def load_and_quantize_model(
    model: ModelT,
    bnb_quantization_config: QuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: DeviceMap | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> ModelT:
    """Quantise the linear layers of a model to 8 or 4 bits, while it is loaded or as it is. In place.

    From a checkpoint each layer is quantised as soon as its weight has been read: in memory are the quantised
    layers so far, and one that isn't yet. Layers that were quantised in the same way when they were saved
    (bitsandbytes) are taken as they are.

    Every ``nn.Linear`` that isn't skipped is quantised. Its weight is frozen; gradients go through it to
    what comes before, so adapters train. On a machine without accelerator the model is quantised, and runs,
    on the CPU. With an accelerator, what the map puts on the host is quantised where the weights can travel
    so (bitsandbytes in 8 bits, torchao in int8) and else stays in ``torch_dtype``. What it puts on the disk
    isn't quantised: it is used where it lies in the checkpoint.

    Effect: on ``model``, which has ``is_loaded_in_8bit``, ``is_loaded_in_4bit`` and ``hf_device_map`` then.

    Ranks: local.

    Args:
        model: Any; with its values, or on the meta device.
        bnb_quantization_config: A :class:`BnbQuantizationConfig` or :class:`TorchaoQuantizationConfig`.
        weights_location: A checkpoint, as :func:`load_checkpoint_in_model` takes it. Needed where the model
            has tensors on the meta device; else None quantises the values that it has.
        device_map: Places by name, or ``"auto"`` and the like, planned with the quantised sizes. None: the
            current accelerator, or the CPU where there is none.
        no_split_module_classes: As :func:`load_checkpoint_and_dispatch` takes it.
        max_memory: As :func:`load_checkpoint_and_dispatch` takes it.
        offload_folder: As :func:`load_checkpoint_and_dispatch` takes it.
        offload_state_dict: Accepted. Nothing is in memory twice in any case.

    Returns:
        The same model.

    Raises:
        TypeError: The configuration is none, or the model no module.
        MissingExtraError: The package that it asks for isn't installed.
        ValueError: The model has no values and there is no checkpoint; it is quantised already; a layer can't
            be quantised so, or none is left; an inferred map of 4-bit layers puts some beside the
            accelerators. Nothing was changed.
        CheckpointError: There is no sound checkpoint, or it doesn't fit. Nothing was changed.
        OSError: A file can't be read, or the folder not written.
    """
    config = _check(model, bnb_quantization_config)
    quantizer = make_quantizer(config)
    bare = [name for name, one in _kept_tensors(model) if one.is_meta]
    if bare and weights_location is None:
        raise ValueError(
            f"{_LOAD}: {', '.join(bare[:5])}{' and others' if len(bare) > 5 else ''} have no values: they "
            "are on the meta device. Pass weights_location, the checkpoint to load."
        )
    places = _places(model, config, quantizer, device_map, no_split_module_classes, max_memory)
    plan = plan_quantization(model, config, _unquantized(model, places, quantizer))
    _check_layers(model, plan, quantizer, lambda name: _device_of(name, places))
    if weights_location is not None:
        _load(model, config, plan, quantizer, places, weights_location, offload_folder)
    else:
        if "disk" in places.values() and offload_folder is None:
            raise ValueError(
                f"{_LOAD}: device_map puts parts of the model on the disk that lie in memory now. Pass "
                "offload_folder, where they are written to, or weights_location, where they are already."
            )
        _quantize_in_place(model, config, plan, quantizer, lambda name: _device_of(name, places))
    said = cast("Any", model)
    said.is_loaded_in_8bit, said.is_loaded_in_4bit = config.bits == 8, config.bits == 4
    dispatch_model(model, cast("Mapping[str, PlaceLike]", places), offload_dir=offload_folder)
    for name in plan.layers:
        if any(map(is_accelerator, places.values())) and not is_accelerator(_place(name, places)):
            quantizer.settle(cast("nn.Linear", model.get_submodule(name)))
    return model


def _check(model: object, config: object) -> QuantizationConfig:
    require_module(_LOAD, model)
    if not isinstance(config, (BnbQuantizationConfig, TorchaoQuantizationConfig)):
        raise TypeError(
            f"{_LOAD}: takes a BnbQuantizationConfig or a TorchaoQuantizationConfig, got "
            f"{type(config).__name__}."
        )
    if getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False):
        raise ValueError(f"{_LOAD}: the model is quantised already. Load it anew to quantise it otherwise.")
    return config


# --- places --------------------------------------------------------------------------------------


def _places(
    model: nn.Module,
    config: QuantizationConfig,
    quantizer: Quantizer,
    device_map: DeviceMap | None,
    no_split_module_classes: Collection[str] | str | None,
    max_memory: MaxMemory | None,
) -> dict[str, Place]:
    if device_map is None:
        return {"": current_place()}
    dtypes: dict[str, AnyDtype] = {
        name: kept_dtype(name, one.dtype, config) for name, one in _kept_tensors(model)
    }
    packed = torch.int8 if config.bits == 8 else CustomDtype.INT4
    dtypes.update({f"{name}.weight": packed for name in plan_quantization(model, config).layers})
    options = PlanOptions(no_split_module_classes=no_split_module_classes, special_dtypes=dtypes)
    places = read_places(resolve_device_map(model, device_map, max_memory, options))
    left = [name for name, place in places.items() if not is_accelerator(place)]
    is_inferred = isinstance(device_map, str)
    if is_inferred and left and not quantizer.travels and any(map(is_accelerator, places.values())):
        raise ValueError(
            f"{_LOAD}: not all of the model fits on the accelerators, and layers of 4 bits run on the device "
            f"where they lie: {', '.join(name or 'the model' for name in left[:5])} would be on "
            f"{' and '.join(sorted({str(places[name]) for name in left}))}. Pass a larger max_memory, 8 "
            "bits, or a device_map of your own, by which those layers stay unquantised."
        )
    return places


def _place(name: str, places: Mapping[str, Place]) -> Place:
    place = place_of(name, places)
    assert place is not None  # the map was checked to have one for everything
    return place


def _device_of(name: str, places: Mapping[str, Place]) -> torch.device:
    return check_device(_place(name, places))


def _unquantized(model: nn.Module, places: Mapping[str, Place], quantizer: Quantizer) -> list[str]:
    """Name the layers that lie where they can't be quantised."""
    has_accelerator = any(map(is_accelerator, places.values()))
    stays = {"disk"} if quantizer.travels or not has_accelerator else {"disk", "cpu"}
    return [
        name
        for name, module in named_modules(model)
        if type(module) is nn.Linear and name and place_of(name, places) in stays
    ]


# --- loading -------------------------------------------------------------------------------------


def _load(
    model: nn.Module,
    config: QuantizationConfig,
    plan: QuantizationPlan,
    quantizer: Quantizer,
    places: Mapping[str, Place],
    weights_location: str | os.PathLike[str],
    offload_folder: str | os.PathLike[str] | None,
) -> None:
    opened, saved = _without_saved(open_checkpoint(weights_location), model, plan, quantizer)
    options = LoadOptions(
        places=places,
        special_dtypes={name: kept_dtype(name, one.dtype, config) for name, one in _kept_tensors(model)},
        has_folder=offload_folder is not None,
    )
    steps = plan_load(_LOAD, model, opened, options)
    owners = {model.get_submodule(name): name for name in plan.layers}
    # A weight that is tied to something that isn't quantised is loaded as a whole, and quantised then.
    layers: dict[str, LoadStep] = {}
    rest: list[LoadStep] = []
    for step in steps.steps:
        if all(ref.owner in owners and ref.key == "weight" for ref in step.target.refs):
            layers.update((owners[ref.owner], step) for ref in step.target.refs)
        else:
            rest.append(step)
    with showing("quantize", steps.num_bytes, None) as advance:
        apply_plan(
            model,
            steps._replace(steps=tuple(rest)),
            opened.file_ids,
            folder=offload_folder,
            advance=advance,
        )
        for name, old, new in _replace_layers(model, plan, quantizer):
            device = _device_of(name, places)
            if name not in layers:
                quantizer.fill(new, old.weight, device)
                continue
            step = layers[name]
            if name in saved:
                parts = saved[name]
                tensors = {key: torch.empty(one.shape, dtype=one.dtype) for key, one in parts.items()}
                read_tensors([Reading(one, tensors[key]) for key, one in parts.items()], opened.file_ids)
                quantizer.restore(new, tensors, device)
            else:
                weight = torch.empty(step.target.tensor.shape, dtype=step.dtype, device=device)
                read_tensors([Reading(step.source, weight)], opened.file_ids)
                quantizer.fill(new, weight, device)
                del weight  # before the next one comes
            advance(step.source.num_bytes)
            _give_back_freed_memory()


def _without_saved(
    opened: Checkpoint, model: nn.Module, plan: QuantizationPlan, quantizer: Quantizer
) -> tuple[Checkpoint, dict[str, dict[str, Stored]]]:
    """Set aside what was saved of quantised layers, and let their weights look as if they weren't.

    So the checkpoint is compared with the model as it is now.

    Raises:
        CheckpointMismatchError: Layers were quantised in another way.
    """
    layers = {name: cast("nn.Linear", model.get_submodule(name)) for name in plan.layers}
    tensors = dict(opened.tensors)
    saved: dict[str, dict[str, Stored]] = {}
    for name in opened.tensors:
        parts = name.split(".")
        for count in range(1, len(parts)):
            layer, rest = ".".join(parts[:count]), ".".join(parts[count:])
            if layer in layers and rest not in ("weight", "bias") and quantizer.is_part(rest):
                saved.setdefault(layer, {})[rest] = tensors.pop(name)
    rows: list[Misfit] = []
    for name, parts in saved.items():
        key = f"{name}.weight"
        if key in tensors:
            parts["weight"] = tensors[key]
            like = layers[name].weight
            tensors[key] = tensors[key]._replace(dtype=like.dtype, shape=tuple(like.shape), elements=None)
        why = quantizer.differs({part: one.dtype for part, one in parts.items()})
        if why is not None:
            rows.append(Misfit(key, why, "one of the configuration"))
    if rows:
        raise CheckpointMismatchError(
            f"{_LOAD}: {opened.place} has layers that were quantised in another way. Nothing was changed. "
            "Pass the configuration that they were quantised with, or full weights.",
            rows,
        )
    return replace(opened, tensors=MappingProxyType(tensors)), saved
