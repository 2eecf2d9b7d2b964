"""Which stored tensor goes where in a model, and how. Nothing is read or changed here."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.bigmodel.assign import TensorRef, named_modules, store_of
from accelfn.bigmodel.devices import (
    Place,
    check_device,
    is_on,
    listed,
    order_of,
    place_of,
    tell_unknown,
)
from accelfn.bigmodel.weight_files import Checkpoint, Stored
from accelfn.checkpoint.header import dtype_name
from accelfn.checkpoint.weights_index import tied_by
from accelfn.checkpoint.weights_state import own_names
from accelfn.errors import CheckpointMismatchError, Misfit
from accelfn.parallel.parameters import WholeModel, whole_of
from accelfn.tree import is_dtensor, local_of

How: TypeAlias = Literal["fill", "new", "map", "convert"]
"""Into the memory that the model has, into new memory, mapped where it is stored, or converted and mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
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
    special_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    keep_in_fp32: tuple[str, ...] = ()
    has_folder: bool = False
    strict: bool = False
    is_whole: bool = True

    def dtype_of(self, target: Target) -> torch.dtype:
        """Return the dtype that a tensor shall have."""
        now = target.tensor.dtype
        if not now.is_floating_point:
            return now
        special = self.special_dtypes
        found = next((special[name] for name in target.names if name in special), None)
        if found is not None or self.dtype is None:
            return found or now
        is_kept = any(has_part(name, self.keep_in_fp32) for name in target.names)
        return torch.float32 if is_kept else self.dtype

    def place_of(self, target: Target) -> Place | None:
        """Return one place for all names: the disk, which needs no memory, or else the fastest.

        A map was checked to cover what state dicts have; of other buffers it may say nothing.
        """
        said = [place_of(name, self.places or {}) for name in target.names]
        known = [place for place in said if place is not None]
        if len(known) < len(said):
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
    """Whether a name has one of ``parts`` as a component, or as several in a row.

    >>> has_part("block.norm.weight", ["norm"]), has_part("block.abnormal.weight", ["norm"])
    (True, False)
    """
    return any(f".{part}." in f".{name}." for part in parts)


class Target(NamedTuple):
    """A tensor of a model.

    Attributes:
        names: All that it has in the model, without what wrappers add; the first is what it is called.
        refs: Where the modules hold it, one for each name.
        tensor: What they hold now.
        is_stored: Whether a state dict holds it; a buffer may be left out of it.
        starts_at_zero: Whether a module counts with it, and begins at zero where a checkpoint lacks it.
    """

    names: tuple[str, ...]
    refs: tuple[TensorRef, ...]
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
        return f"{dtype_name(self.tensor.dtype)} {tuple(self.tensor.shape)}"


class LoadStep(NamedTuple):
    """Loading of one tensor.

    Attributes:
        target: Where it belongs.
        source: Where it is stored.
        device: Of the memory.
        dtype: That it shall have.
        how: It gets there.
    """

    target: Target
    source: Stored
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


_NOT_SAVED = (
    " Buffers that aren't saved (persistent=False) have to be computed: build the model with "
    "init_empty_weights(include_buffers=False)."
)


def plan_load(
    operation: str, model: nn.Module, checkpoint: Checkpoint, options: LoadOptions, *, compare: bool = True
) -> LoadPlan:
    """Decide which stored tensor goes where, and refuse what can't work, all of it at once.

    Args:
        operation: What errors call it.
        model: Without the wrappers around it.
        checkpoint: As its headers say.
        options: Of the caller.
        compare: Look into the files whether tied tensors that are stored twice have one value.

    Raises:
        CheckpointMismatchError: Shapes or kinds of dtypes differ, tied tensors have two values, a tensor
            would stay without any, or (with ``strict``) a name is missing on either side.
        ValueError: The map has no place for a tensor, this machine lacks a device, what goes to the disk
            needs a folder, or there are dtypes for tensors that the model lacks.
    """
    stored, values = _renamed_by_hooks(operation, model, _as_transformers_names(model, checkpoint.tensors))
    own, extras = _read_targets(operation, model)
    whole = whole_of(model) or WholeModel({}, {})  # of which this rank may have some stages alone
    targets = _tied(own, model, whole, stored)
    names = {name for one in targets for name in one.names if one.is_stored}
    known = {name for one in targets for name in one.names}
    unknown = [name for name in options.special_dtypes if name not in known]
    if unknown:
        raise ValueError(
            f"{operation}: special_dtypes names tensors that the model doesn't have: "
            f"{tell_unknown(unknown, known)}."
        )
    rows: list[Misfit] = []
    sources: dict[str, Stored] = {}
    used: set[str] = set()
    for target in targets:
        found = _names_in(stored, target, checkpoint.tied)
        if found:
            sources[target.name] = stored[found[0]]
            used.update(found)
            rows += _misfits(target, [stored[name] for name in found], options, compare)
    lacking = [one for one in targets if one.name not in sources and one.name not in values]
    later = _ties_later(model, lacking)
    needed = [one for one in lacking if not one.starts_at_zero and one.name not in later]
    bare = [one for one in needed if one.tensor.is_meta]
    rows += [Misfit(one.name, "nothing", _wanted(one)) for one in bare]
    there = {*stored, *checkpoint.others, *checkpoint.tied}
    elsewhere = whole.tensors.keys() - names
    tied = whole.tied()
    missing = (
        *(one.name for one in needed if one.is_stored),
        *(name for name in extras if name not in {**checkpoint.others, **checkpoint.tensors}),
        *(n for n in whole.tensors if n in elsewhere and there.isdisjoint(tied.get(n, (n,)))),
    )
    expected = used | names | extras.keys() | elsewhere
    unexpected = tuple(name for name in (*stored, *checkpoint.others) if name not in expected)
    if options.strict:
        told = {row.path for row in rows}
        kinds = {target.name: target.kind for target in targets}
        rows += [Misfit(one, "nothing", kinds.get(one, "state")) for one in missing if one not in told]
        rows += [Misfit(one, stored[one].kind if one in stored else "state", "nothing") for one in unexpected]
    if rows:
        hint = _hint(names, set(stored)) + (_NOT_SAVED if any(not one.is_stored for one in bare) else "")
        raise CheckpointMismatchError(
            f"{operation}: {checkpoint.place} doesn't fit the model. Nothing was changed.{hint}", rows
        )
    for one in lacking:
        if one.starts_at_zero and one.tensor.is_meta:
            values[one.name] = torch.zeros((), dtype=one.tensor.dtype)
    state = {**checkpoint.tensors, **checkpoint.others}
    return LoadPlan(
        steps=_plan_steps(operation, targets, sources, options),
        values=tuple((t, values[t.name].to(options.device_of(t))) for t in targets if t.name in values),
        extras=tuple((module, state[name]) for name, module in extras.items() if name in state),
        missing=missing,
        unexpected=unexpected,
        needs_ties=bool(later),
    )


def _wanted(target: Target) -> str:
    return target.kind if target.is_stored else f"{target.kind}, which isn't saved"


# --- the model -----------------------------------------------------------------------------------


def _read_targets(operation: str, model: nn.Module) -> tuple[list[Target], dict[str, nn.Module]]:
    """List the tensors of a model in the order of its modules, and the modules with more state by its name.

    Raises:
        ValueError: A lazy layer has no shape yet, a parameter is made of other tensors, as those of quantised
            layers are, or two tensors would have the same name without wrappers.
    """
    own = own_names(operation, model)
    groups: dict[object, list[tuple[str, TensorRef]]] = {}
    extras: dict[str, nn.Module] = {}
    for path, module in named_modules(model, every_name=True):
        dot = f"{path}." if path else ""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extras[own.get(f"{dot}_extra_state", f"{dot}_extra_state")] = module
        for is_parameter in (True, False):
            for key, tensor in store_of(module, is_parameter).items():
                if tensor is not None:
                    _check(operation, f"{dot}{key}", tensor)
                    ref = TensorRef(module, key, is_parameter)
                    groups.setdefault(tied_by(tensor), []).append((f"{dot}{key}", ref))
    targets: list[Target] = []
    for group in groups.values():
        ref = group[0][1]
        targets.append(
            Target(
                names=tuple(own.get(name, name) for name, _ in group),
                refs=tuple(one for _, one in group),
                tensor=ref.read(),
                is_stored=any(name in own for name, _ in group),
                starts_at_zero=isinstance(ref.owner, _NormBase) and ref.key == "num_batches_tracked",
            )
        )
    return targets, extras


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


def _tied(
    targets: Iterable[Target], model: nn.Module, whole: WholeModel, stored: Iterable[str]
) -> list[Target]:
    """Add the names of what tensors are tied to on other ranks, and join those that were untied.

    Models of transformers say in ``all_tied_weights_keys`` which tensors are one, and lose that where tensors
    are replaced one by one. Only what a checkpoint lacks is taken to be tied: what it has under both names
    may have been untied since.
    """
    groups, have = whole.tied(), set(stored)
    merged: dict[str, Target] = {}
    for one in targets:
        others = tuple(name for name in groups.get(one.name, ()) if name not in one.names)
        merged[one.name] = one._replace(names=(*one.names, *others))
    of_name = {name: target.name for target in merged.values() for name in target.names}
    for path, module in named_modules(model, every_name=True):
        said: object = vars(module).get("all_tied_weights_keys")
        dot = f"{path}." if path else ""
        for name, first in cast("dict[str, str]", said).items() if isinstance(said, dict) else ():
            one, other = of_name.get(f"{dot}{name}"), of_name.get(f"{dot}{first}")
            if one is None or other is None or one == other or have.intersection(merged[one].names):
                continue
            lacking, base = merged[one], merged[other]
            if lacking.tensor.shape == base.tensor.shape:
                del merged[one]
                refs = base.refs + lacking.refs
                merged[other] = base._replace(names=base.names + lacking.names, refs=refs)
                of_name.update(dict.fromkeys(lacking.names, other))
    return list(merged.values())


def _ties_later(model: nn.Module, lacking: Sequence[Target]) -> set[str]:
    """Names that ``tie_weights`` will give a value, as models of older versions of transformers say it."""
    said: object = getattr(model, "_tied_weights_keys", None)
    if not isinstance(said, (list, tuple)) or not callable(getattr(model, "tie_weights", None)):
        return set()
    keys = set(cast("Iterable[str]", said))
    return {one.name for one in lacking if keys.intersection(one.names)}


# --- names of the checkpoint ---------------------------------------------------------------------


def _names_in(stored: Mapping[str, Stored], target: Target, tied: Mapping[str, str]) -> list[str]:
    """Return the names of a tensor that are stored, or else the one that a name of it is tied to."""
    # A buffer that isn't saved is computed by the module, and only what has no value takes an old one.
    names = target.names if target.is_stored or target.tensor.is_meta else ()
    found = [name for name in names if name in stored]
    return found or [tied[name] for name in names if tied.get(name) in stored][:1]


def _misfits(
    target: Target, found: Sequence[Stored], options: LoadOptions, compare: bool
) -> Iterable[Misfit]:
    """Return why a target can't get what it would."""
    source = found[0]
    if not _fits(source, target.tensor, options):
        yield Misfit(target.name, source.kind, target.kind)
        return
    for twin in found[1:]:
        if compare and not twin.has_bits_of(source):
            yield Misfit(twin.name, f"other values than {source.name}", f"tied to {source.name}")


def _fits(source: Stored, tensor: torch.Tensor, options: LoadOptions) -> bool:
    shape = tuple(tensor.shape if options.is_whole else local_of(tensor).shape)
    # torch has always loaded one element of one dimension into a number, too.
    if source.shape != shape and not (shape == () and source.shape == (1,)):
        return False
    if source.dtype.is_floating_point or tensor.dtype.is_floating_point:
        return source.dtype.is_floating_point and tensor.dtype.is_floating_point
    # Whole numbers and truth values aren't cast, but for a dtype that has all of them.
    return source.dtype == tensor.dtype or torch.promote_types(source.dtype, tensor.dtype) == tensor.dtype


def _hint(wanted: set[str], have: set[str]) -> str:
    """Return whether the names would fit with a prefix more or less: of a model around this one or inside."""
    if not wanted or not have or 2 * len(wanted & have) > min(len(wanted), len(have)):
        return ""
    without = (
        " Without {0!r} the checkpoint's names would be the model's: it is of a model that holds this one as "
        "{1!r}. Load into that one."
    )
    with_it = (
        " With {0!r} before them the checkpoint's names would be the model's: it is of the model inside. "
        "Load into the module {1!r} of it."
    )
    for outer, inner, text in ((have, wanted, without), (wanted, have, with_it)):
        for prefix in sorted({name.partition(".")[0] + "." for name in outer if "." in name}):
            below = {name.removeprefix(prefix) for name in outer if name.startswith(prefix)}
            if 2 * len(below & inner) > len(inner):
                return text.format(prefix, prefix[:-1])
    return ""


def _renamed_by_hooks(
    operation: str, model: nn.Module, tensors: Mapping[str, Stored]
) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
    """Let modules rename what they know by an older name, as ``load_state_dict`` does.

    Their hooks get tensors without values, so only names may change.

    Returns:
        The stored tensors by the model's names, and values that modules add on their own.

    Raises:
        ValueError: A hook needs values, or computes some.
    """
    hooked = [(path, module) for path, module in named_modules(model, every_name=True) if _hooks_of(module)]
    if not hooked:
        return dict(tensors), {}
    state: dict[str, Any] = {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()
    }
    stand_ins = dict(state)  # keeps the objects alive, so that each is known by its id
    known = {id(value): tensors[name] for name, value in stand_ins.items()}
    for path, module in hooked:
        refusal = (
            f"{operation}: {type(module).__name__} at {path or 'the root'!r} has a hook that computes with "
            "the values that are loaded, and here they go from the files to their places unseen. Load this "
            "model with load_state_dict of torch."
        )
        try:
            for hook in _hooks_of(module):
                hook(state, f"{path}." if path else "", {}, True, [], [], [])
        except (NotImplementedError, RuntimeError) as error:  # what has no values can't be computed with
            raise ValueError(refusal) from error
        if any(value.is_meta and id(value) not in known for value in state.values()):
            raise ValueError(refusal)
    return (
        {name: known[id(value)] for name, value in state.items() if id(value) in known},
        {name: value for name, value in state.items() if id(value) not in known},
    )


def _hooks_of(module: nn.Module) -> list[Any]:
    return list(cast("dict[int, Any]", vars(module).get("_load_state_dict_pre_hooks") or {}).values())


class _Part(NamedTuple):
    name: str
    pattern: str
    stored: Stored


def _as_transformers_names(model: nn.Module, tensors: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """Return the tensors of a checkpoint as a model of transformers has them.

    Nothing is read: what is put together of several tensors is so when it is loaded.

    Returns:
        By the model's names, where transformers knows them; the same for models of others, and for
        transformers before version 5, which has no such tensors.
    """
    is_theirs = any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)
    have = set(model.state_dict(keep_vars=True)) if is_theirs else set[str]()
    if not is_theirs or have.issuperset(tensors):
        return tensors
    if importlib.util.find_spec("transformers.core_model_loading") is None:
        return tensors
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversions: Any = importlib.import_module("transformers.conversion_mapping")
    try:
        rules = list(conversions.get_model_conversion_mapping(model))
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    except (AttributeError, TypeError):  # another version's way; what doesn't fit is then named as it is
        return tensors
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Stored] = {}
    parts: dict[str, list[_Part]] = {}
    # In the order of numbers in names, in which parts are put together.
    for name in sorted(tensors, key=loading.dot_natural_key):
        renamed, pattern = cast(
            "tuple[str, str | None]", loading.rename_source_key(name, renamings, converters)
        )
        if renamed in have and pattern is not None:
            parts.setdefault(renamed, []).append(_Part(name, pattern, tensors[name]))
        else:
            found[renamed if renamed in have else name] = tensors[name]
    for renamed, some in parts.items():
        found.update(_put_together(model, by_pattern[some[0].pattern], renamed, some))
    return found


def _put_together(model: nn.Module, rule: Any, renamed: str, parts: Sequence[_Part]) -> dict[str, Stored]:
    """Return what will be made of some tensors, and how to make it.

    Raises:
        ValueError: It can't be made of them, since their shapes don't go together.
    """

    def convert(value: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(rule)
        for part in parts:
            own.add_tensor(renamed, part.name, part.pattern, value(part.stored))
        made = cast("dict[str, Any]", own.convert(renamed, model=model, config=cast("Any", model).config))
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    try:
        shapes = convert(lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"))
    except RuntimeError as error:
        raise ValueError(
            f"{renamed} can't be put together of {listed([part.name for part in parts], 1)}: {error}. Is it "
            f"a checkpoint of {type(model).__name__}?"
        ) from error
    first = min((part.stored for part in parts), key=lambda one: (str(one.path), one.start))

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
            made_of=tuple(part.stored for part in parts),
            made_by=repr(rule.operations),
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
            refused.append(f"{target.name}: {_why_not_mapped(step)}")
        steps.append(step)
    if refused:
        more = [f"and {len(refused) - 5} more"] if len(refused) > 5 else []
        raise ValueError(
            f"{operation}: what the map puts on the disk has to be usable where it lies, and this isn't:\n  "
            + "\n  ".join([*refused[:5], *more])
            + "\nPass offload_folder, to which it is written once as it is needed, or another place."
        )
    return tuple(sorted(steps, key=lambda step: (str(step.source.path), step.source.start)))


def _plan_step(target: Target, source: Stored, options: LoadOptions) -> LoadStep:
    tensor, dtype, device = target.tensor, options.dtype_of(target), options.device_of(target)
    if options.place_of(target) == "disk":
        how: How = "map" if dtype == source.dtype and source.is_mappable else "convert"
    else:
        stays = not tensor.is_meta and tensor.dtype == dtype and is_on(tensor, device)
        how = "fill" if stays else "new"
    return LoadStep(target, source, device, dtype, how)


def _why_not_mapped(step: LoadStep) -> str:
    source = step.source
    if step.dtype != source.dtype:
        return (
            f"the file has {dtype_name(source.dtype)}, and {dtype_name(step.dtype)} is wanted (dtype= asks "
            "for another)"
        )
    if source.made_of:
        return "transformers makes it of several tensors of the checkpoint"
    return "it lies scattered or misaligned in its file"
