"""Methods of an Accelerator besides the training step: memory, profiles, LOMO, trackers."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import nn

import accelfn.tracking as tracking
import accelfn.training as training
from accelfn.accelerator.properties import Holdings
from accelfn.config import ProfileKwargs
from accelfn.data import MicroBatch, shard_sequence
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import syncing
from accelfn.parallel.optimizers import steps_in_backward


class Extras(Holdings):
    """Methods of an Accelerator besides the training step."""

    step: int
    last_micro: MicroBatch | None
    _warned: frozenset[str] = frozenset()
    _run: tracking.Trackers | None = None

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[torch.Tensor] | None = None,
    ) -> Generator[None, None, None]:
        """Shard the sequences of ``buffers`` inside, where ranks along ``cp`` share them. Writes into them.

        Does nothing, with one warning, where no ranks share sequences. A prepared model always takes shards
        of sequences, inside and outside; the loaders can return these directly, with
        ``DataLoaderConfiguration(sequence={...})``, which is simpler.

        Args:
            buffers: Tensors with complete sequences, equal on every rank along ``cp``, such as the batch's
                ids, labels and positions.
            buffer_seq_dims: The sequence dimension of each of them.
            no_restore_buffers: Those that stay sharded afterwards; the others get their values back.

        Raises:
            ConfigurationError: The loaders shard sequences already.
            ValueError: Numbers of ``buffers`` and ``buffer_seq_dims`` differ, a length can't be split
                equally, or ``no_restore_buffers`` has another tensor.
        """
        tensors, dims = tuple(buffers or ()), tuple(buffer_seq_dims or ())
        left = {id(one) for one in no_restore_buffers or ()}
        if len(tensors) != len(dims):
            raise ValueError(
                f"maybe_context_parallel: got {len(tensors)} buffers and {len(dims)} dimensions. Pass one "
                "for each."
            )
        if not left <= {id(one) for one in tensors}:
            raise ValueError(
                "maybe_context_parallel: no_restore_buffers has a tensor that isn't in buffers. Pass it in "
                "both."
            )
        if self.context.axis_size("cp") == 1:
            self._warn_once(
                "sequences",
                "maybe_context_parallel does nothing, since no ranks share sequences by context parallelism "
                "(this warning is shown once). They do with ParallelismConfig(cp_size=...).",
            )
            yield
            return
        if self.context.loading.sequence:
            raise ConfigurationError(
                "maybe_context_parallel: with DataLoaderConfiguration.sequence the loaders shard sequences "
                "already. Leave one of the two out."
            )
        sequences = {str(index): tensor.detach() for index, tensor in enumerate(tensors)}
        shards = shard_sequence(self.context, sequences, dict(zip(sequences, dims, strict=True)))
        kept = [None if id(tensor) in left else tensor.detach().clone() for tensor in tensors]
        for tensor, shard in zip(tensors, shards.values(), strict=True):
            _overwrite(tensor, shard)
        try:
            yield
        finally:
            for tensor, before in zip(tensors, kept, strict=True):
                if before is not None:
                    _overwrite(tensor, before)

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a prepared optimizer steps inside of backward."""
        return any(steps_in_backward(optimizer) for optimizer in self.optimizers)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Step a LOMO optimizer during backward; see :func:`accelfn.training.lomo_backward`.

        Raises:
            ValueError: Not exactly one LOMO optimizer was prepared.
        """
        found = [optimizer for optimizer in self.optimizers if steps_in_backward(optimizer)]
        if len(found) != 1:
            raise ValueError(
                f"lomo_backward: needs one prepared Lomo or AdaLomo optimizer, got {len(found)}. Prepare it, "
                "and keep what prepare returns; for several use accelfn.training.lomo_backward, which takes "
                "the optimizer."
            )
        training.lomo_backward(self.context, loss, learning_rate, found[0], self.window)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Average gradients in a backward pass whose forward pass was under ``no_sync``.

        See :func:`accelfn.training.trigger_sync_in_backward`.
        """
        return syncing(True, model)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Check whether a model has a device map; see :func:`accelfn.training.verify_device_map`."""
        return training.verify_device_map(model)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Run a block under torch's profiler; see :func:`accelfn.profile`."""
        return tracking.profile(self.context, profile_handler)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects, and free memory; see :func:`accelfn.training.release_memory`."""
        training.close_engines(self.models)
        for held in (self.models, self.optimizers, self.schedulers, self.loaders):
            held.clear()
        self.loops.clear()
        self.ended.clear()
        self.step, self.last_micro = 0, None
        self.sync_gradients = True
        self._scaling.reset()
        return training.release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """Call ``free_memory``."""
        return self.free_memory(*objects)

    # --- trackers --------------------------------------------------------------------------------

    @property
    def trackers(self) -> list[tracking.GeneralTracker]:
        """Active trackers of this rank: none before ``init_trackers``, and none on most other ranks."""
        return [] if self._run is None else list(self._run.active)

    def init_trackers(
        self,
        project_name: str,
        config: object = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers; see :func:`accelfn.init_trackers`. Ends running ones first.

        Args:
            project_name: Project of the run.
            config: Configuration of the run.
            init_kwargs: Further arguments of the constructors, by the name of the tracker.
        """
        self._end_run()
        self._run = tracking.init_trackers(
            self.context, project_name, log_with=self.context.log_with, config=config, init_kwargs=init_kwargs
        )

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values of a step; see :func:`accelfn.log`."""
        if self._run is None:
            self._warn_not_started("log")
        else:
            tracking.log(self._run, values, step, log_kwargs=log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name, or its underlying object; see :func:`accelfn.tracking.get_tracker`.

        Without trackers it is a stand-in, whose calls do nothing.
        """
        if self._run is None or not self.context.log_with:
            self._warn_not_started("get_tracker")
            return tracking.BlankTracker(name)
        return tracking.get_tracker(self._run, name, unwrap)

    def _check_trackers(self) -> None:
        """Refuse trackers that can't be started, before training."""
        tracking.plan_trackers(self.context.log_with, self.context.project.logging_dir)

    def _warn_not_started(self, method: str) -> None:
        # Programs may start trackers on the main process only, and log on all.
        if self.context.log_with and self.context.is_main_process:
            self._warn_once(
                "trackers",
                f"Accelerator.{method}: log_with names trackers, but none was started, so this does nothing "
                "(this warning is shown once). Call init_trackers first.",
            )

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned |= {topic}
            warnings.warn(text, stacklevel=4)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            tracking.finish(run)


@torch.no_grad()
def _overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite a tensor with values of any shape. An expanded one gets memory of its own."""
    cast("Any", tensor).set_(values.clone(memory_format=torch.contiguous_format))
