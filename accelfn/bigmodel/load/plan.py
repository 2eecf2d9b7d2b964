"""Which stored tensor goes where, and how. Nothing is read or changed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from accelfn.bigmodel.load.source import Checkpoint, Stored
from accelfn.bigmodel.load.targets import Target, Targets, read_targets, tie_by_names, translate
from accelfn.bigmodel.places import Place, check_device, is_on, order_of
from accelfn.bigmodel.plan.near import tell_unknown
from accelfn.errors import CheckpointMismatchError, Misfit
from accelfn.parallel import WholeModel, whole_of
from accelfn.tree import is_dtensor, local_of

__all__ = ("How", "LoadPlan", "LoadStep", "Wishes", "has_part", "place_of", "plan_load")

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
    stored, values = translate(operation, model, checkpoint.tensors)
    read = read_targets(operation, model)
    whole = whole_of(model) or WholeModel({}, {})  # of which this rank may have some stages alone
    targets = tie_by_names(_tied_over_stages(read.tensors, whole), model, stored)
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


def place_of(name: str, places: Mapping[str, Place]) -> Place | None:
    """Find what a map says of a tensor: the longest of its keys that the name begins with counts.

    >>> place_of("a.b.weight", {"": 0, "a": 1, "a.c": 2})
    1
    """
    while True:
        if name in places:
            return places[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


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
    uncovered: list[str] = []
    refused: list[str] = []
    for target in targets:
        source = sources.get(target.name)
        if source is None:
            continue
        place = None
        if wishes.places is not None:
            place = _place_of_all(target.names, wishes.places)
            if place is None:
                uncovered.append(target.name)
                continue
        step = _step(target, source, place, _final_dtype(target, wishes))
        if step.how in ("map", "convert") and is_dtensor(target.tensor):
            refused.append(f"{target.name}: it is spread over ranks")
        elif step.how == "convert" and not wishes.has_folder:
            refused.append(f"{target.name}: {_why_not_mapped(step)}")
        steps.append(step)
    if uncovered:
        raise ValueError(
            f"{operation}: device_map has no place for {_listed(uncovered)}. Name "
            f"{'it, or a module that holds it' if len(uncovered) == 1 else 'them, or modules that hold them'}"
            "; '' is the whole model."
        )
    if refused:
        more = [f"  and {len(refused) - 5} more"] if len(refused) > 5 else []
        raise ValueError(
            f"{operation}: what the map puts on the disk has to be usable where it lies, and this isn't:\n  "
            + "\n  ".join([*refused[:5], *more])
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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"
