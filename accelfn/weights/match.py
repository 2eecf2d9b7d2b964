"""Plan a load: which stored tensor goes to which tensor of a model, and how. Nothing is read or changed."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.errors import CheckpointMismatchError, Misfit
from accelfn.parallel.pointers import WholeModel, whole_of
from accelfn.storage.address import Address
from accelfn.tree import is_dtensor, local_of
from accelfn.weights.assign import TensorRef, loads_in_its_own_way, named_modules, store_of
from accelfn.weights.dtypes import dtype_name
from accelfn.weights.index import nesting_hint, prefix_hint, tied_by
from accelfn.weights.open import OpenedWeights
from accelfn.weights.places import (
    Place,
    check_device,
    is_on,
    listed,
    order_of,
    place_of,
    suggest_names,
)
from accelfn.weights.state import own_names, without_inserted
from accelfn.weights.stored import Stored

# A buffer of batch norm, which starts at zero where a checkpoint lacks it.
_COUNTER = "num_batches_tracked"

How: TypeAlias = Literal["fill", "new", "map", "convert"]
"""Read into the model's memory, read into new memory, map the checkpoint's file, or convert and map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The caller's options of a load.

    Attributes:
        places: By module or tensor; None leaves every tensor on its device, and meta tensors go to the CPU.
        dtype: For floating tensors; None keeps the model's.
        special_dtypes: The same for single tensors, by name.
        keep_in_fp32: Parts of names whose tensors become float32 if ``dtype`` is given.
        has_folder: Whether there is an offload folder.
        strict: Refuse missing and unexpected names.
        is_whole: Whether the checkpoint has complete tensors, instead of this rank's shards.
        casts: Whether floating tensors may have other dtypes in the files.
        advice: A call that casts, for the error where this one doesn't.
        by_modules: Whether modules may load by code of their own, which needs the files on this rank.
    """

    places: Mapping[str, Place] | None = None
    dtype: torch.dtype | None = None
    special_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    keep_in_fp32: tuple[str, ...] = ()
    has_folder: bool = False
    strict: bool = False
    is_whole: bool = True
    casts: bool = True
    advice: str | None = None
    by_modules: bool = True

    def dtype_of(self, target: Target) -> torch.dtype:
        """Return the dtype that a tensor will have."""
        current = target.tensor.dtype
        if not current.is_floating_point:
            return current
        special = next(
            (self.special_dtypes[name] for name in target.names if name in self.special_dtypes), None
        )
        if special is not None or self.dtype is None:
            return special or current
        keeps_fp32 = any(has_part(name, self.keep_in_fp32) for name in target.names)
        return torch.float32 if keeps_fp32 else self.dtype

    def place_of(self, target: Target) -> Place | None:
        """Return one place for all names of a tensor: the disk if one has it, else the fastest.

        None for a non-persistent buffer that the map doesn't cover.
        """
        places = [place_of(name, self.places or {}) for name in target.names]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return None
        return "disk" if "disk" in known else min(known, key=order_of)

    def device_of(self, target: Target) -> torch.device:
        """Return the device of a tensor's memory."""
        place, tensor = self.place_of(target), target.tensor
        if place is not None and place != "disk":
            return check_device(place, f"device_map[{target.name!r}]")
        if place is None and not tensor.is_meta:
            return tensor.device
        mesh = getattr(tensor, "device_mesh", None) if place is None else None  # of a DTensor
        return torch.device("cpu" if mesh is None else mesh.device_type)


def has_part(name: str, parts: Iterable[str]) -> bool:
    """Check whether a name contains one of ``parts`` as one or several of its components.

    >>> has_part("block.norm.weight", ["norm"]), has_part("block.abnormal.weight", ["norm"])
    (True, False)
    """
    return any(f".{part}." in f".{name}." for part in parts)


class Target(NamedTuple):
    """A tensor of a model.

    Attributes:
        names: All its names, without those of wrappers; the first one identifies it.
        refs: One for each name.
        tensor: Its current value.
        is_stored: Whether it is in the state dict.
        starts_at_zero: Whether it is a counter that starts at zero if the checkpoint lacks it.
    """

    names: tuple[str, ...]
    refs: tuple[TensorRef, ...]
    tensor: torch.Tensor
    is_stored: bool
    starts_at_zero: bool = False

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def kind(self) -> str:
        """Dtype and shape, for messages."""
        return f"{dtype_name(self.tensor.dtype)} {tuple(self.tensor.shape)}"


class LoadStep(NamedTuple):
    """Loading one tensor.

    Attributes:
        target: The model's tensor.
        source: The stored tensor.
        device: The device of its memory.
        dtype: Its dtype after loading.
        how: How it is loaded.
    """

    target: Target
    source: Stored
    device: torch.device
    dtype: torch.dtype
    how: How


class LoadPlan(NamedTuple):
    """What a load will do.

    Attributes:
        steps: In file order.
        values: Targets that get a small value from elsewhere than a file.
        extras: Modules and their extra state.
        missing: The model's names that the checkpoint lacks; they keep their values.
        unexpected: The checkpoint's names that the model lacks.
        is_by_modules: Whether modules have code of their own that loads, and everything goes through it.
    """

    steps: tuple[LoadStep, ...]
    values: tuple[tuple[Target, torch.Tensor], ...]
    extras: tuple[tuple[nn.Module, object], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    is_by_modules: bool = False

    @property
    def num_bytes(self) -> int:
        """The bytes to read."""
        return sum(step.source.num_bytes for step in self.steps)


_NOT_SAVED = (
    " Non-persistent buffers aren't saved (persistent=False): build the model with "
    "init_empty_weights(include_buffers=False), which computes them."
)


def plan_load(
    operation: str, model: nn.Module, checkpoint: OpenedWeights, options: LoadOptions, *, compare: bool = True
) -> LoadPlan:
    """Match a checkpoint with a model, and report all mismatches at once.

    Args:
        operation: The caller's name in errors.
        model: A model without wrappers.
        checkpoint: The headers of the checkpoint.
        options: The caller's options.
        compare: Check that tied tensors that are stored twice have equal values, which reads them.

    Raises:
        CheckpointMismatchError: Shapes or kinds of dtypes differ, tied tensors have different values, a
            tensor would stay on the meta device, no name matches, or (with ``strict``) names are missing or
            unexpected.
        ValueError: The map has no place for a tensor, this machine lacks a device, a tensor for the disk
            needs a folder, or ``special_dtypes`` names unknown tensors.
    """
    # Into a model in memory, modules load by their own code if they have any.
    is_in_place = options.places is None and options.dtype is None and not options.special_dtypes
    is_by_modules = options.by_modules and is_in_place and any(map(loads_in_its_own_way, model.modules()))
    converted = _convert_transformers(model, checkpoint.tensors)
    stored, values = _apply_load_hooks(operation, model, converted, may_compute=is_by_modules)
    own, extras = _read_targets(operation, model)
    whole = whole_of(model) or WholeModel({}, {})  # this rank may hold only some pipeline stages of it
    targets = _merge_tied(own, model, whole, stored)
    names = {name for target in targets for name in target.names if target.is_stored}
    known = {name for target in targets for name in target.names}
    unknown = [name for name in options.special_dtypes if name not in known]
    if unknown:
        raise ValueError(
            f"{operation}: special_dtypes names tensors that the model doesn't have: "
            f"{suggest_names(unknown, known)}."
        )
    rows: list[Misfit] = []
    sources: dict[str, Stored] = {}
    used: set[str] = set()
    for target in targets:
        source_names = _source_names(stored, target, checkpoint.tied)
        if source_names:
            sources[target.name] = stored[source_names[0]]
            used.update(source_names)
            rows += _misfits(target, [stored[name] for name in source_names], options, compare)
    lacking = [target for target in targets if target.name not in sources and target.name not in values]
    needed = [target for target in lacking if not target.starts_at_zero]
    bare = [target for target in needed if target.tensor.is_meta]
    rows += [Misfit(target.name, "nothing", _expected(target)) for target in bare]
    available = {*stored, *checkpoint.others, *checkpoint.tied}
    on_other_stages = whole.tensors.keys() - names
    ties = whole.tied()
    missing = (
        *(target.name for target in needed if target.is_stored),
        *(name for name in extras if name not in {**checkpoint.others, **checkpoint.tensors}),
        *(
            name
            for name in whole.tensors
            if name in on_other_stages
            and available.isdisjoint(ties.get(name, (name,)))
            and name.rpartition(".")[2] != _COUNTER
        ),
    )
    expected = used | names | extras.keys() | on_other_stages
    unexpected = tuple(name for name in (*stored, *checkpoint.others) if name not in expected)
    if options.strict or (names and available and not used):  # or it is another model's
        reported = {row.path for row in rows}
        kinds = {target.name: target.kind for target in targets}
        others = dict.fromkeys(on_other_stages, "a tensor of another stage")
        rows += [
            Misfit(name, _found(checkpoint, name), kinds.get(name, others.get(name, "state")))
            for name in missing
            if name not in reported
        ]
        rows += [
            Misfit(name, stored[name].kind if name in stored else "state", "nothing") for name in unexpected
        ]
    if rows:
        hint = (prefix_hint(names, set(stored)) or nesting_hint(checkpoint.others)) + (
            _NOT_SAVED if any(not target.is_stored for target in bare) else ""
        )
        if options.advice is not None and any(
            _fits(sources[target.name], target.tensor, replace(options, casts=True))
            for target in targets
            if target.name in sources and not _fits(sources[target.name], target.tensor, options)
        ):
            hint += (
                f" {operation} doesn't cast: {options.advice} casts floating-point weights to the model's "
                "dtypes."
            )
        raise CheckpointMismatchError(
            f"{operation}: {checkpoint.place} doesn't fit the model. Nothing was changed.{hint}", rows
        )
    for target in lacking:
        if target.starts_at_zero and target.tensor.is_meta:
            values[target.name] = torch.zeros((), dtype=target.tensor.dtype)
    state = {**checkpoint.tensors, **checkpoint.others}
    steps = _plan_steps(operation, targets, sources, options)
    return LoadPlan(
        steps=steps,
        values=tuple(
            (one, values[one.name].to(options.device_of(one))) for one in targets if one.name in values
        ),
        extras=tuple((module, state[name]) for name, module in extras.items() if name in state),
        missing=missing,
        unexpected=unexpected,
        is_by_modules=is_by_modules and all(step.how == "fill" for step in steps),
    )


def _found(checkpoint: OpenedWeights, name: str) -> str:
    return type(checkpoint.others[name]).__name__ if name in checkpoint.others else "nothing"


def _expected(target: Target) -> str:
    return target.kind if target.is_stored else f"{target.kind}, which isn't saved"


# --- the model -----------------------------------------------------------------------------------


def _read_targets(operation: str, model: nn.Module) -> tuple[list[Target], dict[str, nn.Module]]:
    """List the tensors of a model in module order, and the modules with extra state by its name.

    Raises:
        ValueError: A lazy layer has no shape yet, a parameter consists of other tensors, as in quantised
            layers, or two tensors have the same name without wrappers.
    """
    own = own_names(operation, model)

    def named(name: str) -> str:
        return own.get(name) or own.get(without_inserted(name), name)  # a state dict may leave them out

    stored = frozenset(own.values())
    groups: dict[object, list[tuple[str, TensorRef]]] = {}
    extras: dict[str, nn.Module] = {}
    for path, module in named_modules(model, every_name=True):
        dot = f"{path}." if path else ""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extras[named(f"{dot}_extra_state")] = module
        for is_parameter in (True, False):
            for key, tensor in store_of(module, is_parameter).items():
                if tensor is not None:
                    _check_loadable(operation, f"{dot}{key}", tensor)
                    ref = TensorRef(module, key, is_parameter)
                    groups.setdefault(tied_by(tensor), []).append((f"{dot}{key}", ref))
    targets: list[Target] = []
    for group in groups.values():
        ref = group[0][1]
        targets.append(
            Target(
                names=tuple(named(name) for name, _ in group),
                refs=tuple(ref for _, ref in group),
                tensor=ref.read(),
                is_stored=any(named(name) in stored for name, _ in group),
                starts_at_zero=isinstance(ref.owner, _NormBase) and ref.key == _COUNTER,
            )
        )
    return targets, extras


def _check_loadable(operation: str, name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(
            f"{operation}: {name} has no shape yet. Run the model on a batch once, or pass the layer's size."
        )
    if is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor):
        raise ValueError(
            f"{operation}: {name} is a {type(tensor).__name__}, which can't be read as one tensor. Load the "
            "weights first, then quantise (load_and_quantize_model)."
        )


def _merge_tied(
    targets: Iterable[Target], model: nn.Module, whole: WholeModel, stored: Iterable[str]
) -> list[Target]:
    """Add the names that tensors have on other ranks, and merge tensors that lost their tie.

    transformers models list tied tensors in ``all_tied_weights_keys``; their tie is lost when tensors are
    replaced one by one. Only tensors that the checkpoint lacks are merged: those that it has under both names
    may be untied on purpose.
    """
    ties, available = whole.tied(), set(stored)
    merged: dict[str, Target] = {}
    for target in targets:
        more = tuple(name for name in ties.get(target.name, ()) if name not in target.names)
        merged[target.name] = target._replace(names=(*target.names, *more))
    target_of = {name: target.name for target in merged.values() for name in target.names}
    for path, module in named_modules(model, every_name=True):
        tied_keys: object = vars(module).get("all_tied_weights_keys")
        dot = f"{path}." if path else ""
        pairs = cast("dict[str, str]", tied_keys).items() if isinstance(tied_keys, dict) else ()
        for name, first_name in pairs:
            first, second = target_of.get(f"{dot}{first_name}"), target_of.get(f"{dot}{name}")
            if first is None or second is None or first == second:
                continue
            base, lacking = merged[first], merged[second]
            if lacking.tensor.shape == base.tensor.shape and available.isdisjoint(lacking.names):
                del merged[second]
                refs = base.refs + lacking.refs
                merged[first] = base._replace(names=base.names + lacking.names, refs=refs)
                target_of.update(dict.fromkeys(lacking.names, first))
    return list(merged.values())


# --- names of the checkpoint ---------------------------------------------------------------------


def _source_names(stored: Mapping[str, Stored], target: Target, tied: Mapping[str, str]) -> list[str]:
    """Return the names of a target that are stored, or else the stored name that it is tied to."""
    # Modules compute non-persistent buffers; an old checkpoint's value is used only for those without one.
    names = target.names if target.is_stored or target.tensor.is_meta else ()
    direct = [name for name in names if name in stored]
    return direct or [tied[name] for name in names if tied.get(name) in stored][:1]


def _misfits(
    target: Target, sources: Sequence[Stored], options: LoadOptions, compare: bool
) -> Iterable[Misfit]:
    """Yield the reasons why a target can't be loaded."""
    source = sources[0]
    if not _fits(source, target.tensor, options):
        yield Misfit(target.name, source.kind, target.kind)
        return
    for duplicate in sources[1:]:
        if compare and not duplicate.equals(source):
            yield Misfit(duplicate.name, f"other values than {source.name}", f"tied to {source.name}")


def _fits(source: Stored, tensor: torch.Tensor, options: LoadOptions) -> bool:
    shape = tuple(tensor.shape if options.is_whole else local_of(tensor).shape)
    # Like torch, load one element of one dimension into a scalar.
    if source.shape != shape and not (shape == () and source.shape == (1,)):
        return False
    if not options.casts:
        return source.dtype == tensor.dtype
    if source.dtype.is_floating_point or tensor.dtype.is_floating_point:
        return source.dtype.is_floating_point and tensor.dtype.is_floating_point
    # Integers and booleans are only cast to a dtype that can represent all of them.
    return source.dtype == tensor.dtype or torch.promote_types(source.dtype, tensor.dtype) == tensor.dtype


def _apply_load_hooks(
    operation: str, model: nn.Module, tensors: Mapping[str, Stored], *, may_compute: bool
) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
    """Let load-state-dict hooks of modules rename older names, as ``load_state_dict`` does.

    Hooks get meta tensors, so they can rename, remove and add tensors, but not compute with stored values;
    with ``may_compute`` hooks that do so change nothing here, since modules will run them when they load.

    Returns:
        The stored tensors by the model's names, and the values that hooks add.

    Raises:
        ValueError: A hook computes with stored values.
    """
    hooked = [(path, module) for path, module in named_modules(model, every_name=True) if _load_hooks(module)]
    if not hooked:
        return dict(tensors), {}
    state: dict[str, Any] = {
        name: torch.empty(stored.shape, dtype=stored.dtype, device="meta") for name, stored in tensors.items()
    }
    placeholders = dict(state)  # keeps the objects alive, so that ids are unique
    known = {id(value): tensors[name] for name, value in placeholders.items()}
    for path, module in hooked:
        refusal = (
            f"{operation}: {type(module).__name__} at {path or 'the root'!r} has a hook that computes with "
            "loaded values, which aren't available here. Load this model with torch's load_state_dict."
        )
        try:
            for hook in _load_hooks(module):
                hook(state, f"{path}." if path else "", {}, True, [], [], [])
        except (NotImplementedError, RuntimeError) as error:  # from meta tensors
            if may_compute:
                return dict(tensors), {}
            raise ValueError(refusal) from error
        if any(value.is_meta and id(value) not in known for value in state.values()):
            raise ValueError(refusal)
    # A hook of a wrapper inserts its name.
    state = {name if name in tensors else without_inserted(name): value for name, value in state.items()}
    return (
        {name: known[id(value)] for name, value in state.items() if id(value) in known},
        {name: value for name, value in state.items() if id(value) not in known},
    )


def _load_hooks(module: nn.Module) -> list[Any]:
    return list(cast("dict[int, Any]", vars(module).get("_load_state_dict_pre_hooks") or {}).values())


class _Part(NamedTuple):
    name: str
    pattern: str
    stored: Stored


def _convert_transformers(model: nn.Module, tensors: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """Apply transformers' conversions of checkpoint names and tensors to those of its models.

    Nothing is read: tensors that are assembled from several ones are assembled when they are loaded.

    Returns:
        By the model's names where transformers has a conversion. Unchanged for models of other libraries, and
        for transformers before version 5, which has no conversions.
    """
    is_pretrained = any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)
    expected = set(model.state_dict(keep_vars=True)) if is_pretrained else set[str]()
    if not is_pretrained or expected.issuperset(tensors):
        return tensors
    if importlib.util.find_spec("transformers.core_model_loading") is None:
        return tensors
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversions: Any = importlib.import_module("transformers.conversion_mapping")
    try:
        rules = list(conversions.get_model_conversion_mapping(model))
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    except (AttributeError, TypeError):  # another version's API; mismatches are then reported as usual
        return tensors
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    converted: dict[str, Stored] = {}
    parts: dict[str, list[_Part]] = {}
    # In natural order, in which parts are concatenated.
    for name in sorted(tensors, key=loading.dot_natural_key):
        renamed, pattern = cast(
            "tuple[str, str | None]", loading.rename_source_key(name, renamings, converters)
        )
        if renamed in expected and pattern is not None:
            parts.setdefault(renamed, []).append(_Part(name, pattern, tensors[name]))
        else:
            converted[renamed if renamed in expected else name] = tensors[name]
    for renamed, some in parts.items():
        converted.update(_assemble(model, by_pattern[some[0].pattern], renamed, some))
    return converted


def _assemble(model: nn.Module, rule: Any, renamed: str, parts: Sequence[_Part]) -> dict[str, Stored]:
    """Return the tensors that a conversion rule makes from parts, assembled when they are loaded.

    Raises:
        ValueError: The shapes of the parts don't match.
    """

    def convert(value_of: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(rule)
        for part in parts:
            converter.add_tensor(renamed, part.name, part.pattern, value_of(part.stored))
        results = cast(
            "dict[str, Any]", converter.convert(renamed, model=model, config=cast("Any", model).config)
        )
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}

    try:
        shapes = convert(lambda stored: torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
    except RuntimeError as error:
        raise ValueError(
            f"{renamed} can't be assembled from {listed([part.name for part in parts], 1)}: {error}. Is it a "
            f"checkpoint of {type(model).__name__}?"
        ) from error
    first = min((part.stored for part in parts), key=lambda stored: (str(stored.path), stored.start))

    def elements(name: str) -> torch.Tensor:
        return convert(Stored.map)[name]

    return {
        name: Stored(
            name,
            first.path,
            value.dtype,
            tuple(value.shape),
            first.start,
            elements=functools.partial(elements, name),
            parts=tuple(part.stored for part in parts),
            operations=repr(rule.operations),
        )
        for name, value in shapes.items()
    }


# --- steps ---------------------------------------------------------------------------------------


def _plan_steps(
    operation: str, targets: Iterable[Target], sources: Mapping[str, Stored], options: LoadOptions
) -> tuple[LoadStep, ...]:
    steps: list[LoadStep] = []
    refused: list[str] = []
    for target in targets:
        source = sources.get(target.name)
        if source is None:
            continue
        step = _plan_step(target, source, options)
        if step.how in ("map", "convert") and is_dtensor(target.tensor):
            refused.append(f"{target.name}: it is sharded over ranks")
        elif step.how == "convert" and not options.has_folder:
            refused.append(f"{target.name}: {_why_not_mappable(step)}")
        steps.append(step)
    if refused:
        more = [f"and {len(refused) - 5} more"] if len(refused) > 5 else []
        raise ValueError(
            f"{operation}: device_map puts tensors on the disk that can't be used in place:\n  "
            + "\n  ".join([*refused[:5], *more])
            + "\nPass offload_folder, where they are converted once, or another place."
        )
    return tuple(sorted(steps, key=lambda step: (str(step.source.path), step.source.start)))


def _plan_step(target: Target, source: Stored, options: LoadOptions) -> LoadStep:
    tensor, dtype, device = target.tensor, options.dtype_of(target), options.device_of(target)
    if options.place_of(target) == "disk":
        how: How = "map" if dtype == source.dtype and source.is_mappable else "convert"
    else:
        in_place = not tensor.is_meta and tensor.dtype == dtype and is_on(tensor, device)
        how = "fill" if in_place else "new"
    return LoadStep(target, source, device, dtype, how)


def _why_not_mappable(step: LoadStep) -> str:
    source = step.source
    if step.dtype != source.dtype:
        return f"the file has {dtype_name(source.dtype)}, but {dtype_name(step.dtype)} is requested"
    if source.parts:
        return "transformers assembles it from several tensors"
    if isinstance(source.path, Address):
        return "it is in an object store"
    return "it isn't contiguous or aligned in its file"
