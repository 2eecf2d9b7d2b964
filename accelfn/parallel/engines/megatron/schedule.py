"""Learning rate and weight decay by Megatron's own schedules."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelfn.context.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel.engines.megatron.build import import_core


class MegatronLMDummyScheduler:
    """Asks ``prepare`` for Megatron's own schedule of learning rate and weight decay.

    Attributes:
        optimizer: The optimizer, which is prepared in the same call.
        total_num_steps: Optimizer steps until the learning rate has fallen; None for the plugin's.
        warmup_num_steps: Optimizer steps in which it rises; 0 for the plugin's.
        kwargs: Ignored, for programs that pass them to another engine.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        """Keep the options."""
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMScheduler(LRScheduler):
    """Megatron's schedule, stepped once with each step of the optimizer."""

    def __init__(self, optimizer: Optimizer, schedule: Any, increment: int) -> None:
        """Set the learning rates of ``optimizer`` by ``schedule``.

        Args:
            optimizer: Has the groups.
            schedule: An ``OptimizerParamScheduler`` of megatron-core over it.
            increment: Its steps per step of the optimizer: 1, or the samples of a step.
        """
        # Not LRScheduler.__init__, which would set the learning rates by itself.
        self.optimizer = optimizer
        self.schedule = schedule
        self._increment = increment

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next step."""
        del epoch
        self.schedule.step(self._increment)

    def get_last_lr(self) -> list[float | Any]:
        """Return the learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return dict(self.schedule.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, and the learning rates of it."""
        self.schedule.num_steps = 0  # the state's steps are added
        self.schedule.load_state_dict(dict(state_dict))


class ScheduleLength(NamedTuple):
    """How long a schedule is.

    Attributes:
        total: Steps or samples until the learning rate has fallen.
        warmup: Steps or samples in which it rises.
        increment: Steps or samples per step of the optimizer.
    """

    total: int
    warmup: int
    increment: int


def plan_length(
    dummy: MegatronLMDummyScheduler, plugin: MegatronLMPlugin, batch_size: int | None
) -> ScheduleLength:
    """Return the length of the schedule that ``dummy`` asks for. Pure.

    Args:
        dummy: The request.
        plugin: Its ``lr_*`` and ``train_*`` fields, in steps or samples.
        batch_size: Samples in a step of all replicas; None if it is unknown.

    Raises:
        ConfigurationError: The number of steps isn't known, or isn't above the number of them in which the
            learning rate rises; or it is given in samples, and the size of a step isn't known.
    """
    samples = plugin.lr_decay_samples or plugin.train_samples
    by_samples = dummy.total_num_steps is None and samples is not None
    total = samples if by_samples else dummy.total_num_steps or plugin.lr_decay_iters or plugin.train_iters
    if total is None:
        raise ConfigurationError(
            "MegatronLMDummyScheduler: over how many steps does the learning rate fall? Pass "
            "total_num_steps, or lr_decay_iters or train_iters of the MegatronLMPlugin."
        )
    given = plugin.lr_warmup_samples if by_samples else dummy.warmup_num_steps or plugin.lr_warmup_iters
    warmup = int((plugin.lr_warmup_fraction or 0) * total) if given is None else given
    if warmup >= total:
        raise ConfigurationError(
            f"MegatronLMDummyScheduler: the learning rate rises for {warmup} "
            f"{'samples' if by_samples else 'steps'} and has fallen after {total}, which must be more."
        )
    if by_samples and batch_size is None:
        raise ConfigurationError(
            "MegatronLMDummyScheduler: lr_decay_samples and train_samples need the number of samples in a "
            "step. Prepare the loader in the same call, or give steps (lr_decay_iters)."
        )
    return ScheduleLength(total, warmup, (batch_size or 1) if by_samples else 1)


def build_schedule(
    optimizer: Optimizer, plugin: MegatronLMPlugin, length: ScheduleLength
) -> MegatronLMScheduler:
    """Build Megatron's schedule over the groups of ``optimizer``.

    Raises:
        ConfigurationError: The learning rate or the weight decay would move in the wrong direction.
    """
    first = optimizer.param_groups[0]
    decay = float(first.get("weight_decay", 0.0))
    start = decay if plugin.start_weight_decay is None else plugin.start_weight_decay
    end = decay if plugin.end_weight_decay is None else plugin.end_weight_decay
    changes_decay = plugin.weight_decay_incr_style != "constant"
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = float(group["lr"]), plugin.min_lr
        if not changes_decay:
            group["start_wd"] = group["end_wd"] = group.get("weight_decay", 0.0)
    core: Any = import_core()
    try:
        schedule = core.param_scheduler.OptimizerParamScheduler(
            cast("Any", optimizer),
            init_lr=0.0,
            max_lr=float(first["lr"]),
            min_lr=plugin.min_lr,
            lr_warmup_steps=length.warmup,
            lr_decay_steps=length.total,
            lr_decay_style=plugin.lr_decay_style,
            start_wd=start,
            end_wd=end,
            wd_incr_steps=length.total,
            wd_incr_style=plugin.weight_decay_incr_style,
        )
    except AssertionError as error:
        raise ConfigurationError(
            f"MegatronLMDummyScheduler: min_lr={plugin.min_lr} must be at most the learning rate "
            f"{float(first['lr'])}, and the weight decay mustn't fall from {start} to {end}."
        ) from error
    return MegatronLMScheduler(optimizer, schedule, length.increment)
