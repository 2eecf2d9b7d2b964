"""Load a model with quantised layers: a layer is quantised as soon as its weight has been read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.load.apply import apply_plan, fetch_from_files
from accelfn.bigmodel.load.plan import LoadStep, Wishes, place_of, plan_load
from accelfn.bigmodel.load.progress import showing
from accelfn.bigmodel.load.read import Reading, read_tensors
from accelfn.bigmodel.load.source import Checkpoint, Stored, open_checkpoint
from accelfn.bigmodel.offload.blocks import named_modules
from accelfn.bigmodel.offload.dispatch import dispatch_model
from accelfn.bigmodel.places import Place, PlaceLike, check_device, current_place, is_accelerator
from accelfn.bigmodel.plan.budgets import MaxMemory
from accelfn.bigmodel.plan.maps import DeviceMap, resolve_device_map
from accelfn.bigmodel.plan.sizes import AnyDtype, CustomDtype
from accelfn.bigmodel.quantize.apply import (
    check_layers,
    give_back_freed_memory,
    kept_tensors,
    make_quantizer,
    mark,
    quantize_in_place,
    replace_layers,
)
from accelfn.bigmodel.quantize.choose import QuantizationPlan, kept_dtype, plan_quantization
from accelfn.bigmodel.quantize.config import (
    BnbQuantizationConfig,
    QuantizationConfig,
    TorchaoQuantizationConfig,
)
from accelfn.bigmodel.quantize.quantizer import Quantizer
from accelfn.checkpoint.weights.state import require_module
from accelfn.errors import CheckpointMismatchError, Misfit

__all__ = ("load_and_quantize_model",)

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
    bare = [name for name, one in kept_tensors(model) if one.is_meta]
    if bare and weights_location is None:
        raise ValueError(
            f"{_LOAD}: {', '.join(bare[:5])}{' and others' if len(bare) > 5 else ''} have no values: they "
            "are on the meta device. Pass weights_location, the checkpoint to load."
        )
    places = _places(model, config, quantizer, device_map, no_split_module_classes, max_memory)
    plan = plan_quantization(model, config, _unquantized(model, places, quantizer))
    check_layers(model, plan, quantizer, lambda name: _device_of(name, places))
    if weights_location is not None:
        _load(model, config, plan, quantizer, places, weights_location, offload_folder)
    else:
        if "disk" in places.values() and offload_folder is None:
            raise ValueError(
                f"{_LOAD}: device_map puts parts of the model on the disk that lie in memory now. Pass "
                "offload_folder, where they are written to, or weights_location, where they are already."
            )
        quantize_in_place(model, config, plan, quantizer, lambda name: _device_of(name, places))
    mark(model, config)
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
        name: kept_dtype(name, one.dtype, config) for name, one in kept_tensors(model)
    }
    packed = torch.int8 if config.bits == 8 else CustomDtype.INT4
    dtypes.update({f"{name}.weight": packed for name in plan_quantization(model, config).layers})
    places = resolve_device_map(model, device_map, max_memory, no_split_module_classes, None, dtypes)
    for place in {one for one in places.values() if one != "disk"}:
        check_device(place, "device_map")
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


class _Layer(NamedTuple):
    """What a layer is made of.

    Attributes:
        step: Of its weight.
        saved: What it was saved as, by name, if it was quantised.
    """

    step: LoadStep
    saved: Mapping[str, Stored]


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
    wishes = Wishes(
        places=places,
        special_dtypes={name: kept_dtype(name, one.dtype, config) for name, one in kept_tensors(model)},
        has_folder=offload_folder is not None,
    )
    steps = plan_load(_LOAD, model, opened, wishes)
    owners = {model.get_submodule(name): name for name in plan.layers}
    # A weight that is tied to something that isn't quantised is loaded as a whole, and quantised then.
    layers: dict[str, _Layer] = {}
    rest: list[LoadStep] = []
    for step in steps.steps:
        if not all(slot.owner in owners and slot.key == "weight" for slot in step.target.slots):
            rest.append(step)
            continue
        for slot in step.target.slots:
            name = owners[slot.owner]
            layers[name] = _Layer(step, saved.get(name, {}))
    total = sum(step.source.num_bytes for step in steps.steps)
    with showing("quantize", total, None) as advance:
        apply_plan(
            model,
            steps._replace(steps=tuple(rest)),
            opened.stamps,
            fetch_from_files(opened.stamps),
            folder=offload_folder,
            advance=advance,
        )
        for name, old, new in replace_layers(model, plan, quantizer):
            device = _device_of(name, places)
            if name not in layers:
                quantizer.fill(new, old.weight, device)
                continue
            step, parts = layers[name]
            if parts:
                tensors = {key: torch.empty(one.shape, dtype=one.dtype) for key, one in parts.items()}
                read_tensors([Reading(one, tensors[key]) for key, one in parts.items()], opened.stamps)
                quantizer.restore(new, tensors, device)
            else:
                weight = torch.empty(step.target.tensor.shape, dtype=step.dtype, device=device)
                read_tensors([Reading(step.source, weight)], opened.stamps)
                quantizer.fill(new, weight, device)
                del weight  # before the next one comes
            advance(step.source.num_bytes)
            give_back_freed_memory()


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
        for layer, rest in _heads(name):
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


def _heads(name: str) -> Iterator[tuple[str, str]]:
    """Return each way to cut a dotted name in two."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count]), ".".join(parts[count:])
