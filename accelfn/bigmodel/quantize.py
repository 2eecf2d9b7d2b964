"""Load a model with quantised layers: each layer is quantised as soon as its weight has been read."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.device_map import DeviceMap, PlanOptions, read_places, resolve_device_map
from accelfn.bigmodel.dispatch import dispatch_model
from accelfn.bigmodel.model_info import AnyDtype, CustomDtype, require_values
from accelfn.bigmodel.offload_folder import convert
from accelfn.bigmodel.quantize_config import BnbQuantizationConfig
from accelfn.bigmodel.quantize_layers import Quantizer, make_quantizer
from accelfn.errors import CheckpointMismatchError, Misfit
from accelfn.weights.assign import named_module_tensors, named_modules, refs_of, tied_refs
from accelfn.weights.load import apply_plan
from accelfn.weights.match import LoadOptions, LoadStep, has_part, plan_load
from accelfn.weights.open import OpenedWeights, open_weights
from accelfn.weights.places import (
    MaxMemory,
    Place,
    PlaceLike,
    check_device,
    current_place,
    is_accelerator,
    listed,
    place_of,
)
from accelfn.weights.read import Reading, progress_bar, read_tensors
from accelfn.weights.state import require_module
from accelfn.weights.stored import Stored


def default_skip_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the modules that aren't quantised by default: the output layer, and those with tied weights.

    The output layer is the last child of the model. A transformers base model has none, and is quantised
    completely if it has no tied weights.

    Args:
        model: A model on any device.

    >>> default_skip_modules(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    ('1',)
    """
    # Under one name each, so a repeated module doesn't count as tied to itself.
    refs = {name: ref for name, ref in refs_of(model) if ref.is_parameter}
    owners = [dict.fromkeys(name.rpartition(".")[0] for name in names) for names in tied_refs(refs)]
    tied = [name for sharing in owners if len(sharing) > 1 for name in sharing]
    prefix = cast("object", getattr(model, "base_model_prefix", None))
    is_base = isinstance(prefix, str) and not hasattr(model, prefix)
    last = [] if is_base and not tied else [name for name, _ in model.named_children()][-1:]
    # The root itself can't be skipped.
    return tuple(dict.fromkeys(name for name in (*tied, *last) if name))


def plan_quantization(
    model: nn.Module, config: BnbQuantizationConfig, unquantized: Iterable[str] = ()
) -> tuple[str, ...]:
    """Choose the layers to quantise: every ``nn.Linear`` that isn't skipped. Pure.

    Subclasses of ``nn.Linear`` aren't quantised, since their forward may differ.

    Args:
        model: A model on any device, such as meta.
        config: Specifies ``skip_modules``.
        unquantized: Full names of more modules to skip.

    Returns:
        Names in model order; the first one of a repeated layer.

    Raises:
        ValueError: ``skip_modules`` has a name that no module has, or no layer remains.
    """
    skip_modules = cast("tuple[str, ...] | None", config.skip_modules)
    skipped = default_skip_modules(model) if skip_modules is None else skip_modules
    names = [name for name, _ in named_modules(model, every_name=True)]
    unknown = [entry for entry in skip_modules or () if not any(has_part(name, (entry,)) for name in names)]
    if unknown:
        raise ValueError(
            f"load_and_quantize_model: skip_modules has {', '.join(unknown)}, but the model has no such "
            f"module. Its children are {', '.join(name for name, _ in model.named_children()) or 'none'}."
        )
    full_names = dict.fromkeys(unquantized, True)

    def is_skipped(name: str) -> bool:
        return has_part(name, skipped) or place_of(name, full_names) is not None

    linears: dict[nn.Module, list[str]] = {}
    for name, module in named_modules(model, every_name=True):
        if type(module) is nn.Linear and name:
            linears.setdefault(module, []).append(name)
    layers = tuple(names[0] for names in linears.values() if not any(map(is_skipped, names)))
    if not layers:
        placed = (
            f", and {listed(full_names)} are on places where layers can't be quantised" if full_names else ""
        )
        remedy = "a device_map with some on an accelerator" if full_names else "other skip_modules"
        raise ValueError(
            f"load_and_quantize_model: no layer to quantise. The model has {len(linears)} nn.Linear layers; "
            f"{listed(skipped) or 'nothing'} is skipped{placed}. Pass {remedy}, or load the model without "
            "quantisation."
        )
    return layers


def kept_dtype(name: str, dtype: torch.dtype, config: BnbQuantizationConfig) -> torch.dtype:
    """Return the new dtype of a tensor that isn't quantised.

    Args:
        name: The tensor's name.
        dtype: Its current dtype.
        config: Specifies ``torch_dtype`` and ``keep_in_fp32_modules``.
    """
    if not dtype.is_floating_point:
        return dtype
    if has_part(name, cast("tuple[str, ...] | None", config.keep_in_fp32_modules) or ()):
        return torch.float32
    return cast("torch.dtype | None", config.torch_dtype) or dtype


def _replace_layers(
    model: nn.Module, layers: Iterable[str], quantizer: Quantizer
) -> Iterator[tuple[str, nn.Linear, nn.Linear]]:
    """Yield each layer and an empty one, which replaces it when the next one is requested.

    So the caller fills the new layer first, and the old one is freed before the next one is loaded.

    Yields:
        The name, the old layer, and the new one, whose weight is on the meta device.
    """
    parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        children = cast("dict[str, nn.Module | None]", vars(parent)["_modules"])
        for key, child in children.items():
            if child is not None:
                parents.setdefault(child, []).append((parent, key))
    for name in layers:
        old = cast("nn.Linear", model.get_submodule(name))
        new = quantizer.make(old)
        yield name, old, new
        for parent, key in parents.pop(old):
            setattr(parent, key, new)


def _quantize_in_place(
    model: nn.Module,
    config: BnbQuantizationConfig,
    layers: Iterable[str],
    quantizer: Quantizer,
    places: Mapping[str, Place],
) -> None:
    """Quantise the layers of a model that has its values, and cast its other tensors in place.

    Parameters stay the same objects, except quantised weights.
    """
    weights: set[int] = set()
    for name, old, new in _replace_layers(model, layers, quantizer):
        quantizer.fill(new, old.weight, _device_of(name, places))
        weights.add(id(new.weight))
    _trim_memory()
    with torch.no_grad():
        for name, tensor in _saved_tensors(model):
            if id(tensor) not in weights:
                tensor.data = tensor.data.to(kept_dtype(name, tensor.dtype, config))


def _trim_memory() -> None:
    """Return freed memory to the system, if the C library supports it.

    Freed weights leave fragments between small tensors, which glibc keeps: without this, as much memory is
    held after loading as if nothing had been quantised.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl doesn't
        if trim is not None:
            trim(0)


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of a model, each once."""
    yield from named_module_tensors(model, recurse=True, remove_non_persistent=True)


ModelT = TypeVar("ModelT", bound=nn.Module)

_LOAD = "load_and_quantize_model"


def load_and_quantize_model(
    model: ModelT,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: DeviceMap | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> ModelT:
    """Quantise the linear layers of a model to 8 or 4 bits, while loading it or in place.

    From a checkpoint each layer is quantised as soon as its weight has been read, so one unquantised weight
    at a time is in memory. Layers that were saved in the same quantisation are loaded directly.

    Every ``nn.Linear`` that isn't skipped is quantised. Its weight is frozen; gradients are propagated
    through it, so adapters train. Without an accelerator the model is quantised, and runs, on the CPU. With
    an accelerator, layers on the host are quantised in 8 bits, which can be offloaded, and keep
    ``torch_dtype`` otherwise. Layers on the disk aren't quantised, but used in place in the checkpoint.

    Effect: on ``model``, whose ``is_loaded_in_8bit``, ``is_loaded_in_4bit`` and ``hf_device_map`` are set.

    Ranks: local.

    Args:
        model: Any module, with values or on the meta device.
        bnb_quantization_config: The configuration.
        weights_location: A checkpoint, as in :func:`load_checkpoint_in_model`. Required if the model has meta
            tensors; otherwise None quantises its current values.
        device_map: Places by name, or the name of a strategy such as ``"auto"``, planned with the quantised
            sizes. None: the current accelerator, or the CPU.
        no_split_module_classes: As in :func:`load_checkpoint_and_dispatch`.
        max_memory: As in :func:`load_checkpoint_and_dispatch`.
        offload_folder: As in :func:`load_checkpoint_and_dispatch`.
        offload_state_dict: Accepted for compatibility; weights are never in memory twice.

    Returns:
        The same model.

    Raises:
        TypeError: ``bnb_quantization_config`` isn't a configuration, or ``model`` isn't a module.
        MissingExtraError: bitsandbytes isn't installed.
        ValueError: The model has no values and there is no checkpoint, it is quantised already, no layer
            remains, or a planned map has 4-bit layers outside of accelerators. Nothing was changed.
        CheckpointError: The checkpoint is missing or damaged, or doesn't fit. Nothing was changed.
        OSError: A file can't be read, or the folder can't be written to.
    """
    config = _check(model, bnb_quantization_config)
    quantizer = make_quantizer(config)
    if weights_location is None:
        bare = [name for name, tensor in _saved_tensors(model) if tensor.is_meta]
        require_values(_LOAD, bare, "Pass weights_location, the checkpoint to load.")
    places = _places(model, config, quantizer, device_map, no_split_module_classes, max_memory)
    layers = plan_quantization(model, config, _unquantized(model, places, quantizer))
    if weights_location is not None:
        _load(model, config, layers, quantizer, places, weights_location, offload_folder)
    else:
        if "disk" in places.values() and offload_folder is None:
            raise ValueError(
                f"{_LOAD}: device_map puts modules on the disk that are in memory. Pass offload_folder, "
                "where they are written, or weights_location, where they are used in place."
            )
        _quantize_in_place(model, config, layers, quantizer, places)
    flags = cast("Any", model)
    flags.is_loaded_in_8bit, flags.is_loaded_in_4bit = config.bits == 8, config.bits == 4
    dispatch_model(model, cast("Mapping[str, PlaceLike]", places), offload_dir=offload_folder)
    if any(map(is_accelerator, places.values())):
        for name in layers:
            if place_of(name, places) == "cpu":
                quantizer.prepare_offload(cast("nn.Linear", model.get_submodule(name)))
    return model


def _check(model: object, config: object) -> BnbQuantizationConfig:
    require_module(_LOAD, model)
    if not isinstance(config, BnbQuantizationConfig):
        raise TypeError(
            f"{_LOAD}: bnb_quantization_config must be a BnbQuantizationConfig, got {type(config).__name__}."
        )
    if getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False):
        raise ValueError(
            f"{_LOAD}: the model is quantised already. Load it again to quantise it differently."
        )
    return config


# --- places --------------------------------------------------------------------------------------


def _places(
    model: nn.Module,
    config: BnbQuantizationConfig,
    quantizer: Quantizer,
    device_map: DeviceMap | None,
    no_split_module_classes: Collection[str] | str | None,
    max_memory: MaxMemory | None,
) -> dict[str, Place]:
    if device_map is None:
        return {"": current_place()}
    dtypes: dict[str, AnyDtype] = {
        name: kept_dtype(name, tensor.dtype, config) for name, tensor in _saved_tensors(model)
    }
    packed = torch.int8 if config.bits == 8 else CustomDtype.INT4
    dtypes.update({f"{name}.weight": packed for name in plan_quantization(model, config)})
    options = PlanOptions(no_split_module_classes=no_split_module_classes, special_dtypes=dtypes)
    places = read_places(resolve_device_map(model, device_map, max_memory, options))
    elsewhere = [name for name, place in places.items() if not is_accelerator(place)]
    is_planned = isinstance(device_map, str)
    if is_planned and elsewhere and not quantizer.can_offload and any(map(is_accelerator, places.values())):
        raise ValueError(
            f"{_LOAD}: 4-bit layers can't be offloaded, but the accelerators are too small: "
            f"{listed(name or 'the model' for name in elsewhere)} would be on "
            f"{' and '.join(sorted({str(places[name]) for name in elsewhere}))}. Pass a larger max_memory, "
            "use 8 bits, or pass a device_map, which leaves those layers unquantised."
        )
    return places


def _device_of(name: str, places: Mapping[str, Place]) -> torch.device:
    place = place_of(name, places)
    assert place is not None  # checked with the map
    return check_device(place)


def _unquantized(model: nn.Module, places: Mapping[str, Place], quantizer: Quantizer) -> list[str]:
    """Return the names of layers on places where they can't be quantised."""
    has_accelerator = any(map(is_accelerator, places.values()))
    unsupported = {"disk"} if quantizer.can_offload or not has_accelerator else {"disk", "cpu"}
    return [
        name
        for name, module in named_modules(model)
        if type(module) is nn.Linear and name and place_of(name, places) in unsupported
    ]


# --- loading -------------------------------------------------------------------------------------


def _load(
    model: nn.Module,
    config: BnbQuantizationConfig,
    layers: Collection[str],
    quantizer: Quantizer,
    places: Mapping[str, Place],
    weights_location: str | os.PathLike[str],
    offload_folder: str | os.PathLike[str] | None,
) -> None:
    opened, saved = _without_saved(open_weights(weights_location), model, layers, quantizer)
    options = LoadOptions(
        places=places,
        special_dtypes={
            name: kept_dtype(name, tensor.dtype, config) for name, tensor in _saved_tensors(model)
        },
        has_folder=offload_folder is not None,
    )
    steps = plan_load(_LOAD, model, opened, options)
    owners = {model.get_submodule(name): name for name in layers}
    # A weight that is tied to another module's is loaded with the rest, and then quantised.
    own: dict[str, LoadStep] = {}
    rest: list[LoadStep] = []
    for step in steps.steps:
        if all(ref.owner in owners and ref.key == "weight" for ref in step.target.refs):
            own.update((owners[ref.owner], step) for ref in step.target.refs)
        else:
            rest.append(step)
    with progress_bar("quantize", steps.num_bytes, None) as advance:
        apply_plan(
            model,
            steps._replace(steps=tuple(rest)),
            opened.file_ids,
            convert=partial(convert, opened.file_ids, offload_folder, advance),
            advance=advance,
        )
        for name, old, new in _replace_layers(model, layers, quantizer):
            device = _device_of(name, places)
            if name not in own:
                quantizer.fill(new, old.weight, device)
                continue
            step = own[name]
            if name in saved:
                parts = {
                    key: Reading(stored, torch.empty(stored.shape, dtype=stored.dtype))
                    for key, stored in saved[name].items()
                }
                read_tensors([*parts.values()], opened.file_ids)
                quantizer.restore(new, {key: part.target for key, part in parts.items()}, device)
            else:
                weight = torch.empty(step.target.tensor.shape, dtype=step.dtype, device=device)
                read_tensors([Reading(step.source, weight)], opened.file_ids)
                quantizer.fill(new, weight, device)
                del weight  # before the next one is allocated
            advance(step.source.num_bytes)
            _trim_memory()


def _without_saved(
    opened: OpenedWeights, model: nn.Module, layers: Iterable[str], quantizer: Quantizer
) -> tuple[OpenedWeights, dict[str, dict[str, Stored]]]:
    """Separate the tensors of saved quantised layers, and present their weights as unquantised.

    So the checkpoint can be matched with the model.

    Raises:
        CheckpointMismatchError: Layers were quantised in another way.
    """
    linears = {name: cast("nn.Linear", model.get_submodule(name)) for name in layers}
    tensors = dict(opened.tensors)
    saved: dict[str, dict[str, Stored]] = {}
    for name in opened.tensors:
        components = name.split(".")
        for count in range(1, len(components)):
            layer, rest = ".".join(components[:count]), ".".join(components[count:])
            if layer in linears and rest not in ("weight", "bias") and quantizer.is_part(rest):
                saved.setdefault(layer, {})[rest] = tensors.pop(name)
    rows: list[Misfit] = []
    for name, parts in saved.items():
        key = f"{name}.weight"
        if key in tensors:
            parts["weight"] = tensors[key]
            like = linears[name].weight
            tensors[key] = tensors[key]._replace(dtype=like.dtype, shape=tuple(like.shape), elements=None)
        why = quantizer.mismatch({part: stored.dtype for part, stored in parts.items()})
        if why is not None:
            rows.append(Misfit(key, why, "as configured"))
    if rows:
        raise CheckpointMismatchError(
            f"{_LOAD}: {opened.place} has layers that were quantised in another way. Nothing was changed. "
            "Pass the configuration that they were quantised with, or unquantised weights.",
            rows,
        )
    return replace(opened, tensors=MappingProxyType(tensors)), saved
