"""How data loaders are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelfn.context.config.checks import check_bools, check_ints, settle_options

__all__ = ("DataLoaderConfiguration",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaderConfiguration:
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
        use_stateful_dataloader: Whether the loader keeps torchdata's own state; not available yet. Default
            False.
        custom_classes: By name of a kind of loader, the class to build instead; ``None`` for ours. Refused
            in this version when a loader is prepared. Default None.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    custom_classes: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        check_bools(
            self,
            "split_batches",
            "even_batches",
            "use_seedable_sampler",
            "non_blocking",
            "use_stateful_dataloader",
        )
        check_bools(self, "dispatch_batches", optional=True)
        check_ints(self, "data_seed", minimum=0, optional=True)
        settle_options(self, "custom_classes", optional=True)
