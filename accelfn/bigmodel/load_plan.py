"""Which stored tensor goes where in a model, and how. Nothing is read or changed here."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.bigmodel.assign import Slot
from accelfn.bigmodel.devices import Place, check_device, is_on, order_of, place_of, tell_unknown
from accelfn.bigmodel.weight_files import Checkpoint, Stored
from accelfn.checkpoint.weights_index import tied_by
from accelfn.checkpoint.weights_state import own_names
from accelfn.errors import CheckpointMismatchError, Misfit
from accelfn.parallel.parameters import WholeModel, whole_of
from accelfn.tree import is_dtensor, local_of


def _as_transformers_names(model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint as a model of transformers has them.

    Nothing is read: what is put together of several tensors is so when it is loaded.

    Args:
        model: Of any library.
        tensors: Of a checkpoint, by name.

    Returns:
        By the model's names, where transformers knows them; the same for models of others, and for
        transformers before version 5, which has no such tensors.
    """
    is_theirs = any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)
    have = set(model.state_dict(keep_vars=True)) if is_theirs else set[str]()
    if not is_theirs or have.issuperset(tensors):
        return dict(tensors)
    if importlib.util.find_spec("transformers.core_model_loading") is None:
        return dict(tensors)
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversions: Any = importlib.import_module("transformers.conversion_mapping")
    try:
        rules = list(conversions.get_model_conversion_mapping(model))
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    except (AttributeError, TypeError):  # another version's way; what doesn't fit is then named as it is
        return dict(tensors)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Stored] = {}
    parts: dict[str, list[_Part]] = {}
    rule_of: dict[str, Any] = {}
    # In the order of numbers in names, in which parts are put together.
    for name in sorted(tensors, key=loading.dot_natural_key):
        renamed, pattern = cast(
            "tuple[str, str | None]", loading.rename_source_key(name, renamings, converters)
        )
        if renamed not in have:
            found[name] = tensors[name]
        elif pattern is None:
            found[renamed] = tensors[name]
        else:
            rule_of.setdefault(renamed, by_pattern[pattern])
            parts.setdefault(renamed, []).append(_Part(name, pattern, tensors[name]))
    for renamed, some in parts.items():
        found.update(_put_together(model, rule_of[renamed], renamed, some))
    return found


class _Part(NamedTuple):
    name: str
    pattern: str
    stored: Stored


def _others(count: int) -> str:
    return "" if not count else f" and {count} other{'s' * (count > 1)}"


def _put_together(model: nn.Module, rule: Any, renamed: str, parts: Sequence[_Part]) -> dict[str, Stored]:
    """Return the dtypes and shapes of what will be made of some tensors, and how to make it.

    Raises:
        ValueError: It can't be made of them, since their shapes don't go together.
    """
    try:
        shapes = _convert(model, rule, renamed, parts, _without_values)
    except RuntimeError as error:
        raise ValueError(
            f"{renamed} can't be put together of {parts[0].name}{_others(len(parts) - 1)}: {error}. Is it "
            f"a checkpoint of {type(model).__name__}?"
        ) from error
    first = min((part.stored for part in parts), key=lambda one: (str(one.path), one.start))
    made: dict[str, Stored] = {}
    for name, value in shapes.items():

        def elements(name: str) -> torch.Tensor:
            return _convert(model, rule, renamed, parts, lambda one: one.map())[name]

        made[name] = Stored(
            name,
            first.path,
            value.dtype,
            tuple(value.shape),
            first.start,
            elements=functools.partial(elements, name),
            made_of=tuple(part.stored for part in parts),
            made_by=repr(rule.operations),
        )
    return made


def _without_values(one: Stored) -> torch.Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device="meta")


def _convert(
    model: nn.Module, rule: Any, renamed: str, parts: Sequence[_Part], value: Callable[[Stored], torch.Tensor]
) -> dict[str, torch.Tensor]:
    own = copy.deepcopy(rule)
    for part in parts:
        own.add_tensor(renamed, part.name, part.pattern, value(part.stored))
    made = cast("dict[str, Any]", own.convert(renamed, model=model, config=cast("Any", model).config))
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


class Target(NamedTuple):
    """A tensor of a model.

    Attributes:
        names: All that it has in the model, without what wrappers add; the first is what it is called.
        slots: Where it hangs, one for each name.
        tensor: What hangs there now.
        is_stored: Whether a state dict holds it; a buffer may be left out of it.
        starts_at_zero: Whether a module counts with it, and begins at zero where a checkpoint lacks it.
    """

    names: tuple[str, ...]
    slots: tuple[Slot, ...]
    tensor: torch.Tensor
    is_stored: bool
    starts_at_zero: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return self.names[0]

    @property
    def kind(self) -> str:
        """Dtype and shape, for people."""
        return f"{str(self.tensor.dtype).removeprefix('torch.')} {tuple(self.tensor.shape)}"


class Targets(NamedTuple):
    """What of a model wants a value.

    Attributes:
        tensors: Parameters and buffers, in the order of the modules.
        extras: Modules that have more state than tensors, by its name in a state dict.
    """

    tensors: tuple[Target, ...]
    extras: Mapping[str, nn.Module]


def _read_targets(operation: str, model: nn.Module) -> Targets:
    """List the tensors of a model.

    Ranks: local.

    Args:
        operation: What errors call it.
        model: Without the wrappers around it.

    Raises:
        ValueError: A lazy layer has no shape yet, a parameter is made of other tensors, as those of quantised
            layers are, or two tensors would have the same name without wrappers.
    """
    own = own_names(operation, model)
    groups: dict[object, list[tuple[str, Slot]]] = {}
    extras: dict[str, nn.Module] = {}
    for path, module in _all_modules(model):
        dot = f"{path}." if path else ""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extras[own.get(f"{dot}_extra_state", f"{dot}_extra_state")] = module
        for is_parameter in (True, False):
            held: dict[str, torch.Tensor | None] = vars(module)["_parameters" if is_parameter else "_buffers"]
            for key, tensor in held.items():
                if tensor is not None:
                    _check(operation, f"{dot}{key}", tensor)
                    slot = Slot(module, key, is_parameter)
                    groups.setdefault(tied_by(tensor), []).append((f"{dot}{key}", slot))
    return Targets(tuple(_target(group, own) for group in groups.values()), extras)


def _all_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False))


def _check(operation: str, name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(
            f"{operation}: {name} has no shape yet. Run the model on a batch once, or give the layer its "
            "size."
        )
    if is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor):
        raise ValueError(
            f"{operation}: {name} is a {type(tensor).__name__}, which is made of other tensors, and can't be "
            "read from a file as one. Load the weights first and quantise then (load_and_quantize_model)."
        )


def _target(group: Iterable[tuple[str, Slot]], own: Mapping[str, str]) -> Target:
    named = list(group)
    slot = named[0][1]
    counts = isinstance(slot.owner, _NormBase) and slot.key == "num_batches_tracked"
    return Target(
        names=tuple(own.get(name, name) for name, _ in named),
        slots=tuple(one for _, one in named),
        tensor=slot.read(),
        is_stored=any(name in own for name, _ in named),
        starts_at_zero=counts,
    )


def _tie_by_names(targets: Iterable[Target], model: nn.Module, stored: Iterable[str]) -> tuple[Target, ...]:
    """Put tensors together that a model of transformers says are one, and that aren't (yet).

    Models lose their ties where tensors are replaced one by one. Only what a checkpoint lacks is taken to be
    tied: what it has under both names may have been untied since.

    Args:
        targets: Of the model.
        model: Whose modules may have ``all_tied_weights_keys``: names, and the names they are tied to.
        stored: Names that the checkpoint has.
    """
    said: dict[str, str] = {}
    for path, module in _all_modules(model):
        found: object = vars(module).get("all_tied_weights_keys")
        if isinstance(found, dict):
            dot = f"{path}." if path else ""
            pairs = cast("dict[str, str]", found).items()
            said.update({f"{dot}{name}": f"{dot}{first}" for name, first in pairs})
    have = set(stored)
    merged = {target.name: target for target in targets}
    of_name = {name: target.name for target in merged.values() for name in target.names}
    for name, first in said.items():
        one, other = of_name.get(name), of_name.get(first)
        if one is None or other is None or one == other or have.intersection(merged[one].names):
            continue
        lacking, base = merged[one], merged[other]
        if lacking.tensor.shape == base.tensor.shape:
            del merged[one]
            merged[other] = base._replace(names=base.names + lacking.names, slots=base.slots + lacking.slots)
            of_name.update(dict.fromkeys(lacking.names, other))
    return tuple(merged.values())


class Translated(NamedTuple):
    """The tensors of a checkpoint under the names that the model's modules turn theirs into.

    Attributes:
        tensors: By name.
        values: What modules add on their own.
    """

    tensors: dict[str, Stored]
    values: dict[str, torch.Tensor]


def _translate(operation: str, model: nn.Module, tensors: Mapping[str, Stored]) -> Translated:
    """Return the tensors of a checkpoint as the model has them.

    First as transformers knows it of its models. Then modules may rename what they know by an older name, as
    ``load_state_dict`` lets them: their hooks get tensors without values, so only names may change.

    Args:
        operation: What errors call it.
        model: Whose modules may have hooks for loading.
        tensors: Of a checkpoint, by name.

    Raises:
        ValueError: A hook needs values, or computes some.
    """
    tensors = _as_transformers_names(model, tensors)
    hooked = [(path, module) for path, module in _all_modules(model) if _hooks_of(module)]
    if not hooked:
        return Translated(dict(tensors), {})
    state: dict[str, Any] = {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()
    }
    # Its object tells what a stand-in stands for; the dict of them keeps the objects alive.
    known = {id(value): name for name, value in state.items()}
    kept = list(state.values())
    for path, module in hooked:
        dot = f"{path}." if path else ""
        try:
            for hook in _hooks_of(module):
                hook(state, dot, {}, True, [], [], [])
        except (NotImplementedError, RuntimeError) as error:  # what has no values can't be computed with
            raise ValueError(_refusal(operation, path, module)) from error
        if any(value.is_meta and id(value) not in known for value in state.values()):
            raise ValueError(_refusal(operation, path, module))
    del kept
    return Translated(
        {name: tensors[known[id(value)]] for name, value in state.items() if id(value) in known},
        {name: value for name, value in state.items() if id(value) not in known},
    )


def _hooks_of(module: nn.Module) -> list[Any]:
    return list(cast("dict[int, Any]", vars(module).get("_load_state_dict_pre_hooks") or {}).values())


def _refusal(operation: str, path: str, module: nn.Module) -> str:
    return (
        f"{operation}: {type(module).__name__} at {path or 'the root'!r} has a hook that computes with the "
        "values that are loaded, and here they go from the files to their places unseen. Load this model "
        "with load_state_dict of torch."
    )


How: TypeAlias = Literal["fill", "new", "map", "convert"]
"""Into the memory that the model has, into new memory, mapped where it lies, or written anew and mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the caller wants of loading.

    Attributes:
        places: By module or tensor; None leaves every tensor on its device, and takes the host for what has
            none.
        dtype: Of floating-point tensors; None is the model's own.
        special_dtypes: The same for single tensors, by name.
        keep_in_fp32: Parts of names whose tensors become float32 where ``dtype`` is given.
        has_folder: Whether there is one to write to.
        strict: Refuse where a name is missing on either side.
        is_whole: Whether the checkpoint has whole tensors, and not this rank's parts of them.
    """

    places: Mapping[str, Place] | None = None
    dtype: torch.dtype | None = None
    special_dtypes: Mapping[str, torch.dtype] | None = None
    keep_in_fp32: tuple[str, ...] = ()
    has_folder: bool = False
    strict: bool = False
    is_whole: bool = True


class LoadStep(NamedTuple):
    """One tensor on its way.

    Attributes:
        target: Where it belongs.
        source: Where it lies.
        place: By the map; None without one.
        device: Of the memory.
        dtype: That it shall have.
        how: It gets there.
    """

    target: Target
    source: Stored
    place: Place | None
    device: torch.device
    dtype: torch.dtype
    how: How


class LoadPlan(NamedTuple):
    """What loading will do.

    Attributes:
        steps: In the order of the files.
        values: Targets that get a small value that no file has.
        extras: Modules and the state, more than tensors, that they get.
        missing: Names of the model's tensors that the checkpoint lacks; they stay as they are.
        unexpected: Names in the checkpoint that the model lacks.
        needs_ties: Whether the model says that it will tie what the checkpoint lacks.
    """

    steps: tuple[LoadStep, ...]
    values: tuple[tuple[Target, torch.Tensor], ...]
    extras: tuple[tuple[nn.Module, object], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    needs_ties: bool

    @property
    def num_bytes(self) -> int:
        """Of what is read."""
        return sum(step.source.num_bytes for step in self.steps)


def plan_load(
    operation: str, model: nn.Module, checkpoint: Checkpoint, wishes: Wishes, *, compare: bool = True
) -> LoadPlan:
    """Decide which stored tensor goes where, and refuse what can't work, all of it at once.

    Args:
        operation: What errors call it.
        model: Without the wrappers around it.
        checkpoint: As its heads say.
        wishes: Of the caller.
        compare: Look into the files whether tied tensors that are stored twice have one value.

    Raises:
        CheckpointMismatchError: Shapes or kinds of dtypes differ, tied tensors have two values, a tensor
            would stay without any, or (with ``strict``) a name is missing on either side.
        ValueError: The map has no place for a tensor, this machine lacks a device, what goes to the disk
            needs a folder, or there are dtypes for tensors that the model lacks.
    """
    stored, values = _translate(operation, model, checkpoint.tensors)
    read = _read_targets(operation, model)
    whole = whole_of(model) or WholeModel({}, {})  # of which this rank may have some stages alone
    targets = _tie_by_names(_tied_over_stages(read.tensors, whole), model, stored)
    _check_special(operation, targets, wishes.special_dtypes or {})
    matched = _match(targets, stored, checkpoint.tied)
    rows = [row for target in targets for row in matched.rows(target, wishes, compare)]
    lacking = [
        target for target in targets if target.name not in matched.sources and target.name not in values
    ]
    later = _ties_later(model, lacking)
    bare = [target for target in lacking if target.tensor.is_meta and not target.starts_at_zero]
    rows += [Misfit(one.name, "nothing", _wanted(one)) for one in bare if one.name not in later]
    missing = tuple(
        one.name for one in lacking if one.is_stored and not one.starts_at_zero and one.name not in later
    )
    missing += tuple(name for name in read.extras if name not in {**checkpoint.others, **checkpoint.tensors})
    names = {name for target in targets for name in target.names if target.is_stored}
    elsewhere = whole.tensors.keys() - names
    there = {*stored, *checkpoint.others, *checkpoint.tied}
    tied = whole.tied()
    missing += tuple(
        name for name in whole.tensors if name in elsewhere and there.isdisjoint(tied.get(name, (name,)))
    )
    known = matched.used | names | read.extras.keys() | elsewhere
    unexpected = tuple(name for name in (*stored, *checkpoint.others) if name not in known)
    if wishes.strict:
        said = {row.path for row in rows}
        kinds = {target.name: target.kind for target in targets}
        rows += [Misfit(one, "nothing", kinds.get(one, "state")) for one in missing if one not in said]
        rows += [Misfit(one, stored[one].kind if one in stored else "state", "nothing") for one in unexpected]
    if rows:
        hint = _hint(names, stored) + (_TEMPORARY if any(not one.is_stored for one in bare) else "")
        raise CheckpointMismatchError(
            f"{operation}: {checkpoint.place} doesn't fit the model. Nothing was changed.{hint}", rows
        )
    steps = _steps(operation, targets, matched.sources, wishes)
    zeros = {
        one.name: torch.zeros((), dtype=one.tensor.dtype)
        for one in lacking
        if one.starts_at_zero and one.tensor.is_meta
    }
    added = tuple(
        (one, value.to(_device_for(one, wishes)))
        for one in targets
        if (value := values.get(one.name, zeros.get(one.name))) is not None
    )
    return LoadPlan(steps, added, _extras(read, checkpoint), missing, unexpected, bool(later))


def _tied_over_stages(targets: Iterable[Target], whole: WholeModel) -> tuple[Target, ...]:
    """Rename tensors to the names of those that they are tied with."""
    groups = whole.tied()
    return tuple(
        one._replace(
            names=(*one.names, *(name for name in groups.get(one.name, ()) if name not in one.names))
        )
        for one in targets
    )


_TEMPORARY = (
    " Buffers that aren't saved (persistent=False) have to be computed: build the model with "
    "init_empty_weights(include_buffers=False)."
)


def _wanted(target: Target) -> str:
    return target.kind if target.is_stored else f"{target.kind}, which isn't saved"


def _extras(read: Targets, checkpoint: Checkpoint) -> tuple[tuple[nn.Module, object], ...]:
    found: list[tuple[nn.Module, object]] = []
    for name, module in read.extras.items():
        if name in checkpoint.others:
            found.append((module, checkpoint.others[name]))
        elif name in checkpoint.tensors:
            found.append((module, checkpoint.tensors[name]))
    return tuple(found)


# --- names ---------------------------------------------------------------------------------------


class _Matched(NamedTuple):
    """Attributes: which stored tensor each target gets, by its name; others of its names that are stored."""

    sources: dict[str, Stored]
    twins: dict[str, list[Stored]]
    used: set[str]

    def rows(self, target: Target, wishes: Wishes, compare: bool) -> Iterable[Misfit]:
        """Return why a target can't get what it would."""
        source = self.sources.get(target.name)
        if source is None:
            return
        if not _fits(source, target, wishes):
            yield Misfit(target.name, source.kind, target.kind)
            return
        for twin in self.twins.get(target.name, ()):
            if compare and not twin.has_bits_of(source):
                yield Misfit(twin.name, f"other values than {source.name}", f"tied to {source.name}")


def _match(targets: Iterable[Target], stored: Mapping[str, Stored], tied: Mapping[str, str]) -> _Matched:
    matched = _Matched({}, {}, set())
    for target in targets:
        # A buffer that isn't saved is computed by the module, and only what has no value takes an old one.
        names = target.names if target.is_stored or target.tensor.is_meta else ()
        found = [name for name in names if name in stored]
        if not found:
            found = [tied[name] for name in names if tied.get(name) in stored][:1]
        if found:
            matched.sources[target.name] = stored[found[0]]
            matched.twins[target.name] = [stored[name] for name in found[1:]]
            matched.used.update(found)
    return matched


def _fits(source: Stored, target: Target, wishes: Wishes) -> bool:
    tensor = target.tensor
    shape = tuple(tensor.shape)
    if is_dtensor(tensor) and not wishes.is_whole:
        shape = tuple(local_of(tensor).shape)
    # torch has always loaded one element of one dimension into a number, too.
    if source.shape != shape and not (shape == () and source.shape == (1,)):
        return False
    if source.dtype == tensor.dtype:
        return True
    if source.dtype.is_floating_point or tensor.dtype.is_floating_point:
        return source.dtype.is_floating_point and tensor.dtype.is_floating_point
    # Whole numbers and truth values aren't cast, but for a dtype that has all of them.
    return torch.promote_types(source.dtype, tensor.dtype) == tensor.dtype


def _ties_later(model: nn.Module, lacking: Sequence[Target]) -> set[str]:
    """Names that ``tie_weights`` will give a value, as models of older versions of transformers say it."""
    said: object = getattr(model, "_tied_weights_keys", None)
    if not isinstance(said, (list, tuple)) or not callable(getattr(model, "tie_weights", None)):
        return set()
    keys = set(cast("Iterable[str]", said))
    return {one.name for one in lacking if keys.intersection(one.names)}


def _hint(wanted: set[str], stored: Mapping[str, Stored]) -> str:
    """Return whether the names would fit with a prefix more or less: of a model around this one or inside."""
    have = set(stored)
    if not wanted or not have or 2 * len(wanted & have) > min(len(wanted), len(have)):
        return ""
    for prefix in sorted({name.partition(".")[0] + "." for name in have if "." in name}):
        inner = {name[len(prefix) :] for name in have if name.startswith(prefix)}
        if 2 * len(inner & wanted) > len(wanted):
            return (
                f" Without {prefix!r} the checkpoint's names would be the model's: it is of a model that "
                f"holds this one as {prefix[:-1]!r}. Load into that one."
            )
    for prefix in sorted({name.partition(".")[0] + "." for name in wanted if "." in name}):
        inner = {name[len(prefix) :] for name in wanted if name.startswith(prefix)}
        if 2 * len(inner & have) > len(have):
            return (
                f" With {prefix!r} before them the checkpoint's names would be the model's: it is of the "
                f"model inside. Load into the module {prefix[:-1]!r} of it."
            )
    return ""


# --- places --------------------------------------------------------------------------------------


def _check_special(operation: str, targets: Iterable[Target], special_dtypes: Mapping[str, object]) -> None:
    known = {name for target in targets for name in target.names}
    unknown = [name for name in special_dtypes if name not in known]
    if unknown:
        raise ValueError(
            f"{operation}: special_dtypes names tensors that the model doesn't have: "
            f"{tell_unknown(unknown, known)}."
        )


def _steps(
    operation: str, targets: Iterable[Target], sources: Mapping[str, Stored], wishes: Wishes
) -> tuple[LoadStep, ...]:
    steps: list[LoadStep] = []
    refused: list[str] = []
    for target in targets:
        source = sources.get(target.name)
        if source is None:
            continue
        # A map was checked to cover what state dicts have; of other buffers it may say nothing.
        place = None if wishes.places is None else _place_of_all(target.names, wishes.places)
        step = _step(target, source, place, _final_dtype(target, wishes))
        if step.how in ("map", "convert") and is_dtensor(target.tensor):
            refused.append(f"{target.name}: it is spread over ranks")
        elif step.how == "convert" and not wishes.has_folder:
            refused.append(f"{target.name}: {_why_not_mapped(step)}")
        steps.append(step)
    if refused:
        raise ValueError(
            f"{operation}: what the map puts on the disk has to be usable where it lies, and this isn't:\n  "
            + "\n  ".join(refused[:5])
            + (f"\n  and {len(refused) - 5} more" if len(refused) > 5 else "")
            + "\nPass offload_folder, to which it is written once as it is needed, or another place."
        )
    return tuple(sorted(steps, key=lambda step: (str(step.source.path), step.source.start)))


def _place_of_all(names: Sequence[str], places: Mapping[str, Place]) -> Place | None:
    """Choose one place for what has several names: the disk, which needs no memory, or else the fastest."""
    found = [place_of(name, places) for name in names]
    said = [place for place in found if place is not None]
    if len(said) < len(found):
        return None
    return "disk" if "disk" in said else min(said, key=order_of)


def _final_dtype(target: Target, wishes: Wishes) -> torch.dtype:
    now = target.tensor.dtype
    if not now.is_floating_point:
        return now
    special = wishes.special_dtypes or {}
    for name in target.names:
        if name in special:
            return special[name]
    if wishes.dtype is None:
        return now
    is_kept = any(has_part(name, wishes.keep_in_fp32) for name in target.names)
    return torch.float32 if is_kept else wishes.dtype


def has_part(name: str, parts: Iterable[str]) -> bool:
    """Whether a name has one of ``parts`` as a component, or as several in a row.

    >>> has_part("block.norm.weight", ["norm"]), has_part("block.abnormal.weight", ["norm"])
    (True, False)
    """
    return any(f".{part}." in f".{name}." for part in parts)


def _step(target: Target, source: Stored, place: Place | None, dtype: torch.dtype) -> LoadStep:
    tensor = target.tensor
    if place == "disk":
        can_stay = dtype == source.dtype and source.is_mappable
        how: How = "map" if can_stay else "convert"
        return LoadStep(target, source, place, torch.device("cpu"), dtype, how)
    if place is not None:
        device = check_device(place, f"device_map[{target.name!r}]")
    else:
        device = torch.device("cpu") if tensor.is_meta and not is_dtensor(tensor) else _device_of(tensor)
    stays = not tensor.is_meta and tensor.dtype == dtype and is_on(tensor, device)
    return LoadStep(target, source, place, device, dtype, "fill" if stays else "new")


def _device_of(tensor: torch.Tensor) -> torch.device:
    if not tensor.is_meta:
        return tensor.device
    return torch.device(getattr(tensor, "device_mesh").device_type)  # noqa: B009 -- of a DTensor alone


def _device_for(target: Target, wishes: Wishes) -> torch.device:
    place = _place_of_all(target.names, wishes.places or {})
    if place is None or place == "disk":
        return _device_of(target.tensor) if not target.tensor.is_meta else torch.device("cpu")
    return check_device(place, f"device_map[{target.name!r}]")


def _why_not_mapped(step: LoadStep) -> str:
    source = step.source
    if step.dtype != source.dtype:
        return (
            f"the file has {str(source.dtype).removeprefix('torch.')}, and "
            f"{str(step.dtype).removeprefix('torch.')} is wanted (dtype= asks for another)"
        )
    if source.made_of:
        return "transformers makes it of several tensors of the checkpoint"
    return "it lies scattered or misaligned in its file"
