"""Save a model's weights in the files that other libraries read, and load such files into a model."""

from __future__ import annotations

import itertools
import os
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

import safetensors
import torch
from torch import nn

from accelfn.checkpoint.commit import check_path
from accelfn.checkpoint.header import SAFETENSORS_NAMES
from accelfn.checkpoint.objects import same_bits
from accelfn.checkpoint.plan import check_copies
from accelfn.checkpoint.torch_file import map_torch_file
from accelfn.checkpoint.weights_files import (
    existing_generations,
    locked_directory,
    publish,
    replacing,
    staging,
    write_files,
    write_pickled,
    write_safetensors,
)
from accelfn.checkpoint.weights_index import (
    WeightNaming,
    WeightsFiles,
    find_weights,
    names_of,
    nesting_hint,
    parse_size,
    plan_weights,
    prefix_hint,
    read_header,
    tied_by,
)
from accelfn.checkpoint.weights_state import (
    Agreement,
    complete_state,
    describe_state,
    describe_value,
    gathered_tensors,
    has_bytes,
    is_tensor,
    own_names,
    require_module,
    shard_like,
    together,
)
from accelfn.comm import check_replicas, gather_object
from accelfn.context import Context, takes_context
from accelfn.context.config import GuardMode
from accelfn.errors import CheckpointMismatchError, DamagedCheckpointError, Misfit
from accelfn.parallel.engines import with_plain_weights
from accelfn.parallel.pointers import WholeModel, whole_of
from accelfn.parallel.values import check_filled
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor

_SAVE, _SAVE_OBJECT, _LOAD = "save_model", "save_object", "load_model"
_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})


# --- saving --------------------------------------------------------------------------------------


@takes_context
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
    node does. All new files are complete on disk before they replace the old ones, in an order such that a
    reader finds the complete old model or the complete new one whenever the program is killed. Files of
    earlier saves are removed last. Weights that are the same data are stored once, and the file's metadata
    has the other names. Views that share only a part of their data are stored separately.

    If a model is distributed over ranks (``DTensor``, pipeline stages), one tensor at a time is gathered and
    written.

    Ranks: every rank of ``ctx``. When it returns, the files are complete for all ranks.

    Args:
        ctx: The world.
        model: Prepared or not; the names are those of the model without any wrapper.
        directory: Made if it is missing.
        max_shard_size: Largest size of the tensors in a file, in bytes or a text such as ``"5GB"``.
        safe_serialization: Write safetensors. Otherwise ``torch.save`` writes ``pytorch_model.bin`` and so
            on, with the tensors of one file in memory at a time.
        names: Whose file names to use: ``"transformers"`` (``model.safetensors``) or ``"diffusers"``
            (``diffusion_pytorch_model.safetensors``).

    Returns:
        Paths of the files, on every rank; the index is the last.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A weight is sparse, on the meta device, or of a dtype that safetensors lacks; the state
            dict contains a value that isn't a tensor; or an option is malformed.
        CheckpointError: ``directory`` is an address such as ``s3://bucket``.
        NotADirectoryError: ``directory`` is a file.
        OSError: The files can't be written. The old files are unchanged.
        RemoteRankError: Another rank failed.
        MismatchError: The ranks' models differ.
        ReplicaDriftError: Replicas of a parameter differ between ranks, and only one could be saved.
    """
    model, _ = with_plain_weights(model)
    check_path("save_model", directory)
    folder = Path(directory)
    _check_replicas(ctx, model)

    def save(agree_on: Agreement) -> tuple[Path, ...]:
        kind = names_of(names)[not safe_serialization]
        size = parse_size(max_shard_size)
        inner = unwrap_model(require_module(_SAVE, model), keep_torch_compile=False)
        own = _savable_state(inner, safe_serialization)
        tensors, stages = complete_state(ctx, _SAVE, inner, own, agree_on)
        agree_on(f"{kind} {size}", lambda: describe_state(tensors, stages))
        with ExitStack() as lock:
            generation, is_locked = _reserve_directory(ctx, folder, names, lock, agree_on)
            plan = plan_weights(tensors, size, kind, generation)
            order = [name for _, stored in plan.files for name in stored]
            values = gathered_tensors(tensors, order, agree_on, stages)
            if _writes(ctx):
                with staging(folder / "weights") as stage:
                    files = write_files(stage, plan, kind, tensors, values)
                    publish(folder, names, stage, files, is_locked=is_locked)
            else:
                deque(values, maxlen=0)  # takes part in the gathering
        files = [folder / file for file, _ in plan.files]
        return (*files, folder / kind.index) if len(files) > 1 else tuple(files)

    return together(ctx, _SAVE, save)


def _writes(ctx: Context) -> bool:
    return ctx.is_local_main_process if ctx.project.save_on_each_node else ctx.is_main_process


def _check_replicas(ctx: Context, model: nn.Module) -> None:
    guard = ctx.guard
    if ctx.num_processes == 1 or not guard.check_replicas_before_saving or guard.mode == GuardMode.OFF:
        return

    def parameters() -> dict[str, torch.Tensor]:
        # Without buffers: running statistics of batch norm may differ between ranks.
        inner = unwrap_model(require_module(_SAVE, model), keep_torch_compile=False)
        check_filled(_SAVE, inner)  # uninitialised memory would be reported as drift
        return {name: value for name, value in inner.named_parameters() if not value.is_meta}

    found = together(ctx, _SAVE, lambda _: parameters())
    whole = whole_of(unwrap_model(model, keep_torch_compile=False))
    if whole is None and not any(map(is_dtensor, found.values())):
        check_replicas(ctx, found, name="model")
        return
    first: Mapping[str, str] = {} if whole is None else whole.first  # tied weights may be on several stages
    check_copies(ctx, _SAVE, {first.get(name, name): value for name, value in found.items()}, "model")


def _savable_state(model: nn.Module, safe: bool) -> dict[str, torch.Tensor]:
    """Return this rank's state dict by the model's own names.

    Raises:
        ValueError: A value can't be saved.
    """
    check_filled(_SAVE, model)
    names = own_names(_SAVE, model)
    # With keep_vars, tied parameters are the same object.
    state = {names[name]: value for name, value in model.state_dict(keep_vars=True).items()}
    refused: dict[str, list[str]] = {}
    for name, value in state.items():
        reason = _refusal(value, safe)
        if reason is not None:
            refused.setdefault(reason, []).append(name)
    for reason, odd in refused.items():
        listed = f"{', '.join(odd[:5])}{' and others' if len(odd) > 5 else ''}"
        raise ValueError(f"{_SAVE}: can't save {listed}: {reason}.")
    return cast("dict[str, torch.Tensor]", state)


def _refusal(value: object, safe: bool) -> str | None:
    """Return why a value can't be saved as a weight; None if it can."""
    if not is_tensor(value):
        return (
            "the state dict contains a value that isn't a tensor, and files of weights hold only tensors. "
            "Let get_extra_state return a tensor, or save the value separately"
        )
    if value.layout != torch.strided:
        return f"a tensor has the layout {value.layout}. Convert it with to_dense first"
    if value.is_meta:
        return "no data (meta device). Load or initialise the model first"
    if not is_dtensor(value) and not has_bytes(value):
        kind = type(value).__name__
        return f"tensors of class {kind} consist of others. Convert them to plain tensors first"
    if safe and value.dtype not in SAFETENSORS_NAMES:
        return f"safetensors lacks {value.dtype}. Convert the tensor, or pass safe_serialization=False"
    return None


def _reserve_directory(
    ctx: Context, folder: Path, naming: WeightNaming, lock: ExitStack, agree_on: Agreement
) -> tuple[int, bool]:
    """Lock the directory on the ranks that write, and return a generation that is unused on all nodes.

    Without a lock, it is a random one, which no program uses that saves at the same time.

    Ranks: every rank of ``ctx``.

    Returns:
        The generation; and whether this rank has a lock.
    """
    existing: list[int] = []
    is_locked = True
    if _writes(ctx):
        is_locked = lock.enter_context(locked_directory(folder, naming))
        existing = sorted(existing_generations(folder, naming))
    agree_on("names")
    random = 0 if is_locked else secrets.randbelow(10**9 - 1000) + 1000
    numbers = gather_object(ctx, [-random, *existing])
    if min(numbers):
        return -min(numbers), is_locked
    return next(generation for generation in itertools.count(1) if generation not in numbers), is_locked


def save_object(
    ctx: Context,
    obj: Any,
    path: str | os.PathLike[str] | BinaryIO,
    safe_serialization: bool = False,
) -> None:
    """Write an object once, with ``torch.save``, or write a dict of tensors as safetensors.

    The main process writes; with ``ProjectConfiguration(save_on_each_node=True)`` the first process of each
    node does. The file is complete on disk before it replaces an old one, in one step.

    Ranks: every rank of ``ctx``. When it returns, the file is complete for all ranks.

    Args:
        ctx: The world.
        obj: Anything that ``torch.save`` accepts, or a dict of dense tensors by name. Only the ranks that
            write use it.
        path: The file, in an existing directory. For ``torch.save`` also a binary file object.
        safe_serialization: Write safetensors. Otherwise the file is pickled: read it with
            ``torch.load(weights_only=True)``, unless you trust it.

    Raises:
        TypeError: For safetensors, ``obj`` is not a dict of tensors, or ``path`` is not a path.
        ValueError: A tensor is sparse, on the meta device, or of a dtype that safetensors lacks.
        OSError: The file can't be written. The old file is unchanged.
        RemoteRankError: Another rank failed.
    """

    def write(_: Agreement) -> None:
        if not _writes(ctx):
            return
        tensors = _require_tensors(obj) if safe_serialization else None
        if not isinstance(path, (str, os.PathLike)):
            if tensors is not None:
                raise TypeError(f"{_SAVE_OBJECT}: safetensors need a path, got {type(path).__name__}.")
            torch.save(obj, path)
            return
        with replacing(Path(path)) as temporary:
            if tensors is None:
                write_pickled(temporary, obj)
            else:
                forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
                write_safetensors(temporary, forms, tensors.__getitem__, {"format": "pt"})

    together(ctx, _SAVE_OBJECT, write)


def _require_tensors(obj: object) -> dict[str, torch.Tensor]:
    if not isinstance(obj, Mapping):
        raise TypeError(
            f"{_SAVE_OBJECT}: safetensors hold a dict of tensors by name, got {type(obj).__name__}."
        )
    tensors = dict(cast("Mapping[Any, Any]", obj))
    for name, value in tensors.items():
        if not isinstance(name, str) or not is_tensor(value):
            raise TypeError(
                f"{_SAVE_OBJECT}: safetensors hold a dict of tensors by name, got a dict with "
                f"{type(value).__name__} under {name!r}."
            )
        reason = _refusal(value, safe=True)
        if reason is not None:
            raise ValueError(f"{_SAVE_OBJECT}: can't save {name}: {reason}.")
    return tensors


# --- loading -------------------------------------------------------------------------------------


class LoadReport(NamedTuple):
    """Names that :func:`load_model` could not match.

    Attributes:
        missing: The model's tensors that the files lack; they were left unchanged.
        unexpected: Tensors in the files that the model lacks.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_model(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> LoadReport:
    """Load weights that :func:`save_model`, transformers, diffusers, safetensors or torch saved into a model.

    Names, shapes, dtypes and the files themselves are checked before anything is changed. Weights are copied
    into the model's tensors, so an optimizer keeps working with them. Of tied weights, the files need only
    one name. Pickled files are read as data, so they can't run code, and their checksums are verified.
    Safetensors files have none: damage to a tensor isn't detected.

    Ranks: local; every rank reads for itself. With ZeRO, every rank of the world. If a model is
    distributed over ranks (``DTensor``, pipeline stages), each rank loads its own parts, and checks that the
    files have the names of all.

    Args:
        model: Prepared or not; changed in place.
        path: A directory, a single file, or an index; see :func:`accelfn.checkpoint.find_weights`.
        strict: Raise if a name is missing on either side. Otherwise one name must match.

    Returns:
        The names that did not match; both tuples are empty if ``strict``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: The model is on the meta device and has no memory to load into.
        NoCheckpointError: There are no weights at ``path``.
        DamagedCheckpointError: A file is malformed.
        CheckpointError: A pickled file requires running code, or has the format of torch before 1.6.
        CheckpointMismatchError: Names, shapes or dtypes differ, or the files have different values for
            weights that are tied in the model. Nothing was changed.
    """
    plain, write_back = with_plain_weights(model)
    inner = unwrap_model(require_module(_LOAD, plain), keep_torch_compile=False)
    names = own_names(_LOAD, inner)
    state: dict[str, Any] = inner.state_dict(keep_vars=True)
    targets = {own: state[name] for name, own in names.items()}
    on_meta = [name for name, value in targets.items() if is_tensor(value) and value.is_meta]
    if on_meta:
        raise ValueError(
            f"{_LOAD}: {', '.join(on_meta[:5])}{' and others' if len(on_meta) > 5 else ''} have no memory "
            "(meta device). Allocate it first (to_empty)."
        )
    stored = _open(find_weights(path))
    whole = whole_of(inner) or WholeModel(dict.fromkeys(targets), {})
    sources = _match(targets, stored, whole)
    in_files = {whole.first.get(name, name) for name in (*stored.tensors, *stored.tied)}
    on_other_stages = [name for name in whole.tensors if name not in targets]
    missing = tuple(name for name in targets if name not in sources) + tuple(
        name for name in on_other_stages if whole.first.get(name, name) not in in_files
    )
    used = {*sources.values(), *targets, *on_other_stages}
    unexpected = tuple(name for name in stored.tensors if name not in used)
    rows = _misfits(targets, stored.tensors, sources)
    if strict or (targets and stored.tensors and not sources):  # or the files are another model's
        for name in missing:
            wanted = describe_value(targets[name]) if name in targets else "a tensor of another stage"
            rows.append(Misfit(name, "nothing", wanted))
        rows += [Misfit(name, describe_value(stored.tensors[name]), "nothing") for name in unexpected]
    if rows:
        hint = prefix_hint({*targets}, {*stored.tensors})
        # Only load_model writes what it has loaded back into an engine.
        if plain is model and _can_be_cast(targets, stored.tensors, sources):
            hint += (
                f" {_LOAD} doesn't cast: load_checkpoint_in_model(model, path, strict={strict}) casts "
                "floating-point weights to the model's dtypes."
            )
        raise CheckpointMismatchError(
            f"{_LOAD}: {path} doesn't fit the model. Nothing was changed.{hint}", rows
        )
    with torch.no_grad():
        loaded = {
            name: stored.tensors[sources[own]]
            if not is_dtensor(targets[own])
            else shard_like(targets[own], stored.tensors[sources[own]], targets[own].dtype)
            for name, own in names.items()
            if own in sources
        }
        inner.load_state_dict(loaded, strict=False)
    write_back(plain)
    return LoadReport(missing, unexpected)


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of weights, or of all files in an index; their bytes are read on use.

    Raises:
        NoCheckpointError: There are no weights at ``path``.
        DamagedCheckpointError: A file is malformed.
        CheckpointError: A pickled file requires running code, or has the format of torch before 1.6.
    """
    return _open(find_weights(path)).tensors


class _Stored(NamedTuple):
    """The tensors in the files.

    Attributes:
        tensors: By name.
        tied: The stored name for each name whose data is stored under another.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]


def _open(files: WeightsFiles) -> _Stored:
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for path in files.paths:
        found, aliases = _open_safetensors(path) if files.is_safe else (_open_pickled(path), {})
        if files.weight_map is not None:
            promised = {name for name, file in files.weight_map.items() if file == path.name}
            lost = sorted(promised - found.keys())
            if lost:
                raise DamagedCheckpointError(
                    f"{path} lacks {', '.join(lost[:5])}, which the index says is in it: the files are from "
                    "different saves.",
                    path.name,
                )
            found = {name: tensor for name, tensor in found.items() if name in promised}
        tensors.update(found)
        tied.update(aliases)
    return _Stored(tensors, {name: stored for name, stored in tied.items() if stored in tensors})


def _open_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    header, metadata = read_header(path)
    unknown = sorted({entry.dtype for entry in header.values()} - _DTYPES.keys())
    if unknown:
        raise DamagedCheckpointError(f"{path} has dtypes that torch lacks: {', '.join(unknown)}.", path.name)
    try:
        opened: Any = safetensors.safe_open(path, "pt")
        with opened as file:
            # The tensors are views of the mapped file: nothing is read yet.
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in header}
    except safetensors.SafetensorError as error:
        raise DamagedCheckpointError(f"{path} is not valid safetensors: {error}.", path.name) from error
    return tensors, {name: stored for name, stored in metadata.items() if stored in header}


def _open_pickled(path: Path) -> dict[str, torch.Tensor]:
    content: object = map_torch_file(path)
    tensors = dict(cast("Mapping[Any, Any]", content)) if isinstance(content, Mapping) else {}
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and is_tensor(value) and value.layout == torch.strided
        for name, value in tensors.items()
    ):
        raise DamagedCheckpointError(
            f"{path} must hold a dict of dense tensors by name, and nothing else.{nesting_hint(tensors)}",
            path.name,
        )
    return tensors


# --- which stored tensor goes into which of the model's ------------------------------------------


def _match(targets: Mapping[str, Any], stored: _Stored, whole: WholeModel) -> dict[str, str]:
    """Return the stored tensor for each of the model's: that of its name, or of a name that is tied to it."""
    sources = {name: name for name in targets if name in stored.tensors}
    by_data: dict[Any, str] = {}
    for name in sources:
        if is_tensor(targets[name]):
            by_data.setdefault(tied_by(targets[name]), name)
    by_first = {whole.first.get(name, name): name for name in stored.tensors}  # also ties across stages
    for name, target in targets.items():
        if name not in sources and is_tensor(target):
            # Ties of the model come before those of the file, which another program may have written.
            first = whole.first.get(name, name)
            source = by_data.get(tied_by(target), by_first.get(first, stored.tied.get(name)))
            if source is not None:
                sources[name] = source
    return sources


def _can_be_cast(
    targets: Mapping[str, Any], stored: Mapping[str, torch.Tensor], sources: Mapping[str, str]
) -> bool:
    """Return whether a stored tensor and the model's have different floating-point dtypes."""
    pairs = [(stored[source], targets[name]) for name, source in sources.items() if is_tensor(targets[name])]
    return any(a.dtype != b.dtype and a.is_floating_point() and b.is_floating_point() for a, b in pairs)


def _misfits(
    targets: Mapping[str, Any], stored: Mapping[str, torch.Tensor], sources: Mapping[str, str]
) -> list[Misfit]:
    rows: list[Misfit] = []
    first: dict[Any, str] = {}
    for name, source in sources.items():
        tensor, target = stored[source], targets[name]
        if describe_value(tensor) != describe_value(target):
            rows.append(Misfit(name, describe_value(tensor), describe_value(target)))
        else:
            tied_source = first.setdefault(tied_by(target), source)
            if tied_source != source and not same_bits(stored[tied_source], tensor):
                rows.append(Misfit(name, f"other values than {tied_source}", f"tied to {tied_source}"))
    return rows
