"""Checkpoint methods of an Accelerator."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, cast, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

import accelfn.checkpoint as checkpoint
from accelfn.accelerator.properties import Holdings, Hooks
from accelfn.accelerator.proxies import unwrap
from accelfn.accelerator.registry import WeakRegistry, name_all
from accelfn.checkpoint.attachments import local_files
from accelfn.checkpoint.background import CollectivePhases
from accelfn.comm import catch
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.storage.address import as_path
from accelfn.storage.disk import list_names
from accelfn.storage.object_store import disk_at
from accelfn.training import unwrap_model

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_MAP_LOCATIONS = (None, "cpu", "on_device")


class Saving(Holdings):
    """Checkpoint methods of an Accelerator.

    Objects are saved by name: the keyword that they were prepared or registered with, else their kind
    (``model``, ``optimizer``, ...) if there is only one, else the kind with a description.
    """

    step: int

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint, unless there are later ones already."""
        return self._next_number

    # --- what is saved ---------------------------------------------------------------------------

    def checkpoint_names(self, **objects: Any) -> None:
        """Name prepared objects in checkpoints, where several are of one kind.

        ``prepare`` also takes objects by keyword, and names them so. Names belong to the objects.

        Raises:
            ValueError: One of them was not prepared. No name was set.
        """
        found: list[tuple[WeakRegistry[Any], Any, str]] = []
        for name, thing in objects.items():
            inner = unwrap(thing)
            held = next((held for held in self._all_held() if inner in held), None)
            if held is None:
                raise ValueError(
                    f"checkpoint_names: {name} was not prepared. Pass an object that prepare returned; other "
                    "objects get their names in register_for_checkpointing(name=object)."
                )
            found.append((held, inner, name))
        for held, inner, name in found:
            held.add(inner, name)

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Save and load further objects, named by keyword or by their class. They are kept alive.

        Raises:
            ValueError: Objects without ``state_dict`` and ``load_state_dict``; or two would have one name.
                Nothing is registered then.
        """
        items = [*((type(item).__name__, item) for item in objects), *named.items()]
        wrong = [
            f"{name} ({item!r:.60})"
            for name, item in items
            if not all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict"))
        ]
        if wrong:
            raise ValueError(
                "register_for_checkpointing: objects need state_dict and load_state_dict, but these have no "
                f"such methods: {', '.join(wrong)}. Nothing was registered."
            )
        registered = dict(self._registered)
        for name, item in items:
            if registered.setdefault(name, item) is not item:
                raise ValueError(
                    f"register_for_checkpointing: two objects would be saved as {name!r}. Name them, as in "
                    "register_for_checkpointing(first=..., second=...). Nothing was registered."
                )
        self._registered = registered

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before ``save_state`` writes.

        ``models`` are the prepared ones, without DistributedDataParallel around them. ``output_dir`` is a
        directory next to the future checkpoint; everything that hooks write into it becomes part of the
        checkpoint. ``weights`` has the models' state dicts. A model isn't saved if the
        hook removes its state dict from the list on the main process.

        Returns:
            A handle, whose ``remove()`` removes the hook.
        """
        return _add_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` reads.

        ``models`` are as for hooks that save. ``input_dir`` is the directory of the files that hooks wrote
        into the checkpoint, verified. A model that the hook removes from the list isn't loaded.

        Returns:
            A handle, whose ``remove()`` removes the hook.
        """
        return _add_hook(self._load_hooks, hook)

    # --- saving and loading ----------------------------------------------------------------------

    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: Literal[False] = False,
        step: int | None = None,
        metric: float | None = None,
        keep: checkpoint.Keep | None = None,
        allow_drift: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path: ...
    @overload
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: Literal[True],
        step: int | None = None,
        metric: float | None = None,
        keep: checkpoint.Keep | None = None,
        allow_drift: bool = False,
        **save_model_func_kwargs: Any,
    ) -> checkpoint.SaveHandle: ...
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        asynchronous: bool = False,
        step: int | None = None,
        metric: float | None = None,
        keep: checkpoint.Keep | None = None,
        allow_drift: bool = False,
        **save_model_func_kwargs: Any,
    ) -> Path | checkpoint.SaveHandle:
        """Save all prepared and registered objects as one checkpoint; see :func:`accelfn.save_state`.

        Ranks: every rank.

        Args:
            output_dir: The checkpoint. None with ``automatic_checkpoint_naming``: the next one in
                ``checkpoints`` of the project's folder, of which ``total_limit`` are kept.
            safe_serialization: False also writes the models' weights as pickles, for other programs:
                ``pytorch_model.bin``, or ``pytorch_model_NAME.bin`` for several, in the directory that
                :func:`accelfn.checkpoint.find_files` returns.
            asynchronous: Write in the background.
            step: Your step count. With automatic naming it is the checkpoint's number.
            metric: Your metric, to keep the best checkpoints.
            keep: Which other checkpoints stay; overrides ``total_limit``.
            allow_drift: Save replicas of a model that differ between ranks, each rank's own.
            **save_model_func_kwargs: Not supported: an error that names them.

        Returns:
            The checkpoint's path, on every rank; a handle with ``asynchronous``.

        Raises:
            ConfigurationError: Neither a directory nor automatic naming, or both; nothing was prepared; or
                objects need names.
            TypeError: Other keywords.
            Exception: As :func:`accelfn.save_state`, or raised by a hook.
        """
        return self._save_together(
            self.context,
            output_dir,
            safe_serialization,
            asynchronous,
            step,
            metric,
            keep,
            allow_drift,
            save_model_func_kwargs,
        )

    def _save_together(
        self,
        ctx: Context,
        output_dir: str | os.PathLike[str] | None,
        safe_serialization: bool,
        asynchronous: bool = False,
        step: int | None = None,
        metric: float | None = None,
        keep: checkpoint.Keep | None = None,
        allow_drift: bool = False,
        unknown: Mapping[str, Any] = MappingProxyType({}),
    ) -> Path | checkpoint.SaveHandle:
        """Save with the ranks of a context; see :meth:`save_state`."""
        phases = CollectivePhases(ctx, "save_state")

        def prepare() -> tuple[int, dict[str, Any]]:
            _refuse_unknown("save_state", unknown)
            return self._choose_number(output_dir, step), self._tree()

        chosen, error = catch(prepare)
        numbers_by_rank = phases.gather("number", json.dumps(chosen and chosen[0]), error)
        number, tree = cast("tuple[int, dict[str, Any]]", chosen)
        if output_dir is None:
            number = json.loads(numbers_by_rank[0])  # the disk may look different from other ranks
            limit = self.context.project.total_limit
            target, step = self._folder("save_state") / f"checkpoint_{number}", number
            keep = checkpoint.Keep(last=limit) if keep is None and limit is not None else keep
        else:
            target = Path(output_dir).expanduser()
        tree["loop"]["next_number"] = number + 1
        with self._files(ctx, target, tree["models"], safe_serialization) as files:
            saved = checkpoint.save_state(
                ctx,
                target,
                tree,
                asynchronous,
                step=step,
                metric=metric,
                keep=keep,
                files=files,
                allow_drift=allow_drift,
            )
        self._next_number = number + 1
        return saved

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        random_state: bool = True,
        partial: bool | Sequence[str] = False,
        map_location: str | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load all prepared and registered objects; see :func:`accelfn.load_state`.

        Prepared loaders continue where they were, so don't skip batches yourself. Current gradients, which
        are of other weights, are cleared.

        Ranks: every rank.

        Args:
            input_dir: A checkpoint, or a directory of checkpoints for the newest in it. None with
                ``automatic_checkpoint_naming``: the newest of the project.
            load_kwargs: Options of torch.load, which isn't used: ``{"weights_only": ...}`` or nothing.
            strict: Refuse models whose state dict has other names.
            random_state: Whether to restore random states.
            partial: Parts of the checkpoint that needn't be prepared here: True for all of it, or paths such
                as ``["optimizers", "models/critic"]``.
            map_location: ``"cpu"``, ``"on_device"`` or None. In any case everything is read to the CPU and
                moved to its device.
            **load_model_func_kwargs: Not supported: an error that names them.

        Raises:
            ConfigurationError: Neither a directory nor automatic naming, or objects need names.
            TypeError: Another ``map_location``, or other keywords.
            Exception: As :func:`accelfn.load_state`, or raised by a hook. Nothing was changed, except by
                hooks.
        """
        phases = CollectivePhases(self.context, "load_state")

        def prepare() -> tuple[Path, dict[str, Any]]:
            others = set(load_kwargs or {}) - {"weights_only"}
            _refuse_unknown("load_state", {**load_model_func_kwargs, **dict.fromkeys(others)})
            if map_location not in _MAP_LOCATIONS:
                raise TypeError(
                    f"load_state: map_location must be None, 'cpu' or 'on_device', got {map_location!r}."
                )
            if input_dir is None and not self.context.project.automatic_checkpoint_naming:
                raise ConfigurationError(
                    "load_state: needs a directory. Pass input_dir, or ProjectConfiguration(project_dir=..., "
                    "automatic_checkpoint_naming=True) as when it was saved."
                )
            folder = self._folder("load_state") if input_dir is None else Path(input_dir).expanduser()
            return folder, self._tree(is_to_load=True)

        chosen, error = catch(prepare)
        phases.gather("place", "", error)
        place, tree = cast("tuple[Path, dict[str, Any]]", chosen)
        if self._load_hooks:
            place = checkpoint.find_checkpoint(self.context, place)
            files = self._find_files(place)
            models: dict[str, nn.Module] = tree["models"]
            left, error = catch(lambda: _run_load_hooks(self._load_hooks, models, files))
            phases.gather("hooks", "", error)
            tree["models"] = left = left or {}
            if partial is not True:
                partial = [*(partial or ()), *(f"models/{name}" for name in models if name not in left)]
        loaded = checkpoint.load_state(
            self.context, place, tree, strict=strict, random_state=random_state, partial=partial
        )
        for item in (*self.models, *self.optimizers):
            item.zero_grad()
        loop = loaded["loop"]
        self.step, self._next_number = loop["step"], loop["next_number"]
        if loop["scales_loss"] and self.context.precision.scales_loss:
            self._scaling.restore(loaded["scaler"])

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write one object once per machine; see :func:`accelfn.checkpoint.save_object`."""
        checkpoint.save_object(self.context, obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> tuple[Path, ...]:
        """Write a model's weights; see :func:`accelfn.save_model`."""
        return checkpoint.save_model(self.context, model, save_directory, max_shard_size, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the complete state of a model, which may be sharded or pipelined.

        See :func:`accelfn.checkpoint.get_state_dict`.
        """
        return checkpoint.get_state_dict(self.context, model, unwrap)

    # --- inside ----------------------------------------------------------------------------------

    def _all_held(
        self,
    ) -> tuple[
        WeakRegistry[nn.Module], WeakRegistry[Optimizer], WeakRegistry[LRScheduler], WeakRegistry[Any]
    ]:
        return self.models, self.optimizers, self.schedulers, self.loaders

    def _tree(self, *, is_to_load: bool = False) -> dict[str, Any]:
        """Return the tree to save, by name."""
        if not self._registered and not any([*held] for held in self._all_held()):
            raise ConfigurationError(
                f"{'load' if is_to_load else 'save'}_state: no prepared or registered object is alive. Keep "
                "the objects that prepare returned."
            )
        named: dict[str, dict[str, Any]] | None = None
        with suppress(ConfigurationError):
            named = name_all(*self._all_held())
        if named is None:
            gc.collect()  # dead objects in reference cycles may still have names
            named = name_all(*self._all_held())
        return {
            **named,
            "objects": dict(self._registered),
            "scaler": self._scaling.settled(self.context),
            "loop": {
                "step": self.step,
                "next_number": self._next_number,
                "scales_loss": self.context.precision.scales_loss,
            },
        }

    def _folder(self, operation: str) -> Path:
        folder = self.context.project.project_dir
        if folder is None:
            raise ConfigurationError(
                f"{operation}: automatic_checkpoint_naming needs a folder: "
                "ProjectConfiguration(project_dir=...)."
            )
        return Path(folder).expanduser() / "checkpoints"

    def _choose_number(self, output_dir: object, step: int | None) -> int:
        """Choose the next number, above all existing ones, so that a resumed run can save."""
        if not self.context.project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError(
                    "save_state: needs a directory. Pass output_dir, or "
                    "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
                )
            return self._next_number
        if output_dir is not None or step is not None:
            raise ConfigurationError(
                "save_state: automatic_checkpoint_naming chooses the directory and its number, but "
                f"{'step' if output_dir is None else 'output_dir'} was passed too. Leave one of the two out."
            )
        folder = self._folder("save_state")
        names = list_names(disk_at(folder), os.fspath(as_path(folder)))
        taken = [int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))]
        return max([self._next_number, *(number + 1 for number in taken)])

    @contextmanager
    def _files(
        self, ctx: Context, target: Path, models: dict[str, nn.Module], is_safe: bool
    ) -> Generator[Path | None, None, None]:
        """Yield the directory for files of hooks and pickled weights; None if there are none.

        Models that hooks exclude are removed from ``models``.
        """
        if is_safe and not self._save_hooks:
            yield None
            return
        phases = CollectivePhases(ctx, "save_state")
        with self._folder_for_files(ctx, target) as folder:
            kept, error = catch(lambda: run_save_hooks(self._save_hooks, models, folder))
            # Many hooks remove weights on the main process only, where they save them.
            names = json.loads(phases.gather("hooks", json.dumps(kept), error)[0])
            for name in models.keys() - set(names):
                del models[name]
            for name, model in models.items() if not is_safe else ():
                file = "pytorch_model.bin" if len(models) == 1 else f"pytorch_model_{name}.bin"
                weights = checkpoint.get_state_dict(ctx, model)
                checkpoint.save_object(ctx, weights, folder / file)
            yield None if folder == target else folder

    def _folder_for_files(self, ctx: Context, target: Path) -> AbstractContextManager[Path]:
        """Make the directory that hooks write to: ``target`` itself, or one that is moved into it."""
        return checkpoint.folder_for_files(ctx, target)

    def _find_files(self, place: Path) -> Path:
        """Return the directory of what hooks wrote into a checkpoint."""
        return checkpoint.find_files(self.context, place)


def _add_hook(hooks: Hooks, hook: Callable[..., None]) -> RemovableHandle:
    """Append a hook, and return the handle that removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def run_save_hooks(hooks: Hooks, models: Mapping[str, nn.Module], folder: Path) -> list[str]:
    """Call ``hook(models, weights, folder)``, and return the names of the models to save.

    Raises:
        ConfigurationError: A hook has changed weights.
    """
    if not hooks:
        return list(models)
    states = {
        name: dict(unwrap_model(model, keep_torch_compile=False).state_dict())
        for name, model in models.items()
    }
    before = {name: dict(state) for name, state in states.items()}
    left = list(states.values())
    for hook in tuple(hooks.values()):
        hook([_inside_replica(model) for model in models.values()], left, str(folder))
    kept = [name for name, state in states.items() if any(item is state for item in left)]
    are_same = all(
        states[name].keys() == before[name].keys()
        and all(states[name][key] is value for key, value in before[name].items())
        for name in kept
    )
    if not are_same or len(kept) != len(left):
        raise ConfigurationError(
            "save_state: a hook has changed the weights, but the model itself is saved. Remove the entry "
            "from weights, and write your own weights to output_dir."
        )
    return kept


def _run_load_hooks(hooks: Hooks, models: Mapping[str, nn.Module], place: Path) -> dict[str, nn.Module]:
    """Call ``hook(models, place)``, and return the models to load."""
    given = {name: _inside_replica(model) for name, model in models.items()}
    left = list(given.values())
    with local_files(place) as folder:
        for hook in tuple(hooks.values()):
            hook(left, str(folder))
    return {name: models[name] for name, model in given.items() if any(item is model for item in left)}


def _inside_replica(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel: hooks call its methods, as ``save_pretrained``."""
    return cast("Any", model).module if isinstance(model, DistributedDataParallel) else model


def _refuse_unknown(operation: str, options: Mapping[str, Any]) -> None:
    if options:
        raise TypeError(f"{operation}: unknown arguments: {', '.join(sorted(options))}.")
