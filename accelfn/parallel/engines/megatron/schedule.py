"""Learning rate and weight decay by Megatron's own schedules."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from accelfn.config import MegatronLMPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel.engines.engine import EngineScheduler


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


def plan_length(
    dummy: MegatronLMDummyScheduler, plugin: MegatronLMPlugin, batch_size: int | None
) -> tuple[int, int, int]:
    """Return the length of the schedule that ``dummy`` asks for, in steps or samples. Pure.

    Args:
        dummy: The request.
        plugin: Its ``lr_*`` and ``train_*`` fields, in steps or samples.
        batch_size: Samples in a step of all replicas; None if it is unknown.

    Returns:
        Until the learning rate has fallen, in which it rises, and per step of the optimizer.

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
    return total, warmup, (batch_size or 1) if by_samples else 1


class MegatronLMScheduler(EngineScheduler):
    """Megatron's schedule, stepped once with each step of the optimizer."""

    def __init__(
        self, core: Any, optimizer: Optimizer, plugin: MegatronLMPlugin, length: tuple[int, int, int]
    ) -> None:
        """Set the learning rates of ``optimizer``.

        Args:
            core: megatron-core.
            optimizer: Has the groups.
            plugin: How learning rate and weight decay change.
            length: From :func:`plan_length`.

        Raises:
            ConfigurationError: The learning rate or the weight decay would move in the wrong direction.
        """
        total, warmup, self._increment = length
        first = optimizer.param_groups[0]
        rate, decay = float(first["lr"]), float(first.get("weight_decay", 0.0))
        start = decay if plugin.start_weight_decay is None else plugin.start_weight_decay
        end = decay if plugin.end_weight_decay is None else plugin.end_weight_decay
        for group in optimizer.param_groups:
            group["max_lr"], group["min_lr"] = float(group["lr"]), plugin.min_lr
            if plugin.weight_decay_incr_style == "constant":
                group["start_wd"] = group["end_wd"] = group.get("weight_decay", 0.0)
        try:
            schedule = core.optimizer_param_scheduler.OptimizerParamScheduler(
                optimizer,
                init_lr=0.0,
                max_lr=rate,
                min_lr=plugin.min_lr,
                lr_warmup_steps=warmup,
                lr_decay_steps=total,
                lr_decay_style=plugin.lr_decay_style,
                start_wd=start,
                end_wd=end,
                wd_incr_steps=total,
                wd_incr_style=plugin.weight_decay_incr_style,
            )
        except AssertionError as error:
            raise ConfigurationError(
                f"MegatronLMDummyScheduler: min_lr={plugin.min_lr} must be at most the learning rate "
                f"{rate}, and the weight decay mustn't fall from {start} to {end}."
            ) from error
        super().__init__(optimizer, schedule)

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next step."""
        self.scheduler.step(self._increment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, and the learning rates of it."""
        self.scheduler.num_steps = 0  # the state's steps are added
        super().load_state_dict(dict(state_dict))
