"""Saving as programs written for Accelerate do it: often on the main process alone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import nn

import accelfn.accelerator as shim
import accelfn.checkpoint as checkpoint
import accelfn.comm as comm
from accelfn.accelerator.registry import WeakRegistry
from accelfn.accelerator.saving import run_save_hooks
from accelfn.checkpoint.attachments import claim_folder
from accelfn.checkpoint.commit import read_head
from accelfn.checkpoint.random_state import random_states, restore_random_states
from accelfn.context import Context
from accelfn.storage.address import as_path, is_address
from accelfn.storage.disk import kind_of
from accelfn.storage.object_store import disk_at


class LocalSaving(shim.Accelerator):
    """The methods that save, of which the main process may call each alone if models are replicated.

    Then it writes without the other ranks, which go on. They add their random states if they call
    ``save_state`` too. Where ranks hold parts of a model or stateful loaders, and for automatic names, all
    ranks have to call.
    """

    @property
    def _is_replicated(self) -> bool:
        strategy = self.context.strategy
        is_split = strategy.engine is not None or strategy.fsdp is not None
        return not is_split and self.context.axis_size("pp", "dp_shard", "tp") == 1

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Any:
        """Save all prepared and registered objects as one checkpoint.

        Ranks: with replicated models and ``output_dir`` any; it doesn't wait. Otherwise every rank, and where
        hooks write to an address.
        """
        ctx = self.context
        uploads = output_dir is not None and is_address(output_dir) and bool(self._save_hooks)
        is_alone = (
            self._is_replicated and not ctx.loading.use_stateful_dataloader
        )  # of which each rank has one
        if not is_alone or output_dir is None or uploads or save_model_func_kwargs:
            options: dict[str, Any] = save_model_func_kwargs
            return cast("Any", super()).save_state(output_dir, safe_serialization, **options)
        with comm.failing_together(ctx, "save_state"):
            if ctx.is_main_process:
                return self._save_together(ctx.along(), output_dir, safe_serialization)
            target = Path(output_dir).expanduser()
            run_save_hooks(self._save_hooks, self._tree()["models"], target)
            return checkpoint.save_tree(_random_states_of(ctx, target), random_states(ctx)).parent

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load all prepared and registered objects.

        Loaders stay where they are, since the program skips batches itself, unless they are stateful. So do
        the random states of a rank that saved none.
        """
        partial = () if self.context.loading.use_stateful_dataloader else ("loaders",)
        options: dict[str, Any] = {"partial": partial, **load_model_func_kwargs}
        own = None
        if input_dir is not None and self.context.rank > 0 and options.get("random_state", True):
            place = Path(input_dir).expanduser()
            # super() raises its errors.
            head, _ = comm.catch(lambda: read_head(disk_at(place), str(as_path(place))))
            if head is not None and head.world_size == 1:
                own, options["random_state"] = _random_states_of(self.context, place), False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".* files that are not part of the checkpoint")  # of hooks
            super().load_state(input_dir, load_kwargs, **options)
        if own is not None and kind_of(disk_at(own), as_path(own)) == "directory":
            with comm.failing_together(self.context, "load_state"):
                restore_random_states(self.context, checkpoint.load_tree(own), is_own=True)

    def _tree(self, *, is_to_load: bool = False) -> dict[str, Any]:
        self._number()
        tree = super()._tree(is_to_load=is_to_load)
        return tree if self.context.loading.use_stateful_dataloader else {**tree, "loaders": {}}

    def _number(self) -> None:
        """Name what was prepared by its place in the order of preparation, for checkpoints."""
        for kind in ("model", "optimizer", "scheduler", "loader"):
            held: WeakRegistry[Any] = getattr(self, f"{kind}s")
            for thing in [*held]:
                taken = {held.name_of(other) for other in held}
                names = (f"{kind}_{number}" if number else kind for number in range(len(taken) + 1))
                held.add(thing, held.name_of(thing) or next(name for name in names if name not in taken))

    def _folder_for_files(self, ctx: Context, target: Path) -> AbstractContextManager[Path]:
        """Let hooks write to the checkpoint's own directory, where programs look for their files."""
        if is_address(target):
            return super()._folder_for_files(ctx, target)
        with comm.failing_together(ctx, "save_state"):
            return nullcontext(claim_folder(target))

    def _find_files(self, place: Path) -> Path:
        files = super()._find_files(place)
        return files if is_address(files) or files.is_dir() else place

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write one object once; other ranks do nothing, and needn't call it."""
        save_alone(self.context, obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> tuple[Path, ...]:
        """Write a model's weights. Ranks: with a replicated model any; otherwise every rank."""
        ctx = self.context
        if not self._is_replicated:
            return super().save_model(model, save_directory, max_shard_size, safe_serialization)
        if not _writes(ctx):
            return ()
        with comm.failing_together(ctx, "save_model"):
            return checkpoint.save_model(
                ctx.along(), model, save_directory, max_shard_size, safe_serialization
            )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the complete state of a model. Ranks: with a replicated model any; otherwise every rank."""
        if not self._is_replicated:
            return super().get_state_dict(model, unwrap)
        with comm.failing_together(self.context, "get_state_dict"):
            return checkpoint.get_state_dict(self.context.along(), model, unwrap)


def save_alone(ctx: Context, obj: Any, f: Any, safe_serialization: bool) -> None:
    """Write one object on the main process, or once per node, without the other ranks."""
    if _writes(ctx):
        with comm.failing_together(ctx, "save"):
            checkpoint.save_object(ctx.along(), obj, f, safe_serialization)


def _writes(ctx: Context) -> bool:
    return ctx.is_local_main_process if ctx.project.save_on_each_node else ctx.is_main_process


def _random_states_of(ctx: Context, target: Path) -> Path:
    """Return where a rank that doesn't write the checkpoint has its random states."""
    return target / f"random_states_{ctx.rank}"
