"""The methods of an Accelerator that write and read checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import accelfn.checkpoint as checkpoint
import accelfn.comm as comm
from accelfn.accelerator.held import Held
from accelfn.accelerator.naming import name_things, of_loader, of_model, of_optimizer, of_scheduler
from accelfn.accelerator.scaling import Scaling
from accelfn.context import Context
from accelfn.errors import ConfigurationError

__all__ = ("Saving",)

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_PLACES = (None, "cpu", "on_device")


class Saving:
    """What an Accelerator does with checkpoints.

    What is saved goes by names: the keyword that an object was prepared or registered with, else its kind
    (``model``, ``optimizer``, ...) where it is the only one, else what tells it apart.
    """

    context: Context
    models: Held[nn.Module]
    optimizers: Held[Optimizer]
    schedulers: Held[Any]
    loaders: Held[Any]
    step: int
    _scaling: Scaling
    _registered: dict[str, Any]
    _names: dict[int, str]
    _save_hooks: dict[int, Callable[..., None]]
    _load_hooks: dict[int, Callable[..., None]]
    _iteration: int

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint that is named by itself, unless there are later ones already."""
        return self._iteration

    def checkpoint_names(self, **objects: Any) -> None:
        """Say how prepared objects are called in checkpoints, where several are of one kind.

        Also ``prepare`` takes objects by keyword, and names them so.

        Raises:
            ValueError: One of them was not prepared.
        """
        known = {id(thing) for held in self._held() for thing in held}
        for name, thing in objects.items():
            inner = getattr(thing, "optimizer", thing) if isinstance(thing, Optimizer) else thing
            if id(inner) not in known:
                raise ValueError(
                    f"checkpoint_names: {name} was not prepared. Pass what prepare gave back; what isn't to "
                    "be prepared is registered with register_for_checkpointing."
                )
            self._names[id(inner)] = name

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Let ``save_state`` and ``load_state`` take further objects, by keyword or by their class's name.

        Raises:
            ValueError: Objects without ``state_dict`` and ``load_state_dict``: all of them, and nothing is
                registered. Or two would have one name.
        """
        asked = [*((type(one).__name__, one) for one in objects), *named.items()]
        wrong = [
            f"{name} ({one!r:.60})"
            for name, one in asked
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict"))
        ]
        if wrong:
            raise ValueError(
                "register_for_checkpointing: objects need state_dict and load_state_dict, and these lack "
                f"one: {', '.join(wrong)}. Nothing was registered."
            )
        fresh = dict(self._registered)
        for name, one in asked:
            if fresh.setdefault(name, one) is not one:
                raise ValueError(
                    f"register_for_checkpointing: two objects would be saved as {name!r}. Name them, as in "
                    "register_for_checkpointing(first=..., second=...). Nothing was registered."
                )
        self._registered.update(fresh)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before ``save_state`` writes.

        What it puts into ``output_dir`` becomes part of the checkpoint. ``weights`` are the state dicts of
        the models; those that it takes out of the list aren't saved.

        Returns:
            A handle; ``remove()`` takes the hook away.
        """
        return _added(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before ``load_state`` reads.

        Models that it takes out of the list aren't loaded.

        Returns:
            A handle; ``remove()`` takes the hook away.
        """
        return _added(self._load_hooks, hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path | checkpoint.SaveHandle:
        """Save all that was prepared or registered, as one checkpoint; see :func:`accelfn.save_state`.

        Args:
            output_dir: The checkpoint. None with ``automatic_checkpoint_naming``: the next one in
                ``checkpoints`` of the project's folder, of which ``total_limit`` are kept.
            safe_serialization: Otherwise each model's weights are beside it in ``pytorch_model.bin`` (with
                the name of the model, where there are several) for other programs too.
            **save_model_func_kwargs: ``asynchronous``, ``step``, ``metric`` and ``keep`` of
                :func:`accelfn.save_state`.

        Returns:
            The checkpoint's path on every rank; a handle with ``asynchronous=True``.

        Raises:
            ConfigurationError: Neither a directory nor automatic naming, or both; or names are missing.
            Exception: As :func:`accelfn.save_state`.
        """
        options = dict(save_model_func_kwargs)
        unknown = sorted(options.keys() - {"asynchronous", "step", "metric", "keep"})
        if unknown:
            raise TypeError(f"save_state: nothing takes {', '.join(unknown)}.")
        number = None
        if self.context.project.automatic_checkpoint_naming:
            if output_dir is not None:
                raise ConfigurationError(
                    "save_state: automatic_checkpoint_naming chooses the directory, and output_dir was given "
                    f"too: {os.fspath(output_dir)!r}. Leave one of the two out."
                )
            number, output_dir = self._next()
            limit = self.context.project.total_limit
            options.setdefault("keep", None if limit is None else checkpoint.Keep(last=limit))
            options.setdefault("step", number)
        elif output_dir is None:
            raise ConfigurationError(
                "save_state: needs a directory. Pass output_dir, or ProjectConfiguration(project_dir=..., "
                "automatic_checkpoint_naming=True)."
            )
        tree = self._tree()
        with self._files(Path(output_dir).expanduser(), tree, safe_serialization) as files:
            saved = checkpoint.save_state(
                self.context, Path(output_dir).expanduser(), tree, files=files, **options
            )
        self._iteration = (self._iteration if number is None else number) + 1
        return saved

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load all that was prepared or registered; see :func:`accelfn.load_state`.

        Args:
            input_dir: A checkpoint, or a directory of checkpoints for the newest in it. None with
                ``automatic_checkpoint_naming``: the newest of the project.
            load_kwargs: Nothing here needs them; for programs that pass some.
            **load_model_func_kwargs: ``strict``; ``random_state``; ``map_location`` (``"cpu"``,
                ``"on_device"`` or None) changes nothing, since everything is read to the CPU and put where it
                belongs.

        Raises:
            ConfigurationError: Neither a directory nor automatic naming.
            TypeError: Another ``map_location``, or another keyword.
            Exception: As :func:`accelfn.load_state`.
        """
        del load_kwargs
        options = dict(load_model_func_kwargs)
        place = options.pop("map_location", None)
        unknown = sorted(options.keys() - {"strict", "random_state"})
        if unknown or not (place is None or isinstance(place, str)) or place not in _PLACES:
            raise TypeError(
                "load_state: map_location must be None, 'cpu' or 'on_device', and strict and random_state "
                f"are the other options: got {load_model_func_kwargs}."
            )
        if input_dir is None:
            if not self.context.project.automatic_checkpoint_naming:
                raise ConfigurationError(
                    "load_state: needs a directory. Pass input_dir, or ProjectConfiguration(project_dir=..., "
                    "automatic_checkpoint_naming=True) as when it was saved."
                )
            input_dir = self._folder()
        path = checkpoint.find_checkpoint(self.context, Path(input_dir).expanduser())
        tree = self._tree()
        models = list(tree["models"].values())
        for hook in tuple(self._load_hooks.values()):
            hook(models, str(path))
        kept = {id(model) for model in models}
        left_out = [f"models/{name}" for name, model in tree["models"].items() if id(model) not in kept]
        tree["models"] = {name: model for name, model in tree["models"].items() if id(model) in kept}
        loaded = checkpoint.load_state(self.context, path, tree, ignore=left_out, **options)
        self.step = loaded["loop"]["step"]
        self._scaling.restore(loaded["scaler"])
        match = _NUMBERED.fullmatch(path.name)
        self._iteration = loaded["loop"]["iteration"] if match is None else int(match[1]) + 1

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write one object once per machine; see :func:`accelfn.checkpoint.save_object`."""
        checkpoint.save_object(self.context, obj, f, safe_serialization)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Give the whole state of a model, also of one that is cut over ranks.

        See :func:`accelfn.get_state_dict`.
        """
        return checkpoint.get_state_dict(self.context, model, unwrap)

    # --- inside ----------------------------------------------------------------------------------

    def _held(self) -> tuple[Held[Any], ...]:
        return self.models, self.optimizers, self.schedulers, self.loaders

    def _tree(self) -> dict[str, Any]:
        """Give all that is saved, by name."""
        names = self._names
        models = name_things("model", self.models, names, of_model)
        optimizers = name_things("optimizer", self.optimizers, names, of_optimizer(models))
        return {
            "models": models,
            "optimizers": optimizers,
            "schedulers": name_things("scheduler", self.schedulers, names, of_scheduler(optimizers)),
            "loaders": name_things("loader", self.loaders, names, of_loader),
            "objects": dict(self._registered),
            "scaler": self._scaling.begin_loss(self.context),
            "loop": {"step": self.step, "iteration": self._iteration},
        }

    def _folder(self) -> Path:
        folder = self.context.project.project_dir
        if folder is None:
            raise ConfigurationError(
                "automatic_checkpoint_naming needs a folder: ProjectConfiguration(project_dir=...)."
            )
        return Path(folder).expanduser() / "checkpoints"

    def _next(self) -> tuple[int, Path]:
        """Choose the next number: above all that there are, so that a run that resumes can go on saving."""
        folder, number = self._folder(), self._iteration

        def look() -> int:
            names = os.listdir(folder) if folder.is_dir() else []
            taken = [int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name))]
            return max([number, *(one + 1 for one in taken)])

        found, error = comm.attempt(look)
        numbers = comm.agree_on(self.context, "save_state", found, error)
        number = max(numbers) if self.context.project.save_on_each_node else numbers[0]
        return number, folder / f"checkpoint_{number}"

    @contextmanager
    def _files(self, target: Path, tree: dict[str, Any], safe_serialization: bool) -> Any:
        """Give the directory of what hooks write and of weights in other forms; None where there is none."""
        if safe_serialization and not self._save_hooks:
            yield None
            return
        with checkpoint.shared_folder(self.context, target) as folder:
            models: dict[str, nn.Module] = tree["models"]
            weights = {name: checkpoint.get_state_dict(self.context, model) for name, model in models.items()}
            left = list(weights.values())
            for hook in tuple(self._save_hooks.values()):
                hook(list(models.values()), left, str(folder))
            kept = {id(one) for one in left}
            tree["models"] = {name: model for name, model in models.items() if id(weights[name]) in kept}
            if not safe_serialization:
                for name in tree["models"]:
                    suffix = "" if len(models) == 1 else f"_{name}"
                    checkpoint.save_object(self.context, weights[name], folder / f"pytorch_model{suffix}.bin")
            yield folder


def _added(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
