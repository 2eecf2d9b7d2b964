"""In which order the stages of a pipeline work on the microbatches of a batch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from accelfn.context.config import PipelineParallelConfig
from accelfn.errors import ConfigurationError

__all__ = ("SchedulePlan", "plan_schedule")

# The second stage of the first rank is the last one: batches go through the ranks and back.
_IN_A_V = ("zbvzerobubble", "dualpipev")
# Compute gradients of inputs and of weights apart, by autograd's own graph.
_SPLIT_BACKWARD = ("interleavedzerobubble", *_IN_A_V)


class SchedulePlan(NamedTuple):
    """A schedule of torch's, and what it is for. A value; ``str`` of it says it in a line.

    Attributes:
        name: Torch's, in lower case.
        num_ranks: Ranks along "pp".
        stages_per_rank: Stages that each of them has.
        num_microbatches: Pieces that a batch is cut into, where its rows can be.

    >>> print(plan_schedule(PipelineParallelConfig(num_microbatches=6), 2))
    1f1b with 6 microbatches: 2 ranks wait for 14 % of a batch's time
    """

    name: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return self.num_ranks * self.stages_per_rank

    @property
    def is_v_shaped(self) -> bool:
        """Whether a batch goes through the ranks and back."""
        return self.name in _IN_A_V

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return self.name in _SPLIT_BACKWARD

    @property
    def bubble(self) -> float | None:
        """Share of a batch's time that a rank waits, where stages are equal; None without a formula."""
        if self.splits_backward:
            return None
        waits = self.num_ranks - 1
        return waits / (self.num_microbatches * self.stages_per_rank + waits)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank along "pp".

        >>> SchedulePlan("loopedbfs", 2, 2, 4).stages_of(1), SchedulePlan("dualpipev", 2, 2, 4).stages_of(1)
        ((1, 3), (1, 2))
        """
        if self.is_v_shaped:
            return (rank, self.num_stages - 1 - rank)
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def rank_of(self, stage: int) -> int:
        """Return the rank along "pp" that has a stage."""
        return next(rank for rank in range(self.num_ranks) if stage in self.stages_of(rank))

    def most_kept(self, rank: int, sizes: Mapping[int, int]) -> int:
        """Return the most that a rank keeps at once of microbatches that wait for their backward pass.

        Args:
            rank: Along "pp".
            sizes: What each of its stages keeps of a microbatch.

        >>> plan = SchedulePlan("1f1b", 2, 1, 8)
        >>> plan.most_kept(0, {0: 10}), plan.most_kept(1, {1: 10})
        (20, 10)
        >>> plan._replace(name="gpipe").most_kept(1, {1: 10})
        80
        """
        stages, count = self.stages_of(rank), self.num_microbatches
        if self.name == "1f1b":
            return sizes[stages[0]] * min(count, self.num_ranks - rank)
        if self.name != "interleaved1f1b":  # all of them, or, where a backward pass is split, at most all
            return count * sum(sizes[stage] for stage in stages)
        per_round = count // max(1, count // self.num_ranks)
        passes = [stages[index // per_round % len(stages)] for index in range(count * len(stages))]
        first = min(len(passes), (len(stages) - 1) * per_round + 2 * (self.num_ranks - 1 - rank))
        kept = most = sum(sizes[stage] for stage in passes[:first])
        for index, stage in enumerate(passes[first:]):
            most = max(most, kept + sizes[stage])
            kept += sizes[stage] - sizes[stages[-1 - index // per_round % len(stages)]]
        return most

    def fit(self, rows: int) -> SchedulePlan:
        """Return the schedule of a batch of ``rows`` rows.

        It is cut into as many microbatches as divide it, at most those that were asked for. Where a schedule
        needs more of them, it is one with the same stages that doesn't.

        >>> plan = SchedulePlan("1f1b", 2, 1, 4)
        >>> [(one.name, one.num_microbatches) for one in map(plan.fit, (8, 6, 1))]
        [('1f1b', 4), ('1f1b', 3), ('gpipe', 1)]

        Raises:
            ConfigurationError: There is none: a "dualpipev" needs as many microbatches as stages.
        """
        count = next(one for one in range(min(rows, self.num_microbatches), 0, -1) if rows % one == 0)
        fitted = self._replace(num_microbatches=count)
        if self.name == "1f1b" and count < self.num_stages:
            return fitted._replace(name="gpipe")
        if self.name.startswith("interleaved") and (
            count < self.num_ranks or count % (count // self.num_ranks)
        ):
            return fitted._replace(name="loopedbfs")
        if self.name == "dualpipev" and count < self.num_stages:
            raise ConfigurationError(
                f"schedule='dualpipev' needs at least {self.num_stages} microbatches, as many as there are "
                f"stages, and a batch of {rows} rows was cut into {count} (num_microbatches="
                f"{self.num_microbatches}). Use a multiple of {self.num_stages} for both, and drop the last "
                "batch if it is smaller."
            )
        return fitted

    def __str__(self) -> str:
        """Return the schedule in a line."""
        text = f"{self.name} with {self.num_microbatches} microbatches"
        if self.bubble is not None:
            text += f": {self.num_ranks} ranks wait for {self.bubble:.0%} of a batch's time".replace(
                "%", " %"
            )
        return text


def plan_schedule(config: PipelineParallelConfig, num_ranks: int) -> SchedulePlan:
    """Return the schedule that was asked for. Pure.

    Args:
        config: What was asked for.
        num_ranks: Ranks along "pp".

    Raises:
        ConfigurationError: It needs more microbatches.
    """
    per_rank = config.stages_per_rank or 1
    count = config.num_microbatches or num_ranks * per_rank
    plan = SchedulePlan(config.schedule, num_ranks, per_rank, count)
    if plan.fit(count) != plan:
        least = num_ranks if plan.name.startswith("interleaved") else plan.num_stages
        raise ConfigurationError(
            f"PipelineParallelConfig.num_microbatches must be at least {least} with schedule={plan.name!r}, "
            f"and a multiple of {num_ranks} above {2 * num_ranks} where stages are interleaved, got {count}. "
            'Use more, or schedule="gpipe".'
        )
    return plan
