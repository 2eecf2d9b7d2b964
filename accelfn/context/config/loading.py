"""How data loaders are prepared."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from accelfn.context.config.checks import check_bools, check_ints, settle_classes

__all__ = ("DataLoaderConfiguration",)


@dataclass(frozen=True, slots=True)
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
        use_stateful_dataloader: Whether streams that worker processes read are resumed by the state of their
            datasets: a loader is then torchdata's ``StatefulDataLoader`` (``pip install 'accelfn[data]'``).
            Without workers, and for data that is read by index, none is needed. Default False.
        custom_classes: Classes of your own whose instances ``prepare`` takes for loaders: iterables of
            batches that are no torch DataLoaders. Default none.
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
        settle_classes(self, "custom_classes")
