"""Options of what accelfn itself does: accumulation, data, outputs, agreement, exact mode and tracking."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from os import PathLike
from typing import Any, cast

from accelfn.config.checks import (
    POSITIVE,
    Record,
    did_you_mean,
    settle,
    settle_fields,
    unchecked,
    wrong_type,
)
from accelfn.config.enums import GradientCheck, GuardMode, LoggerType
from accelfn.config.handlers import KwargsHandler
from accelfn.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class GradientAccumulationPlugin(KwargsHandler):
    """How many micro-batches make one optimizer step.

    Attributes:
        num_steps: Micro-batches per optimizer step, at least 1. Default 1.
        adjust_scheduler: Accepted, without effect: one optimizer step is one scheduler step. Default True.
        sync_with_dataloader: Whether the last batch of a loader closes its window early. Default True.
        sync_each_batch: Whether gradients are reduced after every micro-batch, which saves memory under
            sharding and costs time; the optimizer still steps once per window. Default False.
    """

    num_steps: int = field(default=1, metadata=POSITIVE)
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalReduction(Record):
    """Exact mode: an optimizer step sums the gradients of a fixed number of microbatches in a fixed order.

    So training gives the same bits at any number of ranks that divides the number of microbatches.

    Attributes:
        num_microbatches: Batches of all ranks together in one optimizer step, at least 1. The accumulation
            window of a rank follows: ``num_microbatches`` divided by the number of ranks. ``None``: as many
            as the window and the number of ranks make. Default None.
        seed: Of what torch draws at random inside of ``accumulate``, at least 0. Default 0.
    """

    num_microbatches: int | None = field(default=None, metadata=POSITIVE)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ProjectConfiguration:
    """Directories and naming of checkpoints.

    Attributes:
        project_dir: Root of what the run writes, as text once built; ``None`` for no root. Default None.
        logging_dir: Directory of the trackers; ``None`` becomes ``project_dir``. A record made with
            ``dataclasses.replace`` keeps the directory that was found so. Default None.
        automatic_checkpoint_naming: Whether checkpoints are named ``checkpoints/checkpoint_<iteration>``.
            Default False.
        total_limit: Checkpoints that are kept under automatic naming, at least 1; ``None`` keeps all. Default
            None.
        iteration: Number of the next automatically named checkpoint. Default 0.
        save_on_each_node: Whether one rank per node writes what ``save_model`` and ``save`` write, for disks
            that nodes do not share; ``save_state`` needs a disk that they share. Default False.
    """

    project_dir: str | PathLike[str] | None = None
    logging_dir: str | PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = field(default=None, metadata=POSITIVE)
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_fields(self)
        if self.logging_dir is None:
            settle(self, logging_dir=self.project_dir)


@dataclass(frozen=True, slots=True)
class DataLoaderConfiguration(Record):
    """How the batches of a loader reach the ranks.

    Attributes:
        split_batches: False: each rank takes whole batches, so the global batch is batch size times ranks.
            True: each batch of the loader is cut into one part per rank. Default False.
        dispatch_batches: True: rank 0 reads and sends each rank its part, for data that only one process can
            read. False or ``None``: each rank reads its own, which is faster for all others. Default None.
        even_batches: Whether the last round is completed with samples from the start, so that all ranks
            see equally many. Default True.
        use_seedable_sampler: Accepted, without effect: a shuffled order is always a function of seed and
            epoch. Default False.
        data_seed: Seed of a shuffled order, at least 0; ``None`` takes that of the sampler's generator, else
            rank 0's seed of torch. Default None.
        non_blocking: Whether copies to the device are asynchronous. Default False.
        use_stateful_dataloader: Whether streams that worker processes read are resumed by the state of their
            datasets: a loader is then torchdata's ``StatefulDataLoader`` (``pip install 'accelfn[data]'``).
            Without workers, and for data that is read by index, none is needed. Default False.
        custom_classes: Classes of your own whose instances ``prepare`` takes for loaders: iterables of
            batches that are no torch DataLoaders. Default none.
        sequence: What ranks along ``cp`` or ``sp`` share of a batch: the dimension of the tokens, by key of a
            batch that is a mapping, or place in one that is a list or tuple, such as
            ``{"ids": 1, "labels": 1, "positions": 1}``. What isn't named, each of them gets whole. Default
            none.
        sequence_padding: By what the sequence of each of these may be lengthened at its end, where ranks
            can't have equal pieces: ``{"ids": 0, "labels": -100, "positions": 0}``. A length that doesn't
            divide is an error without. Default none.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    _: KW_ONLY
    custom_classes: tuple[type, ...] = ()
    sequence: Mapping[str, int] | Mapping[int, int] | None = None
    sequence_padding: Mapping[str, float] | Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_fields(self)
        own = unchecked(self, "custom_classes") or ()
        classes = tuple(cast("Iterable[object]", own)) if isinstance(own, Iterable) else (None,)
        if not all(isinstance(one, type) for one in classes):
            raise wrong_type(self, "custom_classes", "a tuple of classes, such as (MyLoader,)")
        settle(self, custom_classes=classes)
        for name, kinds in (("sequence", (int,)), ("sequence_padding", (int, float))):
            items = cast("Mapping[object, object]", getattr(self, name) or {}).items()
            if not all(isinstance(key, (str, int)) and type(one) in kinds for key, one in items):
                raise wrong_type(self, name, "a mapping from keys or places to numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard(Record):
    """What is checked before ranks communicate, and when waiting ends.

    Attributes:
        mode: ``"full"`` checks every operation. ``"sampled"`` checks every operation in worlds of up to 8
            ranks, and in larger ones as many as keep the cost per operation the same: the first 50, then
            each ``P / 8``-th of those that need an exchange of their own for it. What is left out is counted,
            and found by the next check. ``"off"`` compares nothing: errors of other ranks still arrive.
            ``None`` says nothing: a context takes ``"full"`` where ``debug=True`` or the environment asks for
            it, and else keeps what it has, which is ``"sampled"`` at first. Default None.
        call_sites: Whether calls of the same form are distinguished by line, in operations to which each rank
            brings data of its own (not in broadcast or scatter): so swapped and skipped ones are found. One
            that stands in two branches of a function still meets, if it is the first of its form; name others
            with ``ctx.tagged("...")``. Default True.
        timeout: How long an operation waits for the other ranks: a ``datetime.timedelta``, or a number of
            seconds. Default 5 minutes.
        long_timeout: The same for what may take long on one rank alone: ``main_process_first``, saving, and
            the first forward pass of a model. Never less than ``timeout``. Default 30 minutes.
        watchdog: Whether a rank's process prints the stacks of all its threads on stderr when an operation of
            the world takes its whole timeout, or no other has begun for that long: so do both the ranks that
            wait and the one that they wait for. Costs a thread that sleeps. Default False.
        check_replicas_every: Steps of an optimizer between two checks that its parameters are equal on all
            ranks, bit by bit; ``None`` for none. Default None.
        check_gradients: Whether each step of an optimizer looks for gradients that are infinite or NaN
            before it changes anything, and raises an error that names their parameters, which waits for the
            device; or with ``"skip"`` is left out on all ranks, as :func:`accelfn.step_was_skipped` says.
            Then only optimizers that aren't ``fused`` wait for the device. With float16 steps are skipped
            anyway, and the loss scale follows. Default False.
        check_replicas_before_saving: Whether weights are checked so before they are saved. Default True.
    """

    mode: str | GuardMode | None = None
    call_sites: bool = True
    timeout: timedelta | float = timedelta(minutes=5)  # a timedelta once built
    long_timeout: timedelta | float = timedelta(minutes=30)
    watchdog: bool = False
    check_replicas_every: int | None = field(default=None, metadata=POSITIVE)
    check_gradients: bool | str | GradientCheck = False
    check_replicas_before_saving: bool = True

    @property
    def timeout_s(self) -> float:
        """Seconds that an operation waits for the other ranks."""
        return _seconds(self.timeout)

    @property
    def long_timeout_s(self) -> float:
        """Seconds that a long operation waits; never less than ``timeout_s``."""
        return max(_seconds(self.timeout), _seconds(self.long_timeout))


def _seconds(duration: timedelta | float) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def settle_log_with(log_with: Any) -> tuple[Any, ...]:
    """Return what ``log_with`` asks for as a tuple, each once: names as texts, the rest as it is.

    Trackers of the caller's own are checked where they are started: here nothing is known of them.

    Raises:
        ConfigurationError: There is no built-in tracker of a name.

    >>> settle_log_with(["wandb", LoggerType.TENSORBOARD, "wandb"])
    ('wandb', 'tensorboard')
    """
    if log_with is None:
        return ()
    asked: list[Any] = [log_with]
    if isinstance(log_with, Iterable) and not isinstance(log_with, (str, type)):
        asked = list(cast("Iterable[Any]", log_with))
    settled: list[Any] = []
    for one in asked:
        item = _settle_name(one) if isinstance(one, str) else one
        if not any(item is other or (isinstance(item, str) and item == other) for other in settled):
            settled.append(item)
    return tuple(settled)


def _settle_name(name: str) -> str:
    name = str(name)
    known = LoggerType.values()
    if name.lower() in known:
        return name.lower()
    raise ConfigurationError(
        f"log_with: there is no tracker {name!r}.{did_you_mean(name.lower(), known)} Known are "
        f"{', '.join(known)}; a tracker of your own is passed itself, as an instance or as its class."
    )
