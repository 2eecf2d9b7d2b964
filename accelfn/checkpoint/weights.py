"""Save a model's weights in the layout that the ecosystem reads, and load them in place."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

import safetensors
import torch
from torch import nn

from accelfn.checkpoint.header import SAFETENSORS_NAMES
from accelfn.checkpoint.plan import check_copies
from accelfn.checkpoint.weights_files import (
    holding,
    publish,
    replacing,
    staging,
    taken_generations,
    write_files,
    write_pickled,
    write_safetensors,
)
from accelfn.checkpoint.weights_index import (
    WeightNames,
    WeightNaming,
    WeightsFiles,
    WeightsPlan,
    find_weights,
    names_of,
    parse_size,
    plan_weights,
    read_header,
    tied_by,
)
from accelfn.checkpoint.weights_state import (
    Meet,
    Stages,
    describe,
    has_bytes,
    is_tensor,
    own_names,
    require_module,
    together,
    whole_state,
    whole_tensors,
)
from accelfn.comm import Call, catch, check_replicas, gather_bytes
from accelfn.context import Context, check_context
from accelfn.context.config import GuardMode
from accelfn.errors import CheckpointMismatchError, DamagedCheckpointError, Misfit
from accelfn.parallel.parameters import WholeModel, check_filled, whole_of
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor

_SAVE = "save_model"
_OBJECT = "save_object"


def save_model(
    ctx: Context,
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    names: WeightNaming = "transformers",
) -> tuple[Path, ...]:
    """Write the weights of ``model`` as ``model.safetensors``, or as several files with an index.

    The main process writes; with ``ProjectConfiguration(save_on_each_node=True)`` the first process of each
    node does. All new files are complete on disk before any of them takes its name, and the order in which
    they do is such that a reader finds the old model or the new one, whole, whenever the program is killed.
    What an earlier save left behind is removed last. Weights that share all their data are stored once; the
    other names stand in the file's metadata. Views that share a part of it become tensors of their own.

    Of a model that is spread over ranks (``DTensor``, stages of a pipeline) one tensor at a time is gathered
    and written.

    Ranks: every rank of ``ctx``. Returns when the files are in place, on all ranks.

    Args:
        ctx: The world.
        model: Prepared or not. Its class and wrapper leave no trace in the names.
        directory: Made if it isn't there.
        max_shard_size: Largest size of a file's tensors, in bytes or such as ``"5GB"``.
        safe_serialization: Safetensors. Otherwise ``pytorch_model.bin`` and the like are written by
            ``torch.save``, with one file's tensors in memory at a time.
        names: What the files are called: ``"transformers"`` (``model.safetensors``) or ``"diffusers"``
            (``diffusion_pytorch_model.safetensors``).

    Returns:
        The files, on every rank; the index is the last.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: A weight is sparse, of a dtype that safetensors lacks, or on the meta device and has no
            data, the state dict holds something that is no tensor, or an option has another form.
        NotADirectoryError: ``directory`` is a file.
        OSError: The files can't be written; what was there before is still there.
        RemoteRankError: On the other ranks, when a rank failed.
        MismatchError: The ranks' models differ.
        ReplicaDriftError: The parameters differ between ranks, so that another rank's would be lost.
    """
    check_context("save_model", ctx)
    folder = Path(directory)
    _check_replicas(ctx, model)

    def look(meet: Meet) -> tuple[dict[str, torch.Tensor], Stages | None, int]:
        kind = _kind(names, safe_serialization)
        size = parse_size(max_shard_size)
        plain = unwrap_model(require_module(_SAVE, model), keep_torch_compile=False)
        tensors, stages = whole_state(ctx, _SAVE, plain, _tensors(plain, safe_serialization), meet)
        meet(f"{kind} {size}", lambda: describe(tensors, stages))
        return tensors, stages, size

    tensors, stages, size = together(ctx, _SAVE, look)
    kind = _kind(names, safe_serialization)
    with ExitStack() as held:
        generation = _begin(ctx, folder, names, held)
        plan = plan_weights(tensors, size, kind, generation)
        together(
            ctx, _SAVE, lambda meet: _save(folder, plan, tensors, stages, names, kind, meet, _writes(ctx))
        )
    files = [folder / file for file, _ in plan.files]
    return (*files, folder / kind.index) if len(files) > 1 else tuple(files)


def _kind(naming: WeightNaming, safe: bool) -> WeightNames:
    return names_of(naming)[0 if safe else 1]


def _writes(ctx: Context) -> bool:
    return ctx.is_local_main_process if ctx.project.save_on_each_node else ctx.is_main_process


def _check_replicas(ctx: Context, model: nn.Module) -> None:
    guard = ctx.guard
    if ctx.num_processes == 1 or not guard.check_replicas_before_saving or guard.mode == GuardMode.OFF:
        return

    def parameters() -> dict[str, torch.Tensor]:
        # Parameters alone: running statistics of a batch differ between ranks by right.
        plain = unwrap_model(require_module(_SAVE, model), keep_torch_compile=False)
        check_filled(_SAVE, plain)  # else whatever was in the memory would be said to have drifted
        named = plain.named_parameters()
        return {name: value for name, value in named if not value.is_meta}

    found = together(ctx, _SAVE, lambda _: parameters())
    staged = whole_of(unwrap_model(model, keep_torch_compile=False))
    if staged is None and not any(map(is_dtensor, found.values())):
        check_replicas(ctx, found, name="model")
        return
    first: Mapping[str, str] = {} if staged is None else staged.first  # as stages call what they share
    check_copies(ctx, _SAVE, {first.get(name, name): value for name, value in found.items()}, "model")


def _tensors(plain: nn.Module, safe: bool) -> dict[str, torch.Tensor]:
    """Return what this rank has to be saved, under the names that the model itself gives.

    Raises:
        ValueError: It can't be saved.
    """
    check_filled(_SAVE, plain)
    names = own_names(_SAVE, plain)
    # With the parameters themselves, by which tied ones are known.
    state = {names[name]: value for name, value in plain.state_dict(keep_vars=True).items()}
    rules: tuple[tuple[Callable[[Any], bool], str], ...] = (
        (
            is_tensor,
            (
                "in the state dict is no tensor, and would be lost: the files hold tensors only. Let "
                "get_extra_state give a tensor, or save it by yourself"
            ),
        ),
        (
            lambda one: one.layout == torch.strided,
            "must be dense to be saved. Make it dense (to_dense) first",
        ),
        (lambda one: not one.is_meta, "have no data (meta device). Load or initialise the model first"),
        (
            lambda one: is_dtensor(one) or has_bytes(one),
            "is of a class of its own, which the files can't hold. Convert it to a plain tensor first",
        ),
        (
            lambda one: not safe or one.dtype in SAFETENSORS_NAMES,
            "has a dtype that safetensors lacks. Convert it, or pass safe_serialization=False",
        ),
    )
    for is_sound, why in rules:
        odd = [name for name, value in state.items() if not is_sound(value)]
        if odd:
            shown = f"{', '.join(odd[:5])}{' and others' if len(odd) > 5 else ''}"
            raise ValueError(f"{_SAVE}: {shown} {why}.")
    return cast("dict[str, torch.Tensor]", state)


def _begin(ctx: Context, folder: Path, naming: WeightNaming, held: ExitStack) -> int:
    """Make the directory, keep others from writing there, and choose names that are free on all nodes."""

    def begin() -> bytes:
        if not _writes(ctx):
            return b""
        held.enter_context(holding(folder, naming))
        return " ".join(map(str, taken_generations(folder, naming))).encode()

    taken, error = catch(begin)
    if ctx.num_processes > 1:
        told = gather_bytes(ctx, Call(_SAVE, "names", takes_long=True), taken or b"", error)
    elif error is not None:
        raise error
    else:
        told = [taken or b""]
    used = {int(number) for one in told for number in one.split()}
    return next(number for number in itertools.count(1) if number not in used)


def _save(
    folder: Path,
    plan: WeightsPlan,
    tensors: Mapping[str, torch.Tensor],
    stages: Stages | None,
    naming: WeightNaming,
    kind: WeightNames,
    meet: Meet,
    writes: bool,
) -> None:
    order = [name for _, names in plan.files for name in names]
    values = whole_tensors(tensors, order, meet, stages)
    if not writes:
        deque(values, maxlen=0)  # this rank only helps to gather, and keeps none of them
        return
    with staging(folder / "weights") as stage:
        publish(folder, naming, stage, write_files(stage, plan, kind, tensors, values))


def save_object(
    ctx: Context,
    obj: Any,
    path: str | os.PathLike[str] | BinaryIO,
    safe_serialization: bool = False,
) -> None:
    """Write an object once: by ``torch.save``, or a dict of tensors as safetensors.

    The main process writes; with ``ProjectConfiguration(save_on_each_node=True)`` the first process of each
    node does. The file is complete on disk before it takes its name, in one step.

    Ranks: every rank of ``ctx``. Returns when the file is there, on all ranks.

    Args:
        ctx: The world.
        obj: Anything that ``torch.save`` takes; or a dict of dense tensors by name. Of each rank, though only
            those that write look at it.
        path: The file, in a directory that exists. For ``torch.save`` a binary file object will do.
        safe_serialization: Safetensors. Otherwise the file is pickled, so read it with
            ``torch.load(weights_only=True)``, unless you trust it.

    Raises:
        TypeError: Safetensors were asked for, and ``obj`` is no dict of tensors, or ``path`` no path.
        ValueError: A tensor is sparse, on the meta device, or of a dtype that safetensors lacks.
        OSError: The file can't be written; what was there before is still there.
        RemoteRankError: On the other ranks, when a rank failed.
    """

    def write(_: Meet) -> None:
        if not _writes(ctx):
            return
        tensors = _require_tensors(obj) if safe_serialization else None
        if not isinstance(path, (str, os.PathLike)):
            if tensors is not None:
                raise TypeError(f"{_OBJECT}: safetensors need a path, got {type(path).__name__}.")
            torch.save(obj, path)
            return
        with replacing(Path(path)) as temporary:
            if tensors is None:
                write_pickled(temporary, obj)
            else:
                forms = {name: (one.dtype, one.shape) for name, one in tensors.items()}
                write_safetensors(temporary, forms, tensors.__getitem__, {"format": "pt"})

    together(ctx, _OBJECT, write)


def _require_tensors(obj: object) -> dict[str, torch.Tensor]:
    given = dict(cast("Mapping[object, object]", obj)) if isinstance(obj, Mapping) else None
    if given is None or not all(isinstance(name, str) and is_tensor(one) for name, one in given.items()):
        other = next((name for name, one in (given or {}).items() if not is_tensor(one)), None)
        what = type(cast("object", obj)).__name__
        what = what if other is None else f"{what} whose {other!r} is no tensor"
        raise TypeError(f"{_OBJECT}: safetensors hold a dict of tensors by name, got a {what}.")
    tensors = cast("dict[str, torch.Tensor]", given)
    for name, value in tensors.items():
        if (
            value.layout != torch.strided
            or value.is_meta
            or value.dtype not in SAFETENSORS_NAMES
            or not has_bytes(value)
        ):
            raise ValueError(
                f"{_OBJECT}: {name!r} must be a plain dense tensor with data, of a dtype that safetensors "
                f"knows: got {value.dtype}, {value.layout}, on {value.device}, {type(value).__name__}."
            )
    return tensors


_LOAD = "load_model"
_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})


class LoadReport(NamedTuple):
    """What :func:`load_model` could not match.

    Attributes:
        missing: Names of the model's tensors that the files don't have; they were left as they were.
        unexpected: Names of tensors in the files that the model doesn't have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_model(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> LoadReport:
    """Load weights that :func:`save_model`, transformers, diffusers, safetensors or torch saved into a model.

    Everything is checked before anything is changed: names, shapes, dtypes, and that the files are sound. The
    tensors of the model keep their place, so an optimizer goes on with them. Weights that the model
    shares need to be in the files under one of their names. Pickled files are read with
    ``weights_only=True``, so that none can run code.

    Ranks: local; every rank reads by itself. Of a model that is spread over ranks (``DTensor``, stages of a
    pipeline) each takes its parts, and looks whether the files have the names of all. These formats have no
    checksums: bits that changed on the disk aren't noticed.

    Args:
        model: Prepared or not; changed in place.
        path: A directory, the only file, or the index; see :func:`accelfn.checkpoint.find_weights`.
        strict: Refuse where a name is missing on either side.

    Returns:
        What did not match; two empty tuples if ``strict``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: The model is on the meta device, and has no memory to load into.
        NoCheckpointError: There are no weights.
        DamagedCheckpointError: A file isn't sound, or is refused.
        CheckpointMismatchError: Names, shapes or dtypes differ, or tied weights of the model differ in the
            files. Nothing was changed.
    """
    plain = unwrap_model(require_module(_LOAD, model), keep_torch_compile=False)
    names = own_names(_LOAD, plain)
    state: dict[str, Any] = plain.state_dict(keep_vars=True)
    targets = {own: state[name] for name, own in names.items()}
    absent = [name for name, value in targets.items() if is_tensor(value) and value.is_meta]
    if absent:
        raise ValueError(
            f"{_LOAD}: {', '.join(absent[:5])}{' and others' if len(absent) > 5 else ''} have no memory "
            "(meta device). Give the model memory first (to_empty)."
        )
    files = find_weights(path)
    stored = _open(files)
    whole = whole_of(plain) or WholeModel(dict.fromkeys(targets), {})
    sources = _match(targets, stored, whole)
    there = {whole.first.get(name, name) for name in (*stored.tensors, *stored.tied)}
    elsewhere = [name for name in whole.tensors if name not in targets]
    missing = tuple(name for name in targets if name not in sources) + tuple(
        name for name in elsewhere if whole.first.get(name, name) not in there
    )
    used = {*sources.values(), *targets, *elsewhere}
    unexpected = tuple(name for name in stored.tensors if name not in used)
    rows = _misfits(targets, stored.tensors, sources)
    if strict:
        rows += [
            Misfit(
                name, "nothing", _kind_of(targets[name]) if name in targets else "a tensor of another stage"
            )
            for name in missing
        ]
        rows += [Misfit(name, _kind_of(stored.tensors[name]), "nothing") for name in unexpected]
    if rows:
        raise CheckpointMismatchError(f"{_LOAD}: {path} doesn't fit the model. Nothing was changed.", rows)
    with torch.no_grad():
        loaded = {
            name: _laid_out(stored.tensors[sources[own]], targets[own])
            for name, own in names.items()
            if own in sources
        }
        plain.load_state_dict(loaded, strict=False)
    return LoadReport(missing, unexpected)


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of weights, or of all that an index names; their bytes are read on use.

    Raises:
        NoCheckpointError: There are no weights.
        DamagedCheckpointError: A file isn't sound, or is refused.
    """
    return _open(find_weights(path)).tensors


# --- the files -----------------------------------------------------------------------------------


class _Opened(NamedTuple):
    """What the files hold.

    Attributes:
        tensors: By name.
        tied: Names that aren't stored, with the stored ones whose data they share.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]


def _open(files: WeightsFiles) -> _Opened:
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for path in files.paths:
        found, aliases = _open_safe(path) if files.is_safe else (_open_pickled(path), {})
        if files.weight_map is not None:
            promised = {name for name, file in files.weight_map.items() if file == path.name}
            lost = sorted(promised - found.keys())
            if lost:
                raise DamagedCheckpointError(
                    f"{path} lacks {', '.join(lost[:5])}, which the index says is in it: the files are not "
                    "of one save.",
                    path.name,
                )
            found = {name: one for name, one in found.items() if name in promised}
        tensors.update(found)
        tied.update(aliases)
    return _Opened(tensors, {name: first for name, first in tied.items() if first in tensors})


def _open_safe(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    header, metadata = read_header(path)
    unknown = sorted({one.dtype for one in header.values()} - _DTYPES.keys())
    if unknown:
        raise DamagedCheckpointError(
            f"{path} has tensors of {', '.join(unknown)}, which torch lacks.", path.name
        )
    try:
        opened: Any = safetensors.safe_open(path, "pt")
        with opened as file:
            # These are views of the mapped file: nothing is read yet.
            found: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in header}
    except safetensors.SafetensorError as error:
        raise DamagedCheckpointError(f"{path} is no sound safetensors file: {error}.", path.name) from error
    return found, {name: first for name, first in metadata.items() if first in header}


def _open_pickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        found: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise DamagedCheckpointError(
            f"{path} is refused: it isn't what torch.save makes of a dict of tensors ({error}).", path.name
        ) from error
    named = cast("Mapping[object, object]", found) if isinstance(found, Mapping) else None
    if named is None or not all(isinstance(name, str) for name in named):
        raise DamagedCheckpointError(f"{path} holds no dict of tensors by name.", path.name)
    for name, value in named.items():
        if not is_tensor(value) or value.layout != torch.strided:
            raise DamagedCheckpointError(f"{path}: {name!r} in it is no dense tensor.", path.name)
    return dict(cast("Mapping[str, torch.Tensor]", named))


# --- what goes where -----------------------------------------------------------------------------


def _match(targets: Mapping[str, Any], stored: _Opened, whole: WholeModel) -> dict[str, str]:
    """Return the stored tensor for each of the model's: its own, or that of a weight that shares its data."""
    sources = {name: name for name in targets if name in stored.tensors}
    by_data: dict[Any, str] = {}
    for name, source in sources.items():
        if is_tensor(targets[name]):
            by_data.setdefault(tied_by(targets[name]), source)
    tied = {whole.first.get(name, name): name for name in stored.tensors}  # with what another stage has
    for name, target in targets.items():
        if name not in sources and is_tensor(target):
            # A tie of the model goes first: the file may have been made by another program.
            source = by_data.get(
                tied_by(target), tied.get(whole.first.get(name, name), stored.tied.get(name))
            )
            if source is not None:
                sources[name] = source
    return sources


def _misfits(
    targets: Mapping[str, Any], stored: Mapping[str, torch.Tensor], sources: Mapping[str, str]
) -> list[Misfit]:
    rows: list[Misfit] = []
    first: dict[Any, str] = {}
    for name, source in sources.items():
        one, target = stored[source], targets[name]
        if not is_tensor(target):
            rows.append(Misfit(name, _kind_of(one), type(target).__name__))
        elif (one.dtype, one.shape) != (target.dtype, target.shape):
            rows.append(Misfit(name, _kind_of(one), _kind_of(target)))
        else:
            before = first.setdefault(tied_by(target), source)
            if before != source and not _same_bits(stored[before], one):
                rows.append(Misfit(name, f"other values than {before}", f"tied to {before}"))
    return rows


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (value.contiguous().view(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(first, second)


def _kind_of(value: Any) -> str:
    if not is_tensor(value):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _laid_out(value: torch.Tensor, target: Any) -> torch.Tensor:
    """Return this rank's parts of a whole tensor, as ``target`` lies; without a message to other ranks."""
    if not is_dtensor(target):
        return value
    # Where there is a DTensor, it has been imported.
    distribute = importlib.import_module("torch.distributed.tensor").distribute_tensor
    local = value.to(target.device_mesh.device_type)
    return distribute(local, target.device_mesh, target.placements, src_data_rank=None)
